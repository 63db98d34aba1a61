"""AmoebaNet-A (Real et al. 2018): an image classifier of two kinds of cells that evolution found.

"Learning to Fuse" cites that paper for its ``AmoebaNet`` and states no sizes. Those of ``paper`` are of its network of
mobile size: images of 224, stacks of N = 4 normal cells, F = 50 filters, 5.1 million parameters. The cells and how they
are joined are those of the authors' released code (``tensorflow/tpu``, ``models/official/amoeba_net``, the cells
``amoeba_net_a``), with which the published numbers of parameters come out: 5.1, 86.7 and 469 million for N, F of 4, 50;
6, 190; and 6, 448 (counted: 5.09, 86.7, 468.2). The stem's 32 filters, 1001 classes and the norms' epsilon are the
defaults of its ``imagenet_hparams``. Chosen: of an odd number of filters a factorized reduction gives the second half
one more (the code refuses it); one image. Batch norms stay nodes, with statistics of random images. A separable
convolution is two of them, each behind a ReLU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.batchnorm import Traced
from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_RELU, gemm

__all__ = ["NORMAL", "REDUCTION", "SIZES", "AmoebaNetConfig", "CellConfig", "build_amoebanet"]

_EPSILON = 1e-3
# Statistics of fewer images, or of smaller ones, suit other images so little that they grow from cell to cell.
_SAMPLES = 32
_SAMPLE_SIDE = 112


@dataclass(frozen=True)
class CellConfig:
    """What a cell computes.

    Attributes
    ----------
    pairs
        Operation and state, twice for each new state, which is their sum. State 0 is the cell before, 1 the one before
        that, 2 the first new one.
    outputs
        The states whose concatenation is the cell's output.
    """

    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    outputs: tuple[int, ...]


NORMAL = CellConfig(
    (
        (("avg", 0), ("max", 0)),
        (("sep3", 1), ("none", 1)),
        (("none", 0), ("avg", 1)),
        (("sep3", 0), ("sep5", 2)),
        (("avg", 5), ("sep3", 0)),
    ),
    (1, 3, 4, 6),
)
REDUCTION = CellConfig(
    (
        (("sep3", 1), ("avg", 0)),
        (("max", 0), ("sep7", 2)),
        (("max", 1), ("max", 0)),
        (("sep3", 4), ("1x7_7x1", 0)),
        (("avg", 1), ("sep7", 0)),
    ),
    (2, 3, 4, 5, 6),
)


@dataclass(frozen=True)
class AmoebaNetConfig:
    """Image side, channels of the stem, normal cells of each of the three stacks (N), filters of the first (F), and
    classes."""

    image: int
    stem: int
    cells: int
    filters: int
    classes: int


SIZES = {
    "paper": AmoebaNetConfig(image=224, stem=32, cells=4, filters=50, classes=1001),
    "tiny": AmoebaNetConfig(image=32, stem=6, cells=1, filters=18, classes=7),
}


def build_amoebanet(config: AmoebaNetConfig, seed: int) -> ModelProto:
    """Build the classifier: ``input`` (1, 3, image, image), ``output`` (1, classes), logits.

    The stem is a convolution and two reduction cells with a quarter and half of the filters; a reduction cell stands
    between two stacks, and filters double with it.
    """
    b = GraphBuilder("amoebanet", seed)
    side = min(config.image, _SAMPLE_SIDE)
    images = b.normal((_SAMPLES, 3, side, side), 1.0) + b.normal((_SAMPLES, 3, 1, 1), 1.0)
    x = Traced(b.input("input", (1, 3, config.image, config.image)), images)
    with b.scope("stem"):
        x = _norm(b, _conv(b, x, "conv", config.stem, (3, 3), (2, 2), padded=False))
    cells = [(REDUCTION, config.filters // 4), (REDUCTION, config.filters // 2)]
    for stack in range(3):
        filters = config.filters << stack
        cells += [(REDUCTION, filters)] * (stack > 0) + [(NORMAL, filters)] * config.cells
    before = x
    for number, (cell, filters) in enumerate(cells):
        with b.scope("cells", f"cells.{number}"):
            before, x = x, _cell(b, cell, filters, x, before)
    y = b.node("Flatten", b.node("GlobalAveragePool", _relu(b, x).name), axis=1)
    with b.scope("classifier"):
        # A mean over pixels is much smaller than what it is of.
        y = gemm(b, y, x.sample.shape[1], config.classes, gain=2.0)
    b.output(y, "output", (1, config.classes))
    return b.model()


def _cell(b: GraphBuilder, cell: CellConfig, filters: int, x: Traced, before: Traced) -> Traced:
    if before is not x:
        before = _fitted(b, before, filters, x.sample.shape[2])
    with b.scope("begin"):
        states = [_norm(b, _conv(b, _relu(b, x), "conv", filters)), before]
    stride = 2 if cell is REDUCTION else 1
    for number, pair in enumerate(cell.pairs):
        parts = []
        for side, (operation, state) in zip(("left", "right"), pair, strict=True):
            with b.scope(f"combination.{number}", side):
                parts.append(_applied(b, operation, states[state], filters, stride if state < 2 else 1))
        left, right = parts
        states.append(Traced(b.node("Add", left.name, right.name), left.sample + right.sample))
    return _joined(b, [states[index] for index in cell.outputs])


def _fitted(b: GraphBuilder, x: Traced, filters: int, side: int) -> Traced:
    """The output of the cell before the last with the filters and the side of the last one's."""
    with b.scope("fit"):
        if x.sample.shape[2] != side:
            return _factorized_reduction(b, _relu(b, x), filters)
        if x.sample.shape[1] != filters:
            return _norm(b, _conv(b, _relu(b, x), "conv", filters))
    return x


