"""Horizontal transformation: independent isomorphic TEs become one TE with a leading axis (paper §6.1, Figure 3).

::

    O_0[v] = e(A, W_0, v)
    ...                         →   O[g, v] = e(A, W[g], v),   W = stack(W_0 ... W_n-1)
    O_n-1[v] = e(A, W_n-1, v)

Legal because TEs at the same depth of the dependence graph cannot depend on each other, and ``O[g]`` is computed by
the expression of ``O_g``. Operands that are constants are packed at compile time; operands that are slices of one
earlier result are read with an index that is affine in ``g``; the rest is selected by ``g``, uniformly over a tile.

Worth it where kernels become fewer, or as many: see :mod:`souffle.transform.operators`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from souffle.decision import Decision
from souffle.program import TE, ExternTE, Tensor, TEProgram, make_te
from souffle.transform.handles import Handles, read
from souffle.transform.operators import costly_merges, operator_shape
from souffle.transform.vertical import simplified
from souffle.tvm_compat import (
    PrimExpr,
    dtype_of,
    fresh_axis,
    load_indices,
    load_tensor,
    map_bodies,
    map_constants,
    map_loads,
    structural_digest,
    substitute,
)

__all__ = ["horizontal"]

_MOST_RUNS = 8
"""Selections in a merged operand; more would cost the inner loop more than a kernel launch does."""


@dataclass(frozen=True)
class _Operand:
    """One load of a body.

    Attributes
    ----------
    tensor : Tensor
        What it reads.
    slots : tuple of Var
        Variables in the place of the integers in its indices.
    values : tuple of int
        Those integers.
    """

    tensor: Tensor
    slots: tuple[tirx.Var, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class _Skeleton:
    """A TE whose loads are taken apart, in the order of the text. TEs with equal keys differ in the operands only."""

    te: TE
    bodies: tuple[PrimExpr, ...]
    operands: tuple[_Operand, ...]
    key: str


_Run = tuple[Tensor, range]
"""Consecutive members of a group that read one tensor, at indices that are affine in the member's number."""


