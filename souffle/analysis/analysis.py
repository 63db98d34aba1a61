"""The analysis of a whole TE program: what every later stage asks (paper §5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from souffle.alone import one_at_a_time
from souffle.analysis.access import Access
from souffle.analysis.classify import Relies, relies_on, relies_on_input
from souffle.analysis.fused_access import access_of
from souffle.analysis.intensity import Arithmetic
from souffle.analysis.reuse import Dependences, LiveRange, Reuse, find_live_ranges, find_reuse
from souffle.program import TE, ExternTE, FusedTE, Loop, Tensor, TEProgram

__all__ = ["Analysis", "analyze"]


@dataclass(frozen=True, eq=False)
class Analysis:
    """What is known of `program`. A program that was changed is analysed anew.

    Each part is worked out when it is first asked for; access maps are shared by TEs that differ in names only.

    Attributes
    ----------
    program : TEProgram
    """

    program: TEProgram

    @cached_property
    def _accesses(self) -> dict[tuple[TE | FusedTE | ExternTE, int], Access]:
        return {(te, i): access_of(te, i) for te in self.program.tes for i in range(len(te.inputs))}

    @cached_property
    def _arithmetic(self) -> dict[TE | FusedTE | ExternTE, Arithmetic]:
        return {te: Arithmetic(te) for te in self.program.tes}

    @cached_property
    def _inside(self) -> dict[Loop, Analysis]:
        return {item: Analysis(self.program.body(item)) for item in self.program.tes if isinstance(item, Loop)}

    def inside(self, loop: Loop) -> Analysis:
        """The analysis of one step of a loop."""
        return self._inside[loop]

    @cached_property
    def dependences(self) -> Dependences:
        """Reachability between TEs."""
        return Dependences(self.program)

    @cached_property
    def reuse(self) -> Mapping[Tensor, Reuse]:
        """Spatial and temporal reuse of every tensor with several consumers."""
        return find_reuse(self.program, self.dependences)

    @cached_property
    def live_ranges(self) -> Mapping[Tensor, LiveRange]:
        """When each tensor is alive, as positions in the program's order."""
        return find_live_ranges(self.program)

    def access(self, te: TE | FusedTE | ExternTE, position: int) -> Access:
        """How `te` reads its input number `position`."""
        return self._accesses[te, position]

    def accesses(self, te: TE | FusedTE | ExternTE) -> tuple[Access, ...]:
        """How `te` reads each of its inputs."""
        return tuple(self._accesses[te, position] for position in range(len(te.inputs)))

    def relies(self, te: TE | FusedTE | ExternTE, position: int | None = None) -> Relies:
        """One-relies-on-one or one-relies-on-many: of a TE, or of one of its inputs."""
        return relies_on(te) if position is None else relies_on_input(self.access(te, position))

    def arithmetic(self, te: TE | FusedTE | ExternTE) -> Arithmetic:
        """Operations, elements accessed and their ratio."""
        return self._arithmetic[te]

    def is_compute_intensive(self, te: TE | FusedTE | ExternTE) -> bool:
        """Whether its ratio of arithmetic to memory accesses reaches 3."""
        return self._arithmetic[te].compute_intensive

    def depends(self, later: TE | FusedTE | ExternTE, earlier: TE | FusedTE | ExternTE) -> bool:
        """Whether `later` needs the result of `earlier`, directly or through others."""
        return self.dependences.depends(later, earlier)

    def independent(self, one: TE | FusedTE | ExternTE, other: TE | FusedTE | ExternTE) -> bool:
        """Whether two different TEs may run in any order."""
        return self.dependences.independent(one, other)

    def summary(self) -> str:
        """One line of counts."""
        parts = [self, *self._inside.values()]
        tes = [(part, te) for part in parts for te in part.program.tes if not isinstance(te, Loop)]
        kinds = [part.relies(te) for part, te in tes]
        compute = sum(part.is_compute_intensive(te) for part, te in tes)
        spatial = sum(reuse.spatial_bytes for part in parts for reuse in part.reuse.values())
        temporal = sum(reuse.temporal_bytes for part in parts for reuse in part.reuse.values())
        loops = f"{len(self._inside)} loops, one step of each counted: " if self._inside else ""
        return (
            f"{loops}{len(kinds)} TEs: {kinds.count(Relies.ONE)} one-relies-on-one, {kinds.count(Relies.MANY)} "
            f"one-relies-on-many; {compute} compute-intensive; reuse of {spatial} bytes spatial, {temporal} temporal"
        )

    def __str__(self) -> str:
        lines = [self.summary()]
        for te in self.program.tes:
            outputs = ", ".join(map(repr, te.outputs))
            lines.append(f"{te.name}: {outputs}; {self.relies(te)}, {self.arithmetic(te)}")
            if isinstance(te, Loop):
                inner = str(self.inside(te)).splitlines()[1:]
                lines += [f"  {te.steps} steps of", *(f"  {line}" for line in inner)]
                continue
            for access in self.accesses(te):
                for line in str(access).splitlines():
                    lines.append(f"  {line}{_remark(access)}")
        if self.reuse:
            lines.append("reuse")
            for reuse in self.reuse.values():
                lines += [f"  {line}" for line in str(reuse).splitlines()]
        return "\n".join(lines)


def _remark(access: Access) -> str:
    return "" if access.exact else f"  (more than is read: {'; '.join(access.inexact_because)})"


@one_at_a_time
def analyze(program: TEProgram) -> Analysis:
    """Analyse a whole TE program (paper §5.1-5.3).

    Parameters
    ----------
    program : TEProgram

    Returns
    -------
    Analysis
        Access maps, classifications, arithmetic intensity, reuse, live ranges and dependences, each worked out when it
        is first asked for.
    """
    return Analysis(program)
