"""Deep Interest Evolution Network, as it predicts: a GRU over a history, attention, a GRU that it slows, a classifier.

Batch 256 is the 2021 paper's (Table 1). The rest is the network that it cites (Zhou et al. 2019) with its published
code (mouna99/dien, ``DIN-V2-gru-vec-attGru``): embeddings of 18, 36 hidden units, attention through 80 and 40 units, a
classifier of 200, 80 and 2 with Dice between them, histories of at most 100, and the users, goods and categories of
its data set Books (Table 1 there). The mask of a history, an input there, is made here of its length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.draws import integers
from souffle.models.layers import gemm, linear, reshape
from souffle.models.recurrent import recurrent_weights

__all__ = ["SIZES", "DienConfig", "build_dien"]

# What the published code puts in place of scores that do not count, and adds to probabilities and to moments.
_MASKED = -(2.0**32) + 1
_ON_PROBABILITY = 1e-8
_IN_DICE = 1e-9
_IN_NORM = 1e-3


@dataclass(frozen=True)
class DienConfig:
    """Batch, length of a history, users, goods, categories, an embedding's width, units of attention and classifier."""

    batch: int
    history: int
    users: int
    goods: int
    categories: int
    embedding: int
    attention: tuple[int, int]
    classifier: tuple[int, int]

    @property
    def item(self) -> int:
        """Width of an item, and of the hidden states: the embeddings of its good and of its category."""
        return 2 * self.embedding


SIZES = {
    "paper": DienConfig(256, 100, 603668, 367982, 1600, embedding=18, attention=(80, 40), classifier=(200, 80)),
    "tiny": DienConfig(4, 5, 9, 17, 6, embedding=3, attention=(8, 5), classifier=(10, 7)),
}


def build_dien(config: DienConfig, seed: int) -> ModelProto:
    """Build the network.

    ``user``, ``good`` and ``category`` (batch,), ``goods`` and ``categories`` (batch, history), int64, and ``lengths``
    (batch,), int32, give ``output`` (batch, 2), probabilities that the user clicks on the good, or not.
    """
    b = GraphBuilder("dien", seed)
    batch, history, width = config.batch, config.history, config.item
    user, good, category = (b.input(name, (batch,), np.int64) for name in ("user", "good", "category"))
    goods, categories = (b.input(name, (batch, history), np.int64) for name in ("goods", "categories"))
    lengths = b.input("lengths", (batch,), np.int32, integers(1, history + 1))
    tables = [
        b.parameter(f"{name}.weight", b.normal((rows, config.embedding), 1.0))
        for name, rows in (("users", config.users), ("goods", config.goods), ("categories", config.categories))
    ]
    user = b.node("Gather", tables[0], user, axis=0)
    item = [b.node("Gather", table, index, axis=0) for table, index in zip(tables[1:], (good, category), strict=True)]
    item = b.node("Concat", *item, axis=1)
    done = [
        b.node("Gather", table, index, axis=0) for table, index in zip(tables[1:], (goods, categories), strict=True)
    ]
    done = b.node("Concat", *done, axis=2)
    with b.scope("gru1"):
        weights = recurrent_weights(b, "GRU", 1, width, width)
        states = b.nodes("GRU", (b.node("Transpose", done, perm=[1, 0, 2]), *weights, lengths), 2, hidden_size=width)[0]
        states = b.node("Squeeze", states, b.constant([1]))
    with b.scope("attention"):
        weights = _attention(b, config, item, b.node("Transpose", states, perm=[1, 0, 2]), lengths)
    with b.scope("gru2"):
        interest = _evolve(b, config, states, weights, lengths)
    total = b.node("ReduceSum", done, b.constant([1]), keepdims=0)
    x = b.node("Concat", user, item, interest, total, axis=1)
    b.output(_classify(b, config, x, config.embedding + 3 * width), "output", (batch, 2))
    return b.model()


