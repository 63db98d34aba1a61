"""Repeated pieces of a program: which items are equal, and what each operand is from step to step.

Two items have equal signatures where they differ only in the tensors that they read and in the constant terms of their
indices. What those terms do from one repetition to the next decides whether a tensor is read at the same place, or at
one that moves with the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tvm import tirx

from souffle.decision import Refused
from souffle.program import TE, FusedTE, Item, Tensor, TEProgram, parts_of
from souffle.program.loop import ALIGNMENT
from souffle.program.shared import OncePer
from souffle.tvm_compat import PrimExpr, constant_term, load_indices, load_tensor, loads, map_loads, structural_digest

__all__ = [
    "BrokenRepeat",
    "Column",
    "Earlier",
    "Fixed",
    "Moving",
    "MovingApart",
    "Piece",
    "Signature",
    "StepConstants",
    "StepOperand",
    "form_of",
    "read_piece",
    "signature",
]

Signature = tuple
"""Equal for items that differ in the tensors and the constant offsets that they read at only."""


@dataclass(frozen=True)
class Fixed:
    """The same tensor in every step."""

    tensor: Tensor


@dataclass(frozen=True)
class Moving:
    """One tensor, read `stride` elements further in each step."""

    tensor: Tensor
    stride: int


@dataclass(frozen=True)
class MovingApart:
    """One tensor, of which load `n` reads ``strides[n]`` elements further in each step.

    The loads are those of this tensor in an item, in the order of its text. They are not all of one stride. A constant
    is read at one row of its first axis by each load, and moves by whole rows.
    """

    tensor: Tensor
    strides: tuple[int, ...]


@dataclass(frozen=True)
class StepConstants:
    """A constant of each step."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Earlier:
    """What item `item` of the piece defines as output `output`, `distance` steps before (0: in this step).

    `initial` holds what the first `distance` steps read.
    """

    item: int
    output: int
    distance: int
    initial: tuple[Tensor, ...]


StepOperand = Fixed | Moving | MovingApart | StepConstants | Earlier


@dataclass(frozen=True, eq=False)
class Piece:
    """Items of a program that repeat.

    Attributes
    ----------
    start, period, steps : int
        Step ``s`` is items ``start + s * period`` to ``start + (s + 1) * period`` of the program.
    operands : tuple of tuples of StepOperand
        For each item of the piece, and each of its inputs.
    """

    start: int
    period: int
    steps: int
    operands: tuple[tuple[StepOperand, ...], ...]

    @cached_property
    def carried_bytes(self) -> int:
        """Bytes handed from one step to the next."""
        found = {(o.item, o.output): o for row in self.operands for o in row if isinstance(o, Earlier) and o.distance}
        return sum(o.initial[0].nbytes for o in found.values())

    def items(self, program: TEProgram) -> tuple[TE | FusedTE, ...]:
        """The items of all steps."""
        return program.tes[self.start : self.start + self.period * self.steps]

    def columns(self, program: TEProgram) -> Iterator[Column]:
        """What each step defines that others need."""
        items = self.items(program)
        inside, results = set(items), set(program.outputs)
        for j in range(self.period):
            for k in range(len(items[j].outputs)):
                tensors = tuple(item.outputs[k] for item in items[j :: self.period])
                wanted = tuple(
                    s
                    for s, tensor in enumerate(tensors)
                    if tensor in results or any(c not in inside for c in program.consumers[tensor])
                )
                if wanted:
                    yield Column(tensors, wanted)


@dataclass(frozen=True, eq=False)
class Column:
    """One output of a piece, in every step.

    Attributes
    ----------
    tensors : tuple of Tensor
        By step.
    wanted : tuple of int
        The steps whose tensor is needed after the piece.
    """

    tensors: tuple[Tensor, ...]
    wanted: tuple[int, ...]

    @property
    def every(self) -> bool:
        """Whether another step than the last is needed."""
        return self.wanted != (len(self.tensors) - 1,)


@dataclass(frozen=True)
class BrokenRepeat(Refused):
    """Why a repeat is no loop.

    Attributes
    ----------
    step : int
        The first step that does not go on as those before it.
    subject : str
    outside : tuple of Tensor
        Of each step the one that it reads, where no two steps read the same, none of these is a constant, and none is
        computed in the repeat: some of these steps are no loop either, as long as they do not compute it.
    """

    step: int
    subject: str
    outside: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Form:
    """What a TE is, but for the tensors that it reads and the constant terms of its indices.

    Attributes
    ----------
    key : tuple
    reads : tuple of (int, tuple of int)
        For each load, the input, and the constant term of each index.
    """

    key: tuple
    reads: tuple[tuple[int, tuple[int, ...]], ...]


