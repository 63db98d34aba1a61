"""Compare a network with ONNX Runtime."""

from __future__ import annotations

from souffle.reference import onnxruntime_outputs
from souffle.runtime.comparison import OutputComparison, compare, random_inputs

__all__ = ["OutputComparison", "compare", "onnxruntime_outputs", "random_inputs"]
