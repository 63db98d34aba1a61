"""The certificate as data: PROVEN, REFUTED with counterexamples, or UNKNOWN with reasons (``docs/verification.md``).

:mod:`souffle.verify` makes it; plans carry it, and files keep it, where TVM is not installed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

from souffle.wording import counted

__all__ = [
    "ACTIVE_LANES",
    "ARRIVALS",
    "CHECKS",
    "GRID_BARRIERS",
    "PAIRS",
    "PROVEN",
    "REFUTED",
    "UNKNOWN",
    "VALUES",
    "Certificate",
    "Counterexample",
    "Section",
    "printed",
]

PROVEN, REFUTED, UNKNOWN = "PROVEN", "REFUTED", "UNKNOWN"

CHECKS = ("memory", "values", "off")
"""The values of the option ``verify`` of :func:`souffle.compile`."""

GRID_BARRIERS, PAIRS = "grid barriers", "pairs of accesses compared"
"""Facts that the one-line summary adds up."""

ARRIVALS = "arrivals of each block at flags"

ACTIVE_LANES = "shuffles among active lanes"
"""A fact: so many of which it is assumed that lanes stay together which ``__activemask()`` found together."""

VALUES = "values of stages"
"""The part of a certificate that compares what stages compute with what they are to; made if it is asked for."""

_WIDTH = 120


@dataclass(frozen=True)
class Counterexample:
    """Two accesses, or one, that break a rule.

    Attributes
    ----------
    rule : str
        ``"race between blocks"``, ``"race in a block"``, ``"divergent barrier"``, ``"divergent shuffle"``,
        ``"out of bounds"``, ``"stale or undefined read"``, ``"aliased pointers"``, ``"misaligned"``,
        ``"does not fit"``, ``"launch"`` or ``"wrong value"``. Of a saved network also ``"text"`` and
        ``"machine code"``: it is not what the TensorIR gives.
    kernel : str
    stages : tuple of str
        One or two stage functions.
    statements : tuple of str
        The text of the statements.
    blocks : tuple of str
        Who: tiles, which are on different blocks of some grid, or threads.
    element : str
        Of which memory.
    reason : str
    """

    rule: str
    kernel: str
    stages: tuple[str, ...]
    statements: tuple[str, ...]
    blocks: tuple[str, ...]
    element: str
    reason: str

    def __str__(self) -> str:
        lines = [f"{self.rule}{' in ' if self.kernel else ''}{self.kernel}: {self.reason}"]
        where = "; ".join(part for part in (self.element, " and ".join(self.blocks)) if part)
        lines += [f"  {where}"] if where else []
        # Two statements may be of one stage.
        stages = (*self.stages, *self.stages[-1:]) if self.stages else ("",) * len(self.statements)
        for stage, text in zip(stages, self.statements, strict=False):
            lines.append(f"  in {stage}: {text}" if stage else f"  {text}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Section:
    """A kernel, or another part of a network, such as the whole sequence of launches.

    Attributes
    ----------
    name : str
    counterexamples : tuple of Counterexample
        The first of each kind that was found.
    unknown : tuple of str
        Why something could not be decided.
    facts : tuple of (str, int)
        What was checked, in numbers.
    notes : tuple of str
        What the verdict says nothing about, though it is part of what was checked.
    """

    name: str
    counterexamples: tuple[Counterexample, ...]
    unknown: tuple[str, ...]
    facts: tuple[tuple[str, int], ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """PROVEN, REFUTED or UNKNOWN."""
        return REFUTED if self.counterexamples else UNKNOWN if self.unknown else PROVEN

    def undecided(self, reason: str) -> Section:
        """This section where `reason` makes its proof, and its counterexamples, say nothing of what runs."""
        return replace(self, counterexamples=(), unknown=(reason,), notes=())


@dataclass(frozen=True)
class Certificate:
    """Of a compiled network. ``print`` shows it as a table, with each counterexample and each reason.

    Attributes
    ----------
    kernels : tuple of Section
        One for each kernel, over all its launches.
    launches : Section
        Of the order of launches: what each read finds, and that memory that tensors share is never needed twice.
    others : tuple of Section
        Other parts that were checked: that stages compute what they are to; of a file, that text and machine code are
        those of the proven TensorIR.
    """

    kernels: tuple[Section, ...]
    launches: Section
    others: tuple[Section, ...] = ()

    @property
    def sections(self) -> tuple[Section, ...]:
        """All parts."""
        return (*self.kernels, self.launches, *self.others)

    @property
    def verdict(self) -> str:
        """REFUTED if any part is, else UNKNOWN if any part is, else PROVEN."""
        verdicts = {section.verdict for section in self.sections}
        return next((v for v in (REFUTED, UNKNOWN) if v in verdicts), PROVEN)

    @property
    def counterexamples(self) -> tuple[Counterexample, ...]:
        """Of all parts."""
        return tuple(c for section in self.sections for c in section.counterexamples)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Of all parts."""
        return tuple(dict.fromkeys(u for section in self.sections for u in section.unknown))

    @property
    def assumed(self) -> str:
        """What the proof takes for granted that not every kernel needs; empty for most networks."""
        count = sum(number for section in self.kernels for what, number in section.facts if what == ACTIVE_LANES)
        return f"lanes that are active together stay together, at {counted(count, 'shuffle')}" if count else ""

    @property
    def summary(self) -> str:
        """One line: ``"PROVEN (4 kernels, 23 grid barriers, 1204 pairs of accesses, values of stages)"``."""
        facts = [fact for section in self.kernels for fact in section.facts]
        parts = [counted(len(self.kernels), "kernel")]
        for name, one in ((GRID_BARRIERS, "grid barrier"), (PAIRS, "pair")):
            text = counted(sum(count for what, count in facts if what == name), one)
            parts.append(text + " of accesses" if name == PAIRS else text)
        parts += [section.name for section in self.others if section.name == VALUES]
        if self.counterexamples:
            parts.append(counted(len(self.counterexamples), "counterexample"))
        if self.unknown:
            parts.append(f"{len(self.unknown)} undecided")
        return f"{self.verdict} ({', '.join(parts)})"

    def __str__(self) -> str:
        return printed(self)


