"""A stage around one sum of products, brought to one form: ``total[b, m, n] = sum over k of left[b, m, k] * right[b, n, k]``.

Theorem behind it. Let the reduction be ``C[s] = sum over r of L(s, r) * R(s, r)``. Sort the axes of ``s`` by which factor
depends on them: both (batch), only L (rows), only R (columns). Fusing each class and the axes of ``r`` into one axis is a
bijection of the iteration domain, and neither factor reads an axis outside its classes, so the result is a batched matrix
product. A convolution becomes the product of the weights with the image-to-column matrix, which is never stored: the
index arithmetic stays inside ``L`` and ``R``.

Blocks ahead of the reduction are substituted into ``L`` and ``R``. Blocks after it must read the reduction at one place
``h(v)`` for their element ``v``, with ``h`` invertible on its image; they are then functions of ``(b, m, n)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Range, TensorLoad

from souffle.tvm_compat import PrimExpr, const_int, substitute, variables

__all__ = ["Axis", "Contraction", "NotAContraction", "Operand", "Store", "canonical_contraction"]

_MAX_EXPRESSION_NODES = 4000
"""Beyond it substituting the neighbours into the reduction would cost more compile time than a kernel of their own."""

_BINARY = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max, tirx.Div, tirx.Mod)
_COMPARE = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)


class NotAContraction(Exception):
    """Why a function has not the canonical form; becomes the reason of a ``Refusal``."""


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the reduction block, or one factor of it: ``var`` over ``[0, extent)``."""

    var: tirx.Var
    extent: int


@dataclass(frozen=True, eq=False)
class Operand:
    """One factor of the products.

    Attributes
    ----------
    value : expression
        Over the variables of the axes it depends on; reads global buffers only.
    dtype : str
        Its type, before a widening cast that ``Contraction.update`` applies instead.
    leaf : Var
        What stands for it in ``Contraction.update``.
    """

    value: PrimExpr
    dtype: str
    leaf: tirx.Var


@dataclass(frozen=True, eq=False)
class Store:
    """One output: ``buffer[indices] = value`` where ``where`` holds (everywhere if it is ``None``)."""

    buffer: Any
    indices: tuple[PrimExpr, ...]
    value: PrimExpr
    where: PrimExpr | None


