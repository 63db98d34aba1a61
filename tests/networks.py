"""Networks written in PyTorch and exported to ONNX, as a user would: what the compiler is tried on beside its models.

Needs torch; tests take it by ``pytest.importorskip("torch")``. Weights are random from a fixed seed.
"""

from __future__ import annotations

import argparse
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["EXPORTERS", "NETWORKS", "export", "network"]

EXPORTERS = ("dynamo", "legacy")


class CausalDecoder(nn.Module):
    """A GPT-style block: causal attention with a mask made from the shapes, pre-norm, GELU."""

    def __init__(self, width: int = 24, heads: int = 3, vocabulary: int = 31, length: int = 11):
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        batch, length = tokens.shape
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
        scores = scores.masked_fill(~mask, float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out(y)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x))


class SdpaEncoder(nn.Module):
    """``nn.TransformerEncoderLayer``, whose attention is ``scaled_dot_product_attention``."""

    def __init__(self, width: int = 20, heads: int = 4):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, heads, 37, batch_first=True, activation="gelu", dropout=0.0)

    def forward(self, x):
        return self.layer(x)


class UNet(nn.Module):
    """Two levels, ConvTranspose on one way up and bilinear Resize on the other, skip connections, batch norm."""

    def __init__(self, base: int = 6):
        super().__init__()

        def double(a, b):
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1),
                nn.LeakyReLU(0.1),
            )

        self.down1, self.down2, self.bottom = double(3, base), double(base, 2 * base), double(2 * base, 4 * base)
        self.up2 = nn.ConvTranspose2d(4 * base, 2 * base, 2, stride=2)
        self.join2, self.join1 = double(4 * base, 2 * base), double(3 * base, base)
        self.head = nn.Conv2d(base, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        y = self.join2(torch.cat([self.up2(c), b], 1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return torch.sigmoid(self.head(self.join1(torch.cat([y, a], 1))))


class Recurrent(nn.Module):
    """A bidirectional LSTM of two layers, a GRU and a tanh RNN over it."""

    def __init__(self, width: int = 7, hidden: int = 5):
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(2 * hidden, hidden, batch_first=True)
        self.rnn = nn.RNN(hidden, 3)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        y, g = self.gru(y)
        z, r = self.rnn(y.transpose(0, 1))
        return z, h, c, g, r


class RmsNorm(nn.Module):
    """Written out, since the old exporter does not know ``nn.RMSNorm``."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class RotaryBlock(nn.Module):
    """A LLaMA-style block: RMS norm, rotary embedding, grouped-query attention, SwiGLU."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2, length: int = 9):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 43, bias=False), nn.Linear(width, 43, bias=False)
        self.down = nn.Linear(43, width, bias=False)
        angle = torch.outer(torch.arange(length), 10000 ** -(torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], -1))
        self.register_buffer("sin", torch.cat([angle.sin(), angle.sin()], -1))

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x):
        batch, length, width = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(batch, length, 2, self.groups, self.size).unbind(2)
        k = self.rotate(k.transpose(1, 2)).repeat_interleave(self.heads // self.groups, 1)
        v = v.transpose(1, 2).repeat_interleave(self.heads // self.groups, 1)
        y = F.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ConvNeXt(nn.Module):
    """A ConvNeXt stage: patch embedding, depthwise 7×7, layer norm over channels, layer scale."""

    def __init__(self, width: int = 12):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)
        return self.head((x + y).mean((-2, -1)))


class Recommender(nn.Module):
    """Embeddings gathered by index, an embedding bag by hand, a crossing of features, several outputs."""

    def __init__(self, rows: int = 23, width: int = 8):
        super().__init__()
        self.users, self.items = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.dense = nn.Linear(5, width)
        self.top = nn.Sequential(nn.Linear(width + 3, 13), nn.PReLU(13), nn.Linear(13, 2))

    def forward(self, user, history, dense):
        u, d = self.users(user), torch.tanh(self.dense(dense))
        h = self.items(history).mean(1)
        stacked = torch.stack([u, h, d], 1)
        crossed = stacked @ stacked.transpose(1, 2)
        pairs = crossed[:, [0, 0, 1], [1, 2, 2]]
        logits = self.top(torch.cat([d, pairs], 1))
        return logits.softmax(-1), logits.argmax(-1), torch.clamp(pairs, -1, 1)


class OddSizes(nn.Module):
    """Prime sizes, dilation, strides, groups, average pooling with padding, one-dimensional convolution."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(7, 11, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1))
        self.b = nn.Conv2d(11, 22, 3, groups=11, padding=1)
        self.c = nn.Conv1d(22, 13, 3, padding=1)
        self.norm = nn.GroupNorm(2, 22)
        self.instance = nn.InstanceNorm1d(13, affine=True)

    def forward(self, x):
        y = F.hardswish(self.a(x))
        y = F.avg_pool2d(self.norm(self.b(y)), 3, stride=2, padding=1, count_include_pad=False)
        y = self.instance(self.c(y.flatten(2)))
        return F.softplus(y).amax(-1), torch.logsumexp(y, 1), y.std(-1)


class SqueezeExcite(nn.Module):
    """An inverted bottleneck with squeeze-and-excitation, ReLU6 and an upsampled branch."""

    def __init__(self, width: int = 10):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, 30, 1, bias=False), nn.BatchNorm2d(30), nn.ReLU6())
        self.depth = nn.Sequential(
            nn.Conv2d(30, 30, 5, padding=2, groups=30, bias=False), nn.BatchNorm2d(30), nn.Hardswish()
        )
        self.reduce, self.grow = nn.Conv2d(30, 8, 1), nn.Conv2d(8, 30, 1)
        self.project = nn.Conv2d(30, width, 1)

    def forward(self, x):
        y = self.depth(self.expand(x))
        s = F.hardsigmoid(self.grow(F.silu(self.reduce(F.adaptive_avg_pool2d(y, 1)))))
        y = x + self.project(y * s)
        return F.interpolate(y, size=(17, 19), mode="nearest"), F.interpolate(y, scale_factor=0.5, mode="bicubic")


class PixelShuffler(nn.Module):
    """Super-resolution: pixel shuffle, reflection padding, einsum attention, rolls and advanced slices."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3)
        self.mix = nn.Linear(9, 9)

    def forward(self, x):
        y = self.conv(F.pad(x, (1, 1, 1, 1), mode="reflect"))
        y = F.pixel_shuffle(y, 2)
        y = torch.roll(y, (1, -2), (2, 3))[:, :, ::2, 1:-1]
        g = torch.einsum("bchw,bdhw->bcd", y, y)
        top, where = torch.topk(g.flatten(1), 4)
        return y, self.mix(g.flatten(1)).cumsum(-1), top, where


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "decoder": (CausalDecoder, lambda: (torch.randint(0, 31, (2, 11)),)),
    "encoder": (SdpaEncoder, lambda: (torch.randn(3, 7, 20),)),
    "unet": (UNet, lambda: (torch.randn(1, 3, 16, 20),)),
    "recurrent": (Recurrent, lambda: (torch.randn(3, 4, 7),)),
    "rotary": (RotaryBlock, lambda: (torch.randn(1, 9, 32),)),
    "convnext": (ConvNeXt, lambda: (torch.randn(2, 3, 28, 36),)),
    "recommender": (
        Recommender,
        lambda: (torch.randint(0, 23, (3,)), torch.randint(0, 23, (3, 6)), torch.randn(3, 5)),
    ),
    "odd": (OddSizes, lambda: (torch.randn(3, 7, 13, 17),)),
    "squeeze": (SqueezeExcite, lambda: (torch.randn(1, 10, 12, 14),)),
    "shuffle": (PixelShuffler, lambda: (torch.randn(1, 3, 8, 10),)),
}


def network(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The module called `name`, in inference mode, and inputs for it."""
    torch.manual_seed(len(name))
    torch.backends.mha.set_fastpath_enabled(False)
    make, inputs = NETWORKS[name]
    module = make().eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean, -0.5, 0.5)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return module, inputs()


def export(name: str, exporter: str = "dynamo") -> onnx.ModelProto:
    """The network called `name` as ONNX, by torch's new exporter (``"dynamo"``) or the old one (``"legacy"``)."""
    module, inputs = network(name)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            return torch.onnx.export(module, inputs, dynamo=True, verbose=False).model_proto
        buffer = io.BytesIO()
        torch.onnx.export(module, inputs, buffer, dynamo=False, opset_version=17)
        return onnx.load_from_string(buffer.getvalue())


def main() -> None:
    """Write every network, by both exporters, into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in NETWORKS:
        for exporter in EXPORTERS:
            onnx.save(export(name, exporter), folder / f"{name}_{exporter}.onnx")


if __name__ == "__main__":
    main()
