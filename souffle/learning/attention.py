"""Attention with segment recurrence and relative positions: Transformer-XL (Dai et al. 2019, §3.2 and §3.3).

What differs from there: the vertices of a segment all see each other, because priorities are given all at once and not
one after the other. So distances are negative too.

In Dai et al. a segment is computed after the one before, whose hidden states it keeps. A layer reads only those of the
layer below, so here all segments of a layer are computed at once, with the same result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["RelativeAttention", "TransformerLayer"]


class RelativeAttention(nn.Module):
    """The attention of one layer.

    The score of the query i for the key j is ``(q_i + u) . k_j + (q_i + v) . W_R r(i - j)``, with the biases of content
    `u` and of position `v` (Dai et al. 2019, §3.3).

    Parameters
    ----------
    width : int
    heads : int
        A divisor of `width`.
    segment : int
        Vertices of a segment, two at least.
    memory : int
        Vertices before a segment that it sees too.
    """

    def __init__(self, width: int, heads: int, segment: int, memory: int) -> None:
        super().__init__()
        self.width, self.heads, self.segment, self.memory = width, heads, segment, memory
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, width // heads))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (n, width) to what each vertex reads (n, width)."""
        count = len(hidden)
        length = min(self.segment, max(count, 2))
        segments = -(-count // length)
        memory = self.memory if segments > 1 else 0
        own = functional.pad(hidden, (0, 0, 0, segments * length - count)).view(segments, length, self.width)
        seen = torch.cat([_before(hidden, segments, length, memory), own], dim=1)
        query = self._per_head(self.query(own))
        key, value = map(self._per_head, self.key_value(seen).chunk(2, dim=-1))
        scores = torch.einsum("slhd,skhd->shlk", query + self.content_bias, key)
        scores = scores + self._of_positions(query + self.position_bias, memory)
        scores = scores / math.sqrt(self.width // self.heads)
        scores = scores.masked_fill(_absent(count, segments, length, memory), -math.inf)
        read = torch.einsum("shlk,skhd->slhd", scores.softmax(dim=-1), value)
        return self.out(read.reshape(segments * length, self.width)[:count])

    def _per_head(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (self.heads, -1))

    def _of_positions(self, query: Tensor, memory: int) -> Tensor:
        """The second term of the scores (s, heads, l, memory + l) from queries (s, l, heads, d)."""
        length = query.shape[1]
        distances = torch.arange(length - 1 + memory, -length, -1, dtype=torch.float32)
        relative = self._per_head(self.position(_sinusoids(distances, self.width)))
        scores = torch.einsum("slhd,rhd->shlr", query, relative)
        # Row i needs the columns from length - 1 - i on. Read as rows one shorter, these stand below each other.
        count = len(distances)
        shifted = scores.flatten(2)[:, :, length - 1 : length - 1 + length * (count - 1)]
        return shifted.unflatten(2, (length, count - 1))[..., : memory + length]


def _before(hidden: Tensor, segments: int, length: int, memory: int) -> Tensor:
    """The stored hidden states before each segment (s, memory, width), through which no gradient passes."""
    if not memory:
        return hidden.new_zeros(segments, 0, hidden.shape[1])
    padded = functional.pad(hidden.detach(), (0, 0, memory, segments * length - len(hidden)))
    return padded.unfold(0, memory, length)[:segments].transpose(1, 2)


def _absent(count: int, segments: int, length: int, memory: int) -> Tensor:
    """Which keys are no vertices, but stand before the first or after the last one (s, 1, 1, memory + l)."""
    place = torch.arange(segments)[:, None] * length + torch.arange(-memory, length)
    return ((place < 0) | (place >= count))[:, None, None]


def _sinusoids(distances: Tensor, width: int) -> Tensor:
    """Encodings of distances (r,) as (r, width): sines and cosines of falling frequency."""
    frequencies = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    angles = distances[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


class TransformerLayer(nn.Module):
    """Attention and two dense layers, each added to what comes in.

    They are normalised before and not after, as Transformer-XL does, because that trains without a warm-up of the rate.
    """

    def __init__(self, width: int, heads: int, segment: int, memory: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = RelativeAttention(width, heads, segment, memory)
        self.dense_norm = nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (n, width) to those of the next layer."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.dense(self.dense_norm(hidden))
