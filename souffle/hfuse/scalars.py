"""The C types of a kernel's scalar parameters: how many bytes of an argument the driver reads."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from souffle.hfuse.errors import FusionError
from souffle.hfuse.parameters import Parameter, kernel_parameters, template_arguments
from souffle.hfuse.part import Part

__all__ = ["scalar_types"]

_INTEGERS = {
    "char": ctypes.c_int8, "short": ctypes.c_int16, "int": ctypes.c_int32, "long": ctypes.c_int64,
    "long long": ctypes.c_int64, "bool": ctypes.c_bool, "float": ctypes.c_float, "double": ctypes.c_double,
    "size_t": ctypes.c_uint64, "ptrdiff_t": ctypes.c_int64,
    **{f"int{bits}_t": getattr(ctypes, f"c_int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}_t": getattr(ctypes, f"c_uint{bits}") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_UNSIGNED = {
    ctypes.c_int8: ctypes.c_uint8, ctypes.c_int16: ctypes.c_uint16, ctypes.c_int32: ctypes.c_uint32,
    ctypes.c_int64: ctypes.c_uint64,
}  # fmt: skip


def scalar_types(part: Part) -> tuple[Any, ...]:
    """For each parameter of a part's kernel its type of ``ctypes``, or None for a pointer.

    Raises
    ------
    FusionError
        A parameter is neither a pointer nor a number of a type that can be told from the file.
    """
    source, kernel = part.reach.source, part.reach.kernel
    parameters = kernel_parameters(source, kernel, template_arguments(source, kernel, part.kernel))
    return tuple(_type_of(part, parameter) for parameter in parameters)


def _type_of(part: Part, parameter: Parameter) -> Any:
    if "*" in parameter.prefix or "[" in parameter.suffix:
        return None
    text = parameter.alias or parameter.base
    for _ in range(8):
        words = [word for word in re.findall(r"\w+", text) if word not in ("const", "volatile", "__grid_constant__")]
        unsigned = "unsigned" in words
        plain = " ".join(word for word in words if word not in ("unsigned", "signed")) or "int"
        plain = plain.removesuffix(" int") if plain != "int" else plain
        if plain in _INTEGERS:
            kind = _INTEGERS[plain]
            return _UNSIGNED.get(kind, kind) if unsigned else kind
        meant = _meaning(part, plain)
        if meant is None:
            break
        text = meant
    raise FusionError(
        f"{part.place}: the parameter {parameter.name} is of type `{parameter.alias or parameter.base}`, which is "
        "neither a pointer nor a number that can be told from the file; write it as a plain type"
    )


def _meaning(part: Part, name: str) -> str | None:
    """What a file's ``using``, ``typedef`` or macro says of a name."""
    text, word = part.reach.source.text, re.escape(name)
    for pattern in (rf"\busing\s+{word}\s*=\s*([^;]+);", rf"\btypedef\s+([^;]+?)\b{word}\s*;"):
        match = re.search(pattern, text)
        if match is not None:
            return match[1]
    return next((macro.body for macro in part.reach.source.macros if macro.name == name), None)
