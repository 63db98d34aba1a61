"""Fused kernels: their text, and that they give the bits of their parts, for what CUDA files hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.emulator import compile_text
from souffle.hfuse import SPACES, Argument, Bound, Fill, FusionError, Launch, Part, Source, check, fuse, original
from tests.hfuse.pairs import HEAD, OUT, launch_of, pair, same_bits

pytestmark = pytest.mark.sampled(6)

MEAN = """#include <stdint.h>
#define WARP 32
#define ROWS(i, n) for (int i = threadIdx.y; i < (n); i += blockDim.y)
__device__ __forceinline__ float combined(float v) {
  for (int i = WARP / 2; i > 0; i /= 2) v += __shfl_xor_sync(0xffffffffu, v, i);
  return v;
}
// The mean of each plane; one block a plane.
__global__ void mean(const float* __restrict__ input, float* output, int rows, int columns) {
  __shared__ float partial[WARP];
  const int tid = threadIdx.x + threadIdx.y * blockDim.x;
  float sum = 0.0f;
  ROWS(row, rows) {
    for (int x = threadIdx.x; x < columns; x += blockDim.x) {
      sum += input[(blockIdx.x * rows + row) * columns + x];
    }
  }
  sum = combined(sum);
  if (tid % WARP == 0) partial[tid / WARP] = sum;
  __syncthreads();
  if (tid < WARP) {
    sum = combined(tid < blockDim.x * blockDim.y / WARP ? partial[tid] : 0.0f);
    if (tid == 0) output[blockIdx.x] = sum / (rows * columns);
  }
}
"""
HISTOGRAM = """#define WARP 1
__device__ int combined(float v, int bins) { return min(int(v * bins), bins - WARP); }
template <typename T>
__global__ void histogram(const T* __restrict__ input, unsigned* output, int bins, int count) {
  extern __shared__ unsigned counters[];
  if (count == 0) return;
  for (int i = threadIdx.x; i < bins; i += blockDim.x) counters[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += blockDim.x * gridDim.x) {
    atomicAdd(&counters[combined(input[i], bins)], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < bins; i += blockDim.x) atomicAdd(&output[i], counters[i]);
}
"""


def figure_4() -> tuple[Part, Part]:
    """Kernels of the kinds of the paper's Figures 2 and 3."""
    mean = Launch(
        "mean",
        (3, 1, 1),
        (None, 16, 1),
        0,
        (
            Argument("input", dtype="float32", count=3 * 5 * 70, fill=Fill("normal", (0, 1))),
            Argument("output", dtype="float32", count=3, output=True),
            Argument("rows", value=5),
            Argument("columns", value=70),
        ),
    )
    histogram = Launch(
        "histogram<float>",
        (5, 1, 1),
        (None, 1, 1),
        20 * 4,
        (
            Argument("input", dtype="float32", count=1999, fill=Fill("uniform", (0, 1))),
            Argument("output", dtype="uint32", count=20, output=True),
            Argument("bins", value=20),
            Argument("count", value=1999),
        ),
    )
    return Part.of(Source("mean.cu", MEAN), None, mean), Part.of(Source("histogram.cu", HISTOGRAM), None, histogram)


def test_the_text_of_figure_4(golden: Callable[[str, str], None]) -> None:
    fused = fuse(figure_4(), (896, 128), name="fused_kernel")
    golden("hfuse_figure_4.cu", fused.text)
    assert (fused.block, fused.splits, fused.shared_bytes) == (1024, (896, 128), 128)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("splits", [(896, 128), (512, 512), (128, 256)])
def test_figure_4_gives_the_bits_of_its_parts(space: str, splits: tuple[int, int]) -> None:
    fused = same_bits(figure_4(), splits, space)
    assert fused.launch().grid == ((8 if space == "block" else 5), 1, 1)
    assert fused.launch().block == (sum(splits) if space == "thread" else max(splits), 1, 1)


def test_results_are_right_and_not_only_the_same() -> None:
    parts = figure_4()
    fused = fuse(parts, (256, 128))
    values = [part.launch.arrays(5) for part in parts]
    arguments = [value for given in values for value in given] + [value for _, value in fused.grids()]
    compile_text(fused.text).launch(
        fused.name, grid=fused.launch().grid, block=(384, 1, 1), args=arguments, shared_bytes=fused.shared_bytes
    )
    mean = values[0][0].astype(np.float64).reshape(3, -1).mean(axis=1)
    np.testing.assert_array_less(abs(values[0][1] - mean), 350 * 2.0**-24 * abs(values[0][0]).max())
    bins = np.minimum((values[1][0] * np.float32(20)).astype(int), 19)
    np.testing.assert_array_equal(values[1][1], np.bincount(bins, minlength=20))


def test_three_and_fifteen_parts() -> None:
    parts = figure_4()
    same_bits((*parts, parts[0]), (128, 256, 512))
    fused = same_bits((*parts, *parts) * 3 + parts[1:] * 3, (32,) * 15)
    assert "bar.sync 15, 32;" in fused.text


def test_one_kernel_of_another_shape_twice() -> None:
    (mean, _) = figure_4()
    fused = same_bits((mean, mean), (64, 512))
    assert "dim3(4, 16, 1)" in fused.text and "dim3(32, 16, 1)" in fused.text


def test_bounds() -> None:
    parts = figure_4()
    assert "__launch_bounds__(1024, 2) " in fuse(parts, (512, 512), bound=Bound(blocks=2)).text
    text = fuse(parts, (512, 512), bound=Bound(registers=40)).text
    assert "void __maxnreg__(40) " in text and "__launch_bounds__" not in text


_SECTIONS = (Path(__file__).parent / "cuda" / "accepted.cu").read_text(encoding="utf-8").split("\n//// ")[1:]
ACCEPTED = {section.partition("\n")[0]: section.partition("\n")[2] for section in _SECTIONS}
ACCEPTED["windows"] = f"#define T \\\r\n  threadIdx.x\r\n// ünï\r\n{HEAD}\r\n  {OUT}T;  /* ∑ */\r\n}}"


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_files_hold(name: str) -> None:
    same_bits(pair(ACCEPTED[name], kernel="k"), (64, 96))


def test_what_files_hold_compiles_with_nvcc() -> None:
    """All of them in three kernels: nvcc and g++ read C++ differently."""
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    parts = [pair(text, kernel="k")[0] for text in ACCEPTED.values()]
    for start in range(0, len(parts), 12):
        some = parts[start : start + 12]
        fused = fuse(some, (64,) * len(some))
        assert list(compile_cubin(fused.text, "sm_80")[1]) == ["hfused" + "_k" * len(some)]


@pytest.mark.parametrize(
    "name", ["k<int>", "k<Tag>", "k<int, 5>", "k<const int>"], ids=["default", "of the file", "all", "qualified"]
)
def test_templates(name: str) -> None:
    text = "struct Tag {};\ntemplate <typename T> struct Size { static const int v = sizeof(T); };\n"
    text += f"template <typename T, int M = 3> {HEAD}\n  {OUT}Size<T>::v * M;\n}}"
    fused = same_bits(pair(text, kernel=name), (64, 64))
    assert ("hfuse_run" in fused.text) == (name == "k<Tag>")


def test_types_of_the_file_in_the_signature() -> None:
    kernel = f"__global__ void k(const I* x, I* y, I n) {{\n  {OUT}x[0];\n}}"
    text = f"namespace a {{ namespace b {{\ntypedef int I;\n{kernel}\n}} }}"
    fused = same_bits(pair(text, kernel="a::b::k"), (64, 64))
    assert "hfuse_1::a::b::hfuse_type_0* x_1" in fused.text


def test_dynamic_shared_memory_of_each_part() -> None:
    flat = f"{HEAD}\n  extern __shared__ __align__(16) int p[];\n  p[threadIdx.x] = threadIdx.x;\n  __syncthreads();\n"
    flat += f"  {OUT}p[blockDim.x - 1 - threadIdx.x];\n}}"
    rows = f"{HEAD}\n  extern __shared__ volatile int t[][8];\n  t[threadIdx.x / 8][threadIdx.x % 8] = threadIdx.x;\n"
    rows = rows.replace("__shared__ volatile", "__shared__")
    rows += f"  __syncthreads();\n  {OUT}t[7 - threadIdx.x / 8][threadIdx.x % 8];\n}}"
    of_file = "extern __shared__ int w[];\n__device__ void put(int v) { w[threadIdx.x] = v; }\n"
    of_file += f"{HEAD}\n  put(threadIdx.x + 7);\n  __syncthreads();\n  {OUT}w[blockDim.x - 1 - threadIdx.x];\n}}"
    parts = [pair(text, launch_of(shared_bytes=300))[0] for text in (flat, rows, of_file)]
    fused = same_bits(parts, (64, 64, 64))
    assert fused.shared_bytes == 3 * 384
    assert [f"hfuse_pool + {offset})" in fused.text for offset in (0, 384, 768)] == [True] * 3
    assert fuse(parts, (64, 64, 64), space="sequence").shared_bytes == 384


def test_grids_of_three_dimensions() -> None:
    index = "(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z))"
    text = f"{HEAD}\n  y[{index} * blockDim.x + threadIdx.x] = blockIdx.x + blockIdx.y * 10 + blockIdx.z * 100;\n}}"
    for space in SPACES:
        fused = same_bits(pair(text, launch_of(grid=(2, 3, 2))), (64, 64), space)
        assert [name for name, _ in fused.grids()] == [
            "hfuse_grid_1_x",
            "hfuse_grid_1_y",
            "hfuse_grid_1_z",
            "hfuse_blocks_2",
        ]


def test_what_the_host_fills() -> None:
    text = f"__constant__ int table[4];\n__device__ int given = 3;\n{HEAD}\n  {OUT}table[1] + given;\n}}"
    fused = fuse(pair(text), (64, 64))
    assert fused.symbols == ("hfuse_1::table",) and "// The host fills hfuse_1::table." in fused.text


def test_the_check_notices() -> None:
    parts = figure_4()
    fused = fuse(parts, (64, 64))
    for before, after, message in (
        ("threadIdx.x - 64u", "threadIdx.x - 63u", "output"),
        ("bar.sync 2, 64", "bar.sync 2, 128", r"bar\.sync 2 \(64 of 128 arrived\)"),
        ("blockIdx.x < hfuse_blocks_1", "blockIdx.x < hfuse_blocks_2", r"outside of output: \d+ bytes"),
    ):
        assert before in fused.text
        result = check(replace(fused, text=fused.text.replace(before, after)), orders=1)
        assert not result.ok
        assert any(re.search(message, str(d)) for d in result.differences), result.differences


def test_the_checked_run_notices_what_gives_the_same_bits() -> None:
    """Races of a part's warps, and of two parts, whatever order the threads come in."""
    flat = f"{HEAD}\n  extern __shared__ int p[];\n  p[threadIdx.x] = x[threadIdx.x];\n  __syncthreads();\n"
    flat += f"  {OUT}p[blockDim.x - 1 - threadIdx.x];\n}}"
    parts = [pair(flat, launch_of(shared_bytes=512))[0]] * 2
    fused = fuse(parts, (64, 128))
    assert check(fused, orders=1, checked=True).ok
    for before, after in (
        ('asm volatile("bar.sync 1, 64;" ::: "memory");', ""),
        ('asm volatile("bar.sync 2, 128;" ::: "memory");', ""),
        ("hfuse_pool + 512)", "hfuse_pool + 0)"),
    ):
        assert before in fused.text
        wrong = replace(fused, text=fused.text.replace(before, after))
        for seed in range(3):
            messages = [str(d) for d in check(wrong, orders=1, seed=seed, checked=True).differences]
            assert any("race" in message or "warp" in message for message in messages), messages


def test_a_kernel_whose_result_is_not_one_cannot_be_checked() -> None:
    text = f"{HEAD}\n  y[0] = threadIdx.x;\n}}"
    with pytest.raises(FusionError, match="it gives other results in another order of its threads, in y: y: 1 of 4096"):
        check(fuse(pair(text), (64, 64)), orders=4)


def test_originals() -> None:
    (mean, histogram) = figure_4()
    assert original(mean).text == MEAN and original(mean).unchanged
    alone = original(histogram)
    assert not alone.unchanged and "histogram<float>(input, output, bins, count);" in alone.text
    wrapped = original(pair(ACCEPTED["static_kernel"])[0], wrapped=True)
    assert 'extern "C" __global__ void __launch_bounds__(64) alone_k(' in wrapped.text
