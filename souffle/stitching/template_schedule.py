"""A template as a schedule: blocks, warps and threads of TensorIR loops (FusionStitching 2019, §5.1 to §5.3).

The last TE of a pattern is its root, whose result is in global memory; its ``GRID`` dimensions are the grid. Every
other TE of the pattern is attached to what reads it, by the paper's composition schemes:

- **block**: its schedule has an ``S``. It is computed in the block loop with a schedule of its own, for what the block
  reads of it, and its result is in shared memory. The layout constraint (§5.3: "only accessed within a single thread
  block context") is that this is exactly what its own template gives a block.
- **warp**: its schedule has no ``S`` and reduces across the lanes of a warp (``CTA`` beside ``WARP``). The result is in
  registers of all lanes, computed in the loop over warps of what reads it.
- **thread**: its schedule has no ``S`` and reduces nothing across threads. It is computed in registers of the thread
  that reads it, once for each that does. An element-wise TE without a schedule is written into what reads it.

All nests share the threads of the block: where two divide them differently, as 8 warps of 32 lanes and 64 rows of 4
threads, ``threadIdx`` gets the dimensions that both can be written in. What comes out is an ordinary schedule of a
stage, lowered, checked and proven as others are. What does not fit is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from tvm import ir, s_tir, tirx

from souffle.program import TE, ExternTE, TEProgram
from souffle.schedule.gpu.forms.blocks import BlockView, block_loops, block_view, block_views, open_schedule
from souffle.schedule.gpu.rule import GpuSchedule, does_not_apply
from souffle.schedule.stage import Stage, draft_stage
from souffle.stitching.guards import conjuncts, guarded
from souffle.stitching.template import Attribute, OpSchedule, Template, TemplateError
from souffle.stitching.template_launch import TemplateOp, ThreadGroup, Tiling, tiling_of
from souffle.stitching.template_ops import op_of
from souffle.tvm_compat import Analyzer, PrimExpr, collect, variables

__all__ = ["scheduled_by", "stage_by"]

RULE = "template"
"""What ``explain`` shows in the place of a rule's name."""

_MOST_DIMENSIONS = 3
"""Of ``threadIdx``: x, y and z."""


def stage_by(
    tes: Sequence[TE | ExternTE],
    program: TEProgram,
    template: Template | str,
    *,
    cta_size: int = 256,
    cta_num: int | None = None,
) -> Stage:
    """Some TEs of a program as one stage that a template schedules.

    Parameters
    ----------
    tes : sequence of TE
        In topological order; the last one is the root.
    program : TEProgram
        Which they are of.
    template, cta_size, cta_num
        See :func:`scheduled_by`. The names in the template are those of the TEs.

    Raises
    ------
    TemplateError
        If the template is not one of these TEs, or cannot be had; the message says why.
    """
    template = Template(template) if isinstance(template, str) else template
    for one in tes:
        if not isinstance(one, TE):
            raise TemplateError(f"{one.name} is {type(one).__name__}; a template schedules TEs of one statement")
        if len(one.outputs) != 1:
            raise TemplateError(f"{one.name} has {len(one.outputs)} outputs; a template schedules TEs of one")
    draft = draft_stage(tes, program)
    extra = [tensor.name for tensor in draft.outputs if tensor not in tes[-1].outputs]
    if extra:
        raise TemplateError(f"{', '.join(extra)} is needed outside of the pattern; only its last TE's result may be")
    schedule = scheduled_by(draft.func, [op_of(one) for one in tes], template, cta_size=cta_size, cta_num=cta_num)
    return Stage(draft, schedule)


