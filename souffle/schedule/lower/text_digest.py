"""Which text a schedule was lowered to, in a few characters: figures are of one text, and rules and passes change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from souffle.schedule.lower.device_function import DeviceFunction
from souffle.tvm_compat import structural_digest

__all__ = ["text_of"]

_NAMES = ("global_symbol", "target")
"""Attributes that are of whoever lowers: what the function is called, and on which host."""

_CHARACTERS = 16


def text_of(functions: Sequence[DeviceFunction]) -> str:
    """Of what a schedule was lowered to, whatever its functions, parameters and variables are called.

    Parameters
    ----------
    functions : sequence of DeviceFunction
        Of one schedule, as :func:`souffle.schedule.lower.lower_stage` gives them.

    Returns
    -------
    str
        16 characters; the same in each process, on each machine, with one version of TVM.
    """
    whole = hashlib.sha256()
    for function in functions:
        bare = function.func
        for name in _NAMES:
            bare = bare.without_attr(name)
        launched = (function.tiles, function.threads, function.shared_bytes, structural_digest(bare))
        whole.update(repr(launched).encode())
    return whole.hexdigest()[:_CHARACTERS]
