"""Rolled repetition: equal consecutive pieces of a program become one loop (see :mod:`souffle.program.loop`).

::

    piece_0; piece_1; ... piece_n-1    →    for s in 0 .. n-1: piece(s)

Legal where the pieces have equal expressions, and each operand of a piece is, in every step, one of these: the same
tensor; one tensor at offsets that are affine in the step; constants, which are stacked; what the same piece defines; or
what the piece a fixed number of steps before defines. Numbers in which they differ are such constants
(``step_numbers.py``). The pieces run in the order that they had, so every value is the same, to the bit. What later TEs
read of a step other than the last is kept for every step.

A TE behind a loop that only moves data goes into its readers, as in the vertical transformation: what was a choice
among the tensors of many steps is one read of the tensor that has them all, and short enough for that. So the pieces
of a concatenation of states are no steps of a loop of copies.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from souffle.alone import one_at_a_time
from souffle.decision import Decision
from souffle.program import TE, ExternTE, FusedTE, Item, Loop, Tensor, TEProgram
from souffle.transform.roll.repetition import BrokenRepeat, Piece, Signature, read_piece, signature
from souffle.transform.roll.rolled_loop import Rolled, build_loop
from souffle.transform.roll.step_numbers import with_step_numbers
from souffle.transform.vertical.vertical import copies_into_readers

__all__ = ["FEWEST_STEPS", "repeated_pieces", "roll"]

FEWEST_STEPS = 3
"""Repetitions from which a loop is shorter than what it replaces, with its parameters and its ramp counted."""

_MOST_TRIED = 64
"""Repeats tried in a row without finding one that can be rolled."""


@dataclass(frozen=True)
class _Repeat:
    """Items ``start`` to ``start + length`` have the same signatures as those `period` later."""

    start: int
    period: int
    length: int

    @property
    def steps(self) -> int:
        return self.length // self.period

    @property
    def saved(self) -> int:
        return (self.steps - 1) * self.period


@one_at_a_time
def roll(program: TEProgram, without: Container[str] = frozenset()) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Find repeated pieces and roll them into loops, those first that save most.

    Parameters
    ----------
    program : TEProgram
    without : container of str
        Names of loops that are not wanted; other ways to roll the same items are not tried either.

    Returns
    -------
    program : TEProgram
        The same object where nothing repeats.
    decisions : tuple of Decision
        One for each loop, and for each repeat that cannot be one.
    """
    roller = _Roller(without)
    numbers = with_step_numbers(program, FEWEST_STEPS)
    rolled = numbers.program
    while (shorter := roller.shorter(rolled)) is not None:
        rolled = shorter
    return program if rolled is numbers.program else numbers.put_back(rolled), tuple(roller.decisions)


def repeated_pieces(program: TEProgram, without: Container[str]) -> Iterator[tuple[TEProgram, Piece]]:
    """The repeated pieces of a program that could be loops, those first that :func:`roll` tries first.

    Parameters
    ----------
    program : TEProgram
    without : container of str
        Names of TEs; repeats that hold one of them are passed over.

    Yields
    ------
    program : TEProgram
        In the order of TEs that the piece belongs to.
    piece : Piece
    """
    roller = _Roller(frozenset())
    refused = 0
    for repeat, order in _repeats_in_two_orders(program):
        if any(item.name in without for item in order.tes[repeat.start : repeat.start + repeat.length]):
            continue
        for piece in roller.pieces(order, repeat):
            if isinstance(piece, BrokenRepeat):
                refused += 1
            else:
                yield order, piece
        if refused > _MOST_TRIED:
            return


