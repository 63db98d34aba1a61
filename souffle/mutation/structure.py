"""Mutations of statements: their order, whether they run, how often, on which buffers and arrays, and for whom."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.mutation.expression_changes import edited, heads, nodes_of, with_head
from souffle.mutation.statement_paths import Change, Path, Site, at, nothing, replaced, sites
from souffle.tvm_compat import sequence

__all__ = ["structure_changes"]

_LOADS = (TensorLoad,)
_WAIT = re.compile(r"souffle_copy_(wait<\d+>|commit)")
_WARP = 32


def structure_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Swap, repeat, move and delete statements, put them under conditions, run loops once more, take other buffers.

    Of a kernel: swap its stages, and the tensors that it gives them.
    """
    for site in sites(func):
        statement = site.statement
        if isinstance(statement, tirx.SeqStmt):
            yield from _order(func, site)
        if _acts(statement):
            make = partial(_replaced, func, site.path, nothing())
            yield Change("statement", "delete", "a statement is deleted", statement, make)
        if _acts(statement) or isinstance(statement, tirx.For):
            yield from _conditions(func, site)
        if isinstance(statement, tirx.For):
            what = f"the loop over {statement.loop_var.name} has a turn more"
            yield Change("statement", "turn more", what, statement, partial(_longer, func, site.path))
    yield from _other_buffers(func)
    yield from _other_tensors(func)
    yield from _smaller_arrays(func)


def _replaced(func: tirx.PrimFunc, path: Path, new: tirx.Stmt) -> tirx.PrimFunc:
    return func.with_body(replaced(func.body, path, new))


def _acts(statement: tirx.Stmt) -> bool:
    if isinstance(statement, tirx.Evaluate):
        return not isinstance(statement.value, tirx.IntImm)
    return isinstance(statement, tirx.BufferStore)


def _order(func: tirx.PrimFunc, site: Site) -> Iterator[Change]:
    parts = list(site.statement.seq)
    names = (tirx.Bind, tirx.AllocBuffer, tirx.DeclBuffer)
    for place in range(len(parts) - 1):
        if any(isinstance(part, names) for part in parts[place : place + 2]):
            continue
        swapped = [*parts[:place], parts[place + 1], parts[place], *parts[place + 2 :]]
        again = [*parts[: place + 2], parts[place], *parts[place + 2 :]]
        last = [*parts[:place], *parts[place + 1 :], parts[place]]
        told = {"swap": "and the next are swapped", "again": "runs again after the next", "last": "becomes the last"}
        for (action, what), order in zip(told.items(), (swapped, again, last), strict=True):
            make = partial(_replaced, func, site.path, sequence(*order))
            yield Change("order", action, f"a statement {what}", parts[place], make)


def _conditions(func: tirx.PrimFunc, site: Site) -> Iterator[Change]:
    """Under conditions on the tile, thread or warp, and on data."""
    first, tid = func.params[:2]
    if not (isinstance(tid, tvm.ir.Var) and str(tid.ty) == "int32"):
        # A kernel: it has no thread as a parameter.
        return
    chosen = {
        "tile": tirx.EQ(first, tirx.IntImm("int32", 0)),
        "thread": tid < 7,
        "lane": tirx.EQ(tirx.bitwise_and(tid, tirx.IntImm("int32", 1)), tirx.IntImm("int32", 0)),
        "warp": tid < _WARP,
        "all but a thread": tid != 33,
    }
    load = next(iter(_float_loads(func)), None)
    if load is not None:
        zero = tirx.BufferLoad(load.source, [tirx.IntImm("int32", 0)])
        chosen["data"] = zero > tirx.FloatImm("float32", 0.0)
    kind = _kind(site.statement)
    for name, condition in chosen.items():
        new = tirx.IfThenElse(condition, site.statement, None)
        make = partial(_replaced, func, site.path, new)
        yield Change("condition", f"{kind}, {name}", f"a {kind} under a condition on {name}", site.statement, make)


def _kind(statement: tirx.Stmt) -> str:
    if isinstance(statement, tirx.For):
        return "loop"
    if isinstance(statement, tirx.BufferStore):
        calls = nodes_of(statement.value, (Call,))
        return "shuffle" if any("_sync" in str(getattr(c.op, "name", "")) for c in calls) else "store"
    name = str(statement.value.args[0].value) if _external(statement.value) else ""
    return "wait for copies" if _WAIT.fullmatch(name) else "copy" if name.startswith("souffle_copy") else "call"


