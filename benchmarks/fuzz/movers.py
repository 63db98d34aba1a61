"""Recipes of operators that move elements: shapes, slices, gathers, scatters, orders."""

from __future__ import annotations

import numpy as np

from benchmarks.fuzz.draft import Draft, Value
from benchmarks.fuzz.grammar import recipe

__all__: list[str] = []


@recipe("Reshape", weight=2.5)
def _reshape(d: Draft) -> None:
    x = d.pick("ffib")
    dims, left = [], x.array.size
    while left > 1 and len(dims) < 4:
        divisors = [n for n in range(1, left + 1) if left % n == 0]
        dims.append(d.choice(divisors))
        left //= dims[-1]
    if left != 1 or d.chance(0.2):
        dims.append(left)
    if dims and d.chance(0.4):
        dims[d.integer(0, len(dims) - 1)] = -1
    for axis in range(min(len(dims), x.rank)):
        if dims[axis] == x.shape[axis] and d.chance(0.3):
            dims[axis] = 0
    d.emit("Reshape", [x, d.ints(*dims)])


@recipe("Transpose", weight=2)
def _transpose(d: Draft) -> None:
    x = d.pick("fffib")
    order = [int(axis) for axis in d.rng.permutation(x.rank)]
    d.emit("Transpose", [x], perm=None if d.chance(0.2) or not order else order)


@recipe("Squeeze")
def _squeeze(d: Draft) -> None:
    x = d.pick("ffi", 1, where=lambda v: 1 in v.shape)
    ones = [axis for axis, extent in enumerate(x.shape) if extent == 1]
    if not ones:
        x = d.emit("Unsqueeze", [x, d.ints(0)])[0]
        ones = [0]
    chosen = [axis - x.rank if d.chance(0.3) else axis for axis in ones if d.chance(0.7)] or ones[:1]
    d.emit("Squeeze", [x, None if d.chance(0.2) else d.ints(*chosen)])


@recipe("Unsqueeze")
def _unsqueeze(d: Draft) -> None:
    x = d.pick("ffib", 0, 4)
    count = d.integer(1, 2)
    axes = d.rng.choice(x.rank + count, count, replace=False)
    d.emit("Unsqueeze", [x, d.ints(*(int(a) - (x.rank + count if d.chance(0.3) else 0) for a in axes))])


@recipe("Flatten", weight=0.8)
def _flatten(d: Draft) -> None:
    x = d.pick("ffi")
    d.emit("Flatten", [x], axis=d.choice((None, *range(-x.rank, x.rank + 1))))


@recipe("Expand")
def _expand(d: Draft) -> None:
    x = d.pick("ffib", elements=800)
    dims = [d.integer(1, 5) if extent == 1 and d.chance(0.7) else extent for extent in x.shape]
    if len(dims) < 5 and d.chance(0.4):
        dims = [d.integer(1, 3), *dims]
    dims = [1 if d.chance(0.15) else extent for extent in dims]
    d.emit("Expand", [x, d.ints(*dims)])


@recipe("Tile")
def _tile(d: Draft) -> None:
    x = d.pick("ffi", 1, elements=800)
    d.emit("Tile", [x, d.ints(*(d.choice((1, 1, 2, 3)) for _ in x.shape))])


@recipe("Pad", weight=1.2)
def _pad(d: Draft) -> None:
    x = d.pick("ffi", 1, elements=1500)
    mode = d.choice((None, "constant", "constant", "edge", "reflect", *(("wrap",) if d.opset >= 19 else ())))
    low = -1 if d.chance(0.15) and mode in (None, "constant") else 0
    most = [max(0, extent - 1) for extent in x.shape]
    pads = [d.integer(low, min(3, m) if mode == "reflect" else 3) if d.chance(0.6) else 0 for m in (*most, *most)]
    value = d.scalar(d.choice((0, 1, 2)), x.dtype) if mode in (None, "constant") and d.chance(0.5) else None
    if d.opset >= 18 and d.chance(0.2):
        axes = d.axes(x)
        pads = [pads[axis] for axis in axes] + [pads[axis + (x.rank if axis >= 0 else 0)] for axis in axes]
        d.emit("Pad", [x, d.ints(*pads), value, d.ints(*axes)], mode=mode)
    else:
        d.emit("Pad", [x, d.ints(*pads), value], mode=mode)


