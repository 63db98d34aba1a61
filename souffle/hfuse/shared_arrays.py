"""Dynamic shared arrays, as pointers into the one pool of the fused kernel's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from souffle.hfuse.edits import Edit
from souffle.hfuse.errors import FusionError
from souffle.hfuse.reach import Reach
from souffle.hfuse.source import Node, walk

__all__ = ["ALIGNMENT", "POOL", "POOL_DECLARATION", "pool_declarations", "pool_pointers"]

ALIGNMENT = 128
"""Bytes that a part's dynamic shared memory begins at a multiple of."""

POOL = "hfuse_pool"
"""The dynamic shared memory of the fused kernel."""

POOL_DECLARATION = f"extern __shared__ __align__({ALIGNMENT}) unsigned char {POOL}[];"


def pool_declarations(reach: Reach) -> tuple[Node, ...]:
    """The declarations of dynamic shared arrays."""
    declarations = []
    for node in reach.nodes():
        if node.type == "declaration":
            words = {child.text.decode() for child in node.children if not child.type.endswith("declarator")}
            if {"extern", "__shared__"} <= words:
                declarations.append(node)
    return tuple(declarations)


def pool_pointers(reach: Reach, offset: int) -> Iterator[Edit]:
    """The dynamic shared arrays of a kernel as pointers to byte `offset` of the pool, where they all begin.

    Raises
    ------
    FusionError
        An array is not plain.
    """
    for node in pool_declarations(reach):
        name, pointer = _pointer(reach, node, offset)
        if node.parent is not None and node.parent.type == "compound_statement":
            yield node.start_byte, node.end_byte, pointer
            continue
        yield node.start_byte, node.end_byte, ""
        # A pointer of the file would be one in memory: each function that uses the array gets one of its own.
        for other in reach.nodes():
            body = other.child_by_field_name("body") if other.type == "function_definition" else None
            if body is not None and name in reach.source.mentioned(body.start_byte, body.end_byte):
                yield body.start_byte + 1, body.start_byte + 1, f" {pointer}"


def _pointer(reach: Reach, node: Node, offset: int) -> tuple[str, str]:
    """A dynamic shared array's name, and its declaration as a pointer into the pool."""
    source = reach.source
    declarators = node.children_by_field_name("declarator")
    kind = node.child_by_field_name("type")
    if len(declarators) != 1 or declarators[0].type != "array_declarator" or kind is None:
        place, line = source.place(node.start_byte), source.excerpt(node.start_byte)
        raise FusionError(
            f"{place}: `{line}`: a dynamic shared array that is not plain; declare one array, as in `T x[]`"
        )
    name = next(n for n in walk(declarators[0]) if n.type == "identifier")
    label = source.slice(name.start_byte, name.end_byte)
    rest = source.slice(name.end_byte, declarators[0].end_byte)
    inner = re.sub(r"^\s*\[\s*\]\s*", "", rest)
    element = source.slice(kind.start_byte, kind.end_byte)
    words = {child.text.decode() for child in node.children}
    element = "volatile " + element if "volatile" in words else element
    target = f"{element}*" if not inner else f"{element} (*){inner}"
    declared = f"{element}* const {label}" if not inner else f"{element} (*const {label}){inner}"
    return label, f"{declared} = reinterpret_cast<{target}>({POOL} + {offset});"
