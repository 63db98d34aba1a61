"""Loads of shared memory in unrolled loops: as nvcc makes them, each word once and neighbours together."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import tirx

from souffle.cost import work_of
from souffle.schedule.lower import DeviceFunction, cuda_target
from souffle.tvm_compat import sequence

THREADS, WARPS = 64, 2
ROWS, DEPTH = 2, 4


class Schedule:
    """In the place of what such a function is lowered from."""


def pointer(name: str) -> tirx.Var:
    return tirx.Var(name, tvm.ir.PointerType(tvm.ir.PrimType("float32"), "global"))


def barrier() -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def products(
    *, rows: int = ROWS, outermost: str = "rows", stored: bool = False, twice: str = ""
) -> DeviceFunction:
    """``total[row] += own[tid * 4 + step] * all[row + 2 * step]``, with both in shared memory.

    Parameters
    ----------
    rows : int
        Of many, the loop over them stays a loop.
    outermost : str
        The loop that is outside, of ``"rows"`` and ``"steps"``.
    stored : bool
        Whether each turn writes what the next may read.
    twice : str
        Where another product of the same words is: ``"in the same turn"``, or ``"behind a barrier"``.
    """
    tile, tid = tirx.Var("tile", "int32"), tirx.Var("tid", "int32")
    source, result = pointer("source_ptr"), pointer("result_ptr")
    x = tirx.decl_buffer((4096,), "float32", "source", data=source, layout=None)
    y = tirx.decl_buffer((4096,), "float32", "result", data=result, layout=None)
    pool = tirx.decl_buffer((4096,), "uint8", name="pool", scope="shared.dyn")
    own = tirx.decl_buffer((256,), "float32", "own", scope="shared", layout=None)
    every = tirx.decl_buffer((16,), "float32", "all", scope="shared", layout=None)
    total = tirx.decl_buffer((ROWS,), "float32", "total", scope="local", layout=None)

    other = tirx.decl_buffer((rows,), "float32", name="other", scope="local", layout=None)

    def loops() -> tirx.Stmt:
        row, step = tirx.Var("row", "int32"), tirx.Var("step", "int32")
        term = own[tid * DEPTH + step] * every[row + rows * step]
        body: tirx.Stmt = tirx.BufferStore(total, total[row] + term, [row])
        if twice == "in the same turn":
            body = sequence(body, tirx.BufferStore(other, other[row] + term, [row]))
        if stored:
            body = sequence(body, tirx.BufferStore(own, total[row], [tid * DEPTH + step]))
        loop = tirx.ForKind.UNROLLED if rows == ROWS else tirx.ForKind.SERIAL
        inner = [(step, DEPTH, tirx.ForKind.UNROLLED), (row, rows, loop)]
        for var, extent, kind in inner if outermost == "rows" else reversed(inner):
            body = tirx.For(var, 0, extent, kind, body)
        return body

    again = [barrier(), loops()] if twice == "behind a barrier" else []
    fill = [tirx.BufferStore(own, x[tid * DEPTH + one], [tid * DEPTH + one]) for one in range(DEPTH)]
    parts = [
        tirx.DeclBuffer(x, data=source),
        tirx.DeclBuffer(y, data=result),
        tirx.AllocBuffer(pool),
        tirx.DeclBuffer(own, data=tirx.address_of(pool[0])),
        tirx.DeclBuffer(every, data=tirx.address_of(pool[1024])),
        tirx.AllocBuffer(total),
        tirx.AllocBuffer(other),
        *fill,
        tirx.IfThenElse(tid < 16, tirx.BufferStore(every, x[tid], [tid]), None),
        *(tirx.BufferStore(one, tirx.FloatImm("float32", 0.0), [row]) for one in (total, other) for row in range(ROWS)),
        barrier(),
        loops(),
        *again,
        *(tirx.BufferStore(y, total[row] + other[row], [tid * ROWS + row]) for row in range(ROWS)),
    ]
    func = tirx.PrimFunc([tile, tid, source, result], sequence(*parts)).with_attr("global_symbol", "stage")
    func = func.with_attr("tirx.noalias", True).with_attr("target", cuda_target("sm_90"))
    return DeviceFunction(func, 4, THREADS, 4096, True, Schedule(), "stage")


OWN, EVERY = WARPS * 32 * 16, WARPS * 32 * 8 * DEPTH
"""Four neighbours of each thread's own, once for both rows; two rows together of what all read, in each step."""


def added(twice: str, **options: Any) -> tuple[float, float]:
    """Bytes of shared memory that the second of two products takes, and instructions but for those of indices."""
    once, both = work_of(products(**options)), work_of(products(twice=twice, **options))
    indices = (both.int32 - once.int32) / 32
    return both.shared_bytes - once.shared_bytes, both.warp_instructions - once.warp_instructions - indices


@pytest.mark.parametrize("outermost", ["rows", "steps"])
def test_a_word_is_read_once_and_neighbours_together(outermost: str) -> None:
    """Whichever loop is inside: it is all one text when they are unrolled."""
    again, free = added("behind a barrier", outermost=outermost), added("in the same turn", outermost=outermost)
    assert again[0] == OWN + EVERY
    # One load of 16 bytes and four of 8, where the second product of a turn has its multiply-adds alone.
    assert free[0] == 0 and again[1] - free[1] == WARPS * (1 + DEPTH)


def test_what_may_have_changed_is_read_again() -> None:
    assert added("behind a barrier", stored=True)[0] == 2 * ROWS * OWN + EVERY


def test_loops_that_stay_read_in_each_turn() -> None:
    """With more turns than nvcc unrolls by itself, a thread's own four words are read anew for each row."""
    assert added("behind a barrier", rows=64)[0] == 64 * OWN + 32 * EVERY
