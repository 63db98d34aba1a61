"""Evaluates a stage's definition, TensorIR that is not scheduled yet, for those elements that are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from souffle.tvm_compat import StatementVisitor, const_int, same_expression, statements_of
from souffle.verify.expressions import Undecided
from souffle.verify.values.field import Number
from souffle.verify.values.inputs import Values, elements_of
from souffle.verify.values.integers import in_type
from souffle.verify.values.points import Numbers
from souffle.verify.values.products import Factors, factors_of
from souffle.verify.values.scalars import Evaluator, Fault, Frame, Mask, Scalars, is_float
from souffle.verify.values.sightings import TextSightings

__all__ = ["DefinitionRun"]

_SMALL = 1 << 16
"""Terms of reductions that are not worth being put together as matrices."""

_CHUNK = 1 << 20
"""Terms of reductions that are worked out at once."""


@dataclass(frozen=True, eq=False)
class _Block:
    """One statement of the definition: it defines buffers, element by element.

    Attributes
    ----------
    number : int
    name : str
    spatial, reduction : tuple of (Var, int)
        Its variables with their extents.
    init : SBlock.init
    body : tirx.Stmt
    """

    number: int
    name: str
    spatial: tuple[tuple[Any, int], ...]
    reduction: tuple[tuple[Any, int], ...]
    init: Any
    body: Any


class _Known:
    """The elements of a buffer that were worked out."""

    def __init__(self, elements: int) -> None:
        self.values = np.zeros(elements, np.int64)
        self.known = np.zeros(elements, bool)


class DefinitionRun(StatementVisitor, Scalars):
    """A stage's definition with values for its inputs.

    Parameters
    ----------
    func : tirx.PrimFunc
        Blocks that each define buffers of their own; parameters are the inputs, then the outputs.
    inputs : mapping of Buffer to array
    numbers : Numbers
    sightings : dict of int to TextSightings
        By the numbers of blocks; one that is missing is put there.

    Raises
    ------
    Undecided
        If it is of another form.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        inputs: Mapping[Any, Values],
        numbers: Numbers,
        sightings: dict[int, TextSightings],
    ) -> None:
        super().__init__(numbers)
        self.sightings_of = sightings
        self.inputs = dict(inputs)
        self.blocks: dict[Any, _Block] = {}
        self._evaluators: dict[int, _BlockEvaluator] = {}
        self._known: dict[Any, _Known] = {}
        self.visit(func.body, {})

    # The blocks

    def visit_for(self, node: tirx.For, loops: dict[Any, int]) -> None:
        """A loop around blocks."""
        if not isinstance(node.min, tirx.IntImm) or int(node.min.value) or not isinstance(node.extent, tirx.IntImm):
            raise Undecided(f"the loop over {node.loop_var.name} of the definition")
        self.visit(node.body, {**loops, node.loop_var: int(node.extent.value)})

    def visit_other(self, node: Any, loops: dict[Any, int]) -> None:
        """Refused, attributes too."""
        raise Undecided(f"a statement of the kind {type(node).__name__} in the definition")

    visit_attr = visit_other

    def visit_block(self, node: s_tir.SBlockRealize, loops: dict[Any, int]) -> None:
        """A block with axes of its own, or all of them."""
        block = node.block
        if not block.iter_vars and not loops:
            self.visit(block.body, loops)
            return
        predicate = node.predicate
        if not (isinstance(predicate, tirx.IntImm) and int(predicate.value)) or len(block.match_buffers):
            raise Undecided(f"the block {block.name_hint} of the definition, which has conditions")
        left = dict(loops)
        spatial, reduction = [], []
        for axis, value in zip(block.iter_vars, node.iter_values):
            extent = const_int(axis.dom.extent)
            whole = isinstance(value, tirx.Var) and left.pop(value, None) == extent
            if not whole and not (isinstance(value, tirx.IntImm) and extent == 1 and int(value.value) == 0):
                raise Undecided(f"the block {block.name_hint} of the definition, whose loops are not its own")
            kind = spatial if axis.iter_type == tirx.IterVar.DataPar else reduction
            kind.append((axis.var, extent))
        if any(extent > 1 for extent in left.values()):
            raise Undecided(f"the block {block.name_hint} of the definition, which is repeated")
        known = _Block(len(self.blocks), str(block.name_hint), tuple(spatial), tuple(reduction), block.init, block.body)
        for store in _stores(block.body):
            if store.buffer in self.blocks:
                raise Undecided(f"the buffer {store.buffer.name}, which two blocks of the definition write")
            self.blocks[store.buffer] = known

    # Evaluation

    def elements(self, buffer: Any, places: np.ndarray) -> np.ndarray:
        """The elements of a buffer at some flat indices.

        Raises
        ------
        Undecided
        Fault
            If the definition itself reads beyond a tensor.
        """
        if buffer in self.inputs:
            return self.inputs[buffer][places]
        known = self._values(buffer)
        missing = np.zeros(len(known.known), bool)
        missing[places] = True
        missing &= ~known.known
        wanted = np.flatnonzero(missing)
        if len(wanted):
            block = self.blocks[buffer]
            if id(block) not in self._evaluators:
                self._evaluators[id(block)] = _BlockEvaluator(self, block)
            for start in range(0, len(wanted), _CHUNK):
                self._evaluators[id(block)].evaluate(wanted[start : start + _CHUNK])
                self.unsure |= self._evaluators[id(block)].unsure
        return known.values[places]

    def defined(self, buffer: Any, places: np.ndarray, values: np.ndarray) -> None:
        """Note elements that were worked out."""
        known = self._values(buffer)
        known.values[places] = values
        known.known[places] = True

    def _values(self, buffer: Any) -> _Known:
        if buffer not in self._known:
            if buffer not in self.blocks:
                raise Undecided(f"the buffer {buffer.name}, which nothing in the definition writes")
            self._known[buffer] = _Known(elements_of(buffer))
        return self._known[buffer]

    def load(self, node: TensorLoad) -> Evaluator:
        """An element of an input, or of what another block defines."""
        return self.at(node.source, [self.of(i) for i in node.indices])

    def at(self, buffer: Any, indices: Sequence[Evaluator]) -> Evaluator:
        """The element of a buffer at some indices."""
        extents = [const_int(e) for e in buffer.shape]

        def read(f: Frame, m: Mask) -> Number:
            flat: Number = 0
            for evaluate, extent in zip(indices, extents):
                index = evaluate(f, m)
                inside = 0 <= index < extent if isinstance(index, int) else (index >= 0) & (index < extent)
                if m is not None:
                    inside = inside | ~m
                if not np.all(inside):
                    raise Fault(f"the definition reads beyond the tensor {buffer.name}", 0)
                flat = flat * extent + index
            places = np.atleast_1d(np.asarray(flat))
            if m is not None:
                places = np.where(m, places, 0)
                if buffer not in self.inputs:
                    found = np.zeros(places.shape, np.int64)
                    chosen = np.broadcast_to(m, places.shape)
                    found[chosen] = self.elements(buffer, places[chosen])
                    return found
            return self.elements(buffer, places)

        return read


