"""ONNX's own conformance suite of its operators, against Souffle (``python -m benchmarks.onnx_suite --help``)."""
