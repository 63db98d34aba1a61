"""Fusion with neighbours: what cannot be one expression becomes one TE of several statements (paper §6.2, §6.3).

::

    R[u] = sum(...)                  E[v] = e(..., R[f(v)], ...)
    E[v] = e(..., R[f(v)], ...)   →      where R[u] = sum(...)            f a bijection of elements

A reduction takes in the element-wise TEs behind it (its epilogue: bias, activation, residual), and so does an
element-wise TE that others read too (a cell's state and its output). Nothing is computed twice. A reduction also takes
in what it alone reads and what is cheap (its prologue: a scale by a gate), though it reads an element many times: the
schedule decides whether an element is kept or computed again, as it does for any two TEs of a stage.

Legal if one thread can compute an element of every statement: every TE that joins has the number of elements of the
first one and reads each tensor of the others at one element for each of its own, each at another. All ways back to the
first must lead to the same element. These are questions to the access maps. And no TE outside may both need a statement
and be needed by one: a TE whose other operands are there before the group's own level creates no such path; one that
waits for more may join only where nothing else reads the group. A prologue has no other reader.
"""

from __future__ import annotations

from dataclasses import dataclass

from souffle.analysis import Dependences, share_elements
from souffle.decision import Decision, Refused
from souffle.program import TE, Item, TEProgram, fuse
from souffle.transform.vertical.compose import work_of

__all__ = ["fuse_neighbours"]

_MOST_PARTS = 16
"""Statements of one fused TE. Longer chains gain nothing and take long to schedule."""


