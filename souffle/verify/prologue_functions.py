"""What functions do that start copies ahead of a wait, and functions that make these themselves (``prologues.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import StatementVisitor, collect, sequence, statements_of
from souffle.verify.device_effects import COPY
from souffle.verify.expressions import Undecided
from souffle.verify.indices import operator_name

__all__ = ["only_copies", "with_copies"]


def only_copies(function: tirx.PrimFunc) -> bool:
    """Whether a function does nothing but start copies of what it is given, at places that no memory says."""
    given = {d.buffer for d in collect(function.body, tirx.DeclBuffer) if d.data in set(function.params)}
    copies = _Copies(given)
    try:
        copies.visit(function.body)
    except Undecided:
        return False
    return copies.count > 0


def with_copies(copies: tirx.PrimFunc, rest: tirx.PrimFunc, places: Sequence[int]) -> tirx.PrimFunc:
    """A function that makes copies and then does the rest.

    Parameters
    ----------
    copies, rest : PrimFunc
    places : sequence of int
        For each parameter of `copies`, which of `rest` it is.

    Raises
    ------
    Undecided
        If it is not seen that both mean the same shared memory.
    """
    table: dict[Any, Any] = {own: rest.params[place] for own, place in zip(copies.params, places, strict=True)}
    first, pool = _pool(copies), _pool(rest)
    for bound in collect(copies.body, tirx.Bind):
        table[bound.var] = tirx.Var(str(bound.var.name), bound.var.ty)
    for loop in collect(copies.body, tirx.For):
        table[loop.loop_var] = tirx.Var(str(loop.loop_var.name), loop.loop_var.ty)
    for declared in collect(copies.body, tirx.DeclBuffer):
        own = declared.buffer
        table[own] = tirx.decl_buffer(own.shape, own.dtype, str(own.name), scope=str(own.scope()), layout=None)
    table[first] = pool

    def declared(node: tirx.DeclBuffer) -> tirx.DeclBuffer:
        return tirx.DeclBuffer(table.get(node.buffer, node.buffer), data=node.data)

    renamed = structural_map(copies.body, [(tvm.ir.Var, lambda var: table.get(var, var)), (tirx.DeclBuffer, declared)])
    inside = [one for one in statements_of(renamed) if not isinstance(one, tirx.AllocBuffer)]
    own = statements_of(rest.body)
    allocated = [isinstance(one, tirx.AllocBuffer) and one.buffer.same_as(pool) for one in own]
    if True not in allocated:
        raise Undecided("where a stage has its shared memory")
    at = allocated.index(True) + 1
    return rest.with_body(sequence(*own[:at], *inside, *own[at:]))


def _pool(function: tirx.PrimFunc) -> tirx.Buffer:
    """A function's only shared memory."""
    found = [a.buffer for a in collect(function.body, tirx.AllocBuffer) if str(a.buffer.scope()) == "shared.dyn"]
    if len(found) != 1:
        raise Undecided("where the shared memory of copies is that of their stage")
    return found[0]


@dataclass(eq=False)
class _Copies(StatementVisitor):
    """Counts the copies that statements start; what does anything else is undecided."""

    given: set[tirx.Buffer]
    count: int = 0

    def visit_attr(self, node: tirx.AttrStmt) -> None:
        if node.attr_key != "extern_scope":
            raise Undecided(node.attr_key)
        self.visit(node.body)

    def visit_bind(self, node: tirx.Bind) -> None:
        self.place(node.value)

    def visit_decl_buffer(self, node: tirx.DeclBuffer) -> None:
        """Nothing is done."""

    def visit_alloc_buffer(self, node: tirx.AllocBuffer) -> None:
        if str(node.buffer.scope()) != "shared.dyn":
            raise Undecided(f"memory {node.buffer.name}")

    def visit_for(self, node: tirx.For) -> None:
        self.place(node.min)
        self.place(node.extent)
        self.visit(node.body)

    def visit_if_then_else(self, node: tirx.IfThenElse) -> None:
        self.place(node.condition)
        for part in (node.then_case, node.else_case):
            if part is not None:
                self.visit(part)

    def visit_evaluate(self, node: tirx.Evaluate) -> None:
        if not isinstance(node.value, Call) or not COPY.fullmatch(operator_name(node.value)):
            raise Undecided("what is no copy")
        target, source, *whether = node.value.args[1:]
        into, of = (pointer.args[0] for pointer in (target, source))
        if of.source not in self.given or not str(into.source.scope()).startswith("shared"):
            raise Undecided("a copy of other memory")
        for place in (*into.indices, *of.indices, *whether):
            self.place(place)
        self.count += 1

    def visit_other(self, node: tirx.Stmt) -> None:
        raise Undecided(type(node).__name__)

    def place(self, expression: Any) -> None:
        """A place or a condition is the same whenever it is calculated."""
        if collect(expression, TensorLoad):
            raise Undecided("a place that memory says")
