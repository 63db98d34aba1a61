"""The bodies by which ONNX itself defines operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from souffle.frontend.values import Value

__all__ = ["definition"]


def definition(
    node: onnx.NodeProto, inputs: Sequence[Value], opsets: Sequence[onnx.OperatorSetIdProto]
) -> onnx.FunctionProto | None:
    """The body by which ONNX itself defines the operator of `node`, if it does."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = next((o.version for o in opsets if ("" if o.domain == "ai.onnx" else o.domain) == domain), 1)
    if not onnx.defs.has(node.op_type, version, domain):
        return None
    schema = onnx.defs.get_schema(node.op_type, version, domain)
    body: onnx.FunctionProto | None = None
    if schema.has_context_dependent_function:
        types = [
            onnx.TypeProto()
            if value is None
            else helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype)), value.shape)
            for value in inputs
        ]
        serialized = schema.get_context_dependent_function(
            node.SerializeToString(), [t.SerializeToString() for t in types]
        )
        body = onnx.FunctionProto.FromString(serialized)
    elif schema.has_function:
        body = onnx.FunctionProto()
        body.CopyFrom(schema.function_body)
    if body is None or not body.node:
        return None
    given = {a.name for a in node.attribute}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            body.attribute_proto.append(attribute.default_value)
    return body