_once: OncePer[_Form] = OncePer()


def _form(te_: TE) -> _Form:
    return _once(te_.op, lambda: _read_form(te_))


def _read_form(te_: TE) -> _Form:
    first = te_.op.body[:1] if te_.is_reduction else te_.op.body
    digest, reads = form_of(te_, first)
    others = [int(body.value_index) for body in te_.op.body[1:]] if te_.is_reduction else []
    shapes = tuple((t.shape, t.dtype) for t in (*te_.outputs, *te_.inputs))
    key = (digest, te_.reduction_shape, shapes, tuple(position for position, _ in reads), tuple(others))
    return _Form(key, reads)


def form_of(te_: TE, expressions: Sequence[PrimExpr]) -> tuple[str, tuple[tuple[int, tuple[int, ...]], ...]]:
    """What some expressions of a TE are, but for the constant terms of their indices; and what these are.

    Parameters
    ----------
    te_ : TE
    expressions : sequence of expressions
        Over its axes, reading its placeholders.

    Returns
    -------
    digest : str
        It holds the tensors that are read as elements of some type: which ones they are stands in `reads`.
    reads : tuple of (int, tuple of int)
        For each load, in the order of the text: the input, and the constant term of each index.
    """
    reads: list[tuple[int, tuple[int, ...]]] = []

    def without_offsets(load: PrimExpr) -> PrimExpr:
        parts = [constant_term(index) for index in load_indices(load)]
        tensor = load_tensor(load)
        reads.append((_position(te_, tensor), tuple(offset for _, offset in parts)))
        # TVM hashes no tensor of a load: its place among the inputs is told beside the digest.
        return tirx.call_pure_extern(str(tensor.dtype), "operand", *(rest for rest, _ in parts))

    bare = [map_loads(expression, without_offsets) for expression in expressions]
    return structural_digest([*(axis.var for axis in te_.axes), *bare]), tuple(reads)


def _position(te_: TE, tensor: object) -> int:
    return next(i for i, placeholder in enumerate(te_.placeholders) if placeholder.same_as(tensor))


def signature(item: Item) -> Signature:
    """What an item is, but for the tensors that it reads and the constant terms of its indices."""
    if isinstance(item, TE):
        return ("te", item.placement is None, _form(item).key)
    if isinstance(item, FusedTE):
        inside = {t: (i, k) for i, part in enumerate(item.parts) for k, t in enumerate(part.outputs)}
        wiring = tuple(
            tuple(inside.get(t, item.inputs.index(t) if t not in inside else None) for t in part.inputs)
            for part in item.parts
        )
        outputs = tuple(inside[t] for t in item.outputs)
        return ("fused", item.placement is None, tuple(_form(part).key for part in item.parts), wiring, outputs)
    return ("other", item.name)


def _reads(item: TE | FusedTE) -> list[tuple[int, tuple[int, ...]]]:
    """For each load of a tensor from outside: which input, and the constant term of each index."""
    if isinstance(item, TE):
        return list(_form(item).reads)
    outer = {tensor: i for i, tensor in enumerate(item.inputs)}
    return [
        (outer[part.inputs[position]], offsets)
        for part in item.parts
        for position, offsets in _form(part).reads
        if part.inputs[position] in outer
    ]


def read_piece(program: TEProgram, start: int, period: int, steps: int) -> Piece | BrokenRepeat:
    """Whether the items from `start` on are the steps of a loop.

    Parameters
    ----------
    program : TEProgram
    start, period, steps : int
        As in :class:`Piece`; the items have equal signatures from step to step.
    """
    items = program.tes[start : start + period * steps]
    home = {t: (n, k) for n, item in enumerate(items) for k, t in enumerate(item.outputs)}
    operands: list[tuple[StepOperand, ...]] = []
    for j in range(period):
        copies = items[j::period]
        moves = _moves(copies)
        row: list[StepOperand] = []
        for k, tensor in enumerate(copies[0].inputs):
            column = [item.inputs[k] for item in copies]
            operand = _operand(program, column, moves[k], home, period, j)
            if isinstance(operand, MovingApart) and tensor in program.constants and not _by_rows(copies[0], operand):
                operand = BrokenRepeat("its reads of a constant move apart by other pieces than rows", 0, "")
            if isinstance(operand, BrokenRepeat):
                subject = f"{copies[0].name} and {steps - 1} like it, {period} TEs apart, reading {tensor.name}"
                return replace(operand, subject=subject)
            row.append(operand)
        operands.append(tuple(row))
    piece = Piece(start, period, steps, tuple(operands))
    for column in piece.columns(program):
        if column.every and column.tensors[0].nbytes % ALIGNMENT:
            tensor = column.tensors[0]
            subject = f"{items[0].name} and what follows it, {steps} times {period} TEs, with {tensor.name}"
            reason = f"several steps of it are needed, and its {tensor.nbytes} bytes are no multiple of {ALIGNMENT}"
            return BrokenRepeat(reason, 0, subject)
    return piece


