"""Index expressions from rows to tensors and back, and reads of rows in the place of what they were computed as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tvm import te, tirx

from souffle.program import TE, FusedTE, Origin, Tensor, make_te
from souffle.transform.handles import Handles, read
from souffle.transform.ramps.index_forms import row_forms
from souffle.transform.vertical.selections import merge_selections
from souffle.tvm_compat import PrimExpr, fresh_axis, load_indices, load_tensor, map_bodies

__all__ = ["Cover", "copied_rows", "read_row", "row_index", "through_rows"]


class Cover(NamedTuple):
    """Where the rows of a tensor are computed instead.

    Attributes
    ----------
    size : int
        Elements of a row.
    rows : mapping of int to (Tensor, int)
        By the number of the row in the tensor: another tensor, and the number of the row in that one.
    """

    size: int
    rows: dict[int, tuple[Tensor, int]]

    def whole(self, tensor: Tensor) -> bool:
        """Whether all rows of the tensor are."""
        return len(self.rows) * self.size == tensor.size


def row_index(shape: Sequence[int], size: int, indices: Sequence[PrimExpr]) -> tuple[PrimExpr, dict[int, PrimExpr]]:
    """An element of a tensor as the number of its row and, by their numbers, its indices along the row's axes."""
    lead: PrimExpr = tirx.IntImm("int32", 0)
    content: dict[int, PrimExpr] = {}
    for index, extent, form in zip(indices, shape, row_forms(shape, 0, size), strict=True):
        taken = form.terms[0][0].extent if form.terms else 1
        if form.terms:
            whole = taken == extent
            content[form.terms[0][0].number] = index if whole else tirx.floormod(index, taken)
        if taken < extent:
            lead = lead * (extent // taken) + (index if taken == 1 else tirx.floordiv(index, taken))
    return lead, content


def read_row(
    handle: te.Tensor, shape: Sequence[int], start: int, size: int, content: Mapping[int, PrimExpr]
) -> PrimExpr:
    """One element of the row of `handle` that starts at element `start`, at indices along the row's axes."""
    indices = []
    for form in row_forms(shape, start, size):
        at = tirx.IntImm("int32", form.constant)
        if form.terms:
            along = content[form.terms[0][0].number]
            at = along + form.constant if form.constant else along
        indices.append(at)
    return read(handle, indices)


def _covered(
    tensor: Tensor, cover: Cover, indices: Sequence[PrimExpr], handles: Handles, other: PrimExpr | None
) -> PrimExpr:
    """An element of a tensor, read where its row is computed; `other` in the rows that are not."""
    lead, content = row_index(tensor.shape, cover.size, indices)
    runs: list[tuple[int, int]] = []
    for row in sorted(cover.rows):
        before = cover.rows.get(row - 1)
        goes_on = before is not None and cover.rows[row] == (before[0], before[1] + 1)
        runs = [*runs[:-1], (runs[-1][0], row + 1)] if goes_on else [*runs, (row, row + 1)]
    value = other
    for first, end in reversed(runs):
        source, row = cover.rows[first]
        if end - first == 1:
            found = read_row(handles.of(source), source.shape, row * cover.size, cover.size, content)
        else:
            # Several rows follow each other along the first axis alone.
            along = [extent > 1 for extent in source.shape[1:]]
            numbers = [sum(along[d + 1 :]) if wide else None for d, wide in enumerate(along)]
            rest = [tirx.IntImm("int32", 0) if number is None else content[number] for number in numbers]
            found = read(handles.of(source), [lead + (row - first) if row != first else lead, *rest])
        if value is None:
            value = found
        elif other is None:
            value = tirx.if_then_else(lead < end, found, value)
        else:
            value = tirx.if_then_else(tirx.all(lead >= first, lead < end), found, value)
    return value


def through_rows(item: TE | FusedTE, covers: Mapping[Tensor, Cover]) -> TE | FusedTE:
    """An item that reads, and takes for itself, what is computed elsewhere; the same one where nothing is.

    Tensors that it reads are read elsewhere where all of their rows are; of what a single TE without reduction defines
    the rows that are computed elsewhere are copied.
    """
    if isinstance(item, FusedTE):
        inside = {t for part in item.parts for t in part.outputs}
        outer = {tensor: cover for tensor, cover in covers.items() if tensor not in inside}
        parts = tuple(_te_through_rows(part, outer, False) for part in item.parts)
        if parts == item.parts:
            return item
        inputs = tuple(dict.fromkeys(t for part in parts for t in part.inputs if t not in inside))
        return replace(item, parts=parts, inputs=inputs)
    return _te_through_rows(item, covers, True)


def _te_through_rows(te_: TE, covers: Mapping[Tensor, Cover], takes: bool) -> TE:
    wanted = {tensor for tensor in te_.inputs if tensor in covers and covers[tensor].whole(tensor)}
    own = covers.get(te_.outputs[0]) if takes and not te_.is_reduction and len(te_.outputs) == 1 else None
    if not wanted and own is None:
        return te_
    handles = Handles()
    bodies = handles.opened(te_)
    moved = [(handles.of(tensor), tensor) for tensor in te_.inputs if tensor in wanted]

    def rewrite(load: PrimExpr) -> PrimExpr:
        source = load_tensor(load)
        for handle, tensor in moved:
            if handle.same_as(source):
                return _covered(tensor, covers[tensor], load_indices(load), handles, None)
        return load

    # Its own rows first: what they were computed from need not be read then.
    if own is not None:
        indices = [axis.var for axis in te_.axes]
        bodies = [_covered(te_.outputs[0], own, indices, handles, body) for body in bodies]
        bodies = merge_selections(bodies, te_.axes)
    rewritten = merge_selections(map_bodies(bodies, rewrite), (*te_.axes, *te_.reduce_axes))
    made = make_te(te_.name, te_.axes, rewritten, handles.pairs(), te_.origin, te_.outputs)
    return made.placed(te_.placement)


def copied_rows(tensor: Tensor, cover: Cover) -> TE:
    """A TE that copies the rows of a tensor from where they are computed, for what needs that tensor itself."""
    axes = [fresh_axis(extent, f"i{k}") for k, extent in enumerate(tensor.shape)]
    handles = Handles()
    body = _covered(tensor, cover, [axis.var for axis in axes], handles, None)
    origin = Origin((tensor.name,), ("Identity",), tensor.name)
    bodies = merge_selections([body], axes)
    return make_te(tensor.name, axes, bodies, handles.pairs(), origin, [tensor])
