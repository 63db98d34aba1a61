"""What the names of an ONNX graph stand for while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from souffle.errors import Refusal, UnsupportedOperatorError
from souffle.program import Tensor

__all__ = [
    "Coded",
    "Count",
    "Counted",
    "Dequantized",
    "IntegerSum",
    "Known",
    "QuantizedValues",
    "Scope",
    "Stacked",
    "Value",
    "is_counted",
]


@dataclass(frozen=True, eq=False)
class Known:
    """A constant, with the name that it has in the model."""

    array: np.ndarray
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.array.shape

    @property
    def dtype(self) -> str:
        """Its element type."""
        return str(self.array.dtype)


@dataclass(frozen=True, eq=False)
class Stacked:
    """Values of one shape laid along a new axis, not written as one tensor unless something needs that.

    The outputs of a recurrent layer are of this kind, so that step t of the next layer waits for step t of this one
    and not for all of them.
    """

    pieces: tuple[Known | Tensor | Coded, ...]
    axis: int
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        part = self.pieces[0].shape
        return (*part[: self.axis], len(self.pieces), *part[self.axis :])

    @property
    def dtype(self) -> str:
        """Its element type."""
        return self.pieces[0].dtype


@dataclass(frozen=True, eq=False)
class Coded:
    """A tensor of a small element type, as the bytes that stand for its elements.

    Attributes
    ----------
    codes : Tensor
    dtype : str
        The element type, of :data:`souffle.element_types.SMALL_TYPES`.
    """

    codes: Tensor
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.codes.shape

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.codes.name


@dataclass(frozen=True, eq=False)
class Count:
    """How many of the positions along an axis are there: nobody knows before the network runs.

    Two axes are of one extent if they have the same count.

    Attributes
    ----------
    tensor : Tensor
        The number, a scalar of ``int64``.
    source : str
        The operator and the node that decide it, for messages.
    """

    tensor: Tensor
    source: str


@dataclass(frozen=True, eq=False)
class Counted:
    """A tensor of which only the first positions are there along some axes.

    What lies behind them means nothing, and whoever reads the tensor must know that. So it has no shape and no type to
    be taken for a tensor by: an operator reads it if :mod:`souffle.frontend.through_counts` says how, and is refused
    otherwise.

    Attributes
    ----------
    tensor : Tensor
        With room for all that there may be.
    counts : mapping of int to Count
        By axis, at least one.
    """

    tensor: Tensor
    counts: Mapping[int, Count]

    @property
    def shape(self) -> tuple[int, ...]:
        """It has none.

        Raises
        ------
        UnsupportedOperatorError
        """
        sources = " and ".join(dict.fromkeys(count.source for count in self.counts.values()))
        raise UnsupportedOperatorError(
            f"a value of which {sources} decides the extent is read where its shape must be known; end the network "
            "before that and compute the rest outside of it",
            refusal=Refusal.DATA,
        )

    dtype = shape


Value = Known | Tensor | Coded | Stacked | Counted | list | None
"""A constant, a tensor, one of bytes, a stack of values, one with counted axes, a sequence of values, or nothing (an
absent optional)."""


def is_counted(value: Value) -> bool:
    """Whether a value has counted axes, or holds one that has."""
    parts = value.pieces if isinstance(value, Stacked) else value if isinstance(value, list) else ()
    return isinstance(value, Counted) or any(map(is_counted, parts))


@dataclass(frozen=True, eq=False)
class Dequantized:
    """What a value was computed from: ``(integers - zero) * scale``.

    Attributes
    ----------
    integers : value
    scale, zero : Known
        One number, or one for each position on `axis`; no `zero` stands for zero.
    axis : int or None
        ``None`` where there is one number.
    """

    integers: Known | Tensor
    scale: Known
    zero: Known | None
    axis: int | None = None


@dataclass(frozen=True, eq=False)
class IntegerSum:
    """What a value was computed from: ``sums * scale``, without what is below zero where it was `rectified`."""

    sums: Known | Tensor
    scale: Known
    rectified: bool = False


@dataclass(frozen=True, eq=False)
class QuantizedValues:
    """Which values stand for integers (:mod:`souffle.frontend.dequantized`)."""

    dequantized: dict[Known | Tensor, Dequantized] = field(default_factory=dict)
    sums: dict[Known | Tensor, IntegerSum] = field(default_factory=dict)
    pairs: dict[Known | Tensor, tuple[str, Dequantized, Dequantized]] = field(default_factory=dict)
    """By an operator on two values: ``Add`` or ``Mul``."""
    averages: set[Known | Tensor] = field(default_factory=set)
    """By average pooling."""


@dataclass
class Scope:
    """The values of a graph's names, and of those around it."""

    values: dict[str, Value]
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    prefix: str = ""
    attributes: Mapping[str, onnx.AttributeProto] = field(default_factory=dict)
    parent: Scope | None = None

    def lookup(self, name: str) -> Value:
        """The value of `name`, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        words = f"the graph reads {name!r}, which nothing before it defines"
        raise UnsupportedOperatorError(words, refusal=Refusal.INVALID)
