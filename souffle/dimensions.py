"""Open dimensions of a network: what they are called, and the shapes that follow from a value of each.

A dimension is a whole number, or words: the name of an open dimension, or sums, differences, products and floor
divisions of names and numbers, such as ``past + sequence``, whose value follows from theirs.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from souffle.errors import OptionError

__all__ = ["Dimension", "OpenDimensions", "Shape", "extents_text", "names_in"]

Dimension = int | str | None
"""A number, words, or nothing where it is not known."""
Shape = tuple[Dimension, ...]

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@cache
def _parsed(words: str) -> ast.expr | None:
    """The words as an expression of names and whole numbers; None where they are none."""
    try:
        root = ast.parse(words.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return root if _readable(root) else None


def _readable(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in _OPERATIONS and _readable(node.left) and _readable(node.right)
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) is int)


def names_in(words: str) -> frozenset[str]:
    """The names in an expression of several parts; none where the words are one name, or no expression."""
    root = _parsed(words)
    if not isinstance(root, ast.BinOp):
        return frozenset()
    return frozenset(node.id for node in ast.walk(root) if isinstance(node, ast.Name))


def _value(node: ast.expr, extents: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left, extents), _value(node.right, extents))
    return extents[node.id] if isinstance(node, ast.Name) else node.value


def _with_values(node: ast.expr, extents: Mapping[str, int]) -> ast.expr:
    if isinstance(node, ast.BinOp):
        return ast.BinOp(_with_values(node.left, extents), node.op, _with_values(node.right, extents))
    return ast.Constant(extents[node.id]) if isinstance(node, ast.Name) and node.id in extents else node


def extents_text(names: Sequence[str], extents: Sequence[int]) -> str:
    """``batch=1, sequence=128``."""
    return ", ".join(f"{name}={extent}" for name, extent in zip(names, extents, strict=True))


@dataclass(frozen=True)
class OpenDimensions:
    """The shapes of a network's inputs and outputs, in numbers and in words.

    Attributes
    ----------
    names : tuple of str
        The open dimensions, in the order in which the inputs have them. Other words are made of these.
    inputs, outputs : tuple of (str, Shape)
        By the model's own names. An output whose shape the model does not declare has None in its place.
    """

    names: tuple[str, ...]
    inputs: tuple[tuple[str, Shape], ...]
    outputs: tuple[tuple[str, Shape | None], ...]

    def places(self) -> Iterator[tuple[str, int, int]]:
        """Where each name stands in an input for the first time: the name, the input's number, the axis."""
        for name in self.names:
            yield (
                name,
                *next(
                    (number, axis)
                    for number, (_, shape) in enumerate(self.inputs)
                    for axis, dimension in enumerate(shape)
                    if dimension == name
                ),
            )

    def knows(self, dimension: Dimension) -> bool:
        """Whether its value follows from those of the open dimensions."""
        if not isinstance(dimension, str):
            return dimension is not None
        used = names_in(dimension)
        return dimension in self.names or bool(used and used <= set(self.names))

    def follows(self, dimension: Dimension, names: Collection[str]) -> bool:
        """Whether its value depends on one of the given open dimensions."""
        used = {dimension} if dimension in self.names else names_in(dimension) if isinstance(dimension, str) else ()
        return not used.isdisjoint(names) if used else False

    def extent(self, dimension: int | str, extents: Mapping[str, int]) -> int:
        """The value of a dimension.

        Raises
        ------
        OptionError
            If it would be negative, or divides by zero.
        """
        if not isinstance(dimension, str) or dimension in extents:
            return dimension if isinstance(dimension, int) else extents[dimension]
        try:
            found = _value(_parsed(dimension), extents)
        except ZeroDivisionError:
            found = -1
        if found < 0:
            chosen = extents_text(tuple(extents), tuple(extents.values()))
            raise OptionError(f"a dimension of {dimension} has no size with {chosen}; choose other values")
        return found

    def shape(self, shape: Shape, extents: Mapping[str, int]) -> tuple[int, ...]:
        """A shape in numbers (:meth:`extent`)."""
        return tuple(self.extent(dimension, extents) for dimension in shape)

    def settled(self, extents: Mapping[str, int], inputs: Collection[str]) -> OpenDimensions:
        """What is open still where some dimensions have values, and some inputs are none any more.

        Parameters
        ----------
        extents : mapping of str to int
            Values of open dimensions, among them all that only `inputs` have.
        inputs : collection of str
            By the model's names.

        Raises
        ------
        OptionError
            As :meth:`extent`.
        """

        def put(shape: Shape) -> Shape:
            return tuple(self._settled(dimension, extents) for dimension in shape)

        return replace(
            self,
            names=tuple(name for name in self.names if name not in extents),
            inputs=tuple((name, put(shape)) for name, shape in self.inputs if name not in inputs),
            outputs=tuple((name, shape and put(shape)) for name, shape in self.outputs),
        )

    def _settled(self, dimension: Dimension, extents: Mapping[str, int]) -> Dimension:
        if not isinstance(dimension, str) or dimension in extents or dimension in self.names:
            return extents.get(dimension, dimension)
        used = names_in(dimension)
        if used and used <= extents.keys():
            return self.extent(dimension, extents)
        return dimension if used.isdisjoint(extents) else ast.unparse(_with_values(_parsed(dimension), extents))

    def where(self, name: str) -> str:
        """``dimension 1 of input 'x'``, where the name stands for the first time."""
        _, number, axis = next(place for place in self.places() if place[0] == name)
        return f"dimension {axis} of input {self.inputs[number][0]!r}"
