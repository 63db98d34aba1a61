"""Numbers that differ from step to step, which keep equal pieces of a program from being steps of a loop.

A recurrence over padded sequences asks ``lengths[b] > t`` in step `t`: the steps are equal but for a number that stands
in their text. In the place of such a number goes an element of a constant, of which a loop has one for each step, as it
has of other constants. A number that no loop has one by step of is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Call

from souffle.program import TE, FusedTE, Item, Loop, Tensor, TEProgram, make_te, parts_of, with_parts
from souffle.program.names import NameSupply
from souffle.transform.handles import Handles, read
from souffle.transform.roll.repetition import Signature, signature
from souffle.tvm_calls import structural_mutate
from souffle.tvm_compat import PrimExpr, dtype_of, is_load, load_tensor, loads, map_loads

__all__ = ["StepNumbers", "signature_of_step", "with_step_numbers"]

_TWO_SIDED = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max),
    *(tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
)
_LITERALS = (tirx.IntImm, tirx.FloatImm)
_TYPES = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    *("float16", "float32", "float64"),
}

_ANY = {dtype: Tensor("number", (1,), dtype) for dtype in _TYPES}

Literal = Any
"""An ``IntImm`` or a ``FloatImm``."""
_Text = tuple[str, str]


@dataclass(frozen=True, eq=False)
class StepNumbers:
    """A program in which some numbers are elements of constants.

    Attributes
    ----------
    program : TEProgram
    before : dict of Item to Item
        What each changed item was.
    literals : dict of Tensor to literal
        The number that each of these constants holds.
    """

    program: TEProgram
    before: dict[Item, Item]
    literals: dict[Tensor, Literal]

    def put_back(self, program: TEProgram) -> TEProgram:
        """`program`, made of this one, with the numbers that are no loop's one by step as they were."""
        if not self.before:
            return program
        return program.with_tes([self._with_numbers(item) for item in program.tes])

    def _with_numbers(self, item: Item) -> Item:
        if item in self.before:
            return self.before[item]
        if isinstance(item, Loop):
            return item.with_body(tuple(self._with_numbers(one) for one in item.body))
        if not isinstance(item, TE | FusedTE) or self.literals.keys().isdisjoint(item.inputs):
            return item
        return with_parts(item, [self._part(part) for part in parts_of(item)])

    def _part(self, part: TE) -> TE:
        if self.literals.keys().isdisjoint(part.inputs):
            return part
        handles = Handles()
        known = {handles.of(tensor).op: self.literals[tensor] for tensor in part.inputs if tensor in self.literals}

        def literal(load: PrimExpr) -> PrimExpr:
            return known.get(load_tensor(load).op, load)

        return _made(part, [map_loads(body, literal) for body in handles.opened(part)], handles)


def with_step_numbers(program: TEProgram, fewest: int) -> StepNumbers:
    """Put elements of constants in the place of numbers in which items differ that are equal otherwise.

    Numbers are looked for where they are one side of an operation whose other side is data: what says where something
    is read, or for which elements of an axis something holds, stays text.

    Parameters
    ----------
    program : TEProgram
    fewest : int
        So many items have to be equal.
    """
    names = NameSupply(named.name for named in (*program.tensors(), *program.tes))
    constants: dict[_Text, Tensor] = {}
    literals: dict[Tensor, Literal] = {}

    def constant(literal: Literal) -> Tensor:
        text = _text(literal)
        if text not in constants:
            constants[text] = Tensor(names.fresh("number"), (1,), dtype_of(literal))
            literals[constants[text]] = literal
        return constants[text]

    before: dict[Item, Item] = {}
    for group in _differing(program.tes, fewest):
        texts = [[_text(one) for one in _numbers(item)] for item in group]
        wanted = {place for place, column in enumerate(zip(*texts, strict=True)) if len(set(column)) > 1}

        def element(place: int, one: Literal, wanted: Container[int] = wanted) -> Tensor | None:
            return constant(one) if place in wanted else None

        before |= {_lifted(item, element): item for item in group}
    if not before:
        return StepNumbers(program, {}, {})
    after = {item: made for made, item in before.items()}
    arrays = {tensor: np.array([literal.value], tensor.dtype) for tensor, literal in literals.items()}
    lifted = program.with_tes([after.get(item, item) for item in program.tes], constants=arrays)
    return StepNumbers(lifted, before, literals)


