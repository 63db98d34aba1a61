"""Random kernels fused in pairs and triples give the bits of the kernels alone, and wrong fused kernels do not."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.hfuse import SPACES, FusedKernel, Part, Source, check, fuse
from tests.hfuse.mutants import KINDS, mutants
from tests.hfuse.random_kernels import random_kernel
from tests.thorough import sized

SEEDS = range(sized(2, 6))
MUTATED = (505,)
UNSURE = ("no barrier", "barrier id", "shared offset")
"""Whether these change anything is a matter of which threads come first."""


def fused_of(seed: int, space: str | None = None) -> FusedKernel:
    """Two or three random kernels, at random numbers of threads."""
    draw = random.Random(seed)
    parts = []
    for index in range(2 if draw.random() < 0.75 else 3):
        made = random_kernel(seed * 10 + index)
        parts.append(Part.of(Source(f"{'abc'[index]}.cu", made.text), None, made.launch))
    space = space or draw.choice((*SPACES, "thread", "thread"))
    splits = [p.threads or p.granule * draw.randint(1, max(1, min(8, 320 // p.granule))) for p in parts]
    return fuse(parts, splits, space=space)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bits_of_the_kernels_alone(seed: int, tmp_path: Path) -> None:
    result = check(fused_of(seed), orders=2, seed=seed, cache_dir=tmp_path)
    assert result.ok, [str(difference) for difference in result.differences]


def test_mutants_are_noticed(tmp_path: Path) -> None:
    noticed: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for seed in MUTATED:
        for kind, mutant in mutants(fused_of(seed, "thread")):
            made[kind] += 1
            noticed[kind] += not check(mutant, orders=2, seed=seed, cache_dir=tmp_path).ok
    assert set(made) == set(KINDS)
    certain = [kind for kind in KINDS if kind not in UNSURE]
    assert {kind: noticed[kind] for kind in certain} == {kind: made[kind] for kind in certain}
    assert sum(noticed[kind] for kind in UNSURE) >= 0.75 * sum(made[kind] for kind in UNSURE)


def test_nvcc_compiles_them() -> None:
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    for seed in list(SEEDS)[:3]:
        fused = fused_of(seed)
        assert list(compile_cubin(fused.text, "sm_90")[1]) == [fused.name]
