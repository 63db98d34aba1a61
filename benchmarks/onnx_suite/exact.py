"""A second opinion on an expected value: the model in double precision, by ONNX's reference evaluator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

__all__ = ["expectation_is_inexact"]


def expectation_is_inexact(
    model: onnx.ModelProto,
    inputs: Sequence[Any],
    expected: Sequence[Any],
    given: Sequence[Any],
    is_near: Callable[[np.ndarray, np.ndarray], bool],
) -> bool:
    """Whether the outputs are right and it is the expected ones that are not, within one and the same tolerance.

    Expected values were rounded on their way as whatever computed them did. Those that depart from the exact ones by
    more than one rounding of the largest of them in single precision are wrong for another reason, of which nothing is
    said here; nor is where the evaluator does not carry double precision through to an output.

    Parameters
    ----------
    model : ModelProto
    inputs, expected, given : sequence
        The case's inputs, its outputs, and those that are in question.
    is_near : callable
        Whether a value agrees with an exact one, by the case's own tolerance.
    """
    exact = _in_double_precision(model, inputs)
    if exact is None or len(exact) != len(given):
        return False
    departs = False
    for true, stored, value in zip(exact, expected, given, strict=True):
        stored, value = np.asarray(stored), np.asarray(value)
        if stored.dtype != np.float32:
            if not np.array_equal(stored, value):
                return False
            continue
        if true.dtype != np.float64 or true.shape != value.shape or value.dtype != stored.dtype:
            return False
        rounded = true.astype(np.float32)
        if not is_near(rounded, value):
            return False
        largest = np.abs(true).max(initial=0.0)
        if not np.abs(stored - true).max(initial=0.0) <= np.finfo(np.float32).eps * largest:
            return False
        departs = departs or not is_near(rounded, stored)
    return departs


def _in_double_precision(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[np.ndarray] | None:
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for tensor in wide.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(_wide(numpy_helper.to_array(tensor)), tensor.name))
    names = [info.name for info in model.graph.input]
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            feeds = {name: _wide(np.asarray(value)) for name, value in zip(names, inputs, strict=True)}
            return [np.asarray(value) for value in ReferenceEvaluator(wide).run(None, feeds)]
    except Exception:  # the evaluator's kernels raise anything where they do not take double precision
        return None


def _wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64) if value.dtype == np.float32 else value
