"""Networks of PyTorch: :func:`from_torch` compiles a module, ``torch.compile(module, backend="souffle")`` its graphs.

Both have PyTorch's own exporter write ONNX (``torch.onnx``), which the frontend reads as any other model. PyTorch is
optional, and is loaded when something of here is first used: ``pip install 'souffle-dl[torch]'``.
"""

from __future__ import annotations

import importlib
import re

from souffle.errors import IncompatibleEnvironmentError

_LAZY = {
    "Break": "souffle.torch.report",
    "breaks": "souffle.torch.report",
    "reset": "souffle.torch.report",
    "backend": "souffle.torch.dynamo",
    "from_torch": "souffle.torch.module",
}
_OLDEST = (2, 9)
"""The exporter that takes any module by ``torch.export`` is there before; this is the first that was looked at."""

__all__ = ["Break", "backend", "breaks", "from_torch", "require", "reset"]


def require() -> None:
    """Refuse to go on where PyTorch is missing or too old.

    Raises
    ------
    IncompatibleEnvironmentError
    """
    wanted = f"PyTorch {'.'.join(map(str, _OLDEST))} or later"
    try:
        version = str(importlib.import_module("torch").__version__)
    except ImportError as error:
        raise IncompatibleEnvironmentError(
            f"networks of PyTorch need {wanted}, which cannot be imported ({error}): pip install 'souffle-dl[torch]'"
        ) from error
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise IncompatibleEnvironmentError(
            f"networks of PyTorch need {wanted}, whose exporter to ONNX they use, and this is {version}: "
            "pip install -U 'souffle-dl[torch]'"
        )


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'souffle.torch' has no attribute {name!r}")
    require()
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
