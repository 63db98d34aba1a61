"""Merge the stages of a subprogram into one TensorIR kernel with grid-wide barriers (paper §6.4).

::

    stage A; stage B            kernel(a, b, c, num_blocks):
    (B reads what A writes) →     for it: tile = it * num_blocks + blockIdx.x; if tile < tiles_A: A(tile, tid, a, b)
                                  grid sync
                                  for it: tile = it * num_blocks + blockIdx.x; if tile < tiles_B: B(tile, tid, b, c)

Legal for every grid of at least one block that is on the device at once: each stage computes all its tiles, and every
pair of stages that touch one tensor, at least one of them writing, has a grid sync between, or flags that the tiles of
the one set and those of the other wait for (:mod:`souffle.kernel.block_flags`). A loop over stages is a loop in the
kernel, with a grid sync or flags between its steps; each step passes its stages its own parts of the tensors.

Where a block has several teams (:mod:`souffle.schedule.lower.teams`), each of them is what a block is above::

    team, tid = threadIdx.x / threads, threadIdx.x % threads
    worker, workers = team * num_blocks + blockIdx.x, teams * num_blocks

takes the place of ``blockIdx.x``, ``threadIdx.x`` and ``num_blocks`` wherever tiles are given out; all of a block's
threads come to each grid sync.

Stages that are computed side by side (:mod:`souffle.kernel.side_by_side`) have their workers counted anew: those of
some teams alone, or from another one on. ::

    if 1 <= team && team < 3:                                 own = (worker + workers - 104 % workers) % workers
      own, count = (team - 1) * num_blocks + block, 2 * num_blocks

What a stage copies of constants first may be copied for the first tile of each worker while blocks wait before it
(:mod:`souffle.schedule.lower.prologues`)::

    found = arrive at the grid sync
    if worker < tiles: copies(worker, tid, w)
    ask for further weights in the L2 cache
    wait for the others
    for it: tile = it * workers + worker; if tile < tiles: (if it > 0: copies(tile, tid, w)); rest(tile, tid, x, w, y)

Nobody uses shared memory then: all threads of the block have come to the sync, and what the stages of another worker
have there is no part of this one's.

Constants that a stage of a loop finds in registers, or in shared memory behind what all stages use, are read into them
before the loop, for the tile that is the block's in a grid of as many blocks as there are tiles, or more; in a smaller
one a block has several, and reads them before each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import tirx

from souffle.kernel.assignment import Assignment
from souffle.kernel.block_flags import BlockFlags, flag_words
from souffle.kernel.grid_barrier import GRID_BARRIERS, STATE_DTYPE, GridBarrier, WaitPlace
from souffle.kernel.kernel_shape import ArgumentPlace, KernelShape, LoopCall, StageCall, TileWait
from souffle.kernel.part_text import of_a_part
from souffle.kernel.text import format_calls
from souffle.schedule.lower.device_function import DeviceFunction, LoweringError
from souffle.schedule.lower.kept_loads import KeptLoads
from souffle.schedule.lower.shares import Share
from souffle.schedule.stage import Window
from souffle.tvm_compat import MIN_BLOCKS_ATTRIBUTE, PrimExpr, sequence

__all__ = [
    "CHOICE_FUNCTION",
    "KEPT_FUNCTION",
    "OFFSET_FUNCTION",
    "PREFETCH_FUNCTION",
    "WINDOW_FUNCTION",
    "MergedKernel",
    "merge",
]


@dataclass(frozen=True, eq=False)
class MergedKernel:
    """A merged kernel: its TensorIR and the functions that it calls.

    Attributes
    ----------
    name : str
    func : tirx.PrimFunc
        Parameters: one pointer for each of the shape's parameters, one to the state of grid barriers and flags where
        the kernel has such as keep one, one to the record of a wait that is over where its waits have a limit, then
        ``num_blocks``.
    shape : KernelShape
    state_words : int
        Words of that state; 0 where there is none.
    watched : bool
        Whether there is a record.
    """

    name: str
    func: tirx.PrimFunc
    shape: KernelShape
    state_words: int = 0
    watched: bool = False

    def __str__(self) -> str:
        return f"kernel {self.name}: {format_calls(self.shape)}\n\n{self.func.script()}"


PREFETCH_FUNCTION = "souffle_prefetch_l2"
"""Asks for a range of global memory in the L2 cache; its text is in :mod:`souffle.codegen.cuda`."""

KEPT_FUNCTION = "souffle_kept"
"""Where constants that stay in shared memory begin, from a byte of it on."""

OFFSET_FUNCTION = "souffle_at"
"""A pointer some elements further."""

CHOICE_FUNCTION = "souffle_choose"
"""One of two pointers."""

WINDOW_FUNCTION = "souffle_window"
"""Where a tensor would begin if all of it lay around the part of a tile that stays in shared memory; or where it does
begin, in global memory, if that part has no room."""


def merge(
    name: str,
    shape: KernelShape,
    global_vars: Mapping[DeviceFunction, tvm.ir.GlobalVar],
    barrier: GridBarrier = GRID_BARRIERS["cooperative"],
    number: int = 0,
    blocks: int = 0,
) -> MergedKernel:
    """The kernel's TensorIR function.

    Parameters
    ----------
    name : str
    shape : KernelShape
    global_vars : mapping of DeviceFunction to GlobalVar
        How the functions are called in the module that the kernel will be part of.
    barrier : GridBarrier
        How its blocks wait for each other.
    number : int
        Of the kernel, by which a wait that is over names it.
    blocks : int
        Most blocks of any kernel whose flags lie in the same memory; by default of this one.
    """
    block, tid = tirx.Var("block", "int32"), tirx.Var("tid", "int32")
    num_blocks = tirx.Var("num_blocks", "int32")
    pointers = [
        tirx.Var(f"g{i}", tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global"))
        for i, (dtype, _) in enumerate(shape.parameters)
    ]
    words = max(flag_words(max(blocks, shape.tiles)) if shape.ticks else 0, barrier.words(shape))
    names = ("grid_state", "grid_record") if barrier.limit else ("grid_state",)
    pointer = tvm.ir.PointerType(tvm.ir.PrimType(STATE_DTYPE), "global")
    waiting = [tirx.Var(name, pointer) for name in names] if words else []

    def wait(stage: int, step: PrimExpr, **meanwhile: Sequence[tirx.Stmt]) -> tirx.Stmt:
        return barrier.wait(waiting, num_blocks, WaitPlace(number, stage, step), **meanwhile)

    if shape.ticks and shape.teams:
        raise LoweringError(f"kernel {name}: the teams of a block have no flags of their own")
    flags = BlockFlags(tuple(waiting), num_blocks, words, barrier.limit) if shape.ticks else None
    launch = (block, tid, num_blocks)
    worker, binds = _Worker(None, *launch), []
    if shape.teams:
        count, threads = shape.teams.count, shape.teams.threads
        team, own, one, all_ = (tirx.Var(name, "int32") for name in ("team", "team_tid", "worker", "workers"))
        values = (
            tirx.truncdiv(tid, threads),
            tirx.truncmod(tid, threads),
            team * num_blocks + block,
            num_blocks * count,
        )
        binds = [tirx.Bind(*pair) for pair in zip((team, own, one, all_), values, strict=True)]
        worker = _Worker(team, one, own, all_)
    writer = _Writer(shape, global_vars, pointers, worker, launch, wait, flags, number)
    statements = [*binds, *(statement for call in shape.calls for statement in writer.call(call))]
    body = sequence(*(flags.around(statements, shape.ticks) if flags else statements))
    body = _thread("threadIdx.x", tid, tirx.IntImm("int32", shape.threads), body)
    body = _thread("blockIdx.x", block, num_blocks, body)
    func = tirx.PrimFunc([*pointers, *waiting, num_blocks], body).with_attr("global_symbol", name)
    target = shape.functions[0].func.attrs["target"]
    func = func.with_attr("target", target).with_attr("calling_conv", 2).with_attr("tirx.is_global_func", True)
    if shape.blocks_per_sm != 1:
        # It says itself with how many resident blocks of a multiprocessor its registers are counted.
        func = func.with_attr(MIN_BLOCKS_ATTRIBUTE, shape.blocks_per_sm)
    return MergedKernel(name, func, shape, words, bool(waiting and barrier.limit))


def _thread(tag: str, var: tirx.Var, extent: object, body: tirx.Stmt) -> tirx.Stmt:
    axis = tirx.IterVar((0, extent), var, tirx.IterVar.ThreadIndex, tag)
    return tirx.AttrStmt(axis, "thread_extent", extent, body)


_FIRST, _OUTSIDE = tirx.IntImm("int32", 0), tirx.IntImm("int32", -1)
"""The step of a wait that stands before a loop for its first step, and of one before a stage that is in no loop."""


@dataclass(frozen=True, eq=False)
class _Worker:
    """What computes tiles: a block, or a team of one; its number, that of a thread in it, and how many there are."""

    team: tirx.Var | None
    number: tirx.Var
    tid: tirx.Var
    count: tirx.Var


@dataclass(eq=False)
class _Writer:
    """Writes the statements of one kernel; `launch` is the block, the thread, and how many blocks there are."""

    shape: KernelShape
    global_vars: Mapping[DeviceFunction, tvm.ir.GlobalVar]
    pointers: Sequence[tirx.Var]
    worker: _Worker
    launch: tuple[tirx.Var, tirx.Var, tirx.Var]
    wait: Callable[..., tirx.Stmt]
    flags: BlockFlags | None
    number: int
    loops: int = 0
    stages: int = 0
    kept: dict[StageCall, list[PrimExpr]] = field(default_factory=dict)
    # Of each arrival so far: the tick at the first step of its loop, and how many there are in a step.
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    ticks: int = 0
    # Arrivals whose statements are written.
    passed: int = 0

    def call(self, call: StageCall | LoopCall) -> list[tirx.Stmt]:
        """A stage, or a loop over stages."""
        if isinstance(call, StageCall):
            return self.stage(call, None, 0, True)
        step = tirx.Var(f"s{self.loops}", "int32")
        self.loops += 1
        each = sum(stage.arrive_before for stage in call.calls)
        self.arrivals += [(self.ticks + number, each) for number in range(1, each + 1)]
        self.ticks += each * call.steps
        before = self.asked(call.prefetch, None, 0)
        places = call.kept_places
        for number, stage in enumerate(call.calls):
            before += self.fill_before(stage, places.get(number, ()))
        # Where no grid sync begins each step, the one before the first stands outside.
        before += [self.wait(self.stages, _FIRST)] if call.sync_first and not call.calls[0].sync_before else []
        before += [self.block_barrier()] if call.block_sync_first else []
        inside: list[tirx.Stmt] = []
        for number, stage in enumerate(call.calls):
            inside += self.stage(stage, step, call.steps, call.sync_first or number > 0)
        # What stands behind the loop has what it needs where a thread may still look for constants.
        after = [self.block_barrier()] if places and call is not self.shape.calls[-1] else []
        return [*before, tirx.For(step, 0, call.steps, tirx.ForKind.SERIAL, sequence(*inside)), *after]

    def stage(self, call: StageCall, step: tirx.Var | None, steps: int, sync_first: bool) -> list[tirx.Stmt]:
        """A stage with the barrier before it; `sync_first` says whether a loop's first step waits there too."""
        asked = self.asked(call.prefetch, step, steps)
        arguments = [self.pointer(place, step, steps) for place in call.arguments]
        number = self.stages, _OUTSIDE if step is None else step
        if call.sync_before and sync_first:
            statements = [self.wait(*number, copies=self.begun(call, arguments), asked=asked)]
        elif call.sync_before:
            # The condition is the same in all blocks.
            statements = [*asked, tirx.IfThenElse(step > 0, self.wait(*number), None)]
        else:
            statements = asked
        if call.arrive_before:
            if step is None:
                self.ticks += 1
                self.arrivals.append((self.ticks, 0))
            statements.append(self.flags.arrive(self.tick(self.passed, step)))
            self.passed += 1
        place = WaitPlace(self.number, self.stages, _OUTSIDE if step is None else step)
        self.stages += len(call.functions)
        if call.block_sync_before:
            statements.append(self.block_barrier())
        if call.share.part is not None:
            room = self.shape.threads, self.shape.shared_bytes
            called = self.global_vars[call.share.part.function]
            return [*statements, *of_a_part(call.share.part, called, arguments, self.launch, room)]
        windows = [place.window for place in call.arguments]
        own, binds, among = self.sharing(call.share)
        loops = [self.tile_loop(function, arguments, windows, call, step, place, own) for function in call.functions]
        body = [*binds, *loops]
        return [*statements, *body] if among is None else [*statements, tirx.IfThenElse(among, sequence(*body), None)]

    def begun(self, call: StageCall, arguments: Sequence[PrimExpr]) -> list[tirx.Stmt]:
        """The first copies of a stage, for the first tile of each worker."""
        if call.prologue is None:
            return []
        first = self.worker.number
        copies = self.of_threads(call.prologue.copies, self.copies(call, _tile(call.assignment, first), arguments))
        return [tirx.IfThenElse(first < call.slots, copies, None)]

    def copies(self, call: StageCall, tile: PrimExpr, arguments: Sequence[PrimExpr]) -> tirx.Stmt:
        """The first copies of a stage, for a tile."""
        return self.called(call.prologue.copies, tile, [arguments[number] for number in call.prologue.reads])

    def sharing(self, share: Share) -> tuple[_Worker, list[tirx.Stmt], PrimExpr | None]:
        """The workers that compute a stage's tiles, what counts them, and the condition that one is among them."""
        own, binds, among = self.worker, [], None
        if share.teams:
            block, _, blocks = self.launch
            last = share.team + share.teams
            if own.team is None or last > self.shape.teams.count:
                raise LoweringError(f"a stage is for {share} of a block of {self.shape.team_count}")
            among = tirx.all(own.team >= share.team, own.team < last)
            values = (own.team - share.team) * blocks + block, blocks * share.teams
            number, count = (tirx.Var(name, "int32") for name in ("own", "own_count"))
            binds += [tirx.Bind(number, values[0]), tirx.Bind(count, values[1])]
            own = _Worker(own.team, number, own.tid, count)
        if share.shift:
            number = tirx.Var("turned", "int32")
            back = own.count - tirx.truncmod(tirx.IntImm("int32", share.shift), own.count)
            binds.append(tirx.Bind(number, tirx.truncmod(own.number + back, own.count)))
            own = _Worker(own.team, number, own.tid, own.count)
        return own, binds, among

    # Flags

    def tick(self, arrival: int, step: PrimExpr | None) -> PrimExpr:
        """The tick of an arrival, at a step."""
        first, each = self.arrivals[arrival]
        return tirx.IntImm("int32", first) if step is None else step * each + first

    def until(self, wait: TileWait, slot: PrimExpr, step: tirx.Var | None, where: WaitPlace) -> tirx.Stmt:
        """Wait for the tiles that the tiles of a slot need."""
        band = wait.band
        base = band.base(slot, tirx.truncdiv)
        first = tirx.max(base - band.before, 0) if band.before > 0 else base - band.before
        last = tirx.min(base + band.after, band.slots - 1)
        tick = self.tick(wait.place, step if step is None else step - wait.ago)
        return self.flags.wait(first, last, tick, where, slot)

    def asked(
        self, prefetch: Sequence[tuple[ArgumentPlace, int]], step: tirx.Var | None, steps: int
    ) -> list[tirx.Stmt]:
        """What is asked into the L2 cache."""
        statements: list[tirx.Stmt] = []
        for place, nbytes in prefetch:
            where = (self.pointer(place, step, steps), tirx.IntImm("int64", nbytes))
            ahead = tirx.call_extern("int32", PREFETCH_FUNCTION, *where, *self.launch)
            statements.append(tirx.Evaluate(ahead))
        return statements

    # Constants on chip

    def fill_before(self, call: StageCall, places: Sequence[int]) -> list[tirx.Stmt]:
        """The arrays of a stage's constants, filled for the first tile of each block; where they are, if it is shared.

        What else was there has been left: a stage that has shared memory ends with a barrier.
        """
        if call.kept is None:
            return []
        if places:
            self.kept[call], allocated = self.places(call.kept, places), []
        else:
            arrays = [
                tirx.decl_buffer((count,), dtype, f"kept{len(self.kept)}_{number}", scope="local", layout=None)
                for number, (dtype, count) in enumerate(call.kept.arrays)
            ]
            self.kept[call], allocated = [array.data for array in arrays], [*map(tirx.AllocBuffer, arrays)]
        filled = self.of_threads(call.functions[0], self.fill(call, self.worker.number))
        return [*allocated, tirx.IfThenElse(self.worker.number < call.kept.fill.tiles, filled, None)]

    def places(self, kept: KeptLoads, starts: Sequence[int]) -> list[PrimExpr]:
        """Where the constants of a stage are in shared memory."""
        found = []
        for (dtype, _), at in zip(kept.arrays, starts, strict=True):
            start = self.of_worker(tirx.IntImm("int32", at))
            pointer = tvm.ir.PointerType(tvm.ir.PrimType(dtype), "shared")
            found.append(tirx.call_extern(pointer, KEPT_FUNCTION, start))
        return found

    def of_worker(self, start: PrimExpr) -> PrimExpr:
        """A byte of a worker's shared memory, in that of its block."""
        return start if self.worker.team is None else self.worker.team * self.shape.teams.shared_bytes + start

    def fill(self, call: StageCall, tile: PrimExpr) -> tirx.Stmt:
        """Read the constants of a tile."""
        tensors = [self.pointer(call.arguments[number], None, 0) for number in call.kept.reads]
        return self.called(call.kept.fill, tile, [*tensors, *self.kept[call]])

    def called(self, function: DeviceFunction, tile: PrimExpr, pointers: Sequence[PrimExpr]) -> tirx.Stmt:
        """A call of a function, by a worker's threads."""
        team = [self.worker.team] if function.in_team else []
        return tirx.Evaluate(tvm.ir.Call(self.global_vars[function], [tile, self.worker.tid, *pointers, *team]))

    def block_barrier(self) -> tirx.Stmt:
        """Of all threads of a worker."""
        teams = self.shape.teams
        return _block_barrier() if teams is None else teams.barrier(self.worker.team)

    def of_threads(self, function: DeviceFunction, body: tirx.Stmt) -> tirx.Stmt:
        """What the threads of a stage do, which may be fewer than the kernel's."""
        if function.threads == self.shape.team_threads:
            return body
        return tirx.IfThenElse(self.worker.tid < function.threads, body, None)

    def pointer(self, place: ArgumentPlace, step: tirx.Var | None, steps: int) -> PrimExpr:
        """A place, as a pointer."""
        here: PrimExpr = self.pointers[place.parameter]
        if place.stride:
            lag = len(place.first)
            part = step - lag if lag else step
            part = tirx.truncmod(part, place.ring) if place.ring else part
            offset = tirx.Cast("int64", part) * tirx.IntImm("int64", place.stride)
            here = tirx.call_extern(self.pointers[place.parameter].ty, OFFSET_FUNCTION, here, offset)
        if place.last is not None:
            here = self.choice(step == steps - 1, self.pointers[place.last], here)
        for number in reversed(range(len(place.first))):
            here = self.choice(step < number + 1, self.pointers[place.first[number]], here)
        return here

    def in_window(self, pointer: PrimExpr, window: Window, turn: PrimExpr, tile: PrimExpr) -> PrimExpr:
        """A tensor, as a tile finds its part of it."""
        start, *numbers = (tirx.IntImm("int32", n) for n in (window.start, window.turns, window.nbytes))
        return tirx.call_extern(pointer.ty, WINDOW_FUNCTION, pointer, self.of_worker(start), *numbers, turn, tile)

    def choice(self, condition: PrimExpr, one: tirx.Var, other: PrimExpr) -> PrimExpr:
        return tirx.call_extern(one.ty, CHOICE_FUNCTION, condition, one, other)

    def tile_loop(
        self,
        function: DeviceFunction,
        arguments: Sequence[PrimExpr],
        windows: Sequence[Window | None],
        call: StageCall,
        step: tirx.Var | None,
        where: WaitPlace,
        worker: _Worker,
    ) -> tirx.Stmt:
        """All tiles of a stage that are a worker's; conditions are uniform in a worker, so barriers are safe."""
        it = tirx.Var("it", "int32")
        callee, assignment = self.global_vars[function], call.assignment
        slot = it * worker.count + worker.number
        slots, place, tile, turn = function.tiles, None, slot, it
        if assignment is not None:
            if assignment.count * assignment.per_slot != function.tiles:
                raise LoweringError(f"{callee.name_hint} has {function.tiles} tiles, which are not those of its slots")
            slots, place = assignment.count, tirx.Var("place", "int32")
            inside = place if assignment.per_slot > 1 else _FIRST
            tile = _tile(assignment, slot, inside)
            turn = it * assignment.per_slot + inside
        arguments = [
            argument if window is None else self.in_window(argument, window, turn, tile)
            for argument, window in zip(arguments, windows, strict=True)
        ]
        body = self.called(function, tile, [*arguments, *self.kept.get(call, ())])
        if call.prologue is not None:
            body = sequence(tirx.IfThenElse(it > 0, self.copies(call, tile, arguments), None), body)
        if call.kept is not None:
            if assignment is not None:
                raise LoweringError(f"{callee.name_hint} keeps the constants of one tile, and a block has several")
            body = sequence(tirx.IfThenElse(self.worker.count < function.tiles, self.fill(call, tile), None), body)
        if function.threads < self.shape.team_threads and function.has_barrier and not function.partial:
            raise LoweringError(
                f"stage {callee.name_hint} has barriers for blocks of {function.threads} threads in a kernel of "
                f"{self.shape.team_threads}: call the form that fit_functions gives"
            )
        # Whole warps, where the stage has barriers of their own.
        body = self.of_threads(function, body)
        if function.shared_bytes or function.partial or any(windows):
            # The next tile, or the next stage, writes the pool that this one reads. All threads wait, also those that
            # the stage has no work for: else they would run ahead into the next stage and write the pool while this one
            # reads it, or use the number of this one's barrier with another count. They have nothing else to do before.
            body = sequence(body, self.block_barrier())
        if assignment is not None and assignment.per_slot > 1:
            body = tirx.For(place, 0, assignment.per_slot, tirx.ForKind.SERIAL, body)
        body = sequence(*(self.until(wait, slot, step, where) for wait in call.waits), body)
        body = tirx.IfThenElse(slot < slots, body, None)
        turns = tirx.truncdiv(tirx.IntImm("int32", slots - 1) + worker.count, worker.count)
        return tirx.For(it, 0, turns, tirx.ForKind.SERIAL, body)


def _block_barrier() -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def _tile(assignment: Assignment | None, slot: PrimExpr, place: PrimExpr = _FIRST) -> PrimExpr:
    """The tile at a place of a slot."""
    if assignment is None:
        return slot
    return assignment.start + _digits(slot, assignment.slots) + _digits(place, assignment.group)


def _digits(number: PrimExpr, digits: Sequence[tuple[int, int]]) -> PrimExpr:
    """The digits of a number, the most significant first, times their strides."""
    total: PrimExpr = tirx.IntImm("int32", 0)
    below = 1
    for position, (extent, stride) in reversed(list(enumerate(digits))):
        digit = number if below == 1 else tirx.truncdiv(number, below)
        # Nothing stands above the first digit.
        total = total + (tirx.truncmod(digit, extent) if position else digit) * stride
        below *= extent
    return total
