"""Which stages a kernel calls, in which order, and where each argument lies.

Where it waits is decided by :mod:`souffle.kernel.waits`; an epoch is what runs between two waits of all blocks. Tensors
are written once in an epoch, and workspace is reused across epochs only, so that outside of loops reads after writes
are the only conflicts. A loop is in one epoch from outside, that of what stands around it where nothing that the two
need of each other leaves its block; inside, its stages have epochs of their own, and all blocks wait for each other
before each step unless what steps need of each other stays on one block.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from souffle.cost.kernel import ASKED_TOGETHER
from souffle.decision import Barrier, Decision
from souffle.kernel.block_parts import parts_together
from souffle.kernel.dependences import TileDependences
from souffle.kernel.kernel_shape import ArgumentPlace, KernelShape, LoopCall, StageCall, TileWait
from souffle.kernel.tile_waits import PlacedFlags, place_flags
from souffle.kernel.waits import Expected, Sequenced, Waits
from souffle.program import Carried, Loop, Tensor
from souffle.program.loop import ALIGNMENT
from souffle.schedule.group import Group
from souffle.schedule.lower.device_function import DeviceFunction, LoweringError
from souffle.schedule.lower.fewer_threads import fit_functions
from souffle.schedule.lower.prologues import prologue_of
from souffle.schedule.lower.shares import ALL_WORKERS
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages

__all__ = ["CallPlan", "EpochOrder", "TensorTouch", "plan_calls"]


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """Units between whose epochs all blocks wait for each other: those of a kernel, or the stages of a loop.

    Attributes
    ----------
    units : tuple of Stage or LoopStage
    epochs : tuple of int
    free : frozenset of Stage
        Stages whose tiles may be computed by any blocks: nothing that others do in their epochs stays with them.
    runs : int
        Of each of them.
    """

    units: tuple[Unit, ...]
    epochs: tuple[int, ...]
    free: frozenset[Stage]
    runs: int


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
    decisions : tuple of Decision
        On its blocks.
    groups : tuple of Group
        Stages that are computed side by side.
    orders : tuple of EpochOrder
        Of the kernel, then of each loop in it.
    begun : frozenset of Stage
        Stages whose first copies are made while blocks wait for what they read.
    """

    shape: KernelShape
    stages: tuple[Unit, ...]
    epochs: tuple[int, ...]
    length: int
    tensors: tuple[Tensor, ...]
    touches: tuple[TensorTouch, ...]
    barriers: tuple[Barrier, ...]
    decisions: tuple[Decision, ...] = ()
    groups: tuple[Group, ...] = ()
    orders: tuple[EpochOrder, ...] = ()
    begun: frozenset[Stage] = frozenset()


