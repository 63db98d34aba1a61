"""Statements that some tiles or threads leave out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tvm import tirx

__all__ = ["in_part"]


def in_part(statement: tirx.Stmt, tile: Any, thread: Any) -> Iterator[tuple[str, tirx.Stmt]]:
    """A statement for some tiles, or threads, only."""
    one = tirx.IntImm("int32", 1)
    for name, condition in {
        "the first tile": tirx.EQ(tile, tirx.IntImm("int32", 0)),
        "all tiles but the first": tirx.NE(tile, tirx.IntImm("int32", 0)),
        "7 threads": thread < 7,
        "even threads": tirx.EQ(tirx.bitwise_and(thread, one), tirx.IntImm("int32", 0)),
        "all threads but 33": tirx.NE(thread, tirx.IntImm("int32", 33)),
    }.items():
        yield name, tirx.IfThenElse(condition, statement, None)
