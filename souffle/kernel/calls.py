"""Which stages a kernel calls, in which order, and where each argument lies.

Where it waits is decided by :mod:`souffle.kernel.waits`; an epoch is what runs between two waits of all blocks. Tensors
are written once in an epoch, and workspace is reused across epochs only, so that outside of loops reads after writes
are the only conflicts. A loop is one epoch from outside; inside, its stages have epochs of their own, and all blocks
wait for each other before each step unless what steps need of each other stays on one block.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from souffle.cost.kernel import ASKED_TOGETHER
from souffle.decision import Barrier
from souffle.kernel.assignment import Assignment
from souffle.kernel.dependences import TileDependences
from souffle.kernel.tile_bands import TileBand
from souffle.kernel.tile_waits import PlacedFlags, place_flags
from souffle.kernel.waits import Expected, Sequenced, Waits
from souffle.program import Carried, Loop, Tensor
from souffle.program.loop import ALIGNMENT
from souffle.schedule.lower.device_function import DeviceFunction, LoweringError
from souffle.schedule.lower.fewer_threads import fit_functions
from souffle.schedule.lower.kept_loads import KeptLoads
from souffle.schedule.stage import LoopStage, Stage, Unit, Window, flat_stages

__all__ = [
    "ArgumentPlace",
    "CallPlan",
    "KernelShape",
    "LoopCall",
    "StageCall",
    "TensorTouch",
    "TileWait",
    "kernel_of_stage",
    "plan_calls",
]


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
        What fills the registers in which its function finds constants.
    arrive_before : bool
        Whether blocks say before it that they are done with all that stands before (:mod:`souffle.kernel.block_flags`).
    waits : tuple of TileWait
        What each of its tiles waits for.
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

    @property
    def slots(self) -> int:
        """Its tiles, those that a block computes together counted once."""
        return self.assignment.count if self.assignment else max(f.tiles for f in self.functions)


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
    prefetch : tuple of (ArgumentPlace, int)
        What is asked into the L2 cache before the loop, and how many bytes: constants of which each step has its own
        part, and which are small in all (level V4).
    """

    steps: int
    calls: tuple[StageCall, ...]
    sync_first: bool
    prefetch: tuple[tuple[ArgumentPlace, int], ...] = ()


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
    """

    calls: tuple[StageCall | LoopCall, ...]
    parameters: tuple[tuple[str, int], ...]
    blocks_per_sm: int = 1

    @property
    def stage_calls(self) -> Iterator[StageCall]:
        """The calls in the text of the kernel: those of a loop once."""
        for call in self.calls:
            yield from call.calls if isinstance(call, LoopCall) else (call,)

    @property
    def functions(self) -> tuple[DeviceFunction, ...]:
        """What computes stages, as often as it stands in the text."""
        return tuple(f for call in self.stage_calls for f in call.functions)

    @property
    def fills(self) -> tuple[DeviceFunction, ...]:
        """What reads the constants that stages find in registers, each once."""
        return tuple(dict.fromkeys(call.kept.fill for call in self.stage_calls if call.kept))

    @property
    def called(self) -> tuple[DeviceFunction, ...]:
        """All that the kernel calls, each once."""
        return tuple(dict.fromkeys((*self.functions, *self.fills)))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return max(f.threads for f in self.functions)

    @property
    def tiles(self) -> int:
        """Most tiles of a stage, those that a block computes together counted once: more blocks have nothing to do."""
        return max(call.slots for call in self.stage_calls)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: all stages use one pool from its start, and what stays between them lies behind."""
        windows = [place.window.end for call in self.stage_calls for place in call.arguments if place.window]
        return max([*windows, *(f.shared_bytes for f in self.functions)])

    @property
    def ticks(self) -> int:
        """How often each block says that it is done, in all."""
        total = 0
        for call in self.calls:
            if isinstance(call, LoopCall):
                total += call.steps * sum(c.arrive_before for c in call.calls)
            else:
                total += call.arrive_before
        return total

    @property
    def flag_waits(self) -> tuple[tuple[int, int, int], ...]:
        """How often, for how many blocks at most, and before how many slots the tiles of each stage wait for tiles.

        The first that stands behind an arrival comes first; slots are 0 for the others, which find the flags set.
        """
        found, listened = [], set()
        for call in self.calls:
            for stage in call.calls if isinstance(call, LoopCall) else (call,):
                for wait in stage.waits:
                    runs = call.steps if isinstance(call, LoopCall) else 1
                    found.append((runs, 0 if wait.place in listened else wait.band.width, stage.slots))
                    listened.add(wait.place)
        return tuple(found)

    @property
    def grid_syncs(self) -> int:
        """Grid-wide barriers that each block waits at, in all."""
        total = 0
        for call in self.calls:
            if isinstance(call, LoopCall):
                total += call.steps * sum(c.sync_before for c in call.calls)
                total += call.sync_first - call.calls[0].sync_before
            else:
                total += call.sync_before
        return total


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
        What fills the registers in which its function finds constants.
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


