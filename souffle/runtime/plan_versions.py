"""A network for several values of its open dimensions, as data: a plan for each, and how inputs may be padded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from souffle.codegen.plan import Plan
from souffle.counted_axes import hidden_outputs
from souffle.dimensions import OpenDimensions, Shape, extents_text
from souffle.errors import OptionError

__all__ = ["Padding", "PlanVersions", "check_padding", "check_version", "versions_from_json", "versions_to_json"]


@dataclass(frozen=True)
class Padding:
    """How an input of another shape becomes one that a version takes.

    Attributes
    ----------
    names : tuple of str
        The open dimensions along which inputs are made larger, at the end.
    values : mapping of str to number
        What is put there, by input; 0 where nothing is named.
    comparison : str
        What was found when outputs with and without padding were compared, in words.
    """

    names: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    comparison: str = ""


@dataclass(frozen=True, eq=False)
class PlanVersions:
    """Plans of one model.

    Attributes
    ----------
    dimensions : OpenDimensions
    padding : Padding or None
        None where only inputs of exactly a version's shape are taken.
    plans : mapping of tuple of int to Plan
        By the values of the open dimensions, in the order of their names.
    """

    dimensions: OpenDimensions
    padding: Padding | None
    plans: Mapping[tuple[int, ...], Plan]


def check_version(dimensions: OpenDimensions, extents: tuple[int, ...], plan: Plan) -> None:
    """Raise ValueError unless a plan has the inputs and outputs that follow from the values of its open dimensions."""
    chosen, about = dict(zip(dimensions.names, extents, strict=True)), extents_text(dimensions.names, extents)
    wanted = [(name, dimensions.shape(shape, chosen)) for name, shape in dimensions.inputs]
    found = [(buffer.label, buffer.shape) for buffer in plan.buffers if buffer.kind == "input"]
    if found != wanted:
        raise ValueError(f"the inputs of its version {about} are {found}, not {wanted}")
    hidden = hidden_outputs(plan.counts)
    outputs = [b.label for b in plan.buffers if b.kind == "output" and b.label not in hidden]
    if outputs != [name for name, _ in dimensions.outputs]:
        raise ValueError(f"the outputs of its version {about} are {outputs}")


def check_padding(dimensions: OpenDimensions, extents: tuple[int, ...], plan: Plan, padding: Padding) -> None:
    """Refuse to pad where outputs could not be cut back to what follows from the inputs, or a value is none of a type.

    Raises
    ------
    OptionError
    """
    chosen = dict(zip(dimensions.names, extents, strict=True))
    names = [name for name, _ in dimensions.inputs]
    unknown = [name for name in padding.values if name not in names]
    if unknown:
        raise OptionError(
            f"pad_values names {unknown[0]!r}, which is no input of {plan.name}; it has {', '.join(names)}"
        )
    hidden = hidden_outputs(plan.counts)
    for buffer in plan.buffers:
        if buffer.kind == "input" and buffer.label in padding.values:
            _check_value(buffer.label, buffer.dtype, padding.values[buffer.label])
        if buffer.kind != "output" or buffer.label in hidden:
            continue
        if buffer.counts:
            raise OptionError(
                f"inputs of {plan.name} cannot be padded: the data decides how long output {buffer.label!r} is, and "
                "what is added to the inputs would be counted with the rest; leave pad away"
            )
        shape = dict(dimensions.outputs)[buffer.label]
        wanted = None
        if shape is not None and all(map(dimensions.knows, shape)):
            wanted = dimensions.shape(shape, chosen)
        if wanted == buffer.shape:
            continue
        says = "no shape" if shape is None else _shape_text(shape)
        raise OptionError(
            f"inputs of {plan.name} cannot be padded: the model declares {says} for output {buffer.label!r}, which "
            f"with {extents_text(dimensions.names, extents)} is {buffer.shape}, so that it is not known how far to cut "
            f"it back; declare its shape in {', '.join(map(repr, dimensions.names))} and numbers, or leave pad away"
        )


def _shape_text(shape: Shape) -> str:
    return f"({', '.join('?' if dimension is None else str(dimension) for dimension in shape)})"


def _check_value(name: str, dtype: str, value: Any) -> None:
    try:
        given = np.array(value)
    except ValueError:
        given = np.array("lists of several lengths")
    same = given.shape == () and given.dtype.kind in "biuf"
    if same:
        with np.errstate(all="ignore"):
            cast = given.astype(dtype)
        # A rounded fraction will do, but no finite number that becomes infinite.
        whole = np.dtype(dtype).kind in "biu"
        same = cast.astype(given.dtype) == given if whole else np.isinf(cast) == np.isinf(given)
    if not same:
        raise OptionError(f"pad_values gives input {name!r} the value {value!r}; it must be one number of type {dtype}")


# files


def versions_to_json(versions: PlanVersions) -> dict[str, Any]:
    """What a file says of the versions, but for their plans."""
    dimensions, padding = versions.dimensions, versions.padding
    values = {} if padding is None else {name: np.asarray(v).item() for name, v in padding.values.items()}
    return {
        "names": list(dimensions.names),
        "inputs": [[name, list(shape)] for name, shape in dimensions.inputs],
        "outputs": [[name, None if shape is None else list(shape)] for name, shape in dimensions.outputs],
        "padding": None
        if padding is None
        else {"names": list(padding.names), "values": values, "comparison": padding.comparison},
    }


def versions_from_json(content: Any) -> tuple[OpenDimensions, Padding | None]:
    """What :func:`versions_to_json` wrote.

    Raises
    ------
    ValueError
        If it is something else.
    """
    if not isinstance(content, dict):
        raise ValueError("it does not say what its versions are of")
    names = _names(content.get("names"))
    inputs = tuple((name, _shape(shape, False)) for name, shape in _pairs(content.get("inputs")))
    outputs = tuple(
        (name, None if shape is None else _shape(shape, True)) for name, shape in _pairs(content.get("outputs"))
    )
    dimensions = OpenDimensions(names, inputs, outputs)
    words = {dimension for _, shape in inputs for dimension in shape}
    if not names or len(set(names)) < len(names) or not words.issuperset(names):
        raise ValueError(f"its open dimensions {names} are not those of its inputs")
    if not all(dimensions.knows(dimension) for dimension in words):
        raise ValueError("its inputs have dimensions that do not follow from its open ones")
    padding = content.get("padding")
    if padding is None:
        return dimensions, None
    if not isinstance(padding, dict) or not isinstance(padding.get("values"), dict):
        raise ValueError("it does not say how inputs are padded")
    comparison = padding.get("comparison")
    padded = Padding(_names(padding.get("names")), padding["values"], comparison if isinstance(comparison, str) else "")
    if not set(padded.names) <= set(names):
        raise ValueError(f"it pads {padded.names}, and its open dimensions are {names}")
    return dimensions, padded


def _names(content: Any) -> tuple[str, ...]:
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise ValueError("its open dimensions have no names")
    return tuple(content)


def _pairs(content: Any) -> list[tuple[str, Any]]:
    proper = isinstance(content, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in content
    )
    if not proper:
        raise ValueError("it does not say which inputs and outputs its versions have")
    return [(name, shape) for name, shape in content]


def _shape(content: Any, unknown: bool) -> Shape:
    def proper(dimension: Any) -> bool:
        if dimension is None:
            return unknown
        number = isinstance(dimension, int) and not isinstance(dimension, bool) and dimension >= 0
        return isinstance(dimension, str) or number

    if not isinstance(content, list) or not all(map(proper, content)):
        raise ValueError(f"{content} is no shape")
    return tuple(content)
