"""Networks in which each thing that keeps tensors on chip is really taken, small enough for the CPU device.

The tiny models hold little of what only pays at the paper's sizes. These have few layers, of such sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx

from souffle import models
from souffle.models.bert import BertConfig, build_bert
from souffle.models.builder import GraphBuilder
from souffle.models.efficientnet import EfficientNetConfig, StageConfig, build_efficientnet
from souffle.models.layers import gelu, layer_norm, linear, reshape
from souffle.models.swin import SwinConfig, build_swin

__all__ = ["NETWORKS", "decoder", "layer_norm_in_pieces"]

Norm = Callable[[GraphBuilder, str, int], str]


def layer_norm_in_pieces(b: GraphBuilder, x: str, width: int) -> str:
    """As exporters write it before opset 17."""
    mean = b.node("ReduceMean", x, axes=[-1], keepdims=1)
    apart = b.node("Sub", x, mean)
    variance = b.node("ReduceMean", b.node("Pow", apart, b.constant(2.0)), axes=[-1], keepdims=1)
    deviation = b.node("Sqrt", b.node("Add", variance, b.constant(1e-5)))
    y = b.node("Mul", b.node("Div", apart, deviation), b.parameter("weight", b.normal((width,), 0.1, mean=1.0)))
    return b.node("Add", y, b.parameter("bias", b.normal((width,), 0.1)))


def _heads(b: GraphBuilder, x: str, tokens: int, heads: int, head: int, order: list[int]) -> str:
    return b.node("Transpose", reshape(b, x, 1, tokens, heads, head), perm=order)


def _attention(b: GraphBuilder, x: str, tokens: int, width: int, heads: int, causal: bool) -> str:
    """Softmax in pieces, with a mask that is a constant where it is causal."""
    head = width // heads
    projected = []
    for name in ("query", "key", "value"):
        with b.scope(name):
            projected.append(linear(b, x, width, width))
    q, k, v = projected
    k = _heads(b, k, tokens, heads, head, [0, 2, 3, 1])
    q, v = (_heads(b, y, tokens, heads, head, [0, 2, 1, 3]) for y in (q, v))
    scores = b.node("Mul", b.node("MatMul", q, k), b.constant(1 / math.sqrt(head)))
    if causal:
        seen = np.tril(np.ones((1, 1, tokens, tokens), bool))
        scores = b.node("Add", scores, b.parameter("mask", np.where(seen, 0.0, -np.inf).astype(np.float32)))
    y = b.node("MatMul", b.node("Softmax", scores, axis=-1), v)
    y = reshape(b, b.node("Transpose", y, perm=[0, 2, 1, 3]), 1, tokens, width)
    with b.scope("output"):
        return linear(b, y, width, width)


def decoder(
    tokens: int, width: int, heads: int, layers: int = 1, norm: Norm = layer_norm, causal: bool = True
) -> onnx.ModelProto:
    """A transformer that normalizes ahead of attention and of two products with GELU between."""
    b = GraphBuilder("decoder", 0)
    x = b.input("input", (1, tokens, width))
    for number in range(layers):
        with b.scope(f"layer.{number}"):
            with b.scope("norm1"):
                y = norm(b, x, width)
            with b.scope("attention"):
                x = b.node("Add", x, _attention(b, y, tokens, width, heads, causal))
            with b.scope("norm2"):
                y = norm(b, x, width)
            with b.scope("up"):
                y = gelu(b, linear(b, y, width, 2 * width))
            with b.scope("down"):
                x = b.node("Add", x, linear(b, y, 2 * width, width))
    b.output(x, "output", (1, tokens, width))
    return b.model()


def _mbconv(image: int, channels: int, blocks: int) -> onnx.ModelProto:
    """Blocks of EfficientNet between a convolution of stride 2 and the classifier."""
    stages = (StageConfig(6, 3, 1, channels, blocks),)
    return build_efficientnet(EfficientNetConfig(image, channels, stages, 4 * channels, 10), 0)


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{name: lambda name=name: models.build(name) for name in models.NAMES},
    "encoder": lambda: build_bert(BertConfig(2, 64, 128, 2, 256), 0),
    "long encoder": lambda: build_bert(BertConfig(1, 1000, 128, 2, 256), 0),
    "causal decoder": lambda: decoder(1000, 128, 2),
    "pre-norm": lambda: decoder(50, 192, 4, 2, causal=False),
    "pre-norm in pieces": lambda: decoder(50, 192, 4, 2, layer_norm_in_pieces, causal=False),
    "shifted windows": lambda: build_swin(SwinConfig(56, 4, 7, 64, (2,), (2,), 10), 0),
    "mbconv 14": lambda: _mbconv(28, 80, 2),
    "mbconv 7": lambda: _mbconv(14, 192, 2),
}
"""By name: the six tiny models, and those sized so that each mechanism pays."""
