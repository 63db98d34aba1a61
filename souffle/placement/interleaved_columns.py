"""Constants whose columns lie as sums that are computed beside each other read them.

::

    Q[u, g] = sum over k of x[k] * w[k, u + g * 256]     →     Q[u, g] = sum over k of x[k] * v[k, u, g]

with ``v[k, u, g] = w[k, u + g * 256]`` made at compile time, once for all sums that read `w` so. What a thread needs
for the sums of one element then lies side by side, and so does what neighbouring threads need.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm import tirx

from souffle.program import Tensor
from souffle.transform.handles import Handles, read
from souffle.tvm_compat import PrimExpr, load_indices, load_tensor, map_loads, variables

__all__ = ["InterleavedColumns"]


class InterleavedColumns:
    """Makes such constants, each once.

    Parameters
    ----------
    constants : mapping of Tensor to array
        Those of the program.
    suffix : str
        Of the names of the new ones.

    Attributes
    ----------
    made : dict of Tensor to array
        The new ones, as far as they were asked for.
    """

    def __init__(self, constants: Mapping[Tensor, np.ndarray], suffix: str) -> None:
        self._constants, self._suffix = constants, suffix
        self._known: dict[tuple[Tensor, int, int], Tensor] = {}
        self.made: dict[Tensor, np.ndarray] = {}

    def read(
        self, body: PrimExpr, handles: Handles, columns: Mapping[tirx.Var, tuple[tirx.Var, tirx.Var, int]]
    ) -> PrimExpr:
        """A body that reads such constants where it can.

        Parameters
        ----------
        body : expression
            Over `handles`.
        handles : Handles
            Those of new constants are added.
        columns : mapping
            From an axis to the two whose place ``u + g * n`` it stands for, and ``n``.
        """
        sources = [(handles.of(tensor), tensor) for tensor in handles.tensors() if tensor in self._constants]

        def rewrite(load: PrimExpr) -> PrimExpr:
            tensor = next((t for handle, t in sources if load_tensor(load).same_as(handle)), None)
            indices = list(load_indices(load))
            for axis, (unit, slot, count) in columns.items():
                places = [n for n, index in enumerate(indices) if any(axis.same_as(v) for v in variables(index))]
                if tensor is None or len(places) != 1 or not indices[places[0]].same_as(axis):
                    continue
                (place,) = places
                if tensor.shape[place] % count == 0 and tensor.shape[place] > count:
                    beside = handles.of(self._of(tensor, place, count))
                    return read(beside, [*indices[:place], unit, *indices[place + 1 :], slot])
            return load

        return map_loads(body, rewrite)

    def _of(self, tensor: Tensor, place: int, count: int) -> Tensor:
        key = (tensor, place, count)
        if key not in self._known:
            groups = tensor.shape[place] // count
            shape = (*tensor.shape[:place], groups, count, *tensor.shape[place + 1 :])
            array = np.ascontiguousarray(np.moveaxis(self._constants[tensor].reshape(shape), place, -1))
            named = sum(known[0] is tensor for known in self._known)
            name = f"{tensor.name}{self._suffix}{named or ''}"
            self._known[key] = Tensor(name, array.shape, tensor.dtype)
            self.made[self._known[key]] = array
        return self._known[key]
