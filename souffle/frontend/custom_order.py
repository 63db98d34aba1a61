"""Searching, sorting, scanning and scattering as reductions over the positions that may contribute.

That is quadratic in the length of one axis, but every element is computed on its own, as the rest of the compiler wants
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from tvm import te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, check_length, defines, int_imm, position_on_axis
from souffle.frontend.refusal import Obstacle
from souffle.program.extrema import infinite, is_floating
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["is_peak"]


def is_peak(value: PrimExpr, peak: PrimExpr) -> PrimExpr:
    """Whether an element is the extreme one of its row, which is NaN where the row holds one, as NumPy has it."""
    if not is_floating(dtype_of(value)):
        return value == peak
    # Comparisons with NaN do not hold: the second is true of NaN alone.
    least = tirx.const(-math.inf, dtype_of(value))
    return tirx.Or(value == peak, tirx.Select(value >= least, tirx.const(False, "bool"), tirx.const(True, "bool")))


@defines("ArgMax", "ArgMin")
def _arg_reduce(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    data, shape = operands.tensor(0), operands.shape(0)
    axis = attribute(node, "axis", 0) % len(shape)
    extent, last = shape[axis], bool(attribute(node, "select_last_index", 0))
    outer = (*shape[:axis], *shape[axis + 1 :])
    best_of, first_of = (te.max if node.op_type == "ArgMax" else te.min), (te.max if last else te.min)

    def best(*at):
        r = te.reduce_axis((0, extent), name="r")
        return best_of(data(*at[:axis], r, *at[axis:]), axis=r)

    peak = te.compute(outer, best, name="peak")
    nowhere = int_imm(0 if last else extent - 1)

    def position(*at):
        r = te.reduce_axis((0, extent), name="r")
        return first_of(tirx.Select(is_peak(data(*at[:axis], r, *at[axis:]), peak(*at)), r.var, nowhere), axis=r)

    where = te.compute(outer, position, name="position")
    keep = attribute(node, "keepdims", 1)

    def result(*at):
        kept = (*at[:axis], *at[axis + 1 :]) if keep else at
        return where(*kept).astype("int64")

    return [te.compute((*shape[:axis], 1, *shape[axis + 1 :]) if keep else outer, result, name="index")]


@defines("CumSum", "CumProd")
def _cumulate(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    along = operands.constant(1)
    if along is None:
        return None
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    axis = int(along.reshape(-1)[0]) % len(shape)
    extent = shape[axis]
    check_length(extent)
    exclusive, reverse = attribute(node, "exclusive", 0), attribute(node, "reverse", 0)
    neutral = tirx.const(0 if node.op_type == "CumSum" else 1, dtype)
    combine = te.sum if node.op_type == "CumSum" else te.comm_reducer(lambda a, b: a * b, lambda t: tirx.const(1, t))

    def element(*at):
        r = te.reduce_axis((0, extent), name="r")
        here = at[axis]
        if reverse:
            covered = r > here if exclusive else r >= here
        else:
            covered = r < here if exclusive else r <= here
        return combine(tirx.Select(covered, data(*at[:axis], r, *at[axis + 1 :]), neutral), axis=r)

    return [te.compute(shape, element, name="cumulate")]


@defines("TopK")
def _top_k(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    count = operands.constant(1) if operands.present(1) else np.array(attribute(node, "k", 1))
    if count is None:
        return None
    data, shape = operands.tensor(0), operands.shape(0)
    axis = attribute(node, "axis", -1) % len(shape)
    extent, k = shape[axis], int(count.reshape(-1)[0])
    if not 0 <= k <= extent:
        raise Obstacle(f"its K is {k}, and its axis {axis} has {extent} elements", f"give a K of 0 to {extent}")
    check_length(extent)
    largest = attribute(node, "largest", 1)

    def rank(*at):
        r = te.reduce_axis((0, extent), name="r")
        other, mine = data(*at[:axis], r, *at[axis + 1 :]), data(*at)
        one, none = int_imm(1), int_imm(0)
        ahead = other > mine if largest else other < mine
        tied = tirx.And(other == mine, r < at[axis])
        counted = tirx.Select(tirx.Or(ahead, tied), one, none)
        if is_floating(operands.dtype(0)):
            # NaN is greater than every number, as NumPy sorts.
            least = tirx.const(-math.inf, operands.dtype(0))
            before, after = (one, none) if largest else (none, one)
            beside_nan = tirx.Select(other >= least, after, tirx.Select(r < at[axis], one, none))
            counted = tirx.Select(mine >= least, tirx.Select(other >= least, counted, before), beside_nan)
        return te.sum(counted, axis=r)

    ranks = te.compute(shape, rank, name="rank")
    result_shape = (*shape[:axis], k, *shape[axis + 1 :])

    def chosen(value, zero):
        def element(*at):
            r = te.reduce_axis((0, extent), name="r")
            there = (*at[:axis], r, *at[axis + 1 :])
            return te.sum(tirx.Select(ranks(*there) == at[axis], value(there, r), zero), axis=r)

        return element

    index = te.compute(result_shape, chosen(lambda there, r: r.var, int_imm(0)), name="place")
    indices = te.compute(result_shape, lambda *at: index(*at).astype("int64"), name="indices")
    values = te.compute(
        result_shape,
        lambda *at: data(*at[:axis], tirx.max(int_imm(0), tirx.min(index(*at), int_imm(extent - 1))), *at[axis + 1 :]),
        name="values",
    )
    return [values, indices]


@defines("ScatterElements", "Scatter")
def _scatter_elements(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    shape, index_shape = operands.shape(0), operands.shape(1)
    indices, updates = operands.tensor(1), operands.tensor(2)
    axis = attribute(node, "axis", 0) % len(shape)
    extent = index_shape[axis]
    check_length(extent)

    def at_update(at, r):
        return (*at[:axis], r, *at[axis + 1 :])

    def inside(at):
        tests = [at[k] < index_shape[k] for k in range(len(shape)) if k != axis and index_shape[k] < shape[k]]
        return tests

    def clipped(at):
        return tuple(
            at[k] if k == axis or index_shape[k] == shape[k] else tirx.min(at[k], int_imm(index_shape[k] - 1))
            for k in range(len(shape))
        )

    def hits(at, r):
        test = position_on_axis(indices(*at_update(clipped(at), r)), shape[axis]) == at[axis]
        for bound in inside(at):
            test = tirx.And(bound, test)
        return test

    found = _Updates((extent,), len(shape), hits, lambda at, r: updates(*at_update(clipped(at), r[0])))
    return _scattered(node, operands, found)


@defines("ScatterND")
def _scatter_nd(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    shape, index_shape = operands.shape(0), operands.shape(1)
    indices, updates = operands.tensor(1), operands.tensor(2)
    depth, places = index_shape[-1], index_shape[:-1]
    check_length(math.prod(places))

    def hits(at, *r):
        test: PrimExpr = tirx.const(True, "bool")
        for k in range(depth):
            same = position_on_axis(indices(*r, k), shape[k]) == at[k]
            test = same if k == 0 else tirx.And(test, same)
        return test

    return _scattered(node, operands, _Updates(places, depth, hits, lambda at, r: updates(*r, *at[depth:])))


@dataclass(frozen=True)
class _Updates:
    """The updates of a scatter.

    Attributes
    ----------
    places : tuple of int
        The shape of what has one index each.
    depth : int
        How many of the result's axes an index speaks of, the first ones; an update is a slice along the others.
    hits : callable
        From an element's place (of which the first `depth` indices matter) and those of an update, whether that is it.
    value : callable
        From both, what the update has for the element.
    """

    places: tuple[int, ...]
    depth: int
    hits: Callable[..., PrimExpr]
    value: Callable[[Sequence[PrimExpr], Sequence[PrimExpr]], PrimExpr]

    def axes(self) -> list:
        """New axes to reduce along, of all updates."""
        return [te.reduce_axis((0, extent), name=f"r{k}") for k, extent in enumerate(self.places)]

    def last(self, shape: tuple[int, ...]) -> te.Tensor:
        """Which update is the last that hits each slice of a tensor, counted through; -1 for none."""

        def last_hit(*at):
            r = self.axes()
            return te.max(tirx.Select(self.hits(at, *r), _counted(r, self.places), int_imm(-1)), axis=r)

        # A scalar has no axis to be found on.
        return te.compute(shape[: self.depth or len(shape)], last_hit, name="last_hit")

    def place(self, flat: PrimExpr) -> list[PrimExpr]:
        """The indices of an update that is counted through, of the first where it is none."""
        flat = tirx.max(flat, int_imm(0))
        place: list[PrimExpr] = []
        for extent in reversed(self.places):
            place.insert(0, tirx.floormod(flat, extent))
            flat = tirx.floordiv(flat, extent)
        return place


def _scattered(node: onnx.NodeProto, operands: NodeOperands, updates: _Updates) -> list[te.Tensor] | None:
    """Scatter as a gather: every element looks for the updates that hit it; those of a slice do so together."""
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    reduction = attribute(node, "reduction", b"none").decode()

    if reduction == "none":
        return _chosen(operands, updates, updates.value)
    reducers: dict[str, tuple[Callable, PrimExpr, Callable]] = {
        "add": (te.sum, tirx.const(0, dtype), lambda a, b: a + b),
        "mul": (
            te.comm_reducer(lambda a, b: a * b, lambda t: tirx.const(1, t)),
            tirx.const(1, dtype),
            lambda a, b: a * b,
        ),
        "max": (te.max, infinite(tirx.min_value(dtype)), tirx.Max),
        "min": (te.min, infinite(tirx.max_value(dtype)), tirx.Min),
    }
    if reduction not in reducers or not updates.places:
        return None
    combine, neutral, join = reducers[reduction]
    rows, width = math.prod(shape[: updates.depth]), math.prod(shape[updates.depth :])
    count = math.prod(updates.places)
    if rows + count * width < rows * width:
        # Updates of one slice become one of them, and each slice looks for its own: rows * count comparisons and
        # count * count * width, in place of rows * width * count.
        slices = _slices(operands)
        total = _together(operands, updates, slices, combine, neutral)
        found = replace(updates, hits=lambda at, *r: slices(*r) == _counted(at, shape[: updates.depth]))
        return _chosen(operands, found, lambda at, r: join(data(*at), total(*r, *at[updates.depth :])))

    def total_of(*at):
        r = updates.axes()
        return combine(tirx.Select(updates.hits(at, *r), updates.value(at, r), neutral), axis=r)

    sums = te.compute(shape, total_of, name="hits")
    return [te.compute(shape, lambda *at: join(data(*at), sums(*at)), name="scatter")]


def _chosen(operands: NodeOperands, updates: _Updates, value: Callable[..., PrimExpr]) -> list[te.Tensor]:
    """The result: `value` of an element and the last update that hits it; as it was where none does."""
    data, shape = operands.tensor(0), operands.shape(0)
    last = updates.last(shape)

    def element(*at):
        found = last(*at[: len(last.shape)])
        return tirx.Select(found >= 0, value(at, updates.place(found)), data(*at))

    return [te.compute(shape, element, name="scatter")]


def _counted(at: Sequence[PrimExpr], shape: Sequence[int]) -> PrimExpr:
    """The number of an element where those of a tensor are counted through."""
    flat: PrimExpr = int_imm(0)
    for index, extent in zip(at, shape, strict=False):
        flat = flat * extent + index
    return flat


def _slices(operands: NodeOperands) -> te.Tensor:
    """To which slice each update of a ScatterND goes.

    By itself, since two of them are compared: TVM takes seconds to simplify that two clipped indices are equal.
    """
    shape, (*places, depth) = operands.shape(0), operands.shape(1)
    indices = operands.tensor(1)

    def number(*at):
        return _counted([position_on_axis(indices(*at, k), shape[k]) for k in range(depth)], shape)

    return te.compute(places, number, name="slice")


def _together(
    operands: NodeOperands, found: _Updates, slices: te.Tensor, combine: Callable[..., PrimExpr], neutral: PrimExpr
) -> te.Tensor:
    """For each update all that go to the same slice, combined."""
    updates, rank = operands.tensor(2), len(found.places)

    def total(*at):
        r = found.axes()
        return combine(tirx.Select(slices(*at[:rank]) == slices(*r), updates(*r, *at[rank:]), neutral), axis=r)

    return te.compute((*found.places, *operands.shape(0)[found.depth :]), total, name="hits")


@defines("Hardmax")
def _hardmax(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    axis = attribute(node, "axis", -1) % len(shape)
    extent = shape[axis]
    outer = (*shape[:axis], *shape[axis + 1 :])

    def best(*at):
        r = te.reduce_axis((0, extent), name="r")
        return te.max(data(*at[:axis], r, *at[axis:]), axis=r)

    peak = te.compute(outer, best, name="peak")

    def first(*at):
        r = te.reduce_axis((0, extent), name="r")
        here = is_peak(data(*at[:axis], r, *at[axis:]), peak(*at))
        return te.min(tirx.Select(here, r.var, int_imm(extent - 1)), axis=r)

    where = te.compute(outer, first, name="position")

    def element(*at):
        return tirx.Select(where(*at[:axis], *at[axis + 1 :]) == at[axis], tirx.const(1, dtype), tirx.const(0, dtype))

    return [te.compute(shape, element, name="hardmax")]