def printed(certificate: Certificate) -> str:
    """The certificate for people: a table of its parts, then the counterexamples, then what was not decided."""
    sections = certificate.sections
    width = max(len("part"), *(len(section.name) for section in sections))
    lines = [f"certificate: {certificate.summary}", "", f"{'part':{width}}  verdict  what was looked at"]
    lines.append(f"{'-' * width}  {'-' * 7}  {'-' * 18}")
    for section in sections:
        facts = ", ".join(f"{count} {what}" for what, count in section.facts)
        head = f"{section.name:{width}}  {section.verdict:7}  "
        # Long names leave little room beside them; facts then go below.
        beside = len(head) <= _WIDTH // 2
        if not beside:
            lines.append(head.rstrip())
        lines += textwrap.wrap(
            facts,
            _WIDTH,
            initial_indent=head if beside else " " * 4,
            subsequent_indent=" " * (len(head) if beside else 4),
        ) or ([head.rstrip()] if beside else [])
    lines += _listed("assumed", [certificate.assumed] if certificate.assumed else [])
    lines += _listed("counterexamples", (str(found) for found in certificate.counterexamples))
    lines += _listed("not seen", (f"{section.name}: {note}" for section in sections for note in section.notes))
    undecided = [f"{section.name}: {reason}" for section in sections for reason in section.unknown]
    lines += _listed("not decided", undecided)
    return "\n".join(lines)


def _listed(title: str, entries: Iterable[str]) -> list[str]:
    lines = [textwrap.indent(entry, "  ") for entry in entries]
    return ["", f"{title}:", *lines] if lines else []
