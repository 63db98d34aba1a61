"""A stage around one reduction, as ``total[s] = combine over r of term(s, r)``, with what its terms read told apart.

Where ``term`` is a product its factors are the *leaves*, else it is one leaf itself. Neighbouring outputs that need the
same value of a leaf can then have it from one register: a leaf that does not depend on an axis of the outputs is the
same along it, and a leaf read at ``a*s + r*d``, as the image of a convolution is, meets along ``a`` what it met along
``r`` (:func:`find_meeting`).

What follows the reduction reads its elements in place, or several of them for one of its own: the gates of a cell. The
axes along which these lie are *slots*; a thread has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from souffle.decision import Refused
from souffle.schedule.gpu.forms.blocks import BlockView, is_reduction, same_buffer
from souffle.schedule.gpu.forms.contraction_expressions import (
    Axis,
    bounded,
    depends,
    is_constant,
    narrow_indices,
    substitute_axes,
)
from souffle.schedule.gpu.forms.matrix_product import Store
from souffle.schedule.gpu.forms.memory_access import memory_step
from souffle.schedule.gpu.forms.rows import Chain, read_rows
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.forms.term_operands import narrow_operand, separate
from souffle.schedule.gpu.forms.two_operands import Operand
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, buffer_loads, cast, const_int, dtype_of

__all__ = ["Meeting", "Sum", "find_meeting", "read_sum"]

_FARTHEST = 8
"""Steps of outputs or of the window by which they may meet; beyond, a thread would hold more than it uses."""

_MOST_SLOTS = 64
"""Totals that one element of what follows may need: a thread holds all of them in registers."""

_NEUTRAL = {tirx.Add: 0.0, tirx.Mul: 1.0}
"""Totals may start from it any number of times; those of a minimum or maximum from anything."""


@dataclass(frozen=True, eq=False)
class Sum:
    """One reduction with its injective neighbours.

    Attributes
    ----------
    func : PrimFunc
        The stage.
    name : str
        The reduction block's.
    axes, inner : tuple of Axis
        Of the outputs and of the reduction, those longer than 1, in the block's order.
    leaves : tuple of Operand
        What the terms read, each before its widening cast.
    term : expression
        Over the variables that stand for the leaves.
    combine : type
        ``tirx.Add``, ``Mul``, ``Min`` or ``Max``.
    initial : expression
        The first total.
    totals : mapping of tuple of int to Var
        The finished totals in the values of `stores`, by their place along `slots`: one where there are none.
    stores : tuple of Store
        Over the axes that are no slots, and `totals`.
    slots : tuple of Axis
        Of `axes`, those along which what follows reads several elements, each at a given place.
    """

    func: tirx.PrimFunc
    name: str
    axes: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    leaves: tuple[Operand, ...]
    term: PrimExpr
    combine: type
    initial: PrimExpr
    totals: Mapping[tuple[int, ...], tirx.Var]
    stores: tuple[Store, ...]
    slots: tuple[Axis, ...] = ()

    def refused(self, reason: str) -> Refused:
        """A rule's refusal of it."""
        return Refused(f"block {self.name}: {reason}")

    @property
    def dtype(self) -> str:
        """Type of the totals."""
        return dtype_of(next(iter(self.totals.values())))

    @property
    def size(self) -> int:
        """How many totals there are."""
        return prod(axis.extent for axis in self.axes)

    @property
    def length(self) -> int:
        """How many terms a total has."""
        return prod(axis.extent for axis in self.inner)


@dataclass(frozen=True)
class Meeting:
    """A leaf's value at ``(a + along, r)`` is that at ``(a, r + across)``: one of the two is 1."""

    along: int
    across: int


def find_meeting(value: PrimExpr, axis: Axis, window: Axis) -> Meeting | None:
    """Where outputs that are neighbours along `axis` read the same value at different places of `window`."""
    if not (depends(value, axis) and depends(value, window)):
        return None
    steps = [memory_step(value, one) for one in (axis, window)]
    if any(not step or step < 0 for step in steps):
        return None
    common = gcd(*steps)
    along, across = steps[1] // common, steps[0] // common
    if min(along, across) != 1 or max(along, across) > _FARTHEST:
        return None
    # Without ranges, so that what holds of the one holds of the other wherever they are read.
    analyzer = tvm.sym.Analyzer()
    first = analyzer.simplify(substitute_axes(value, {axis.var: axis.var + along}))
    second = analyzer.simplify(substitute_axes(value, {window.var: window.var + across}))
    return Meeting(along, across) if _same(first, second, analyzer) else None


