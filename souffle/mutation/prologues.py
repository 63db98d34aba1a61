"""Mutations of copies that blocks start while they wait: whether, when, for whom and from where, and the wait around.

::

    found = arrive(state, n)                  the copies before the arrival or behind the wait, or none
    if (w < T) copies(w, tid, c);             for another tile, thread or step, from another tensor, in part
    wait(state, n, found)                     left out; with another number
    for it: if (tile < T) {
      if (it > 0) copies(tile, tid, c);       in other turns, or none
      rest(tile, tid, x, c); }
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call

from souffle.kernel.grid_barrier import COMPLETION_FUNCTION
from souffle.kernel.merge import OFFSET_FUNCTION
from souffle.mutation.barriers import called, moves
from souffle.mutation.in_part import in_part
from souffle.mutation.statement_paths import Change, Path, Site, at, nothing, replaced, sites
from souffle.schedule.lower.prologues import COPIES_SUFFIX
from souffle.tvm_compat import collect, substitute

__all__ = ["prologue_changes"]

_KIND = "prologue"


def prologue_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Of a kernel, its calls that start copies, and the waits that they are made in."""
    threads = [s.statement.node.var for s in sites(func) if _is_axis(s.statement, "threadIdx.x")]
    for site in sites(func):
        if (called(site.statement) or ("",))[0] == COMPLETION_FUNCTION:
            yield from _of_wait(func, site)
        elif _is_prologue(site.statement):
            yield from _who(func, site, threads[0])
            yield from _when(func, site)
            yield from _from_where(func, site)


def _of_wait(func: tirx.PrimFunc, site: Site) -> Iterator[Change]:
    yield _change(func, "wait left out", "the others are not waited for", site.path, nothing())
    call = site.statement.value
    other = tirx.call_extern("int32", COMPLETION_FUNCTION, *call.args[1:3], tirx.IntImm("uint32", 0))
    yield _change(func, "another number", "the arrival is told to have found 0", site.path, tirx.Evaluate(other))


def _who(func: tirx.PrimFunc, site: Site, thread: tirx.Var) -> Iterator[Change]:
    call, name = site.statement.value, _name(site)
    own, tid = call.args[:2]
    yield _change(func, "left out", f"{name} is not called", site.path, nothing())
    for who, new in in_part(site.statement, own, thread):
        yield _change(func, "in part", f"{name} is called for {who}", site.path, new)
    for what, tile in {"the next tile": own + 1, "the tile before": own - 1, "tile 0": own * 0}.items():
        yield _change(func, "another tile", f"{name} is called for {what}", site.path, _told(call, 0, tile))
    neighbour = tirx.bitwise_xor(tid, tirx.IntImm("int32", 1))
    yield _change(func, "another thread", f"{name} is called for its neighbour", site.path, _told(call, 1, neighbour))
    around = site.path
    while around and isinstance(at(func.body, around[:-1]), tirx.IfThenElse):
        around = around[:-1]
        statement = at(func.body, around)
        for what, condition in _other_conditions(statement.condition):
            new = tirx.IfThenElse(condition, statement.then_case, None)
            yield _change(func, "in part", f"{statement.condition} before {name} is {what}", around, new)


def _other_conditions(condition: Any) -> Iterator[tuple[str, Any]]:
    yield "never", tirx.const(False, "bool")
    yield "always", tirx.const(True, "bool")
    yield "the other way round", tirx.Not(condition)
    if isinstance(condition, (tirx.LT, tirx.GT)):
        yield "one further", type(condition)(condition.a, condition.b + 1)
        yield "one sooner", type(condition)(condition.a, condition.b - 1)


def _when(func: tirx.PrimFunc, site: Site) -> Iterator[Change]:
    outer = site.path
    while outer and isinstance(at(func.body, outer[:-1]), tirx.IfThenElse):
        outer = outer[:-1]
    for path in dict.fromkeys((site.path, outer)):
        for action, what, body in moves(func.body, path):
            statement = at(func.body, path)
            yield Change(_KIND, action, f"{_name(site)} {what}", statement, lambda body=body: func.with_body(body()))


def _from_where(func: tirx.PrimFunc, site: Site) -> Iterator[Change]:
    call, name = site.statement.value, _name(site)
    for number, pointer in enumerate(call.args[2:], start=2):
        if not isinstance(getattr(pointer, "ty", None), tvm.ir.PointerType):
            continue
        further = tirx.call_extern(pointer.ty, OFFSET_FUNCTION, pointer, tirx.IntImm("int64", 8))
        new = _told(call, number, further)
        yield _change(func, "another place", f"{name} copies from {pointer} 8 elements further", site.path, new)
        steps = [v for v in collect(pointer, tirx.Var) if not isinstance(v.ty, tvm.ir.PointerType)]
        for step in dict.fromkeys(steps):
            for what, value in {"0": step * 0, "the next": step + 1}.items():
                new = _told(call, number, substitute(pointer, {step: value}))
                yield _change(func, "another step", f"{name} copies what step {what} has", site.path, new)
        for other in func.params[:-1]:
            if not other.same_as(pointer) and str(other.ty) == str(pointer.ty):
                new = _told(call, number, other)
                yield _change(func, "another tensor", f"{name} copies {other.name} for {pointer}", site.path, new)


def _told(call: Call, number: int, value: Any) -> tirx.Stmt:
    """A call with another argument."""
    return tirx.Evaluate(Call(call.op, [*call.args[:number], value, *call.args[number + 1 :]]))


def _is_axis(statement: tirx.Stmt, tag: str) -> bool:
    found = isinstance(statement, tirx.AttrStmt) and statement.attr_key == "thread_extent"
    return found and str(statement.node.thread_tag) == tag


def _is_prologue(statement: tirx.Stmt) -> bool:
    call = statement.value if isinstance(statement, tirx.Evaluate) else None
    if not (isinstance(call, Call) and isinstance(call.op, tvm.ir.GlobalVar)):
        return False
    return COPIES_SUFFIX in str(call.op.name_hint)


def _name(site: Site) -> str:
    return str(site.statement.value.op.name_hint)


def _change(func: tirx.PrimFunc, action: str, what: str, path: Path, new: tirx.Stmt) -> Change:
    return Change(_KIND, action, what, at(func.body, path), lambda: func.with_body(replaced(func.body, path, new)))