def _attention(b: GraphBuilder, config: DienConfig, item: str, states: str, lengths: str) -> str:
    """How much each state counts for the item, (batch, history)."""
    batch, history, width = config.batch, config.history, config.item
    with b.scope("query"):
        query = gemm(b, item, width, width)
        slope = b.parameter("alpha", b.normal((width,), 0.05, mean=0.1))
        zero = b.constant(0.0)
        query = b.node("Add", b.node("Max", query, zero), b.node("Mul", slope, b.node("Min", query, zero)))
    query = b.node("Expand", b.node("Unsqueeze", query, b.constant([1])), b.constant([batch, history, width]))
    apart, alike = b.node("Sub", query, states), b.node("Mul", query, states)
    x, inputs = b.node("Concat", query, states, apart, alike, axis=2), 4 * width
    for layer, units in enumerate(config.attention):
        with b.scope(f"f{layer + 1}"):
            x, inputs = b.node("Sigmoid", linear(b, x, inputs, units, gain=2.0)), units
    with b.scope("f3"):
        scores = reshape(b, linear(b, x, inputs, 1, gain=4.0), batch, history)
    places = b.parameter("places", np.arange(history, dtype=np.int32)[None])
    counts = b.node("Less", places, b.node("Unsqueeze", lengths, b.constant([1])))
    return b.node("Softmax", b.node("Where", counts, scores, b.constant(_MASKED)), axis=-1)


def _evolve(b: GraphBuilder, config: DienConfig, states: str, weights: str, lengths: str) -> str:
    """The last state of the second GRU, whose update gate attention scales; unrolled, for ONNX has no such cell."""
    width = config.item
    std = 1.5 / math.sqrt(2 * width)
    gates = (
        b.parameter("gates.weight", b.normal((2 * width, 2 * width), std)),
        b.parameter("gates.bias", b.normal((2 * width,), 0.1, mean=1.0)),
    )
    candidate = (
        b.parameter("candidate.weight", b.normal((2 * width, width), std)),
        b.parameter("candidate.bias", b.normal((width,), 0.1)),
    )
    halves, one = b.folded("Split", np.full(2, width, np.int64)), b.constant(1.0)
    lengths = b.node("Unsqueeze", lengths, b.constant([1]))
    state = b.folded("Concat", np.zeros((config.batch, width), np.float32))
    for step in range(config.history):
        x = b.node("Gather", states, b.constant(step), axis=0)
        weight = b.node("Slice", weights, b.constant([step]), b.constant([step + 1]), b.constant([1]))
        both = b.node("Gemm", b.node("Concat", x, state, axis=1), *gates, alpha=1.0, beta=1.0)
        reset, update = b.nodes("Split", (b.node("Sigmoid", both), halves), 2, axis=1)
        both = b.node("Concat", x, b.node("Mul", reset, state), axis=1)
        new = b.node("Tanh", b.node("Gemm", both, *candidate, alpha=1.0, beta=1.0))
        update = b.node("Mul", b.node("Sub", one, weight), update)
        new = b.node("Add", b.node("Mul", update, state), b.node("Mul", b.node("Sub", one, update), new))
        # A sequence that has ended keeps its state.
        lasts = b.node("Greater", lengths, b.constant(np.array(step, np.int32)))
        state = b.node("Where", lasts, new, state)
    return state


def _classify(b: GraphBuilder, config: DienConfig, x: str, inputs: int) -> str:
    with b.scope("bn1"):
        scale, shift = b.normal((inputs,), 0.1, mean=1.0), b.normal((inputs,), 0.1)
        # Moments of training, folded into the scale and the shift.
        scale /= np.float32(math.sqrt(1.0 + _IN_NORM))
        x = b.node("Add", b.node("Mul", x, b.parameter("scale", scale)), b.parameter("shift", shift))
    for layer, units in enumerate(config.classifier):
        with b.scope(f"dnn{layer + 1}"):
            x = _dice(b, gemm(b, x, inputs, units), units)
        inputs = units
    with b.scope("dnn3"):
        x = gemm(b, x, inputs, 2)
    return b.node("Add", b.node("Softmax", x, axis=-1), b.constant(_ON_PROBABILITY))


def _dice(b: GraphBuilder, x: str, units: int) -> str:
    """Dice (Zhou et al. 2018) with the moments of the batch, which the published code takes when it predicts too."""
    epsilon, one = b.constant(_IN_DICE), b.constant(1.0)
    centred = b.node("Sub", x, b.node("ReduceMean", x, axes=[0], keepdims=1))
    square = b.node("Add", b.node("Mul", centred, centred), epsilon)
    deviation = b.node("Sqrt", b.node("ReduceMean", square, axes=[0], keepdims=1))
    on = b.node("Sigmoid", b.node("Div", centred, b.node("Add", deviation, epsilon)))
    slope = b.parameter("alpha", b.normal((units,), 0.1, mean=0.2))
    off = b.node("Mul", b.node("Mul", slope, b.node("Sub", one, on)), x)
    return b.node("Add", off, b.node("Mul", on, x))
