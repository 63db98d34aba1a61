"""Which results of a kernel take turns in shared memory, by the dominance tree (FusionStitching 2019, Algorithm 4).

Operations run in a given topological order. One that requests no bytes is computed where it is read (thread
composition), so that its readers read what it reads. Going through the order, an operation that requests bytes may take
the space of a previous one that it dominates (:mod:`souffle.stitching.dominance`): all that is made of that value
passes through it, so nobody needs the value afterwards. Values that it dominates beside that one are reclaimed.

What the paper leaves open is decided so: each operation hands on which spaces may still be taken, those of its operands
but for what it took and reclaimed; a space is as large as the largest of its values; what is reclaimed may be given out
again, to operations that run later.

As printed the algorithm is not safe, by one rule that it lacks. Dominance says that nobody needs the value *after* the
operation that takes its space, but the operation may still read it while it writes: the smallest example is ``b`` that
reads all of ``a`` for each of its elements, as a transposition does. Some threads have written ``b`` over what others
have yet to read of ``a``. In the paper's Figure 1 ``add`` reads ``dot_1`` at the element that it computes, and there it
is safe. So here an operation takes the space of a value only if

- it reads that no more: every reader is another operation that requests bytes, and has run; or
- it reads it at the element that it writes alone (``in_place``), through operations that do too, and has as many bytes.

:func:`plan_as_printed` is the algorithm without that rule. Spaces that are taken by dominance alone are right in every
topological order; those that were reclaimed and given out again are right in the order that was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from souffle.errors import SouffleError
from souffle.stitching.dominance import Dominance

__all__ = ["SharedError", "SharedPlan", "SharedRequest", "plan_as_printed", "plan_shared"]


class SharedError(SouffleError):
    """Requests of shared memory are not those of a data-flow graph; the message names the operation."""


@dataclass(frozen=True)
class SharedRequest:
    """An operation and what it asks for.

    Attributes
    ----------
    name : str
    operands : tuple of str
        The operations that it reads.
    nbytes : int
        Of its result in shared memory; 0 where it has none.
    in_place : frozenset of str
        Those of the operands that it reads at the element that it computes alone.
    """

    name: str
    operands: tuple[str, ...] = ()
    nbytes: int = 0
    in_place: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SharedPlan:
    """Where results lie.

    Attributes
    ----------
    offsets : mapping of str to int
        The first byte of each result.
    takes : mapping of str to str
        Whose space an operation took, of those that took one by dominance.
    requested, allocated : int
        Bytes of all requests together, and of the memory that they lie in.
    """

    offsets: Mapping[str, int]
    takes: Mapping[str, str]
    requested: int
    allocated: int

    @property
    def ratio(self) -> float:
        """Allocated to requested bytes, as in the paper's Table 4: the lower, the more is reused."""
        return self.allocated / self.requested if self.requested else 1.0


def plan_shared(requests: Sequence[SharedRequest], *, alignment: int = 1, any_order: bool = False) -> SharedPlan:
    """Algorithm 4 with the rule that makes it safe.

    Parameters
    ----------
    requests : sequence of SharedRequest
        The operations in the order in which they run, each behind those that it reads.
    alignment : int
        Bytes at whose multiples results begin.
    any_order : bool
        Whether the plan is to be right in every topological order: nothing that was reclaimed is given out again.

    Raises
    ------
    SharedError
        If a name is not of an operation before, occurs twice, or a size is negative.
    """
    return _Planner(requests, alignment).planned(_readable_until(requests), give_out=not any_order)


def plan_as_printed(requests: Sequence[SharedRequest], *, alignment: int = 1) -> SharedPlan:
    """Algorithm 4 as it is printed: dominance alone. It is not safe, as the head of this file says.

    Parameters and errors as for :func:`plan_shared`.
    """
    return _Planner(requests, alignment).planned(lambda one, before: True, give_out=True)


_MayTake = Callable[[SharedRequest, SharedRequest], bool]


@dataclass
class _Space:
    """Bytes that results take turns in."""

    nbytes: int


