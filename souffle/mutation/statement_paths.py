"""Statements of TensorIR by their place in the tree, and functions with one of them replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from souffle.tvm_compat import sequence

__all__ = ["Change", "Path", "Site", "at", "is_int", "mapped", "nothing", "replaced", "sites"]

Path = tuple[int, ...]
"""From the root of a function's body: which part of the statement, which part of that, and so on."""


@dataclass(frozen=True, eq=False)
class Site:
    """A statement in a function."""

    path: Path
    statement: tirx.Stmt


@dataclass(frozen=True, eq=False)
class Change:
    """One way to change a function.

    Attributes
    ----------
    kind : str
        ``"grid barrier"``, ``"block barrier"``, ``"warp barrier"``, ``"copy wait"``, ``"predicate"``,
        ``"comparison"`` or ``"index"``.
    action : str
        What is done to it, such as ``"delete"``.
    what : str
        The same in words, with numbers.
    statement : Stmt
        The one that is changed.
    make : callable
        Gives the changed function.
    """

    kind: str
    action: str
    what: str
    statement: tirx.Stmt
    make: Callable[[], tirx.PrimFunc]


def _parts(statement: tirx.Stmt) -> tuple[tirx.Stmt, ...]:
    if isinstance(statement, tirx.SeqStmt):
        return tuple(statement.seq)
    if isinstance(statement, (tirx.For, tirx.AttrStmt)):
        return (statement.body,)
    if isinstance(statement, tirx.IfThenElse):
        return tuple(s for s in (statement.then_case, statement.else_case) if s is not None)
    return ()


def _with_parts(statement: tirx.Stmt, parts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """A statement with other statements inside."""
    if isinstance(statement, tirx.SeqStmt):
        return sequence(*parts)
    if isinstance(statement, tirx.For):
        s = statement
        return tirx.For(s.loop_var, s.min, s.extent, s.kind, parts[0], s.thread_binding, s.annotations, s.step)
    if isinstance(statement, tirx.AttrStmt):
        return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, parts[0])
    otherwise = parts[1] if len(parts) > 1 else None
    return tirx.IfThenElse(statement.condition, parts[0], otherwise)


def sites(func: tirx.PrimFunc) -> Iterator[Site]:
    """All statements, outer before inner, in the order of the text."""
    pending: list[Site] = [Site((), func.body)]
    while pending:
        site = pending.pop()
        yield site
        inner = [Site((*site.path, i), part) for i, part in enumerate(_parts(site.statement))]
        pending += reversed(inner)


def at(root: tirx.Stmt, path: Path) -> tirx.Stmt:
    """The statement at a place."""
    for number in path:
        root = _parts(root)[number]
    return root


def replaced(root: tirx.Stmt, path: Path, new: tirx.Stmt) -> tirx.Stmt:
    """`root` with `new` at a place."""
    if not path:
        return new
    parts = list(_parts(root))
    parts[path[0]] = replaced(parts[path[0]], path[1:], new)
    return _with_parts(root, parts)


def nothing() -> tirx.Stmt:
    """A statement that does nothing."""
    return tirx.Evaluate(tirx.IntImm("int32", 0))


def mapped(root: Any, kinds: tuple[type, ...], number: int, change: Callable[[Any], Any]) -> Any:
    """`root`, a statement's own part or expression, with its node of that number among those of some kinds changed.

    Nodes are numbered in the order of :func:`tvm_ffi.structural_map`, inner before outer.
    """
    seen = -1

    def see(node: Any) -> Any:
        nonlocal seen
        seen += 1
        return change(node) if seen == number else node

    return tvm_ffi.structural_map(root, (kinds, see))


def is_int(node: Any) -> bool:
    """Whether an expression is a whole number, or a vector of them."""
    return tvm.DataType(str(node.ty.dtype)).type_code in (0, 1)
