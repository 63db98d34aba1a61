"""Random ONNX networks on every target against ONNX Runtime: ``python -m benchmarks.fuzz`` (``docs/debugging.md``)."""
