"""What a caller may ask of the compiler: levels, and the other options with their values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from souffle.certificate import CHECKS
from souffle.errors import OptionError

__all__ = [
    "BARRIERS",
    "CHOICES",
    "GATHERED",
    "GRID_BARRIER_NAMES",
    "INTEGERS",
    "LEVELS",
    "ON_CHIP",
    "PRECISIONS",
    "REDUCTIONS",
    "REUSE_POLICIES",
    "SOUFFLE",
    "SWITCHES",
    "WAITS",
    "WINOGRAD",
    "Hook",
    "LateHook",
    "Level",
    "Options",
    "Progress",
    "Waiting",
    "checked_threads",
    "keep",
    "quiet",
]


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

ON_CHIP = (
    *("attention", "normalization", "interleaving", "channels", "reuse", "resident", "ramps", "weights", "teams"),
    *("hfuse", "prologues"),
)
"""What keeps tensors on chip at V4, and teams from V3 on, each of which can be left out alone: a product, what follows
it in rows and a second product in one stage; normalizations that become part of the products around them; sums of which
an element needs several, such as a cell's gates, computed with it; tiles that own their channels through several
operators; stages joined whose tiles match; tensors that stay in a block's shared memory from one stage to a later one;
partial steps before and after a loop that become steps of it; constants that stay on chip for all its steps; blocks
of a multiprocessor that are one, so that fewer wait for each other and tiles are spread evenly; independent stages
that different blocks, or different threads of each block, compute at the same time (HFuse); and the first tiles of a
product's weights, which are copied to shared memory while blocks wait for its activations."""

INTEGERS = "integers"
"""Products on the integers that numbers were dequantized from; at every level, as it is the import that does it."""

WINOGRAD = "winograd"
"""Convolutions by minimal filtering, on the CPU target."""

GATHERED = "gathered"
"""Independent products with the same weights as one, on the CPU target."""

SWITCHES = (*ON_CHIP, INTEGERS, WINOGRAD, GATHERED)
"""What can be left out by its name."""

REUSE_POLICIES = ("belady", "lru")
"""Which tensors stay there while there is room: those needed soonest, or those used last (the paper's)."""

SOUFFLE = "souffle"
"""The fusion of Souffle itself: its own rules say which TEs are a stage."""

PRECISIONS = ("fp32", "tf32x3", "tf32", "mixed")
REDUCTIONS = ("ordered", "one_phase")
GRID_BARRIER_NAMES = ("cooperative", "counter")
_LEAST_MS, _MOST_MS = 1e-3, 1e9
_MOST_THREADS = 1024

WAITS = ("auto", "barriers", "flags")
"""What stands between dependent stages of a kernel: see :func:`souffle.compile`."""

CHOICES: dict[str, tuple[str, ...]] = {
    "level": tuple(LEVELS),
    "precision": PRECISIONS,
    "reductions": REDUCTIONS,
    "verify": CHECKS,
    "grid_barrier": GRID_BARRIER_NAMES,
    "waits": WAITS,
    "reuse_policy": REUSE_POLICIES,
}
"""The options of :class:`Options` that have one of a few values, and these; planners are looked up by their names."""


@dataclass(frozen=True)
class Waiting:
    """What may stand between the stages of a kernel.

    Attributes
    ----------
    flags : str
        One of :data:`WAITS`.
    teams : bool
        Whether blocks that share a multiprocessor may be one block, where that makes barriers cheaper.
    side_by_side : bool
        Whether independent stages between two barriers may be computed at the same time.
    prologues : bool
        Whether blocks copy the first weights of the stage behind a barrier while they wait.
    """

    flags: str
    teams: bool
    side_by_side: bool = False
    prologues: bool = False


BARRIERS = Waiting("barriers", teams=False)
"""The paper's."""

Hook = Callable[[str, object], object]
"""Called between stages with the stage's name and its result; what it returns replaces the result."""


Progress = Callable[[str], None]
"""Told in a few words what is being done."""


def keep(stage: str, result: object) -> object:
    """The hook that replaces nothing."""
    return result


@dataclass(frozen=True)
class LateHook:
    """A hook for what comes when stages and kernels are settled: ``"partition"``, ``"merge"`` and ``"text"``.

    A plain hook sees each way to stages that is tried, so that what is taken is made once more where it is not the
    last; for this one nothing is.

    Attributes
    ----------
    hook : callable
    """

    hook: Hook

    def __call__(self, stage: str, result: object) -> object:
        return self.hook(stage, result)


def quiet(message: str) -> None:
    """The progress that nobody is told of."""


def checked_threads(threads: object) -> int:
    """A number of threads that a caller gave.

    Raises
    ------
    OptionError
        If it is none.
    """
    if isinstance(threads, bool) or not isinstance(threads, Integral) or not 1 <= threads <= _MOST_THREADS:
        raise OptionError(
            f"threads={threads!r} is not valid; give a whole number from 1 to {_MOST_THREADS}, or None for all cores "
            "that the process may use"
        )
    return int(threads)


