"""Which elements of a slice of shared memory a function's threads touch, and which of their own these are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.tvm_compat import Analyzer, collect, const_int, substitute
from souffle.verify.expressions import Axis, Expr, Undecided, evaluate, variable
from souffle.verify.indices import index_of

__all__ = ["elements_of", "own_place"]

_MOST_POINTS = 1 << 24
"""Places of one access, over all threads and turns, that are looked at."""


def elements_of(
    name: str, func: tirx.PrimFunc, parameter: tirx.Var, threads: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(thread, element, element of the thread's own) of all accesses of a function, in all turns of its loops.

    Parameters
    ----------
    name : str
        Of the function, for messages.
    func : PrimFunc
    parameter : Var
        That points to the slice.
    threads : int
        That call it.

    Raises
    ------
    Undecided
        If something else decides which they are.
    """
    for index in _indices(func, parameter):
        yield from _points(func, index, threads, name)


def own_place(index: Any, thread: tirx.Var, threads: int) -> Any:
    """Element ``i * threads + k * tid`` of all threads, of which k are read at once, as element `i` of a thread."""
    first, step, lanes = _parts(index)
    if lanes > 1 and step not in (1, threads):
        raise Undecided(f"elements {index} of a slice")
    of_first = substitute(first, {thread: tirx.IntImm("int32", 0)})
    own = Analyzer().simplify(tirx.floordiv(of_first, threads))
    return tirx.Ramp(own, 1, lanes) if lanes > 1 else own


def _indices(func: tirx.PrimFunc, parameter: tirx.Var) -> list[Any]:
    """How a function counts the elements of a slice, wherever it touches them."""
    (buffer,) = (d.buffer for d in collect(func.body, tirx.DeclBuffer) if d.data.same_as(parameter))
    loads = [node.indices for node in collect(func.body, TensorLoad) if node.source.same_as(buffer)]
    stores = [node.indices for node in collect(func.body, tirx.BufferStore) if node.buffer.same_as(buffer)]
    found: list[Any] = []
    for (index,) in (*loads, *stores):
        if not any(tvm_ffi.structural_equal(index, other) for other in found):
            found.append(index)
    return found


def _parts(index: Any) -> tuple[Any, int, int]:
    """The first element of an access, how far apart its elements are, and how many."""
    if not isinstance(index, tirx.Ramp):
        return index, 1, 1
    return index.base, const_int(index.stride), const_int(index.lanes)


def _points(
    func: tirx.PrimFunc, index: Any, count: int, name: str
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(thread, element, element of its own) of an access in all turns, by all threads."""
    thread, own = func.params[1], own_place(index, func.params[1], count)
    loops = {loop.loop_var: loop for loop in collect(func.body, tirx.For)}
    axes = {thread: Axis("tid", count)}
    for counter in (v for part in (index, own) for v in collect(part, tirx.Var)):
        loop = loops.get(counter)
        if loop is not None and isinstance(loop.extent, tirx.IntImm) and const_int(loop.min) == 0 and loop.step is None:
            axes[counter] = Axis(str(counter.name), const_int(loop.extent))
        elif counter not in axes:
            raise Undecided(f"which elements of a slice {name} touches: {index}")
    shape = [axis.extent for axis in axes.values()]
    if np.prod(shape, dtype=float) > _MOST_POINTS:
        raise Undecided(f"{np.prod(shape, dtype=float):.0f} places of a slice in {name}")
    values = dict(zip(axes.values(), np.ix_(*map(np.arange, shape)), strict=True))
    env: dict[Any, Expr] = {counter: variable(axis) for counter, axis in axes.items()}
    firsts = [evaluate(index_of(_parts(part)[0], env), values, {}) for part in (index, own)]
    threads, elements, owns = (np.broadcast_to(a, shape).reshape(-1) for a in (values[axes[thread]], *firsts))
    _, step, lanes = _parts(index)
    if lanes > 1 and step == 1 and (elements % lanes).any():
        raise Undecided(f"elements {index} of a slice, which {name} touches at once and which are not aligned")
    for lane in range(lanes):
        yield threads, elements + lane * step, owns + lane