def fuse_neighbours(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Fuse element-wise TEs with the TEs before them.

    A TE that reads several candidates goes to the one that comes last in program order.

    Parameters
    ----------
    program : TEProgram
        Composed; fused TEs in it stay as they are.

    Returns
    -------
    program : TEProgram
        The same object where nothing could be fused.
    decisions : tuple of Decision
        One for each TE that was fused, and for each element-wise one that reads TEs and was not.
    """
    fuser = _Fuser(program)
    for item in program.tes:
        fuser.place(item)
    return fuser.result(), tuple(fuser.decisions)


@dataclass(eq=False)
class _Group:
    """TEs that become one.

    Attributes
    ----------
    items : list
        One fused TE, loop or operator that is no TE; or TEs.
    level : int
        Groups on the longest path to this one.
    prologue : int
        How many of the items stand before the reduction.
    """

    items: list[Item]
    level: int
    prologue: int = 0

    @property
    def open(self) -> bool:
        """Whether TEs may join it."""
        return isinstance(self.items[0], TE)

    @property
    def size(self) -> int:
        """Elements of each of its TEs from the reduction on."""
        return self.items[self.prologue].outputs[0].size

    @property
    def name(self) -> str:
        """The name of the TE that it is so far."""
        return self.items[-1].name


class _Fuser:
    def __init__(self, program: TEProgram) -> None:
        self.program = program
        self.results = set(program.outputs)
        self.groups: dict[_Group, None] = {}
        self.group_of: dict[Item, _Group] = {}
        self.position = {item: number for number, item in enumerate(program.tes)}
        self.decisions: list[Decision] = []
        self._dependences: Dependences | None = None

    def place(self, item: Item) -> None:
        """Put an item into a group of one before it, or into one of its own."""
        refusals: list[tuple[bool, Refused]] = []
        for group in self._candidates(item):
            refusal = self._refusal(item, group)
            if refusal is None:
                self._join(item, group)
                return
            refusals.append((item.output.size != group.size, refusal))
        if refusals:
            # That of the nearest one of its own size tells most.
            _, nearest = min(refusals, key=lambda refusal: refusal[0])
            self.decisions.append(Decision("vertical", item.name, False, nearest.reason))
        prologue = [g for g in self._before(item) if self._is_prologue(g, item)]
        members = [member for g in reversed(prologue) for member in g.items]
        before = [g for one in (*members, item) for g in self._before(one) if g not in prologue]
        group = _Group([*members, item], max((g.level + 1 for g in before), default=0), len(members))
        for g in prologue:
            del self.groups[g]
            subject = f"{g.name} before {item.name}"
            self.decisions.append(Decision("vertical", subject, True, "cheap, and the reduction alone reads it"))
        self.groups[group] = None
        self.group_of.update(dict.fromkeys(group.items, group))

    def _is_prologue(self, group: _Group, reader: Item) -> bool:
        """Whether a reduction takes in a group that it reads."""
        if not (group.open and isinstance(reader, TE) and reader.is_reduction):
            return False
        if any(part.is_reduction or work_of(part).expensive for part in group.items):
            return False
        tensors = [tensor for part in group.items for tensor in part.outputs]
        inside = {reader, *group.items}
        return not any(t in self.results or any(c not in inside for c in self.program.consumers[t]) for t in tensors)

    def result(self) -> TEProgram:
        """The program with each group as one TE."""
        if all(len(group.items) == 1 for group in self.groups):
            return self.program
        items: list[Item] = []
        for group in self.groups:
            if len(group.items) == 1:
                items.extend(group.items)
                continue
            inside = set(group.items)
            defined = [tensor for part in group.items for tensor in part.outputs]
            needed = [
                t for t in defined if t in self.results or any(c not in inside for c in self.program.consumers[t])
            ]
            items.append(fuse(group.items, needed))
        return self.program.with_tes(items)

    def _before(self, item: Item) -> list[_Group]:
        """The groups that an item reads, the last producer's first."""
        producers = {self.program.producers[t] for t in item.inputs if t in self.program.producers}
        ordered = sorted(producers, key=lambda p: -self.position[p])
        return list(dict.fromkeys(self.group_of[p] for p in ordered))

    def _candidates(self, item: Item) -> list[_Group]:
        if not isinstance(item, TE) or item.is_reduction:
            return []
        return self._before(item)

    def _refusal(self, te_: TE, group: _Group) -> Refused | None:
        """Why a TE does not join a group; ``None`` if it does."""
        if not group.open:
            return Refused(f"{group.name} takes in no statement")
        if te_.output.size != group.size:
            return Refused(
                f"its {te_.output.size} elements are not the {group.size} of {group.name}, which would be repeated"
            )
        if len(group.items) >= _MOST_PARTS:
            return Refused(f"{group.name} has {_MOST_PARTS} statements already")
        if not share_elements([*group.items[group.prologue :], te_]):
            return Refused(f"it does not read {group.name} at one element for each of its own, each at another")
        return self._refusal_by_order(te_, group)

    def _refusal_by_order(self, te_: TE, group: _Group) -> Refused | None:
        late = [g for g in self._before(te_) if g is not group and g.level >= group.level]
        if not late:
            return None
        readers = (reader for part in group.items for t in part.outputs for reader in self.program.consumers[t])
        waiting = next((r for r in readers if r is not te_ and self.group_of.get(r) is not group), None)
        if waiting is None:
            return None
        for other in late:
            if any(self._depends(item, part) for item in other.items for part in group.items):
                return Refused(f"{other.name} lies between: it needs {group.name} and is needed here")
        return Refused(f"{waiting.name} reads {group.name} too and would wait for {late[0].name}")

    def _depends(self, later: Item, earlier: Item) -> bool:
        if self._dependences is None:
            self._dependences = Dependences(self.program)
        return self._dependences.depends(later, earlier)

    def _join(self, te_: TE, group: _Group) -> None:
        before = [g.level + 1 for g in self._before(te_) if g is not group]
        group.level = max(group.level, *before, 0)
        subject = f"{te_.name} with {group.name}"
        group.items.append(te_)
        self.group_of[te_] = group
        reason = f"one TE of {len(group.items)} statements: each element of one belongs to one element of the other"
        self.decisions.append(Decision("vertical", subject, True, reason))
