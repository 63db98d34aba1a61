"""Layers that several models share, each as the nodes PyTorch's exporter writes for it.

``gain`` is the standard deviation of a layer's output for inputs of unit second moment: weights have standard deviation
``gain / sqrt(fan_in)``. The models choose gains that keep activations of order one through their whole depth.
"""

from __future__ import annotations

import math

from souffle.models.builder import GraphBuilder

__all__ = [
    "AFTER_GELU",
    "AFTER_RELU",
    "AFTER_SWISH",
    "conv",
    "gelu",
    "gemm",
    "layer_norm",
    "linear",
    "reshape",
    "swish",
]

# Gains that restore a unit second moment after the activation: 1 / sqrt(E[f(x)^2]) for a standard normal x.
AFTER_RELU = math.sqrt(2.0)
AFTER_GELU = 1.0 / math.sqrt(0.4252)
AFTER_SWISH = 1.0 / math.sqrt(0.3557)

# Small, yet large enough that a bias left out changes the result well beyond any rounding.
_BIAS_STD = 0.1


def linear(b: GraphBuilder, x: str, fan_in: int, fan_out: int, gain: float = 1.0, bias: bool = True) -> str:
    """``nn.Linear`` on an input of rank 3 or more: MatMul, then Add with the bias first."""
    weight = b.folded("MatMul", b.normal((fan_in, fan_out), gain / math.sqrt(fan_in)))
    y = b.node("MatMul", x, weight)
    if not bias:
        return y
    return b.node("Add", b.parameter("bias", b.normal((fan_out,), _BIAS_STD)), y)


def gemm(b: GraphBuilder, x: str, fan_in: int, fan_out: int, gain: float = 1.0) -> str:
    """``nn.Linear`` on a matrix: one Gemm with the weight as stored, (fan_out, fan_in)."""
    weight = b.parameter("weight", b.normal((fan_out, fan_in), gain / math.sqrt(fan_in)))
    bias = b.parameter("bias", b.normal((fan_out,), _BIAS_STD))
    return b.node("Gemm", x, weight, bias, alpha=1.0, beta=1.0, transB=1)


def conv(
    b: GraphBuilder,
    x: str,
    channels: tuple[int, int],
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    gain: float = 1.0,
    folded: bool = True,
    pad: int | None = None,
) -> str:
    """Convolution, NCHW, with bias.

    Parameters
    ----------
    channels
        Input and output channels.
    folded
        A batch norm was folded into the weights, which gives them an exporter's name.
    pad
        Padding on each side, ``kernel // 2`` if not given.
    """
    inputs, outputs = channels
    fan_in = inputs // groups
    weight = b.normal((outputs, fan_in, kernel, kernel), gain / math.sqrt(fan_in * kernel * kernel))
    bias = b.normal((outputs,), _BIAS_STD)
    if folded:
        names = b.folded("Conv", weight), b.folded("Conv", bias)
    else:
        names = b.parameter("weight", weight), b.parameter("bias", bias)
    return b.node(
        "Conv",
        x,
        *names,
        dilations=[1, 1],
        group=groups,
        kernel_shape=[kernel, kernel],
        pads=[kernel // 2 if pad is None else pad] * 4,
        strides=[stride, stride],
    )


def layer_norm(b: GraphBuilder, x: str, width: int, epsilon: float = 1e-5) -> str:
    """``nn.LayerNorm`` over the last axis, with scales near one."""
    scale = b.parameter("weight", b.normal((width,), 0.1, mean=1.0))
    bias = b.parameter("bias", b.normal((width,), _BIAS_STD))
    return b.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon)


def gelu(b: GraphBuilder, x: str) -> str:
    """The exact GELU, x * (1 + erf(x / sqrt(2))) * 0.5."""
    erf = b.node("Erf", b.node("Div", x, b.constant(math.sqrt(2.0))))
    return b.node("Mul", b.node("Mul", x, b.node("Add", erf, b.constant(1.0))), b.constant(0.5))


def swish(b: GraphBuilder, x: str) -> str:
    """SiLU, x * sigmoid(x)."""
    return b.node("Mul", x, b.node("Sigmoid", x))


def reshape(b: GraphBuilder, x: str, *shape: int) -> str:
    """Reshape to a constant shape."""
    return b.node("Reshape", x, b.constant(shape))
