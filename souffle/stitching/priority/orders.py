"""Orders of fusion that nobody has to learn: the default of TensorFlow (002 §3), and by bytes that are saved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from souffle.stitching.graph import OpGraph
from souffle.stitching.traffic import volume_saved

__all__ = ["by_priority", "by_saved_bytes", "topological"]


def topological(graph: OpGraph) -> list[int]:
    """Vertices without producers; any other when all that it reads has been traversed, first come first served.

    002 §3: after a node has been processed its outgoing edges are removed, and any node without incoming edges that are
    left is put in the queue.
    """
    waiting = [len(producers) for producers in graph.producers]
    order = [number for number, count in enumerate(waiting) if not count]
    for number in order:
        for consumer in graph.consumers[number]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                order.append(consumer)
    return order


def by_saved_bytes(graph: OpGraph) -> list[int]:
    """Vertices that save the most global memory traffic when fused with a producer first; the earlier of equal ones."""
    saved = [
        max((volume_saved(graph, (producer, number)) for producer in producers), default=0)
        for number, producers in enumerate(graph.producers)
    ]
    return sorted(range(len(graph.ops)), key=lambda number: (-saved[number], number))


def by_priority(ranks: Sequence[int], priorities: np.ndarray) -> list[int]:
    """Vertices of the highest priority first, those of one priority in the default order.

    Parameters
    ----------
    ranks : sequence of int
        Each vertex's place in the default order.
    priorities : array of int
        One for each vertex.
    """
    return np.lexsort((np.asarray(ranks), -np.asarray(priorities))).tolist()
