"""One step of decoding of a recurrent translation model with attention.

The 2019 paper's ``nmt`` is an inference by an RNN with attention (it cites Xiong et al. 2018, who build on RNNsearch)
and states no sizes. Those of ``paper`` are RNNsearch-50's (Bahdanau et al. 2015, 4.2 and A): 30,000 words, embeddings
of 620, 1000 hidden units, 1000 in the alignment model, a maxout of 500, source sentences of 50 words. Chosen: 10
hypotheses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.layers import gemm, linear, reshape

__all__ = ["SIZES", "NmtConfig", "build_nmt"]


@dataclass(frozen=True)
class NmtConfig:
    """Hypotheses, words of the source sentence, words of the target language, and widths of the parts."""

    hypotheses: int
    source: int
    words: int
    embedding: int
    hidden: int
    alignment: int
    maxout: int


SIZES = {
    "paper": NmtConfig(hypotheses=10, source=50, words=30000, embedding=620, hidden=1000, alignment=1000, maxout=500),
    "tiny": NmtConfig(hypotheses=3, source=5, words=19, embedding=7, hidden=8, alignment=6, maxout=5),
}


def build_nmt(config: NmtConfig, seed: int) -> ModelProto:
    """Build the step.

    ``words`` (hypotheses,), int64, ``state`` (hypotheses, hidden), ``annotations`` (hypotheses, source, 2 * hidden),
    the encoder's, and ``keys`` (hypotheses, source, alignment), what the alignment model makes of them once for a
    sentence, give ``output`` (hypotheses, words), logarithms of probabilities, ``state_new`` and ``alignment``
    (hypotheses, source).
    """
    b = GraphBuilder("nmt", seed)
    count, hidden, annotated = config.hypotheses, config.hidden, 2 * config.hidden
    words = b.input("words", (count,), np.int64)
    state = b.input("state", (count, hidden))
    annotations = b.input("annotations", (count, config.source, annotated))
    keys = b.input("keys", (count, config.source, config.alignment))
    table = b.parameter("embedding", b.normal((config.words, config.embedding), 1.0))
    word = b.node("Gather", table, words, axis=0)
    with b.scope("attention"):
        query = b.node("Unsqueeze", linear(b, state, hidden, config.alignment), b.constant([1]))
        energy = b.node("Tanh", b.node("Add", query, keys))
        scores = reshape(b, linear(b, energy, config.alignment, 1, gain=4.0, bias=False), count, 1, config.source)
        alignment = b.node("Softmax", scores, axis=-1)
        context = reshape(b, b.node("MatMul", alignment, annotations), count, annotated)
    with b.scope("gru"):
        state_new = _gru(b, b.node("Concat", word, context, axis=1), config.embedding + annotated, state, hidden)
    with b.scope("readout"):
        # A.2.2: from the state before the step.
        read = b.node("Concat", state, word, context, axis=1)
        with b.scope("maxout"):
            pairs = gemm(b, read, hidden + config.embedding + annotated, 2 * config.maxout)
        best = b.node("ReduceMax", reshape(b, pairs, count, config.maxout, 2), axes=[2], keepdims=0)
        with b.scope("out"):
            logits = gemm(b, best, config.maxout, config.words, gain=2.0)
    b.output(b.node("LogSoftmax", logits, axis=-1), "output", (count, config.words))
    b.output(state_new, "state_new", (count, hidden))
    b.output(b.node("Squeeze", alignment, b.constant([1])), "alignment", (count, config.source))
    return b.model()


def _gru(b: GraphBuilder, x: str, inputs: int, state: str, hidden: int) -> str:
    """A cell whose reset gate stands before the state's product (A.1.1)."""
    both = b.node("Concat", x, state, axis=1)
    with b.scope("gates"):
        gates = b.node("Sigmoid", gemm(b, both, inputs + hidden, 2 * hidden, gain=math.sqrt(2.0)))
    reset, update = b.nodes("Split", (gates, b.constant([hidden, hidden])), 2, axis=1)
    with b.scope("candidate"):
        both = b.node("Concat", x, b.node("Mul", reset, state), axis=1)
        candidate = b.node("Tanh", gemm(b, both, inputs + hidden, hidden, gain=math.sqrt(2.0)))
    kept = b.node("Mul", b.node("Sub", b.constant(1.0), update), state)
    return b.node("Add", kept, b.node("Mul", update, candidate))
