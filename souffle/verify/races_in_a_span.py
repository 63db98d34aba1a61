"""Who touches which byte between two barriers of a block: the bookkeeping that finds races.

All accesses of a span are compared, in whatever order they come: without a barrier between them threads may run in any
order. A thread is told by its number. An instruction of a whole warp is one actor of its own, since which of the
threads touches which byte is not known; so is a copy that a thread has issued and not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from souffle.verify.accesses import MemoryAccess
from souffle.verify.expressions import Undecided

__all__ = [
    "COPY_CODE",
    "RACE",
    "WARP",
    "WARP_CODE",
    "Found",
    "NeedsTile",
    "Span",
    "State",
    "Touched",
    "Wrong",
    "partial_warp",
]

RACE = "race in a block"
"""The rule that two threads of one block break by touching a byte without a barrier between, at least one writing."""

WARP = 32
_NOBODY, _MANY = -1, -2
WARP_CODE = 1 << 28
"""From here on: all of a warp, after its threads waited for each other."""
_PART_CODE = WARP_CODE + 64
"""Plus so many: all of the first so many warps, after their threads waited for each other."""
COPY_CODE = 1 << 29
"""From here on: a copy that a thread has issued and not waited for."""


@dataclass(frozen=True)
class Wrong:
    """What is wrong in a block.

    Attributes
    ----------
    rule, reason : str
        As of :class:`souffle.certificate.Counterexample`.
    statements : tuple
        The TensorIR.
    threads : tuple of str
        Who, in words, with their tiles.
    element : str
        Of which memory; empty where it is the stage itself.
    """

    rule: str
    reason: str
    statements: tuple[object, ...]
    threads: tuple[str, ...] = ()
    element: str = ""


def partial_warp(masks: np.ndarray, comes: np.ndarray) -> tuple[int, int | None] | None:
    """A thread that comes to a shuffle, and one that its mask names and that does not, or None if masks leave it out.

    Parameters
    ----------
    masks : array of int
        Of each thread, or of all.
    comes : array of bool
        By thread; further axes are turns of loops.

    Returns
    -------
    (int, int or None) or None
        None if of each warp the lanes that the masks of all of them name come, or none.
    """
    threads = comes.shape[0]
    rows = -(-threads // WARP) * WARP
    lanes = np.zeros((rows, comes.size // threads), bool)
    lanes[:threads] = comes.reshape(threads, -1)
    lanes = lanes.reshape(-1, WARP, lanes.shape[1])
    named = np.zeros(rows, np.int64)
    named[:threads] = np.broadcast_to(masks.reshape(-1), threads)
    named = named.reshape(-1, WARP, 1)
    here = (lanes.astype(np.int64) << np.arange(WARP)[:, None]).sum(axis=1, keepdims=True)
    wrong = np.argwhere(lanes & (named != here))
    if not wrong.size:
        return None
    warp, lane, turn = (int(place) for place in wrong[0])
    mask, present = int(named[warp, lane, 0]), int(here[warp, 0, turn])
    unnamed, missing = present & ~mask, mask & ~present
    if unnamed:
        return WARP * warp + _lowest(unnamed), None
    return WARP * warp + lane, WARP * warp + _lowest(missing)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class NeedsTile(Exception):
    """What matters depends on the tile."""


class Found(Exception):
    """Something is wrong; the search ends."""

    def __init__(self, what: Wrong) -> None:
        super().__init__()
        self.what = what


@dataclass(eq=False)
class State:
    """Of one memory, in one span between barriers: who has touched each unit; and whether it was written before."""

    name: str
    unit: int
    defined: np.ndarray | None
    writer: np.ndarray
    reader: np.ndarray
    writer_warp: np.ndarray
    reader_warp: np.ndarray

    @classmethod
    def of(cls, name: str, nbytes: int, unit: int, *, shared: bool) -> State:
        count = -(-nbytes // unit)
        return cls(
            name,
            unit,
            np.zeros(count, bool) if shared else None,
            *(np.full(count, _NOBODY, np.int32) for _ in range(4)),
        )

    def byte(self, unit: int) -> str:
        """A unit in words."""
        return f"byte {unit * self.unit} of the shared memory {self.name}"

    def enlarge(self, nbytes: int) -> None:
        """Make room for so many bytes; what is not declared grows as it is touched."""
        more = -(-nbytes // self.unit) - self.writer.size
        for name in ("writer", "reader", "writer_warp", "reader_warp"):
            setattr(self, name, np.concatenate([getattr(self, name), np.full(more, _NOBODY, np.int32)]))

    def clear(self) -> None:
        """A new span begins."""
        for array in (self.writer, self.reader, self.writer_warp, self.reader_warp):
            array.fill(_NOBODY)


@dataclass(frozen=True, eq=False)
class Touched:
    """The units that an access touches, and who: thread, or for a warp's instruction that one, and the warp.

    `certain` says whether it does so for sure: no condition on the tile was left out, nor one on data (`by_data`).
    `perhaps` says whether data may keep it from all of them; of a read whose place data chooses, each may be chosen.
    `again` says of which units a thread's copies touch them several times.
    """

    access: MemoryAccess
    tile: int | None
    certain: bool
    by_data: bool
    perhaps: bool
    state: State
    at: np.ndarray
    actor: np.ndarray
    warp: np.ndarray
    again: np.ndarray | None = None

    def part(self, mask: np.ndarray) -> Touched:
        """Some of the units."""
        again = None if self.again is None else self.again[mask]
        return replace(self, at=self.at[mask], actor=self.actor[mask], warp=self.warp[mask], again=again)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A copy under way, and of each unit which of its thread's groups it belongs to."""

    copy: Touched
    group: np.ndarray


