"""Tensor expressions (TEs): one expression, and the tensors between them (paper §3).

A :class:`TE` is closed: its ``te.ComputeOp`` reads only placeholders, and ``inputs`` says which tensor each placeholder
stands for. So a TE can be replaced without rebuilding what comes after it, and equal TEs of different layers are
structurally equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import te, tirx
from tvm.ir import Range

from souffle.errors import SouffleError
from souffle.program.ieee import exact_bodies
from souffle.program.wide import wide_bodies
from souffle.tvm_compat import (
    compute_op,
    const_int,
    largest_value,
    load_tensor,
    loads,
    map_bodies,
    reduce_node,
    substitute,
)

__all__ = ["ELEMENT_TYPES", "Computed", "ExternTE", "InTiles", "Origin", "ProgramError", "TE", "Tensor", "make_te"]


_MOST_NODES = 6
"""ONNX nodes that are named in a listing or a message; ``Origin.nodes`` holds all."""


ELEMENT_TYPES = frozenset(
    ["bool", "bfloat16", *(f"float{bits}" for bits in (16, 32, 64))]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)
"""What tensors hold."""


class ProgramError(SouffleError):
    """A TE program is not well formed; the message names the TE and the tensor."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """One value of the program. Compares by identity.

    Attributes
    ----------
    name : str
        Unique in a program; a valid C identifier.
    shape : tuple of int
        Static; ``()`` for a scalar.
    dtype : str
        As NumPy and TVM spell it (``"float32"``, ``"int64"``, ``"bool"``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 1 if self.dtype == "bool" else np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.itemsize

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Origin:
    """Where a TE comes from.

    Attributes
    ----------
    nodes : tuple of str
        Names of the ONNX nodes that it computes (several after a transformation).
    operators : tuple of str
        Their operator types, such as ``"MatMul"``, in the same order.
    group : str
        The operator-fusion group of TVM that it belongs to at level V0; TEs of one fused operator share it.
    """

    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    group: str

    def merged(self, *others: Origin) -> Origin:
        """The origin of a TE that computes what this and `others` compute; the group is this one's."""
        pairs = dict.fromkeys(pair for o in (self, *others) for pair in zip(o.nodes, o.operators, strict=True))
        return Origin(tuple(n for n, _ in pairs), tuple(o for _, o in pairs), self.group)

    def __str__(self) -> str:
        named = [f"{op} {node}" for node, op in zip(self.nodes, self.operators, strict=True)]
        if len(named) > _MOST_NODES:
            named[_MOST_NODES - 1 :] = [f"and {len(named) - _MOST_NODES + 1} more"]
        return ", ".join(named)


@dataclass(frozen=True)
class InTiles:
    """A placement: computed in the tiles of a contraction, while a tile's results are in registers (paper §6.3).

    Attributes
    ----------
    contraction : str
        The name of the TE in whose tiles.
    phase : {"results", "moments", "rows", "elements"}
        What it is of: any reduction of a tile's results; one of a normalization (of these one may read another that has
        the same chunks); ahead of the contraction, what its left operand or what stands behind it reads of a row; or
        functions of elements that read several of its results for one of their own.
    """

    contraction: str
    phase: str = "results"

    def __str__(self) -> str:
        return f"{'for the rows' if self.phase == 'rows' else 'in the tiles'} of {self.contraction}"


class Computed:
    """What TEs and fused TEs have in common: a name, an origin, and outputs of which there is mostly one."""

    name: str
    outputs: tuple[Tensor, ...]
    origin: Origin
    placement: InTiles | None

    @property
    def comment(self) -> str:
        """Where it comes from, and where it is computed if that was decided; of listings."""
        return f"{self.origin}" if self.placement is None else f"{self.origin}, {self.placement}"

    @property
    def output(self) -> Tensor:
        """The only output.

        Raises
        ------
        ProgramError
            If it has several.
        """
        if len(self.outputs) != 1:
            raise ProgramError(f"TE {self.name} ({self.origin}) has {len(self.outputs)} outputs, one was expected")
        return self.outputs[0]


@dataclass(frozen=True, eq=False)
class TE(Computed):
    """One tensor expression.

    Attributes
    ----------
    name : str
        Unique in its program; a valid C identifier.
    op : te.ComputeOp
        The expression, closed over ``placeholders``.
    placeholders : tuple of te.Tensor
        What ``op`` reads, each once.
    inputs : tuple of Tensor
        ``inputs[i]`` is the tensor that ``placeholders[i]`` stands for; same shape and type.
    outputs : tuple of Tensor
        One per body of ``op``; several only for a reduction of tuples such as argmax.
    origin : Origin
    placement : InTiles or None
        Where it is to be computed; ``None``: where the formation of stages finds best.
    """

    name: str
    op: te.ComputeOp
    placeholders: tuple[te.Tensor, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    origin: Origin
    placement: InTiles | None = None

    @property
    def axes(self) -> tuple[tirx.IterVar, ...]:
        """Data-parallel axes, one per output dimension."""
        return tuple(self.op.axis)

    @property
    def reduce_axes(self) -> tuple[tirx.IterVar, ...]:
        """Reduction axes; empty for a TE without reduction."""
        return tuple(self.op.reduce_axis)

    @property
    def reduction_shape(self) -> tuple[int, ...]:
        """Extents of the reduction axes; the largest where one varies with the element, as in adaptive pooling."""
        return tuple(largest_value(axis.dom.extent, self.axes) for axis in self.reduce_axes)

    @property
    def body(self):
        """The expression of the first output."""
        return self.op.body[0]

    @property
    def is_reduction(self) -> bool:
        """Whether it has reduction axes."""
        return reduce_node(self.body) is not None

    def input_of(self, placeholder: te.Tensor) -> Tensor:
        """The tensor that `placeholder` stands for."""
        for candidate, tensor in zip(self.placeholders, self.inputs, strict=True):
            if candidate.same_as(placeholder):
                return tensor
        raise ProgramError(f"TE {self.name} ({self.origin}) reads {placeholder}, which is none of its placeholders")

    def on(self, arguments: Sequence[te.Tensor], name: str | None = None) -> tuple[te.Tensor, ...]:
        """The same expression over other ``te.Tensor`` s: ``op`` rebuilt to read ``arguments[i]`` for input ``i``.

        Over axes of its own too: TEs may share an expression, and TensorIR wants every variable defined once.
        """
        bodies = map_bodies(self.op.body, lambda load: _reload(load, self.placeholders, arguments))
        op = compute_op(name or self.name, *with_fresh_axes(self.axes, bodies), self.op.tag)
        return tuple(op.output(i) for i in range(op.num_outputs))

    def with_inputs(self, inputs: Sequence[Tensor]) -> TE:
        """The same TE reading other tensors of the same shapes and types."""
        return self if tuple(inputs) == self.inputs else replace(self, inputs=tuple(inputs))

    def placed(self, placement: InTiles | None) -> TE:
        """The same TE, to be computed where `placement` says."""
        return self if placement == self.placement else replace(self, placement=placement)

    def __repr__(self) -> str:
        return f"TE({self.name})"


@dataclass(frozen=True, eq=False)
class ExternTE:
    """An operator that cannot be expressed as a TE: TVM's own TensorIR for it, a kernel of its own (paper §6.7).

    Attributes
    ----------
    func : tirx.PrimFunc
        Not scheduled, or scheduled by TVM. Parameters: the inputs, then the outputs.
    """

    name: str
    func: tirx.PrimFunc
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    origin: Origin

    def __repr__(self) -> str:
        return f"ExternTE({self.name})"


def with_fresh_axes(axes: Sequence[tirx.IterVar], bodies: Sequence) -> tuple[list[tirx.IterVar], list]:
    """An expression over new axes, data-parallel and reduction, of the same ranges."""
    new_axes = [_fresh(axis, {}) for axis in axes]
    mapping = {old.var: new.var for old, new in zip(axes, new_axes, strict=True)}
    first = reduce_node(bodies[0])
    if first is None:
        return new_axes, [substitute(body, mapping) for body in bodies]
    new_reduce = [_fresh(axis, mapping) for axis in first.axis]
    mapping |= {old.var: new.var for old, new in zip(first.axis, new_reduce, strict=True)}
    sources = [substitute(source, mapping) for source in first.source]
    condition = substitute(first.condition, mapping)
    init = [substitute(value, mapping) for value in first.init]
    whole = tirx.Reduce(first.combiner, sources, new_reduce, condition, 0, init)
    # The outputs of one reduction of tuples must share its sources.
    rest = [tirx.Reduce(whole.combiner, whole.source, whole.axis, whole.condition, k, whole.init)
            for k in range(1, len(bodies))]  # fmt: skip
    if first.value_index:
        raise ProgramError("the first body of a reduction of tuples must be its first value")
    return new_axes, [whole, *rest]


def _fresh(axis: tirx.IterVar, mapping: Mapping[tirx.Var, object]) -> tirx.IterVar:
    extent = axis.dom.extent
    if mapping and not isinstance(extent, tirx.IntImm):
        dom = Range.from_min_extent(substitute(axis.dom.min, mapping), substitute(extent, mapping))
    else:
        dom = axis.dom
    return tirx.IterVar(dom, tirx.Var(axis.var.name, axis.var.ty), axis.iter_type, axis.thread_tag)


def _reload(load, placeholders: Sequence[te.Tensor], arguments: Sequence[te.Tensor]):
    source = load_tensor(load)
    for placeholder, argument in zip(placeholders, arguments, strict=True):
        if placeholder.same_as(source):
            return argument[tuple(load.args[1:])] if len(load.args) > 1 else argument()
    return load


def make_te(
    name: str,
    axes: Sequence[tirx.IterVar],
    bodies: Sequence,
    reads: Mapping[te.Tensor, Tensor] | Sequence[tuple[te.Tensor, Tensor]],
    origin: Origin,
    outputs: Sequence[Tensor] | None = None,
) -> TE:
    """Build a TE from an expression.

    Parameters
    ----------
    name : str
        Its name, and the name of its output where `outputs` is not given.
    axes : sequence of IterVar
        Data-parallel axes.
    bodies : sequence of expressions
        One per output; their loads read the ``te.Tensor`` s of `reads`.
    reads : pairs of te.Tensor and Tensor
        What each ``te.Tensor`` stands for. Pairs that `bodies` do not read are dropped; several ``te.Tensor`` s that
        stand for one tensor become one placeholder.
    origin : Origin
    outputs : sequence of Tensor, optional
        The tensors that it defines, to replace an existing TE.
    """
    pairs = list(reads.items()) if isinstance(reads, Mapping) else list(reads)
    placeholders: list[te.Tensor] = []
    inputs: list[Tensor] = []
    renamed: list[tuple[te.Tensor, te.Tensor]] = []
    for load in (load for body in bodies for load in loads(body)):
        source = load_tensor(load)
        if any(source.same_as(old) for old, _ in renamed):
            continue
        tensor = next((t for candidate, t in pairs if candidate.same_as(source)), None)
        if tensor is None:
            raise ProgramError(f"TE {name} ({origin}) reads {source}, which is not among the tensors it was given")
        if tensor in inputs:
            renamed.append((source, placeholders[inputs.index(tensor)]))
            continue
        fresh = te.placeholder(tensor.shape, tensor.dtype, name=f"p{len(inputs)}")
        placeholders.append(fresh)
        inputs.append(tensor)
        renamed.append((source, fresh))
    old, new = [o for o, _ in renamed], [n for _, n in renamed]
    # As long as a simplifier has not seen it.
    closed = wide_bodies(axes, exact_bodies(map_bodies(bodies, lambda load: _reload(load, old, new))))
    op = compute_op(name, axes, closed)
    if outputs is None:
        shape = tuple(const_int(axis.dom.extent) for axis in axes)
        count = op.num_outputs
        outputs = [Tensor(name if count == 1 else f"{name}_{i}", shape, str(op.output(i).dtype)) for i in range(count)]
    return TE(name, op, tuple(placeholders), tuple(inputs), tuple(outputs), origin)
