"""An ONNX graph as a PyTorch module, for peers: the operators of the paper's models and of others that are timed.

Needs the onnx package, and PyTorch for :func:`to_torch`; nothing else, so that it works on a GPU host.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from souffle.benchmark.onnx_fusions import Node, OnnxGraph, read_nodes

try:
    import torch
except ImportError:
    torch = None

__all__ = ["to_torch", "unknown_operators"]

_IFGO = (0, 2, 3, 1)
"""PyTorch's order of an LSTM's gates, in numbers of ONNX's order: input, output, forget, cell."""


def unknown_operators(graph: OnnxGraph) -> list[str]:
    """Operators that :func:`to_torch` does not know, in alphabetical order."""
    return sorted({node.operator for node in graph.nodes} - set(_OPERATORS))


def to_torch(model: onnx.ModelProto, device: str) -> Any:
    """A ``torch.fx.GraphModule`` that computes a model.

    It is traced, so that neither an interpreter nor what depends on constants alone takes time in a call. Its arguments
    are the model's inputs in the model's order, its result the tuple of the outputs.

    Parameters
    ----------
    model
        fp32, opset 13 or later, static shapes.
    device
        Where its weights are: ``"cuda"`` or ``"cpu"``.

    Raises
    ------
    ValueError
        If an operator, or the way in which it is used, is not translated.
    """
    graph = read_nodes(model)
    if unknown := unknown_operators(graph):
        raise ValueError(f"no PyTorch function is known here for the operators {', '.join(unknown)}")
    if torch is None:
        raise ValueError("PyTorch is not installed")
    translation = _Translation(graph, device)
    for node in graph.nodes:
        found = _OPERATORS[node.operator](_Call(node, translation))
        translation.values.update(zip(node.outputs, found if isinstance(found, list) else [found], strict=False))
    translation.graph.output(tuple(translation.tensor(name) for name in graph.outputs))
    module = torch.fx.GraphModule(translation.root, translation.graph)
    module.graph.lint()
    return module.eval()


class _Translation:
    """The traced graph as it grows."""

    def __init__(self, graph: OnnxGraph, device: str) -> None:
        self.graph, self.root, self.device = torch.fx.Graph(), torch.nn.Module(), device
        self.constants = graph.constants
        self.values = {name: self.graph.placeholder(f"input_{i}") for i, name in enumerate(graph.inputs)}

    def tensor(self, name: str) -> Any:
        """A value as a node of the traced graph."""
        if name not in self.values:
            self.values[name] = self.buffer(torch.from_numpy(np.array(self.constants[name])).to(self.device))
        return self.values[name]

    def buffer(self, tensor: Any) -> Any:
        """A tensor that the module holds."""
        name = f"buffer_{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, tensor)
        return self.graph.get_attr(name)


