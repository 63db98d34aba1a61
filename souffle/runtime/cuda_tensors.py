"""Tensors of other libraries on a GPU, looked at in place: the checks of inputs and of memory for outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from souffle.errors import InputError
from souffle.runtime import dlpack
from souffle.runtime.cuda import Cuda
from souffle.runtime.dlpack import DlpackTensor
from souffle.runtime.signature import Destination, Signature, TensorSpec

__all__ = ["VECTOR_BYTES", "input_on_gpu", "on_gpu", "outputs_on_gpu"]

VECTOR_BYTES = 16
"""The widest load of one thread; an address that a kernel gets must be a multiple of it."""


def on_gpu(value: Any) -> bool:
    """Whether a value lies on some GPU."""
    if isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__dlpack_device__"):
        return False
    return dlpack.device_of(value)[0] in (dlpack.CUDA, dlpack.CUDA_MANAGED)


def _read(what: str, value: Any, cuda: Cuda, stream: Any) -> DlpackTensor:
    _, ordinal = dlpack.device_of(value)
    if ordinal != cuda.ordinal:
        raise InputError(
            f"{what} is on GPU {ordinal} and the network is on {cuda.label}; move it, or choose "
            f'device="cuda:{ordinal}"'
        )
    try:
        return dlpack.read(value, int(stream))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{what} cannot be read through DLPack: {error}") from error


def input_on_gpu(signature: Signature, spec: TensorSpec, value: Any, cuda: Cuda, stream: Any) -> DlpackTensor:
    """A checked input; `stream` waits for its content.

    Raises
    ------
    InputError
        If it is on another GPU, of another shape or type, or not contiguous.
    """
    what = f"input {spec.name!r} of {signature.network}"
    tensor = _read(what, value, cuda, stream)
    signature.check(spec, tensor.shape, tensor.dtype)
    if not tensor.contiguous:
        raise InputError(f"{what} is not contiguous on the GPU; call .contiguous() on it")
    return tensor


def outputs_on_gpu(
    signature: Signature, wanted: Iterable[Destination | None], cuda: Cuda, stream: Any
) -> dict[int, DlpackTensor]:
    """The checked destinations that are on the GPU, by the output's number; `stream` waits until they are free.

    Raises
    ------
    InputError
        As :func:`input_on_gpu`, and if two share memory.
    """
    found: dict[int, DlpackTensor] = {}
    for number, (spec, destination) in enumerate(zip(signature.produced, wanted, strict=True)):
        if destination is None or destination.array is not None:
            continue
        tensor = _read(f"out= for {spec.name!r} of {signature.network}", destination.given, cuda, stream)
        signature.check_destination(spec, tensor.shape, tensor.dtype, tensor.contiguous)
        for earlier, other in found.items():
            if tensor.overlaps(other.address, other.nbytes):
                raise InputError(
                    f"out= for {spec.name!r} and for {signature.produced[earlier].name!r} of {signature.network} share "
                    "memory; give each its own"
                )
        found[number] = tensor
    return found
