"""Which merges of TEs take operators apart: the kernels that a horizontal transformation leaves.

A TE that is merged with TEs of other operators leaves the kernel of its own. Where all of an operator's TEs are merged
with those of another, one kernel takes the place of two; where only some are, what is left of each operator is a
kernel of its own, which waits for the merged one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from souffle.program import TE, ExternTE, TEProgram

__all__ = ["costly_merges", "operator_shape"]

Merge = tuple[TE, ...]


def costly_merges(program: TEProgram, merges: Sequence[Merge]) -> list[tuple[list[Merge], str]]:
    """The merges that leave more kernels than there were operators.

    Merges of one row of operators are judged together: matrix products and the biases added to them, for example.

    Parameters
    ----------
    program : TEProgram
        Before the merges.
    merges : sequence of tuples of TE
        Of `program`; no TE is in two.

    Returns
    -------
    list of (list of tuples of TE, str)
        The merges of each row of operators that costs more, and why.
    """
    rows: dict[tuple[str, ...], list[Merge]] = {}
    for merge in merges:
        rows.setdefault(tuple(member.origin.group for member in merge), []).append(merge)
    members: dict[str, list[TE | ExternTE]] = {}
    for te_ in program.tes:
        members.setdefault(te_.origin.group, []).append(te_)
    costly = []
    for row, together in rows.items():
        groups = set(row)
        tes = [te_ for group in sorted(groups) for te_ in members[group]]
        merged: dict[TE | ExternTE, Hashable] = {te_: row for merge in together for te_ in merge}
        nodes: dict[TE | ExternTE, Hashable] = {te_: i for i, merge in enumerate(together) for te_ in merge}
        before = _kernels(program, tes, lambda te_: te_, lambda te_: te_.origin.group)
        after = _kernels(
            program, tes, lambda te_: nodes.get(te_, te_), lambda te_: merged.get(te_, te_.origin.group)
        )
        if after > before:
            costly.append((together, f"it would leave {after} kernels of {before}: the operators differ in other TEs"))
    return costly


def operator_shape(program: TEProgram) -> dict[TE | ExternTE, Hashable]:
    """For each TE, what its whole operator-fusion group computes, roughly: equal for equal groups."""
    shapes: dict[str, list[Hashable]] = {}
    for te_ in program.tes:
        reduced = te_.reduction_shape if isinstance(te_, TE) else ()
        outputs = tuple((tensor.shape, tensor.dtype) for tensor in te_.outputs)
        shapes.setdefault(te_.origin.group, []).append((te_.origin.operators, outputs, reduced))
    return {te_: tuple(shapes[te_.origin.group]) for te_ in program.tes}


def _kernels(
    program: TEProgram,
    tes: Iterable[TE | ExternTE],
    node: Callable[[TE | ExternTE], Hashable],
    label: Callable[[TE | ExternTE], Hashable],
) -> int:
    """Connected parts of `tes`, where a producer and a consumer of one label share a kernel."""
    chosen = list(tes)
    inside = set(chosen)
    parent: dict[Hashable, Hashable] = {node(te_): node(te_) for te_ in chosen}

    def find(item: Hashable) -> Hashable:
        while parent[item] is not item:
            item = parent[item]
        return item

    for te_ in chosen:
        for tensor in te_.inputs:
            producer = program.producers.get(tensor)
            if producer in inside and label(producer) == label(te_):
                parent[find(node(te_))] = find(node(producer))
    return sum(parent[item] is item for item in parent)
