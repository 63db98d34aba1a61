"""Texts that are compiled beside another one: they do what they do alone, and only what differs is compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from souffle.emulator import SHARED_STEMS, compile_text, toolchain
from souffle.emulator.divided import divided
from souffle.errors import CudaCompileError

_TEXT = """
static __device__ __forceinline__ float twice(float x) {
  return 2.0f * x;
}
static __device__ __noinline__ void first(int tid, float* __restrict__ x, float* __restrict__ y);
static __device__ __forceinline__ void second(int tid, float* __restrict__ y, float* __restrict__ z);
static __device__ __noinline__ void third(int tid, float* __restrict__ y, float* __restrict__ z);
extern "C" __global__ void __launch_bounds__(64) k(float* x, float* y, float* z, int n);
static __device__ __noinline__ void first(int tid, float* __restrict__ x, float* __restrict__ y) {
  y[tid] = twice(x[tid]) + 1.0f;
}
static __device__ __forceinline__ void second(int tid, float* __restrict__ y, float* __restrict__ z) {
  extern __shared__ __align__(64) unsigned char pool_ptr[];
  __shared__ float row[64];
  float* turned = ((float*)(&(pool_ptr[0])));
  turned[63 - tid] = y[tid];
  row[tid] = y[tid];
  __syncthreads();
  z[tid] = turned[tid] + row[tid];
}
static __device__ __noinline__ void third(int tid, float* __restrict__ y, float* __restrict__ z) {
  y[tid] = twice(z[tid]) + 1.0f;
}
extern "C" __global__ void __launch_bounds__(64) k(float* x, float* y, float* z, int n) {
  first((int)threadIdx.x, x, y);
  __syncthreads();
  second((int)threadIdx.x, y, z);
  __syncthreads();
  third((int)threadIdx.x, y, z);
}
"""
_TURNED = ("turned[63 - tid]", "turned[tid]")


def changed(*changes: tuple[str, str]) -> str:
    text = _TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def results(text: str, folder: Path, base: str | None = None, checked: bool = False) -> list[bytes | str]:
    """What comes of three orders: all bytes, and the findings without their lines."""
    module = compile_text(text, cache_dir=folder, base=base, checked=checked)
    found: list[bytes | str] = []
    for seed in range(3):
        x = np.random.default_rng(0).random(64, np.float32)
        arrays = [x, np.zeros_like(x), np.zeros_like(x)]
        how = {"order": "shuffled", "seed": seed, "shared_bytes": 256, "raises": False}
        report = module.launch("k", grid=(1, 1, 1), block=(64, 1, 1), args=[*arrays, 1], **how)
        found += [array.tobytes() for array in arrays]
        found += [f"{f.kind} in {f.place.function}" for f in report.findings]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize(
    "changes",
    [
        (),
        (_TURNED,),
        (("row[tid] = y[tid];", "row[tid] = y[tid] - 4.0f;"), ("twice(x[tid])", "x[tid]")),
        (("y[tid] = twice(z[tid])", "y[63 - tid] = twice(z[tid])"),),
        (("first((int)threadIdx.x, x, y);", ""), ("third((int)threadIdx.x, y, z)", "third((int)threadIdx.x, y, x)")),
        (("2.0f * x", "3.0f * x"),),
    ],
)
def test_a_text_beside_another_does_what_it_does_alone(folder: Path, changes: tuple, checked: bool) -> None:
    text = changed(*changes)
    assert results(text, folder, _TEXT, checked) == results(text, folder, checked=checked)


def test_functions_that_are_equal_stay_apart(folder: Path) -> None:
    """`first` and `third` are the same text; one is replaced."""
    one = changed(("y[tid] = twice(x[tid])", "y[tid] = 5.0f * twice(x[tid])"))
    found = results(one, folder, _TEXT)
    assert found == results(one, folder) != results(_TEXT, folder)


def test_a_register_that_is_read_before_it_is_written_shows(folder: Path) -> None:
    text = changed(("y[tid] = twice(x[tid])", "float s[1];\n  y[tid] = s[0] + twice(x[tid])"))
    _, _, z, *_ = results(text, folder, _TEXT)
    assert (np.frombuffer(z, np.float32) < -1e38).all()


def test_what_differs_is_compiled_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where all lies that serves texts, too.
    monkeypatch.setenv("SOUFFLE_CACHE", str(tmp_path))
    tmp_path = tmp_path / "cpu_device"
    compiled: list[str] = []
    inner = toolchain._object

    def counted(unit, folder, result, failed):
        had = {path.name for path in tmp_path.glob("*.o")}
        made = inner(unit, folder, result, failed)
        if not unit.stem or {path.name for path in tmp_path.glob("*.o")} != had:
            compiled.append(unit.stem or unit.source)
        return made

    monkeypatch.setattr(toolchain, "_object", counted)
    compile_text(_TEXT, cache_dir=tmp_path, base=_TEXT)
    assert compiled[1:] == ["rest"]  # behind the runtime
    compile_text(changed(_TURNED), cache_dir=tmp_path, base=_TEXT)
    assert len(compiled) == 3 and "turned" in compiled[2] and "twice(z[tid])" not in compiled[2]
    compile_text(_TEXT, cache_dir=tmp_path, base=_TEXT, checked=True)
    assert compiled[3:] == ["rest", "checks"]
    compile_text(changed(_TURNED), cache_dir=tmp_path, base=_TEXT, checked=True)
    assert len(compiled) == 6 and "turned" in compiled[5]
    own = {path.name for path in tmp_path.iterdir() if not path.name.startswith(SHARED_STEMS)}
    assert {name.partition("-")[0] for name in own} == {"kernels", "checked"} and len(own) == 4


@pytest.mark.parametrize(
    "changes",
    [
        (("2.0f * x", "3.0f * x"),),
        (("__noinline__ void third", "__forceinline__ void third"),),
        (("pool_ptr[];", "other_ptr[];"), ("pool_ptr[0]", "other_ptr[0]")),
        (("void first(int tid", "void fifth(int tid"),),
    ],
)
def test_texts_that_differ_in_more_are_compiled_whole(changes: tuple) -> None:
    assert divided(changed(*changes), _TEXT) is None


def test_variables_of_all_functions_are_not_divided() -> None:
    for line in ("__constant__ float c[4];", "__shared__ float s[64];", "static __device__ int count;"):
        assert divided(f"{line}\n{changed(_TURNED)}", f"{line}\n{_TEXT}") is None
    assert divided(changed(_TURNED), _TEXT) is not None


@pytest.mark.parametrize(
    ("change", "function", "line"),
    [
        (("y[tid] = twice(x[tid])", "\n  y[tid + 64] = twice(x[tid])"), "first", "y[tid + 64]"),
        (("third((int)threadIdx.x", "\n third(64 + (int)threadIdx.x"), "third", "y[tid] = twice(z[tid])"),
    ],
)
def test_lines_are_those_of_the_whole(folder: Path, change: tuple[str, str], function: str, line: str) -> None:
    """Of what is compiled again, and of what is not."""
    text = changed(change)
    module = compile_text(text, cache_dir=folder, base=_TEXT, checked=True)
    arrays = [np.zeros(64, np.float32) for _ in range(3)]
    how = {"shared_bytes": 256, "raises": False}
    report = module.launch("k", grid=(1, 1, 1), block=(64, 1, 1), args=[*arrays, 1], **how)
    lines = divided(text, _TEXT).whole.splitlines()
    assert {f.place.function for f in report.findings} == {function}
    assert all(line in lines[f.place.line - 1] for f in report.findings)


def test_errors_of_the_compiler_are_those_of_what_differs(folder: Path) -> None:
    with pytest.raises(CudaCompileError, match="nowhere"):
        compile_text(changed(("turned[tid] + row", "nowhere + row")), cache_dir=folder, base=_TEXT)
