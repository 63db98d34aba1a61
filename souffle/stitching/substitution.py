"""Substitution fusion: everything between partition operators is one pattern (003 §4.2.1, Algorithm 1).

The vertices are taken in a topological order, and the partition operators cut it into intervals. In each step more
kinds are partition operators, in the order in which the paper names them, and each step gives its intervals. An
interval of a topological order is in no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from souffle.cost.device import CostDevice
from souffle.stitching.graph import Op, OpGraph
from souffle.stitching.kinds import Kind
from souffle.stitching.model_score import ALONE, is_large_gemm

__all__ = ["partition_steps", "substitution_patterns"]

_STEPS = (Kind.BATCHED_GEMM, Kind.GEMM, Kind.COLUMN, Kind.SCALAR, Kind.ROW)
"""Kinds that become partition operators after large gemms, step by step; "etc." of the paper is all but element-wise
ones, since element-wise and row-reduction patterns ask for nothing special, and rows stand last."""


def partition_steps(graph: OpGraph, device: CostDevice) -> Iterator[Callable[[int], bool]]:
    """Whether a vertex is a partition operator, in each step."""
    for count in range(len(_STEPS) + 1):
        kinds = ALONE | frozenset(_STEPS[:count])

        def is_partition_op(number: int, kinds: frozenset[Kind] = kinds) -> bool:
            op: Op = graph.ops[number]
            return op.kind in kinds or is_large_gemm(graph, number, device)

        yield is_partition_op


def substitution_patterns(graph: OpGraph, device: CostDevice) -> tuple[int, ...]:
    """The patterns of all steps, each once, as the bits of a number; those of one vertex are left out."""
    found: dict[int, None] = {}
    for is_partition_op in partition_steps(graph, device):
        interval = 0
        for number in range(len(graph.ops) + 1):
            if number == len(graph.ops) or is_partition_op(number):
                found[interval] = None
                interval = 0
            else:
                interval |= 1 << number
    return tuple(pattern for pattern in found if pattern & pattern - 1)