def _factorized_reduction(b: GraphBuilder, x: Traced, filters: int) -> Traced:
    """Every other pixel for half of the filters, those one row and column further for the others."""
    far = np.iinfo(np.int64).max
    bounds = (b.constant(values) for values in ([1, 1], [far, far], [2, 3]))
    moved = b.node("Slice", b.node("Pad", x.name, b.constant([0, 0, 0, 0, 0, 0, 1, 1])), *bounds)
    sample = np.pad(x.sample, ((0, 0), (0, 0), (0, 1), (0, 1)))[:, :, 1:, 1:]
    paths = []
    for name, path, outputs in (
        ("first", x, filters // 2),
        ("second", Traced(moved, sample), filters - filters // 2),
    ):
        every_other = b.node("AveragePool", path.name, kernel_shape=[1, 1], strides=[2, 2])
        paths.append(_conv(b, Traced(every_other, path.sample[:, :, ::2, ::2]), name, outputs))
    return _norm(b, _joined(b, paths))


def _applied(b: GraphBuilder, operation: str, x: Traced, filters: int, stride: int) -> Traced:
    channels = x.sample.shape[1]
    if operation == "none":
        return x
    if operation in ("avg", "max"):
        x = _pooled(b, x, operation, stride)
        return x if channels == filters else _norm(b, _conv(b, x, "fit", filters))
    if operation == "1x7_7x1":
        layers = (
            (filters // 4, (1, 1), (1, 1)),
            (filters // 4, (1, 7), (1, stride)),
            (filters // 4, (7, 1), (stride, 1)),
            (filters, (1, 1), (1, 1)),
        )
        for number, (outputs, kernel, strides) in enumerate(layers):
            with b.scope(f"layers.{number}"):
                x = _norm(b, _conv(b, _relu(b, x), "conv", outputs, kernel, strides))
        return x
    kernel = int(operation.removeprefix("sep"))
    for number, strides in enumerate(((stride, stride), (1, 1))):
        with b.scope(f"layers.{number}"):
            x = _relu(b, x)
            x = _conv(b, x, "depthwise", x.sample.shape[1], (kernel, kernel), strides, depthwise=True)
            x = _norm(b, _conv(b, x, "pointwise", filters))
    return x


def _relu(b: GraphBuilder, x: Traced) -> Traced:
    return Traced(b.node("Relu", x.name), np.maximum(x.sample, 0))


def _joined(b: GraphBuilder, parts: list[Traced]) -> Traced:
    name = b.node("Concat", *(part.name for part in parts), axis=1)
    return Traced(name, np.concatenate([part.sample for part in parts], axis=1))


def _same(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """TensorFlow's padding for an output of ``side / stride``, rounded up: the odd one behind."""
    total = max(0, ((side + stride - 1) // stride - 1) * stride + kernel - side)
    return total // 2, total - total // 2


def _pads(side: int, kernel: tuple[int, int], strides: tuple[int, int]) -> list[int]:
    (top, bottom), (left, right) = (_same(side, k, s) for k, s in zip(kernel, strides, strict=True))
    return [top, left, bottom, right]


def _taken(sample: np.ndarray, kernel: tuple[int, int], strides: tuple[int, int], padded: bool) -> list[np.ndarray]:
    """What each position of a kernel meets: (samples, channels, height, width), NaN in the padding."""
    sides = sample.shape[2:]
    ways = [_same(side, k, s) if padded else (0, 0) for side, k, s in zip(sides, kernel, strides, strict=True)]
    x = np.pad(sample, ((0, 0), (0, 0), *ways), constant_values=np.nan)
    height, width = ((x.shape[2 + k] - kernel[k]) // strides[k] + 1 for k in range(2))
    return [
        x[:, :, i : i + strides[0] * height : strides[0], j : j + strides[1] * width : strides[1]]
        for i, j in np.ndindex(*kernel)
    ]


def _pooled(b: GraphBuilder, x: Traced, kind: str, stride: int) -> Traced:
    taken = np.stack(_taken(x.sample, (3, 3), (stride, stride), padded=True))
    pads = _pads(x.sample.shape[2], (3, 3), (stride, stride))
    operator, sample = ("AveragePool", np.nanmean(taken, 0)) if kind == "avg" else ("MaxPool", np.nanmax(taken, 0))
    return Traced(b.node(operator, x.name, kernel_shape=[3, 3], pads=pads, strides=[stride, stride]), sample)


def _conv(
    b: GraphBuilder,
    x: Traced,
    module: str,
    channels: int,
    kernel: tuple[int, int] = (1, 1),
    strides: tuple[int, int] = (1, 1),
    depthwise: bool = False,
    padded: bool = True,
) -> Traced:
    """A convolution without bias, padded as TensorFlow's ``SAME`` or not at all."""
    inputs = x.sample.shape[1]
    fan_in = (1 if depthwise else inputs) * kernel[0] * kernel[1]
    weight = b.normal((channels, 1 if depthwise else inputs, *kernel), AFTER_RELU / math.sqrt(fan_in))
    with b.scope(module):
        name = b.node(
            "Conv",
            x.name,
            b.parameter("weight", weight),
            dilations=[1, 1],
            group=inputs if depthwise else 1,
            kernel_shape=list(kernel),
            pads=_pads(x.sample.shape[2], kernel, strides) if padded else [0] * 4,
            strides=list(strides),
        )
    y = np.float32(0)
    for (i, j), part in zip(np.ndindex(*kernel), _taken(x.sample, kernel, strides, padded), strict=True):
        part = np.nan_to_num(part)
        if depthwise:
            y = y + part * weight[:, 0, i, j][:, None, None]
        else:
            shape = (part.shape[0], channels, *part.shape[2:])
            y = y + (weight[:, :, i, j] @ part.reshape(*part.shape[:2], -1)).reshape(shape)
    return Traced(name, y)


def _norm(b: GraphBuilder, x: Traced) -> Traced:
    """A batch norm with the statistics of the sample images."""
    channels = x.sample.shape[1]
    with b.scope("norm"):
        mean, variance = (
            b.parameter(f"running_{name}", values)
            for name, values in (("mean", x.sample.mean(axis=(0, 2, 3))), ("var", x.sample.var(axis=(0, 2, 3))))
        )
        scale, shift = b.normal((channels,), 0.1, mean=1.0), b.normal((channels,), 0.2)
        parameters = b.parameter("weight", scale), b.parameter("bias", shift)
        name = b.node("BatchNormalization", x.name, *parameters, mean, variance, epsilon=_EPSILON)
    centred = x.sample - x.sample.mean(axis=(0, 2, 3), keepdims=True)
    inverse = scale / np.sqrt(x.sample.var(axis=(0, 2, 3)) + np.float32(_EPSILON))
    return Traced(name, centred * inverse[:, None, None] + shift[:, None, None])
