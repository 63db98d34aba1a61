"""Whether two networks compute the same: inputs to run both with, and how far outputs may be apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from souffle.runtime.signature import TensorSpec

__all__ = ["OutputComparison", "compare", "random_inputs"]

FP32_RTOL, FP32_ATOL = 1e-3, 1e-5
ROUNDED_TOLERANCE = 2e-2

_ROUNDED = ("mixed", "tf32")
"""Precisions in which factors of products are rounded to 11 bits."""


@dataclass(frozen=True)
class OutputComparison:
    """How far outputs are from the reference.

    Attributes
    ----------
    error : float
        Largest difference, divided by the output's largest magnitude; infinite where an infinity or NaN stands in the
        wrong place, NaN where an output is missing or of another shape or type.
    ok : bool
        fp32 and tf32x3: every element within rtol 1e-3 or, for small ones, atol 1e-5 of the output's magnitude or of 1,
        whichever is larger. mixed and tf32: `error` at most 2e-2. Integers and booleans must be equal.
    """

    error: float
    ok: bool


def compare(outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], precision: str) -> OutputComparison:
    """Compare all outputs with the reference."""
    if set(outputs) != set(reference):
        return OutputComparison(float("nan"), False)
    worst, ok = 0.0, True
    for name, expected in reference.items():
        given = np.asarray(outputs[name])
        if given.shape != expected.shape or given.dtype != expected.dtype:
            return OutputComparison(float("nan"), False)
        if expected.dtype.kind not in "fc":
            equal = bool(np.array_equal(given, expected))
            worst, ok = max(worst, float(not equal)), ok and equal
            continue
        # Infinities and NaN must stand where they are expected; the tolerance is for finite values.
        finite = np.isfinite(given) & np.isfinite(expected)
        if not np.all(finite | (given == expected) | (np.isnan(given) & np.isnan(expected))):
            return OutputComparison(float("inf"), False)
        wanted = expected[finite].astype(np.float64)
        difference = np.abs(given[finite].astype(np.float64) - wanted)
        largest = float(np.max(np.abs(wanted), initial=0.0))
        error = float(np.max(difference, initial=0.0)) / (largest or 1.0)
        worst = max(worst, error)
        if precision in _ROUNDED:
            ok = ok and error <= ROUNDED_TOLERANCE
        else:
            ok = ok and bool(np.all(difference <= FP32_ATOL * max(1.0, largest) + FP32_RTOL * np.abs(wanted)))
    return OutputComparison(worst, ok)


def random_inputs(specs: Iterable[TensorSpec], seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs for a network: normal floats, the integers 0 and 1 (which index any table of two rows), booleans."""
    generator = np.random.default_rng(seed)
    inputs = {}
    for spec in specs:
        kind = np.dtype(spec.dtype).kind
        if kind == "f":
            inputs[spec.name] = generator.standard_normal(spec.shape).astype(spec.dtype)
        elif kind == "b":
            inputs[spec.name] = generator.integers(0, 2, spec.shape).astype(bool)
        else:
            inputs[spec.name] = generator.integers(0, 2, spec.shape).astype(spec.dtype)
    return inputs
