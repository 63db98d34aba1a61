"""What a policy sees of a graph: numbers of each operator, and who gives whom how much (002 §3, "embedding").

All are scaled to about 0 to 2, and none depends on a name: kind, sizes, bytes, arithmetic, what relation its elements
have to those that it reads, where it stands, and what its kernel would take alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from souffle.cost.device import CostDevice
from souffle.learning.problem import GraphFeatures
from souffle.stitching.graph import Op, OpGraph
from souffle.stitching.kinds import Kind
from souffle.stitching.priority.prices import PatternPrices

__all__ = ["FEATURES", "features_of"]

_BITS = 32.0
"""Logarithms of sizes are divided by so many."""

_PLAIN = (
    *("elements", "reduced points", "bytes written", "bytes read of others", "bytes read of inputs and constants"),
    *("arithmetic instructions", "special functions", "times that an element is read", "dimensions"),
    *("producers", "consumers", "many elements of the input for one", "output of the program"),
    *("depth from the inputs", "depth from the outputs", "share of its launch in its kernel alone", "seconds alone"),
)

FEATURES: tuple[str, ...] = (*(f"is {kind}" for kind in Kind), *_PLAIN)
"""What the columns of :attr:`souffle.learning.GraphFeatures.nodes` say."""


def features_of(graph: OpGraph, device: CostDevice, prices: PatternPrices, name: str = "") -> GraphFeatures:
    """The features of a graph.

    Parameters
    ----------
    graph : OpGraph
    device : CostDevice
    prices : PatternPrices
        Of the graph on the device.
    name : str
    """
    depths, heights = _depths(graph.producers), _depths(graph.consumers, backwards=True)
    deepest = max(1, max(depths, default=0))
    launch = device.launch_seconds
    rows = []
    for number, op in enumerate(graph.ops):
        alone = prices(1 << number)
        rows.append(
            [float(op.kind is kind) for kind in Kind]
            + _sizes(op)
            + [
                math.log2(1 + len(graph.producers[number])) / 4,
                math.log2(1 + len(graph.consumers[number])) / 4,
                float(bool(op.reduced) or any(read.times > 1 for read in op.reads)),
                float(op.needed),
                depths[number] / deepest,
                heights[number] / deepest,
                launch / alone,
                math.log2(1 + alone / launch) / 8,
            ]
        )
    edges = np.array([edge[:2] for edge in graph.edges], np.int64).reshape(-1, 2).T
    weights = np.array([_log(size) for _, _, size in graph.edges], np.float32)
    nodes = np.array(rows, np.float32).reshape(-1, len(FEATURES))
    return GraphFeatures(name, nodes, np.ascontiguousarray(edges), weights)


def _sizes(op: Op) -> list[float]:
    inside = sum(read.bytes for read in op.reads if read.producer is not None)
    outside = sum(read.bytes for read in op.reads if read.producer is None)
    sizes = (op.size, math.prod(op.reduced), op.written, inside, outside, op.work.arithmetic, op.work.special)
    times = max((read.times for read in op.reads), default=1.0)
    return [*map(_log, sizes), _log(times), len(op.shape) / 8]


def _log(size: float) -> float:
    return math.log2(1 + size) / _BITS


def _depths(neighbours: Sequence[Sequence[int]], *, backwards: bool = False) -> list[int]:
    """The longest way to each vertex."""
    depths = [0] * len(neighbours)
    numbers = range(len(neighbours))
    for number in reversed(numbers) if backwards else numbers:
        depths[number] = max((depths[one] + 1 for one in neighbours[number]), default=0)
    return depths
