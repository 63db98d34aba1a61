"""An LSTM cell of elementary operators with one product for all gates, as TensorFlow's, for unrolled networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from souffle.models.builder import GraphBuilder

__all__ = ["LstmCell", "draw_cell", "take_step"]

# Keeps what reaches the last step and layer from fading, without making the recurrence chaotic.
_GAIN = 1.5


@dataclass(frozen=True)
class LstmCell:
    """Names of a cell's parameters, which its steps share.

    Attributes
    ----------
    weight
        (input + output, 4 * hidden); gates in the order input, candidate, forget, output.
    bias
        (4 * hidden,).
    sizes
        How the gates are split.
    projection
        (hidden, output), where the output is projected (Sak et al. 2014).
    """

    weight: str
    bias: str
    sizes: str
    projection: str | None


def draw_cell(b: GraphBuilder, inputs: int, hidden: int, projected: int | None = None, forget: float = 1.0) -> LstmCell:
    """Draw the parameters of a cell, in the current module; `forget` is added to the forget gate's bias."""
    outputs = hidden if projected is None else projected
    std = _GAIN / math.sqrt(inputs + outputs)
    bias = b.normal((4 * hidden,), 0.1)
    bias[2 * hidden : 3 * hidden] += np.float32(forget)
    weight = b.parameter("weight", b.normal((inputs + outputs, 4 * hidden), std))
    names = weight, b.parameter("bias", bias), b.parameter("sizes", np.full(4, hidden, np.int64))
    if projected is None:
        return LstmCell(*names, None)
    # Outputs before the projection have a second moment far below one.
    return LstmCell(*names, b.parameter("projection", b.normal((hidden, projected), 2.0 / math.sqrt(hidden))))


def take_step(b: GraphBuilder, cell: LstmCell, x: str, state: tuple[str, str]) -> tuple[str, str]:
    """The output and the inner state behind a step, from those before it."""
    h, c = state
    gates = b.node("Add", b.node("MatMul", b.node("Concat", x, h, axis=1), cell.weight), cell.bias)
    i, j, f, o = b.nodes("Split", (gates, cell.sizes), 4, axis=1)
    kept = b.node("Mul", b.node("Sigmoid", f), c)
    c = b.node("Add", kept, b.node("Mul", b.node("Sigmoid", i), b.node("Tanh", j)))
    h = b.node("Mul", b.node("Sigmoid", o), b.node("Tanh", c))
    return (h if cell.projection is None else b.node("MatMul", h, cell.projection)), c
