"""Why a node cannot be imported, in the words of the one who wrote the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import onnx

from souffle.errors import Refusal, UnsupportedOperatorError
from souffle.frontend.values import Counted, Known, Value, is_counted

__all__ = [
    "Obstacle",
    "computed",
    "data_dependent",
    "formal_inputs",
    "is_text",
    "listed",
    "operator_name",
    "position_name",
    "refuse",
    "subject",
    "unknown_extent",
    "value_type",
    "version_of",
]


class Obstacle(UnsupportedOperatorError):
    """A form of an operator that cannot be imported.

    Whoever reads an operator says only why; the interpreter adds operator, node and inputs (:func:`refuse`).

    Attributes
    ----------
    reason : str
        Follows "operator ... cannot be imported: ".
    remedy : str
        What would help, as an imperative; empty where nothing is known to.
    parameters : tuple of str
        The node's inputs, by the names of the standard, whose values would have to be known.
    """

    def __init__(
        self,
        reason: str,
        remedy: str = "",
        *,
        refusal: Refusal = Refusal.FORM,
        parameters: tuple[str, ...] = (),
        needs: tuple[str, ...] = (),
    ) -> None:
        super().__init__(reason, remedy, refusal=refusal, needs=needs)
        self.reason = reason
        self.remedy = remedy
        self.parameters = parameters

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.reason, self.remedy)))


def computed(*names: str) -> Obstacle:
    """The obstacle that the inputs of these names have no value before the network runs."""
    quoted = listed(names)
    several = len(names) > 1
    are, constant, them = ("are", "constants", "them") if several else ("is", "a constant", "it")
    return Obstacle(
        f"its input{'s' if several else ''} {quoted} {are} computed at run time, and the program depends on {them}",
        f"give {quoted} as {constant} (an initializer or a Constant node); where the model computes {them} from "
        "constants or shapes, fold it with onnxsim",
        refusal=Refusal.PARAMETER,
        parameters=names,
    )


def unknown_extent(
    node: onnx.NodeProto, inputs: Sequence[Value], opsets: Sequence[onnx.OperatorSetIdProto], why: str = ""
) -> Obstacle:
    """The obstacle that a node reads along an axis whose extent data decides.

    `why` says what of the node stands against it, where that is not the operator as a whole.
    """
    names = formal_inputs(node, opsets)
    found = []
    for k, value in enumerate(inputs):
        if isinstance(value, Counted):
            name = repr(names[k]) if k < len(names) else str(k)
            axes = ", ".join(f"axis {axis} (by {count.source})" for axis, count in sorted(value.counts.items()))
            found.append(f"of its input {name} along {axes}")
    which = " and ".join(found) or "of a part of its inputs"
    return Obstacle(
        f"data decides the extent {which}, and {why or f'{node.op_type} is not known to read such a value'}",
        "end the network before this node and compute the rest outside of it, or keep the fixed shape up to here "
        "(Where for Compress or NonZero, TopK for a selection)",
        refusal=Refusal.DATA,
    )


def data_dependent(names: Sequence[str]) -> Obstacle:
    """The obstacle that nobody knows how large the result is before the values of these inputs are there."""
    return Obstacle(
        f"the shape of its result depends on the values of {listed(names) or 'its inputs'}, and shapes must be static",
        "end the network before this node and compute the rest outside of it, or replace the node by one whose result "
        "has a fixed shape (Where for Compress or NonZero, TopK for a selection)",
        refusal=Refusal.DATA,
    )


def listed(names: Sequence[str]) -> str:
    """``'a', 'b' and 'c'``."""
    quoted = [repr(name) for name in names]
    return " and ".join(filter(None, (", ".join(quoted[:-1]), *quoted[-1:])))


def version_of(domain: str, opsets: Sequence[onnx.OperatorSetIdProto]) -> int:
    """The version of the operator set of `domain`; 1 where none is named."""
    plain = "" if domain == "ai.onnx" else domain
    return next((o.version for o in opsets if ("" if o.domain == "ai.onnx" else o.domain) == plain), 1)


def formal_inputs(node: onnx.NodeProto, opsets: Sequence[onnx.OperatorSetIdProto]) -> list[str]:
    """The names that the ONNX standard gives the inputs of `node`; empty for an operator that it does not have."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = version_of(domain, opsets)
    if not onnx.defs.has(node.op_type, version, domain):
        return []
    formal = onnx.defs.get_schema(node.op_type, version, domain).inputs
    variadic = bool(formal) and formal[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    names = [parameter.name for parameter in (formal[:-1] if variadic else formal)]
    if variadic:
        names += [f"{formal[-1].name}[{k}]" for k in range(len(node.input) - len(names))]
    return names


def value_type(value: Value) -> str:
    """Element type and shape of a value, as ``float32[2, 3]``."""
    if value is None:
        return "absent"
    if isinstance(value, list):
        parts = sorted({value_type(part) for part in value})
        return f"sequence of {len(value)} ({', '.join(parts)})" if parts else "empty sequence"
    if isinstance(value, Counted):
        extents = [f"<={e}" if axis in value.counts else str(e) for axis, e in enumerate(value.tensor.shape)]
        return f"{value.tensor.dtype}[{', '.join(extents)}]"
    if is_counted(value):
        return "stack of values whose extent depends on data"
    return f"{'string' if is_text(value) else value.dtype}{list(value.shape)}"


def is_text(value: Value) -> bool:
    """Whether `value` is a constant of strings."""
    return isinstance(value, Known) and value.array.dtype.kind in "OUS"


def position_name(node: onnx.NodeProto, position: int) -> str:
    """The name of the node at `position` of its graph; made from its operator where it has none."""
    return node.name or f"{node.op_type}_{position}"


def operator_name(node: onnx.NodeProto) -> str:
    """The operator of `node`, with its domain where that is not ONNX's own."""
    return f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def subject(node: onnx.NodeProto, types: Sequence[str], opsets: Sequence[onnx.OperatorSetIdProto]) -> str:
    """Operator, node, and the type of every input."""
    names = formal_inputs(node, opsets)
    described = [f"{names[k]}: {kind}" if k < len(names) else kind for k, kind in enumerate(types)]
    given = f"inputs ({', '.join(described)})" if described else "no inputs"
    return f"operator {operator_name(node)} of node {node.name!r} with {given}"


def _parameters(
    node: onnx.NodeProto, inputs: Sequence[Value], opsets: Sequence[onnx.OperatorSetIdProto], error: Obstacle
) -> list[Value]:
    """Those inputs of `node` that an obstacle asks the values of."""
    names = formal_inputs(node, opsets)
    return [value for name, value in zip(names, inputs, strict=False) if name in error.parameters]


def refuse(
    node: onnx.NodeProto,
    inputs: Sequence[Value],
    opsets: Sequence[onnx.OperatorSetIdProto],
    error: UnsupportedOperatorError,
    inputs_behind: Callable[[Sequence[Value]], Sequence[str]] = lambda values: (),
) -> NoReturn:
    """Raise the whole sentence about `node`.

    Parameters
    ----------
    node : NodeProto
    inputs : sequence of Value
    opsets : sequence of OperatorSetIdProto
    error : UnsupportedOperatorError
        An obstacle, or the refusal of a node that this one is made of.
    inputs_behind : callable
        The names of those inputs of the model that values are computed from.
    """
    about = subject(node, [value_type(value) for value in inputs], opsets)
    if not isinstance(error, Obstacle):
        if str(error).startswith(about):
            raise error
        words = f"{about} cannot be imported: it is made of others, and {error}"
        raise UnsupportedOperatorError(words, refusal=error.refusal, needs=error.needs) from error
    needs = inputs_behind(_parameters(node, inputs, opsets, error))
    named = tuple(dict.fromkeys((*error.needs, *needs)))
    given = f"compile with constants={{{', '.join(f'{name!r}: ...' for name in needs)}}}, or " if needs else ""
    words = "; ".join(filter(None, (error.reason, f"{given}{error.remedy}")))
    raise UnsupportedOperatorError(f"{about} cannot be imported: {words}", refusal=error.refusal, needs=named) from (
        error.__cause__ or error
    )
