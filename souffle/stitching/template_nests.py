"""The loop nests of a pattern's operations, by their templates (FusionStitching 2019, §5.1 and §5.3).

What is in shared memory and what is stored has a nest of its own, a *host*; what stays in registers is computed in the
nest that reads it, its *home*. ``template_schedule.py`` says which is which.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from tvm import ir, s_tir, tirx

from souffle.schedule.gpu.forms.blocks import block_loops, block_view
from souffle.stitching.guards import conjuncts, guarded
from souffle.stitching.layout import AxisSet
from souffle.stitching.template import Attribute, TemplateError
from souffle.stitching.template_blocks import HOST, in_grids
from souffle.stitching.template_grid import HostGrid, grids_of
from souffle.stitching.template_launch import ThreadGroup, Tiling
from souffle.stitching.template_pattern import Pattern
from souffle.tvm_compat import Analyzer, PrimExpr, collect, variables

__all__ = ["Nests"]


@dataclass(frozen=True, eq=False)
class _Nest:
    """The loops of one operation that has a nest of its own, as far as others can be computed in them.

    Attributes
    ----------
    tiling : Tiling
    own : SBlockRV
        The block that the loops are of.
    warp : LoopRV or None
        The innermost loop over warps, within which all threads are lanes of one warp.
    thread : LoopRV or None
        The innermost loop over threads, within which each has elements of its own; none where they reduce together.
    element : LoopRV
        The innermost loop, within which a thread has one element, or one term of its reduction.
    """

    tiling: Tiling
    own: Any
    warp: Any
    thread: Any
    element: Any


_Levels = dict[tuple[int, int], Any]
"""Loops by the dimension and level that they are of."""


class Nests:
    """Builds the nests of a kernel, from what is read last to what is read first.

    Parameters
    ----------
    pattern : Pattern
    dimensions : tuple of int
        Extents of ``threadIdx`` from x on.
    """

    def __init__(self, pattern: Pattern, dimensions: tuple[int, ...]) -> None:
        self.pattern, self.dimensions = pattern, dimensions
        self.sch, self.tilings, self.blocks = pattern.sch, pattern.tilings, pattern.blocks
        self.readers = pattern.readers()
        self.homes = self.found_homes()
        self.grid: dict[int, Any] = {}
        self.copies: dict[int, Any] = {}
        self.hosts: dict[int, _Nest] = {}
        self.serial: list[tuple[Any, Any]] = []

    def found_homes(self) -> dict[int, int]:
        """In whose nest each operation is computed: its own, or that of all that read it."""
        found: dict[int, int] = {}
        for number in sorted(self.tilings, reverse=True):
            tiling, reads = self.tilings[number], {found[reader] for reader in self.readers[number]}
            if tiling.schedule.shared or number in self.pattern.stored:
                found[number] = number
            elif len(reads) == 1:
                (found[number],) = reads
            else:
                names = ", ".join(sorted(self.tilings[home].op.name for home in reads))
                why = f"is read in the nests of {names}, which share no registers; S would keep it for them"
                raise TemplateError(f"{tiling.op.name} {why}")
        return found

    def grids(self, sets: Sequence[AxisSet]) -> dict[int, HostGrid]:
        """The units of the nests."""
        hosts = {number: self.tilings[number] for number in sorted(self.tilings) if self.homes[number] == number}
        # The last TE's digits come first, and copies are none.
        order = sorted(hosts, key=lambda number: (number < self.pattern.count, number))
        reads: dict[int, set[int]] = {number: set() for number in hosts}
        for number, readers in self.readers.items():
            if self.tilings[number].schedule.shared:
                for reader in readers:
                    reads[self.homes[reader]].add(number)
        member = {number: number % self.pattern.count for number in hosts}
        found = grids_of({number: hosts[number] for number in order}, member, reads, sets)
        for number, grid in found.items():
            tiling = hosts[number]
            if tiling.across and grid.stored and grid.others:
                # TVM recognizes no reduction across threads behind a condition on blocks.
                raise TemplateError(f"{tiling.schedule} would be computed by several of {grid.units} blocks")
        return found

    def scheduled(self, grids: Mapping[int, HostGrid], blocks: int | None) -> tirx.PrimFunc:
        """The function with all nests."""
        levels = {number: self.in_grid(number, grids[number]) for number in sorted(grids, reverse=True)}
        others = sorted((number for number in self.tilings if number not in grids), reverse=True)
        # All are in the block loop before any loop is divided among threads: what a block reads is plain then.
        for number in others:
            self.sch.set_scope(self.blocks[number], 0, "local")
            self.sch.compute_at(self.blocks[number], self.grid[self.homes[number]], preserve_unit_loops=True)
        self.hosts = {number: self.nest(number, levels[number]) for number in levels}
        nests = dict(self.hosts)
        for number in others:
            nests[number] = self.in_registers(number, self.hosts[self.homes[number]])
        guards = {self.sch.get(self.blocks[n]).name_hint: self.left_out(n, nest) for n, nest in nests.items()}
        # Last, since a block without its initialization is none that loops can be bound around.
        for block, loop in self.serial:
            # TVM does not see through the indices of a dimension that does not divide, fused with another one. Then
            # the total is begun within the loops, at their first iteration.
            with suppress(s_tir.ScheduleError):
                self.sch.decompose_reduction(block, loop)
        return in_grids(guarded(self.sch.mod["main"], guards), grids, blocks)

    # Where an operation is computed

    def in_grid(self, number: int, grid: HostGrid) -> _Levels:
        """One that has a nest of its own: its ``GRID`` loops stand outside. The other loops."""
        sch, tiling = self.sch, self.tilings[number]
        own = self.opened(number)
        levels = self.levels(tiling, block_loops(sch, block_view(sch, own)), frozenset())
        places = [place for place in sorted(levels) if _attribute(tiling, place) is Attribute.GRID]
        loops = {place: levels.pop(place) for place in places}
        outer = [loops.pop(place) for place, _ in grid.levels]
        sch.reorder(*outer, *loops.values(), *levels.values())
        if not outer:
            outer = [_unit_loop(sch, own)]
        sch.annotate(outer[0], HOST, number)
        self.grid[number] = outer[-1]
        if tiling.schedule.shared:
            sch.set_scope(own, 0, "shared")
        return levels

    def in_registers(self, number: int, host: _Nest) -> _Nest:
        """Warp or thread composition: in a loop of the nest that reads it, which is the answer."""
        tiling = self.tilings[number]
        if tiling.across:
            self.in_warp(number, host)
        else:
            block = self.blocks[number]
            # Elements of the host that a thread or a warp takes in turn may read one result.
            at = host.thread if any(tiling.op.reduced) and host.thread is not None else host.element
            if _of_warps(tiling) and host.warp is not None:
                at = host.warp
            self.reduced_in_sequence(block, self.attached(number, block, at), tiling)
        return host

    def in_warp(self, number: int, host: _Nest) -> None:
        """Warp composition: all lanes reduce together, and each has the result."""
        tiling = self.tilings[number]
        name, schedule = tiling.op.name, tiling.schedule
        if not schedule.has(Attribute.WARP) or any(group.attribute is Attribute.WARP for group in tiling.across):
            raise TemplateError(f"{schedule} combines {name} across warps; what reads it needs it in shared memory: S")
        if any(group.attribute is Attribute.CTA and not group.reduced for group in tiling.groups):
            raise TemplateError(f"{schedule} gives lanes elements of {name} of their own; others read them by S alone")
        if host.warp is None:
            reader = host.tiling.schedule
            raise TemplateError(f"{reader} reads {name} and has no WARP whose lanes could keep it; S could")
        gone = {Attribute.GRID, Attribute.WARP}
        loops = self.attached(number, self.blocks[number], host.warp, gone)
        self.nest(number, self.levels(tiling, loops, gone), host.warp)

    def opened(self, number: int) -> Any:
        """The block that the loops of an operation are of: a copy of the results, where a thread reduces alone."""
        block, tiling = self.blocks[number], self.tilings[number]
        if any(tiling.op.reduced) and not tiling.across:
            self.copies[number] = self.sch.cache_write(block, 0, "local")
        return self.copies.get(number, block)

    def attached(self, number: int, block: Any, at: Any, gone: Collection[Attribute] | None = None) -> list[Any]:
        """Compute a block in a loop of its reader; its loops there, one for each of its axes.

        Its own template has to say that just what is read there is computed there: the iterations of all parts but
        those that are `gone`, since the loop stands within them. ``None``: whatever is read.
        """
        sch, tiling = self.sch, self.tilings[number]
        sch.compute_at(block, at, preserve_unit_loops=True)
        loops = list(sch.get_loops(block))[-len(sch.get(block).iter_vars) :]
        for d, axis in enumerate(tiling.op.axes):
            if gone is None or axis >= len(loops):
                continue
            extent, there = tiling.without(gone, d), sch.get(loops[axis]).extent
            if not isinstance(there, tirx.IntImm) or int(there) != extent:
                raise TemplateError(
                    f"{tiling.schedule} computes {extent} of dimension {d} of {tiling.op.name} there, and what reads "
                    f"it needs {there}: it would come from elsewhere"
                )
        return loops

    def left_out(self, number: int, nest: _Nest) -> tuple[PrimExpr, ...]:
        """On which conditions of the threads' loops a block is to be computed that is computed in those of a nest.

        Where threads and iterations differ in number, some threads have none. ``compute_at`` asks only whether what
        they would compute exists, and not whether the nest reads it; what these read may be of no thread then.
        """
        sch = self.sch
        block = self.blocks[number]
        loops = [sch.get(loop) for loop in sch.get_loops(block)]
        around = [loop.loop_var for loop in loops]
        if sch.get(block).same_as(sch.get(nest.own)):
            return ()
        analyzer = Analyzer()
        for loop in loops:
            analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))
        with analyzer.constraint_scope(self.predicate(block)):
            conditions = [
                condition
                for condition in conjuncts(self.predicate(nest.own))
                if all(any(v.same_as(a) for a in around) for v in variables(condition))
                and not analyzer.can_prove(condition)
            ]
        if not conditions or not self.tilings[number].across:
            return tuple(conditions)
        # All lanes come to a reduction across them, also those of warps that have none to do.
        read = [n for n, readers in self.readers.items() if number in readers and not self.in_lanes(n)]
        if read:
            name, other = self.tilings[number].op.name, self.tilings[read[0]].op.name
            why = f"of {nest.tiling.schedule} some warps have no work, and would read {other} where nothing is"
            raise TemplateError(f"{name}: {why}; a WARP that divides its dimension, or S for {name}, could be had")
        return ()

    def predicate(self, block: Any) -> PrimExpr:
        """On which condition a block is computed."""
        node = self.sch.get(block)
        realizes = collect(self.sch.mod["main"].body, s_tir.SBlockRealize)
        return next(realize.predicate for realize in realizes if realize.block.same_as(node))

    def in_lanes(self, number: int) -> bool:
        """Whether an operation is computed by all lanes of all warps."""
        return bool(self.tilings[number].across) and not self.tilings[number].schedule.shared

    # The loops of an operation

    def levels(self, tiling: Tiling, loops: Sequence[Any], gone: Collection[Attribute]) -> _Levels:
        """The loop of each level of each dimension, in their order, without those that stand further out."""
        found: _Levels = {}
        for d, axis in enumerate(tiling.op.axes):
            if axis >= len(loops) or loops[axis] is None:
                continue
            kept = [n for n in range(len(tiling.extents[d])) if _attribute(tiling, (d, n)) not in gone]
            made = [loops[axis]]
            if len(kept) > 1:
                made = self.sch.split(loops[axis], [None, *(tiling.extents[d][n] for n in kept[1:])])
            # A loop of one iteration may be of no level.
            found |= {(d, n): loop for n, loop in zip(kept or [-1], made, strict=True)}
        return found

    def nest(self, number: int, levels: _Levels, host: Any = None) -> _Nest:
        """Give the loops to warps, threads and turns: those that reduce nothing outside, those of warps first.

        In the loop `host` over warps of another nest, those of warps are given already.
        """
        sch, tiling = self.sch, self.tilings[number]
        block = self.blocks[number]
        own = self.copies.get(number, block)
        given = Attribute.WARP if host is not None else None
        groups = sorted((g for g in reversed(tiling.groups) if g.attribute is not given), key=lambda g: g.reduced)
        held = {place for group in groups for place in group.levels}
        alone = [[p for p in levels if p not in held and tiling.op.reduced[p[0]] == r] for r in (False, True)]
        runs = [[levels[p] for p in group.levels if p in levels] for group in groups]
        spatial = sum(not group.reduced for group in groups)
        sch.reorder(
            *(loop for run in runs[:spatial] for loop in run),
            *(levels[p] for p in alone[0]),
            *(loop for run in runs[spatial:] for loop in run),
            *(levels[p] for p in alone[1]),
        )
        warp = thread = None
        for group, run in zip(groups, runs, strict=True):
            loop = sch.fuse(*run) if run else _unit_loop(sch, own, self.grid[self.homes[number]])
            last = self.divided(loop, tiling, group)
            warp = last if group.attribute is Attribute.WARP and not group.reduced else warp
            thread = last if run else thread
        nest = _Nest(tiling, own, warp, None if tiling.across else thread, list(sch.get_loops(own))[-1])
        if own is not block:
            sch.compute_at(block, nest.element, preserve_unit_loops=True)
            loops = list(sch.get_loops(block))[-len(sch.get(block).iter_vars) :]
            self.reduced_in_sequence(block, loops, tiling)
        return nest

    def divided(self, loop: Any, tiling: Tiling, group: ThreadGroup) -> Any:
        """Split a loop into turns and threads, and bind these; the innermost loop of them."""
        first = prod(one.threads for one in tiling.groups[: tiling.groups.index(group)])
        if group.threads == 1:
            return loop
        before = [1, *accumulate(self.dimensions, mul)]
        places = [n for n in range(len(self.dimensions)) if first <= before[n] < first * group.threads]
        turns, *threads = self.sch.split(loop, [None, *(self.dimensions[n] for n in reversed(places))])
        for thread, n in zip(threads, reversed(places), strict=True):
            self.sch.bind(thread, f"threadIdx.{'xyz'[n]}")
        if group.reduced:
            self.sch.reorder(*threads, turns)
        return threads[-1]

    def reduced_in_sequence(self, block: Any, loops: Sequence[Any], tiling: Tiling) -> None:
        """Note that a thread reduces alone, so that it begins ahead of the loops."""
        reduced = [loops[axis] for axis, r in zip(tiling.op.axes, tiling.op.reduced, strict=True) if r]
        if reduced:
            first = next(loop for loop in loops if any(self.sch.get(loop).same_as(self.sch.get(r)) for r in reduced))
            self.serial.append((block, first))


def _of_warps(tiling: Tiling) -> bool:
    """Whether a warp has one element: nothing is given to its lanes or taken in sequence."""
    levels = [(d, n) for d, extents in enumerate(tiling.extents) for n, extent in enumerate(extents) if extent > 1]
    given = {_attribute(tiling, place) for place in levels}
    return Attribute.WARP in given and not given & {Attribute.CTA, Attribute.THREAD}


def _attribute(tiling: Tiling, place: tuple[int, int]) -> Attribute:
    return tiling.schedule.dimensions[place[0]][place[1]].attribute


def _unit_loop(sch: s_tir.Schedule, block: Any, behind: Any = None) -> Any:
    """A loop of one iteration around all loops of a block, or around those behind one."""
    loops = list(sch.get_loops(block))
    if behind is not None:
        node = sch.get(behind)
        loops = loops[next(n for n, loop in enumerate(loops) if sch.get(loop).same_as(node)) + 1 :]
    return sch.add_unit_loop(loops[0] if loops else block)
