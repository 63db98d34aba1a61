"""ResNeXt with grouped bottlenecks, batch norm folded into the convolutions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_RELU, conv, gemm

__all__ = ["SIZES", "ResNeXtConfig", "build_resnext"]


@dataclass(frozen=True)
class ResNeXtConfig:
    """Image side, stem channels, groups, blocks and channels of each stage, classes, and images of a batch.

    A stage's bottleneck and its output have the same number of channels, as in the 64x4d network.
    """

    image: int
    stem: int
    groups: int
    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    classes: int
    batch: int = 1


SIZES = {
    "paper": ResNeXtConfig(224, 64, 64, (3, 4, 23, 3), (256, 512, 1024, 2048), 1000),
    "tiny": ResNeXtConfig(32, 8, 4, (2, 2, 2), (16, 32, 64), 10),
}


def build_resnext(config: ResNeXtConfig, seed: int) -> ModelProto:
    """Build the classifier: ``input`` (batch, 3, image, image), ``output`` (batch, classes)."""
    b = GraphBuilder("resnext", seed)
    x = b.input("input", (config.batch, 3, config.image, config.image))
    with b.scope("conv1"):
        x = conv(b, x, (3, config.stem), kernel=7, stride=2)
    with b.scope("relu"):
        x = b.node("Relu", x)
    with b.scope("maxpool"):
        x = b.node("MaxPool", x, ceil_mode=0, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    channels = config.stem
    for stage, (blocks, width) in enumerate(zip(config.blocks, config.widths, strict=True)):
        # Blocks of a stage share one unit of added variance, however many they are.
        gain = 1.0 / math.sqrt(blocks)
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            with b.scope(f"layer{stage + 1}", f"layer{stage + 1}.{block}"):
                x = _bottleneck(b, x, (channels, width), config.groups, stride, gain)
            channels = width
    with b.scope("avgpool"):
        x = b.node("GlobalAveragePool", x)
    x = b.node("Flatten", x, axis=1)
    with b.scope("fc"):
        x = gemm(b, x, channels, config.classes)
    b.output(x, "output", (config.batch, config.classes))
    return b.model()


def _bottleneck(b: GraphBuilder, x: str, channels: tuple[int, int], groups: int, stride: int, gain: float) -> str:
    inputs, width = channels
    with b.scope("conv1"):
        y = conv(b, x, (inputs, width))
    with b.scope("relu"):
        y = b.node("Relu", y)
    with b.scope("conv2"):
        y = conv(b, y, (width, width), kernel=3, stride=stride, groups=groups, gain=AFTER_RELU)
    with b.scope("relu"):
        y = b.node("Relu", y)
    with b.scope("conv3"):
        y = conv(b, y, (width, width), gain=gain * AFTER_RELU)
    if inputs != width or stride != 1:
        with b.scope("downsample", "downsample.0"):
            x = conv(b, x, (inputs, width), stride=stride)
    y = b.node("Add", y, x)
    with b.scope("relu"):
        return b.node("Relu", y)
