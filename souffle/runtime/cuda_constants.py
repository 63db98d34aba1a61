"""The constants of a plan in a GPU's memory."""

from __future__ import annotations

from functools import partial

import numpy as np

from souffle.codegen.plan import Plan
from souffle.runtime.cuda import Cuda
from souffle.runtime.device_array import Handle
from souffle.runtime.shared_constants import SharedConstants

__all__ = ["constants_on"]


def constants_on(cuda: Cuda, plan: Plan, shared: SharedConstants) -> dict[int, Handle]:
    """Upload the constants that are not there yet.

    Returns
    -------
    dict of int to Handle
        Device memory by the buffer's number, which is given back when neither `shared` nor anyone else refers to it.

    Raises
    ------
    DeviceError
        If the driver refuses an allocation.
    """
    stream = Handle(cuda.stream(), cuda.destroy_stream)

    def uploaded(array: np.ndarray, about: str) -> Handle:
        memory = Handle(cuda.alloc(array.nbytes, about), cuda.free)
        array = np.ascontiguousarray(array)
        cuda.to_device(memory.handle, array, stream.handle)
        # Another network may use it as soon as it is shared.
        cuda.synchronize(stream.handle, about)
        return memory

    where, placed = (id(cuda.api), cuda.ordinal), {}
    for index, buffer in enumerate(plan.buffers):
        if buffer.kind == "constant":
            array, about = plan.constants[buffer.name], f"constant {buffer.name} of {buffer.nbytes} bytes"
            placed[index] = shared.placed(where, array, buffer.shape, partial(uploaded, array, about))
    return placed
