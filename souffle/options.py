"""What a caller may ask of the compiler: levels, and the other options with their values."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from souffle.certificate import CHECKS
from souffle.errors import OptionError
from souffle.kernel.grid_barrier import GRID_BARRIERS
from souffle.partition import PLANNERS
from souffle.schedule.gpu.device import device_for

__all__ = ["LEVELS", "PRECISIONS", "REDUCTIONS", "CudaOptions", "Hook", "Level", "check_options", "keep"]


@dataclass(frozen=True)
class Level:
    """What an optimization level does (paper, Table 4). Each adds one thing to the last.

    Attributes
    ----------
    name : str
    horizontal : bool
        Independent isomorphic TEs become one (§6.1).
    vertical : bool
        One-relies-on-one chains become one, and join their neighbours' stages across operators (§6.2).
    merge : bool
        One kernel per subprogram, with grid syncs (§5.4, §6.4); repeated layers and steps are loops in it.
    reuse : bool
        Tensors stay on chip across operators, weights are loaded ahead of barriers (§6.5).
    summary : str
    """

    name: str
    horizontal: bool
    vertical: bool
    merge: bool
    reuse: bool
    summary: str


LEVELS = {
    level.name: level
    for level in (
        Level("V0", False, False, False, False, "TVM's operator fusion, one kernel for each fused operator"),
        Level("V1", True, False, False, False, "V0 + horizontal transformation of independent TEs"),
        Level("V2", True, True, False, False, "V1 + vertical transformation of one-relies-on-one TEs"),
        Level("V3", True, True, True, False, "V2 + one kernel per subprogram, with grid-wide barriers and loops"),
        Level("V4", True, True, True, True, "V3 + on-chip tensor reuse and loads ahead of barriers"),
    )
}

PRECISIONS = ("fp32", "mixed")
REDUCTIONS = ("ordered", "one_phase")

Hook = Callable[[str, object], object]
"""Called between stages with the stage's name and its result; what it returns replaces the result."""


def keep(stage: str, result: object) -> object:
    """The hook that replaces nothing."""
    return result


@dataclass(frozen=True)
class CudaOptions:
    """How to compile for a GPU.

    Attributes
    ----------
    level, arch, precision, partition, grid_barrier, verify : str
        See :func:`souffle.compile`.
    reductions : str
        ``"ordered"``: from V3 on, a reduction may start in the tiles of what it reduces (§6.3), or become two phases
        where it leaves multiprocessors idle; both combine in a fixed order. ``"one_phase"``: none does.
    tuning_log : path, "auto" or None
        See :func:`souffle.compile`.
    cubin : bool
        Whether to run nvcc. Without, the result has CUDA text only, enough for the CPU device.
    cache_dir : Path, optional
        Where cubins are kept by their text's hash.
    progress : callable, optional
        Told in a few words what is being done.
    hook : callable, optional
        Called between stages, see ``docs/debugging.md``.
    """

    level: str = "V4"
    arch: str = "sm_90"
    precision: str = "fp32"
    partition: str = "souffle"
    reductions: str = "ordered"
    grid_barrier: str = "cooperative"
    verify: str = "memory"
    tuning_log: str | os.PathLike | None = None
    cubin: bool = True
    cache_dir: Path | None = None
    progress: Callable[[str], None] = lambda message: None
    hook: Hook = keep


def check_options(
    level: str,
    precision: str,
    partition: str = "souffle",
    arch: str | None = None,
    reductions: str = "ordered",
    verify: str = "memory",
    grid_barrier: str = "cooperative",
) -> Level:
    """The level asked for.

    Raises
    ------
    OptionError
        If an option is not valid, naming those that are.
    """
    for name, value, allowed in (
        ("level", level, tuple(LEVELS)),
        ("precision", precision, PRECISIONS),
        ("partition", partition, tuple(PLANNERS)),
        ("reductions", reductions, REDUCTIONS),
        ("verify", verify, CHECKS),
        ("grid_barrier", grid_barrier, tuple(GRID_BARRIERS)),
    ):
        if value not in allowed:
            raise OptionError(f"{name}={value!r} is not valid; choose one of {', '.join(allowed)}")
    if arch is not None:
        device_for(arch)
    return LEVELS[level]
