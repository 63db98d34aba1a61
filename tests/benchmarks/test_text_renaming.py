"""Texts that are one but for names, and texts that are not."""

from __future__ import annotations

import re

import pytest

from benchmarks.text_renaming import Renaming, TextDifference, compare_texts

TEXT = """
#define WIDTH 4
struct pair { float x, y; };
static __device__ __noinline__ void scale(int tile, float* __restrict__ from, float* to);
static __device__ __noinline__ void scale(int tile, float* __restrict__ from, float* to) {
  float factor = 2.5f * tile;
  for (int i = 0; i < WIDTH; ++i) {
    to[(tile * 4) + i] = max(from[(tile * 4) + i] * factor, 0.0f);
  }
}
extern "C" __global__ void __launch_bounds__(32) kernel0_scale(float* g0, float* g1, int num_blocks) {
  // one tile for each block
  scale(((int)blockIdx.x), g0, g1);
  asm volatile("bar.sync %0;" : : "n"(0) : "memory");
  __syncthreads();
}
"""


def changed(*pairs: tuple[str, str]) -> str:
    text = TEXT
    for old, new in pairs:
        name = rf"\b{old}\b" if old.isidentifier() else re.escape(old)
        text, count = re.subn(name, new, text)
        assert count
    return text


@pytest.mark.parametrize(
    "after",
    [
        TEXT,
        changed(("factor", "by")),
        changed(("scale", "times"), ("tile", "part")),
        changed(("  ", "\t"), ("// one tile for each block", "/* tile by tile */")),
        # Each function has its own: what one calls g0 another may call from.
        changed(("g0", "from"), ("g1", "to")),
        # Names are swapped, throughout the one function that has them.
        changed(("from", "swapped"), ("to", "from"), ("swapped", "to")),
    ],
)
def test_names_and_layout_do_not_count(after: str) -> None:
    assert isinstance(compare_texts(TEXT, after), Renaming)


def test_functions_are_renamed_throughout() -> None:
    after = changed(("scale", "times"))
    found = compare_texts(TEXT, after, [("kernel0_scale", "kernel0_scale")])
    assert isinstance(found, Renaming)
    assert (found.forth["scale"], found.forth["kernel0_scale"]) == ("times", "kernel0_scale")


@pytest.mark.parametrize(
    "after, shown",
    [
        (changed(("2.5f", "2.4f")), "+  float factor = 2.4f * tile;"),
        (changed(("tile * 4) + i] =", "tile * 4) + tile] =")), None),
        (changed(("i < WIDTH", "i <= WIDTH")), None),
        (changed(("WIDTH; ++i", "WIDTH; + + i")), None),
        (changed(("scale(((int)blockIdx.x), g0, g1)", "scale(((int)blockIdx.x), g1, g0)")), None),
        (changed(("max", "min")), None),
        (changed(("blockIdx", "threadIdx")), None),
        (changed(("blockIdx.x", "blockIdx.y")), None),
        (changed(("bar.sync %0", "bar.arrive %0")), None),
        (changed(("__syncthreads", "__syncwarp")), None),
        (changed(("WIDTH 4", "WIDTH 8")), None),
        (changed(("float x, y", "float y, x")), None),
        (changed(("__noinline__", "__forceinline__")), None),
        (changed(("float factor", "double factor")), None),
        # Two names become one: what is read is another thing.
        (changed(("factor", "tile")), None),
        (changed(("g1", "g0")), None),
        # A variable takes the name of what the text does not declare, and so of what is called there.
        (changed(("factor", "max")), None),
        (changed(("__launch_bounds__(32)", "__launch_bounds__(64)")), None),
        (changed(("kernel0_scale(float* g0", "scale2() {}\nvoid kernel0_scale(float* g0")), None),
        (TEXT + "static __device__ void more() {}\n", None),
    ],
)
def test_everything_else_counts(after: str, shown: str | None) -> None:
    found = compare_texts(TEXT, after)
    assert isinstance(found, TextDifference)
    assert found.reason
    assert isinstance(compare_texts(after, TEXT), TextDifference)
    assert shown is None or shown in found.diff


def test_kernels_must_be_those_of_the_plan() -> None:
    pair = changed(("kernel0_scale", "kernel1_scale"))
    assert isinstance(compare_texts(TEXT, pair, [("kernel0_scale", "kernel1_scale")]), Renaming)
    assert isinstance(compare_texts(TEXT, pair, [("kernel0_scale", "kernel0_scale")]), TextDifference)


def test_a_difference_is_shown_without_what_was_renamed() -> None:
    after = changed(("factor", "by"), ("tile", "part"), ("0.0f", "1.0f"))
    diff = compare_texts(TEXT, after).diff
    assert [line[1:].strip() for line in diff if line[0] in "+-" and line[1:3] not in ("++", "--")] == [
        "to[(tile * 4) + i] = max(from[(tile * 4) + i] * factor, 0.0f);",
        "to[(tile * 4) + i] = max(from[(tile * 4) + i] * factor, 1.0f);",
    ]
