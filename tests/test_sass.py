"""Counting machine instructions: kernels whose instructions are known are counted right."""

from __future__ import annotations

import pytest

from benchmarks.sass import self_test
from souffle.codegen.nvcc import find_nvcc


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_known_instructions(arch: str) -> None:
    assert self_test(arch) is None
