"""Builds the loop of a repeated piece, and what follows it reads the loop's results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx

from souffle.program import (
    TE,
    Carried,
    Collected,
    ExternTE,
    FusedTE,
    Indexed,
    Item,
    Loop,
    Origin,
    Tensor,
    TEProgram,
    make_te,
    parts_of,
    with_parts,
)
from souffle.program.loop import ALIGNMENT
from souffle.program.names import NameSupply
from souffle.transform.handles import Handles, read
from souffle.transform.roll.repetition import Earlier, Fixed, Moving, MovingApart, Piece, StepConstants, StepOperand
from souffle.transform.vertical.selections import merge_selections
from souffle.tvm_compat import PrimExpr, const_int, fresh_axis, load_indices, load_tensor, map_bodies

__all__ = ["Rolled", "build_loop"]


@dataclass(frozen=True, eq=False)
class Rolled:
    """A program with a piece of it rolled into `loop`.

    Attributes
    ----------
    program : TEProgram
    loop : Loop
    readers : frozenset of Item
        What reads single steps of the loop.
    """

    program: TEProgram
    loop: Loop
    readers: frozenset[Item]


def build_loop(program: TEProgram, piece: Piece) -> Rolled:
    """Replace a repeated piece of a program by a loop.

    Parameters
    ----------
    program : TEProgram
    piece : Piece
        Of `program`.
    """
    return _Builder(program, piece).build()


class _Builder:
    def __init__(self, program: TEProgram, piece: Piece) -> None:
        self.program = program
        self.piece = piece
        self.names = NameSupply(named.name for named in (*program.tensors(), *program.tes))
        self.items = program.tes[piece.start : piece.start + piece.period * piece.steps]
        self.first = self.items[: piece.period]
        self.indexed: dict[tuple, Indexed] = {}
        self.carried: dict[tuple, Carried] = {}
        self.stacked: dict[Tensor, np.ndarray] = {}
        self.rows: dict[tuple[Tensor, int, int], Tensor] = {}

    def build(self) -> Rolled:
        body = tuple(
            self.with_parameters(item, dict(zip(item.inputs, row, strict=True)))
            for item, row in zip(self.first, self.piece.operands, strict=True)
        )
        collected, moved = self.results()
        origin = self.first[0].origin.merged(*(item.origin for item in self.first[1:]))
        name = self.names.fresh(f"{self.first[-1].name}_for{self.piece.steps}")
        indexed, carried = tuple(self.indexed.values()), tuple(self.carried.values())
        loop = Loop(name, self.piece.steps, body, indexed, carried, tuple(collected), origin)
        before = self.program.tes[: self.piece.start]
        after = self.program.tes[self.piece.start + len(self.items) :]
        following = list(self.follow(after, moved))
        tes = [*before, loop, *following]
        readers = frozenset(following).difference(after)
        return Rolled(self.program.with_tes(tes, constants=self.stacked), loop, readers)

    def with_parameters(self, item: TE | FusedTE, operands: Mapping[Tensor, StepOperand]) -> TE | FusedTE:
        """An item of the first step as the body has it."""
        table: dict[Tensor, Tensor] = {}
        strides: dict[Tensor, Iterator[int]] = {}
        for tensor, operand in operands.items():
            if isinstance(operand, MovingApart):
                strides[tensor] = iter(operand.strides)
            else:
                table[tensor] = self.parameter(operand, tensor)
        if not strides:
            return _with_inputs(item, [table[t] for t in item.inputs])
        parts = [self.part_with_parameters(part, table, strides) for part in parts_of(item)]
        return with_parts(item, parts)

    def part_with_parameters(
        self, part: TE, table: Mapping[Tensor, Tensor], strides: Mapping[Tensor, Iterator[int]]
    ) -> TE:
        """A part of an item as the body has it; each load of `strides` takes the next one of its tensor."""
        handles = Handles()

        def rewrite(load: PrimExpr) -> PrimExpr:
            tensor, indices = part.input_of(load_tensor(load)), load_indices(load)
            if tensor not in strides:
                return read(handles.of(table.get(tensor, tensor)), indices)
            stride = next(strides[tensor])
            if tensor in self.program.constants:
                row = self.constant_row(tensor, const_int(indices[0]), stride)
                return read(handles.of(row), [tirx.IntImm("int32", 0), *indices[1:]])
            moving = Moving(tensor, stride) if stride else Fixed(tensor)
            return read(handles.of(self.parameter(moving, tensor)), indices)

        bodies = map_bodies(part.op.body, rewrite)
        made = make_te(part.name, part.axes, bodies, handles.pairs(), part.origin, part.outputs)
        return made.placed(part.placement)

    def constant_row(self, tensor: Tensor, first: int, stride: int) -> Tensor:
        """What the body reads for the rows of a constant from row `first` on: one tensor where all are equal.

        Directions of a recurrence read a weight for each step, which is the same one.
        """
        key = tensor, first, stride
        if key not in self.rows:
            array = self.program.constants[tensor]
            move = stride * tensor.shape[0] // tensor.size
            rows = [array[first + move * step][None] for step in range(self.piece.steps)]
            if all(np.array_equal(_bytes(rows[0]), _bytes(row)) for row in rows[1:]):
                self.rows[key] = Tensor(self.names.fresh(f"{tensor.name}_row"), rows[0].shape, tensor.dtype)
                self.stacked[self.rows[key]] = np.ascontiguousarray(rows[0])
            else:
                like = Tensor(f"{tensor.name}_row", rows[0].shape, tensor.dtype)
                parameter = Indexed(self.local(like, "s"), self.stack(like, rows), _aligned(like))
                self.indexed[key] = parameter
                self.rows[key] = parameter.tensor
        return self.rows[key]

    def parameter(self, operand: Fixed | Moving | StepConstants | Earlier, tensor: Tensor) -> Tensor:
        """What the body reads for an operand; `tensor` is what the first step reads."""
        if isinstance(operand, Fixed):
            return operand.tensor
        if isinstance(operand, Earlier):
            value = self.first[operand.item].outputs[operand.output]
            if operand.distance == 0:
                return value
            key = (operand.item, operand.output, operand.initial)
            if key not in self.carried:
                inside = self.local(value, "before")
                self.carried[key] = Carried(inside, value, operand.initial)
            return self.carried[key].tensor
        if isinstance(operand, Moving):
            key = (operand.tensor, operand.stride)
            source, stride = operand.tensor, operand.stride
        else:
            key, source, stride = (operand.tensors,), None, _aligned(tensor)
        if key not in self.indexed:
            if source is None:
                source = self.stack(tensor, [self.program.constants[one] for one in operand.tensors])
            self.indexed[key] = Indexed(self.local(tensor, "s"), source, stride)
        return self.indexed[key].tensor

    def stack(self, first: Tensor, rows: Sequence[np.ndarray]) -> Tensor:
        """The constants of all steps as one; `first` has the name, the shape and the type of the first step's."""
        array = np.empty((self.piece.steps, _aligned(first)), rows[0].dtype)
        array[:, first.size :] = 0
        for step, row in enumerate(rows):
            array[step, : first.size] = row.reshape(-1)
        array = array.reshape(-1, *first.shape) if array.shape[1] == first.size else array
        whole = Tensor(self.names.fresh(f"{first.name}_for{self.piece.steps}"), array.shape, first.dtype)
        self.stacked[whole] = array
        return whole

    def results(self) -> tuple[list[Collected], dict[Tensor, tuple[Tensor, int]]]:
        """What the loop defines; and for what is read of an earlier step, where that is kept."""
        collected: list[Collected] = []
        moved: dict[Tensor, tuple[Tensor, int]] = {}
        for column in self.piece.columns(self.program):
            value = column.tensors[0]
            if column.every:
                name = self.names.fresh(f"{value.name}_of_every_step")
                every = Tensor(name, (self.piece.steps, *value.shape), value.dtype)
                collected.append(Collected(every, value, True))
                moved.update((column.tensors[s], (every, s)) for s in column.wanted)
            else:
                collected.append(Collected(column.tensors[-1], value, False))
        return collected, moved

    def follow(self, items: Iterable[Item], moved: dict[Tensor, tuple[Tensor, int]]) -> Iterable[Item]:
        """`items` reading what is kept for every step in the place of single steps' tensors."""
        whole: set[Tensor] = set()
        rewritten = []
        for item in items:
            if isinstance(item, (ExternTE, Loop)):
                whole.update(t for t in item.inputs if t in moved)
            elif any(t in moved for t in item.inputs):
                item = _through(item, moved)
            rewritten.append(item)
        whole.update(t for t in self.program.outputs if t in moved)
        for tensor in (t for t in moved if t in whole):
            yield _taken_out(tensor, *moved[tensor])
        yield from rewritten

    def local(self, like: Tensor, suffix: str) -> Tensor:
        return Tensor(self.names.fresh(f"{like.name}_{suffix}"), like.shape, like.dtype)


