"""Calls whose buffers are settled once: what ``bind`` of a network gives, and the memory that it makes for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from souffle.aligned import aligned_array
from souffle.errors import InputError
from souffle.runtime.signature import Destination, Signature, TensorSpec

__all__ = ["BoundNetwork", "Buffers", "buffers_of"]

class Buffers:
    """What is bound: inputs in order, as callers see them and as they are read, and a destination for each output."""

    def __init__(
        self,
        signature: Signature,
        inputs: Sequence[Any],
        values: Sequence[Any],
        destinations: Sequence[Destination],
    ) -> None:
        self.signature, self.values, self.destinations = signature, tuple(values), tuple(destinations)
        self.inputs = MappingProxyType(dict(zip((spec.name for spec in signature.inputs), inputs, strict=True)))
        self.outputs = MappingProxyType(
            {spec.name: place.given for spec, place in zip(signature.outputs, destinations, strict=True)}
        )


def _made(spec: TensorSpec) -> np.ndarray:
    return aligned_array(spec.shape, spec.dtype, 0)


def buffers_of(signature: Signature, inputs: Any, outputs: Any, *, gpu: bool = False) -> Buffers:
    """The buffers that a caller binds, checked, with zeros where none was given.

    Parameters
    ----------
    signature : Signature
    inputs : mapping, sequence or None
        By name, of which any may be missing, or one for each input in order.
    outputs : mapping, sequence, array or None
        As for :meth:`Signature.destinations`.
    gpu : bool
        Whether tensors on a GPU can be bound; they are checked where they are read.

    Raises
    ------
    InputError
        As :meth:`Signature.bound_array` and :meth:`Signature.destinations`, and where data decides how long an output
        is.
    """
    counted = [spec for spec in signature.outputs if spec.counted]
    if counted:
        raise InputError(
            f"buffers of {signature.network} cannot be bound: data decides how long its output {counted[0]} is; call it"
        )
    if inputs is None:
        inputs = {}
    if isinstance(inputs, Mapping):
        inputs = {spec.name: _made(spec) for spec in signature.inputs if spec.name not in inputs} | dict(inputs)
        given = signature.arrange((inputs,))
    else:
        given = signature.arrange(tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,))
    on_host = [not gpu or isinstance(value, (np.ndarray, np.generic)) for value in given]
    values = [
        signature.bound_array(spec, value) if host else value
        for spec, value, host in zip(signature.inputs, given, on_host, strict=True)
    ]
    found = signature.destinations(outputs, gpu=gpu)
    made = {spec.name: _made(spec) for spec, place in zip(signature.outputs, found, strict=True) if place is None}
    given_out = {
        spec.name: place.given for spec, place in zip(signature.outputs, found, strict=True) if place is not None
    }
    return Buffers(signature, given, values, signature.destinations({**made, **given_out}, gpu=gpu))


class BoundNetwork:
    """A network with the buffers of its calls (``bind``): ``bound()`` reads its inputs and writes its outputs.

    What the buffers hold is read anew by each call; which they are, and that they fit, was settled when they were
    bound. A call takes no arguments, checks nothing and makes no memory; it gives :attr:`outputs`, which it has written
    when it returns.

    One of them is called by one thread at a time, and a second call meanwhile is refused. Threads have one each: what
    they share is the network, with its code and constants.

    Parameters
    ----------
    buffers : Buffers
    run : callable
        Runs once, from these buffers to these.

    Attributes
    ----------
    inputs : mapping of str to array
        Where inputs are read; those that the caller gave, or made for it.
    outputs : mapping of str to array
        Where outputs are written.
    buffers : Buffers
        Both, as they were checked.
    """

    def __init__(self, buffers: Buffers, run: Callable[[], object]) -> None:
        self.inputs, self.outputs = buffers.inputs, buffers.outputs
        self.buffers, self._run = buffers, run  # the buffers, since their memory may be lent already
        self._network = buffers.signature.network
        self._free = threading.Lock()

    def __repr__(self) -> str:
        return f"BoundNetwork({self._network!r}, inputs {', '.join(self.inputs)}, outputs {', '.join(self.outputs)})"

    def __call__(self) -> Mapping[str, Any]:
        """Run once.

        Returns
        -------
        mapping of str to array
            :attr:`outputs`.

        Raises
        ------
        InputError
            If another thread is in a call of the same object.
        KernelTimeoutError, DeviceError
            As a call of the network. What the outputs hold then is not defined.
        """
        if not self._free.acquire(blocking=False):
            raise InputError(
                f"buffers bound to {self._network} are in a call on another thread; bind buffers for each thread"
            )
        try:
            self._run()
        finally:
            self._free.release()
        return self.outputs
