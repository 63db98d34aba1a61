"""Models that several threads import at the same time: each is what it is alone."""

from __future__ import annotations

import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

import souffle
from tests.defects import mended


def _model(width: int) -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.ones((width, width), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Softmax", ["m"], ["s"]),
        helper.make_node("Add", ["s", "x"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3, width)) for name in "xy"]
    graph = helper.make_graph(nodes, f"g{width}", ends[:1], ends[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_threads_import_models_at_the_same_time() -> None:
    models = [_model(width) for width in range(2, 6)]
    alone = [str(souffle.import_onnx(model)) for model in models]
    found: list[tuple[int, str]] = []
    start = threading.Barrier(len(models))

    def work(number: int) -> None:
        start.wait()
        for _ in range(8):
            found.append((number, str(souffle.import_onnx(models[number]))))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted((number, text) for number, text in enumerate(alone) for _ in range(8))


def test_builders_of_relax_are_on_one_stack_for_all_threads() -> None:
    inside, left = threading.Event(), threading.Event()

    def work() -> None:
        builder = relax.BlockBuilder()
        with builder.function("second", []):
            inside.set()
            left.wait(60)
            builder.emit_func_output(relax.const(1.0))

    def build() -> None:
        builder = relax.BlockBuilder()
        with builder.function("first", []):
            thread.start()
            inside.wait(60)
            builder.emit_func_output(relax.const(1.0))

    thread = threading.Thread(target=work)
    stack = list(relax.BlockBuilder._stack)
    try:
        with pytest.raises(AssertionError):
            build()
    except pytest.fail.Exception:
        pytest.fail(mended("the lock of souffle/frontend/onnx_import.py"))
    finally:
        left.set()
        thread.join()
        relax.BlockBuilder._stack[:] = stack
