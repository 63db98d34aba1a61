"""Are two CUDA texts one, but for names: token by token, with one renaming that holds throughout.

What may be renamed are the functions that a text defines (throughout the text), and the parameters and variables that
a function declares (within it). Keywords, what CUDA defines, members, strings, directives of the preprocessor and the
insides of structures must be the same. Comments and white space do not count.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Renaming", "TextDifference", "compare_texts"]

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<directive>\#(?:[^\\\n]|\\.)*)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<name>[A-Za-z_]\w*)
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<mark><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|[-+*/%&|^<>=!]=|&&|\|\||::|.)""",
    re.VERBOSE | re.DOTALL,
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TYPES = _words("auto bool char double float int long short signed unsigned void wchar_t")
_QUALIFIERS = _words(
    """alignas const constexpr extern inline mutable register static thread_local volatile __align__ __asm__
    __constant__ __device__ __forceinline__ __global__ __host__ __launch_bounds__ __noinline__ __restrict__ __shared__
    __volatile__"""
)
_OTHER_WORDS = _words(
    """and asm bitand bitor break case catch class compl const_cast continue decltype default delete do dynamic_cast
    else enum explicit export false for friend goto if namespace new noexcept not nullptr operator or private protected
    public reinterpret_cast return sizeof static_assert static_cast struct switch template this throw true try typedef
    typeid typename union using virtual while xor"""
)
_RESERVED = _TYPES | _QUALIFIERS | _OTHER_WORDS
_RIGID = _words("class enum namespace struct typedef union using")
_POINTED_TO = re.compile(
    r"(?:u?(?:char|short|int|long|longlong)|float|double|half)[1-8]?|u?int\d+_t|__half2?|\w*bfloat\w*"
)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


@dataclass(frozen=True)
class _Piece:
    """What stands at the top of a text: a declaration or a definition."""

    tokens: tuple[_Token, ...]
    declared: frozenset[str]
    top: tuple[str, ...]
    rigid: bool

    @property
    def name(self) -> str:
        """Of the function; empty for what is none."""
        return self.top[-1] if self.top else ""

    def text(self, names: Mapping[str, str], whole: str) -> str:
        """As it stands in the whole text, with other names."""
        parts, at = [], self.tokens[0].start
        for token in self.tokens:
            parts += [whole[at : token.start], names.get(token.text, token.text)]
            at = token.start + len(token.text)
        return "".join(parts)


@dataclass
class Renaming:
    """One name for each name, both ways."""

    forth: dict[str, str] = field(default_factory=dict)
    back: dict[str, str] = field(default_factory=dict)

    def agree(self, before: str, after: str) -> bool:
        """Whether the two may stand for each other; they do from then on."""
        return self.forth.setdefault(before, after) == after and self.back.setdefault(after, before) == before


@dataclass(frozen=True)
class TextDifference:
    """The first function that differs.

    Attributes
    ----------
    reason : str
    diff : tuple of str
        Unified, the function's new text with the old names where they were found to be renamed.
    """

    reason: str
    diff: tuple[str, ...] = ()


def compare_texts(before: str, after: str, kernels: Sequence[tuple[str, str]] = ()) -> Renaming | TextDifference:
    """The renaming that makes two texts one.

    Parameters
    ----------
    before, after : str
    kernels : sequence of (before, after)
        Names that must stand for each other: those of the kernels as the plan has them.

    Returns
    -------
    Renaming or TextDifference
        Of the names of functions.
    """
    old, new = _pieces(before, {name for name, _ in kernels}), _pieces(after, {name for _, name in kernels})
    whole = Renaming()
    for names in kernels:
        if not whole.agree(*names):
            return TextDifference(f"kernel {names[0]} is {names[1]} after, and so is another")
    tops = tuple(frozenset(name for piece in pieces for name in piece.top) for pieces in (old, new))
    for number, (first, second) in enumerate(zip(old, new)):
        local = Renaming()
        if not _match(first, second, tops, whole, local):
            texts = (before, after)
            return _difference(old, new, number, texts, {**whole.back, **local.back})
    if len(old) != len(new):
        return _difference(old, new, min(len(old), len(new)), (before, after), whole.back)
    return whole


