"""What a kernel is: which stages it calls, in which order, where each argument lies and where it waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from souffle.kernel.assignment import Assignment
from souffle.kernel.tile_bands import TileBand
from souffle.schedule.lower.device_function import DeviceFunction
from souffle.schedule.lower.fewer_threads import fit_functions
from souffle.schedule.lower.kept_loads import KeptLoads
from souffle.schedule.lower.prologues import Prologue, prologue_by_teams
from souffle.schedule.lower.shares import ALL_WORKERS, Share
from souffle.schedule.lower.teams import Teams, kept_by_teams, team_function
from souffle.schedule.resources import aligned, with_constants
from souffle.schedule.stage import Window

__all__ = ["ArgumentPlace", "KernelShape", "LoopCall", "StageCall", "TileWait", "kernel_of_stage"]


@dataclass(frozen=True)
class ArgumentPlace:
    """Where an argument of a stage lies: a parameter of the kernel, or a part of one that the step of a loop chooses.

    At step ``s`` of a loop of ``n`` steps it is ``first[s]`` where that is given, `last` where that is given and ``s``
    is ``n - 1``, and otherwise element ``((s - len(first)) % ring) * stride`` of `parameter`.

    Attributes
    ----------
    parameter : int
        Of the kernel.
    stride : int
        Elements from one step's part to the next one's; 0 outside of loops.
    ring : int
        Parts that take turns; 0 where every step has its own.
    first : tuple of int
        Parameters for the first steps.
    last : int or None
        The parameter for the last step.
    window : Window or None
        Where the parts of a block's tiles lie instead, as far as it has room for them.
    """

    parameter: int
    stride: int = 0
    ring: int = 0
    first: tuple[int, ...] = ()
    last: int | None = None
    window: Window | None = None


@dataclass(frozen=True)
class TileWait:
    """A tile waits until the blocks of some slots have arrived.

    Attributes
    ----------
    place : int
        Which arrival of the kernel's text it is.
    ago : int
        How many steps of the loop ago.
    band : TileBand
        The slots, for the slot that waits.
    """

    place: int
    ago: int
    band: TileBand


@dataclass(frozen=True)
class StageCall:
    """One stage of a kernel.

    Attributes
    ----------
    functions : tuple of DeviceFunction
        What :func:`souffle.schedule.lower.lower_stage` gave for it, in the form that the kernel's threads ask for
        (:func:`souffle.schedule.lower.fewer_threads.fit_functions`).
    arguments : tuple of ArgumentPlace
        One for each parameter of the stage.
    sync_before : bool
        Whether a grid sync stands before it.
    prefetch : tuple of (ArgumentPlace, int)
        What is asked into the L2 cache before the barrier that this stage waits at, and how many bytes (level V4,
        paper §6.5).
    block_sync_before : bool
        Whether a block barrier stands before it.
    assignment : Assignment or None
        Which tiles a block computes together; ``None`` for each alone.
    kept : KeptLoads or None
        What fills the registers, or the shared memory, in which its function finds constants.
    arrive_before : bool
        Whether blocks say before it that they are done with all that stands before (:mod:`souffle.kernel.block_flags`).
    waits : tuple of TileWait
        What each of its tiles waits for.
    share : Share
        Which workers compute its tiles.
    prologue : Prologue or None
        Its function in two, of which `functions` has the rest: the copies of each worker's first tile are made while
        it waits at the grid sync.
    """

    functions: tuple[DeviceFunction, ...]
    arguments: tuple[ArgumentPlace, ...]
    sync_before: bool = False
    prefetch: tuple[tuple[ArgumentPlace, int], ...] = ()
    block_sync_before: bool = False
    assignment: Assignment | None = None
    kept: KeptLoads | None = None
    arrive_before: bool = False
    waits: tuple[TileWait, ...] = ()
    share: Share = ALL_WORKERS
    prologue: Prologue | None = None

    @property
    def slots(self) -> int:
        """Its tiles, those that a block computes together counted once."""
        return self.assignment.count if self.assignment else max(f.tiles for f in self.functions)

    @property
    def wholes(self) -> tuple[DeviceFunction, ...]:
        """Its functions as they would be without a prologue."""
        return self.functions if self.prologue is None else (self.prologue.whole,)

    @property
    def shared_bytes(self) -> int:
        """Of a worker's pool, and the ends of tensors that stay between stages; parts have theirs of a whole block."""
        if self.share.part is not None:
            return 0
        windows = [place.window.end for place in self.arguments if place.window]
        return max([*windows, *(f.shared_bytes for f in self.functions)])