@dataclass(frozen=True, eq=False)
class Contraction:
    """The canonical form. Groups of axes are fused row-major, the first axis outermost; unit axes are dropped.

    Attributes
    ----------
    name : str
        The reduction block's name.
    batch, rows, columns, inner : tuple of Axis
        The last axis of ``columns`` (or else of ``batch``) is the innermost of the first output.
    left, right : Operand
        Over batch, rows, inner and over batch, columns, inner.
    total : Var
        The accumulator in ``update`` and in the values of ``stores``.
    update : expression
        The new total, over ``total`` and the leaves.
    initial : expression
        The first total.
    product_sum : bool
        Whether ``update`` is ``total + left * right`` up to casts, so that zero operands change nothing.
    stores : tuple of Store
        Over the axes and ``total``.
    """

    name: str
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    left: Operand
    right: Operand
    total: tirx.Var
    update: PrimExpr
    initial: PrimExpr
    product_sum: bool
    stores: tuple[Store, ...]

    @property
    def dtype(self) -> str:
        """Type of the accumulator."""
        return str(self.total.ty.dtype)

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Batch, rows, columns, inner."""
        return tuple(prod(a.extent for a in group) for group in (self.batch, self.rows, self.columns, self.inner))


@dataclass(frozen=True, eq=False)
class _Block:
    name: str
    spatial: tuple[Axis, ...]
    reduction: tuple[Axis, ...]
    buffer: Any
    indices: tuple[PrimExpr, ...]
    value: PrimExpr
    initial: PrimExpr | None


def dtype_of(expression: PrimExpr) -> str:
    """The scalar type of an expression."""
    return str(expression.ty.dtype)


def cast(expression: PrimExpr, dtype: str) -> PrimExpr:
    """`expression` as `dtype`, unchanged if it is already."""
    return expression if dtype_of(expression) == dtype else tirx.Cast(dtype, expression)


def substitute_axes(expression: PrimExpr, mapping: Mapping[tirx.Var, PrimExpr]) -> PrimExpr:
    """Substitute variables, each value cast to the type of its variable."""
    return substitute(expression, {var: cast(value, dtype_of(var)) for var, value in mapping.items()})


def buffer_loads(expression: PrimExpr) -> list[TensorLoad]:
    """All reads of buffers in `expression`."""
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(expression, (TensorLoad, found.append))
    return found


def bounded(axes: Sequence[Axis]) -> tvm.sym.Analyzer:
    """An analyzer that knows the ranges of `axes`."""
    analyzer = tvm.sym.Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, Range(0, axis.extent))
    return analyzer


def _blocks(func: tirx.PrimFunc) -> list[_Block]:
    root = func.body.block if hasattr(func.body, "block") else None
    if root is None:
        raise NotAContraction("the function has no root block")
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    blocks = []
    for nest in nests:
        bound = {}
        while isinstance(nest, tirx.For):
            bound[nest.loop_var] = nest
            nest = nest.body
        if not hasattr(nest, "block"):
            raise NotAContraction("a nest is not loops around one block")
        block = nest.block
        if not isinstance(block.body, tirx.BufferStore):
            raise NotAContraction(f"block {block.name_hint} stores more than one value")
        kinds: dict[bool, list[Axis]] = {True: [], False: []}
        for axis in block.iter_vars:
            kinds[axis.iter_type == tirx.IterVar.CommReduce].append(Axis(axis.var, const_int(axis.dom.extent)))
        store = block.body
        initial = block.init.value if isinstance(block.init, tirx.BufferStore) else None
        spatial, reduction = tuple(kinds[False]), tuple(kinds[True])
        blocks.append(
            _Block(block.name_hint, spatial, reduction, store.buffer, tuple(store.indices), store.value, initial)
        )
    return blocks


def _count_nodes(expression: PrimExpr) -> int:
    count = 0

    def see(_: Any) -> None:
        nonlocal count
        count += 1

    tvm_ffi.structural_walk(expression, ((*_BINARY, Call, TensorLoad, tirx.Cast, tirx.Select), see))
    return count


def _narrow(expression: PrimExpr, analyzer: tvm.sym.Analyzer) -> PrimExpr:
    """Do 64-bit index arithmetic in 32 bits where the bounds of the axes show that it fits, and simplify.

    Exporters write 64-bit shapes; casts between the widths hide from TVM's simplifier what indices have in common.
    """
    limit = 2**31 - 1

    def fits(value: PrimExpr) -> bool:
        bound = analyzer.const_int_bound(value)
        return -limit <= bound.min_value and bound.max_value <= limit

    def small(value: PrimExpr) -> PrimExpr | None:
        if isinstance(value, tirx.IntImm) and abs(int(value.value)) <= limit:
            return tirx.IntImm("int32", int(value.value))
        if isinstance(value, tirx.Cast) and dtype_of(value.value) == "int32":
            return value.value
        return None

    def rewrite(node: PrimExpr) -> PrimExpr:
        if dtype_of(node.a) != "int64":
            return node
        a, b = small(node.a), small(node.b)
        if a is None or b is None:
            return node
        if isinstance(node, _COMPARE):
            return type(node)(a, b)
        return tirx.Cast("int64", type(node)(a, b)) if fits(node) else node

    def recast(node: tirx.Cast) -> PrimExpr:
        narrow = small(node.value)
        return cast(narrow, "int32") if narrow is not None and dtype_of(node) == "int32" else node

    def reload(load: TensorLoad) -> PrimExpr:
        indices = [small(i) if dtype_of(i) == "int64" else None for i in load.indices]
        if all(i is None for i in indices):
            return load
        chosen = [old if new is None else new for old, new in zip(load.indices, indices, strict=True)]
        return load.source[tuple(chosen)]

    rules = [((*_BINARY, *_COMPARE), rewrite), (tirx.Cast, recast), (TensorLoad, reload)]
    return analyzer.simplify(tvm_ffi.structural_map(expression, rules))


class _Inliner:
    """Substitutes the values of injective blocks into reads of their buffers."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, _Block, PrimExpr]] = []

    def define(self, block: _Block, value: PrimExpr) -> None:
        self._known.append((block.buffer, block, value))

    def expand(self, expression: PrimExpr) -> PrimExpr:
        def inline(load: TensorLoad) -> PrimExpr:
            for buffer, block, value in self._known:
                if load.source.same_as(buffer):
                    mapping = {i: index for i, index in zip(block.indices, load.indices, strict=True)}
                    return substitute_axes(value, mapping)
            return load

        result = tvm_ffi.structural_map(expression, (TensorLoad, inline))
        if _count_nodes(result) > _MAX_EXPRESSION_NODES:
            raise NotAContraction("substituting the blocks around the reduction makes its expression too long")
        return result


