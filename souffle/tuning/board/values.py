"""What a stage is tried with, and whether two ways to compute it give the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

__all__ = ["outputs_differ", "random_inputs"]

_TOLERANCE = {"float16": 4e-3, "bfloat16": 3.2e-2, "float32": 1e-3, "float64": 1e-9}
"""Of the largest value: candidates sum in another order and round to the same type; four units in the last place of
16-bit types, and fp32 sums whose products were rounded to fp16."""


def random_inputs(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> dict[str, np.ndarray]:
    """Values near 1 for floats; integers are 0 or 1, which every tensor can be indexed with that has two elements.

    Parameters
    ----------
    tensors : iterable of (name, shape, dtype)

    Returns
    -------
    dict of str to array
        The same for the same tensors.
    """
    generator = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    for name, shape, dtype in tensors:
        if "float" in dtype:
            values[name] = generator.standard_normal(shape).astype(dtype)
        else:
            values[name] = generator.integers(0, 2, shape).astype(dtype)
    return values


def outputs_differ(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> str:
    """In which output two ways differ by more than rounding, and in how many elements; empty where in none.

    NaN and infinities are the same in the same places.
    """
    for name, value in expected.items():
        limit, same = _TOLERANCE.get(str(value.dtype)), np.asarray(found[name]) == value
        if limit is not None:
            exact, given = value.astype(np.float64), np.asarray(found[name]).astype(np.float64)
            scale = float(np.max(np.abs(exact), initial=0.0, where=np.isfinite(exact)))
            same = np.isclose(given, exact, rtol=0.0, atol=limit * max(scale, 1e-6), equal_nan=True)
        if not np.all(same):
            return f"{name} differs from the rule's own schedule in {int(np.sum(~same))} of {value.size} elements"
    return ""
