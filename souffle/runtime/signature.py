"""What a network takes and gives: names, shapes and types, and the checks of what a caller hands to it.

Nothing is converted in silence: a value of another type or shape is refused with a message that says what was expected,
what was given and what would help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from souffle.counted_axes import Counts, cut, first_positions, hidden_outputs
from souffle.element_types import SMALL_TYPES
from souffle.errors import InputError
from souffle.runtime import dlpack
from souffle.wording import did_you_mean

__all__ = ["Destination", "Signature", "TensorSpec"]


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


@dataclass(frozen=True, eq=False)
class Destination:
    """Memory of the caller in which an output is wanted.

    Attributes
    ----------
    given : object
        As the caller gave it; the call gives it back.
    array : array or None
        The same memory on the host, with elements of small types as bytes; None for a tensor on a GPU.
    """

    given: Any
    array: np.ndarray | None


@dataclass(frozen=True)
class Signature:
    """The inputs of a network, in order, and its outputs.

    Attributes
    ----------
    network : str
        The network's name, for messages.
    inputs : tuple of TensorSpec
    produced : tuple of TensorSpec
        The outputs, with those that say how long others are (:mod:`souffle.counted_axes`).
    counts : mapping
        Which these are.
    """

    network: str
    inputs: tuple[TensorSpec, ...]
    produced: tuple[TensorSpec, ...] = ()
    counts: Counts = field(default_factory=dict)

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs that callers see."""
        hidden = hidden_outputs(self.counts)
        return tuple(spec for spec in self.produced if spec.name not in hidden)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.inputs)

    @cached_property
    def _names_produced(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.produced)

    @cached_property
    def _nowhere(self) -> tuple[None, ...]:
        return (None,) * len(self.produced)

    @cached_property
    def _arrays(self) -> tuple[tuple[np.dtype | None, tuple[int, ...]], ...]:
        """Of each input, the type and shape of an array that is taken as it is; None where each is looked at."""
        return tuple((None if spec.dtype in SMALL_TYPES else np.dtype(spec.dtype), spec.shape) for spec in self.inputs)

    def __str__(self) -> str:
        return ", ".join(str(spec) for spec in self.inputs) if self.inputs else "no inputs"

    def arrange(self, args: Sequence[Any], named: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """Put a call's arguments into the order of the inputs.

        Parameters
        ----------
        args
            One mapping of values by name, or values by position.
        named
            Further values by name, for inputs that have none by position.

        Raises
        ------
        InputError
            If a name is unknown or missing, an input is given twice, or the count differs.
        """
        if named:
            return self._by_name(self._joined(args, named))
        if len(args) == 1 and (type(args[0]) is dict or isinstance(args[0], Mapping)):
            return self._by_name(args[0])
        if len(args) != len(self.inputs):
            raise InputError(
                f"{self.network} takes {len(self.inputs)} inputs and was given {len(args)}; it takes {self}, "
                "in this order, or one dict by name"
            )
        return tuple(args)

    def _joined(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Values by position and by keyword as one mapping."""
        if any(isinstance(value, Mapping) for value in args):
            raise InputError(
                f"{self.network} was given a dict of inputs and keywords ({', '.join(named)}); put all into one dict"
            )
        if len(args) > len(self.inputs):
            raise InputError(f"{self.network} takes {len(self.inputs)} inputs and was given more; it takes {self}")
        values = dict(zip((spec.name for spec in self.inputs), args))
        twice = [name for name in named if name in values]
        if twice:
            raise InputError(f"{self.network} was given its input {twice[0]!r} twice, by position and by keyword")
        return {**values, **named}

    def _by_name(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        names = self._names
        if type(values) is dict and len(values) == len(names):
            try:
                return tuple(map(values.__getitem__, names))
            except KeyError:
                pass  # said below, of all names
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
        array = self._host_view(spec, value)
        self.check(spec, array.shape, array.dtype)
        # ascontiguousarray makes a scalar one-dimensional
        whole = np.ascontiguousarray(array).reshape(spec.shape)
        return whole.view(np.uint8) if spec.dtype in SMALL_TYPES else whole

    def _host_view(self, spec: TensorSpec, value: Any) -> np.ndarray:
        """An input's value as an array of the same memory."""
        if isinstance(value, (np.ndarray, np.generic)):
            return np.asarray(value)
        if not hasattr(value, "__dlpack__"):
            raise InputError(
                f"input {spec.name!r} of {self.network} must be an array of {spec.dtype} {spec.shape} and was given a "
                f"{type(value).__name__}; give a NumPy array, as with np.asarray(value, dtype={spec.dtype!r}), "
                "or a tensor that has __dlpack__"
            )
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"input {spec.name!r} of {self.network} cannot be read through DLPack: {error}") from error

    def bound_array(self, spec: TensorSpec, value: Any) -> np.ndarray:
        """As :meth:`host_array`, of a value that later calls read again: never a copy.

        Raises
        ------
        InputError
            As :meth:`host_array`, and if the value does not lie in memory as kernels read it.
        """
        array = self._host_view(spec, value)
        self.check(spec, array.shape, array.dtype)
        if isinstance(value, np.generic) or not array.flags.c_contiguous:
            raise InputError(
                f"input {spec.name!r} of {self.network} is {'a scalar' if array.ndim == 0 else 'not contiguous'}, and "
                "what is bound is read where it lies; give a contiguous array, as np.ascontiguousarray makes one"
            )
        return array.view(np.uint8) if spec.dtype in SMALL_TYPES else array

    def host_arrays(self, args: Sequence[Any], named: Mapping[str, Any] | None = None) -> tuple[np.ndarray, ...]:
        """All inputs of a call, arranged and checked (:meth:`arrange`, :meth:`host_array`)."""
        # Of small networks this is most of a call: what is as it must be is seen by looking at it once.
        values = self.arrange(args, named)
        for (dtype, shape), value in zip(self._arrays, values):
            if (
                type(value) is not np.ndarray
                or value.dtype is not dtype
                or value.shape != shape
                or not value.flags.c_contiguous
            ):
                return tuple(self.host_array(spec, value) for spec, value in zip(self.inputs, values, strict=True))
        return values

    def results(
        self,
        values: Sequence[Any],
        read: Callable[[Any], Any] = np.asarray,
        take: Callable[[Any, Mapping[int, int]], Any] = first_positions,
    ) -> dict[str, Any]:
        """What a call gives of what was produced: by name, each as long as it was counted (`read` and `take` as in
        :func:`souffle.counted_axes.cut`)."""
        named = dict(zip(self._names_produced, values, strict=True))
        return cut(named, self.counts, read, take) if self.counts else named

    def destinations(self, out: Any, *, gpu: bool = False) -> tuple[Destination | None, ...]:
        """Where the caller wants what is produced, in its order; None for an output that is to be new.

        Parameters
        ----------
        out : mapping, sequence, array or None
            Arrays by the outputs' names, of which any may be missing; or one for each output in order, of which any may
            be None; or one array for the only output.
        gpu : bool
            Whether tensors on a GPU can be written. Their shape and type are looked at where they are read.

        Raises
        ------
        InputError
            If a name is unknown, the count differs, data decides how long the output of an array is, or an array has
            another shape or type than its output, cannot be written, is not contiguous, or shares memory with another.
        """
        if out is None:
            return self._nowhere
        if isinstance(out, Mapping):
            names = [spec.name for spec in self.outputs]
            for name in out:
                if name not in names:
                    raise InputError(f"{self.network} has no output named {name!r}{did_you_mean(name, names)}")
            given: Sequence[Any] = [out.get(name) for name in names]
        else:
            given = out if isinstance(out, (list, tuple)) else [out]
        if len(given) != len(self.outputs):
            takes = ", ".join(map(str, self.outputs))
            raise InputError(
                f"out= of {self.network} has {len(given)} arrays, and its outputs are {takes}; give one for each in "
                "this order, or a dict by name"
            )
        by_name = {spec.name: value for spec, value in zip(self.outputs, given, strict=True) if value is not None}
        for spec in self.outputs:
            if spec.counted and spec.name in by_name:
                raise InputError(
                    f"out= for {spec.name!r} of {self.network} is refused: data decides how long it is, "
                    f"{spec} at most; take the new array that the call gives"
                )
        found = tuple(
            self._destination(spec, by_name[spec.name], gpu) if spec.name in by_name else None for spec in self.produced
        )
        self._check_apart(found)
        return found

    def _destination(self, spec: TensorSpec, value: Any, gpu: bool) -> Destination:
        what = f"out= for {spec.name!r} of {self.network}"
        if isinstance(value, np.ndarray):
            array = value
        elif not hasattr(value, "__dlpack_device__"):
            raise InputError(f"{what} must be an array of {spec.dtype} {spec.shape} and is a {type(value).__name__}")
        elif dlpack.device_of(value)[0] in (dlpack.CUDA, dlpack.CUDA_MANAGED):
            if gpu:
                return Destination(value, None)
            raise InputError(f"{what} is on a GPU, and this call writes on the host; give an array of the host")
        else:
            try:
                array = np.from_dlpack(value)
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                raise InputError(f"{what} cannot be read through DLPack: {error}") from error
        self.check_destination(spec, array.shape, array.dtype, array.flags.c_contiguous)
        if not array.flags.writeable:
            raise InputError(f"{what} is read-only; give an array that can be written to")
        return Destination(value, array.view(np.uint8) if spec.dtype in SMALL_TYPES else array)

    def check_destination(self, spec: TensorSpec, shape: Iterable[int], dtype: Any, contiguous: bool) -> None:
        """Refuse memory that cannot hold an output as it is.

        Raises
        ------
        InputError
        """
        what, given = f"out= for {spec.name!r} of {self.network}", tuple(int(extent) for extent in shape)
        if np.dtype(dtype) != np.dtype(spec.dtype):
            raise InputError(f"{what} must be {spec.dtype} and is {np.dtype(dtype)}; Souffle casts nothing")
        if given != spec.shape:
            raise InputError(f"{what} must have shape {spec.shape} and has {given}")
        if not contiguous:
            raise InputError(f"{what} is not contiguous; give an array in C order, and copy from it")

    def _check_apart(self, found: Sequence[Destination | None]) -> None:
        """Refuse destinations of which one would be written over by another."""
        arrays = [
            (spec.name, destination.array)
            for spec, destination in zip(self.produced, found, strict=True)
            if destination is not None and destination.array is not None
        ]
        for number, (name, array) in enumerate(arrays):
            for other, earlier in arrays[:number]:
                if np.may_share_memory(array, earlier):
                    raise InputError(
                        f"out= for {name!r} and for {other!r} of {self.network} share memory; give each its own"
                    )
