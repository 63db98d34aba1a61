"""The recurrent networks of TensorFlow-Examples, forward: a bidirectional LSTM, and one over sequences with lengths.

The 2019 paper names TensorFlow-Examples as the source of its micro-benchmarks and no sizes: those of ``paper`` are the
examples' (``bidirectional_rnn.py``, ``dynamic_rnn.py``). The cells are ONNX ``LSTM`` nodes, which the frontend unrolls:
the examples unroll theirs as well (TensorFlow's static ``rnn``), one cell for each time step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.draws import integers, uniform
from souffle.models.layers import linear, reshape

__all__ = [
    "BIDIRECTIONAL_SIZES",
    "DYNAMIC_SIZES",
    "RecurrentConfig",
    "build_bidirectional",
    "build_dynamic",
    "recurrent_weights",
]

# Keeps what reaches the last step from fading, without making the recurrence chaotic.
_GAIN = 1.5


@dataclass(frozen=True)
class RecurrentConfig:
    """Batch, time steps, features of each, hidden units of a direction, and classes."""

    batch: int
    steps: int
    features: int
    hidden: int
    classes: int


BIDIRECTIONAL_SIZES = {
    "paper": RecurrentConfig(batch=128, steps=28, features=28, hidden=128, classes=10),
    "tiny": RecurrentConfig(batch=3, steps=4, features=5, hidden=6, classes=4),
}
DYNAMIC_SIZES = {
    "paper": RecurrentConfig(batch=128, steps=20, features=1, hidden=64, classes=2),
    "tiny": RecurrentConfig(batch=4, steps=5, features=1, hidden=6, classes=2),
}


def recurrent_weights(
    b: GraphBuilder, operator: str, directions: int, inputs: int, hidden: int, forget: float = 0.0
) -> tuple[str, str, str]:
    """W, R and B of an ``LSTM`` or ``GRU`` node; `forget` is added to the bias of the LSTM's forget gates."""
    gates = {"LSTM": 4, "GRU": 3}[operator] * hidden
    w = b.normal((directions, gates, inputs), _GAIN / math.sqrt(inputs))
    r = b.normal((directions, gates, hidden), _GAIN / math.sqrt(hidden))
    bias = b.normal((directions, 2 * gates), 0.1)
    if operator == "LSTM":
        bias[:, 2 * hidden : 3 * hidden] += np.float32(forget)
    return b.folded(operator, w), b.folded(operator, r), b.folded(operator, bias)


def build_bidirectional(config: RecurrentConfig, seed: int) -> ModelProto:
    """Build ``bi-rnn``: ``input`` (batch, steps, features), an image's rows as steps, ``output`` (batch, classes),
    logits.

    The classifier reads both directions' outputs of the last step, of which the backward one has seen that step alone.
    """
    b = GraphBuilder("bi-rnn", seed)
    x = b.input("input", (config.batch, config.steps, config.features), drawn=uniform(0, 1))
    x = b.node("Transpose", x, perm=[1, 0, 2])
    weights = recurrent_weights(b, "LSTM", 2, config.features, config.hidden, forget=1.0)
    y = b.nodes("LSTM", (x, *weights), 3, hidden_size=config.hidden, direction="bidirectional")[0]
    last = b.node("Gather", y, b.constant(config.steps - 1), axis=0)
    last = reshape(b, b.node("Transpose", last, perm=[1, 0, 2]), config.batch, 2 * config.hidden)
    with b.scope("out"):
        result = linear(b, last, 2 * config.hidden, config.classes, gain=2.0)
    b.output(result, "output", (config.batch, config.classes))
    return b.model()


def build_dynamic(config: RecurrentConfig, seed: int) -> ModelProto:
    """Build ``dyn-rnn``: ``input`` (batch, steps, features) and ``lengths`` (batch,), int32, ``output`` (batch,
    classes).

    As in the example, the output of each sequence's last step is gathered from those of all steps and sequences.
    """
    b = GraphBuilder("dyn-rnn", seed)
    batch, steps, hidden = config.batch, config.steps, config.hidden
    x = b.input("input", (batch, steps, config.features), drawn=uniform(0, 1))
    lengths = b.input("lengths", (batch,), np.int32, integers(1, steps + 1))
    x = b.node("Transpose", x, perm=[1, 0, 2])
    weights = recurrent_weights(b, "LSTM", 1, config.features, hidden, forget=1.0)
    y = b.nodes("LSTM", (x, *weights, lengths), 3, hidden_size=hidden)[0]
    y = b.node("Transpose", b.node("Squeeze", y, b.constant([1])), perm=[1, 0, 2])
    starts = b.parameter("starts", np.arange(batch, dtype=np.int32) * steps)
    index = b.node("Add", starts, b.node("Sub", lengths, b.constant(np.array(1, np.int32))))
    last = b.node("Gather", reshape(b, y, batch * steps, hidden), index, axis=0)
    with b.scope("out"):
        result = linear(b, last, hidden, config.classes, gain=2.0)
    b.output(result, "output", (batch, config.classes))
    return b.model()
