"""The step that repeats, as the definitions of rows: what each of its values is, and what its reads stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from souffle.analysis.te_expression import expression_of
from souffle.decision import Refused
from souffle.program import TE, FusedTE, Tensor, TEProgram
from souffle.program.fused import parts_of
from souffle.transform.ramps.index_forms import Definition, Form, Term, flat_form, peeled, reduction_forms, row_forms
from souffle.transform.roll.repetition import Earlier, Fixed, Moving, Piece
from souffle.tvm_compat import PrimExpr, constant_term, load_indices, load_tensor, loads

__all__ = ["MOST_ROWS", "ZERO", "Before", "Row", "Rows", "Template", "Travel", "Within", "Zero", "template_of"]

MOST_ROWS = 64


class Row(NamedTuple):
    """Elements of a tensor that follow each other, from element `start` on."""

    tensor: Tensor
    start: int


class Zero(NamedTuple):
    """A row of zeros that no tensor holds."""


ZERO = Zero()


@dataclass(frozen=True)
class Within:
    """A read of what the same step defines."""

    value: Tensor


@dataclass(frozen=True)
class Before:
    """A read of what the step before defines as `value`."""

    value: Tensor


class Travel(NamedTuple):
    """A read of `tensor` that moves by `move` along dimension `dimension` from step to step."""

    tensor: Tensor
    dimension: int
    move: int

    @property
    def stride(self) -> int:
        """Elements that it moves by."""
        stride = self.move
        for extent in self.tensor.shape[self.dimension + 1 :]:
            stride *= extent
        return stride


Operand = Within | Before | Fixed | Travel


class Rows:
    """The rows of a program's tensors, and what defines them."""

    def __init__(self, program: TEProgram) -> None:
        self.program = program
        self.parts = {
            tensor: part
            for item in program.tes
            for part in parts_of(item)
            if isinstance(part, TE)
            for tensor in part.outputs
        }
        self._definitions: dict[TE, Definition] = {}
        self._canonical: dict[tuple[Row, int], Row | Zero] = {}

    @cached_property
    def readers(self) -> dict[Tensor, list[TE]]:
        """The TEs, single or parts of fused ones, that read each tensor."""
        table: dict[Tensor, list[TE]] = {}
        for part in dict.fromkeys(self.parts.values()):
            for tensor in part.inputs:
                table.setdefault(tensor, []).append(part)
        return table

    def definition(self, te_: TE) -> Definition:
        """A TE with its expression."""
        if te_ not in self._definitions:
            self._definitions[te_] = Definition(te_, expression_of(te_))
        return self._definitions[te_]

    def element(self, tensor: Tensor, env: tuple[Form, ...]) -> Term | None:
        """What defines an element of a tensor without a reduction; ``None`` for another one."""
        part = self.parts.get(tensor)
        if part is None or part.is_reduction:
            return None
        definition = self.definition(part)
        root = definition.expression.regions[0].roots[part.outputs.index(tensor)]
        return peeled(Term(definition, root, env))

    def canonical(self, row: Row, size: int) -> Row | Zero:
        """The row that a row is a copy of, as far as copies go; zeros where they are constants."""
        key = row, size
        if key not in self._canonical:
            self._canonical[key] = self._original(row, size)
        return self._canonical[key]

    def _original(self, row: Row, size: int) -> Row | Zero:
        array = self.program.constants.get(row.tensor)
        if array is not None:
            part = np.ascontiguousarray(array).reshape(-1)[row.start : row.start + size]
            return row if part.any() or np.signbit(part).any() else ZERO
        env = row_forms(row.tensor.shape, row.start, size)
        term = None if env is None else self.element(row.tensor, env)
        if term is None or term.node.kind != "load" or term.node.dtype != row.tensor.dtype:
            return row
        there, here = flat_form(term), flat_of(env, row.tensor.shape)
        if there is None or there.terms != here.terms or there.constant % size:
            return row
        return self.canonical(Row(term.tensor, there.constant), size)


def flat_of(env: tuple[Form, ...], shape: tuple[int, ...]) -> Form:
    """Which element of a tensor indices mean, counted in row-major order."""
    total = Form(0)
    for index, extent in zip(env, shape, strict=True):
        total = Form(0).plus(total, extent).plus(index)
    return total


