"""Windows over space: where the largest element of each lies, their overlap added up, and windows that data moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
import onnx
from tvm import te, tirx

from souffle.frontend.attributes import attribute, attributes
from souffle.frontend.custom import LONGEST_AXIS, NodeOperands, defines, int_imm
from souffle.frontend.custom_order import is_peak
from souffle.frontend.interpreter import Interpreter, special
from souffle.frontend.node_writer import NodeWriter, constant
from souffle.frontend.pooling import same_pads, windows
from souffle.frontend.refusal import Obstacle, computed
from souffle.frontend.values import Known, Scope, Value
from souffle.program.extrema import infinite
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []


def _placed(node: onnx.NodeProto, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Pads before each dimension of space, and how many windows there are along it."""
    kernel, strides, dilations = windows(node, shape)
    rank, extents = len(kernel), shape[2:]
    auto = attribute(node, "auto_pad", b"NOTSET").decode()
    pads = list(attribute(node, "pads", [0] * 2 * rank)) if auto == "NOTSET" else [0] * 2 * rank
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        counts = [-(-extent // stride) for extent, stride in zip(extents, strides, strict=True)]
        return same_pads(auto, extents, spans, strides)[:rank], counts
    counts = []
    for axis, (extent, span, stride) in enumerate(zip(extents, spans, strides, strict=True)):
        room = extent + pads[axis] + pads[rank + axis] - span
        count = room // stride + 1
        if attribute(node, "ceil_mode", 0):
            count = -(-room // stride) + 1
            # A window that would begin after the data and what is before it is none.
            count -= (count - 1) * stride >= extent + pads[axis]
        counts.append(count)
    return pads[:rank], counts


@defines("MaxPool")
def _max_pool_with_indices(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    if not any(list(node.output)[1:]):
        return None
    data, shape, dtype = operands.tensor(0), operands.shape(0), operands.dtype(0)
    kernel, strides, dilations = windows(node, shape)
    pads, counts = _placed(node, shape)
    extents, rank = shape[2:], len(kernel)
    least = infinite(tirx.min_value(dtype))

    def read(at: Sequence[PrimExpr], taps: Sequence) -> tuple[PrimExpr, list[PrimExpr]]:
        """Whether an element of a window is one of the data, and where it lies."""
        place = [at[k] * strides[k] - pads[k] + taps[k] * dilations[k] for k in range(rank)]
        return tirx.all(*(t for k in range(rank) for t in (place[k] >= 0, place[k] < extents[k]))), place

    def axes() -> list:
        return [te.reduce_axis((0, size), name=f"k{k}") for k, size in enumerate(kernel)]

    def largest(n: PrimExpr, c: PrimExpr, *at: PrimExpr) -> PrimExpr:
        taps = axes()
        inside, place = read(at, taps)
        return te.max(tirx.if_then_else(inside, data(n, c, *place), least), axis=taps)

    peak = te.compute((*shape[:2], *counts), largest, name="peak")
    # In the order in which a window is gone through, the first of equal ones has the least number in the data.
    nowhere = int_imm(math.prod(extents) - 1)

    def first(n: PrimExpr, c: PrimExpr, *at: PrimExpr) -> PrimExpr:
        taps = axes()
        inside, place = read(at, taps)
        here = reduce(lambda flat, k: flat * extents[k] + place[k], range(rank), int_imm(0))
        found = tirx.Select(is_peak(data(n, c, *place), peak(n, c, *at)), here, nowhere)
        return te.min(tirx.if_then_else(inside, found, nowhere), axis=taps)

    where = te.compute((*shape[:2], *counts), first, name="place")
    by_columns = attribute(node, "storage_order", 0)

    def index(n: PrimExpr, c: PrimExpr, *at: PrimExpr) -> PrimExpr:
        flat = where(n, c, *at)
        if by_columns:
            turned, rest = int_imm(0), flat
            for k in reversed(range(rank)):
                turned = turned + tirx.floormod(rest, extents[k]) * math.prod(extents[:k])
                rest = tirx.floordiv(rest, extents[k])
            flat = turned
        image = tirx.Cast("int64", n * shape[1] + c) * tirx.IntImm("int64", math.prod(extents))
        return image + tirx.Cast("int64", flat)

    return [peak, te.compute((*shape[:2], *counts), index, name="indices")]


@special("MaxUnpool")
def _max_unpool(
    interpreter: Interpreter, node: onnx.NodeProto, inputs: Sequence[Value], scope: Scope
) -> list[Value] | None:
    write, x = NodeWriter(interpreter, node), inputs[0]
    if len(inputs) < 3 or inputs[2] is None:
        count, shape = math.prod(x.shape), _unpooled(node, x.shape)
        if count > LONGEST_AXIS or min(shape) < 1:
            return None
        # An index may be of any element: TVM's scatter is no TE, and has no schedule on a GPU.
        flat, places = (write("Reshape", interpreter.whole(v), constant([-1], "int64")) for v in inputs[:2])
        zeros = Known(np.zeros(math.prod(shape), x.dtype), f"{node.name}_zeros")
        filled = write("ScatterElements", zeros, places, flat, axis=0)
        return [write("Reshape", filled, constant(shape, "int64"))]
    if not isinstance(inputs[2], Known):
        raise computed("output_shape")
    indices, wanted = inputs[1], [int(extent) for extent in inputs[2].array.reshape(-1)]
    given = attributes(node)
    # The indices count through what the pooling was of; further rows and columns follow it.
    whole = write("MaxUnpool", x, indices, **given)
    more = [extent - has for extent, has in zip(wanted, whole.shape, strict=False)]
    if len(wanted) != len(whole.shape) or min(more) < 0:
        raise Obstacle(
            f"its output_shape {wanted} has no room for the {list(whole.shape)} that its windows cover",
            "give it an output_shape of at least these extents",
        )
    if not any(more):
        return [whole]
    return [write("Pad", whole, constant([0] * len(more) + more, "int64"), constant(0, x.dtype))]


def _unpooled(node: onnx.NodeProto, shape: Sequence[int]) -> list[int]:
    """The shape of what a pooling was of that gives `shape`."""
    kernel, strides, _ = windows(node, shape)
    pads = attribute(node, "pads", [0] * 2 * len(kernel))
    extents = [
        (extent - 1) * stride + size - before - after
        for extent, stride, size, before, after in zip(
            shape[2:], strides, kernel, pads, pads[len(kernel) :], strict=False
        )
    ]
    return [*shape[:2], *extents]


@defines("Col2Im")
def _col2im(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    """Each element of the image takes those of all blocks that cover it."""
    unknown = [name for k, name in ((1, "image_shape"), (2, "block_shape")) if operands.constant(k) is None]
    if unknown:
        raise computed(*unknown)
    data, shape = operands.tensor(0), operands.shape(0)
    image, block = ([int(extent) for extent in operands.constant(k).reshape(-1)] for k in (1, 2))
    rank, area = len(image), math.prod(block)
    dilations, strides = (list(attribute(node, name, [1] * rank)) for name in ("dilations", "strides"))
    pads = list(attribute(node, "pads", [0] * 2 * rank))
    counts = [
        (image[k] + pads[k] + pads[rank + k] - dilations[k] * (block[k] - 1) - 1) // strides[k] + 1 for k in range(rank)
    ]
    if len(block) != rank or len(shape) != 3 or shape[1] % area or shape[2] != math.prod(counts):
        raise Obstacle(
            f"blocks of {block} in an image of {image}, {counts} along its dimensions, do not make {list(shape)}",
            "give it a tensor of [batch, channels * elements of a block, number of blocks]",
        )
    zero = tirx.const(0, operands.dtype(0))

    def total(n: PrimExpr, c: PrimExpr, *at: PrimExpr) -> PrimExpr:
        taps = [te.reduce_axis((0, size), name=f"k{k}") for k, size in enumerate(block)]
        tests, row, column = [], int_imm(0), int_imm(0)
        for k in range(rank):
            reached = at[k] + pads[k] - taps[k] * dilations[k]
            tests += [reached >= 0, reached < counts[k] * strides[k]]
            if strides[k] > 1:
                tests.append(tirx.EQ(tirx.floormod(reached, strides[k]), 0))
            row = row * block[k] + taps[k]
            column = column * counts[k] + tirx.floordiv(reached, strides[k])
        return te.sum(tirx.if_then_else(tirx.all(*tests), data(n, c * area + row, column), zero), axis=taps)

    return [te.compute((shape[0], shape[1] // area, *image), total, name="col2im")]


@defines("DeformConv")
def _deformable_convolution(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor]:
    """The elements between which each tap falls, mixed by distance, and then a product with the weights."""
    x, weights, offsets, bias, mask = (operands.tensor(k) for k in range(5))
    shape, filters, dtype = operands.shape(0), operands.shape(1), operands.dtype(0)
    extents, kernel, rank = shape[2:], list(attribute(node, "kernel_shape", filters[2:])), len(shape) - 2
    dilations, strides = (list(attribute(node, name, [1] * rank)) for name in ("dilations", "strides"))
    pads = list(attribute(node, "pads", [0] * 2 * rank))
    groups, parts = attribute(node, "group", 1), attribute(node, "offset_group", 1)
    area, results = math.prod(kernel), operands.shape(2)[2:]
    counts = [
        (extents[k] + pads[k] + pads[rank + k] - dilations[k] * (kernel[k] - 1) - 1) // strides[k] + 1
        for k in range(rank)
    ]
    fits = list(results) == counts and operands.shape(2)[1] == parts * area * rank and list(filters[2:]) == kernel
    fits = fits and (mask is None or operands.shape(4) == (shape[0], parts * area, *counts))
    if not fits or shape[1] != filters[1] * groups or filters[0] % groups or shape[1] % parts:
        raise Obstacle(
            f"for windows that are {counts} along the dimensions of space, {groups} groups and {parts} offset groups, "
            "its inputs do not fit each other",
            f"give it offsets of [batch, {parts * area * rank}, {', '.join(map(str, counts))}]",
        )
    # Places have more digits than 16-bit numbers.
    wide = dtype if dtype == "float64" else "float32"
    zero, one = (tirx.const(value, wide) for value in (0, 1))

    def widened(value: PrimExpr) -> PrimExpr:
        return value if dtype == wide else tirx.Cast(wide, value)

    def sample(n: PrimExpr, c: PrimExpr, *at: PrimExpr) -> PrimExpr:
        taps, place = at[:rank], at[rank:]
        group = tirx.floordiv(c, shape[1] // parts)
        tap = reduce(lambda flat, k: flat * kernel[k] + taps[k], range(rank), group)
        lower, beyond, tests = [], [], []
        for k in range(rank):
            base = tirx.Cast(wide, place[k] * strides[k] - pads[k] + taps[k] * dilations[k])
            point = base + widened(offsets(n, tap * rank + k, *place))
            inside = tirx.And(point > tirx.const(-1, wide), point < tirx.const(extents[k], wide))
            # A place of no meaning (NaN) is none: it has no element before it.
            safe = tirx.Select(inside, point, zero)
            floor = tirx.floor(safe)
            tests.append(inside)
            lower.append(tirx.Cast("int32", floor))
            beyond.append(safe - floor)
        mixed: PrimExpr = zero
        for corner in itertools.product((0, 1), repeat=rank):
            index = [lower[k] + corner[k] for k in range(rank)]
            weight = reduce(tirx.Mul, [beyond[k] if corner[k] else one - beyond[k] for k in range(rank)])
            bounds = [bound for k in range(rank) for bound in (index[k] >= 0, index[k] < extents[k])]
            mixed = mixed + tirx.Select(tirx.all(*bounds), weight * widened(x(n, c, *index)), zero)
        mixed = tirx.Select(tirx.all(*tests), mixed, zero)
        mixed = mixed if mask is None else mixed * widened(mask(n, tap, *place))
        return mixed if dtype == wide else tirx.Cast(dtype, mixed)

    samples = te.compute((*shape[:2], *kernel, *counts), sample, name="samples")
    depth, outputs = filters[1], filters[0] // groups

    def total(n: PrimExpr, m: PrimExpr, *at: PrimExpr) -> PrimExpr:
        channel = te.reduce_axis((0, depth), name="c")
        taps = [te.reduce_axis((0, size), name=f"k{k}") for k, size in enumerate(kernel)]
        source = tirx.floordiv(m, outputs) * depth + channel
        return te.sum(samples(n, source, *taps, *at) * weights(m, channel, *taps), axis=[channel, *taps])

    result = te.compute((shape[0], filters[0], *counts), total, name="deform_conv")
    if bias is None:
        return [result]
    return [te.compute(result.shape, lambda n, m, *at: result(n, m, *at) + bias(m), name="bias")]


@defines("RoiAlign")
def _largest_in_regions(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    """Of each bin the largest share that any element has in any of its points, as ONNX's reference defines it."""
    if attribute(node, "mode", b"avg") != b"max":
        return None
    points = attribute(node, "sampling_ratio", 0)
    image, regions, batch = (operands.tensor(k) for k in range(3))
    shape, dtype = operands.shape(0), operands.dtype(0)
    extents, counts = shape[2:], [attribute(node, f"output_{side}", 1) for side in ("height", "width")]
    scale = attribute(node, "spatial_scale", 1.0)
    half = attribute(node, "coordinate_transformation_mode") == b"half_pixel"
    zero, one = (tirx.const(value, dtype) for value in (0, 1))

    def largest(r: PrimExpr, c: PrimExpr, *at: PrimExpr) -> PrimExpr:
        taps = [te.reduce_axis((0, points), name=name) for name in ("y", "x")]
        tests, cells, beyond = [], [], []
        for k in range(2):
            # A region is given as x1, y1, x2, y2.
            shift = tirx.const(0.5 if half else 0.0, dtype)
            low, high = (regions(r, 1 - k + 2 * end) * tirx.const(scale, dtype) - shift for end in range(2))
            width = high - low if half else tirx.Max(high - low, one)
            size = width / tirx.const(counts[k], dtype)
            step = (tirx.Cast(dtype, taps[k]) + tirx.const(0.5, dtype)) * size / tirx.const(points, dtype)
            point = low + tirx.Cast(dtype, at[k]) * size + step
            tests.append(tirx.And(point >= tirx.const(-1, dtype), point <= tirx.const(extents[k], dtype)))
            kept = tirx.Select(tests[-1], tirx.Max(tirx.Min(point, tirx.const(extents[k] - 1, dtype)), zero), zero)
            cells.append(tirx.Cast("int32", tirx.floor(kept)))
            beyond.append(kept - tirx.floor(kept))
        shares = []
        for corner in itertools.product((0, 1), repeat=2):
            weight = reduce(tirx.Mul, [beyond[k] if corner[k] else one - beyond[k] for k in range(2)])
            place = [tirx.min(cells[k] + corner[k], int_imm(extents[k] - 1)) for k in range(2)]
            shares.append(weight * image(batch(r), c, *place))
        share = tirx.Select(tirx.all(*tests), reduce(tirx.Max, shares), zero)
        return te.max(share, axis=taps)

    return [te.compute((operands.shape(1)[0], shape[1], *counts), largest, name="roi_align")]
