"""Which elements of the outputs the tiles of a stage function write, over all tiles: places alone, without values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.tvm_calls import structural_walk
from souffle.verify.expressions import Undecided
from souffle.verify.indices import bytes_of
from souffle.verify.values.points import Numbers
from souffle.verify.values.scalars import Frame, Mask
from souffle.verify.values.statements import Statement, Statements, nothing

__all__ = ["mark_written"]

_LANES = 1 << 18
"""Threads that are looked at together."""


def mark_written(func: tirx.PrimFunc, tiles: int, threads: int, written: Mapping[int, np.ndarray]) -> None:
    """Mark the elements that a function writes.

    Parameters
    ----------
    func : tirx.PrimFunc
        ``f(tile, tid, pointers...)``.
    tiles, threads : int
    written : mapping of int to array of bool
        For the position of each output among the pointers, its elements; marked in place.

    Raises
    ------
    Undecided
        If where it writes depends on data.
    """
    reader = _Writes(func, written)
    together = max(1, _LANES // threads)
    for start in range(0, tiles, together):
        here = np.arange(start, min(start + together, tiles))
        frame = reader.frame()
        frame[reader.tile] = np.repeat(here, threads)
        frame[reader.tid] = np.tile(np.arange(threads), len(here))
        reader.body(frame, None)


class _Writes(Statements):
    """A function of which only assignments to outputs are left, with their conditions and loops."""

    def __init__(self, func: tirx.PrimFunc, written: Mapping[int, np.ndarray]) -> None:
        super().__init__(Numbers(0))
        tile, tid, *pointers = func.params
        self.tile, self.tid = self.slot(tile), self.slot(tid)
        tensors = {pointers[number]: marks for number, marks in written.items()}
        self.outputs: dict[Any, np.ndarray] = {}
        declared: list[tirx.DeclBuffer] = []
        called: list[tirx.Evaluate] = []
        structural_walk(func.body, [(tirx.DeclBuffer, declared.append), (tirx.Evaluate, called.append)])
        for node in declared:
            if isinstance(node.data, tvm.ir.Var) and node.data in tensors:
                if bytes_of(str(node.buffer.dtype)) != bytes_of(str(node.data.ty.element_type.dtype)):
                    raise Undecided(f"the buffer {node.buffer.name}, whose elements are not those of its tensor")
                self.outputs[node.buffer] = tensors[node.data]
        for call in called:
            self._check(call.value)
        self.body = self.visit(func.body)

    def _check(self, call: Any) -> None:
        """Functions that are called write no output: what they do to one is not known here."""
        found: list[Any] = []

        def see(argument: Call) -> None:
            taken = argument.args[0] if str(getattr(argument.op, "name", "")) == "tirx.address_of" else None
            if isinstance(taken, TensorLoad) and taken.source in self.outputs:
                found.append(taken.source)

        if isinstance(call, Call):
            structural_walk(call, (Call, see))
        if found:
            raise Undecided(f"a call that is given the output {found[0].name}")

    def visit(self, node: Any) -> Statement:
        """What does not matter is left out: loops and conditions with no assignment to an output in them, other memory
        than the outputs, which are known, and calls, which were looked at."""
        if isinstance(node, (tirx.AllocBuffer, tirx.DeclBuffer, tirx.Evaluate)):
            return nothing
        if isinstance(node, (tirx.For, tirx.IfThenElse)) and not self._writes(node):
            return nothing
        return super().visit(node)

    def _writes(self, node: Any) -> bool:
        found: list[Any] = []

        def see(store: tirx.BufferStore) -> None:
            if store.buffer in self.outputs:
                found.append(store)

        structural_walk(node, (tirx.BufferStore, see))
        return bool(found)

    def visit_bind(self, node: tirx.Bind) -> Statement:
        """A variable; one that depends on data stays unbound, and whoever needs it is told."""
        try:
            value = self.of(node.value)
        except Undecided:
            return nothing
        slot = self.slot(node.var)
        self.name(node.var, node.value)

        def bound(f: Frame, m: Mask) -> None:
            f[slot] = value(f, m)

        return bound

    def visit_buffer_store(self, node: tirx.BufferStore) -> Statement:
        """An assignment to an output."""
        if node.buffer not in self.outputs:
            return nothing
        at, marks = self.of(node.indices[0]), self.outputs[node.buffer]

        def mark(f: Frame, m: Mask) -> None:
            places = np.atleast_1d(np.asarray(at(f, m)))
            if m is not None:
                places, chosen = np.broadcast_arrays(places, m)
                places = places[chosen]
            # What lies outside is for others to say.
            marks[places[(places >= 0) & (places < len(marks))]] = True

        return mark
