"""Layer normalization as exporters write it before ONNX's opset 17, in the ways that are met."""

from __future__ import annotations

from collections.abc import Callable

from souffle.models.builder import GraphBuilder

__all__ = ["SPELLINGS", "Norm"]

Norm = Callable[[GraphBuilder, str, int], str]

_EPSILON = 1e-5


def _mean(b: GraphBuilder, x: str) -> str:
    return b.node("ReduceMean", x, axes=[-1], keepdims=1)


def _scaled(b: GraphBuilder, y: str, width: int) -> str:
    y = b.node("Mul", y, b.parameter("weight", b.normal((width,), 0.1, mean=1.0)))
    return b.node("Add", y, b.parameter("bias", b.normal((width,), 0.1)))


def _deviation(b: GraphBuilder, variance: str) -> str:
    return b.node("Sqrt", b.node("Add", variance, b.constant(_EPSILON)))


def power(b: GraphBuilder, x: str, width: int) -> str:
    """PyTorch's: Pow(2), Sqrt, Div."""
    apart = b.node("Sub", x, _mean(b, x))
    variance = _mean(b, b.node("Pow", apart, b.constant(2.0)))
    return _scaled(b, b.node("Div", apart, _deviation(b, variance)), width)


def product(b: GraphBuilder, x: str, width: int) -> str:
    """The square as a product, the quotient as a product with a reciprocal."""
    apart = b.node("Sub", x, _mean(b, x))
    inverse = b.node("Reciprocal", _deviation(b, _mean(b, b.node("Mul", apart, apart))))
    return _scaled(b, b.node("Mul", apart, inverse), width)


def two_differences(b: GraphBuilder, x: str, width: int) -> str:
    """The difference once for the variance and once more for the result."""
    mean = _mean(b, x)
    variance = _mean(b, b.node("Pow", b.node("Sub", x, mean), b.constant(2.0)))
    return _scaled(b, b.node("Div", b.node("Sub", x, mean), _deviation(b, variance)), width)


def two_means(b: GraphBuilder, x: str, width: int) -> str:
    """Mean and difference once more for the result."""
    apart = b.node("Sub", x, _mean(b, x))
    variance = _mean(b, b.node("Mul", apart, apart))
    return _scaled(b, b.node("Div", b.node("Sub", x, _mean(b, x)), _deviation(b, variance)), width)


def power_of_half(b: GraphBuilder, x: str, width: int) -> str:
    """The inverse deviation as a power."""
    apart = b.node("Sub", x, _mean(b, x))
    variance = b.node("Add", _mean(b, b.node("Mul", apart, apart)), b.constant(_EPSILON))
    return _scaled(b, b.node("Mul", apart, b.node("Pow", variance, b.constant(-0.5))), width)


def sum_of_squares(b: GraphBuilder, x: str, width: int) -> str:
    """The variance as a sum of squares, times the reciprocal of their number; the mean less the element."""
    apart = b.node("Sub", _mean(b, x), x)
    squares = b.node("ReduceSumSquare", apart, axes=[-1], keepdims=1)
    deviation = _deviation(b, b.node("Mul", squares, b.constant(1.0 / width)))
    return _scaled(b, b.node("Div", b.node("Neg", apart), deviation), width)


def cast_around(b: GraphBuilder, x: str, width: int) -> str:
    """With casts to the type that it has."""
    apart = b.node("Sub", b.node("Cast", x, to=1), _mean(b, b.node("Cast", x, to=1)))
    variance = _mean(b, b.node("Pow", b.node("Cast", apart, to=1), b.constant(2.0)))
    y = b.node("Cast", b.node("Div", b.node("Cast", apart, to=1), _deviation(b, variance)), to=1)
    return _scaled(b, y, width)


def weight_first(b: GraphBuilder, x: str, width: int) -> str:
    """The weight ahead of the division."""
    apart = b.node("Sub", x, _mean(b, x))
    deviation = _deviation(b, _mean(b, b.node("Mul", apart, apart)))
    weighted = b.node("Mul", b.parameter("weight", b.normal((width,), 0.1, mean=1.0)), apart)
    return b.node("Add", b.node("Div", weighted, deviation), b.parameter("bias", b.normal((width,), 0.1)))


def scale_and_shift(b: GraphBuilder, x: str, width: int) -> str:
    """TensorFlow's: scale and shift of each element are made first."""
    mean = _mean(b, x)
    apart = b.node("Sub", x, mean)
    inverse = b.node("Reciprocal", _deviation(b, _mean(b, b.node("Mul", apart, apart))))
    scale = b.node("Mul", inverse, b.parameter("weight", b.normal((width,), 0.1, mean=1.0)))
    shift = b.node("Sub", b.parameter("bias", b.normal((width,), 0.1)), b.node("Mul", mean, scale))
    return b.node("Add", b.node("Mul", x, scale), shift)


SPELLINGS: tuple[Norm, ...] = (
    power,
    product,
    two_differences,
    two_means,
    power_of_half,
    sum_of_squares,
    cast_around,
    weight_first,
    scale_and_shift,
)
