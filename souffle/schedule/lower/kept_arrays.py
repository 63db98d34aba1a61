"""Where a thread keeps what it has read: in registers, or in its own slice of the block's shared memory.

A slice is no run of bytes: element ``i`` of thread ``t`` of ``T`` lies at ``i * T + t``, so that the threads of a warp
find theirs in banks of their own; what is read in `k` lanes lies at ``i * T + k * t`` with `i` a multiple of `k`. No
other thread touches it, so nothing has to wait. ``souffle/verify/kept_slices.py`` proves that of each kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.schedule.lower.wide_fills import WideRead
from souffle.tvm_compat import PrimExpr, const_int, dtype_of

__all__ = ["SCOPES", "KeptArrays", "held"]

SCOPES = ("local", "shared")
"""The memories in which constants can stay, as TVM names them: registers, and shared memory."""


@dataclass(eq=False)
class _Array:
    """A thread's elements of one type, as far as they are given out."""

    buffer: tirx.Buffer
    pointer: tirx.Var
    used: int = 0
    places: dict[tuple[object, ...], tuple[int, tuple[tirx.For, ...]]] = field(default_factory=dict)


@dataclass(eq=False)
class KeptArrays:
    """The arrays of one stage's threads.

    Attributes
    ----------
    scope : str
        One of `SCOPES`.
    thread : Var
        The number of a thread.
    threads : int
    sizes : dict of str to int
        By their types, how many elements of a thread each array has in the end.
    """

    scope: str
    thread: tirx.Var
    threads: int
    sizes: dict[str, int]
    arrays: dict[str, _Array] = field(default_factory=dict)

    def place(
        self,
        node: PrimExpr,
        key: tuple[object, ...],
        loops: Sequence[tirx.For],
        wide: WideRead | None,
    ) -> tuple[TensorLoad, PrimExpr, bool]:
        """Where what is read in each turn of some loops is kept.

        Parameters
        ----------
        node : expression
            That reads it.
        key : tuple
            What tells it from other reads, beside the loops.
        loops : sequence of For
        wide : WideRead or None
            What reads it together with its neighbours: then the loop that tells these apart counts fastest.

        Returns
        -------
        element : TensorLoad
        together : expression
            The index of all that is read together.
        new : bool
            Whether nothing else has filled it.
        """
        if wide is not None:
            loops = (*(loop for loop in loops if not loop.same_as(wide.loop)), wide.loop)
        kind = tvm.DataType(dtype_of(node))
        array = self._of_type(dtype_of(node).removesuffix(f"x{kind.lanes}"))
        key = (*key, *(loop.loop_var for loop in loops))
        new = key not in array.places
        if new:
            size = prod(const_int(loop.extent) for loop in loops) * kind.lanes
            together = kind.lanes if wide is None else wide.lanes
            start = -(-array.used // together) * together
            array.places[key] = start, tuple(loops)
            array.used = start + size
        linear: PrimExpr = tirx.IntImm("int32", 0)
        for loop in loops:
            linear = linear * const_int(loop.extent) + loop.loop_var
        linear = linear * kind.lanes + array.places[key][0]
        index, apart = linear, 1
        if self.scope == "shared":
            index = linear * self.threads + self.thread * kind.lanes
            apart = self.threads
        if kind.lanes > 1:
            index = tirx.Ramp(index, 1, kind.lanes)
        return array.buffer[index], index if wide is None else tirx.Ramp(index, apart, wide.lanes), new

    def used(self) -> dict[str, int]:
        """Elements of a thread, by their types."""
        return {dtype: array.used for dtype, array in self.arrays.items()}

    def pointers(self) -> list[tirx.Var]:
        return [array.pointer for array in self.arrays.values()]

    def declared(self) -> list[tirx.DeclBuffer]:
        return [tirx.DeclBuffer(array.buffer, data=array.pointer) for array in self.arrays.values()]

    def _of_type(self, scalar: str) -> _Array:
        if scalar not in self.arrays:
            name, size = f"kept{len(self.arrays)}", self.sizes.get(scalar, 1)
            size *= self.threads if self.scope == "shared" else 1
            pointer = tirx.Var(f"{name}_ptr", tvm.ir.PointerType(tvm.ir.PrimType(scalar), self.scope))
            buffer = tirx.decl_buffer((size,), scalar, name, pointer, scope=self.scope, layout=None)
            self.arrays[scalar] = _Array(buffer, pointer)
        return self.arrays[scalar]


def held(arrays: Collection[tuple[str, int]]) -> int:
    """Bytes of a thread for arrays of some types and elements."""
    return sum(tvm.DataType(dtype).itemsize * count for dtype, count in arrays)
