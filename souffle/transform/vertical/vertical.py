"""Vertical transformation: chains of one-relies-on-one TEs become one TE (paper §6.2, Figure 4).

::

    P[u] = p(u)                 C[v] = c(..., p(f(v)), ...)
    C[v] = c(..., P[f(v)], ...)   →

Legal because a TE without reduction is a function of its indices: an element of P can be computed wherever it is read.
The arithmetic stays the same where every element of P is read at most once. So P is put into its readers when that
holds, or when P does no arithmetic at all and only moves data (reshape, transpose, slice, pad, concat), or when P is
one comparison of one element: a reader of the flag would load a byte and compare it.

What cannot be one expression becomes one TE of several statements afterwards (``epilogue.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable

from souffle.alone import one_at_a_time
from souffle.decision import Decision, Refused
from souffle.program import TE, FusedTE, Item, Tensor, TEProgram
from souffle.transform.vertical.compose import TEWork, composed, simplified, use_of, work_of
from souffle.transform.vertical.epilogue import fuse_neighbours

__all__ = ["copies_into_readers", "simplified", "vertical"]

_LARGEST_BODY = 64
"""Loads in one TE's body; composing past this gains nothing and makes expressions that are slow to simplify."""

_MOST_NAMES = 4
"""Readers that a decision names."""


