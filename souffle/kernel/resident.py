"""Tensors that stay in a block's shared memory from the stage that makes them to those that read them (paper §6.5).

::

    stage A writes t, tile by tile            A writes part i of t to the block's own shared memory,
    ... other stages ...                  →   behind what the stages between need for themselves;
    stage B reads t, tile by tile             B, on the same block, reads it there

A tensor can stay where each tile of a reader touches only what the writer's tile of equal number makes, and both are
given to blocks in the same way: then whichever grid is launched, the block that reads a part has made it, in the same
turn of its loop over tiles. How many turns a block takes only the launch knows. So there is room for as many parts as
the grid that is expected asks for, and what a block of a smaller grid makes beyond them lies in global memory, where
all of the tensor has its place (:data:`souffle.kernel.merge.WINDOW_FUNCTION`).

Where nobody else needs the tensor, it is not written to global memory at all; else it is written to both. It stays in
the order of its elements where a part is a run of them, and part by part where it is not
(:mod:`souffle.kernel.relaid`). Which tensors stay while there is room, a policy says
(:mod:`souffle.kernel.reuse_policy`). It lies right behind what the stages need that run meanwhile, and no further than
a block may ask for while as many of the kernel's blocks are on a multiprocessor. Stages and tensors that are never
there together share memory as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.cost.kernel import KernelForecast, forecast_on
from souffle.decision import Decision, Refused
from souffle.kernel.dependences import TileDependences
from souffle.kernel.kernel_plan import expected_in
from souffle.kernel.relaid import Relaid, in_parts
from souffle.kernel.reuse_policy import POLICIES, Reuse
from souffle.kernel.tile_layouts import TileLayout, flat, layout_of
from souffle.kernel.tile_maps import tile_maps
from souffle.kernel.waits import Waits
from souffle.options import Options
from souffle.partition import Partition, PartitionRequest, Subprogram
from souffle.program import ExternTE, Tensor
from souffle.schedule.lower import WINDOWS, DeviceFunction, LoweringError, cuda_target, lower_stage
from souffle.schedule.resources import SHARED_ALIGNMENT, aligned, with_constants
from souffle.schedule.stage import LoopStage, Stage, Unit, Window, flat_stages, map_stages
from souffle.tvm_compat import collect, dtype_of

__all__ = ["keep_on_chip"]


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A tensor that could stay: who writes it, who reads it in the same tiles, and at which places of their sequence.

    Attributes
    ----------
    others : bool
        Whether stages beside `readers` need it.
    turns : int
        Tiles of a block, on the grid that is expected.
    """

    tensor: Tensor
    layout: TileLayout
    writer: Stage
    readers: tuple[Stage, ...]
    uses: tuple[int, ...]
    others: bool
    turns: int

    @property
    def part(self) -> int:
        """Bytes that a tile makes."""
        return self.tensor.nbytes // self.writer.schedule.tiles

    @property
    def nbytes(self) -> int:
        """Bytes of a block for it."""
        return aligned(self.part * self.turns)

    def first(self, reads: int) -> _Candidate:
        """The same with its first readers alone."""
        fewer = reads < len(self.readers)
        return replace(self, readers=self.readers[:reads], uses=self.uses[: reads + 1], others=self.others or fewer)


def keep_on_chip(
    request: PartitionRequest,
    partition: Partition,
    options: Options,
    dependences: TileDependences,
) -> tuple[PartitionRequest, Partition]:
    """Let tensors stay in shared memory where it is predicted to pay.

    Parameters
    ----------
    request : PartitionRequest
        The stages, lowered.
    partition : Partition
    options : Options
    dependences : TileDependences

    Returns
    -------
    request : PartitionRequest
        With stages some of which are others, and what is predicted of them.
    partition : Partition
        With the same kernels of those stages, and with the decisions.
    """
    keeper = _Keeper(request, options, dependences)
    changed: dict[Stage, Stage] = {}
    for subprogram in partition.subprograms:
        known = len(keeper.decisions)
        found = keeper.kernel(subprogram)
        if found and not keeper.shares_enough(partition, changed, found):
            keeper.take_back(known)
        else:
            changed |= found
    if changed:
        units = _swapped(request.stages, changed)
        forecast = forecast_on(options.arch, request.analysis.program, units, graph=options.graph, ahead=True)
        request = replace(request, stages=units, forecast=forecast)
        # A unit of a kernel is a unit of the request: a loop that is in both is one.
        same = dict(zip(keeper.units, units, strict=True))
        subprograms = [
            replace(sub, stages=tuple(same.get(unit, unit) for unit in sub.stages)) for sub in partition.subprograms
        ]
        partition = replace(partition, subprograms=tuple(subprograms))
    return request, replace(partition, decisions=(*partition.decisions, *keeper.decisions))


