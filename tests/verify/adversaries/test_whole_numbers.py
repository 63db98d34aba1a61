"""Whole numbers that leave their types, divisions by zero, and what the text calculates in spite of a short cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from tvm import te, tirx

from souffle.codegen.cuda import text_of_functions
from souffle.emulator import CpuModule, compile_text
from souffle.errors import DeviceError
from souffle.schedule.lower import cuda_target
from souffle.schedule.lower.printed_conditions import with_plain_conditions
from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate, certify_plan
from souffle.verify.expressions import Undecided
from souffle.verify.values import Agreement, values_agree
from tests.verify.hand_made import THREADS, Memory, Run, kernel, plan_of, sequence, stage, tensor

pytestmark = pytest.mark.sampled(2)

TILES, SIZE = 2, 128
LARGE = 50_000_000


def place(m: Memory) -> tirx.PrimExpr:
    return m.tile * THREADS + m.tid


def digit(m: Memory) -> tirx.PrimExpr:
    return tirx.truncmod(place(m), 8)


def load(m: Memory, index: tirx.PrimExpr) -> tirx.PrimExpr:
    return m.tensors[0][index]


def data(m: Memory) -> tirx.PrimExpr:
    """A whole number that data decides."""
    return tirx.Cast("int32", load(m, place(m)))


def stored(m: Memory, value: tirx.PrimExpr) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[1], value, [place(m)])


def clamped(index: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.max(tirx.min(index, SIZE - 1), 0)


def zero() -> tirx.PrimExpr:
    return tirx.const(0.0)


def chosen(condition: tirx.PrimExpr, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """``if_then_else``, which becomes statements of its own."""
    return tirx.if_then_else(condition, value, zero())


def truth(condition: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.Select(condition, tirx.const(1.0), zero())


def grown(m: Memory, dtype: str = "int32") -> tirx.PrimExpr:
    """The own place, by way of numbers that 32 bits do not hold from place 43 on."""
    wide = tirx.Cast(dtype, place(m)) * tirx.const(LARGE, dtype)
    return tirx.truncdiv(wide, tirx.const(LARGE, dtype))


def wrapped(m: Memory) -> tirx.PrimExpr:
    """The own place again: unsigned numbers wrap around."""
    odd = tirx.Cast("uint32", place(m)) * tirx.const(2**31 + 1, "uint32")
    return tirx.Cast("int32", tirx.Mod(odd, tirx.const(SIZE, "uint32")))


def under(m: Memory, condition: tirx.PrimExpr, value: tirx.PrimExpr) -> tirx.Stmt:
    return tirx.IfThenElse(condition, stored(m, value), stored(m, zero()))


def named(m: Memory) -> tirx.Stmt:
    """A quotient of data that stands in an index under its name."""
    quotient = tirx.Var("quotient", "int32")
    return sequence(tirx.Bind(quotient, tirx.truncdiv(127, data(m))), stored(m, load(m, clamped(quotient))))


def past(m: Memory) -> tirx.PrimExpr:
    return place(m) < 100


def beyond(m: Memory) -> tirx.PrimExpr:
    return load(m, place(m) + 28)


def bits(m: Memory) -> tirx.PrimExpr:
    return tirx.reinterpret("int32", beyond(m)) > 0


def let(m: Memory) -> tirx.PrimExpr:
    x = tirx.Var("x", "float32")
    return tirx.Let(x, beyond(m), x > 0)


def asked(m: Memory) -> tirx.PrimExpr:
    """An element beyond the tensor, were it not for the condition before."""
    return chosen(m.tid >= 0, beyond(m)) > 0


@dataclass(frozen=True)
class Case:
    """A stage that reads tensor 0 and writes tensor 1.

    Attributes
    ----------
    body : callable
    verdict : str
    rule : str
        Of the counterexample, or a part of the reason.
    expected : callable or None
        What is to be written, of ``place, x``; ``None`` where the device is to find `finding`.
    finding : str
    """

    body: Callable[[Memory], tirx.Stmt]
    verdict: str
    rule: str = ""
    expected: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    finding: str = ""
    plain: bool = False

    def function(self, name: str) -> tirx.PrimFunc:
        func = stage(name, (SIZE, SIZE), self.body)
        return with_plain_conditions(func) if self.plain else func

    def certificate(self) -> Certificate:
        runs = [Run("stage", TILES, (0, 1))]
        buffers = [tensor("x", SIZE, "input"), tensor("y", SIZE, "output")]
        functions = {"stage": self.function("stage")}
        return certify_plan(plan_of(buffers, runs, 1024), {"kernel": kernel(runs, 2)}, functions)


def same(at: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x


def quotients(at: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.where(at % 8 > 0, x[127 // np.maximum(at % 8, 1)], 0)


def positive(at: np.ndarray, x: np.ndarray) -> np.ndarray:
    return (at < 100).astype(np.float32)


OVERFLOW, ZERO = partial(Case, rule="arithmetic", finding="out_of_bounds"), partial(Case, rule="arithmetic")
AHEAD = partial(Case, verdict=REFUTED, rule="out of bounds", finding="out_of_bounds")
CASES = {
    "int32": OVERFLOW(lambda m: stored(m, load(m, grown(m))), REFUTED),
    "int64": Case(lambda m: stored(m, load(m, grown(m, "int64"))), PROVEN, expected=same),
    "unsigned": Case(lambda m: stored(m, load(m, wrapped(m))), PROVEN, expected=same),
    "int32 in a branch": Case(
        lambda m: under(m, place(m) < 42, load(m, grown(m))), PROVEN, expected=lambda at, x: np.where(at < 42, x, 0)
    ),
    "int32 in a branch that is too wide": OVERFLOW(lambda m: under(m, place(m) < 44, load(m, grown(m))), REFUTED),
    "int32 in a choice": Case(
        lambda m: stored(m, chosen(place(m) < 42, load(m, grown(m)))),
        PROVEN,
        expected=lambda at, x: np.where(at < 42, x, 0),
    ),
    "int32 after a short cut": Case(
        lambda m: stored(m, truth(tirx.And(place(m) < 42, load(m, grown(m)) > 0))),
        PROVEN,
        expected=lambda at, x: (at < 42).astype(np.float32),
    ),
    "int32 as a value": Case(
        lambda m: stored(m, tirx.Cast("float32", place(m) * LARGE)), REFUTED, "arithmetic", finding="values"
    ),
    "int32 where data says so": Case(
        lambda m: under(m, load(m, place(m)) < 42, load(m, grown(m))), UNKNOWN, "overflows int32"
    ),
    "division": ZERO(
        lambda m: stored(m, load(m, tirx.truncdiv(127, digit(m)))), REFUTED, finding="integer division by zero"
    ),
    "remainder": ZERO(
        lambda m: stored(m, load(m, tirx.truncmod(127, digit(m)))), REFUTED, finding="integer division by zero"
    ),
    "division in a branch": Case(
        lambda m: under(m, digit(m) > 0, load(m, tirx.truncdiv(127, digit(m)))), PROVEN, expected=quotients
    ),
    "division in a choice": Case(
        lambda m: stored(m, chosen(digit(m) != 0, load(m, tirx.truncdiv(127, digit(m))))), PROVEN, expected=quotients
    ),
    "division after a short cut": Case(
        lambda m: stored(m, truth(tirx.And(digit(m) > 0, load(m, tirx.truncdiv(127, digit(m))) > 0))),
        PROVEN,
        expected=lambda at, x: (at % 8 > 0).astype(np.float32),
    ),
    "division ahead of a short cut": ZERO(
        lambda m: stored(
            m, truth(tirx.And(digit(m) > 0, chosen(m.tid >= 0, load(m, tirx.truncdiv(127, digit(m)))) > 0))
        ),
        REFUTED,
        finding="integer division by zero",
    ),
    "division by data": Case(
        lambda m: stored(m, load(m, clamped(tirx.truncdiv(127, data(m))))), UNKNOWN, "divides by zero"
    ),
    "division by data under a name": Case(named, UNKNOWN, "divides by zero"),
    "division by data that is clamped": Case(
        lambda m: stored(m, load(m, clamped(tirx.truncdiv(127, tirx.max(data(m), 1))))),
        PROVEN,
        expected=lambda at, x: x[127 // x.astype(int)],
    ),
    "division by data as a value": Case(
        lambda m: stored(m, tirx.Cast("float32", tirx.truncdiv(127, data(m)))),
        PROVEN,
        expected=lambda at, x: (127 // x.astype(int)).astype(np.float32),
    ),
    "after a short cut": Case(lambda m: stored(m, truth(tirx.And(past(m), beyond(m) > 0))), PROVEN, expected=positive),
    "a choice after a short cut": Case(
        lambda m: stored(m, truth(tirx.And(past(m), tirx.Select(m.tid >= 0, beyond(m), zero()) > 0))),
        PROVEN,
        expected=positive,
    ),
    "ahead of a short cut": AHEAD(lambda m: stored(m, truth(tirx.And(past(m), asked(m))))),
    "ahead of a short cut, as it is compiled": Case(
        lambda m: stored(m, truth(tirx.And(past(m), asked(m)))), PROVEN, expected=positive, plain=True
    ),
    "ahead of an alternative": AHEAD(lambda m: stored(m, truth(tirx.Or(tirx.Not(past(m)), let(m))))),
    "ahead of an alternative, as it is compiled": Case(
        lambda m: stored(m, truth(tirx.Not(tirx.Or(tirx.Not(past(m)), tirx.Not(let(m)))))),
        PROVEN,
        expected=positive,
        plain=True,
    ),
    "bits ahead of a short cut": AHEAD(lambda m: stored(m, truth(tirx.And(past(m), bits(m))))),
    "bits ahead of a short cut, as it is compiled": Case(
        lambda m: stored(m, truth(tirx.And(past(m), bits(m)))), PROVEN, expected=positive, plain=True
    ),
    "ahead of a selection": AHEAD(
        lambda m: stored(m, tirx.Select(past(m), chosen(m.tid >= 0, beyond(m)), zero())),
    ),
    "ahead of a selection, as it is compiled": Case(
        lambda m: stored(m, tirx.Select(past(m), chosen(m.tid >= 0, beyond(m)), zero())),
        PROVEN,
        expected=lambda at, x: np.where(at < 100, np.roll(x, -28), 0),
        plain=True,
    ),
    "a function that is known": Case(
        lambda m: stored(m, tirx.call_pure_extern("float32", "fmaxf", load(m, place(m)), zero())), PROVEN, expected=same
    ),
    "a function that is not": Case(
        lambda m: stored(m, tirx.call_pure_extern("float32", "no_such_function", load(m, place(m)))),
        UNKNOWN,
        "a call of no_such_function",
    ),
}
"""Verdicts were PROVEN before, but for those that are and that of the choice after a short cut."""

ON_DEVICE = [name for name, case in CASES.items() if case.finding or case.expected]


@pytest.mark.parametrize("name", CASES)
def test_verdict(name: str) -> None:
    case = CASES[name]
    found = case.certificate()
    assert found.verdict == case.verdict, found
    if case.verdict == REFUTED:
        assert {c.rule for c in found.counterexamples} == {case.rule}
    else:
        assert case.verdict == PROVEN or any(case.rule in reason for reason in found.unknown), found


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_values_are_compared_where_numbers_stay_in_their_types(dtype: str) -> None:
    """As whole numbers both are what the definition says."""
    x = te.placeholder((SIZE,), "float32", name="x")
    definition = te.create_prim_func([x, te.compute((SIZE,), lambda i: x[i], name="y")])
    func = stage("stage", (SIZE, SIZE), lambda m: stored(m, load(m, grown(m, dtype))))
    found = values_agree(definition, [(func, TILES, THREADS)])
    assert isinstance(found, Agreement if dtype == "int64" else Undecided), found
    assert dtype == "int64" or "overflows int32" in str(found)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> CpuModule:
    """One text of all cases that the CPU device runs."""
    target, kernels, functions = cuda_target("sm_90"), {}, {}
    for number, name in enumerate(ON_DEVICE):
        functions[f"stage{number}"] = CASES[name].function(f"stage{number}").with_attr("target", target)
        made = kernel([Run(f"stage{number}", TILES, (0, 1))], 2).with_attr("target", target)
        made = made.with_attr("calling_conv", 2).with_attr("tirx.is_global_func", True)
        kernels[f"kernel{number}"] = made.with_attr("global_symbol", f"kernel{number}")
    text = text_of_functions(kernels, functions, target)
    return compile_text(text, cache_dir=tmp_path_factory.mktemp("numbers"), checked=True)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_device(name: str, module: CpuModule) -> None:
    case, at = CASES[name], np.arange(SIZE)
    x = (1 + at).astype(np.float32)
    arrays = [x.copy(), np.zeros(SIZE, np.float32)]
    kinds: set[str] = set()
    try:
        report = module.launch(
            f"kernel{ON_DEVICE.index(name)}",
            grid=(TILES, 1, 1),
            block=(THREADS, 1, 1),
            args=[*arrays, TILES],
            shared_bytes=1024,
            raises=False,
        )
        kinds = {finding.kind for finding in report.findings}
    except DeviceError as error:
        kinds = {case.finding} if case.finding and case.finding in str(error) else {str(error)}
    if case.finding == "values":
        assert (arrays[1] != at.astype(np.float32) * LARGE).any()
    elif case.finding:
        assert case.finding in kinds
    else:
        assert not kinds
        np.testing.assert_array_equal(arrays[1], case.expected(at, x).astype(np.float32))
