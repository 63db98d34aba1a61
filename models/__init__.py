"""The networks of the papers' evaluations as ONNX models, with operators and names as PyTorch's exporter writes them.

``souffle.models.build("bert")`` gives a small one for tests, ``build("bert", "paper")`` the one that was measured;
``python -m souffle.models bert --size paper -o bert.onnx`` writes it to a file.
"""

from __future__ import annotations

from souffle.models.inputs import random_inputs
from souffle.models.registry import ALL_NAMES, LEARNING_NAMES, MODEL_SIZES, NAMES, SE_NAMES, STITCHING_NAMES, build

__all__ = [
    "ALL_NAMES",
    "LEARNING_NAMES",
    "MODEL_SIZES",
    "NAMES",
    "SE_NAMES",
    "STITCHING_NAMES",
    "build",
    "random_inputs",
]