def _external(call: Any) -> bool:
    return isinstance(call, Call) and str(getattr(call.op, "name", "")) == "tirx.call_extern"


def _float_loads(func: tirx.PrimFunc) -> Iterator[TensorLoad]:
    for site in sites(func):
        for head in heads(site.statement):
            for load in nodes_of(head, _LOADS):
                if str(load.source.scope()) == "global" and str(load.source.dtype) == "float32":
                    yield load


def _longer(func: tirx.PrimFunc, path: Path) -> tirx.PrimFunc:
    loop = at(func.body, path)
    return _replaced(func, path, with_head(loop, 0, loop.extent + 1))


def _other_buffers(func: tirx.PrimFunc) -> Iterator[Change]:
    """A load, or a store, of another array of the same kind."""
    buffers: list[Any] = []
    for site in sites(func):
        if isinstance(site.statement, (tirx.DeclBuffer, tirx.AllocBuffer)):
            buffers.append(site.statement.buffer)

    def others(buffer: Any) -> list[Any]:
        alike = (str(buffer.dtype), str(buffer.scope()))
        return [o for o in buffers if not o.same_as(buffer) and (str(o.dtype), str(o.scope())) == alike]

    for site in sites(func):
        s = site.statement
        for number, head in enumerate(heads(s)):
            for index, load in enumerate(nodes_of(head, _LOADS)):
                for other in others(load.source):
                    make = edited(
                        func, site.path, number, _LOADS, index, lambda n, o=other: tirx.BufferLoad(o, list(n.indices))
                    )
                    yield Change("array", "load", f"{other.name} is read, not {load.source.name}", s, make)
        if isinstance(s, tirx.BufferStore):
            for other in others(s.buffer):
                make = partial(_replaced, func, site.path, tirx.BufferStore(other, s.value, list(s.indices)))
                yield Change("array", "store", f"{other.name} is written, not {s.buffer.name}", s, make)


def _other_tensors(func: tirx.PrimFunc) -> Iterator[Change]:
    """A kernel gives a stage another of its tensors, or two in the other order."""
    for site in sites(func):
        s = site.statement
        call = s.value if isinstance(s, tirx.Evaluate) else None
        if not (isinstance(call, Call) and isinstance(call.op, tvm.ir.GlobalVar)):
            continue
        given = list(call.args)
        for place in range(2, len(given)):
            for param in func.params[:-1]:
                same = isinstance(given[place], tvm.ir.Var) and param.same_as(given[place])
                if same or str(param.ty) != str(given[place].ty):
                    continue
                new = tirx.Evaluate(Call(call.op, [*given[:place], param, *given[place + 1 :]]))
                what = f"{call.op.name_hint} is given {param.name} for {given[place]}"
                yield Change("tensor", "another", what, s, partial(_replaced, func, site.path, new))


def _smaller_arrays(func: tirx.PrimFunc) -> Iterator[Change]:
    """An array of registers, or of shared memory, is declared with half of its elements."""
    for site in sites(func):
        s = site.statement
        if not isinstance(s, tirx.AllocBuffer) or len(s.buffer.shape) != 1 or int(s.buffer.shape[0]) < 2:
            continue
        what = f"{s.buffer.name} has half of its elements"
        yield Change("array", "smaller", what, s, _shrunk(func, s.buffer))


def _shrunk(func: tirx.PrimFunc, buffer: Any) -> Callable[[], tirx.PrimFunc]:
    def make() -> tirx.PrimFunc:
        count = int(buffer.shape[0]) // 2
        new = tirx.decl_buffer((count,), str(buffer.dtype), name=str(buffer.name), scope=str(buffer.scope()))

        def load(node: TensorLoad) -> TensorLoad:
            return tirx.BufferLoad(new, list(node.indices)) if node.source.same_as(buffer) else node

        def store(node: tirx.BufferStore) -> tirx.BufferStore:
            return tirx.BufferStore(new, node.value, list(node.indices)) if node.buffer.same_as(buffer) else node

        def alloc(node: tirx.AllocBuffer) -> tirx.AllocBuffer:
            return tirx.AllocBuffer(new) if node.buffer.same_as(buffer) else node

        pairs = [(TensorLoad, load), (tirx.BufferStore, store), (tirx.AllocBuffer, alloc)]
        return func.with_body(tvm_ffi.structural_map(func.body, pairs))

    return make
