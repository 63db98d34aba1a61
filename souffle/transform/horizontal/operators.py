"""Which merges of TEs take operators apart: the kernels that a horizontal transformation leaves.

A TE that is merged with TEs of other operators leaves the kernel of its own. Where all of an operator's TEs are merged
with those of another, one kernel takes the place of two; where only some are, what is left of each operator is a
kernel of its own, which waits for the merged one. Contractions that share an operand are merged all the same: it is
then read once, which is what the transformation is for. Operands of one element-wise TE, each read by it alone, are in
its kernel already::

    y = m0 + m1; m0 = a * b0; m1 = a * b1       one kernel
    y = m[0] + m[1]; m[i] = a * b[i]            two, since the shapes differ
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from souffle.program import TE, Item, TEProgram

__all__ = ["Merge", "contracts", "costly_merges", "operator_shape"]


@dataclass(frozen=True, eq=False)
class Merge:
    """One merged TE.

    Attributes
    ----------
    members : tuple of TE
    reuses : bool
        Whether an operand is the same for all, or packed: whether merging is more than putting TEs side by side.
    """

    members: tuple[TE, ...]
    reuses: bool


_Row = frozenset[str]
"""The operators of the members. Merges of one row, such as products and the biases added to them, share a kernel."""


def costly_merges(program: TEProgram, merges: Sequence[Merge]) -> list[tuple[tuple[TE, ...], str]]:
    """The merges, of other TEs than contractions that share an operand, without which there would be fewer kernels.

    Parameters
    ----------
    program : TEProgram
        Before the merges.
    merges : sequence of Merge
        Of `program`; no TE is in two.

    Returns
    -------
    list of (tuple of TE, str)
        Each with the reason.
    """
    kernels = _Kernels(program, merges)
    costly = []
    for row, together in list(kernels.rows.items()):
        if len(row) == 1:
            for node in together:
                reader = _only_reader(program, node.members)
                if reader is not None:
                    costly.append((node.members, f"{reader.name} reads them all, element by element, in one kernel"))
            continue
        if any(node.merge.reuses and contracts(node.members[0]) for node in together):
            continue
        made, saved = kernels.count_without(row, keep=True), kernels.count_without(row, keep=False)
        if saved < made:
            reason = f"their operators differ in other TEs, and would be {made} kernels in the place of {saved}"
            costly.extend((node.members, reason) for node in together)
            kernels.drop(row)
    return costly


def operator_shape(program: TEProgram) -> dict[Item, Hashable]:
    """For each TE, what its whole operator-fusion group computes, roughly: equal for equal groups."""
    shapes: dict[str, list[Hashable]] = {}
    for te_ in program.tes:
        reduced = te_.reduction_shape if isinstance(te_, TE) else ()
        outputs = tuple((tensor.shape, tensor.dtype) for tensor in te_.outputs)
        shapes.setdefault(te_.origin.group, []).append((te_.origin.operators, outputs, reduced))
    return {te_: tuple(shapes[te_.origin.group]) for te_ in program.tes}


@dataclass(frozen=True, eq=False)
class _Node:
    """A TE after the merges: its members, their operators, and how they were merged if they were."""

    members: tuple[Item, ...]
    row: _Row
    merge: Merge | None = None


class _Kernels:
    """The kernels of a program with some merges: connected TEs of one operator, or of one row of operators."""

    def __init__(self, program: TEProgram, merges: Sequence[Merge]) -> None:
        self.program = program
        self.rows: dict[_Row, list[_Node]] = {}
        self.alone = {te_: _Node((te_,), frozenset((te_.origin.group,))) for te_ in program.tes}
        self.node_of = dict(self.alone)
        for merge in merges:
            node = _Node(merge.members, frozenset(te_.origin.group for te_ in merge.members), merge)
            self.rows.setdefault(node.row, []).append(node)
            self.node_of.update(dict.fromkeys(merge.members, node))
        self.members: dict[str, list[Item]] = {}
        for te_ in program.tes:
            self.members.setdefault(te_.origin.group, []).append(te_)

    def drop(self, row: _Row) -> None:
        """Undo the merges of a row."""
        for node in self.rows.pop(row):
            self.node_of.update((te_, self.alone[te_]) for te_ in node.members)

    def count_without(self, row: _Row, *, keep: bool) -> int:
        """Kernels that hold a TE of the row's operators, with or without the row's merges."""
        touched = {self.node_of[te_] for group in row for te_ in self.members[group]}
        chosen = {member: node for node in touched for member in node.members}
        if not keep:
            chosen |= {te_: self.alone[te_] for node in self.rows[row] for te_ in node.members}
        return _connected(self.program, chosen)


def _only_reader(program: TEProgram, members: Sequence[Item]) -> TE | None:
    """The element-wise TE of the members' operator that reads them all, if nothing else reads one."""
    readers = {reader for te_ in members for tensor in te_.outputs for reader in program.consumers.get(tensor, ())}
    if len(readers) != 1 or any(tensor in program.outputs for te_ in members for tensor in te_.outputs):
        return None
    (reader,) = readers
    same = all(te_.outputs[0].shape == reader.outputs[0].shape for te_ in members)
    plain = isinstance(reader, TE) and not reader.is_reduction and not any(te_.is_reduction for te_ in members)
    return reader if same and plain and reader.origin.group == members[0].origin.group else None


def contracts(te_: TE) -> bool:
    """Whether a TE sums products, or reduces several operands otherwise."""
    return te_.is_reduction and len(te_.inputs) > 1


def _connected(program: TEProgram, node_of: Mapping[Item, _Node]) -> int:
    """Connected parts of some TEs, where a producer and a consumer of one row share a kernel."""
    parent = {node: node for node in node_of.values()}

    def find(node: _Node) -> _Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for te_, node in node_of.items():
        for tensor in te_.inputs:
            before = node_of.get(program.producers.get(tensor))
            if before is not None and before is not node and before.row == node.row:
                parent[find(node)] = find(before)
    return sum(above is node for node, above in parent.items())
