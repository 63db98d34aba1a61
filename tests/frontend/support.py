"""Small ONNX graphs, and their comparison with ONNX Runtime."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference.ops import _op_list, op_pool_common

from souffle.byte_products import with_exact_sums
from souffle.frontend import import_onnx
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.reference import sums_are_exact

__all__ = ["assert_same", "collecting", "compare", "model_of", "node_model", "random_inputs", "reference"]

# These have the function that is replaced below.
assert _op_list


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """While ONNX's cases are collected: without warnings, and without the results of large poolings.

    These take two thirds of the time, and no test asks for them: who did would find no numbers.
    """
    whole = op_pool_common.pool

    def small(padded: np.ndarray, given: Sequence[int], kernel: Any, strides: Any, out: Sequence[int], *more, **named):
        shape = [*given[:2], *out]
        if math.prod(shape) > 1000:
            return np.full(shape, np.nan, padded.dtype)
        return whole(padded, given, kernel, strides, out, *more, **named)

    with warnings.catch_warnings(), np.errstate(all="ignore"), mock.patch.object(op_pool_common, "pool", small):
        warnings.simplefilter("ignore")
        yield


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[str, Sequence[Any]]],
    outputs: Sequence[str],
    constants: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """A model of these nodes; inputs are (element type, shape)."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=opsets, functions=list(functions))
    model.ir_version = 10
    return onnx.shape_inference.infer_shapes(model)


def node_model(
    operator: str,
    inputs: Sequence[tuple[str, Sequence[int]] | np.ndarray | None],
    *,
    outputs: int = 1,
    opset: int = 17,
    domain: str = "",
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node; arrays among the inputs are constants, ``None`` is an absent input."""
    names = ["" if value is None else f"x{k}" for k, value in enumerate(inputs)]
    results = [f"y{k}" for k in range(outputs)]
    node = helper.make_node(operator, names, results, name=f"the_{operator}", domain=domain, **attributes)
    given = {name: value for name, value in zip(names, inputs, strict=True) if isinstance(value, tuple)}
    known = {name: value for name, value in zip(names, inputs, strict=True) if isinstance(value, np.ndarray)}
    return model_of([node], given, results, known, opset=opset, domains=[domain] if domain else [])


def random_inputs(program: TEProgram, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of the program's shapes and types; integers are small and not negative."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, tensor in zip(program.input_names, program.inputs, strict=True):
        if tensor.dtype.startswith("float"):
            values[name] = rng.standard_normal(tensor.shape).astype(tensor.dtype)
        elif tensor.dtype == "bool":
            values[name] = rng.integers(0, 2, tensor.shape).astype(bool)
        else:
            values[name] = rng.integers(0, 3, tensor.shape).astype(tensor.dtype)
    return values


def reference(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs by ONNX Runtime, without its graph optimizations."""
    if not sums_are_exact():
        model = with_exact_sums(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(inputs)), strict=True))


def assert_same(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], rtol: float = 1e-4) -> None:
    """Same names, shapes and types, and values within `rtol` of the output's largest magnitude."""
    assert list(got) == list(want)
    for name, expected in want.items():
        actual = got[name]
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
        if expected.dtype == bool or expected.size == 0:
            np.testing.assert_array_equal(actual, expected, err_msg=name)
            continue
        finite = expected[np.isfinite(expected.astype("float64"))].astype("float64")
        scale = max(float(np.abs(finite).max()) if finite.size else 1.0, 1e-3)
        np.testing.assert_allclose(
            actual.astype("float64"), expected.astype("float64"), rtol=rtol, atol=rtol * scale, err_msg=name
        )


def compare(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray] | None = None, *, rtol: float = 1e-4) -> TEProgram:
    """Import a model, run it, and compare with ONNX Runtime."""
    program = import_onnx(model)
    given = random_inputs(program) if inputs is None else dict(inputs)
    assert_same(evaluate(program, given), reference(model, given), rtol)
    return program
