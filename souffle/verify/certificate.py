"""What the checker says: PROVEN, REFUTED with a counterexample, or UNKNOWN with the reason."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROVEN", "REFUTED", "UNKNOWN", "Certificate", "Counterexample", "Section", "printed"]

PROVEN, REFUTED, UNKNOWN = "PROVEN", "REFUTED", "UNKNOWN"


@dataclass(frozen=True)
class Counterexample:
    """Two accesses, or one, that break a rule.

    Attributes
    ----------
    rule : str
        ``"race between blocks"``, ``"race in a block"``, ``"divergent barrier"``, ``"out of bounds"``,
        ``"stale or undefined read"``, ``"aliased pointers"``, ``"misaligned"``,
        ``"does not fit"`` or ``"launch"``.
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


@dataclass(frozen=True)
class Section:
    """A kernel, or the whole sequence of launches.

    Attributes
    ----------
    name : str
    counterexamples : tuple of Counterexample
        The first of each kind that was found.
    unknown : tuple of str
        Why something could not be decided.
    facts : tuple of (str, int)
        What was checked, in numbers.
    """

    name: str
    counterexamples: tuple[Counterexample, ...]
    unknown: tuple[str, ...]
    facts: tuple[tuple[str, int], ...]

    @property
    def verdict(self) -> str:
        """PROVEN, REFUTED or UNKNOWN."""
        return REFUTED if self.counterexamples else UNKNOWN if self.unknown else PROVEN


@dataclass(frozen=True)
class Certificate:
    """Of a compiled network.

    Attributes
    ----------
    kernels : tuple of Section
        One for each kernel, over all its launches.
    launches : Section
        Of the order of launches: what each read finds, and that memory that tensors share is never needed twice.
    """

    kernels: tuple[Section, ...]
    launches: Section

    @property
    def sections(self) -> tuple[Section, ...]:
        """All parts."""
        return (*self.kernels, self.launches)

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


def printed(certificate: Certificate) -> str:
    """The certificate for people."""
    lines = [f"certificate: {certificate.verdict}"]
    for section in certificate.sections:
        facts = ", ".join(f"{count} {what}" for what, count in section.facts)
        lines.append(f"  {section.verdict:8} {section.name}: {facts}")
        for found in section.counterexamples:
            lines.append(f"    {found.rule}: {found.reason}")
            lines.append(f"      {found.element}; {' and '.join(found.blocks)}")
            for stage, text in zip((*found.stages, *found.stages[-1:]), found.statements, strict=False):
                lines.append(f"      in {stage}: {text}")
        lines += [f"    unknown: {reason}" for reason in section.unknown]
    return "\n".join(lines)
