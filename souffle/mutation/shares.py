"""Mutations of which workers compute a stage beside others: how they are counted, and who they are."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
import tvm_ffi
from tvm import tirx

from souffle.mutation.flags import others
from souffle.mutation.statement_paths import Change, Site, replaced, sites
from souffle.tvm_compat import collect

__all__ = ["share_changes"]

_KIND = "share"
_COUNTS = ("own", "own_count", "turned")


def share_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Count the workers of a share otherwise; give a stage to other teams, or to all."""
    for site in sites(func):
        statement = site.statement
        if isinstance(statement, tirx.Bind) and str(statement.var.name) in _COUNTS:
            for action, value in (*others(statement.value), *_numbers(statement.value)):
                name = str(statement.var.name)
                yield _change(func, site, f"{name}: {action}", f"{name} is {action}", tirx.Bind(statement.var, value))
        elif isinstance(statement, tirx.IfThenElse) and _of_teams(statement.condition):
            yield _change(func, site, "all teams", "all teams compute a stage", statement.then_case)
            for action, value in _numbers(statement.condition):
                made = tirx.IfThenElse(value, statement.then_case, statement.else_case)
                yield _change(func, site, f"teams: {action}", f"other teams compute a stage: {action}", made)


def _of_teams(condition: tirx.PrimExpr) -> bool:
    return any(str(var.name) == "team" for var in collect(condition, tvm.ir.Var))


def _numbers(value: tirx.PrimExpr) -> Iterator[tuple[str, tirx.PrimExpr]]:
    """The same with one of its whole numbers changed."""
    for number in sorted({int(n) for n in collect(value, tirx.IntImm)}):
        for by in (number + 1, number - 1, 2 * number):
            if by not in (number, 0) or number == 1:

                def changed(node: tirx.IntImm, number: int = number, by: int = by) -> tirx.IntImm:
                    return tirx.IntImm("int32", by) if int(node) == number else node

                yield f"{number} becomes {by}", tvm_ffi.structural_map(value, (tirx.IntImm, changed))


def _change(func: tirx.PrimFunc, site: Site, action: str, what: str, new: tirx.Stmt) -> Change:
    return Change(_KIND, action, what, site.statement, lambda: func.with_body(replaced(func.body, site.path, new)))
