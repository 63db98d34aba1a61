"""Read the control structure of a merged kernel: which stage is called for which tiles with which pointers, and waits.

The kernel's own loops are unrolled: what is proven is proven of the sequence of calls that a launch makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import Call

from souffle.tvm_compat import StatementVisitor, statements_of
from souffle.verify.expressions import (
    Axis,
    Expr,
    Undecided,
    conjuncts,
    const,
    evaluate,
    linear_terms,
    operation,
    variable,
)
from souffle.verify.indices import bytes_of, index_of, operator_name
from souffle.verify.kernel_items import (
    Ahead,
    Arrival,
    Await,
    BarrierMark,
    KernelIf,
    KernelLoop,
    Leave,
    parted,
    unrolled,
    waits,
    wrong_ticks,
)
from souffle.verify.kernel_pointers import Choice, Pointer, moved
from souffle.verify.parts import PART
from souffle.verify.shares import NUMBERING
from souffle.verify.tiles_in_a_row import Arrive, Prefetch, SharedParts, SlotWait, StageRun, Sync
from souffle.verify.wait_names import (
    ARRIVE_FUNCTION,
    AWAIT_FUNCTION,
    BEGIN_FUNCTION,
    COMPLETION_FUNCTION,
    COUNTER_FUNCTION,
    GRID_WAITS,
    LEAVE_FUNCTION,
    WATCHED_AWAIT_FUNCTION,
    WATCHED_FUNCTION,
)

__all__ = ["KernelText", "read_kernel"]

WINDOW_FUNCTION = "souffle_window"
"""A tensor whose parts lie in the shared memory of the blocks that make them."""

_MANY = 1 << 20
"""More blocks than any device holds at once."""

_TRIED = 4096
"""Blocks beyond the number of tiles, for which it is looked whether a grid leaves out a tile."""

_MOST_IN_A_TURN = 64
"""Calls of stages that several make together in the turn of a slot."""


@dataclass(frozen=True, eq=False)
class KernelText:
    """A kernel as it runs.

    Attributes
    ----------
    events : tuple of StageRun, Sync or Prefetch
        In order.
    threads : int
        Of a block.
    problems : tuple of str
        What could not be read.
    refuted : tuple of str
        What is wrong whatever the stages do: barriers that not all reach, tiles that some grid leaves out.
    counters : tuple of int
        Parameters that point to where grid barriers count arrivals, and to flags.
    records : tuple of int
        Parameters that point to where waits with a limit write that they are over.
    calls : tuple of str
        The device functions that wait, or say what others wait for.
    words : tuple of int
        Elements of that memory that the kernel takes flags to have.
    """

    events: tuple[StageRun | Sync | Arrive | Prefetch, ...]
    threads: int
    problems: tuple[str, ...]
    refuted: tuple[str, ...]
    counters: tuple[int, ...] = ()
    records: tuple[int, ...] = ()
    calls: tuple[str, ...] = ()
    words: tuple[int, ...] = ()


def read_kernel(func: tirx.PrimFunc) -> KernelText:
    """The run of a merged kernel ``kernel(pointers..., num_blocks)``; what cannot be read is in its `problems`."""
    return _Reader(func).read()


class _Reader(StatementVisitor):
    """Reads each statement as the items that it is."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self.blocks, self.block, self.thread = Axis("num_blocks", _MANY), Axis("block", _MANY), Axis("tid", 1024)
        self.env: dict[Any, Expr] = {}
        self.pointers: dict[Any, Pointer] = {}
        self.threads = 0
        self.thread_var: Any = None
        self.problems: dict[str, None] = {}
        self.refuted: dict[str, None] = {}
        self.counters: dict[int, None] = {}
        self.records: dict[int, None] = {}
        self.calls: dict[str, None] = {}
        self.words: dict[int, None] = {}
        # Arrivals before the launch, and the waits of each call of a stage before it is known at which step.
        self.before = Axis("arrivals before", _MANY)
        self.awaits: dict[int, tuple[Await, ...]] = {}
        # Of each call of a stage, before it is known at which step.
        self.given: list[tuple[Pointer | Choice, ...]] = []
        # The loop over the tiles of a slot that is being read.
        self.places: Axis | None = None
        # Of one loop over tiles: how many stages stand before each grid barrier in a turn, and the barrier.
        self.grid_waits: list[tuple[int, Any]] = []
        self.turn_axis = Axis("it", _MANY)
        self.loops = 0

    def read(self) -> KernelText:
        *pointers, count = self.func.params
        for number, pointer in enumerate(pointers):
            self.pointers[pointer] = Pointer(number, bytes_of(str(pointer.ty.element_type.dtype)), const(0))
        # The number of blocks is an axis from 0; nothing below reads its value 0 as a grid.
        self.env[count] = variable(self.blocks)
        events: tuple[Any, ...] = ()
        try:
            events = tuple(unrolled(self.visit(self.func.body), self.given, self.awaits, {}))
        except Undecided as reason:
            self.problems[str(reason)] = None
        self.refuted |= dict.fromkeys(wrong_ticks(events))
        events = tuple(event for event in events if not isinstance(event, Leave))
        found = (self.problems, self.refuted, self.counters, self.records, self.calls, self.words)
        return KernelText(events, self.threads, *map(tuple, found))

    def visit_sequence(self, node: tirx.SeqStmt) -> tuple[Any, ...]:
        return tuple(item for part in node.seq for item in self.visit(part))

    def visit_bind(self, node: tirx.Bind) -> tuple[Any, ...]:
        if isinstance(node.value, Call) and operator_name(node.value) == BEGIN_FUNCTION:
            self.state(node.value, BEGIN_FUNCTION)
            self.env[node.var] = variable(self.before)
            return ()
        self.env[node.var] = index_of(node.value, self.env)
        return ()

    def visit_if_then_else(self, node: tirx.IfThenElse) -> tuple[Any, ...]:
        condition, then = index_of(node.condition, self.env), self.visit(node.then_case)
        otherwise = () if node.else_case is None else self.visit(node.else_case)
        if condition.opaque or condition.axes & {self.block, self.thread, self.blocks}:
            if any(waits(item) for item in (*then, *otherwise)):
                self.refuted[f"a barrier under the condition {node.condition}, which not all threads meet"] = None
            raise Undecided(f"a stage under the condition {node.condition}")
        return (KernelIf(condition, then, otherwise),)

    def visit_evaluate(self, node: tirx.Evaluate) -> tuple[Any, ...]:
        return self.call(node.value) if isinstance(node.value, Call) else ()

    def visit_other(self, node: Any) -> tuple[Any, ...]:
        raise Undecided(f"a statement of the kind {type(node).__name__} in a kernel")

    def visit_attr(self, node: tirx.AttrStmt) -> tuple[Any, ...]:
        """An axis of the launch."""
        if node.attr_key == NUMBERING:
            numbering = int(node.value.value)
            return tuple(
                replace(item, numbering=numbering) if isinstance(item, StageRun) else item
                for item in self.visit(node.body)
            )
        if node.attr_key == PART:
            return self.of_parts(node)
        if node.attr_key != "thread_extent":
            raise Undecided(f"the attribute {node.attr_key} in a kernel")
        tag = str(node.node.thread_tag)
        if tag == "blockIdx.x" and index_of(node.value, self.env) is variable(self.blocks):
            self.env[node.node.var] = variable(self.block)
        elif tag == "threadIdx.x" and isinstance(node.value, tirx.IntImm):
            self.threads = int(node.value.value)
            self.thread = Axis("tid", self.threads)
            self.thread_var = node.node.var
            self.env[node.node.var] = variable(self.thread)
        else:
            raise Undecided(f"a kernel over {tag} of {node.value}")
        return self.visit(node.body)

    def of_parts(self, node: tirx.AttrStmt) -> tuple[Any, ...]:
        """Loops over tiles by workers of other threads than a block has."""
        before = self.threads, self.thread
        self.threads = int(node.value.value)
        self.thread = Axis("tid", self.threads)
        self.env[self.thread_var] = variable(self.thread)
        items = self.visit(node.body)
        self.threads, self.thread = before
        self.env[self.thread_var] = variable(self.thread)
        return tuple(replace(i, part=int(node.value.value)) if isinstance(i, StageRun) else i for i in items)

    def visit_for(self, node: tirx.For) -> tuple[Any, ...]:
        low, extent = index_of(node.min, self.env), index_of(node.extent, self.env)
        if node.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED) or node.step is not None:
            raise Undecided(f"the loop over {node.loop_var.name}")
        if extent.op == "const":
            axis = Axis(str(node.loop_var.name), max(1, extent.value))
            self.env[node.loop_var] = operation("add", low, variable(axis))
            body = self.visit(node.body)
            return (KernelLoop(axis, low, body),) if extent.value > 0 else ()
        if extent.opaque or extent.axes != {self.blocks} or low is not const(0):
            raise Undecided(f"the loop over {node.loop_var.name} of {node.extent} turns")
        return self.tile_loop(node, extent)

    # The tiles of a stage

    def tile_loop(self, node: tirx.For, turns: Expr) -> tuple[Any, ...]:
        """``for it: slot = it * num_blocks + block; if slot < slots: barrier?; stage(tile, ...); barrier?``

        The tile is the slot, or a function of it and of a loop of constant turns around the call.

        The turns are as many in all blocks, so that all of them reach a grid barrier outside of the branch equally
        often. One before all stages of a turn is read as one before the loop, one after them as one after it; others
        are not counted on.
        """
        turn = variable(self.turn_axis)
        blocks, block = variable(self.blocks), variable(self.block)
        products = (operation("mul", turn, blocks), operation("mul", blocks, turn))
        sums = [f for p in products for f in (operation("add", p, block), operation("add", block, p))]
        self.env[node.loop_var] = turn
        self.loops += 1
        self.grid_waits.clear()
        marks: list[StageRun | BarrierMark | Await] = []
        self.turn(node.body, sums, None, self.threads, marks)
        runs = [replace(run, loop=self.loops) for run in parted(marks)]
        waits: list[Await] = []
        for mark in marks:
            if isinstance(mark, Await):
                waits.append(mark)
            elif isinstance(mark, StageRun):
                self.awaits[mark.call] = tuple(waits)
        for run in runs:
            self.cover(run, turns)
        before = tuple(wait for place, wait in self.grid_waits if place == 0)
        after = tuple(wait for place, wait in self.grid_waits if place == len(runs))
        return (*before[:1], *runs, *after[:1])

    def turn(
        self, node: Any, tile: list[Expr], tiles: int | None, threads: int, marks: list[StageRun | BarrierMark]
    ) -> None:
        """One turn: its calls and the barriers between them."""
        for part in statements_of(node):
            if isinstance(part, tirx.IfThenElse) and part.else_case is None:
                self.turn(part.then_case, tile, *self.guard(part.condition, tile, tiles, threads), marks)
                continue
            if isinstance(part, tirx.Bind):
                self.env[part.var] = index_of(part.value, self.env)
                continue
            if isinstance(part, tirx.For):
                self.place(part, tile, tiles, threads, marks)
                continue
            if isinstance(part, tirx.Evaluate) and isinstance(part.value, tirx.IntImm):
                continue
            if not (isinstance(part, tirx.Evaluate) and isinstance(part.value, Call)):
                raise Undecided(f"a statement of the kind {type(part).__name__} in a loop over tiles")
            name = operator_name(part.value)
            if name == "tirx.tvm_storage_sync":
                self.block_barrier(part.value)
                if threads < self.threads:
                    self.refuted["a block barrier that only some threads of a block reach"] = None
                marks.append(BarrierMark(tiles))
            elif name in GRID_WAITS:
                if tiles is None and threads == self.threads:
                    calls = sum(isinstance(mark, StageRun) for mark in marks)
                    self.grid_waits += [(calls, wait) for wait in self.call(part.value)]
                    continue
                self.refuted["a grid barrier in a loop over tiles, which not all blocks reach equally often"] = None
            elif name == ARRIVE_FUNCTION:
                self.refuted["an arrival in a loop over tiles, where a block is not done with all of them"] = None
            elif name in (AWAIT_FUNCTION, WATCHED_AWAIT_FUNCTION):
                marks.append(self.wait(part.value, tile, tiles, threads))
            elif isinstance(part.value.op, tvm.ir.GlobalVar):
                marks.append(self.run(part.value, tile, tiles, threads))
            else:
                raise Undecided(f"a call of {name} in a loop over tiles")

    def place(
        self, node: tirx.For, tile: list[Expr], tiles: int | None, threads: int, marks: list[StageRun | BarrierMark]
    ) -> None:
        """A loop over the tiles of a slot: one run of its stage, or where several take turns one of each at each place.

        As if the loop were unrolled: stages at a place stand in a slot's turn beside those at the others.
        """
        extent = index_of(node.extent, self.env)
        plain = node.kind == tirx.ForKind.SERIAL and node.step is None and index_of(node.min, self.env) is const(0)
        if not plain or extent.op != "const" or self.places is not None:
            raise Undecided(f"the loop over {node.loop_var.name} in a loop over tiles")
        self.places = Axis(str(node.loop_var.name), max(1, extent.value))
        self.env[node.loop_var] = variable(self.places)
        own: list[StageRun | BarrierMark] = []
        self.turn(node.body, tile, tiles if extent.value else 0, threads, own)
        self.places = None
        runs = parted(own)
        if len(runs) * extent.value > _MOST_IN_A_TURN:
            raise Undecided(f"{len(runs)} stages in a loop over the {extent.value} tiles of a slot")
        # A barrier outside of the loop does not part the tiles of a slot.
        between = any(run.before or run.after for run in runs)
        for place in range(extent.value) if len(runs) > 1 else (None,):
            own = [replace(m, place=place, between=between) if isinstance(m, StageRun) else m for m in own]
            marks += own

    def guard(self, node: Any, tile: list[Expr], tiles: int | None, threads: int) -> tuple[int | None, int]:
        for condition in conjuncts([index_of(node, self.env)]):
            bound = condition.args[1].value if len(condition.args) == 2 and condition.args[1].op == "const" else None
            subject = condition.args[0] if condition.args else None
            if bound is None or condition.op not in ("lt", "le"):
                raise Undecided(f"the condition {node} in a loop over tiles")
            bound += condition.op == "le"
            if any(subject is t for t in tile):
                tiles = bound if tiles is None else min(tiles, bound)
            elif subject is variable(self.thread):
                threads = min(threads, bound)
            else:
                raise Undecided(f"the condition {node} in a loop over tiles")
        return tiles, threads

    def wait(self, call: Call, tile: list[Expr], tiles: int | None, threads: int) -> Await:
        """``AWAIT_FUNCTION(state, first, last, num_blocks, tick)`` in the turn of a slot."""
        name = operator_name(call)
        self.state(call, name)
        if name == WATCHED_AWAIT_FUNCTION:
            self.records[self.whole(call.args[6])] = None
        if tiles is None or self.places is not None:
            raise Undecided("a wait for slots outside of the turn of a slot")
        if threads < self.threads:
            self.refuted["a wait for slots that only some threads of a block reach"] = None
        first, last, blocks, tick = (index_of(a, self.env) for a in call.args[2:6])
        if blocks is not variable(self.blocks):
            self.refuted[f"a wait for slots of {call.args[4]} blocks, which is not the grid that is launched"] = None
        ends = self.slots_between(first, last, tile, max(1, tiles))
        if ends.first.min() < 0:
            self.refuted[f"a wait for slot {int(ends.first.min())}, which is on no block"] = None
        return Await(self.tick(tick, call), ends)

    def slots_between(self, first: Expr, last: Expr, tile: list[Expr], count: int) -> SlotWait:
        """Which slots each slot waits for. Those of some grids only do not count, and it is not proven then."""
        slot = Axis("slot", count)
        found = [_replaced(end, tile, variable(slot)) for end in (first, last)]
        if all(not end.opaque and end.axes <= {slot} for end in found):
            at = {slot: np.arange(count)}
            return SlotWait(*(np.broadcast_to(evaluate(end, at, {}), count) for end in found))
        self.problems[f"whether the slots {first} to {last} that are waited for are those of a slot"] = None
        known = {self.turn_axis, self.blocks, self.block}
        if any(end.opaque or not end.axes <= known for end in (first, last)):
            return SlotWait(np.full(count, count), np.full(count, -1))
        tried: list[list[np.ndarray]] = []
        for blocks in sorted({1, 2, 3, count - 1, count} - {0}):
            slots = np.arange(count)
            at = {self.turn_axis: slots // blocks, self.block: slots % blocks, self.blocks: np.full(count, blocks)}
            tried.append([np.broadcast_to(evaluate(end, at, {}), count) for end in (first, last)])
        return SlotWait(np.max([one[0] for one in tried], axis=0), np.min([one[1] for one in tried], axis=0))

    def tick(self, tick: Expr, call: Call) -> Expr:
        """Which arrival of the launch one is; 0, which is past, for one that is not counted from its begin."""
        terms, number = linear_terms(tick)
        own = const(number)
        counted = terms.pop(variable(self.before), 0)
        if counted != 1 and not tick.opaque:
            self.problems[f"which arrival {call} is about in a second launch"] = None
            return const(0)
        for term, factor in terms.items():
            own = operation("add", own, operation("mul", term, const(factor)))
        if own.opaque or own.axes & {self.before, self.block, self.thread, self.blocks, self.turn_axis}:
            raise Undecided(f"which arrival {call} is about")
        return own

    def state(self, call: Call, name: str) -> None:
        """All flags are in the same memory."""
        self.counters[self.whole(call.args[1])] = None
        self.calls[name] = None

    def run(self, call: Call, tile: list[Expr], tiles: int | None, threads: int) -> StageRun:
        name = str(call.op.name_hint)
        if index_of(call.args[1], self.env) is not variable(self.thread):
            raise Undecided(f"the thread {call.args[1]} of {name}")
        if tiles is None:
            raise Undecided(f"the tiles of {name}, which have no bound")
        own = index_of(call.args[0], self.env)
        found = [self.in_shared(a, own) for a in call.args[2:]]
        self.given.append(tuple(pointer for pointer, _ in found))
        number, shared = len(self.given) - 1, tuple(parts for _, parts in found)
        shared = shared if any(shared) else ()
        if self.places is None and any(own is t for t in tile):
            return StageRun(name, max(0, tiles), threads, call=number, shared=shared)
        slots, ranks = self.slots(name, own, tile, max(0, tiles))
        return StageRun(name, len(slots), threads, slots=slots, ranks=ranks, call=number, shared=shared)

    def in_shared(self, node: Any, own: Expr) -> tuple[Pointer | Choice, SharedParts | None]:
        """A pointer, and where parts of its tensor lie in its place.

        ``souffle_window(data, start, turns, nbytes, turn, tile)`` is the address from which byte ``tile * nbytes`` is
        byte ``start + turn * nbytes`` of the pool, if ``turn < turns``, and else `data`. With `turn` the number of the
        block's tile and `tile` its own, both up to a constant, that is :class:`SharedParts`.
        """
        if not (isinstance(node, Call) and operator_name(node) == WINDOW_FUNCTION):
            return self.pointer(node), None
        start, turns, nbytes, turn, tile = (index_of(a, self.env) for a in node.args[2:])
        if not (start.op == turns.op == nbytes.op == "const" and nbytes.value > 0):
            raise Undecided(f"the window {node}")
        each = 1 if self.places is None else self.places.extent
        counted = {variable(self.turn_axis): each} | ({variable(self.places): 1} if self.places else {})
        numbers, later = linear_terms(turn)
        further, other = linear_terms(operation("sub", tile, own))
        if numbers != {term: factor for term, factor in counted.items() if factor} or further:
            raise Undecided(f"which part of the window {node} a tile has")
        first = start.value + (later - other) * nbytes.value
        return self.pointer(node.args[1]), SharedParts(first, turns.value - later, nbytes.value)

    def slots(self, name: str, own: Expr, tile: list[Expr], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The slot and the rank of each tile, where the tile is a function of the slot and of the place in it."""
        slot, places = Axis("slot", max(1, count)), self.places or Axis("place", 1)
        of_slot = _replaced(own, tile, variable(slot))
        if of_slot.opaque or not of_slot.axes <= {slot, places}:
            raise Undecided(f"the tile {own} of {name}")
        axes = {slot: np.arange(slot.extent)[:, None], places: np.arange(places.extent)[None, :]}
        found = np.broadcast_to(evaluate(of_slot, axes, {}), (slot.extent, places.extent))[:count].reshape(-1)
        if not np.array_equal(np.sort(found), np.arange(count * places.extent)):
            self.refuted[f"{name}: its blocks do not compute each of {count * places.extent} tiles once"] = None
            raise Undecided(f"the tiles of {name}")
        ranks = np.empty(found.size, np.int64)
        ranks[found] = np.arange(found.size)
        return tuple((ranks // places.extent).tolist()), tuple(ranks.tolist())

    def cover(self, run: StageRun, turns: Expr) -> None:
        """Whether each grid, of any number of blocks, computes all the tiles.

        ``(last + blocks) / blocks`` turns do, if no tile comes after the last: they are ``last / blocks + 1``, and
        ``(last / blocks + 1) * blocks`` is greater than `last`. Other forms are tried, and not proven.
        """
        slots, rounded = run.turns, turns.args and turns.args[1] is variable(self.blocks)
        terms, last = linear_terms(turns.args[0]) if rounded and turns.op in ("div", "floordiv") else ({}, -1)
        if terms == {variable(self.blocks): 1} and last >= slots - 1:
            return
        grids = np.arange(1, max(slots, 1) + _TRIED, dtype=np.int64)
        done = np.broadcast_to(evaluate(turns, {self.blocks: grids}, {}), grids.shape) * grids
        short = np.flatnonzero(done < slots)
        if short.size:
            grid, first = int(grids[short[0]]), int(done[short[0]])
            what = f"tile {first}" if run.slots is None else f"the tiles of slot {first}"
            self.refuted[f"{run.name}: a grid of {grid} blocks leaves out {what}"] = None
        else:
            self.problems[f"whether every grid computes all tiles of {run.name} in {turns} turns"] = None

    # Pointers and calls

    def pointer(self, node: Any) -> Pointer | Choice:
        if isinstance(node, tvm.ir.Var) and node in self.pointers:
            return self.pointers[node]
        if isinstance(node, Call):
            name = operator_name(node)
            if name == "souffle_at":
                base = self.pointer(node.args[1])
                offset = index_of(node.args[2], self.env)
                return moved(base, offset)
            if name == "souffle_choose":
                condition = index_of(node.args[1], self.env)
                return Choice(condition, self.pointer(node.args[2]), self.pointer(node.args[3]))
        raise Undecided(f"the pointer {node}")

    def call(self, call: Call) -> tuple[Any, ...]:
        name = operator_name(call)
        if name == "tirx.cuda.grid_sync":
            return (Sync("grid"),)
        if name in (COUNTER_FUNCTION, WATCHED_FUNCTION, COMPLETION_FUNCTION):
            return (self.counter(call),)
        if name == "tirx.tvm_storage_sync":
            self.block_barrier(call)
            return (Sync("block"),)
        if name == ARRIVE_FUNCTION:
            self.state(call, name)
            return Sync("block"), Arrival(self.tick(index_of(call.args[2], self.env), call))
        if name == LEAVE_FUNCTION:
            return self.leave(call)
        if name == "souffle_prefetch_l2":
            return (Ahead(self.pointer(call.args[1]), index_of(call.args[2], self.env)),)
        raise Undecided(f"a call of {name} outside of a loop over tiles")

    def counter(self, call: Call) -> Sync:
        """A barrier that counts: every one in the same memory, and each block of the launch once."""
        self.counters[self.whole(call.args[1])] = None
        self.calls[operator_name(call)] = None
        if operator_name(call) == WATCHED_FUNCTION:
            self.records[self.whole(call.args[3])] = None
        if index_of(call.args[2], self.env) is not variable(self.blocks):
            self.refuted[f"a grid barrier for {call.args[2]} blocks, which is not the grid that is launched"] = None
        return Sync("grid")

    def leave(self, call: Call) -> tuple[Any, ...]:
        """The end of the waits of a launch."""
        self.state(call, LEAVE_FUNCTION)
        blocks, tick, words = (index_of(a, self.env) for a in call.args[2:])
        if blocks is not variable(self.blocks):
            self.refuted[f"flags are left by {call.args[2]} blocks, which is not the grid that is launched"] = None
        if words.op != "const":
            raise Undecided(f"how many words of flags there are: {call.args[4]}")
        self.words[words.value] = None
        return Sync("block"), Leave(self.tick(tick, call))

    def whole(self, node: Any) -> int:
        """The parameter that what waits is given as it is."""
        state = self.pointer(node)
        if not isinstance(state, Pointer) or state.offset is not const(0):
            raise Undecided(f"the memory {node} of what waits")
        return state.parameter

    def block_barrier(self, call: Call) -> None:
        if len(call.args) != 1 or str(call.args[0].value) not in ("shared", "shared.dyn"):
            raise Undecided(f"the barrier {call}")


def _replaced(expr: Expr, forms: list[Expr], by: Expr) -> Expr:
    """`expr` with `by` for each part that is one of `forms`."""
    if any(expr is form for form in forms):
        return by
    if not expr.args:
        return expr
    return operation(expr.op, *(_replaced(arg, forms, by) for arg in expr.args))
