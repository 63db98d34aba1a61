"""Time as a kernel sees it on the CPU device: it passes where threads only poll, and stands still while any works."""

from __future__ import annotations

import time

import numpy as np
import pytest

from souffle.emulator import CpuModule, compile_text

pytestmark = pytest.mark.sampled(2)

_TEXT = r"""
__device__ int awaited(const unsigned* flag, long long limit) {
  long long first, now;
  unsigned value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(first));
  for (;;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    if (value) return 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (now - first > limit) return 1;
  }
}

extern "C" __global__ void waits(unsigned* out, unsigned* flag, unsigned set, long long work, long long limit) {
  int over = 0;
  if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) {
    for (long long i = 0; i < work; ++i) atomicAdd(out + gridDim.x * blockDim.x, 1u);
    for (long long i = 0; i < work; ++i) __nanosleep(1), atomicAdd(out + gridDim.x * blockDim.x, 1u);
    asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(flag), "r"(set) : "memory");
  } else if (threadIdx.x == 0) {
    over = awaited(flag, limit);
  }
  if (__syncthreads_or(over)) asm volatile("exit;");
  out[blockIdx.x * blockDim.x + threadIdx.x] = 7;
}

__device__ int leave(int lane) {
  asm volatile("{ .reg .pred p; setp.ge.s32 p, %0, 16; @p exit; }" : : "r"(lane));
  return 5;
}

extern "C" __global__ void leaves(int* out) {
  out[threadIdx.x] = 1;
  out[threadIdx.x] = leave(threadIdx.x);
}
"""
SCHEDULES = [{}, {"order": "shuffled", "seed": 1}, {"workers": 2}, {"workers": 4}]
_BLOCKS, _THREADS = 4, 64


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checked"])
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuModule:
    return compile_text(_TEXT, cache_dir=tmp_path_factory.mktemp("time"), checked=request.param)


def _went_on(module: CpuModule, *, sets: int, work: int, limit: int, **options) -> list[bool]:
    """Which blocks came to their end."""
    out = np.zeros(_BLOCKS * _THREADS + 1, np.uint32)
    args = [out, np.zeros(1, np.uint32), sets, work, limit]
    module.launch(
        "waits", grid=(_BLOCKS, 1, 1), block=(_THREADS, 1, 1), args=args, cooperative=True, raises=False, **options
    )
    blocks = out[:-1].reshape(_BLOCKS, _THREADS)
    assert {tuple(block) for block in blocks} <= {(0,) * _THREADS, (7,) * _THREADS}
    return [bool(block[0]) for block in blocks]


@pytest.mark.parametrize("options", SCHEDULES)
@pytest.mark.parametrize("limit", [10**6, 10**9, 3600 * 10**9])
def test_a_wait_in_vain_comes_to_any_limit_at_once(module: CpuModule, options: dict, limit: int) -> None:
    begin = time.monotonic()
    assert _went_on(module, sets=0, work=1, limit=limit, **options) == [False] * (_BLOCKS - 1) + [True]
    assert time.monotonic() - begin < 5.0, "much sooner than a deadlock is reported"


@pytest.mark.parametrize("options", SCHEDULES)
def test_what_is_waited_for_takes_no_time(module: CpuModule, options: dict) -> None:
    """10,000 turns of all blocks, in each of which one of them gets on, are less than 1 ms."""
    assert _went_on(module, sets=1, work=10_000, limit=10**6, **options) == [True] * _BLOCKS


def test_a_thread_exits_from_within_a_function(module: CpuModule) -> None:
    out = np.zeros(32, np.int32)
    module.launch("leaves", grid=(1, 1, 1), block=(32, 1, 1), args=[out])
    assert out.tolist() == [5] * 16 + [1] * 16
