"""Reductions that are not packed: along rows in memory, along columns with accumulators in registers, or plainly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import DataType, sym, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import ForKind

from souffle.schedule.cpu.contraction_form import Combiner, combiner_of, split_groups, without_units
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.loop_emission import collapse, pieces, serial, whole_vector
from souffle.schedule.cpu.nest import (
    Axis,
    Nest,
    guarded_loads,
    loop,
    map_buffer_loads,
    replace_variables,
    stride_along,
    uses,
)
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, sequence

__all__ = ["emit_reduction", "reduces_along_memory"]

_ACCUMULATORS = 4
"""Independent vector sums: additions take four cycles, and one starts every cycle or half of it."""
_MAX_UNROLLED_ROWS = 8
_MAX_TILE_BYTES = 1008
"""TVM puts smaller buffers on the stack, where LLVM turns them into registers; larger ones it allocates by a call."""


def emit_reduction(nest: Nest, machine: Machine) -> tirx.Stmt:
    """Serial loops for a reduction over its spatial loops, vectorised along memory or along the last spatial loop."""
    nest = without_units(nest)
    combiner = combiner_of(nest)
    if combiner is None or not nest.reduce:
        return _plain(nest)
    nest = collapse(split_groups(nest), "reduce")
    lanes = machine.lanes(str(nest.body.buffer.dtype))
    if reduces_along_memory(nest):
        return serial(nest, nest.spatial, lambda point: _along_memory(point, lanes))
    if nest.spatial and nest.spatial[-1].extent >= 4:
        return _columns(nest, lanes)
    return serial(nest, nest.spatial, _scalar)


def reduces_along_memory(nest: Nest) -> bool:
    """Whether the last reduction loop walks contiguous memory, and the last spatial loop does not."""
    combiner = combiner_of(nest)
    if combiner is None:
        return False
    axes = (*nest.spatial, *nest.reduce)
    inner = nest.reduce[-1]
    last = nest.spatial[-1] if nest.spatial else None
    moving = [load for load in buffer_loads(combiner.value) if uses(load, [inner])]
    contiguous = [load for load in moving if stride_along(load, inner, axes) == 1]
    if not contiguous or inner.extent < 4:
        return False
    if last is None or last.extent < 4:
        return True
    by_column = [load for load in buffer_loads(combiner.value) if uses(load, [last])]
    return not by_column or not all(stride_along(load, last, axes) in (1, 2) for load in by_column)


def _rest(nest: Nest) -> Combiner:
    combiner = combiner_of(nest)
    assert combiner is not None  # the caller has read it before; loops do not change the body's form
    return combiner


def _scalar(nest: Nest) -> tirx.Stmt:
    dtype = str(nest.body.buffer.dtype)
    total = tirx.decl_buffer((1,), dtype, "total")
    combiner = _rest(nest)

    def step(point: Nest) -> tirx.Stmt:
        value = _rest(point).value
        return tirx.BufferStore(total, combiner.apply(tirx.BufferLoad(total, [0]), value), [0])

    return sequence(
        tirx.AllocBuffer(total),
        tirx.BufferStore(total, combiner.identity, [0]),
        serial(nest, nest.reduce, step),
        nest.finish(tirx.BufferLoad(total, [0])),
    )


def _along_memory(nest: Nest, lanes: int) -> tirx.Stmt:
    """One output: vector accumulators over the last loop, folded in halves at the end, the remainder added singly."""
    combiner = _rest(nest)
    dtype = str(nest.body.buffer.dtype)
    *outer, inner = nest.reduce
    while lanes > inner.extent:
        lanes //= 2
    if lanes < 4:
        return _scalar(nest)
    width = lanes * max(1, min(_ACCUMULATORS, inner.extent // lanes))
    partial = tirx.decl_buffer((width,), dtype, "partial")
    full = inner.extent // width

    def load(position: PrimExpr) -> PrimExpr:
        return tirx.BufferLoad(partial, [position])

    def add(body: Nest, position: PrimExpr, slot: PrimExpr) -> tirx.Stmt:
        value = replace_variables(_rest(body).value, {inner.var: position})
        return tirx.BufferStore(partial, combiner.apply(load(slot), value), [slot])

    def chunk(body: Nest, start: PrimExpr, count: int) -> tirx.Stmt:
        return loop(
            count,
            lambda u: loop(
                lanes,
                lambda v: add(body, start + u * lanes + v, u * lanes + v),
                ForKind.VECTORIZED,
                name="v",
                dtype=inner.dtype,
            ),
            ForKind.UNROLLED,
            name="u",
            dtype=inner.dtype,
        )

    def one_pass(body: Nest) -> tirx.Stmt:
        steps = [loop(full, lambda o: chunk(body, o * width, width // lanes), name="o", dtype=inner.dtype)]
        vectors = (inner.extent - full * width) // lanes
        if vectors:
            steps.append(chunk(body, tirx.const(full * width, inner.dtype), vectors))
        done = full * width + vectors * lanes
        if done < inner.extent:
            zero = tirx.const(0, inner.dtype)
            steps.append(loop(inner.extent - done, lambda t: add(body, t + done, zero), name="t", dtype=inner.dtype))
        return sequence(*steps)

    statements = [tirx.AllocBuffer(partial), _fill(partial, width, lanes, combiner.identity)]
    statements.append(serial(nest, outer, one_pass))
    span = width
    while span > 1:
        half = span // 2 if span % 2 == 0 else 1
        kind = ForKind.VECTORIZED if half >= 4 else ForKind.SERIAL
        for start in range(half, span, half):
            statements.append(
                loop(
                    half,
                    lambda v, start=start: tirx.BufferStore(partial, combiner.apply(load(v), load(v + start)), [v]),
                    kind,
                    name="v",
                )
            )
        span = half
    statements.append(nest.finish(load(tirx.const(0, "int32"))))
    return sequence(*statements)


def _fill(buffer: tirx.Buffer, extent: int, lanes: int, value: PrimExpr) -> tirx.Stmt:
    return loop(
        extent // lanes,
        lambda o: loop(lanes, lambda v: tirx.BufferStore(buffer, value, [o * lanes + v]), ForKind.VECTORIZED, name="v"),
        ForKind.UNROLLED,
        name="o",
    )


def _columns(nest: Nest, lanes: int) -> tirx.Stmt:
    """Accumulators for a few rows times a few vectors, the reduction loops around them."""
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
    if beyond is not None and _may_read(nest, column, beyond.width - beyond.valid):
        blocks = [block for block in blocks if block.start < beyond.start] + [beyond]

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


def _may_read(nest: Nest, column: Axis, beyond: int) -> bool:
    """Whether all that is read along the columns is there for some more of them, in the same row of its tensor."""
    analyzer = sym.Analyzer()
    for axis in (*nest.spatial, *nest.reduce):
        analyzer.bind(axis.var, tvm.ir.Range(tirx.const(0, axis.dtype), tirx.const(axis.extent, axis.dtype)))
    value = _rest(nest).value
    if guarded_loads(value) or uses(map_buffer_loads(value, lambda load: tirx.const(0, dtype_of(load))), [column]):
        return False
    for load in buffer_loads(value):
        if not uses(load, [column]):
            continue
        *leading, last = load.indices
        stride = stride_along(load, column, [column])
        if uses(leading, [column]) or buffer_loads(list(load.indices)) or stride is None or stride < 0:
            return False
        highest = int(analyzer.const_int_bound(last).max_value)
        if highest + stride * beyond >= int(load.source.shape[-1]):
            return False
    return True


def _shared_row(nest: Nest, outer: list[Axis], column: Axis) -> Axis | None:
    """A spatial loop that some operand does not depend on, at best one that is read along the columns.

    Its rows share those vectors, or at least what they are multiplied with.
    """
    loads = buffer_loads(_rest(nest).value)
    vectors = [load for load in loads if uses(load, [column])]
    for shared in (vectors, loads):
        for axis in reversed(outer):
            if any(not uses(load, [axis]) for load in shared):
                return axis
    return None


def _tile(nest: Nest, rows: Axis | None, column: Axis, start: PrimExpr, height: int, block: _Block) -> tirx.Stmt:
    combiner = _rest(nest)
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
                        piece.count * piece.width,
                        lambda v, piece=piece: make(r, v + piece.start),
                        ForKind.VECTORIZED if piece.width > 1 else ForKind.UNROLLED,
                        name="v",
                        dtype=column.dtype,
                    )
                    for piece in pieces(block.valid, width)
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
            return each(lambda r, c: update(r, c, _rest(at(body, r, c)).value))
        return loop(vectors, lambda u: staged(body, strided, u * width), ForKind.UNROLLED, name="u", dtype=column.dtype)

    def staged(body: Nest, strided: list[TensorLoad], offset: PrimExpr) -> tirx.Stmt:
        # Every second element of two vectors, by way of local arrays that LLVM turns into one shuffle.
        shared = [load for load in strided if rows is None or not uses(load, [rows])]
        buffers: list[tuple[TensorLoad, tirx.Buffer]] = []

        def stage(loads: list[TensorLoad], r: PrimExpr) -> list[tirx.Stmt]:
            statements = []
            for load in loads:
                statement, picked = _every_second(replace_variables(load, at_values(r, offset)), width)
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

                value = map_buffer_loads(_rest(body).value, pick)
                return update(r, offset + v, replace_variables(value, at_values(r, offset + v)))

            return sequence(*own, loop(width, lane, ForKind.VECTORIZED, name="v", dtype=column.dtype))

        common = stage(shared, tirx.const(0, column.dtype))
        kind = ForKind.UNROLLED
        rest = loop(height, row, kind, name="r", dtype=rows.dtype if rows is not None else column.dtype)
        return sequence(*common, rest)

    return sequence(
        tirx.AllocBuffer(tile),
        each(lambda r, c: tirx.BufferStore(tile, combiner.identity, [r, c])),
        serial(nest, nest.reduce, step),
        stored(lambda r, c: at(nest, r, c).finish(tirx.BufferLoad(tile, [r, c]))),
    )


def _pairs(nest: Nest, column: Axis, width: int) -> list[TensorLoad]:
    """Distinct loads that step by two elements along the columns, in their last dimension alone."""
    found: list[TensorLoad] = []
    if width < 4:
        return found
    value = _rest(nest).value
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


def _every_second(base: TensorLoad, width: int) -> tuple[tirx.Stmt, tirx.Buffer]:
    """Elements 0, 2, ... from `base` on in a local array, from two contiguous vectors that read nothing beyond them."""
    dtype = dtype_of(base)
    both = tirx.decl_buffer((2 * width,), dtype, "both")
    even = tirx.decl_buffer((width,), dtype, "even")
    *leading, last = base.indices
    half = width // 2

    def vector(extent: int, make: Callable[[PrimExpr], tirx.Stmt]) -> tirx.Stmt:
        return loop(extent, make, ForKind.VECTORIZED, name="v", dtype=dtype_of(last))

    def read(offset: int) -> Callable[[PrimExpr], PrimExpr]:
        return lambda v: tirx.BufferLoad(base.source, [*leading, last + v + offset])

    low, high = read(0), read(width - 1)
    statements = [
        tirx.AllocBuffer(both),
        tirx.AllocBuffer(even),
        vector(width, lambda v: tirx.BufferStore(both, low(v), [v])),
        vector(width, lambda v: tirx.BufferStore(both, high(v), [v + width])),
        vector(half, lambda v: tirx.BufferStore(even, tirx.BufferLoad(both, [v * 2]), [v])),
        vector(half, lambda v: tirx.BufferStore(even, tirx.BufferLoad(both, [v * 2 + width + 1]), [v + half])),
    ]
    return sequence(*statements), even


def _plain(nest: Nest) -> tirx.Stmt:
    """Any other reduction, as of tuples: serial."""

    def point(inner: Nest) -> tirx.Stmt:
        steps = [inner.init] if inner.init is not None else []
        steps.append(serial(inner, inner.reduce, lambda body: body.body))
        if inner.epilogue is not None:
            steps.append(inner.epilogue)
        return sequence(*steps)

    return serial(nest, nest.spatial, point)
