"""Mutations of expressions: predicates that hold for fewer, loops with a turn less, accesses one element further."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.kernel.merge import OFFSET_FUNCTION
from souffle.mutation.statement_paths import Change, Path, at, is_int, mapped, replaced, sites

__all__ = ["edited", "heads", "index_changes", "nodes_of", "predicate_changes", "with_head"]

_ORDERS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ)
_COPY_BYTES = 16
"""Bytes of the widest access, by which pointers are shifted too."""


def heads(statement: tirx.Stmt) -> tuple[Any, ...]:
    """The expressions of a statement, without the statements inside."""
    if isinstance(statement, tirx.IfThenElse):
        return (statement.condition,)
    if isinstance(statement, tirx.For):
        return (statement.extent,)
    if isinstance(statement, (tirx.Bind, tirx.Evaluate)):
        return (statement.value,)
    if isinstance(statement, tirx.BufferStore):
        return (statement.value, *statement.indices)
    return ()


def with_head(statement: tirx.Stmt, number: int, head: Any) -> tirx.Stmt:
    """A statement with another one of its expressions."""
    if isinstance(statement, tirx.IfThenElse):
        return tirx.IfThenElse(head, statement.then_case, statement.else_case)
    if isinstance(statement, tirx.For):
        s = statement
        return tirx.For(s.loop_var, s.min, head, s.kind, s.body, s.thread_binding, s.annotations, s.step)
    if isinstance(statement, tirx.Bind):
        return tirx.Bind(statement.var, head)
    if isinstance(statement, tirx.Evaluate):
        return tirx.Evaluate(head)
    indices = list(statement.indices)
    if number:
        indices[number - 1] = head
    return tirx.BufferStore(statement.buffer, statement.value if number else head, indices)


def nodes_of(head: Any, kinds: tuple[type, ...]) -> list[Any]:
    """In the order of :func:`souffle.mutation.statement_paths.mapped`."""
    found: list[Any] = []
    tvm_ffi.structural_walk(head, (kinds, found.append), order="post")
    return found


def edited(
    func: tirx.PrimFunc, path: Path, number: int, kinds: tuple[type, ...], node: int, change: Callable[[Any], Any]
) -> Callable[[], tirx.PrimFunc]:
    """Gives `func` with a node of one of the expressions of a statement changed."""

    def make() -> tirx.PrimFunc:
        statement = at(func.body, path)
        head = mapped(heads(statement)[number], kinds, node, change)
        return func.with_body(replaced(func.body, path, with_head(statement, number, head)))

    return make


def predicate_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Make each comparison of whole numbers hold for one value less, and leave out the last turn of each loop.

    What holds for one value holds never.

    Comparisons are those of branches, of guards in choices (``select``, ``if_then_else``) and of tiles.
    """
    for site in sites(func):
        statement = site.statement
        if isinstance(statement, tirx.For):
            what = f"the last turn of the loop over {statement.loop_var.name} is left out"
            yield Change("predicate", "last turn", what, statement, lambda f=func, p=site.path: _shorter(f, p))
            continue
        for number, head in enumerate(heads(statement)):
            for index, node in enumerate(nodes_of(head, _ORDERS)):
                if not is_int(node.a):
                    continue
                what = f"{node} never holds" if isinstance(node, tirx.EQ) else f"{node} holds for one value less"
                action = "branch" if isinstance(statement, tirx.IfThenElse) else "choice"
                make = edited(func, site.path, number, _ORDERS, index, _tighter)
                yield Change("predicate", action, what, statement, make)


def _shorter(func: tirx.PrimFunc, path: Path) -> tirx.PrimFunc:
    loop = at(func.body, path)
    return func.with_body(replaced(func.body, path, with_head(loop, 0, loop.extent - 1)))


def _tighter(node: Any) -> Any:
    if isinstance(node, tirx.EQ):
        return tirx.const(False, "bool")
    one = -1 if isinstance(node, (tirx.LT, tirx.LE)) else 1
    return type(node)(node.a, node.b + tirx.const(one, node.b.ty.dtype))


def index_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Shift each load, store, pointer to an element, and step of a loop's tensors, forth and back.

    By one element; by a vector where it is one of several elements, or a pointer; by a whole step for a loop's tensors.
    """
    for site in sites(func):
        statement = site.statement
        for number, head in enumerate(heads(statement)):
            pointers = [c.args[0] for c in nodes_of(head, (tvm.ir.Call,)) if _is(c, "tirx.address_of")]
            for index, load in enumerate(nodes_of(head, (TensorLoad,))):
                pointer = any(load.same_as(p) for p in pointers)
                subject = f"{'the pointer to' if pointer else 'the load of'} {load.source.name}"
                for by in _distances(load.source, load.indices, pointer):
                    make = edited(func, site.path, number, (TensorLoad,), index, lambda n, by=by: _shifted(n, by))
                    action = "pointer" if pointer else "load"
                    yield Change("index", f"{action} {by:+d}", f"{subject} is {by:+d} elements off", statement, make)
            for index, call in enumerate(nodes_of(head, (tvm.ir.Call,))):
                if not _is(call, OFFSET_FUNCTION):
                    continue
                for by in (1, _stride(call)):
                    make = edited(func, site.path, number, (tvm.ir.Call,), index, lambda n, by=by: _further(n, by))
                    action = "step's pointer" if by == 1 else "next step's pointer"
                    yield Change("index", action, f"the pointer of a step is {by:+d} elements off", statement, make)
        if isinstance(statement, tirx.BufferStore):
            for by in _distances(statement.buffer, statement.indices, False):
                what = f"the store into {statement.buffer.name} is {by:+d} elements off"
                make = _store(func, site.path, by)
                yield Change("index", f"store {by:+d}", what, statement, make)


def _is(call: Any, name: str) -> bool:
    own = str(getattr(call.op, "name", ""))
    return (str(call.args[0].value) if own == "tirx.call_extern" else own) == name


def _distances(buffer: Any, indices: Any, pointer: bool) -> tuple[int, ...]:
    """In elements of the buffer, which may be vectors themselves."""
    lanes = int(indices[-1].lanes) if isinstance(indices[-1], tirx.Ramp) else 1
    if pointer:
        kind = tvm.DataType(str(buffer.dtype))
        lanes = max(1, _COPY_BYTES * 8 // (kind.bits * kind.lanes))
    return (1, -1) if lanes == 1 else (1, -1, lanes, -lanes)


def _moved(indices: Any, by: int) -> list[Any]:
    *outer, last = indices
    if isinstance(last, tirx.Ramp):
        return [*outer, tirx.Ramp(last.base + by, last.stride, last.lanes)]
    return [*outer, last + by]


def _shifted(load: Any, by: int) -> Any:
    return tirx.BufferLoad(load.source, _moved(load.indices, by))


def _store(func: tirx.PrimFunc, path: Path, by: int) -> Callable[[], tirx.PrimFunc]:
    def make() -> tirx.PrimFunc:
        s = at(func.body, path)
        new = tirx.BufferStore(s.buffer, s.value, _moved(s.indices, by))
        return func.with_body(replaced(func.body, path, new))

    return make


def _stride(call: Any) -> int:
    """Elements from one step's part to the next: the factor of the offset."""
    factors = [n.b for n in nodes_of(call.args[2], (tirx.Mul,)) if isinstance(n.b, tirx.IntImm)]
    return int(factors[-1]) if factors else 1


def _further(call: Any, by: int) -> Any:
    name, base, offset = call.args
    return tirx.call_extern(call.ty, name.value, base, offset + tirx.IntImm("int64", by))
