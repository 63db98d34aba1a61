"""Mutations of parts of a block: which threads they have, at which barriers they wait, and where their memory lies."""

from __future__ import annotations

import re
from collections.abc import Iterator

import tvm
import tvm_ffi
from tvm import tirx

from souffle.mutation.barriers import called
from souffle.mutation.flags import others
from souffle.mutation.statement_paths import Change, Site, nothing, replaced, sites
from souffle.schedule.lower.fewer_threads import BARRIER_FUNCTION
from souffle.schedule.lower.parts import part_number
from souffle.schedule.lower.uniform_barriers import barrier_scope
from souffle.tvm_compat import collect

__all__ = ["part_changes"]

_KIND = "part"
_BARRIER = re.compile(re.escape(BARRIER_FUNCTION) + r"<(\d+), *(\d+)>")
_COUNTED = "part_tid"
_FIRST_NUMBER = part_number(1, 0)
_WARP = 32
_BYTES = 4096
"""By which memory is moved: in the part beside it, where that has some."""


def part_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Give a part other threads, or count them otherwise; wait at another number, for others, or not at all; leave out
    a block's barrier before its parts or behind them; find memory at another place."""
    found = sites(func)
    binds = [one for one in found if isinstance(one.statement, tirx.Bind) and str(one.statement.var.name) == _COUNTED]
    waits = [(site, *map(int, own)) for site in found if (own := _barrier_of(site.statement))]
    for site in binds:
        for action, value in (*others(site.statement.value), *_numbers(site.statement.value)):
            made = tirx.Bind(site.statement.var, value)
            yield _change(func, site, f"{_COUNTED}: {action}", f"{_COUNTED} is {action}", made)
    for site in found if binds else ():
        statement = site.statement
        if isinstance(statement, tirx.IfThenElse) and _is_part(statement):
            yield _change(func, site, "all threads", "all threads of a block are in a part", statement.then_case)
            for action, value in _numbers(statement.condition):
                made = tirx.IfThenElse(value, statement.then_case, statement.else_case)
                yield _change(func, site, f"threads: {action}", f"other threads are in a part: {action}", made)
        elif isinstance(statement, tirx.Evaluate) and _waits_for_all(statement):
            yield _change(func, site, "together", "a block's barrier around its parts is deleted", nothing())
    for site, number, count in waits:
        yield _change(func, site, "delete", "a part's barrier is deleted", nothing())
        for other in (0, number - 1, number + 1):
            what = f"a part's barrier {number} becomes {other}"
            yield _change(func, site, f"number {other - number:+d}", what, _wait(other, count))
        for other in (count - _WARP, count + _WARP, 2 * count):
            what = f"a part's barrier waits for {other} threads, not {count}"
            yield _change(func, site, f"count {other - count:+d}", what, _wait(number, max(_WARP, other)))
    for site in found if waits else ():
        start = _start_of(site.statement)
        for by in (-_BYTES, _BYTES, -start) if start else (_BYTES,) if start == 0 else ():
            if start + by >= 0:
                what = f"memory of a part lies at byte {start + by}, not {start}"
                yield _change(func, site, f"memory {by:+d}", what, _at(site.statement, start + by))


def _barrier_of(statement: tirx.Stmt) -> tuple[str, str] | None:
    """The number and the count of a part's barrier."""
    name, _ = called(statement) or ("", None)
    found = _BARRIER.fullmatch(name)
    return (found[1], found[2]) if found and int(found[1]) >= _FIRST_NUMBER else None


def _wait(number: int, count: int) -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_extern("int32", f"{BARRIER_FUNCTION}<{number}, {count}>"))


def _is_part(node: tirx.IfThenElse) -> bool:
    return any(str(bind.var.name) == _COUNTED for bind in collect(node.then_case, tirx.Bind))


def _waits_for_all(node: tirx.Evaluate) -> bool:
    return isinstance(node.value, tvm.ir.Call) and barrier_scope(node.value) == "block"


def _start_of(node: tirx.Stmt) -> int | None:
    """The byte of the pool at which an array of a function lies."""
    if not isinstance(node, tirx.DeclBuffer) or not isinstance(node.data, tvm.ir.Call):
        return None
    index = node.data.args[0].indices[0] if str(getattr(node.data.op, "name", "")) == "tirx.address_of" else None
    return int(index) if isinstance(index, tirx.IntImm) else None


def _at(node: tirx.DeclBuffer, start: int) -> tirx.Stmt:
    load = node.data.args[0]
    return tirx.DeclBuffer(node.buffer, data=tirx.address_of(load.source[tirx.IntImm("int32", start)]))


def _numbers(value: tirx.PrimExpr) -> Iterator[tuple[str, tirx.PrimExpr]]:
    """The same with one of its whole numbers changed, by a thread or by a warp."""
    for number in sorted({int(n) for n in collect(value, tirx.IntImm)}):
        for by in (number - 1, number + 1, number - _WARP, number + _WARP):

            def changed(node: tirx.IntImm, number: int = number, by: int = by) -> tirx.IntImm:
                return tirx.IntImm("int32", by) if int(node) == number else node

            if by >= 0:
                yield f"{number} becomes {by}", tvm_ffi.structural_map(value, (tirx.IntImm, changed))


def _change(func: tirx.PrimFunc, site: Site, action: str, what: str, new: tirx.Stmt) -> Change:
    return Change(_KIND, action, what, site.statement, lambda: func.with_body(replaced(func.body, site.path, new)))
