"""Take what overlapping windows compute again and again out of a reduction, into a buffer that is written once.

Before: ``y[p] += if_then_else(1 <= p + r, x[p + r - 1], 0) * w[r]``, as substitution leaves the padding of a
convolution; after: ``q[i] = if_then_else(1 <= i, x[i - 1], 0)`` and ``y[p] += q[p + r] * w[r]``. This is right for any
expression that depends on the loops only through the positions that it reads and compares, here ``p + r``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx import Mul

from souffle.index.operations import COMPARISONS
from souffle.schedule.cpu.contraction_form import combiner_of
from souffle.schedule.cpu.nest import Axis, Nest, analyzer_of, product, simplify, uses
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of

__all__ = ["hoist_windows"]

_WORTHWHILE_REPEATS = 1.5


@dataclass(frozen=True, eq=False)
class _Position:
    """An index expression and the variable that stands for it, counted from its lowest value."""

    expression: PrimExpr
    low: int
    axis: Axis


def hoist_windows(items: Sequence[Nest | tirx.Stmt]) -> list[Nest | tirx.Stmt]:
    """Put a nest of its own before each reduction that computes an expression repeatedly in windows."""
    result: list[Nest | tirx.Stmt] = []
    for item in items:
        nest = item
        if isinstance(nest, Nest) and nest.reduce:
            combiner = combiner_of(nest)
            value = combiner.value if combiner is not None else None
            factors = [value.a, value.b] if isinstance(value, Mul) else [value] if value is not None else []
            if len(factors) == 2 and tvm_ffi.structural_equal(*factors):
                factors.pop()
            for factor in factors:
                hoisted = _hoist(nest, factor)
                if hoisted is not None:
                    before, nest = hoisted
                    result.append(before)
        result.append(nest)
    return result


def _hoist(nest: Nest, factor: PrimExpr) -> tuple[Nest, Nest] | None:
    loads = buffer_loads(factor)
    axes = nest.axes
    if isinstance(factor, TensorLoad) or not loads or len(uses(factor, nest.reduce)) == 0:
        return None
    if all(any(index.same_as(a.var) for a in axes) or not uses(index, axes) for v in loads for index in v.indices):
        return None  # no window: every element is computed for one place of the loops that it depends on
    positions = _positions(loads, axes)
    if positions is None:
        return None
    computed = product(axis.extent for axis in uses(factor, axes))
    kept = product(position.axis.extent for position in positions)
    if computed < _WORTHWHILE_REPEATS * kept:
        return None
    # Bytes stay bytes, of which instructions multiply several at once.
    bytes_ = isinstance(factor, tirx.Cast) and dtype_of(factor.value) in ("int8", "uint8")
    kept_value = factor.value if bytes_ else factor
    stored = _through(kept_value, positions, axes)
    if stored is None:
        return None
    buffer = tirx.decl_buffer(tuple(p.axis.extent for p in positions), dtype_of(kept_value), f"{nest.name}_window")
    store = tirx.BufferStore(buffer, stored, [p.axis.var for p in positions])
    before = Nest(f"{nest.name}_window", tuple(p.axis for p in positions), (), None, store)
    read = tirx.BufferLoad(buffer, [simplify(p.expression - p.low, axes) for p in positions])
    read = tirx.Cast(dtype_of(factor), read) if bytes_ else read
    body = nest.body

    def swap(node: PrimExpr) -> PrimExpr:
        return read if tvm_ffi.structural_equal(node, factor) else node

    value = body.value
    own, other = (value.a, value.b) if _reads_own(value.a, body) else (value.b, value.a)
    term = Mul(swap(other.a), swap(other.b)) if isinstance(other, Mul) else swap(other)
    return before, replace(nest, body=tirx.BufferStore(body.buffer, type(value)(own, term), list(body.indices)))


def _reads_own(expression: PrimExpr, body: tirx.BufferStore) -> bool:
    return isinstance(expression, TensorLoad) and expression.source.same_as(body.buffer)


def _positions(loads: Sequence[TensorLoad], axes: Sequence[Axis]) -> list[_Position] | None:
    analyzer = analyzer_of(axes)
    found: list[_Position] = []
    for load in loads:
        if any(buffer_loads(index) for index in load.indices):
            return None
        for index in load.indices:
            if not uses(index, axes) or _relative(index, found, axes) is not None:
                continue
            bound = analyzer.const_int_bound(index)
            low, extent = int(bound.min_value), int(bound.max_value) - int(bound.min_value) + 1
            found.append(_Position(index, low, Axis(tirx.Var(f"q{len(found)}", dtype_of(index)), extent)))
    # Positions that share a loop would make a box with corners that the loops never reach, outside of the tensors.
    shared = [axis for axis in axes if sum(bool(uses(p.expression, [axis])) for p in found) > 1]
    return None if shared or not found else found


def _relative(expression: PrimExpr, positions: Sequence[_Position], axes: Sequence[Axis]) -> PrimExpr | None:
    """`expression` in the variable of the one position that it equals, up to its sign and a constant."""
    for position in positions:
        if dtype_of(position.expression) != dtype_of(expression):
            continue
        for sign in (1, -1):
            offset = simplify(expression - position.expression * sign, axes)
            if isinstance(offset, tirx.IntImm):
                return (position.axis.var + position.low) * sign + offset
    return None


def _through(factor: PrimExpr, positions: Sequence[_Position], axes: Sequence[Axis]) -> PrimExpr | None:
    failed: list[bool] = []
    own = [position.axis for position in positions]

    def rewritten(expression: PrimExpr) -> PrimExpr:
        if not uses(expression, axes):
            return expression
        found = _relative(expression, positions, axes)
        if found is None:
            failed.append(True)
            return expression
        return simplify(found, own)

    def compare(node: PrimExpr) -> PrimExpr:
        if not dtype_of(node.a).startswith("int") or buffer_loads(node):
            return node
        difference = rewritten(node.a - node.b)
        return type(node)(difference, tirx.const(0, dtype_of(difference)))

    def load(node: TensorLoad) -> PrimExpr:
        return tirx.BufferLoad(node.source, [rewritten(index) for index in node.indices])

    stored = structural_map(factor, [(TensorLoad, load), (COMPARISONS, compare)])
    return None if failed or uses(stored, axes) else stored