@recipe("Slice", weight=2)
def _slice(d: Draft) -> None:
    x = d.pick("ffib", 1)
    axes = d.axes(x)
    starts, ends, steps = [], [], []
    for axis in axes:
        extent = x.shape[axis]
        step = d.choice((1, 1, 1, 2, 3, -1, -2))
        start, end = sorted((d.integer(0, extent), d.integer(0, extent)))
        if d.chance(0.2):
            end = 2**31 - 1
        if step < 0:
            start, end = end, start - 1
            end = -extent - 1 if end < 0 else end
            start = min(start, extent) if start > extent else start
        elif d.chance(0.2) and start:
            start -= extent
        starts.append(start)
        ends.append(end)
        steps.append(step)
    plain = axes == list(range(len(axes))) and d.chance(0.3)
    stepped = any(step != 1 for step in steps) or d.chance(0.3)
    parts = [d.ints(*starts), d.ints(*ends), None if plain else d.ints(*axes), d.ints(*steps) if stepped else None]
    d.emit("Slice", [x, *parts])


@recipe("Split", weight=1.5)
def _split(d: Draft) -> None:
    x = d.pick("ffi", 1, where=lambda v: max(v.shape) > 1)
    axis = d.axis(x)
    extent = x.shape[axis]
    count = d.integer(1, min(4, max(extent, 1)))
    if extent % count == 0 and d.chance(0.4):
        d.emit("Split", [x], outputs=count, axis=axis, num_outputs=count if d.opset >= 18 else None)
        return
    if d.opset >= 18 and d.chance(0.2):
        d.emit("Split", [x], outputs=count, axis=axis, num_outputs=count)
        return
    cuts = sorted(d.integer(0 if d.zero_size else 1, max(1, extent)) for _ in range(count - 1))
    sizes = np.diff([0, *cuts, extent])
    if d.zero_size or min(sizes) > 0:
        d.emit("Split", [x, d.ints(*(int(s) for s in sizes))], outputs=count, axis=axis)


@recipe("Concat", weight=2)
def _concat(d: Draft) -> None:
    x = d.pick("ffffi", 1, elements=2000)
    axis = d.axis(x)
    operands = [x]
    for _ in range(d.choice((0, 1, 1, 1, 2, 3))):
        shape = list(x.shape)
        alike = [v for v in d.values if v.dtype == x.dtype and v.rank == x.rank and _alike(v, x, axis)]
        if alike and d.chance(0.6):
            operands.append(d.choice(alike[-4:]))
        else:
            shape[axis] = d.size(8)
            operands.append(d.fresh(x.dtype, shape))
    d.emit("Concat", [operands[i] for i in d.rng.permutation(len(operands))], axis=axis)


def _alike(one: Value, other: Value, axis: int) -> bool:
    both = [*zip(one.shape, other.shape, strict=True)]
    del both[axis]
    return all(a == b for a, b in both)


@recipe("DepthToSpace", weight=0.5)
def _depth_to_space(d: Draft) -> None:
    block = d.choice((1, 2, 3))
    x = d.fresh(d.float_dtype, (d.integer(1, 2), block * block * d.integer(1, 3), d.size(5), d.size(5)), constant=0)
    d.emit("DepthToSpace", [x], blocksize=block, mode=d.choice((None, "DCR", "CRD")))


@recipe("SpaceToDepth", weight=0.5)
def _space_to_depth(d: Draft) -> None:
    block = d.choice((1, 2, 3))
    x = d.fresh(d.float_dtype, (d.integer(1, 2), d.integer(1, 3), block * d.integer(1, 4), block * d.integer(1, 4)))
    d.emit("SpaceToDepth", [x], blocksize=block)


def indices(d: Draft, shape: tuple[int, ...], extent: int, *, dtype: str = "", distinct: bool = False) -> Value:
    """Valid indices, some counted from the end; a constant or an input."""
    if distinct:
        numbers = d.rng.permutation(extent)[: int(np.prod(shape, dtype=np.int64))].reshape(shape)
    else:
        numbers = np.asarray(d.rng.integers(0, max(extent, 1), shape))
    if d.chance(0.3):
        numbers = np.where(d.rng.random(shape) < 0.5, numbers, numbers - extent)
    array = np.asarray(numbers).astype(dtype or d.choice(("int64", "int64", "int32")))
    return d.constant(array) if d.chance(0.5) else d.input(array)