@dataclass(frozen=True)
class LoopCall:
    """Stages that a kernel runs several times.

    Attributes
    ----------
    steps : int
    calls : tuple of StageCall
        The first has a grid sync or a block barrier before it, which separates the steps.
    sync_first : bool
        Whether a grid sync stands before the first step.
    block_sync_first : bool
        Whether a block barrier does.
    prefetch : tuple of (ArgumentPlace, int)
        What is asked into the L2 cache before the loop, and how many bytes: constants of which each step has its own
        part, and which are small in all (level V4).
    """

    steps: int
    calls: tuple[StageCall, ...]
    sync_first: bool
    prefetch: tuple[tuple[ArgumentPlace, int], ...] = ()
    block_sync_first: bool = False

    @property
    def kept_places(self) -> dict[int, tuple[int, ...]]:
        """By the numbers of stages that have constants in shared memory, where their arrays begin there.

        That is behind all else that stages of the loop have in it. What other stages have there is before the loop
        or after it, and may lie at the same place.
        """
        found: dict[int, tuple[int, ...]] = {}
        end = aligned(max(call.shared_bytes for call in self.calls))
        for number, call in enumerate(self.calls):
            if call.kept is not None and call.kept.shared_bytes:
                found[number] = tuple(accumulate(call.kept.sizes[:-1], initial=end))
                end += call.kept.shared_bytes
        return found

    @property
    def shared_bytes(self) -> int:
        """Of a block, for its stages and for their constants."""
        stages = max(call.shared_bytes for call in self.calls)
        constants = sum(call.kept.shared_bytes for call in self.calls if call.kept)
        return with_constants(stages, constants)


