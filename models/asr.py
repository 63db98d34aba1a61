"""Speech recognition by a Transformer: convolutions that take every fourth frame, an encoder, and each frame's classes.

Batch 8 is the 2021 paper's (Table 1), which says no more of its network than that it recognizes speech. Chosen: the
encoder and the CTC classifier of ESPnet's Transformer for AISHELL (``egs/aishell/asr1``): 83 features of a frame,
utterances of 512 frames (its ``maxlen-in``), two convolutions of 3 x 3 with stride 2 and 256 channels, 12 layers of
width 256 with 4 heads and 2048 inner units, layer normalization before each part, and 4233 characters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from souffle.models.attention import Heads, attention, feed_forward
from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_RELU, conv, layer_norm, linear, reshape

__all__ = ["SIZES", "AsrConfig", "build_asr"]

_EPSILON = 1e-12


@dataclass(frozen=True)
class AsrConfig:
    """Layers, batch, frames, features of a frame, hidden width (and channels), heads, inner units, and characters."""

    layers: int
    batch: int
    frames: int
    features: int
    hidden: int
    heads: int
    inner: int
    characters: int

    @property
    def kept(self) -> tuple[int, int]:
        """Frames and features behind both convolutions."""
        return tuple(((size - 1) // 2 - 1) // 2 for size in (self.frames, self.features))


SIZES = {
    "paper": AsrConfig(layers=12, batch=8, frames=512, features=83, hidden=256, heads=4, inner=2048, characters=4233),
    "tiny": AsrConfig(layers=2, batch=2, frames=23, features=13, hidden=8, heads=2, inner=12, characters=11),
}


def build_asr(config: AsrConfig, seed: int) -> ModelProto:
    """Build the network: ``input`` (batch, 1, frames, features), ``output`` (batch, kept frames, characters),
    logarithms of probabilities.
    """
    b = GraphBuilder("asr", seed)
    hidden, (frames, features) = config.hidden, config.kept
    x = b.input("input", (config.batch, 1, config.frames, config.features))
    with b.scope("encoder", "embed"):
        for k, channels in enumerate((1, hidden)):
            with b.scope("conv", f"conv.{2 * k}"):
                x = conv(b, x, (channels, hidden), 3, stride=2, gain=AFTER_RELU, folded=False, pad=0)
                x = b.node("Relu", x)
        x = reshape(b, b.node("Transpose", x, perm=[0, 2, 1, 3]), config.batch, frames, hidden * features)
        with b.scope("out"):
            x = linear(b, x, hidden * features, hidden)
        places = b.parameter("pe", _places(frames, hidden))
        x = b.node("Add", b.node("Mul", x, b.constant(math.sqrt(hidden))), places)
    heads = Heads(config.batch, hidden, config.heads)
    for layer in range(config.layers):
        with b.scope("encoder", f"encoders.{layer}"):
            with b.scope("norm1"):
                y = layer_norm(b, x, hidden, _EPSILON)
            with b.scope("self_attn"):
                x = b.node("Add", x, attention(b, heads, y, y, (frames, frames)))
            with b.scope("norm2"):
                y = layer_norm(b, x, hidden, _EPSILON)
            with b.scope("feed_forward"):
                x = b.node("Add", x, feed_forward(b, y, hidden, config.inner))
    with b.scope("encoder", "after_norm"):
        x = layer_norm(b, x, hidden, _EPSILON)
    with b.scope("ctc"):
        x = linear(b, x, hidden, config.characters)
    b.output(b.node("LogSoftmax", x, axis=-1), "output", (config.batch, frames, config.characters))
    return b.model()


def _places(frames: int, hidden: int) -> np.ndarray:
    """Sines and cosines of a frame's place (Vaswani et al. 2017, 3.5), (1, frames, hidden)."""
    angles = np.arange(frames)[:, None] * np.exp(np.arange(0, hidden, 2) * -(math.log(10000.0) / hidden))
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(1, frames, hidden).astype(np.float32)
