"""What a network takes: the names, shapes and types of its inputs, and the checks of what a caller gives.

Nothing is converted in silence: a value of another type or shape is refused with a message that says what was expected,
what was given and what would help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from souffle.element_types import SMALL_TYPES
from souffle.errors import InputError
from souffle.wording import did_you_mean

__all__ = ["Signature", "TensorSpec"]


def _shape_text(shape: Sequence[int | str]) -> str:
    if any(isinstance(extent, str) for extent in shape):
        return " x ".join(map(str, shape))
    return "x".join(str(extent) for extent in shape) if shape else "scalar"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: the model's name for it, its shape and its dtype.

    Along the axes `counted` an output is as long as the data makes it, and `shape` says how long at most.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    counted: tuple[int, ...] = ()

    def __str__(self) -> str:
        shape = [f"<={extent}" if axis in self.counted else extent for axis, extent in enumerate(self.shape)]
        return f"{self.name!r} ({self.dtype} {_shape_text(shape)})"


@dataclass(frozen=True)
class Signature:
    """The inputs of a network, in order.

    Attributes
    ----------
    network : str
        The network's name, for messages.
    inputs : tuple of TensorSpec
    """

    network: str
    inputs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return ", ".join(str(spec) for spec in self.inputs) if self.inputs else "no inputs"

    def arrange(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Put a call's arguments into the order of the inputs: one mapping of values by name, or values by position.

        Raises
        ------
        InputError
            If a name is unknown or missing, or the count differs.
        """
        if len(args) == 1 and isinstance(args[0], Mapping):
            return self._by_name(args[0])
        if len(args) != len(self.inputs):
            raise InputError(
                f"{self.network} takes {len(self.inputs)} inputs and was given {len(args)}; it takes {self}, "
                "in this order, or one dict by name"
            )
        return tuple(args)

    def _by_name(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        names = [spec.name for spec in self.inputs]
        missing = [name for name in names if name not in values]
        for name in values:
            if name not in names:
                hint = did_you_mean(name, missing or names)
                raise InputError(f"{self.network} has no input named {name!r}; it takes {self}{hint}")
        if missing:
            raise InputError(
                f"{self.network} was not given its input{'s' if len(missing) > 1 else ''} "
                f"{', '.join(repr(name) for name in missing)}; it takes {self}"
            )
        return tuple(values[name] for name in names)

    def check(self, spec: TensorSpec, shape: Iterable[int], dtype: Any) -> None:
        """Refuse a tensor whose shape or dtype is not that of an input.

        ``dtype`` is a NumPy dtype or its name. A dtype of the other byte order is another dtype.

        Raises
        ------
        InputError
        """
        given = tuple(int(extent) for extent in shape)
        if np.dtype(dtype) != np.dtype(spec.dtype):
            raise InputError(
                f"input {spec.name!r} of {self.network} must be {spec.dtype} and was given as {np.dtype(dtype)} "
                f"({_shape_text(given)}); convert it yourself, as with .astype({spec.dtype!r}): Souffle casts nothing"
            )
        if given != spec.shape:
            hint = ""
            if len(given) != len(spec.shape):
                hint = f" ({len(spec.shape)} dimensions, not {len(given)})"
            elif given[:1] != spec.shape[:1] and given[1:] == spec.shape[1:]:
                hint = f"; to run a batch of {given[0]}, compile the model for that batch"
            raise InputError(
                f"input {spec.name!r} of {self.network} must have shape {spec.shape} and was given {given}{hint}"
            )

    def host_array(self, spec: TensorSpec, value: Any) -> np.ndarray:
        """The checked value of one input as a C-contiguous array on the host, copied only where it is not yet one.

        Elements of a small type (``float8_e4m3fn``, ``int4``) are given as their bytes, as kernels take them.

        Parameters
        ----------
        spec
            The input.
        value
            A NumPy array or scalar, or an object with ``__dlpack__`` in host memory.

        Raises
        ------
        InputError
            If it is another thing, or of another shape or dtype.
        """
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
        elif hasattr(value, "__dlpack__"):
            try:
                array = np.from_dlpack(value)
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                raise InputError(
                    f"input {spec.name!r} of {self.network} cannot be read through DLPack: {error}"
                ) from error
        else:
            raise InputError(
                f"input {spec.name!r} of {self.network} must be an array of {spec.dtype} {spec.shape} and was given a "
                f"{type(value).__name__}; give a NumPy array, as with np.asarray(value, dtype={spec.dtype!r}), "
                "or a tensor that has __dlpack__"
            )
        self.check(spec, array.shape, array.dtype)
        # ascontiguousarray makes a scalar one-dimensional
        whole = np.ascontiguousarray(array).reshape(spec.shape)
        return whole.view(np.uint8) if spec.dtype in SMALL_TYPES else whole

    def host_arrays(self, args: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """All inputs of a call, arranged and checked (:meth:`arrange`, :meth:`host_array`)."""
        values = self.arrange(args)
        return tuple(self.host_array(spec, value) for spec, value in zip(self.inputs, values, strict=True))
