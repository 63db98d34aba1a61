"""Recipes of operators that few networks have: quantized products, regions, losses, sequences, signals."""

from __future__ import annotations

import numpy as np

from benchmarks.fuzz.draft import Draft, Value
from benchmarks.fuzz.grammar import recipe
from benchmarks.fuzz.heavy import image
from benchmarks.fuzz.movers import indices

__all__: list[str] = []


def _scale(d: Draft) -> Value:
    return d.scalar(d.choice((0.125, 0.25, 0.5)), "float32")


@recipe("QLinearMatMul", weight=0.3)
def _qlinear_matmul(d: Draft) -> None:
    dtype = d.choice(("uint8", "int8"))
    x = d.fresh(dtype, d.shape(2, 3, 300), constant=0)
    w = d.fresh(dtype, (x.shape[-1], d.size(17)), constant=0.8)
    zeros = [d.scalar(d.integer(0, 3), dtype) for _ in range(3)]
    d.emit("QLinearMatMul", [x, _scale(d), zeros[0], w, _scale(d), zeros[1], _scale(d), zeros[2]])


@recipe("QLinearConv", weight=0.3)
def _qlinear_conv(d: Draft) -> None:
    channels, out, k = d.integer(1, 4), d.integer(1, 4), d.choice((1, 3))
    x = d.fresh("uint8", (1, channels, d.integer(3, 8), d.integer(3, 8)), constant=0)
    w = d.fresh("uint8", (out, channels, k, k), constant=0.9)
    zeros = [d.scalar(d.integer(0, 3), "uint8") for _ in range(3)]
    bias = d.fresh("int32", (out,), "normal", constant=0.9) if d.chance(0.5) else None
    pads = [k // 2] * 4 if d.chance(0.5) else None
    d.emit("QLinearConv", [x, _scale(d), zeros[0], w, _scale(d), zeros[1], _scale(d), zeros[2], bias], pads=pads)


@recipe("ConvInteger", weight=0.3)
def _conv_integer(d: Draft) -> None:
    channels, k = d.integer(1, 4), d.choice((1, 2, 3))
    x = d.fresh("uint8", (1, channels, d.integer(3, 8), d.integer(3, 8)), constant=0)
    w = d.fresh("uint8", (d.integer(1, 4), channels, k, k), constant=0.9)
    zero = d.scalar(d.integer(0, 3), "uint8") if d.chance(0.6) else None
    d.emit("ConvInteger", [x, w, zero], strides=d.choice((None, [2, 1])))


@recipe("RoiAlign", since=16, weight=0.3)
def _roi_align(d: Draft) -> None:
    # What infinities weigh that lie beside a region is nothing, or NaN.
    x = image(d, ranks=(4,), tame=True)
    count = d.integer(1, 3)
    corners = np.asarray(d.rng.integers(0, 8, (count, 2))).astype(x.dtype)
    regions = np.concatenate([corners, corners + np.asarray(d.rng.integers(1, 6, (count, 2)))], axis=1).astype(x.dtype)
    where = np.asarray(d.rng.integers(0, x.shape[0], count)).astype(np.int64)
    mode = d.choice((None, "output_half_pixel", "half_pixel"))
    given = [x, d.constant(regions) if d.chance(0.5) else d.input(regions), d.constant(where)]
    d.emit(
        "RoiAlign",
        given,
        mode=d.choice((None, "avg", "max")),
        coordinate_transformation_mode=mode,
        output_height=d.integer(1, 4),
        output_width=d.integer(1, 4),
        sampling_ratio=d.choice((None, 1, 2)),
        spatial_scale=d.choice((None, 0.5)),
    )


@recipe("Det", weight=0.3)
def _det(d: Draft) -> None:
    n = d.integer(1, 4)
    d.emit("Det", [d.fresh(d.float_dtype, (*d.shape(0, 2, 6), n, n), constant=0)])


@recipe("DFT", since=17, weight=0.2)
def _dft(d: Draft) -> None:
    n = d.choice((2, 3, 4, 5, 8))
    x = d.fresh(d.float_dtype, (d.integer(1, 2), n, d.choice((1, 2))), constant=0)
    inverse = d.choice((None, 0, 1)) if x.shape[-1] == 2 else None
    if d.opset >= 20:
        d.emit("DFT", [x, None, d.scalar(1, "int64")], inverse=inverse)
    else:
        d.emit("DFT", [x], axis=1, inverse=inverse)


@recipe("HannWindow", "HammingWindow", "BlackmanWindow", since=17, weight=0.1)
def _window(d: Draft, op: str) -> None:
    d.emit(op, [d.scalar(d.integer(2, 9), "int64")], periodic=d.choice((None, 0, 1)))


@recipe("MaxUnpool", weight=0.2)
def _max_unpool(d: Draft) -> None:
    shape = (1, d.integer(1, 3), 2 * d.integer(1, 4), 2 * d.integer(1, 4))
    x = d.fresh("float32", shape, "eighths", constant=0)
    y, where = d.emit("MaxPool", [x], outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    d.emit("MaxUnpool", [y, where], kernel_shape=[2, 2], strides=[2, 2])


@recipe("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", weight=0.2)
def _loss(d: Draft, op: str) -> None:
    rows, classes = d.size(8) or 1, d.integer(2, 7)
    x = d.fresh(d.float_dtype, (rows, classes), constant=0)
    target = d.input(np.asarray(d.rng.integers(0, classes, rows)).astype(np.int64))
    weight = d.weight(x.dtype, (classes,), "positive") if d.chance(0.4) else None
    d.emit(op, [x, target, weight], reduction=d.choice((None, "none", "sum", "mean")))


@recipe("RotaryEmbedding", since=23, weight=0.3)
def _rotary(d: Draft) -> None:
    heads, tokens, size = d.integer(1, 3), d.size(8) or 1, 2 * d.integer(1, 5)
    x = d.fresh(d.float_dtype, (1, heads, tokens, size), constant=0)
    cosine, sine = (d.weight(x.dtype, (1, tokens, size // 2)) for _ in range(2))
    d.emit("RotaryEmbedding", [x, cosine, sine], interleaved=d.choice((None, 0, 1)))


@recipe("sequence", weight=0.3)
def _sequence(d: Draft) -> None:
    x = d.pick("f", 1, where=lambda v: 1 < v.shape[0] <= 4)
    if not 1 < x.shape[0] <= 4:
        return
    parts = d.emit("Split", [x], outputs=x.shape[0], axis=0, num_outputs=x.shape[0] if d.opset >= 18 else None)
    d.emit("Concat", parts[::-1], axis=d.axis(x))


@recipe("QuantizeDequantize", weight=0.4)
def _fake_quantization(d: Draft) -> None:
    x = d.pick("f", tame=True, exact=True, where=lambda v: v.dtype == "float32")
    if x.dtype != "float32":
        return
    scale, zero = _scale(d), d.scalar(d.integer(0, 9), d.choice(("uint8", "int8")))
    (y,) = d.emit("QuantizeLinear", [x, scale, zero])
    d.emit("DequantizeLinear", [y, scale, zero])


@recipe("TensorScatter", since=24, weight=0.3)
def _tensor_scatter(d: Draft) -> None:
    batch, most, width = d.integer(1, 3), d.integer(2, 9), d.size(8) or 1
    past = d.fresh(d.float_dtype, (batch, 2, most, width), constant=0)
    count = d.integer(1, most)
    update = d.fresh(d.float_dtype, (batch, 2, count, width), constant=0)
    where = indices(d, (batch,), most - count + 1, dtype="int64")
    if np.min(where.array) >= 0:
        d.emit("TensorScatter", [past, update, where])


@recipe("mean of neighbours", weight=0.3)
def _neighbours(d: Draft) -> None:
    """Two slices of one tensor, shifted, and their mean: a stencil by hand."""
    x = d.pick("f", 2, where=lambda v: v.shape[-1] > 2)
    n = x.shape[-1]
    if n < 3:
        return
    left = d.emit("Slice", [x, d.ints(0), d.ints(n - 1), d.ints(x.rank - 1)])[0]
    right = d.emit("Slice", [x, d.ints(1), d.ints(n), d.ints(x.rank - 1)])[0]
    total = d.emit("Add", [left, right])[0]
    d.emit("Mul", [total, d.scalar(0.5, x.dtype)])
