"""The search of Figure 6, with a played measure and with nvcc's figures."""

from __future__ import annotations

import pytest

from souffle.codegen.nvcc import find_nvcc
from souffle.codegen.plan import Resources
from souffle.hfuse import (
    Bound,
    FusedKernel,
    FusionError,
    Multiprocessor,
    Part,
    Source,
    compiled_usage,
    fuse,
    multiprocessor_of,
    partitions,
    register_bound,
    search,
)
from tests.hfuse.pairs import HEAD, OUT, launch_of, pair

VOLTA = multiprocessor_of("sm_70")
BODY = f"{HEAD}\n  {OUT}1;\n}}\n"
FIXED = launch_of(block=(256, 1, 1))


def registers(figures: dict[str, int], shared: int = 0):
    """A compiler that says so many registers of each kernel."""

    def usage(text: str, name: str) -> Resources:
        return Resources(figures.get(name, 40), shared if "hfused" in name else 0, 0, 0)

    return usage


def test_the_partitions_of_figure_6() -> None:
    first, second = pair(BODY)
    steps = list(partitions((first, second), 1024))
    assert steps == [(d, 1024 - d) for d in range(128, 1024, 128)]
    assert list(partitions((first, second), 100)) == []
    triples = list(partitions((first, second, first), 1024))
    assert len(triples) == 21 and all(sum(t) == 1024 and min(t) >= 128 for t in triples) and len(set(triples)) == 21
    fixed = Part.of(first.reach.source, None, FIXED)
    assert list(partitions((fixed, fixed), 1024)) == [(256, 256)]
    assert list(partitions((fixed, second), 1024)) == [(256, 768)]
    assert list(partitions((second, fixed), 1024)) == [(768, 256)]
    rows = Part.of(first.reach.source, None, launch_of(block=(None, 48, 1)))
    assert list(partitions((rows, second), 1024)) == [(384, 640), (768, 256)]
    bounded = pair(BODY.replace("void k", "void __launch_bounds__(512) k"))
    assert list(partitions(bounded, 1024)) == [(128, 896), (256, 768), (384, 640), (512, 512)]


@pytest.mark.parametrize(
    ("splits", "used", "shared", "blocks", "bound"),
    [
        # Figure 4's kernels on Pascal and Volta: 32 registers of 1024 threads, two blocks on a multiprocessor.
        ((896, 128), (32, 24), 4096, 2, 32),
        ((768, 256), (40, 24), 4096, 2, 32),
        ((512, 512), (64, 32), 0, 2, 32),
        ((512, 512), (65, 32), 0, 1, 64),  # 65536 // (512 * 65) is 1
        ((512, 512), (32, 32), 60 * 1024, 1, 64),  # the shared memory of one
        ((256, 256), (32, 32), 0, 4, 32),  # the threads of four
        ((256, 256), (120, 32), 0, 2, 64),
        ((896, 128), (255, 32), 0, 1, 64),  # less than one block would be no bound
        ((64, 64), (255, 255), 0, 4, 128),
        ((32, 32), (255, 255), 0, 8, 128),
    ],
)
def test_the_register_bound(
    splits: tuple[int, ...], used: tuple[int, ...], shared: int, blocks: int, bound: int
) -> None:
    made = register_bound(splits, used, shared, VOLTA)
    assert (made.blocks, made.registers) == (blocks, bound)


def test_the_search_takes_the_fastest() -> None:
    parts = pair(BODY)
    asked: list[FusedKernel] = []

    def measure(fused: FusedKernel) -> float:
        asked.append(fused)
        return abs(fused.splits[0] - 640) + (5 if fused.bound is None else 0) + 1.0

    found = search(parts, 1024, measure, usage=registers({"alone_k": 32}), multiprocessor=VOLTA)
    assert [(t.splits, t.registers) for t in found.trials[:4]] == [
        ((128, 896), None),
        ((128, 896), 32),
        ((256, 768), None),
        ((256, 768), 32),
    ]
    assert [t.fused for t in found.trials] == asked and len(asked) == 14
    assert (found.best.splits, found.best.registers, found.best.blocks, found.best.seconds) == ((640, 384), 32, 2, 1.0)
    assert "__launch_bounds__(1024, 2)" in found.best.fused.text


def test_of_equals_the_first_is_taken_as_in_the_figure() -> None:
    found = search(pair(BODY), 512, lambda fused: 1.0, usage=registers({}), multiprocessor=VOLTA)
    assert (found.best.splits, found.best.registers) == ((128, 384), None)


def test_the_bound_is_made_of_what_each_kernel_uses_alone() -> None:
    usage = registers({"alone_k": 100}, shared=40 * 1024)
    found = search(pair(BODY), 512, lambda fused: 1.0, usage=usage, multiprocessor=VOLTA)
    bounds = {trial.splits: (trial.blocks, trial.registers) for trial in found.trials if trial.registers}
    # 65536 // (384 * 100) is 1 for the uneven ones; 2 for 256 threads each, and the shared memory has room for two.
    assert bounds == {(128, 384): (1, 128), (256, 256): (2, 64), (384, 128): (1, 128)}


def test_no_partition() -> None:
    with pytest.raises(FusionError, match="no partition of 100 threads in steps of 128 fits k, k"):
        search(pair(BODY), 100, lambda fused: 1.0, usage=registers({}), multiprocessor=VOLTA)


def test_resident_blocks() -> None:
    hopper = multiprocessor_of("sm_90")
    assert hopper.resident(1024, 0, 32) == 2 and hopper.resident(1024, 0, 33) == 1 and hopper.resident(32, 0, 16) == 32
    assert hopper.resident(128, 100 * 1024, 16) == 2 and VOLTA.resident(128, 48 * 1024, 16) == 2
    assert Multiprocessor(65536, 0, 2048, 32, 0).resident(64, 0, 32) == 32
    with pytest.raises(FusionError, match="the architecture 'sm_1' is not known; known are sm_60"):
        multiprocessor_of("sm_1")


def test_what_nvcc_says() -> None:
    """The bound is in the machine code: nvcc takes no more registers than either way of asking allows."""
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    wide = f"{HEAD}\n  float v[48];\n#pragma unroll\n  for (int i = 0; i < 48; ++i) v[i] = x[i * n + threadIdx.x];\n"
    wide += "  __syncthreads();\n  float s = 0;\n#pragma unroll\n"
    wide += f"  for (int i = 0; i < 48; ++i) s = s * v[i] + v[47 - i];\n  {OUT}s;\n}}\n"
    parts = pair(wide)
    usage = compiled_usage("sm_90")
    free = fuse(parts, (512, 256))
    blocks = fuse(parts, (512, 256), bound=Bound(blocks=2))
    number = fuse(parts, (512, 256), bound=Bound(registers=32))
    used = [usage(fused.text, fused.name).registers for fused in (free, blocks, number)]
    assert used[0] > 42 and used[1] <= 65536 // (2 * 768) and used[2] <= 32
    with pytest.raises(FusionError, match="nvcc made no kernel 'none' of the text; it made hfused_k_k"):
        usage(free.text, "none")


def test_a_source_may_be_read_once_for_all_candidates() -> None:
    source = Source("a.cu", BODY)
    part = Part.of(source)
    texts = {fuse((part, part), splits).text for splits in ((128, 256), (256, 128), (128, 256))}
    assert len(texts) == 2
