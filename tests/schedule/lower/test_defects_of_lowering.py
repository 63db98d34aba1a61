"""Defects of TVM that lowering a stage works around: each shows without its workaround, and not with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx

import souffle
from souffle.errors import CertificateError, CudaCompileError
from souffle.program import TEProgram
from souffle.schedule.lower import device_function as lower
from souffle.schedule.lower.thread_sync import synchronized
from souffle.schedule.lower.tvm_defects import paired_conditions
from souffle.schedule.stage import Stage
from souffle.tvm_compat import collect
from tests.defects import fails_without, mended
from tests.testlib import Builder

BoundSchedule = Callable[[s_tir.Schedule], None]


def unchanged(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """In a workaround's place."""
    return function


def compiled(program: TEProgram, bind: BoundSchedule) -> souffle.Network:
    """The network whose one stage has the schedule that `bind` makes of it."""

    def scheduled(stage: Stage) -> Stage:
        schedule = s_tir.Schedule(stage.draft.func)
        bind(schedule)
        return replace(stage, schedule=replace(stage.schedule, func=schedule.mod["main"]))

    def hook(name: str, result: tuple) -> tuple:
        return tuple(map(scheduled, result)) if name == "schedule" else result

    return souffle.compile(program, hook=hook, target="cuda", level="V0", device="cpu", cubin=False)


def loops_of(schedule: s_tir.Schedule) -> list:
    (block,) = schedule.get_child_blocks(schedule.get_sblock("root"))
    return schedule.get_loops(block)


def row_sums(rows: int, columns: int) -> TEProgram:
    b = Builder()
    return b.program(b.reduce(b.input(rows, columns), 1))


def across_threads(rows: int, threads: int) -> BoundSchedule:
    """So many rows of a tile, each by so many threads."""

    def bind(schedule: s_tir.Schedule) -> None:
        row, column = loops_of(schedule)
        tile, row = schedule.split(row, [None, rows])
        _, thread = schedule.split(column, [None, threads])
        schedule.bind(tile, "blockIdx.x")
        schedule.bind(row, "threadIdx.y")
        schedule.bind(thread, "threadIdx.x")

    return bind


def check_row_sums(rows: int, columns: int, bind: BoundSchedule) -> None:
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    (sums,) = compiled(row_sums(rows, columns), bind).on("cpu", checked=True)(x).values()
    np.testing.assert_allclose(sums, x.sum(1), rtol=1e-4, atol=1e-5)


def test_a_lone_condition_is_not_carried_over_to_the_write_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows in tiles of four: the threads of three rows that are none write beyond the result."""
    check_row_sums(5, 64, across_threads(4, 32))
    monkeypatch.setattr(lower, "paired_conditions", unchanged)
    with fails_without("paired_conditions in lower/tvm_defects.py", CertificateError, match="out of bounds"):
        compiled(row_sums(5, 64), across_threads(4, 32))


def test_lanes_shuffle_what_they_have_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight warps: the lanes from the eighth on have no warp's sum to hand on, and do."""
    check_row_sums(2, 512, across_threads(1, 256))
    monkeypatch.setattr(lower, "with_written_values", unchanged)
    with fails_without("lower/shuffled_values.py", CertificateError, match="has not written before"):
        compiled(row_sums(2, 512), across_threads(1, 256))


def test_shuffles_name_the_lanes_that_happen_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def text() -> str:
        return "".join(module.text for module in compiled(row_sums(2, 64), across_threads(1, 32)).plan.modules)

    assert "__activemask()" not in text()
    monkeypatch.setattr(lower, "with_full_masks", lambda body, tid, threads: body)
    assert "__activemask()" in text(), mended("lower/shuffle_masks.py")