class _Call:
    """One node to be translated."""

    def __init__(self, node: Node, translation: _Translation) -> None:
        self.node, self.to = node, translation

    def __len__(self) -> int:
        return sum(map(bool, self.node.inputs))

    def tensor(self, number: int) -> Any:
        """An input, or None where it is left out."""
        inputs = self.node.inputs
        return self.to.tensor(inputs[number]) if number < len(inputs) and inputs[number] else None

    def operand(self, number: int) -> Any:
        """An input, or a number where it is one that is known: PyTorch's users write it so."""
        array = self.to.constants.get(self.node.inputs[number])
        return float(array) if array is not None and array.ndim == 0 else self.tensor(number)

    def array(self, number: int) -> np.ndarray | None:
        """A constant input, or None where it is left out.

        Raises
        ------
        ValueError
            If it is not known before the run.
        """
        inputs = self.node.inputs
        if number >= len(inputs) or not inputs[number]:
            return None
        if inputs[number] not in self.to.constants:
            raise ValueError(f"{self.node}: input {number} must be a constant")
        return self.to.constants[inputs[number]]

    def integers(self, number: int) -> list[int]:
        """A constant input of integers."""
        array = self.array(number)
        self.need(array is not None, f"input {number} must be there")
        return [int(value) for value in np.atleast_1d(array)]

    def bound(self, number: int) -> float | None:
        """A constant input of one number, or None where it is left out."""
        array = self.array(number)
        return None if array is None else float(array)

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute as the node has it."""
        return self.node.attributes.get(name, default)

    def need(self, holds: bool, what: str) -> None:
        """Refuse what is not translated."""
        if not holds:
            raise ValueError(f"{self.node}: {what}")

    def __call__(self, function: Any, *arguments: Any, **named: Any) -> Any:
        return self.to.graph.call_function(function, arguments, named)


# operators


def _unary(name: str) -> Callable[[_Call], Any]:
    return lambda call: call(getattr(torch, name), call.tensor(0))


def _binary(name: str) -> Callable[[_Call], Any]:
    return lambda call: call(getattr(operator, name), call.operand(0), call.operand(1))


def _activation(name: str) -> Callable[[_Call], Any]:
    return lambda call: call(getattr(torch.nn.functional, name), call.tensor(0))


def _linear(call: _Call) -> Any:
    return call(torch.nn.functional.linear, *map(call.tensor, range(3)))


def _gemm(call: _Call) -> Any:
    call.need(call.attribute("alpha", 1.0) == call.attribute("beta", 1.0) == 1.0, "alpha and beta must be 1")
    call.need(not call.attribute("transA", 0), "transA is not translated")
    weight = call.tensor(1) if call.attribute("transB", 0) else call(torch.t, call.tensor(1))
    return call(torch.nn.functional.linear, call.tensor(0), weight, call.tensor(2))


def _matmul(call: _Call) -> Any:
    return call(torch.matmul, call.tensor(0), call.tensor(1))


def _pads(call: _Call) -> tuple[Any, list[int]]:
    """The first input, and the padding on both sides of each axis; a window's attributes are checked on the way."""
    call.need(call.attribute("auto_pad", b"NOTSET") == b"NOTSET", "auto_pad is not translated")
    pads = list(call.attribute("pads", [0] * 4))
    call.need(len(pads) == 4, "two axes are translated")
    call.need(pads[:2] == pads[2:], "the padding must be the same on both sides")
    return call.tensor(0), pads[:2]


def _conv(call: _Call) -> Any:
    x, pads = _pads(call)
    strides, dilations = call.attribute("strides", [1, 1]), call.attribute("dilations", [1, 1])
    group = call.attribute("group", 1)
    return call(torch.nn.functional.conv2d, x, call.tensor(1), call.tensor(2), strides, pads, dilations, group)


def _max_pool(call: _Call) -> Any:
    x, pads = _pads(call)
    kernel, strides = call.attribute("kernel_shape"), call.attribute("strides", [1, 1])
    dilations, ceil = call.attribute("dilations", [1, 1]), bool(call.attribute("ceil_mode", 0))
    return call(torch.nn.functional.max_pool2d, x, kernel, strides, pads, dilations, ceil)


def _global_average_pool(call: _Call) -> Any:
    return call(torch.nn.functional.adaptive_avg_pool2d, call.tensor(0), 1)


def _flatten(call: _Call) -> Any:
    call.need(call.attribute("axis", 1) == 1, "axis must be 1")
    return call(torch.flatten, call.tensor(0), 1)


def _softmax(call: _Call) -> Any:
    return call(torch.softmax, call.tensor(0), call.attribute("axis", -1))


def _layer_norm(call: _Call) -> Any:
    scale = call.array(1)
    call.need(call.attribute("axis", -1) == -scale.ndim, "axis must be that of the scale, counted from the end")
    tensors = (call.tensor(1), call.tensor(2))
    epsilon = call.attribute("epsilon", 1e-5)
    return call(torch.nn.functional.layer_norm, call.tensor(0), list(scale.shape), *tensors, epsilon)


def _reduction(name: str) -> Callable[[_Call], Any]:
    def reduced(call: _Call) -> Any:
        axes = call.attribute("axes")  # before opset 13, and of means before 18
        if axes is None and len(call) > 1:
            axes = call.integers(1)
        call.need(bool(axes), "the axes must be there")
        return call(getattr(torch, name), call.tensor(0), list(axes), bool(call.attribute("keepdims", 1)))

    return reduced


def _split(call: _Call) -> list[Any]:
    axis, count = call.attribute("axis", 0), len(call.node.outputs)
    if len(call) > 1:
        parts = call(torch.split, call.tensor(0), call.integers(1), axis)
    else:
        parts = call(torch.chunk, call.tensor(0), count, axis)
    return [call(operator.getitem, parts, number) for number in range(count)]