def scheduled_by(
    func: tirx.PrimFunc,
    ops: Sequence[TemplateOp],
    template: Template,
    *,
    cta_size: int = 256,
    cta_num: int | None = None,
) -> GpuSchedule:
    """The schedule of a stage's function by a template.

    Parameters
    ----------
    func : tirx.PrimFunc
        A block for each operation, in order, named ``t0``, ``t1`` and so on.
    ops : sequence of Op
        The last one is the root.
    template : Template
        A template without names is of the only operation.
    cta_size : int
        Threads of a block.
    cta_num : int, optional
        Blocks, each of which takes several of those that ``GRID`` names where there are fewer; as many if not given.

    Raises
    ------
    TemplateError
        If it does not go with the operations, or with the machine.
    """
    known = _named(ops, template)
    tilings = {number: tiling_of(schedule, ops[number], cta_size) for number, schedule in known.items()}
    root = len(ops) - 1
    if tilings[root].schedule.shared:
        raise TemplateError(f"{ops[root].name} is what the pattern gives, which is read from global memory: no S")
    grid = tilings[root].grid
    if cta_num is not None and not 1 <= cta_num <= grid:
        raise TemplateError(f"cta_num={cta_num}: GRID divides {ops[root].name} into {grid}, for 1 to {grid} blocks")
    nests = _Nests(open_schedule(func), tilings, _dimensions(tilings.values(), cta_size), cta_num or grid)
    try:
        made = nests.scheduled(root)
    except s_tir.ScheduleError as error:
        raise TemplateError(f"{template}: {does_not_apply(error).reason}") from error
    return GpuSchedule(made, RULE, cta_num or grid, cta_size, way=str(template))


def _named(ops: Sequence[TemplateOp], template: Template) -> dict[int, OpSchedule]:
    """The schedule of each operation that has one."""
    names = [op.name for op in ops]
    first = template.schedules[0]
    if not first.name:
        if len(ops) != 1:
            raise TemplateError(f"{template} names no TE, and the pattern has {len(ops)}: {', '.join(names)}")
        return {0: first}
    for schedule in template.schedules:
        if schedule.name not in names:
            raise TemplateError(f"{schedule.name} is none of the pattern's TEs, which are {', '.join(names)}")
    found = {names.index(one.name): one for one in template.schedules}
    for number, op in enumerate(ops):
        if number not in found and (any(op.reduced) or number == len(ops) - 1):
            what = "a reduction" if any(op.reduced) else "the pattern's last TE"
            raise TemplateError(f"{op.name} has no schedule; {what} needs one, others are written into their readers")
    return found


