"""DLPack without a framework: read a tensor that another library owns, and lend one of ours, both without a copy.

The structures are those of dlpack.h, in its unversioned form, which every consumer accepts.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CPU", "CUDA", "DlpackTensor", "capsule", "device_of", "read"]

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Device types of dlpack.h."""

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_SMALL_TYPES = {
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}
"""Types of one byte that have a code of their own; of narrower ones DLPack has several in a byte."""


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


# The deleter may be called by a library that has let go of the interpreter's lock, which CFUNCTYPE takes again.
_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_NAME = b"dltensor"
_python = ctypes.pythonapi
# A capsule's destructor gets a capsule that no reference holds any more, so it must stay a bare pointer.
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(("PyCapsule_New", _python))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_bare = (ctypes.c_void_p, ctypes.c_char_p)
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, *_bare)(("PyCapsule_IsValid", _python))
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_bare)(("PyCapsule_GetPointer", _python))

_lent: dict[int, tuple[Any, ...]] = {}
"""What each tensor that is lent out keeps alive, by the address of its structure."""


@_Deleter
def _forget(managed: Any) -> None:
    _lent.pop(ctypes.addressof(managed.contents), None)


@_Destructor
def _drop_unused(capsule_address: int) -> None:
    # A consumer renames the capsule that it took; one with the first name was taken by nobody.
    if _dying_is_valid(capsule_address, _NAME):
        _lent.pop(_dying_pointer(capsule_address, _NAME), None)


@dataclass(frozen=True, eq=False)
class DlpackTensor:
    """A tensor that another library owns.

    Attributes
    ----------
    address : int
    shape : tuple of int
    dtype : str
        A name such as ``"float32"``.
    contiguous : bool
        Whether it lies in memory in C order.
    device : tuple of (int, int)
        Device type and number.
    owner : object
        What keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    contiguous: bool
    device: tuple[int, int]
    owner: Any

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, where they are contiguous."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Whether a contiguous tensor has a byte in common with a piece of memory."""
        return self.address < address + nbytes and address < self.address + self.nbytes


def device_of(value: Any) -> tuple[int, int]:
    """Device type (of dlpack.h) and number of an object with ``__dlpack_device__``."""
    kind, number = value.__dlpack_device__()
    return int(kind), int(number)


def read(value: Any, stream: int) -> DlpackTensor:
    """Look at a CUDA tensor of another library, in place.

    Parameters
    ----------
    value
        An object with ``__dlpack__``.
    stream
        The handle of the stream on which it will be used; the owner makes that stream wait for the tensor's content.

    Raises
    ------
    BufferError
        If its elements have a type that DLPack or NumPy does not name.
    """
    held = value.__dlpack__(stream=stream)
    # The capsule keeps its first name, so that letting go of it gives the tensor back to its owner.
    tensor = _Managed.from_address(_pointer(held, _NAME)).tensor
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    kind = _KINDS.get(code)
    dtype = _SMALL_TYPES.get(code) if kind is None else "bool" if kind == "bool" else f"{kind}{bits}"
    if dtype is None or lanes != 1:
        raise BufferError(f"elements of DLPack type code {tensor.dtype.code} with {lanes} lanes are not supported")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    contiguous, expected = True, 1
    if tensor.strides:
        for axis in reversed(range(tensor.ndim)):
            if shape[axis] > 1 and tensor.strides[axis] != expected:
                contiguous = False
            expected *= shape[axis]
    return DlpackTensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        dtype=dtype,
        contiguous=contiguous or 0 in shape,
        device=(int(tensor.device.type), int(tensor.device.id)),
        owner=held,
    )


def capsule(
    address: int,
    shape: tuple[int, ...],
    dtype: str,
    device: tuple[int, int],
    owner: Any,
    room: tuple[int, ...] | None = None,
) -> Any:
    """Lend a tensor as a DLPack capsule; ``owner`` is kept alive until the consumer is done with it.

    It lies in memory in C order, as the first positions of a tensor of shape ``room`` where that is given.
    """
    resolved = np.dtype(dtype)
    if dtype == "bfloat16":
        code = 4
    elif dtype in _SMALL_TYPES.values():
        code = next(number for number, name in _SMALL_TYPES.items() if name == dtype)
    elif resolved.kind in _CODES:
        code = _CODES[resolved.kind]
    else:
        raise BufferError(f"DLPack has no elements of type {dtype}")
    extents = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    strides = (ctypes.c_int64 * max(1, len(shape)))()
    step = 1
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        step *= max(1, (room or shape)[axis])
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(*device)
    managed.tensor.ndim = len(shape)
    managed.tensor.dtype = _DataType(code, resolved.itemsize * 8, 1)
    managed.tensor.shape = ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    managed.tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _forget
    where = ctypes.addressof(managed)
    _lent[where] = (managed, extents, strides, owner)
    return _new(where, _NAME, _drop_unused)
