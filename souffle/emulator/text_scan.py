"""Finding things in CUDA text without parsing it: code, comments and strings, kernels, dynamic shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "KernelDeclaration",
    "blank_comments",
    "dynamic_shared_names",
    "find_kernels",
    "matching",
    "uses_atomics",
    "uses_releases",
]

_TOKEN = re.compile(
    r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"(?P<d>[^(\s]*)\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)
_OPEN = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class KernelDeclaration:
    """A ``__global__`` function found in the text; ``launch_bounds`` is None where none is written as a number."""

    name: str
    launch_bounds: int | None


def blank_comments(text: str, *, strings: bool = True) -> str:
    """Replace comments (and, unless ``strings`` is false, string contents) by blanks of the same length."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        if token[0] == "/" or strings:
            return re.sub(r"[^\n]", " ", token)
        return token

    return _TOKEN.sub(blank, text)


def matching(code: str, start: int) -> int:
    """Return the index of the bracket that closes the one at ``start``, or -1. ``code`` has its strings blanked."""
    stack = []
    for i in range(start, len(code)):
        c = code[i]
        if c in _OPEN:
            stack.append(_OPEN[c])
        elif c in ")]}":
            if not stack or stack.pop() != c:
                return -1
            if not stack:
                return i
    return -1


def find_kernels(code: str) -> tuple[KernelDeclaration, ...]:
    """List the kernels of ``code`` (comments blanked) in the order of the text; templates are left out."""
    found: dict[str, KernelDeclaration] = {}
    for match in re.finditer(r"\b__global__\b", code):
        # A declaration begins behind what ends the one before, so that a long text is not looked at for each kernel.
        begins = max(code.rfind(mark, 0, match.start()) for mark in ";{}") + 1
        if re.search(r"\btemplate\s*<[^;{}]*>\s*(?:static\s+|inline\s+)*$", code[begins : match.start()]):
            continue
        at, bounds, name = match.end(), None, None
        while name is None:
            word = re.compile(r"[\s*&]*(\w+)\s*").match(code, at)
            if word is None:
                break
            at = word.end()
            if at < len(code) and code[at] == "(":
                if word.group(1) in ("__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__attribute__"):
                    close = matching(code, at)
                    number = re.match(r"\(\s*(\d+)", code[at:])
                    if word.group(1) == "__launch_bounds__" and number:
                        bounds = int(number.group(1))
                    at = close + 1
                else:
                    name = word.group(1)
        if name is not None:
            earlier = found.get(name)
            known = earlier.launch_bounds if earlier else None
            found[name] = KernelDeclaration(name, bounds if bounds is not None else known)
    return tuple(found.values())


def dynamic_shared_names(code: str) -> tuple[str, ...]:
    """List the names of ``extern __shared__`` arrays."""
    names = re.findall(r"\bextern\s+(?:__align__\s*\([^)]*\)\s*)?__shared__\b[^;]*?(\w+)\s*\[\s*\]", code)
    return tuple(dict.fromkeys(names))


def uses_atomics(code: str) -> bool:
    """Tell whether results may depend on the order in which blocks run."""
    return re.search(r"\batomic[A-Z]\w*\s*\(|\bred\.|\batom\.", code) is not None or uses_releases(code)


def uses_releases(code: str) -> bool:
    """Tell whether blocks may be ordered by releases and acquires of memory."""
    return re.search(r"release|acq_rel", code) is not None
