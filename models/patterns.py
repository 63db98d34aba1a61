"""The two graphs that the papers on FusionStitching show: layer normalization and a pattern of a recommender system.

Both are written as the elementary operators of their figures, so that what is fused is the compiler's choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.draws import uniform

__all__ = [
    "INTERESTS_SIZES",
    "LAYER_NORM_SIZES",
    "InterestsConfig",
    "LayerNormConfig",
    "build_layer_norm",
    "build_multi_interests",
]


@dataclass(frozen=True)
class LayerNormConfig:
    """Rows and their width, over which each is normalized."""

    rows: int
    width: int


LAYER_NORM_SIZES = {
    "paper": LayerNormConfig(rows=32 * 128, width=768),
    "tiny": LayerNormConfig(rows=6, width=40),
}

# tf.contrib.layers.layer_norm's.
_EPSILON = 1e-12


def build_layer_norm(config: LayerNormConfig, seed: int) -> ModelProto:
    """Build Figure 1 of the 2021 paper: ``input`` and ``output`` are (rows, width).

    The figure's operators are TensorFlow's, whose ``layer_norm`` takes moments and then calls ``batch_normalization``:
    two reductions, an expensive operator on a small tensor (the root; XLA's ``fusion.2``), and the element-wise rest,
    four kernels of XLA's. HLO's ``rsqrt`` is two operators in ONNX, ``Sqrt`` and ``Reciprocal``; means are sums times a
    constant, as in HLO.

    The text names no sizes. Chosen: the layer normalizations of the paper's BERT, 32 sequences (Table 1) of 128 tokens
    (the length of nine tenths of BERT's training, Devlin et al. 2019, A.2), hidden width 768.
    """
    b = GraphBuilder("layer-norm", seed)
    shape = (config.rows, config.width)
    x = b.input("input", shape)
    scale = b.parameter("gamma", b.normal((config.width,), 0.1, mean=1.0))
    shift = b.parameter("beta", b.normal((config.width,), 0.1))
    mean = _mean(b, x, config.width)
    centred = b.node("Sub", x, mean)
    variance = _mean(b, b.node("Mul", centred, centred), config.width)
    root = b.node("Sqrt", b.node("Add", variance, b.constant(_EPSILON)))
    factor = b.node("Mul", b.node("Reciprocal", root), scale)
    moved = b.node("Sub", shift, b.node("Mul", mean, factor))
    b.output(b.node("Add", b.node("Mul", x, factor), moved), "output", shape)
    return b.model()


def _mean(b: GraphBuilder, x: str, width: int) -> str:
    total = b.node("ReduceSum", x, b.constant([-1]), keepdims=1)
    return b.node("Mul", total, b.constant(1.0 / width))


@dataclass(frozen=True)
class InterestsConfig:
    """Batch, behaviours of a user, and width of what a dot product sums over."""

    batch: int
    behaviours: int
    width: int


INTERESTS_SIZES = {
    "paper": InterestsConfig(batch=16384, behaviours=94, width=2),
    "tiny": InterestsConfig(batch=4, behaviours=6, width=2),
}


def build_multi_interests(config: InterestsConfig, seed: int) -> ModelProto:
    """Build the pattern of Figure 1 of the 2019 paper, taken from the training of ``multi-interests``.

    With n behaviours and width k: ``query`` (batch, n, k), ``key`` (batch, k, n), ``value`` and ``target`` (batch, n,
    k); ``divide`` and ``multiply_2`` (batch, n, k), ``log_1`` and ``subtract`` (batch, n, 1).

    The paper's text gives: nine element-wise operators, two reductions, two batched GEMMs; ``dot_1`` of two small
    tensors (12 MB) into a large one (552 MB), which ``dot_2`` reads, behind element-wise operators, and makes small
    again; outputs ``divide``, ``log_1``, ``multiply_2`` and ``subtract``; and 94 * 94 * 4 bytes of shared memory for
    each of ``dot_1`` and ``add`` (§5.4). So n = 94, and 552 MiB of 94 * 94 floats are 16384 of them; with k = 2 each
    operand of ``dot_1`` has 11.75 MiB.

    The edges of the figure are not in its text. Chosen, with each of its names once: an attention whose sum is divided
    out behind the second product, with the logarithm of its partition function, as a backward pass keeps it, and the
    log-likelihood of ``target``. No maximum is subtracted before the exponential, since the figure has one subtraction
    and that is an output.
    """
    b = GraphBuilder("multi-interests", seed)
    n, k = config.behaviours, config.width
    query = b.input("query", (config.batch, n, k))
    key = b.input("key", (config.batch, k, n))
    value = b.input("value", (config.batch, n, k), drawn=uniform(0.1, 2.0))
    target = b.input("target", (config.batch, n, k), drawn=uniform(0.1, 2.0))
    places = b.parameter("places", b.normal((n, n), 0.5))
    dot_1 = b.node("MatMul", query, key)
    multiply_1 = b.node("Mul", dot_1, b.constant(1.0 / math.sqrt(k)))
    add = b.node("Add", multiply_1, places)
    exponential = b.node("Exp", add)
    reduce_1 = b.node("ReduceSum", exponential, b.constant([-1]), keepdims=1)
    log_1 = b.node("Log", reduce_1)
    dot_2 = b.node("MatMul", exponential, value)
    divide = b.node("Div", dot_2, reduce_1)
    multiply_2 = b.node("Mul", divide, target)
    reduce_2 = b.node("ReduceSum", multiply_2, b.constant([-1]), keepdims=1)
    log_2 = b.node("Log", b.node("Max", reduce_2, b.constant(1e-10)))
    subtract = b.node("Sub", log_2, log_1)
    b.output(divide, "divide", (config.batch, n, k))
    b.output(log_1, "log_1", (config.batch, n, 1))
    b.output(multiply_2, "multiply_2", (config.batch, n, k))
    b.output(subtract, "subtract", (config.batch, n, 1))
    return b.model()