def _moves(copies: Sequence[TE | FusedTE]) -> list[list[tuple[int, ...]]]:
    """For each input, and each step but the last: how many elements further each of its loads is in the next step."""
    shapes = [tensor.shape for tensor in copies[0].inputs]
    moves: list[list[tuple[int, ...]]] = [[] for _ in shapes]
    for here, after in itertools.pairwise(_reads(item) for item in copies):
        row: list[list[int]] = [[] for _ in shapes]
        for (position, old), (_, new) in zip(here, after, strict=True):
            row[position].append(_flat([b - a for a, b in zip(old, new, strict=True)], shapes[position]))
        for position, found in enumerate(row):
            moves[position].append(tuple(found))
    return moves


def _flat(offsets: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for offset, extent in zip(offsets, shape, strict=True):
        flat = flat * extent + offset
    return flat


def _operand(
    program: TEProgram,
    column: Sequence[Tensor],
    moves: Sequence[tuple[int, ...]],
    home: Mapping[Tensor, tuple[int, int]],
    period: int,
    j: int,
) -> StepOperand | BrokenRepeat:
    """What an input is in all steps; the first step that does not go on as those before it, if it is nothing."""
    change = next((s for s in range(1, len(column)) if column[s] is not column[0]), None)
    if change is None and column[0] not in home:
        return _moving(column[0], moves)
    moved = next((s for s, row in enumerate(moves, 1) if any(row)), None)
    if moved is not None:
        return BrokenRepeat(f"step {moved} reads another tensor, and at another place", moved, "")
    if all(tensor in program.constants for tensor in column):
        return StepConstants(tuple(column))
    return _earlier(column, home, program.constants, period, j)


def _moving(tensor: Tensor, moves: Sequence[tuple[int, ...]]) -> StepOperand | BrokenRepeat:
    """What a tensor is that all steps read, of whose loads each must move by one stride."""
    changed = next((s for s, row in enumerate(moves, 1) if row != moves[0]), None)
    if changed is not None:
        return BrokenRepeat("it is not read a fixed number of elements further in each step", changed, "")
    strides = dict.fromkeys(moves[0])
    for stride in strides:
        if stride * tensor.itemsize % ALIGNMENT:
            reason = f"each step reads {stride * tensor.itemsize} bytes further, no multiple of {ALIGNMENT}"
            return BrokenRepeat(reason, 0, "")
    if len(strides) > 1:
        return MovingApart(tensor, moves[0])
    return Moving(tensor, moves[0][0]) if any(strides) else Fixed(tensor)


def _by_rows(item: TE | FusedTE, operand: MovingApart) -> bool:
    """Whether each load of a constant reads one row of it and moves by whole rows, so that these can be set apart."""
    row = operand.tensor.size // operand.tensor.shape[0]
    return not any(stride % row for stride in operand.strides) and all(
        isinstance(load_indices(load)[0], tirx.IntImm)
        for part in parts_of(item)
        for body in part.op.body
        for load in loads(body)
        if part.input_of(load_tensor(load)) is operand.tensor
    )


def _earlier(
    column: Sequence[Tensor],
    home: Mapping[Tensor, tuple[int, int]],
    constants: Container[Tensor],
    period: int,
    j: int,
) -> Earlier | BrokenRepeat:
    last = len(column) - 1
    if column[last] in home:
        number, output = home[column[last]]
        distance, source = last - number // period, number % period
        if 0 <= distance < last and (distance > 0 or source < j):
            for step in range(last - 1, -1, -1):
                expected = ((step - distance) * period + source, output) if step >= distance else None
                if home.get(column[step]) != expected:
                    return _other_operand(column, step + 1, (home, constants))
            return Earlier(source, output, distance, tuple(column[:distance]))
    return _other_operand(column, last, (home, constants))


def _other_operand(column: Sequence[Tensor], step: int, known: Sequence[Container[Tensor]]) -> BrokenRepeat:
    reason = (
        f"step {step} reads {column[step].name} where the step before reads {column[step - 1].name}: they are no "
        "constants, and not what steps at one distance compute"
    )
    others = len(set(column)) == len(column) and not any(tensor in found for tensor in column for found in known)
    return BrokenRepeat(reason, step, "", tuple(column) if others else ())
