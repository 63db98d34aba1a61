"""Races and divergent barriers within one block, by running all its threads at once over the accesses only.

Between two block barriers the accesses of different threads come in any order, so that what matters is who touches
which bytes in that span, not when. Loops without a barrier in them are taken as a whole; the others turn by turn.
Conditions on the tile are taken to hold; only if that makes a conflict are the tiles looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from souffle.verify.accesses import (
    Access,
    Branch,
    Function,
    Item,
    Loop,
    Memory,
    Shuffle,
    Transfer,
    Wait,
    all_of,
    orders,
    waits_of,
)
from souffle.verify.expressions import Axis, Expr, Undecided, conjuncts, evaluate, linear_terms, operation
from souffle.verify.ranges import representatives
from souffle.verify.spans import (
    COPY_CODE,
    WARP,
    WARP_CODE,
    Clash,
    Divergence,
    Found,
    Miscount,
    NeedsTile,
    PartialWarp,
    Span,
    State,
    Touched,
    Unwritten,
    partial_warp,
)

__all__ = ["BlockReport", "Part", "check_block"]

_MOST_TURNS = 1 << 13
_MOST_TILES = 512
_MOST_POINTS = 1 << 24
_NAMED_BARRIERS = 16
"""Of a block, on every GPU."""


@dataclass(frozen=True)
class BlockReport:
    """What was found in one block.

    Attributes
    ----------
    found : Clash, Divergence, Miscount, PartialWarp, Unwritten or None
    epochs : int
        Spans between barriers that were looked at.
    accesses : int
        Points of accesses that were compared.
    """

    found: Clash | Divergence | Miscount | PartialWarp | Unwritten | None
    epochs: int
    accesses: int


@dataclass(frozen=True, eq=False)
class Part:
    """A function of a sequence that a block runs, and whether a block barrier stands before it.

    Attributes
    ----------
    function : Function
    barrier : bool
    globals_ : tuple of (int, str, int)
        Pointer parameters that are looked at too: parameter, the name of the memory behind it, and the byte where it
        points to; none by default.
    """

    function: Function
    barrier: bool = False
    globals_: tuple[tuple[int, str, int], ...] = ()


def check_block(parts: Sequence[Part]) -> BlockReport:
    """Whether threads of one block that runs `parts` in turn, for one tile each, conflict.

    Raises
    ------
    Undecided
        If there are more tiles to look at one by one than is feasible, or an address depends on data.
    """
    whole = not any(part.globals_ for part in parts)
    undecided: Undecided | None = None
    if whole:
        walk = _Walk(parts, None)
        try:
            walk.run()
            return BlockReport(None, walk.span.epochs, walk.span.points)
        except (NeedsTile, Found):
            pass
        except Undecided as reason:
            undecided = reason
    tiles = _different_tiles(parts)
    if tiles.size > _MOST_TILES:
        raise undecided or Undecided(f"{tiles.size} tiles whose threads differ in what they do")
    epochs = points = 0
    for tile in tiles:
        walk = _Walk(parts, int(tile))
        try:
            walk.run()
        except Found as found:
            return BlockReport(found.what, epochs + walk.span.epochs, points + walk.span.points)
        epochs, points = epochs + walk.span.epochs, points + walk.span.points
    return BlockReport(None, epochs, points)


def _different_tiles(parts: Sequence[Part]) -> np.ndarray:
    """One tile of each kind: tiles between which nothing that is looked at differs are one kind."""
    if len({p.function.tile for p in parts}) > 1:
        # Which tiles of two functions meet in a block depends on the grid; equal ones do in each.
        return np.arange(min(p.function.tile.extent for p in parts))
    function = parts[0].function
    wanted = {parameter for part in parts for parameter, _, _ in part.globals_}
    nodes: list[Expr] = []
    _collect(function.body, wanted, nodes)
    # Conditions on data are taken to hold in every tile.
    return representatives(function.tile, [node for node in nodes if not node.opaque])


def _collect(items: Sequence[Item], wanted: set[int], nodes: list[Expr]) -> None:
    for item in items:
        if isinstance(item, Access):
            memory = item.place.memory
            if memory.kind == "shared" or memory.parameter in wanted:
                nodes += [item.place.offset, *item.conditions]
        elif isinstance(item, Shuffle):
            nodes += item.conditions
        elif isinstance(item, Loop):
            _collect(item.body, wanted, nodes)
        elif isinstance(item, Branch):
            nodes.append(item.condition)
            _collect(item.then, wanted, nodes)
            _collect(item.otherwise, wanted, nodes)


class _Walk:
    def __init__(self, parts: Sequence[Part], tile: int | None) -> None:
        self.parts = parts
        self.tile = tile
        self.instances = 0
        self.seen: set[tuple] = set()
        self.sets: dict[tuple, Touched | None] = {}
        self.part = parts[0]
        self.names: dict[Memory, tuple[str, int]] = {}
        self.names_of: list[dict[Memory, tuple[str, int]]] = []
        self.threads = max(p.function.thread.extent for p in parts)
        self.span = Span(self.threads, tile)
        self._allocate()

    def _allocate(self) -> None:
        sizes: dict[str, int] = {}
        units: dict[str, int] = {}
        for number, part in enumerate(self.parts):
            # A function that runs twice may be given other pointers each time.
            names: dict[Memory, tuple[str, int]] = {}
            self.names_of.append(names)
            for access in all_of(part.function.body, Access):
                memory = access.place.memory
                if memory.kind == "shared":
                    # All functions use one pool; other shared arrays are a function's own.
                    name = memory.name if memory.name == "pool" else f"{memory.name} of part {number}"
                    names[memory] = (name, 0)
                    sizes[name] = max(sizes.get(name, 0), memory.nbytes)
                    units[name] = _grain(access, units.get(name, 0))
            for parameter, name, base in part.globals_:
                names[part.function.pointers[parameter]] = (name, base)
        for name, nbytes in sizes.items():
            self.span.states[name] = State.of(name, nbytes, max(1, units[name]), shared=True)

    def run(self) -> None:
        for part, names in zip(self.parts, self.names_of, strict=True):
            self.part, self.names = part, names
            self.sets.clear()
            self.seen.clear()
            if part.barrier:
                self.span.barrier()
            self.span.forget()
            self.env: dict[Axis, np.ndarray] = {}
            self.items(part.function.body, {}, (), ())
        if any(copies for copies in (self.span.open, *self.span.groups)):
            raise Undecided("copies that are under way when a stage ends")

    # Control

    def items(
        self, items: Sequence[Item], fixed: dict[Axis, int], free: tuple[Axis, ...], conditions: tuple[Expr, ...]
    ) -> None:
        for item in items:
            if isinstance(item, Access):
                self.access(item, fixed, free, conditions)
            elif isinstance(item, Wait):
                # Not under `conditions`: branches around barriers have been decided for all threads at once.
                self.wait(item)
            elif isinstance(item, Transfer):
                self.span.transfer(item.pending)
            elif isinstance(item, Shuffle):
                self.shuffle(item, fixed, conditions)
            elif isinstance(item, Loop):
                self.loop(item, fixed, free, conditions)
            elif orders((item,)):
                self.ordered_branch(item, fixed, free, conditions)
            else:
                self.items(item.then, fixed, free, (*conditions, item.condition))
                if item.otherwise:
                    self.items(item.otherwise, fixed, free, (*conditions, _not(item.condition)))

    def loop(self, item: Loop, fixed: dict[Axis, int], free: tuple[Axis, ...], conditions: tuple[Expr, ...]) -> None:
        if not orders(item.body):
            self.items(item.body, fixed, (*free, item.axis), conditions)
            return
        turns = item.axis.extent
        if not self.depends(item.body, item.axis) and not all_of(item.body, Transfer):
            # All turns are equal: what meets in two of them meets in any two neighbours.
            turns = min(turns, 2)
        if turns > _MOST_TURNS:
            raise Undecided(f"a loop of {turns} turns with barriers in it")
        for turn in range(turns):
            self.items(item.body, {**fixed, item.axis: turn}, free, conditions)

    def ordered_branch(
        self, item: Branch, fixed: dict[Axis, int], free: tuple[Axis, ...], conditions: tuple[Expr, ...]
    ) -> None:
        condition = item.condition
        if condition.opaque:
            raise Undecided(f"a barrier under a condition on data: {condition}")
        if self.tile is None and self.part.function.tile in condition.axes:
            raise NeedsTile
        if self.part.function.thread in condition.axes:
            holds = self.value(condition, fixed, ()) != 0
            if holds.any() and not holds.all():
                inside = (*item.then, *item.otherwise)
                self.some_warps(item, holds.reshape(-1))
                only_warp = not waits_of(inside) and not all_of(inside, Transfer)
                rows = holds.reshape(-1)
                if only_warp and rows.size % WARP == 0:
                    rows = rows.reshape(-1, WARP)
                    if (rows.all(axis=1) | ~rows.any(axis=1)).all():
                        raise Undecided("a barrier of a warp that only some warps reach")
                self.diverges(item.statement, holds.reshape(-1))
            holds = bool(holds.all())
        else:
            holds = bool(np.asarray(self.value(condition, fixed, ())).reshape(-1)[0])
        self.items(item.then if holds else item.otherwise, fixed, free, conditions)

    def some_warps(self, item: Branch, holds: np.ndarray) -> None:
        """Named barriers that are made for just the threads that come to them are none of the forms that are proven."""
        inside = (*item.then, *item.otherwise)
        waits = [w for w in all_of(inside, Wait) if w.scope != "warp"]
        mine, others = int(np.count_nonzero(holds)), int(np.count_nonzero(~holds))
        fits = all(w.scope == "part" and w.number for w in waits)
        fits = fits and all(w.count == mine for w in all_of(item.then, Wait) if w.scope == "part")
        fits = fits and all(w.count == others for w in all_of(item.otherwise, Wait) if w.scope == "part")
        if holds.size % WARP:
            return
        warps = holds.reshape(-1, WARP)
        if waits and fits and (warps.all(axis=1) | ~warps.any(axis=1)).all():
            raise Undecided("a barrier of some warps of a stage")

    def diverges(self, statement: object, holds: np.ndarray) -> None:
        yes, no = int(np.flatnonzero(holds)[0]), int(np.flatnonzero(~holds)[0])
        raise Found(Divergence(statement, (yes, no), self.tile))

    def depends(self, items: Sequence[Item], axis: Axis) -> bool:
        """Whether what is looked at depends on an axis."""
        for item in items:
            if isinstance(item, Access):
                nodes = (item.place.offset, *item.conditions)
                if item.place.memory in self.names and any(axis in n.axes for n in nodes):
                    return True
            elif isinstance(item, Shuffle):
                if any(axis in condition.axes for condition in item.conditions):
                    return True
            elif isinstance(item, Loop):
                if self.depends(item.body, axis):
                    return True
            elif isinstance(item, Branch):
                inside = (*item.then, *item.otherwise)
                matters = orders(inside) or any(a.place.memory in self.names for a in all_of(inside, Access))
                matters = matters or bool(all_of(inside, Shuffle))
                if matters and (axis in item.condition.axes or self.depends(inside, axis)):
                    return True
        return False

    # Waiting

    def wait(self, item: Wait) -> None:
        if item.scope == "grid":
            raise Undecided("a grid barrier inside of a stage")
        self.seen.clear()
        if item.scope == "warp":
            self.span.warp_barrier()
        elif item.scope == "part":
            # The count is in whole warps, and a warp that comes counts as a whole.
            threads = self.part.function.thread.extent
            if item.count != threads or item.count % WARP or not 0 <= item.number < _NAMED_BARRIERS:
                raise Found(Miscount(item.statement, item.number, item.count, threads))
            self.span.part_barrier(item.count)
        else:
            self.span.barrier()

    # Shuffles

    def shuffle(self, item: Shuffle, fixed: dict[Axis, int], conditions: tuple[Expr, ...]) -> None:
        """Of each warp that comes, in each turn of loops around, just the lanes that the mask names must come."""
        if item.mask is None:
            # That lanes stay together which are active together is assumed; the certificate says how often.
            return
        function = self.part.function
        parts = conjuncts((*conditions, *item.conditions))
        if any(c.opaque or c.by_data for c in parts):
            raise Undecided("a shuffle of named lanes under a condition on data")
        if self.tile is None:
            if any({function.tile, function.thread} <= c.axes for c in parts):
                raise NeedsTile
            parts = tuple(c for c in parts if function.tile not in c.axes)
        used = frozenset().union(*(c.axes for c in parts)) - {function.tile, function.thread} - fixed.keys()
        free = sorted(used, key=lambda axis: axis.name)
        shape = (function.thread.extent, *(axis.extent for axis in free))
        if int(np.prod(shape, dtype=np.int64)) > _MOST_POINTS:
            raise Undecided(f"{int(np.prod(shape, dtype=np.int64))} points of one shuffle")
        comes = np.ones(shape, bool)
        for condition in parts:
            comes = comes & (self.value(condition, fixed, tuple(free)) != 0)
        strayed = partial_warp(self.value(item.mask, fixed, ()), comes)
        if strayed is not None:
            raise Found(PartialWarp(item.statement, *strayed, self.tile))

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
        self, access: Access, fixed: dict[Axis, int], free: tuple[Axis, ...], conditions: tuple[Expr, ...]
    ) -> None:
        if access.place.memory not in self.names:
            return
        parts = conjuncts((*conditions, *access.conditions))
        offset, function = access.place.offset, self.part.function
        used = set(offset.axes).union(*(c.axes for c in parts))
        key = (id(access), *((id(a), v) for a, v in fixed.items() if a in used))
        if key in self.seen:
            return
        self.seen.add(key)
        if key not in self.sets:
            known = [c for c in parts if not c.opaque]
            if self.tile is None:
                if function.tile in offset.axes:
                    raise NeedsTile
                if access.by == "warp" and any({function.tile, function.thread} <= c.axes for c in known):
                    raise NeedsTile
                known = [c for c in known if function.tile not in c.axes]
            if offset.opaque:
                raise Undecided(f"an address in {access.place.memory.name} that depends on data")
            by_data = offset.by_data or any(c.opaque for c in parts)
            certain = len(known) == len(parts) and not by_data
            self.sets[key] = self.touched(access, offset, known, certain, by_data, fixed, free)
        found = self.sets[key]
        if found is not None:
            self.span.record(found)
            if access.by == "copy":
                self.span.open.append(found)

    def touched(
        self,
        access: Access,
        offset: Expr,
        known: list[Expr],
        certain: bool,
        by_data: bool,
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
        if int(np.prod(shape, dtype=np.int64)) > _MOST_POINTS:
            raise Undecided(f"{int(np.prod(shape, dtype=np.int64))} points of one access between two barriers")
        memo: dict[Expr, np.ndarray] = {}
        mask = np.ones((1,) * len(shape), bool)
        for condition in known:
            mask = mask & (evaluate(condition, env, memo) != 0)
        if not mask.any():
            return None
        value = np.broadcast_to(evaluate(offset, env, memo), shape)
        mask = np.broadcast_to(mask, shape)
        thread = np.broadcast_to(env[function.thread], shape)
        warp = thread // WARP
        if access.by == "warp":
            self.whole_warps(access, mask)
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
        pairs = np.unique(at * (1 << 31) + actor, return_index=True)[1]
        who = (actor[pairs].astype(np.int32), warp[pairs].astype(np.int32))
        return Touched(access, certain, by_data, state, at[pairs], *who)

    def whole_warps(self, access: Access, mask: np.ndarray) -> None:
        if mask.shape[0] % WARP:
            raise Undecided("an instruction of a warp in a block of broken warps")
        warps = mask.reshape(-1, WARP, *mask.shape[1:])
        broken = warps.any(axis=1) & ~warps.all(axis=1)
        if broken.any():
            where = np.argwhere(broken)[0]
            lanes = warps[(where[0], slice(None), *where[1:])]
            holds = np.zeros(mask.shape[0], bool)
            holds[where[0] * WARP : (where[0] + 1) * WARP] = lanes
            only = slice(where[0] * WARP, (where[0] + 1) * WARP)
            yes, no = np.flatnonzero(holds[only]), np.flatnonzero(~holds[only])
            first = int(where[0]) * WARP
            raise Found(Divergence(access.statement, (first + int(yes[0]), first + int(no[0])), self.tile))


def _grain(access: Access, grain: int) -> int:
    """Bytes that never are touched in part: what divides all widths and all addresses."""
    terms, total = linear_terms(access.place.offset)
    return gcd(grain, access.width, total, *terms.values())


def _not(condition: Expr) -> Expr:
    return operation("not", condition)
