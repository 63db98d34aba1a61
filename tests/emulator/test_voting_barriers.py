"""``bar.red`` on the CPU device: some of a block's threads count a predicate, or join it, at a barrier of their own."""

from __future__ import annotations

import numpy as np
import pytest

from souffle.emulator import BarrierError, compile_text
from souffle.errors import CudaCompileError

_TEXT = """
__device__ int vote_count(int holds) {
  int n;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; bar.red.popc.u32 %0, 3, 96, p; }" : "=r"(n) : "r"(holds));
  return n;
}
__device__ int vote_none(int holds) {
  int n;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; barrier.cta.red.popc.aligned.u32 %0, 3, 96, !p; }"
               : "=r"(n) : "r"(holds));
  return n;
}
extern "C" __global__ void votes(const int* values, int* out, int rounds) {
  const int t = threadIdx.x;
  if (t >= 96) { out[4 * t] = -1; return; }
  for (int i = 0; i < rounds; ++i) {
    const int value = values[(t + i) % 96];
    int all, any;
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.and.pred q, 3, 96, p; selp.s32 %0, 1, 0, q; }"
                 : "=r"(all) : "r"(value));
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.or.pred q, 3, 96, p; selp.s32 %0, 1, 0, q; }"
                 : "=r"(any) : "r"(value));
    out[4 * t] = vote_count(value);
    out[4 * t + 1] = vote_none(value);
    out[4 * t + 2] = all;
    out[4 * t + 3] = any;
  }
}
extern "C" __global__ void lost(int* out) {
  if (threadIdx.x < 64) out[threadIdx.x] = vote_count(1);
}
"""


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("holding", [0, 1, 40, 95, 96])
@pytest.mark.parametrize("options", [{}, {"order": "shuffled", "seed": 3}, {"order": "shuffled", "seed": 4}])
def test_votes_of_some_threads(checked: bool, holding: int, options: dict) -> None:
    module = compile_text(_TEXT, checked=checked)
    values = (np.random.default_rng(holding).permutation(96) < holding).astype(np.int32)
    out = np.zeros((128, 4), np.int32)
    module.launch("votes", grid=(1, 1, 1), block=(128, 1, 1), args=[values, out, 3], **options)
    np.testing.assert_array_equal(out[:96], [[holding, 96 - holding, holding == 96, holding > 0]] * 96)
    assert (out[96:, 0] == -1).all()


def test_threads_that_do_not_come_are_missed() -> None:
    with pytest.raises(BarrierError, match=r"bar\.sync 3 \(64 of 96 arrived\)"):
        compile_text(_TEXT).launch("lost", grid=(1, 1, 1), block=(128, 1, 1), args=[np.zeros(128, np.int32)])


def test_other_reductions_are_refused() -> None:
    with pytest.raises(CudaCompileError, match="does not know this instruction"):
        compile_text(_TEXT.replace("bar.red.popc.u32", "bar.red.xor.pred"))