def test_barriers_of_a_warp_have_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 threads of a row are no whole warps: TVM reduces them in shared memory, with barriers of warps in between."""
    check_row_sums(4, 96, across_threads(1, 48))
    monkeypatch.setattr(lower, "with_whole_warps", lambda name, body, tid, threads: body)
    with fails_without("with_whole_warps in lower/uniform_barriers.py", CertificateError, match="race in a block"):
        compiled(row_sums(4, 96), across_threads(1, 48))


def in_vectors(lanes: int) -> BoundSchedule:
    def bind(schedule: s_tir.Schedule) -> None:
        (loop,) = loops_of(schedule)
        tile, thread, lane = schedule.split(loop, [None, 4, lanes])
        schedule.bind(tile, "blockIdx.x")
        schedule.bind(thread, "threadIdx.x")
        schedule.vectorize(lane)

    return bind


def elementwise(dtype: str, element: Callable[[te.Tensor, tirx.Var], object]) -> TEProgram:
    """64 elements, each made of some of 128."""
    b = Builder()
    return b.program(b.add(lambda x: te.compute((64,), lambda i: element(x, i)), b.input(128, dtype=dtype)))


def every_other(x: te.Tensor, i: tirx.Var) -> object:
    return x[i * 2]


def third_lanes(x: te.Tensor, i: tirx.Var) -> object:
    return tirx.Select(i % 3 < 1, x[i], tirx.const(False, "bool"))


TRUTHS = np.random.default_rng(0).random(128) < 0.5


@pytest.mark.parametrize(
    ("element", "wanted", "workaround"),
    [
        (every_other, TRUTHS[::2], "without_gathers and has_vector_gather in lower/tvm_defects.py"),
        (
            third_lanes,
            TRUTHS[:64] & (np.arange(64) % 3 < 1),
            "has_vector_select in lower/printed_conditions.py, and what without_gathers asks of Select",
        ),
    ],
)
def test_lanes_of_truth_values_are_mixed_up(
    element: Callable, wanted: np.ndarray, workaround: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def right() -> bool:
        (result,) = compiled(elementwise("bool", element), in_vectors(4))(TRUTHS).values()
        return np.array_equal(result, wanted)

    assert right()
    monkeypatch.setattr(lower, "without_gathers", unchanged)
    monkeypatch.setattr(lower, "_UNWRITTEN", ())
    assert not right(), mended(workaround)


def test_eight_halves_that_lie_apart_are_no_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight elements the text has ``make_uint4`` with eight arguments."""
    x = np.arange(128, dtype=np.float16)
    (result,) = compiled(elementwise("float16", every_other), in_vectors(8))(x).values()
    np.testing.assert_array_equal(result, x[::2])
    monkeypatch.setattr(lower, "without_gathers", unchanged)
    monkeypatch.setattr(lower, "_UNWRITTEN", ())
    with fails_without("without_gathers and has_vector_gather in lower/tvm_defects.py", CudaCompileError):
        compiled(elementwise("float16", every_other), in_vectors(8))(x)


def test_long_vectors_have_no_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_number(x: te.Tensor, i: tirx.Var) -> object:
        return x[i] + tirx.const(1, "int64")

    x = np.arange(128)
    (result,) = compiled(elementwise("int64", next_number), in_vectors(8))(x).values()
    np.testing.assert_array_equal(result, x[:64] + 1)
    monkeypatch.setattr(lower, "_UNWRITTEN", ())
    with fails_without("has_vector_without_type in lower/tvm_defects.py", tvm.error.InternalError, match="type_name"):
        compiled(elementwise("int64", next_number), in_vectors(8))


X = tirx.decl_buffer((64,), "float32", name="x")
S = tirx.decl_buffer((64,), "float32", name="s", scope="shared")
H = tirx.decl_buffer((128,), "float16", name="h", data=S.data, scope="shared")
TX, TY = tirx.Var("tx", "int32"), tirx.Var("ty", "int32")
HALF = tirx.truncdiv(TX, 2)


