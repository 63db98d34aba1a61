"""Pieces of a tensor in the tensor's own memory: what only moves them is not called (:mod:`souffle.program.pieces`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from souffle.program import Tensor, TEProgram
from souffle.program.pieces import ALIGNMENT, pieces_of
from souffle.schedule.stage import Stage

__all__ = ["InPlace", "in_place"]


@dataclass(frozen=True)
class InPlace:
    """Stages of which none moves what lies in its place.

    Attributes
    ----------
    stages : tuple of Stage
    within : mapping of Tensor to (Tensor, int)
        For each piece the whole, which is no piece itself, and at which of its bytes it begins.
    """

    stages: tuple[Stage, ...]
    within: Mapping[Tensor, tuple[Tensor, int]]


def in_place(program: TEProgram, stages: Sequence[Stage]) -> InPlace:
    """Find the pieces that can lie in their wholes.

    All pieces of a stage or none do: those that are computed or read from the workspace, as the whole is, that begin
    where vectors may, and lie in nothing else.

    Parameters
    ----------
    program : TEProgram
    stages : sequence of Stage
        In an order of execution.
    """
    outer = {*program.inputs, *program.outputs, *program.constants}
    within: dict[Tensor, tuple[Tensor, int]] = {}
    wholes: set[Tensor] = set()
    kept: list[Stage] = []
    for stage in stages:
        found = pieces_of(stage.tes[0])
        if found is None:
            kept.append(stage)
            continue
        whole, pieces = found
        root, start = within.get(whole, (whole, 0))
        fits = root not in outer and not any(
            piece in outer or piece in within or piece in wholes or (start + at) % ALIGNMENT for piece, at in pieces
        )
        if fits and len({piece for piece, _ in pieces}) == len(pieces):
            within.update((piece, (root, start + at)) for piece, at in pieces)
            wholes.add(root)
        else:
            kept.append(stage)
    return InPlace(tuple(kept), within)
