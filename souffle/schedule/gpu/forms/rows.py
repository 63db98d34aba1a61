"""Stages whose blocks share rows: finding the rows, and building loops in which a thread block owns whole rows.

A *row* is a point of the data-parallel axes that all linked blocks of a stage have in common and by which they reach
each other's results unchanged (the row of a softmax, the batch and channel of a global pool). As no block reads
another row, tiles of rows need no barrier across thread blocks, and what is kept of a row fits on chip. For a single
reduction all of its data-parallel axes are row axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import DataType, ir, s_tir, tirx
from tvm.sym import Analyzer

from souffle.decision import Refused
from souffle.program.flattening import has_shifted_division
from souffle.schedule.gpu.forms.blocks import (
    BlockAccess,
    BlockView,
    block_loops,
    block_view,
    block_views,
    detach_outputs,
    detaching_refusal,
    inline_injective,
    inlining_refusal,
    intermediates,
    is_reduction,
    open_schedule,
    product,
    same_buffer,
)
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.tvm_compat import collect, const_int, substitute

__all__ = ["Chain", "Layout", "Rows", "build", "crosses", "open_rows", "private_bytes", "read_rows"]


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks that reach each other through intermediates.

    Attributes
    ----------
    blocks : tuple of BlockView
        Producers before consumers.
    rows : tuple of tuple of int
        For each block the positions of the row axes among its axes, in one order for all.
    row_count : int
        Number of rows. The row axes of a block, the last one fastest, count them; the same count is the same row in
        all.
    broken : tuple of str
        Why further axes are not rows, one sentence for each.
    """

    blocks: tuple[BlockView, ...]
    rows: tuple[tuple[int, ...], ...]
    row_count: int
    broken: tuple[str, ...]

    def columns(self, index: int) -> int:
        """Elements of one row that block `index` computes."""
        return self.blocks[index].size // self.row_count

    @property
    def work(self) -> int:
        """Evaluations of block bodies for one row."""
        return sum(self.columns(i) * view.reduction_size for i, view in enumerate(self.blocks))


@dataclass(frozen=True, eq=False)
class Rows:
    """A stage ready to be laid out: outputs detached, accumulators private, the rest inlined.

    Attributes
    ----------
    func : PrimFunc
        The stage as it was.
    sch : Schedule
        What rules only look at, nobody builds on: see :meth:`opened`.
    chains : tuple of Chain
    free : tuple of BlockView
        Blocks that read no intermediate and write an output.
    private : tuple of buffer
        The intermediates that are left.
    """

    func: tirx.PrimFunc
    sch: s_tir.Schedule
    chains: tuple[Chain, ...]
    free: tuple[BlockView, ...]
    private: tuple[ir.Var, ...]

    @property
    def reductions(self) -> list[BlockView]:
        """The blocks that reduce."""
        return [view for chain in self.chains for view in chain.blocks if view.reduction]

    def opened(self, keep: frozenset[str] = frozenset()) -> Rows:
        """The same stage once more, to be built on, with the injective blocks named in `keep` left as they are."""
        return open_rows(self.func, keep)


@dataclass(frozen=True)
class Layout:
    """Where the work of rows goes.

    Attributes
    ----------
    tiles : int
        Extent of ``blockIdx.x``.
    rows : int
        Rows of a tile, each with its own threads.
    inner : int
        Threads of a row. With 1, a thread keeps its rows to itself, in registers.
    rows_fastest : bool
        Whether neighbouring threads hold neighbouring rows, instead of elements of one row.
    """

    tiles: int
    rows: int
    inner: int
    rows_fastest: bool


def read_rows(stage: StageForms) -> Rows | Refused:
    """The rows of a stage, or why its injective blocks should not be inlined."""
    return inlining_refusal(stage.func) or detaching_refusal(stage.func) or open_rows(stage.func)


