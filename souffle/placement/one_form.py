"""Normalizations written in pieces, brought to the form of those that are written as one operator.

::

    d[m, k] = x[m, k] - mean[m]
    V[m]    = sum over k of d[m, k] * d[m, k]       →    V[m]    = sum over k of (x[m, k] - mean[m])^2
    y[m, k] = d[m, k] / sqrt(V[m] / n + e)               y[m, k] = (x[m, k] - mean[m]) / sqrt(V[m] / n + e)

Exporters before ONNX's opset 17 write a normalization so, and the difference is a tensor of its own, since each of its
readers would subtract again (:mod:`souffle.transform.vertical.vertical`). For a product that normalizes its rows that
is less than reading the difference, which would have to be stored first. And where the last step is cheap, as a product
with a reciprocal is, a product that alone reads it has taken it in as its prologue: it stands alone here again. Legal
because an element of either is a function of its indices: the same arithmetic gives the same bits wherever it is done.

Nothing is told by an operator's name. A difference is what sums of squares become second moments of
(:func:`souffle.placement.moments.second_moment`) once it stands where they read it; a last step reads a tensor and a
sum of the same tensor's elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from souffle.placement.moments import is_sum, second_moment
from souffle.placement.stage_trial import reduction_of
from souffle.program import TE, FusedTE, Item, Tensor, TEProgram, fuse, parts_of
from souffle.transform.narrow import narrow
from souffle.transform.vertical.compose import composed, work_of

__all__ = ["in_one_form"]


def in_one_form(program: TEProgram) -> TEProgram:
    """The program with normalizations as sums of rows, second moments and functions of elements; itself if they are.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet.
    """
    made = _differences_where_read(_without_last_steps(program))
    # What stands alone again is stored in the type that it is read in.
    return program if made is program else narrow(made)[0]


def _without_last_steps(program: TEProgram) -> TEProgram:
    """The program with last steps of normalizations ahead of the products that have taken them in."""
    items: list[Item] = []
    for item in program.tes:
        ahead = item.prologue if isinstance(item, FusedTE) else ()
        if ahead and _reads_moment(program, ahead):
            rest = item.parts[len(ahead) :]
            items += [*ahead, fuse(rest, item.outputs) if len(rest) > 1 else rest[0]]
        else:
            items.append(item)
    return program.with_tes(items) if len(items) > len(program.tes) else program


def _reads_moment(program: TEProgram, parts: Sequence[TE]) -> bool:
    """Whether some TEs read a tensor and a sum of its elements, which is of one tensor alone but for values of rows."""
    read = {tensor for part in parts for tensor in part.inputs}
    for tensor in read & program.producers.keys():
        item = program.producers[tensor]
        if isinstance(item, (TE, FusedTE)) and item.is_reduction and is_sum(item):
            inputs = reduction_of(item).inputs
            largest = max(inputs, key=lambda t: t.size)
            if (
                largest in read
                and largest.size > tensor.size
                and all(t is largest or t.size < largest.size for t in inputs)
            ):
                return True
    return False


def _differences_where_read(program: TEProgram) -> TEProgram:
    """The program with the differences of second moments taken where they are read; itself if there are none.

    What reads a difference and is neither such a moment nor a function of elements, such as a product, goes on reading
    the tensor.
    """
    known = {item.output: item for item in program.tes if _may_be_difference(item)}
    moments = {item: made for item in program.tes if (made := _second_moment(item, known)) is not None}
    if not moments:
        return program
    of_moments = {t: known[t] for item, made in moments.items() for t in set(item.inputs) - set(made.inputs)}
    items = [moments.get(item) or _with_differences(item, of_moments) for item in program.tes]
    read = {tensor for item in items for tensor in item.inputs}.union(program.outputs)
    return program.with_tes(item for item in items if read.intersection(item.outputs))


def _may_be_difference(item: Item) -> bool:
    return isinstance(item, TE) and not item.is_reduction and len(item.outputs) == 1 and not work_of(item).expensive


def _second_moment(item: Item, known: Mapping[Tensor, TE]) -> Item | None:
    """An item as a second moment of what the differences that it squares are made of; ``None`` where it is none."""
    if not isinstance(item, (TE, FusedTE)) or not item.is_reduction or second_moment(item) is not None:
        return None
    reduction = reduction_of(item)
    before = {part.output: part for part in parts_of(item)[: parts_of(item).index(reduction)]}
    if not all(_may_be_difference(part) for part in before.values()):
        return None
    own = known | before
    whole = composed(reduction, {tensor: own[tensor] for tensor in reduction.inputs if tensor in own})
    after = parts_of(item)[len(before) + 1 :]
    made = fuse((whole, *after), item.outputs) if after else whole
    return None if second_moment(made) is None else made


def _with_differences(item: Item, differences: Mapping[Tensor, TE]) -> Item:
    """An item that takes differences itself, if it is a function of elements."""
    if not isinstance(item, (TE, FusedTE)) or item.is_reduction or not differences.keys() & set(item.inputs):
        return item
    parts = [composed(p, {t: differences[t] for t in p.inputs if t in differences}) for p in parts_of(item)]
    return fuse(parts, item.outputs) if len(parts) > 1 else parts[0]