def signature_of_step(item: TE | FusedTE) -> Signature:
    """Equal for items that differ in the tensors, the offsets and the numbers that they read only."""
    return signature(_lifted(item, lambda _, literal: _ANY[dtype_of(literal)]) if _numbers(item) else item)


def _text(literal: Literal) -> _Text:
    """A number's type and value, where zeros of both signs are two, and all NaN are one."""
    return dtype_of(literal), repr(literal.value)


def _differing(items: Sequence[Item], fewest: int) -> Iterator[list[TE | FusedTE]]:
    """Groups of items that differ in numbers, in what they read and in where alone."""
    several: dict[tuple, list[TE | FusedTE]] = {}
    for item in items:
        if isinstance(item, TE | FusedTE) and (count := len(_numbers(item))):
            shapes = tuple(tuple((t.shape, t.dtype) for t in (*part.inputs, *part.outputs)) for part in parts_of(item))
            several.setdefault((count, shapes), []).append(item)
    for alike in several.values():
        if len(alike) < fewest or len({signature(item) for item in alike}) == 1:
            continue
        equal: dict[tuple, list[TE | FusedTE]] = {}
        for item in alike:
            equal.setdefault(signature_of_step(item), []).append(item)
        for group in equal.values():
            if len(group) >= fewest and len({signature(item) for item in group}) > 1:
                yield group


def _numbers(item: TE | FusedTE) -> list[Literal]:
    """The numbers of an item that stand beside data, in the order of its text."""
    found: list[Literal] = []
    for part in parts_of(item):
        if not part.is_reduction:
            for body in part.op.body:
                _map_numbers(body, found.append)
    return found


def _lifted(item: TE | FusedTE, constant: Callable[[int, Literal], Tensor | None]) -> TE | FusedTE:
    """An item with elements of constants in the place of numbers: of those for which `constant` has one."""
    places = iter(range(len(_numbers(item))))
    parts = []
    for part in parts_of(item):
        if part.is_reduction:
            parts.append(part)
            continue
        handles = Handles()

        def element(literal: Literal, handles: Handles = handles) -> PrimExpr | None:
            tensor = constant(next(places), literal)
            return None if tensor is None else read(handles.of(tensor), [tirx.IntImm("int32", 0)])

        parts.append(_made(part, [_map_numbers(body, element) for body in handles.opened(part)], handles))
    return with_parts(item, parts)


def _map_numbers(expression: PrimExpr, rewrite: Callable[[Literal], PrimExpr | None]) -> PrimExpr:
    """Ask for what goes in the place of each number that stands beside data; ``None`` for itself."""

    def call(node: Call, mutator: Any) -> PrimExpr:
        return node if is_load(node) else mutator.default_mutate(node)

    def operation(node: Any, mutator: Any) -> PrimExpr:
        node = mutator.default_mutate(node)
        left, right = node.a, node.b
        if _is_number(right) and loads(left):
            made = rewrite(right)
            return node if made is None else type(node)(left, made)
        if _is_number(left) and loads(right):
            made = rewrite(left)
            return node if made is None else type(node)(made, right)
        return node

    return structural_mutate(expression, [(Call, call), (_TWO_SIDED, operation)])


def _is_number(node: Any) -> bool:
    return isinstance(node, _LITERALS) and dtype_of(node) in _TYPES


def _made(part: TE, bodies: Iterable[PrimExpr], handles: Handles) -> TE:
    made = make_te(part.name, part.axes, list(bodies), handles.pairs(), part.origin, part.outputs)
    return made.placed(part.placement)
