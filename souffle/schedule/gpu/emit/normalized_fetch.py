"""Bringing tiles of an operand that is normalized on its way: what steps have in common stays in registers.

A thread reads the same rows of the tile in each step, so that it takes their values from shared memory once. It reads
the same place of the inner axis in all rows of a step, so that what varies along that axis alone, such as the scale and
shift of a normalization, is read once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import tvm_ffi
from tvm import tirx

from souffle.schedule.gpu.emit.contraction_statements import all_of, guarded, local_buffer, loop
from souffle.schedule.gpu.emit.staging import TileFetch
from souffle.schedule.gpu.forms.contraction_expressions import depends, substitute_axes
from souffle.schedule.gpu.forms.row_values import RowValues, replaced_parts
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, sequence, variables

__all__ = ["NormalizedFetch"]

RowLookup = Callable[[PrimExpr, PrimExpr], Mapping[tirx.Var, PrimExpr]]
"""From batch and own index in a tile to what stands there for the variables of its row."""


class NormalizedFetch:
    """A fetch through registers of an operand that has values of rows.

    Parameters
    ----------
    fetch : TileFetch
    values : RowValues
    """

    def __init__(self, fetch: TileFetch, values: RowValues) -> None:
        value, self._loads = _without_inner_loads(fetch)
        self._along = [tirx.Var(f"along_inner_{n}", dtype_of(load)) for n, load in enumerate(self._loads)]
        for load, var in zip(self._loads, self._along, strict=True):
            value = replaced_parts(value, load, var)
        self._fetch = replace(fetch, operand=replace(fetch.operand, value=value))
        self._values = _read_values(fetch, values)
        count = fetch.register_elements if not fetch.along_inner else fetch.turns
        self._of_rows = [local_buffer(f"row_{n}", count, dtype_of(v)) for n, v in enumerate(self._values)]
        self._of_inner = [local_buffer(f"inner_{n}", fetch.lanes, dtype_of(v)) for n, v in enumerate(self._along)]

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Registers that it needs."""
        return (*self._of_rows, *self._of_inner)

    def take(self, rows: RowLookup, thread: PrimExpr) -> tirx.Stmt | None:
        """Take the values of this thread's rows, when they are there."""
        if not self._values:
            return None
        zero = (tirx.IntImm("int32", 0),) * 3

        def turn(index: PrimExpr) -> tirx.Stmt:
            read = self._fetch.read_of(index, thread, zero)

            def one(lane: PrimExpr) -> tirx.Stmt:
                known = rows(*read.own(lane))
                place = self._place(index, lane)
                stores = zip(self._of_rows, self._values, strict=True)
                return sequence(*(tirx.BufferStore(held, known[var], [place]) for held, var in stores))

            body = one(tirx.IntImm("int32", 0)) if self._fetch.along_inner else loop("lane", self._fetch.lanes, one)
            return sequence(*read.statements, guarded(read.exists, body))

        return loop("turn", self._fetch.turns, turn, "unrolled")

    def fetch(self, registers: Any, thread: PrimExpr, corner: Sequence[PrimExpr]) -> tirx.Stmt:
        """Read the tile whose batch, own and inner tile indices are `corner`; outside the tensor it is zero."""
        fetch = self._fetch

        def turn(index: PrimExpr) -> tirx.Stmt:
            read = fetch.read_of(index, thread, corner)

            def one(lane: PrimExpr) -> tirx.Stmt:
                value = substitute_axes(fetch.operand.value, {**read.mapping(lane), **self._known(index, lane)})
                if read.inside:
                    value = tirx.if_then_else(all_of(read.inside), value, tirx.const(0, fetch.operand.dtype))
                return tirx.BufferStore(registers, value, [index * fetch.lanes + lane])

            body = loop("lane", fetch.lanes, one, "vectorized")
            return sequence(*read.statements, guarded(read.exists, body))

        return sequence(*self._along_inner(thread, corner), loop("turn", fetch.turns, turn, "unrolled"))

    def _place(self, turn: PrimExpr, lane: PrimExpr) -> PrimExpr:
        return turn if self._fetch.along_inner else turn * self._fetch.lanes + lane

    def _known(self, turn: PrimExpr, lane: PrimExpr) -> Mapping[tirx.Var, PrimExpr]:
        place = self._place(turn, lane)
        of_rows = {var: held[place] for var, held in zip(self._values, self._of_rows, strict=True)}
        return of_rows | {var: held[lane] for var, held in zip(self._along, self._of_inner, strict=True)}

    def _along_inner(self, thread: PrimExpr, corner: Sequence[PrimExpr]) -> list[tirx.Stmt]:
        if not self._loads:
            return []
        read = self._fetch.read_of(tirx.IntImm("int32", 0), thread, corner)

        def one(held: Any, load: PrimExpr, lane: PrimExpr) -> tirx.Stmt:
            return tirx.BufferStore(held, substitute_axes(load, read.mapping(lane)), [lane])

        pairs = zip(self._of_inner, self._loads, strict=True)
        loads = [
            loop("lane", self._fetch.lanes, lambda lane, h=held, e=load: one(h, e, lane), "vectorized")
            for held, load in pairs
        ]
        return [*read.statements, guarded(read.exists, sequence(*loads))]


def _without_inner_loads(fetch: TileFetch) -> tuple[PrimExpr, list[PrimExpr]]:
    """The operand's value, and what it reads that varies along the inner axis alone, at one place for all turns."""
    value = fetch.operand.value
    fast = fetch.tile[2] // fetch.lanes
    whole = prod(axis.extent for axis in fetch.inner) % fetch.tile[2] == 0
    if not fetch.along_inner or fetch.threads % fast or not whole or fetch.turns < 2:
        return value, []
    found: list[PrimExpr] = []
    for load in buffer_loads(value):
        alone = not any(depends(load, axis) for axis in (*fetch.axes, *fetch.batch))
        new = not any(tvm_ffi.structural_equal(load, other) for other in found)
        if alone and new and any(depends(load, axis) for axis in fetch.inner):
            found.append(load)
    return value, found


def _read_values(fetch: TileFetch, values: RowValues) -> list[tirx.Var]:
    used = variables(fetch.operand.value)
    return [value.var for value in values.values if any(value.var.same_as(v) for v in used)]