@recipe("Gather", weight=1.5)
def _gather(d: Draft) -> None:
    x = d.pick("ffib", 1, where=lambda v: v.array.size > 0)
    axis = d.axis(x)
    d.emit("Gather", [x, indices(d, d.shape(0, 2, 12), x.shape[axis])], axis=axis)


@recipe("GatherElements", weight=0.8)
def _gather_elements(d: Draft) -> None:
    x = d.pick("ffi", 1, where=lambda v: v.array.size > 0)
    axis = d.axis(x)
    shape = [d.integer(1, extent) if d.chance(0.4) else extent for extent in x.shape]
    shape[axis] = d.size(7) or 1
    d.emit("GatherElements", [x, indices(d, tuple(shape), x.shape[axis])], axis=axis)


def _tuples(d: Draft, x: Value, batch: int, *, distinct: bool = False) -> tuple[Value, tuple[int, ...]]:
    """Indices for GatherND and ScatterND, and the shape of what they choose."""
    depth = d.integer(1, x.rank - batch)
    most = int(np.prod(x.shape[batch : batch + depth], dtype=np.int64))
    count = d.integer(1, min(most, 12)) if distinct else d.integer(1, 12)
    leading = x.shape[:batch]
    rows = int(np.prod(leading, dtype=np.int64))
    flat = np.stack(
        [d.rng.permutation(most)[:count] if distinct else d.rng.integers(0, most, count) for _ in range(rows)]
    )
    parts = np.stack(np.unravel_index(flat, x.shape[batch : batch + depth]), axis=-1)
    if d.chance(0.2):
        parts = parts - np.array(x.shape[batch : batch + depth]) * d.integer(0, 1)
    array = parts.reshape(*leading, count, depth).astype(np.int64)
    value = d.constant(array) if d.chance(0.5) else d.input(array)
    return value, (*leading, count, *x.shape[batch + depth :])


@recipe("GatherND", weight=0.8)
def _gather_nd(d: Draft) -> None:
    x = d.pick("ffi", 1, where=lambda v: v.array.size > 0)
    batch = d.integer(0, 1) if x.rank > 1 and d.chance(0.3) else 0
    d.emit("GatherND", [x, _tuples(d, x, batch)[0]], batch_dims=batch or None)


@recipe("ScatterND", weight=0.8)
def _scatter_nd(d: Draft) -> None:
    x = d.pick("ffi", 1, where=lambda v: v.array.size > 0)
    reduction = d.choice(_reductions(d, x))
    chosen, shape = _tuples(d, x, 0, distinct=reduction in (None, "none"))
    d.emit("ScatterND", [x, chosen, d.weight(x.dtype, shape)], reduction=reduction)


def _reductions(d: Draft, x: Value) -> tuple[str | None, ...]:
    more = (("add", "mul") if d.opset >= 16 else ()) + (("max", "min") if d.opset >= 18 else ())
    return (None, *more)


@recipe("ScatterElements", weight=0.8)
def _scatter_elements(d: Draft) -> None:
    x = d.pick("ffi", 1, where=lambda v: v.array.size > 0)
    axis = d.axis(x)
    reduction = d.choice(_reductions(d, x))
    shape = list(x.shape)
    if reduction is None:
        # Two updates of one element would be in no order: along the axis, each index once.
        shape[axis] = d.integer(1, x.shape[axis])
        order = np.argsort(d.rng.random(x.shape), axis=axis)
        array = np.take(order, np.arange(shape[axis]), axis=axis).astype(np.int64)
        chosen = d.constant(array) if d.chance(0.5) else d.input(array)
    else:
        shape = [d.integer(1, extent) for extent in x.shape]
        shape[axis] = d.integer(1, 7)
        chosen = indices(d, tuple(shape), x.shape[axis], dtype="int64")
    d.emit("ScatterElements", [x, chosen, d.weight(x.dtype, shape)], axis=axis, reduction=reduction)


@recipe("OneHot", weight=0.6)
def _one_hot(d: Draft) -> None:
    depth = d.integer(1, 9)
    dtype = d.choice(("float32", "float32", "int64"))
    values = d.constant(np.array(d.choice(((0, 1), (-1, 2))), dtype))
    where = indices(d, d.shape(1, 3, 100), depth, dtype="int64")
    d.emit("OneHot", [where, d.scalar(depth, "int64"), values], axis=d.choice((None, 0, -1, where.rank)))


