"""Calls and conditions of kernels that keep registers, as :mod:`souffle.verify.kept_memory` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx

from souffle.verify.expressions import Expr, Undecided, const
from souffle.verify.indices import index_of

__all__ = ["alike", "bound_of", "bounds_of", "is_data", "is_tile", "is_turn", "meet", "whole_number"]


def alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        a.same_as(b) or tvm_ffi.structural_equal(a, b) for a, b in zip(some, others, strict=True)
    )


def meet(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether there is one that is among both."""
    return any(alike((a,), (b,)) for a in some for b in others)


def is_data(node: Any, buffer: tirx.Buffer) -> bool:
    """Whether an expression is where a buffer begins."""
    return tvm_ffi.structural_equal(node, buffer.data)


def bounds_of(around: Sequence[Any]) -> list[tuple[Any, int]] | None:
    """The conditions around a call, each ``value < bound``; ``None`` if one has another form."""
    found: list[tuple[Any, int]] = []
    pending = [one for one in around if not isinstance(one, tirx.For)]
    while pending:
        condition = pending.pop()
        if isinstance(condition, tirx.And):
            pending += [condition.a, condition.b]
        elif isinstance(condition, tirx.LT) and isinstance(condition.b, tirx.IntImm):
            found.append((condition.a, int(condition.b.value)))
        elif isinstance(condition, tirx.LE) and isinstance(condition.b, tirx.IntImm):
            found.append((condition.a, int(condition.b.value) + 1))
        else:
            return None
    return found


def bound_of(bounds: Sequence[tuple[Any, int]], value: Any, default: int | None = None) -> int | None:
    found = [bound for one, bound in bounds if one.same_as(value) or tvm_ffi.structural_equal(one, value)]
    return min(found) if found else default


def is_turn(loop: tirx.For) -> bool:
    """Whether a loop counts its turns from 0, one after another."""
    return (
        loop.kind == tirx.ForKind.SERIAL
        and loop.step is None
        and isinstance(loop.min, tirx.IntImm)
        and not loop.min.value
    )


def is_tile(tile: Any, turn: Any, blocks: Any, block: Any) -> bool:
    """Whether a tile is ``turn * blocks + block``."""
    return any(
        tvm_ffi.structural_equal(tile, form)
        for product in (turn * blocks, blocks * turn)
        for form in (product + block, block + product)
    )


def whole_number(value: Any, env: Mapping[Any, int]) -> int:
    """A whole number, where all of its variables are known.

    Raises
    ------
    Undecided
        If it is none.
    """
    found: Expr = index_of(value, {variable: const(number) for variable, number in env.items()})
    if found.op != "const":
        raise Undecided(f"the value of {value} in a kernel")
    return int(found.value)
