"""The variational auto-encoder of TensorFlow-Examples, forward: from images and noise to their reconstruction and loss.

The 2019 paper names TensorFlow-Examples as the source of its micro-benchmarks and no sizes: those of ``paper`` are the
example's (``variational_autoencoder.py``): 784 pixels, 512 hidden units, 2 latent variables, batches of 64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.draws import uniform

__all__ = ["SIZES", "VariationalConfig", "build_variational"]

_LEAST = 1e-10


@dataclass(frozen=True)
class VariationalConfig:
    """Batch, pixels, hidden units of encoder and decoder, and latent variables."""

    batch: int
    pixels: int
    hidden: int
    latent: int


SIZES = {
    "paper": VariationalConfig(batch=64, pixels=784, hidden=512, latent=2),
    "tiny": VariationalConfig(batch=5, pixels=14, hidden=9, latent=2),
}


def build_variational(config: VariationalConfig, seed: int) -> ModelProto:
    """Build the network: ``input`` (batch, pixels) from 0 to 1 and ``noise`` (batch, latent) give ``output``, the
    reconstruction (batch, pixels), and ``loss`` (). The noise, which the example draws, is an input.
    """
    b = GraphBuilder("var-encoder", seed)
    image = b.input("input", (config.batch, config.pixels), drawn=uniform(0, 1))
    noise = b.input("noise", (config.batch, config.latent))
    with b.scope("encoder"):
        hidden = b.node("Tanh", _dense(b, "h1", image, config.pixels, config.hidden))
        mean = _dense(b, "z_mean", hidden, config.hidden, config.latent)
        # The logarithm of a variance, although the example calls it z_std.
        spread = _dense(b, "z_std", hidden, config.hidden, config.latent)
    z = b.node("Add", mean, b.node("Mul", b.node("Exp", b.node("Div", spread, b.constant(2.0))), noise))
    with b.scope("decoder"):
        hidden = b.node("Tanh", _dense(b, "h1", z, config.latent, config.hidden))
        result = b.node("Sigmoid", _dense(b, "out", hidden, config.hidden, config.pixels))
    b.output(_loss(b, image, result, mean, spread), "loss", ())
    b.output(result, "output", (config.batch, config.pixels))
    return b.model()


def _dense(b: GraphBuilder, name: str, x: str, inputs: int, outputs: int) -> str:
    # The example's own initialization, but for the bias, which there has a standard deviation above 1 in small layers.
    with b.scope(name):
        weight = b.parameter("weight", b.normal((inputs, outputs), math.sqrt(2.0 / inputs)))
        return b.node("Add", b.node("MatMul", x, weight), b.parameter("bias", b.normal((outputs,), 0.1)))


def _loss(b: GraphBuilder, image: str, result: str, mean: str, spread: str) -> str:
    one, least = b.constant(1.0), b.constant(_LEAST)
    # In the order of the example, where 1e-10 + 1 is 1: a result that rounds to 1 takes the logarithm of 0.
    white = b.node("Mul", image, b.node("Log", b.node("Add", least, result)))
    black = b.node("Log", b.node("Sub", b.node("Add", least, one), result))
    black = b.node("Mul", b.node("Sub", one, image), black)
    rebuilt = b.node("Neg", b.node("ReduceSum", b.node("Add", white, black), b.constant([1]), keepdims=0))
    inner = b.node("Sub", b.node("Add", one, spread), b.node("Mul", mean, mean))
    inner = b.node("Sub", inner, b.node("Exp", spread))
    divergence = b.node("Mul", b.constant(-0.5), b.node("ReduceSum", inner, b.constant([1]), keepdims=0))
    return b.node("ReduceMean", b.node("Add", rebuilt, divergence), keepdims=0)