def _same(left: PrimExpr, right: PrimExpr, analyzer: tvm.sym.Analyzer) -> bool:
    """Whether two expressions are equal, their indices simplified: those of loads are not by themselves."""

    def simple(expression: PrimExpr) -> PrimExpr:
        def reload(load: TensorLoad) -> TensorLoad:
            return load.source[tuple(analyzer.simplify(index) for index in load.indices)]

        return analyzer.simplify(structural_map(expression, (TensorLoad, reload)))

    return bool(tvm_ffi.structural_equal(simple(left), simple(right), map_free_vars=False))


def read_sum(stage: StageForms) -> Sum | Refused:
    """The one reduction of a stage; or the reason why it has not this form, naming the block."""
    rows = stage.read(read_rows)
    if isinstance(rows, Refused):
        return rows
    if len(rows.chains) != 1 or rows.free:
        return Refused("blocks that do not depend on the reduction stand beside it")
    chain = rows.chains[0]
    reductions = [index for index, view in enumerate(chain.blocks) if view.reduction]
    others = [index for index in range(len(chain.blocks)) if index not in reductions]
    most = [_MOST_SLOTS if index in reductions else 1 for index in range(len(chain.blocks))]
    if len(reductions) != 1 or any(chain.columns(index) > limit for index, limit in enumerate(most)):
        return Refused("it is not one reduction whose readers take its elements in place")
    main = chain.blocks[reductions[0]]
    body, start = main.node.body, main.node.init
    if not isinstance(body, tirx.BufferStore) or not isinstance(start, tirx.BufferStore):
        return Refused(f"block {main.name} keeps several totals")
    if any(not same_buffer(buffer, body.buffer) for buffer in rows.private):
        return Refused(f"block {main.name} is read through another intermediate")
    kind = type(body.value)
    if kind not in (tirx.Add, tirx.Mul, tirx.Min, tirx.Max):
        return Refused(f"block {main.name} combines by {kind.__name__}, not by sum, product, min or max")
    both = (body.value.a, body.value.b)
    sides = [isinstance(side, TensorLoad) and same_buffer(side.source, body.buffer) for side in both]
    if sum(sides) != 1:
        return Refused(f"block {main.name} does not combine its total with one term")
    term = body.value.b if sides[0] else body.value.a
    if any(same_buffer(load.source, body.buffer) for load in buffer_loads(term)):
        return Refused(f"block {main.name} reads its total in what it adds")
    if kind in _NEUTRAL and not (is_constant(start.value) and float(start.value.value) == _NEUTRAL[kind]):
        return Refused(f"block {main.name} does not start from the neutral element")
    if dtype_of(body.value) == "bool":
        return Refused(f"block {main.name} combines truth values")

    mapping: dict[tirx.Var, PrimExpr] = {}
    axes: list[Axis] = []
    inner: list[Axis] = []
    for axis in main.node.iter_vars:
        extent = const_int(axis.dom.extent)
        fresh = Axis(tirx.Var(str(axis.var.name), "int32"), extent)
        mapping[axis.var] = fresh.var if extent > 1 else tirx.IntImm("int32", 0)
        if extent > 1:
            (inner if is_reduction(axis) else axes).append(fresh)
    known = bounded([*axes, *inner])
    term = narrow_indices(substitute_axes(term, mapping), known)
    leaves, joint = _leaves(term, kind, known)
    slotted = [axis for place, axis in enumerate(main.node.iter_vars) if _is_slot(chain, reductions[0], place)]
    if len(leaves) == 2 and not slotted:
        # The channels of a group of a convolution, which the image does not depend on, become an axis of their own.
        left, right, parts, axes = separate(leaves[0].value, leaves[1].value, axes)
        leaves = tuple(Operand(v, one.dtype, one.leaf) for v, one in zip((left, right), leaves, strict=True))
        mapping = {var: substitute_axes(value, parts) for var, value in mapping.items()}
        known = bounded([*axes, *inner])
    slots = [next(axis for axis in axes if axis.var.same_as(mapping[one.var])) for one in slotted]
    dimensions = [next((d for d, i in enumerate(body.indices) if i.same_as(one.var)), None) for one in slotted]
    if None in dimensions:
        return Refused(f"block {main.name} does not store each of its axes as a dimension")
    places = product(*(range(axis.extent) for axis in slots))
    totals = {place: tirx.Var("_".join(("total", *map(str, place))), dtype_of(body.value)) for place in places}

    def finished(load: TensorLoad) -> PrimExpr | None:
        """The total that a load of the reduction's results is; ``None`` if it is at no given slot."""
        at = [load.indices[dimension] for dimension in dimensions]
        return totals.get(tuple(int(index.value) for index in at if isinstance(index, tirx.IntImm)))

    stores = []
    for index in others:
        store = _store(chain, index, reductions[0], mapping, finished, body.buffer, known)
        if isinstance(store, Refused):
            return store
        stores.append(store)
    if max((prod(const_int(e) for e in b.shape) for b in _buffers(leaves, stores)), default=0) >= 2**31:
        return Refused(f"block {main.name} touches a tensor too large for 32-bit indices")
    axes, inner, stores, slots = tuple(axes), tuple(inner), tuple(stores), tuple(slots)
    return Sum(stage.func, main.name, axes, inner, leaves, joint, kind, start.value, totals, stores, slots)


