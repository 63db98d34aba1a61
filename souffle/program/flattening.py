"""Buffers of one dimension, as TVM's ``FlattenBuffer`` makes them, without an error of its simplifier.

TVM simplifies the place of an element by taking it for a map of loops (``IterMapSimplify``). Where one loop is divided
twice, and one of the dividends has a constant in it, it may give both divisions the constant::

    x[t % 310 // 10, (t + 2) % 5]    →    x[(t + 2) % 310 // 10 * 5 + (t + 2) % 5]          (TVM 0.27)

And ``t // 21 % -2 * 21 + t % 21``, whose negative number its simplifier has made, it takes for ``t % -42``. So such
divisions are variables while it works, which it leaves alone, and divisions again afterwards.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.index.operations import DIVISIONS
from souffle.program.tvm_passes import function_pass
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, collect, dtype_of, substitute

__all__ = ["flatten_buffers", "has_shifted_division"]

_SUMS = (tirx.Add, tirx.Sub, tirx.Mul)


def flatten_buffers() -> tvm.transform.Pass:
    """The pass, in the place of ``tirx.transform.FlattenBuffer``."""
    return function_pass(_flattened, "souffle.FlattenBuffer")


def has_shifted_division(index: PrimExpr, loops: list[tirx.Var]) -> bool:
    """Whether an index divides anything but sums of loop variables, quotients and remainders, or by less than 1."""
    divisions = [division for kind in DIVISIONS for division in collect(index, kind)]
    return any(not (_is_plain(division.a, loops) and _is_positive(division.b)) for division in divisions)


def _is_positive(number: PrimExpr) -> bool:
    return isinstance(number, tirx.IntImm) and int(number.value) > 0


def _is_plain(dividend: PrimExpr, loops: list[tirx.Var]) -> bool:
    """Whether an expression is a sum of loop variables, quotients and remainders, each times a number above zero."""
    if isinstance(dividend, tirx.Add):
        return _is_plain(dividend.a, loops) and _is_plain(dividend.b, loops)
    if isinstance(dividend, tirx.Mul):
        return _is_positive(dividend.b) and _is_plain(dividend.a, loops)
    if isinstance(dividend, tirx.Var):
        return any(dividend.same_as(loop) for loop in loops)
    # Their own dividends are looked at by themselves.
    return isinstance(dividend, DIVISIONS)


def _flattened(function: tirx.PrimFunc) -> tirx.PrimFunc:
    loops = [loop.loop_var for loop in collect(function.body, tirx.For)]
    loops += [node.node.var for node in collect(function.body, tirx.AttrStmt) if isinstance(node.node, tirx.IterVar)]
    hidden: dict[tirx.Var, PrimExpr] = {}

    def hide(index: PrimExpr) -> PrimExpr:
        if isinstance(index, DIVISIONS) and has_shifted_division(index, loops) and not collect(index, TensorLoad):
            variable = tirx.Var("division", dtype_of(index))
            hidden[variable] = index
            return variable
        if isinstance(index, _SUMS):
            return type(index)(hide(index.a), hide(index.b))
        return tirx.Ramp(hide(index.base), index.stride, index.lanes) if isinstance(index, tirx.Ramp) else index

    def load(node: TensorLoad) -> TensorLoad:
        return tirx.BufferLoad(node.source, [hide(index) for index in node.indices])

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(node.buffer, node.value, [hide(index) for index in node.indices])

    body = structural_map(function.body, [(TensorLoad, load), (tirx.BufferStore, store)])
    flatten = tirx.transform.FlattenBuffer()
    if not hidden:
        return _applied(flatten, function)
    flat = _applied(flatten, function.with_body(body))
    return flat.with_body(substitute(flat.body, hidden))


def _applied(lowering: tvm.transform.Pass, function: tirx.PrimFunc) -> tirx.PrimFunc:
    return lowering(tvm.IRModule({"main": function}))["main"]
