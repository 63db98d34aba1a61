"""The reference that the compiler is held to, against NumPy."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from souffle.errors import InputError
from souffle.program import evaluate as evaluate_module
from souffle.program.evaluate import evaluate
from souffle.program.llvm_pipeline import compile_llvm
from tests.testlib import Builder


def test_every_kind_of_te_against_numpy() -> None:
    b, rng = Builder(), np.random.default_rng(0)
    x = rng.integers(-4, 5, (4, 6)).astype(np.float32)
    w = rng.integers(-4, 5, (6, 3)).astype(np.float32)
    rows = np.array([3, 0, 3], np.int32)
    source = b.input(4, 6)
    results = {
        b.relu(source): np.maximum(x, 0),
        b.transpose(source, 1, 0): x.T,
        b.reshape(source, 3, 8): x.reshape(3, 8),
        b.slice(source, 1, 1, 6, 2): x[:, 1:6:2],
        b.pad(source, 0, 1, 2): np.pad(x, ((1, 2), (0, 0))),
        b.concat(source, source, 1): np.concatenate([x, x], 1),
        b.gather(source, b.constant(rows)): x[rows],
        b.broadcast(source, 2): np.broadcast_to(x, (2, 4, 6)),
        b.reduce(source, 0): x.sum(0),
        b.reduce(source, 1, "max"): x.max(1),
        b.matmul(source, b.constant(w)): x @ w,
        b.extern_sort(source): np.sort(x, 1),
    }
    found = evaluate(b.program(*results), {"in0": x})
    for value, expected in zip(found.values(), results.values(), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_function_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def counted(functions, target):
        compiled.append(len(functions))
        return compile_llvm(functions, target)

    monkeypatch.setattr(evaluate_module, "compile_llvm", counted)
    monkeypatch.setattr(evaluate_module, "_CODE", OrderedDict())

    def check(factor: float, rows: int = 5) -> int:
        """How many functions it took."""
        compiled.clear()
        b = Builder()
        x = np.arange(rows * 7, dtype=np.float32).reshape(rows, 7) - 9
        program = b.program(b.relu(b.scaled(b.input(rows, 7), factor)))
        np.testing.assert_array_equal(evaluate(program, {"in0": x})["out0"], np.maximum(x * np.float32(factor), 0))
        return sum(compiled)

    assert [check(-9.0), check(-9.0)] == [2, 0]
    assert [check(-8.0), check(-9.0, rows=4)] == [1, 2], "another number, and other shapes"
    assert [check(-8.0), check(-9.0)] == [0, 0]
    monkeypatch.setattr(evaluate_module, "_MOST_FUNCTIONS", 1)
    assert [check(-7.0), check(-7.0), check(-7.0)][1:] == [1, 1], "only the last one is kept"


def test_many_threads_evaluate_what_is_forgotten_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "_CODE", OrderedDict())
    monkeypatch.setattr(evaluate_module, "_MOST_FUNCTIONS", 2)
    programs = []
    for columns in (2, 3, 4):
        b = Builder()
        programs.append(b.program(b.relu(b.scaled(b.input(3, columns), -3.0))))

    def check(number: int) -> None:
        x = np.full((3, 2 + number % 3), number - 12, np.float32)
        np.testing.assert_array_equal(evaluate(programs[number % 3], {"in0": x})["out0"], np.maximum(-3 * x, 0))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, range(24)))
    assert len(evaluate_module._CODE) <= 2


def test_inputs_by_name_or_in_order() -> None:
    b = Builder()
    program = b.program(b.plus(b.input(3), b.input(3)))
    one, two = np.ones(3, np.float32), np.full(3, 2, np.float32)
    for inputs in ({"in0": one, "in1": two}, (one, two)):
        np.testing.assert_array_equal(evaluate(program, inputs)["out0"], one + two)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"in0": np.ones(3, np.float32)}, "input 'in1' is missing; it is float32 of shape"),
        ({"in0": np.ones(3, np.float32), "y": 1}, "no input 'y'; it takes 'in0', 'in1'"),
        ((np.ones(3, np.float32),), "1 inputs were given, the network takes 2: in0, in1"),
        ((np.ones(3, np.float32), np.ones(4, np.float32)), r"'in1' is float32 of shape \[4\], expected .* \[3\]"),
        ((np.ones(3, np.float32), np.ones(3)), r"'in1' is float64 .*expected float32"),
    ],
)
def test_wrong_inputs_are_named(inputs, says: str) -> None:
    b = Builder()
    program = b.program(b.plus(b.input(3), b.input(3)))
    with pytest.raises(InputError, match=says):
        evaluate(program, inputs)