@dataclass(frozen=True)
class Options:
    """How a model is compiled: made once from what the caller says, checked as it is made, and kept in the plan.

    Attributes
    ----------
    level, precision, waits, verify : str
        See :func:`souffle.compile`.
    grid_barrier : str
        See :func:`souffle.compile`.
    watchdog_ms : float or None
        After how many milliseconds a wait of a kernel is over (:mod:`souffle.kernel.watchdog`); None for no limit.
    graph : bool
        Whether the network is to run as one CUDA graph: what a kernel's launch costs depends on it, and with that where
        kernels end.
    disable : tuple of str
        Names of :data:`SWITCHES` that are left out; kept in their order there, each once.
    reuse_policy : str
        One of :data:`REUSE_POLICIES`.
    fusion : str
        See :func:`souffle.compile`; ``"souffle"``, or the planner of that name, which is looked up by
        :func:`souffle.stitching.fusion_planner_for`.
    policy : path or None
        A file for planners that are trained; None for the one that ships. Not kept in files.
    partition : str
        See :func:`souffle.compile`; the planner of that name is looked up by :func:`souffle.partition.planner_for`.
    arch : str
        Such as ``"sm_90"``; looked up by :func:`souffle.schedule.gpu.device.device_for`.
    reductions : str
        ``"ordered"``: from V3 on, a reduction may start in the tiles of what it reduces (§6.3), or become two phases
        where it leaves multiprocessors idle; both combine in a fixed order. ``"one_phase"``: none does.
    threads : int or None
        Of calls on the processor; see :func:`souffle.compile`.
    processor : str or None
        That LLVM compiles for; None for this machine's. Looked up by :func:`souffle.schedule.cpu.host_target`; files
        have it in `arch`.
    tuning_log : path, "auto" or None
        See :func:`souffle.compile`. Not kept in files, as are the two below.
    cubin : bool
        Whether to run nvcc. Without, the result has CUDA text only, enough for the CPU device.
    cache_dir : Path, optional
        Where cubins are kept by their text's hash.

    Raises
    ------
    OptionError
        If a value is none of those that there are, naming these.
    """

    level: str = "V4"
    precision: str = "fp32"
    fusion: str = SOUFFLE
    policy: str | os.PathLike | None = None
    partition: str = "souffle"
    arch: str = "sm_90"
    reductions: str = "ordered"
    grid_barrier: str = "counter"
    waits: str = "auto"
    disable: Sequence[str] = ()
    reuse_policy: str = "belady"
    graph: bool = False
    watchdog_ms: float | None = None
    threads: int | None = None
    processor: str | None = None
    verify: str = "memory"
    tuning_log: str | os.PathLike | None = None
    cubin: bool = True
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        self._check_waits()
        object.__setattr__(self, "threads", None if self.threads is None else checked_threads(self.threads))
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise OptionError(f"{name}={value!r} is not valid; choose one of {', '.join(allowed)}")
        given = self.disable
        wrong = given if isinstance(given, str) else next((name for name in given if name not in SWITCHES), None)
        if wrong is not None:
            raise OptionError(f"disable={given!r} is not valid; give a list of names among {', '.join(SWITCHES)}")
        if self.policy is not None and self.fusion == SOUFFLE:
            raise OptionError(
                f"policy={os.fspath(self.policy)!r} is for a fusion planner that is trained; "
                'give fusion="learned" with it'
            )
        object.__setattr__(self, "disable", tuple(name for name in SWITCHES if name in given))

    def _check_waits(self) -> None:
        limit = self.watchdog_ms
        if limit is not None:
            number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if not (number and math.isfinite(limit) and _LEAST_MS <= limit <= _MOST_MS):
                raise OptionError(
                    f"watchdog_ms={limit!r} is not valid; give milliseconds from {_LEAST_MS:g} to {_MOST_MS:g}, or "
                    "None for waits without a limit"
                )
            if self.grid_barrier == "cooperative":
                raise OptionError(
                    f'watchdog_ms={limit!r} needs grid_barrier="counter", the default: a wait of cooperative groups '
                    "cannot be left"
                )
            object.__setattr__(self, "watchdog_ms", float(limit))

    @property
    def waiting(self) -> Waiting:
        """What stands between stages: flags by price at V4 only; levels below have the paper's barriers.

        Blocks of several teams are how a merged kernel lies on the device, at V3 too: of several blocks on each
        multiprocessor, a cooperative launch puts the first ones together.
        """
        level = LEVELS[self.level]
        flags = "barriers" if self.waits == "auto" and not level.reuse else self.waits
        on_chip = self.on_chip
        teams = level.merge and "teams" not in self.disable
        return Waiting(flags, teams, "hfuse" in on_chip, "prologues" in on_chip)

    @property
    def on_chip(self) -> frozenset[str]:
        """The names of :data:`ON_CHIP` that the level and `disable` leave on."""
        return frozenset(ON_CHIP).difference(self.disable) if LEVELS[self.level].reuse else frozenset()
