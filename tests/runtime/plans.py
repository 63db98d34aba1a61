"""Small plans written by hand."""

from __future__ import annotations

import hashlib

import numpy as np

from souffle.codegen.plan import Buffer, CudaModule, Kernel, Launch, Plan, Resources
from souffle.decision import Decision
from souffle.options import Options

__all__ = ["cooperative_expected", "cooperative_plan", "machine_code", "many_types_plan"]

_COOPERATIVE = """
#include <cooperative_groups.h>

__device__ void scale(int tile, int tid, float* x, float* w, float* t) {
  int i = tile * 32 + tid;
  if (i < 100) t[i] = x[i] * w[i];
}

__device__ void total(int tile, int tid, float* t, float* y) {
  extern __shared__ float partial[];
  float sum = 0.0f;
  for (int i = tid; i < 100; i += 32) sum += t[i] * (float)(tile + 1);
  partial[tid] = sum;
  __syncthreads();
  if (tid == 0) {
    sum = 0.0f;
    for (int i = 0; i < 32; ++i) sum += partial[i];
    y[tile] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(32) fused(float* x, float* w, float* t, float* y, int num_blocks) {
  for (int it = 0; it * num_blocks < 4; ++it) {
    int tile = it * num_blocks + blockIdx.x;
    if (tile < 4) scale(tile, threadIdx.x, x, w, t);
    __syncthreads();
  }
  cooperative_groups::this_grid().sync();
  for (int it = 0; it * num_blocks < 7; ++it) {
    int tile = it * num_blocks + blockIdx.x;
    if (tile < 7) total(tile, threadIdx.x, t, y);
    __syncthreads();
  }
}
"""

_BUMP = """
extern "C" __global__ void bump(float* y, float* z, int num_blocks) {
  for (int tile = blockIdx.x; tile < 7; tile += num_blocks) {
    if (threadIdx.x == 0) z[tile] = y[tile] + 1.0f;
  }
}
"""


def machine_code(text: str) -> bytes:
    """Stands for what nvcc would give."""
    return b"machine code of " + hashlib.sha256(text.encode()).digest()


def cooperative_plan(*, arch: str = "sm_90", compiled: bool = True, constant: np.ndarray | None = None) -> Plan:
    """Two kernels: a cooperative one of two stages with dynamic shared memory, and one launched twice.

    ``y[j] = (j + 1) * sum(x * w)``, ``z = y + 1``, ``again = z + 1``.
    """
    weights = np.linspace(-1, 1, 100, dtype=np.float32) if constant is None else constant
    resources = Resources(24, 0, 0, 0) if compiled else None
    return Plan(
        name="two_stage",
        options=Options(level="V3", arch=arch),
        buffers=(
            Buffer("x", (10, 10), "float32", "input", "input.1"),
            Buffer("y", (7,), "float32", "output", "scores"),
            Buffer("z", (1, 7), "float32", "output", "more/scores"),
            Buffer("again", (7,), "float32", "output", "again"),
            Buffer("w", (100,), "float32", "constant", "w"),
            Buffer("t", (100,), "float32", "workspace", "t", 256),
        ),
        constants={"w": weights},
        modules=tuple(CudaModule(text, machine_code(text) if compiled else b"") for text in (_COOPERATIVE, _BUMP)),
        kernels=(
            Kernel("fused", 0, 7, 32, 128, 1, resources, ("scale", "total"), ("t", "y")),
            Kernel("bump", 1, 7, 32, 0, 0, resources, ("bump",), ("z",)),
        ),
        launches=(Launch(0, (0, 4, 5, 1), ("t", "y")), Launch(1, (1, 2), ("z",)), Launch(1, (2, 3), ("again",))),
        workspace_bytes=1024,
        decisions=(
            Decision("partition", "t, y", True, "one wave of 7 blocks"),
            Decision("horizontal", "z, again", False, "again depends on z"),
            Decision("partition", "y, z", False, "z is cheap"),
        ),
    )


def cooperative_expected(x: np.ndarray, weights: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """What :func:`cooperative_plan` computes, in float64."""
    weights = np.linspace(-1, 1, 100, dtype=np.float32) if weights is None else weights
    y = np.arange(1, 8) * np.sum(x.astype(np.float64).ravel() * weights)
    return {"scores": y, "more/scores": (y + 1)[None], "again": y + 2}


_TYPES = """
#include <cuda_fp16.h>
extern "C" __global__ void types(bool* b, long long* n, half* h, bool* nb, long long* m, float* f, int num_blocks) {
  if (blockIdx.x == 0 && threadIdx.x < 3) {
    int i = threadIdx.x;
    nb[i] = !b[i];
    m[i] = n[0] + i;
    f[i] = __half2float(h[i]);
  }
}
"""


def many_types_plan() -> Plan:
    """bool and a scalar int64 in, a float16 constant; bool, int64 and float32 out."""
    return Plan(
        name="types",
        options=Options(level="V0"),
        buffers=(
            Buffer("b", (3,), "bool", "input", "mask"),
            Buffer("n", (), "int64", "input", "count"),
            Buffer("nb", (3,), "bool", "output", "negated"),
            Buffer("m", (3,), "int64", "output", "counts"),
            Buffer("f", (3,), "float32", "output", "values"),
            Buffer("h", (3,), "float16", "constant", "h"),
        ),
        constants={"h": np.array([0.5, -2, 65504], np.float16)},
        modules=(CudaModule(_TYPES, machine_code(_TYPES)),),
        kernels=(Kernel("types", 0, 1, 32, 0, 0, None, ("types",), ("nb", "m", "f")),),
        launches=(Launch(0, (0, 1, 5, 2, 3, 4), ("nb", "m", "f")),),
        workspace_bytes=0,
        decisions=(),
    )
