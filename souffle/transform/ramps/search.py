"""Which partial steps stand before and after a repeated piece: backward from what its first step reads, forward from
what its last one defines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from souffle.program import Item, Tensor, TEProgram
from souffle.transform.ramps.template import ZERO, Row, Rows, Template, Zero
from souffle.transform.ramps.unify import ConstantValues, Unification
from souffle.transform.roll.repetition import Piece

__all__ = ["Key", "Ramps", "Step", "ancestors", "find_ramps"]

Key = tuple[Tensor, int]
"""A value of the template, and one of its rows."""

_Source = Row | Zero | str
"""What a row holds: a row of the program, zeros, or (a text) what no tensor of the program has."""


@dataclass(frozen=True)
class Step:
    """One partial step.

    Attributes
    ----------
    number : int
        Negative before the piece, from the piece's number of steps on after it.
    active : frozenset of Key
        The carried rows that it computes; the others keep what they hold.
    covers : mapping of Key to Row
        The rows of the program that it computes.
    """

    number: int
    active: frozenset[Key]
    covers: Mapping[Key, Row]


@dataclass(frozen=True)
class Ramps:
    """The steps around a piece.

    Attributes
    ----------
    before, after : tuple of Step
        In the order in which they run.
    sources : mapping of Key to Row or Zero
        What the carried rows hold when the first of all steps starts.
    """

    before: tuple[Step, ...]
    after: tuple[Step, ...]
    sources: Mapping[Key, Row | Zero]


def find_ramps(program: TEProgram, piece: Piece, template: Template) -> Ramps:
    """The partial steps that can be steps of the loop of a piece."""
    return _Search(program, piece, template).ramps()


class _Search:
    def __init__(self, program: TEProgram, piece: Piece, template: Template) -> None:
        self.program = program
        self.piece = piece
        self.template = template
        self.rows = Rows(program)
        self.constants = ConstantValues(program.constants)
        self.inside = {tensor for item in piece.items(program) for tensor in item.outputs}

    def ramps(self) -> Ramps:
        sources = {(value, row): self.held_first(value, row) for value, row in self.template.carried_rows()}
        found = [(None, sources)]
        while (step := self.step_before(-len(found), found[-1][1])) is not None:
            found.append(step)
        # The first step starts from what stands in the program by itself, and not in a TE of several parts alone.
        while len(found) > 1 and not all(map(self.stands_alone, found[-1][1].values())):
            found.pop()
        before = tuple(step for step, _ in reversed(found[1:]))
        return Ramps(before, tuple(self.steps_after()), found[-1][1])

    def stands_alone(self, source: Row | Zero) -> bool:
        """Whether other TEs may read a row."""
        if not isinstance(source, Row):
            return True
        known = self.program.producers.keys() | self.program.constants.keys() | set(self.program.inputs)
        return source.tensor in known

    def held_first(self, value: Tensor, row: int) -> Row | Zero:
        """What the first step of the piece reads as a row of the step before."""
        size = self.template.size(value)
        return self.rows.canonical(Row(self.template.initial[value], row * size), size)

    def step_before(self, number: int, sources: Mapping[Key, Row | Zero]) -> tuple[Step, dict[Key, Row | Zero]] | None:
        """The step that leaves `sources`, and what it starts from."""
        step = Unification(self.template, self.rows, self.constants, number)
        active = {
            key
            for key, source in sources.items()
            if isinstance(source, Row) and source.tensor not in self.inside and step.is_row(*key, source)
        }
        idle = [key for key in sources if key not in active]
        if not active or not active.issuperset(step.needed):
            return None
        if any(step.before.get(key, sources[key]) != sources[key] for key in idle):
            return None
        # What no active row reads of an active row may be anything.
        start = {key: sources[key] if key in idle else step.before.get(key, ZERO) for key in sources}
        return Step(number, frozenset(active), dict(step.within)), start

    def steps_after(self) -> Iterable[Step]:
        """The steps that go on where the piece ends."""
        last = self.piece.items(self.program)[-self.piece.period :]
        final = {
            value: tensor
            for item, end in zip(self.template.items, last, strict=True)
            for value, tensor in zip(item.outputs, end.outputs, strict=True)
        }
        sources: dict[Key, _Source] = {
            (value, row): Row(final[value], row * self.template.size(value))
            for value, row in self.template.carried_rows()
        }
        number = self.piece.steps
        reached: set[Row] = set()
        while True:
            step = Unification(self.template, self.rows, self.constants, number, sources)
            for value in self.template.values:
                for row in range(self.template.rows[value]):
                    self.find_row(step, value, row)
            # A row that is what it holds may idle, also where others read it; nothing new is the end.
            changed = {key for key in sources if key in step.within and step.within[key] != sources[key]}
            new = {step.within[key] for key in changed} - reached
            if not new:
                return
            reached |= new
            active = changed | {key for key in step.needed if key not in step.within}
            yield Step(number, frozenset(active), dict(step.within))
            for key in active:
                sources[key] = step.within.get(key, f"{key[0].name}, row {key[1]}, of step {number}")
            number += 1

    def find_row(self, step: Unification, value: Tensor, row: int) -> None:
        """Bind a row to one of the program that is computed from what its definition reads."""
        size = self.template.size(value)
        read = dict.fromkeys(found.tensor for found in step.reads(value, row))
        for reader in dict.fromkeys(reader for tensor in read for reader in self.rows.readers.get(tensor, ())):
            for tensor in reader.outputs:
                if tensor in self.inside or tensor.size % size:
                    continue
                for start in range(0, tensor.size, size):
                    found = Row(tensor, start)
                    if self.rows.canonical(found, size) == found and step.is_row(value, row, found):
                        return


def ancestors(program: TEProgram, tensors: Iterable[Tensor]) -> set[Item]:
    """What some tensors are computed by."""
    found: set[Item] = set()
    pending = [program.producers[t] for t in tensors if t in program.producers]
    while pending:
        item = pending.pop()
        if item not in found:
            found.add(item)
            pending += [program.producers[t] for t in item.inputs if t in program.producers]
    return found
