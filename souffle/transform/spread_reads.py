"""Reads at varying multiples of a small axis become choices by that axis, so that steps of a recurrence are equal.

::

    y_t[i, k] = f(x[i * (n - 4t) + 2t, k])    →    y_t[i, k] = f(x[2t, k] if i < 1 else x[n - 2t, k])      0 ≤ i < 2

Legal because an element reads what it read: where the axis has the value ``v``, the side that is evaluated is the old
expression with ``v`` in the place of the axis. The sides that are not chosen are not evaluated, so nothing is read that
was not read.

The directions of a recurrent layer, computed by one TE, move apart by more in each step; the multiple of their axis is
how far. The sides of the choice differ from step to step in constant terms alone, as the steps of a loop may
(:mod:`souffle.transform.roll`). Worth it, and done, only where three items or more become equal that were not, and only
for what differs between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tvm import tirx

from souffle.alone import one_at_a_time
from souffle.decision import Decision
from souffle.program import TE, FusedTE, Item, TEProgram, fuse, make_te, parts_of
from souffle.program.shared import OncePer
from souffle.transform.handles import read
from souffle.transform.roll.repetition import Signature, form_of, signature
from souffle.transform.roll.roll import FEWEST_STEPS
from souffle.tvm_compat import (
    PrimExpr,
    bounded_analyzer,
    choice_like,
    choice_parts,
    const_int,
    dtype_of,
    is_choice,
    is_load,
    load_indices,
    load_tensor,
    loads,
    map_loads,
    map_outermost,
    reduce_node,
    simplified_index,
    substitute,
    variables,
)

__all__ = ["spread_reads"]

_MOST_VALUES = 4
"""Elements of an axis that a choice is made by: directions, heads; each is one more read in the text."""

_Key = tuple
"""What an expression of a TE is, but for constant terms of indices."""


@dataclass(frozen=True)
class _Spread:
    """A TE with choices by one axis.

    Attributes
    ----------
    te : TE
        The one that was looked at first; of those that share its expression others have other inputs.
    sources : tuple of int
        The inputs of that TE that `te` reads.
    forms : mapping
        By what each choice is, and its number among those that are alike: what it was before.
    """

    te: TE
    sources: tuple[int, ...]
    forms: Mapping[_Key, _Key]


@one_at_a_time
def spread_reads(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Make items equal that differ in the multiples of a small axis at which they read.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet.

    Returns
    -------
    program : TEProgram
        The same object where no items become equal.
    decisions : tuple of Decision
        One for each group of items that do.
    """
    decisions: list[Decision] = []
    for axis in range(max((len(t.shape) for item in program.tes for t in item.outputs), default=0)):
        made: dict[Item, Item] = {}
        for group in _alike(program.tes, axis):
            made |= _made_equal(group, axis, decisions)
        if made:
            program = program.with_tes(made.get(item, item) for item in program.tes)
    return program, tuple(decisions)


def _made_equal(group: list[TE | FusedTE], axis: int, decisions: list[Decision]) -> dict[Item, Item]:
    """Items that are alike with choices in the place of what differs between them, where that makes them equal."""
    forms: dict[_Key, set[_Key]] = {}
    for item in group:
        for spread in _spreads(item, axis):
            for key, before in spread.forms.items():
                forms.setdefault(key, set()).add(before)
    differing = frozenset(key for key, before in forms.items() if len(before) > 1)
    equal: dict[Signature, dict[Item, Item]] = {}
    for item in group:
        rewritten = _rewritten(item, axis, differing)
        equal.setdefault(signature(rewritten), {})[item] = rewritten
    made: dict[Item, Item] = {}
    for items in equal.values():
        different = len({signature(item) for item in items})
        if len(items) >= FEWEST_STEPS and different > 1:
            made |= items
            first = next(iter(items))
            reason = f"{len(items)} TEs that were of {different} kinds are equal with reads chosen by axis {axis}"
            decisions.append(Decision("spread", first.name, True, reason))
    return made


def _alike(items: Iterable[Item], axis: int) -> Iterator[list[TE | FusedTE]]:
    """Groups of items that are different and would be equal if all that depends on an axis were choices by it."""
    for group in _groups(items, lambda item: _shapes(item, axis)):
        yield from _groups(group, lambda item: signature(_rewritten(item, axis)))


def _groups(items: Iterable[Item], key: Callable[[Item], tuple | None]) -> Iterator[list[TE | FusedTE]]:
    """Items of equal keys, where they are enough and different."""
    found: dict[tuple, list[TE | FusedTE]] = {}
    for item in items:
        known = key(item)
        if known is not None:
            found.setdefault(known, []).append(item)
    for group in found.values():
        if len(group) >= FEWEST_STEPS and len({signature(item) for item in group}) > 1:
            yield group


def _shapes(item: Item, axis: int) -> tuple | None:
    """The shapes of what an item reads and computes; ``None`` where no part has a small axis in that place."""
    if not isinstance(item, TE | FusedTE) or not any(_is_small(part, axis) for part in parts_of(item)):
        return None
    return tuple(tuple((t.shape, t.dtype) for t in (*part.inputs, *part.outputs)) for part in parts_of(item))


