"""``python -m souffle.doctor_trial TARGET``: whether a small network can be compiled and computes what it is to.

Of a process of its own, whose end says something too.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.errors import SouffleError
from souffle.garbage import collect_rarely
from souffle.runtime.comparison import compare, random_inputs

__all__ = ["main"]


def main(target: str) -> int:
    """Print an object of JSON: ``ok``, and ``said`` in words."""
    collect_rarely()
    rows, inner, columns = 8, 16, 8
    weight = np.random.default_rng(0).standard_normal((inner, columns)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Softmax", ["product"], ["y"], axis=-1)],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, columns])],
        [numpy_helper.from_array(weight, "w")],
    )
    begin = time.perf_counter()
    try:
        program = souffle.import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
        network = souffle.compile(program, target=target)
        inputs = random_inputs(network.signature.inputs)
        outputs = {name: np.asarray(value) for name, value in network(inputs).items()}
        found = compare(outputs, program.run(inputs), "fp32")
    except SouffleError as error:
        return _say(False, f"a small network cannot be compiled and run: {type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    if not found.ok:
        return _say(False, f"a small network was compiled, and its outputs are wrong, off by {found.error:.1e}")
    return _say(True, f"a small network was compiled and run in {seconds:.1f} s, and its outputs are right")


def _say(ok: bool, said: str) -> int:
    sys.stdout.write(json.dumps({"ok": ok, "said": said}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
