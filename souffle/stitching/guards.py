"""Conditions on which the blocks of a scheduled function are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm_ffi
from tvm import s_tir, tirx

from souffle.tvm_compat import PrimExpr

__all__ = ["conjuncts", "guarded"]


def conjuncts(condition: PrimExpr) -> list[PrimExpr]:
    """What all has to hold for a condition to hold."""
    return [*conjuncts(condition.a), *conjuncts(condition.b)] if isinstance(condition, tirx.And) else [condition]


def guarded(func: tirx.PrimFunc, guards: Mapping[str, Sequence[PrimExpr]]) -> tirx.PrimFunc:
    """A function with blocks computed on more conditions, and so their initializations."""

    def guard(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        name = realize.block.name_hint.removesuffix("_init").removesuffix("_update")
        condition = realize.predicate
        for one in guards.get(name, ()):
            condition = tirx.And(condition, one)
        return s_tir.SBlockRealize(list(realize.iter_values), condition, realize.block)

    if not any(guards.values()):
        return func
    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, guard)))
