"""Runs a stage function, as it was lowered, for all threads of some tiles at once.

Statements are executed in the order of the text by all lanes together. That is one of the orders in which threads may
run, and what they run has no races (which the certificate shows), so that every order gives the same. Barriers and
waits for copies have nothing left to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Call

from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import const_int
from souffle.verify.expressions import Undecided
from souffle.verify.indices import operator_name
from souffle.verify.values.loops import LoopNest, at_once
from souffle.verify.values.memory import Lanes
from souffle.verify.values.places import Places
from souffle.verify.values.points import Numbers
from souffle.verify.values.scalars import Evaluator, Frame, Mask, Scalars, is_steady
from souffle.verify.values.sightings import TextSightings
from souffle.verify.values.statements import Statement, nothing

__all__ = ["FunctionRun"]

_BARRIERS = ("tirx.tvm_storage_sync", "tirx.cuda.cta_sync", "tirx.cuda.warp_sync")
_PART_BARRIER = re.compile(r"souffle_named_barrier<\d+, *\d+>")

_CALL = 8
"""Numbers of a thread that a function called by name handles, about."""

_MOST_AT_ONCE = 1 << 19
"""Elements of one array when turns of a loop are run together."""


class FunctionRun(Places):
    """A stage function that is run for some tiles.

    Parameters
    ----------
    func : tirx.PrimFunc
        ``f(tile, tid, pointers...)``, see :mod:`souffle.verify.values`.
    lanes : Lanes
        The tiles, and how many threads each has.
    tensors : sequence of array
        What the pointers point to, one number for each element; written in place.
    numbers : Numbers
        Also what was never written is made of them.
    sightings : TextSightings
    intrinsics : callable
        ``intrinsics(run, name, arguments)``: the effect of a function that the text calls, or ``None``.

    Attributes
    ----------
    work : int
        How many numbers were assigned.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        lanes: Lanes,
        tensors: Sequence[np.ndarray],
        numbers: Numbers,
        sightings: TextSightings,
        intrinsics: Callable[[FunctionRun, str, Sequence[Any]], Statement | None],
    ) -> None:
        super().__init__(func, lanes, tensors, numbers, sightings)
        self.intrinsics = intrinsics
        self.statements: list[Any] = []
        self.current = 0
        self.work = 0
        self.uses: Counter[Any] = Counter()
        structural_walk(func.body, (tirx.Var, lambda variable: self.uses.update([variable])))
        tile, tid = func.params[:2]
        self.initial = {self.slot(tile): lanes.tile, self.slot(tid): lanes.tid}
        if len(lanes.tiles) == 1:
            self.initial[self.slot(tile)] = lanes.tiles[0]
        self.steady.update(self.initial)
        self.body = self.visit(func.body)

    def run(self) -> None:
        """Execute it.

        Raises
        ------
        Fault
            If a lane leaves a memory.
        Undecided
        """
        frame = self.frame()
        for slot, value in self.initial.items():
            frame[slot] = value
        self.body(frame, None)

    def call(self, node: Call, name: str) -> Evaluator:
        """Functions of several threads."""
        found = self.intrinsics(self, name, node.args)
        return found if found is not None else super().call(node, name)

    # Statements

    def numbered(self, node: Any) -> int:
        """A number for a statement, which messages show by."""
        self.statements.append(node)
        return len(self.statements) - 1

    def visit_bind(self, node: tirx.Bind) -> Statement:
        """A variable."""
        pointer = self.pointer(node.value)
        if pointer is not None:
            self.pointers[node.var] = pointer
            return nothing
        if self.uses[node.var] == 1:
            # Named and never used.
            return nothing
        value = self.of(node.value)
        slot = self.slot(node.var)
        if is_steady(value):
            self.steady.add(slot)
        self.name(node.var, node.value)
        if node.var in self.drawn:

            def kept(f: Frame, m: Mask) -> None:
                # The memory may be written before the variable is used.
                f[slot] = np.array(value(f, m))

            return kept

        def bound(f: Frame, m: Mask) -> None:
            f[slot] = value(f, m)

        return bound

    def together(self, node: tirx.For) -> Statement | None:
        """All turns of a nest of loops, where that is the same: its variables are arrays with an axis each."""
        nest = at_once(node, _MOST_AT_ONCE // self.lanes.count)
        if nest is None:
            return None
        lows = [self.of(loop.min) for loop in nest.loops]
        if nest.selves:
            # What an element is made of is the element itself: each turn must have its own.
            for index in nest.selves:
                if not self._distinct(nest, index):
                    return None
        slots = [self.slot(loop.loop_var) for loop in nest.loops]
        counts = [const_int(loop.extent) for loop in nest.loops]
        axes = [np.arange(n).reshape((n,) + (1,) * (2 + len(counts) - 1 - i)) for i, n in enumerate(counts)]
        body = self.visit(nest.body)

        def together(f: Frame, m: Mask) -> None:
            for slot, low, axis in zip(slots, lows, axes):
                f[slot] = low(f, m) + axis
            body(f, m)

        return together

    def _distinct(self, nest: LoopNest, index: Any) -> bool:
        """Whether an index that depends on the nest's own variables alone differs from turn to turn."""
        own = Scalars(self.numbers)
        frame = own.frame()
        grid = np.indices([const_int(loop.extent) for loop in nest.loops]).reshape(len(nest.loops), -1)
        for loop, values in zip(nest.loops, grid):
            if not isinstance(loop.min, tirx.IntImm):
                return False
            own.slot(loop.loop_var)
            frame.append(values + int(loop.min.value))
        places = nest.alone(index, own, frame)
        return places is not None and len(np.unique(places)) == places.size == grid.shape[1]

    def visit_buffer_store(self, node: tirx.BufferStore) -> Statement:
        """An assignment: all lanes read before any writes."""
        memory, at, size = self._element(node.buffer, node.indices)
        value, number, lanes = self.of(node.value), self.numbered(node), self.lanes.count

        def assign(f: Frame, m: Mask) -> None:
            self.current = number
            found = value(f, m)
            self.work += max(np.size(found), lanes)
            memory.write(at(f, m), size, found, m, number)

        return assign

    def visit_evaluate(self, node: tirx.Evaluate) -> Statement:
        """A call for what it does."""
        if not isinstance(node.value, Call):
            return nothing
        name = operator_name(node.value)
        if name in _BARRIERS or _PART_BARRIER.fullmatch(name):
            return self.barrier
        arguments = node.value.args
        if str(getattr(node.value.op, "name", "")) in ("tirx.call_extern", "tirx.call_pure_extern"):
            arguments = arguments[1:]
        self.current = number = self.numbered(node)
        found = self.intrinsics(self, name, arguments)
        if found is None:
            raise Undecided(f"a call of {name}")

        def called(f: Frame, m: Mask) -> None:
            self.current = number
            self.work += _CALL * self.lanes.count
            found(f, m)

        return called

    def barrier(self, f: Frame, m: Mask) -> None:
        """A barrier of the block: nothing to do, if all threads come to it together.

        Raises
        ------
        Undecided
            If some threads of a tile do not: what they do meanwhile may be meant to come before.
        """
        if self.lanes.parted(m, self.lanes.threads):
            raise Undecided("a barrier that a part of the threads comes to")