class _Keeper:
    """Decides for the kernels of one network."""

    def __init__(self, request: PartitionRequest, options: Options, dependences: TileDependences) -> None:
        self.request, self.options = request, options
        self.units = request.stages
        self.dependences, self.target = dependences, cuda_target(options.arch)
        self.decisions: list[Decision] = []
        self.readers = _readers(request)
        self.forms: dict[tuple[object, ...], tuple[object, tuple[DeviceFunction, ...]]] = {}
        self.made: dict[tuple[Tensor, TileLayout], Tensor] = {}
        self.names: set[str] = {f.name for stage in flat_stages(request.stages) for f in stage.functions}

    def kernel(self, subprogram: Subprogram) -> dict[Stage, Stage]:
        """The stages of a kernel that become others."""
        units = subprogram.stages
        if len(flat_stages(units)) < 2:
            return {}
        waits = Waits(self.dependences, expected_in(self.request, units))
        bodies = {unit: waits.sequence(unit.stages).units for unit in units if isinstance(unit, LoopStage)}
        room = _Room(self.request, subprogram, waits)
        changed: dict[Stage, Stage] = {}
        ends: dict[Unit, int] = {}
        for unit, body in bodies.items():
            constants = sum(stage.kept.shared_bytes for stage in unit.stages if stage.kept)
            made = self.sequence(body, waits, room, {}, constants)
            windows = [window.end for stage in made.values() for _, window in stage.windows]
            ends[unit] = with_constants(max([*windows, *(stage.pool_bytes for stage in unit.stages)]), constants)
            changed |= made
        return changed | self.sequence(waits.sequence(units).units, waits, room, ends)

    def sequence(
        self, units: Sequence[Unit], waits: Waits, room: _Room, ends: Mapping[Unit, int], constants: int = 0
    ) -> dict[Stage, Stage]:
        """Those of units that run one after the other.

        `ends` says what loops among them need beside their stages, and `constants` what lies behind all that these do.
        """
        most = room.most - constants
        own = [max([ends.get(unit, 0), *(stage.pool_bytes for stage in flat_stages([unit]))]) for unit in units]
        found = [one for one in self.candidates(units, waits, room) if self.pays(one, room)]
        policy = POLICIES[self.options.reuse_policy]
        served = policy([Reuse(one.nbytes, one.uses) for one in found], [max(0, most - used) for used in own])
        windows: dict[_Candidate, Window] = {}
        for one, reads in zip(found, served, strict=True):
            kept = one.first(reads)
            start = _lowest_start(kept, most, own, windows) if reads else None
            if start is None:
                why = f"{one.nbytes} bytes of a block, which has {most}, are not free until it is read"
                self.note(one, False, why)
                continue
            windows[kept] = Window(start, kept.turns, kept.part)
            self.note(kept, True, self.figures(kept, len(one.readers), windows[kept]))
        changed: dict[Stage, Stage] = {}
        for stage in dict.fromkeys(s for one in windows for s in (one.writer, *one.readers)):
            touched = {one: window for one, window in windows.items() if stage in (one.writer, *one.readers)}
            changed[stage] = self.changed(stage, touched)
        return changed

    # The code of the network

    def shares_enough(self, partition: Partition, changed: Mapping[Stage, Stage], found: Mapping[Stage, Stage]) -> bool:
        """Whether the network's stages take no longer with what was found, with the code that is fetched for them.

        Equal stages share their code; those that find tensors in different places do not.
        """
        if self.request.forecast is None:
            return True
        return self.seconds(partition, {**changed, **found}) <= self.seconds(partition, changed)

    def seconds(self, partition: Partition, changed: Mapping[Stage, Stage]) -> float:
        """Of all stages of the network's kernels, some of which are others."""
        kernels = [_swapped(subprogram.stages, changed) for subprogram in partition.subprograms]
        units = [unit for kernel in kernels for unit in kernel]
        forecast = forecast_on(
            self.options.arch, self.request.analysis.program, units, graph=self.options.graph, ahead=True
        )
        fetches = forecast.fetches(units)
        return sum(
            forecast.times(kernel, forecast.together(flat_stages(kernel)), 1, 0, fewer=False, fetches=fetches).stages
            for kernel in kernels
        )

    def take_back(self, known: int) -> None:
        """Refuse what was accepted after so many decisions."""
        reason = "its stages share their code with others; for code of their own the network would take longer"
        self.decisions[known:] = [
            one._replace(accepted=False, reason=reason) if one.accepted else one for one in self.decisions[known:]
        ]

    # What could stay

    def candidates(self, units: Sequence[Unit], waits: Waits, room: _Room) -> Iterator[_Candidate]:
        """Tensors whose readers have the tiles of their writer."""
        writers = {t: n for n, unit in enumerate(units) if isinstance(unit, Stage) for t in unit.outputs}
        reads: dict[Tensor, list[int]] = {}
        for number, unit in enumerate(units):
            for tensor in dict.fromkeys(unit.inputs if isinstance(unit, Stage) else ()):
                if tensor in writers:
                    reads.setdefault(tensor, []).append(number)
        for tensor, places in reads.items():
            writer = units[writers[tensor]]
            # What has its constants in registers is not lowered again.
            free = [n for n in places if units[n].kept is None and writer.kept is None]
            near = [n for n in free if self.in_same_tiles(writer, units[n], tensor, waits)]
            layout = self.layout(writer, tensor, [units[n] for n in near]) if near else None
            if layout is None:
                continue
            others = self.readers.get(tensor, 0) > len(near)
            turns = room.turns(writer, waits)
            stages = tuple(units[n] for n in near)
            found = _Candidate(tensor, layout, writer, stages, (writers[tensor], *near), others, turns)
            why = self.refusal(found)
            if why:
                self.note(found, False, why)
            else:
                yield found

    def in_same_tiles(self, writer: Stage, reader: Stage, tensor: Tensor, waits: Waits) -> bool:
        """Whether each tile of the reader needs only what the tile of equal number made, in the same turn.

        They have to be as many: a window says which tiles have parts in it, the same to all that touch it.
        """
        if writer.schedule.tiles != reader.schedule.tiles:
            return False
        if any(isinstance(stage.tes[0], ExternTE) or len(stage.functions) > 1 for stage in (writer, reader)):
            return False
        if waits.assignments.get(writer) != waits.assignments.get(reader):
            return False
        return self.dependences.between(writer, tensor, reader, tensor).same

    def layout(self, writer: Stage, tensor: Tensor, readers: Sequence[Stage]) -> TileLayout | None:
        """How the parts of a tensor lie that tiles make and read."""
        tiles = writer.schedule.tiles
        writes = tile_maps(writer.schedule).writes(len(writer.inputs) + writer.outputs.index(tensor))
        reads = [tile_maps(stage.schedule).reads(stage.inputs.index(tensor)) for stage in readers]
        if writes is None or any(one is None for one in reads):
            return None
        for shape, maps in ((tensor.shape, (writes, *reads)), flat(tensor.shape, (writes, *reads))):
            layout = layout_of(shape, tiles, maps[0])
            if layout is not None and all(layout.holds(one) for one in maps[1:]):
                return layout
        return None

    def refusal(self, one: _Candidate) -> str:
        """Why the functions cannot touch the tensor elsewhere; nothing where they can."""
        for stage in (one.writer, *one.readers):
            position = (*stage.inputs, *stage.outputs).index(one.tensor)
            widest = _widest(stage.functions[0], position)
            if not widest:
                return f"{stage.name} hands it on by its address"
            if one.part % widest:
                return f"{stage.name} touches {widest} bytes at once, and a tile makes {one.part}"
        return ""

    # What it is worth

    def pays(self, one: _Candidate, room: _Room) -> bool:
        """Whether the stages are predicted to take no longer."""
        stages = dict.fromkeys((one.writer, *one.readers))
        try:
            made = {s: self.changed(s, {one: Window(0, one.turns, one.part)}, bare=True) for s in stages}
        except LoweringError as error:
            self.note(one, False, str(error))
            return False
        if self.request.forecast is None:
            return True
        program = self.request.analysis.program
        after = forecast_on(self.options.arch, program, tuple(made.values()), graph=self.options.graph, ahead=True)
        before = forecast_on(self.options.arch, program, tuple(stages), graph=self.options.graph, ahead=True)
        seconds = [
            sum(known.seconds(stage, room.block) for stage in some)
            for known, some in ((before, stages), (after, made.values()))
        ]
        if seconds[1] <= seconds[0]:
            return True
        figures = f"{seconds[1] * 1e6:.2f} µs predicted where it is {seconds[0] * 1e6:.2f} from global memory"
        self.note(one, False, f"its stages would take {figures}")
        return False

    def figures(self, one: _Candidate, reads: int, window: Window) -> str:
        """What a tensor that stays is worth, in words."""
        stays = f"bytes {window.start} to {window.end} of a block hold {one.part} of each of its {one.turns} tiles"
        saved = len(one.readers) * one.tensor.nbytes
        asked = (
            f"{saved} bytes less are read"
            if one.others
            else f"{saved} bytes less are read, {one.tensor.nbytes} written"
        )
        some = "" if len(one.readers) == reads else f" by {len(one.readers)} of its {reads} readers of the same tiles"
        where = "" if one.layout.plain else ", tile by tile"
        return f"{stays}{where}; {asked}{some}"

    def note(self, one: _Candidate, accepted: bool, reason: str) -> None:
        """Keep a decision, once."""
        to = ", ".join(dict.fromkeys(stage.name for stage in one.readers))
        decision = Decision("resident", f"{one.tensor.name} from {one.writer.name} to {to}", accepted, reason)
        if decision not in self.decisions:
            self.decisions.append(decision)

    # The stages that touch it

    def changed(self, stage: Stage, touched: Mapping[_Candidate, Window], *, bare: bool = False) -> Stage:
        """A stage that finds some tensors in windows; `bare` is for one that is looked at alone."""
        parts = {one: self.parts(one) for one in touched}
        relaid = [
            Relaid(one.tensor, parts[one], one.layout, one.others and stage is one.writer)
            for one in touched
            if parts[one] is not one.tensor
        ]
        made = in_parts(stage, relaid) if relaid else stage
        if isinstance(made, Refused):
            raise LoweringError(made.reason)
        windows = tuple((parts[one], window) for one, window in touched.items())
        tensors = (*made.inputs, *made.outputs)
        numbers = tuple(tensors.index(tensor) for tensor, _ in windows)
        key = (stage.functions, numbers, tuple((r.layout, r.whole) for r in relaid))
        if key not in self.forms:
            self.forms[key] = (made.schedule, self.lowered(stage, made, numbers))
        schedule, functions = self.forms[key]
        used = stage.resources
        if used is not None and not bare:
            end = max(window.end for _, window in windows)
            used = replace(used, dynamic_shared_bytes=max(used.dynamic_shared_bytes, end))
        return replace(made, schedule=schedule, functions=functions, resources=used, windows=windows)

    def lowered(self, stage: Stage, made: Stage, numbers: Sequence[int]) -> tuple[DeviceFunction, ...]:
        """The functions of a stage that finds these of its tensors in windows."""
        functions = stage.functions
        if made.schedule is not stage.schedule:
            functions = lower_stage("stage", made.schedule, self.target)
        found = []
        for function, before in zip(functions, stage.functions, strict=True):
            func = function.func.with_attr(WINDOWS, list(numbers))
            found.append(replace(function, func=func, name=self.name(before.name)))
        return tuple(found)

    def name(self, before: str) -> str:
        """A name for another form of a function."""
        number = next(n for n in range(1, len(self.names) + 2) if f"{before}_near{n}" not in self.names)
        self.names.add(f"{before}_near{number}")
        return f"{before}_near{number}"

    def parts(self, one: _Candidate) -> Tensor:
        """What lies in the window of a tensor: it itself, or its parts."""
        if one.layout.plain and not one.others:
            return one.tensor
        key = (one.tensor, one.layout)
        if key not in self.made:
            shape = one.tensor.shape if one.layout.plain else one.layout.relaid
            self.made[key] = Tensor(f"{one.tensor.name}_near", shape, one.tensor.dtype)
        return self.made[key]


