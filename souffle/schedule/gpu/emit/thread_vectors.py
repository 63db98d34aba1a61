"""How a thread's rows of a tile lie in it, or its columns, and which it keeps where several threads have the same."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from souffle.tvm_compat import PrimExpr

__all__ = ["ThreadVectors"]


@dataclass(frozen=True)
class ThreadVectors:
    """A thread's rows of a tile, or its columns: in vectors of `lanes`, `threads` vectors apart.

    Attributes
    ----------
    count, lanes, threads : int
        Rows of a thread, how many are neighbours, and threads along the rows.
    """

    count: int
    lanes: int
    threads: int

    def place(self, vector: PrimExpr, thread: PrimExpr) -> PrimExpr:
        """Where in the tile a vector begins."""
        return (vector * self.threads + thread) * self.lanes

    def position(self, number: PrimExpr, thread: PrimExpr) -> PrimExpr:
        """Where in the tile a thread's row or column is, by its number."""
        return self.place(tirx.floordiv(number, self.lanes), thread) + tirx.floormod(number, self.lanes)

    def shared_by(self, parts: int) -> ThreadVectors:
        """Those that each of `parts` times as many threads keeps, where the threads of each part had all of them.

        A vector has no more rows than one thread keeps of them. Thread ``t`` of part ``p`` then keeps those of thread
        ``p * threads + t``.
        """
        return ThreadVectors(self.count // parts, self.lanes, self.threads * parts)
