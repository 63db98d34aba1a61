"""Machine code that was made before: taken where the function, the processor and the compiler are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx, topi

import souffle
from souffle.codegen.host_library import linked_library
from souffle.errors import CompilerNotFoundError
from souffle.schedule.cpu import ScheduledFunction, build, build_objects, host_target, schedule_with_constants
from tests.test_kept_plans import _model

_SHAPE = (30, 40)


def _functions(*numbers: float) -> dict[str, tirx.PrimFunc]:
    x = te.placeholder(_SHAPE, "float32", name="x")
    return {
        f"f{i}": te.create_prim_func([x, topi.add(x, tirx.const(number, "float32"))])
        for i, number in enumerate(numbers)
    }


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that LLVM compiled."""
    monkeypatch.setenv("SOUFFLE_CACHE_GB", "1")
    seen: list[str] = []
    whole = build.compile_llvm

    def counted(functions: dict[str, tirx.PrimFunc], target: tvm.target.Target) -> Any:
        seen.extend(functions)
        return whole(functions, target)

    monkeypatch.setattr(build, "compile_llvm", counted)
    return seen


def _built(
    funcs: dict[str, tirx.PrimFunc], folder: Path | None, target: tvm.target.Target | None = None
) -> list[bytes]:
    report: list[tuple[str, str]] = []
    scheduled: dict[str, ScheduledFunction] = {}
    objects = build_objects(
        funcs,
        target or host_target(),
        folder=folder,
        report=report,
        constants={},
        scheduled=scheduled,
        winograd=True,
    )
    assert list(scheduled) == list(funcs)
    return objects


def test_a_function_is_compiled_once(tmp_path: Path, runs: list[str]) -> None:
    first = _built(_functions(0.1, 0.2, 0.3), tmp_path)
    assert sorted(runs) == ["f0", "f1", "f2"]
    assert _built(_functions(0.1, 0.2, 0.3), tmp_path) == first and len(runs) == 3
    (tmp_path / "network.so").write_bytes(linked_library(first))
    library = tvm.runtime.load_module(str(tmp_path / "network.so"))
    a = np.random.default_rng(0).standard_normal(_SHAPE).astype(np.float32)
    for i in range(3):
        out = tvm.runtime.empty(_SHAPE, "float32", tvm.cpu())
        library[f"f{i}"](tvm.runtime.tensor(a, tvm.cpu()), out)
        np.testing.assert_array_equal(out.numpy(), a + np.float32((i + 1) / 10))
    # The next number of float32, another processor, no cache.
    _built(_functions(0.1, float(np.nextafter(np.float32(0.2), np.float32(1))), 0.3), tmp_path)
    assert runs[3:] == ["f1"]
    _built(_functions(0.1), tmp_path, tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 2}))
    _built(_functions(0.1), None)
    assert runs[4:] == ["f0", "f0"]


def test_another_compiler_compiles_again(tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _built(_functions(0.1), tmp_path)
    for name, value in (("package_digest", lambda: "another"), ("_key", lambda func, target: "another")):
        monkeypatch.setattr(build, name, value)
        _built(_functions(0.1), tmp_path)
    assert runs == ["f0"] * 3
    _built(_functions(0.1), tmp_path)
    assert runs == ["f0"] * 3


def test_half_of_a_function_is_compiled_again(tmp_path: Path, runs: list[str]) -> None:
    first = _built(_functions(0.1), tmp_path)
    (path,) = tmp_path.rglob("*.o")
    whole = path.read_bytes()
    for number, broken in enumerate((b"", whole[:-1], whole[:100], bytes([whole[0] ^ 1]) + whole[1:])):
        path.write_bytes(broken)
        assert _built(_functions(0.1), tmp_path) == first
        assert len(runs) == number + 2 and path.read_bytes() == whole


def test_a_function_without_a_schedule_is_kept_as_it_is(
    tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of it unscheduled is not taken for what a later compiler schedules."""
    funcs = _functions(0.1)

    def refuse(func: tirx.PrimFunc, **options: Any) -> ScheduledFunction:
        assert tvm_ffi.structural_equal(func, funcs["f0"])
        raise tvm.error.InternalError("no such schedule")

    with monkeypatch.context() as patch:
        patch.setattr(build, "schedule_with_constants", refuse)
        plain = _built(funcs, tmp_path)
        assert _built(funcs, tmp_path) == plain and runs == ["f0"]
    assert build.schedule_with_constants is schedule_with_constants
    assert _built(funcs, tmp_path) != plain and runs == ["f0", "f0"]


def test_other_weights_are_compiled_without_llvm(tmp_path: Path, runs: list[str]) -> None:
    networks = [souffle.compile(_model(change=change), target="cpu", cache_dir=tmp_path) for change in (None, 5)]
    assert len(runs) == len(networks[0].plan.kernels)
    apart = souffle.compile(_model(change=5), target="cpu", cache_dir=tmp_path / "apart")
    x = np.random.default_rng(0).standard_normal(networks[0].inputs[0].shape).astype(np.float32)
    np.testing.assert_array_equal(networks[1](x)["y"], apart(x)["y"])
    assert networks[1].plan.modules == apart.plan.modules


def test_without_a_compiler_of_cpp_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("souffle.codegen.host_library.cc.get_cc", lambda: "/nowhere/g++")
    with pytest.raises(CompilerNotFoundError, match=r"g\+\+.*CXX"):
        linked_library([])
