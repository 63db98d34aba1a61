"""Access to the attributes of an ONNX node."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper

__all__ = ["attribute"]


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute of `node`; `default` where it has none of that name."""
    for candidate in node.attribute:
        if candidate.name == name:
            return helper.get_attribute_value(candidate)
    return default
