"""Threads that compile at the same time: isl's one context, with its one limit, answers one of them at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import onnx
import pytest
from onnx import TensorProto, helper
from tvm import te

import souffle
from souffle import transform
from souffle.alone import one_at_a_time
from souffle.index import isl
from souffle.pipeline import compile_cuda, compile_host, independent_stages_of, stages_of
from tests.testlib import in_threads


@pytest.mark.usefixtures("threads_that_take_turns")
def test_a_limit_that_one_thread_meets_is_no_error_of_another() -> None:
    """One has a question that it gives up, the others' are short: without turns they fail hundreds of times."""
    # Points of three variables of which each is tied to the others by remainders.
    tied = "exists e, f, g: 3e + 5f = a + b and 7e - 2f <= c and 11g = a + c - d and 0 <= a, b, c, d < 1000"
    given_up: list[bool] = []

    @one_at_a_time
    def long() -> None:
        hard = isl.Set(f"{{ [a, b, c, d]: {tied} }}")
        given_up.append(isl.within_budget(lambda: hard.complement().coalesce().lexmin().is_empty(), 3000) is None)

    @one_at_a_time
    def short() -> None:
        points = isl.box([(0, 10)])
        assert not points.intersect(points).is_empty()
        assert isl.within_budget(lambda: points.lexmin().is_empty()) is False

    def again(once: Callable[[], None], times: int) -> Callable[[], None]:
        return lambda: [once() for _ in range(times)]

    assert not in_threads([again(long, 8), again(short, 2000), again(short, 2000)])
    assert given_up == [True] * 8


def _model() -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, 4)) for name in "xy"]
    nodes = [helper.make_node("MatMul", ["x", "x"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _by_hand() -> souffle.TEProgram:
    x = te.placeholder((4, 4), name="x")
    return souffle.from_te([x], [te.compute((4, 4), lambda i, j: x[j, i], name="y")])


_ENTRIES: dict[str, Callable[[souffle.TEProgram], object]] = {
    "import_onnx": lambda program: souffle.import_onnx(_model()),
    "from_te": lambda program: _by_hand(),
    "analyze": souffle.analyze,
    **{
        name: getattr(transform, name)
        for name in ("absorb_ramps", "horizontal", "masks_by_index", "mixed_precision", "narrow", "roll", "vertical")
    },
    "tensor_float": lambda program: transform.tensor_float(program, "tf32"),
    "spread_reads": transform.spread_reads,
    "stages_of": stages_of,
    "independent_stages_of": independent_stages_of,
    "compile_cuda": lambda program: compile_cuda(program, cubin=False),
    "compile_host": compile_host,
}


@pytest.mark.parametrize("name", _ENTRIES)
def test_what_asks_isl_waits_for_its_turn(name: str) -> None:
    program = souffle.import_onnx(_model())
    begins, done = threading.Event(), threading.Event()

    def work() -> None:
        begins.set()
        _ENTRIES[name](program)
        done.set()

    thread = threading.Thread(target=work)

    @one_at_a_time
    def busy() -> bool:
        thread.start()
        begins.wait()
        return done.wait(0.2)

    assert not busy(), "it did not wait"
    thread.join()
    assert done.is_set()


def test_a_child_of_a_process_has_its_own_turn() -> None:
    """What another thread of its parent held is nobody's there."""
    inside, leave = threading.Event(), threading.Event()

    @one_at_a_time
    def hold() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    try:
        child = os.fork()
        if child == 0:
            os._exit(one_at_a_time(lambda: 7)())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        leave.set()
        thread.join()
