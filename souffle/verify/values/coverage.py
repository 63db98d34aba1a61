"""Which elements of the outputs the tiles of a stage function write, over all tiles: places alone, without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.verify.expressions import Undecided
from souffle.verify.indices import bytes_of
from souffle.verify.values.points import Numbers
from souffle.verify.values.scalars import Evaluator, Frame, Mask, Scalars, both, none_of

__all__ = ["mark_written"]

_LANES = 1 << 18
"""Threads that are looked at together."""

_Step = Callable[[Frame, Mask], None]


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
    if reader.body is None:
        return
    together = max(1, _LANES // threads)
    for start in range(0, tiles, together):
        here = np.arange(start, min(start + together, tiles))
        frame = reader.frame()
        frame[reader.tile] = np.repeat(here, threads)
        frame[reader.tid] = np.tile(np.arange(threads), len(here))
        reader.body(frame, None)


class _Writes(Scalars):
    """A function of which only assignments to outputs are left, with their conditions and loops."""

    def __init__(self, func: tirx.PrimFunc, written: Mapping[int, np.ndarray]) -> None:
        super().__init__(Numbers(0))
        tile, tid, *pointers = func.params
        self.tile, self.tid = self.slot(tile), self.slot(tid)
        self.written = written
        self.outputs: dict[Any, int] = {pointers[i]: i for i in written}
        self.buffers: dict[Any, int] = {}
        self.body = self.statement(func.body)

    def load(self, node: TensorLoad) -> Evaluator:
        """Nothing is stored."""
        raise Undecided(f"a place that depends on {node.source.name}")

    def statement(self, node: Any) -> _Step | None:
        """The function that marks what a statement writes; ``None`` if it writes no output."""
        if isinstance(node, tirx.SeqStmt):
            return _sequence([self.statement(part) for part in node.seq])
        if isinstance(node, tirx.AttrStmt):
            return self.statement(node.body)
        if isinstance(node, tirx.For):
            return self.loop(node)
        if isinstance(node, tirx.IfThenElse):
            return self.branch(node)
        if isinstance(node, tirx.Bind):
            return self.bind(node)
        if isinstance(node, tirx.BufferStore):
            return self.store(node)
        if isinstance(node, tirx.DeclBuffer):
            if isinstance(node.data, tvm.ir.Var) and node.data in self.outputs:
                if bytes_of(str(node.buffer.dtype)) != bytes_of(str(node.data.ty.element_type.dtype)):
                    raise Undecided(f"the buffer {node.buffer.name}, whose elements are not those of its tensor")
                self.buffers[node.buffer] = self.outputs[node.data]
            return None
        if isinstance(node, tirx.AllocBuffer):
            return None
        if isinstance(node, tirx.Evaluate):
            self.check_call(node.value)
            return None
        raise Undecided(f"a statement of the kind {type(node).__name__}")

    def check_call(self, call: Any) -> None:
        """Functions that are called write no output: what they do to one is not known here."""
        found: list[Any] = []

        def see(argument: Call) -> None:
            taken = argument.args[0] if str(getattr(argument.op, "name", "")) == "tirx.address_of" else None
            if isinstance(taken, TensorLoad) and taken.source in self.buffers:
                found.append(taken.source)

        if isinstance(call, Call):
            tvm_ffi.structural_walk(call, (Call, see))
        if found:
            raise Undecided(f"a call that is given the output {found[0].name}")

    def loop(self, node: tirx.For) -> _Step | None:
        """A loop, if there is an assignment in it."""
        slot = self.slot(node.loop_var)
        body = self.statement(node.body)
        if body is None:
            return None
        low, extent = self.of(node.min), self.of(node.extent)

        def turns(f: Frame, m: Mask) -> None:
            first, count = low(f, m), extent(f, m)
            for turn in range(count if isinstance(count, int) else int(count.max())):
                f[slot] = first + turn
                body(f, m if isinstance(count, int) else both(m, turn < count))

        return turns

    def branch(self, node: tirx.IfThenElse) -> _Step | None:
        """A condition, if there is an assignment under it."""
        then = self.statement(node.then_case)
        otherwise = self.statement(node.else_case) if node.else_case is not None else None
        if then is None and otherwise is None:
            return None
        test = self.of(node.condition)

        def evaluate(f: Frame, m: Mask) -> None:
            known = test(f, m)
            for step, holds in ((then, known), (otherwise, known == 0)):
                if step is None:
                    continue
                if isinstance(known, int):
                    if holds:
                        step(f, m)
                    continue
                here = both(m, holds != 0)
                if not none_of(here):
                    step(f, here)

        return evaluate

    def bind(self, node: tirx.Bind) -> _Step | None:
        """A variable; one that depends on data stays unbound, and whoever needs it is told."""
        try:
            value = self.of(node.value)
        except Undecided:
            return None
        slot = self.slot(node.var)

        def bound(f: Frame, m: Mask) -> None:
            f[slot] = value(f, m)

        return _Name(bound)

    def store(self, node: tirx.BufferStore) -> _Step | None:
        """An assignment to an output."""
        if node.buffer not in self.buffers:
            return None
        at, marks = self.of(node.indices[0]), self.written[self.buffers[node.buffer]]

        def mark(f: Frame, m: Mask) -> None:
            places = np.atleast_1d(np.asarray(at(f, m)))
            if m is not None:
                places, chosen = np.broadcast_arrays(places, m)
                places = places[chosen]
            # What lies outside is for others to say.
            marks[places[(places >= 0) & (places < len(marks))]] = True

        return mark


class _Name:
    """A step that writes nothing itself."""

    def __init__(self, step: _Step) -> None:
        self.step = step

    def __call__(self, f: Frame, m: Mask) -> None:
        self.step(f, m)


def _sequence(steps: list[_Step | None]) -> _Step | None:
    parts = [step for step in steps if step is not None]
    if all(isinstance(step, _Name) for step in parts):
        return None

    def sequence(f: Frame, m: Mask) -> None:
        for part in parts:
            part(f, m)

    return sequence