def horizontal(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Merge independent isomorphic TEs.

    Parameters
    ----------
    program : TEProgram

    Returns
    -------
    program : TEProgram
        The same object where nothing could be merged.
    decisions : tuple of Decision
        One for each group merged, and for each that was not.
    """
    within: dict[TE | ExternTE, Hashable] = {}
    refused: dict[tuple[TE, ...], Decision] = {}
    shapes = operator_shape(program)
    while True:
        attempt = _Horizontal(program, within, refused)
        result, decisions = attempt.run()
        costly = costly_merges(program, attempt.merges)
        if not costly:
            return result, (*refused.values(), *decisions)
        for members, reason in costly:
            refused[members] = Decision("horizontal", ", ".join(m.name for m in members), False, reason)
            within.update((member, shapes[member]) for member in members)


class _Horizontal:
    """One attempt: TEs of `within` are merged with those of equal operators only, and what `refused` holds is not."""

    def __init__(
        self,
        program: TEProgram,
        within: Mapping[TE | ExternTE, Hashable],
        refused: Mapping[tuple[TE, ...], Decision],
    ) -> None:
        self.program = program
        self.within = within
        self.refused = refused
        self.decisions: list[Decision] = []
        self.merges: list[tuple[TE, ...]] = []
        self.packed: dict[Tensor, np.ndarray] = {}
        self.packs: dict[tuple[Tensor, ...], Tensor] = {}
        self.moved: dict[Tensor, tuple[Tensor, int]] = {}
        self.names = {tensor.name for tensor in program.tensors()}

    def run(self) -> tuple[TEProgram, tuple[Decision, ...]]:
        result: list[TE | ExternTE] = []
        for level in _levels(self.program):
            current = [self._follow(te_) for te_ in level]
            groups: dict[tuple[str, Hashable], list[_Skeleton]] = {}
            for original, te_ in zip(level, current, strict=True):
                if self._may_merge(te_):
                    skeleton = _skeleton(te_)
                    groups.setdefault((skeleton.key, self.within.get(original)), []).append(skeleton)
            merged: set[TE | ExternTE] = set()
            for members in groups.values():
                if len(members) > 1 and self._merge(members, result):
                    merged.update(m.te for m in members)
            result.extend(te_ for te_ in current if te_ not in merged)
        if not self.moved:
            return self.program, tuple(self.decisions)
        windows = self._windows()
        result = [_through_windows(te_, windows) for te_ in result]
        return self.program.with_tes(result, constants=self.packed), tuple(self.decisions)

    def _may_merge(self, te_: TE | ExternTE) -> bool:
        return (
            isinstance(te_, TE)
            and len(te_.outputs) == 1
            and te_.output not in self.program.outputs
            and bool(te_.inputs)
            and not any(isinstance(c, ExternTE) for c in self.program.consumers[te_.output])
        )

    def _follow(self, te_: TE | ExternTE) -> TE | ExternTE:
        """`te_` reading merged results in the place of those that were merged into them."""
        if not isinstance(te_, TE) or not any(t in self.moved for t in te_.inputs):
            return te_
        handles = Handles()
        bodies = handles.opened(te_)
        table = [(handles.of(t), handles.of(self.moved[t][0]), self.moved[t][1]) for t in te_.inputs if t in self.moved]

        def rewrite(load: PrimExpr) -> PrimExpr:
            for old, new, index in table:
                if load_tensor(load).same_as(old):
                    return read(new, [tirx.IntImm("int32", index), *load_indices(load)])
            return load

        rewritten = map_bodies(bodies, rewrite)
        return make_te(te_.name, te_.axes, rewritten, handles.pairs(), te_.origin, te_.outputs)

    def _constant(self, tensor: Tensor) -> np.ndarray | None:
        if tensor in self.packed:
            return self.packed[tensor]
        return self.program.constants.get(tensor)

    def _merge(self, members: list[_Skeleton], result: list[TE | ExternTE]) -> bool:
        first = members[0]
        subject = ", ".join(m.te.name for m in members)
        originals = tuple(self.program.producers[m.te.output] for m in members)
        if originals in self.refused:
            return False
        runs = [self._runs([m.operands[i] for m in members]) for i in range(len(first.operands))]
        shared = any(len(r) == 1 and self._constant(r[0][0]) is None for r in runs)
        selections = max((len(r) for r in runs), default=1)
        if selections > _MOST_RUNS:
            reason = f"an operand would be selected among {selections} tensors for each element"
        elif selections > 1 and not first.te.is_reduction:
            reason = "their operands are separate tensors, and an element-wise TE would spend more on selecting them"
        elif selections > 1 and not any(len(r) == 1 for r in runs):
            reason = "they share no operand and none is constant"
        else:
            reason = ""
        if reason:
            self.decisions.append(Decision("horizontal", subject, False, reason))
            return False
        merged = self._merged_te(members, runs)
        result.append(merged)
        self.merges.append(originals)
        for index, member in enumerate(members):
            self.moved[member.te.output] = (merged.output, index)
        what = "share an operand" if shared else "have packed or sliced operands"
        self.decisions.append(
            Decision("horizontal", subject, True, f"{len(members)} independent TEs of one shape {what}: {merged.name}")
        )
        return True

    def _runs(self, column: Sequence[_Operand]) -> list[_Run]:
        """Maximal runs of one operand over the members; distinct constants are packed and make one run."""
        tensors = tuple(o.tensor for o in column)
        if len(set(tensors)) > 1 and all(self._constant(t) is not None for t in tensors) and _affine(column):
            return [(self._pack(tensors), range(len(column)))]
        runs: list[_Run] = []
        for number, operand in enumerate(column):
            if runs and runs[-1][0] is operand.tensor and _affine(column[runs[-1][1].start : number + 1]):
                runs[-1] = (operand.tensor, range(runs[-1][1].start, number + 1))
            else:
                runs.append((operand.tensor, range(number, number + 1)))
        return runs

    def _merged_te(self, members: list[_Skeleton], runs: list[list[_Run]]) -> TE:
        first = members[0]
        group = fresh_axis(len(members), "g")
        handles = Handles()
        position = -1

        def rewrite(load: PrimExpr) -> PrimExpr:
            nonlocal position
            position += 1
            column = [m.operands[position] for m in members]
            choice = None
            for tensor, run in reversed(runs[position]):
                indices = _fill(load_indices(load), column, run, group.var)
                if all(operand.tensor is not tensor for operand in column):
                    indices = [group.var, *indices]  # a pack of the members' constants
                here = read(handles.of(tensor), indices)
                choice = here if choice is None else tirx.if_then_else(group.var < run.stop, here, choice)
            return choice

        rewritten = map_bodies(first.bodies, rewrite)
        origin = first.te.origin.merged(*(m.te.origin for m in members[1:]))
        name = self._fresh(f"{first.te.name}_x{len(members)}")
        merged = make_te(name, [group, *first.te.axes], rewritten, handles.pairs(), origin)
        tidy = simplified(merged.op.body, merged)
        reads = list(zip(merged.placeholders, merged.inputs, strict=True))
        return make_te(name, merged.axes, tidy, reads, origin, merged.outputs)

    def _pack(self, column: tuple[Tensor, ...]) -> Tensor:
        """The constants of a column as one, stacked along a new first axis; the same column is packed once."""
        if column not in self.packs:
            array = np.stack([self._constant(t) for t in column])
            packed = Tensor(self._fresh(f"{column[0].name}_x{len(column)}"), array.shape, column[0].dtype)
            self.packs[column] = packed
            self.packed[packed] = array
        return self.packs[column]

    def _windows(self) -> dict[Tensor, tuple[Tensor, int]]:
        """Packs that are a window of a longer one, and where it starts: each weight is kept once, whatever reads it.

        The cells on the wavefronts of an LSTM need the weights of layers 0 to 1, 0 to 2, 1 to 3, and so on. Packs that
        overlap by at least half are laid over each other.
        """
        wholes: list[tuple[Tensor, ...]] = []
        for column in sorted(self.packs, key=len, reverse=True):
            for number, whole in enumerate(wholes):
                joined = _overlaid(whole, column)
                if joined is not None:
                    wholes[number] = joined
                    break
            else:
                wholes.append(column)
        found: dict[Tensor, tuple[Tensor, int]] = {}
        for column, packed in list(self.packs.items()):
            starts = ((whole, _start(whole, column)) for whole in wholes)
            whole, start = next((whole, start) for whole, start in starts if start is not None)
            if whole != column:
                found[packed] = (self._pack(whole), start)
        return found

    def _fresh(self, name: str) -> str:
        candidate, number = name, 1
        while candidate in self.names:
            candidate, number = f"{name}_{number}", number + 1
        self.names.add(candidate)
        return candidate


def _start(whole: tuple[Tensor, ...], column: tuple[Tensor, ...]) -> int | None:
    """Where `column` stands in `whole` without a gap."""
    starts = range(len(whole) - len(column) + 1)
    return next((i for i in starts if whole[i : i + len(column)] == column), None)


def _overlaid(whole: tuple[Tensor, ...], column: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The shortest sequence that holds both, if at least half of `column` lies in `whole` or at one of its ends."""
    if _start(whole, column) is not None:
        return whole
    for common in range(len(column) - 1, (len(column) - 1) // 2, -1):
        if whole[-common:] == column[:common]:
            return whole + column[common:]
        if whole[:common] == column[-common:]:
            return column[:-common] + whole
    return None


def _through_windows(te_: TE | ExternTE, windows: Mapping[Tensor, tuple[Tensor, int]]) -> TE | ExternTE:
    """`te_` reading the larger pack in the place of its window."""
    if not isinstance(te_, TE) or not any(t in windows for t in te_.inputs):
        return te_
    handles = Handles()
    bodies = handles.opened(te_)
    table = [(handles.of(t), handles.of(windows[t][0]), windows[t][1]) for t in te_.inputs if t in windows]

    def rewrite(load: PrimExpr) -> PrimExpr:
        for window, whole, start in table:
            if load_tensor(load).same_as(window):
                first, *others = load_indices(load)
                return read(whole, [first + start, *others])
        return load

    return make_te(te_.name, te_.axes, map_bodies(bodies, rewrite), handles.pairs(), te_.origin, te_.outputs)


def _levels(program: TEProgram) -> list[list[TE | ExternTE]]:
    """TEs by their depth in the dependence graph; those of one depth are independent."""
    depth: dict[TE | ExternTE, int] = {}
    levels: list[list[TE | ExternTE]] = []
    for te_ in program.tes:
        before = [depth[program.producers[t]] for t in te_.inputs if t in program.producers]
        depth[te_] = max(before, default=-1) + 1
        while len(levels) <= depth[te_]:
            levels.append([])
        levels[depth[te_]].append(te_)
    return levels


def _skeleton(te_: TE) -> _Skeleton:
    operands: list[_Operand] = []

    def rewrite(load: PrimExpr) -> PrimExpr:
        slots: list[tirx.Var] = []
        values: list[int] = []

        def take(value: int, dtype: str) -> tirx.Var:
            slots.append(tirx.Var(f"c{len(operands)}_{len(slots)}", dtype))
            values.append(value)
            return slots[-1]

        # Every index has a constant term, so that a slice from 0 is like those that follow it.
        parts = [_without_offset(index) for index in load_indices(load)]
        indices = [map_constants(rest, take) + take(offset, dtype_of(rest)) for rest, offset in parts]
        operands.append(_Operand(te_.input_of(load_tensor(load)), tuple(slots), tuple(values)))
        return read(load_tensor(load), indices)

    bodies = tuple(map_bodies(te_.op.body, rewrite))
    tensors = [o.tensor for o in operands]
    shapes = [(te_.output.shape, te_.output.dtype, te_.reduction_shape), *((t.shape, t.dtype) for t in tensors)]
    variables = [axis.var for axis in te_.axes] + [slot for o in operands for slot in o.slots]
    digest = structural_digest([*variables, *(map_loads(body, _anonymous) for body in bodies)])
    return _Skeleton(te_, bodies, tuple(operands), f"{digest}:{shapes}:{[tensors.index(t) for t in tensors]}")


def _without_offset(index: PrimExpr) -> tuple[PrimExpr, int]:
    """An index as the sum of an expression and a constant."""
    if isinstance(index, tirx.IntImm):
        return tirx.IntImm(dtype_of(index), 0), int(index.value)
    if isinstance(index, tirx.Add) and isinstance(index.b, tirx.IntImm):
        return index.a, int(index.b.value)
    return index, 0


def _anonymous(load: PrimExpr) -> PrimExpr:
    """A load without its tensor, which TVM cannot hash; the key holds the tensors' shapes beside it."""
    return tirx.call_pure_extern(str(load_tensor(load).dtype), "operand", *load_indices(load))


def _affine(column: Sequence[_Operand]) -> bool:
    """Whether every integer of the loads is affine in the member's number."""
    for values in zip(*(o.values for o in column), strict=True):
        if len({after - before for before, after in itertools.pairwise(values)}) > 1:
            return False
    return True


def _fill(
    indices: Sequence[PrimExpr], column: Sequence[_Operand], run: range, group: tirx.Var
) -> list[PrimExpr]:
    """The load's indices for the members of `run`: each slot is a constant, or affine in `group`."""
    mapping: dict[tirx.Var, PrimExpr] = {}
    for number, slot in enumerate(column[0].slots):
        start = column[run.start].values[number]
        step = column[run.start + 1].values[number] - start if len(run) > 1 else 0
        mapping[slot] = (group - run.start) * step + start if step else tirx.IntImm(dtype_of(slot), start)
    return [substitute(index, mapping) for index in indices]
