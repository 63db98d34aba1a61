"""The kernel of one reduction whose threads hold a few outputs each, in registers (see ``tiling/direct_tiling.py``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import barrier
from souffle.schedule.gpu.emit.contraction_statements import (
    Binder,
    all_of,
    guarded,
    kernel_func,
    local_buffer,
    loop,
    shared_buffer,
)
from souffle.schedule.gpu.emit.lane_totals import LaneShare, LaneTotals
from souffle.schedule.gpu.emit.read_ahead import ReadAhead
from souffle.schedule.gpu.emit.wide_reads import WideReads
from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends, substitute_axes
from souffle.schedule.gpu.forms.matrix_product import Store
from souffle.schedule.gpu.forms.memory_access import lanes_along, memory_step
from souffle.schedule.gpu.forms.one_reduction import Meeting
from souffle.schedule.gpu.tiling.direct_tiling import (
    WARP,
    DirectTiling,
    Held,
    SumPlan,
    halves_totals,
    held_of,
    parts_of,
)
from souffle.tvm_compat import PrimExpr, cast, sequence

__all__ = ["DirectKernel", "emit_direct"]


def emit_direct(plan: SumPlan, tiling: DirectTiling, threads: int) -> tuple[tirx.PrimFunc, int]:
    """The kernel of a sum with these numbers, and its tiles."""
    kernel = DirectKernel(plan, tiling, threads)
    return kernel_func(plan.problem.func, kernel.tiles, threads, kernel.buffers, kernel.body), kernel.tiles


class DirectKernel:
    """A sum's kernel: what one block does, with the buffers that it needs."""

    def __init__(self, plan: SumPlan, tiling: DirectTiling, threads: int) -> None:
        self.plan, self.tiling, self.threads = plan, tiling, threads
        problem = plan.problem
        self.held = held_of(plan, tiling)
        self.registers = [
            local_buffer(f"held{number}", held.size, held.leaf.dtype) for number, held in enumerate(self.held)
        ]
        self.outputs = tiling.outputs(plan)
        self.totals = local_buffer("totals", self.outputs, problem.dtype)
        self.in_tile = threads // tiling.split
        self.distances, self.parts = parts_of(plan, tiling.split, threads) if tiling.split > 1 else ([], 1)
        self.halves = halves_totals(plan, tiling, threads)
        self.shared = None
        self.buffers = [*self.registers, self.totals]
        if self.parts > 1 or tiling.gathered:
            self.shared = shared_buffer("parts", self.parts * self.outputs * self.in_tile, problem.dtype)
            self.buffers.append(self.shared)
        self.widths = {axis.var: tiling.width(plan, axis) for axis in plan.order}
        several = {axis.var: self.widths[axis.var] for axis in self._several()}
        self.of_lanes = LaneTotals(self.totals, several, problem.dtype, problem.combine)
        # The axes of the groups: as many steps as there are threads along an axis.
        self.group_axes = [Axis(axis.var, -(-axis.extent // self.widths[axis.var])) for axis in plan.order]
        self.results = []
        for number, store in enumerate(problem.stores):
            buffer = None
            if self._lanes(store) > 1:
                buffer = local_buffer(f"result{number}", self._lanes(store), str(store.buffer.dtype))
                self.buffers.append(buffer)
            self.results.append(buffer)
        self.ahead = ReadAhead([store.value for store in problem.stores], problem.totals.values())
        self.values = [store.value for store in problem.stores]
        if tiling.ahead and self._single():
            self.values = self.ahead.values
            self.buffers += [register for register, _ in self.ahead.reads]
        # What stands beside the sums of neighbours that are stored together is read together, too.
        together = max(map(self._lanes, problem.stores), default=1)
        self.wide = WideReads(self.values, plan.vector, together, problem.totals.values()) if together > 1 else None
        self.buffers += self.wide.registers if self.wide is not None else []

    def _single(self) -> bool:
        """Whether a group of threads has one element of what follows the sums."""
        return all(self.plan.is_slot(axis) for axis in self._several())

    @property
    def tiles(self) -> int:
        """Blocks of the grid."""
        return self.tiling.tiles(self.plan, self.threads)

    # Places

    def _group(self, block: PrimExpr, thread: PrimExpr, binder: Binder) -> tuple[dict, PrimExpr, list[PrimExpr]]:
        """The first output of a thread by axis, its place in its sum, and under which condition it has any."""
        split, in_tile = self.tiling.split, self.in_tile
        if split == 1:
            lane, group = tirx.IntImm("int32", 0), thread
        elif self.plan.sum_fast:
            lane, group = tirx.floormod(thread, split), tirx.floordiv(thread, split)
        else:
            lane, group = tirx.floordiv(thread, in_tile), tirx.floormod(thread, in_tile)
        linear = binder.name("group", block * in_tile + group)
        groups = self.tiling.groups(self.plan)
        conditions = [tirx.LT(linear, groups)] if groups % in_tile else []
        return self._base(binder, linear), binder.name("lane", lane), conditions

    def _base(self, binder: Binder, group: PrimExpr) -> dict:
        """The first output of a group by axis."""
        found = binder.locate(self.group_axes, group, lambda axis: True)
        return {
            var: binder.name(f"{var.name}_first", value * self.widths[var]) if self.widths[var] > 1 else value
            for var, value in found.items()
        }

    def _at(self, held: Held, places: Mapping[str, Any]) -> PrimExpr:
        """Place in a leaf's registers of one of its values, from those of outputs, window, turn and lane."""
        linear: PrimExpr = tirx.IntImm("int32", 0)
        for kind, extent in zip(held.kinds, held.extents, strict=True):
            if kind[0] == "met":
                _, axis, window, how = kind
                place = places[axis.var] * how.across + places[window.var] * how.along
            else:
                place = places[kind[0] if kind[0] in ("turn", "lane") else kind[1].var]
            linear = linear * extent + place
        return linear

    # Reading

    def _read(self, number: int, base: Mapping, conditions: Sequence[PrimExpr], where: Mapping) -> tirx.Stmt:
        """Read a leaf's values; `where` says where the long axes are, and which turn it is."""
        held, registers = self.held[number], self.registers[number]
        kinds = [kind for kind in held.kinds if kind[0] != "turn"]

        def nest(position: int, chosen: dict[int, PrimExpr]) -> tirx.Stmt:
            if position == len(kinds):
                return value(chosen)
            extent = held.extents[position + len(held.kinds) - len(kinds)]
            kind = "vectorized" if kinds[position][0] == "lane" and held.vector else "unrolled"
            return loop("n", extent, lambda n: nest(position + 1, {**chosen, position: n}), kind)

        def value(chosen: dict[int, PrimExpr]) -> tirx.Stmt:
            at: dict = {**base, **{axis.var: tirx.IntImm("int32", 0) for axis in self.plan.window}}
            at.update({var: place for var, place in where.items() if not isinstance(var, str)})
            inside = list(conditions)
            linear: PrimExpr = tirx.IntImm("int32", 0)
            turn = where.get("turn", tirx.IntImm("int32", 0))
            for position, kind in enumerate((("turn",), *kinds) if len(kinds) < len(held.kinds) else kinds):
                extent = held.extents[position]
                n = turn if kind[0] == "turn" else chosen[position - (len(held.kinds) - len(kinds))]
                linear = linear * extent + n
                if kind[0] == "lane":
                    at[self.plan.vector.var] = at[self.plan.vector.var] + n
                elif kind[0] == "window":
                    at[kind[1].var] = n
                elif kind[0] == "own":
                    at[kind[1].var] = base[kind[1].var] + n
                    inside += self._beyond(kind[1], base, n)
                elif kind[0] == "met":
                    _, axis, window, how = kind
                    moved = window if how.along == 1 else axis
                    at[moved.var] = n if moved is window else base[axis.var] + n
                    inside += self._beyond(axis, base, _first_user(n, window.extent, how), how.along > 1)
            result = substitute_axes(held.leaf.value, at)
            if inside:
                result = tirx.if_then_else(all_of(inside), result, tirx.const(0, held.leaf.dtype))
            return tirx.BufferStore(registers, result, [linear])

        return nest(0, {})

    def _beyond(self, axis: Axis, base: Mapping, output: PrimExpr, gaps: bool = False) -> list[PrimExpr]:
        """The conditions under which a thread's output number `output` along an axis is one."""
        width = self.widths[axis.var]
        conditions = [tirx.LT(base[axis.var] + output, axis.extent)] if axis.extent % width else []
        return [*conditions, tirx.LT(output, width)] if gaps else conditions

    def _several(self) -> list[Axis]:
        """The axes along which a thread has several outputs, as these lie in its totals: the last one fastest."""
        axes = [axis for axis in self.plan.order if self.widths[axis.var] > 1 and axis is not self.plan.vector]
        return [*axes, self.plan.vector] if self.plan.vector_is_output and self.tiling.lanes > 1 else axes

    # Arithmetic

    def _term(self, places: Mapping) -> PrimExpr:
        values = {
            held.leaf.leaf: registers[self._at(held, places)]
            for held, registers in zip(self.held, self.registers, strict=True)
        }
        return substitute_axes(self.plan.problem.term, values)

    def _combined(self, left: PrimExpr, right: PrimExpr) -> PrimExpr:
        return self.plan.problem.combine(left, right)

    def _over_outputs(self, body: Callable[[dict, PrimExpr], tirx.Stmt]) -> tirx.Stmt:
        """`body` for each output of the thread: its place along each axis, and its total's place."""
        zeros = {axis.var: tirx.IntImm("int32", 0) for axis in self.plan.order}
        return self.of_lanes.each(lambda places, at: body({**zeros, **places}, at))

    def _accumulate(self, turn: PrimExpr, in_sum: PrimExpr | None) -> tirx.Stmt:
        """Add the terms of one turn, those beyond the end of the sum left out by `in_sum`."""
        window, tiling = self.plan.window, self.tiling
        own_lanes = tiling.lanes if tiling.lanes > 1 and not self.plan.vector_is_output else 1

        def one(places: dict, at: PrimExpr) -> tirx.Stmt:
            if self.plan.vector_is_output and tiling.lanes > 1:
                places = {**places, "lane": places[self.plan.vector.var]}
            term = self._term(places)
            total = self.totals[at]
            value = self._combined(total, term)
            if in_sum is not None:
                value = tirx.if_then_else(in_sum, value, total)
            return tirx.BufferStore(self.totals, value, [at])

        def nest(position: int, places: dict) -> tirx.Stmt:
            if position < len(window):
                axis = window[position]
                return loop("w", axis.extent, lambda n: nest(position + 1, {**places, axis.var: n}), "unrolled")
            if own_lanes > 1 and "lane" not in places:
                return loop("v", own_lanes, lambda n: nest(position, {**places, "lane": n}), "unrolled")
            return self._over_outputs(lambda chosen, at: one({**places, **chosen}, at))

        return nest(0, {"turn": turn})

    # The whole

    def body(self, block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        """What a thread of a block does."""
        plan, tiling = self.plan, self.tiling
        binder = Binder()
        base, lane, conditions = self._group(block, thread, binder)
        clear = loop(
            "i",
            self.outputs,
            lambda i: tirx.BufferStore(self.totals, cast(plan.problem.initial, plan.problem.dtype), [i]),
            "unrolled",
        )
        # Without a barrier or shuffle, threads that have nothing to do leave; else they only read nothing.
        alone = tiling.split == 1
        inside = [] if alone else conditions
        once = [self._read(number, base, inside, {}) for number, held in enumerate(self.held) if not held.long]
        statements = [clear, *once]
        if plan.long:
            statements.append(self._turns(base, lane, inside))
        else:
            statements.append(self._accumulate(tirx.IntImm("int32", 0), None))
        if tiling.gathered:
            ahead, following = self._gathered(block, thread, lane)
            return sequence(*binder.statements, *ahead, *statements, *following)
        if alone:
            return sequence(*binder.statements, guarded(conditions, sequence(*statements, self._stores(base))))
        joined, share = self._joined(thread, lane)
        if share is None:
            stores = guarded([tirx.EQ(lane, 0), *conditions], self._stores(base))
        else:
            own = {var: place + share.first[var] if var in share.first else place for var, place in base.items()}
            stores = guarded([*share.one_of_alike, *conditions], self._stores(own, share.widths))
        return sequence(*binder.statements, *statements, *joined, stores)

    def _turns(self, base: Mapping, lane: PrimExpr, conditions: Sequence[PrimExpr]) -> tirx.Stmt:
        plan, tiling = self.plan, self.tiling
        lanes = 1 if plan.vector_is_output or plan.vector is None else tiling.lanes
        steps = plan.terms // lanes
        stride = tiling.split * tiling.turns
        ragged = bool(steps % stride)
        rounds = -(-steps // stride)
        long = [number for number, held in enumerate(self.held) if held.long]
        # Zeros are read beyond the end of a sum. Where nothing is read in turns, all terms along it are the same.
        vanishing = plan.problem.combine is tirx.Add and long

        def step(number: PrimExpr, turn: PrimExpr, binder: Binder) -> PrimExpr:
            return binder.name("step", (number * tiling.turns + turn) * tiling.split + lane)

        def read(number: PrimExpr, turn: PrimExpr) -> tirx.Stmt:
            binder = Binder()
            at = step(number, turn, binder)
            inside = [*conditions, tirx.LT(at, steps)] if ragged else list(conditions)

            def used(axis: Axis) -> bool:
                return any(depends(self.held[one].leaf.value, axis) for one in long)

            where = binder.locate(plan.long, at, used, lanes, tirx.IntImm("int32", 0))
            where = {**where, "turn": turn}
            return sequence(*binder.statements, *(self._read(one, base, inside, where) for one in long))

        def add(number: PrimExpr, turn: PrimExpr) -> tirx.Stmt:
            binder = Binder()
            in_sum = None
            if ragged and not vanishing:
                in_sum = tirx.LT(step(number, turn, binder), steps)
            return sequence(*binder.statements, self._accumulate(turn, in_sum))

        def together(number: PrimExpr) -> tirx.Stmt:
            return sequence(
                loop("turn", tiling.turns, lambda turn: read(number, turn), "unrolled") if long else None,
                loop("turn", tiling.turns, lambda turn: add(number, turn), "unrolled"),
            )

        return loop("round", rounds, together)

    def _joined(self, thread: PrimExpr, lane: PrimExpr) -> tuple[list[tirx.Stmt], LaneShare | None]:
        """Join the totals of the threads that share a sum; the first of them has all of it then, or each its share."""
        plan, tiling = self.plan, self.tiling
        statements, share = self._exchanged(thread)
        if self.shared is None:
            return statements, share
        in_tile, fast = self.in_tile, tiling.split if plan.sum_fast else self.in_tile
        warp = tirx.floordiv(thread, WARP)
        if plan.sum_fast:
            group, part = tirx.floordiv(thread, tiling.split), tirx.floordiv(lane, WARP)
            first = [tirx.EQ(tirx.floormod(thread, WARP), 0)]
        else:
            group = tirx.floormod(thread, in_tile)
            part, first = (lane, []) if fast >= WARP else (warp, [tirx.LT(tirx.floormod(thread, WARP), fast)])

        def place(part: PrimExpr, i: PrimExpr) -> PrimExpr:
            return (part * self.outputs + i) * in_tile + group

        def gathered(i: PrimExpr) -> tirx.Stmt:
            def further(p: PrimExpr) -> tirx.Stmt:
                joined = self._combined(self.totals[i], self.shared[place(p + 1, i)])
                return tirx.BufferStore(self.totals, joined, [i])

            start = tirx.BufferStore(self.totals, self.shared[place(tirx.IntImm("int32", 0), i)], [i])
            return sequence(start, loop("part", self.parts - 1, further, "unrolled"))

        put = self._put(share, first, lambda i: place(part, i))
        gather = loop("i", self.outputs, gathered, "unrolled")
        return [*statements, put, barrier(), guarded([tirx.EQ(lane, 0)], gather)], None

    def _put(
        self, share: LaneShare | None, first: Sequence[PrimExpr], place: Callable[[PrimExpr], PrimExpr]
    ) -> tirx.Stmt:
        """Store totals to shared memory: those of a share, by all lanes that have one, or else by the `first` lanes."""
        start = tirx.IntImm("int32", 0) if share is None else self.of_lanes.place(share.first)

        def one(_: dict, i: PrimExpr) -> tirx.Stmt:
            return tirx.BufferStore(self.shared, self.totals[i], [place(start + i)])

        if share is None:
            return guarded(first, self.of_lanes.each(one))
        return guarded(share.one_of_alike, self.of_lanes.each(one, share.widths))

    def _exchanged(self, thread: PrimExpr) -> tuple[list[tirx.Stmt], LaneShare | None]:
        """Join the totals of lanes of one warp: each then has its share, or, without one, the first lane all of it."""
        if self.halves:
            return self.of_lanes.shared_out(thread, self.distances)
        return self.of_lanes.joined(self.distances), None

    def _gathered(self, block: PrimExpr, thread: PrimExpr, lane: PrimExpr) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
        """Join the totals of the threads that share a sum, each of them some; the first threads have all of one then.

        What these read beside them they ask for first, so that nothing waits for memory behind the barrier.
        """
        in_tile, outputs = self.in_tile, self.outputs
        statements, share = self._exchanged(thread)
        group = tirx.floordiv(thread, self.tiling.split)
        put = self._put(share, [tirx.EQ(lane, 0)], lambda i: i * in_tile + group)

        def got(i: PrimExpr) -> tirx.Stmt:
            return tirx.BufferStore(self.totals, self.shared[i * in_tile + thread], [i])

        binder = Binder()
        linear = binder.name("group", block * in_tile + thread)
        groups = self.tiling.groups(self.plan)
        inside = [tirx.LT(linear, groups)] if groups % in_tile else []
        base, inside = self._base(binder, linear), [tirx.LT(thread, in_tile), *inside]
        following = sequence(loop("i", outputs, got, "unrolled"), self._stores(base))
        reads = [
            tirx.BufferStore(register, substitute_axes(value, base), [0])
            for register, value in (self.ahead.reads if self.values is self.ahead.values else ())
        ]
        before = [*binder.statements, *([guarded(inside, sequence(*reads))] if reads else [])]
        return before, [*statements, put, barrier(), guarded(inside, following)]

    # Writing

    def _lanes(self, store: Store) -> int:
        """Elements of one store."""
        lanes, vector = self.tiling.lanes, self.plan.vector
        if not self.plan.vector_is_output or lanes == 1 or self.plan.is_slot(vector):
            return 1
        target = store.buffer[store.indices]
        whole = memory_step(target, vector) == 1 and lanes_along(target, vector, str(store.buffer.dtype)) >= lanes
        return lanes if whole else 1

    def _total(self, own: Mapping, slots: Sequence[int]) -> PrimExpr:
        """One of a thread's totals, by its places along the axes of which the thread has several, and along slots."""
        at = {**own, **{axis.var: n for axis, n in zip(self.plan.problem.slots, slots, strict=True)}}
        return self.totals[self.of_lanes.place(at)]

    def _stores(self, base: Mapping, widths: Mapping[tirx.Var, int] | None = None) -> tirx.Stmt:
        """Store the thread's outputs, or the first ones along each axis, of which the first is at `base`."""
        plan, widths = self.plan, self.widths if widths is None else widths
        vector = plan.vector if plan.vector_is_output and widths.get(plan.vector.var, 1) > 1 else None
        vector = None if vector is None or plan.is_slot(vector) else vector
        axes = [axis for axis in self._several() if axis is not vector and not plan.is_slot(axis)]

        def nest(position: int, own: dict, inside: list[PrimExpr]) -> tirx.Stmt:
            if position < len(axes):
                axis = axes[position]

                def one(n: PrimExpr) -> tirx.Stmt:
                    return nest(position + 1, {**own, axis.var: n}, inside + self._beyond(axis, base, n))

                return loop("i", widths[axis.var], one, "unrolled")
            lanes = 1 if vector is None else widths[vector.var]
            wide = lanes == self.tiling.lanes and self.wide is not None
            reads = self._wide_reads(base, own) if wide else None
            stores = [self._store(k, base, own, vector, lanes, wide) for k in range(len(plan.problem.stores))]
            return guarded(inside, sequence(reads, *itertools.chain(*stores)))

        return nest(0, {}, [])

    def _at_place(self, base: Mapping, places: Mapping) -> dict:
        """The axes at one of a thread's outputs."""
        return {**base, **{var: base[var] + place for var, place in places.items()}}

    def _wide_reads(self, base: Mapping, own: Mapping) -> tirx.Stmt | None:
        """Read what stands beside the sums of a vector of outputs."""

        def here(load: PrimExpr, lane: PrimExpr) -> PrimExpr:
            return substitute_axes(load, self._at_place(base, {**own, self.plan.vector.var: lane}))

        return self.wide.statement(here)

    def _store(
        self, number: int, base: Mapping, own: Mapping, vector: Axis | None, lanes: int, wide: bool
    ) -> list[tirx.Stmt]:
        """Store one output at a place, or `lanes` neighbours: computed one by one, stored together."""
        store, result = self.plan.problem.stores[number], self.results[number]

        def here(lane: PrimExpr) -> tuple[PrimExpr, list[PrimExpr]]:
            places = dict(own) if vector is None else {**own, vector.var: lane}
            at = self._at_place(base, places)
            totals = {total: self._total(places, slots) for slots, total in self.plan.problem.totals.items()}
            value = self.wide.value(number, lane) if wide else self.values[number]
            return substitute_axes(value, {**at, **totals}), [substitute_axes(i, at) for i in store.indices]

        def direct(lane: PrimExpr) -> tirx.Stmt:
            value, indices = here(lane)
            return tirx.BufferStore(store.buffer, value, indices)

        if vector is None:
            return [direct(tirx.IntImm("int32", 0))]
        if result is None:
            return [loop("lane", lanes, direct, "unrolled")]
        compute = loop("lane", lanes, lambda lane: tirx.BufferStore(result, here(lane)[0], [lane]), "unrolled")
        write = loop(
            "lane", lanes, lambda lane: tirx.BufferStore(store.buffer, result[lane], here(lane)[1]), "vectorized"
        )
        return [compute, write]


def _first_user(place: PrimExpr, extent: int, how: Meeting) -> PrimExpr:
    """The first of a thread's outputs that uses place number `place` of what it holds."""
    if how.along == 1:
        return tirx.floordiv(tirx.Max(place - (extent - how.across), tirx.IntImm("int32", 0)), how.across)
    return place - how.along * tirx.Min(tirx.floordiv(place, how.along), tirx.IntImm("int32", extent - 1))
