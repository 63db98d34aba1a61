"""Which injective nests disappear: into the nests that read them, or into the end of the reduction that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from souffle.index.inverse import inverse_map
from souffle.schedule.cpu.contraction_form import combiner_of, contraction_of
from souffle.schedule.cpu.elementary import is_expensive
from souffle.schedule.cpu.nest import Nest, map_buffer_loads, product, replace_variables, uses
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, is_branch

__all__ = ["attach_epilogues", "inline_injective", "node_count", "without_trivial_reductions"]

_MAX_NODES = 400
"""Larger expressions are kept in a buffer, which bounds the text that repeated inlining can make."""
_CHEAP = 8
"""Nodes of an expression that is as cheap as a load: a cast, a scaled copy, a sum of two."""


def without_trivial_reductions(items: Sequence[Nest | tirx.Stmt]) -> list[Nest | tirx.Stmt]:
    """Turn reductions over a single element, such as a product with K = 1, into injective nests."""
    return [_once(item) if isinstance(item, Nest) else item for item in items]


def _once(nest: Nest) -> Nest:
    if not nest.reduce or combiner_of(nest) is None or any(axis.extent > 1 for axis in nest.reduce):
        return nest
    own = nest.body.buffer
    bound = nest.bind({axis.var: tirx.const(0, axis.dtype) for axis in nest.reduce})
    start = bound.init.value
    body = map_buffer_loads(bound.body, lambda load: start if load.source.same_as(own) else load)
    return replace(bound, init=None, body=body)


def inline_injective(items: Sequence[Nest | tirx.Stmt], kept: Sequence[Any]) -> list[Nest | tirx.Stmt]:
    """Substitute injective nests into their readers where that repeats nothing expensive.

    Parameters
    ----------
    items : sequence of Nest or Stmt
    kept : sequence of Buffer
        Buffers that must be written (the function's parameters).
    """
    current = list(items)
    position = -1
    while position + 1 < len(current):
        position += 1
        producer = current[position]
        if not isinstance(producer, Nest) or not producer.injective or not _stores_each_once(producer):
            continue
        buffer = producer.body.buffer
        if any(buffer.same_as(k) for k in kept):
            continue
        readers = [i for i, item in enumerate(current) if i != position and _reads(item, buffer)]
        if not readers or not all(isinstance(current[i], Nest) for i in readers):
            continue
        if not all(_worthwhile(producer, current[i], len(readers)) for i in readers):
            continue
        merged = {i: _substitute(producer, current[i]) for i in readers}
        if any(node_count(nest.body) > _MAX_NODES for nest in merged.values()):
            continue
        current = [merged.get(i, item) for i, item in enumerate(current) if i != position]
        position -= 1
    return current


def attach_epilogues(items: Sequence[Nest | tirx.Stmt], kept: Sequence[Any]) -> list[Nest | tirx.Stmt]:
    """Let a reduction store what its only reader computes from it, element by element.

    The pair stands where the reader stood, since all that the reader needs exists there.
    """
    current = list(items)
    for candidate in list(current):
        if not isinstance(candidate, Nest) or not candidate.reduce or not candidate.single:
            continue
        if not _stores_each_once(candidate):
            continue
        buffer = candidate.body.buffer
        readers = [item for item in current if item is not candidate and _reads(item, buffer)]
        if any(buffer.same_as(k) for k in kept) or len(readers) != 1:
            continue
        epilogue = _as_epilogue(candidate, readers[0])
        if epilogue is None:
            continue
        at = next(i for i, item in enumerate(current) if item is readers[0])
        current[at] = replace(candidate, epilogue=epilogue, name=readers[0].name)
        current = [item for item in current if item is not candidate]
    return current


def node_count(node: Any) -> int:
    """Number of TVM nodes in an expression or statement."""
    count = 0

    def visit(_: Any) -> None:
        nonlocal count
        count += 1

    structural_walk(node, (tvm.Object, visit))
    return count


def _reads(item: Nest | tirx.Stmt, buffer: Any) -> bool:
    if isinstance(item, Nest):
        return any(buffer.same_as(read) for read in item.reads)
    seen: list[tirx.Var] = []
    structural_walk(item, (tirx.Var, lambda v: seen.append(v)))
    return any(buffer.same_as(v) for v in seen)


def _stores_each_once(nest: Nest) -> bool:
    indices = list(nest.body.indices)
    if len(indices) != len(nest.spatial):
        return not indices and nest.points == 1
    return all(index.same_as(axis.var) for index, axis in zip(indices, nest.spatial, strict=True))


def _substitute(producer: Nest, reader: Nest) -> Nest:
    buffer = producer.body.buffer

    def inlined(load: TensorLoad) -> PrimExpr:
        if not load.source.same_as(buffer):
            return load
        values = {axis.var: index for axis, index in zip(producer.spatial, load.indices, strict=False)}
        return replace_variables(producer.body.value, values)

    return replace(reader, body=map_buffer_loads(reader.body, inlined))


def _conditional(expression: Any) -> bool:
    found: list[bool] = []
    structural_walk(expression, (Call, lambda call: found.append(is_branch(call))))
    return any(found)


def _distinct_loads(expression: Any, buffer: Any) -> list[TensorLoad]:
    kept: list[TensorLoad] = []
    for load in buffer_loads(expression):
        if load.source.same_as(buffer) and not any(tvm_ffi.structural_equal(load, other) for other in kept):
            kept.append(load)
    return kept


def _worthwhile(producer: Nest, reader: Nest, readers: int) -> bool:
    value = producer.body.value
    if not reader.single:
        return False
    loads = _distinct_loads(reader.body, producer.body.buffer)
    nodes = node_count(value)
    plain = isinstance(value, TensorLoad)
    expensive = is_expensive(value)
    form = contraction_of(reader)
    if form is not None:
        vector_side = any(load.source.same_as(producer.body.buffer) for load in buffer_loads(form.vector.value))
        scalar_side = any(load.source.same_as(producer.body.buffer) for load in buffer_loads(form.scalar.value))
        if plain:
            return True
        if scalar_side or not vector_side or expensive or readers > 1:
            return False
        used = product(axis.extent for axis in uses(form.vector.value, (*reader.spatial, *reader.reduce)))
        return used <= producer.points
    evaluations = reader.work * len(loads)
    repeats = evaluations > producer.points
    if plain:
        return True
    if readers > 1:
        return not expensive and not repeats and nodes <= _CHEAP
    if reader.reduce:
        return not repeats and not (_conditional(value) and len(loads) > 1)
    if expensive:
        return not repeats and not _conditional(reader.body)
    return not repeats or nodes <= 4 * _CHEAP


def _as_epilogue(reduction: Nest, reader: Nest | tirx.Stmt) -> tirx.BufferStore | None:
    if not isinstance(reader, Nest) or not reader.injective or reader.points != reduction.points:
        return None
    if not _stores_each_once(reader):
        return None
    own = reduction.body.buffer
    loads = _distinct_loads(reader.body, own)
    if len(loads) != 1:
        return None
    if not reduction.spatial:
        values: dict[tirx.Var, PrimExpr] = {axis.var: tirx.const(0, axis.dtype) for axis in reader.spatial}
        return replace_variables(reader.body, values)
    inverse = inverse_map([(axis.var, axis.extent) for axis in reader.spatial], list(loads[0].indices))
    if inverse is None:
        return None
    indices = inverse([axis.var for axis in reduction.spatial])
    values = {
        axis.var: index if dtype_of(index) == axis.dtype else tirx.Cast(axis.dtype, index)
        for axis, index in zip(reader.spatial, indices, strict=True)
    }
    identity = list(reduction.body.indices)

    def own_element(load: TensorLoad) -> PrimExpr:
        return tirx.BufferLoad(own, identity) if load.source.same_as(own) else load

    # The reader's own index map, composed with its inverse, is the identity: load the element plainly.
    return replace_variables(map_buffer_loads(reader.body, own_element), values)
