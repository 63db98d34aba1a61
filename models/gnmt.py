"""Google's translation model (Wu et al. 2016): a deep LSTM encoder, and a decoder with attention, over whole sentences.

"Learning to Fuse" cites that paper for its ``NMT`` and states no sizes. Those of ``paper`` are that paper's for the
widths (1024 units in each layer and in the attention's hidden layer), for the batch of training, 128, and for the
vocabulary, 8,000 wordpieces, the smallest that it compares (WPM-8K). Chosen: 4 layers of each side instead of its 8,
source sentences of 6 wordpieces and 4 steps of decoding, so that the unrolled graph has some hundred operators;
embeddings as wide as the layers; zeros for the first states of both sides; no dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.cells import LstmCell, draw_cell, take_step
from souffle.models.draws import integers
from souffle.models.layers import gemm, linear, reshape

__all__ = ["SIZES", "GnmtConfig", "build_gnmt"]


@dataclass(frozen=True)
class GnmtConfig:
    """Layers of each side, batch, wordpieces of source and target and of the vocabulary, width of the layers, and units
    of the attention's hidden layer."""

    layers: int
    batch: int
    source: int
    target: int
    words: int
    hidden: int
    attention: int


SIZES = {
    "paper": GnmtConfig(layers=4, batch=128, source=6, target=4, words=8000, hidden=1024, attention=1024),
    "tiny": GnmtConfig(layers=3, batch=3, source=3, target=2, words=19, hidden=8, attention=6),
}


def build_gnmt(config: GnmtConfig, seed: int) -> ModelProto:
    """Build the network as it is trained, with the right word given to each next step.

    ``source`` (batch, source) and ``target`` (batch, target), int64, give ``output`` (target, batch, words), logarithms
    of probabilities, and ``alignment`` (target, batch, source).
    """
    b = GraphBuilder("gnmt", seed)
    batch, hidden = config.batch, config.hidden
    zero = b.folded("Concat", np.zeros((batch, hidden), np.float32))
    with b.scope("encoder"):
        encoded = _encoded(b, config, _embedded(b, config, "source", config.source), zero)
    sequence = b.node("Concat", *(b.node("Unsqueeze", x, b.constant([1])) for x in encoded), axis=1)
    with b.scope("decoder"):
        words = _embedded(b, config, "target", config.target)
        tops, alignments = _decoded(b, config, words, sequence, zero)
    with b.scope("out"):
        logits = gemm(b, b.node("Concat", *tops, axis=0), hidden, config.words, gain=4.0)
    logits = reshape(b, logits, config.target, batch, config.words)
    b.output(b.node("LogSoftmax", logits, axis=-1), "output", (config.target, batch, config.words))
    shape = (config.target, batch, config.source)
    b.output(reshape(b, b.node("Concat", *alignments, axis=0), *shape), "alignment", shape)
    return b.model()


def _embedded(b: GraphBuilder, config: GnmtConfig, name: str, length: int) -> list[str]:
    """The embedding of each of a sentence's wordpieces."""
    words = b.input(name, (config.batch, length), np.int64, integers(0, config.words))
    table = b.parameter("embedding", b.normal((config.words, config.hidden), 1.0))
    embedded = b.node("Gather", table, words, axis=0)
    return [b.node("Gather", embedded, b.constant(step), axis=1) for step in range(length)]


def _encoded(b: GraphBuilder, config: GnmtConfig, steps: list[str], zero: str) -> list[str]:
    """The top layer's output: the first layer reads both ways (section 3.2), the third and later add their
    input to their output (3.1)."""
    hidden = config.hidden
    ways = []
    for name, order in (("forward", 1), ("backward", -1)):
        with b.scope("layers", "layers.0", name):
            ways.append(_ran(b, draw_cell(b, hidden, hidden), steps[::order], zero)[::order])
    steps = [b.node("Concat", *both, axis=1) for both in zip(*ways, strict=True)]
    for layer in range(1, config.layers):
        with b.scope("layers", f"layers.{layer}"):
            outputs = _ran(b, draw_cell(b, hidden if layer > 1 else 2 * hidden, hidden), steps, zero)
            if layer > 1:
                outputs = [b.node("Add", y, x) for y, x in zip(outputs, steps, strict=True)]
        steps = outputs
    return steps


def _ran(b: GraphBuilder, cell: LstmCell, steps: list[str], zero: str) -> list[str]:
    state, outputs = (zero, zero), []
    for x in steps:
        state = take_step(b, cell, x, state)
        outputs.append(state[0])
    return outputs


def _decoded(
    b: GraphBuilder, config: GnmtConfig, words: list[str], sequence: str, zero: str
) -> tuple[list[str], list[str]]:
    """The top layer's output of each step, and how the step attends to the source.

    The bottom layer's output of the step before asks (section 3); the answer goes into all layers beside their input.
    """
    hidden, batch, units = config.hidden, config.batch, config.attention
    cells = []
    for layer in range(config.layers):
        with b.scope("layers", f"layers.{layer}"):
            cells.append(draw_cell(b, 2 * hidden, hidden))
    with b.scope("attention"):
        query_weight = b.parameter("query", b.normal((hidden, units), 2.0 / math.sqrt(hidden)))
        score_weight = b.parameter("score", b.normal((units, 1), 4.0 / math.sqrt(units)))
        with b.scope("keys"):
            keys = linear(b, sequence, hidden, units)
    states = [(zero, zero)] * config.layers
    tops, alignments = [], []
    for word in words:
        with b.scope("attention"):
            query = b.node("Unsqueeze", b.node("MatMul", states[0][0], query_weight), b.constant([1]))
            energy = b.node("MatMul", b.node("Tanh", b.node("Add", query, keys)), score_weight)
            weights = b.node("Softmax", reshape(b, energy, batch, 1, config.source), axis=-1)
            context = reshape(b, b.node("MatMul", weights, sequence), batch, hidden)
            alignments.append(weights)
        x = word
        for layer, cell in enumerate(cells):
            with b.scope("layers", f"layers.{layer}"):
                states[layer] = take_step(b, cell, b.node("Concat", x, context, axis=1), states[layer])
                x = b.node("Add", states[layer][0], x) if layer > 1 else states[layer][0]
        tops.append(x)
    return tops, alignments
