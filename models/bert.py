"""The encoder of BERT, from the embeddings to the last hidden state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_GELU, gelu, layer_norm, linear, reshape

__all__ = ["SIZES", "BertConfig", "build_bert"]

_EPSILON = 1e-12


@dataclass(frozen=True)
class BertConfig:
    """Layers, tokens, hidden width, attention heads and width of the feed-forward part."""

    layers: int
    tokens: int
    hidden: int
    heads: int
    ffn: int


SIZES = {
    "paper": BertConfig(layers=12, tokens=384, hidden=768, heads=12, ffn=3072),
    "tiny": BertConfig(layers=2, tokens=16, hidden=32, heads=2, ffn=64),
}


def build_bert(config: BertConfig, seed: int) -> ModelProto:
    """Build the encoder: ``input`` and ``output`` are (1, tokens, hidden)."""
    b = GraphBuilder("bert", seed)
    shape = (1, config.tokens, config.hidden)
    x = b.input("input", shape)
    for layer in range(config.layers):
        with b.scope("encoder", f"layer.{layer}"):
            with b.scope("attention"):
                x = _attention(b, x, config)
            x = _feed_forward(b, x, config)
    b.output(x, "output", shape)
    return b.model()


def _attention(b: GraphBuilder, x: str, config: BertConfig) -> str:
    hidden, width = config.hidden, config.hidden // config.heads
    with b.scope("self"):
        projected = []
        for name in ("query", "key", "value"):
            with b.scope(name):
                projected.append(linear(b, x, hidden, hidden))
        q, k, v = (reshape(b, p, 1, config.tokens, config.heads, width) for p in projected)
        q = b.node("Transpose", q, perm=[0, 2, 1, 3])
        v = b.node("Transpose", v, perm=[0, 2, 1, 3])
        k = b.node("Transpose", k, perm=[0, 2, 3, 1])
        scores = b.node("Div", b.node("MatMul", q, k), b.constant(math.sqrt(width)))
        context = b.node("MatMul", b.node("Softmax", scores, axis=-1), v)
        context = reshape(b, b.node("Transpose", context, perm=[0, 2, 1, 3]), 1, config.tokens, hidden)
    with b.scope("output"):
        with b.scope("dense"):
            y = linear(b, context, hidden, hidden)
        y = b.node("Add", y, x)
        with b.scope("LayerNorm"):
            return layer_norm(b, y, hidden, _EPSILON)


def _feed_forward(b: GraphBuilder, x: str, config: BertConfig) -> str:
    with b.scope("intermediate"):
        with b.scope("dense"):
            y = linear(b, x, config.hidden, config.ffn)
        with b.scope("intermediate_act_fn"):
            y = gelu(b, y)
    with b.scope("output"):
        with b.scope("dense"):
            y = linear(b, y, config.ffn, config.hidden, gain=AFTER_GELU)
        y = b.node("Add", y, x)
        with b.scope("LayerNorm"):
            return layer_norm(b, y, config.hidden, _EPSILON)
