"""What the deep-learning kernels of :mod:`benchmarks.hfuse.workloads` must give, in NumPy.

Each takes the arguments of a launch by name, as :func:`named` gives them, and gives its outputs by name. Where floating
point is involved the operations are those of the kernel in its order, in float32, so that results are equal in each
bit where nothing is contracted to fused operations, as on the CPU device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from souffle.hfuse import Launch

__all__ = ["REFERENCES", "batchnorm_exact", "named"]

Arguments = Mapping[str, Any]

_WARP = 32


def named(launch: Launch, arrays: list[np.ndarray | int | float]) -> dict[str, Any]:
    """The arguments of a launch by the names of its parameters."""
    return {argument.name: value for argument, value in zip(launch.arguments, arrays, strict=True)}


def _windows(planes: np.ndarray, given: Arguments, fill: float) -> np.ndarray:
    """All windows of padded planes: planes x out_height x out_width x kernel_height x kernel_width."""
    vertical, horizontal = given["pad_height"], given["pad_width"]
    padded = np.pad(planes, ((0, 0), (vertical, vertical), (horizontal, horizontal)), constant_values=fill)
    reach = [(given[f"kernel_{side}"] - 1) * given[f"dilation_{side}"] + 1 for side in ("height", "width")]
    every = sliding_window_view(padded, reach, axis=(1, 2))
    return every[
        :,
        :: given["stride_height"],
        :: given["stride_width"],
        :: given["dilation_height"],
        :: given["dilation_width"],
    ]


def _planes(given: Arguments, name: str, count: str, height: str, width: str) -> np.ndarray:
    return given[name].reshape(given[count], given[height], given[width])


def maxpool(given: Arguments) -> dict[str, np.ndarray]:
    """Values and places; of equal values the first inside the image, of several NaN the last."""
    planes = _planes(given, "input", "planes", "in_height", "in_width")
    positions = np.broadcast_to(np.arange(planes[0].size).reshape(planes[0].shape), planes.shape)
    values, places = _windows(planes, given, -np.inf), _windows(positions, given, -1)
    shape = (*values.shape[:3], -1)
    values, places = values.reshape(shape), places.reshape(shape)
    absent = np.isnan(values)
    most = np.where(absent, -np.inf, values).max(axis=-1, keepdims=True)
    first = np.argmax((values == most) & (places >= 0), axis=-1)
    last = values.shape[-1] - 1 - np.argmax(absent[..., ::-1], axis=-1)
    chosen = np.where(absent.any(axis=-1), last, first)[..., None]
    return {
        "output": np.take_along_axis(values, chosen, axis=-1).ravel(),
        "places": np.take_along_axis(places, chosen, axis=-1).ravel(),
    }


def im2col(given: Arguments) -> dict[str, np.ndarray]:
    """The columns: a window's position within its kernel comes before its place in the image."""
    windows = _windows(_planes(given, "image", "channels", "height", "width"), given, 0.0)
    return {"columns": np.ascontiguousarray(windows.transpose(0, 3, 4, 1, 2)).ravel()}


def upsample(given: Arguments) -> dict[str, np.ndarray]:
    """Each output pixel of its four neighbors."""
    planes = _planes(given, "input", "planes", "in_height", "in_width")
    half, one = np.float32(0.5), np.float32(1)

    def taps(side: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        out, scale = np.arange(given[f"out_{side}"], dtype=np.float32), np.float32(given[f"scale_{side}"])
        source = scale * out if given["align_corners"] else np.maximum(scale * (out + half) - half, np.float32(0))
        first = np.minimum(source.astype(np.int32), given[f"in_{side}"] - 1)
        return first, np.minimum(first + 1, given[f"in_{side}"] - 1), source - first.astype(np.float32)

    top, bottom, vertical = taps("height")
    left, right, horizontal = taps("width")
    vertical = vertical[:, None]

    def row(rows: np.ndarray) -> np.ndarray:
        return (one - horizontal) * planes[:, rows][:, :, left] + horizontal * planes[:, rows][:, :, right]

    return {"output": ((one - vertical) * row(top) + vertical * row(bottom)).ravel()}


def hist(given: Arguments) -> dict[str, np.ndarray]:
    """Counts of the bins."""
    bins, low, high = given["bins"], np.float32(given["low"]), np.float32(given["high"])
    inside = given["values"][(given["values"] >= low) & (given["values"] <= high)]
    places = ((inside - low) * np.float32(bins) / (high - low)).astype(np.int32)
    return {"counts": np.bincount(np.minimum(places, bins - 1), minlength=bins).astype(np.uint32)}


def batchnorm(given: Arguments) -> dict[str, np.ndarray]:
    """Mean and biased variance in float64, by two passes."""
    values = given["input"].reshape(given["batch"], given["channels"], given["positions"]).astype(np.float64)
    mean = values.mean(axis=(0, 2))
    return {"means": mean, "variances": ((values - mean[:, None]) ** 2).mean(axis=(0, 2))}


def batchnorm_exact(given: Arguments, block: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Mean and biased variance in float32, in the order of a block's threads.

    Parameters
    ----------
    given
        The arguments of a launch by name.
    block
        The launch's block: another one gives other sums.
    """
    batch, channels, positions = given["batch"], given["channels"], given["positions"]
    values = given["input"].reshape(batch, channels, positions).transpose(1, 0, 2)
    width, height, _ = block
    shape = (channels, height, width)
    mean, squares = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    count = np.zeros(shape, np.int32)
    for row in range(0, batch, height):
        for column in range(0, positions, width):
            tile = values[:, row : row + height, column : column + width]
            part = np.s_[:, : tile.shape[1], : tile.shape[2]]
            count[part] += 1
            before = tile - mean[part]
            mean[part] += before / count[part].astype(np.float32)
            squares[part] += before * (tile - mean[part])
    warps = height * width // _WARP
    state = tuple(item.reshape(channels, warps, _WARP) for item in (mean, squares, count))
    first_lanes = [item[:, :, 0] for item in _merged_lanes(*state)]
    padded = [np.pad(item, ((0, 0), (0, _WARP - warps)))[:, None, :] for item in first_lanes]
    mean, squares, count = (item[:, 0, 0] for item in _merged_lanes(*padded))
    return {"means": mean, "variances": squares / count.astype(np.float32)}


def _merged_lanes(mean: np.ndarray, squares: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, ...]:
    """Chan's formula between lanes whose numbers differ in one bit, for each bit; lanes are the last axis."""
    lanes = np.arange(_WARP)
    for flip in (1, 2, 4, 8, 16):
        other = lanes ^ flip
        here, there = count.astype(np.float32), count[..., other].astype(np.float32)
        factor = np.float32(1) / np.maximum(np.float32(1), (count + count[..., other]).astype(np.float32))
        distance = mean - mean[..., other]
        squares = squares + (squares[..., other] + distance * distance * here * there * factor)
        mean = (here * mean + there * mean[..., other]) * factor
        count = count + count[..., other]
    return mean, squares, count


REFERENCES: dict[str, Callable[[Arguments], dict[str, np.ndarray]]] = {
    "maxpool": maxpool,
    "batchnorm": batchnorm,
    "upsample": upsample,
    "im2col": im2col,
    "hist": hist,
}
"""By the kernel's name in :data:`benchmarks.hfuse.workloads.DEEP_LEARNING`."""