def _clip(call: _Call) -> Any:
    return call(torch.clamp, call.tensor(0), *map(call.bound, (1, 2)))


def _hard_sigmoid(call: _Call) -> Any:
    slope, shift = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    if np.float32(slope) == np.float32(1 / 6) and shift == 0.5:
        return call(torch.nn.functional.hardsigmoid, call.tensor(0))
    moved = call(operator.add, call(operator.mul, call.tensor(0), slope), shift)
    return call(torch.clamp, moved, 0.0, 1.0)


def _gelu(call: _Call) -> Any:
    how = call.attribute("approximate", b"none").decode()
    return call(torch.nn.functional.gelu, call.tensor(0), approximate=how)


def _reshape(call: _Call) -> Any:
    shape = call.integers(1)
    call.need(0 not in shape, "an extent of 0 is not translated")
    return call(torch.reshape, call.tensor(0), shape)


def _transpose(call: _Call) -> Any:
    call.need("perm" in call.node.attributes, "perm must be there")
    return call(torch.permute, call.tensor(0), call.attribute("perm"))


def _swap_last_axes(call: _Call) -> Any:
    return call(torch.transpose, call.tensor(0), -2, -1)


def _unsqueeze(call: _Call) -> Any:
    axes = call.integers(1)
    call.need(len(axes) == 1 or min(axes) >= 0, "several axes must be counted from the front")
    x = call.tensor(0)
    for axis in sorted(axes):
        x = call(torch.unsqueeze, x, axis)
    return x


def _squeeze(call: _Call) -> Any:
    return call(torch.squeeze, call.tensor(0), tuple(call.integers(1)))


def _slice(call: _Call) -> Any:
    starts, ends = call.integers(1), call.integers(2)
    axes = call.integers(3) if len(call) > 3 else list(range(len(starts)))
    steps = call.integers(4) if len(call) > 4 else [1] * len(starts)
    call.need(min(steps) > 0, "steps must be positive")
    x = call.tensor(0)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        x = call(torch.ops.aten.slice.Tensor, x, axis, start, end, step)
    return x


def _gather(call: _Call) -> Any:
    axis = call.attribute("axis", 0)
    if call.node.inputs[1] not in call.to.constants:
        # Indices of a run are as PyTorch's users have them: counted from the front.
        call.need(axis == 0, "indices that are no constant must be those of the first axis")
        return call(torch.nn.functional.embedding, call.tensor(1), call.tensor(0))
    indices = call.array(1)
    call.need(indices.ndim < 2, "the indices must be a number or a list")
    if indices.ndim == 0:
        return call(torch.select, call.tensor(0), axis, int(indices))
    call.need(bool((indices >= 0).all()), "a list of indices must be counted from the front")
    return call(torch.index_select, call.tensor(0), axis, call.tensor(1))


def _gather_nd(call: _Call) -> Any:
    indices = call.array(1)
    call.need(call.attribute("batch_dims", 0) == 0, "batch_dims must be 0")
    call.need(bool((indices >= 0).all()), "indices must be counted from the front")
    along = [torch.from_numpy(np.array(indices[..., axis])).to(call.to.device) for axis in range(indices.shape[-1])]
    return call(operator.getitem, call.tensor(0), tuple(map(call.to.buffer, along)))


def _concat(call: _Call) -> Any:
    return call(torch.cat, [call.tensor(number) for number in range(len(call))], call.attribute("axis"))


