"""ONNX models, and graphs of plain ``te`` tensors, as TE programs (paper §4)."""

from souffle.frontend.from_te import from_te
from souffle.frontend.onnx_import import import_onnx

__all__ = ["from_te", "import_onnx"]
