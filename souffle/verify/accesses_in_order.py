"""The accesses of one block in the order of its barriers, all threads at once.

Loops without a barrier in them are taken as a whole, if all that they read of shared memory was written before them;
the others turn by turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from souffle.verify.accesses import (
    BarrierWait,
    Branch,
    Function,
    Item,
    Memory,
    MemoryAccess,
    SerialLoop,
    Transfer,
    WarpMeeting,
    all_of,
    leaves,
    orders,
    waits_of,
)
from souffle.verify.expressions import (
    Axis,
    Expr,
    Undecided,
    conjuncts,
    evaluate,
    holding,
    interval,
    linear_terms,
    operation,
)
from souffle.verify.races_in_a_span import (
    COPY_CODE,
    WARP,
    WARP_CODE,
    Found,
    NeedsTile,
    Span,
    State,
    Touched,
    Wrong,
    partial_warp,
)

__all__ = ["MOST_POINTS", "FunctionInSpan", "walked"]

_MOST_TURNS = 1 << 13
_MOST_WAYS = 256
MOST_POINTS = 1 << 24
"""Points of one question that are evaluated at once."""
_DIVERGENT = "divergent barrier"
_NAMED_BARRIERS = 16
"""Of a block, on every GPU."""


@dataclass(frozen=True, eq=False)
class FunctionInSpan:
    """A function of a sequence that a block runs with no barrier between.

    Attributes
    ----------
    function : Function
    globals_ : tuple of (int, str, int)
        Pointer parameters that are looked at too: parameter, the name of the memory behind it, and the byte where it
        points to; none by default.
    """

    function: Function
    globals_: tuple[tuple[int, str, int], ...] = ()


class Walk:
    """The accesses of one block, span by span: of each part for one tile, or for any (None).

    Raises :class:`souffle.verify.races_in_a_span.Found` for what is wrong, ``NeedsTile`` of that module where the tile
    matters, and :class:`souffle.verify.expressions.Undecided`.
    """

    def __init__(self, parts: Sequence[FunctionInSpan], tiles: Sequence[int | None], way: Sequence[bool] = ()) -> None:
        self.parts = parts
        # What data decides at branches that all threads of a tile take alike, in the order in which they come there.
        self.way, self.branches = list(way), 0
        self.asked: set[Expr] = set()
        self.tiles = tiles
        self.tile = tiles[0]
        self.instances = 0
        self.seen: set[tuple] = set()
        self.met: set[tuple] = set()
        self.own_reads: dict[SerialLoop, tuple[tuple[str, slice], ...]] = {}
        # Who has touched static shared memory in a span, and whether to write it.
        self.static: dict[tuple[int, str], bool] = {}
        self.sets: dict[tuple, Touched | None] = {}
        self.part = parts[0]
        self.names: dict[Memory, tuple[str, int]] = {}
        self.names_of: list[dict[Memory, tuple[str, int]]] = []
        self.threads = max(p.function.thread.extent for p in parts)
        self.span = Span(self.threads)
        self._allocate()

    def _allocate(self) -> None:
        sizes: dict[str, int] = {}
        units: dict[str, int] = {}
        for part in self.parts:
            # A function that runs twice may be given other pointers each time.
            names: dict[Memory, tuple[str, int]] = {}
            self.names_of.append(names)
            for access in all_of(part.function.body, MemoryAccess):
                memory = access.place.memory
                if memory.kind == "shared":
                    # All functions use one pool; other shared arrays are a function's own, whenever it runs.
                    number = part.function.memories.index(memory)
                    name = "pool" if memory.pool else f"{memory.name} ({number}) of {part.function.name}"
                    names[memory] = (name, 0)
                    sizes[name] = max(sizes.get(name, 0), memory.nbytes)
                    units[name] = _grain(access, units.get(name, 0))
            for parameter, name, base in part.globals_:
                names[part.function.pointers[parameter]] = (name, base)
        for name, nbytes in sizes.items():
            self.span.states[name] = State.of(name, nbytes, max(1, units[name]), shared=True)

    def run(self) -> None:
        for part, names, tile in zip(self.parts, self.names_of, self.tiles, strict=True):
            self.part, self.names, self.tile = part, names, tile
            self.sets.clear()
            self.seen.clear()
            self.met.clear()
            self.own_reads.clear()
            self.span.begin(tile)
            self.items(part.function.body, {}, (), ())
        if self.span.under_way():
            raise Undecided("copies that are under way when a stage ends")

    # Control

    def items(
        self, items: Sequence[Item], fixed: dict[Axis, int], free: tuple[Axis, ...], conditions: tuple[Expr, ...]
    ) -> None:
        for item in items:
            if isinstance(item, MemoryAccess):
                self.access(item, fixed, free, conditions)
            elif isinstance(item, BarrierWait):
                self.wait(item, fixed, conditions)
            elif isinstance(item, Transfer):
                self.seen.clear()
                comes = np.zeros(self.threads, bool)
                comes[: self.part.function.thread.extent] = self.comes(conditions, fixed, (), "a group of copies")
                self.span.transfer(item.pending, comes)
            elif isinstance(item, WarpMeeting):
                self.meeting(item, fixed, conditions)
            elif isinstance(item, SerialLoop):
                self.loop(item, fixed, free, conditions)
            elif orders((item,)) or (item.uniform and item.condition.opaque and all_of((item,), WarpMeeting)):
                self.ordered_branch(item, fixed, free, conditions)
            else:
                self.items(item.then, fixed, free, (*conditions, item.condition))
                if item.otherwise:
                    self.items(item.otherwise, fixed, free, (*conditions, operation("not", item.condition)))

    def loop(
        self, item: SerialLoop, fixed: dict[Axis, int], free: tuple[Axis, ...], conditions: tuple[Expr, ...]
    ) -> None:
        waits = orders(item.body)
        if not waits and not self.hands_on(item):
            self.items(item.body, fixed, (*free, item.axis), conditions)
            return
        turns = item.axis.extent
        if waits and not self.depends(item.body, item.axis) and not all_of(item.body, Transfer):
            # All turns are equal: what meets in two of them meets in any two neighbours.
            turns = min(turns, 2)
        if turns > _MOST_TURNS:
            raise Undecided(f"a loop of {turns} turns with barriers in it, or that reads what its turns write")
        for turn in range(turns):
            self.items(item.body, {**fixed, item.axis: turn}, free, conditions)

    def hands_on(self, item: SerialLoop) -> bool:
        """Whether a loop may read of shared memory what nothing has written before it, and one of its turns writes."""
        if item not in self.own_reads:
            self.own_reads[item] = tuple(self.reads_of_own(item))
        return any(not self.span.states[name].defined[units].all() for name, units in self.own_reads[item])

    def reads_of_own(self, item: SerialLoop) -> Iterator[tuple[str, slice]]:
        """Where a loop reads shared memory that it also writes: the memory, and units of it."""
        reach: list[tuple[str, int, int, bool]] = []
        for access in all_of(item.body, MemoryAccess):
            if access.place.memory.kind == "shared":
                name = self.names[access.place.memory][0]
                unit = self.span.states[name].unit
                low, high = interval(access.place.offset)
                reach.append((name, max(0, low // unit), (high + access.width - 1) // unit + 1, access.writes))
        for name, low, high, writes in dict.fromkeys(reach):
            if not writes and any(w and n == name and a < high and low < b for n, a, b, w in reach):
                yield name, slice(low, high)

    def ordered_branch(
        self, item: Branch, fixed: dict[Axis, int], free: tuple[Axis, ...], conditions: tuple[Expr, ...]
    ) -> None:
        condition, inside = item.condition, (*item.then, *item.otherwise)
        if condition.opaque and not item.uniform:
            raise Undecided(f"a barrier under a condition on data: {condition}")
        if condition.opaque:
            self.items(item.then if self.decided(condition) else item.otherwise, fixed, free, conditions)
            return
        if self.tile is None and self.part.function.tile in condition.axes:
            raise NeedsTile
        holds = np.broadcast_to(self.value(condition, fixed, ()) != 0, (self.part.function.thread.extent,))
        if holds.all() or not holds.any():
            self.items(item.then if holds.all() else item.otherwise, fixed, free, conditions)
            return
        if waits_of(inside):
            self.some_warps(item, holds)
            raise self.divergent(item.statement, holds)
        self.items(item.then, fixed, free, (*conditions, condition))
        self.items(item.otherwise, fixed, free, (*conditions, operation("not", condition)))

    def decided(self, condition: Expr) -> bool:
        """Which way all threads go; it holds where nothing else was asked for."""
        self.asked.add(condition)
        self.branches += 1
        if self.branches > len(self.way):
            self.way.append(True)
        return self.way[self.branches - 1]

    def some_warps(self, item: Branch, holds: np.ndarray) -> None:
        """Named barriers that are made for just the threads that come to them are none of the forms that are proven."""
        mine, others = int(np.count_nonzero(holds)), int(np.count_nonzero(~holds))
        waits = [(wait, mine) for wait in all_of(item.then, BarrierWait)]
        waits += [(wait, others) for wait in all_of(item.otherwise, BarrierWait)]
        fits = all(w.scope == "part" and w.number and w.count == count for w, count in waits if w.scope != "warp")
        if holds.size % WARP:
            return
        warps = holds.reshape(-1, WARP)
        if fits and (warps.all(axis=1) | ~warps.any(axis=1)).all():
            raise Undecided("a barrier of some warps of a stage")

    def depends(self, items: Sequence[Item], axis: Axis) -> bool:
        """Whether what is looked at depends on an axis."""
        for item, conditions, _ in leaves(items):
            if isinstance(item, MemoryAccess) and item.place.memory not in self.names:
                continue
            own = (item.place.offset,) if isinstance(item, MemoryAccess) else ()
            own += item.conditions if isinstance(item, (MemoryAccess, WarpMeeting)) else ()
            if any(axis in node.axes for node in (*conditions, *own)):
                return True
        return False

    # Waiting

    def wait(self, item: BarrierWait, fixed: dict[Axis, int], conditions: tuple[Expr, ...]) -> None:
        if item.scope == "grid":
            raise Undecided("a grid barrier inside of a stage")
        self.seen.clear()
        if item.scope == "warp":
            self.span.warp_barrier(self.waiting_warps(item, fixed, conditions))
        elif item.scope == "part":
            # The count is in whole warps, and a warp that comes counts as a whole.
            threads = self.part.function.thread.extent
            if item.count != threads or item.count % WARP or not 0 <= item.number < _NAMED_BARRIERS:
                why = f"it waits for {item.count} threads, and {threads} come to it"
                raise Found(Wrong(_DIVERGENT, why, (item.statement,), (), f"barrier {item.number}"))
            self.span.part_barrier(item.count)
        else:
            # Not under `conditions`: branches around such barriers have been decided for all threads at once.
            self.span.barrier()

    def waiting_warps(self, item: BarrierWait, fixed: dict[Axis, int], conditions: tuple[Expr, ...]) -> np.ndarray:
        """Which warps come to a barrier of a warp, each as a whole."""
        comes = self.comes(conditions, fixed, (), "a barrier of a warp")
        warps = np.zeros(-(-self.threads // WARP), bool)
        for first in range(0, comes.size, WARP):
            lanes = comes[first : first + WARP]
            if lanes.any() and not lanes.all():
                raise self.divergent(item.statement, lanes, first)
            warps[first // WARP] = lanes.all()
        return warps

    def divergent(self, statement: object, comes: np.ndarray, first: int = 0) -> Found:
        """A barrier to which some threads from the `first` on come, and others do not."""
        yes, no = first + int(np.argmax(comes)), first + int(np.argmin(comes))
        who = (self.span.person(yes, self.tile), self.span.person(no, self.tile))
        return Found(Wrong(_DIVERGENT, f"thread {yes} comes to it, thread {no} does not", (statement,), who))

    # What lanes do together

    def meeting(self, item: WarpMeeting, fixed: dict[Axis, int], conditions: tuple[Expr, ...]) -> None:
        """Of each warp that comes, in each turn of loops around, just the lanes that the mask names must come."""
        if item.mask is None:
            # That lanes stay together which are active together is assumed; the certificate says how often.
            return
        parts = conjuncts((*conditions, *item.conditions))
        used = frozenset().union(*(c.axes for c in parts))
        key = (id(item), *((id(a), v) for a, v in fixed.items() if a in used))
        if key in self.met:
            return
        self.met.add(key)
        free = used - {self.part.function.tile, self.part.function.thread} - fixed.keys()
        comes = self.comes(parts, fixed, sorted(free, key=lambda axis: axis.name), "what lanes do together")
        strayed = partial_warp(self.value(item.mask, fixed, ()), comes)
        if strayed is None:
            return
        thread, other = strayed
        why = f"thread {thread} comes to it, thread {other}, which its mask names, does not"
        if other is None:
            why = f"thread {thread} comes to it, which its mask leaves out"
        who = tuple(self.span.person(one, self.tile) for one in strayed if one is not None)
        raise Found(Wrong("divergent shuffle", why, (item.statement,), who))

    def comes(self, conditions: Sequence[Expr], fixed: dict[Axis, int], free: Sequence[Axis], what: str) -> np.ndarray:
        """Which threads meet conditions, for all values of free axes."""
        function = self.part.function
        if any(c.opaque or c.by_data for c in conditions):
            raise Undecided(f"{what} under a condition on data")
        if self.tile is None:
            if any({function.tile, function.thread} <= c.axes for c in conditions):
                raise NeedsTile
            conditions = [c for c in conditions if function.tile not in c.axes]
        shape = (function.thread.extent, *(axis.extent for axis in free))
        if int(np.prod(shape, dtype=np.int64)) > MOST_POINTS:
            raise Undecided(f"{int(np.prod(shape, dtype=np.int64))} points of {what}")
        return np.broadcast_to(holding(conditions, self.box(fixed, free), {}), shape)

    # Accesses

    def value(self, expr: Expr, fixed: dict[Axis, int], free: tuple[Axis, ...]) -> np.ndarray:
        return evaluate(expr, self.box(fixed, free), {})

    def box(self, fixed: dict[Axis, int], free: Sequence[Axis]) -> dict[Axis, np.ndarray]:
        rank = 1 + len(free)
        thread = self.part.function.thread
        env: dict[Axis, np.ndarray] = {a: np.int64(v) for a, v in fixed.items()}
        env[thread] = np.arange(thread.extent, dtype=np.int64).reshape([-1] + [1] * len(free))
        for i, axis in enumerate(free):
            env[axis] = np.arange(axis.extent, dtype=np.int64).reshape([-1 if k == i + 1 else 1 for k in range(rank)])
        if self.tile is not None:
            env[self.part.function.tile] = np.int64(self.tile)
        return env

    def access(
        self, access: MemoryAccess, fixed: dict[Axis, int], free: tuple[Axis, ...], conditions: tuple[Expr, ...]
    ) -> None:
        if access.place.memory not in self.names:
            return
        parts = conjuncts((*conditions, *access.conditions))
        offset, function = access.place.offset, self.part.function
        used = set(offset.axes).union(*(c.axes for c in parts))
        key = (id(access), *((id(a), v) for a, v in fixed.items() if a in used))
        if key in self.seen and access.by != "copy":
            return
        self.seen.add(key)
        if key not in self.sets:
            known = [c for c in parts if not c.opaque]
            if self.tile is None:
                if function.tile in offset.axes:
                    raise NeedsTile
                known = [c for c in known if function.tile not in c.axes]
            if offset.opaque:
                raise Undecided(f"an address in {access.place.memory.name} that depends on data")
            self.sets[key] = self.touched(access, offset, known, parts, fixed, free)
        found = self.sets[key]
        if found is not None:
            self.overlaid(access)
            self.span.record(found)
            if access.by == "copy":
                self.span.issue(found)

    def overlaid(self, access: MemoryAccess) -> None:
        """The compiler may lay static arrays of different functions over each other."""
        memory, mine = access.place.memory, self.part.function.name
        if memory.kind != "shared" or memory.pool:
            return
        for (epoch, other), writes in self.static.items():
            if epoch == self.span.epochs and other != mine and (writes or access.writes):
                raise Undecided(f"static shared memory of {other} and {mine} may be the same")
        key = (self.span.epochs, mine)
        self.static[key] = self.static.get(key, False) or access.writes

    def touched(
        self,
        access: MemoryAccess,
        offset: Expr,
        known: list[Expr],
        parts: Sequence[Expr],
        fixed: dict[Axis, int],
        free: tuple[Axis, ...],
    ) -> Touched | None:
        function = self.part.function
        used = set(offset.axes).union(*(c.axes for c in known)) - {function.tile, function.thread} - fixed.keys()
        turns = [a for a in free if a in used]
        inner = sorted(used - set(turns), key=lambda a: a.name)
        axes = [*turns, *inner]
        env = self.box(fixed, axes)
        shape = (function.thread.extent, *(a.extent for a in axes))
        if int(np.prod(shape, dtype=np.int64)) > MOST_POINTS:
            raise Undecided(f"{int(np.prod(shape, dtype=np.int64))} points of one access between two barriers")
        memo: dict[Expr, np.ndarray] = {}
        mask = holding(known, env, memo)
        if not mask.any():
            return None
        value = np.broadcast_to(evaluate(offset, env, memo), shape)
        mask = np.broadcast_to(mask, shape)
        thread = np.broadcast_to(env[function.thread], shape)
        warp = thread // WARP
        if access.by == "warp":
            instance = np.arange(int(np.prod([a.extent for a in turns], dtype=np.int64)), dtype=np.int64)
            instance = instance.reshape([1, *(a.extent for a in turns), *(1 for _ in inner)])
            actor = (
                self.threads + (self.instances + np.broadcast_to(instance, shape)) * (self.threads // WARP + 1) + warp
            )
            self.instances += int(instance.size)
            if int(actor.max()) >= WARP_CODE:
                raise Undecided("more instructions of warps between two barriers than are told apart")
        else:
            actor = thread + (COPY_CODE if access.by == "copy" else 0)
        name, base = self.names[access.place.memory]
        state = self.span.states.get(name)
        value = value[mask] + base
        if state is None:
            state = self.span.states[name] = State.of(name, int(value.max()) + access.width, 1, shared=False)
        elif int(value.max()) + access.width > state.writer.size * state.unit:
            if access.place.memory.kind == "shared":
                raise Undecided(f"an address beyond the {access.place.memory.name}")
            state.enlarge(int(value.max()) + access.width)
        if int(value.min()) < 0:
            raise Undecided(f"an address before the {access.place.memory.name}")
        count = -(-access.width // state.unit)
        at = (value[:, None] // state.unit + np.arange(count)).reshape(-1)
        actor = np.repeat(actor[mask], count)
        warp = np.repeat(warp[mask], count)
        copies = access.by == "copy" and access.writes
        _, pairs, *times = np.unique(at * (1 << 31) + actor, return_index=True, return_counts=copies)
        again = (times[0] > 1) | any(a.extent > 1 for a in free if a not in used) if copies else None
        who = (actor[pairs].astype(np.int32), warp[pairs].astype(np.int32))
        perhaps = any(condition.opaque for condition in parts)
        by_data = perhaps or offset.by_data
        certain = len(known) == len(parts) and not by_data
        perhaps = perhaps or (offset.by_data and access.writes)
        return Touched(access, self.tile, certain, by_data, perhaps, state, at[pairs], *who, again)


def walked(parts: Sequence[FunctionInSpan], tiles: Sequence[int | None]) -> Walk:
    """A walk on which nothing is wrong, whichever way data decides where it decides for all threads of a tile alike.

    Raises as :class:`Walk` does. Undecided where something is wrong on some ways only, which data may never choose; but
    a condition that is the only one may hold whenever it is asked, or not.
    """
    ways: list[tuple[bool, ...]] = [()]
    found: list[tuple[Walk, Found]] = []
    for count in range(_MOST_WAYS):
        way = ways.pop()
        walk = Walk(parts, tiles, way)
        try:
            walk.run()
        except Found as what:
            found.append((walk, what))
        ways += [(*walk.way[:i], False) for i in range(len(way), len(walk.way))]
        if ways:
            continue
        if not found:
            return walk
        always = next((what for one, what in found if len(one.asked) <= 1 and len(set(one.way)) <= 1), None)
        if len(found) == count + 1:
            raise found[0][1]
        if always is not None:
            raise Found(replace(always.what, reason=f"{always.what.reason}, if data decides so"))
        raise Undecided("threads conflict, or come apart, if data decides so at barriers under a condition on it")
    raise Undecided(f"more than {_MOST_WAYS} ways past barriers under conditions on data")


def _grain(access: MemoryAccess, grain: int) -> int:
    """Bytes that never are touched in part: what divides all widths and all addresses."""
    terms, total = linear_terms(access.place.offset)
    return gcd(grain, access.width, total, *terms.values())
