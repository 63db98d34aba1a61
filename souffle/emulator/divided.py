"""A text beside another one that differs in few functions: only these have to be compiled again.

Functions that are declared before they are defined, as TVM writes stage functions and kernels, are what a text is
divided into. They become functions of the whole library, which are not inlined: in the rest, which is the other text,
weak ones, about which g++ may conclude nothing, so that the linker can put others in their place. Each function then
computes what it would in one text, for g++ contracts and reorders no arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from souffle.emulator.text_scan import blank_comments, dynamic_shared_names, matching

__all__ = ["Divided", "divided"]

_STAGE = re.compile(r"static __device__ (?:__noinline__|__forceinline__) ")
_DECLARATION = re.compile(rf'^((?:{_STAGE.pattern}|extern "C" __global__ ).*);$', re.MULTILINE)
# Variables of all functions: there would be two of each.
_VARIABLE = re.compile(
    r"\b__constant__\b|\b__managed__\b|(?<!\bextern )\b__shared__\b|^(?:static )?__device__ [^(]*;", re.MULTILINE
)


@dataclass(frozen=True)
class Divided:
    """A text in two.

    Attributes
    ----------
    whole : str
        The text with the functions that differ behind the others, so that lines of `own` and `rest` are lines of it.
    own : str
        The functions that differ; empty where none does.
    rest : str
        The other text, whose functions can be replaced.
    """

    whole: str
    own: str
    rest: str


def divided(text: str, other: str) -> Divided | None:
    """A text as what another one lacks; ``None`` where they differ in more than the bodies of functions."""
    frame, functions = _functions(text)
    other_frame, others = _functions(other)
    if frame != other_frame or list(functions) != list(others) or _VARIABLE.search(blank_comments(frame)):
        return None
    changed = [head for head in functions if functions[head] != others[head]]
    if not {*dynamic_shared_names(blank_comments(text))} <= {*dynamic_shared_names(blank_comments(other))}:
        return None
    behind = "".join(f"\n{head} {functions[head]}\n" for head in changed)
    whole, own = other, other
    for head, body in others.items():
        definition, declared = f"\n{head} {body}", f"\n{head};" + "\n" * body.count("\n")
        own = own.replace(definition, declared)
        if head in changed:
            whole = whole.replace(definition, declared)
    own, rest = own + behind if changed else "", other
    for head in functions:
        shared = _STAGE.sub("__attribute__((noinline)) ", head)
        own, rest = own.replace(head, shared), rest.replace(head, _weak(shared))
    return Divided(whole + behind, own, rest)


def _weak(head: str) -> str:
    kernel = 'extern "C" '
    attribute = "__attribute__((weak)) "
    return kernel + attribute + head.removeprefix(kernel) if head.startswith(kernel) else attribute + head


def _functions(text: str) -> tuple[str, dict[str, str]]:
    """The text without the bodies of functions that are declared before, and these by their declarations."""
    code = blank_comments(text)
    found: dict[str, str] = {}
    frame = text
    for head in _DECLARATION.findall(blank_comments(text, strings=False)):
        start = text.find(f"\n{head} {{\n")
        begin = start + len(head) + 2
        end = matching(code, begin) + 1 if start >= 0 else 0
        if end:
            found[head] = text[begin:end]
            frame = frame.replace(f"\n{head} {found[head]}", f"\n{head} {{}}", 1)
    return frame, found