def _is_slot(chain: Chain, index: int, place: int) -> bool:
    """Whether an axis of a block's results is none of the chain's rows."""
    axis = chain.blocks[index].node.iter_vars[place]
    return not is_reduction(axis) and const_int(axis.dom.extent) > 1 and place not in chain.rows[index]


def _buffers(leaves: Sequence[Operand], stores: Sequence[Store]) -> list:
    loads = [load for one in (*leaves, *stores) for load in buffer_loads(one.value)]
    return [load.source for load in loads] + [store.buffer for store in stores]


def _leaves(term: PrimExpr, kind: type, analyzer: tvm.sym.Analyzer) -> tuple[tuple[Operand, ...], PrimExpr]:
    """The factors of a sum's term that read something, and the term over what stands for them."""
    leaves: list[Operand] = []

    def leaf(value: PrimExpr) -> PrimExpr:
        if not buffer_loads(value):
            return value
        narrow = narrow_operand(value)
        for known in leaves:
            if _same(known.value, narrow, analyzer):
                return cast(known.leaf, dtype_of(value))
        leaves.append(Operand(narrow, dtype_of(narrow), tirx.Var(f"leaf{len(leaves)}", dtype_of(narrow))))
        return cast(leaves[-1].leaf, dtype_of(value))

    def split(value: PrimExpr) -> PrimExpr:
        if isinstance(value, tirx.Mul):
            return split(value.a) * split(value.b)
        return leaf(value)

    # Zeros stand for what lies beyond the end of a sum, and a product of zeros is what it should add.
    joint = split(term) if kind is tirx.Add else leaf(term)
    return tuple(leaves), joint


def _store(
    chain: Chain,
    index: int,
    main: int,
    mapping: dict[tirx.Var, PrimExpr],
    finished: Callable[[TensorLoad], PrimExpr | None],
    buffer: object,
    analyzer: tvm.sym.Analyzer,
) -> Store | Refused:
    """What a block after the reduction stores, over the reduction's axes."""
    view: BlockView = chain.blocks[index]
    if not isinstance(view.node.body, tirx.BufferStore):
        return Refused(f"block {view.name} stores several values")
    own, theirs = ([chain.blocks[i].node.iter_vars[p] for p in chain.rows[i]] for i in (index, main))
    place: dict[tirx.Var, PrimExpr] = {axis.var: tirx.IntImm("int32", 0) for axis in view.node.iter_vars}
    extents = [[const_int(axis.dom.extent) for axis in group] for group in (own, theirs)]
    if extents[0] == extents[1]:
        place.update({mine.var: mapping[other.var] for mine, other in zip(own, theirs, strict=True)})
    else:
        # The n-th element of the one is the n-th of the other, whatever their shapes.
        rest: PrimExpr = tirx.IntImm("int32", 0)
        for other, extent in zip(theirs, extents[1], strict=True):
            rest = rest * extent + mapping[other.var]
        for mine, extent in reversed(list(zip(own, extents[0], strict=True))):
            place[mine.var] = tirx.floormod(rest, extent)
            rest = tirx.floordiv(rest, extent)
    store = view.node.body
    known = [finished(load) for load in buffer_loads(store.value) if same_buffer(load.source, buffer)]
    if any(total is None for total in known):
        return Refused(f"block {view.name} does not read its elements of {chain.blocks[main].name} at given places")

    def read(load: TensorLoad) -> PrimExpr:
        return finished(load) if same_buffer(load.source, buffer) else load

    value = structural_map(store.value, (TensorLoad, read))
    indices = tuple(narrow_indices(substitute_axes(i, place), analyzer) for i in store.indices)
    return Store(store.buffer, indices, narrow_indices(substitute_axes(value, place), analyzer), None)
