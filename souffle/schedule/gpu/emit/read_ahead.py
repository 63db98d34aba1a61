"""What an expression reads from memory, read before something else that it needs is known.

::

    y = f(total, x[i], where(c, z[j], total))     →     a0 = x[i]; a1 = where(c, z[j], 0)
                                                        ...
                                                        y = f(total, a0, where(c, a1, total))

Legal for reads at places, and under conditions, that do not depend on what is not known yet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from souffle.schedule.gpu.emit.contraction_statements import all_of, local_buffer
from souffle.tvm_calls import structural_mutate
from souffle.tvm_compat import (
    PrimExpr,
    choice_parts,
    collect,
    dtype_of,
    is_branch,
    is_choice,
    structural_key,
)

__all__ = ["ReadAhead"]


class ReadAhead:
    """Parts some expressions.

    Parameters
    ----------
    values : sequence of PrimExpr
    later : collection of Var
        What is not known yet.

    Attributes
    ----------
    values : list of PrimExpr
        The expressions with registers for what they read.
    reads : list of (Buffer, PrimExpr)
        The registers, of one element each, and what is read into them.
    """

    def __init__(self, values: Sequence[PrimExpr], later: Collection[tirx.Var]) -> None:
        self.later = tuple(later)
        self.reads: list[tuple[tirx.Buffer, PrimExpr]] = []
        self._known: dict[tuple[object, ...], tirx.Buffer] = {}
        self.values = [self._parted(value, ()) for value in values]

    def _parted(self, value: PrimExpr, conditions: tuple[PrimExpr, ...]) -> PrimExpr:
        def taken(node: PrimExpr, _: object) -> PrimExpr:
            return self._taken(node, conditions)

        def call(node: Call, mutator: Any) -> PrimExpr:
            return self._taken(node, conditions) if is_branch(node) else mutator.default_mutate(node)

        return structural_mutate(value, [(TensorLoad, taken), (tirx.Select, taken), (Call, call)])

    def _taken(self, node: PrimExpr, conditions: tuple[PrimExpr, ...]) -> PrimExpr:
        if is_choice(node):
            condition, then, other = choice_parts(node)
            if any(variable.same_as(one) for variable in collect(condition, tirx.Var) for one in self.later):
                return node
            condition = self._parted(condition, conditions)
            if not is_branch(node):
                # Both sides are read in any case.
                return tirx.Select(condition, self._parted(then, conditions), self._parted(other, conditions))
            then = self._parted(then, (*conditions, condition))
            other = self._parted(other, (*conditions, tirx.Not(condition)))
            return tirx.if_then_else(condition, then, other)
        if any(collect(index, TensorLoad) for index in node.indices) or dtype_of(node).startswith("bool"):
            return node
        key = (structural_key(node), *(structural_key(condition) for condition in conditions))
        if key not in self._known:
            register = local_buffer(f"ahead{len(self.reads)}", 1, dtype_of(node))
            zero = tirx.const(0, dtype_of(node))
            self.reads.append((register, tirx.if_then_else(all_of(conditions), node, zero) if conditions else node))
            self._known[key] = register
        return self._known[key][0]
