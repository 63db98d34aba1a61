"""Swin Transformer: attention in windows that shift in every second block, patches merged between stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_GELU, conv, gelu, gemm, layer_norm, linear, reshape

__all__ = ["SIZES", "SwinConfig", "build_swin"]

_MASKED = -100.0
_MLP_RATIO = 4
_RESIDUAL = 0.5
# End of a slice that runs to the end of its axis, as the exporter writes it.
_END = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class SwinConfig:
    """Image side, patch side, window side, width of the first stage, each stage's blocks and heads, classes, batch."""

    image: int
    patch: int
    window: int
    dim: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    classes: int
    batch: int = 1


@dataclass(frozen=True)
class _Stage:
    side: int
    dim: int
    heads: int
    window: int
    batch: int


SIZES = {
    "paper": SwinConfig(224, 4, 7, 128, (2, 2, 18, 2), (4, 8, 16, 32), 1000),
    # As in the paper's size, the last stage is a single window and so has no shift.
    "tiny": SwinConfig(32, 4, 4, 16, (2, 2), (2, 4), 10),
}


def build_swin(config: SwinConfig, seed: int) -> ModelProto:
    """Build the classifier: ``input`` (batch, 3, image, image), ``output`` (batch, classes)."""
    b = GraphBuilder("swin", seed)
    x = b.input("input", (config.batch, 3, config.image, config.image))
    side, dim = config.image // config.patch, config.dim
    with b.scope("features", "features.0"):
        with b.scope("features.0.0"):
            x = conv(b, x, (3, dim), config.patch, config.patch, folded=False, pad=0)
        with b.scope("features.0.1"):
            x = b.node("Transpose", x, perm=[0, 2, 3, 1])
        with b.scope("features.0.2"):
            x = layer_norm(b, x, dim)
    for index, (depth, heads) in enumerate(zip(config.depths, config.heads, strict=True)):
        if index > 0:
            with b.scope("features", f"features.{2 * index}"):
                x = _merge_patches(b, x, dim)
            side, dim = side // 2, dim * 2
        stage = _Stage(side, dim, heads, config.window, config.batch)
        module = f"features.{2 * index + 1}"
        for block in range(depth):
            shift = config.window // 2 if block % 2 == 1 and side > config.window else 0
            with b.scope("features", module, f"{module}.{block}"):
                x = _block(b, x, stage, shift)
    with b.scope("norm"):
        x = layer_norm(b, x, dim)
    with b.scope("permute"):
        x = b.node("Transpose", x, perm=[0, 3, 1, 2])
    with b.scope("avgpool"):
        x = b.node("GlobalAveragePool", x)
    with b.scope("flatten"):
        x = b.node("Flatten", x, axis=1)
    with b.scope("head"):
        x = gemm(b, x, dim, config.classes)
    b.output(x, "output", (config.batch, config.classes))
    return b.model()


def _block(b: GraphBuilder, x: str, stage: _Stage, shift: int) -> str:
    dim = stage.dim
    with b.scope("norm1"):
        y = layer_norm(b, x, dim)
    with b.scope("attn"):
        y = _attention(b, y, stage, shift)
    x = b.node("Add", x, y)
    with b.scope("norm2"):
        y = layer_norm(b, x, dim)
    with b.scope("mlp"):
        with b.scope("mlp.0"):
            y = linear(b, y, dim, _MLP_RATIO * dim)
        with b.scope("mlp.1"):
            y = gelu(b, y)
        with b.scope("mlp.3"):
            y = linear(b, y, _MLP_RATIO * dim, dim, gain=_RESIDUAL * AFTER_GELU)
    return b.node("Add", x, y)


