"""Times on a GPU, with a played driver that runs the kernels on the CPU device: what is launched, and with what."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.codegen.plan import Resources
from souffle.errors import NoGpuError
from souffle.hfuse import Argument, FusedKernel, FusionError, Launch, Part, Source, fuse, original
from souffle.hfuse.profile import Profiler, Times
from souffle.hfuse.scalars import scalar_types
from souffle.runtime.cuda import Cuda
from tests.hfuse.pairs import HEAD, launch_of, pair

TEXT = f"""{HEAD}
  extern __shared__ int pool[];
  pool[threadIdx.x] = x[threadIdx.x % n];
  __syncthreads();
  y[blockIdx.x * blockDim.x + threadIdx.x] += pool[blockDim.x - 1 - threadIdx.x] + gridDim.x;
}}
"""


def machine_code(text: str, arch: str) -> tuple[bytes, dict[str, Resources]]:
    return text.encode(), {}


def played(parts: Sequence[Part], fused: Sequence[FusedKernel], **options) -> tuple[Cuda, RehearsalDriver]:
    texts = [original(part, wrapped=True).text for part in parts] + [kernel.text for kernel in fused]
    driver = RehearsalDriver({text.encode(): text for text in texts}, **options)
    return Cuda(0, driver), driver


def test_everything_takes_turns() -> None:
    parts = pair(TEXT, launch_of(shared_bytes=1024))
    fused = [fuse(parts, splits) for splits in ((128, 64), (64, 128))]
    cuda, driver = played(parts, fused)
    with Profiler(cuda, parts, (128, 64), repeats=3, warm_seconds=0, compiler=machine_code) as profiler:
        times = profiler.times(fused)
    assert len(times.fused) == 2 and len(times.alone) == 2 and min(times.parallel, times.serial, *times.fused) > 0
    names = [launch["name"] for launch in driver.launches]
    turn = ["alone_k", "alone_k"] * 2 + ["hfused_k_k"] * 2 + ["alone_k", "alone_k"]
    assert names == turn * 4
    shapes = {(launch["name"], launch["grid"], launch["block"], launch["shared"]) for launch in driver.launches}
    assert shapes == {("alone_k", 3, 128, 1024), ("alone_k", 2, 64, 0), ("hfused_k_k", 3, 192, 1024)}
    # Side by side on two streams, which meet.
    waits = [name for name, _ in driver.calls if name == "cuStreamWaitEvent"]
    assert len(waits) == 2 * 4
    given = {name for name, _ in driver.calls}
    assert {"cuMemFree", "cuModuleUnload", "cuEventDestroy", "cuStreamDestroy"} <= given


def test_what_runs_is_what_the_launches_say() -> None:
    parts = pair(TEXT, launch_of(shared_bytes=1024))
    fused = fuse(parts, (128, 64))
    results = []
    for kernel in (None, fused):
        cuda, _ = played(parts, [fused])
        with Profiler(cuda, parts, (128, 64), seed=4, repeats=1, compiler=machine_code) as profiler:
            results.append(profiler.results(kernel))
    for alone, beside in zip(*results, strict=True):
        for left, right in zip(alone, beside, strict=True):
            np.testing.assert_array_equal(left, right)
    x, y = results[0][0]
    np.testing.assert_array_equal(x, parts[0].launch.arrays(4)[0])
    expected = np.tile(x[np.arange(127, -1, -1) % 64] + 3, 3)
    np.testing.assert_array_equal(y[: 3 * 128], expected)


def test_a_search_asks_for_seconds() -> None:
    parts = pair(TEXT, launch_of(shared_bytes=1024))
    fused = fuse(parts, (64, 64))
    cuda, _ = played(parts, [fused])
    with Profiler(cuda, parts, (64, 64), repeats=1, warm_seconds=0, compiler=machine_code) as profiler:
        assert profiler.seconds(fused) > 0


def test_speedup_is_over_the_kernels_side_by_side() -> None:
    assert Times(3.0, 5.0, (2.0, 6.0), (1.0, 1.0)).speedup() == 0.5
    assert Times(3.0, 5.0, (2.0, 6.0), (1.0, 1.0)).speedup(1) == -0.5


def test_without_a_launch_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part.of(Source("a.cu", "__global__ void k(int* y) { y[0] = 1; }"))
    cuda, _ = played([part], [])
    with pytest.raises(FusionError, match="a profile needs the launches of all kernels"):
        Profiler(cuda, (part, part), (32, 32), compiler=machine_code)
    monkeypatch.setattr("souffle.runtime.cuda._bindings", None)
    with pytest.raises(NoGpuError):
        Cuda()


def test_types_of_scalars() -> None:
    given = {
        "int a": ctypes.c_int32, "unsigned b": ctypes.c_uint32, "const long long c": ctypes.c_int64,
        "unsigned long int d": ctypes.c_uint64, "size_t e": ctypes.c_uint64, "uint8_t f": ctypes.c_uint8,
        "float g": ctypes.c_float, "const double h": ctypes.c_double, "bool i": ctypes.c_bool,
        "unsigned short j": ctypes.c_uint16, "const float* k": None, "int l[]": None, "word m": ctypes.c_uint32,
        "Real n": ctypes.c_double, "COUNT o": ctypes.c_int64, "T p": ctypes.c_float, "const char** q": None,
    }  # fmt: skip
    text = "typedef unsigned int word;\nusing Real = double;\n#define COUNT long long\n"
    text += f"template <typename T> __global__ void k({', '.join(given)}) {{}}\n"
    part = Part.of(Source("a.cu", text), "k<float>")
    assert dict(zip(given, scalar_types(part), strict=True)) == given
    with pytest.raises(FusionError, match=r"a\.cu:2: kernel k: the parameter p is of type `P`, which is neither"):
        scalar_types(Part.of(Source("a.cu", "struct P { int a; };\n__global__ void k(P p) {}")))


def test_scalars_reach_the_kernel_whole() -> None:
    """Of 64 bits, and of floating point: the driver reads as many bytes as the parameter has."""
    text = "__global__ void k(int* y, long long n, float f, short s) { y[0] = n + f + s; }"
    arguments = [*launch_of().arguments[1:2]]
    values = [Argument(name, value=value) for name, value in (("n", 2**40 + 3), ("f", 0.5), ("s", -2))]
    part = Part.of(Source("a.cu", text), None, Launch("k", (1, 1, 1), (32, 1, 1), 0, (*arguments, *values)))
    cuda, _ = played([part, part], [], execute=False)
    profiler = Profiler(cuda, (part, part), (32, 32), repeats=1, warm_seconds=0, compiler=machine_code)
    held = profiler._alone[0].keep[1:]
    assert [type(value) for value in held[1:]] == [ctypes.c_int64, ctypes.c_float, ctypes.c_int16]
    assert [value.value for value in held[1:]] == [2**40 + 3, 0.5, -2]