def _index_vars(block: _Block) -> None:
    """Demand that a block writes each element at its own axes."""
    spatial = [axis.var for axis in block.spatial]
    if len(block.indices) != len(spatial) or any(
        not isinstance(index, tirx.Var) or not any(index.same_as(var) for var in spatial) for index in block.indices
    ):
        raise NotAContraction(f"block {block.name} does not write at its own axes")


def _fresh_axes(axes: Sequence[Axis]) -> tuple[dict[tirx.Var, PrimExpr], list[Axis]]:
    """32-bit stand-ins for `axes`, a constant 0 for a unit axis; and the non-unit ones."""
    mapping: dict[tirx.Var, PrimExpr] = {}
    fresh = []
    for axis in axes:
        if axis.extent == 1:
            mapping[axis.var] = tirx.IntImm("int32", 0)
            continue
        new = Axis(tirx.Var(str(axis.var.name), "int32"), axis.extent)
        mapping[axis.var] = new.var
        fresh.append(new)
    return mapping, fresh


def _is_constant(expression: PrimExpr) -> bool:
    return isinstance(expression, tirx.IntImm | tirx.FloatImm)


def _is_branch(expression: PrimExpr) -> bool:
    return isinstance(expression, Call) and getattr(expression.op, "name", "") == "tirx.if_then_else"


_Wrap = Callable[[PrimExpr, PrimExpr], PrimExpr]


@dataclass(frozen=True, eq=False)
class _Split:
    """``term == wrap(left, right)``; `product` says that wrap multiplies them, up to casts of the result."""

    left: PrimExpr
    right: PrimExpr
    wrap: _Wrap
    product: bool


def _factors(expression: PrimExpr) -> list[PrimExpr]:
    if isinstance(expression, tirx.Mul):
        return _factors(expression.a) + _factors(expression.b)
    return [expression]


def _same_axes(left: set[int], right: set[int]) -> bool:
    return left <= right or right <= left


def _split_term(term: PrimExpr, spatial: Sequence[Axis]) -> _Split:
    """Find the two operands of a reduction's term."""

    def spatial_set(expression: PrimExpr) -> set[int]:
        used = variables(expression)
        return {i for i, axis in enumerate(spatial) if any(axis.var.same_as(v) for v in used)}

    if isinstance(term, tirx.Cast):
        inner = _split_term(term.value, spatial)
        dtype = dtype_of(term)
        return _Split(inner.left, inner.right, lambda a, b: tirx.Cast(dtype, inner.wrap(a, b)), inner.product)
    if isinstance(term, tirx.Mul):
        factors = _factors(term)
        sets = [spatial_set(f) for f in factors]
        first = max(range(len(factors)), key=lambda i: len(sets[i]))
        apart = [i for i in range(len(factors)) if not sets[i] <= sets[first]]
        # Nothing apart (a product such as A[i, k] * x[k], or a grouped convolution): the largest other factor.
        rest = apart or [i for i in range(len(factors)) if i != first and buffer_loads(factors[i])]
        if not rest:
            raise NotAContraction("the summed term has one operand only")
        second = max(rest, key=lambda i: len(sets[i]))
        groups: dict[int, list[PrimExpr]] = {first: [], second: []}
        for i, factor in enumerate(factors):
            home = first if i == first or (i != second and sets[i] <= sets[first]) else second
            if i not in (first, second) and home == second and not sets[i] <= sets[second]:
                raise NotAContraction("the summed term is a product of three operands over different axes")
            groups[home].append(factor)
        # Keeps the operands in the order of the text, so that rounding is that of the original where there are two.
        order = sorted(groups)
        left, right = (_multiply(groups[i]) for i in order)
        return _Split(left, right, lambda a, b: a * b, True)
    if _is_branch(term) or isinstance(term, tirx.Select):
        return _split_branch(term, spatial)
    if isinstance(term, (*_BINARY, *_COMPARE)):
        kind = type(term)
        for this, other, put in (
            (term.a, term.b, lambda x, c: kind(x, c)),
            (term.b, term.a, lambda x, c: kind(c, x)),
        ):
            if not buffer_loads(other):
                inner = _split_term(this, spatial)
                return _Split(inner.left, inner.right, lambda a, b: put(inner.wrap(a, b), other), False)
        if not _same_axes(spatial_set(term.a), spatial_set(term.b)):
            return _Split(term.a, term.b, lambda a, b: kind(a, b), False)
        for power in (term.a, term.b):
            if isinstance(power, tirx.Mul) and term.a.same_as(power) and term.b.same_as(power):
                raise NotAContraction("the summed term is a square")
    if isinstance(term, Call) and len(term.args) == 1:
        inner = _split_term(term.args[0], spatial)
        return _Split(inner.left, inner.right, lambda a, b: Call(term.op, [inner.wrap(a, b)], ret_ty=term.ty), False)
    raise NotAContraction("the summed term has one operand only")


