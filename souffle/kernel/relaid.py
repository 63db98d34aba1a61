"""A stage that reads or writes a tensor part by part, each part where one tile makes it.

::

    t1[0, row, column] = value            t1[0, row, column] = value
                                   →      t1_parts[row // 64, column // 64, row % 64, column % 64] = value

Legal where each tile touches the elements of one part alone (:class:`souffle.kernel.tile_layouts.TileLayout`): the same
elements are touched, elsewhere. The stage's definition is changed with it: the parts are what the tensor's elements are
at their places, and a tensor that is read in parts is what they say. Whether the statements do that is for the
certificate to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import s_tir, te, tirx
from tvm.ir.expr import TensorLoad

from souffle.decision import Refused
from souffle.kernel.tile_layouts import TileLayout
from souffle.program import ExternTE, Tensor
from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.stage import Stage, StageDraft
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import (
    Analyzer,
    PrimExpr,
    collect,
    only_calculates,
    primfunc_from_tensors,
    sequence,
    structural_digest,
    substitute,
)

__all__ = ["Relaid", "in_parts"]


@dataclass(frozen=True, eq=False)
class Relaid:
    """A tensor that a stage touches in parts.

    Attributes
    ----------
    tensor : Tensor
        Of the stage's inputs or outputs.
    parts : Tensor
        Its elements part by part.
    layout : TileLayout
    whole : bool
        Whether the stage goes on writing the tensor itself too; only of an output.
    """

    tensor: Tensor
    parts: Tensor
    layout: TileLayout
    whole: bool


def in_parts(stage: Stage, changes: Sequence[Relaid]) -> Stage | Refused:
    """A stage that touches some tensors in parts, without functions; or why it cannot be written.

    What is also written as a whole has its parts as further outputs, in the order given; other parts take its place.
    """
    if isinstance(stage.tes[0], ExternTE):
        return Refused(f"{stage.name} is no TE")
    schedule = _schedule(stage, changes)
    if isinstance(schedule, Refused):
        return schedule
    return replace(stage, draft=_draft(stage, changes), schedule=schedule, functions=(), parts=())


# What the stage is to compute


def _draft(stage: Stage, changes: Sequence[Relaid]) -> StageDraft:
    of = {change.tensor: change for change in changes}
    instead = {t: of[t].parts for t in of if not of[t].whole}
    inputs, outputs = (tuple(instead.get(t, t) for t in ts) for ts in (stage.inputs, stage.outputs))
    outputs = (*outputs, *(change.parts for change in changes if change.whole))
    given = {t: te.placeholder(t.shape, t.dtype, name=f"in{i}") for i, t in enumerate(inputs)}
    values: dict[Tensor, te.Tensor] = {}
    for tensor in stage.inputs:
        own = given[instead.get(tensor, tensor)]
        values[tensor] = _whole(own, of[tensor].layout, tensor) if tensor in of else own
    for index, te_ in enumerate(stage.tes):
        values.update(zip(te_.outputs, te_.on([values[t] for t in te_.inputs], name=f"t{index}"), strict=True))
    made = dict(values)
    for change in changes:
        if change.tensor in stage.outputs:
            made[change.parts] = _in_parts(values[change.tensor], change.layout, change.parts)
    func = primfunc_from_tensors([*(given[t] for t in inputs), *(made[t] for t in outputs)], "stage")
    return StageDraft(stage.tes, inputs, outputs, func, structural_digest(func))


def _whole(parts: te.Tensor, layout: TileLayout, tensor: Tensor) -> te.Tensor:
    """A tensor from its parts."""
    return te.compute(tensor.shape, lambda *at: parts[_place(layout, at)], name=f"{parts.op.name}_whole")


def _in_parts(whole: te.Tensor, layout: TileLayout, parts: Tensor) -> te.Tensor:
    """The parts of a tensor."""
    count = len(layout.order)

    def element(*at: PrimExpr) -> PrimExpr:
        index = list(at[count:])
        for number, dimension in zip(at[:count], layout.order, strict=True):
            index[dimension] = number * layout.part[dimension] + index[dimension]
        return whole[tuple(index)]

    if layout.plain:
        return te.compute(parts.shape, lambda *at: whole[at], name=f"{whole.op.name}_parts")
    return te.compute(parts.shape, element, name=f"{whole.op.name}_parts")


def _place(layout: TileLayout, at: Sequence[PrimExpr]) -> tuple[PrimExpr, ...]:
    """Where an element of a tensor is among its parts."""
    if layout.plain:
        return tuple(at)
    numbers = (tirx.floordiv(at[d], layout.part[d]) for d in layout.order)
    inside = (
        i if own == extent else tirx.floormod(i, own)
        for i, own, extent in zip(at, layout.part, layout.shape, strict=True)
    )
    return (*numbers, *inside)


# How its tiles do it


def _schedule(stage: Stage, changes: Sequence[Relaid]) -> GpuSchedule | Refused:
    schedule: GpuSchedule = stage.schedule
    function, tensors = schedule.func, (*stage.inputs, *stage.outputs)
    places = {tensors.index(change.tensor): change for change in changes}
    params = list(function.params)
    own = {
        position: tirx.decl_buffer(change.parts.shape, params[position].dtype, f"{params[position].name}_parts")
        for position, change in places.items()
    }
    writer = _Writer(function, [(params[p], own[p], places[p].layout, places[p].whole) for p in places])
    body = writer.body()
    if isinstance(body, Refused):
        return Refused(f"{stage.name}: {body.reason}")
    kept = [own[i] if i in own and not places[i].whole else param for i, param in enumerate(params)]
    kept += [own[tensors.index(change.tensor)] for change in changes if change.whole]
    return replace(schedule, func=tirx.PrimFunc(kept, body, function.ret_type, function.attrs, function.span))


class _Writer:
    """Writes the statements of a schedule with some buffers in parts."""

    def __init__(self, function: tirx.PrimFunc, changed: Sequence[tuple[tirx.Var, tirx.Var, TileLayout, bool]]) -> None:
        self.function = function
        self.changed = changed
        self.analyzer = Analyzer()
        self.names = {bind.var: bind.value for bind in collect(function.body, tirx.Bind) if only_calculates(bind.value)}
        for loop in collect(function.body, tirx.For):
            if isinstance(loop.min, tirx.IntImm) and isinstance(loop.extent, tirx.IntImm):
                self.analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))

    def body(self) -> tirx.Stmt | Refused:
        """All of them."""
        for old, _, _, _ in self.changed:
            if self._handed_on(old):
                return Refused(f"{old.name} is handed on by its address")
        steps = [(TensorLoad, self._load), (tirx.BufferStore, self._store), (tirx.SeqStmt, self._sequence)]
        return structural_map(self.function.body, [*steps, (s_tir.SBlock, self._block)])

    def _handed_on(self, old: tirx.Var) -> bool:
        """Whether it is touched otherwise than element by element."""
        calls = collect(self.function.body, tvm.ir.Call)
        taken = [call.args[0] for call in calls if str(getattr(call.op, "name", "")) == "tirx.address_of"]
        matched = [m.source.buffer for block in collect(self.function.body, s_tir.SBlock) for m in block.match_buffers]
        named = [buffer for buffer in matched if buffer.same_as(old)]
        return bool(named) or any(isinstance(at, TensorLoad) and at.source.same_as(old) for at in taken)

    def _change(self, buffer: tirx.Var) -> tuple[tirx.Var, tirx.Var, TileLayout, bool] | None:
        return next((change for change in self.changed if change[0].same_as(buffer)), None)

    def _indices(self, layout: TileLayout, indices: Sequence[PrimExpr]) -> list[PrimExpr]:
        if layout.plain:
            return list(indices)
        return [self.analyzer.simplify(index) for index in _place(layout, [self._spelled_out(i) for i in indices])]

    def _spelled_out(self, index: PrimExpr) -> PrimExpr:
        """An index without names, whose values say what it can be."""
        for _ in range(_MOST_NESTED):
            used = [v for v in collect(index, tirx.Var) if v in self.names]
            if not used:
                break
            index = substitute(index, {v: self.names[v] for v in used})
        return index

    def _load(self, node: TensorLoad) -> PrimExpr:
        change = self._change(node.source)
        if change is None or change[3]:
            return node
        return tirx.BufferLoad(change[1], self._indices(change[2], list(node.indices)))

    def _store(self, node: tirx.BufferStore) -> tirx.Stmt:
        change = self._change(node.buffer)
        if change is None:
            return node
        _, parts, layout, whole = change
        part = tirx.BufferStore(parts, node.value, self._indices(layout, list(node.indices)))
        return sequence(node, part) if whole else part

    def _sequence(self, node: tirx.SeqStmt) -> tirx.Stmt:
        return sequence(*node.seq)

    def _block(self, node: s_tir.SBlock) -> s_tir.SBlock:
        regions = [self._regions(list(some)) for some in (node.reads, node.writes)]
        return s_tir.SBlock(
            list(node.iter_vars),
            *regions,
            node.name_hint,
            node.body,
            node.init,
            list(node.alloc_buffers),
            list(node.match_buffers),
            node.annotations,
        )

    def _regions(self, some: Sequence[tirx.BufferRegion]) -> list[tirx.BufferRegion]:
        """What a block says that it touches: of what is in parts, all of it."""
        found: list[tirx.BufferRegion] = []
        for region in some:
            change = self._change(region.source)
            if change is None or change[3]:
                found.append(region)
            if change is not None:
                whole = [tvm.ir.Range.from_min_extent(0, extent) for extent in change[1].shape]
                found.append(tirx.BufferRegion(change[1], whole))
        return found


_MOST_NESTED = 16
"""Names in the values of names."""