def open_rows(func: tirx.PrimFunc, keep: frozenset[str] = frozenset()) -> Rows:
    """Prepare `func`: its chains, with the injective blocks inlined except those named in `keep`."""
    sch = open_schedule(func)
    detach_outputs(sch)
    inline_injective(sch, keep)
    known = intermediates(sch)
    for view in block_views(sch):
        if view.reduction and not any(same_buffer(view.writes[0].buffer, buffer) for buffer in known):
            for position in range(len(view.node.writes)):
                sch.cache_write(view.rv, position, "local")
    private = intermediates(sch)
    free, linked = [], []
    for view in block_views(sch):
        touched = [a for a in (*view.reads, *view.writes) if any(same_buffer(a.buffer, b) for b in private)]
        (linked if touched else free).append(view)
    chains = tuple(_chain(blocks, private) for blocks in _components(linked, private))
    return Rows(func, sch, chains, tuple(free), tuple(private))


def _components(views: Sequence[BlockView], private: Sequence[ir.Var]) -> list[list[BlockView]]:
    """`views` grouped by the intermediates that they share, order kept."""
    groups: list[list[BlockView]] = []
    for view in views:
        touched = [a.buffer for a in (*view.reads, *view.writes) if any(same_buffer(a.buffer, b) for b in private)]
        joined = [g for g in groups if any(m.writes_to(b) or m.reads_from(b) for m in g for b in touched)]
        groups = [g for g in groups if not any(g is j for j in joined)]
        groups.append([m for g in joined for m in g] + [view])
    order = {view.name: place for place, view in enumerate(views)}
    return [sorted(group, key=lambda view: order[view.name]) for group in groups]


def _position(view: BlockView, index: tirx.PrimExpr) -> int | None:
    """Which data-parallel axis of `view` the expression `index` is, by its place among all axes."""
    for place, axis in enumerate(view.node.iter_vars):
        if axis.var.same_as(index):
            return None if is_reduction(axis) else place
    return None


def _extent(view: BlockView, place: int) -> int:
    return const_int(view.node.iter_vars[place].dom.extent)


def _chain(views: list[BlockView], private: Sequence[ir.Var]) -> Chain:
    """Find the row axes of linked blocks: axes that all of them have and that every read between them leaves alone."""
    nodes = [(b, p) for b, v in enumerate(views) for p in range(len(v.node.iter_vars)) if _position_is_row(v, p)]
    parent = {node: node for node in nodes}
    broken: dict[tuple[int, int], str] = {}

    def find(node: tuple[int, int]) -> tuple[int, int]:
        while parent[node] != node:
            node = parent[node]
        return node

    for consumer, view in enumerate(views):
        for read in view.reads:
            producer = next((i for i, other in enumerate(views) if other.writes_to(read.buffer)), None)
            if producer is None or not any(same_buffer(read.buffer, b) for b in private):
                continue
            for own, source in _read_axes(views[producer], view, read):
                if (
                    own is not None
                    and (consumer, own) in parent
                    and _extent(view, own) == _extent(views[producer], source)
                ):
                    parent[find((consumer, own))] = find((producer, source))
                else:
                    made = views[producer]
                    axis = made.node.iter_vars[source].var.name
                    broken[(producer, source)] = f"block {view.name} reads {made.name} across its axis {axis}"
    classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for node in nodes:
        classes.setdefault(find(node), []).append(node)
    reasons = [broken[node] for node in broken]
    kept = []
    for members in classes.values():
        if any(node in broken for node in members):
            continue
        if sorted(block for block, _ in members) != list(range(len(views))):
            continue
        kept.append(dict(members))
    anchor = max(range(len(views)), key=lambda b: (views[b].size * views[b].reduction_size, -b))
    kept.sort(key=lambda members: members[anchor])
    rows = tuple(tuple(members[block] for members in kept) for block in range(len(views)))
    if reasons and _all_in_order(views, private):
        rows, reasons = tuple(tuple(p for b, p in nodes if b == block) for block in range(len(views))), []
    return Chain(tuple(views), rows, product(_extent(views[0], place) for place in rows[0]), tuple(reasons))


