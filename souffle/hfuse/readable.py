"""CUDA text as tree-sitter's grammar can read it, as long in bytes, so that places stay.

What the grammar does not know is blanked: attributes with arguments, and macros that stand for qualifiers. The name of
a macro whose body is the head of a loop is read as an ``if``: the statement after its use is then the loop's.
"""

from __future__ import annotations

import re

from souffle.emulator.text_scan import blank_comments, matching

__all__ = ["qualifier_macros", "readable"]

_ATTRIBUTE = re.compile(
    r"\b(?:__align__|__builtin_align__|__maxnreg__|__cluster_dims__|__attribute__|__declspec)\s*(?=\()"
)
_PLAIN_ATTRIBUTE = re.compile(r"\b__grid_constant__\b|(?<=\])(\s*)__device__(?=\s*[({])")
_LOOP_HEAD = re.compile(r"(?:for|while|if)\s*(?=\()")
_QUALIFIERS = frozenset(
    {
        *("__restrict__", "__restrict", "restrict", "__forceinline__", "__inline__", "__noinline__"),
        *("inline", "static", "__device__", "__host__", "__global__", "const", "constexpr"),
    }
)


def readable(text: str) -> tuple[str, dict[int, str]]:
    """The text as the grammar reads it, as long in bytes, with what it does not know blanked; and its loop heads."""
    code = blank_comments(text)
    out = list(text)

    def blank(start: int, end: int) -> None:
        for i in range(start, end):
            out[i] = text[i] if text[i] == "\n" else " " * len(text[i].encode())

    for match in _ATTRIBUTE.finditer(code):
        close = matching(code, match.end())
        if close >= 0:
            blank(match.start(), close + 1)
    for match in _PLAIN_ATTRIBUTE.finditer(code):
        blank(*match.span())
    for name in qualifier_macros(code):
        for match in re.finditer(rf"^[ \t]*#[^\n]*|\b{name}\b", code, re.MULTILINE):
            if match[0] == name:
                blank(*match.span())
    heads = {}
    for name in _loop_macros(code):
        for match in re.finditer(rf"\b{name}\s*(?=\()", code):
            before = code[code.rfind("\n", 0, match.start()) + 1 : match.start()]
            if len(name) >= len("if") and not re.match(r"\s*#\s*define\b", before):
                out[match.start() : match.start() + len(name)] = "if".ljust(len(name))
                heads[len(text[: match.start()].encode())] = name
    return "".join(out), heads


def qualifier_macros(code: str) -> tuple[str, ...]:
    """Macros without parameters that stand for qualifiers, such as ``__restrict__``."""
    names = []
    for match in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([\w \t]+)$", code, re.MULTILINE):
        if set(match[2].split()) <= _QUALIFIERS:
            names.append(match[1])
    return tuple(dict.fromkeys(names))


def _loop_macros(code: str) -> tuple[str, ...]:
    """Macros with parameters that are the head of a loop or of an ``if``: what follows their use is its statement."""
    names = []
    for match in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\(([^)]*)\)((?:\\\n|[^\n])*)", code, re.MULTILINE):
        body = match[3].replace("\\\n", "  ").strip()
        head = _LOOP_HEAD.search(body)
        while head is not None:
            close = matching(body, head.end())
            if close == len(body) - 1:
                names.append(match[1])
            head = None if close < 0 else _LOOP_HEAD.search(body, close)
    return tuple(dict.fromkeys(names))