class _Room:
    """What a block of a kernel may ask for.

    Attributes
    ----------
    block : StageResources
        What it does ask for.
    most : int
        Bytes of shared memory with which as many of the kernel's blocks are on a multiprocessor.
    """

    def __init__(self, request: PartitionRequest, subprogram: Subprogram, waits: Waits) -> None:
        stages, device = flat_stages(subprogram.stages), request.device
        forecast: KernelForecast | None = request.forecast
        self.block = request.together(subprogram.stages) if forecast is None else forecast.together(stages)
        slots = [self.slots(stage, waits) for stage in stages]
        used = self.block
        fit = device.blocks_per_wave(used.threads, used.shared_bytes, used.registers)
        self.blocks = min(fit, max(slots))
        resident = -(-self.blocks // device.sm_count)
        self.most = (
            max(
                (
                    shared
                    for shared in range(0, device.shared_per_block + 1, SHARED_ALIGNMENT)
                    if device.resident_blocks(used.threads, shared, used.registers)["shared memory"] >= resident
                ),
                default=0,
            )
            - used.static_shared_bytes
        )

    def slots(self, stage: Stage, waits: Waits) -> int:
        """Among how many blocks the tiles of a stage are divided at most."""
        assignment = waits.assignments.get(stage)
        return stage.schedule.tiles if assignment is None else assignment.count

    def turns(self, stage: Stage, waits: Waits) -> int:
        """Tiles of the busiest block."""
        assignment = waits.assignments.get(stage)
        each = 1 if assignment is None else assignment.per_slot
        return -(-self.slots(stage, waits) // self.blocks) * each


def _swapped(units: Sequence[Unit], changed: Mapping[Stage, Stage]) -> tuple[Unit, ...]:
    return map_stages(units, lambda stage: changed.get(stage, stage))


def _readers(request: PartitionRequest) -> dict[Tensor, int]:
    """How many stages read each tensor, loops and the network's caller among them."""
    found: dict[Tensor, int] = {}

    def read(tensors: Collection[Tensor]) -> None:
        for tensor in dict.fromkeys(tensors):
            found[tensor] = found.get(tensor, 0) + 1

    read(request.analysis.program.outputs)
    for unit in request.stages:
        read(unit.inputs)
        if isinstance(unit, LoopStage):
            for stage in unit.stages:
                read(stage.inputs)
            read([carried.value for carried in unit.loop.carried])
            read([collected.value for collected in unit.loop.collected])
    return found


def _widest(function: DeviceFunction, position: int) -> int:
    """Bytes of the widest access to a tensor, 0 where it is touched in another way than by loads and stores."""
    pointer = list(function.func.params)[2 + position]
    buffers = [d.buffer for d in collect(function.func.body, tirx.DeclBuffer) if d.data.same_as(pointer)]
    calls = collect(function.func.body, tvm.ir.Call)
    taken = [c.args[0] for c in calls if str(getattr(c.op, "name", "")) in ("tirx.address_of", "tirx.tvm_access_ptr")]
    if any(at.source.same_as(buffer) for at in taken if isinstance(at, TensorLoad) for buffer in buffers):
        return 0
    loads = [at for at in collect(function.func.body, TensorLoad) if any(at.source.same_as(b) for b in buffers)]
    stores = [
        at.value for at in collect(function.func.body, tirx.BufferStore) if any(at.buffer.same_as(b) for b in buffers)
    ]
    return max(
        (tvm.DataType(dtype_of(at)).itemsize * tvm.DataType(dtype_of(at)).lanes for at in (*loads, *stores)), default=1
    )


def _lowest_start(one: _Candidate, most: int, own: Sequence[int], placed: Mapping[_Candidate, Window]) -> int | None:
    """The first byte from which a window is free for as long as the tensor stays, None where there is none."""
    first, last = one.uses[0], one.uses[-1]
    start = aligned(max(own[first : last + 1]))
    beside = [w for other, w in placed.items() if other.uses[0] <= last and first <= other.uses[-1]]
    for window in sorted(beside, key=lambda window: window.start):
        if start + one.nbytes <= window.start:
            break
        start = max(start, aligned(window.end))
    return start if start + one.nbytes <= most else None
