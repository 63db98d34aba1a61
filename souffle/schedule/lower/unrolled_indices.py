"""What loops that are to be unrolled index with, worked out ahead of them.

nvcc unrolls a loop with ``#pragma unroll``, but for some in which an address takes several divisions. It says nothing;
the loop stays, and a thread's own array that it indexes lies in local memory and not in registers::

    for lane in unrolled(4):                               base = a / 49 * 50176 + b % 49 / 7 * 7168
        own[lane] = x[a / 49 * 50176                       for lane in unrolled(4):
                      + b % 49 / 7 * 7168 + lane]    →         own[lane] = x[base + lane]

Legal since what is moved is arithmetic on whole numbers that no turn changes, and whose divisors are constants other
than zero: it may be worked out even where no turn would have come to it.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.index.operations import DIVISIONS
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, collect, dtype_of, only_calculates, sequence, variables

__all__ = ["with_short_indices"]

_MANY = 3
"""Divisions, powers of two not counted, with which nvcc 13.0 was seen to leave a loop as it is."""

_SUMS = (tirx.Add, tirx.Sub, tirx.Mul)


def with_short_indices(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """`function` with the long parts of indices ahead of the innermost unrolled loops over a thread's own arrays."""
    return function.with_body(structural_map(function.body, (tirx.For, _shortened)))


def _shortened(loop: tirx.For) -> tirx.Stmt:
    if loop.kind != tirx.ForKind.UNROLLED or collect(loop.body, tirx.For) or not _indexes_own(loop):
        return loop
    moved = _Moved(loop)

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(node.buffer, node.value, [moved.index(i) for i in node.indices])

    def load(node: TensorLoad) -> TensorLoad:
        return tirx.BufferLoad(node.source, [moved.index(i) for i in node.indices])

    body = structural_map(loop.body, [(tirx.BufferStore, store), (TensorLoad, load)])
    if not moved.binds:
        return loop
    inner = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)
    return sequence(*moved.binds, inner)


class _Moved:
    """The long parts of a loop's indices, each bound once."""

    def __init__(self, loop: tirx.For) -> None:
        self.binds: list[tirx.Bind] = []
        self.inside = [loop.loop_var, *(bind.var for bind in collect(loop.body, tirx.Bind))]

    def index(self, node: PrimExpr) -> PrimExpr:
        """An index with variables for its long parts that are the same in all turns."""
        if self._changes(node):
            if isinstance(node, _SUMS):
                return type(node)(self.index(node.a), self.index(node.b))
            if isinstance(node, tirx.Ramp):
                return tirx.Ramp(self.index(node.base), node.stride, node.lanes)
            return node
        if _divisions(node) < _MANY or not _is_safe(node):
            return node
        for bind in self.binds:
            if tvm_ffi.structural_equal(bind.value, node):
                return bind.var
        self.binds.append(tirx.Bind(tirx.Var("base", dtype_of(node)), node))
        return self.binds[-1].var

    def _changes(self, node: PrimExpr) -> bool:
        if isinstance(node, tirx.IntImm):
            return False
        used = [node] if isinstance(node, tirx.Var) else variables(node)
        return any(var.same_as(own) for var in used for own in self.inside)


def _indexes_own(loop: tirx.For) -> bool:
    """Whether the loop's variable indexes memory of a thread's own."""
    accesses = [(store.buffer, store.indices) for store in collect(loop.body, tirx.BufferStore)]
    accesses += [(load.source, load.indices) for load in collect(loop.body, TensorLoad)]
    indices = [i for buffer, at in accesses if str(buffer.scope()) == "local" for i in at]
    return any(v.same_as(loop.loop_var) for i in indices for v in collect(i, tirx.Var))


def _divisions(node: PrimExpr) -> int:
    """Of an index, by constants that are no power of two."""
    divisors = [division.b for kind in DIVISIONS for division in collect(node, kind)]
    return sum(isinstance(b, tirx.IntImm) and int(b.value).bit_count() != 1 for b in divisors)


def _is_safe(node: PrimExpr) -> bool:
    """Whether it may be worked out anywhere: no division by what may be zero, and nothing is asked."""
    divisors = [division.b for kind in DIVISIONS for division in collect(node, kind)]
    return only_calculates(node) and all(isinstance(b, tirx.IntImm) and int(b.value) != 0 for b in divisors)
