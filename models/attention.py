"""Multi-head attention and the two-layer network behind it, of a batch of sequences, for the models made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_RELU, linear, reshape

__all__ = ["Heads", "attention", "feed_forward"]


@dataclass(frozen=True)
class Heads:
    """Batch, hidden width, and heads among which it is divided."""

    batch: int
    hidden: int
    count: int


def attention(
    b: GraphBuilder, heads: Heads, x: str, memory: str, lengths: tuple[int, int], mask: str | None = None
) -> str:
    """Attention of `x` (batch, lengths[0], hidden) on `memory` (batch, lengths[1], hidden), projected again.

    `mask` is added to the scores, (batch, heads, lengths[0], lengths[1]), before the softmax.
    """
    width = heads.hidden // heads.count
    parts = []
    for name, source, length in zip("qkv", (x, memory, memory), (lengths[0], *lengths[1:] * 2), strict=True):
        with b.scope(f"linear_{name}"):
            parts.append(reshape(b, linear(b, source, heads.hidden, heads.hidden), heads.batch, length, -1, width))
    q = b.node("Transpose", parts[0], perm=[0, 2, 1, 3])
    k = b.node("Transpose", parts[1], perm=[0, 2, 3, 1])
    v = b.node("Transpose", parts[2], perm=[0, 2, 1, 3])
    scores = b.node("Div", b.node("MatMul", q, k), b.constant(math.sqrt(width)))
    if mask is not None:
        scores = b.node("Add", scores, mask)
    context = b.node("MatMul", b.node("Softmax", scores, axis=-1), v)
    context = reshape(b, b.node("Transpose", context, perm=[0, 2, 1, 3]), heads.batch, lengths[0], heads.hidden)
    with b.scope("linear_out"):
        return linear(b, context, heads.hidden, heads.hidden)


def feed_forward(b: GraphBuilder, x: str, hidden: int, inner: int) -> str:
    """Two linear layers with a ReLU between them."""
    with b.scope("w_1"):
        x = b.node("Relu", linear(b, x, hidden, inner))
    with b.scope("w_2"):
        return linear(b, x, inner, hidden, gain=AFTER_RELU)