class _Roller:
    def __init__(self, without: Container[str]) -> None:
        self.without = without
        self.decisions: list[Decision] = []
        self.unwanted: dict[str, set[int]] = {}
        self.refused: set[tuple[str, int, int]] = set()
        # Tensors each of which another step reads, with all those that its repeat reads so.
        self.others: dict[Tensor, frozenset[Tensor]] = {}

    def shorter(self, program: TEProgram) -> TEProgram | None:
        """The program with one more loop."""
        tried = 0
        for repeat, order in _repeats_in_two_orders(program):
            for piece in self.pieces(order, repeat):
                if isinstance(piece, BrokenRepeat):
                    tried += 1
                    self.decisions.append(Decision("roll", piece.subject, False, piece.reason))
                    continue
                rolled = build_loop(order, piece)
                if rolled.loop.name in self.without:
                    self.leave_apart(piece, order)
                elif len(rolled.program.tes) + piece.period >= len(program.tes):
                    # What takes single steps out of the loop's results would take the place of the steps.
                    self.leave_apart(piece, order)
                    reason = "its steps are needed one by one, so that a loop would leave as many TEs"
                    self.decisions.append(Decision("roll", rolled.loop.name, False, reason))
                else:
                    self.decisions.append(_accepted(piece, rolled))
                    shorter, copies = copies_into_readers(rolled.program, rolled.readers)
                    self.decisions.extend(copies)
                    return shorter
            if tried > _MOST_TRIED:
                break
        return None

    def leave_apart(self, piece: Piece, program: TEProgram) -> None:
        """Try no other way to roll the items of a piece."""
        for item in piece.items(program):
            self.unwanted.setdefault(item.name, set()).add(piece.period)

    def pieces(self, program: TEProgram, repeat: _Repeat) -> Iterator[Piece | BrokenRepeat]:
        """The ways to roll a repeat, best first: where it starts decides how much is carried from step to step."""
        found: list[Piece] = []
        refusals: list[BrokenRepeat] = []
        # A repeat whose steps are wired in two ways is cut where the wiring changes.
        pending = [(repeat.start + r, (repeat.length - r) // repeat.period) for r in range(repeat.period)]
        while pending:
            start, steps = pending.pop(0)
            subject = program.tes[start].name, repeat.period, steps
            if steps < FEWEST_STEPS or subject in self.refused:
                continue
            if _holds_extern(program.tes[start : start + repeat.period]):
                continue
            if any(_in_one_stage(program.tes, start + step * repeat.period) for step in range(steps + 1)):
                continue
            if self.reads_others(program, start, repeat.period, steps):
                continue
            piece = read_piece(program, start, repeat.period, steps)
            if isinstance(piece, Piece):
                found.append(piece)
                continue
            self.refused.add(subject)
            refusals.append(piece)
            self.others |= dict.fromkeys(piece.outside, frozenset(piece.outside))
            at = piece.step
            cut = 0 < at < steps and not piece.outside
            pending += [(start, at), (start + at * repeat.period, steps - at)] if cut else []
        for piece in sorted(found, key=lambda p: (-(p.steps - 1) * p.period, p.carried_bytes, p.start)):
            # Two steps of a loop that is not wanted are no better as one.
            periods = (p for item in piece.items(program) for p in self.unwanted.get(item.name, ()))
            if not any(piece.period % period == 0 for period in periods):
                yield piece
        if not found:
            yield from refusals[:1]

    def reads_others(self, program: TEProgram, start: int, period: int, steps: int) -> bool:
        """Whether the steps of a piece read what a repeat was refused for: it is some of the same steps.

        So that a long repeat is refused once, not again for every second step, every third, and so on, before repeats
        are tried that save less: among them those that compute what it reads, after which it is a loop.
        """
        items = program.tes[start : start + period * steps]
        for j, item in enumerate(items[:period]):
            for k, tensor in enumerate(item.inputs):
                among = self.others.get(tensor)
                if among is None:
                    continue
                column = {copy.inputs[k] for copy in items[j::period]}
                if len(column) == steps and column <= among:
                    made = {t for one in items for t in one.outputs}
                    if column.isdisjoint(made):
                        return True
        return False


def _accepted(piece: Piece, rolled: Rolled) -> Decision:
    loop = rolled.loop
    per_step = f"{len(loop.body)} TE{'s' if len(loop.body) > 1 else ''}"
    kinds = f"{len(loop.carried)} carried, {len(loop.indexed)} indexed by the step, {len(loop.invariants)} fixed"
    reason = f"{piece.steps} repetitions of {per_step} are one loop; operands: {kinds}"
    return Decision("roll", loop.name, True, reason)


def _late(program: TEProgram) -> TEProgram:
    """The same program with every TE as late as its readers allow, so that what only the end needs parts no steps."""
    to_end: dict[Item, int] = {}
    stage: list[Item] = []
    for number in reversed(range(len(program.tes))):
        stage.append(program.tes[number])
        if _in_one_stage(program.tes, number):
            continue
        readers = (reader for item in stage for tensor in item.outputs for reader in program.consumers[tensor])
        distance = max((to_end[reader] + 1 for reader in readers if reader not in stage), default=0)
        to_end |= dict.fromkeys(stage, distance)
        stage = []
    ordered = tuple(sorted(program.tes, key=lambda item: -to_end[item]))
    return program if ordered == program.tes else replace(program, tes=ordered)


def _in_one_stage(items: Sequence[Item], number: int) -> bool:
    """Whether an item is computed in one stage with the one before it, by what a normalization says of either."""
    if not 0 < number < len(items):
        return False
    before = items[number - 1]
    phases = [
        item.placement and item.placement.phase for item in (before, items[number]) if isinstance(item, TE | FusedTE)
    ]
    return len(phases) == 2 and (phases[1] in ("moments", "elements") or phases[0] == "rows")


def _repeats_in_two_orders(program: TEProgram) -> list[tuple[_Repeat, TEProgram]]:
    """The repeats of a program, and of the one with every TE as late as possible; those first that save most."""
    orders = [program, _late(program)]
    repeats = [(repeat, order) for order in orders for repeat in _repeats([signature(item) for item in order.tes])]
    return sorted(repeats, key=lambda found: -found[0].saved)


def _repeats(signatures: Sequence[Signature]) -> Iterator[_Repeat]:
    """Maximal repeats, those that save most first; of equal ones the shortest period."""
    numbers: dict[Signature, int] = {}
    row = np.array([numbers.setdefault(s, len(numbers)) for s in signatures], dtype=np.int64)
    found: list[_Repeat] = []
    for period in range(1, len(row) // FEWEST_STEPS + 1):
        same = np.concatenate([[0], row[:-period] == row[period:], [0]]).astype(np.int8)
        edges = np.diff(same)
        for start, stop in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
            length = int(stop - start) + period
            if length >= FEWEST_STEPS * period:
                found.append(_Repeat(int(start), period, length))
    yield from sorted(found, key=lambda r: (-r.saved, r.period, r.start))


def _holds_extern(items: Sequence[Item]) -> bool:
    """Loops hold TEs alone: an operator that is no TE is a kernel of its own."""
    return any(isinstance(item, (ExternTE, Loop)) for item in items)
