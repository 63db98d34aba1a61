"""Rows normalized by their mean and deviation, in two passes."""

from __future__ import annotations

from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.values import Value

__all__ = ["normalized_rows"]


def normalized_rows(
    write: NodeWriter, x: Value, epsilon: float, *, centred: bool = True, axis: int = -1
) -> tuple[Value, Value | None, Value]:
    """Rows in single precision at least, each divided by its deviation; the mean where it is `centred`; and one by the
    deviation.

    ONNX's definition takes doubles by way of single precision, which ONNX Runtime and ONNX's reference do not; and its
    variance is a difference of mean squares, which has no correct digit where the mean is large.

    Parameters
    ----------
    write : NodeWriter
    x : value
    epsilon : float
    centred : bool
        Whether the mean is taken off; else the mean square stands for the variance.
    axis : int
        The first of those normalized over.
    """
    axes = list(range(axis % len(x.shape), len(x.shape)))
    wide = x.dtype if x.dtype == "float64" else "float32"
    rows, mean = write.cast(x, wide), None
    if centred:
        mean = write("ReduceMean", rows, axes=axes, keepdims=1)
        rows = write("Sub", rows, mean)
    variance = write("ReduceMean", write("Mul", rows, rows), axes=axes, keepdims=1)
    inverse = write("Reciprocal", write("Sqrt", write("Add", variance, constant(epsilon, wide))))
    return write("Mul", rows, inverse), mean, inverse