def _all_in_order(views: Sequence[BlockView], private: Sequence[ir.Var]) -> bool:
    """Whether each block reads, for its n-th element, the n-th element of the others, whatever their shapes.

    So it is with a reshape between them, whose axes do not correspond one by one.
    """
    analyzer = Analyzer()
    if len({view.size for view in views}) != 1:
        return False
    for view in views:
        own: tirx.PrimExpr = tirx.IntImm("int32", 0)
        for axis, extent in zip(view.spatial, view.spatial_shape, strict=True):
            analyzer.bind(axis.var, ir.Range(0, extent))
            own = own * extent + axis.var
        for access in (*view.reads, *view.writes):
            if any(same_buffer(access.buffer, buffer) for buffer in private):
                difference = analyzer.simplify(access.flat - own)
                if not (isinstance(difference, tirx.IntImm) and difference.value == 0):
                    return False
    return True


def _position_is_row(view: BlockView, place: int) -> bool:
    axis = view.node.iter_vars[place]
    return not is_reduction(axis) and const_int(axis.dom.extent) > 1


def _read_axes(producer: BlockView, consumer: BlockView, read: BlockAccess) -> list[tuple[int | None, int]]:
    """For each axis of `producer` longer than 1: the axis of `consumer` that it is read by, or ``None``."""
    write = next(access for access in producer.writes if same_buffer(access.buffer, read.buffer))
    pairs = []
    for written, index in zip(write.indices, read.indices, strict=True):
        source = _position(producer, written)
        if source is not None and _extent(producer, source) > 1:
            pairs.append((_position(consumer, index), source))
    return pairs


