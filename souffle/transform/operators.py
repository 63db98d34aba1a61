"""Which merges of TEs take operators apart: the kernels that a horizontal transformation leaves.

A TE that is merged with TEs of other operators leaves the kernel of its own. Where all of an operator's TEs are merged
with those of another, one kernel takes the place of two; where only some are, what is left of each operator is a
kernel of its own, which waits for the merged one. Contractions are merged all the same: a shared operand is then read
once, which is what the transformation is for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from souffle.program import TE, ExternTE, TEProgram

__all__ = ["costly_merges", "operator_shape"]

Merge = tuple[TE, ...]
"""Members of one merged TE."""

_Row = tuple[str, ...]
"""The operators of the members. Merges of one row, such as products and the biases added to them, share a kernel."""


def costly_merges(program: TEProgram, merges: Sequence[Merge]) -> list[tuple[Merge, str]]:
    """The merges, of other TEs than contractions, without which there would be fewer kernels.

    Parameters
    ----------
    program : TEProgram
        Before the merges.
    merges : sequence of tuples of TE
        Of `program`; no TE is in two.

    Returns
    -------
    list of (tuple of TE, str)
        Each with the reason.
    """
    kernels = _Kernels(program, merges)
    costly = []
    for row, together in list(kernels.rows.items()):
        if len(set(row)) == 1 or any(_contracts(member) for merge in together for member in merge):
            continue
        made, saved = kernels.count_without(row, keep=True), kernels.count_without(row, keep=False)
        if saved < made:
            reason = f"their operators differ in other TEs, and would be {made} kernels in the place of {saved}"
            costly.extend((merge, reason) for merge in together)
            kernels.drop(row)
    return costly


def operator_shape(program: TEProgram) -> dict[TE | ExternTE, Hashable]:
    """For each TE, what its whole operator-fusion group computes, roughly: equal for equal groups."""
    shapes: dict[str, list[Hashable]] = {}
    for te_ in program.tes:
        reduced = te_.reduction_shape if isinstance(te_, TE) else ()
        outputs = tuple((tensor.shape, tensor.dtype) for tensor in te_.outputs)
        shapes.setdefault(te_.origin.group, []).append((te_.origin.operators, outputs, reduced))
    return {te_: tuple(shapes[te_.origin.group]) for te_ in program.tes}


class _Kernels:
    """The kernels of a program with some merges: connected TEs of one operator, or of one row of operators."""

    def __init__(self, program: TEProgram, merges: Sequence[Merge]) -> None:
        self.program = program
        self.rows: dict[_Row, list[Merge]] = {}
        self.merge_of: dict[TE | ExternTE, Merge] = {}
        for merge in merges:
            self.rows.setdefault(_row(merge), []).append(merge)
            self.merge_of.update(dict.fromkeys(merge, merge))
        self.members: dict[str, list[TE | ExternTE]] = {}
        for te_ in program.tes:
            self.members.setdefault(te_.origin.group, []).append(te_)

    def drop(self, row: _Row) -> None:
        """Undo the merges of a row."""
        for merge in self.rows.pop(row):
            for te_ in merge:
                del self.merge_of[te_]

    def count_without(self, row: _Row, *, keep: bool) -> int:
        """Kernels that hold a TE of the row's operators, with or without the row's merges."""
        touched = [te_ for group in dict.fromkeys(row) for te_ in self.members[group]]
        chosen = dict.fromkeys(member for te_ in touched for member in self.merge_of.get(te_, (te_,)))
        undone = () if keep else (te_ for merge in self.rows[row] for te_ in merge)
        apart = {te_: (te_,) for te_ in undone}
        return _connected(self.program, {te_: apart.get(te_) or self.merge_of.get(te_, (te_,)) for te_ in chosen})


def _contracts(te_: TE) -> bool:
    return te_.is_reduction and len(te_.inputs) > 1


def _row(members: Iterable[TE | ExternTE]) -> _Row:
    return tuple(te_.origin.group for te_ in members)


def _connected(program: TEProgram, node_of: Mapping[TE | ExternTE, tuple[TE | ExternTE, ...]]) -> int:
    """Connected parts of some TEs, where a producer and a consumer of one row share a kernel."""
    parent = {node: node for node in node_of.values()}

    def find(node: tuple) -> tuple:
        while parent[node] is not node:
            node = parent[node]
        return node

    for te_, node in node_of.items():
        for tensor in te_.inputs:
            before = node_of.get(program.producers.get(tensor))
            if before is not None and _row(before) == _row(node):
                parent[find(node)] = find(before)
    return sum(above is node for node, above in parent.items())
