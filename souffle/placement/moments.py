"""Moments of rows in chunks: what a tile has of a row says enough of it (paper §6.3).

The sum over a row is that of its chunks' sums (:mod:`souffle.placement.two_phase`). So is the second moment about any
value ``m`` of the row, if each chunk gives its moment about its own mean; with ``n_c`` elements in chunk ``c``::

    V = sum over r of (x[r] - m)^2          S_c = sum over r in c of x[r]
                                       →    M_c = sum over r in c of (x[r] - S_c / n_c)^2
                                            V   = sum over c of (M_c + n_c * (S_c / n_c - m)^2)

Exact in real numbers, whatever ``m`` is: in ``(x - m)^2 = (x - a)^2 + 2 * (x - a) * (a - m) + (a - m)^2`` with ``a``
the mean of a chunk, the middle terms of the chunk add up to 0 (Chan, Golub and LeVeque 1983).

Rounding. Let ``u`` be half of a unit in the last place, ``a`` the mean of a row, ``s`` its deviation, and ``e`` the
error of the mean that a chunk uses, at most about ``u * a`` times the depth of its sum. M_c is then too large by
``n_c * e^2``, and the second term is off by ``2 * n_c * e * (S_c / n_c - m) + n_c * e^2``, both added up: relative to V
at most about ``2 * e / s``, which is the depth times ``u * a / s``, as far as x itself is known at that mean. Sums add
their own ``u`` times their depth. All terms are positive: nothing cancels, unlike in ``E[x^2] - E[x]^2``, whose
relative error is ``u * (a / s)^2``. An element that is infinite or no number makes V no number, here as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from souffle.decision import Refused
from souffle.placement.stage_trial import reduction_of
from souffle.placement.two_phase import Phases
from souffle.program import TE, FusedTE, InTiles, Tensor, fuse, make_te, parts_of
from souffle.program.shared import OncePer
from souffle.transform.handles import Handles, instantiate, read
from souffle.tvm_compat import (
    PrimExpr,
    const_int,
    dtype_of,
    fresh_axis,
    reduce_node,
    same_expression,
    substitute,
    variables,
)

__all__ = ["Moment", "chunked_square", "chunked_sum", "is_sum", "second_moment", "sums_elements"]


@dataclass(frozen=True)
class Moment:
    """A reduction of rows in chunks.

    Attributes
    ----------
    inside : TE
        Of each chunk, to be computed in tiles.
    total : TE or FusedTE
        What the whole defined, from what chunks have.
    """

    inside: TE
    total: TE | FusedTE


def chunked_sum(item: TE | FusedTE, contraction: str, size: int, suffix: str) -> Moment | Refused:
    """A sum over rows of a contraction, in chunks of `size`.

    Parameters
    ----------
    item : TE or FusedTE
        That holds the sum, and perhaps what is made of it.
    contraction : str
        In whose tiles the chunks are summed up.
    size : int
    suffix : str
        Of the names of what chunks define.
    """
    if not is_sum(item):
        return Refused(f"{item.name} is no sum of rows alone")
    phases = Phases.of(item, 1, suffix, size=size, placement=InTiles(contraction, "moments"))
    return phases if isinstance(phases, Refused) else Moment(phases.partial, phases.total)


def is_sum(item: TE | FusedTE) -> bool:
    """Whether an item's reduction is a sum in fp32, which nothing stands before."""
    reduction = reduction_of(item)
    node = reduce_node(reduction.body)
    operators = list(node.combiner.result)
    plain = len(operators) == 1 and isinstance(operators[0], tirx.Add) and isinstance(node.condition, tirx.IntImm)
    alone = parts_of(item)[0] is reduction and int(node.condition.value) == 1 if plain else False
    return alone and dtype_of(reduction.body) == "float32"


def second_moment(item: TE | FusedTE) -> tuple[PrimExpr, PrimExpr] | None:
    """What `item` squares and sums up: an element, and the value of its row that is taken from it.

    ``None`` if it does not sum up squares of such differences. Over the axes and placeholders of its reduction.
    """
    reduction = reduction_of(item)
    source = _source(reduction)
    if not is_sum(item) or not isinstance(source, tirx.Mul):
        return None
    if not isinstance(source.a, tirx.Sub) or not same_expression(source.a, source.b):
        return None
    inner = [axis.var for axis in reduction.reduce_axes]

    def varies(part: PrimExpr) -> bool:
        return any(v.same_as(axis) for v in variables(part) for axis in inner)

    pair = (source.a.a, source.a.b)
    element, of_row = pair if varies(pair[0]) else pair[::-1]
    return None if varies(of_row) or not varies(element) else (element, of_row)


def _source(reduction: TE) -> PrimExpr:
    return reduce_node(reduction.body).source[0]


def sums_elements(item: TE | FusedTE, of: TE | FusedTE) -> bool:
    """Whether `item` sums up, of each row, the elements whose squares the second moment `of` is about."""
    moment = second_moment(of)
    first, second = reduction_of(item), reduction_of(of)
    extents = [[const_int(a.dom.extent) for a in (*r.axes, *r.reduce_axes)] for r in (first, second)]
    if moment is None or extents[0] != extents[1] or first.reduction_shape != second.reduction_shape:
        return False
    handles = Handles()
    own = reduce_node(handles.opened(first)[0]).source[0]
    theirs = reduce_node(handles.opened(second)[0]).source[0].a
    mapping = {a.var: b.var for a, b in zip((*first.axes, *first.reduce_axes), (*second.axes, *second.reduce_axes))}
    own = substitute(own, mapping)
    return any(same_expression(own, side) for side in (theirs.a, theirs.b))


