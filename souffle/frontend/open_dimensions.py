"""Which dimensions of a model are open, what they are called, and the values that a caller gives them."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from souffle.dimensions import OpenDimensions, Shape, names_in
from souffle.errors import ModelError, OptionError, Refusal
from souffle.frontend.readers import Readers

__all__ = ["checked_extent", "fixed_extents", "open_dimensions_of"]


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
        raise OptionError(f"dims gives {name!r} the value {value!r}; it must be a whole number of at least 1")
    return extent


def fixed_extents(
    dimensions: OpenDimensions, batch: int | None, dims: Mapping[str, Any], where: str, readers: Readers
) -> dict[str, int]:
    """The value of every open dimension: `batch` for first dimensions of inputs, and what `dims` gives by name.

    Parameters
    ----------
    dimensions : OpenDimensions
    batch : int or None
        At least 1.
    dims : mapping of str to int
    where : str
        The model, for messages.
    readers : Readers

    Raises
    ------
    OptionError
        If `dims` names no open dimension or gives it no size, or `batch` has no effect or contradicts `dims`.
    ModelError
        If a dimension stays open.
    """
    _check_names(dimensions, dims, where)
    firsts = {shape[0] for _, shape in dimensions.inputs if shape} & set(dimensions.names)
    both = [name for name in dimensions.names if batch is not None and name in firsts and name in dims]
    if both:
        raise OptionError(
            f"batch={batch} and dims both give a value to {both[0]!r} ({dimensions.where(both[0])}) of {where}; leave "
            "batch away"
        )
    extents, missing = {}, []
    for name in dimensions.names:
        if name in dims:
            extents[name] = checked_extent(name, dims[name])
        elif batch is not None and name in firsts:
            extents[name] = batch
        else:
            missing.append(name)
    if missing:
        raise ModelError(_still_open(dimensions, missing, firsts, batch, where, readers), refusal=Refusal.OPEN)
    if batch is not None and not firsts:
        _check_fixed_batch(batch, dimensions, where)
    return extents


def _check_names(dimensions: OpenDimensions, dims: Mapping[str, Any], where: str) -> None:
    unknown = [name for name in dims if name not in dimensions.names]
    if not unknown:
        return
    if not dimensions.names:
        raise OptionError(
            f"dims names {unknown[0]!r}, and no dimension of {where} is open; leave dims away, or export the model "
            "with symbolic dimensions (torch.onnx.export with dynamic_shapes or dynamic_axes)"
        )
    near = difflib.get_close_matches(str(unknown[0]), dimensions.names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
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


def _still_open(
    dimensions: OpenDimensions,
    missing: Sequence[str],
    firsts: set[str],
    batch: int | None,
    where: str,
    readers: Readers,
) -> str:
    places = {name: (number, axis) for name, number, axis in dimensions.places()}
    number, axis = places[missing[0]]
    source = dimensions.inputs[number][0]
    unnamed = missing[0] == f"{source}:{axis}"
    others = f", and {', '.join(map(repr, missing[1:]))} too" if missing[1:] else ""
    values = ", ".join(f'"{name}": ...' for name in missing)
    by_batch = "batch=... or " if batch is None and firsts.issuperset(missing) else ""
    return (
        f"{where}: dimension {axis} ({'unnamed' if unnamed else missing[0]}) of input {source!r} is open"
        f"{readers.of_value(source)}{others}; pass {by_batch}dims={{{values}}} to fix "
        f"{'them' if others else 'it'} (souffle.compile takes lists of values, too, and compiles a version for each)"
    )
