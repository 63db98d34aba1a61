"""Mutations of whole numbers: literals, masks of warps, products near the end of 32 bits, and divisions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.mutation.expression_changes import edited, heads, nodes_of
from souffle.mutation.statement_paths import Change, Site, is_int, replaced, sites

__all__ = ["number_changes"]

_LITERALS = (tirx.IntImm,)
_LOADS = (TensorLoad,)
_TOP = 2**31
_LANES = 32


def number_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Make each literal one more or less, double or half; each mask lack a lane; spoil each index's arithmetic.

    An index is multiplied and divided by one number, so that it is right but for the 32 bits of the product; or by one
    that is zero in some tile or thread.
    """
    tile, tid = func.params[:2]
    for site in sites(func):
        statement = site.statement
        for number, head in enumerate(heads(statement)):
            declared = [n for load in nodes_of(head, _LOADS) for n in nodes_of(load.source, _LITERALS)]
            # A buffer's own extents are no part of the expression.
            literals = [n for n in nodes_of(head, _LITERALS) if not any(n.same_as(own) for own in declared)]
            for index, node in enumerate(literals):
                yield from _literal(func, site, number, index, node)
            for index, load in enumerate(nodes_of(head, _LOADS)):
                for action, what, spoil in _spoilers(tile, tid):
                    if _plain(load.indices):
                        make = edited(func, site.path, number, _LOADS, index, lambda n, s=spoil: _load(n, s))
                        yield Change("number", action, f"the index of {load.source.name} {what}", statement, make)
        if isinstance(statement, tirx.BufferStore) and _plain(statement.indices):
            for action, what, spoil in _spoilers(tile, tid):
                yield _store(func, site, action, what, spoil)


def _literal(func: tirx.PrimFunc, site: Site, number: int, index: int, node: tirx.IntImm) -> Iterator[Change]:
    value, dtype = int(node.value), str(node.ty.dtype)
    if dtype == "uint32" and value > _LANES:
        # A mask: a lane less, a lane more, half of the lanes.
        others = (value & (value - 1), value | (value + 1) & (_TOP * 2 - 1), value & 0xFFFF)
        kind = "mask"
    elif dtype in ("int32", "int64"):
        others, kind = (value + 1, value - 1, 2 * value, value // 2), "number"
    else:
        return
    # What 32 bits do not hold no text has, unless in 64.
    least, end = {"uint32": (0, 2 * _TOP), "int32": (-_TOP, _TOP)}.get(dtype, (-_TOP * _TOP, _TOP * _TOP))
    for other in dict.fromkeys(others):
        if other != value and least <= other < end:
            new = tirx.const(other, dtype)
            make = edited(func, site.path, number, _LITERALS, index, lambda _, n=new: n)
            yield Change(kind, "literal", f"the number {value} becomes {other}", site.statement, make)


def _plain(indices: Any) -> bool:
    return len(indices) == 1 and not isinstance(indices[0], tirx.Ramp) and is_int(indices[0])


def _spoilers(tile: Any, tid: Any) -> Iterator[tuple[str, str, Any]]:
    def product(index: Any) -> Any:
        by = tirx.const(_TOP // 64 + 1, "int32")
        return tirx.truncdiv(index * by, by)

    def quotient(var: Any) -> Any:
        return lambda index: tirx.truncdiv(index * (var - 1), var - 1)

    yield "overflow", "is multiplied beyond 32 bits", product
    for var in (tile, tid):
        if isinstance(var, tvm.ir.Var) and str(var.ty) == "int32":
            yield "division", f"is divided by {var.name} - 1", quotient(var)


def _load(load: Any, spoil: Any) -> Any:
    return tirx.BufferLoad(load.source, [spoil(load.indices[0])])


def _store(func: tirx.PrimFunc, site: Site, action: str, what: str, spoil: Any) -> Change:
    s = site.statement

    def make() -> tirx.PrimFunc:
        new = tirx.BufferStore(s.buffer, s.value, [spoil(s.indices[0])])
        return func.with_body(replaced(func.body, site.path, new))

    return Change("number", action, f"the index of {s.buffer.name} {what}", s, make)