def _multiply(factors: Sequence[PrimExpr]) -> PrimExpr:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def _split_branch(term: PrimExpr, spatial: Sequence[Axis]) -> _Split:
    """``if c: x * y else: z * w`` is ``(if c: x else z) * (if c: y else w)``; a constant 0 stands for ``0 * 0``."""
    if isinstance(term, tirx.Select):
        condition, yes, no = term.condition, term.true_value, term.false_value
    else:
        condition, yes, no = term.args

    def both(a: PrimExpr, b: PrimExpr) -> PrimExpr:
        return tirx.if_then_else(condition, a, b)

    def zero(expression: PrimExpr) -> bool:
        return _is_constant(expression) and float(expression.value) == 0.0

    first = None if zero(yes) else _split_term(yes, spatial)
    second = None if zero(no) else _split_term(no, spatial)
    present = [s for s in (first, second) if s is not None]
    if not present or not all(s.product for s in present):
        raise NotAContraction("the summed term is a selection between terms that are not products")

    def part(side: str) -> PrimExpr:
        known = getattr(present[0], side)
        a, b = (tirx.const(0, dtype_of(known)) if s is None else getattr(s, side) for s in (first, second))
        if dtype_of(a) != dtype_of(b):
            raise NotAContraction("the summed term selects between operands of different types")
        return both(a, b)

    return _Split(part("left"), part("right"), present[0].wrap, True)


def _narrow_operand(value: PrimExpr) -> PrimExpr:
    """`value` before its widening cast, so that the narrow type is what is staged; selections are looked through."""
    if isinstance(value, tirx.Cast) and tvm.DataType(dtype_of(value.value)).bits < tvm.DataType(dtype_of(value)).bits:
        return _narrow_operand(value.value) if buffer_loads(value.value) else value
    if _is_branch(value):
        condition, yes, no = value.args
        a, b = _narrow_operand(yes), _narrow_operand(no)
        if _is_constant(yes) and float(yes.value) == 0.0:
            a = tirx.const(0, dtype_of(b))
        if _is_constant(no) and float(no.value) == 0.0:
            b = tirx.const(0, dtype_of(a))
        if dtype_of(a) == dtype_of(b) != dtype_of(value):
            return tirx.if_then_else(condition, a, b)
    return value


def _split_points(expressions: Sequence[PrimExpr], axis: Axis) -> list[int]:
    """Extents of an inner factor by which `axis` may be split to separate what each operand reads of it."""
    found: set[int] = set()
    bounds = 0

    def see(node: PrimExpr) -> None:
        nonlocal bounds
        if not isinstance(node.b, tirx.IntImm) or not any(axis.var.same_as(v) for v in variables(node.a)):
            return
        value = abs(int(node.b.value))
        if isinstance(node, tirx.FloorDiv | tirx.FloorMod | tirx.Div | tirx.Mod):
            found.add(value)
        elif isinstance(node.a, tirx.Var):
            bounds = gcd(bounds, value + (1 if isinstance(node, tirx.LE | tirx.GT) else 0))

    for expression in expressions:
        tvm_ffi.structural_walk(
            expression, ((tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, *_COMPARE), see)
        )
    found.add(bounds)
    return sorted(c for c in found if 1 < c < axis.extent and axis.extent % c == 0)


def _depends(expression: PrimExpr, axis: Axis) -> bool:
    return any(axis.var.same_as(v) for v in variables(expression))


