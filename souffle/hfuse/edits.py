"""Changes of a CUDA file that do not depend on where in a fused kernel its kernel is to be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from souffle.emulator.text_scan import blank_comments, matching
from souffle.hfuse.reach import Reach

__all__ = ["Edit", "applied", "device_function", "left_out", "plain_linkage", "squeezed"]

Edit = tuple[int, int, str]
"""From a byte to a byte, and what takes its place."""

_HEAD = re.compile(
    r"\b(?:__global__|static|inline|__forceinline__|__inline__|extern)\b|\bextern\s*\"C\""
    r"|\b(?:__launch_bounds__|__maxnreg__|__attribute__|__cluster_dims__)\s*(?=\()"
)


def left_out(reach: Reach) -> Iterator[Edit]:
    """Without functions that are not needed, macros for kernels, and headers, which stand before all parts."""
    for function in reach.dropped:
        yield function.start, function.end, ""
    for macro in reach.source.macros:
        if "__global__" in macro.mentioned:
            yield macro.start, macro.end, "\n"
    for include in reach.source.includes:
        if reach.kept(include.start):
            yield include.start, include.end, "\n"
    for match in re.finditer(rb"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*", reach.source.data, re.MULTILINE):
        yield match.start(), match.end(), ""


def device_function(reach: Reach) -> Iterator[Edit]:
    """The kernel as a function of the device."""
    kernel, source = reach.kernel, reach.source
    start = kernel.head
    head = blank_comments(source.slice(start, kernel.declarator.start_byte), strings=False)
    kept, done = [], 0
    for match in _HEAD.finditer(head):
        if match.start() < done:
            continue
        kept.append(head[done : match.start()])
        done = match.end()
        if head[done : done + 1] == "(":
            done = matching(head, done) + 1
    # A macro there stands for qualifiers, or for attributes of kernels.
    macros = {macro.name for macro in source.macros}
    words = " ".join(word for word in "".join([*kept, head[done:]]).split() if word not in macros)
    yield start, kernel.declarator.start_byte, f"__device__ __forceinline__ {words} "
    given = kernel.parameters
    for match in re.finditer(rb"\b__grid_constant__\b", reach.source.data[given.start_byte : given.end_byte]):
        yield given.start_byte + match.start(), given.start_byte + match.end(), ""


def plain_linkage(reach: Reach) -> Iterator[Edit]:
    """``extern "C"`` would give functions of two parts one name."""
    for node in reach.nodes():
        if node.type != "linkage_specification":
            continue
        body = node.child_by_field_name("body")
        if body.type == "declaration_list":
            yield node.start_byte, body.start_byte + 1, ""
            yield body.end_byte - 1, body.end_byte, ""
        else:
            yield node.start_byte, body.start_byte, ""


def applied(data: bytes, edits: list[Edit]) -> str:
    """The text with all edits made; what lies in a span that is replaced goes with it."""
    out, done = [], 0
    # At one byte, what is inserted stands first, and of two spans the longer one holds the other.
    for start, end, text in sorted(edits, key=lambda edit: (edit[0], edit[1] > edit[0], -edit[1])):
        if start < done:
            continue
        out += [data[done:start], text.encode()]
        done = end
    return b"".join([*out, data[done:]]).decode()


def squeezed(text: str) -> str:
    """A text with one empty line where several are."""
    return re.sub(r"\n[ \t]*(?:\n[ \t]*)+\n", "\n\n", text).strip()
