"""Reductions that are not packed: along rows in memory, along columns with accumulators in registers, or plainly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.tirx import ForKind

from souffle.schedule.cpu.column_reduction import emit_columns
from souffle.schedule.cpu.contraction_form import combiner_of, known_combiner, split_groups, without_units
from souffle.schedule.cpu.elementary import is_expensive
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.loop_emission import collapse, emit_injective, serial
from souffle.schedule.cpu.nest import Axis, Nest, loop, product, replace_variables, stride_along, uses
from souffle.tvm_compat import PrimExpr, buffer_loads, sequence

__all__ = ["emit_reduction", "reduces_along_memory"]

_ACCUMULATORS = 4
"""Independent vector sums: additions take four cycles, and one starts every cycle or half of it."""
_MOST_SUMS = 16384
"""That stay in a second-level cache between the sum and what is computed of it."""
_LEAST_PART = 16
"""Smaller ones than that part of it are not worth the second loop."""


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
        return _then_functions(nest, machine) or emit_columns(nest, lanes)
    return serial(nest, nest.spatial, _scalar)


def _then_functions(nest: Nest, machine: Machine) -> tirx.Stmt | None:
    """Sums first, many of them, and then what is computed of them, where that is expensive; None where it is not.

    In one loop, the constants of both would need more registers than there are. And functions of what lies in a row
    are computed in whole vectors, however long the rows of the sums are.
    """
    if nest.epilogue is None or not is_expensive(nest.epilogue.value):
        return None
    cut = _cut(nest)
    if cut is None:
        return None
    nest, outer, inner = cut
    own, dtype = nest.body.buffer, str(nest.body.buffer.dtype)
    first, *others = (axis.extent for axis in inner)
    lanes = machine.lanes(dtype)
    beyond = lanes if not others else -(-lanes // product(others))
    sums = tirx.decl_buffer((first + beyond, *others), dtype, "sums")
    places = [axis.var for axis in inner]

    def moved(buffer: Any, indices: list[PrimExpr]) -> tuple[Any, list[PrimExpr]] | None:
        return (sums, places) if buffer.same_as(own) else None

    def part(point: Nest) -> tirx.Stmt:
        summing, whole = replace(point, epilogue=None).on_buffers(moved), point.on_buffers(moved)
        functions = Nest(f"{nest.name}_of_sums", inner, (), None, whole.epilogue)
        return sequence(emit_columns(summing, lanes, runs_on=True), emit_injective(functions, machine))

    return sequence(tirx.AllocBuffer(sums), serial(nest, outer, part))


def _cut(nest: Nest) -> tuple[Nest, tuple[Axis, ...], tuple[Axis, ...]] | None:
    """The nest with its loops in two parts, of which the inner one is as large as fits in the caches."""
    spatial = nest.spatial
    depth = next(n for n in range(len(spatial) + 1) if product(axis.extent for axis in spatial[n:]) <= _MOST_SUMS)
    outer, inner = spatial[:depth], spatial[depth:]
    if not outer:
        return nest, outer, inner
    *leading, axis = outer
    room = _MOST_SUMS // product(each.extent for each in inner)
    extent = max(divisor for divisor in range(1, room + 1) if axis.extent % divisor == 0)
    if extent * product(each.extent for each in inner) * _LEAST_PART < _MOST_SUMS:
        return None  # the loop has no part of such a size
    block = Axis(tirx.Var(f"{axis.var.name}_block", axis.dtype), axis.extent // extent)
    within = Axis(tirx.Var(f"{axis.var.name}_within", axis.dtype), extent)
    bound = nest.bind({axis.var: block.var * extent + within.var})
    return replace(bound, spatial=(*leading, block, within, *inner)), (*leading, block), (within, *inner)


def reduces_along_memory(nest: Nest) -> bool:
    """Whether the last reduction loop walks contiguous memory, and the last spatial loop does not."""
    combiner = combiner_of(nest)
    if combiner is None:
        return False
    axes = nest.axes
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


def _scalar(nest: Nest) -> tirx.Stmt:
    dtype = str(nest.body.buffer.dtype)
    total = tirx.decl_buffer((1,), dtype, "total")
    combiner = known_combiner(nest)

    def step(point: Nest) -> tirx.Stmt:
        value = known_combiner(point).value
        return tirx.BufferStore(total, combiner.apply(tirx.BufferLoad(total, [0]), value), [0])

    return sequence(
        tirx.AllocBuffer(total),
        tirx.BufferStore(total, combiner.identity, [0]),
        serial(nest, nest.reduce, step),
        nest.finish(tirx.BufferLoad(total, [0])),
    )


def _along_memory(nest: Nest, lanes: int) -> tirx.Stmt:
    """One output: vector accumulators over the last loop, folded in halves at the end, the remainder added singly."""
    combiner = known_combiner(nest)
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
        value = replace_variables(known_combiner(body).value, {inner.var: position})
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

    def fold(count: int, start: int) -> tirx.Stmt:
        kind = ForKind.VECTORIZED if count > 1 else ForKind.SERIAL
        return loop(
            count,
            lambda v: tirx.BufferStore(partial, combiner.apply(load(v), load(v + start)), [v]),
            kind,
            name="v",
        )

    # Whole vectors first, then halves of the one that is left: LLVM keeps in registers what is read as it was written.
    statements += [fold(lanes, start) for start in range(lanes, width, lanes)]
    while lanes > 1:
        lanes //= 2
        statements.append(fold(lanes, lanes))
    statements.append(nest.finish(load(tirx.const(0, "int32"))))
    return sequence(*statements)


def _fill(buffer: tirx.Buffer, extent: int, lanes: int, value: PrimExpr) -> tirx.Stmt:
    return loop(
        extent // lanes,
        lambda o: loop(lanes, lambda v: tirx.BufferStore(buffer, value, [o * lanes + v]), ForKind.VECTORIZED, name="v"),
        ForKind.UNROLLED,
        name="o",
    )


def _plain(nest: Nest) -> tirx.Stmt:
    """Any other reduction, as of tuples: serial."""

    def point(inner: Nest) -> tirx.Stmt:
        steps = [inner.init] if inner.init is not None else []
        steps.append(serial(inner, inner.reduce, lambda body: body.body))
        if inner.epilogue is not None:
            steps.append(inner.epilogue)
        return sequence(*steps)

    return serial(nest, nest.spatial, point)