@pytest.mark.parametrize(
    ("axes", "write", "read"),
    [
        pytest.param(
            [("threadIdx.x", TX, 32), ("threadIdx.y", TY, 2)],
            tirx.IfThenElse(TY < 1, tirx.BufferStore(S, X[TX], [TX]), None),
            tirx.BufferStore(X, S[TX], [TY * 32 + TX]),
            id="one row of threads writes, all read",
        ),
        pytest.param(
            [("threadIdx.x", TX, 32)],
            tirx.IfThenElse(tirx.truncmod(TX, 2) < 1, tirx.BufferStore(S, X[HALF], [HALF]), None),
            tirx.BufferStore(X, S[HALF], [TX]),
            id="one of two threads writes, both read",
        ),
        pytest.param(
            [("threadIdx.x", TX, 32)],
            tirx.BufferStore(S, X[TX], [TX]),
            tirx.BufferStore(X, tirx.Cast("float32", H[TX]), [TX]),
            id="elements of two sizes in one memory",
        ),
    ],
)
def test_a_barrier_is_left_out(axes: list, write: tirx.Stmt, read: tirx.Stmt) -> None:
    body = tirx.SeqStmt([tirx.AllocBuffer(S), tirx.DeclBuffer(H, data=S.data), write, read])
    module = tvm.IRModule({"main": tirx.PrimFunc([X], launched(axes, body))})
    barriers = s_tir.transform.ThreadSync("shared")
    assert count(synchronized(module, barriers)) == 1
    assert count(barriers(module)) == 0, mended("lower/thread_sync.py")


def launched(axes: list, body: tirx.Stmt) -> tirx.Stmt:
    """A statement for each thread of some axes, the innermost first."""
    for tag, var, extent in axes:
        axis = tirx.IterVar((0, extent), var, tirx.IterVar.ThreadIndex, tag)
        body = tirx.AttrStmt(axis, "thread_extent", tirx.IntImm("int32", extent), body)
    return body


def count(lowered: tvm.IRModule) -> int:
    """Block barriers."""
    calls = collect(lowered["main"].body, tvm.ir.Call)
    return sum(getattr(call.op, "name", "") == "tirx.tvm_storage_sync" for call in calls)


def test_each_nest_has_an_innermost_axis_of_its_own() -> None:
    """A function of two root-level nests, whose threads have different orders."""
    first = launched([("threadIdx.y", TY, 2), ("threadIdx.x", TX, 32)], tirx.BufferStore(X, X[TX] + X[TY], [TX]))
    tx, ty = tirx.Var("tx", "int32"), tirx.Var("ty", "int32")
    write = tirx.IfThenElse(ty < 1, tirx.BufferStore(S, X[tx], [tx]), None)
    body = tirx.SeqStmt([tirx.AllocBuffer(S), write, tirx.BufferStore(X, S[tx], [ty * 32 + tx])])
    second = launched([("threadIdx.x", tx, 32), ("threadIdx.y", ty, 2)], body)
    barriers = s_tir.transform.ThreadSync("shared")
    for nests in ([first, second], [second, first]):
        module = tvm.IRModule({"main": tirx.PrimFunc([X], tirx.SeqStmt(nests))})
        assert count(synchronized(module, barriers)) == 1


def test_only_conjunctions_are_carried_over() -> None:
    """The same of one pass: the write-back of a row names the row's condition where that is an ``And``."""
    x, column = te.placeholder((5, 64), name="x"), te.reduce_axis((0, 64), name="k")
    total = te.compute((5,), lambda i: te.sum(x[i, column], axis=column), name="total")
    schedule = s_tir.Schedule(te.create_prim_func([x, total]))
    across_threads(4, 32)(schedule)

    def write_back(function: tirx.PrimFunc) -> str:
        lowered = s_tir.transform.LowerCrossThreadReduction()(tvm.IRModule({"main": function}))["main"]
        realized = collect(lowered.body, s_tir.SBlockRealize)
        return next(str(node.predicate) for node in realized if "write_back" in node.block.name_hint)

    assert "< 5" in write_back(paired_conditions(schedule.mod["main"]))
    assert "< 5" not in write_back(schedule.mod["main"]), mended("paired_conditions in lower/tvm_defects.py")
