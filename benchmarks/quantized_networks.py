"""Three networks of 8-bit integers, made by code from a seed and by ONNX Runtime's own quantizer; nothing is loaded.

ResNet-50 with QuantizeLinear and DequantizeLinear around its operators (static), a BERT whose products are quantized
as it runs (dynamic), and MobileNetV2 of ONNX Runtime's quantized operators (static).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from souffle.models.bert import BertConfig, build_bert
from souffle.models.builder import GraphBuilder

__all__ = ["NETWORKS", "QuantizedNetwork", "dynamic", "mobilenet_v2", "random_image", "resnet", "static"]


def _conv(
    b: GraphBuilder, x: str, channels: int, filters: int, size: int, stride: int = 1, groups: int = 1, gain: float = 2.0
) -> str:
    """A convolution with the normalization after it folded in, of variance `gain` / 2 behind a rectifier."""
    std = (gain / (channels // groups * size * size)) ** 0.5
    weight = b.parameter("weight", b.normal((filters, channels // groups, size, size), std))
    bias = b.parameter("bias", b.normal((filters,), 0.05))
    pads = [size // 2] * 4
    return b.node("Conv", x, weight, bias, kernel_shape=[size, size], strides=[stride, stride], pads=pads, group=groups)


def _classifier(b: GraphBuilder, x: str, features: int, classes: int) -> None:
    pooled = b.node("Flatten", b.node("GlobalAveragePool", x))
    weight = b.parameter("fc.weight", b.normal((classes, features), features**-0.5))
    bias = b.parameter("fc.bias", b.normal((classes,), 0.05))
    b.output(b.node("Gemm", pooled, weight, bias, transB=1), "output", (1, classes))


def resnet(
    image: int = 224, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000, seed: int = 0
) -> onnx.ModelProto:
    """ResNet of bottlenecks for one image, its normalizations folded; ResNet-50 as it is.

    Parameters
    ----------
    image : int
        Rows and columns.
    width : int
        Channels of the first layer.
    blocks : tuple of int
        Bottlenecks of each stage.
    classes, seed : int
    """
    b = GraphBuilder("resnet", seed)
    x = b.input("input", (1, 3, image, image))
    with b.scope("conv1"):
        x = b.node("Relu", _conv(b, x, 3, width, 7, 2))
    x = b.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = width
    for stage, count in enumerate(blocks):
        inner, outer = width << stage, 4 * (width << stage)
        for number in range(count):
            stride = 2 if stage and not number else 1
            shortcut = x
            with b.scope(f"layer{stage + 1}", f"layer{stage + 1}.{number}"):
                with b.scope("conv1"):
                    y = b.node("Relu", _conv(b, x, channels, inner, 1))
                with b.scope("conv2"):
                    y = b.node("Relu", _conv(b, y, inner, inner, 3, stride))
                with b.scope("conv3"):
                    y = _conv(b, y, inner, outer, 1, gain=1.0)
                if not number:
                    with b.scope("downsample"):
                        shortcut = _conv(b, x, channels, outer, 1, stride, gain=1.0)
                x = b.node("Relu", b.node("Add", y, shortcut))
            channels = outer
    _classifier(b, x, channels, classes)
    return b.model()


_MOBILE_STAGES = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)
"""Expansion, channels, blocks and first stride of the stages of MobileNetV2 (Sandler et al. 2018, Table 2)."""


def mobilenet_v2(
    image: int = 224,
    classes: int = 1000,
    stages: tuple[tuple[int, int, int, int], ...] = _MOBILE_STAGES,
    last: int = 1280,
    seed: int = 0,
) -> onnx.ModelProto:
    """MobileNetV2 for one image, its normalizations folded.

    Parameters
    ----------
    image, classes : int
    stages : tuple
        Expansion, channels, blocks and first stride of each.
    last, seed : int
        Channels before the classifier.
    """
    b = GraphBuilder("mobilenet_v2", seed)
    x = b.input("input", (1, 3, image, image))

    def clipped(value: str) -> str:
        return b.node("Clip", value, b.constant(0.0), b.constant(6.0))

    with b.scope("features", "features.0"):
        x = clipped(_conv(b, x, 3, 32, 3, 2))
    channels, place = 32, 1
    for expansion, filters, count, first in stages:
        for number in range(count):
            stride, before, inner = (first if not number else 1), x, channels * expansion
            with b.scope("features", f"features.{place}"):
                y = x
                if expansion != 1:
                    with b.scope("expand"):
                        y = clipped(_conv(b, y, channels, inner, 1))
                with b.scope("depthwise"):
                    y = clipped(_conv(b, y, inner, inner, 3, stride, groups=inner))
                with b.scope("project"):
                    y = _conv(b, y, inner, filters, 1, gain=1.0)
                x = b.node("Add", before, y) if stride == 1 and channels == filters else y
            channels, place = filters, place + 1
    with b.scope("features", "features.last"):
        x = clipped(_conv(b, x, channels, last, 1))
    _classifier(b, x, last, classes)
    return b.model()


def random_image(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Inputs of a model of one float input."""
    info = model.graph.input[0]
    shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
    return {info.name: np.random.default_rng(seed).standard_normal(shape, np.float32)}


