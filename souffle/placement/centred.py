"""Copies of rows about the means of their chunks: what a product can take by asynchronous copies (paper §6.3).

An element that a product normalizes where it reads it is affine in the element, with factors of the row and of the
place in the row::

    y[m, k] = h(x[m, k]) * weight[k] + bias[k]        h(x) = a * x + b        a, b: of row m alone

The tile that has computed `x` knows mean and deviation of its chunk of the row, so that it can write 16 bits that lose
nothing of the row's deviation, however large the mean is, and are neither too large nor too small for fp16. With ``S``
and ``M`` sum and second moment of a chunk of ``n`` elements, and ``d = M / n``::

    copy[m, k] = fp16((x[m, k] - S / n) * rsqrt(d + e))           at most sqrt(n) in magnitude
    h(x[m, k]) = copy[m, k] * (a * sqrt(d + e)) + h(S / n)        one value each of a row and chunk

The second line is exact for the copy before it is rounded, since ``h`` is affine; weight and bias go into the product's
constants (:mod:`souffle.placement.folded_weights`). Products take the second line in fp16, with scale and shift rounded
to it. Where one rounding was, of ``y`` to fp16, there are now at most four: of the copy, its scale, its shift and the
result, each half a unit of fp16 of what it rounds. With ``u`` half a unit, an element of the normalized row is off by
at most ``u * (2 * |h(x) - h(S / n)| + |h(S / n)| + |h(x)|)``. None of these is larger than a few deviations of the
row, however large its mean is. A chunk whose squares overflow has 0 for a copy, and normalizes to what it would: its
row's deviation is infinite. An element that is infinite or no number makes its row no number, here as there, by way of
``S``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm import te, tirx

from souffle.decision import Refused
from souffle.placement.moments import Moment, second_moment
from souffle.placement.stage_trial import reduction_of
from souffle.program import TE, FusedTE, InTiles, Tensor, make_te, parts_of
from souffle.program.shared import OncePer
from souffle.transform.handles import Handles, read
from souffle.transform.vertical.compose import composed
from souffle.tvm_compat import (
    PrimExpr,
    cast,
    const_int,
    dtype_of,
    fresh_axis,
    load_indices,
    load_tensor,
    loads,
    map_loads,
    reduce_node,
    same_expression,
    variables,
)

__all__ = ["Centred", "centred"]

_SMALLEST = 1e-30
"""Added to mean squares: the copy of a chunk of equal elements is 0 times a finite number."""

_LARGEST = 1e38
"""Of mean squares, where the scale of a row is made of them: a row that is divided by infinity has a finite one."""


@dataclass(frozen=True)
class Centred:
    """What a normalization becomes whose readers take copies.

    Attributes
    ----------
    copy : TE
        To be computed in the tiles of the product.
    of_chunks : tuple of TE
        Scale and shift of a row's chunks.
    normal : TE
        Defines the elements before `weight` and `bias`, of the copy.
    target : Tensor
        What the elements are with these.
    weight, bias : Tensor or None
        Over the places of a row.
    """

    copy: TE
    of_chunks: tuple[TE, ...]
    normal: TE
    target: Tensor
    weight: Tensor | None
    bias: Tensor | None


def centred(
    moments: Sequence[TE | FusedTE],
    chunked: Sequence[Moment],
    of_rows: Sequence[TE | FusedTE],
    elements: Sequence[TE | FusedTE],
    rows: Tensor,
    size: int,
    contraction: str,
) -> Centred | Refused:
    """The copy of a product's rows, and what readers make of it.

    Parameters
    ----------
    moments : sequence of TE or FusedTE
        Reductions of the rows.
    chunked : sequence of Moment
        The same in chunks.
    of_rows, elements : sequence of TE or FusedTE
        What is made of moments for a row, and of these and an element.
    rows : Tensor
        What is normalized.
    size : int
        Elements of a chunk.
    contraction : str
        The product that computes the rows.
    """
    about = _about(moments, chunked, rows)
    if isinstance(about, Refused):
        return about
    if prod(reduction_of(moments[0]).reduction_shape) % size:
        return Refused(f"its chunks of {size} have no equal sizes")
    row_tensors = tuple(tensor for item in of_rows for tensor in item.outputs)
    made: dict[Tensor, TE] = {}
    for part in (part for item in elements for part in parts_of(item)):
        made[part.output] = composed(part, {t: made[t] for t in part.inputs if t in made})
    narrow = {tensor: whole for tensor, whole in made.items() if tensor.dtype == "float16"}
    if len(narrow) != 1:
        return Refused(f"{len(narrow)} tensors of 16 bits are made of its rows")
    ((target, whole),) = narrow.items()
    sources = (rows, *(t for t in about if t is not None), *row_tensors)
    numbers = tuple(sources.index(t) if t in sources else -1 for t in whole.inputs)
    dims = len(rows.shape) - len(reduction_of(moments[0]).reduction_shape)
    key = (whole.op, numbers, tuple((t.shape, t.dtype) if t else None for t in (rows, *about)), size)
    prototype = _prototypes(key, lambda: _Maker(whole, rows, *about, row_tensors, size, dims).made())
    if isinstance(prototype, Refused):
        return prototype
    return prototype.of(whole, rows, about, target, InTiles(contraction, "moments"))


def _about(
    moments: Sequence[TE | FusedTE], chunked: Sequence[Moment], rows: Tensor
) -> tuple[Tensor | None, Tensor] | Refused:
    """Sums of the chunks, if the mean is to be taken from them, and the sums of squares."""
    for item, moment in zip(moments, chunked, strict=True):
        reduction = reduction_of(item)
        source = reduce_node(reduction.body).source[0]
        if not isinstance(source, tirx.Mul) or not same_expression(source.a, source.b):
            continue
        pair = second_moment(item)
        element = source.a if pair is None else pair[0]
        if not _reads_in_order(reduction, element, rows):
            return Refused(f"{item.name} reads its rows in another order than they have in memory")
        squares = reduction_of(moment.inside).output
        if pair is None:
            return None, squares
        sums = next(t for t in moment.inside.inputs if t is not rows and t.shape == squares.shape)
        return sums, squares
    return Refused("it sums up no squares, which would say how large the rows are")


def _reads_in_order(reduction: TE, element: PrimExpr, rows: Tensor) -> bool:
    """Whether a reduction reads an element of the rows at its own axes and then at those that it reduces."""
    found = loads(element)
    if len(found) != 1 or not same_expression(found[0], element) or reduction.input_of(load_tensor(found[0])) != rows:
        return False
    # What extends over one element has no order.
    axes = [a for a in reduction.axes if const_int(a.dom.extent) > 1]
    at = [i for i, extent in zip(load_indices(found[0]), rows.shape, strict=True) if extent > 1]
    inner = [a for a in reduction.reduce_axes if const_int(a.dom.extent) > 1]
    last = rows.shape[len(rows.shape) - len(reduction.reduce_axes) :]
    wanted = [*axes, *inner]
    same = len(wanted) == len(at) and all(i.same_as(a.var) for i, a in zip(at, wanted, strict=True))
    return same and last == reduction.reduction_shape


@dataclass(frozen=True)
class _Prototype:
    """The TEs of one layer, and the tensors that they were made of: rows, sums, squares, and the element's inputs."""

    copy: TE
    scale: TE
    shift: TE | None
    normal: TE
    weight: Tensor | None
    bias: Tensor | None
    tensors: tuple[Tensor, ...]

    def of(
        self, whole: TE, rows: Tensor, about: tuple[Tensor | None, Tensor], target: Tensor, placement: InTiles
    ) -> Centred:
        """The same of an equal layer."""
        given = (rows, *(t for t in about if t is not None), *whole.inputs)
        own = dict(zip(self.tensors, given, strict=True))
        made = []
        kinds = ("copy", "scale", "shift", "normal")
        for part, kind in zip((self.copy, self.scale, self.shift, self.normal), kinds, strict=True):
            if part is None:
                continue
            tensor = replace(part.output, name=f"{rows.name}_{kind}")
            inputs = tuple(own[t] for t in part.inputs)
            made.append(replace(part, name=tensor.name, inputs=inputs, outputs=(tensor,), origin=whole.origin))
            own[part.output] = tensor
        copy, *of_chunks, normal = made
        weight, bias = (None if t is None else own[t] for t in (self.weight, self.bias))
        return Centred(copy.placed(placement), tuple(of_chunks), normal, target, weight, bias)


