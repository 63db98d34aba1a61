"""What a vertex computes, in instructions of single threads, counted on its expression.

Counted are operations on data: those of the arithmetic intensity (``souffle/analysis/intensity.py``), with a function
such as ``exp`` as the instructions that CUDA's takes (``souffle/cost/work.py``). Arithmetic on indices is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from souffle.analysis import Arithmetic, expression_of
from souffle.cost.work import function_cost
from souffle.program import TE, Item, parts_of

__all__ = ["OpWork", "work_of"]


@dataclass(frozen=True)
class OpWork:
    """Instructions of all threads together that compute a vertex once.

    Attributes
    ----------
    arithmetic : int
        Additions, products, comparisons, ...; a multiply-add of a contraction is one.
    special : int
        Of the special-function unit.
    """

    arithmetic: int = 0
    special: int = 0


def work_of(item: Item) -> OpWork:
    """What an item of a program computes."""
    if not isinstance(item, TE):
        return OpWork(sum(Arithmetic(part).operations for part in parts_of(item)))
    expression = expression_of(item)
    points = expression.points * expression.reduction_points
    calls = [node for node in expression.nodes if node.kind == "call" and node.data]
    costs = [function_cost(str(node.value)) for node in calls]
    operations = Arithmetic(item).operations
    if expression.reduce_axes and operations >= 2 * points:
        operations -= points  # a product and the addition to its total are one instruction
    simple = sum(cost for cost, _ in costs) - len(costs)
    return OpWork(operations + max(0, simple) * points, sum(special for _, special in costs) * points)