class _Planner:
    def __init__(self, requests: Sequence[SharedRequest], alignment: int) -> None:
        _check(requests)
        self.requests = {one.name: one for one in requests}
        self.alignment = alignment
        self.dominance = Dominance(list(self.requests), {one.name: one.operands for one in requests})
        self.space: dict[str, _Space] = {}
        self.spaces: list[_Space] = []
        self.free: list[_Space] = []
        self.takes: dict[str, str] = {}

    def planned(self, may_take: _MayTake, *, give_out: bool) -> SharedPlan:
        """Go through the operations; `may_take` says whether one may write where a result is that it dominates."""
        # For each operation the results whose spaces may still be taken behind it.
        info: dict[str, dict[str, None]] = {}
        for one in self.requests.values():
            known = {name: None for operand in one.operands for name in info[operand]}
            if one.nbytes:
                ended = [name for name in known if self.dominance.dominates(one.name, name)]
                self.take(one, [name for name in ended if may_take(one, self.requests[name])])
                for name in ended:
                    del known[name]
                    if self.space[name] is not self.space[one.name] and give_out:
                        self.free.append(self.space[name])
                known[one.name] = None
            info[one.name] = known
        return self.laid_out()

    def take(self, one: SharedRequest, previous: Sequence[str]) -> None:
        """A space for a result: of a previous one, else what was reclaimed and is large enough, else new."""
        if previous:
            self.takes[one.name] = min(previous, key=lambda name: self.misfit(self.space[name], one))
            space = self.space[self.takes[one.name]]
        else:
            fit = [space for space in self.free if space.nbytes >= one.nbytes]
            space = min(fit, key=lambda space: space.nbytes) if fit else _Space(0)
            self.free = [other for other in self.free if other is not space]
            self.spaces += [] if fit else [space]
        space.nbytes = max(space.nbytes, one.nbytes)
        self.space[one.name] = space

    def misfit(self, space: _Space, one: SharedRequest) -> tuple[bool, int]:
        """How ill a space is for a result: too small is worst, and what is too large is wasted."""
        return space.nbytes < one.nbytes, abs(space.nbytes - one.nbytes)

    def laid_out(self) -> SharedPlan:
        """The spaces one behind the other."""
        begin, end = {}, 0
        for space in self.spaces:
            begin[id(space)] = end
            end += -(-space.nbytes // self.alignment) * self.alignment
        offsets = {name: begin[id(space)] for name, space in self.space.items()}
        asked = [-(-one.nbytes // self.alignment) * self.alignment for one in self.requests.values()]
        return SharedPlan(offsets, dict(self.takes), sum(asked), end)


def _readable_until(requests: Sequence[SharedRequest]) -> _MayTake:
    """Whether an operation no longer reads a result, or at the element that it writes alone."""
    by_name = {one.name: one for one in requests}
    reads: dict[str, dict[str, bool]] = {}
    for one in requests:
        # What is read when it is computed, and whether at its own element alone.
        found: dict[str, bool] = {}
        for operand in one.operands:
            own = operand in one.in_place
            below = {operand: True} if by_name[operand].nbytes else reads[operand]
            for name, placed in below.items():
                found[name] = found.get(name, True) and own and placed
        reads[one.name] = found

    def may_take(one: SharedRequest, before: SharedRequest) -> bool:
        own = reads[one.name].get(before.name)
        return own is None or (own and one.nbytes == before.nbytes)

    return may_take


def _check(requests: Iterable[SharedRequest]) -> None:
    known: set[str] = set()
    for one in requests:
        for operand in (*one.operands, *one.in_place):
            if operand not in known:
                raise SharedError(f"{one.name} reads {operand}, which is no operation before it")
        if one.name in known:
            raise SharedError(f"two operations are called {one.name}")
        if one.nbytes < 0 or not one.in_place <= set(one.operands):
            raise SharedError(f"{one.name} requests {one.nbytes} bytes, in place of {sorted(one.in_place)}")
        known.add(one.name)
