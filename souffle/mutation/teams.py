"""Mutations of how a block is divided into teams: who computes what, whose barriers and whose memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import tvm
import tvm_ffi
from tvm import tirx

from souffle.mutation.barriers import called, moves
from souffle.mutation.flags import others
from souffle.mutation.statement_paths import Change, Site, nothing, replaced, sites
from souffle.schedule.lower.teams import TEAM_BARRIER_FUNCTION
from souffle.tvm_compat import collect, substitute

__all__ = ["team_changes"]

_KIND = "team"
_BARRIER = re.compile(re.escape(TEAM_BARRIER_FUNCTION) + r"<(\d+), *(\d+)>")
_DIVIDES = ("team", "team_tid", "worker", "workers")
_WARP = 32


def team_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Divide a block otherwise; tell a stage another team; wait at another number, for others, elsewhere or not at all;
    find memory at another place."""
    last = func.params[-1]
    team = last if str(last.name) == "team" else None
    for site in sites(func):
        statement = site.statement
        if isinstance(statement, tirx.Bind) and str(statement.var.name) in _DIVIDES:
            if str(statement.var.name) == "team":
                team = statement.var
            yield from _divisions(func, site)
        if team is None:
            continue
        name, call = called(statement) or ("", None)
        found = _BARRIER.fullmatch(name)
        if found:
            yield from _barriers(func, site, int(found[1]), int(found[2]), team)
        elif call is not None and isinstance(call.op, tvm.ir.GlobalVar) and call.args[-1].same_as(team):
            for action, other in _teams(team):
                made = tirx.Evaluate(tvm.ir.Call(call.op, [*call.args[:-1], other]))
                yield _change(func, site, f"told: {action}", f"a stage is told that its team {action}", made)
        elif isinstance(statement, tirx.DeclBuffer) and team in {*collect(statement.data, tvm.ir.Var)}:
            for action, other in _teams(team):
                made = tirx.DeclBuffer(statement.buffer, data=substitute(statement.data, {team: other}))
                what = f"{statement.buffer.name} lies where it does for a team that {action}"
                yield _change(func, site, f"memory: {action}", what, made)


def _divisions(func: tirx.PrimFunc, site: Site) -> Iterator[Change]:
    bind = site.statement
    for action, other in others(bind.value):
        what = f"{bind.var.name} is {action}"
        yield _change(func, site, f"{bind.var.name}: {action}", what, tirx.Bind(bind.var, other))
    numbers = [n for n in collect(bind.value, tirx.IntImm) if int(n) > 1]
    for number in numbers:
        for action, by in (("halved", int(number) // 2), ("doubled", int(number) * 2)):

            def changed(node: tirx.IntImm, number: tirx.IntImm = number, by: int = by) -> tirx.IntImm:
                return tirx.IntImm("int32", by) if int(node) == int(number) else node

            made = tirx.Bind(bind.var, tvm_ffi.structural_map(bind.value, (tirx.IntImm, changed)))
            name = str(bind.var.name)
            yield _change(func, site, f"{name}: {action}", f"{name} has its {int(number)} {action}", made)


def _barriers(func: tirx.PrimFunc, site: Site, first: int, count: int, team: tirx.Var) -> Iterator[Change]:
    def named(first: int, count: int, team: tirx.PrimExpr) -> tirx.Stmt:
        return tirx.Evaluate(tirx.call_extern("int32", f"{TEAM_BARRIER_FUNCTION}<{first}, {count}>", team))

    yield _change(func, site, "delete", "a team's barrier is deleted", nothing())
    whole = tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
    yield _change(func, site, "swap", "a team's barrier becomes the block's", whole)
    for number in (0, first + 1, 15):
        what = f"the barrier {first} + team becomes {number} + team"
        yield _change(func, site, f"number {number - first:+d}", what, named(number, count, team))
    for other in (count - _WARP, count + _WARP, 2 * count):
        if other > 0:
            what = f"a team's barrier waits for {other} threads, not {count}"
            yield _change(func, site, f"count {other - count:+d}", what, named(first, other, team))
    for action, other in _teams(team):
        what = f"a team waits at the barrier of one that {action}"
        yield _change(func, site, f"barrier: {action}", what, named(first, count, other))
    for action, what, body in moves(func.body, site.path):
        make = partial(_with_body, func, body)
        yield Change(_KIND, action, f"a team's barrier {what}", site.statement, make)


def _teams(team: tirx.Var) -> Iterator[tuple[str, tirx.PrimExpr]]:
    yield "is the first", tirx.IntImm("int32", 0)
    yield "is the next", team + 1
    yield "is its half", tirx.truncdiv(team, 2)


def _change(func: tirx.PrimFunc, site: Site, action: str, what: str, new: tirx.Stmt) -> Change:
    make = partial(_with_body, func, partial(replaced, func.body, site.path, new))
    return Change(_KIND, action, what, site.statement, make)


def _with_body(func: tirx.PrimFunc, body) -> tirx.PrimFunc:
    return func.with_body(body())