def chunked_square(item: TE | FusedTE, sums: TE, contraction: str, size: int, suffix: str) -> Moment | Refused:
    """A second moment of rows of a contraction, in chunks of `size`.

    Parameters
    ----------
    item : TE or FusedTE
        See :func:`second_moment`.
    sums : TE
        The sums of the same elements in the same chunks.
    contraction, size, suffix
        See :func:`chunked_sum`.
    """
    if second_moment(item) is None:
        return Refused(f"{item.name} is no second moment of rows")
    placement = InTiles(contraction, "moments")
    phases = Phases.of(item, 1, suffix, size=size, placement=placement)
    if isinstance(phases, Refused):
        return phases
    whole, partial = reduction_of(item), phases.partial
    key = (whole.op, sums.op, size)
    made = _prototypes(key, lambda: _prototype(whole, partial, sums.outputs[0], size))
    chunks = partial.outputs[0]
    # What a prototype was made of stands for the same of an equal layer.
    own = dict(zip(made.tensors, (*whole.inputs, sums.outputs[0], chunks), strict=True))
    first, last = (replace(te_, inputs=tuple(own[t] for t in te_.inputs)) for te_ in (made.inside, made.total))
    inside = replace(first, name=partial.name, outputs=(chunks,), origin=partial.origin, placement=placement)
    second = replace(last, name=whole.name, outputs=whole.outputs, origin=whole.origin)
    after = parts_of(item)[1:]
    return Moment(inside, fuse((second, *after), item.outputs) if after else second)


@dataclass(frozen=True)
class _Prototype:
    """Both phases; `tensors` are what they were made of: the whole's inputs, the chunks' sums, their moments."""

    inside: TE
    total: TE
    tensors: tuple[Tensor, ...]


_prototypes: OncePer[_Prototype] = OncePer()


def _prototype(whole: TE, partial: TE, sums: Tensor, size: int) -> _Prototype:
    handles = Handles()
    values = _values(whole)
    chunks = partial.outputs[0]
    chunk, *places = partial.axes
    body = reduce_node(handles.opened(partial)[0])
    mean = _mean(handles, sums, [chunk.var, *(axis.var for axis in places)], values, size)
    square = _square_in(body.source[0])
    element = _element(square, [axis.var for axis in partial.reduce_axes])
    about = element - mean
    source = _replaced(body.source[0], about * about)
    inside = tirx.Reduce(body.combiner, [source], list(body.axis), body.condition, 0, [])
    # The second phase, over axes of its own.
    ends = [fresh_axis(const_int(axis.dom.extent), str(axis.var.name)) for axis in whole.axes]
    again = fresh_axis(const_int(chunk.dom.extent), "chunk", reduction=True)
    at = [axis.var for axis in ends]
    opened = reduce_node(handles.opened(whole)[0]).source[0]
    inner = [axis.var for axis in whole.reduce_axes]
    of_row = instantiate(_of_row(opened, inner), whole.axes, at)
    apart = _mean(handles, sums, [again.var, *at], values, size) - of_row
    term = read(handles.of(chunks), [again.var, *at]) + apart * apart * _count(again.var, values, size)
    total = tirx.Reduce(body.combiner, [term], [again], tirx.const(True, "bool"), 0, [])
    return _Prototype(
        make_te(partial.name, list(partial.axes), [inside], handles.pairs(), partial.origin, partial.outputs),
        make_te(whole.name, ends, [total], handles.pairs(), whole.origin, whole.outputs),
        (*whole.inputs, sums, chunks),
    )


def _values(whole: TE) -> int:
    count = 1
    for extent in whole.reduction_shape:
        count *= extent
    return count


def _square_in(source: PrimExpr) -> PrimExpr:
    """The square of a first phase, which stands alone or beside the identity beyond the last chunk."""
    return source if isinstance(source, tirx.Mul) else source.args[1]


def _element(square: PrimExpr, inner: Sequence[tirx.Var]) -> PrimExpr:
    pair = (square.a.a, square.a.b)
    return next(part for part in pair if any(v.same_as(axis) for v in variables(part) for axis in inner))


def _of_row(square: PrimExpr, inner: Sequence[tirx.Var]) -> PrimExpr:
    pair = (square.a.a, square.a.b)
    return next(part for part in pair if not any(v.same_as(axis) for v in variables(part) for axis in inner))


def _replaced(source: PrimExpr, new: PrimExpr) -> PrimExpr:
    """A first phase's source with another expression for its square."""
    if isinstance(source, tirx.Mul):
        return new
    return tirx.if_then_else(source.args[0], new, source.args[2])


def _count(chunk: PrimExpr, values: int, size: int) -> PrimExpr:
    """Elements of a chunk; the last may have fewer."""
    whole, rest = tirx.const(float(size), "float32"), values % size
    return tirx.Select(chunk < values // size, whole, tirx.const(float(rest), "float32")) if rest else whole


def _mean(handles: Handles, sums: Tensor, at: Sequence[PrimExpr], values: int, size: int) -> PrimExpr:
    """The mean of a chunk. By the reciprocal where that is exact: the same number, without a division."""
    total = read(handles.of(sums), at)
    if values % size == 0 and size & (size - 1) == 0:
        return total * tirx.const(1.0 / size, "float32")
    return total / _count(at[0], values, size)
