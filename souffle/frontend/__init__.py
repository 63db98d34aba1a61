"""ONNX models as TE programs (paper §4)."""

from souffle.frontend.onnx_import import import_onnx

__all__ = ["import_onnx"]
