"""Mutations of what waits: barriers of the grid, a block or a warp, and groups of asynchronous copies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import tvm
from tvm import tirx
from tvm.backend.cuda.op import cuda_grid_sync

from souffle.kernel.grid_barrier import COMPLETION_FUNCTION, COUNTER_FUNCTION, WATCHED_FUNCTION
from souffle.mutation.statement_paths import Change, Path, at, nothing, replaced, sites
from souffle.schedule.gpu.emit.async_copy import COMMIT_FUNCTION, WAIT_FUNCTION
from souffle.schedule.lower.fewer_threads import BARRIER_FUNCTION
from souffle.tvm_compat import sequence

__all__ = ["barrier_changes", "barrier_kind", "called", "moves"]

_WAIT = re.compile(re.escape(WAIT_FUNCTION) + r"<(\d+)>")
_PARTIAL = re.compile(re.escape(BARRIER_FUNCTION) + r"<(\d+), *(\d+)>")
_SCOPES = {"shared": "block barrier", "shared.dyn": "block barrier", "warp": "warp barrier"}
_KINDS = {
    "tirx.cuda.grid_sync": "grid barrier",
    COUNTER_FUNCTION: "grid barrier",
    WATCHED_FUNCTION: "grid barrier",
    COMPLETION_FUNCTION: "grid barrier",
    "tirx.cuda.cta_sync": "block barrier",
    "tirx.cuda.warp_sync": "warp barrier",
    COMMIT_FUNCTION: "copy wait",
}
_WARP = 32


def called(statement: tirx.Stmt) -> tuple[str, tvm.ir.Call] | None:
    """The function that a statement calls, and the call; ``None`` for other statements."""
    if not (isinstance(statement, tirx.Evaluate) and isinstance(statement.value, tvm.ir.Call)):
        return None
    call = statement.value
    name = str(getattr(call.op, "name", ""))
    return (str(call.args[0].value) if name == "tirx.call_extern" else name), call


def barrier_kind(statement: tirx.Stmt) -> str | None:
    """``"grid barrier"``, ``"block barrier"``, ``"warp barrier"`` or ``"copy wait"``; ``None`` for other statements."""
    found = called(statement)
    if found is None:
        return None
    name, call = found
    if name == "tirx.tvm_storage_sync":
        return _SCOPES.get(str(call.args[0].value))
    if _PARTIAL.fullmatch(name):
        return "block barrier"
    return "copy wait" if _WAIT.fullmatch(name) else _KINDS.get(name)


def barrier_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Delete each barrier, move it by one statement or over the edge of a loop or branch, swap grid and block.

    Of copies under way, each wait is also made to leave one group more; a barrier of some threads of a block, to wait
    for another warp.
    """
    # A grid barrier may need the kernel's own arguments, so that another one is a copy of it.
    grid = next((s.statement for s in sites(func) if barrier_kind(s.statement) == "grid barrier"), None)
    for site in sites(func):
        kind = barrier_kind(site.statement)
        if kind is None:
            continue
        change = partial(_changed, func, kind, site.path)
        yield change("delete", "is deleted", lambda path=site.path: replaced(func.body, path, nothing()))
        if kind in ("grid barrier", "block barrier"):
            other = "block" if kind == "grid barrier" else "grid"
            yield change(
                "swap",
                f"becomes a {other} barrier",
                lambda path=site.path, other=other: replaced(func.body, path, _barrier(other, grid)),
            )
        for action, what, body in moves(func.body, site.path):
            yield change(action, what, body)
        name = called(site.statement)[0]
        wait, part = _WAIT.fullmatch(name), _PARTIAL.fullmatch(name)
        if wait:
            groups = int(wait.group(1))
            what, other = f"waits for all but {groups + 1} groups, not {groups}", f"{WAIT_FUNCTION}<{groups + 1}>"
            yield change("loosen", what, partial(_renamed, func.body, site.path, other))
        elif part:
            number, count = int(part.group(1)), int(part.group(2))
            what = f"waits for {count + _WARP} threads, not {count}"
            other = f"{BARRIER_FUNCTION}<{number}, {count + _WARP}>"
            yield change("count", what, partial(_renamed, func.body, site.path, other))


def _changed(func: tirx.PrimFunc, kind: str, path: Path, action: str, what: str, body) -> Change:
    statement = at(func.body, path)
    return Change(kind, action, f"a {kind} {what}", statement, lambda: func.with_body(body()))


