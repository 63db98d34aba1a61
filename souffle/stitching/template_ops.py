"""What a template's dimensions are of a TE (FusionStitching 2019, §5.2)."""

from __future__ import annotations

from tvm import tirx

from souffle.program import TE
from souffle.stitching.kinds import kind_of
from souffle.stitching.template import TemplateError
from souffle.stitching.template_launch import TemplateOp
from souffle.tvm_compat import const_int, load_indices, loads, reduce_node

__all__ = ["op_of"]


def op_of(te: TE) -> TemplateOp:
    """A TE as an operation with dimensions.

    "There is a parallel loop tiling attribute for each input dimension" (2019 §5.2): the dimensions of a reduction are
    those of what it reads, in that order, where it reads one tensor at an element for each of its iterations. Else, as
    of a product, those of its output come first and those that it reduces behind them, which the paper leaves open. A
    single element has one dimension of one iteration.

    Raises
    ------
    TemplateError
        If a reduced extent varies with the element.
    """
    axes = (*te.axes, *te.reduce_axes)
    if not axes:
        return TemplateOp(te.name, (1,), (False,), kind_of(te))
    for axis in axes:
        if not isinstance(axis.dom.extent, tirx.IntImm) or const_int(axis.dom.min):
            raise TemplateError(f"{te.name}: the extent of axis {axis.var.name} is not the same for all elements")
    order = _input_order(te) or tuple(range(len(axes)))
    extents = tuple(const_int(axes[axis].dom.extent) for axis in order)
    reduced = tuple(axis >= len(te.axes) for axis in order)
    return TemplateOp(te.name, extents, reduced, kind_of(te), order)


def _input_order(te: TE) -> tuple[int, ...] | None:
    """The axes in the order of the dimensions of the only tensor that is read, where each is one of them."""
    node = reduce_node(te.body)
    if node is None:
        return None
    axes = (*te.axes, *te.reduce_axes)
    reads = [load for source in node.source for load in loads(source)]
    if len(reads) != 1:
        return None
    places = []
    for index in load_indices(reads[0]):
        number = next((n for n, axis in enumerate(axes) if axis.var.same_as(index)), None)
        if number is None:
            return None
        places.append(number)
    return tuple(places) if sorted(places) == list(range(len(axes))) else None
