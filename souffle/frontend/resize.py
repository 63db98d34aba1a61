"""ONNX ``Resize`` as tables: which elements of an axis each element of the output mixes, and how much of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from souffle.frontend.attributes import attribute
from souffle.frontend.refusal import Obstacle, computed

__all__ = ["AxisResize", "ResizePlan", "interpolation_table", "resize_plan"]


_TIE = 1e-6
"""How far off a position in float32 may be and still be taken as half-way, as ONNX Runtime does it."""
_NEAREST = {
    "round_prefer_floor": lambda x: np.ceil(x.astype("float64") - 0.5 - _TIE),
    "round_prefer_ceil": lambda x: np.floor(x.astype("float64") + 0.5 + _TIE),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True)
class AxisResize:
    """One resized axis: its extents, its scale, and the part of it that is taken (0 to 1)."""

    axis: int
    before: int
    after: int
    scale: float
    start: float = 0.0
    end: float = 1.0

    @property
    def exact(self) -> bool:
        """Whether the scale is the ratio of the extents."""
        return abs(self.scale * self.before - self.after) < 1e-6 * self.after


@dataclass(frozen=True)
class ResizePlan:
    """What a ``Resize`` node does, with every attribute resolved."""

    mode: str
    coordinates: str
    nearest_mode: str
    cubic_coefficient: float
    exclude_outside: bool
    extrapolation_value: float
    antialias: bool
    axes: tuple[AxisResize, ...]

    @property
    def exact(self) -> bool:
        """Whether every scale is the ratio of the extents."""
        return all(axis.exact for axis in self.axes)


def resize_plan(
    node: onnx.NodeProto,
    shape: Sequence[int],
    roi: np.ndarray | None,
    scales: np.ndarray | None,
    sizes: np.ndarray | None,
) -> ResizePlan:
    """Resolve the attributes of a ``Resize`` node.

    Raises
    ------
    UnsupportedOperatorError
        If neither scales nor sizes are known.
    """
    axes = [axis % len(shape) for axis in attribute(node, "axes", range(len(shape)))]
    scales = None if scales is None or scales.size == 0 else scales.astype("float32").tolist()
    sizes = None if sizes is None or sizes.size == 0 else [int(size) for size in sizes.tolist()]
    if scales is None and sizes is None:
        raise computed("sizes" if len(node.input) > 3 and node.input[3] else "scales")
    if sizes is not None:
        ratios = [size / shape[axis] for size, axis in zip(sizes, axes, strict=True)]
        policy = attribute(node, "keep_aspect_ratio_policy", b"stretch").decode()
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            ratios = [ratio] * len(axes)
            sizes = [math.floor(ratio * shape[axis] + 0.5) for axis in axes]
    else:
        ratios = scales
        sizes = [math.floor(shape[axis] * scale) for axis, scale in zip(axes, scales, strict=True)]
    coordinates = attribute(node, "coordinate_transformation_mode", b"half_pixel").decode()
    cropped = coordinates == "tf_crop_and_resize" and roi is not None and roi.size == 2 * len(axes)
    bounds = roi.astype("float64").tolist() if cropped else [0.0] * len(axes) + [1.0] * len(axes)
    resized = tuple(
        AxisResize(axis, shape[axis], size, float(ratio), bounds[k], bounds[k + len(axes)])
        for k, (axis, size, ratio) in enumerate(zip(axes, sizes, ratios, strict=True))
        if size != shape[axis] or ratio != 1 or cropped
    )
    return ResizePlan(
        mode=attribute(node, "mode", b"nearest").decode(),
        coordinates=coordinates,
        nearest_mode=attribute(node, "nearest_mode", b"round_prefer_floor").decode(),
        cubic_coefficient=attribute(node, "cubic_coeff_a", -0.75),
        exclude_outside=bool(attribute(node, "exclude_outside", 0)),
        extrapolation_value=attribute(node, "extrapolation_value", 0.0),
        antialias=bool(attribute(node, "antialias", 0)),
        axes=resized,
    )


def interpolation_table(
    plan: ResizePlan, axis: AxisResize, precision: str = "float32"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How an axis is interpolated.

    Parameters
    ----------
    plan : ResizePlan
    axis : AxisResize
    precision : str
        The type in which positions and weights are computed.

    Returns
    -------
    indices : int32 array (after, taps)
        Positions on the axis before.
    weights : array (after, taps) of type `precision`
    outside : bool array (after,)
        Where the extrapolation value is to be used instead.
    """
    x = _coordinates(plan.coordinates, axis, precision)
    outside = np.zeros(axis.after, dtype=bool)
    if plan.coordinates == "tf_crop_and_resize":
        outside = (x < 0) | (x > axis.before - 1)
    if plan.mode == "nearest":
        indices = _NEAREST[plan.nearest_mode](x).astype("int64")[:, None]
        return np.clip(indices, 0, axis.before - 1).astype("int32"), np.ones((axis.after, 1), precision), outside
    x = x.astype("float64")
    base = np.floor(x)
    ratio = x - base
    shrink = min(axis.scale, 1.0) if plan.antialias else 1.0
    reach = 1 if plan.mode == "linear" else 2
    first = math.floor(-reach / shrink) + 1
    offsets = np.arange(first, 2 - first if plan.antialias else reach + 1)
    distance = np.abs(shrink * (offsets[None, :] - ratio[:, None]))
    weights = np.clip(1 - distance, 0, 1) if plan.mode == "linear" else _cubic(distance, plan.cubic_coefficient)
    indices = base[:, None].astype("int64") + offsets[None, :]
    if plan.exclude_outside:
        weights = np.where((indices < 0) | (indices >= axis.before), 0, weights)
    if plan.exclude_outside or plan.antialias:
        weights = weights / weights.sum(axis=1, keepdims=True)
    used = (weights != 0).any(axis=0)
    indices = np.clip(indices[:, used], 0, axis.before - 1)
    return indices.astype("int32"), weights[:, used].astype(precision), outside


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _coordinates(mode: str, axis: AxisResize, precision: str) -> np.ndarray:
    """Where each output element lies on the axis before; in float32 as ONNX Runtime computes it."""
    one = np.dtype(precision).type
    x = np.arange(axis.after, dtype=precision)
    scale, half = one(axis.scale), one(0.5)
    if mode == "half_pixel":
        return (x + half) / scale - half
    if mode == "half_pixel_symmetric":
        adjustment = one(axis.after) / (scale * one(axis.before))
        offset = one(axis.before) / one(2) * (one(1) - adjustment)
        return offset + (x + half) / scale - half
    if mode == "pytorch_half_pixel":
        return (x + half) / scale - half if axis.after > 1 else np.zeros_like(x)
    if mode == "align_corners":
        if axis.after > 1 and not axis.exact:
            # ONNX's tests and reference divide by what the scale gives, ONNX Runtime and PyTorch by the whole number.
            raise Obstacle(
                f"with align_corners, its scale {axis.scale:g} makes {axis.scale * axis.before:g} elements of "
                f"{axis.before}, which is no whole number, and ONNX does not say where the last one is",
                f"give sizes in place of scales, or a scale that gives {axis.after} elements exactly",
            )
        return x * one(axis.before - 1) / one(max(axis.after - 1, 1))
    if mode == "asymmetric":
        return x / scale
    if mode == "tf_half_pixel_for_nn":
        return (x + half) / scale
    if mode == "tf_crop_and_resize":
        last = axis.before - 1
        if axis.after == 1:
            return np.array([0.5 * (axis.start + axis.end) * last], dtype=precision)
        steps = np.arange(axis.after) * (axis.end - axis.start) * last / (axis.after - 1)
        return (axis.start * last + steps).astype(precision)
    raise Obstacle(
        f"its attribute coordinate_transformation_mode = {mode} is not supported",
        "supported modes are half_pixel, half_pixel_symmetric, pytorch_half_pixel, align_corners, asymmetric, "
        "tf_half_pixel_for_nn and tf_crop_and_resize",
    )
