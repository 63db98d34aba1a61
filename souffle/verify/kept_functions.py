"""What functions do with registers, or slices of shared memory, that they are given (``kept_memory.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call

from souffle.tvm_calls import structural_map
from souffle.tvm_compat import StatementVisitor, collect, sequence
from souffle.verify.expressions import Undecided

__all__ = [
    "escapes",
    "fills_registers",
    "only_fills",
    "stores_elsewhere",
    "stores_to",
    "takes_registers",
    "with_registers",
]


def fills_registers(function: tirx.PrimFunc) -> bool:
    """Whether a function is no stage, but fills the registers that it is given."""
    return stores_to(function, _registers_of(function))


def takes_registers(function: tirx.PrimFunc) -> bool:
    return bool(_registers_of(function))


def _registers_of(function: tirx.PrimFunc) -> list[Any]:
    return [p for p in function.params if getattr(p.ty, "storage_scope", "") in ("local", "shared")]


def _of_pointers(function: tirx.PrimFunc, pointers: Sequence[Any]) -> list[tirx.Buffer]:
    """The memory that a function is given as some of its parameters."""
    return [d.buffer for d in collect(function.body, tirx.DeclBuffer) if any(p.same_as(d.data) for p in pointers)]


def stores_to(function: tirx.PrimFunc, pointers: Sequence[Any]) -> bool:
    """Whether a function stores to memory that it is given as some of its parameters."""
    given = _of_pointers(function, pointers)
    return any(any(store.buffer.same_as(one) for one in given) for store in collect(function.body, tirx.BufferStore))


def stores_elsewhere(function: tirx.PrimFunc, pointers: Sequence[Any]) -> bool:
    """Whether a function stores to other memory than it is given as some of its parameters."""
    given = _of_pointers(function, pointers)
    return not all(any(s.buffer.same_as(one) for one in given) for s in collect(function.body, tirx.BufferStore))


def only_fills(function: tirx.PrimFunc, pointers: Sequence[Any]) -> bool:
    """Whether all that a function changes is the memory that it is given as some of its parameters."""
    acts = [one for one in collect(function.body, tirx.Evaluate) if not isinstance(one.value, tirx.IntImm)]
    return not stores_elsewhere(function, pointers) and not acts


def escapes(function: tirx.PrimFunc, pointers: Sequence[Any]) -> bool:
    """Whether a function hands on where memory lies that it is given as some of its parameters: to what may store."""
    given = _of_pointers(function, pointers)
    for call in collect(function.body, Call):
        for argument in call.args:
            source = getattr(argument, "source", None)
            taken = source is not None and str(getattr(call.op, "name", "")) == "tirx.address_of"
            if (taken and any(source.same_as(b) for b in given)) or any(argument.same_as(p) for p in pointers):
                return True
    return False


def with_registers(function: tirx.PrimFunc, arguments: Sequence[Any], registers: Sequence[tirx.Buffer]) -> tirx.Stmt:
    """A function's body with other parameters, the last of them registers, and what it declares its own."""
    pointers = function.params[len(arguments) :]
    table = dict(zip(function.params, arguments, strict=False))
    for declared in collect(function.body, tirx.DeclBuffer):
        for pointer, register in zip(pointers, registers, strict=True):
            if pointer.same_as(declared.data):
                if _layout(declared.buffer) != _layout(register):
                    raise Undecided(f"registers of {_layout(register)} that {declared.buffer.name} has as others")
                table[declared.buffer] = register
    for bound in collect(function.body, tirx.Bind):
        table[bound.var] = tirx.Var(str(bound.var.name), bound.var.ty)
    for loop in collect(function.body, tirx.For):
        table[loop.loop_var] = tirx.Var(str(loop.loop_var.name), loop.loop_var.ty)
    renamed = structural_map(function.body, (tvm.ir.Var, lambda var: table.get(var, var)))
    return _Undeclared(registers).visit(renamed)


@dataclass(eq=False)
class _Undeclared(StatementVisitor):
    """Statements without the declarations of some buffers, which are there already."""

    buffers: Sequence[tirx.Buffer]

    def visit_sequence(self, node: tirx.SeqStmt) -> tirx.Stmt | None:
        parts = [part for part in map(self.visit, node.seq) if part is not None]
        return sequence(*parts) if parts else None

    def visit_attr(self, node: tirx.AttrStmt) -> tirx.Stmt:
        return tirx.AttrStmt(node.node, node.attr_key, node.value, self.visit(node.body))

    def visit_decl_buffer(self, node: tirx.DeclBuffer) -> tirx.Stmt | None:
        return None if any(node.buffer.same_as(one) for one in self.buffers) else node

    def visit_other(self, node: tirx.Stmt) -> tirx.Stmt:
        return node


def _layout(buffer: tirx.Buffer) -> tuple[str, tuple[int, ...]]:
    """The type and the extents of registers."""
    return str(buffer.dtype), tuple(int(extent) for extent in buffer.shape)
