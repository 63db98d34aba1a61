"""Bringing tiles from global to shared memory by asynchronous copies (sm_80 and newer): past the registers, and without
waiting.

A kernel issues the copies of a tile (:meth:`AsyncCopy.copies`), closes them as a group (:func:`commit`), and before it
reads a tile waits until all but the newest groups have arrived (:func:`wait`), each thread for its own copies. Then all
threads meet at a barrier (:func:`barrier`), after which the tile is there for all of them::

    for s in 0 .. stages - 2:  copies(s); commit
    for turn in 0 .. steps - 1:
        wait(stages - 2); barrier
        copies(turn + stages - 1) into what turn - 1 has read; commit
        products of turn

One barrier a step is enough: it also says that all threads are done with the tile of the step before, which is
overwritten next. A group is committed in each step, also where there is nothing left to copy, so that the number of
newer groups is the same in all steps.

TVM's ThreadSync does not see these copies, nor a read through a pointer, so barriers are explicit wherever one of the
two sides is of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.ir import TensorLoad

from souffle.decision import Refused
from souffle.schedule.gpu.emit.contraction_statements import all_of, guarded, loop
from souffle.schedule.gpu.emit.staging import TileFetch
from souffle.schedule.gpu.forms.contraction_expressions import is_constant, substitute_axes
from souffle.schedule.gpu.forms.memory_access import aligned_lanes, bits_of, has_condition_on, memory_step
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of, is_branch, sequence

__all__ = [
    "COMMIT_FUNCTION",
    "COPY_FUNCTION",
    "COPY_OR_ZERO_FUNCTION",
    "WAIT_FUNCTION",
    "AsyncCopy",
    "async_copy",
    "barrier",
    "commit",
    "compute_capability",
    "wait",
]

COPY_FUNCTION = "souffle_copy_async"
"""``<bytes>(shared, global)``; the texts of these functions are in :mod:`souffle.codegen.device_functions`."""

COPY_OR_ZERO_FUNCTION = "souffle_copy_async_or_zero"
"""``<bytes>(shared, global, whether)``: zeros if not, and then the pointer to global memory is not followed."""

COMMIT_FUNCTION = "souffle_copy_commit"

WAIT_FUNCTION = "souffle_copy_wait"
"""``<groups>()``: until at most so many of the thread's groups, the newest, are on their way."""

_SIZES = (16, 8, 4)
"""Bytes of one copy; those of 16 do not pass through the L1 cache."""

_FEW = 4
"""Copies of a thread that are unrolled always."""

_FIRST_CAPABILITY = 80


def compute_capability(arch: str) -> int:
    """Such as 90 for ``"sm_90"``; 0 where there is no number."""
    digits = "".join(c for c in arch if c.isdigit())
    return int(digits) if digits else 0


@dataclass(frozen=True, eq=False)
class AsyncCopy:
    """How the threads of a block copy a tile of an operand from global to shared memory.

    Attributes
    ----------
    fetch : TileFetch
        Where things are; its `lanes` are the elements of one copy.
    load : TensorLoad
        What is copied, over the operand's axes.
    conditions : tuple of expression
        Of the operand itself, such as those of padding: zero where one does not hold.
    rolled : bool
        Whether a thread's copies are a loop for the CUDA compiler, too, where they are many. Unrolled they are quicker,
        but what their addresses have in common for all tiles is kept in registers from one tile to the next.
    """

    fetch: TileFetch
    load: TensorLoad
    conditions: tuple[PrimExpr, ...]
    rolled: bool = False

    @property
    def copy_bytes(self) -> int:
        """Bytes of one copy."""
        return self.fetch.lanes * bits_of(self.fetch.operand.dtype) // 8

    def copies(self, shared: Any, start: PrimExpr | int, thread: PrimExpr, corner: Sequence[PrimExpr]) -> tirx.Stmt:
        """Issue the copies of one tile; what lies outside the tensor becomes zero.

        Parameters
        ----------
        shared : buffer
            Shared memory of the operand's type.
        start : expression
            The element of `shared` at which the tile begins, a multiple of `fetch.lanes`: a stage of the pipeline.
        thread : expression
        corner : sequence of expression
            Batch, own and inner index of the tile.
        """
        fetch = self.fetch

        def turn(index: PrimExpr) -> tirx.Stmt:
            read = fetch.read_of(index, thread, corner)
            mapping = read.mapping(tirx.IntImm("int32", 0))
            source = tirx.address_of(self.load.source[tuple(substitute_axes(i, mapping) for i in self.load.indices)])
            target = tirx.address_of(shared[start + read.place])
            inside = [*read.inside, *(substitute_axes(c, mapping) for c in self.conditions)]
            if inside:
                flag = tirx.Select(all_of(inside), tirx.IntImm("int32", 1), tirx.IntImm("int32", 0))
                copy = _call(f"{COPY_OR_ZERO_FUNCTION}<{self.copy_bytes}>", target, source, flag)
            else:
                copy = _call(f"{COPY_FUNCTION}<{self.copy_bytes}>", target, source)
            return sequence(*read.statements, guarded(read.exists, copy))

        return loop("turn", fetch.turns, turn, "rolled" if self.rolled and fetch.turns > _FEW else "unrolled")


