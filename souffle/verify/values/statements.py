"""TensorIR's statements as functions over many lanes at once; a lane that a condition leaves out keeps what it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import tirx

from souffle.tvm_compat import StatementVisitor
from souffle.verify.expressions import Undecided
from souffle.verify.values.scalars import Frame, Mask, Scalars, both, none_of

__all__ = ["Statement", "Statements", "nothing"]

Statement = Callable[[Frame, Mask], None]

_ATTRIBUTES = ("extern_scope", "reduce_scope", "fragment_shape", "fragment_layout")

_MOST_TURNS = 1 << 20
"""Of one loop; more would take hours."""


def nothing(f: Frame, m: Mask) -> None:
    """A statement that does nothing."""


class Statements(StatementVisitor, Scalars):
    """Translates statements, each into a function. A subclass says what buffers, variables, stores and calls are."""

    def visit_sequence(self, node: tirx.SeqStmt) -> Statement:
        """One after the other."""
        parts = [part for part in map(self.visit, node.seq) if part is not nothing]

        def sequence(f: Frame, m: Mask) -> None:
            for part in parts:
                part(f, m)

        return sequence

    def visit_attr(self, node: tirx.AttrStmt) -> Statement:
        """What has an attribute that changes nothing."""
        if node.attr_key not in _ATTRIBUTES:
            raise Undecided(f"the attribute {node.attr_key}")
        return self.visit(node.body)

    def visit_other(self, node: Any) -> Statement:
        """Refused."""
        raise Undecided(f"a statement of the kind {type(node).__name__}")

    def visit_if_then_else(self, node: tirx.IfThenElse) -> Statement:
        """A condition."""
        test, then = self.of(node.condition), self.visit(node.then_case)
        otherwise = self.visit(node.else_case) if node.else_case is not None else nothing

        def evaluate(f: Frame, m: Mask) -> None:
            known = test(f, m)
            if isinstance(known, int):
                (then if known else otherwise)(f, m)
                return
            known = known != 0
            first = both(m, known)
            if not none_of(first):
                then(f, None if m is None and known.all() else first)
            if otherwise is not nothing:
                second = both(m, ~known)
                if not none_of(second):
                    otherwise(f, second)

        return evaluate

    def visit_for(self, node: tirx.For) -> Statement:
        """A loop: turn by turn, or all turns together where that is the same."""
        if node.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED):
            raise Undecided(f"the loop over {node.loop_var.name}, whose kind is {node.kind}")
        if node.step is not None:
            raise Undecided(f"the loop over {node.loop_var.name}, which has steps")
        return self.together(node) or self._turns(node)

    def together(self, node: tirx.For) -> Statement | None:
        """All turns of a loop at once; ``None`` where they are not known to be the same."""

    def _turns(self, node: tirx.For) -> Statement:
        low, extent, slot = self.of(node.min), self.of(node.extent), self.slot(node.loop_var)
        body = self.visit(node.body)

        def turns(f: Frame, m: Mask) -> None:
            first, count = low(f, m), extent(f, m)
            most = count if isinstance(count, int) else int((count if m is None else np.where(m, count, 0)).max())
            if most > _MOST_TURNS:
                raise Undecided(f"{most} turns of the loop over {node.loop_var.name}")
            for turn in range(most):
                f[slot] = first + turn
                body(f, m if isinstance(count, int) else both(m, turn < count))

        return turns