def _attention(b: GraphBuilder, x: str, stage: _Stage, shift: int) -> str:
    side, dim, heads, window = stage.side, stage.dim, stage.heads, stage.window
    across, tokens = side // window, window * window
    windows, width = stage.batch * across * across, dim // heads
    if shift:
        x = _roll(b, _roll(b, x, -shift, axis=1), -shift, axis=2)
    x = reshape(b, x, stage.batch, across, window, across, window, dim)
    x = reshape(b, b.node("Transpose", x, perm=[0, 1, 3, 2, 4, 5]), windows, tokens, dim)
    with b.scope("qkv"):
        qkv = linear(b, x, dim, 3 * dim)
    qkv = b.node("Transpose", reshape(b, qkv, windows, tokens, 3, heads, width), perm=[2, 0, 3, 1, 4])
    q, k, v = (b.node("Gather", qkv, b.constant(part), axis=0) for part in range(3))
    q = b.node("Mul", q, b.constant(1.0 / math.sqrt(width)))
    scores = b.node("MatMul", q, b.node("Transpose", k, perm=[0, 1, 3, 2]))
    scores = b.node("Add", scores, b.folded("Add", _relative_position_bias(b, window, heads)))
    if shift:
        scores = reshape(b, scores, stage.batch, across * across, heads, tokens, tokens)
        scores = b.node("Add", scores, b.folded("Add", _shift_mask(side, window, shift)))
        scores = reshape(b, scores, -1, heads, tokens, tokens)
    y = b.node("MatMul", b.node("Softmax", scores, axis=-1), v)
    y = reshape(b, b.node("Transpose", y, perm=[0, 2, 1, 3]), windows, tokens, dim)
    with b.scope("proj"):
        y = linear(b, y, dim, dim)
    y = reshape(b, y, stage.batch, across, across, window, window, dim)
    y = reshape(b, b.node("Transpose", y, perm=[0, 1, 3, 2, 4, 5]), stage.batch, side, side, dim)
    return _roll(b, _roll(b, y, shift, axis=1), shift, axis=2) if shift else y


def _roll(b: GraphBuilder, x: str, shift: int, axis: int) -> str:
    """``torch.roll`` along one axis: the tail from ``-shift`` on, then what stood before it."""
    tail = _slice(b, x, -shift, _END, axis)
    head = _slice(b, x, 0, -shift, axis)
    return b.node("Concat", tail, head, axis=axis)


def _slice(b: GraphBuilder, x: str, start: int, end: int, axis: int, step: int = 1) -> str:
    return b.node("Slice", x, *(b.constant([value]) for value in (start, end, axis, step)))


def _merge_patches(b: GraphBuilder, x: str, dim: int) -> str:
    """Put 2x2 neighbours side by side and project their 4 * dim channels to 2 * dim."""
    parts = []
    for row, column in ((0, 0), (1, 0), (0, 1), (1, 1)):
        rows = _slice(b, x, row, _END, axis=1, step=2)
        parts.append(_slice(b, rows, column, _END, axis=2, step=2))
    x = b.node("Concat", *parts, axis=-1)
    with b.scope("norm"):
        x = layer_norm(b, x, 4 * dim)
    with b.scope("reduction"):
        return linear(b, x, 4 * dim, 2 * dim, bias=False)


def _relative_position_bias(b: GraphBuilder, window: int, heads: int) -> np.ndarray:
    """A random table of (2 * window - 1)^2 offsets, looked up for each pair of tokens: (1, heads, tokens, tokens)."""
    reach = 2 * window - 1
    table = b.normal((reach * reach, heads), 0.5)
    rows, columns = (axis.ravel() for axis in np.indices((window, window)))
    offset = (rows[:, None] - rows + window - 1) * reach + columns[:, None] - columns + window - 1
    return table[offset].transpose(2, 0, 1)[None]


def _shift_mask(side: int, window: int, shift: int) -> np.ndarray:
    """Forbid attention between tokens that the cyclic shift made neighbours: (1, windows, 1, tokens, tokens)."""
    band = np.zeros(side, np.int64)
    band[side - window : side - shift] = 1
    band[side - shift :] = 2
    across = side // window
    region = (3 * band[:, None] + band).reshape(across, window, across, window)
    region = region.transpose(0, 2, 1, 3).reshape(across * across, window * window)
    mask = np.where(region[:, :, None] == region[:, None, :], 0.0, _MASKED).astype(np.float32)
    return mask[None, :, None]