def _lstm(call: _Call) -> Any:
    """All layers in one call of cuDNN, which needs their weights in one piece of memory."""
    hidden = call.attribute("hidden_size")
    strange = set(call.node.attributes) - {"hidden_size"} - {
        name for name, usual in (("direction", b"forward"), ("layout", 0), ("input_forget", 0))
        if call.attribute(name) == usual
    }  # fmt: skip
    call.need(not strange, f"the attributes {', '.join(sorted(strange))} are not translated")
    call.need(hidden is not None, "hidden_size must be there")
    layers = [_Layer(call, names, hidden) for names in call.node.layers]
    # The module alone knows how cuDNN wants the weights to lie.
    module = torch.nn.LSTM(layers[0].inputs, hidden, len(layers)).to(call.to.device)
    with torch.no_grad():
        for number, layer in enumerate(layers):
            for name, array in layer.parameters.items():
                getattr(module, f"{name}_l{number}").copy_(torch.from_numpy(array))
    module.flatten_parameters()
    weights = [call.to.buffer(weight.detach()) for weight in module._flat_weights]
    states = [np.concatenate([layer.states[i] for layer in layers]) for i in range(2)]
    states = [call.to.buffer(torch.from_numpy(state).to(call.to.device)) for state in states]
    y = call(torch.ops.souffle_peers.lstm.default, call.tensor(0), *states, weights, len(layers))
    return call(torch.unsqueeze, y, 1)


class _Layer:
    """One layer's constants in PyTorch's order: gates as ``_IFGO`` says."""

    def __init__(self, call: _Call, names: tuple[str, ...], hidden: int) -> None:
        given = [call.to.constants.get(name) if name else None for name in (*names, *[""] * 7)][:7]
        w, r, b, lengths, h, c, peepholes = given
        call.need(w is not None and r is not None, "the weights must be constants")
        call.need(lengths is None and peepholes is None, "sequence_lens and P are not translated")
        known = all(not name or name in call.to.constants for name in names)
        call.need(known and h is not None and c is not None, "the initial states must be there, and constants")
        bias = np.zeros((1, 8 * hidden), w.dtype) if b is None else b
        self.inputs = w.shape[2]
        self.states = (np.array(h), np.array(c))
        gates = {
            "weight_ih": w[0],
            "weight_hh": r[0],
            "bias_ih": bias[0, : 4 * hidden],
            "bias_hh": bias[0, 4 * hidden :],
        }
        self.parameters = {name: _gates_of_torch(array) for name, array in gates.items()}


def _gates_of_torch(array: np.ndarray) -> np.ndarray:
    gates = array.reshape(4, -1, *array.shape[1:])
    return np.ascontiguousarray(gates[list(_IFGO)]).reshape(array.shape)


if torch is not None:
    # torch.compile does not trace torch.nn.LSTM, nor should it: taken apart, it would be a thousand small kernels.
    _library = torch.library.Library("souffle_peers", "DEF")
    _library.define("lstm(Tensor x, Tensor h, Tensor c, Tensor[] weights, int layers) -> Tensor")

    @torch.library.impl(_library, "lstm", "CompositeExplicitAutograd")
    def _run_lstm(x: Any, h: Any, c: Any, weights: list[Any], layers: int) -> Any:
        return torch.lstm(x, (h, c), weights, True, layers, 0.0, False, False, False)[0]

    @torch.library.register_fake("souffle_peers::lstm", lib=_library)
    def _shape_of_lstm(x: Any, h: Any, c: Any, weights: list[Any], layers: int) -> Any:
        return x.new_empty((*x.shape[:2], h.shape[-1]))


_OPERATORS: dict[str, Callable[[_Call], Any]] = {
    "Add": _binary("add"), "Sub": _binary("sub"), "Mul": _binary("mul"), "Div": _binary("truediv"),
    "Pow": _binary("pow"), "Relu": _unary("relu"), "Sigmoid": _unary("sigmoid"), "Erf": _unary("erf"),
    "Tanh": _unary("tanh"), "Exp": _unary("exp"), "Sqrt": _unary("sqrt"), "Neg": _unary("neg"), "Clip": _clip,
    "Gelu": _gelu, "Silu": _activation("silu"), "HardSwish": _activation("hardswish"),
    "HardSigmoid": _hard_sigmoid, "Softmax": _softmax,
    "Linear": _linear, "Gemm": _gemm, "MatMul": _matmul, "Conv": _conv, "LSTM": _lstm,
    "MaxPool": _max_pool, "GlobalAveragePool": _global_average_pool,
    "LayerNormalization": _layer_norm, "ReduceSum": _reduction("sum"), "ReduceMean": _reduction("mean"),
    "Flatten": _flatten, "Reshape": _reshape, "Transpose": _transpose, "SwapLastAxes": _swap_last_axes,
    "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Slice": _slice, "Gather": _gather,
    "GatherND": _gather_nd, "Split": _split, "Concat": _concat,
}  # fmt: skip
