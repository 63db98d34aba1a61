"""EfficientNet, batch norm folded, and its squeeze-and-excitation sub-modules alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.batchnorm import Traced, norm_conv, sample_images, sigmoid
from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_SWISH, gemm, swish

__all__ = ["SE_SIZES", "SIZES", "EfficientNetConfig", "SeConfig", "StageConfig", "build_efficientnet", "build_se"]

# The two layers of an excitation are random about a mean that makes strong inputs close it. Products of a value with a
# function of itself otherwise spread images of different contrast further apart in each block, until some saturate.
_SQUEEZE_MEAN = 4.0
_EXCITE_MEAN = -3.0
_EXCITE_BIAS = 2.0
# Deviation of what a block adds to its input, so that the sum grows little over a stage.
_RESIDUAL = 0.5


@dataclass(frozen=True)
class StageConfig:
    """Expansion factor, kernel, stride of the first block, output channels and number of blocks."""

    expansion: int
    kernel: int
    stride: int
    channels: int
    blocks: int


@dataclass(frozen=True)
class EfficientNetConfig:
    """Image side, stem channels, stages, channels of the last convolution, classes, and images of a batch."""

    image: int
    stem: int
    stages: tuple[StageConfig, ...]
    head: int
    classes: int
    batch: int = 1


@dataclass(frozen=True)
class SeConfig:
    """Height, width, channels, channels between the two fully connected layers, and images of a batch."""

    height: int
    width: int
    channels: int
    reduced: int
    batch: int = 1


SIZES = {
    "paper": EfficientNetConfig(
        image=224,
        stem=32,
        stages=(
            StageConfig(1, 3, 1, 16, 1),
            StageConfig(6, 3, 2, 24, 2),
            StageConfig(6, 5, 2, 40, 2),
            StageConfig(6, 3, 2, 80, 3),
            StageConfig(6, 5, 1, 112, 3),
            StageConfig(6, 5, 2, 192, 4),
            StageConfig(6, 3, 1, 320, 1),
        ),
        head=1280,
        classes=1000,
    ),
    "tiny": EfficientNetConfig(
        image=32,
        stem=8,
        stages=(StageConfig(1, 3, 1, 8, 1), StageConfig(4, 3, 2, 12, 2), StageConfig(4, 5, 2, 16, 2)),
        head=32,
        classes=10,
    ),
}

_SE_PAPER = (
    SeConfig(112, 112, 32, 8),
    SeConfig(56, 56, 96, 4),
    SeConfig(56, 56, 144, 6),
    SeConfig(28, 28, 144, 6),
    SeConfig(28, 28, 240, 10),
    SeConfig(14, 14, 240, 10),
    SeConfig(14, 14, 480, 20),
    SeConfig(14, 14, 672, 28),
    SeConfig(7, 7, 672, 28),
    SeConfig(7, 7, 1152, 48),
)


def _shrink(config: SeConfig) -> SeConfig:
    side = max(3, config.height // 14)
    return SeConfig(side, side, max(8, config.channels // 16), max(2, config.reduced // 4))


# Configurations of M0 to M9 of the paper's Figure 6, in that order.
SE_SIZES = {"paper": _SE_PAPER, "tiny": tuple(_shrink(config) for config in _SE_PAPER)}


def build_efficientnet(config: EfficientNetConfig, seed: int) -> ModelProto:
    """Build the classifier: ``input`` (batch, 3, image, image), ``output`` (batch, classes)."""
    b = GraphBuilder("efficientnet", seed)
    x = Traced(b.input("input", (config.batch, 3, config.image, config.image)), sample_images(b, config.image))
    with b.scope("features", "features.0"):
        x = _conv_swish(b, x, "features.0", config.stem, kernel=3, stride=2)
    for number, stage in enumerate(config.stages, start=1):
        for block in range(stage.blocks):
            stride = stage.stride if block == 0 else 1
            with b.scope("features", f"features.{number}", f"features.{number}.{block}"):
                x = _mbconv(b, x, stage, stride)
    last = f"features.{len(config.stages) + 1}"
    with b.scope("features", last):
        x = _conv_swish(b, x, last, config.head)
    with b.scope("avgpool"):
        y = b.node("GlobalAveragePool", x.name)
    y = b.node("Flatten", y, axis=1)
    with b.scope("classifier", "classifier.1"):
        y = gemm(b, y, config.head, config.classes, gain=AFTER_SWISH)
    b.output(y, "output", (config.batch, config.classes))
    return b.model()


def build_se(config: SeConfig, seed: int) -> ModelProto:
    """Build one squeeze-and-excitation module: ``input`` and ``output`` are (batch, channels, height, width)."""
    b = GraphBuilder("squeeze-excitation", seed)
    shape = (config.batch, config.channels, config.height, config.width)
    x = b.input("input", shape)
    # The sample serves a network's next batch norm and is of no use to a module alone.
    sample = np.zeros((1, config.channels, 1, 1), np.float32)
    y = _squeeze_excitation(b, Traced(x, sample), config.reduced)
    b.output(y.name, "output", shape)
    return b.model()


def _squeeze_excitation(b: GraphBuilder, x: Traced, reduced: int) -> Traced:
    channels = x.sample.shape[1]
    with b.scope("avgpool"):
        y = Traced(b.node("GlobalAveragePool", x.name), x.sample.mean(axis=(2, 3), keepdims=True))
    with b.scope("fc1"):
        y = _fully_connected(b, y, reduced, _SQUEEZE_MEAN, 0.0)
    with b.scope("activation"):
        y = _swish(b, y)
    with b.scope("fc2"):
        y = _fully_connected(b, y, channels, _EXCITE_MEAN, _EXCITE_BIAS)
    with b.scope("scale_activation"):
        y = Traced(b.node("Sigmoid", y.name), sigmoid(y.sample))
    return Traced(b.node("Mul", y.name, x.name), y.sample * x.sample)


def _fully_connected(b: GraphBuilder, x: Traced, outputs: int, mean: float, bias: float) -> Traced:
    """A fully connected layer on an image of one pixel, which the exporter sees as a convolution.

    ``mean`` is the sum that a row of weights has on average, ``bias`` the mean of the biases.
    """
    inputs = x.sample.shape[1]
    weight = b.normal((outputs, inputs, 1, 1), 1.0 / math.sqrt(inputs), mean=mean / inputs)
    shift = b.normal((outputs,), 0.1, mean=bias)
    parameters = b.parameter("weight", weight), b.parameter("bias", shift)
    name = b.node(
        "Conv", x.name, *parameters, dilations=[1, 1], group=1, kernel_shape=[1, 1], pads=[0] * 4, strides=[1, 1]
    )
    sample = np.einsum("oi,nihw->nohw", weight[:, :, 0, 0], x.sample) + shift[:, None, None]
    return Traced(name, sample)


def _swish(b: GraphBuilder, x: Traced) -> Traced:
    return Traced(swish(b, x.name), x.sample * sigmoid(x.sample))


def _conv_swish(
    b: GraphBuilder, x: Traced, module: str, channels: int, kernel: int = 1, stride: int = 1, depthwise: bool = False
) -> Traced:
    with b.scope(f"{module}.0"):
        x = norm_conv(b, x, channels, kernel, stride, depthwise)
    with b.scope(f"{module}.2"):
        return _swish(b, x)


def _mbconv(b: GraphBuilder, x: Traced, stage: StageConfig, stride: int) -> Traced:
    channels = x.sample.shape[1]
    expanded = channels * stage.expansion
    residual = stride == 1 and channels == stage.channels
    # Modules are numbered in sequence, and without expansion the first one is not there.
    first = 1 if stage.expansion != 1 else 0
    y = x
    with b.scope("block"):
        if stage.expansion != 1:
            with b.scope("block.0"):
                y = _conv_swish(b, y, "block.0", expanded)
        with b.scope(f"block.{first}"):
            y = _conv_swish(b, y, f"block.{first}", expanded, stage.kernel, stride, depthwise=True)
        with b.scope(f"block.{first + 1}"):
            y = _squeeze_excitation(b, y, max(1, channels // 4))
        with b.scope(f"block.{first + 2}", f"block.{first + 2}.0"):
            y = norm_conv(b, y, stage.channels, gain=_RESIDUAL if residual else 1.0)
    if not residual:
        return y
    return Traced(b.node("Add", y.name, x.name), y.sample + x.sample)
