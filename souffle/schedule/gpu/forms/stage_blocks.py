"""The blocks of a stage as TensorIR has them, and substituting injective ones into what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.ir import TensorLoad

from souffle.schedule.gpu.forms.behind_contraction import Block
from souffle.schedule.gpu.forms.contraction_expressions import Axis, NotAContraction, count_nodes, substitute_axes
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, buffer_loads, const_int, statements_of

__all__ = ["Inliner", "OutputBlocks", "demand_own_axes", "reads_block", "stage_blocks"]

_MAX_EXPRESSION_NODES = 4000
"""Beyond it substituting the neighbours into the reduction would cost more compile time than a kernel of their own."""


def stage_blocks(func: tirx.PrimFunc) -> list[Block]:
    """The blocks of a stage in its order.

    Raises
    ------
    NotAContraction
        If it is not nests of loops around one block each, which stores one value.
    """
    root = func.body.block if hasattr(func.body, "block") else None
    if root is None:
        raise NotAContraction("the function has no root block")
    blocks = []
    for nest in statements_of(root.body):
        while isinstance(nest, tirx.For):
            nest = nest.body
        if not hasattr(nest, "block"):
            raise NotAContraction("a nest is not loops around one block")
        block = nest.block
        if not isinstance(block.body, tirx.BufferStore):
            raise NotAContraction(f"block {block.name_hint} stores more than one value")
        kinds: dict[bool, list[Axis]] = {True: [], False: []}
        for axis in block.iter_vars:
            kinds[axis.iter_type == tirx.IterVar.CommReduce].append(Axis(axis.var, const_int(axis.dom.extent)))
        store = block.body
        initial = block.init.value if isinstance(block.init, tirx.BufferStore) else None
        spatial, reduction = tuple(kinds[False]), tuple(kinds[True])
        blocks.append(
            Block(block.name_hint, spatial, reduction, store.buffer, tuple(store.indices), store.value, initial)
        )
    return blocks


class Inliner:
    """Substitutes the values of injective blocks into reads of their buffers."""

    def __init__(self, known: Sequence[tuple[Any, Block, PrimExpr]] = ()) -> None:
        self._known = list(known)

    def copy(self) -> Inliner:
        """One more that knows the same blocks."""
        return Inliner(self._known)

    def define(self, block: Block, value: PrimExpr) -> None:
        """What stands for an element of a block's buffer, over the block's axes."""
        self._known.append((block.buffer, block, value))

    def expand(self, expression: PrimExpr) -> PrimExpr:
        """An expression that reads no buffer of a block that is defined here."""

        def inline(load: TensorLoad) -> PrimExpr:
            for buffer, block, value in self._known:
                if load.source.same_as(buffer):
                    mapping = dict(zip(block.indices, load.indices, strict=True))
                    return substitute_axes(value, mapping)
            return load

        result = structural_map(expression, (TensorLoad, inline))
        if count_nodes(result) > _MAX_EXPRESSION_NODES:
            raise NotAContraction("substituting the blocks around the reduction makes its expression too long")
        return result


def demand_own_axes(block: Block) -> None:
    """Demand that a block writes each element at its own axes."""
    spatial = [axis.var for axis in block.spatial]
    if len(block.indices) != len(spatial) or any(
        not isinstance(index, tirx.Var) or not any(index.same_as(var) for var in spatial) for index in block.indices
    ):
        raise NotAContraction(f"block {block.name} does not write at its own axes")


class OutputBlocks:
    """The blocks of a function that write what is not only used inside."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._inside = list(func.body.block.alloc_buffers)

    def __contains__(self, block: Block) -> bool:
        return not any(block.buffer.same_as(buffer) for buffer in self._inside)


def reads_block(value: PrimExpr, block: Block) -> bool:
    """Whether an expression reads what a block writes."""
    return any(load.source.same_as(block.buffer) for load in buffer_loads(value))
