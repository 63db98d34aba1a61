"""Models that several threads import at the same time: each is what it is alone."""

from __future__ import annotations

import threading

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import souffle


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
