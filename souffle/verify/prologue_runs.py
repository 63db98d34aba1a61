"""Calls of a kernel made one after the other, for who finds copies that are not those of its tile (``prologues.py``).

A thread of a block of some grid makes the kernel's calls in order. What finds copies made needs, when it is called,
that those for its tile, its thread and its memory were started since it was last called, and no others; and nothing
else is called while they are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call

from souffle.tvm_compat import collect
from souffle.verify.expressions import Undecided
from souffle.verify.indices import operator_name
from souffle.verify.kept_conditions import is_turn, whole_number
from souffle.verify.other_forms import launch_of

__all__ = ["CopiesFor", "StaleCopies", "stale_copies"]

_MOST_CALLS = 1 << 12
"""Of one thread, and four times as many of all together."""

_THREADS = (0, 1, 2, 7, 33)


@dataclass(frozen=True)
class CopiesFor:
    """Whose copies a function starts.

    Attributes
    ----------
    rest : str
        What finds them made.
    places : tuple of int
        For each of its arguments, which of that function's it is.
    """

    rest: str
    places: tuple[int, ...]


@dataclass(frozen=True)
class StaleCopies:
    """A call that finds other copies than it needs.

    Attributes
    ----------
    stage : str
    who : str
        The thread, the block and the grid.
    why : str
    """

    stage: str
    who: str
    why: str


def stale_copies(kernel: tirx.PrimFunc, owners: Mapping[str, CopiesFor]) -> StaleCopies | None:
    """The first call that is found to lack copies, on grids of a few sizes; ``None`` where none is found.

    Parameters
    ----------
    kernel : PrimFunc
    owners : mapping of str to CopiesFor
        By the names of what starts copies.
    """
    launch, body = launch_of(kernel)
    axes = {str(one.node.thread_tag): one for one in launch}
    block, thread = (axes[tag].node.var for tag in ("blockIdx.x", "threadIdx.x"))
    threads = int(axes["threadIdx.x"].value.value)
    bounds = {int(c.b.value) for c in collect(body, tirx.LT) if isinstance(c.b, tirx.IntImm)}
    tiles = sorted(bound for bound in bounds if 0 < bound <= _MOST_CALLS)
    grids = [*(tile + more for tile in tiles for more in (0, -1, 1)), 1, 2, 3]
    left = 4 * _MOST_CALLS
    for grid in dict.fromkeys(grid for grid in grids if grid > 0):
        near = {0, 1, grid - 1, *(tile - 1 for tile in tiles)} & {*range(grid)}
        for number, own in product(sorted(near), sorted({*_THREADS, threads - 1} & {*range(threads)})):
            run = _Run(owners, {kernel.params[-1]: grid, block: number, thread: own})
            found = run.stale(body)
            if found is not None:
                return StaleCopies(found[0], f"thread {own} of block {number} of {grid}", found[1])
            left -= run.made
            if left <= 0:
                return None
    return None


class _Run:
    """The calls of one thread."""

    def __init__(self, owners: Mapping[str, CopiesFor], env: dict[Any, int]) -> None:
        self.owners, self.env = owners, env
        self.copies_of = {owner.rest: copies for copies, owner in owners.items()}
        self.made = 0

    def stale(self, body: tirx.Stmt) -> tuple[str, str] | None:
        """What finds other copies than it needs, and how."""
        started: dict[str, list[tuple[str, ...]]] = {}
        with suppress(Undecided):
            for name, given in self.calls(body, self.env):
                self.made += 1
                copies = self.copies_of.get(name, "")
                own = started.pop(copies, [])
                if name in self.owners:
                    started.setdefault(name, []).append(given)
                elif started:
                    other, (one, *_) = next(iter(started.items()))
                    return name, f"what {other} copies for tile {one[0]} is on its way into its shared memory"
                elif copies:
                    why = _lack(own, [given[place] for place in self.owners[copies].places])
                    if why:
                        return name, why
                if self.made >= _MOST_CALLS:
                    break
        return None

    def calls(self, node: tirx.Stmt, env: dict[Any, int]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The functions that are called, and what they are given: numbers, and where pointers point."""
        if isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                yield from self.calls(part, env)
        elif isinstance(node, tirx.AttrStmt):
            yield from self.calls(node.body, env)
        elif isinstance(node, tirx.Bind):
            # What is no number by then may still decide nothing that matters here.
            with suppress(Undecided):
                env[node.var] = whole_number(node.value, env)
        elif isinstance(node, tirx.IfThenElse):
            if whole_number(node.condition, env):
                yield from self.calls(node.then_case, env)
            elif node.else_case is not None:
                yield from self.calls(node.else_case, env)
        elif isinstance(node, tirx.For):
            if not is_turn(node):
                raise Undecided(f"the turns of the loop over {node.loop_var.name}")
            for turn in range(whole_number(node.extent, env)):
                yield from self.calls(node.body, {**env, node.loop_var: turn})
        elif isinstance(node, tirx.Evaluate) and isinstance(node.value, Call):
            call = node.value
            name = str(call.op.name_hint) if isinstance(call.op, tvm.ir.GlobalVar) else ""
            if name in self.owners or name in self.copies_of:
                yield name, tuple(_place(one, env) for one in call.args)
            elif name:
                yield name, ()


def _place(node: Any, env: Mapping[Any, int]) -> str:
    """Where a pointer points, or a number."""
    if isinstance(node, Call) and operator_name(node) == "souffle_at":
        return f"{_place(node.args[1], env)} + {whole_number(node.args[2], env)}"
    if isinstance(node, Call) and operator_name(node) == "souffle_choose":
        return _place(node.args[2] if whole_number(node.args[1], env) else node.args[3], env)
    if isinstance(node, tvm.ir.Var) and node not in env:
        return str(node.name)
    if isinstance(getattr(node, "ty", None), tvm.ir.PointerType):
        return str(node)
    return str(whole_number(node, env))


def _lack(found: Sequence[tuple[str, ...]], needed: Sequence[str]) -> str:
    """In what copies are not those that are needed; empty where they are."""
    if not found:
        return f"nothing was copied for tile {needed[0]}"
    for given in found:
        for number, (one, other) in enumerate(zip(given, needed, strict=True)):
            if one != other:
                what = ("of tile", "by thread")[number] if number < 2 else "from"
                return f"what was copied for it is {what} {one}, not {other}"
    return ""
