"""A stack of LSTM layers, as ONNX ``LSTM`` nodes and as unrolled cells of elementary operators.

Both forms draw the same weights from the same seed and compute the same function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.builder import GraphBuilder

__all__ = ["SIZES", "LstmConfig", "build_lstm", "build_lstm_unrolled"]

# Without it the state would fade from layer to layer; a much larger one would make the recurrence chaotic, so that
# two correct implementations drift apart.
_GAIN = 1.5


@dataclass(frozen=True)
class LstmConfig:
    """Layers, time steps, width, which is that of the input and of the hidden state, and sequences of a batch."""

    layers: int
    steps: int
    hidden: int
    batch: int = 1


SIZES = {
    "paper": LstmConfig(layers=10, steps=100, hidden=256),
    "tiny": LstmConfig(layers=3, steps=4, hidden=16),
}


def build_lstm(config: LstmConfig, seed: int) -> ModelProto:
    """Build ``nn.LSTM`` with zero initial state: ``input`` and ``output`` are (steps, batch, hidden)."""
    b = GraphBuilder("lstm", seed)
    shape = (config.steps, config.batch, config.hidden)
    x = b.input("input", shape)
    with b.scope("lstm"):
        for _ in range(config.layers):
            w_ih, w_hh, b_ih, b_hh = (_onnx_gates(p) for p in _draw_layer(b, config.hidden))
            weights = [b.folded("LSTM", p[None]) for p in (w_ih, w_hh, np.concatenate([b_ih, b_hh]))]
            state = np.zeros((1, config.batch, config.hidden), np.float32)
            states = b.folded("LSTM", state), b.folded("LSTM", state)
            outputs = b.nodes("LSTM", (x, *weights, "", *states), 3, hidden_size=config.hidden)
            # Y is (steps, directions, batch, hidden) with one direction.
            x = b.node("Squeeze", outputs[0], b.constant([1]))
    b.output(x, "output", shape)
    return b.model()


def build_lstm_unrolled(config: LstmConfig, seed: int) -> ModelProto:
    """Build the same network with a cell for each layer and time step, which share their layer's weights."""
    b = GraphBuilder("lstm-unrolled", seed)
    hidden = config.hidden
    shape = (config.steps, config.batch, hidden)
    sequence = b.input("input", shape)
    weights = []
    for layer in range(config.layers):
        with b.scope("cells", f"cells.{layer}"):
            w_ih, w_hh, b_ih, b_hh = _draw_layer(b, hidden)
            with b.scope("ih"):
                ih = b.parameter("weight", w_ih), b.parameter("bias", b_ih)
            with b.scope("hh"):
                weights.append((ih, (b.parameter("weight", w_hh), b.parameter("bias", b_hh))))
    sizes = b.folded("Split", np.full(4, hidden, np.int64))
    zero = b.folded("Gemm", np.zeros((config.batch, hidden), np.float32))
    state = [(zero, zero)] * config.layers
    results = []
    for step in range(config.steps):
        x = b.node("Gather", sequence, b.constant(step), axis=0)
        for layer in range(config.layers):
            with b.scope("cells", f"cells.{layer}"):
                state[layer] = _cell(b, x, state[layer], weights[layer], sizes)
            x = state[layer][0]
        results.append(b.node("Unsqueeze", x, b.constant([0])))
    b.output(b.node("Concat", *results, axis=0), "output", shape)
    return b.model()


def _draw_layer(b: GraphBuilder, hidden: int) -> tuple[np.ndarray, ...]:
    """Weights of one layer as PyTorch stores them, gates in the order input, forget, cell, output."""
    std = _GAIN / math.sqrt(hidden)
    weights = tuple(b.normal((4 * hidden, hidden), std) for _ in range(2))
    return (*weights, *(b.normal((4 * hidden,), 0.1) for _ in range(2)))


def _onnx_gates(values: np.ndarray) -> np.ndarray:
    """Reorder gates to ONNX's input, output, forget, cell."""
    i, f, g, o = np.split(values, 4)
    return np.concatenate([i, o, f, g])


def _cell(
    b: GraphBuilder, x: str, state: tuple[str, str], weights: Sequence[tuple[str, str]], sizes: str
) -> tuple[str, str]:
    h, c = state
    with b.scope("ih"):
        from_input = b.node("Gemm", x, *weights[0], alpha=1.0, beta=1.0, transB=1)
    with b.scope("hh"):
        from_state = b.node("Gemm", h, *weights[1], alpha=1.0, beta=1.0, transB=1)
    gates = b.node("Add", from_input, from_state)
    i, f, g, o = b.nodes("Split", (gates, sizes), 4, axis=1)
    i, f, g, o = b.node("Sigmoid", i), b.node("Sigmoid", f), b.node("Tanh", g), b.node("Sigmoid", o)
    c = b.node("Add", b.node("Mul", f, c), b.node("Mul", i, g))
    return b.node("Mul", o, b.node("Tanh", c)), c
