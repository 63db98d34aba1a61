"""Operators on values of which data decides the extent: what their results are counted by.

A value with counted axes has room for all that there may be, and counts (:class:`souffle.frontend.values.Counted`). An
operator is computed on the whole room. That is right where an element of its result reads nothing but elements at
its own position along a counted axis, so that those behind the end are read by such behind the end alone::

    rows: float32[<=12, 4]  ->  MatMul with [4, 8]  ->  float32[<=12, 8]        the same count
    rows: float32[<=12, 4]  ->  ReduceSum over axis 1  ->  float32[<=12]        the same count

or where what is behind the end is made neutral first (reductions over a counted axis). A rule says the counts of the
results, or refuses. An operator without a rule is refused: nothing is read by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from souffle.errors import Refusal
from souffle.frontend.attributes import attribute
from souffle.frontend.interpreter import COUNTED_FORMS, Interpreter
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.refusal import Obstacle, computed, unknown_extent
from souffle.frontend.values import Count, Counted, Known, Scope, Value
from souffle.program import Tensor

__all__ = ["AxisCounts", "Reading", "carries", "reads_counts", "room_of", "with_counts", "without_end"]

AxisCounts = Mapping[int, Count]


def room_of(value: Value) -> Value:
    """The tensor with room for all that there may be; other values as they are."""
    return value.tensor if isinstance(value, Counted) else value


def with_counts(value: Value, counts: AxisCounts) -> Value:
    """A result whose axes are counted."""
    if not counts or value is None:
        return value
    if not isinstance(value, Tensor):
        words = "a result of which data decides an extent has no elements, is a constant, or is of a small type"
        raise Obstacle(words, "end the network before this node", refusal=Refusal.DATA)
    return Counted(value, dict(counts))


@dataclass(frozen=True, eq=False)
class Reading:
    """A node that reads values with counted axes.

    Attributes
    ----------
    interpreter : Interpreter
    node : NodeProto
    inputs : sequence of Value
    scope : Scope
    """

    interpreter: Interpreter
    node: onnx.NodeProto
    inputs: Sequence[Value]
    scope: Scope

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an input, its room where axes are counted."""
        return room_of(self.inputs[position]).shape

    def counts(self, position: int) -> AxisCounts:
        """The counted axes of an input."""
        value = self.inputs[position] if position < len(self.inputs) else None
        return value.counts if isinstance(value, Counted) else {}

    def known(self, position: int, name: str) -> np.ndarray | None:
        """The value of an input on which the program depends; ``None`` where it is absent."""
        value = self.inputs[position] if position < len(self.inputs) else None
        if value is None:
            return None
        if not isinstance(value, Known):
            raise computed(name)
        return value.array

    def refused(self, why: str) -> Obstacle:
        """Why this node is not computed."""
        return unknown_extent(self.node, self.inputs, self.scope.opsets, why)

    def results(self, inputs: Sequence[Value] | None = None) -> Sequence[Value]:
        """The outputs of the node on the whole room."""
        given = [room_of(value) for value in (self.inputs if inputs is None else inputs)]
        return self.interpreter.node(self.node, given, self.scope)

    def axis(self, default: int, rank: int | None = None) -> int:
        """The attribute ``axis``, from the front."""
        rank = len(self.shape(0)) if rank is None else rank
        return attribute(self.node, "axis", default) % max(1, rank)

    def axes(self) -> list[int] | None:
        """The axes that the node names, in an attribute or in its second input, from the front."""
        given = attribute(self.node, "axes")
        if given is None:
            given = self.known(1, "axes")
        return None if given is None else [int(axis) % max(1, len(self.shape(0))) for axis in np.reshape(given, -1)]

    def derived(self, key: tuple, make: Callable[[NodeWriter], Value], *sources: Count) -> Count:
        """The count that is computed from others, the same for the same `key`."""
        if key not in self.interpreter.counts:
            tensor = self.interpreter.tensor_of(make(NodeWriter(self.interpreter, self.node)))
            names = " and ".join(dict.fromkeys(source.source for source in sources))
            self.interpreter.counts[key] = Count(tensor, names)
        return self.interpreter.counts[key]


_Rule = Callable[[Reading], AxisCounts]
_Form = Callable[[Reading], Sequence[Value]]


def carries(*operators: str) -> Callable[[_Rule], _Rule]:
    """Enter a rule that says by what all results of `operators` are counted, which are computed on the whole room."""

    def register(rule: _Rule) -> _Rule:
        def form(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
            reading = Reading(interpreter, node, inputs, scope)
            counts = rule(reading)
            return [with_counts(value, counts) for value in reading.results()]

        COUNTED_FORMS.update(dict.fromkeys(operators, form))
        return rule

    return register


def reads_counts(*operators: str) -> Callable[[_Form], _Form]:
    """Enter a function that gives the results of `operators` itself."""

    def register(function: _Form) -> _Form:
        def form(interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
            return list(function(Reading(interpreter, node, inputs, scope)))

        COUNTED_FORMS.update(dict.fromkeys(operators, form))
        return function

    return register


def without_end(reading: Reading, value: Counted, fill: float | int | bool, axes: Sequence[int] | None = None) -> Value:
    """`value` with `fill` in all that is behind the end along `axes`, of which it is not counted any more."""
    chosen = [axis for axis in sorted(value.counts) if axes is None or axis in axes]
    known = reading.interpreter.without_ends
    # The same for all that read it, so that what they count of it is the same.
    key = (value.tensor, fill, *((axis, value.counts[axis]) for axis in chosen))
    if key not in known:
        known[key] = _filled(reading, value, fill, chosen)
    return with_counts(known[key], {axis: count for axis, count in value.counts.items() if axis not in chosen})


def _filled(reading: Reading, value: Counted, fill: float | int | bool, axes: Sequence[int]) -> Value:
    write, rank, dtype = NodeWriter(reading.interpreter, reading.node), len(value.tensor.shape), value.tensor.dtype
    there: Value = None
    for axis in axes:
        positions = np.arange(value.tensor.shape[axis], dtype="int64").reshape([-1] + [1] * (rank - 1 - axis))
        before = write("Less", constant(positions, "int64"), value.counts[axis].tensor)
        there = before if there is None else write("And", there, before)
    return write("Where", there, value.tensor, constant(fill, dtype))
