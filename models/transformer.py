"""The Transformer's stacks of encoder and decoder layers, from embedded words to the decoder's last hidden state.

The 2021 paper's batch is 4096 (Table 1), read as words, which is what ``batch_size`` counts in Tensor2Tensor's
Transformer. Chosen: 64 pairs of sentences of 64 words, none padded. The rest is the base model of the paper that it
cites (Vaswani et al. 2017, Table 3): 6 layers each, width 512, 8 heads, 2048 inner units, layer normalization behind
each residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.attention import Heads, attention, feed_forward
from souffle.models.builder import GraphBuilder
from souffle.models.layers import layer_norm

__all__ = ["SIZES", "TransformerConfig", "build_transformer"]

# Tensor2Tensor's layer_norm.
_EPSILON = 1e-6
# Added to a score that is not to count; larger than any score by far, and a number in half precision too.
_MASKED = -1e4


@dataclass(frozen=True)
class TransformerConfig:
    """Layers of each stack, pairs of sentences, words of source and target, hidden width, heads, and inner units."""

    layers: int
    batch: int
    source: int
    target: int
    hidden: int
    heads: int
    inner: int


SIZES = {
    "paper": TransformerConfig(layers=6, batch=64, source=64, target=64, hidden=512, heads=8, inner=2048),
    "tiny": TransformerConfig(layers=2, batch=2, source=6, target=5, hidden=16, heads=2, inner=24),
}


def build_transformer(config: TransformerConfig, seed: int) -> ModelProto:
    """Build both stacks: ``source`` (batch, source, hidden), ``target`` and ``output`` (batch, target, hidden).

    A word of the target attends to those before it and itself.
    """
    b = GraphBuilder("transformer", seed)
    heads = Heads(config.batch, config.hidden, config.heads)
    memory = b.input("source", (config.batch, config.source, config.hidden))
    x = b.input("target", (config.batch, config.target, config.hidden))
    for layer in range(config.layers):
        with b.scope("encoder", f"encoders.{layer}"):
            memory = _attended(b, heads, "self_attn", memory, memory, (config.source, config.source))
            memory = _fed_forward(b, memory, config)
    future = np.triu(np.full((config.target, config.target), _MASKED, np.float32), 1)
    mask = b.parameter("mask", future)
    for layer in range(config.layers):
        with b.scope("decoder", f"decoders.{layer}"):
            x = _attended(b, heads, "self_attn", x, x, (config.target, config.target), mask)
            x = _attended(b, heads, "src_attn", x, memory, (config.target, config.source))
            x = _fed_forward(b, x, config)
    b.output(x, "output", (config.batch, config.target, config.hidden))
    return b.model()


def _attended(
    b: GraphBuilder, heads: Heads, name: str, x: str, memory: str, lengths: tuple[int, int], mask: str | None = None
) -> str:
    with b.scope(name):
        y = attention(b, heads, x, memory, lengths, mask)
        with b.scope("norm"):
            return layer_norm(b, b.node("Add", x, y), heads.hidden, _EPSILON)


def _fed_forward(b: GraphBuilder, x: str, config: TransformerConfig) -> str:
    with b.scope("feed_forward"):
        y = feed_forward(b, x, config.hidden, config.inner)
        with b.scope("norm"):
            return layer_norm(b, b.node("Add", x, y), config.hidden, _EPSILON)
