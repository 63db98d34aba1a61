"""Compute or memory intensive: arithmetic per tensor element accessed (paper §5.3).

What counts as one operation, each time that it is evaluated: ``+ - * /``, integer division and remainder, minimum,
maximum, a comparison, a bit operation, and a call of a mathematical function (``exp``, ``erf``, ``tanh``, ``sqrt``,
``pow``, ...), if its value depends on an element of a tensor. What does not: index arithmetic and predicates on
indices, casts, choosing between two values, and logical connectives. A subexpression that occurs several times in a TE
counts once, since every compiler below computes it once. An operation in a branch counts at the points where the branch
is taken; where data decides, at all of them. A reduction counts its combiner at every point.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from souffle.analysis.evaluation_counts import PointCounter
from souffle.analysis.fused_access import access_of
from souffle.analysis.te_expression import expression_of
from souffle.index.expression import Expression, Node
from souffle.program import TE, ExternTE, FusedTE, Loop, parts_of
from souffle.program.shared import OncePer

__all__ = ["THRESHOLD", "Arithmetic"]

THRESHOLD = 3.0
"""Operations per element from which a TE is compute-intensive: the paper's value."""

_OPERATIONS = frozenset(
    (
        "add", "sub", "mul", "div", "mod", "floordiv", "floormod", "min", "max", "lt", "le", "gt", "ge", "eq",
        "ne", "bitand", "bitor", "bitxor", "bitnot", "shl", "shr"
    )
)  # fmt: skip
_CHEAP_CALLS = frozenset(
    (
        "fabs", "abs", "floor", "ceil", "trunc", "round", "nearbyint", "roundeven", "isnan", "isinf",
        "isfinite", "copysign", "max", "min", "fma", "likely", "reinterpret", "shift_left", "shift_right",
        "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "popcount", "clz"
    )
)  # fmt: skip
_DIVISIONS = frozenset(["div", "mod", "floordiv", "floormod"])
_NO_OPERATION = frozenset(["likely", "reinterpret"])


@dataclass(frozen=True)
class Arithmetic:
    """The work of one TE; that of a fused TE is what its parts do.

    Attributes
    ----------
    te : TE, FusedTE or ExternTE
    """

    te: TE | FusedTE | ExternTE

    @cached_property
    def operations(self) -> int:
        """Arithmetic operations of one evaluation of all output elements; 0 for an operator without an expression."""
        return sum(_work_of(part)[0] for part in parts_of(self.te))

    @cached_property
    def expensive_operations(self) -> int:
        """Those of :attr:`operations` that are costly: divisions and functions such as exp, erf, tanh, pow, sqrt."""
        return sum(_work_of(part)[1] for part in parts_of(self.te))

    @property
    def expensive(self) -> bool:
        """Whether computing an element twice is to be avoided: it holds a costly operation, or is unknown."""
        return isinstance(self.te, ExternTE) or self.expensive_operations > 0

    @cached_property
    def calls_functions(self) -> bool:
        """Whether it evaluates a function such as exp, erf, tanh, pow or sqrt of an element of a tensor."""
        return any(_calls_function(part) for part in parts_of(self.te))

    @cached_property
    def elements_read(self) -> int:
        """Distinct elements of all inputs that are read."""
        return sum(access_of(self.te, position).elements for position in range(len(self.te.inputs)))

    @property
    def elements_written(self) -> int:
        """Elements of all outputs."""
        return sum(tensor.size for tensor in self.te.outputs)

    @property
    def ratio(self) -> float:
        """Operations per element read or written."""
        return self.operations / max(1, self.elements_read + self.elements_written)

    @property
    def compute_intensive(self) -> bool:
        """Whether the ratio reaches the threshold."""
        return self.ratio >= THRESHOLD

    def __str__(self) -> str:
        kind = "compute" if self.compute_intensive else "memory"
        return f"{kind}-intensive ({self.ratio:.2f} operations per element)"


_known: OncePer[tuple[int, int]] = OncePer()


def _work_of(te: TE | ExternTE | Loop) -> tuple[int, int]:
    if isinstance(te, Loop):
        work = [_work_of(part) for item in te.body for part in parts_of(item)]
        return te.steps * sum(all_ for all_, _ in work), te.steps * sum(costly for _, costly in work)
    return _known(te.op, lambda: _work(expression_of(te))) if isinstance(te, TE) else (0, 0)


def _calls_function(te: TE | ExternTE | Loop) -> bool:
    nodes = expression_of(te).nodes if isinstance(te, TE) else ()
    return any(node.kind == "call" and node.data and _is_operation(node) and _is_costly(node) for node in nodes)


@lru_cache(maxsize=4096)
def _work(expression: Expression) -> tuple[int, int]:
    """All operations, and the costly ones."""
    counter = PointCounter(expression)
    total = costly = 0
    for region in expression.regions:
        for number, paths in expression.reach(region).items():
            node = expression.nodes[number]
            if not _is_operation(node):
                continue
            times = counter.times(region.reduced, paths)
            total += times
            costly += times if _is_costly(node) else 0
    whole = expression.points * expression.reduction_points
    for number in _below(expression, expression.combine):
        node = expression.nodes[number]
        if _is_operation(node):
            total += whole
            costly += whole if _is_costly(node) else 0
    return total, costly


def _is_operation(node: Node) -> bool:
    if not node.data:
        return False
    if node.kind == "call":
        return node.value not in _NO_OPERATION
    return node.kind in _OPERATIONS or node.kind == "opaque"


def _is_costly(node: Node) -> bool:
    if node.kind == "call":
        return node.value not in _CHEAP_CALLS
    return node.kind in _DIVISIONS or node.kind == "opaque"


def _below(expression: Expression, roots: Iterable[int]) -> set[int]:
    found: set[int] = set()
    stack = list(roots)
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            stack.extend(expression.nodes[number].args)
    return found
