"""Networks of products and normalizations by turns."""

from __future__ import annotations

import onnx

from souffle.models.builder import GraphBuilder
from souffle.models.layers import layer_norm, linear, reshape

__all__ = ["epsilon_layer_norm", "layers"]


def epsilon_layer_norm(b: GraphBuilder, x: str, width: int) -> str:
    with b.scope("norm"):
        return layer_norm(b, x, width, 1e-5)


def layers(count: int, tokens: int = 256, width: int = 256) -> onnx.ModelProto:
    """Products and normalizations by turns, as in an encoder."""
    b = GraphBuilder("g", 0)
    x = b.input("x", (1, tokens, width))
    for layer in range(count):
        with b.scope(f"layer{layer}"):
            h = b.node("Add", linear(b, x, width, width), x)
            x = epsilon_layer_norm(b, h, width)
    b.output(reshape(b, linear(b, x, width, 64), 1, tokens, 64), "z", (1, tokens, 64))
    return b.model()
