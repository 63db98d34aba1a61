"""Horizontal transformation: independent isomorphic TEs become one TE (paper §6.1, Figure 3).

::

    O_0[v] = e(A, W_0, v)
    ...                         →   O[g, v] = e(A, W[g], v),   W = stack(W_0 ... W_n-1)
    O_n-1[v] = e(A, W_n-1, v)

and where the extents differ along one axis ``i`` that is a term of indices only, with ``s_m`` the sum of the extents
before member ``m``::

    O_0[i, u] = e(A, W_0, i, u),  i < n_0           O[i, u] = e(A, W, i, u),   W = concatenate(W_0, W_1)
    O_1[i, u] = e(A, W_1, i, u),  i < n_1     →     O_m[i, u] = O[s_m + i, u]

Legal because TEs at the same depth of the dependence graph cannot depend on each other, and each element of ``O`` is
computed by the expression of its member, from the same elements. Operands that are constants are packed at compile
time; operands that are slices of one earlier result are read at one formula of ``g`` or ``i``
(:mod:`souffle.transform.horizontal.runs`); the rest is selected, uniformly over a tile.

Worth it where kernels become fewer, or as many: see :mod:`souffle.transform.horizontal.operators`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from souffle.alone import one_at_a_time
from souffle.decision import Decision
from souffle.program import TE, Item, Tensor, TEProgram
from souffle.program.names import NameSupply
from souffle.transform.horizontal.merged_te import followed_te, merged_te
from souffle.transform.horizontal.operands import Member, PackedPlace, member_of
from souffle.transform.horizontal.operators import Merge, contracts, costly_merges, operator_shape
from souffle.transform.horizontal.packs import Pack, Packs
from souffle.transform.horizontal.runs import MergePlan, joined_plan, stacked_plan

__all__ = ["horizontal"]

_MOST_RUNS = 8
"""Selections in a merged operand; more would cost the inner loop more than a kernel launch does."""

_TILE = 16
"""Rows or columns of the smallest tile of a contraction that keeps its operands busy, and the side of a tensor core's
fragment: what is selected along a joined axis must not change within it."""


@one_at_a_time
def horizontal(program: TEProgram, *, apart: bool = True) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Merge independent isomorphic TEs.

    Parameters
    ----------
    program : TEProgram
    apart : bool
        Whether products are merged that share no operand. Then more blocks of a GPU have work at once; a processor
        reads the weights of all in turn, where it could read those of one several times from its cache.

    Returns
    -------
    program : TEProgram
        The same object where nothing could be merged.
    decisions : tuple of Decision
        One for each group merged, and for each that was not.
    """
    within: dict[Item, Hashable] = {}
    refused: dict[frozenset[Item], Decision] = {}
    shapes = operator_shape(program)
    while True:
        attempt = _Horizontal(program, within, refused, apart)
        attempt.run()
        costly = costly_merges(program, attempt.merges)
        if not costly:
            return attempt.result(), (*refused.values(), *attempt.decisions)
        for members, reason in costly:
            refused[frozenset(members)] = Decision("horizontal", _names(members), False, reason)
            within.update((member, shapes[member]) for member in members)


def _names(tes: Sequence[TE]) -> str:
    return ", ".join(te_.name for te_ in tes)


