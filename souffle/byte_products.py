"""Models whose products of bytes ONNX Runtime sums exactly on every processor.

Where a processor has no instruction that adds four products of bytes in a word (AVX-512 VNNI, AVX VNNI, or Arm's dot
products), ONNX Runtime adds two products of a byte without a sign and one with it in 16 bits, and cuts off what these
do not hold. Products of two bytes without signs it adds exactly. So the operand with the sign gets 128 more, and so
does its zero point, which changes no result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

__all__ = ["multiplies_bytes", "with_exact_sums"]

_MICROSOFT = "com.microsoft"
_OPERANDS: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("", "ConvInteger"): ((0, 2), (1, 3)),
    ("", "MatMulInteger"): ((0, 2), (1, 3)),
    ("", "QLinearConv"): ((0, 2), (3, 5)),
    ("", "QLinearMatMul"): ((0, 2), (3, 5)),
    (_MICROSOFT, "DynamicQuantizeMatMul"): ((1, 3),),
    (_MICROSOFT, "MatMulIntegerToFloat"): ((0, 4), (1, 5)),
    (_MICROSOFT, "QAttention"): ((0, 6), (1, 7)),
    (_MICROSOFT, "QGemm"): ((0, 2), (3, 5)),
}
"""Of operators that multiply bytes, the places of the operands and of their zero points. Those of one operand make
bytes without signs of the other."""

_SHIFT = 128


def multiplies_bytes(model: onnx.ModelProto) -> bool:
    """Whether a model has operators that multiply bytes at all."""
    return any((node.domain, node.op_type) in _OPERANDS for node in model.graph.node)


def with_exact_sums(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model that multiplies no byte with a sign by one without, as far as types are known.

    Parameters
    ----------
    model : ModelProto
        What is inside the bodies of loops and branches stays as it is.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    _Rewriter(made).run()
    return made


class _Rewriter:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.types = _types_of(model)
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.shifted: dict[str, str] = {}
        self.nodes: list[onnx.NodeProto] = []

    def run(self) -> None:
        for node in list(self.graph.node):
            operands = _OPERANDS.get((node.domain, node.op_type), ())
            if operands:
                self._rewrite(node, operands)
            self.nodes.append(node)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)

    def _rewrite(self, node: onnx.NodeProto, operands: tuple[tuple[int, int], ...]) -> None:
        kinds = [self.types.get(_input(node, place)) for place, _ in operands]
        others = kinds if len(kinds) > 1 else [*kinds, TensorProto.UINT8]
        if set(others) != {TensorProto.UINT8, TensorProto.INT8}:
            return
        for (place, zero), kind in zip(operands, kinds, strict=True):
            if kind == TensorProto.INT8:
                node.input.extend([""] * (zero + 1 - len(node.input)))
                node.input[place] = self._moved(node.input[place])
                node.input[zero] = self._moved(node.input[zero]) if node.input[zero] else self._zero()

    def _zero(self) -> str:
        """The zero point of an operand that had none."""
        name = "souffle_zero_of_shifted_bytes"
        if name not in self.constants:
            self._add_constant(name, np.array(_SHIFT, np.uint8))
        return name

    def _add_constant(self, name: str, value: np.ndarray) -> None:
        self.graph.initializer.append(numpy_helper.from_array(value, name))
        self.constants[name] = self.graph.initializer[-1]

    def _moved(self, name: str) -> str:
        """A byte with a sign as one without it, 128 greater."""
        if name not in self.shifted:
            made = f"{name}_souffle_shifted"
            self.shifted[name] = made
            if name in self.constants:
                array = numpy_helper.to_array(self.constants[name]).astype(np.int16) + _SHIFT
                self._add_constant(made, array.astype(np.uint8))
            else:
                self._add_constant(f"{made}_by", np.array(_SHIFT, np.int32))
                wide, sum_ = f"{made}_wide", f"{made}_sum"
                self.nodes += [
                    helper.make_node("Cast", [name], [wide], to=TensorProto.INT32),
                    helper.make_node("Add", [wide, f"{made}_by"], [sum_]),
                    helper.make_node("Cast", [sum_], [made], to=TensorProto.UINT8),
                ]
        return self.shifted[name]


def _input(node: onnx.NodeProto, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""


def _types_of(model: onnx.ModelProto) -> dict[str, int]:
    """The element types that are known; operators of other domains say nothing of theirs."""
    inferred = model
    # Of a model beyond 2 GB nothing is inferred: what it says of itself is left.
    with contextlib.suppress(ValueError, RuntimeError):
        inferred = shape_inference.infer_shapes(model)
    graph = inferred.graph
    known = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.input, *graph.output)}
    return known | {tensor.name: tensor.data_type for tensor in graph.initializer}
