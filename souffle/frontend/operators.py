"""Which operators of ONNX enter by code of our own; the others enter through TVM's importer or ONNX's definition."""

from __future__ import annotations

from souffle.frontend import onnx_import  # noqa: F401  (all modules that enter operators are imported with it)
from souffle.frontend.custom import OWN_DEFINITIONS
from souffle.frontend.interpreter import SPECIAL_OPERATORS

__all__ = ["own_operators"]


def own_operators() -> dict[str, tuple[bool, bool]]:
    """By name, whether an operator has a tensor expression here, and whether its nodes are taken apart here.

    Both may be: the one for some forms, the other for the rest.
    """
    names = sorted({*OWN_DEFINITIONS, *SPECIAL_OPERATORS})
    return {name: (name in OWN_DEFINITIONS, name in SPECIAL_OPERATORS) for name in names}
