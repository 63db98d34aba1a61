"""CRNN: convolutions that turn an image of a line of text into a sequence of frames, and two bidirectional LSTMs.

Batch 8 is the 2021 paper's (Table 1). The rest is the network that it cites (Shi et al. 2016; ``model/crnn_demo`` of
bgshih/crnn): grey images of 32 x 100, seven convolutions, batch normalizations (here folded) behind the third, fifth
and seventh, two pools that halve the height alone, 26 frames of 512 channels, 256 hidden units for each direction, and
the logarithms of probabilities of 36 characters and the blank.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import ModelProto

from souffle.models.builder import GraphBuilder
from souffle.models.layers import AFTER_RELU, conv, linear
from souffle.models.recurrent import recurrent_weights

__all__ = ["SIZES", "CrnnConfig", "build_crnn"]


@dataclass(frozen=True)
class CrnnConfig:
    """Batch, width of an image (32 pixels high), channels of the seven convolutions, hidden units, and classes."""

    batch: int
    width: int
    channels: tuple[int, ...]
    hidden: int
    classes: int

    @property
    def frames(self) -> int:
        """Frames of the sequence: two pools halve the width, two add a column, the last convolution takes one."""
        return self.width // 4 + 1


SIZES = {
    "paper": CrnnConfig(batch=8, width=100, channels=(64, 128, 256, 256, 512, 512, 512), hidden=256, classes=37),
    "tiny": CrnnConfig(batch=2, width=12, channels=(3, 4, 5, 5, 6, 6, 8), hidden=5, classes=7),
}

_HEIGHT = 32
_NORMALIZED = (2, 4, 6)
# Behind which convolution, counted from 0, which pool stands: kernel, strides, and padding at both ends of each axis.
_HALVED = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 0, 0]}
_LOWERED = {"kernel_shape": [2, 2], "strides": [2, 1], "pads": [0, 1, 0, 1]}
_POOLS = {0: _HALVED, 1: _HALVED, 3: _LOWERED, 5: _LOWERED}


def build_crnn(config: CrnnConfig, seed: int) -> ModelProto:
    """Build the network: ``input`` (batch, 1, 32, width), ``output`` (frames, batch, classes)."""
    b = GraphBuilder("crnn", seed)
    x = b.input("input", (config.batch, 1, _HEIGHT, config.width))
    inputs = 1
    for layer, outputs in enumerate(config.channels):
        kernel, pad = (2, 0) if layer == len(config.channels) - 1 else (3, 1)
        with b.scope("cnn", f"conv{layer}"):
            folded = layer in _NORMALIZED
            x = conv(b, x, (inputs, outputs), kernel, gain=AFTER_RELU, folded=folded, pad=pad)
            x = b.node("Relu", x)
            if layer in _POOLS:
                x = b.node("MaxPool", x, **_POOLS[layer])
        inputs = outputs
    # (batch, channels, 1, frames) to (frames, batch, channels)
    x = b.node("Transpose", b.node("Squeeze", x, b.constant([2])), perm=[2, 0, 1])
    with b.scope("rnn.0"):
        x = _recurrent(b, x, inputs, config.hidden, config)
    with b.scope("rnn.1"):
        x = _recurrent(b, x, config.hidden, config.classes, config)
    b.output(b.node("LogSoftmax", x, axis=-1), "output", (config.frames, config.batch, config.classes))
    return b.model()


def _recurrent(b: GraphBuilder, x: str, inputs: int, outputs: int, config: CrnnConfig) -> str:
    weights = recurrent_weights(b, "LSTM", 2, inputs, config.hidden)
    y = b.nodes("LSTM", (x, *weights), 3, hidden_size=config.hidden, direction="bidirectional")[0]
    joined = b.node("Transpose", y, perm=[0, 2, 1, 3])
    joined = b.node("Reshape", joined, b.constant([config.frames, config.batch, 2 * config.hidden]))
    return linear(b, joined, 2 * config.hidden, outputs, gain=4.0)