class _Images(CalibrationDataReader):
    """Random inputs, which the quantizer runs to find ranges."""

    def __init__(self, model: onnx.ModelProto, count: int = 3) -> None:
        self._images: Iterator[dict[str, np.ndarray]] = iter([random_image(model, 100 + n) for n in range(count)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._images, None)


def _quantized(model: onnx.ModelProto, quantize: Callable[[Path, Path], None]) -> onnx.ModelProto:
    """`model` through the quantizer, which works on files and says more than it needs to."""
    root = logging.getLogger()
    before = root.level
    onnxruntime.set_default_logger_severity(3)
    try:
        root.setLevel(logging.ERROR)
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "float.onnx"), Path(folder, "quantized.onnx")
            onnx.save(model, source)
            quantize(source, target)
            return onnx.load(target)
    finally:
        root.setLevel(before)


def static(model: onnx.ModelProto, form: QuantFormat, activations: QuantType) -> onnx.ModelProto:
    """Quantized with ranges of a few random inputs; weights in int8, with a scale for each channel."""

    def quantize(source: Path, target: Path) -> None:
        quantize_static(
            source,
            target,
            _Images(model),
            quant_format=form,
            activation_type=activations,
            weight_type=QuantType.QInt8,
            per_channel=True,
        )

    return _quantized(model, quantize)


def dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    """Products with weights quantized as the network runs; weights in int8."""
    return _quantized(model, lambda source, target: quantize_dynamic(source, target, weight_type=QuantType.QInt8))


@dataclass(frozen=True)
class QuantizedNetwork:
    """A network, whole and at a size that the CPU device bears.

    Attributes
    ----------
    name : str
    form : str
        How it was quantized.
    whole, small : callable
        Make the quantized model.
    sizes : tuple of str
        Of the two, in words.
    """

    name: str
    form: str
    whole: Callable[[], onnx.ModelProto]
    small: Callable[[], onnx.ModelProto]
    sizes: tuple[str, str]


def _bert(tokens: int) -> onnx.ModelProto:
    return dynamic(build_bert(BertConfig(layers=2, tokens=tokens, hidden=128, heads=2, ffn=512), 0))


def _resnet(**size: int) -> onnx.ModelProto:
    return static(resnet(**size), QuantFormat.QDQ, QuantType.QInt8)


def _mobilenet(**size: int) -> onnx.ModelProto:
    return static(mobilenet_v2(**size), QuantFormat.QOperator, QuantType.QUInt8)


NETWORKS = {
    network.name: network
    for network in (
        QuantizedNetwork(
            "resnet50",
            "static, QDQ, int8",
            _resnet,
            lambda: _resnet(image=32, classes=100),
            ("224 x 224", "32 x 32"),
        ),
        QuantizedNetwork(
            "bert-tiny",
            "dynamic, uint8 by int8",
            lambda: _bert(128),
            lambda: _bert(32),
            ("128 tokens", "32 tokens"),
        ),
        QuantizedNetwork(
            "mobilenet_v2",
            "static, QOperator, uint8 by int8",
            _mobilenet,
            lambda: _mobilenet(image=64, classes=100),
            ("224 x 224", "64 x 64"),
        ),
    )
}
