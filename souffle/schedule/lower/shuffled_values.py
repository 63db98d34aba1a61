"""What lanes of a warp hand to each other: each lane has written it.

Of a reduction by several warps, the first lanes load what each warp has found, and LowerThreadAllreduce lets all lanes
shuffle (TVM 0.27; right would be to give the others the reduction's identity). What they hand on comes to no lane that
counts, but they read an array that they have not written::

    if (tid < 8) { r[0] = found[tid]; }          →    if (tid < 8) { r[0] = found[tid]; } else { r[0] = 0; }
    t[0] = __shfl_down_sync(mask, r[0], 4, 32);
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import StatementVisitor, collect, dtype_of, is_shuffle, sequence, statements_of

__all__ = ["with_written_values"]


def with_written_values(body: tirx.Stmt) -> tirx.Stmt:
    """A function's body in which lanes write zeros where they have nothing to hand on."""
    shuffles = [call for call in collect(body, tvm.ir.Call) if is_shuffle(call)]
    first = _FirstStores([load.source for call in shuffles for load in collect(call.args[1], TensorLoad)])
    first.visit(body, 0)

    def zero(store: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(store.buffer, tirx.const(0, dtype_of(store.value)), store.indices)

    def otherwise(node: tirx.IfThenElse) -> tirx.IfThenElse:
        if not any(node.same_as(one) for one in first.guarded):
            return node
        zeros = [zero(store) for store in collect(node.then_case, tirx.BufferStore)]
        return tirx.IfThenElse(node.condition, node.then_case, sequence(*zeros))

    return structural_map(body, (tirx.IfThenElse, otherwise)) if first.guarded else body


class _FirstStores(StatementVisitor):
    """Branches in which arrays that are handed on are written for the first time since they were declared.

    Statements are visited in the order of the text, each with the number of loops around it.

    Attributes
    ----------
    guarded : list of IfThenElse
    """

    def __init__(self, handed: Sequence[tirx.Var]) -> None:
        self.guarded: list[tirx.IfThenElse] = []
        self._handed = handed
        # With the number of loops around their declarations.
        self._fresh: list[tuple[tirx.Var, int]] = []

    def visit_for(self, node: tirx.For, loops: int) -> None:
        self.visit(node.body, loops + 1)

    def visit_alloc_buffer(self, node: tirx.AllocBuffer, loops: int) -> None:
        if any(node.buffer.same_as(one) for one in self._handed):
            self._fresh.append((node.buffer, loops))

    def visit_if_then_else(self, node: tirx.IfThenElse, loops: int) -> None:
        if self._begins(node, loops):
            self.guarded.append(node)
        self.visit_other(node, loops)

    def visit_other(self, node: tirx.Stmt, loops: int) -> None:
        """What it stores to is written for the first time here at the latest."""
        stored = [store.buffer for store in collect(node, tirx.BufferStore)]
        self._fresh = [fresh for fresh in self._fresh if not any(fresh[0].same_as(one) for one in stored)]

    def _begins(self, node: tirx.IfThenElse, loops: int) -> bool:
        return node.else_case is None and all(
            isinstance(part, tirx.BufferStore)
            and any(part.buffer.same_as(array) and loops == around for array, around in self._fresh)
            for part in statements_of(node.then_case)
        )