class _Horizontal:
    """One attempt: TEs of `within` are merged with those of equal operators only, and what `refused` holds is not."""

    def __init__(
        self,
        program: TEProgram,
        within: Mapping[Item, Hashable],
        refused: Mapping[frozenset[Item], Decision],
        apart: bool,
    ) -> None:
        self.program = program
        self.apart = apart
        self.within = within
        self.refused = refused
        self.decisions: list[Decision] = []
        self.merges: list[Merge] = []
        self.moved: dict[Tensor, PackedPlace] = {}
        self.origins: dict[Tensor, tuple[Tensor, ...]] = {}
        self.tes: list[Item] = []
        self.names = NameSupply(tensor.name for tensor in program.tensors())
        self.packs = Packs(program.constants, self.names.fresh)

    def run(self) -> None:
        """Merge level by level; what is merged at one is read as such at the next."""
        for level in _levels(self.program):
            current = {te_: member_of(te_, self.moved) for te_ in level if isinstance(te_, TE)}
            self._note_outputs(list(current.values()))
            merged = self._merge_level([m for te_, m in current.items() if self._may_merge(te_)])
            for te_ in level:
                if te_ not in merged:
                    self.tes.append(followed_te(current[te_]) if te_ in current else te_)

    def result(self) -> TEProgram:
        """The program of the merged TEs."""
        if not self.moved:
            return self.program
        windows = self.packs.windows()
        tes = [followed_te(member_of(te_, windows)) if isinstance(te_, TE) else te_ for te_ in self.tes]
        arrays = self.packs.arrays(tensor for te_ in tes for tensor in te_.inputs)
        return self.program.with_tes(tes, constants=arrays)

    def _may_merge(self, te_: TE) -> bool:
        return (
            len(te_.outputs) == 1
            and te_.output not in self.program.outputs
            and bool(te_.inputs)
            and all(isinstance(c, TE) for c in self.program.consumers[te_.output])
        )

    def _note_outputs(self, level: Sequence[Member]) -> None:
        """Say which TEs could be merged if they were not outputs of the program, each a tensor of its own."""
        results = set(self.program.outputs)
        kept = [m for m in level if any(tensor in results for tensor in m.te.outputs)]
        for member in (m for m in kept if contracts(m.te)):
            alike = [m.te for m in level if m is not member and _alike(m, member)]
            if alike:
                reason = f"it is an output of the program; merged with {_names(alike[:4])} it would be copied out again"
                self.decisions.append(Decision("horizontal", member.te.name, False, reason))

    def _merge_level(self, members: Sequence[Member]) -> set[TE]:
        """The TEs of a level that were merged: joined where that needs no selection, then stacked, then joined."""
        merged: set[TE] = set()
        unequal = self._unequal(members)
        for axis, bucket in unequal:
            merged |= self._merge(axis, bucket, merged, final=False)
        groups: dict[Hashable, list[Member]] = {}
        for member in members:
            groups.setdefault((member.template.key, self.within.get(member.te)), []).append(member)
        for group in groups.values():
            merged |= self._merge(None, group, merged)
        for axis, bucket in unequal:
            merged |= self._merge(axis, bucket, merged)
        return merged

    def _unequal(self, members: Sequence[Member]) -> list[tuple[int, list[Member]]]:
        """Groups that differ in the extent of one axis, with that axis."""
        buckets: dict[Hashable, list[Member]] = {}
        for member in members:
            for axis, (key, _) in member.template.along.items():
                buckets.setdefault((axis, key, self.within.get(member.te)), []).append(member)
        return [(axis, bucket) for (axis, *_), bucket in buckets.items() if _differ(bucket, axis)]

    def _merge(self, axis: int | None, group: Sequence[Member], merged: set[TE], *, final: bool = True) -> set[TE]:
        """Merge what is left of a group, or else the parts of it that read the same tensors; which were merged.

        Where it is not `final`, what would need a selection is left for later.
        """
        members = [m for m in group if m.te not in merged]
        if len(members) < 2 or (axis is not None and not _differ(members, axis)):
            return set()
        if frozenset(m.te for m in members) in self.refused:
            return set()
        plan = self._plan(members, axis)
        reason, parts = self._refusal(plan)
        if not final and plan.chooses:
            reason, parts = "it would need a selection", _by_tensors(plan)
        if not reason:
            self._accept(plan, members[0].te)
            return {m.te for m in members}
        if final:
            subject = _names([m.te for m in plan.members])
            self.decisions.append(Decision("horizontal", subject, False, reason))
        done: set[TE] = set()
        if len(parts) > 1:
            for part in parts:
                done |= self._merge(axis, part, merged, final=final)
        return done

    def _plan(self, members: Sequence[Member], axis: int | None) -> MergePlan:
        constants = self.program.constants
        if axis is None:
            return stacked_plan(members, constants.__contains__)
        return joined_plan(members, axis, constants.__contains__)

    def _refusal(self, plan: MergePlan) -> tuple[str, Sequence[Sequence[Member]]]:
        """Why a plan does not pay, and which parts of the group may; no reason where it pays."""
        first = plan.members[0].te
        if plan.selections > _MOST_RUNS:
            count = plan.selections
            return f"an operand would be selected among {count} tensors for each element", _by_tensors(plan)
        if plan.axis is not None and plan.chooses:
            if not first.is_reduction:
                return "an element-wise TE would spend more on selecting along an axis that is joined", ()
            extents = sorted({m.shape[plan.axis] for m in plan.members})
            if plan.granule < _TILE <= extents[-1]:
                return f"tiles of {_TILE} along the joined axis, of extents {extents}, would hold parts of two", ()
        if not self.apart and not plan.shared and contracts(first):
            return "they share no operand, and on a processor each reads weights of its own", _by_tensors(plan)
        if plan.selections == 1:
            return "", ()
        homes = {} if first.is_reduction else self._homes(plan)
        if homes:
            names = ", ".join(dict.fromkeys(t.name for home in homes.values() for t in home))
            reason = f"each is better computed where its operand is made: {names} have no other use"
            return reason, _parted(plan.members, [homes.get(m.te, ()) for m in plan.members])
        if any(len(runs) == 1 for runs in plan.runs) or contracts(first):
            return "", ()
        if first.is_reduction:
            return "they share no operand and none is constant", _by_tensors(plan)
        reason = "their operands are separate tensors, and an element-wise TE would spend more on selecting them"
        return reason, _by_tensors(plan)

    def _homes(self, plan: MergePlan) -> dict[TE, tuple[Tensor, ...]]:
        """For members that could be computed with an operand: the selected tensors that only they read."""
        group = {m.te for m in plan.members}
        homes: dict[TE, tuple[Tensor, ...]] = {}
        for k, runs in enumerate(plan.runs):
            if len(runs) == 1:
                continue
            only = {run.tensor: self._serves(run.tensor, group) for run in runs}
            for member in plan.members:
                tensor = member.operands[k].tensor
                if only.get(tensor):
                    homes[member.te] = (*homes.get(member.te, ()), tensor)
        return homes

    def _serves(self, tensor: Tensor | Pack, group: set[TE]) -> bool:
        """Whether a TE defines `tensor` for some of `group`, and for nothing else."""
        parts = self.origins.get(tensor, (tensor,))
        if not all(t in self.program.producers for t in parts):
            return False
        return group > {reader for t in parts for reader in self.program.consumers[t]}

    def _accept(self, plan: MergePlan, first: TE) -> None:
        """Merge; name and operator-fusion group are those of `first`, whatever the order of the plan."""
        tes = tuple(m.te for m in plan.members)
        name = self.names.fresh(f"{first.name}_x{len(tes)}")
        origin = first.origin.merged(*(te_.origin for te_ in tes))
        merged = merged_te(plan, name, origin, self.packs)
        self.tes.append(merged)
        self.merges.append(Merge(tes, any(len(runs) == 1 for runs in plan.runs)))
        self.origins[merged.output] = tuple(te_.output for te_ in tes)
        for number, te_ in enumerate(tes):
            self.moved[te_.output] = plan.place(number, merged.output)
        if plan.shared:
            what = "share an operand"
        elif any(len(runs) == 1 for runs in plan.runs):
            what = "have packed or sliced operands"
        else:
            what = "have operands of their own"
        if plan.selections > 1:
            what += f", one selected among {plan.selections} tensors"
        how = "of one shape" if plan.axis is None else f"joined along axis {plan.axis}"
        reason = f"{len(tes)} independent TEs {how} {what}: {merged.name}"
        self.decisions.append(Decision("horizontal", _names(tes), True, reason))


