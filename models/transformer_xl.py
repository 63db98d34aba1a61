"""Transformer-XL (Dai et al. 2019): attention by relative position, on a segment of words and the one before it.

"Learning to Fuse" cites that paper for its ``Transformer-XL`` and states no sizes. Those of ``paper`` are of the
standard model for WikiText-103 (Table 1), as the authors' script ``run_wt103_base.sh`` has them: 16 layers, width 410,
10 heads of 41, 2100 inner units, segments of 150 words and as many remembered, a batch of 4 on the first GPU. Its
words are 267,735 and its softmax is adaptive, with a head of the 20,000 most frequent ones and an entry for each of 3
clusters of the others. Chosen: the head alone, hence no other words; no dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.attention import feed_forward
from souffle.models.builder import GraphBuilder
from souffle.models.draws import integers
from souffle.models.layers import layer_norm, linear, reshape

__all__ = ["SIZES", "TransformerXlConfig", "build_transformer_xl"]

# Added to a score that is not to count; larger than any score by far, and a number in half precision too.
_MASKED = -1e4


@dataclass(frozen=True)
class TransformerXlConfig:
    """Layers, batch, words of a segment and of the memory, hidden width, heads, inner units, words of the vocabulary,
    and clusters of rarer ones."""

    layers: int
    batch: int
    segment: int
    memory: int
    hidden: int
    heads: int
    inner: int
    words: int
    clusters: int


SIZES = {
    "paper": TransformerXlConfig(
        layers=16, batch=4, segment=150, memory=150, hidden=410, heads=10, inner=2100, words=20000, clusters=3
    ),
    "tiny": TransformerXlConfig(
        layers=2, batch=2, segment=3, memory=4, hidden=12, heads=2, inner=16, words=19, clusters=2
    ),
}


def build_transformer_xl(config: TransformerXlConfig, seed: int) -> ModelProto:
    """Build the network.

    ``words`` (batch, segment), int64, and for each layer ``memory.<layer>`` (batch, memory, hidden), what the layer had
    as its input for the words before, give ``output`` (batch, segment, words + clusters), logarithms of probabilities,
    and ``memory.<layer>_new``. Embeddings are the rows of the softmax's weight, times the root of their width.
    """
    b = GraphBuilder("transformer-xl", seed)
    batch, segment, hidden = config.batch, config.segment, config.hidden
    words = b.input("words", (batch, segment), np.int64, integers(0, config.words))
    memories = [b.input(f"memory.{layer}", (batch, config.memory, hidden)) for layer in range(config.layers)]
    entries = config.words + config.clusters
    table = b.parameter("embedding", b.normal((entries, hidden), 1.0 / math.sqrt(hidden)))
    x = b.node("Mul", b.node("Gather", table, words, axis=0), b.constant(math.sqrt(hidden)))
    width = hidden // config.heads
    # Both biases and the places serve all layers.
    biases = tuple(b.parameter(name, b.normal((config.heads, 1, width), 0.5)) for name in ("u", "v"))
    places = b.parameter("places", _places(config.memory + segment, hidden))
    future = np.triu(np.full((segment, config.memory + segment), _MASKED, np.float32), 1 + config.memory)
    mask = b.parameter("mask", future)
    new = []
    for layer, memory in enumerate(memories):
        with b.scope("layers", f"layers.{layer}"):
            known = b.node("Concat", memory, x, axis=1)
            bounds = (b.constant([value]) for value in (segment, segment + config.memory, 1))
            new.append(b.node("Slice", known, *bounds))
            with b.scope("attention"):
                y = _relative_attention(b, config, x, known, places, biases, mask)
                with b.scope("norm"):
                    x = layer_norm(b, b.node("Add", x, y), hidden)
            with b.scope("feed_forward"):
                y = feed_forward(b, x, hidden, config.inner)
                with b.scope("norm"):
                    x = layer_norm(b, b.node("Add", x, y), hidden)
    rows = reshape(b, x, batch * segment, hidden)
    bias = b.parameter("bias", b.normal((entries,), 0.1))
    logits = reshape(b, b.node("Gemm", rows, table, bias, alpha=1.0, beta=1.0, transB=1), batch, segment, entries)
    b.output(b.node("LogSoftmax", logits, axis=-1), "output", (batch, segment, entries))
    for layer, value in enumerate(new):
        b.output(value, f"memory.{layer}_new", (batch, config.memory, hidden))
    return b.model()


def _places(length: int, width: int) -> np.ndarray:
    """Encodings of the distances from `length` - 1 down to 0: sines, then cosines."""
    angles = np.outer(np.arange(length)[::-1], 1.0 / 10000 ** (np.arange(0, width, 2) / width))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width].astype(np.float32)


def _relative_attention(
    b: GraphBuilder,
    config: TransformerXlConfig,
    x: str,
    known: str,
    places: str,
    biases: tuple[str, str],
    mask: str,
) -> str:
    """Attention of the segment on the memory and itself (section 3.3), projected again."""
    batch, hidden, heads, width = config.batch, config.hidden, config.heads, config.hidden // config.heads
    length = config.memory + config.segment
    with b.scope("q"):
        q = reshape(b, linear(b, x, hidden, hidden, bias=False), batch, config.segment, heads, width)
    with b.scope("k"):
        k = reshape(b, linear(b, known, hidden, hidden, bias=False), batch, length, heads, width)
    with b.scope("v"):
        v = reshape(b, linear(b, known, hidden, hidden, bias=False), batch, length, heads, width)
    with b.scope("r"):
        # A place's sines and cosines have a second moment of a half.
        r = reshape(b, linear(b, places, hidden, hidden, gain=math.sqrt(2.0), bias=False), length, heads, width)
    q = b.node("Transpose", q, perm=[0, 2, 1, 3])
    content = b.node("MatMul", b.node("Add", q, biases[0]), b.node("Transpose", k, perm=[0, 2, 3, 1]))
    position = b.node("MatMul", b.node("Add", q, biases[1]), b.node("Transpose", r, perm=[1, 2, 0]))
    scores = b.node("Add", content, _shifted(b, position, (batch, heads, config.segment, length)))
    scores = b.node("Add", b.node("Mul", scores, b.constant(1.0 / math.sqrt(width))), mask)
    context = b.node("MatMul", b.node("Softmax", scores, axis=-1), b.node("Transpose", v, perm=[0, 2, 1, 3]))
    context = reshape(b, b.node("Transpose", context, perm=[0, 2, 1, 3]), batch, config.segment, hidden)
    with b.scope("out"):
        return linear(b, context, hidden, hidden, bias=False)


def _shifted(b: GraphBuilder, x: str, shape: tuple[int, int, int, int]) -> str:
    """From scores by distance, falling, to scores by word (appendix B): row i moves left by its distance from the last.

    What comes in from the right belongs to later words and is masked.
    """
    batch, heads, rows, columns = shape
    zeros = b.constant(np.zeros((batch, heads, rows, 1), np.float32))
    padded = reshape(b, b.node("Concat", zeros, x, axis=3), batch, heads, columns + 1, rows)
    bounds = (b.constant([value]) for value in (1, columns + 1, 2))
    return reshape(b, b.node("Slice", padded, *bounds), *shape)
