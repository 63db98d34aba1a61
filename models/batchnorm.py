"""Batch norm folded into random convolutions, with statistics from sample images.

A deep network without normalisation and with random weights either dies out or saturates, and its output then hardly
depends on its input. A trained one has its batch norms' statistics; here they are measured while the network is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from souffle.models.builder import GraphBuilder

__all__ = ["Traced", "norm_conv", "sample_images", "sigmoid"]

_SAMPLES = 16
# Half the usual image, for speed; from much smaller ones, padding dominates the statistics of the last layers.
_SAMPLE_SIDE = 112


@dataclass(frozen=True)
class Traced:
    """A value of the graph, and what it is for the sample images: (samples, channels, height, width)."""

    name: str
    sample: np.ndarray


def sample_images(b: GraphBuilder, side: int) -> np.ndarray:
    """Draw sample images like those of :func:`models.random_inputs`: noise, and a mean for each channel."""
    side = min(side, _SAMPLE_SIDE)
    return b.normal((_SAMPLES, 3, side, side), 1.0) + b.normal((_SAMPLES, 3, 1, 1), 1.0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """The logistic function, without overflow for large negative values."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def norm_conv(
    b: GraphBuilder,
    x: Traced,
    channels: int,
    kernel: int = 1,
    stride: int = 1,
    depthwise: bool = False,
    gain: float = 1.0,
) -> Traced:
    """A convolution with a batch norm folded into it, one Conv node with padding ``kernel // 2``.

    Parameters
    ----------
    channels
        Output channels; for a depthwise convolution also those of the input.
    gain
        Standard deviation of each output channel over the sample images, give or take 10 %.
    """
    inputs = x.sample.shape[1]
    weight = b.normal((channels, 1 if depthwise else inputs, kernel, kernel), 1.0)
    y = _convolve(x.sample, weight, stride, depthwise)
    mean, std = y.mean(axis=(0, 2, 3)), y.std(axis=(0, 2, 3))
    scale = b.normal((channels,), 0.1 * gain, mean=gain) / std
    shift = b.normal((channels,), 0.2) - mean * scale
    name = b.node(
        "Conv",
        x.name,
        b.folded("Conv", weight * scale[:, None, None, None]),
        b.folded("Conv", shift),
        dilations=[1, 1],
        group=inputs if depthwise else 1,
        kernel_shape=[kernel, kernel],
        pads=[kernel // 2] * 4,
        strides=[stride, stride],
    )
    return Traced(name, y * scale[:, None, None] + shift[:, None, None])


def _convolve(x: np.ndarray, weight: np.ndarray, stride: int, depthwise: bool) -> np.ndarray:
    """Sum over the kernel's positions of a shifted image times that position's weights."""
    kernel = weight.shape[-1]
    pad = kernel // 2
    height, width = ((side + 2 * pad - kernel) // stride + 1 for side in x.shape[2:])
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    y = np.zeros((x.shape[0], weight.shape[0], height, width), np.float32)
    for i, j in np.ndindex(kernel, kernel):
        part = padded[:, :, i : i + stride * height : stride, j : j + stride * width : stride][:, :, :height, :width]
        if depthwise:
            y += part * weight[:, 0, i, j][:, None, None]
        else:
            y += (weight[:, :, i, j] @ part.reshape(*part.shape[:2], -1)).reshape(y.shape)
    return y