_prototypes: OncePer[_Prototype | Refused] = OncePer()


class _Maker:
    """Makes the TEs of a layer.

    Parameters
    ----------
    whole : TE
        The element, of all that it is made of.
    rows : Tensor
    sums, squares : Tensor
        Of chunks; without sums copies are about zero.
    row_tensors : sequence of Tensor
        Values of rows.
    size : int
    dims : int
        Of `rows`, those that are not along a row.
    """

    def __init__(
        self,
        whole: TE,
        rows: Tensor,
        sums: Tensor | None,
        squares: Tensor,
        row_tensors: Sequence[Tensor],
        size: int,
        dims: int,
    ) -> None:
        self.whole, self.rows, self.sums, self.squares, self.size = whole, rows, sums, squares, size
        self.handles = Handles()
        (self.body,) = self.handles.opened(whole)
        self.source = self.handles.of(rows)
        self.of_rows = [self.handles.of(t) for t in row_tensors]
        self.dims = dims

    def made(self) -> _Prototype | Refused:
        """The TEs, or why there are none."""
        elements = [load for load in loads(self.body) if load_tensor(load).same_as(self.source)]
        if not elements or any(not same_expression(load, elements[0]) for load in elements):
            return Refused(f"{self.whole.name} reads several elements of its rows")
        at = load_indices(elements[0])
        of_rows = [load for load in loads(self.body) if self._is_of_rows(load)]
        if not of_rows or any(not self._same_place(load, at) for load in of_rows):
            return Refused(f"{self.whole.name} reads values of another row than its element's")
        found = self._factored(self.body, at)
        if found is None:
            return Refused(f"{self.whole.name} is not affine in its element with a weight and a bias of its place")
        affine, *outer = found
        slope = self._walk(affine, tirx.const(1.0, "float32"))
        copy = self._copy()
        scale = self._of_chunk("scale", lambda c, m: self._at_rows(slope, m) * te.sqrt(self._clamped(c, m)))
        # About zero, nothing is left of a function that adds nothing.
        shifts = self.sums is not None or self._adds(affine)
        shift = self._of_chunk("shift", lambda c, m: self._at_rows(affine, m, self._center(c, m))) if shifts else None
        normal = self._normal(at, copy.output, scale.output, None if shift is None else shift.output)
        given = (self.rows, *([] if self.sums is None else [self.sums]), self.squares, *self.whole.inputs)
        return _Prototype(copy, scale, shift, normal, *outer, given)

    def _is_of_rows(self, load: PrimExpr) -> bool:
        return any(load_tensor(load).same_as(handle) for handle in self.of_rows)

    def _same_place(self, load: PrimExpr, at: Sequence[PrimExpr]) -> bool:
        """Whether a value of a row is that of an element's; dimensions of one element do not count."""
        shape = [const_int(extent) for extent in load_tensor(load).shape]
        place = [index for index, extent in zip(load_indices(load), shape, strict=True) if extent > 1]
        own = [index for index, extent in zip(at[: self.dims], self.rows.shape, strict=False) if extent > 1]
        return len(place) == len(own) and all(same_expression(a, b) for a, b in zip(place, own, strict=True))

    def _read_of_row(self, handle: te.Tensor, at: Sequence[PrimExpr], first: Sequence[PrimExpr] = ()) -> PrimExpr:
        """A value of the row of an element, whose first indices are given."""
        own = iter(index for index, extent in zip(at[: self.dims], self.rows.shape, strict=False) if extent > 1)
        shape = [const_int(extent) for extent in handle.shape[len(first) :]]
        return read(handle, [*first, *(next(own) if extent > 1 else 0 for extent in shape)])

    def _reads_element(self, expression: PrimExpr) -> bool:
        return any(load_tensor(load).same_as(self.source) for load in loads(expression))

    def _is_of_row(self, expression: PrimExpr) -> bool:
        """Whether it is a function of a row's values alone."""
        if any(not self._is_of_rows(load) for load in loads(expression)):
            return False
        # Where a row stands is said by what is read of it alone.
        return not variables(map_loads(expression, lambda load: tirx.const(0.0, dtype_of(load))))

    def _is_affine(self, expression: PrimExpr) -> bool:
        return dtype_of(expression) == "float32" and self._walk(expression, tirx.const(1.0, "float32")) is not None

    def _walk(self, expression: PrimExpr, slope: PrimExpr) -> PrimExpr | None:
        """The factor of the element, times `slope`; ``None`` if it is not affine in it."""
        if loads(expression) and same_expression(expression, loads(expression)[0]):
            return slope if self._reads_element(expression) else None
        if not isinstance(expression, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div)):
            return None
        first = self._reads_element(expression.a)
        inner, other = (expression.a, expression.b) if first else (expression.b, expression.a)
        if not self._is_of_row(other) or (isinstance(expression, tirx.Div) and not first):
            return None
        if isinstance(expression, tirx.Mul):
            slope = slope * other
        elif isinstance(expression, tirx.Div):
            slope = slope / other
        elif isinstance(expression, tirx.Sub) and not first:
            slope = -slope
        return self._walk(inner, slope)

    def _factored(
        self, expression: PrimExpr, at: Sequence[PrimExpr]
    ) -> tuple[PrimExpr, Tensor | None, Tensor | None] | None:
        """What is affine in the element by values of the row, and the weight and the bias of its place around it.

        ``None`` if it is not made of these. A factor of the row that stands around the weight goes inside of it.
        """
        if self._is_affine(expression):
            return expression, None, None
        if isinstance(expression, tirx.Cast):
            return self._factored(expression.value, at)
        if not isinstance(expression, (tirx.Add, tirx.Mul, tirx.Div)):
            return None
        first = self._reads_element(expression.a)
        inner, other = (expression.a, expression.b) if first else (expression.b, expression.a)
        found = None if self._reads_element(other) else self._factored(inner, at)
        if found is None or found[2] is not None:
            return None
        affine, weight, _ = found
        if not isinstance(expression, tirx.Add) and self._is_of_row(other):
            around = affine * other if isinstance(expression, tirx.Mul) else affine / other if first else None
            return None if around is None else (around, weight, None)
        tensor = self._of_place(other, at)
        if tensor is None or isinstance(expression, tirx.Div):
            return None
        if isinstance(expression, tirx.Mul):
            return (affine, tensor, None) if weight is None else None
        return affine, weight, tensor

    def _of_place(self, expression: PrimExpr, at: Sequence[PrimExpr]) -> Tensor | None:
        """The tensor of which an expression is the element at the place in the row."""
        found = loads(expression)
        if len(found) != 1 or not same_expression(found[0], expression):
            return None
        tensor = next(t for handle, t in self.handles.pairs() if handle.same_as(load_tensor(found[0])))
        places = load_indices(found[0])
        same = len(places) == len(at) - self.dims and tensor.shape == self.rows.shape[self.dims :]
        same = same and all(same_expression(a, b) for a, b in zip(places, at[self.dims :], strict=True))
        return tensor if same and tensor.dtype == "float32" else None

    def _at_rows(self, expression: PrimExpr, places: Sequence[PrimExpr], center: PrimExpr | None = None) -> PrimExpr:
        """An expression of values of rows at other rows, with `center` for the element."""

        def rewrite(load: PrimExpr) -> PrimExpr:
            source = load_tensor(load)
            if source.same_as(self.source):
                return center
            return self._read_of_row(source, places)

        return map_loads(expression, rewrite)

    def _mean_square(self, chunk: PrimExpr, places: Sequence[PrimExpr]) -> PrimExpr:
        total = self._read_of_row(self.handles.of(self.squares), places, [chunk])
        return total * tirx.const(1.0 / self.size, "float32")

    def _center(self, chunk: PrimExpr, places: Sequence[PrimExpr]) -> PrimExpr:
        if self.sums is None:
            return tirx.const(0.0, "float32")
        return self._read_of_row(self.handles.of(self.sums), places, [chunk]) * tirx.const(1.0 / self.size, "float32")

    def _copy(self) -> TE:
        axes = [fresh_axis(extent, f"i{n}") for n, extent in enumerate(self.rows.shape)]
        at = [axis.var for axis in axes]
        chunk, places = self._chunk_of(at), at[: self.dims]
        apart = read(self.source, at) - self._center(chunk, places)
        value = apart * te.rsqrt(self._mean_square(chunk, places) + tirx.const(_SMALLEST, "float32"))
        return make_te("copy", axes, [cast(value, "float16")], self.handles.pairs(), self.whole.origin)

    def _chunk_of(self, at: Sequence[PrimExpr]) -> PrimExpr:
        linear: PrimExpr | None = None
        for index, extent in zip(at[self.dims :], self.rows.shape[self.dims :], strict=True):
            linear = index if linear is None else linear * extent + index
        return tirx.floordiv(linear, self.size)

    def _of_chunk(self, name: str, value: Callable[[PrimExpr, Sequence[PrimExpr]], PrimExpr]) -> TE:
        """One value for each chunk of each row, from the chunk's number and the row's place."""
        count, shape = self.squares.shape[0], self.rows.shape[: self.dims]
        axes = [fresh_axis(count, "chunk"), *(fresh_axis(extent, f"i{n}") for n, extent in enumerate(shape))]
        chunk, *places = (axis.var for axis in axes)
        body = cast(value(chunk, places), "float16")
        return make_te(name, axes, [body], self.handles.pairs(), self.whole.origin)

    def _clamped(self, chunk: PrimExpr, places: Sequence[PrimExpr]) -> PrimExpr:
        square = self._mean_square(chunk, places) + tirx.const(_SMALLEST, "float32")
        return tirx.min(square, tirx.const(_LARGEST, "float32"))

    def _adds(self, expression: PrimExpr) -> bool:
        """Whether anything is added to the element on its way through an affine part."""
        if isinstance(expression, (tirx.Add, tirx.Sub)):
            return True
        if not isinstance(expression, (tirx.Mul, tirx.Div)):
            return False
        return self._adds(expression.a if self._reads_element(expression.a) else expression.b)

    def _normal(self, at: Sequence[PrimExpr], copy: Tensor, scale: Tensor, shift: Tensor | None) -> TE:
        place = [self._chunk_of(at), *at[: self.dims]]
        value = read(self.handles.of(copy), list(at)) * read(self.handles.of(scale), place)
        value = value if shift is None else value + read(self.handles.of(shift), place)
        return make_te("normal", list(self.whole.axes), [value], self.handles.pairs(), self.whole.origin)
