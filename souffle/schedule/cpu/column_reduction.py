"""Reductions along columns: accumulators for a few rows times a few vectors, in registers for the whole sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm_ffi
from tvm import DataType, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import ForKind

from souffle.schedule.cpu.contraction_form import combiner_of, known_combiner
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.loop_emission import overlapping, pieces, serial, whole_vector
from souffle.schedule.cpu.nest import (
    Axis,
    Nest,
    analyzer_of,
    distinct,
    guarded_loads,
    loop,
    map_buffer_loads,
    replace_variables,
    stride_along,
    uses,
)
from souffle.schedule.cpu.window_steps import Tile, every_second, window_steps
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, sequence

__all__ = ["emit_columns", "with_room"]

_ACCUMULATORS = 4
"""Independent vector sums: additions take four cycles, and one starts every cycle or half of it."""
_MAX_UNROLLED_ROWS = 8
_MAX_TILE_BYTES = 1008
"""TVM puts smaller buffers on the stack, where LLVM turns them into registers; larger ones it allocates by a call."""


def emit_columns(nest: Nest, lanes: int, *, runs_on: bool = False) -> tirx.Stmt:
    """Loops for a reduction whose last spatial loop is in vectors: tiles, the reduction loops inside.

    Parameters
    ----------
    nest : Nest
    lanes : int
        Of a vector.
    runs_on : bool
        Whether a vector that is wider than what is left of a row may be written whole, where rows are written in their
        order: they follow each other in memory, and behind the last one there is room.
    """
    *outer, column = nest.spatial
    rows = _shared_row(nest, outer, column)
    rest = [axis for axis in outer if axis is not rows]
    height = 1
    if rows is not None:
        height = max(h for h in range(1, min(_MAX_UNROLLED_ROWS, rows.extent) + 1) if rows.extent % h == 0)
    itemsize = DataType(str(nest.body.buffer.dtype)).itemsize
    fitting = _MAX_TILE_BYTES // (height * lanes * itemsize)
    vectors = max(1, min(_ACCUMULATORS, fitting, 24 // height, column.extent // lanes))
    blocks = _blocks(column.extent, lanes, vectors)
    beyond = _one_vector(column.extent, lanes)
    read = _read_beyond(nest, column, beyond.width - beyond.valid) if beyond is not None else None
    if read is not None and all(length <= int(buffer.shape[-1]) for buffer, length in read):
        blocks = [block for block in blocks if block.start < beyond.start]
        if runs_on and (rows is None or rows is outer[-1]):
            # What it writes of the next row, that row's own columns replace.
            blocks = [replace(beyond, valid=beyond.width), *blocks]
        else:
            blocks = [*blocks, beyond]

    def tile(point: Nest) -> tirx.Stmt:
        statements = []
        for block in blocks:
            statements.append(
                loop(
                    block.count,
                    lambda o, block=block: _tile(point, rows, column, o * block.columns + block.start, height, block),
                    name="o",
                    dtype=column.dtype,
                )
            )
        return sequence(*statements)

    if rows is None or rows.extent == height:
        return serial(nest, rest, tile)
    block_axis = Axis(tirx.Var(f"{rows.var.name}_o", rows.dtype), rows.extent // height)
    inner = Axis(tirx.Var(f"{rows.var.name}_i", rows.dtype), height)
    split = nest.bind({rows.var: block_axis.var * height + inner.var})
    split = replace(split, spatial=(*rest, block_axis, inner, column))
    rows = inner
    return serial(split, [*rest, block_axis], tile)


@dataclass(frozen=True)
class _Block:
    """`count` times as many columns as `vectors` of `width` elements have, the first one at `start`.

    Of the last vector the first `valid` elements are columns, and what is computed of the others is dropped.
    """

    start: int
    count: int
    width: int
    vectors: int
    valid: int

    @property
    def columns(self) -> int:
        return self.width * self.vectors


def _blocks(extent: int, lanes: int, vectors: int) -> list[_Block]:
    """Cover the columns."""
    found = []
    wide = lanes * vectors
    count = extent // wide
    if count:
        found.append(_Block(0, count, lanes, vectors, lanes))
    start = count * wide
    found += [_Block(start + p.start, p.count, p.width, 1, p.width) for p in pieces(extent - start, lanes)]
    return found


def _one_vector(extent: int, lanes: int) -> _Block | None:
    """The columns behind the last whole vector in a vector that is wider than they are many; ``None`` without any."""
    rest = extent % lanes
    return _Block(extent - rest, 1, whole_vector(rest), 1, rest) if rest and rest != whole_vector(rest) else None


def _read_beyond(nest: Nest, column: Axis, beyond: int) -> list[tuple[Any, int]] | None:
    """The buffers that are read along the columns, and how long their rows have to be for `beyond` more of these.

    ``None`` where something else depends on the column, or a read is not at a multiple of it.
    """
    analyzer = analyzer_of(nest.axes)
    value = known_combiner(nest).value
    if guarded_loads(value) or uses(map_buffer_loads(value, lambda load: tirx.const(0, dtype_of(load))), [column]):
        return None
    found: list[tuple[Any, int]] = []
    for load in buffer_loads(value):
        if not uses(load, [column]):
            continue
        *leading, last = load.indices
        stride = stride_along(load, column, [column])
        if uses(leading, [column]) or buffer_loads(list(load.indices)) or stride is None or stride < 0:
            return None
        found.append((load.source, int(analyzer.const_int_bound(last).max_value) + stride * beyond + 1))
    return found


def with_room(items: Sequence[Nest | tirx.Stmt], params: Sequence[Any], machine: Machine) -> list[Nest | tirx.Stmt]:
    """Make rows of intermediate buffers so long that windows along them are read in whole vectors.

    What stands behind the elements of a row is not written, and what is computed of it is dropped.

    Parameters
    ----------
    items : sequence of Nest or Stmt
    params : sequence of Buffer
        The function's, whose shapes stay.
    machine : Machine
    """
    if not all(isinstance(item, Nest) for item in items):
        return list(items)
    longer: list[tuple[Any, int]] = []
    for nest in items:
        if not nest.reduce or not nest.spatial or combiner_of(nest) is None:
            continue
        column = nest.spatial[-1]
        block = _one_vector(column.extent, machine.lanes(str(nest.body.buffer.dtype)))
        read = _read_beyond(nest, column, block.width - block.valid) if block is not None else None
        for buffer, length in read or ():
            if length > int(buffer.shape[-1]) and not any(buffer.same_as(param) for param in params):
                longer.append((buffer, length))
    if not longer:
        return list(items)
    table: list[tuple[Any, Any]] = []
    for buffer in distinct(buffer for buffer, _ in longer):
        length = max(length for other, length in longer if other.same_as(buffer))
        shape = (*(int(extent) for extent in buffer.shape[:-1]), length)
        table.append((buffer, tirx.decl_buffer(shape, str(buffer.dtype), buffer.name)))

    def moved(buffer: Any, indices: list[PrimExpr]) -> tuple[Any, list[PrimExpr]] | None:
        new = next((new for old, new in table if old.same_as(buffer)), None)
        return None if new is None else (new, indices)

    return [nest.on_buffers(moved) for nest in items]


def _shared_row(nest: Nest, outer: list[Axis], column: Axis) -> Axis | None:
    """A spatial loop that some operand does not depend on, at best one that is read along the columns.

    Its rows share those vectors, or at least what they are multiplied with.
    """
    loads = buffer_loads(known_combiner(nest).value)
    vectors = [load for load in loads if uses(load, [column])]
    for shared in (vectors, loads):
        for axis in reversed(outer):
            if any(not uses(load, [axis]) for load in shared):
                return axis
    return None


def _tile(nest: Nest, rows: Axis | None, column: Axis, start: PrimExpr, height: int, block: _Block) -> tirx.Stmt:
    combiner = known_combiner(nest)
    width, vectors = block.width, block.vectors
    tile = tirx.decl_buffer((height, vectors * width), str(nest.body.buffer.dtype), "tile")

    def each(make) -> tirx.Stmt:
        def lane(r: PrimExpr, u: PrimExpr) -> tirx.Stmt:
            if width == 1:
                return make(r, u)
            return loop(width, lambda v: make(r, u * width + v), ForKind.VECTORIZED, name="v", dtype=column.dtype)

        return loop(
            height,
            lambda r: loop(vectors, lambda u: lane(r, u), ForKind.UNROLLED, name="u", dtype=column.dtype),
            ForKind.UNROLLED,
            name="r",
            dtype=rows.dtype if rows is not None else column.dtype,
        )

    def stored(make: Callable[[PrimExpr, PrimExpr], tirx.Stmt]) -> tirx.Stmt:
        if block.valid == width:
            return each(make)

        def row(r: PrimExpr) -> tirx.Stmt:
            return sequence(
                *(
                    loop(
                        piece.width,
                        lambda v, first=first: make(r, v + first),
                        ForKind.VECTORIZED,
                        name="v",
                        dtype=column.dtype,
                    )
                    for piece in overlapping(block.valid, width)
                    for first in piece.starts
                )
            )

        return loop(height, row, ForKind.UNROLLED, name="r", dtype=rows.dtype if rows is not None else column.dtype)

    def at_values(r: PrimExpr, c: PrimExpr) -> dict[tirx.Var, PrimExpr]:
        return {column.var: start + c} | ({rows.var: r} if rows is not None else {})

    def at(body: Nest, r: PrimExpr, c: PrimExpr) -> Nest:
        return body.bind(at_values(r, c))

    def update(r: PrimExpr, c: PrimExpr, value: PrimExpr) -> tirx.Stmt:
        return tirx.BufferStore(tile, combiner.apply(tirx.BufferLoad(tile, [r, c]), value), [r, c])

    def step(body: Nest) -> tirx.Stmt:
        strided = _pairs(body, column, width)
        if not strided:
            return each(lambda r, c: update(r, c, known_combiner(at(body, r, c)).value))
        return loop(vectors, lambda u: staged(body, strided, u * width), ForKind.UNROLLED, name="u", dtype=column.dtype)

    def staged(body: Nest, strided: list[TensorLoad], offset: PrimExpr) -> tirx.Stmt:
        # Every second element of two vectors, by way of local arrays that LLVM turns into one shuffle.
        shared = [load for load in strided if rows is None or not uses(load, [rows])]
        buffers: list[tuple[TensorLoad, tirx.Buffer]] = []

        def stage(loads: list[TensorLoad], r: PrimExpr) -> list[tirx.Stmt]:
            statements = []
            for load in loads:
                statement, picked = every_second(replace_variables(load, at_values(r, offset)), width)
                statements.append(statement)
                buffers.append((load, picked))
            return statements

        def row(r: PrimExpr) -> tirx.Stmt:
            own = stage([load for load in strided if not any(load.same_as(s) for s in shared)], r)

            def lane(v: PrimExpr) -> tirx.Stmt:
                def pick(load: TensorLoad) -> PrimExpr:
                    matches = (b for original, b in buffers if tvm_ffi.structural_equal(load, original))
                    buffer = next(matches, None)
                    return load if buffer is None else tirx.BufferLoad(buffer, [v])

                value = map_buffer_loads(known_combiner(body).value, pick)
                return update(r, offset + v, replace_variables(value, at_values(r, offset + v)))

            return sequence(*own, loop(width, lane, ForKind.VECTORIZED, name="v", dtype=column.dtype))

        common = stage(shared, tirx.const(0, column.dtype))
        kind = ForKind.UNROLLED
        rest = loop(height, row, kind, name="r", dtype=rows.dtype if rows is not None else column.dtype)
        return sequence(*common, rest)

    def finish(r: PrimExpr, c: PrimExpr) -> tirx.BufferStore:
        return at(nest, r, c).finish(tirx.BufferLoad(tile, [r, c]))

    straight = None
    if rows is not None and height > 1:
        straight = window_steps(nest, Tile(rows, column, height, start, width, vectors), update)
    statements = [
        tirx.AllocBuffer(tile),
        each(lambda r, c: tirx.BufferStore(tile, combiner.identity, [r, c])),
        serial(nest, nest.reduce, step) if straight is None else straight,
    ]
    if block.valid == width or not _ends_alone(nest, column):
        return sequence(*statements, stored(finish))
    # What follows the sum is computed in whole vectors, too.
    ends = tirx.decl_buffer((height, width), str(nest.epilogue.buffer.dtype), "ends")
    return sequence(
        *statements,
        tirx.AllocBuffer(ends),
        each(lambda r, c: tirx.BufferStore(ends, finish(r, c).value, [r, c])),
        stored(lambda r, c: _stored_instead(finish(r, c), tirx.BufferLoad(ends, [r, c]))),
    )


def _ends_alone(nest: Nest, column: Axis) -> bool:
    """Whether there is an epilogue that along the columns reads nothing but the reduction's own results."""
    if nest.epilogue is None:
        return False
    own = nest.body.buffer
    value = map_buffer_loads(
        nest.epilogue.value, lambda load: tirx.const(0, dtype_of(load)) if load.source.same_as(own) else load
    )
    return not uses(value, [column])


def _stored_instead(store: tirx.BufferStore, value: PrimExpr) -> tirx.BufferStore:
    return tirx.BufferStore(store.buffer, value, list(store.indices))


def _pairs(nest: Nest, column: Axis, width: int) -> list[TensorLoad]:
    """Distinct loads that step by two elements along the columns, in their last dimension alone."""
    found: list[TensorLoad] = []
    if width < 4:
        return found
    value = known_combiner(nest).value
    guarded = guarded_loads(value)
    for load in buffer_loads(value):
        # Ahead of its condition, a load would read beside its tensor: LLVM then takes the whole vector for undefined.
        if any(load.same_as(other) for other in guarded):
            continue
        if not load.indices or len(uses(list(load.indices)[:-1], [column])) or buffer_loads(list(load.indices)):
            continue
        if stride_along(load, column, [column]) == 2 and not any(tvm_ffi.structural_equal(load, f) for f in found):
            found.append(load)
    return found