def _is_small(part: TE, axis: int) -> bool:
    shape = part.outputs[0].shape
    return axis < len(shape) and 1 < shape[axis] <= _MOST_VALUES


_spread_once: OncePer[_Spread] = OncePer()


def _spread(part: TE, axis: int, wanted: frozenset[_Key] | None = None) -> _Spread:
    """A TE with choices by an axis: all of them, or those that are wanted."""
    return _spread_once((part.op, axis, wanted), lambda: _Spreader(part, axis, wanted).spread())


def _spreads(item: TE | FusedTE, axis: int) -> Iterator[_Spread]:
    """The parts of an item with all choices by an axis."""
    return (_spread(part, axis) for part in parts_of(item) if _is_small(part, axis))


def _rewritten(item: TE | FusedTE, axis: int, wanted: frozenset[_Key] | None = None) -> TE | FusedTE:
    """An item with choices by an axis: all of them, or those that are wanted."""
    parts = [_chosen(part, axis, wanted) if _is_small(part, axis) else part for part in parts_of(item)]
    return fuse(parts, item.outputs) if isinstance(item, FusedTE) else parts[0]


def _chosen(part: TE, axis: int, wanted: frozenset[_Key] | None) -> TE:
    if wanted is not None and not wanted & _spread(part, axis).forms.keys():
        return part
    made = _spread(part, axis, wanted)
    inputs = tuple(part.inputs[number] for number in made.sources)
    return replace(part, op=made.te.op, placeholders=made.te.placeholders, inputs=inputs)


class _Spreader:
    def __init__(self, part: TE, axis: int, wanted: frozenset[_Key] | None) -> None:
        self.part, self.wanted = part, wanted
        self.var: tirx.Var = part.axes[axis].var
        self.extent = part.outputs[0].shape[axis]
        others = [other for number, other in enumerate(part.axes) if number != axis]
        self.analyzer = bounded_analyzer([*others, *part.reduce_axes])
        self.forms: dict[_Key, _Key] = {}
        self.seen: Counter[_Key] = Counter()

    def spread(self) -> _Spread:
        part = self.part
        reads = list(zip(part.placeholders, part.inputs, strict=True))
        made = make_te(part.name, part.axes, self.bodies(), reads, part.origin, part.outputs)
        sources = tuple(map(part.inputs.index, made.inputs))
        return _Spread(made, sources, self.forms)

    def bodies(self) -> list[PrimExpr]:
        whole = reduce_node(self.part.body)
        if whole is None:
            return [map_outermost(body, self.node) for body in self.part.op.body]
        sources = [map_outermost(source, self.node) for source in whole.source]
        first = tirx.Reduce(whole.combiner, sources, whole.axis, whole.condition, 0, whole.init)
        # The outputs of one reduction of tuples must share its sources.
        rest = [tirx.Reduce(first.combiner, first.source, first.axis, first.condition, number, first.init)
                for number in range(1, len(self.part.op.body))]  # fmt: skip
        return [first, *rest]

    def node(self, node: PrimExpr) -> PrimExpr:
        """A load or a choice of which none is around it.

        A load that does not depend on the axis may be one that does in other steps: its multiple is 0.
        """
        if is_choice(node):
            condition, then, other = choice_parts(node)
            if loads(condition) or not self.depends(condition):
                condition, then, other = (map_outermost(side, self.node) for side in (condition, then, other))
                return choice_like(node, condition, then, other)
        values = [self.at(node, value) for value in range(self.extent)]
        chosen = values[-1]
        for value in reversed(range(self.extent - 1)):
            below = self.var < tirx.const(value + 1, dtype_of(self.var))
            chosen = tirx.if_then_else(below, values[value], chosen)
        what = self.key(chosen)
        key = (*what, self.seen[what])
        self.seen[what] += 1
        self.forms[key] = self.key(node)
        return chosen if self.wanted is None or key in self.wanted else node

    def depends(self, expression: PrimExpr) -> bool:
        return any(variable.same_as(self.var) for variable in variables(expression))

    def key(self, expression: PrimExpr) -> _Key:
        digest, reads = form_of(self.part, [expression])
        return digest, tuple(position for position, _ in reads)

    def at(self, expression: PrimExpr, value: int) -> PrimExpr:
        """An expression where the axis has a value."""
        return self.tidied(substitute(expression, {self.var: tirx.const(value, dtype_of(self.var))}))

    def tidied(self, expression: PrimExpr) -> PrimExpr:
        """An expression without the sides of choices that are never chosen, its indices simplified."""
        return map_outermost(expression, self.tidy)

    def tidy(self, node: PrimExpr) -> PrimExpr:
        if is_load(node):
            return map_loads(node, self.tidy_load)
        condition, then, other = choice_parts(node)
        if loads(condition):
            return choice_like(node, *(self.tidied(side) for side in (condition, then, other)))
        condition = self.analyzer.simplify(condition)
        if isinstance(condition, tirx.IntImm):
            return self.tidied(then if const_int(condition) else other)
        return choice_like(node, condition, self.tidied(then), self.tidied(other))

    def tidy_load(self, load: PrimExpr) -> PrimExpr:
        indices = [simplified_index(index, self.analyzer) for index in load_indices(load)]
        return read(load_tensor(load), indices)