@dataclass(frozen=True)
class KernelShape:
    """A kernel up to the tensors that it is launched with: equal shapes are one kernel launched several times.

    Attributes
    ----------
    calls : tuple of StageCall or LoopCall
    parameters : tuple of (str, int)
        Type and bytes of each tensor parameter.
    blocks_per_sm : int
        Blocks that a multiprocessor must hold at once, which bounds the registers of a thread; 1 bounds nothing.
    teams : Teams or None
        Of each block; without, a block computes tiles as a whole.
    """

    calls: tuple[StageCall | LoopCall, ...]
    parameters: tuple[tuple[str, int], ...]
    blocks_per_sm: int = 1
    teams: Teams | None = None

    def in_teams(self, count: int) -> KernelShape:
        """The same with blocks that are so many of these: each computes tiles as a block did."""
        teams = Teams(count, self.threads, aligned(max(call.shared_bytes for call in self.calls)))
        blocks = max(1, self.blocks_per_sm // count)
        return replace(
            self, calls=tuple(_in_teams(call, teams) for call in self.calls), teams=teams, blocks_per_sm=blocks
        )

    @property
    def stage_calls(self) -> Iterator[StageCall]:
        """The calls in the text of the kernel: those of a loop once."""
        return (call for call, _ in self.runs)

    @property
    def functions(self) -> tuple[DeviceFunction, ...]:
        """What computes stages, as often as it stands in the text."""
        return tuple(f for call in self.stage_calls for f in call.functions)

    @property
    def wholes(self) -> tuple[DeviceFunction, ...]:
        """What computes stages with all of their copies, as often as it stands in the text."""
        return tuple(f for call in self.stage_calls for f in call.wholes)

    @property
    def fills(self) -> tuple[DeviceFunction, ...]:
        """What reads the constants that stages find on chip, each once."""
        return tuple(dict.fromkeys(call.kept.fill for call in self.stage_calls if call.kept))

    @property
    def prologues(self) -> tuple[DeviceFunction, ...]:
        """What makes the first copies of stages while blocks wait, each once."""
        return tuple(dict.fromkeys(call.prologue.copies for call in self.stage_calls if call.prologue))

    @property
    def called(self) -> tuple[DeviceFunction, ...]:
        """All that the kernel calls, each once."""
        return tuple(dict.fromkeys((*self.functions, *self.fills, *self.prologues)))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.team_threads * self.team_count

    @property
    def team_count(self) -> int:
        """Teams of a block."""
        return self.teams.count if self.teams else 1

    @property
    def team_threads(self) -> int:
        """Threads that compute a tile."""
        return max(
            c.share.part.team_threads if c.share.part else f.threads for c in self.stage_calls for f in c.functions
        )

    @property
    def tiles(self) -> int:
        """Most tiles of a stage, those that a block computes together counted once: more blocks have nothing to do.

        Those of stages in block space count together.
        """
        return max(call.slots + call.share.shift for call in self.stage_calls)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: all stages use one pool from its start, and what stays between them lies behind.

        Each team has its own.
        """
        parts = [call.share.part.end for call in self.stage_calls if call.share.part]
        if self.teams:
            return max(self.teams.count * self.teams.shared_bytes, *parts, 0)
        return max(*parts, *(call.shared_bytes for call in self.calls), 0)

    @property
    def runs(self) -> Iterator[tuple[StageCall, int]]:
        """The calls in the text of the kernel, each with how often it is made in a launch."""
        for call in self.calls:
            steps = call.steps if isinstance(call, LoopCall) else 1
            yield from ((stage, steps) for stage in (call.calls if isinstance(call, LoopCall) else (call,)))

    @property
    def ticks(self) -> int:
        """How often each block says that it is done, in all."""
        return sum(runs * call.arrive_before for call, runs in self.runs)

    @property
    def block_syncs(self) -> int:
        """Block barriers between stages, in all."""
        loops = sum(isinstance(call, LoopCall) and call.block_sync_first for call in self.calls)
        return loops + sum(runs * call.block_sync_before for call, runs in self.runs)

    @property
    def flag_waits(self) -> tuple[tuple[int, int, int], ...]:
        """How often the tiles of a stage wait for tiles, for how many blocks at most, and before how many slots.

        Of those that wait for one arrival, the first in the text has the blocks; the others have 0, for they find the
        flags set.
        """
        found, heard = [], set()
        for call, runs in self.runs:
            for wait in call.waits:
                found.append((runs, 0 if wait.place in heard else wait.band.width, call.slots))
                heard.add(wait.place)
        return tuple(found)

    @property
    def waits(self) -> bool:
        """Whether blocks wait for each other."""
        return self.grid_syncs > 0 or self.ticks > 0

    @property
    def grid_syncs(self) -> int:
        """Grid-wide barriers that each block waits at, in all."""
        # A loop that waits between its steps alone may wait before the first, too.
        loops = (call for call in self.calls if isinstance(call, LoopCall))
        before = sum(call.sync_first - call.calls[0].sync_before for call in loops)
        return before + sum(runs * call.sync_before for call, runs in self.runs)


def _in_teams(call: StageCall | LoopCall, teams: Teams) -> StageCall | LoopCall:
    if isinstance(call, LoopCall):
        return replace(call, calls=tuple(_in_teams(stage, teams) for stage in call.calls))
    if call.share.part is not None:
        return call
    kept = call.kept and kept_by_teams(call.kept, teams)
    prologue = call.prologue and prologue_by_teams(call.prologue, teams)
    functions = tuple(team_function(f, teams) for f in call.functions) if prologue is None else (prologue.rest,)
    return replace(call, functions=functions, kept=kept, prologue=prologue)


_STEPS_ALONE = 100
"""Of the loop around a stage alone that keeps its constants: too many to be unrolled."""


def kernel_of_stage(
    functions: Sequence[DeviceFunction],
    parameters: Sequence[tuple[str, int]],
    prefix: str,
    kept: KeptLoads | None = None,
) -> KernelShape:
    """A kernel of one stage; a loop over it, if it keeps constants.

    Parameters
    ----------
    functions : sequence of DeviceFunction
        The stage's.
    parameters : sequence of (str, int)
        Type and bytes of each tensor that it takes.
    prefix : str
        Of the functions' names, which are numbered.
    kept : KeptLoads, optional
        What fills the registers, or the shared memory, in which its function finds constants.
    """
    if kept is not None:
        named_kept = kept.named(prefix)
        places = tuple(ArgumentPlace(number) for number in range(len(parameters)))
        call = StageCall((named_kept.use,), places, kept=named_kept)
        return KernelShape((LoopCall(_STEPS_ALONE, (call,), False),), tuple(parameters))
    form = fit_functions(functions)
    named = tuple(replace(form[function], name=f"{prefix}{number}") for number, function in enumerate(functions))
    places = tuple(ArgumentPlace(number) for number in range(len(parameters)))
    return KernelShape((StageCall(named, places),), tuple(parameters))