@dataclass(frozen=True)
class TensorTouch:
    """A tensor of a kernel that is read or written from epoch `first` to epoch `last`, inclusive.

    Between two epochs all blocks wait for each other. The epochs of one step of a loop count each.
    """

    tensor: Tensor
    first: int
    last: int
    writes: bool


@dataclass(frozen=True, eq=False)
class CallPlan:
    """The stages of a kernel in the order to run, and what its first launch is given.

    Attributes
    ----------
    shape : KernelShape
    stages : tuple of Stage or LoopStage
        By epoch; otherwise in the order given.
    epochs : tuple of int
        For each of `stages`, how many waits for all blocks stand before it, loops counted as one epoch.
    length : int
        Epochs in all, with those of one step of each loop.
    tensors : tuple of Tensor
        For each parameter of the kernel: tensors of the program, or the memory of a loop's carried values.
    touches : tuple of TensorTouch
    barriers : tuple of Barrier
        Why it waits, in the order of its text.
    """

    shape: KernelShape
    stages: tuple[Unit, ...]
    epochs: tuple[int, ...]
    length: int
    tensors: tuple[Tensor, ...]
    touches: tuple[TensorTouch, ...]
    barriers: tuple[Barrier, ...]


def plan_calls(
    stages: Sequence[Unit],
    constants: Mapping[Tensor, object],
    *,
    prefetch: bool,
    blocks_per_sm: int = 1,
    expected: Expected | None = None,
    dependences: TileDependences | None = None,
) -> CallPlan:
    """Decide where a kernel waits, and with which tensors it is launched.

    Parameters
    ----------
    stages : sequence of Stage or LoopStage
        In topological order, lowered.
    constants : mapping of Tensor
        Tensors that no kernel writes.
    prefetch : bool
        Whether weights of the stages after a barrier are prefetched before it.
    blocks_per_sm : int
        See :class:`KernelShape`.
    expected : Expected, optional
        What decides which tiles one block computes together. By default none are.
    dependences : TileDependences, optional
        Those of other kernels of the network, which may be the same.
    """
    waits = Waits(dependences or TileDependences(), expected or Expected())
    return _Planner(constants, prefetch, waits).plan(stages, blocks_per_sm)


