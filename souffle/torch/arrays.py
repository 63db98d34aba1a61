"""Tensors of PyTorch as what networks take, and what networks give as tensors, on the host without a copy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

__all__ = ["given", "taken"]

_AS_INTEGERS = {torch.bfloat16: (torch.int16, ml_dtypes.bfloat16)}
"""Types that NumPy has from a library, and PyTorch does not give to it."""
_FROM_INTEGERS = {np.dtype(dtype): (integer, kind) for kind, (integer, dtype) in _AS_INTEGERS.items()}


def given(tensor: torch.Tensor) -> Any:
    """A tensor as an input: an array of the same memory on the host, the tensor itself on a GPU."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.device.type != "cpu":
        return tensor
    if tensor.dtype in _AS_INTEGERS:
        integer, dtype = _AS_INTEGERS[tensor.dtype]
        return tensor.view(integer).numpy().view(dtype)
    return tensor.numpy()


def taken(value: Any) -> torch.Tensor:
    """An output as a tensor, which has its memory."""
    if not isinstance(value, np.ndarray):
        return torch.from_dlpack(value)
    if value.dtype in _FROM_INTEGERS:
        integer, kind = _FROM_INTEGERS[value.dtype]
        return torch.from_numpy(value.view(str(integer).removeprefix("torch."))).view(kind)
    return torch.from_numpy(value)
