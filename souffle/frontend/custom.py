"""ONNX operators that get a TE of our own, where TVM has none, an extern function, or several TEs for one.

Their definitions are in the modules beside this one, and enter themselves by :func:`defines`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from tvm import te, tirx

from souffle.frontend.lowering import NodeInput, Step, Template
from souffle.frontend.refusal import Obstacle, operator_name
from souffle.tvm_compat import PrimExpr, primfunc_from_tensors

__all__ = [
    "LONGEST_AXIS",
    "OWN_DEFINITIONS",
    "NodeOperands",
    "check_length",
    "custom_template",
    "defines",
    "int_imm",
    "position_on_axis",
    "template_of",
]

_Definition = Callable[[onnx.NodeProto, "NodeOperands"], Sequence[te.Tensor] | None]
OWN_DEFINITIONS: dict[str, _Definition] = {}
LONGEST_AXIS = 65536
"""Beyond this a quadratic formulation costs more than it is worth."""


class NodeOperands:
    """The inputs of a node as placeholders; constants stay known."""

    def __init__(self, inputs: Sequence[NodeInput | None]):
        self.inputs = list(inputs)
        self.placeholders = [
            None if form is None else te.placeholder(form.shape, form.dtype, name=f"i{k}")
            for k, form in enumerate(inputs)
        ]

        self.tables: list[tuple[te.Tensor, np.ndarray]] = []

    def table(self, array: np.ndarray) -> te.Tensor:
        """A placeholder for a constant that the definition itself makes."""
        placeholder = te.placeholder(array.shape, str(array.dtype), name=f"table{len(self.tables)}")
        self.tables.append((placeholder, array))
        return placeholder

    def tensor(self, position: int) -> te.Tensor | None:
        """The placeholder of an input; ``None`` for an absent one."""
        return self.placeholders[position] if position < len(self.placeholders) else None

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an input."""
        return self.inputs[position].shape

    def dtype(self, position: int) -> str:
        """The element type of an input."""
        return self.inputs[position].dtype

    def constant(self, position: int) -> np.ndarray | None:
        """The value of an input, if it is known."""
        form = self.inputs[position] if position < len(self.inputs) else None
        return None if form is None else form.value

    def present(self, position: int) -> bool:
        """Whether an optional input is there."""
        return self.tensor(position) is not None


def custom_template(node: onnx.NodeProto, inputs: Sequence[NodeInput | None]) -> Template | None:
    """The template of a node that is defined here; ``None`` for all others."""
    definition = OWN_DEFINITIONS.get(operator_name(node))
    if definition is None:
        return None
    return template_of(lambda operands: definition(node, operands), inputs, node.op_type.lower())


def template_of(
    definition: Callable[[NodeOperands], Sequence[te.Tensor] | None], inputs: Sequence[NodeInput | None], name: str
) -> Template | None:
    """The template of what `definition` makes of the operands; ``None`` where it makes nothing."""
    operands = NodeOperands(inputs)
    tensors = definition(operands)
    if tensors is None:
        return None
    slots = [k for k, form in enumerate(inputs) if form is not None and form.value is None]
    slots += [k for k, form in enumerate(inputs) if form is not None and form.value is not None]
    placeholders = (*(operands.placeholders[k] for k in slots), *(table for table, _ in operands.tables))
    constants = {place: inputs[k].value for place, k in enumerate(slots) if inputs[k].value is not None}
    constants.update({len(slots) + k: array for k, (_, array) in enumerate(operands.tables)})
    types = [(tuple(int(extent) for extent in t.shape), str(t.dtype)) for t in (*placeholders, *tensors)]
    results = tuple(range(len(placeholders), len(types)))
    func = primfunc_from_tensors([*placeholders, *tensors], name)
    read = tuple(range(len(placeholders)))
    step = Step(name, func, read, results, placeholders, tuple(tensors))
    return Template(tuple(types), constants, (step,), results)


def defines(*operators: str) -> Callable[[_Definition], _Definition]:
    """Enter a function as the definition of `operators`; it gives ``None`` to leave a node to TVM.

    An operator of another domain than ONNX's is named ``domain::operator``.
    """

    def register(function: _Definition) -> _Definition:
        for operator in operators:
            OWN_DEFINITIONS[operator] = function
        return function

    return register


def int_imm(value: int, dtype: str = "int32") -> PrimExpr:
    """An integer constant."""
    return tirx.IntImm(dtype, value)


def position_on_axis(index: PrimExpr, extent: int) -> PrimExpr:
    """An index of ONNX as a position on an axis: negative ones count from the end, none leaves the axis."""
    if isinstance(index, tirx.IntImm):
        value = int(index.value)
        return int_imm(min(max(value + extent if value < 0 else value, 0), extent - 1))
    index = index.astype("int32") if str(index.ty.dtype) != "int32" else index
    counted = tirx.Select(index < 0, index + extent, index)
    return tirx.max(tirx.min(counted, int_imm(extent - 1)), int_imm(0))


def check_length(extent: int, most: int = LONGEST_AXIS) -> None:
    """Refuse an axis that is too long for a definition of quadratic cost."""
    if extent > most:
        raise Obstacle(
            f"it works along an axis of {extent} elements, and at most {most} are supported",
            "split the axis into shorter parts",
        )