def _match(
    first: _Piece, second: _Piece, tops: tuple[frozenset[str], frozenset[str]], whole: Renaming, local: Renaming
) -> bool:
    if len(first.tokens) != len(second.tokens) or first.rigid != second.rigid:
        return False
    previous = ""
    for old, new in zip(first.tokens, second.tokens, strict=True):
        if old.kind != new.kind:
            return False
        member, previous = previous in (".", "->"), old.text
        if old.kind != "name" or member or first.rigid:
            if old.text != new.text:
                return False
            continue
        everywhere = old.text in tops[0]
        if everywhere != (new.text in tops[1]):
            return False
        inside = not everywhere and old.text in first.declared
        if inside != (not everywhere and new.text in second.declared):
            return False
        if not everywhere and not inside and old.text != new.text:
            return False
        if not local.agree(old.text, new.text) or (not inside and not whole.agree(old.text, new.text)):
            return False
    return True


def _difference(
    old: Sequence[_Piece], new: Sequence[_Piece], number: int, texts: tuple[str, str], names: Mapping[str, str]
) -> TextDifference:
    """Show the definition of the first function that differs, which its declaration may have given away."""
    definitions = tuple({piece.name: piece for piece in pieces if piece.name} for pieces in (old, new))
    first = old[number] if number < len(old) else None
    second = new[number] if number < len(new) else None
    if len(old) != len(new):
        gone = [name for name in definitions[0] if name not in definitions[1]]
        added = [name for name in definitions[1] if name not in definitions[0]]
        if gone or added:
            parts = [f"{what}: {', '.join(some[:6])}" for what, some in (("only before", gone), ("only after", added))]
            reason = "; ".join(part for part, some in zip(parts, (gone, added), strict=True) if some)
            return TextDifference(f"{len(old)} declarations and definitions before, {len(new)} after; {reason}")
        second = definitions[1].get(first.name, second) if first is not None else second
    if first is None or second is None:
        return TextDifference(f"{len(old)} declarations and definitions before, {len(new)} after")
    first, second = definitions[0].get(first.name, first), definitions[1].get(second.name, second)
    sides = (first.text({}, texts[0]).splitlines(), second.text(names, texts[1]).splitlines())
    diff = tuple(difflib.unified_diff(*sides, f"before {first.name}", f"after {second.name}", lineterm="", n=1))
    where = f"function {first.name}" if first.name else "what stands before the functions"
    return TextDifference(f"{where} differs" if diff else f"{where} is used or placed otherwise", diff)


def _pieces(text: str, kernels: set[str]) -> list[_Piece]:
    """Divide a text at the ends of what stands at its top."""
    pieces: list[_Piece] = []
    tokens: list[_Token] = []
    depths: list[int] = []
    braces = parentheses = 0
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "space":
            continue
        token = _Token(kind, match[0], match.start())
        tokens.append(token)
        depths.append(braces + parentheses)
        if kind != "mark":
            if kind == "directive" and len(tokens) == 1:
                pieces.append(_piece(tokens, depths, kernels))
                tokens, depths = [], []
            continue
        braces += (token.text == "{") - (token.text == "}")
        parentheses += (token.text in "([") - (token.text in ")]")
        if braces == 0 and parentheses == 0 and token.text in ";}":
            pieces.append(_piece(tokens, depths, kernels))
            tokens, depths = [], []
    if tokens:
        pieces.append(_piece(tokens, depths, kernels))
    return pieces


def _piece(tokens: Sequence[_Token], depths: Sequence[int], kernels: set[str]) -> _Piece:
    declared: list[tuple[str, int]] = []
    for at, token in enumerate(tokens):
        if token.kind == "name" and token.text not in _RESERVED:
            known = depths[at] == 0 and token.text in kernels
            if known or _declares(tokens, at):
                declared.append((token.text, depths[at]))
    top = tuple(name for name, depth in declared if depth == 0)
    rigid = any(token.text in _RIGID for token, depth in zip(tokens, depths, strict=True) if depth == 0)
    return _Piece(tuple(tokens), frozenset(name for name, _ in declared), top, rigid)


def _declares(tokens: Sequence[_Token], at: int) -> bool:
    """Whether a name stands behind a type: ``a * b`` declares nothing, ``float* b`` does."""
    pointed = False
    at -= 1
    while at >= 0 and tokens[at].text in ("*", "&", "const", "volatile", "__restrict__"):
        pointed |= tokens[at].text in "*&"
        at -= 1
    if at < 0 or tokens[at].kind != "name":
        return False
    word = tokens[at].text
    if pointed:
        return word in _TYPES or _POINTED_TO.fullmatch(word) is not None
    return word in _TYPES or word not in _RESERVED
