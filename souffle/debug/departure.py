"""The first value of a program that departs from its reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from souffle.program import Loop, Tensor, TEProgram
from souffle.program.evaluate import checked_inputs, run_tes
from souffle.program.printer import format_item
from souffle.runtime.comparison import OutputComparison, compare

__all__ = ["Departure", "Reference", "first_departure", "values_of"]


@dataclass(frozen=True)
class Reference:
    """What a tensor is to hold.

    Attributes
    ----------
    array : ndarray
    source : str
        Who says so.
    value : str
        The name of ONNX's value; empty where it has none.
    """

    array: np.ndarray
    source: str
    value: str = ""


@dataclass(frozen=True)
class Departure:
    """A TE whose value is not what it is to be.

    Attributes
    ----------
    te, tensor : str
    nodes : str
        The ONNX nodes that it computes.
    value, source : str
        The name of ONNX's value, empty where it has none; and what it was compared with.
    error : float
        Largest difference over the largest magnitude, as :class:`souffle.runtime.comparison.OutputComparison` has it.
    text : str
        The TE as a program prints it.
    unknown : tuple of str
        TEs between the last values that are right and this one, which nothing can be compared with: new ones of a
        transformation.
    """

    te: str
    tensor: str
    nodes: str
    value: str
    source: str
    error: float
    text: str
    unknown: tuple[str, ...]


def values_of(program: TEProgram, inputs: Mapping[str, np.ndarray]) -> dict[Tensor, np.ndarray]:
    """The value of each tensor that the TEs of a program define, loops as a whole; by the reference evaluator."""
    given = dict(zip(program.inputs, checked_inputs(program, inputs), strict=True)) | dict(program.constants)
    tes = program.expanded().tes
    return run_tes(tes, given, {tensor for te_ in tes for tensor in te_.outputs})


def first_departure(
    program: TEProgram,
    values: Mapping[Tensor, np.ndarray],
    references: Mapping[Tensor, Reference],
    precision: str,
) -> tuple[Departure | None, int]:
    """The first TE in the program's order whose value departs by more than the contract, and how many were compared.

    Parameters
    ----------
    program : TEProgram
    values : mapping of Tensor to array
        Of :func:`values_of`.
    references : mapping of Tensor to Reference
        Of tensors of the program as it was imported. A tensor that is not among them stands for the one of its name
        and shape, as where only its type is another.
    precision : str
        Whose contract holds.
    """
    by_name = {(tensor.name, tensor.shape): found for tensor, found in references.items()}
    outputs = _outputs(program, references)
    compared, unknown = 0, []
    for item in program.expanded().tes:
        known = False
        for tensor in item.outputs:
            reference = outputs.get(tensor) or references.get(tensor) or by_name.get((tensor.name, tensor.shape))
            if reference is None or not _comparable(tensor, reference):
                continue
            known = True
            if reference.array is values[tensor]:  # its own value, which nothing else is known of
                continue
            compared += 1
            found = _compared(values[tensor], reference.array, precision)
            if not found.ok:
                return _departure(program, item, tensor, reference, found.error, unknown), compared
        if not known:
            unknown.append(item)
    return None, compared


def _outputs(program: TEProgram, references: Mapping[Tensor, Reference]) -> dict[Tensor, Reference]:
    """What a program's outputs are to hold: an output keeps the model's name, whatever tensor it becomes."""
    by_value = {found.value: found for found in references.values() if found.value}
    named = zip(program.output_names, program.outputs, strict=True)
    return {tensor: by_value[name] for name, tensor in named if name in by_value}


def _comparable(tensor: Tensor, reference: Reference) -> bool:
    both_float = "float" in tensor.dtype and reference.array.dtype.kind == "f"
    return both_float or tensor.dtype == str(reference.array.dtype)


def _compared(value: np.ndarray, expected: np.ndarray, precision: str) -> OutputComparison:
    return compare({"": value.astype(expected.dtype)}, {"": expected}, precision)


def _departure(
    program: TEProgram, item: object, tensor: Tensor, reference: Reference, error: float, unknown: Sequence[object]
) -> Departure:
    behind = _behind(item, program)
    origin = getattr(item, "origin", None)
    lines = format_item(item)
    return Departure(
        item.name,
        tensor.name,
        str(origin) if origin is not None else "",
        reference.value,
        reference.source,
        error,
        "\n".join(lines[:1] if isinstance(item, Loop) else lines),
        tuple(te_.name for te_ in unknown if te_ in behind),
    )


def _behind(item: object, program: TEProgram) -> set[object]:
    """All that an item needs."""
    producers = program.expanded().producers
    found: set[object] = set()
    stack = [item]
    while stack:
        for tensor in stack.pop().inputs:
            before = producers.get(tensor)
            if before is not None and before not in found:
                found.add(before)
                stack.append(before)
    return found
