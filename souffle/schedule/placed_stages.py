"""Stages one after another, some of them joined with an earlier one: where each stands, and what reads it meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from souffle.program import TE, ExternTE, Loop, TEProgram
from souffle.schedule.drafts import Formed, FormedLoop, stands_alone

__all__ = ["PlacedStages"]


class PlacedStages:
    """Stages in the order in which they run. One that takes in an earlier one stands where its last TE does.

    Parameters
    ----------
    program : TEProgram
        That they are of.
    """

    def __init__(self, program: TEProgram) -> None:
        self._program = program
        self._placed: list[Formed | FormedLoop | None] = []
        self._position: dict[TE | ExternTE | Loop, int] = {}

    @property
    def stages(self) -> list[Formed | FormedLoop]:
        """All that stand."""
        return [stage for stage in self._placed if stage is not None]

    def place(self, stage: Formed | FormedLoop) -> None:
        """Append a stage, in place of those that it has TEs of."""
        for member in stage.tes:
            if member in self._position:
                self._placed[self._position[member]] = None
            self._position[member] = len(self._placed)
        self._placed.append(stage)

    def producers(self, tes: Sequence[TE | ExternTE | Loop]) -> set[TE | ExternTE | Loop]:
        """What has a place and defines what some TEs read, besides themselves."""
        producers = self._program.producers
        read = {producers[t] for te_ in tes for t in te_.inputs if t in producers}
        return {producer for producer in read if producer in self._position}.difference(tes)

    def before(self, stage: Formed | FormedLoop) -> Formed | None:
        """The stage of a stage's latest producer, if the two may be joined."""
        producers = self.producers(stage.tes)
        if not producers or stands_alone(stage):
            return None
        latest = self._placed[max(self._position[producer] for producer in producers)]
        return None if stands_alone(latest) else latest

    def other_readers(self, stage: Formed, members: Sequence[TE | ExternTE]) -> list[TE | ExternTE | Loop]:
        """What reads a stage and is none of `members`."""
        tensors = (tensor for te_ in stage.tes for tensor in te_.outputs)
        return [reader for tensor in tensors for reader in self._program.consumers[tensor] if reader not in members]

    def first_placed(self, tes: Sequence[TE | ExternTE | Loop]) -> TE | ExternTE | Loop | None:
        """The first of some TEs that has a place: a reader that stands between a stage and what is to join it."""
        return next((te_ for te_ in tes if te_ in self._position), None)