def _thread(actor: np.ndarray) -> np.ndarray:
    """Who has issued a copy, of copies; else who it is."""
    return np.where(actor >= COPY_CODE, actor - COPY_CODE, actor)


def _unordered(before: np.ndarray, actor: np.ndarray, warp: np.ndarray) -> np.ndarray:
    """Whether who touched each unit before has not been waited for by who touches it now.

    A copy comes after all that its thread has done before it, other copies left out.
    """
    waited = (before == _thread(actor)) | (before == WARP_CODE + warp)
    waited |= (before > _PART_CODE) & (before < COPY_CODE) & (warp < before - _PART_CODE)
    return (before != _NOBODY) & ~waited


class Span:
    """The present span, and the copies that are under way across spans."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.tile: int | None = None
        self.states: dict[str, State] = {}
        self.epochs = 1
        self.recorded: list[Touched] = []
        # Barriers of some warps in this span: how many accesses came before, which warps waited, and whether for each
        # other.
        self.parts: list[tuple[int, np.ndarray, bool]] = []
        self.flights: list[_Flight] = []
        # How many groups of copies each thread has closed.
        self.closed = np.zeros(threads, np.int64)
        self.doubt: set[str] = set()

    def begin(self, tile: int | None) -> None:
        """A tile begins: what shared memory holds from before is not to be read."""
        self.tile = tile
        for state in self.states.values():
            if state.defined is not None:
                state.defined.fill(False)

    def barrier(self) -> None:
        """All threads of the block wait; copies under way go on into the next span."""
        self.epochs += 1
        for state in self.states.values():
            state.clear()
        self.recorded.clear()
        self.parts.clear()
        for under_way in self.under_way():
            self.record(under_way)

    def under_way(self) -> list[Touched]:
        """Copies that have not been waited for."""
        return [flight.copy for flight in self.flights]

    def issue(self, copy: Touched) -> None:
        """An asynchronous copy, which belongs to the group that its thread closes next, has been recorded."""
        self.flights.append(_Flight(copy, self.closed[copy.actor - COPY_CODE]))

    def part_barrier(self, count: int) -> None:
        """The first `count` threads of the block wait for each other, and for no others.

        What those threads have done is done for all of them, and for nobody else.
        """
        if count >= self.threads:
            self.barrier()
            return
        warps = count // WARP
        for state in self.states.values():
            mine = (state.writer != _NOBODY) & (state.writer < COPY_CODE) & (state.writer_warp < warps)
            state.writer[mine] = np.maximum(state.writer[mine], _PART_CODE + warps)
            # Of units that several have read, those that all of them are waiting.
            outside = np.zeros(state.reader.size, bool)
            for old in self.recorded:
                if old.state is state and not old.access.writes:
                    outside[old.at[old.warp >= warps]] = True
            mine = (state.reader != _NOBODY) & (state.reader < COPY_CODE) & ~outside
            state.reader[mine] = np.maximum(state.reader[mine], _PART_CODE + warps)
        self.parts.append((len(self.recorded), np.arange(-(-self.threads // WARP)) < warps, True))

    def warp_barrier(self, warps: np.ndarray) -> None:
        """What threads of some warps have done is done for all threads of the same warp."""
        for state in self.states.values():
            for who, warp in ((state.writer, state.writer_warp), (state.reader, state.reader_warp)):
                done = (who != _NOBODY) & (warp >= 0) & (who < _PART_CODE) & warps[np.maximum(warp, 0)]
                who[done] = WARP_CODE + warp[done]
        self.parts.append((len(self.recorded), warps, False))

    def transfer(self, pending: int | None, comes: np.ndarray) -> None:
        """The threads that come close a group of copies each, or wait for all but `pending` of their groups.

        Copies that were waited for are what the thread itself did.
        """
        if pending is None:
            self.closed[comes] += 1
            return
        flights, self.flights = self.flights, []
        for flight in flights:
            copy, thread = flight.copy, flight.copy.actor - COPY_CODE
            done = comes[thread] & (flight.group < self.closed[thread] - pending)
            who = copy.state.writer if copy.access.writes else copy.state.reader
            own = done & (who[copy.at] == copy.actor)
            who[copy.at[own]] = thread[own]
            if not done.any():
                self.flights.append(flight)
            elif not done.all():
                rest = copy.part(~done)
                self.recorded = [*(rest if old is copy else old for old in self.recorded), copy.part(done)]
                self.flights.append(_Flight(rest, flight.group[~done]))
        for copy in self.under_way():
            if not copy.access.writes:
                own = copy.state.reader[copy.at] == copy.actor - COPY_CODE
                copy.state.reader[copy.at[own]] = copy.actor[own]

    def record(self, new: Touched) -> None:
        """Compare an access with all of this span.

        Raises
        ------
        Found
            For the first conflict, or the first read of shared memory that was not written.
        """
        state, at, actor, warp = new.state, new.at, new.actor, new.warp
        bad = _unordered(state.writer[at], actor, warp)
        if new.access.writes:
            bad |= _unordered(state.reader[at], actor, warp)
            twice = at[1:] == at[:-1]
            bad[1:] |= twice & (actor[1:] != actor[:-1])
            if new.again is not None:
                bad |= new.again
        if bad.any():
            self.clash(new, int(np.flatnonzero(bad)[0]))
        if state.defined is not None:
            self.contents(new)
        if new.access.writes:
            state.writer[at] = actor
            state.writer_warp[at] = warp
        else:
            # Several readers of one unit come one after the other, sorted.
            same = at[1:] == at[:-1]
            many = np.zeros(at.size, bool)
            many[1:] |= same & (actor[1:] != actor[:-1])
            several = np.zeros(at.size, bool)
            several[1:] |= same & (warp[1:] != warp[:-1])
            before, before_warp = state.reader[at], state.reader_warp[at]
            # Whoever is ordered after this reader is so after those that it has waited for; but a copy of its own may
            # still be reading.
            ordered = np.where(before == actor + COPY_CODE, before, actor)
            unordered = _unordered(before, actor, warp) & (before != ordered)
            state.reader[at] = np.where(unordered, _MANY, ordered)
            state.reader_warp[at] = np.where((before_warp == _NOBODY) | (before_warp == warp), warp, _MANY)
            state.reader[at[many]] = _MANY
            state.reader_warp[at[several]] = _MANY
        self.recorded.append(new)

    def contents(self, new: Touched) -> None:
        """Shared memory that a tile reads, it has written before."""
        state = new.state
        if new.access.writes:
            if new.certain:
                state.defined[new.at] = True
            elif new.by_data:
                self.doubt.add(state.name)
            return
        missing = np.flatnonzero(~state.defined[new.at])
        if not missing.size:
            return
        if new.tile is None:
            raise NeedsTile
        if new.by_data or state.name in self.doubt:
            raise Undecided(f"whether all that is read of {state.name} was written depends on data")
        unit, who = int(new.at[missing[0]]), self.person(int(new.actor[missing[0]]), new.tile)
        why = "it is read, and nothing was written there in this tile"
        raise Found(Wrong("stale or undefined read", why, (new.access.statement,), (who,), state.byte(unit)))

    def clash(self, new: Touched, position: int) -> None:
        """Say who else touches the unit at a position of an access."""
        unit, actor, warp = int(new.at[position]), int(new.actor[position]), int(new.warp[position])
        first, who, perhaps = new, actor, new.perhaps
        again, under_way = new.again is not None and bool(new.again[position]), self.under_way()
        for number, old in enumerate((*self.recorded, new)):
            if old.state is not new.state or not (old.access.writes or new.access.writes):
                continue
            others = (old.at == unit) & ~self.waited_for(number, old, warp)
            if old is new:
                others &= (old.actor == actor) if again else (old.actor != actor)
            elif not any(old is copy for copy in under_way):
                others &= _thread(old.actor) != _thread(np.int64(actor))
            if others.any():
                first, who, perhaps = old, int(old.actor[others][0]), perhaps or old.perhaps
                break
        if perhaps:
            raise Undecided(f"whether accesses of {new.state.name} meet depends on data")
        statements = (first.access.statement, new.access.statement)
        people = (self.person(who, first.tile), self.person(actor, new.tile))
        chosen = ", if data chooses it" if first.by_data or new.by_data else ""
        why = f"both touch it, one writes, and no block barrier stands between{chosen}"
        raise Found(Wrong(RACE, why, statements, people, new.state.byte(unit)))

    def waited_for(self, number: int, old: Touched, warp: int) -> np.ndarray:
        """Where an earlier access is ordered before what a warp does now, by a barrier of some warps."""
        waited = np.zeros(old.at.size, bool)
        for before, warps, together in self.parts:
            if number < before and warps[warp]:
                waited |= warps[old.warp] if together else old.warp == warp
        return waited

    def person(self, actor: int, tile: int | None) -> str:
        """Who an actor is, for messages."""
        if actor >= COPY_CODE:
            who = f"the copy of thread {actor - COPY_CODE}"
        elif actor >= self.threads:
            who = f"warp {(actor - self.threads) % (self.threads // WARP + 1)}"
        else:
            who = f"thread {actor}"
        return f"{who} of any tile" if tile is None else f"{who} of tile {tile}"