def _dimensions(tilings: Iterable[Tiling], cta_size: int) -> tuple[int, ...]:
    """Extents of ``threadIdx`` from x on, in which every operation's groups are products of some that are adjacent."""
    borders = sorted({border for tiling in tilings for border in tiling.borders})
    for inner, outer in zip(borders, [*borders[1:], cta_size][: len(borders)], strict=True):
        if outer % inner:
            raise TemplateError(f"one schedule divides the {cta_size} threads into {inner}, another into {outer}")
    if len(borders) >= _MOST_DIMENSIONS:
        raise TemplateError(
            f"threads are divided at {', '.join(map(str, borders))} of {cta_size}; blocks have three dimensions"
        )
    return tuple(outer // inner for inner, outer in zip([1, *borders], [*borders, cta_size], strict=True))


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


class _Nests:
    """Builds the nests of a kernel, from what is read last to what is read first.

    Parameters
    ----------
    sch : Schedule
    tilings : mapping
        Of the operations that have a schedule, by their numbers.
    dimensions : tuple of int
        Extents of ``threadIdx`` from x on.
    blocks : int
    """

    def __init__(
        self, sch: s_tir.Schedule, tilings: Mapping[int, Tiling], dimensions: tuple[int, ...], blocks: int
    ) -> None:
        self.sch, self.tilings, self.dimensions, self.blocks = sch, tilings, dimensions, blocks
        self.grid: Any = None
        self.readers: dict[int, set[int]] = {}
        self.copies: dict[int, Any] = {}
        self.hosts: dict[int, _Nest] = {}
        self.serial: list[tuple[Any, Any]] = []

    def scheduled(self, root: int) -> tirx.PrimFunc:
        """The function with all nests."""
        self.readers = self.inlined(root)
        others = sorted((number for number in self.tilings if number != root), reverse=True)
        homes = self.homes(root, others)
        levels = {root: self.in_grid(root)}
        # All are in the block loop before any loop is divided among threads: what a block reads is plain then.
        for number in others:
            levels[number] = self.in_block(number)
        shared = [number for number in others if self.tilings[number].schedule.shared]
        self.hosts = {number: self.nest(number, levels[number]) for number in (root, *shared)}
        for number in others:
            if number not in self.hosts:
                self.hosts[number] = self.in_registers(number, self.hosts[homes[number]])
        guards = {f"t{number}": self.left_out(number, nest) for number, nest in self.hosts.items()}
        # Last, since a block without its initialization is none that loops can be bound around.
        for block, loop in self.serial:
            self.sch.decompose_reduction(block, loop)
        return guarded(self.sch.mod["main"], guards)

    def inlined(self, root: int) -> dict[int, set[int]]:
        """Write what has no schedule into its readers; who reads each of the others."""
        for view in block_views(self.sch):
            if _number(view) not in self.tilings:
                self.sch.compute_inline(view.rv)
        views = {_number(view): view for view in block_views(self.sch)}
        return {
            number: {other for other, reader in views.items() if reader.reads_from(view.writes[0].buffer)}
            for number, view in views.items()
            if number != root
        }

    def homes(self, root: int, others: Sequence[int]) -> dict[int, int]:
        """In whose nest each operation is computed: its own, or that of all that read it."""
        found = {root: root}
        for number in others:
            tiling, reads = self.tilings[number], {found[reader] for reader in self.readers[number]}
            if tiling.schedule.shared:
                found[number] = number
            elif len(reads) == 1:
                (found[number],) = reads
            else:
                names = ", ".join(sorted(self.tilings[home].op.name for home in reads))
                why = f"is read in the nests of {names}, which share no registers; S would keep it for them"
                raise TemplateError(f"{tiling.op.name} {why}")
        return found

    # Where an operation is computed

    def in_grid(self, number: int) -> _Levels:
        """The root: its ``GRID`` loops are bound to the grid. The other loops."""
        sch, tiling = self.sch, self.tilings[number]
        own = self.opened(number)
        levels = self.levels(tiling, block_loops(sch, block_view(sch, own)), frozenset())
        grid = [levels.pop(place) for place in sorted(levels) if _attribute(tiling, place) is Attribute.GRID]
        sch.reorder(*grid, *levels.values())
        outer = sch.fuse(*grid) if grid else _unit_loop(sch, own)
        # A block takes neighbours, which share what they read.
        bound, self.grid = sch.split(outer, [self.blocks, None])
        sch.bind(bound, "blockIdx.x")
        return levels

    def in_block(self, number: int) -> _Levels:
        """Another: in the block loop. In shared memory it stays there, and has to be what a block reads of it."""
        tiling = self.tilings[number]
        if not tiling.schedule.shared:
            block = self.sch.get_sblock(f"t{number}")
            self.sch.set_scope(block, 0, "local")
            self.sch.compute_at(block, self.grid, preserve_unit_loops=True)
            return {}
        own = self.opened(number)
        self.sch.set_scope(own, 0, "shared")
        gone = {Attribute.GRID}
        return self.levels(tiling, self.attached(number, own, self.grid, gone), gone)

    def in_registers(self, number: int, host: _Nest) -> _Nest:
        """Warp or thread composition: in a loop of the nest that reads it, which is the answer."""
        sch, tiling = self.sch, self.tilings[number]
        if tiling.across:
            self.in_warp(number, host)
        else:
            block = sch.get_sblock(f"t{number}")
            # Elements of the host that a thread takes in turn may read one result.
            at = host.thread if any(tiling.op.reduced) and host.thread is not None else host.element
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
        loops = self.attached(number, self.sch.get_sblock(f"t{number}"), host.warp, gone)
        self.nest(number, self.levels(tiling, loops, gone), host.warp)

    def opened(self, number: int) -> Any:
        """The block that the loops of an operation are of: a copy of the results, where a thread reduces alone."""
        block, tiling = self.sch.get_sblock(f"t{number}"), self.tilings[number]
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
        block = sch.get_sblock(f"t{number}")
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
        block = sch.get_sblock(f"t{number}")
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
            loop = sch.fuse(*run) if run else _unit_loop(sch, own, self.grid)
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


def _number(view: BlockView) -> int:
    """Which of the pattern's TEs a block is."""
    return int(view.name[1:])


def _attribute(tiling: Tiling, place: tuple[int, int]) -> Attribute:
    return tiling.schedule.dimensions[place[0]][place[1]].attribute


def _unit_loop(sch: s_tir.Schedule, block: Any, behind: Any = None) -> Any:
    """A loop of one iteration around all loops of a block, or around those behind one."""
    loops = list(sch.get_loops(block))
    if behind is not None:
        node = sch.get(behind)
        loops = loops[next(n for n, loop in enumerate(loops) if sch.get(loop).same_as(node)) + 1 :]
    return sch.add_unit_loop(loops[0] if loops else block)
