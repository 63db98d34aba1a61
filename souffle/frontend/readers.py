"""Who reads a value of a model, for messages about inputs and weights that come before any node is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from souffle.frontend.refusal import position_name, subject

__all__ = ["Readers", "declared_type"]


def declared_type(kind: onnx.TypeProto) -> str:
    """A type as a model declares it, such as ``float32[N, 3]`` or ``sequence of string[]``."""
    form = kind.WhichOneof("value")
    if form in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(kind, form)
        extents = [str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
        shape = f"[{', '.join(extents)}]" if tensor.HasField("shape") else " of unknown shape"
        return f"{'sparse ' if form == 'sparse_tensor_type' else ''}{_element(tensor.elem_type)}{shape}"
    if form in ("sequence_type", "optional_type"):
        return f"{form.removesuffix('_type')} of {declared_type(getattr(kind, form).elem_type)}"
    return "map" if form == "map_type" else "of unknown type"


def _element(number: int) -> str:
    if number not in onnx.TensorProto.DataType.values():
        return f"element type {number}"
    name = onnx.TensorProto.DataType.Name(number).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


@dataclass(frozen=True, eq=False)
class Readers:
    """The nodes of a graph and the declared types of its values.

    Attributes
    ----------
    proto : ModelProto
    types : mapping of str to str
        Of inputs, initializers and whatever else the model declares.
    """

    proto: onnx.ModelProto
    types: Mapping[str, str]

    @classmethod
    def of(cls, proto: onnx.ModelProto) -> Readers:
        """Of a checked model."""
        graph = proto.graph
        types = {info.name: declared_type(info.type) for info in (*graph.value_info, *graph.output, *graph.input)}
        types.update({t.name: f"{_element(t.data_type)}{list(t.dims)}" for t in graph.initializer})
        types.update(
            {s.values.name: f"sparse {_element(s.values.data_type)}{list(s.dims)}" for s in graph.sparse_initializer}
        )
        return cls(proto, types)

    def of_value(self, name: str) -> str:
        """`` (read by operator ...)``, with the first node that reads `name`."""
        for position, node in enumerate(self.proto.graph.node):
            if name in node.input:
                named = onnx.NodeProto()
                named.CopyFrom(node)
                named.name = position_name(node, position)
                types = [self.types.get(source, "computed") if source else "absent" for source in node.input]
                return f" (read by {subject(named, types, self.proto.opset_import)})"
        return " (read by no node)"
