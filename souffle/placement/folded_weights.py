"""The weight and bias of a normalization in the constants of the product that reads it.

::

    z[m, n] = sum over k of (u[m, k] * weight[k] + bias[k]) * W[k, n]
            = sum over k of u[m, k] * (weight[k] * W[k, n])  +  sum over k of bias[k] * W[k, n]

Exact in real numbers. ``weight * W`` is rounded to the type of `W` once more, which moves it by half a unit of fp16 of
each product at most; where some would leave the range of fp16, or more would be lost as subnormal numbers than that,
nothing is folded. The second sum is calculated in double precision and kept in fp32; where a constant is added to the
product anyway, in that constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx

from souffle.decision import Refused
from souffle.placement.centred import Centred
from souffle.placement.stage_trial import reduction_of
from souffle.program import TE, FusedTE, Tensor, fuse, make_te, parts_of
from souffle.program.shared import OncePer
from souffle.transform.handles import Handles, read
from souffle.tvm_compat import (
    PrimExpr,
    collect,
    dtype_of,
    fresh_axis,
    is_load,
    load_indices,
    load_tensor,
    loads,
    reduce_node,
    same_expression,
    substitute,
    variables,
)

__all__ = ["FoldedProduct", "folded_product"]

_UNIT = 2.0**-11
"""Half a unit in the last place of fp16, of a number of 1."""


@dataclass(frozen=True, eq=False)
class FoldedProduct:
    """A product that reads elements before weight and bias.

    Attributes
    ----------
    item : TE or FusedTE
    source : Tensor
        Its constant before.
    weights : Tensor
        And now.
    added : Tensor or None
        What comes of the bias, with the constant that it is added to; ``None`` where there is none.
    added_to : Tensor or None
        That constant, if there is one.
    dimension : int
        Of the constant, along the places of a row.
    centred : Centred
    """

    item: TE | FusedTE
    source: Tensor
    weights: Tensor
    added: Tensor | None
    added_to: Tensor | None
    dimension: int
    centred: Centred

    def constants(self, known: Mapping[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray] | Refused:
        """The new constants, of those that are known; or why they would not be as good."""
        before = known[self.source]
        weight = None if self.centred.weight is None else known[self.centred.weight].ravel().astype(np.float32)
        shape = [-1 if n == self.dimension else 1 for n in range(before.ndim)]
        wide = before.astype(np.float32) * (1.0 if weight is None else weight.reshape(shape))
        with np.errstate(over="ignore"):
            rounded = wide.astype(before.dtype)
        found = {self.weights: rounded}
        error = np.sqrt(np.mean(np.square(rounded.astype(np.float32) - wide, dtype=np.float64)))
        if not error <= _UNIT * np.sqrt(np.mean(np.square(wide, dtype=np.float64))):
            return Refused(f"{self.source.name} times the weights of its rows leaves the range of fp16")
        if self.added is not None:
            bias = known[self.centred.bias].ravel().astype(np.float64)
            total = np.tensordot(bias, before.astype(np.float64), (0, self.dimension))
            total = total if self.added_to is None else total + known[self.added_to].astype(np.float64)
            found[self.added] = total.astype(np.float32)
        return found


def folded_product(
    item: TE | FusedTE, centred: Centred, constants: Mapping[Tensor, np.ndarray], suffix: str
) -> FoldedProduct | Refused:
    """A product with weight and bias of its rows in its constants.

    Parameters
    ----------
    item : TE or FusedTE
    centred : Centred
        What its rows are; its `target` is what the product reads.
    constants : mapping
        The program's.
    suffix : str
        Of the names of new tensors.

    Returns
    -------
    FoldedProduct or Refused
        The reason is that the other operand is no constant, or one of another form.
    """
    for tensor in (centred.weight, centred.bias):
        if tensor is not None and tensor not in constants:
            return Refused(f"{tensor.name} is no constant")
    reduction = reduction_of(item)
    others = [t for t in reduction.inputs if t is not centred.target]
    if centred.target not in reduction.inputs or len(others) != 1 or others[0] not in constants:
        return Refused(f"{reduction.name} multiplies its rows by no constant")
    (source,) = others
    key = (reduction.op, reduction.inputs.index(source), centred.bias is None)
    made = _prototypes(key, lambda: _folded(reduction, source, centred.target, centred.bias is not None))
    if isinstance(made, Refused):
        return made
    weights = Tensor(f"{source.name}{suffix}", source.shape, source.dtype)
    own = {centred.target: centred.normal.output, source: weights}
    replaced = reduction.with_inputs([own[t] for t in reduction.inputs])
    parts = tuple(replaced if part is reduction else part for part in parts_of(item))
    added = added_to = None
    if made.adding is not None:
        added = Tensor(f"{source.name}_bias{suffix}", made.adding.inputs[1].shape, "float32")
        added_to = _constant_added(item, made.adding, constants)
        if added_to is not None:
            inputs = [[added if t is added_to else t for t in part.inputs] for part in parts]
            parts = tuple(part.with_inputs(own) for part, own in zip(parts, inputs, strict=True))
        else:
            parts = tuple(one for part in parts for one in _apart(part, made.adding, added, suffix))
    made_item = fuse(parts, item.outputs) if len(parts) > 1 else parts[0]
    return FoldedProduct(made_item, source, weights, added, added_to, made.dimension, centred)


def _apart(part: TE, adding: TE, added: Tensor, suffix: str) -> tuple[TE, ...]:
    """The reduction with what adds a constant to it behind it; another part as it is."""
    if not part.is_reduction:
        return (part,)
    total = Tensor(f"{part.output.name}{suffix}", part.output.shape, part.output.dtype)
    name = f"{part.name}{suffix}"
    after = replace(adding, name=name, inputs=(total, added), outputs=part.outputs, origin=part.origin)
    return replace(part, outputs=(total,)), after


def _constant_added(item: TE | FusedTE, adding: TE, constants: Mapping[Tensor, np.ndarray]) -> Tensor | None:
    """The constant that is added to a product wherever that is read, of the same elements as `adding` would add."""
    result = reduction_of(item).output
    readers = [part for part in parts_of(item) if result in part.inputs]
    beside = {_beside(part, result, adding) for part in readers}
    if len(beside) != 1 or result in item.outputs:
        return None
    (only,) = beside
    # Elsewhere in the item it would be another constant.
    elsewhere = [part for part in parts_of(item) if part not in readers and only in part.inputs]
    return only if only in constants and not elsewhere else None


def _beside(part: TE, result: Tensor, adding: TE) -> Tensor | None:
    """The tensor that a part adds to each element of `result` that it reads, and reads for nothing else; ``None`` if
    there is none, or not the element that `adding` would add.
    """
    read_of = [part.input_of(load_tensor(load)) for load in loads(part.body)]
    (own,) = (load for load in loads(adding.body) if adding.input_of(load_tensor(load)) is adding.inputs[1])
    found = []
    for node in collect(part.body, tirx.Add):
        if not (is_load(node.a) and is_load(node.b)):
            continue
        pair = {part.input_of(load_tensor(side)): load_indices(side) for side in (node.a, node.b)}
        if result not in pair or len(pair) != 2:
            continue
        (other,) = pair.keys() - {result}
        at = {axis.var: index for axis, index in zip(adding.axes, pair[result], strict=True)}
        expected = [substitute(index, at) for index in load_indices(own)]
        same = (other.shape, other.dtype) == (adding.inputs[1].shape, "float32")
        if not same or not all(same_expression(a, b) for a, b in zip(expected, pair[other], strict=True)):
            return None
        found.append(other)
    whole = len(set(found)) == 1 and len(found) == read_of.count(result) == read_of.count(found[0])
    return found[0] if whole else None


@dataclass(frozen=True)
class _Prototype:
    """The dimension of the constant along places of a row, and what adds the bias, which it reads after the sum."""

    dimension: int
    adding: TE | None


_prototypes: OncePer[_Prototype | Refused] = OncePer()


def _folded(reduction: TE, source: Tensor, rows: Tensor, biased: bool) -> _Prototype | Refused:
    refusal = Refused(f"{reduction.name} is no sum of products of its rows and a constant, place by place")
    node = reduce_node(reduction.body)
    if len(node.axis) != 1 or len(node.source) != 1 or not isinstance(node.source[0], tirx.Mul):
        return refusal
    operands: dict[Tensor, tuple[PrimExpr, ...]] = {}
    for operand in (node.source[0].a, node.source[0].b):
        inner = operand.value if isinstance(operand, tirx.Cast) else operand
        if not is_load(inner):
            return refusal
        operands[reduction.input_of(load_tensor(inner))] = load_indices(inner)
    if operands.keys() != {source, rows}:
        return refusal
    place = node.axis[0].var
    along = [n for n, index in enumerate(operands[source]) if any(v.same_as(place) for v in variables(index))]
    last = operands[rows][-1]
    whole = len(along) == 1 and operands[source][along[0]].same_as(place) and last.same_as(place)
    extent = int(node.axis[0].dom.extent)
    if not whole or extent != rows.shape[-1] or extent != source.shape[along[0]]:
        return refusal
    if any(v.same_as(place) for index in operands[rows][:-1] for v in variables(index)):
        return refusal
    return _Prototype(along[0], _adding(reduction, source, operands[source], along[0]) if biased else None)


def _adding(reduction: TE, source: Tensor, indices: tuple[PrimExpr, ...], dimension: int) -> TE:
    handles = Handles()
    shape = tuple(extent for n, extent in enumerate(source.shape) if n != dimension)
    added = Tensor("bias", shape, "float32")
    axes = [fresh_axis(extent, f"i{n}") for n, extent in enumerate(reduction.output.shape)]
    own = {axis.var: new.var for axis, new in zip(reduction.axes, axes, strict=True)}
    at = [substitute(index, own) for n, index in enumerate(indices) if n != dimension]
    total = read(handles.of(reduction.output), [axis.var for axis in axes])
    assert dtype_of(reduction.body) == "float32"
    return make_te("adding", axes, [total + read(handles.of(added), at)], handles.pairs(), reduction.origin)
