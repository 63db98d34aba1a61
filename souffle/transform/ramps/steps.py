"""The items of all steps: copies of the first one's, in which a row that idles keeps what it held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tvm import te, tirx

from souffle.decision import Refused
from souffle.program import TE, FusedTE, Tensor, TEProgram, fuse, make_te
from souffle.program.fused import parts_of
from souffle.program.names import NameSupply
from souffle.transform.handles import Handles, read
from souffle.transform.ramps.outer_elements import Pad
from souffle.transform.ramps.row_reads import read_row, row_index
from souffle.transform.ramps.search import Ramps
from souffle.transform.ramps.template import Before, Fixed, Operand, Row, Template, Travel, Within
from souffle.transform.roll.repetition import Piece
from souffle.tvm_compat import (
    PrimExpr,
    bounded_analyzer,
    cast,
    compute_op,
    constant_term,
    dtype_of,
    fresh_axis,
    load_indices,
    load_tensor,
    loads,
    map_bodies,
)

__all__ = ["Steps", "make_steps"]

_MOST_BYTES_PADDED = 1 << 26


@dataclass(frozen=True, eq=False)
class Steps:
    """All steps of a piece and of the ramps around it.

    Attributes
    ----------
    items : tuple of TE or FusedTE
        In order.
    starts : tuple of TE
        What copies rows into what the first step reads, and pads what moves.
    values : mapping
        By the number of a step and a value of the template: the tensor.
    constants : mapping of Tensor to array
    pads : mapping of Tensor to Pad
        By what moves: its copy, of which nothing that is read later depends on what stands around.
    """

    items: tuple[TE | FusedTE, ...]
    starts: tuple[TE, ...]
    values: Mapping[tuple[int, Tensor], Tensor]
    constants: Mapping[Tensor, np.ndarray]
    pads: Mapping[Tensor, Pad]


@dataclass(frozen=True)
class _Mask:
    """A read of which rows of `value` a step computes."""

    value: Tensor


@dataclass(frozen=True)
class _AllRows:
    """A read of what a step would compute of `value` if no row idled."""

    value: Tensor


_Read = Operand | _Mask | _AllRows


@dataclass(frozen=True, eq=False)
class _Written:
    """A TE as all steps have it; it reads marks in the place of tensors."""

    te: TE
    reads: tuple[_Read, ...]
    value: _AllRows | Within
    moving: Mapping[int, Travel] = field(default_factory=dict)
    ops: dict[int, te.ComputeOp] = field(default_factory=dict)

    def op_of(self, number: int) -> te.ComputeOp:
        """The expression in step `number`, one object for equal steps."""
        shift = number if self.moving else 0
        if shift == 0:
            return self.te.op
        if shift not in self.ops:
            bodies = map_bodies(self.te.op.body, lambda load: self._shifted(load, shift))
            self.ops[shift] = compute_op(self.te.name, self.te.axes, bodies, self.te.op.tag)
        return self.ops[shift]

    def _shifted(self, load: PrimExpr, number: int) -> PrimExpr:
        source = load_tensor(load)
        for position, travel in self.moving.items():
            if self.te.placeholders[position].same_as(source):
                return read(source, _moved(load_indices(load), travel.dimension, travel.move * number))
        return load


def make_steps(program: TEProgram, piece: Piece, template: Template, ramps: Ramps) -> Steps | Refused:
    """All steps of a piece and of the ramps around it, each a copy of the template."""
    maker = _Maker(program, piece, template, ramps)
    refused = maker.pad()
    return maker.make() if refused is None else refused


class _Maker:
    def __init__(self, program: TEProgram, piece: Piece, template: Template, ramps: Ramps) -> None:
        self.program = program
        self.piece = piece
        self.template = template
        self.ramps = ramps
        self.names = NameSupply(named.name for named in (*program.tensors(), *program.tes))
        self.partial = {step.number: step for step in (*ramps.before, *ramps.after)}
        self.numbers = range(-len(ramps.before), piece.steps + len(ramps.after))
        self.pads: dict[Tensor, Pad] = {}
        self.starts: list[TE] = []
        self.constants: dict[Tensor, np.ndarray] = {}
        self.values: dict[tuple[int, Tensor], Tensor] = {}
        self.marks: dict[_Read, Tensor] = {}
        self.histories: dict[tuple[bytes, ...], dict[int, Tensor]] = {}

    def make(self) -> Steps | Refused:
        self.masks = {value: self.masks_of(value) for value in self.template.initial}
        several = next((v for v, mask in self.masks.items() if mask and len(self.producer(v).outputs) > 1), None)
        if several is not None:
            return Refused(f"{several.name} is one of several results of a reduction")
        written = {part: tuple(self.written(part)) for part in self.template.operands}
        self.initial = {value: self.start(value) for value in self.template.initial}
        items: list[TE | FusedTE] = []
        old = self.piece.items(self.program)
        for number in self.numbers:
            for position, item in enumerate(self.template.items):
                inside = 0 <= number < self.piece.steps
                like = old[number * self.piece.period + position] if inside else None
                items.append(self.item(item, like, number, written))
        return Steps(tuple(items), tuple(self.starts), self.values, self.constants, self.pads)

    def producer(self, value: Tensor) -> TE:
        return next(part for part in self.template.operands if value in part.outputs)

    # One step.

    def item(
        self, item: TE | FusedTE, like: TE | FusedTE | None, number: int, written: Mapping[TE, tuple[_Written, ...]]
    ) -> TE | FusedTE:
        """An item of the template in step `number`; where the program has it (`like`), with that one's names."""
        made: list[TE] = []
        for place, part in enumerate(parts_of(item)):
            known = parts_of(like)[place] if like is not None else None
            for output, value in enumerate(part.outputs):
                tensor = known.outputs[output] if known is not None else self.renamed(value)
                self.values[number, value] = tensor
            for one in written[part]:
                outputs = tuple(self.values[number, value] for value in part.outputs)
                if isinstance(one.value, _AllRows):
                    outputs = (self.renamed(outputs[0], "_of_all_rows"),)
                name = known.name if known is not None else part.name
                if known is None or one is not written[part][-1]:
                    name = self.names.fresh(f"{name}_of_step")
                inputs = tuple(self.resolved(r, number, made) for r in one.reads)
                origin = known.origin if known is not None else part.origin
                whole = replace(one.te, name=name, op=one.op_of(number), inputs=inputs, outputs=outputs, origin=origin)
                made.append(whole.placed(part.placement))
        if len(made) == 1:
            return made[0]
        return fuse(made, [self.values[number, value] for value in item.outputs])

    def renamed(self, value: Tensor, suffix: str = "_of_step") -> Tensor:
        return Tensor(self.names.fresh(f"{value.name}{suffix}"), value.shape, value.dtype)

    def resolved(self, operand: _Read, number: int, made: Sequence[TE]) -> Tensor:
        """What a read of a step stands for."""
        match operand:
            case Fixed():
                return operand.tensor
            case Travel():
                return self.pads[operand.tensor].tensor if operand.tensor in self.pads else operand.tensor
            case Within():
                return self.values[number, operand.value]
            case Before():
                first = number == self.numbers[0]
                return self.initial[operand.value] if first else self.values[number - 1, operand.value]
            case _Mask():
                return self.masks[operand.value][number]
            case _:
                return made[-1].outputs[0]

    # A TE as all steps have it.

    def written(self, part: TE) -> Iterator[_Written]:
        """A TE of the template, with rows that can idle; behind a reduction a TE that keeps them."""
        operands = dict(zip(part.inputs, self.template.operands[part], strict=True))
        value = part.outputs[0]
        masked = bool(self.masks.get(value))
        handles = Handles()
        table = {id(p): operands[t] for p, t in zip(part.placeholders, part.inputs, strict=True)}

        def marked(load: PrimExpr) -> PrimExpr:
            source = load_tensor(load)
            operand = table.get(id(source)) or operands[part.input_of(source)]
            indices = load_indices(load)
            if isinstance(operand, Travel) and operand.tensor in self.pads:
                indices = _moved(indices, operand.dimension, self.pads[operand.tensor].before)
            return read(handles.of(self.mark(operand)), indices)

        bodies = map_bodies(part.op.body, marked)
        if masked and not part.is_reduction:
            bodies = [self.kept(bodies[0], value, part.axes, handles)]
        rest = masked and part.is_reduction
        yield self.with_marks(part, part.axes, bodies, handles, _AllRows(value) if rest else Within(value))
        if rest:
            handles = Handles()
            axes = [fresh_axis(extent, f"i{k}") for k, extent in enumerate(value.shape)]
            result = read(handles.of(self.mark(_AllRows(value))), [axis.var for axis in axes])
            body = self.kept(result, value, axes, handles)
            yield self.with_marks(part, axes, [body], handles, Within(value))

    def with_marks(
        self,
        part: TE,
        axes: Sequence[tirx.IterVar],
        bodies: Sequence[PrimExpr],
        handles: Handles,
        value: _AllRows | Within,
    ) -> _Written:
        made = make_te(part.name, axes, bodies, handles.pairs(), part.origin, part.outputs)
        meaning = {mark: operand for operand, mark in self.marks.items()}
        reads = tuple(meaning[tensor] for tensor in made.inputs)
        moving = {position: operand for position, operand in enumerate(reads) if isinstance(operand, Travel)}
        return _Written(made, reads, value, moving)

    def kept(self, result: PrimExpr, value: Tensor, axes: Sequence[tirx.IterVar], handles: Handles) -> PrimExpr:
        """A result in the rows that are computed, what was held in the others."""
        row = axes[0].var if self.template.rows[value] > 1 else tirx.IntImm("int32", 0)
        mask = read(handles.of(self.mark(_Mask(value))), [row])
        held = read(handles.of(self.mark(Before(value))), [axis.var for axis in axes])
        return tirx.Select(mask != tirx.const(0, "float32"), result, held)

    def mark(self, operand: _Read) -> Tensor:
        """A tensor that stands for a read."""
        if operand not in self.marks:
            if isinstance(operand, Fixed | Travel):
                like = self.pads[operand.tensor].tensor if operand.tensor in self.pads else operand.tensor
                shape, dtype = like.shape, like.dtype
            else:
                shape, dtype = operand.value.shape, operand.value.dtype
            if isinstance(operand, _Mask):
                shape, dtype = (self.template.rows[operand.value],), "float32"
            self.marks[operand] = Tensor(f"mark{len(self.marks)}", shape, dtype)
        return self.marks[operand]

    def masks_of(self, value: Tensor) -> dict[int, Tensor] | None:
        """For each step which rows of a value are computed; ``None`` where all are in all steps."""
        arrays = []
        for number in self.numbers:
            step = self.partial.get(number)
            active = [step is None or (value, row) in step.active for row in range(self.template.rows[value])]
            arrays.append(np.array(active, np.float32))
        if all(array.all() for array in arrays):
            return None
        history = tuple(array.tobytes() for array in arrays)
        if history not in self.histories:
            # One tensor for equal steps of a history, and none for two histories: they are two operands of one TE.
            known: dict[bytes, Tensor] = {}
            for array, key in zip(arrays, history, strict=True):
                if key not in known:
                    known[key] = Tensor(self.names.fresh("active_rows"), array.shape, "float32")
                    self.constants[known[key]] = array
            self.histories[history] = {n: known[key] for n, key in zip(self.numbers, history, strict=True)}
        return self.histories[history]

    # What the first step reads.

    def start(self, value: Tensor) -> Tensor:
        """What the first step reads in the place of the step before: the rows that it holds, in a tensor of its own."""
        sources = [self.ramps.sources[value, row] for row in range(self.template.rows[value])]
        size = self.template.size(value)
        start = Tensor(self.names.fresh(f"{value.name}_start"), value.shape, value.dtype)
        if not any(isinstance(source, Row) for source in sources):
            self.constants[start] = np.zeros(value.shape, self.dtype_of_constants(value))
            return start
        axes = [fresh_axis(extent, f"i{k}") for k, extent in enumerate(value.shape)]
        lead, content = row_index(value.shape, size, [axis.var for axis in axes])
        handles = Handles()
        body: PrimExpr | None = None
        for row in reversed(range(len(sources))):
            source = sources[row]
            held = tirx.const(0, value.dtype)
            if isinstance(source, Row):
                held = read_row(handles.of(source.tensor), source.tensor.shape, source.start, size, content)
            body = held if body is None else tirx.if_then_else(lead == row, held, body)
        origin = self.producer(value).origin
        self.starts.append(make_te(start.name, axes, [body], handles.pairs(), origin, [start]))
        return start

    def dtype_of_constants(self, value: Tensor) -> np.dtype:
        known = next((a.dtype for t, a in self.program.constants.items() if t.dtype == value.dtype), None)
        return np.dtype(value.dtype) if known is None else known

    def pad(self) -> Refused | None:
        """Copies, with zeros around, of what steps would read outside of."""
        for tensor, dimension, low, high in self.reaches():
            before, after = max(0, -low), max(0, high - tensor.shape[dimension] + 1)
            if not before and not after:
                continue
            shape = list(tensor.shape)
            shape[dimension] += before + after
            padded = Tensor(self.names.fresh(f"{tensor.name}_padded"), tuple(shape), tensor.dtype)
            if tensor in self.pads:
                return Refused(f"{tensor.name} moves along two dimensions")
            if padded.nbytes > _MOST_BYTES_PADDED:
                return Refused(f"{tensor.name} with zeros around it has {padded.nbytes} bytes")
            self.pads[tensor] = Pad(dimension, before, after, padded)
            axes = [fresh_axis(extent, f"i{k}") for k, extent in enumerate(shape)]
            along = axes[dimension].var
            handles = Handles()
            value = read(handles.of(tensor), _moved([axis.var for axis in axes], dimension, -before))
            inside = tirx.all(along >= before, along < before + tensor.shape[dimension])
            body = tirx.if_then_else(inside, value, tirx.const(0, tensor.dtype))
            origin = self.template.items[0].origin
            self.starts.append(make_te(padded.name, axes, [body], handles.pairs(), origin, [padded]))
        return next((r for r in self.unknown_reaches()), None)

    def reaches(self) -> list[tuple[Tensor, int, int, int]]:
        """For each tensor that moves: along which dimension, and the least and greatest index there of all steps."""
        table: dict[tuple[Tensor, int], tuple[int, int]] = {}
        for travel, index, part in self.moving_indices():
            if loads(index):
                continue
            bounds = bounded_analyzer((*part.axes, *part.reduce_axes)).const_int_bound(index)
            ends = [travel.move * number for number in (self.numbers[0], self.numbers[-1])]
            low, high = int(bounds.min_value) + min(ends), int(bounds.max_value) + max(ends)
            known = table.get(travel[:2], (low, high))
            table[travel[:2]] = min(low, known[0]), max(high, known[1])
        return [(*key, *ends) for key, ends in table.items()]

    def unknown_reaches(self) -> Iterator[Refused]:
        for travel, index, _ in self.moving_indices():
            if loads(index):
                yield Refused(f"where {travel.tensor.name} is read depends on data")

    def moving_indices(self) -> Iterator[tuple[Travel, PrimExpr, TE]]:
        """The indices, in the template, along the dimensions in which reads move."""
        for part, operands in self.template.operands.items():
            for body in part.op.body:
                for load in loads(body):
                    operand = operands[part.inputs.index(part.input_of(load_tensor(load)))]
                    if isinstance(operand, Travel):
                        yield operand, load_indices(load)[operand.dimension], part


def _moved(indices: Sequence[PrimExpr], dimension: int, distance: int) -> list[PrimExpr]:
    """Indices, of which one is a constant larger."""
    rest, offset = constant_term(indices[dimension])
    total = offset + distance
    moved = rest
    if isinstance(rest, tirx.IntImm):
        moved = cast(tirx.IntImm("int32", int(rest.value) + total), dtype_of(rest))
    elif total:
        moved = rest + total if total > 0 else rest - -total
    return [moved if d == dimension else index for d, index in enumerate(indices)]