def private_bytes(stage: Rows, rows: int, shared: bool) -> int:
    """Bytes that the intermediates of `rows` rows take; if in shared memory, without those of one value a row."""
    total = 0
    for chain in stage.chains:
        for index, view in enumerate(chain.blocks):
            for access in view.writes:
                if shared and chain.columns(index) == 1:
                    continue
                if any(same_buffer(access.buffer, buffer) for buffer in stage.private):
                    itemsize = max(DataType(access.buffer.dtype).bits // 8, 1)
                    total += product(access.shape) // chain.row_count * rows * itemsize
    return total


def build(stage: Rows, layout: Layout) -> None:
    """Lay the loops of `stage` out as `layout` says and place its intermediates on chip.

    The schedule of `stage` is changed in place; it cannot be built twice.
    """
    sch = stage.sch
    outer = []
    for chain in stage.chains:
        for index in range(len(chain.blocks)):
            _place(stage, chain, index, layout)
        nests = [_row_nest(stage, chain, index, layout) for index in range(len(chain.blocks))]
        if layout.inner == 1 and len(nests) > 1:
            sch.merge(*[row for _, row in nests])
            outer.append(sch.get_loops(chain.blocks[0].rv)[0])
        else:
            outer.extend(tile for tile, _ in nests)
    outer.extend(_free_nest(sch, view, layout) for view in stage.free)
    tile = sch.merge(*outer) if len(outer) > 1 else outer[0]
    sch.bind(tile, "blockIdx.x")
    row_tag, _ = _tags(layout)
    for view in (view for chain in stage.chains for view in chain.blocks):
        row = sch.get_loops(view.rv)[1]
        if layout.rows > 1 and sch.get(row).thread_binding is None:
            sch.bind(row, row_tag)
    for view in stage.reductions:
        # Last, since a block without its initialization is none that loops can be bound around.
        loops = sch.get_loops(view.rv)
        reduced = _reduction_loops(sch, view, loops)
        if reduced and len(view.writes) == 1 and all(sch.get(loop).thread_binding is None for loop in reduced):
            sch.decompose_reduction(view.rv, reduced[0])


def _reduction_loops(sch: s_tir.Schedule, view: BlockView, loops: Sequence[object]) -> list[object]:
    """Those of a scheduled block's loops that its reduction axes are computed from, outer first."""
    nodes = [sch.get(loop) for loop in loops]
    realize = next(r for r in collect(nodes[-1].body, s_tir.SBlockRealize) if r.block.same_as(sch.get(view.rv)))
    used = [
        variable
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
        if is_reduction(axis)
        for variable in collect(value, ir.Var)
    ]
    return [loop for loop, node in zip(loops, nodes, strict=True) if any(node.loop_var.same_as(v) for v in used)]


def _tags(layout: Layout) -> tuple[str, str]:
    """The thread axes of rows and of the elements of a row."""
    rows_on_x = layout.inner == 1 or (layout.rows_fastest and layout.rows > 1)
    return ("threadIdx.x", "threadIdx.y") if rows_on_x else ("threadIdx.y", "threadIdx.x")


def _place(stage: Rows, chain: Chain, index: int, layout: Layout) -> None:
    """Put what a block writes for the stage itself on chip, its row axes joined to one leading dimension.

    With one dimension for all row axes, a tile of rows is one range of it whatever the extents, so that only the tile
    is allocated. A single value of a row goes to registers, of each of the row's threads: cheaper than shared memory,
    and TVM's ThreadSync takes shared elements whose index names the innermost thread axis for one thread's own, and
    leaves out the barrier between the one thread that writes the row's value and the others that read it.
    """
    view = chain.blocks[index]
    scope = "local" if layout.inner == 1 or chain.columns(index) == 1 else "shared"
    for position, region in enumerate(view.node.writes):
        if not any(same_buffer(region.source, buffer) for buffer in stage.private):
            continue
        stage.sch.set_scope(view.rv, position, scope)
        write = next(access for access in view.writes if same_buffer(access.buffer, region.source))
        places = [_position(view, written) for written in write.indices]
        dimensions = [places.index(place) for place in chain.rows[index]]
        if len(dimensions) > 1:
            joined = _row_layout(dimensions, [write.shape[dimension] for dimension in dimensions])
            index_map = tirx.IndexMap.from_func(joined, ndim=len(places), index_dtype="int32")
            stage.sch.transform_layout(view.rv, ("write", position), index_map, assume_injective_transform=True)


def _row_layout(dimensions: Sequence[int], row_shape: Sequence[int]) -> Callable[..., list[tirx.PrimExpr]]:
    """The map of a buffer's indices that joins `dimensions`, of extents `row_shape`, and puts them first."""

    def layout(*indices: tirx.Var) -> list[tirx.PrimExpr]:
        row: tirx.PrimExpr = indices[dimensions[0]]
        for dimension, extent in zip(dimensions[1:], row_shape[1:], strict=True):
            row = row * extent + indices[dimension]
        return [row, *(index for place, index in enumerate(indices) if place not in dimensions)]

    return layout


def _join_rows(sch: s_tir.Schedule, chain: Chain, index: int) -> tuple[int, ...]:
    """Make one axis of a block's row axes, the first; give the row axes' new positions.

    The axis must be the block's own, beyond the fusion of loops: only then is what a tile touches seen to be as small
    as it is.
    """
    view, places = chain.blocks[index], chain.rows[index]
    if len(places) < 2:
        return places
    joined = _row_layout(places, [_extent(view, place) for place in places])
    index_map = tirx.IndexMap.from_func(joined, ndim=len(view.node.iter_vars), index_dtype="int32")
    before = sch.get(view.rv)
    sch.transform_block_layout(view.rv, index_map)
    axes = [axis.var for axis in before.iter_vars]
    accesses = (*collect(before.body, tirx.BufferStore), *collect(before.body, ir.TensorLoad))
    if any(has_shifted_division(index, axes) for access in accesses for index in access.indices):
        _write_again(sch, view, before, places)
    return (0,)


def _write_again(sch: s_tir.Schedule, view: BlockView, before: s_tir.SBlock, places: tuple[int, ...]) -> None:
    """Give a block, whose row axes are one now, its body of before: TVM simplifies shifted divisions wrongly there."""
    after = sch.get(view.rv)
    row, *others = (axis.var for axis in after.iter_vars)
    values = dict(zip((a.var for p, a in enumerate(before.iter_vars) if p not in places), others, strict=True))
    for number, place in enumerate(reversed(places)):
        extent = _extent(view, place)
        values[before.iter_vars[place].var] = row if number == len(places) - 1 else tirx.floormod(row, extent)
        row = tirx.floordiv(row, extent)

    def regions(old: Sequence[tirx.BufferRegion]) -> list[tirx.BufferRegion]:
        return [
            tirx.BufferRegion(
                region.source, [ir.Range.from_min_extent(substitute(r.min, values), r.extent) for r in region.region]
            )
            for region in old
        ]

    written = s_tir.SBlock(
        after.iter_vars,
        regions(before.reads),
        regions(before.writes),
        before.name_hint,
        substitute(before.body, values),
        before.init if before.init is None else substitute(before.init, values),
        before.alloc_buffers,
        before.match_buffers,
        before.annotations,
    )
    sch.state.replace(sch.get_sref(view.rv), written, {after: written})


def _row_nest(stage: Rows, chain: Chain, index: int, layout: Layout) -> tuple[object, object]:
    """Split the loops of a block into tiles, rows, threads of a row and the rest; give the first two."""
    sch = stage.sch
    on_chip = any(same_buffer(access.buffer, b) for access in chain.blocks[index].writes for b in stage.private)
    row_places = _join_rows(sch, chain, index)
    view = block_view(sch, chain.blocks[index].rv)
    table = block_loops(sch, view)
    reduced = [is_reduction(axis) for axis in view.node.iter_vars]
    rows = [table[place] for place in row_places]
    columns = [
        loop for place, loop in enumerate(table) if loop is not None and place not in row_places and not reduced[place]
    ]
    reductions = [loop for place, loop in enumerate(table) if loop is not None and reduced[place]]
    if len(rows + columns + reductions) > 1:
        sch.reorder(*rows, *columns, *reductions)
    loops = sch.get_loops(view.rv)
    row = sch.fuse(*rows) if rows else sch.add_unit_loop(loops[0] if loops else view.rv)
    across = crosses(chain, index, layout)
    parallel = None
    if layout.inner > 1 and not (on_chip and chain.columns(index) == 1 and not across):
        if across:
            parallel = sch.fuse(*reductions)
        else:
            parallel = sch.fuse(*columns) if columns else sch.add_unit_loop(reductions[0] if reductions else view.rv)
    if parallel is not None and reductions and not across:
        # Before the splits, whose conditions then hold for the copy too; after them it would lose that of a single row.
        for position in range(len(view.node.writes)):
            sch.reverse_compute_at(sch.cache_write(view.rv, position, "local"), parallel)
    tile, row = sch.split(row, [layout.tiles, layout.rows])
    if parallel is not None:
        serial, thread = sch.split(parallel, [None, layout.inner])
        sch.reorder(thread, serial)
        sch.bind(thread, _tags(layout)[1])
    return tile, row


def crosses(chain: Chain, index: int, layout: Layout) -> bool:
    """Whether the threads of a row share the reduction of a block, instead of dividing its columns.

    Not where threads are left over beside a single row and its columns are shared: TVM's LowerCrossThreadReduction
    drops a condition that stands alone, here the one that keeps those threads from writing to the row.
    """
    view = chain.blocks[index]
    columns = chain.columns(index)
    if columns > 1 and chain.row_count == 1 and layout.rows > 1:
        return False
    return bool(view.reduction) and columns < layout.inner and view.reduction_size > columns


def _free_nest(sch: s_tir.Schedule, view: BlockView, layout: Layout) -> object:
    """Split the loops of a block that no other needs over tiles and threads; give the loop over tiles."""
    loops = sch.get_loops(view.rv)
    flat = sch.fuse(*loops) if loops else sch.add_unit_loop(view.rv)
    row_tag, _ = _tags(layout)
    slow, fast = (layout.inner, layout.rows) if row_tag == "threadIdx.x" else (layout.rows, layout.inner)
    chunk = -(-view.size // (layout.tiles * slow * fast))
    tile, serial, slow_loop, fast_loop = sch.split(flat, [layout.tiles, chunk, slow, fast])
    sch.reorder(slow_loop, fast_loop, serial)
    if fast > 1:
        sch.bind(fast_loop, "threadIdx.x")
    if slow > 1:
        sch.bind(slow_loop, "threadIdx.y")
    return tile
