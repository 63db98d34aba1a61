"""A network in the making: every node is run by ONNX Runtime as it is added, so its values are known from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.fuzz.oracle import ORACLE_ERRORS, run_oracle
from benchmarks.fuzz.values import FLOATS, INTEGERS, is_exact, is_tame, random_values

__all__ = ["Draft", "Refused", "Settings", "Value"]

_SIZES = (1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 8, 11, 13, 16, 17, 31, 32, 33, 64, 67)
_LARGE_SIZES = (127, 128, 129, 255, 256, 257, 509, 1000, 1024, 1031)
_MOST_ELEMENTS = 6000
_MANY = 10
"""How many times as many elements tensors of large networks have."""

_ODD_NAMES = ("float", "a/b:0", "x.1", "0", "p-q", "blockIdx", "main", "é", "this name", "T_add", "extern_c", "i0")
_KINDS = {"f": FLOATS, "i": INTEGERS, "b": ("bool",)}


# fmt: off
_MAY_OVERFLOW = frozenset((
    "Add", "Sub", "Mul", "Sum", "Mean", "Neg", "Abs", "Pow", "MatMul", "Gemm", "Einsum", "CumSum", "ReduceSum",
    "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceProd", "ReduceMean", "ReduceLogSum", "ReduceLogSumExp"
))
# fmt: on
"""Operators whose result ONNX leaves open where it leaves the range of an integer type."""


class Refused(Exception):
    """The oracle does not run the node that was to be added, or what it gives is of no use here."""


@dataclass(frozen=True)
class Settings:
    """What networks are made of.

    Attributes
    ----------
    without : frozenset of str
        Operators left out.
    only : frozenset of str
        Recipes to choose from; all where empty.
    large : float
        The share of networks with dimensions up to 1031, so that reductions are long and tiles many.
    specials : float
        The share of networks whose inputs hold NaN, infinities and the like.
    zero_size : float
        The share of networks in which dimensions may be 0.
    dtypes : tuple of str
        The floating point types that networks are mainly made of, as often as named.
    most_nodes : int
    wide : float
        The share of networks of many nodes beside each other, nearly all of which are outputs.
    """

    without: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    large: float = 0.06
    specials: float = 0.12
    zero_size: float = 0.03
    dtypes: tuple[str, ...] = ("float32",) * 8 + ("float16", "float64")
    most_nodes: int = 14
    wide: float = 0.12


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the network, with what it is for the inputs at hand."""

    name: str
    array: np.ndarray
    constant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.array.shape

    @property
    def dtype(self) -> str:
        """Its type, in NumPy's word."""
        return str(self.array.dtype)

    @property
    def rank(self) -> int:
        """Its number of dimensions."""
        return self.array.ndim