@dataclass(frozen=True, eq=False)
class Template:
    """The step that repeats.

    Attributes
    ----------
    items : tuple of TE or FusedTE
        Those of the first step.
    operands : mapping of TE to tuple of Operand
        For each TE of it, single or part of a fused one, what each input stands for.
    initial : mapping of Tensor to Tensor
        By the carried values: what the first step reads in their place.
    rows : mapping of Tensor to int
        Into how many rows each value is parted: along its first axis where nothing reads across them, else one.
    """

    items: tuple[TE | FusedTE, ...]
    operands: dict[TE, tuple[Operand, ...]]
    initial: dict[Tensor, Tensor]
    rows: dict[Tensor, int]

    def size(self, value: Tensor) -> int:
        """Elements of a row."""
        return value.size // self.rows[value]

    def row_forms(self, value: Tensor, row: int) -> tuple[Form, ...]:
        """The indices of the elements of a row."""
        return row_forms(value.shape, row * self.size(value), self.size(value))

    def row_of(self, value: Tensor, form: Form) -> int | None:
        """The row that all elements of a form are in."""
        size = self.size(value)
        low, high = form.bounds()
        return low // size if low >= 0 and low // size == high // size < self.rows[value] else None

    @cached_property
    def values(self) -> tuple[Tensor, ...]:
        """All that a step defines, in order."""
        return tuple(tensor for part in self.operands for tensor in part.outputs)

    @cached_property
    def outer(self) -> tuple[Tensor, ...]:
        """What every step reads from outside, beside the constants of a step."""
        read = (operand for row in self.operands.values() for operand in row)
        return tuple(dict.fromkeys(o.tensor for o in read if isinstance(o, Fixed | Travel)))

    def carried_rows(self) -> Iterator[tuple[Tensor, int]]:
        """Each row that is handed to the next step."""
        for value in self.initial:
            for row in range(self.rows[value]):
                yield value, row


def template_of(program: TEProgram, piece: Piece) -> Template | Refused:
    """The first step of a repeated piece, with what its reads stand for."""
    items = piece.items(program)[: piece.period]
    following = piece.items(program)[piece.period : 2 * piece.period]
    operands: dict[TE, tuple[Operand, ...]] = {}
    initial: dict[Tensor, Tensor] = {}
    for item, after, row in zip(items, following, piece.operands, strict=True):
        outer = dict(zip(item.inputs, row, strict=True))
        for part, next_part in zip(parts_of(item), parts_of(after), strict=True):
            found: list[Operand] = []
            for position, tensor in enumerate(part.inputs):
                operand = outer.get(tensor)
                match operand:
                    case None:
                        made: Operand | Refused = Within(tensor)
                    case Fixed():
                        made = operand
                    case Moving():
                        made = _travel(part, next_part, position)
                    case Earlier(distance=0 | 1):
                        value = items[operand.item].outputs[operand.output]
                        made = Before(value) if operand.distance else Within(value)
                        if operand.distance and initial.setdefault(value, operand.initial[0]) is not operand.initial[0]:
                            made = Refused(f"its first step reads two tensors in the place of {value.name} before it")
                    case _:
                        made = Refused(f"{tensor.name} is of each step, or of more than one step before")
                if isinstance(made, Refused):
                    return made
                found.append(made)
            operands[part] = tuple(found)
    if not initial:
        return Refused("nothing is handed from one step to the next")
    return _with_whole_rows(items, operands, initial)


def _with_whole_rows(
    items: tuple[TE | FusedTE, ...], operands: dict[TE, tuple[Operand, ...]], initial: dict[Tensor, Tensor]
) -> Template:
    """A template of which no row reads parts of several rows."""
    rows = {t: t.shape[0] if t.shape and t.shape[0] <= MOST_ROWS else 1 for part in operands for t in part.outputs}
    while True:
        template = Template(items, operands, initial, rows)
        across = {value for part in operands for value in _read_across(part, template)}
        if not across:
            return template
        rows = {value: 1 if value in across else count for value, count in rows.items()}


def _read_across(part: TE, template: Template) -> Iterator[Tensor]:
    """The values of which a row of a TE reads parts of several rows."""
    definition = Definition(part, expression_of(part))
    roots = definition.expression.regions[0].roots
    for row in range(template.rows[part.outputs[0]]):
        env = template.row_forms(part.outputs[0], row) + reduction_forms(definition.expression)
        pending = [Term(definition, root, env) for root in roots]
        while pending:
            term = peeled(pending.pop())
            pending += () if term.node.kind == "load" else term.args()
            operand = template.operands[part][term.node.value] if term.node.kind == "load" else None
            if isinstance(operand, Within | Before) and template.rows[operand.value] > 1:
                form = flat_form(term)
                if form is None or template.row_of(operand.value, form) is None:
                    yield operand.value


def _travel(part: TE, after: TE, position: int) -> Travel | Refused:
    """How the reads of an input move from a step to the next one."""
    moves: set[tuple[int, int]] = set()
    both = ([_offsets(body, te_.placeholders[position]) for body in te_.op.body] for te_ in (part, after))
    for here, there in zip(*both, strict=True):
        for old, new in zip(here, there, strict=True):
            moved = [(d, b - a) for d, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
            moves.add(moved[0] if len(moved) == 1 else (0, 0))
    if len(moves) != 1 or (0, 0) in moves:
        return Refused(f"{part.inputs[position].name} moves along several dimensions from step to step")
    return Travel(part.inputs[position], *moves.pop())


def _offsets(body: PrimExpr, placeholder: object) -> list[tuple[int, ...]]:
    read = (load for load in loads(body) if placeholder.same_as(load_tensor(load)))
    return [tuple(constant_term(index)[1] for index in load_indices(load)) for load in read]