def plan_calls(
    stages: Sequence[Unit],
    constants: Mapping[Tensor, object],
    *,
    prefetch: bool,
    blocks_per_sm: int = 1,
    expected: Expected | None = None,
    dependences: TileDependences | None = None,
    groups: Sequence[Group] = (),
    delayed: Mapping[Stage, int] | None = None,
    prologues: bool = False,
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
    groups : sequence of Group
        Stages that are computed side by side, each in one epoch and nothing on its blocks for others.
    delayed : mapping of Stage to int, optional
        Epochs of stages that may wait longer than they have to, which are none's in which no other stage is.
    prologues : bool
        Whether the first copies of stages, where they are of constants, are made while blocks wait.
    """
    waits = Waits(dependences or TileDependences(), expected or Expected(), delayed)
    plan = _Planner(constants, prefetch, waits, groups, prologues).plan(stages, blocks_per_sm)
    return replace(plan, groups=tuple(groups))


class _Planner:
    def __init__(
        self,
        constants: Mapping[Tensor, object],
        prefetch: bool,
        waits: Waits,
        groups: Sequence[Group],
        prologues: bool,
    ) -> None:
        self.shares = {stage: share for group in groups for stage, share in group.members}
        self.form: dict[DeviceFunction, DeviceFunction] = {}
        self.constants = constants
        self.prefetch = prefetch
        self.waits = waits
        self.prologues = prologues
        self.begun: dict[Stage, None] = {}
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
                if unit in between and barrier is not None and barrier.scope == between[unit].scope == "block":
                    # The one between its steps stands before the first, too.
                    barrier = None
                reasons += [barrier] if barrier else []
                if isinstance(unit, LoopStage):
                    body = bodies[unit], between[unit]
                    call, inside = self.loop(unit, *body, span, barrier, alone=len(loops) == 1)
                    calls.append(call)
                    reasons += inside
                else:
                    places = {t: self.fixed(t) for t in (*unit.inputs, *unit.outputs)}
                    calls.append(self.stage(unit, barrier, places, self.constants, None, self.constants))
                    self.touch(unit.inputs, unit.outputs, span)
            start = span.stop
        tensors = tuple(self.position)
        shape = KernelShape(parts_together(calls), tuple((t.dtype, t.nbytes) for t in tensors), blocks_per_sm)
        orders = [self.epoch_order(order, 1)]
        near = _near(order)
        for unit, body in bodies.items():
            if between[unit].scope == "grid" and unit not in near:
                orders.append(self.epoch_order(body, unit.loop.steps))
        touches, begun = tuple(self.touches), frozenset(self.begun)
        return CallPlan(
            shape, order.units, epochs, start, tensors, touches, tuple(reasons), orders=tuple(orders), begun=begun
        )

    def epoch_order(self, order: Sequenced, runs: int) -> EpochOrder:
        """The units of an order, and which of them are bound to no blocks."""
        alone = (unit for unit in order.units if isinstance(unit, Stage) and unit not in self.waits.assignments)
        single = (stage for stage in alone if len(stage.functions) == 1 and not (stage.kept or stage.windows))
        return EpochOrder(order.units, order.epochs, frozenset(single) - _near(order), runs)

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
        unchanging: Container[Tensor],
    ) -> StageCall:
        """The call of a stage; `weights` are worth a prefetch, `unchanging` may be copied before its barrier."""
        scope = barrier.scope if barrier else ""
        ahead = self.prefetch and barrier is not None
        kept = () if stage.kept is None else tuple(stage.inputs[number] for number in stage.kept.reads)
        wanted = [tensor for tensor in stage.inputs if tensor in weights and tensor not in kept]
        prefetch = tuple((places[t], t.nbytes) for t in wanted) if ahead else ()
        windows = dict(stage.windows)
        arguments = tuple(replace(places[t], window=windows.get(t)) for t in (*stage.inputs, *stage.outputs))
        assignment = self.waits.assignments.get(stage)
        share = self.shares.get(stage, ALL_WORKERS)
        functions = tuple(self.form[f] for f in stage.functions) if share.part is None else (share.part.function,)
        own = scope == "grid", prefetch, scope == "block", assignment, stage.kept, scope == "flags"
        call = StageCall(functions, arguments, *own, self.waiting(stage, loop), share)
        return self.beginning(stage, call, unchanging)

    def beginning(self, stage: Stage, call: StageCall, unchanging: Container[Tensor]) -> StageCall:
        """The call of a stage behind a grid barrier whose first copies are made before, where that is possible."""
        alone = len(call.functions) == 1 and call.kept is None and call.share == ALL_WORKERS
        slots = call.assignment is None or call.assignment.per_slot == 1
        if not (self.prologues and call.sync_before and alone and slots and not self.arrivals):
            return call
        constants = [number for number, tensor in enumerate(stage.inputs) if tensor in unchanging]
        prologue = prologue_of(call.functions[0], constants)
        if prologue is None:
            return call
        self.begun[stage] = None
        return replace(call, functions=(prologue.rest,), prologue=prologue)

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
        scope = before.scope if before else ""
        unchanging = {*parts, *self.constants}
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
            # What waits in some steps alone copies nothing before.
            always = scope == "grid" or stage is not body.units[0]
            calls.append(
                self.stage(stage, barriers.get(stage), places, weights, unit, unchanging if always else frozenset())
            )
        runs = {body.units[0]: loop.steps - 1} if steps.scope == "grid" else {}
        reasons = [
            replace(barriers[stage], runs=runs.get(stage, loop.steps)) for stage in body.units if stage in barriers
        ]
        ahead = tuple((self.fixed(source), source.nbytes) for source in small) if self.prefetch else ()
        return LoopCall(loop.steps, parts_together(calls), scope == "grid", ahead, scope == "block"), reasons

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


def _near(order: Sequenced) -> set[Unit]:
    """Units that need what another one of their epoch makes, or make it: what they share stays on its blocks."""
    writer = {tensor: (unit, at) for unit, at in zip(order.units, order.epochs, strict=True) for tensor in unit.outputs}
    near: set[Unit] = set()
    for unit, at in zip(order.units, order.epochs, strict=True):
        for tensor in unit.inputs:
            producer, made = writer.get(tensor, (unit, None))
            if made == at and producer is not unit:
                near |= {unit, producer}
    return near


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