def _alike(one: Member, other: Member) -> bool:
    """Whether two TEs are equal but for their operands, or for the extent of one axis too."""
    if one.template.key == other.template.key:
        return True
    along = other.template.along
    return any(axis in along and along[axis][0] == key for axis, (key, _) in one.template.along.items())


def _differ(members: Sequence[Member], axis: int) -> bool:
    return len({m.shape[axis] for m in members}) > 1


def _by_tensors(plan: MergePlan) -> list[list[Member]]:
    """Members that read the same tensor, where the plan selects among the fewest."""
    selected = [k for k, runs in enumerate(plan.runs) if len(runs) > 1 or runs[0].chosen]
    columns = [[m.operands[k].tensor for m in plan.members] for k in selected]
    return _parted(plan.members, min(columns, key=lambda column: len(set(column))))


def _parted(members: Sequence[Member], keys: Sequence[Hashable]) -> list[list[Member]]:
    parts: dict[Hashable, list[Member]] = {}
    for member, key in zip(members, keys, strict=True):
        parts.setdefault(key, []).append(member)
    return list(parts.values())


def _levels(program: TEProgram) -> list[list[Item]]:
    """TEs by their depth in the dependence graph; those of one depth are independent."""
    depth: dict[Item, int] = {}
    levels: list[list[Item]] = []
    for te_ in program.tes:
        before = [depth[program.producers[t]] for t in te_.inputs if t in program.producers]
        depth[te_] = max(before, default=-1) + 1
        while len(levels) <= depth[te_]:
            levels.append([])
        levels[depth[te_]].append(te_)
    return levels
