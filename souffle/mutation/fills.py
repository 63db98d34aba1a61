"""Mutations of how a kernel fills the registers in which constants stay: of its calls, and of when they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.mutation.barriers import moves
from souffle.mutation.flags import others
from souffle.mutation.statement_paths import Change, Site, at, nothing, replaced, sites
from souffle.schedule.lower.kept_loads import FILL_SUFFIX
from souffle.tvm_compat import collect

__all__ = ["calls_fill", "fill_changes"]

_ARGUMENTS = ("tile", "thread")


def calls_fill(statement: tirx.Stmt) -> bool:
    """Whether all that a statement does is to fill registers that are kept."""
    done = collect(statement, tirx.Evaluate)
    return bool(done) and not collect(statement, tirx.BufferStore) and all(map(_fills, done))


def fill_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Delete, move and repeat each call, for another tile, thread or array, or only in the first turn of a loop."""
    arrays = [site.statement.buffer for site in sites(func) if _declares(site.statement)]
    for site in sites(func):
        statement = site.statement
        if not isinstance(statement, tirx.Evaluate):
            continue
        kept = [
            n for n, a in enumerate(_arguments(statement)) if any(tvm_ffi.structural_equal(a, b.data) for b in arrays)
        ]
        if not kept:
            continue
        kind = "fill call" if _fills(statement) else "kept registers"
        yield from _given(func, site, kind, kept, arrays)
        if kind != "fill call":
            continue
        change = partial(_change, func, kind, statement)
        yield change("delete", "is deleted", partial(replaced, func.body, site.path, nothing()))
        for action, what, body in moves(func.body, site.path):
            yield change(action, what, body)
        call = statement.value
        for number, name in enumerate(_ARGUMENTS):
            for action, other in others(call.args[number]):
                made = _called(call, number, other)
                yield change(
                    f"{name}: {action}", f"has its {name} {action}", partial(replaced, func.body, site.path, made)
                )
        for loop in _loops(func, site):
            first = tirx.IfThenElse(tirx.EQ(loop, tirx.IntImm("int32", 0)), statement, None)
            name = str(loop.name)
            what = f"is made only where {name} is 0"
            yield change(f"first turn of {name}", what, partial(replaced, func.body, site.path, first))


def _given(func: tirx.PrimFunc, site: Site, kind: str, kept: list[int], arrays: list[tirx.Buffer]) -> Iterator[Change]:
    """The call is given other registers of the same type."""
    call = site.statement.value
    for number in kept:
        own = next(buffer for buffer in arrays if tvm_ffi.structural_equal(call.args[number], buffer.data))
        for other in arrays:
            if other.same_as(own) or str(other.dtype) != str(own.dtype):
                continue
            made = partial(replaced, func.body, site.path, _called(call, number, other.data))
            yield _change(func, kind, site.statement, "other registers", f"is given {other.name} for {own.name}", made)


def _loops(func: tirx.PrimFunc, site: Site) -> Iterator[tirx.Var]:
    for length in range(len(site.path)):
        around = at(func.body, site.path[:length])
        if isinstance(around, tirx.For):
            yield around.loop_var


def _called(call: Call, number: int, other: tirx.PrimExpr) -> tirx.Stmt:
    return tirx.Evaluate(Call(call.op, [*call.args[:number], other, *call.args[number + 1 :]]))


def _arguments(statement: tirx.Evaluate) -> list[tirx.PrimExpr]:
    call = statement.value
    return list(call.args) if isinstance(call, Call) and isinstance(call.op, tvm.ir.GlobalVar) else []


def _fills(statement: tirx.Evaluate) -> bool:
    return bool(_arguments(statement)) and str(statement.value.op.name_hint).endswith(FILL_SUFFIX)


def _declares(statement: tirx.Stmt) -> bool:
    return isinstance(statement, tirx.AllocBuffer) and str(statement.buffer.scope()) == "local"


def _change(
    func: tirx.PrimFunc, kind: str, statement: tirx.Stmt, action: str, what: str, body: Callable[[], tirx.Stmt]
) -> Change:
    return Change(kind, action, f"a call with kept registers {what}", statement, lambda: func.with_body(body()))