@dataclass(eq=False)
class Draft:
    """A network in the making.

    Parameters
    ----------
    rng : numpy.random.Generator
        Every choice is drawn from it.
    settings : Settings
    """

    rng: np.random.Generator
    settings: Settings
    opset: int = 17
    float_dtype: str = "float32"
    special: bool = False
    zero_size: bool = False
    large: bool = False
    wide: bool = False
    odd_names: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    initializers: dict[str, np.ndarray] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    selected: list[Value] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)

    # ---- choices ----

    def chance(self, probability: float) -> bool:
        """True as often as said."""
        return bool(self.rng.random() < probability)

    def choice(self, items: Sequence[Any]) -> Any:
        """One of them."""
        return items[int(self.rng.integers(len(items)))]

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included.

        Raises
        ------
        Refused
            If there is none, as for an index into a dimension of 0.
        """
        if high < low:
            raise Refused("an empty range")
        return int(self.rng.integers(low, high + 1))

    def size(self, most: int = 67) -> int:
        """A dimension: 1, 2, 3, primes, powers of two and their neighbours."""
        if self.zero_size and self.chance(0.15):
            return 0
        if self.large and most > 32 and self.chance(0.3):
            return self.choice(_LARGE_SIZES)
        return self.choice([size for size in _SIZES if size <= most])

    def shape(self, least_rank: int = 0, most_rank: int = 5, elements: int = 2000) -> tuple[int, ...]:
        """A shape of few elements."""
        ranks = [rank for rank in (0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5) if least_rank <= rank <= most_rank]
        rank = self.choice(ranks) if ranks else least_rank
        return self.fitted([self.size() for _ in range(rank)], elements)

    def fitted(self, shape: Sequence[int], elements: int = 2000) -> tuple[int, ...]:
        """The shape with its largest dimensions made smaller until it has few elements."""
        dims = list(shape)
        while np.prod(dims, dtype=np.int64) > elements * (_MANY if self.large else 1):
            largest = int(np.argmax(dims))
            dims[largest] = self.size(min(67, max(1, dims[largest] - 1), dims[largest] // 2)) or 1
        return tuple(dims)

    def axis(self, value: Value) -> int:
        """An axis of a tensor of at least one dimension, sometimes counted from the end."""
        axis = self.integer(0, value.rank - 1)
        return axis - value.rank if self.chance(0.3) else axis

    def axes(self, value: Value) -> list[int]:
        """Some axes of a tensor, none twice."""
        count = self.integer(1, value.rank)
        chosen = sorted(int(a) for a in self.rng.choice(value.rank, count, replace=False))
        return [axis - value.rank if self.chance(0.2) else axis for axis in chosen]

    # ---- tensors ----

    def name(self, stem: str) -> str:
        """A name that nothing has."""
        stem = self.choice(_ODD_NAMES) if self.odd_names else stem
        candidate, number = stem, 0
        while candidate in self.taken or not candidate:
            number += 1
            candidate = f"{stem}{'_' if self.odd_names else ''}{number}"
        self.taken.add(candidate)
        return candidate

    def input(self, array: np.ndarray) -> Value:
        """A new graph input."""
        value = Value(self.name("x"), array)
        self.inputs[value.name] = array
        self.values.append(value)
        return value

    def constant(self, array: np.ndarray) -> Value:
        """A new initializer, or a Constant node."""
        array = np.asarray(array)
        value = Value(self.name("w"), array, constant=True)
        if self.chance(0.15):
            self.nodes.append(helper.make_node("Constant", [], [value.name], value=numpy_helper.from_array(array)))
        self.initializers[value.name] = array
        return value

    def ints(self, *numbers: int) -> Value:
        """A constant of int64: axes, shapes, starts."""
        return self.constant(np.array(numbers, np.int64))

    def scalar(self, number: float, dtype: str) -> Value:
        """A constant of rank 0."""
        return self.constant(np.array(number, dtype))

    def style(self) -> str:
        """How the values of a new tensor are drawn."""
        if self.special and self.chance(0.6):
            return "special"
        return self.choice(("normal", "normal", "eighths", "whole"))

    def dtype(self, kinds: str) -> str:
        """A type of the kinds ``"f"``, ``"i"`` and ``"b"``, most often the network's own or a common one."""
        kind = self.choice(kinds)
        if kind == "f":
            return self.float_dtype
        if kind == "b":
            return "bool"
        return self.choice(("int64", "int64", "int32", "int32", *INTEGERS))

    def fresh(self, dtype: str, shape: Sequence[int], style: str = "", constant: float = 0.3) -> Value:
        """A tensor with new values: a graph input, or as often as said a constant."""
        array = random_values(self.rng, dtype, tuple(shape), style or self.style())
        return self.constant(array) if self.chance(constant) else self.input(array)

    def weight(self, dtype: str, shape: Sequence[int], style: str = "") -> Value:
        """A tensor such as a layer's weights: mostly a constant, sometimes an input or a tensor that is there.

        It holds no NaN and no infinity: what zeros around an image make of an infinite weight, ONNX leaves open.
        """
        alike = [value for value in self.values if value.shape == tuple(shape) and value.dtype == dtype]
        present = [value for value in alike if is_tame(value.array)]
        if present and not style and self.chance(0.3):
            return self.choice(present)
        return self.fresh(dtype, shape, style or self.choice(("normal", "normal", "eighths", "whole")), constant=0.7)

    def pick(
        self,
        kinds: str = "f",
        least_rank: int = 0,
        most_rank: int = 5,
        *,
        where: Callable[[Value], bool] = lambda value: True,
        tame: bool = False,
        exact: bool = False,
        elements: int = _MOST_ELEMENTS,
        style: str = "",
    ) -> Value:
        """A tensor of the network that an operator can take, mostly a recent one; a new one where there is none.

        Parameters
        ----------
        kinds : str
            Of types: ``"f"``, ``"i"``, ``"b"``.
        least_rank, most_rank : int
        where : callable
            What else it must be.
        tame : bool
            Its values are finite and not large.
        exact : bool
            Its values are small multiples of 1/64, so that an operator that is not continuous stands on firm ground.
        elements : int
            At most so many.
        style : str
            Of a new tensor's values.

        Raises
        ------
        Refused
            If the new tensor is not what it must be.
        """
        dtypes = {dtype for kind in kinds for dtype in _KINDS[kind]}
        suitable = [
            value
            for value in self.values
            if value.dtype in dtypes
            and least_rank <= value.rank <= most_rank
            and value.array.size <= elements * (_MANY if self.large else 1)
            and (not tame or is_tame(value.array))
            and (not exact or is_exact(value.array))
            and where(value)
        ]
        if self.wide:
            suitable = [value for value in suitable if value.name in self.inputs] or suitable
        if suitable and self.chance(0.95):
            fresh = [value for value in suitable if value.name not in self.read]
            if fresh and self.chance(0.6):
                return fresh[-1]
            return self.choice(suitable[-3:] if self.chance(0.6) else suitable)
        style = style or ("eighths" if exact else self.choice(("normal", "eighths", "whole")) if tame else "")
        shape = self.shape(least_rank, most_rank, min(elements, 2000))
        value = self.fresh(self.dtype(kinds), shape, style, constant=0.1)
        if not where(value):
            raise Refused("no such tensor")
        return value

    def broadcastable(self, value: Value, style: str = "", dtype: str = "") -> Value:
        """A tensor that broadcasts with another: one that is there, or a new one with dimensions left out or 1."""
        dtype = dtype or value.dtype
        present = [
            other
            for other in self.values
            if other.dtype == dtype and _broadcasts(other.shape, value.shape) and other is not value
        ]
        if present and not style and self.chance(0.55):
            return self.choice(present[-4:])
        if not style and dtype == value.dtype and self.chance(0.06):
            return value
        shape = list(value.shape)
        if shape and self.chance(0.4):
            shape = shape[self.integer(0, len(shape)) :]
        shape = [1 if self.chance(0.25) else extent for extent in shape]
        if len(shape) == value.rank and value.rank < 5 and value.array.size < 500 and self.chance(0.1):
            shape = [self.integer(1, 3), *shape]
        return self.fresh(dtype, shape, style)

    # ---- nodes ----

    def emit(
        self,
        op: str,
        inputs: Sequence[Value | None],
        outputs: int | Sequence[bool] = 1,
        *,
        captured: Sequence[Value] = (),
        **attributes,
    ) -> list[Value]:
        """Add a node.

        Parameters
        ----------
        op : str
        inputs : sequence of Value or None
            None where an optional one is left out.
        outputs : int or sequence of bool
            How many, or which of them are asked for.
        captured : sequence of Value
            What its bodies read of the graph around them.
        attributes
            Those that are None are left out.

        Raises
        ------
        Refused
            If ONNX Runtime does not run it, or the result is too large or overflows.
        """
        if op in self.settings.without or (op in _MAY_OVERFLOW and any(v and _is_extreme(v.array) for v in inputs)):
            raise Refused(op)
        wanted = [True] * outputs if isinstance(outputs, int) else list(outputs)
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        names = [f"{op.lower()}_{i}" for i in range(len(wanted))]
        node = helper.make_node(
            op,
            [value.name if value else "" for value in given],
            [name if asked else "" for name, asked in zip(names, wanted, strict=True)],
            **{key: value for key, value in attributes.items() if value is not None},
        )
        present = {value.name: value for value in (*given, *captured) if value}
        try:
            arrays = run_oracle(
                one_node(node, present, self.opset), {v.name: v.array for v in present.values() if not v.constant}
            )
        except ORACLE_ERRORS as error:
            raise Refused(f"{op}: {error}") from error
        self._check(arrays, special=self.special or any(not is_tame(v.array) for v in present.values()))
        node.ClearField("output")
        made = []
        results = iter(arrays)
        for asked in wanted:
            if asked:
                made.append(Value(self.name(op.lower()), next(results)))
            node.output.append(made[-1].name if asked else "")
        self.nodes.append(node)
        self.read |= present.keys()
        self.values += made
        return made

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Let no other recipe read the values that are made meanwhile: data decides their extents."""
        before = len(self.values)
        try:
            yield
        finally:
            self.selected += self.values[before:]
            del self.values[before:]

    def _check(self, arrays: Sequence[np.ndarray], *, special: bool) -> None:
        for array in arrays:
            if not isinstance(array, np.ndarray) or array.dtype == object:
                raise Refused("no tensor")
            if array.size > _MOST_ELEMENTS * (_MANY if self.large else 1) or array.ndim > 6:
                raise Refused("too large")
            if array.size == 0 and not self.zero_size:
                raise Refused("empty")
            if not special and not is_tame(array, 2e4 if array.dtype == np.float16 else 1e6):
                raise Refused("overflow")


def _is_extreme(array: np.ndarray) -> bool:
    """Whether sums, products or negatives of such integers may leave the range of a type that TVM reckons with."""
    return array.dtype.kind in "iu" and array.itemsize >= 4 and bool(np.any(np.abs(array.astype("float64")) > 2**20))


def one_node(node: onnx.NodeProto, values: dict[str, Value], opset: int) -> onnx.ModelProto:
    """A model of one node, whose constants are initializers."""
    inputs = [
        helper.make_tensor_value_info(v.name, helper.np_dtype_to_tensor_dtype(v.array.dtype), v.shape)
        for v in values.values()
        if not v.constant
    ]
    constants = [numpy_helper.from_array(v.array, v.name) for v in values.values() if v.constant]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _broadcasts(shape: Sequence[int], other: Sequence[int]) -> bool:
    both = zip(reversed(shape), reversed(other), strict=False)
    if len(shape) > 5 or not all(a == b or 1 in (a, b) for a, b in both):
        return False
    return int(np.prod(np.broadcast_shapes(shape, other), dtype=np.int64)) <= _MOST_ELEMENTS
