"""Copies of tiles whose rows are no power of two of copies: each element comes once, those of a thread evenly apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tvm import tirx

from souffle.schedule.gpu.emit.async_copy import AsyncCopy, async_copy
from souffle.schedule.gpu.emit.staging import choose_fetch
from souffle.schedule.gpu.forms.matrix_product import canonical_contraction
from souffle.tvm_compat import Analyzer, primfunc_from_tensors, substitute
from tests.schedule.matrix_products import gemm


def copy_of(columns: int, step: int, threads: int, factor: str = "float16") -> AsyncCopy:
    """The copies of a right operand's tiles of `step` inner elements and `columns` columns, contiguous in memory."""
    inputs, result = gemm(64, 4 * columns, 4 * step, types=(factor, factor), factors=factor)
    problem = canonical_contraction(primfunc_from_tensors((*inputs, result), "stage"))
    fetch = choose_fetch(problem, "right", (1, columns, step), threads, None, lambda _: 8)
    found = async_copy(fetch, "sm_80")
    assert isinstance(found, AsyncCopy)
    return found


def places(copy: AsyncCopy, threads: int) -> np.ndarray:
    """Where the copies of each turn and thread go in shared memory; -1 where there is none."""
    fetch, analyzer = copy.fetch, Analyzer()
    turn, thread, zero = tirx.Var("turn", "int32"), tirx.Var("thread", "int32"), tirx.IntImm("int32", 0)
    read = fetch.read_of(turn, thread, (zero, zero, zero))
    named = {bind.var: bind.value for bind in read.statements}

    def value(expression: object, n: int, t: int) -> int:
        for _ in range(len(named) + 1):
            expression = substitute(expression, named)
        known = {turn: tirx.IntImm("int32", n), thread: tirx.IntImm("int32", t)}
        return int(analyzer.simplify(substitute(expression, known)))

    found = np.full((fetch.turns, threads), -1)
    for n in range(fetch.turns):
        for t in range(threads):
            if all(value(condition, n, t) for condition in read.exists):
                found[n, t] = value(read.place, n, t)
    return found


@pytest.mark.parametrize("columns", [24, 40, 48, 56, 80, 96, 112, 160, 192, 224])
@pytest.mark.parametrize("threads", [64, 128])
def test_each_element_comes_once(columns: int, threads: int) -> None:
    copy = copy_of(columns, 64, threads)
    fetch = copy.fetch
    assert fetch.lanes == 8
    found = places(copy, threads)
    expected = [row * fetch.pitch + at for row in range(64) for at in range(0, columns, 8)]
    assert sorted(found[found >= 0].tolist()) == sorted(expected)


@pytest.mark.parametrize("columns", [48, 96, 112, 160, 192])
def test_copies_of_a_thread_are_evenly_apart(columns: int) -> None:
    found = places(copy_of(columns, 64, 128), 128)
    used = found[:, found[0] >= 0]
    assert used.shape[1] >= 128 * 5 // 8 and (used >= 0).all()
    assert len(np.unique(np.diff(used, axis=0))) == 1
    # A warp has whole rows.
    pitch = columns + 8
    for warp in found[0].reshape(-1, 32):
        assert len(warp[warp >= 0]) % (columns // 8) == 0
        assert set((warp[warp >= 0] % pitch).tolist()) == set(range(0, columns, 8))


def test_what_passes_through_registers_holds_no_more_for_it() -> None:
    copied = copy_of(96, 64, 128).fetch
    assert replace(copied, whole_rows=False).turns == 64 * 12 // 128 < copied.turns
