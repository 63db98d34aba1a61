"""Sums of products of 8-bit integers in 32 bits, whose operands stay as they are stored.

::

    O[v] = sum((x[f] - zx) * (w[h] - zw))   →   O[v] = sum(x[f] * (w[h] - zw)) - zx * sum(w[h] - zw)

Right since integers have no rounding; where the sums on the right could leave 32 bits, the left form stays. The second
sum is over weights alone, so that it is a constant where they are. What lies beyond the edge of an image is zx. So
the factors are 8-bit integers as long as weights have no zero point, and instructions for these apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, defines
from souffle.frontend.pooling import same_pads
from souffle.frontend.refusal import Obstacle
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []

_SUM = "int32"
_LIMIT = 2**31
_Reader = Callable[..., PrimExpr]


def _wide(value: PrimExpr) -> PrimExpr:
    return tirx.Cast(_SUM, value)


def _reader(tensor: te.Tensor | None) -> _Reader | None:
    """Reads an element at the last of the given indices, broadcast as NumPy does, in 32 bits."""
    if tensor is None:
        return None
    extents = [int(extent) for extent in tensor.shape]

    def read(*at: PrimExpr) -> PrimExpr:
        own = at[len(at) - len(extents) :]
        return _wide(tensor(*(0 if extent == 1 else index for index, extent in zip(own, extents, strict=True))))

    return read


def _difference(read: _Reader, zero: _Reader | None) -> _Reader:
    return read if zero is None else lambda *at: read(*at) - zero(*at)


def _is_safe(terms: int, x: str, w: str, centred_weights: bool) -> bool:
    """Whether the sum of so many products with `x` as it is stored, and what is taken from it, stay in 32 bits."""
    largest = {"int8": 128, "uint8": 255}
    weight = 255 if centred_weights else largest[w]
    return 2 * terms * largest[x] * weight < _LIMIT


def _check_types(node: onnx.NodeProto, operands: NodeOperands) -> None:
    for position in (0, 1):
        dtype = operands.dtype(position)
        if dtype not in ("int8", "uint8"):
            raise Obstacle(f"it multiplies integers of 8 bits, and input {position} is {dtype}", "cast it before")


def _without_zero_point(products: te.Tensor, zero: _Reader | None, total: _Reader, name: str) -> te.Tensor:
    """`products` less the zero point's share: it times the sum of its factors."""
    if zero is None:
        return products
    return te.compute(products.shape, lambda *at: products(*at) - zero(*at) * total(*at), name=name)


