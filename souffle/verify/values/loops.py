"""Loops whose turns can be run at once: one assignment, or one call, under conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import same_expression, statements_of, variables
from souffle.verify.expressions import Undecided
from souffle.verify.values.scalars import Fault, Frame, Scalars

__all__ = ["LoopNest", "at_once"]


@dataclass(frozen=True, eq=False)
class LoopNest:
    """Loops around each other, with what is in the innermost.

    Attributes
    ----------
    loops : tuple of tirx.For
        The outer ones first.
    body : tirx.Stmt
    selves : tuple of expressions
        The index of the element that the assignment both reads and writes; empty if it reads none of its own buffer.
    """

    loops: tuple[tirx.For, ...]
    body: Any
    selves: tuple[Any, ...]

    def alone(self, index: Any, scalars: Scalars, frame: Frame) -> np.ndarray | None:
        """An index over all turns, if nothing but the loops' variables is in it."""
        try:
            return np.asarray(scalars.of(index)(frame, None))
        except (Undecided, Fault):
            return None


def at_once(loop: tirx.For, most: int) -> LoopNest | None:
    """The nest that begins with a loop, if its turns may be run together and are not more than `most`.

    They may where each turn is one assignment to a buffer that it does not read: the last turn that writes an element
    wins, as it does in turn. Or where it reads the very element that it writes, and each turn has its own
    (:attr:`LoopNest.selves`).
    """
    loops: list[tirx.For] = []
    body: Any = loop
    turns = 1
    while isinstance(body, tirx.For):
        if not isinstance(body.extent, tirx.IntImm) or body.kind == tirx.ForKind.PARALLEL or body.step is not None:
            return None
        turns *= int(body.extent.value)
        loops.append(body)
        body = body.body
    if not 1 < turns <= most:
        return None
    leaf = _leaf(body)
    if leaf is None:
        return None
    found: list[TensorLoad] = []
    calls: list[Call] = []
    structural_walk(body, [(TensorLoad, found.append), (Call, calls.append)])
    if any(str(getattr(c.op, "name", "")).startswith(("tirx.call_extern", "tirx.cuda", "tirx.tvm_")) for c in calls):
        return None
    own = [load for load in found if load.source.same_as(leaf.buffer)]
    if not own:
        return LoopNest(tuple(loops), body, ())
    index = leaf.indices[0]
    inside = [loop.loop_var for loop in loops]
    if not all(same_expression(load.indices[0], index) for load in own) or isinstance(index, tirx.Ramp):
        return None
    if not all(any(v.same_as(w) for w in inside) for v in variables(index)):
        return None
    return LoopNest(tuple(loops), body, (index,))


def _leaf(body: Any) -> tirx.BufferStore | None:
    """The only assignment under conditions and variables."""
    *names, last = statements_of(body)
    if not all(isinstance(name, tirx.Bind) for name in names):
        return None
    if isinstance(last, tirx.IfThenElse) and last.else_case is None:
        return _leaf(last.then_case)
    return last if isinstance(last, tirx.BufferStore) else None
