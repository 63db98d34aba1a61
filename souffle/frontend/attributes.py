"""Access to the attributes of an ONNX node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

__all__ = ["attribute", "attributes", "sides"]


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute of `node`; `default` where it has none of that name."""
    for candidate in node.attribute:
        if candidate.name == name:
            return helper.get_attribute_value(candidate)
    return default


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of `node` by name, those that it has."""
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def sides(auto_pad: str, totals: Sequence[int]) -> list[int]:
    """Pads before all dimensions, then after: half of each total, the odd one where ``auto_pad`` has it."""
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return small + large if auto_pad == "SAME_UPPER" else large + small
