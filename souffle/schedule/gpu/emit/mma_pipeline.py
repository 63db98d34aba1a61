"""Tiles of operands on their way to shared memory while the tiles before them are worked on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import barrier, commit, wait
from souffle.schedule.gpu.emit.contraction_statements import guarded
from souffle.schedule.gpu.emit.mma_pieces import TileRing
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["Corner", "Pipeline"]

Corner = Callable[[PrimExpr], tuple[PrimExpr, PrimExpr, PrimExpr]]
"""From the number of a step to the batch, own and inner index of its tile."""


class Pipeline:
    """Steps, each of which needs a tile of each ring; see :mod:`souffle.schedule.gpu.emit.async_copy`.

    The statements of :attr:`opening` come first, those of :meth:`turn` in each step, :attr:`closing` last; then shared
    memory is free. With :meth:`turn_ahead` in place of :meth:`turn`, :meth:`arrived` and the loads of the first piece
    come before the first step.

    Parameters
    ----------
    shared : buffer
    rings : sequence of pairs of TileRing and Corner
    steps : int
    stages : int
        Tiles of a ring that comes by asynchronous copies. With one, what is copied is waited for.
    thread : expression
    before : sequence of Stmt
        What comes before the first fetch through registers, while copies are on their way.
    """

    def __init__(
        self,
        shared: Any,
        rings: Sequence[tuple[TileRing, Corner]],
        steps: int,
        stages: int,
        thread: PrimExpr,
        before: Sequence[tirx.Stmt] = (),
    ) -> None:
        self.shared, self.rings, self.steps, self.stages, self.thread = shared, rings, steps, stages, thread
        self.before = list(before)
        self.some = any(ring.asynchronous for ring, _ in rings)

    @property
    def opening(self) -> list[tirx.Stmt]:
        """What is on its way before the first step."""
        zero = tirx.IntImm("int32", 0)
        if self.stages == 1:
            return [*self.before, *self._fetches(zero)]
        first: list[tirx.Stmt] = []
        for number in range(self.stages - 1 if self.some else 0):
            turn = tirx.IntImm("int32", number)
            first += [*(self._copies(turn) if number < self.steps else []), commit()]
        return [*first, *self.before, *self._fetches(zero), *self._puts(zero)]

    def turn(self, turn: PrimExpr, products: tirx.Stmt) -> tirx.Stmt:
        """One step around what is done with its tiles."""
        if self.stages == 1:
            return sequence(
                *self._copies(turn),
                *([commit()] if self.some else []),
                *self._puts(turn),
                *self._ahead(self._fetches, turn, 1),
                wait(0) if self.some else None,
                barrier(),
                products,
                barrier(),
            )
        ahead = self.stages - 1
        copying = [*self._ahead(self._copies, turn, ahead), commit()] if self.some else []
        # One barrier a step.
        return sequence(
            wait(ahead - 1) if self.some else None,
            barrier(),
            *copying,
            *self._ahead(self._fetches, turn, 1),
            products,
            *self._ahead(self._puts, turn, 1),
        )

    def arrived(self) -> list[tirx.Stmt]:
        """All threads find the tiles of the oldest step that is on its way, and none reads those of the step before."""
        return [wait(self.stages - 2), barrier()]

    def turn_ahead(self, turn: PrimExpr, pieces: Sequence[tirx.Stmt], loads: Sequence[tirx.Stmt]) -> tirx.Stmt:
        """One step, all of whose tiles are copied, where the loads of each piece come before the products of another.

        Parameters
        ----------
        turn : expression
        pieces : sequence of Stmt
            The products of each piece, whose parts have been loaded; those of the first one in the step before.
        loads : sequence of Stmt
            Those of the second piece and so on, the last one of the first piece of the next step.
        """
        *own, next_ = loads
        # What the copies overwrite was loaded before the barrier of the step before.
        copying = [*self._ahead(self._copies, turn, self.stages - 1), commit()]
        begins = guarded([tirx.LT(turn + 1, self.steps)], sequence(*self.arrived(), next_))
        parts = zip([*own, begins], pieces, strict=True)
        return sequence(*copying, *(part for pair in parts for part in pair))

    @property
    def closing(self) -> list[tirx.Stmt]:
        """Behind the last step other warps may still read its tiles."""
        return [] if self.stages == 1 else [barrier()]

    def _copies(self, turn: PrimExpr) -> list[tirx.Stmt]:
        return [
            ring.copy.copies(self.shared, ring.start(turn), self.thread, corner(turn))
            for ring, corner in self.rings
            if ring.asynchronous
        ]

    def _fetches(self, turn: PrimExpr) -> list[tirx.Stmt]:
        return [
            ring.source.fetch(ring.held, self.thread, corner(turn))
            for ring, corner in self.rings
            if not ring.asynchronous
        ]

    def _puts(self, turn: PrimExpr) -> list[tirx.Stmt]:
        return [
            ring.fetch.put(ring.held, self.shared, self.thread, ring.start(turn))
            for ring, _ in self.rings
            if not ring.asynchronous
        ]

    def _ahead(self, make: Callable[[PrimExpr], list[tirx.Stmt]], turn: PrimExpr, distance: int) -> list[tirx.Stmt]:
        """What is done for a step further on, if there is one."""
        if self.steps <= distance:
            return []
        found = make(turn + distance)
        return [guarded([tirx.LT(turn + distance, self.steps)], sequence(*found))] if found else []
