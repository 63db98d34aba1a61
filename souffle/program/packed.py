"""Programs as bytes for another process of this machine.

Each TE holds objects of TVM, and which are one object matters: a load's tensor *is* a placeholder of its TE, and equal
layers share one ``te.ComputeOp``. TVM's own pickles write each object alone and lose that. Here all of them are written
in one JSON, whose nodes are shared, and the rest is a pickle that names them by number. Weights are not copied.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi

__all__ = ["pack", "unpack"]

_PROTOCOL = 5
"""Of pickles, the first that leaves large arrays where they are."""


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, arrays: list[pickle.PickleBuffer]) -> None:
        super().__init__(stream, _PROTOCOL, buffer_callback=arrays.append)
        self.objects: list[tvm_ffi.Object] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, tvm_ffi.Object):
            return None
        address = value.__chandle__()
        if address not in self._numbers:
            # What is kept in the list keeps its address.
            self._numbers[address] = len(self.objects)
            self.objects.append(value)
        return self._numbers[address]


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, objects: Sequence[Any], arrays: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=arrays)
        self._objects = objects

    def persistent_load(self, number: int) -> Any:
        return self._objects[number]


def pack(value: Any) -> list[bytes | memoryview]:
    """Data that holds programs, as pieces to be written one after another; weights are views of the arrays.

    Parameters
    ----------
    value
        Any data that can be pickled but for the objects of TVM in it.
    """
    arrays: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    packer = _Packer(stream, arrays)
    packer.dump(value)
    objects = tvm.ir.save_json(packer.objects).encode()
    return [stream.getvalue(), objects, *(array.raw() for array in arrays)]


def unpack(pieces: Sequence[Any]) -> Any:
    """What :func:`pack` packed; a pickle, so of this user's own processes alone."""
    content, objects, *arrays = pieces
    return _Unpacker(content, tvm.ir.load_json(bytes(objects).decode()), arrays).load()
