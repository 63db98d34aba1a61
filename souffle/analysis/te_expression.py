"""From a TE to its expression, with the ranges of its axes."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from souffle.index.expression import Expression, Node, NodeTable, Region
from souffle.program import TE, ProgramError
from souffle.program.shared import OncePer
from souffle.tvm_compat import bounded_analyzer, const_int, load_tensor, reduce_node

__all__ = ["expression_of"]

_NO_LOWER_BOUND, _NO_UPPER_BOUND = -(2**31), 2**31

_once: OncePer[Expression] = OncePer()


def expression_of(te: TE) -> Expression:
    """The expression of `te`, found once for all TEs of one ``te.ComputeOp``."""
    return _once(te.op, lambda: _Builder(te).build())


class _Builder:
    """The expression of one TE."""

    def __init__(self, te: TE) -> None:
        self.te = te
        self.table = NodeTable(self.input_of)

    def input_of(self, load: Any) -> int:
        tensor = load_tensor(load)
        return next(i for i, known in enumerate(self.te.placeholders) if known.same_as(tensor))

    def build(self) -> Expression:
        te, table = self.te, self.table
        axes = te.axes + te.reduce_axes
        for position, axis in enumerate(axes):
            table.bind(axis.var, table.number(Node("axis", (), position, str(axis.var.ty), False)))
        regions: list[Region] = []
        combine: tuple[int, ...] = ()
        reduce = reduce_node(te.body)
        if reduce is None:
            regions.append(Region(tuple(table.visit(body) for body in te.op.body), False))
        else:
            conditions = [table.visit(reduce.condition), *self.varying_bounds()]
            holding = [c for c in conditions if not (table.nodes[c].kind == "int" and table.nodes[c].value)]
            regions.append(Region(tuple(table.visit(source) for source in reduce.source), True, tuple(holding)))
            if len(reduce.init):
                regions.append(Region(tuple(table.visit(init) for init in reduce.init), False))
            combiner = reduce.combiner
            for position, variable in enumerate([*combiner.lhs, *combiner.rhs]):
                table.bind(variable, table.number(Node("operand", (), position, str(variable.ty), True)))
            combine = tuple(table.visit(result) for result in combiner.result)
        extents = [self.range(axis) for axis in axes]
        split = len(te.axes)
        return Expression(
            tuple(extents[:split]),
            tuple(extents[split:]),
            tuple((tensor.shape, tensor.dtype) for tensor in te.inputs),
            tuple(table.nodes),
            tuple(regions),
            combine,
        )

    def range(self, axis: tirx.IterVar) -> tuple[int, int]:
        first, extent = axis.dom.min, axis.dom.extent
        if isinstance(first, tirx.IntImm) and isinstance(extent, tirx.IntImm):
            return const_int(first), const_int(extent)
        analyzer = bounded_analyzer(self.te.axes)
        low = analyzer.const_int_bound(first).min_value
        high = analyzer.const_int_bound(first + extent).max_value
        if low <= _NO_LOWER_BOUND or high >= _NO_UPPER_BOUND:
            raise ProgramError(
                f"TE {self.te.name} ({self.te.origin}) reduces {axis.var.name} over [{first}, {first + extent}), which "
                "has no constant bounds; a reduction's range may depend on its output index only"
            )
        return int(low), int(high - low)

    def varying_bounds(self) -> list[int]:
        """The bounds of the reduction axes whose range is not constant, as conditions."""
        conditions: list[int] = []
        for axis in self.te.reduce_axes:
            first, extent = axis.dom.min, axis.dom.extent
            if not isinstance(first, tirx.IntImm):
                conditions.append(self.table.visit(axis.var >= first))
            if not (isinstance(first, tirx.IntImm) and isinstance(extent, tirx.IntImm)):
                conditions.append(self.table.visit(axis.var < first + extent))
        return conditions
