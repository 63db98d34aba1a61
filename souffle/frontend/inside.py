"""Elements that data chooses lie in their tensor, whatever the data.

An index that a model's input decides may be anything, and the models that we are given are not to be trusted with the
memory of who runs them. What is wrong about an index shows in the result, nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.sym import Analyzer

from souffle.tvm_compat import PrimExpr, const_int, load_indices, load_tensor, loads, map_loads

__all__ = ["kept_inside"]


def kept_inside(expression: PrimExpr, axes: Sequence[tirx.IterVar]) -> PrimExpr:
    """`expression` with a clamp around each index that another element decides and that might leave its dimension.

    Parameters
    ----------
    expression : expression
    axes : sequence of IterVar
        All that it is over.
    """
    if not any(_by_data(load) for load in loads(expression)):
        return expression
    analyzer = Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, axis.dom)

    def inside(index: PrimExpr, extent: int) -> PrimExpr:
        if not loads(index):
            return index
        # The analyzer is for expressions over variables: an element stands for any number of its type.
        bound = analyzer.const_int_bound(map_loads(index, lambda load: tirx.Var("element", load.ty.dtype)))
        if bound.min_value >= 0 and bound.max_value < extent:
            return index
        dtype, index = str(index.ty.dtype), _apart_from_guards(index)
        return tirx.max(tirx.min(index, tirx.IntImm(dtype, extent - 1)), tirx.IntImm(dtype, 0))

    def rewritten(load: Call) -> PrimExpr:
        if not _by_data(load):
            return load
        tensor = load_tensor(load)
        return tensor(*(inside(i, const_int(e)) for i, e in zip(load_indices(load), tensor.shape, strict=True)))

    return map_loads(expression, rewritten)


def _apart_from_guards(index: PrimExpr) -> PrimExpr:
    """`index` with numbers rounded from floating point by way of 64 bits.

    A guard around the element may compare the very same number, so that a simplifier would take the clamp away. What is
    left would be in bounds only if both roundings gave one number, which no floating-point arithmetic has to: a
    compiler may join a product and a sum in one of them alone.
    """

    def cast(node: tirx.Cast) -> PrimExpr:
        rounds = "float" in str(node.value.ty.dtype) and str(node.ty.dtype) == "int32"
        return tirx.Cast("int32", tirx.Cast("int64", node.value)) if rounds else node

    return tvm_ffi.structural_map(index, (tirx.Cast, cast))


def _by_data(load: Call) -> bool:
    return any(loads(index) for index in load_indices(load))