def async_copy(fetch: TileFetch, arch: str) -> AsyncCopy | Refused:
    """The asynchronous copies that bring a tile, or why none can.

    Parameters
    ----------
    fetch : TileFetch
        The tile, as a fetch through registers would bring it; copies are as wide as the tensor lets them, so their
        `lanes` may be others.
    arch : str
        Such as ``"sm_80"``.

    Returns
    -------
    AsyncCopy or Refused
        The reason is that of an older architecture; of an operand that is more than one read of memory and conditions
        under which it is zero, or is in shared memory already; or of elements that lie apart, or too narrow or
        unaligned for 4 bytes.
    """
    if compute_capability(arch) < _FIRST_CAPABILITY:
        return Refused(f"{arch} has no asynchronous copies")
    operand = fetch.operand
    value, conditions = operand.value, []
    while is_branch(value):
        condition, then, other = value.args
        if not (is_constant(other) and float(other.value) == 0.0):
            return Refused("the operand is a choice between values")
        conditions.append(condition)
        value = then
    if not isinstance(value, TensorLoad):
        return Refused("the operand is computed from what is in memory")
    if str(value.source.scope()) not in ("", "global"):
        return Refused("the operand is on chip already")
    if any(buffer_loads(part) for part in (*value.indices, *conditions)):
        return Refused("the operand is read at an index that depends on data")
    if dtype_of(value) != operand.dtype or bits_of(operand.dtype) % 8:
        return Refused("the operand is of another type in memory")
    lanes = _widest(fetch, value, conditions)
    if lanes is None:
        return Refused("neighbours of the operand are not neighbours in memory, or are not aligned to 4 bytes")
    return AsyncCopy(replace(fetch, lanes=lanes, whole_rows=True), value, tuple(conditions))


def _widest(fetch: TileFetch, load: TensorLoad, conditions: Sequence[PrimExpr]) -> int | None:
    """Elements of the widest copy that takes neighbours in memory to neighbours in shared memory, aligned in both."""
    element = bits_of(fetch.operand.dtype) // 8
    group, along = (fetch.inner, fetch.tile[2]) if fetch.along_inner else (fetch.axes, fetch.tile[1])
    axis = group[-1] if group else None
    neighbours = (
        axis is not None
        and fetch.along_inner == fetch.inner_last
        and memory_step(load, axis) == 1
        and not any(has_condition_on(condition, axis) for condition in conditions)
    )
    for nbytes in _SIZES:
        lanes, rest = divmod(nbytes, element)
        if rest or lanes < 1:
            continue
        if lanes == 1:
            return 1
        whole = neighbours and not any(count % lanes for count in (axis.extent, along, fetch.pitch))
        if whole and aligned_lanes(load, axis, lanes) == lanes:
            return lanes
    return None


def commit() -> tirx.Stmt:
    """Close a group of the copies that this thread has issued since the last."""
    return _call(COMMIT_FUNCTION)


def wait(groups: int) -> tirx.Stmt:
    """Wait for this thread's copies, but for those of its `groups` newest groups."""
    return _call(f"{WAIT_FUNCTION}<{groups}>")


def barrier() -> tirx.Stmt:
    """All threads of the block meet."""
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def _call(name: str, *arguments: Any) -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_extern("int32", name, *arguments))