@recipe("Trilu", since=14, weight=0.7)
def _trilu(d: Draft) -> None:
    x = d.pick("ffi", 2)
    d.emit("Trilu", [x, d.scalar(d.integer(-3, 3), "int64") if d.chance(0.6) else None], upper=d.choice((None, 0, 1)))


@recipe("ReverseSequence", weight=0.5)
def _reverse_sequence(d: Draft) -> None:
    x = d.pick("f", 2, where=lambda v: min(v.shape) > 0)
    batch = d.integer(0, 1)
    lengths = np.asarray(d.rng.integers(1, x.shape[1 - batch] + 1, x.shape[batch])).astype(np.int64)
    held = d.constant(lengths) if d.chance(0.6) else d.input(lengths)
    d.emit("ReverseSequence", [x, held], batch_axis=batch, time_axis=1 - batch)


@recipe("Compress", weight=0.4)
def _compress(d: Draft) -> None:
    x = d.pick("ffi", 1)
    axis = d.choice((None, d.axis(x)))
    extent = x.array.size if axis is None else x.shape[axis]
    condition = d.rng.random(min(extent, 40)) < 0.6
    if condition.any():
        d.emit("Compress", [x, d.constant(condition)], axis=axis)


@recipe("CumSum", weight=0.8)
def _cumsum(d: Draft) -> None:
    x = d.pick("ffi", 1, tame=True, where=lambda v: v.dtype in ("float32", "float64", "int32", "int64"))
    if x.dtype in ("float32", "float64", "int32", "int64"):
        axis = d.scalar(d.axis(x), d.choice(("int64", "int32")))
        d.emit("CumSum", [x, axis], exclusive=d.choice((None, 0, 1)), reverse=d.choice((None, 0, 1)))


@recipe("TopK", weight=0.8)
def _topk(d: Draft) -> None:
    x = d.pick("f", 1, tame=True, exact=True, where=lambda v: v.array.size > 0)
    axis = d.axis(x)
    k = d.integer(1, x.shape[axis])
    d.emit("TopK", [x, d.ints(k)], outputs=2, axis=axis, largest=d.choice((None, 0, 1)))


@recipe("ArgMax", "ArgMin", weight=0.7)
def _arg(d: Draft, op: str) -> None:
    x = d.pick("ffi", 1, tame=not d.special or d.chance(0.7), exact=True, where=lambda v: v.array.size > 0)
    last = d.choice((None, 0, 1))
    d.emit(op, [x], axis=d.axis(x), keepdims=d.choice((None, 0, 1)), select_last_index=last)


@recipe("Hardmax", weight=0.4)
def _hardmax(d: Draft) -> None:
    x = d.pick("f", 1, tame=True, exact=True, where=lambda v: v.array.size > 0)
    d.emit("Hardmax", [x], axis=d.choice((None, d.axis(x))))


@recipe("Shape", "Size", weight=0.3)
def _facts(d: Draft, op: str) -> None:
    d.emit(op, [d.pick("fi")])


@recipe("ConstantOfShape", weight=0.3)
def _constant_of_shape(d: Draft) -> None:
    shape = d.shape(0, 3, 100)
    d.emit("ConstantOfShape", [d.ints(*shape)])


@recipe("Range", weight=0.3)
def _range(d: Draft) -> None:
    dtype = d.choice(("int64", "int32", "float32"))
    d.emit("Range", [d.scalar(d.integer(*ends), dtype) for ends in ((-2, 2), (3, 12), (1, 3))])


@recipe("EyeLike", weight=0.3)
def _eye_like(d: Draft) -> None:
    d.emit("EyeLike", [d.pick("f", 2, 2)], k=d.choice((None, -1, 0, 2)))


@recipe("CenterCropPad", since=18, weight=0.4)
def _center_crop_pad(d: Draft) -> None:
    x = d.pick("f", 1, elements=600)
    axes = sorted({axis % x.rank for axis in d.axes(x)})
    d.emit("CenterCropPad", [x, d.ints(*(max(1, x.shape[a] + d.integer(-3, 3)) for a in axes))], axes=axes)


@recipe("NonZero", weight=0.2)
def _non_zero(d: Draft) -> None:
    array = np.asarray(d.rng.integers(0, 2, d.shape(1, 3, 60))).astype(np.float32)
    if array.any():
        d.emit("NonZero", [d.constant(array)])