def _aligned(tensor: Tensor) -> int:
    """Elements from one step's constant to the next one's."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT // tensor.itemsize


def _with_inputs(item: TE | FusedTE, inputs: list[Tensor]) -> TE | FusedTE:
    if isinstance(item, TE):
        return item.with_inputs(inputs)
    table = dict(zip(item.inputs, inputs, strict=True))
    parts = tuple(part.with_inputs([table.get(t, t) for t in part.inputs]) for part in item.parts)
    return replace(item, parts=parts, inputs=tuple(dict.fromkeys(inputs)))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _through(item: TE | FusedTE, moved: dict[Tensor, tuple[Tensor, int]]) -> TE | FusedTE:
    """`item` reading one step of a larger tensor in the place of each tensor of `moved`."""
    if isinstance(item, FusedTE):
        return with_parts(item, [_through(p, moved) if any(t in moved for t in p.inputs) else p for p in item.parts])
    handles = Handles()
    bodies = handles.opened(item)
    table = {id(handles.of(t)): (handles.of(moved[t][0]), moved[t][1]) for t in item.inputs if t in moved}
    kept = [handles.of(t) for t in item.inputs if t in moved]

    def rewrite(load: PrimExpr) -> PrimExpr:
        source = load_tensor(load)
        for handle in kept:
            if handle.same_as(source):
                whole, step = table[id(handle)]
                return read(whole, [tirx.IntImm("int32", step), *load_indices(load)])
        return load

    rewritten = merge_selections(map_bodies(bodies, rewrite), item.axes)
    made = make_te(item.name, item.axes, rewritten, handles.pairs(), item.origin, item.outputs)
    return made.placed(item.placement)


def _taken_out(tensor: Tensor, every: Tensor, step: int) -> TE:
    """A TE that copies one step, for what needs that tensor itself."""
    axes = [fresh_axis(extent, f"i{k}") for k, extent in enumerate(tensor.shape)]
    handles = Handles()
    body = read(handles.of(every), [tirx.IntImm("int32", step), *(axis.var for axis in axes)])
    origin = Origin((tensor.name,), ("Identity",), tensor.name)
    return make_te(tensor.name, axes, [body], handles.pairs(), origin, [tensor])
