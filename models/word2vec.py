"""Word2vec (skip-gram with noise-contrastive estimation) of TensorFlow-Examples: nearest words, and a training step.

The 2019 paper names TensorFlow-Examples as the source of its micro-benchmarks and no sizes: those of ``paper`` are the
example's (``word2vec.py``): at most 50,000 words, embeddings of 200, batches of 128, 64 negative samples, six words
whose neighbours are asked for, learning rate 0.1. Samples are an input, for a drawn one would differ from run to run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.draws import integers
from souffle.models.training import parameter, transposed

__all__ = ["SIZES", "Word2vecConfig", "build_word2vec", "build_word2vec_step"]


@dataclass(frozen=True)
class Word2vecConfig:
    """Words, width of an embedding, batch, negative samples, words that are asked for, and learning rate."""

    words: int
    width: int
    batch: int
    samples: int
    asked: int
    rate: float


SIZES = {
    "paper": Word2vecConfig(words=50000, width=200, batch=128, samples=64, asked=6, rate=0.1),
    "tiny": Word2vecConfig(words=23, width=10, batch=8, samples=5, asked=3, rate=4.0),
}


def build_word2vec(config: Word2vecConfig, seed: int) -> ModelProto:
    """Build what the example evaluates between steps: the cosine similarity of some words to all.

    ``words`` (asked,), int64, and ``embedding`` (words, width) give ``output`` (asked, words). The embedding is an
    input, since it is in training. As in the example, the words that are asked for are divided by their norm as one
    matrix.
    """
    b = GraphBuilder("word2vec", seed)
    words = b.input("words", (config.asked,), np.int64, integers(0, config.words))
    embedding = parameter(b, "embedding", (config.words, config.width), 1.0)
    asked = b.node("Gather", embedding, words, axis=0)
    square = b.node("Mul", asked, asked)
    asked = b.node("Div", asked, b.node("Sqrt", b.node("ReduceSum", square, keepdims=0)))
    square = b.node("Mul", embedding, embedding)
    norms = b.node("Sqrt", b.node("ReduceSum", square, b.constant([1]), keepdims=1))
    similarity = b.node("MatMul", asked, transposed(b, b.node("Div", embedding, norms)))
    b.output(similarity, "output", (config.asked, config.words))
    return b.model()


def build_word2vec_step(config: Word2vecConfig, seed: int) -> ModelProto:
    """Build a step of gradient descent on the noise-contrastive loss.

    ``words`` and ``contexts`` (batch,) and ``samples`` (samples,), int64, ``embedding`` and ``nce_weight`` (words,
    width) and ``nce_bias`` (words,) give ``loss`` (), ``embedding_new``, ``nce_weight_new`` and ``nce_bias_new``.
    Gradients are of the rows that were looked up, and are added into their tables; a row may be looked up several
    times.

    The counts with which words are expected among the samples are the log-uniform sampler's with replacement, samples *
    log((k + 2) / (k + 1)) / log(words + 1): TensorFlow's, without, depend on the tries that a draw happened to need.
    """
    b = GraphBuilder("word2vec-train", seed)
    draw = integers(0, config.words)
    words = b.input("words", (config.batch,), np.int64, draw)
    contexts = b.input("contexts", (config.batch,), np.int64, draw)
    samples = b.input("samples", (config.samples,), np.int64, draw)
    embedding = parameter(b, "embedding", (config.words, config.width), 1.0 / math.sqrt(config.width))
    table = parameter(b, "nce_weight", (config.words, config.width), 1.0)
    biases = parameter(b, "nce_bias", (config.words,), 0.1)
    rank = np.arange(config.words)
    expected = config.samples * np.log((rank + 2) / (rank + 1)) / np.log(config.words + 1)
    offsets = b.node("Sub", biases, b.parameter("expected", np.log(expected).astype(np.float32)))

    looked, true = (b.node("Gather", t, i, axis=0) for t, i in ((embedding, words), (table, contexts)))
    noise = b.node("Gather", table, samples, axis=0)
    product = b.node("ReduceSum", b.node("Mul", looked, true), b.constant([1]), keepdims=1)
    true_offset = b.node("Unsqueeze", b.node("Gather", offsets, contexts, axis=0), b.constant([1]))
    true_logit = b.node("Add", product, true_offset)
    noise_offset = b.node("Gather", offsets, samples, axis=0)
    noise_logit = b.node("Add", b.node("MatMul", looked, transposed(b, noise)), noise_offset)
    logits = b.node("Concat", true_logit, noise_logit, axis=1)
    label = np.zeros((config.batch, 1 + config.samples), np.float32)
    label[:, 0] = 1.0
    label_name = b.parameter("label", label)
    b.output(_mean_loss(b, logits, label_name), "loss", ())

    of_logits = b.node("Mul", b.node("Sub", b.node("Sigmoid", logits), label_name), b.constant(1.0 / config.batch))
    sizes = b.constant([1, config.samples])
    of_true, of_noise = b.nodes("Split", (of_logits, sizes), 2, axis=1)
    of_looked = b.node("Add", b.node("Mul", of_true, true), b.node("MatMul", of_noise, noise))
    of_rows = b.node("Mul", of_true, looked), b.node("MatMul", transposed(b, of_noise), looked)
    of_biases = b.node("Squeeze", of_true, b.constant([1])), b.node("ReduceSum", of_noise, b.constant([0]), keepdims=0)
    both = b.node("Concat", contexts, samples, axis=0)
    shape = (config.words, config.width)
    _descend_rows(b, embedding, words, of_looked, shape, config.rate)
    _descend_rows(b, table, both, b.node("Concat", *of_rows, axis=0), shape, config.rate)
    _descend_rows(b, biases, both, b.node("Concat", *of_biases, axis=0), shape[:1], config.rate)
    return b.model()


def _mean_loss(b: GraphBuilder, logits: str, label: str) -> str:
    """TensorFlow's sigmoid cross entropy, which overflows for no logit, summed over the classes."""
    linear = b.node("Sub", b.node("Relu", logits), b.node("Mul", logits, label))
    tail = b.node("Log", b.node("Add", b.node("Exp", b.node("Neg", b.node("Abs", logits))), b.constant(1.0)))
    return b.node(
        "ReduceMean", b.node("ReduceSum", b.node("Add", linear, tail), b.constant([1]), keepdims=0), keepdims=0
    )


def _descend_rows(b: GraphBuilder, name: str, rows: str, gradient: str, shape: tuple[int, ...], rate: float) -> None:
    index = b.node("Unsqueeze", rows, b.constant([1]))
    change = b.node("Mul", gradient, b.constant(-rate))
    b.output(b.node("ScatterND", name, index, change, reduction="add"), f"{name}_new", shape)
