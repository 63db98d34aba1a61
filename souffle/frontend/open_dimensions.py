"""Which dimensions of a model are open, what they are called, and the values that a caller gives them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from souffle.dimensions import OpenDimensions, Shape, names_in
from souffle.errors import ModelError, OptionError, Refusal
from souffle.frontend.readers import Readers, declared_type
from souffle.wording import did_you_mean

__all__ = ["DeclaredDimensions", "checked_extent", "open_dimensions_of"]


def open_dimensions_of(inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> OpenDimensions:
    """The shapes that a model declares. An open dimension without a name is called ``input:axis``.

    Parameters
    ----------
    inputs : sequence of ValueInfoProto
        Tensors with shapes.
    outputs : sequence of ValueInfoProto
        Of any kind.
    """
    declared = tuple((info.name, _shape(info, named=True)) for info in inputs)
    words = dict.fromkeys(d for _, shape in declared for d in shape if isinstance(d, str))
    single = {name for name in words if not names_in(name)}
    # ``a - b`` follows from a and b where both are dimensions; else it is a name with a dash in it.
    free = tuple(name for name in words if name in single or not names_in(name) <= single)
    return OpenDimensions(free, declared, tuple((info.name, _shape(info, named=False)) for info in outputs))


def _shape(info: onnx.ValueInfoProto, *, named: bool) -> Shape | None:
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    return tuple(
        dim.dim_value
        if dim.HasField("dim_value") and dim.dim_value >= 0
        else dim.dim_param or (f"{info.name}:{axis}" if named else None)
        for axis, dim in enumerate(tensor.shape.dim)
    )


def checked_extent(name: str, value: Any) -> int:
    """A value of a dimension.

    Raises
    ------
    OptionError
        If it is no whole number of at least 1.
    """
    try:
        extent = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        extent = -1
    if extent < 1:
        lists = "; lists of values are for souffle.compile, tune and check"
        several = lists if isinstance(value, (list, tuple)) else ""
        raise OptionError(f"dims gives {name!r} the value {value!r}; it must be a whole number of at least 1{several}")
    return extent


@dataclass(frozen=True, eq=False)
class DeclaredDimensions:
    """The dimensions that a model declares, and the values that they are given, also by inputs whose values are known.

    Attributes
    ----------
    declared : OpenDimensions
        Of all inputs.
    constants : dict of str to ValueInfoProto and shape
        The inputs whose values are given, and the shapes of those.
    where : str
        The model, for messages.
    readers : Readers
    settled : dict of str to (int, str)
        What follows from `constants`: the value of an open dimension, and by which it is.
    still_open : OpenDimensions
        The rest, of the inputs that have no values.

    Raises
    ------
    OptionError
        If `constants` give a dimension two values.
    """

    declared: OpenDimensions
    constants: Mapping[str, tuple[onnx.ValueInfoProto, tuple[int, ...]]]
    where: str
    readers: Readers
    settled: Mapping[str, tuple[int, str]] = field(init=False)
    still_open: OpenDimensions = field(init=False)

    def __post_init__(self) -> None:
        settled: dict[str, tuple[int, str]] = {}
        for name, shape in self.declared.inputs:
            given = self.constants[name][1] if name in self.constants else ()
            for dimension, extent in zip(shape, given, strict=False):
                if dimension in self.declared.names:
                    settled.setdefault(dimension, (extent, f"the value of {name!r}"))
        self._check_constants(settled)
        extents = {name: extent for name, (extent, _) in settled.items()}
        object.__setattr__(self, "settled", settled)
        object.__setattr__(self, "still_open", self.declared.settled(extents, self.constants))

    def extents(self, batch: int | None, dims: Mapping[str, Any]) -> dict[str, int]:
        """The value of every dimension of :attr:`still_open`: `batch` for first ones, and what `dims` gives by name.

        Parameters
        ----------
        batch : int or None
            At least 1.
        dims : mapping of str to int

        Raises
        ------
        OptionError
            If `dims` names no open dimension or gives it no size, `batch` has no effect or contradicts `dims`, or one
            of them contradicts the shape of a constant.
        ModelError
            If a dimension stays open.
        """
        known, where = self.declared, self.where
        _check_names(known, dims, where)
        given = [shape for name, shape in known.inputs if name not in self.constants]
        firsts = {shape[0] for shape in given if shape} & set(known.names)
        both = [name for name in known.names if batch is not None and name in firsts and name in dims]
        if both:
            raise OptionError(
                f"batch={batch} and dims both give a value to {both[0]!r} ({known.where(both[0])}) of {where}; leave "
                "batch away"
            )
        chosen = {name: (checked_extent(name, value), "dims") for name, value in dims.items()}
        if batch is not None:
            chosen |= {name: (operator.index(batch), f"batch={batch}") for name in firsts}
        chosen = {**self.settled, **chosen}
        self._check_constants(chosen)
        missing = [name for name in self.still_open.names if name not in chosen]
        if missing:
            by_batch = batch is None and firsts.issuperset(missing)
            raise ModelError(_left_open(self.still_open, missing, by_batch, where, self.readers), refusal=Refusal.OPEN)
        if batch is not None and not firsts:
            _check_fixed_batch(batch, self.still_open, where)
        return {name: chosen[name][0] for name in self.still_open.names}

    def _check_constants(self, chosen: Mapping[str, tuple[int, str]]) -> None:
        """Refuse constants whose shapes are not what follows from values of dimensions, each with what gives it."""
        extents = {name: extent for name, (extent, _) in chosen.items()}
        for name, shape in self.declared.inputs:
            if name not in self.constants:
                continue
            info, own = self.constants[name]
            for dimension, extent in zip(shape, own, strict=True):
                used = {dimension} if dimension in chosen else names_in(dimension) if isinstance(dimension, str) else ()
                if not used or not used <= chosen.keys() or self.declared.extent(dimension, extents) == extent:
                    continue
                by = " and ".join(dict.fromkeys(chosen[part][1] for part in self.declared.names if part in used))
                raise OptionError(
                    f"constants: input {name!r} of {self.where} takes {declared_type(info.type)} and was given {own}; "
                    f"{dimension} is {self.declared.extent(dimension, extents)} by {by}"
                )


def _check_names(dimensions: OpenDimensions, dims: Mapping[str, Any], where: str) -> None:
    unknown = [name for name in dims if name not in dimensions.names]
    if not unknown:
        return
    if not dimensions.names:
        raise OptionError(
            f"dims names {unknown[0]!r}, and no dimension of {where} is open; leave dims away, or export the model "
            "with symbolic dimensions (torch.onnx.export with dynamic_shapes or dynamic_axes)"
        )
    hint = did_you_mean(unknown[0], dimensions.names, most=1)
    has = ", ".join(f"{name!r} ({dimensions.where(name)})" for name in dimensions.names)
    raise OptionError(f"dims names {unknown[0]!r}, which is no open dimension of {where}; it has {has}{hint}")


def _check_fixed_batch(batch: int, dimensions: OpenDimensions, where: str) -> None:
    """Refuse a batch that a model without open first dimensions cannot have."""
    others = [(name, shape) for name, shape in dimensions.inputs if shape[:1] != (batch,)]
    if dimensions.inputs and not others:
        return
    has = "it has no input"
    if others:
        name, shape = others[0]
        has = f"the shape of input {name!r} is {shape}" + ("" if shape else ", a scalar")
    which = "first dimensions" if dimensions.names else "dimensions"
    raise OptionError(
        f"batch={batch} has no effect on {where}: none of its {which} is open, {has}; leave batch away, or export "
        "the model with a symbolic first dimension (torch.onnx.export with dynamic_shapes or dynamic_axes)"
    )


def _left_open(dimensions: OpenDimensions, missing: Sequence[str], by_batch: bool, where: str, readers: Readers) -> str:
    places = {name: (number, axis) for name, number, axis in dimensions.places()}
    number, axis = places[missing[0]]
    source = dimensions.inputs[number][0]
    unnamed = missing[0] == f"{source}:{axis}"
    others = f", and {', '.join(map(repr, missing[1:]))} too" if missing[1:] else ""
    values = ", ".join(f'"{name}": ...' for name in missing)
    # Of one dimension are axes, sizes and the like.
    lists = ", ".join(f'"{name}": ...' for name, shape in dimensions.inputs if len(shape) == 1 and shape[0] in missing)
    given = f"; where values of inputs are known before the network runs, constants={{{lists}}} gives them"
    return (
        f"{where}: dimension {axis} ({'unnamed' if unnamed else missing[0]}) of input {source!r} is open"
        f"{readers.of_value(source)}{others}; pass {'batch=... or ' if by_batch else ''}dims={{{values}}} to fix "
        f"{'them' if others else 'it'} (souffle.compile takes lists of values, too, and compiles a version for each)"
        f"{given if lists else ''}"
    )
