"""How far sums of products are from exact ones in each precision, the emitted CUDA text on the CPU device.

``python -m benchmarks.product_error [--inner [64 ...]] [--models [bert ...]] [--out FILE.json]``

First products of two matrices, of random numbers of both signs and of positive ones: the largest error against fp64,
divided by the sum of the magnitudes of what is added. Tensor cores are documented to round sums towards zero (Fasi et
al. 2021; Ootomo and Yokota 2022), which the CPU device does not, so the same is calculated here for sums that stay in
them, and for those that are added outside. Then networks of tiny size, against ONNX's reference evaluator in fp64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import souffle
from benchmarks.record import save_results
from souffle import models
from souffle.cli.output import format_table
from souffle.options import PRECISIONS

_ROWS, _COLUMNS = 32, 64

_FRAGMENT = 8
"""Products of TF32 that one instruction adds."""


def truncated(values: np.ndarray) -> np.ndarray:
    """fp64 to fp32, towards zero."""
    near = values.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(values)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near)


def rounded(values: np.ndarray) -> np.ndarray:
    """fp32 to TF32, to nearest."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def modelled(a: np.ndarray, b: np.ndarray, *, outside: bool) -> np.ndarray:
    """Three products of TF32 by tensor cores that truncate: in one sum of theirs, or in sums that are added outside."""
    (a_high, a_low), (b_high, b_low) = ((rounded(x), rounded(x - rounded(x))) for x in (a, b))
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(0, a.shape[1], _FRAGMENT):
        part = np.zeros_like(total) if outside else total
        for left, right in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
            exact = left[:, k : k + _FRAGMENT].astype(np.float64) @ right[k : k + _FRAGMENT].astype(np.float64)
            part = truncated(part.astype(np.float64) + exact)
        total = total + part if outside else part
    return total


def product_model(inner: int) -> onnx.ModelProto:
    """A matrix product."""
    shapes = {"a": (_ROWS, inner), "b": (inner, _COLUMNS), "c": (_ROWS, _COLUMNS)}
    a, b, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", [a, b], [c])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def products(inner: int, network: dict[str, souffle.Network]) -> Iterator[dict]:
    """Errors of one extent, with numbers of both signs and positive ones."""
    generator = np.random.default_rng(inner)
    for kind, draw in (("both signs", generator.standard_normal), ("positive", generator.random)):
        a, b = (draw(shape).astype(np.float32) for shape in ((_ROWS, inner), (inner, _COLUMNS)))
        exact = a.astype(np.float64) @ b.astype(np.float64)
        magnitude = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
        found = {precision: one({"a": a, "b": b})["c"] for precision, one in network.items()}
        found["truncated inside"] = modelled(a, b, outside=False)
        found["truncated, added outside"] = modelled(a, b, outside=True)
        errors = {name: float((np.abs(values - exact) / magnitude).max()) for name, values in found.items()}
        yield {"inner": inner, "numbers": kind, "errors": errors}


def in_fp64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose numbers of 32 bits have 64."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _widen(wide.graph)
    return wide


def _widen(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _widen(attribute.g)
            elif attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def of_network(name: str, arch: str) -> dict:
    """Errors of a tiny network's outputs, divided by the largest magnitude of each."""
    model = models.build(name, "tiny")
    inputs = models.random_inputs(model)
    wide = {key: value.astype(np.float64) if value.dtype == np.float32 else value for key, value in inputs.items()}
    exact = ReferenceEvaluator(in_fp64(model)).run(None, wide)
    names = [output.name for output in model.graph.output]
    errors = {}
    for precision in PRECISIONS:
        network = souffle.compile(model, target="cuda", device="cpu", arch=arch, precision=precision, cubin=False)
        outputs = network(inputs)
        pairs = [(np.asarray(outputs[key]).astype(np.float64), one) for key, one in zip(names, exact, strict=True)]
        errors[precision] = max(float(np.abs(own - one).max() / (np.abs(one).max() or 1.0)) for own, one in pairs)
    return {"model": name, "errors": errors}


def main() -> int:
    """Compile, run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", nargs="*", type=int, default=[64, 768, 3072, 12288])
    parser.add_argument("--models", nargs="*", default=list(models.NAMES))
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    results = []
    for inner in arguments.inner:
        model = product_model(inner)
        options = {"target": "cuda", "device": "cpu", "arch": arguments.arch, "cubin": False}
        network = {precision: souffle.compile(model, precision=precision, **options) for precision in PRECISIONS}
        results += products(inner, network)
    first = [one for one in results if "inner" in one]
    _print(("products", "numbers"), [((one["inner"], one["numbers"]), one["errors"]) for one in first])
    for name in arguments.models:
        print(f"running {name}", file=sys.stderr)
        results.append(of_network(name, arguments.arch))
    _print(("model",), [((one["model"],), one["errors"]) for one in results if "model" in one])
    if arguments.out:
        save_results(arguments.out, "benchmarks.product_error", results)
    return 0


def _print(named: tuple[str, ...], rows: list[tuple[tuple, dict[str, float]]]) -> None:
    if rows:
        print(
            format_table(
                (*named, *rows[0][1]), [(*name, *(f"{e:.1e}" for e in errors.values())) for name, errors in rows]
            )
        )


if __name__ == "__main__":
    raise SystemExit(main())
