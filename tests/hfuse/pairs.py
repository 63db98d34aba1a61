"""Small kernels to fuse, and what is asked of them again and again."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.hfuse import Argument, Fill, FusedKernel, Launch, Part, Source, check, fuse

__all__ = ["HEAD", "OUT", "OTHER", "launch_of", "pair", "same_bits"]

HEAD = "__global__ void k(const int* x, int* y, int n) {"
OUT = "y[blockIdx.x * blockDim.x + threadIdx.x] = "

OTHER = """#define N 3
__device__ int helper(int a) { return a + N; }
__global__ void k(int* y) {
  __shared__ int s[1024];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x + blockIdx.x * blockDim.x] = helper(s[(threadIdx.x + 1) % blockDim.x]);
}
"""


def launch_of(
    kernel: str = "k",
    *,
    grid: tuple[int, int, int] = (3, 1, 1),
    block: tuple[int | None, int, int] = (None, 1, 1),
    shared_bytes: int = 0,
) -> Launch:
    """A launch of a kernel of ``(const int* x, int* y, int n)``."""
    arguments = (
        Argument("x", dtype="int32", count=256, fill=Fill("integers", (0, 100))),
        Argument("y", dtype="int32", count=4096, output=True),
        Argument("n", value=64),
    )
    return Launch(kernel, grid, block, shared_bytes, arguments)


def pair(text: str, launch: Launch | None = None, kernel: str | None = None) -> tuple[Part, Part]:
    """A kernel beside another one, which uses the same names and has a smaller grid."""
    other = Launch("k", (2, 1, 1), (None, 1, 1), 0, (Argument("y", dtype="int32", count=2048, output=True),))
    first = Part.of(Source("a.cu", text), kernel, launch or launch_of(kernel or "k"))
    return first, Part.of(Source("b.cu", OTHER), None, other)


def same_bits(parts: Sequence[Part], splits: Sequence[int], space: str = "thread") -> FusedKernel:
    """Fuse, and demand that the fused kernel gives the bits of its parts."""
    fused = fuse(parts, splits, space=space)
    result = check(fused, orders=2)
    assert result.ok, [str(difference) for difference in result.differences]
    return fused
