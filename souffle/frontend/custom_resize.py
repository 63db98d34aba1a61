"""``Resize`` as TEs: index arithmetic where that gives the positions, tables of positions and weights elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from tvm import DataType, te, tirx

from souffle.frontend.attributes import attribute
from souffle.frontend.custom import NodeOperands, defines, int_imm, position_on_axis
from souffle.frontend.refusal import computed
from souffle.frontend.resize import AxisResize, ResizePlan, interpolation_table, resize_plan
from souffle.program.extrema import is_floating
from souffle.tvm_compat import PrimExpr

__all__: list[str] = []


@defines("Resize")
def _resize(node: onnx.NodeProto, operands: NodeOperands) -> list[te.Tensor] | None:
    roi, scales, sizes = (operands.constant(k) for k in (1, 2, 3))
    shape = operands.shape(0)
    crops = attribute(node, "coordinate_transformation_mode") == b"tf_crop_and_resize"
    if crops and roi is None and operands.present(1):
        raise computed("roi")
    plan = resize_plan(node, shape, roi, scales, sizes)
    result, dtype = operands.tensor(0), operands.dtype(0)
    if plan.mode == "nearest":
        return [_resized_nearest(plan, operands, result)]
    # TVM computes doubles in single precision, and cuts off what integers have behind the point.
    floating = is_floating(dtype) and dtype != "float64"
    if floating and _tvm_resizes(plan, shape) and not attribute(node, "axes"):
        return None
    if not floating and dtype != "float64":
        wide = "float32" if dtype == "bool" or DataType(dtype).bits <= 16 else "float64"
        result = te.compute(shape, lambda *at: operands.tensor(0)(*at).astype(wide), name="wide")
    for axis in plan.axes:
        result = _resized_axis(plan, axis, operands, result)
    return [result if str(result.dtype) == dtype else _rounded(result, dtype)]


def _rounded(data: te.Tensor, dtype: str) -> te.Tensor:
    """Interpolated numbers as the integers nearest to them, of those that the type has."""
    wide = str(data.dtype)
    if dtype == "bool":
        return te.compute(data.shape, lambda *at: tirx.nearbyint(data(*at)) != tirx.const(0, wide), name="rounded")
    bounds = np.iinfo(dtype)
    most = float(bounds.max)
    if most > bounds.max:
        # The largest number of 64 bits is none in floating point; the next lower one there is.
        most = float(np.nextafter(most, 0.0))
    least, largest = tirx.const(float(bounds.min), wide), tirx.const(most, wide)

    def element(*at):
        return tirx.Cast(dtype, tirx.Max(tirx.Min(tirx.nearbyint(data(*at)), largest), least))

    return te.compute(data.shape, element, name="rounded")


def _tvm_resizes(plan: ResizePlan, shape: Sequence[int]) -> bool:
    """Whether TVM's own formulation, which computes positions instead of reading them, gives ONNX's result."""
    plain = not plan.antialias and not plan.exclude_outside and plan.exact and len(shape) == 4
    inner = all(axis.axis >= 2 and axis.after > 1 for axis in plan.axes)
    known = plan.coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
    # Its aligned corners of an axis of one element divide by zero, also where the axis stays as it is.
    apart = plan.coordinates != "align_corners" or 1 not in shape[2:]
    return plain and inner and known and apart and bool(plan.axes)


def _resized_nearest(plan: ResizePlan, operands: NodeOperands, data: te.Tensor) -> te.Tensor:
    shape = [int(extent) for extent in data.shape]
    resized = {axis.axis: axis for axis in plan.axes}
    tables = {k: interpolation_table(plan, axis) for k, axis in resized.items()}
    indices = {k: _nearest_index(operands, resized[k], table[0][:, 0]) for k, table in tables.items()}
    outside = {k: operands.table(t[2].astype("int32")) for k, t in tables.items() if t[2].any()}
    result_shape = [resized[k].after if k in resized else extent for k, extent in enumerate(shape)]

    def element(*at):
        value = data(*(indices[k](index) if k in indices else index for k, index in enumerate(at)))
        for k, table in outside.items():
            value = tirx.Select(table(at[k]) != 0, tirx.const(plan.extrapolation_value, str(data.dtype)), value)
        return value

    return te.compute(result_shape, element, name="resize")


def _nearest_index(operands: NodeOperands, axis: AxisResize, table: np.ndarray) -> Callable[[PrimExpr], PrimExpr]:
    """Arithmetic that gives the table, so that what is read stays visible to the analysis; else the table."""
    i = np.arange(axis.after, dtype="int64")
    before, after = axis.before // math.gcd(axis.before, axis.after), axis.after // math.gcd(axis.before, axis.after)
    # position = (slope * i + shift) // divisor
    for slope, shift, divisor in (
        (before, 0, after),
        (2 * before, before, 2 * after),
        (2 * before, before - 1, 2 * after),
    ):
        if np.array_equal((slope * i + shift) // divisor, table):
            return lambda at: tirx.floordiv(at * slope + shift, int_imm(divisor)) if divisor > 1 else at * slope + shift
    positions = operands.table(table)
    return lambda at: position_on_axis(positions(at), axis.before)


def _resized_axis(plan: ResizePlan, axis: AxisResize, operands: NodeOperands, data: te.Tensor) -> te.Tensor:
    shape, dtype = [int(extent) for extent in data.shape], str(data.dtype)
    k = axis.axis
    precision = "float64" if dtype == "float64" else "float32"
    indices, weights, outside = interpolation_table(plan, axis, precision)
    positions, factors = operands.table(indices), operands.table(weights.astype(dtype))
    taps = indices.shape[1]

    def mixed(*at):
        r = te.reduce_axis((0, taps), name="tap")
        return te.sum(
            data(*at[:k], position_on_axis(positions(at[k], r), axis.before), *at[k + 1 :]) * factors(at[k], r), axis=r
        )

    result_shape = [*shape[:k], axis.after, *shape[k + 1 :]]
    result = te.compute(result_shape, mixed, name=f"resize_axis{k}")
    if not outside.any():
        return result
    table = operands.table(outside.astype("int32"))
    beyond = tirx.const(plan.extrapolation_value, dtype)
    return te.compute(result_shape, lambda *at: tirx.Select(table(at[k]) != 0, beyond, result(*at)), name="extrapolate")
