"""Random values of every type, and which of them rounding cannot move."""

from __future__ import annotations

import numpy as np

__all__ = ["FLOATS", "INTEGERS", "is_exact", "is_tame", "random_values"]

FLOATS = ("float32", "float16", "float64")
INTEGERS = ("int64", "int32", "int8", "uint8", "int16", "uint16", "uint32", "uint64")

_SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-40, 6e4, -3e4, 1.0, -1.0)
"""Denormals of float32 are zero in float16, and what is large fits both."""


def is_exact(array: np.ndarray) -> bool:
    """Whether sums, products and comparisons of a few such values round nowhere: small multiples of 1/64.

    NaN and infinities are left out of account.
    """
    if array.dtype.kind not in "f":
        return True
    finite = array[np.isfinite(array)].astype(np.float64)
    most = 16.0 if array.dtype == np.float16 else 2.0**13
    return bool(np.all(np.abs(finite) <= most) and np.all(finite * 64 == np.rint(finite * 64)))


def is_tame(array: np.ndarray, most: float = 1e4) -> bool:
    """Whether all values are finite and none is larger than `most`."""
    if array.dtype.kind != "f":
        return True
    return bool(np.all(np.isfinite(array)) and np.max(np.abs(array), initial=0) <= most)


def random_values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], style: str = "normal") -> np.ndarray:
    """An array.

    Parameters
    ----------
    rng : numpy.random.Generator
    dtype : str
    shape : tuple of int
    style : str
        Of floats: ``"normal"``, ``"eighths"`` (multiples of 1/8 up to 2), ``"whole"`` (-3 to 3, so many are equal),
        ``"positive"`` (0.25 to 2) or ``"special"`` (normal with NaN, infinities, zeros, denormals and large ones). Of
        integers: ``"special"`` has extreme ones; otherwise they are small.
    """
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.asarray(rng.integers(0, 2, shape)).astype(bool)
    if kind in "iu":
        low = 0 if kind == "u" else -5
        values = np.asarray(rng.integers(low, 8, shape)).astype(dtype)
        if style == "special":
            info = np.iinfo(dtype)
            extreme = rng.choice(np.array([info.min, info.max, info.max - 1], dtype), shape)
            values = np.where(rng.random(shape) < 0.15, extreme, values).astype(dtype)
        return values
    if style == "whole":
        values = rng.integers(-3, 4, shape)
    elif style == "eighths":
        values = rng.integers(-16, 17, shape) / 8
    elif style == "positive":
        values = rng.integers(2, 17, shape) / 8
    else:
        values = rng.standard_normal(shape)
    values = np.asarray(values).astype(dtype)
    if style == "special":
        special = rng.choice(np.array(_SPECIAL), shape).astype(dtype)
        values = np.where(rng.random(shape) < 0.12, special, values).astype(dtype)
    return values