@defines("MatMulInteger")
def _matrix_product(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    """Of operands of at least two dimensions; zero points are scalars, or broadcast as the operands are."""
    _check_types(node, operands)
    left, right = operands.shape(0), operands.shape(1)
    terms, batch = left[-1], np.broadcast_shapes(left[:-2], right[:-2])
    a_zero, b_zero = (_reader(operands.tensor(position)) for position in (2, 3))
    a, b = _reader(operands.tensor(0)), _difference(_reader(operands.tensor(1)), b_zero)
    safe = _is_safe(terms, operands.dtype(0), operands.dtype(1), b_zero is not None)
    if not safe:
        a, a_zero = _difference(a, a_zero), None
    inner = te.reduce_axis((0, terms), name="k")
    shape = (*batch, left[-2], right[-1])

    def product(*at: PrimExpr) -> PrimExpr:
        *outer, row, column = at
        return te.sum(a(*outer, row, inner) * b(*outer, inner, column), axis=inner)

    products = te.compute(shape, product, name="products")
    if a_zero is None:
        return [products]
    added = te.reduce_axis((0, terms), name="k")
    columns = te.compute(
        (*right[:-2], right[-1]),
        lambda *at: te.sum(b(*at[:-1], added, at[-1]), axis=added),
        name="column_sums",
    )
    read = _reader(columns)
    return [_without_zero_point(products, a_zero, lambda *at: read(*at[:-2], at[-1]), "matmul_integer")]


@defines("ConvInteger")
def _convolution(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    """The image's zero point is a scalar; that of the weights one, or one for each of their channels."""
    _check_types(node, operands)
    shape, filters = operands.shape(0), operands.shape(1)
    rank, kernel, groups = len(shape) - 2, filters[2:], attribute(node, "group", 1)
    strides, dilations = attribute(node, "strides", [1] * rank), attribute(node, "dilations", [1] * rank)
    pads = _pads(node, shape[2:], kernel, strides, dilations)
    if filters[1] * groups != shape[1] or filters[0] % groups:
        raise Obstacle(
            f"its weights are for {filters[1] * groups} channels in {groups} groups, and its image has {shape[1]}",
            "give it weights that fit",
        )
    x_zero, w_zero = (_reader(operands.tensor(position)) for position in (2, 3))
    image, weight = operands.tensor(0), _reader(operands.tensor(1))
    if w_zero is not None:
        stored, of_channel = weight, w_zero
        weight = lambda m, *at: stored(m, *at) - of_channel(m)  # noqa: E731
    terms = math.prod(filters[1:])
    safe = _is_safe(terms, operands.dtype(0), operands.dtype(1), w_zero is not None)
    if any(pads):
        image = _padded(image, operands.tensor(2), shape, pads)
    read = _reader(image)
    if not safe and x_zero is not None:
        centred, zero = read, x_zero
        read, x_zero = (lambda *at: centred(*at) - zero()), None
    extents = [int(extent) for extent in image.shape][2:]
    results = [
        (extent - (size - 1) * dilation - 1) // stride + 1
        for extent, size, dilation, stride in zip(extents, kernel, dilations, strides, strict=True)
    ]
    if min(results, default=1) < 1:
        raise Obstacle("its window is larger than the image with its pads", "give it larger pads or a smaller kernel")
    channel = te.reduce_axis((0, filters[1]), name="c")
    taps = [te.reduce_axis((0, extent), name=f"k{k}") for k, extent in enumerate(kernel)]
    members = filters[0] // groups

    def product(n: PrimExpr, m: PrimExpr, *at: PrimExpr) -> PrimExpr:
        source = channel if groups == 1 else tirx.floordiv(m, members) * filters[1] + channel
        places = [p * s + t * d for p, s, t, d in zip(at, strides, taps, dilations, strict=True)]
        return te.sum(read(n, source, *places) * weight(m, channel, *taps), axis=[channel, *taps])

    products = te.compute((shape[0], filters[0], *results), product, name="products")
    if x_zero is None:
        return [products]
    over = [te.reduce_axis((0, extent), name=f"r{k}") for k, extent in enumerate(filters[1:])]
    totals = te.compute((filters[0],), lambda m: te.sum(weight(m, *over), axis=over), name="filter_sums")
    of_filter = _reader(totals)
    return [_without_zero_point(products, lambda *_: x_zero(), lambda *at: of_filter(at[1]), "conv_integer")]


def _pads(
    node: onnx.NodeProto,
    extents: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Pads before all dimensions of space, then after."""
    rank, auto = len(extents), attribute(node, "auto_pad", b"NOTSET").decode()
    if auto in ("NOTSET", ""):
        return list(attribute(node, "pads", [0] * 2 * rank))
    if auto == "VALID":
        return [0] * 2 * rank
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    return same_pads(auto, extents, spans, strides)


def _padded(image: te.Tensor, zero: te.Tensor | None, shape: Sequence[int], pads: Sequence[int]) -> te.Tensor:
    rank, dtype = len(shape) - 2, str(image.dtype)
    extents = [extent + pads[k] + pads[rank + k] for k, extent in enumerate(shape[2:])]
    beyond = tirx.const(0, dtype) if zero is None else zero(*(0 for _ in zero.shape))

    def element(n: PrimExpr, c: PrimExpr, *at: PrimExpr) -> PrimExpr:
        inside = [
            condition
            for k, position in enumerate(at)
            for condition in (
                *([position >= pads[k]] if pads[k] else []),
                *([position < pads[k] + shape[2 + k]] if pads[rank + k] else []),
            )
        ]
        places = [position - pads[k] for k, position in enumerate(at)]
        return tirx.if_then_else(tirx.all(*inside), image(n, c, *places), beyond)

    return te.compute((*shape[:2], *extents), element, name="pad")