@one_at_a_time
def vertical(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Compose chains of one-relies-on-one TEs, to a fixed point, and fuse what remains with its neighbours.

    Parameters
    ----------
    program : TEProgram

    Returns
    -------
    program : TEProgram
        The same object where nothing could be composed or fused.
    decisions : tuple of Decision
        One for each TE that was put into its readers or fused, and for each that was kept although it is
        one-relies-on-one.
    """
    composer = _Composer(program)
    smaller = composer.run()
    result, fused = fuse_neighbours(smaller)
    return result, (*composer.accepted, *composer.refused.values(), *fused)


def copies_into_readers(program: TEProgram, among: Container[Item]) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Put some TEs that only move data into what reads them; where reductions were placed, that stays as it is.

    Parameters
    ----------
    program : TEProgram
    among : container of items
        Those that may be put into their readers: what a transformation after this one has changed.

    Returns
    -------
    program : TEProgram
        The same object where none is.
    decisions : tuple of Decision
        One for each TE that is.
    """
    composer = _Composer(program, among)
    return composer.copies_alone(), tuple(composer.accepted)


def _is_flag(te_: TE, work: TEWork) -> bool:
    """Whether an element is one comparison of one element."""
    return te_.output.dtype == "bool" and work.loads == 1 and work.operations <= te_.output.size


class _Composer:
    """Puts producers into their readers. Judges a TE again only where it or a reader of it has changed."""

    def __init__(self, program: TEProgram, among: Container[Item] | None = None) -> None:
        self.program = program
        self.judged = {i for i, item in enumerate(program.tes) if among is None or item in among}
        self.items: list[Item | None] = list(program.tes)
        self.producer = {t: i for i, item in enumerate(program.tes) for t in item.outputs}
        # Ordered sets of positions.
        self.readers: dict[Tensor, dict[int, None]] = {t: {} for t in self.producer}
        for i, item in enumerate(program.tes):
            for tensor in item.inputs:
                if tensor in self.readers:
                    self.readers[tensor][i] = None
        self.results = set(program.outputs)
        self.pending: dict[int, dict[Tensor, TE]] = {}
        self.loads: dict[int, int] = {}
        self.dropped: set[int] = set()
        self.kept: frozenset[int] = frozenset()
        self.accepted: list[Decision] = []
        self.refused: dict[int, Decision] = {}

    def run(self) -> TEProgram:
        """The program of which nothing more can be composed; the same object where nothing could at all.

        What only moves data goes first. A padding that took in the arithmetic before it could not go into the
        convolution that reads it.
        """
        self._pass(moving=True)
        self._pass(moving=False)
        return self._composed()

    def copies_alone(self) -> TEProgram:
        """The program of which nothing that only moves data can be composed, of TEs that are not placed."""
        placed = (i for i, item in enumerate(self.items) if isinstance(item, TE | FusedTE) and item.placement)
        self.kept = frozenset(placed)
        self.judged -= self.kept
        self._pass(moving=True)
        for position in list(self.pending):
            self._settle(position)
        return self._composed()

    def _composed(self) -> TEProgram:
        if not self.accepted:
            return self.program
        return self.program.with_tes(item for item in self.items if item is not None)

    def _pass(self, moving: bool) -> None:
        turn, later = [position for position in self.judged if self.items[position] is not None], set()
        while turn:
            queued = set(turn)
            heapq.heapify(turn)
            while turn:
                position = heapq.heappop(turn)
                queued.discard(position)
                for changed in self.judged.intersection(self._judge(position, moving)):
                    # Readers come after it and still have their turn; what it reads is judged again in the next one.
                    if changed < position:
                        later.add(changed)
                    elif changed not in queued:
                        queued.add(changed)
                        heapq.heappush(turn, changed)
            later |= self.dropped
            self.dropped.clear()
            turn, later = [position for position in self.judged & later if self.items[position] is not None], set()

    def _judge(self, position: int, moving: bool) -> Iterable[int]:
        """Put a TE into its readers where that is right; the positions for which it makes a difference."""
        self._settle(position)
        te_ = self.items[position]
        if not any(tensor in self.results or self.readers[tensor] for tensor in te_.outputs):
            self.items[position] = None
            self._unread(position, te_.inputs)
            return ()
        if not isinstance(te_, TE) or te_.is_reduction or len(te_.outputs) != 1:
            return ()
        if te_.output in self.results or (moving and work_of(te_).operations):
            return ()
        readers = self._readers(te_.output)
        if not readers:
            return (position,)
        refusal = self._refusal(te_, readers)
        if refusal is not None:
            self.refused[position] = Decision("vertical", te_.name, False, refusal.reason)
            return ()
        self.refused.pop(position, None)
        subject = f"{te_.name} into {self._names(readers)}"
        self.accepted.append(Decision("vertical", subject, True, "its elements are computed where they are read"))
        self.items[position] = None
        for reader in readers:
            self.pending.setdefault(reader, {})[te_.output] = te_
        above = [self.producer[t] for t in te_.inputs if t in self.producer]
        for tensor in te_.inputs:
            if tensor in self.readers:
                self.readers[tensor].pop(position, None)
                self.readers[tensor].update(dict.fromkeys(readers))
        return (*readers, *above)

    def _settle(self, position: int) -> None:
        """Compose a TE with the producers that wait to be put into it: all at once, as a concatenation has many."""
        producers = self.pending.pop(position, None)
        if not producers:
            return
        before = self.items[position]
        made = self.items[position] = composed(before, producers)
        self.loads.pop(position, None)
        read = {tensor for te_ in (before, *producers.values()) for tensor in te_.inputs}
        # A selection may have turned out to be impossible.
        self._unread(position, read.difference(made.inputs))

    def _unread(self, position: int, tensors: Iterable[Tensor]) -> None:
        """An item does not read some tensors any more, which makes a difference to what defines them."""
        for tensor in tensors:
            if tensor in self.readers and position in self.readers[tensor]:
                del self.readers[tensor][position]
                self.dropped.add(self.producer[tensor])

    def _readers(self, tensor: Tensor) -> list[int]:
        """The readers of `tensor`, composed as far as matters to how they read it."""
        for position in list(self.readers[tensor]):
            waiting = self.pending.get(position)
            if waiting and (
                work_of(self.items[position]).nested or any(tensor in producer.inputs for producer in waiting.values())
            ):
                self._settle(position)
        return list(self.readers[tensor])

    def _refusal(self, te_: TE, readers: Iterable[int]) -> Refused | None:
        """Why a TE is not put into its readers; ``None`` if it is."""
        if not all(isinstance(self.items[reader], TE) for reader in readers):
            return Refused("an operator that is no TE reads it")
        if not self.kept.isdisjoint(readers):
            return Refused("a reduction that is placed reads it")
        work = work_of(te_)
        reads, grown = 0, {}
        for position in readers:
            reader = self.items[position]
            use = use_of(reader, te_.output)
            before = self.loads.get(position) or work_of(reader).loads
            grown[position] = before + (work.loads - 1) * use.occurrences
            if work.loads > 1 and grown[position] > _LARGEST_BODY:
                return Refused(f"{reader.name} would read {grown[position] - before} more elements for each of its own")
            if work.expensive and use.occurrences > 1:
                return Refused(f"{reader.name} would hold its expensive expression several times")
            reads += use.times
        if work.operations and reads > te_.output.size and not _is_flag(te_, work):
            kind = "expensive " if work.expensive else ""
            return Refused(
                f"its {te_.output.size} elements are read {reads} times, which would repeat {kind}arithmetic"
            )
        self.loads.update(grown)
        return None

    def _names(self, readers: Iterable[int]) -> str:
        names = [self.items[reader].name for reader in readers]
        rest = len(names) - _MOST_NAMES
        return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