class _Planner:
    def __init__(self, constants: Mapping[Tensor, object], prefetch: bool, waits: Waits) -> None:
        self.form: dict[DeviceFunction, DeviceFunction] = {}
        self.constants = constants
        self.prefetch = prefetch
        self.waits = waits
        self.position: dict[Tensor, int] = {}
        self.touches: dict[TensorTouch, None] = {}
        # Where flags are, of the kernel (None) and in its loops; how many arrivals of the text stand before theirs.
        self.flags: dict[LoopStage | None, PlacedFlags] = {}
        self.arrivals: dict[tuple[LoopStage | None, int], int] = {}

    def plan(self, stages: Sequence[Unit], blocks_per_sm: int) -> CallPlan:
        self.form = fit_functions([function for stage in flat_stages(stages) for function in stage.functions])
        bodies = {unit: self.waits.sequence(unit.stages) for unit in stages if isinstance(unit, LoopStage)}
        order = self.waits.sequence(stages)
        between = {unit: self.waits.between_steps(unit, body) for unit, body in bodies.items()}
        self.place_flags(order, bodies, between)
        epochs = self.whole_epochs(order, None)
        calls: list[StageCall | LoopCall] = []
        reasons: list[Barrier] = []
        start = 0
        for epoch in range(max(epochs) + 1):
            units = [unit for unit, at in zip(order.units, epochs, strict=True) if at == epoch]
            loops = [unit for unit in units if isinstance(unit, LoopStage)]
            inner = [max(self.whole_epochs(bodies[unit], unit)) + 1 for unit in loops]
            # Whatever runs beside a loop may run beside any of its stages; so may the stages of two loops.
            span = range(start, start + max(inner, default=1))
            for unit in units:
                barrier = self.exchanged(order.barriers.get(unit), order, unit, None)
                reasons += [barrier] if barrier else []
                if isinstance(unit, LoopStage):
                    body = bodies[unit], between[unit]
                    call, inside = self.loop(unit, *body, span, barrier, alone=len(loops) == 1)
                    calls.append(call)
                    reasons += inside
                else:
                    places = {t: self.fixed(t) for t in (*unit.inputs, *unit.outputs)}
                    calls.append(self.stage(unit, barrier, places, self.constants, None))
                    self.touch(unit.inputs, unit.outputs, span)
            start = span.stop
        tensors = tuple(self.position)
        shape = KernelShape(tuple(calls), tuple((t.dtype, t.nbytes) for t in tensors), blocks_per_sm)
        return CallPlan(shape, order.units, epochs, start, tensors, tuple(self.touches), tuple(reasons))

    # Flags in place of barriers

    def place_flags(
        self, order: Sequenced, bodies: Mapping[LoopStage, Sequenced], between: Mapping[LoopStage, Barrier]
    ) -> None:
        """Decide where flags are, and number their arrivals in the order of the text."""
        expected = self.waits.expected
        if expected.flags == "barriers":
            return
        always = expected.flags == "flags"
        around = {at for unit, at in zip(order.units, order.epochs, strict=True) if isinstance(unit, LoopStage)}
        sites = dict.fromkeys({*order.epochs} - {0} - around, 1)
        crossings = self.waits.crossings(order)
        self.flags[None] = place_flags(sites, crossings, expected.prices, always=always)
        for unit, body in bodies.items():
            steps = between[unit].scope == "grid"
            sites = dict.fromkeys({*body.epochs} - {0}, unit.loop.steps)
            if steps:
                # All blocks wait for each other before the first step in any case.
                sites[0] = unit.loop.steps - 1
            crossings = self.waits.crossings_of_steps(unit, body, between=steps)
            runs = unit.loop.steps
            self.flags[unit] = place_flags(sites, crossings, expected.prices, runs=runs, always=always)
        seen = 0
        for unit, at in zip(order.units, order.epochs, strict=True):
            if at != seen and at in self.flags[None].heard:
                self.arrivals[None, at] = len(self.arrivals)
            seen = at
            if isinstance(unit, LoopStage):
                for site in sorted(self.flags[unit].heard):
                    self.arrivals[unit, site] = len(self.arrivals)

    def whole_epochs(self, order: Sequenced, loop: LoopStage | None) -> tuple[int, ...]:
        """For each unit, how many barriers of all blocks stand before it."""
        flags = self.flags[loop].sites if loop in self.flags else ()
        return tuple(at - sum(1 for site in flags if 0 < site <= at) for at in order.epochs)

    def exchanged(
        self, barrier: Barrier | None, order: Sequenced, unit: Unit, loop: LoopStage | None
    ) -> Barrier | None:
        """The barrier before a unit, or what stands in its place."""
        if barrier is None or barrier.scope != "grid" or loop not in self.flags:
            return barrier
        site = order.epochs[order.units.index(unit)]
        if site not in self.flags[loop].sites:
            return barrier
        return replace(barrier, scope="flags" if site in self.flags[loop].heard else "block")

    def waiting(self, stage: Stage, loop: LoopStage | None) -> tuple[TileWait, ...]:
        """What the tiles of a stage wait for."""
        found = self.flags[loop].waits.get(stage, ()) if loop in self.flags else ()
        return tuple(TileWait(self.arrivals[loop, wait.site], wait.ago, wait.band) for wait in found)

    # Calls

    def stage(
        self,
        stage: Stage,
        barrier: Barrier | None,
        places: Mapping[Tensor, ArgumentPlace],
        weights: Container[Tensor],
        loop: LoopStage | None,
    ) -> StageCall:
        """The call of a stage; `weights` are worth a prefetch."""
        scope = barrier.scope if barrier else ""
        ahead = self.prefetch and barrier is not None
        kept = () if stage.kept is None else tuple(stage.inputs[number] for number in stage.kept.reads)
        wanted = [tensor for tensor in stage.inputs if tensor in weights and tensor not in kept]
        prefetch = tuple((places[t], t.nbytes) for t in wanted) if ahead else ()
        windows = dict(stage.windows)
        arguments = tuple(replace(places[t], window=windows.get(t)) for t in (*stage.inputs, *stage.outputs))
        assignment = self.waits.assignments.get(stage)
        functions = tuple(self.form[function] for function in stage.functions)
        own = scope == "grid", prefetch, scope == "block", assignment, stage.kept, scope == "flags"
        return StageCall(functions, arguments, *own, self.waiting(stage, loop))

    def loop(
        self, unit: LoopStage, body: Sequenced, steps: Barrier, span: range, before: Barrier | None, *, alone: bool
    ) -> tuple[LoopCall, list[Barrier]]:
        """The call of a loop, and why it waits inside; `alone` says whether no other loop runs beside it."""
        loop = unit.loop
        places = self.places(loop, span)
        self.touch(loop.inputs, loop.outputs, span)
        # What every step reads again is in the cache after the first.
        parts = {p.tensor: p.source for p in loop.indexed if p.source in self.constants}
        small = dict.fromkeys(source for source in parts.values() if source.nbytes <= ASKED_TOGETHER)
        # What begins further on in one tensor at each step ends beyond it in the last ones.
        own = {p.tensor for p in loop.indexed if p.tensor.nbytes <= p.stride * p.tensor.itemsize}
        weights = {tensor for tensor, source in parts.items() if source not in small and tensor in own}
        barriers = {**body.barriers, body.units[0]: steps}
        barriers = {stage: self.exchanged(barrier, body, stage, unit) for stage, barrier in barriers.items()}
        steps = barriers[body.units[0]]
        # Without a wait of all blocks between steps, one may be a step ahead.
        apart = alone and steps.scope == "grid"
        calls = []
        inside: set[Tensor] = set()
        for stage, at in zip(body.units, self.whole_epochs(body, unit), strict=True):
            for tensor in (*stage.inputs, *stage.outputs):
                if tensor not in places:
                    places[tensor] = self.fixed(tensor)
                    inside.update({tensor} & {*stage.outputs})
                if tensor in inside:
                    here = range(span.start + at, span.start + at + 1) if apart else span
                    self.touch((), (tensor,), here)
            calls.append(self.stage(stage, barriers.get(stage), places, weights, unit))
        runs = {body.units[0]: loop.steps - 1} if steps.scope == "grid" else {}
        reasons = [
            replace(barriers[stage], runs=runs.get(stage, loop.steps)) for stage in body.units if stage in barriers
        ]
        ahead = tuple((self.fixed(source), source.nbytes) for source in small) if self.prefetch else ()
        return LoopCall(loop.steps, tuple(calls), before is not None, ahead), reasons

    def places(self, loop: Loop, span: range) -> dict[Tensor, ArgumentPlace]:
        """Where the loop's parameters and results lie at each step."""
        _check_alignment(loop)
        places = {p.tensor: ArgumentPlace(self.fixed(p.source).parameter, p.stride) for p in loop.indexed}
        kept = {c.value: c for c in loop.collected}
        longest: dict[Tensor, int] = {}
        for c in loop.carried:
            longest[c.value] = max(longest.get(c.value, 0), c.distance)
        homes: dict[Tensor, ArgumentPlace] = {}
        for value in dict.fromkeys([*longest, *kept]):
            result = kept.get(value)
            if result is not None and result.every:
                homes[value] = ArgumentPlace(self.fixed(result.tensor).parameter, value.size)
            elif value in longest:
                ring = _ring(value, longest[value] + 1)
                last = None if result is None else self.fixed(result.tensor).parameter
                stride = ring.size // (longest[value] + 1)
                homes[value] = ArgumentPlace(self.fixed(ring).parameter, stride, longest[value] + 1, last=last)
                self.touch((), (ring,), span)
            else:
                homes[value] = self.fixed(result.tensor)
        places.update(homes)
        places.update({c.tensor: self.carried(c, homes[c.value]) for c in loop.carried})
        return places

    def carried(self, carried: Carried, home: ArgumentPlace) -> ArgumentPlace:
        """Where what an earlier step has left lies."""
        first = tuple(self.fixed(tensor).parameter for tensor in carried.initial)
        return ArgumentPlace(home.parameter, home.stride, home.ring, first)

    def fixed(self, tensor: Tensor) -> ArgumentPlace:
        return ArgumentPlace(self.position.setdefault(tensor, len(self.position)))

    def touch(self, reads: Sequence[Tensor], writes: Sequence[Tensor], span: range) -> None:
        self.touches.update(dict.fromkeys(TensorTouch(t, span.start, span.stop - 1, False) for t in reads))
        self.touches.update(dict.fromkeys(TensorTouch(t, span.start, span.stop - 1, True) for t in writes))


def _ring(value: Tensor, slots: int) -> Tensor:
    """The memory of a carried value: as many parts as steps are needed at once."""
    part = -(-value.nbytes // ALIGNMENT) * ALIGNMENT // value.itemsize
    return Tensor(f"{value.name}_ring", (slots, part), value.dtype)


def _check_alignment(loop: Loop) -> None:
    """What :func:`souffle.transform.roll` makes is aligned; a loop built by hand may not be."""
    moves = [(p.source, p.stride * p.source.itemsize) for p in loop.indexed]
    moves += [(c.tensor, c.value.nbytes) for c in loop.collected if c.every]
    for tensor, stride in moves:
        if stride % ALIGNMENT:
            raise LoweringError(
                f"loop {loop.name} moves {stride} bytes further in {tensor} in each step; wide reads and writes need a "
                f"multiple of {ALIGNMENT}"
            )