def _renamed(root: tirx.Stmt, path: Path, name: str) -> tirx.Stmt:
    return replaced(root, path, tirx.Evaluate(tirx.call_extern("int32", name)))


def _barrier(scope: str, grid: tirx.Stmt | None) -> tirx.Stmt:
    if scope == "block":
        return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
    return tirx.Evaluate(cuda_grid_sync()) if grid is None else _outside(grid)


def _outside(barrier: tirx.Stmt) -> tirx.Stmt:
    """The same barrier outside of the loop that it stood in, whose step one with a limit would tell; all of it."""
    name, call = called(barrier) or ("", None)
    if name == COMPLETION_FUNCTION:
        return tirx.Evaluate(tirx.call_extern("int32", COUNTER_FUNCTION, *call.args[1:3]))
    if name != WATCHED_FUNCTION:
        return barrier
    return tirx.Evaluate(tirx.call_extern("int32", name, *call.args[1:-1], tirx.IntImm("int32", -1)))


def _acts(statement: tirx.Stmt) -> bool:
    """Whether the order of a barrier and this statement can matter."""
    names = (tirx.Bind, tirx.AllocBuffer, tirx.DeclBuffer)
    empty = isinstance(statement, tirx.Evaluate) and isinstance(statement.value, tirx.IntImm)
    return not isinstance(statement, names) and not empty


def moves(root: tirx.Stmt, path: Path):
    """Where a barrier may go: over the next statement that acts, into it, or out of what it stands in.

    Names that are bound on the way are passed over: a barrier needs none.
    """
    if not path:
        return
    barrier, parent = at(root, path), at(root, path[:-1])
    whole = isinstance(parent, tirx.SeqStmt)
    around, own = (path[:-1], path[-1]) if whole else (path, 0)
    parts = list(parent.seq) if whole else [barrier]
    for direction, where in ((-1, "earlier"), (1, "later")):
        place = own + direction
        while 0 <= place < len(parts) and not _acts(parts[place]):
            place += direction
        if 0 <= place < len(parts):
            target = parts[place]
            yield (
                f"move {where}",
                f"moves {where}, over one statement",
                partial(_over, root, around, parts, own, place),
            )
            if isinstance(target, (tirx.For, tirx.IfThenElse)):
                name = "loop" if isinstance(target, tirx.For) else "branch"
                yield (
                    f"move into the {name} {'before' if direction < 0 else 'after'}",
                    f"moves into the {name} {'before' if direction < 0 else 'after'} it",
                    partial(_into, root, around, parts, own, place, at_end=direction < 0),
                )
            continue
        # The outermost statements are the launch itself.
        outer = around[:-1] if whole else path[:-1]
        while outer and not isinstance(at(root, outer), (tirx.For, tirx.IfThenElse)):
            outer = outer[:-1]
        if not isinstance(at(root, outer), (tirx.For, tirx.IfThenElse)):
            continue
        name = "loop" if isinstance(at(root, outer), tirx.For) else "branch"
        yield (
            f"move out of its {name}, {where}",
            f"moves out of its {name}, {where}",
            partial(_out, root, path, outer, before=direction < 0),
        )


def _over(root: tirx.Stmt, around: Path, parts: list[tirx.Stmt], own: int, place: int) -> tirx.Stmt:
    rest = parts[:own] + parts[own + 1 :]
    return replaced(root, around, sequence(*rest[:place], parts[own], *rest[place:]))


def _into(root: tirx.Stmt, around: Path, parts: list[tirx.Stmt], own: int, place: int, *, at_end: bool) -> tirx.Stmt:
    target = parts[place]
    inside = target.body if isinstance(target, tirx.For) else target.then_case
    inner = sequence(inside, parts[own]) if at_end else sequence(parts[own], inside)
    changed = [*parts]
    changed[place] = replaced(target, (0,), inner)
    changed[own] = nothing()
    return replaced(root, around, sequence(*changed))


def _out(root: tirx.Stmt, path: Path, outer: Path, *, before: bool) -> tirx.Stmt:
    barrier = _outside(at(root, path))
    without = at(replaced(root, path, nothing()), outer)
    return replaced(root, outer, sequence(*((barrier, without) if before else (without, barrier))))
