"""A language model of LSTM layers whose outputs are projected (Józefowicz et al. 2016), unrolled over some words.

"Learning to Fuse" cites that paper for its ``RNNLM`` and states no sizes. Those of ``paper`` are of the model that it
calls LSTM-2048-512 (Table 1; the authors' released code has the same numbers): embeddings of 512, 2048 units, outputs
projected to 512, a batch of 128, 20 steps whose first state is what the last 20 left (section 4.4), a forget gate whose
bias starts at 1 (4.3). Two layers are those of its larger LSTM-8192-1024. Chosen: a vocabulary of 8192 words instead of
793,471, as many as the samples that stand for the vocabulary in its softmax (4.4); no dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.cells import draw_cell, take_step
from souffle.models.draws import integers, normal
from souffle.models.layers import gemm

__all__ = ["SIZES", "RnnlmConfig", "build_rnnlm"]


@dataclass(frozen=True)
class RnnlmConfig:
    """Layers, batch, time steps, words, and widths of an embedding, a layer's inner state and its output."""

    layers: int
    batch: int
    steps: int
    words: int
    embedding: int
    hidden: int
    projected: int


SIZES = {
    "paper": RnnlmConfig(layers=2, batch=128, steps=20, words=8192, embedding=512, hidden=2048, projected=512),
    "tiny": RnnlmConfig(layers=2, batch=3, steps=4, words=19, embedding=7, hidden=10, projected=6),
}


def build_rnnlm(config: RnnlmConfig, seed: int) -> ModelProto:
    """Build the network.

    ``words`` (batch, steps), int64, and for each layer ``output.<layer>`` (batch, projected) and ``state.<layer>``
    (batch, hidden), what the words before left, give ``output`` (steps * batch, words), logarithms of the probabilities
    of each next word, and ``output.<layer>_new`` and ``state.<layer>_new``.
    """
    b = GraphBuilder("rnnlm", seed)
    batch, hidden, projected = config.batch, config.hidden, config.projected
    words = b.input("words", (batch, config.steps), np.int64, integers(0, config.words))
    states = [
        (
            b.input(f"output.{layer}", (batch, projected), drawn=normal(0.5)),
            b.input(f"state.{layer}", (batch, hidden), drawn=normal(0.5)),
        )
        for layer in range(config.layers)
    ]
    table = b.parameter("embedding", b.normal((config.words, config.embedding), 1.0))
    embedded = b.node("Gather", table, words, axis=0)
    steps = [b.node("Gather", embedded, b.constant(step), axis=1) for step in range(config.steps)]
    for layer in range(config.layers):
        with b.scope("cells", f"cells.{layer}"):
            cell = draw_cell(b, projected if layer else config.embedding, hidden, projected)
            for step, x in enumerate(steps):
                states[layer] = take_step(b, cell, x, states[layer])
                steps[step] = states[layer][0]
    read = b.node("Concat", *steps, axis=0)
    with b.scope("out"):
        logits = gemm(b, read, projected, config.words, gain=math.sqrt(2.0))
    b.output(b.node("LogSoftmax", logits, axis=-1), "output", (config.steps * batch, config.words))
    for layer, (h, c) in enumerate(states):
        b.output(h, f"output.{layer}_new", (batch, projected))
        b.output(c, f"state.{layer}_new", (batch, hidden))
    return b.model()
