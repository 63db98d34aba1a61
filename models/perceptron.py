"""Logistic regression and the multilayer perceptron of TensorFlow-Examples, as they predict and as they train.

The 2019 paper names TensorFlow-Examples as the source of its micro-benchmarks and no sizes: those of ``paper`` are the
examples' (``logistic_regression.py``, ``multilayer_perceptron.py``): MNIST's 784 pixels and 10 classes, batches of 100,
two hidden layers of 256, and their optimizers and learning rates. ``tiny`` has larger learning rates, so that a
wrong gradient shows in what the step leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.draws import one_hot, uniform
from souffle.models.layers import AFTER_RELU
from souffle.models.training import Adam, descend, linear_gradients, parameter, transposed

__all__ = [
    "LOGISTIC_SIZES",
    "PERCEPTRON_SIZES",
    "LogisticConfig",
    "PerceptronConfig",
    "build_logistic",
    "build_logistic_step",
    "build_perceptron",
    "build_perceptron_step",
]

# Below it the logarithm of a probability is cut off, as in the example.
_LEAST = 1e-10


@dataclass(frozen=True)
class LogisticConfig:
    """Batch, features, classes, and learning rate."""

    batch: int
    features: int
    classes: int
    rate: float


@dataclass(frozen=True)
class PerceptronConfig:
    """Batch, features, units of both hidden layers, classes, and learning rate."""

    batch: int
    features: int
    hidden: tuple[int, int]
    classes: int
    rate: float

    @property
    def layers(self) -> tuple[tuple[str, int, int], ...]:
        """Name, inputs and outputs of each layer."""
        widths = (self.features, *self.hidden, self.classes)
        return tuple((name, *widths[k : k + 2]) for k, name in enumerate(("hidden_1", "hidden_2", "out")))


LOGISTIC_SIZES = {
    "paper": LogisticConfig(batch=100, features=784, classes=10, rate=0.01),
    "tiny": LogisticConfig(batch=5, features=12, classes=4, rate=2.0),
}
PERCEPTRON_SIZES = {
    "paper": PerceptronConfig(batch=100, features=784, hidden=(256, 256), classes=10, rate=0.001),
    "tiny": PerceptronConfig(batch=5, features=12, hidden=(8, 6), classes=4, rate=0.1),
}


def build_logistic(config: LogisticConfig, seed: int) -> ModelProto:
    """Build the prediction: ``input`` (batch, features), ``output`` (batch, classes), probabilities."""
    b = GraphBuilder("logistic", seed)
    x = b.input("input", (config.batch, config.features), drawn=uniform(0, 1))
    weight = b.parameter("weight", b.normal((config.features, config.classes), 4.0 / math.sqrt(config.features)))
    logits = b.node("Add", b.node("MatMul", x, weight), b.parameter("bias", b.normal((config.classes,), 0.1)))
    b.output(b.node("Softmax", logits, axis=-1), "output", (config.batch, config.classes))
    return b.model()


def build_logistic_step(config: LogisticConfig, seed: int) -> ModelProto:
    """Build a step of gradient descent on the mean cross entropy.

    ``input`` (batch, features), ``label`` (batch, classes, one-hot), ``weight`` (features, classes) and ``bias``
    (classes,) give ``loss`` (), ``weight_new`` and ``bias_new``. The gradient passes the operators of the example one
    by one, as TensorFlow's does: the logarithm, the clipping, the softmax.
    """
    b = GraphBuilder("logistic-train", seed)
    batch, features, classes = config.batch, config.features, config.classes
    x = b.input("input", (batch, features), drawn=uniform(0, 1))
    label = b.input("label", (batch, classes), drawn=one_hot())
    weight = parameter(b, "weight", (features, classes), 1.0 / math.sqrt(features))
    bias = parameter(b, "bias", (classes,), 0.1)
    probability = b.node("Softmax", b.node("Add", b.node("MatMul", x, weight), bias), axis=-1)
    clipped = b.node("Clip", probability, b.constant(_LEAST), b.constant(1.0))
    entropy = b.node("ReduceSum", b.node("Mul", label, b.node("Log", clipped)), b.constant([1]), keepdims=0)
    b.output(b.node("ReduceMean", b.node("Neg", entropy), keepdims=0), "loss", ())
    of_clipped = b.node("Div", b.node("Mul", label, b.constant(-1.0 / batch)), clipped)
    below, above = b.node("Less", probability, b.constant(_LEAST)), b.node("Greater", probability, b.constant(1.0))
    of_probability = b.node("Where", b.node("Or", below, above), b.constant(0.0), of_clipped)
    shared = b.node("ReduceSum", b.node("Mul", of_probability, probability), b.constant([1]), keepdims=1)
    of_logits = b.node("Mul", b.node("Sub", of_probability, shared), probability)
    of_weight, of_bias = linear_gradients(b, x, of_logits)
    descend(b, weight, of_weight, (features, classes), config.rate)
    descend(b, bias, of_bias, (classes,), config.rate)
    return b.model()


def build_perceptron(config: PerceptronConfig, seed: int) -> ModelProto:
    """Build the prediction: ``input`` (batch, features), ``output`` (batch, classes), probabilities."""
    b = GraphBuilder("perceptron", seed)
    x = b.input("input", (config.batch, config.features), drawn=uniform(0, 1))
    for name, inputs, outputs in config.layers:
        with b.scope(name):
            weight = b.parameter("weight", b.normal((inputs, outputs), AFTER_RELU / math.sqrt(inputs)))
            x = b.node("Add", b.node("MatMul", x, weight), b.parameter("bias", b.normal((outputs,), 0.1)))
            if name != "out":
                x = b.node("Relu", x)
    b.output(b.node("Softmax", x, axis=-1), "output", (config.batch, config.classes))
    return b.model()


def build_perceptron_step(config: PerceptronConfig, seed: int) -> ModelProto:
    """Build a step of Adam on the mean cross entropy.

    ``input`` (batch, features), ``label`` (batch, classes, one-hot), and for each of the layers ``hidden_1``,
    ``hidden_2`` and ``out`` ``<layer>.weight`` (inputs, outputs) and ``<layer>.bias`` (outputs,), with Adam's state,
    give ``loss`` () and all parameters and states anew. The cross entropy of logits is one operator of TensorFlow,
    whose gradient is the softmax less the label.
    """
    b = GraphBuilder("perceptron-train", seed)
    x = b.input("input", (config.batch, config.features), drawn=uniform(0, 1))
    label = b.input("label", (config.batch, config.classes), drawn=one_hot())
    read, weights = [], []
    for name, inputs, outputs in config.layers:
        weights.append(parameter(b, f"{name}.weight", (inputs, outputs), AFTER_RELU / math.sqrt(inputs)))
        bias = parameter(b, f"{name}.bias", (outputs,), 0.1)
        read.append(x)
        x = b.node("Add", b.node("MatMul", x, weights[-1]), bias)
        if name != "out":
            x = b.node("Relu", x)
    logs = b.node("LogSoftmax", x, axis=-1)
    entropy = b.node("Neg", b.node("ReduceSum", b.node("Mul", label, logs), b.constant([1]), keepdims=0))
    b.output(b.node("ReduceMean", entropy, keepdims=0), "loss", ())
    adam = Adam(config.rate)
    size = adam.step_size(b)
    gradient = b.node("Mul", b.node("Sub", b.node("Exp", logs), label), b.constant(1.0 / config.batch))
    for k, (name, inputs, outputs) in reversed(list(enumerate(config.layers))):
        of_weight, of_bias = linear_gradients(b, read[k], gradient)
        if k:
            passed = b.node("MatMul", gradient, transposed(b, weights[k]))
            gradient = b.node("Where", b.node("Greater", read[k], b.constant(0.0)), passed, b.constant(0.0))
        adam.update(b, f"{name}.weight", of_weight, (inputs, outputs), size)
        adam.update(b, f"{name}.bias", of_bias, (outputs,), size)
    return b.model()
