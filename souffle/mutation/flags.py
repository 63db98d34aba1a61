"""Mutations of flags: of arrivals, and of what tiles wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import tvm
import tvm_ffi
from tvm import tirx

from souffle.kernel.block_flags import (
    ARRIVE_FUNCTION,
    BEGIN_FUNCTION,
    LEAVE_FUNCTION,
    WAIT_FUNCTION,
    WATCHED_WAIT_FUNCTION,
)
from souffle.mutation.barriers import called, moves
from souffle.mutation.statement_paths import Change, Path, nothing, replaced, sites
from souffle.tvm_compat import substitute

__all__ = ["flag_changes", "others"]

_KINDS = {
    ARRIVE_FUNCTION: "arrival",
    WAIT_FUNCTION: "flag wait",
    WATCHED_WAIT_FUNCTION: "flag wait",
    LEAVE_FUNCTION: "flags left",
}
_SLOTS = ("first slot", "last slot", "number of blocks", "tick")
_NAMES = {
    ARRIVE_FUNCTION: ("tick",),
    WAIT_FUNCTION: _SLOTS,
    WATCHED_WAIT_FUNCTION: _SLOTS,
    LEAVE_FUNCTION: ("number of blocks", "tick", "number of words"),
}
"""The arguments behind the state."""


def flag_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Delete and move each arrival and wait, change each number that it is given, and forget the step or the launch."""
    for site in sites(func):
        statement = site.statement
        if isinstance(statement, tirx.Bind) and _name(statement.value) == BEGIN_FUNCTION:
            make = partial(_with_body, func, site.path, tirx.Bind(statement.var, tirx.IntImm("int32", 0)))
            yield Change("arrival", "forget the launch", "ticks of a launch begin at 0", statement, make)
            continue
        name, call = called(statement) or ("", None)
        if name not in _KINDS:
            continue
        change = partial(_change, func, _KINDS[name], statement)
        yield change("delete", "is deleted", partial(replaced, func.body, site.path, nothing()))
        for action, what, body in moves(func.body, site.path):
            yield change(action, what, body)
        for number, what in enumerate(_NAMES[name], start=2):
            for action, other in others(call.args[number]):
                args = [*call.args]
                args[number] = other
                made = tirx.Evaluate(tirx.call_extern("int32", name, *args[1:]))
                body = partial(replaced, func.body, site.path, made)
                yield change(f"{what}: {action}", f"has its {what} {action}", body)


def _name(value: object) -> str:
    """The function that a value comes from."""
    return (called(tirx.Evaluate(value)) or ("", None))[0] if isinstance(value, tvm.ir.Call) else ""


def others(value: tirx.PrimExpr) -> Iterator[tuple[str, tirx.PrimExpr]]:
    """Other whole numbers in the place of one: what is done, and the number."""
    yield "one more", value + 1
    yield "one less", value - 1
    variables: list[tirx.Var] = []
    tvm_ffi.structural_walk(value, (tirx.Var, variables.append))
    for variable in {str(v.name): v for v in variables}.values():
        for action, by in (("is 0", tirx.IntImm("int32", 0)), ("is one more", variable + 1)):
            yield f"as if {variable.name} {action}", substitute(value, {variable: by})


def _change(
    func: tirx.PrimFunc, kind: str, statement: tirx.Stmt, action: str, what: str, body: Callable[[], tirx.Stmt]
) -> Change:
    return Change(kind, action, f"a {kind} {what}", statement, lambda: func.with_body(body()))


def _with_body(func: tirx.PrimFunc, path: Path, statement: tirx.Stmt) -> tirx.PrimFunc:
    return func.with_body(replaced(func.body, path, statement))
