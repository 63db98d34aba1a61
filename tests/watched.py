"""A small network of a loop whose steps wait for all blocks, compiled with a limit."""

from __future__ import annotations

import numpy as np

from souffle.codegen.assemble import CompiledKernels
from souffle.kernel.grid_barrier import WATCHED_FUNCTION
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from tests.testlib import Builder

__all__ = ["CALL", "STEPS", "looped", "watched"]

CALL = f"{WATCHED_FUNCTION}(grid_state, num_blocks, grid_record,"
"""How a wait begins in the text of a kernel."""

STEPS = 6
"""Of the loop; before it a stage stands alone."""


def looped() -> TEProgram:
    """Products of equal shape, each of which reads what all blocks have written."""
    b, random = Builder(), np.random.default_rng(0)
    x = b.input(64, 64)
    x = b.matmul(x, b.constant(random.standard_normal((64, 64)).astype(np.float32)))
    for _ in range(STEPS):
        x = b.tanh(b.matmul(x, b.constant(random.standard_normal((64, 64)).astype(np.float32))))
    return b.program(x)


def watched(level: str, watchdog_ms: float | None) -> CompiledKernels:
    """Compiled with the counter; without a limit where that is None."""
    return compile_cuda(
        looped(), level=level, arch="sm_90", cubin=False, grid_barrier="counter", watchdog_ms=watchdog_ms
    )
