"""The encoder of BERT, from the embeddings to the last hidden state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto

from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_GELU, gelu, layer_norm, linear, reshape

__all__ = ["SIZES", "BertConfig", "build_bert"]

_EPSILON = 1e-12


@dataclass(frozen=True)
class BertConfig:
    """Layers, tokens, hidden width, attention heads, width of the feed-forward part, and sequences of a batch.

    With `open_dimensions`, batch and tokens are left to who compiles it, and a mask says which tokens there are.
    """

    layers: int
    tokens: int
    hidden: int
    heads: int
    ffn: int
    open_dimensions: bool = False
    batch: int = 1


SIZES = {
    "paper": BertConfig(layers=12, tokens=384, hidden=768, heads=12, ffn=3072),
    "tiny": BertConfig(layers=2, tokens=16, hidden=32, heads=2, ffn=64),
}


def build_bert(config: BertConfig, seed: int) -> ModelProto:
    """Build the encoder: ``input`` and ``output`` are (batch, tokens, hidden).

    With open dimensions, they are (batch, sequence, hidden), and ``attention_mask`` (batch, sequence) has 1 for tokens
    and 0 for what fills a sequence up. Equal seeds give equal weights either way.
    """
    b = GraphBuilder("bert", seed)
    first = ("batch", "sequence") if config.open_dimensions else (config.batch, config.tokens)
    shape = (*first, config.hidden)
    x = b.input("input", shape)
    bias = _mask(b, b.input("attention_mask", first, np.int64)) if config.open_dimensions else None
    for layer in range(config.layers):
        with b.scope("encoder", f"layer.{layer}"):
            with b.scope("attention"):
                x = _attention(b, x, config, bias)
            x = _feed_forward(b, x, config)
    b.output(x, "output", shape)
    return b.model()


def _mask(b: GraphBuilder, mask: str) -> str:
    """What is added to scores, (batch, 1, 1, sequence): 0 for tokens, and the lowest number where there is none."""
    there = b.node("Cast", b.node("Unsqueeze", mask, b.constant((1, 2))), to=TensorProto.FLOAT)
    absent = b.node("Sub", b.constant(1.0), there)
    return b.node("Mul", absent, b.constant(float(np.finfo(np.float32).min)))


def _attention(b: GraphBuilder, x: str, config: BertConfig, bias: str | None) -> str:
    hidden, width = config.hidden, config.hidden // config.heads
    # In a shape to reshape to, 0 is the extent that is there.
    first = (0, 0) if config.open_dimensions else (config.batch, config.tokens)
    with b.scope("self"):
        projected = []
        for name in ("query", "key", "value"):
            with b.scope(name):
                projected.append(linear(b, x, hidden, hidden))
        q, k, v = (reshape(b, p, *first, config.heads, width) for p in projected)
        q = b.node("Transpose", q, perm=[0, 2, 1, 3])
        v = b.node("Transpose", v, perm=[0, 2, 1, 3])
        k = b.node("Transpose", k, perm=[0, 2, 3, 1])
        scores = b.node("Div", b.node("MatMul", q, k), b.constant(math.sqrt(width)))
        if bias is not None:
            scores = b.node("Add", scores, bias)
        context = b.node("MatMul", b.node("Softmax", scores, axis=-1), v)
        context = reshape(b, b.node("Transpose", context, perm=[0, 2, 1, 3]), *first, hidden)
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
