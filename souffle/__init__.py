"""Souffle compiles a whole ONNX model to as few CUDA kernels as the GPU allows.

Names are loaded when first used: ``import souffle`` and :func:`souffle.load` work where TVM is not installed.
"""

from __future__ import annotations

import importlib

from souffle.errors import SouffleError

__version__ = "0.1.0"

_LAZY = {
    "bench": "souffle.benchmark.bench",
    "compile": "souffle.api",
    "learn": "souffle.searching",
    "tune": "souffle.searching",
    "tune_side_by_side": "souffle.searching",
    "load": "souffle.loading",
    "write_report": "souffle.reporting",
    "import_onnx": "souffle.frontend",
    "from_te": "souffle.frontend",
    "from_torch": "souffle.torch",
    "analyze": "souffle.analysis",
    "transform": "souffle.transform",
    "TEProgram": "souffle.program",
    "together": "souffle.program",
    "torch": "souffle.torch",
}

__all__ = [
    "SouffleError",
    "TEProgram",
    "analyze",
    "bench",
    "compile",
    "from_te",
    "from_torch",
    "import_onnx",
    "learn",
    "load",
    "together",
    "torch",
    "transform",
    "tune",
    "tune_side_by_side",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'souffle' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return module if _LAZY[name] == f"souffle.{name}" and not hasattr(module, name) else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