def _separate(left: PrimExpr, right: PrimExpr, axes: list[Axis]) -> tuple[PrimExpr, PrimExpr, dict[tirx.Var, PrimExpr], list[Axis]]:
    """Split axes that both operands read, where one of them reads only the outer or only the inner factor.

    Grouped convolution: the image is read at ``f // (F / G)``, so ``f = (g, i)`` makes g a batch axis and i one of the
    weights alone. Operands joined by a condition on an axis (horizontal transformation) come apart the same way.
    """
    mapping: dict[tirx.Var, PrimExpr] = {}
    result: list[Axis] = []
    for axis in axes:
        parts = [axis]
        if _depends(left, axis) and _depends(right, axis):
            for size in _split_points((left, right), axis):
                name = str(axis.var.name)
                outer = Axis(tirx.Var(f"{name}_outer", "int32"), axis.extent // size)
                inner = Axis(tirx.Var(f"{name}_inner", "int32"), size)
                value = outer.var * size + inner.var
                analyzer = bounded([*result, *axes, outer, inner])
                new = [analyzer.simplify(substitute_axes(e, {axis.var: value})) for e in (left, right)]
                if any(not _depends(e, part) for e in new for part in (outer, inner)):
                    left, right = new
                    mapping[axis.var] = value
                    parts = [outer, inner]
                    break
        result.extend(parts)
    return left, right, mapping, result


def canonical_contraction(func: tirx.PrimFunc) -> Contraction:
    """Bring a function of one sum of products and injective blocks around it to canonical form.

    Raises
    ------
    NotAContraction
        With the reason, naming the block.
    """
    blocks = _blocks(func)
    reductions = [b for b in blocks if b.reduction]
    if len(reductions) != 1:
        raise NotAContraction(f"{len(reductions)} reduction blocks, one is needed")
    main = reductions[0]
    intermediate = list(func.body.block.alloc_buffers)

    def is_output(block: _Block) -> bool:
        return not any(block.buffer.same_as(b) for b in intermediate)

    for block in blocks:
        _index_vars(block)
    inliner = _Inliner()
    after = False
    dependent: list[_Block] = []
    values: dict[int, PrimExpr] = {}
    term_value = main.value
    for block in blocks:
        if block is main:
            term_value = inliner.expand(main.value)
            after = True
            continue
        value = inliner.expand(block.value)
        inliner.define(block, value)
        reads_total = after and any(load.source.same_as(main.buffer) for load in buffer_loads(value))
        if is_output(block):
            if not reads_total:
                raise NotAContraction(f"output block {block.name} does not depend on the reduction {main.name}")
            dependent.append(block)
            values[id(block)] = value

    mapping, axes = _fresh_axes(main.spatial)
    reduce_mapping, inner = _fresh_axes(main.reduction)
    analyzer = bounded([*axes, *inner])
    total = tirx.Var("total", dtype_of(main.value))

    def accumulate(load: TensorLoad) -> PrimExpr:
        return total if load.source.same_as(main.buffer) else load

    update = tvm_ffi.structural_map(term_value, (TensorLoad, accumulate))
    update = _narrow(substitute_axes(update, {**mapping, **reduce_mapping}), analyzer)
    if not isinstance(update, tirx.Add | tirx.Max | tirx.Min | tirx.Mul) or main.initial is None:
        raise NotAContraction(f"block {main.name} combines by {type(update).__name__}, not by sum, product, min or max")
    if update.b.same_as(total):
        combine, term = type(update), update.a
    elif update.a.same_as(total):
        combine, term = type(update), update.b
    else:
        raise NotAContraction(f"block {main.name} does not combine its total with one term")
    split = _split_term(term, axes)
    wide = (dtype_of(split.left), dtype_of(split.right))
    left, right = (_narrow_operand(e) for e in (split.left, split.right))
    left, right, separated, axes = _separate(left, right, axes)

    groups: dict[tuple[bool, bool], list[Axis]] = {(x, y): [] for x in (True, False) for y in (True, False)}
    for axis in axes:
        groups[_depends(left, axis), _depends(right, axis)].append(axis)
    batch, rows, columns = groups[True, True], groups[True, False] + groups[False, False], groups[False, True]

    leaves = [tirx.Var(name, dtype_of(value)) for name, value in (("left", left), ("right", right))]
    wrapped = split.wrap(*(cast(leaf, dtype) for leaf, dtype in zip(leaves, wide, strict=True)))
    operands = [
        Operand(value, dtype_of(value), leaf) for value, leaf in zip((left, right), leaves, strict=True)
    ]

    place = {axis.var: mapping[axis.var] for axis in main.spatial}
    where = [substitute_axes(place[v], separated) for v in main.indices]
    extents = [const_int(e) for e in main.buffer.shape]
    everything = bounded([*axes, *inner])
    stores = []
    if is_output(main):
        stores.append(Store(main.buffer, tuple(where), total, None))
    for block in dependent:
        stores.append(_store_of(block, values[id(block)], main, total, where, extents, everything))
    if not stores:
        raise NotAContraction("no output depends on the reduction")

    innermost = _innermost(stores[0], axes)
    if innermost is not None and any(axis is innermost for axis in rows):
        rows, columns, operands = columns, rows, operands[::-1]
    return Contraction(
        main.name,
        tuple(batch),
        tuple(rows),
        tuple(columns),
        tuple(inner),
        operands[0],
        operands[1],
        total,
        combine(total, wrapped),
        main.initial,
        split.product and combine is tirx.Add,
        tuple(stores),
    )


def _innermost(store: Store, axes: Sequence[Axis]) -> Axis | None:
    """The axis by which neighbouring elements of the output differ."""
    for index in reversed(store.indices):
        used = [axis for axis in axes if _depends(index, axis)]
        if used:
            return used[-1]
    return None


def _store_of(
    block: _Block,
    value: PrimExpr,
    main: _Block,
    total: tirx.Var,
    where: Sequence[PrimExpr],
    extents: Sequence[int],
    analyzer: tvm.sym.Analyzer,
) -> Store:
    """One output block as a function of the place ``where`` in the reduction's buffer."""
    mapping, axes = _fresh_axes(block.spatial)
    local = bounded(axes)
    value = _narrow(substitute_axes(value, mapping), local)
    reads = [load for load in buffer_loads(value) if load.source.same_as(main.buffer)]
    places = [[local.simplify(index) for index in load.indices] for load in reads]
    for place in places[1:]:
        if not all(local.can_prove_equal(a, b) for a, b in zip(places[0], place, strict=True)):
            raise NotAContraction(f"block {block.name} reads several elements of {main.name} for one of its own")
    value = tvm_ffi.structural_map(
        value, (TensorLoad, lambda load: total if load.source.same_as(main.buffer) else load)
    )
    if any(load.source.same_as(main.buffer) for load in buffer_loads(value)):
        raise NotAContraction(f"block {block.name} reads {main.name} at an index that depends on data")
    inverse, conditions = _inverse(block, axes, places[0], where, extents, local)
    whole = {axis.var: analyzer.simplify(e) for axis, e in zip(axes, inverse, strict=True)}
    place_of = {v: mapping[v] for v in (axis.var for axis in block.spatial)}
    indices = tuple(analyzer.simplify(substitute_axes(place_of[v], whole)) for v in block.indices)
    final = analyzer.simplify(substitute_axes(value, whole))
    guard = None
    for condition in conditions:
        guard = condition if guard is None else tirx.And(guard, condition)
    return Store(block.buffer, indices, final, guard)


def _inverse(
    block: _Block,
    axes: Sequence[Axis],
    place: Sequence[PrimExpr],
    where: Sequence[PrimExpr],
    extents: Sequence[int],
    analyzer: tvm.sym.Analyzer,
) -> tuple[list[PrimExpr], list[PrimExpr]]:
    """The element of `block` that reads the reduction at `where`, and the conditions under which there is one."""
    conditions: list[PrimExpr] = []
    maps: list[PrimExpr] = []
    points: list[PrimExpr] = []
    covered = 1
    for index, target, extent in zip(place, where, extents, strict=True):
        bound = analyzer.const_int_bound(index)
        low, high = int(bound.min_value), int(bound.max_value)
        if low < 0 or high >= extent:
            raise NotAContraction(f"block {block.name} reads the reduction out of its bounds")
        if low > 0:
            conditions.append(tirx.GE(target, low))
        if high < extent - 1:
            conditions.append(tirx.LT(target, high + 1))
        if high > low:
            maps.append(analyzer.simplify(index - low))
            points.append(target - low if low else target)
            covered *= high - low + 1
    if covered != prod(axis.extent for axis in axes):
        raise NotAContraction(f"block {block.name} does not read each element of its region of the reduction once")
    if not axes:
        return [], conditions
    # Each axis read alone, in any order, is the usual case; it needs no solver.
    direct = {i: next((p for m, p in zip(maps, points, strict=True) if m.same_as(a.var)), None) for i, a in enumerate(axes)}
    if all(p is not None for p in direct.values()):
        return [direct[i] for i in range(len(axes))], conditions
    try:
        index_map = tirx.IndexMap([a.var for a in axes], maps, None)
        inverse = index_map.inverse([Range(0, a.extent) for a in axes])
    except (ValueError, RuntimeError) as error:
        raise NotAContraction(
            f"block {block.name} reads the reduction through a map that cannot be inverted"
        ) from error
    return list(inverse.map_indices(points)), conditions
