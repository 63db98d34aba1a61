"""Implementation templates: how the loops of some TEs go to blocks, warps and threads (FusionStitching 2019, §5.2).

The paper's grammar::

    <template>      ::= <schedule-list>
    <schedule-list> ::= <schedule> <schedule-list> | <schedule>
    <schedule>      ::= <identifier> '[' <attr-list> ']' ';'  |  <identifier> '[' <attr-list> ']' 'S' ';'
    <attr-list>     ::= <attr> ',' <attr-list> | <attr>
    <attr>          ::= <attrtype> | <subattr-list>
    <subattr-list>  ::= <subattr> '-' <subattr-list> | <subattr>
    <subattr>       ::= <attrtype> '_' <integer>
    <attrtype>      ::= 'GRID' | 'WARP' | 'CTA' | 'THREAD'

Every text of it is read. What is read beside it, since the paper's own examples are not of its grammar:

- ``[GRID,WARP,WARP,CTA]S`` has no identifier and no semicolon. A template of one schedule may lack the identifier, and
  the last schedule of a list the semicolon. What is printed has both, but for a schedule without an identifier.
- The grammar says nothing of spaces; they may stand between any two tokens. Identifiers are not defined: here letters,
  digits, ``_`` and ``.``, not beginning with a digit or a dot. The ``.`` is for XLA's names, such as ``reduce.1``.
- ``<integer>`` is a decimal number from 1 on.

Names occur once in a template: each schedule is the implementation of one TE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from souffle.errors import SouffleError

__all__ = ["Attribute", "OpSchedule", "Part", "Template", "TemplateError"]


class TemplateError(SouffleError):
    """A template is not of the grammar, or does not go with what it is for; the message names the place."""


class Attribute(Enum):
    """To whom the iterations of a dimension are given."""

    GRID = "GRID"
    """The blocks of the grid."""
    WARP = "WARP"
    """The warps of a block."""
    CTA = "CTA"
    """The threads of a block; beside a ``WARP`` of the same schedule, the lanes of each warp."""
    THREAD = "THREAD"
    """No one: a thread runs them in sequence."""


@dataclass(frozen=True)
class Part:
    """One level of the tiling of a dimension.

    Attributes
    ----------
    attribute : Attribute
    count : int or None
        How many parts of the dimension there are at this level; ``None`` where the whole dimension has one attribute.
    """

    attribute: Attribute
    count: int | None = None

    def __str__(self) -> str:
        return self.attribute.value if self.count is None else f"{self.attribute.value}_{self.count}"


Dimension = tuple[Part, ...]
"""How one dimension is tiled, outermost level first: one part without a count, or parts that all have one."""


@dataclass(frozen=True)
class OpSchedule:
    """The implementation of one TE.

    Attributes
    ----------
    name : str
        The TE's; empty in a template that is of any one TE.
    dimensions : tuple of tuple of Part
        One for each dimension that the TE iterates over.
    shared : bool
        Whether its result is in shared memory (``S``).

    Raises
    ------
    TemplateError
        If it could not be written in the grammar.
    """

    name: str
    dimensions: tuple[Dimension, ...]
    shared: bool = False

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise TemplateError(f"{self.name!r} is no identifier of a template: letters, digits, '_' and '.' are")
        if not self.dimensions or not all(self.dimensions):
            raise TemplateError(f"{self.name or 'a schedule'} has a dimension without an attribute")
        for parts in self.dimensions:
            if len(parts) > 1 and any(part.count is None for part in parts):
                names = "-".join(map(str, parts))
                raise TemplateError(f"{names}: each of several attributes of a dimension has a count, such as GRID_128")
            for part in parts:
                if part.count is not None and part.count < 1:
                    raise TemplateError(f"{part}: counts are 1 and above")

    def __str__(self) -> str:
        attributes = ",".join("-".join(map(str, parts)) for parts in self.dimensions)
        return f"{self.name}[{attributes}]{'S' if self.shared else ''}{';' if self.name else ''}"

    def has(self, attribute: Attribute) -> bool:
        """Whether any dimension is given to these."""
        return any(part.attribute is attribute for parts in self.dimensions for part in parts)


@dataclass(frozen=True, init=False)
class Template:
    """Implementations of the TEs of a kernel; its text is read when it is made, and printed by ``str``.

    Parameters
    ----------
    text : str

    Attributes
    ----------
    schedules : tuple of OpSchedule

    Raises
    ------
    TemplateError
        With the place in the text and what could stand there.
    """

    schedules: tuple[OpSchedule, ...]

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "schedules", _checked(_Reader(text).schedules()))

    @classmethod
    def of(cls, schedules: Iterable[OpSchedule]) -> Template:
        """The template of some schedules.

        Raises
        ------
        TemplateError
            If there are none, one of several has no name, or two have one.
        """
        made = cls.__new__(cls)
        object.__setattr__(made, "schedules", _checked(tuple(schedules)))
        return made

    def __str__(self) -> str:
        return " ".join(map(str, self.schedules))

    def __repr__(self) -> str:
        return f"Template({str(self)!r})"

    def of_te(self, name: str) -> OpSchedule | None:
        """The schedule of a TE, ``None`` where there is none."""
        return next((one for one in self.schedules if one.name == name), None)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_NUMBER = re.compile(r"[0-9]+")
_WORD = re.compile(r"[A-Za-z]+")
_ATTRIBUTES = ", ".join(one.value for one in Attribute)


def _checked(schedules: tuple[OpSchedule, ...]) -> tuple[OpSchedule, ...]:
    if not schedules:
        raise TemplateError("a template has one schedule or more, such as reduce_1[GRID,CTA]S;")
    names = [one.name for one in schedules]
    if len(names) > 1 and not all(names):
        raise TemplateError(f"schedule {names.index('') + 1} of {len(names)} has no name; each of several has one")
    for number, name in enumerate(names):
        if name in names[:number]:
            raise TemplateError(f"two schedules are of {name}; a TE has one")
    return schedules


class _Reader:
    """Reads a text, token by token."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def schedules(self) -> tuple[OpSchedule, ...]:
        """All of the text."""
        found = [self.schedule(first=True)]
        while not self.ended():
            found.append(self.schedule(first=False))
        return tuple(found)

    def schedule(self, *, first: bool) -> OpSchedule:
        """An identifier, which a template of one schedule may lack, attributes, and what its end is."""
        begins = self.start()
        name = self.taken(_NAME)
        if not name and not (first and self.peek() == "["):
            raise self.error("the name of a TE or '['" if first else "the name of a TE")
        self.expect("[", "'['")
        dimensions = [self.dimension()]
        while self.peek() == ",":
            self.at += 1
            dimensions.append(self.dimension())
        self.expect("]", "'_', ',' or ']'" if dimensions[-1][-1].count is None else "'-', ',' or ']'")
        shared = self.peek() == "S"
        self.at += shared
        if not self.ended():
            self.expect(";", "';' or the end" if shared else "'S', ';' or the end")
        if not name and not self.ended():
            self.at = begins
            raise self.error("the name of a TE, since several schedules follow each other")
        return OpSchedule(name, tuple(dimensions), shared)

    def dimension(self) -> Dimension:
        """One attribute, or several with their counts."""
        parts = [self.part()]
        while self.peek() == "-":
            if parts[-1].count is None:
                raise self.error(f"'_' and a count behind {parts[-1]}, which is not the only one of its dimension")
            self.at += 1
            parts.append(self.part())
            if parts[-1].count is None:
                raise self.error(f"'_' and a count behind {parts[-1]}, which is not the only one of its dimension")
        return tuple(parts)

    def part(self) -> Part:
        """An attribute with its count, if it has one."""
        begins = self.start()
        word = self.taken(_WORD)
        if word not in Attribute.__members__:
            self.at = begins
            raise self.error(f"one of {_ATTRIBUTES}")
        if self.peek() != "_":
            return Part(Attribute[word])
        self.at += 1
        begins = self.start()
        number = self.taken(_NUMBER)
        if not number or int(number) < 1:
            self.at = begins
            raise self.error("a whole number from 1 on")
        return Part(Attribute[word], int(number))

    def start(self) -> int:
        """The place of the next token."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.at

    def peek(self) -> str:
        return self.text[self.start() : self.at + 1]

    def ended(self) -> bool:
        return self.start() == len(self.text)

    def taken(self, pattern: re.Pattern[str]) -> str:
        """What is next of a pattern, empty where it is not."""
        match = pattern.match(self.text, self.start())
        self.at = match.end() if match else self.at
        return match.group() if match else ""

    def expect(self, symbol: str, wanted: str) -> None:
        if self.peek() != symbol:
            raise self.error(wanted)
        self.at += 1

    def error(self, wanted: str) -> TemplateError:
        """The text with a mark under the place."""
        place = self.start()
        found = repr(self.text[place]) if place < len(self.text) else "the end"
        shown = self.text.replace("\n", " ").replace("\t", " ")
        return TemplateError(f"{found} stands at {place + 1}, expected is {wanted}:\n  {shown}\n  {' ' * place}^")
