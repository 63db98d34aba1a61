"""Discrete Fourier transforms as products with a constant matrix, of long axes in two steps.

A complex number is a pair along the last axis, so that a transform along an axis n is one sum over n and the pair::

    Y[.., k, .., d] = sum over n and c of X[.., n, .., c] * M[n, c, k, d]

With n = n1 * N2 + n2 and k = k1 + N1 * k2 the exponent n * k / (N1 * N2) is, but for whole numbers, the sum of
n1 * k1 / N1, n2 * k1 / (N1 * N2) and n2 * k2 / N2: a transform over n1, a factor for each element, and one over n2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, defines
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.refusal import Obstacle, computed, version_of
from souffle.frontend.values import Known, Scope, Value
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []

# A matrix of so many rows costs less than two steps with a pass over the data between them.
_DIRECT = 256
_LARGEST_PRIME = 2048


@special("DFT")
def _with_its_axis(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> Sequence[Value] | None:
    """Where the axis is said, and which it is by default, depends on the operator set."""
    x, length, axis = [*inputs, None, None][:3]
    if attribute(node, "axis") is not None:
        return None
    if axis is not None and not isinstance(axis, Known):
        raise computed("axis")
    default = 1 if version_of("", scope.opsets) < 20 else -2
    attributes = {name: attribute(node, name, 0) for name in ("inverse", "onesided")}
    attributes["axis"] = default if axis is None else int(axis.array.reshape(-1)[0])
    return interpreter.emit("DFT", [x, length], f"{node.name}/DFT", **attributes)


@defines("DFT")
def _dft(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    data, shape = operands.tensor(0), operands.shape(0)
    inverse, onesided = attribute(node, "inverse", 0), attribute(node, "onesided", 0)
    axis = attribute(node, "axis", 1)
    if not -len(shape) <= axis < len(shape) or axis % len(shape) == len(shape) - 1 or shape[-1] not in (1, 2):
        raise Obstacle(
            f"its axis is {axis} of the shape {list(shape)}, whose last axis must be of 1 (real) or 2 (complex) parts",
            "give it one of the other axes, and a last axis of 1 or 2",
        )
    axis %= len(shape)
    if operands.present(1) and operands.constant(1) is None:
        raise computed("dft_length")
    if operands.present(1):
        length = int(operands.constant(1).reshape(-1)[0])
    else:
        length = 2 * (shape[axis] - 1) if inverse and onesided else shape[axis]
    if length < 1:
        raise Obstacle(f"its dft_length is {length}", "give it at least 1")
    if onesided and not inverse:
        _check_real(shape[-1])
    transform = _Transform(operands, axis, 1 if inverse else -1)
    if inverse and onesided:
        return [transform.real_of_half(data, length)]
    return [transform.of(data, length, length // 2 + 1 if onesided else length)]


@defines("STFT")
def _stft(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    signal, shape = operands.tensor(0), operands.shape(0)
    absent = [
        name
        for position, name in ((1, "frame_step"), (3, "frame_length"))
        if operands.present(position) and operands.constant(position) is None
    ]
    if absent:
        raise computed(*absent)
    if len(shape) != 3 or shape[2] not in (1, 2):
        raise Obstacle(
            f"its signal is of the shape {list(shape)}, not a batch, a length, and 1 (real) or 2 (complex) parts",
            "reshape the signal to three axes",
        )
    step, window = int(operands.constant(1).reshape(-1)[0]), operands.tensor(2)
    width = shape[1] if window is None else operands.shape(2)[0]
    if operands.present(3):
        width = int(operands.constant(3).reshape(-1)[0])
    if step < 1 or not 1 <= width <= shape[1] or (window is not None and operands.shape(2) != (width,)):
        raise Obstacle(
            f"frames of {width} in steps of {step} do not fit a signal of {shape[1]}"
            + ("" if window is None else f" and a window of {list(operands.shape(2))}"),
            "give it a frame_length of the window's length and at most the signal's, and a frame_step of at least 1",
        )
    onesided = attribute(node, "onesided", 1)
    if onesided:
        _check_real(shape[2])

    def framed(batch: PrimExpr, frame: PrimExpr, place: PrimExpr, part: PrimExpr) -> PrimExpr:
        sample = signal(batch, frame * step + place, part)
        return sample if window is None else sample * window(place)

    frames = te.compute((shape[0], (shape[1] - width) // step + 1, width, shape[2]), framed, name="frames")
    return [_Transform(operands, 2, -1).of(frames, width, width // 2 + 1 if onesided else width)]


def _check_real(parts: int) -> None:
    if parts != 1:
        raise Obstacle(
            "with onesided = 1 its input is complex, of whose transform no half follows from the other",
            "give it onesided = 0, or a real input (a last axis of 1)",
        )


def _angles(rows: int, columns: int, length: int, sign: int) -> np.ndarray:
    """``sign * 2 pi * row * column / length``, which is exact as far as whole turns are left out."""
    turns = np.arange(rows, dtype="int64")[:, None] * np.arange(columns, dtype="int64") % length
    return sign * 2 * np.pi * turns / length


def _as_parts(angles: np.ndarray, parts: int) -> np.ndarray:
    """Multiplication by ``exp(i * angle)`` of real (one part) or complex numbers: [row, part, column, part]."""
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)][:parts], axis=1)


class _Transform:
    """Transforms along one axis of tensors whose last axis holds the parts of a number."""

    def __init__(self, operands: NodeOperands, axis: int, sign: int):
        self.operands, self.axis, self.sign = operands, axis, sign
        self.dtype = operands.dtype(0)

    def of(self, data: te.Tensor, length: int, kept: int) -> te.Tensor:
        """The first `kept` numbers of the transform of `length`, for which `data` is cut or filled up with zeros."""
        scale = 1 / length if self.sign > 0 else 1.0
        if _is_direct(length):
            rows = min(_extent(data, self.axis), length)
            return self._product(data, self.axis, self._matrix(rows, data, length, kept), scale)
        whole = self._in_steps(self._fitted(data, length), self.axis, length)
        factor = tirx.const(scale, self.dtype)
        shape = _with_extent(whole, self.axis, kept)
        return te.compute(shape, lambda *at: whole(*at) * factor if scale != 1 else whole(*at), name="transform")

    def real_of_half(self, data: te.Tensor, length: int) -> te.Tensor:
        """The real numbers whose transform of `length` begins with `data`, of which the rest is the mirror image."""
        half, extent = length // 2 + 1, _extent(data, self.axis)
        if _is_direct(length):
            rows = min(extent, half)
            matrix = _as_parts(_angles(rows, length, length, 1), _extent(data, -1))[..., :1]
            # All but the first number, and the middle one where there is one, stand for two.
            twice = np.array([1.0 if 2 * row % length == 0 else 2.0 for row in range(rows)])
            return self._product(data, self.axis, matrix * twice[:, None, None, None], 1 / length)
        parts = _extent(data, -1)

        def mirrored(*at: PrimExpr) -> PrimExpr:
            row, part = at[self.axis], at[-1]
            source = tirx.Select(row < half, row, length - row)
            there = list(at)
            there[self.axis] = tirx.min(source, extent - 1)
            there[-1] = part if parts == 2 else 0
            zero, value = tirx.const(0, self.dtype), data(*there)
            if parts == 1:
                value = tirx.Select(part == 0, value, zero)
            # The imaginary parts of the first and the middle number do not count.
            own = tirx.Select(tirx.EQ(tirx.floormod(2 * row, length), 0), zero, tirx.Select(row < half, value, -value))
            value = tirx.Select(part == 0, value, own)
            return tirx.Select(source < extent, value, zero)

        shape = [*_with_extent(data, self.axis, length)[:-1], 2]
        whole = self._in_steps(te.compute(shape, mirrored, name="spectrum"), self.axis, length)
        scale = tirx.const(1 / length, self.dtype)
        return te.compute([*shape[:-1], 1], lambda *at: whole(*at[:-1], 0) * scale, name="transform")

    def _matrix(self, rows: int, data: te.Tensor, length: int, columns: int) -> np.ndarray:
        return _as_parts(_angles(rows, columns, length, self.sign), _extent(data, -1))

    def _product(self, data: te.Tensor, axis: int, matrix: np.ndarray, scale: float = 1.0) -> te.Tensor:
        table = self.operands.table((matrix * scale).astype(self.dtype))
        rows, parts, columns, results = matrix.shape

        def total(*at: PrimExpr) -> PrimExpr:
            n, c = te.reduce_axis((0, rows), name="n"), te.reduce_axis((0, parts), name="c")
            element = data(*at[:axis], n, *at[axis + 1 : -1], c)
            return te.sum(element * table(n, c, at[axis], at[-1]), axis=[n, c])

        return te.compute([*_with_extent(data, axis, columns)[:-1], results], total, name="transform")

    def _in_steps(self, data: te.Tensor, axis: int, length: int) -> te.Tensor:
        """The transform along `axis`, which has `length` elements, without a scale."""
        if _is_direct(length):
            return self._product(data, axis, self._matrix(length, data, length, length))
        first = min((d for d in range(1, length) if length % d == 0), key=lambda d: abs(math.log(d * d / length)))
        second = length // first
        shape = [int(extent) for extent in data.shape]
        split = te.compute(
            [*shape[:axis], first, second, *shape[axis + 1 :]],
            lambda *at: data(*at[:axis], at[axis] * second + at[axis + 1], *at[axis + 2 :]),
            name="split",
        )
        outer = self._in_steps(split, axis, first)
        angles = _angles(first, second, length, self.sign)
        cos, sin = (self.operands.table(function(angles).astype(self.dtype)) for function in (np.cos, np.sin))

        def turned(*at: PrimExpr) -> PrimExpr:
            here = (at[axis], at[axis + 1])
            real, imaginary = outer(*at[:-1], 0), outer(*at[:-1], 1)
            return tirx.Select(
                at[-1] == 0,
                real * cos(*here) - imaginary * sin(*here),
                real * sin(*here) + imaginary * cos(*here),
            )

        inner = self._in_steps(te.compute(outer.shape, turned, name="turned"), axis + 1, second)

        def joined(*at: PrimExpr) -> PrimExpr:
            place = (tirx.floormod(at[axis], first), tirx.floordiv(at[axis], first))
            return inner(*at[:axis], *place, *at[axis + 1 :])

        return te.compute([*shape[:-1], 2], joined, name="joined")

    def _fitted(self, data: te.Tensor, length: int) -> te.Tensor:
        extent, axis = _extent(data, self.axis), self.axis
        if extent >= length:
            return te.compute(_with_extent(data, axis, length), lambda *at: data(*at), name="fitted")
        zero = tirx.const(0, self.dtype)
        return te.compute(
            _with_extent(data, axis, length),
            lambda *at: tirx.if_then_else(at[axis] < extent, data(*at), zero),
            name="fitted",
        )


def _extent(tensor: te.Tensor, axis: int) -> int:
    return int(tensor.shape[axis])


def _with_extent(tensor: te.Tensor, axis: int, extent: int) -> list[int]:
    shape = [int(e) for e in tensor.shape]
    shape[axis] = extent
    return shape


def _is_direct(length: int) -> bool:
    """Whether a transform is one product: a short one, or one of a length that has no divisors.

    Raises
    ------
    Obstacle
        If it has none and is long.
    """
    prime = all(length % d for d in range(2, math.isqrt(length) + 1))
    if prime and length > _LARGEST_PRIME:
        raise Obstacle(
            f"its length has the prime factor {length}, and at most {_LARGEST_PRIME} is supported",
            "choose a dft_length that is a product of small numbers, such as a power of two",
        )
    return prime or length <= _DIRECT