def _stores(body: Any) -> list[tirx.BufferStore]:
    stores = [part for part in statements_of(body) if not isinstance(part, tirx.Bind)]
    for part in stores:
        if not isinstance(part, tirx.BufferStore):
            raise Undecided(f"a statement of the kind {type(part).__name__} in a block of the definition")
    return stores


class _BlockEvaluator(Scalars):
    """One block, for many elements at once."""

    def __init__(self, definition: DefinitionRun, block: _Block) -> None:
        super().__init__(definition.numbers, definition.sightings_of.setdefault(block.number, TextSightings()).again())
        self.definition = definition
        self.block = block
        self.stores = _stores(block.body)
        self.spatial = [self.slot(var) for var, _ in block.spatial]
        self.reduction = [self.slot(var) for var, _ in block.reduction]
        first = self.stores[0]
        self.axes = self._axes(first)
        for store in self.stores[1:]:
            if self._axes(store) != self.axes:
                raise Undecided(f"the block {block.name} of the definition, whose statements have different indices")
        self.running: dict[Any, int] = {}
        if block.reduction:
            for number, store in enumerate(self.stores):
                self.running[store.buffer] = self.slot(("running", number))
        self.factors: Factors | None = None
        self.kind, self.term = self._combined()
        self.starts = {s.buffer: self.of(s.value) for s in _stores(block.init)} if block.init is not None else {}
        self.steps = [] if self.term is not None else self._sequence(block.body)

    def _axes(self, store: tirx.BufferStore) -> tuple[int | None, ...]:
        """Which spatial variable each index is; ``None`` for 0."""
        found: list[int | None] = []
        for index, extent in zip(store.indices, store.buffer.shape):
            number = next((i for i, (v, _) in enumerate(self.block.spatial) if v.same_as(index)), None)
            if number is None and not (isinstance(index, tirx.IntImm) and int(index.value) == 0):
                raise Undecided(f"the index {index} in the block {self.block.name} of the definition")
            if const_int(extent) != (1 if number is None else self.block.spatial[number][1]):
                raise Undecided(f"the block {self.block.name} of the definition, which defines a part of a buffer")
            found.append(number)
        longer = [i for i, (_, extent) in enumerate(self.block.spatial) if extent > 1]
        if sorted(i for i in found if i in longer) != longer:
            raise Undecided(f"the block {self.block.name} of the definition, which defines elements several times")
        return tuple(found)

    def load(self, node: TensorLoad) -> Evaluator:
        """What another block defines, or this one so far."""
        if node.source in self.running:
            slot = self.running[node.source]
            return lambda f, m: f[slot]
        return self.definition.at(node.source, [self.of(i) for i in node.indices])

    def _combined(self) -> tuple[type | None, Evaluator | None]:
        """The operator and the term of a reduction that takes its terms in any order."""
        if not self.block.reduction or len(self.stores) != 1 or not isinstance(self.block.body, tirx.BufferStore):
            return None, None
        store, value = self.stores[0], self.stores[0].value
        kind = type(value)
        if kind not in (tirx.Add, tirx.Max, tirx.Min, tirx.Mul):
            return None, None
        for own, term in ((value.a, value.b), (value.b, value.a)):
            same = isinstance(own, TensorLoad) and own.source.same_as(store.buffer)
            if same and all(same_expression(a, b) for a, b in zip(own.indices, store.indices)):
                if kind is tirx.Add and is_float(str(store.buffer.dtype)):
                    self.factors = factors_of(term, [v for v, _ in self.block.spatial], self.of)
                return kind, self.of(term)
        return None, None

    def _sequence(self, body: Any) -> list[tuple[int, Evaluator]]:
        """Assignments of variables and of elements, in order."""
        found = []
        for part in statements_of(body):
            if isinstance(part, tirx.Bind):
                value = self.of(part.value)
                self.name(part.var, part.value)
                found.append((self.slot(part.var), value))
            else:
                found.append((self.slot(("new", part.buffer)), self.of(part.value)))
        return found

    def evaluate(self, places: np.ndarray) -> None:
        """Work out the elements at some flat indices, and tell the definition."""
        shape = [const_int(e) for e in self.stores[0].buffer.shape]
        coordinates = np.unravel_index(places, shape) if shape else ()
        frame = self.frame() + [None] * 8
        for slot in self.spatial:
            frame[slot] = 0
        for number, values in zip(self.axes, coordinates):
            if number is not None:
                frame[self.spatial[number]] = np.asarray(values, np.int64)
        if not self.block.reduction:
            results = {}
            for slot, value in self.steps:
                frame[slot] = value(frame, None)
            for store in self.stores:
                results[store.buffer] = frame[self.slots["new", store.buffer]]
        else:
            results = self._reduce(frame, len(places))
        for store in self.stores:
            self.definition.defined(store.buffer, places, np.broadcast_to(results[store.buffer], places.shape))

    def _reduce(self, frame: Frame, count: int) -> dict[Any, Number]:
        extents = [extent for _, extent in self.block.reduction]
        turns = int(np.prod(extents, dtype=np.int64))
        totals = {s.buffer: self.starts[s.buffer](frame, None) for s in self.stores}
        if self.factors is not None and turns * count > _SMALL:
            spatial = [np.broadcast_to(frame[slot], (count,)) for slot in self.spatial]
            numbers = np.unravel_index(np.arange(turns), extents)
            sums = self.factors.sums(self.numbers, spatial, numbers, self.spatial, self.reduction, frame)
            if sums is not None:
                buffer = self.stores[0].buffer
                return {buffer: self.numbers.add(totals[buffer], sums)}
            for slot, values in zip(self.spatial, spatial):
                frame[slot] = values
        together = max(1, _CHUNK // count) if self.term is not None else 1
        for start in range(0, turns, together):
            numbers = np.arange(start, min(start + together, turns))
            for slot, values in zip(self.reduction, np.unravel_index(numbers, extents)):
                frame[slot] = np.asarray(values, np.int64)[:, None] if self.term is not None else int(values[0])
            if self.term is not None:
                buffer = self.stores[0].buffer
                terms = np.broadcast_to(self.term(frame, None), (len(numbers), count))
                totals[buffer] = _folded(self.kind, totals[buffer], terms, self.numbers, str(buffer.dtype))
                continue
            for store in self.stores:
                frame[self.running[store.buffer]] = totals[store.buffer]
            for slot, value in self.steps:
                frame[slot] = value(frame, None)
            totals = {s.buffer: frame[self.slots["new", s.buffer]] for s in self.stores}
        return totals


def _folded(kind: type, so_far: Number, terms: np.ndarray, numbers: Numbers, dtype: str) -> Number:
    """A reduction's terms, put to what it has."""
    if not is_float(dtype):
        operate = {tirx.Add: np.add, tirx.Mul: np.multiply, tirx.Max: np.maximum, tirx.Min: np.minimum}[kind]
        return in_type(dtype, operate)(so_far, operate.reduce(terms, axis=0))
    if kind is tirx.Add:
        return numbers.add(so_far, numbers.sum_of(terms))
    if kind is tirx.Mul:
        return numbers.multiply(so_far, numbers.product(terms))
    if numbers.sums:
        return numbers.joined(np.concatenate([np.broadcast_to(so_far, terms[:1].shape), terms]), kind is tirx.Max)
    ranks = numbers.ranks(terms)
    best = ranks.argmax(axis=0) if kind is tirx.Max else ranks.argmin(axis=0)
    found = np.take_along_axis(terms, best[None], axis=0)[0]
    return numbers.largest(so_far, found) if kind is tirx.Max else numbers.least(so_far, found)
