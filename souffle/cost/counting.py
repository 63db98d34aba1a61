"""Counting what one tile of a lowered stage takes: warps, sectors of global memory, banks of shared memory, waits.

The counter knows the loops and conditions around the present statement, for all threads of a few tiles that are spread
over the grid (see :mod:`souffle.index.arrays`). What its methods add to is one :class:`Work`.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from souffle.index.arrays import Shape, Value, joined_shape

__all__ = [
    "BANK_BYTES",
    "INSTRUCTION_BYTES",
    "SECTOR",
    "WARP",
    "WIDEST",
    "Counter",
    "Executions",
    "Surrounding",
    "Work",
]

WARP = 32

INSTRUCTION_BYTES = 16
"""Of machine code, on sm_70 and later."""

SECTOR = 32
"""Bytes that the L2 cache hands out at a time."""

_LINE = 128
"""Bytes of a line of the L1 cache, whose tags are looked up one line at a time."""

_COPY_PASSES = 2
"""Clocks of an asynchronous copy on the path to shared memory for each line: an H100 takes 20.7 for a warp's copies of
16 bytes each that it writes in 10.5 turns."""

_BANKS, BANK_BYTES = 32, 4

WIDEST = 16
"""Bytes that one thread loads or stores at once at most."""

_SAMPLED_TILES = 5
"""Spread evenly: those at an edge, which often have less to do, are as likely as they are frequent."""

_MOST_POINTS = 1 << 20
"""Loop turns, tiles and threads that one access is worked out for; beyond, a loop's first turns stand for all."""

_PREDICATED = 12
"""Instructions under a condition that nvcc predicates one by one, so that loads of several conditions are issued
together; of more it makes a branch. In texts of whole networks up to 11.3 as counted are predicated, from 15 on not."""

_ADDRESS = 1
"""Instructions that make an address of an index (a wide multiply-add)."""


@dataclass(frozen=True)
class Work:
    """What one tile takes, on average over the grid.

    Attributes
    ----------
    warp_instructions : float
        Issued by the schedulers.
    fp32, int32, special : float
        Instructions of threads, idle threads of a working warp counted; fp16 arithmetic counts as fp32.
    tensor_fma, tf32_fma : float
        Multiply-adds on tensor cores, of fp16 and of TF32.
    shared_bytes : float
        That shared memory and the L1 cache pass, in transactions of 128: bank conflicts and scattered accesses make
        more of them, and what a load gives each thread passes for each, also where threads read one place.
    requested_bytes : float
        Of global memory, in sectors, by all loads: what the L1 cache is asked for.
    distinct_bytes : float
        As many, each sector once: what the L2 cache is asked for at least.
    common_bytes : float
        The part of the distinct bytes that the tiles of the grid have in common, such as a convolution's kernel.
    written_bytes : float
        Of global memory, in sectors.
    barriers : float
        Of the block.
    global_waits, prefetched_waits, shared_waits, arithmetic_waits : float
        Latencies that follow one another in a thread: of loads from global memory, of those that only fill registers
        for the next step and pass while this one is worked on, of loads from shared memory, and of additions that wait
        for the last.
    code_bytes : float
        Of the machine code, which is the same for all tiles: each instruction once for each turn of the loops that are
        unrolled around it.
    """

    warp_instructions: float = 0.0
    fp32: float = 0.0
    int32: float = 0.0
    special: float = 0.0
    tensor_fma: float = 0.0
    tf32_fma: float = 0.0
    shared_bytes: float = 0.0
    requested_bytes: float = 0.0
    distinct_bytes: float = 0.0
    common_bytes: float = 0.0
    written_bytes: float = 0.0
    barriers: float = 0.0
    global_waits: float = 0.0
    prefetched_waits: float = 0.0
    shared_waits: float = 0.0
    arithmetic_waits: float = 0.0
    code_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))


@dataclass(frozen=True)
class Executions:
    """How often a tile's warps execute something, and how often it stands in the machine code."""

    warps: float
    copies: float

    def __mul__(self, factor: float) -> Executions:
        return Executions(self.warps * factor, self.copies * factor)


@dataclass(frozen=True)
class Surrounding:
    """A loop around the present statement, whether the compiler unrolls it, and else how often its body is written."""

    turns: int
    unrolled: bool
    written: int = 1


class Counter:
    """Adds up the work of one tile.

    Parameters
    ----------
    tiles : ndarray
        The tiles that are looked at; the result is their mean.
    threads : int
        Of a block.
    """

    def __init__(self, tiles: np.ndarray, threads: int) -> None:
        self.samples, self.threads = len(tiles), threads
        self.warps = -(-threads // WARP)
        self.tile = Value.of(tiles.reshape(-1, 1), "tile")
        self.thread = Value.of(np.arange(threads), "thread")
        self.loops: list[Surrounding] = []
        self.mask: np.ndarray | None = None
        self.total: dict[str, float] = {field.name: 0.0 for field in fields(Work)}
        self.touched: dict[str, list[tuple[np.ndarray, float]]] = {}
        self.turns = 1.0
        self.held: set[object] = set()
        self.waiting = {"global_waits": False, "prefetched_waits": False, "shared_waits": False}

    def work(self) -> Work:
        """What was counted."""
        self.settle()
        each, joint = (
            sum(self._distinct(parts, joint=joint) for parts in self.touched.values()) for joint in (False, True)
        )
        distinct = min(each, self.total["requested_bytes"])
        # Of n tiles' own parts and one common part: what they touch together is n x own + common.
        common = (self.samples * each - joint) / (self.samples - 1) if self.samples > 1 else 0.0
        return Work(**{**self.total, "distinct_bytes": distinct, "common_bytes": min(max(common, 0.0), distinct)})

    @contextlib.contextmanager
    def where(self, condition: Value, *, negated: bool = False) -> Iterator[None]:
        """What is executed where a condition holds. One on data may hold or not: both of its sides are counted."""
        outer, before = self.mask, set(self.held)
        if condition.array is not None:
            held = np.logical_not(condition.array) if negated else condition.array.astype(bool)
            self.mask = held if outer is None else np.logical_and(outer, held)
        yield
        self.mask = outer
        self.held &= before

    def scattered_access(self, buffer: str, *, store: bool) -> None:
        """An access to global memory whose address depends on data: every thread touches a sector of its own."""
        executions = self.executions((), all_loops=True)
        self.count("int32", executions, _ADDRESS)
        self.count("", executions)
        threads = executions.warps * WARP
        self.total["shared_bytes"] += threads * _LINE
        self.total["written_bytes" if store else "requested_bytes"] += threads * SECTOR
        if not store:
            one_of_each = np.arange(self.samples) * (self.samples + 1)
            self.touched.setdefault(buffer, []).append((one_of_each, threads))

    def shared_access(
        self, places: np.ndarray | None, unit: int, width: int, each: int, word: object | None = None
    ) -> None:
        """A load or store of shared memory.

        Parameters
        ----------
        places : ndarray or None
            The index, if it is known.
        unit, width : int
            Bytes of an element of the buffer, and of what one thread touches at once.
        each : int
            How many such accesses one thread makes.
        word : object, optional
            What a load reads, where nothing is stored to it in the unrolled loops around: loads of equal words are one,
            whose registers last until threads meet or a loop begins or ends.
        """
        if word is not None and word in self.held:
            return
        if word is None or places is None:
            executions = self.executions((), all_loops=True)
        else:
            self.held.add(word)
            executions = self.executions(self._shape_in_registers(places.shape))
        places, merged = self._merged(places, width)
        executions *= 1 / merged
        self.count("", executions, each)
        self.total["shared_bytes"] += executions.warps * each * self._bank_bytes(places, unit, width * merged)

    def _distinct(self, parts: list[tuple[np.ndarray, float]], *, joint: bool) -> float:
        """Bytes of the sectors of one tensor that a tile reads, or all looked at together, each once.

        Parts cut short do not overlap others.
        """
        whole = [part for part, scale in parts if scale == 1.0]
        cut = [(part, scale) for part, scale in parts if scale != 1.0]
        if joint:
            whole, cut = [part // self.samples for part in whole], [(part // self.samples, s) for part, s in cut]
        sectors = float(len(_each_once(np.concatenate(whole)))) if whole else 0.0
        sectors += sum(len(_each_once(part)) * scale for part, scale in cut)
        return sectors * SECTOR / (1 if joint else self.samples)

    def executions(self, shape: Shape, *, all_loops: bool = False, unrolled: bool = True) -> Executions:
        """How often warps execute something of this shape for one tile, those without a thread at work left out."""
        mask = self.mask
        if mask is not None:
            shape = joined_shape(shape, mask.shape)
        share = 1.0 if mask is None else self._active(mask)
        count, copies = 1.0, 1.0
        for depth, one in enumerate(self.loops):
            axis = len(shape) - 3 - depth
            if all_loops or (axis >= 0 and shape[axis] > 1):
                count *= 1.0 if one.unrolled and not unrolled else one.turns
                copies *= (one.turns if unrolled else 1) if one.unrolled else one.written
        return Executions(count * self.warps * share, copies)

    def _unrolled(self) -> list[int]:
        """The innermost loops that are unrolled together, the innermost first, by their depths."""
        depths = range(len(self.loops) - 1, -1, -1)
        return list(itertools.takewhile(lambda depth: self.loops[depth].unrolled, depths))

    def _shape_in_registers(self, shape: Shape) -> Shape:
        """As executed whose result stays in registers: in all loops, but once for the turns of the innermost unrolled
        ones that it does not vary along."""
        unrolled, turns = self._unrolled(), []
        for depth, loop in enumerate(self.loops):
            axis = len(shape) - 3 - depth
            varies = axis >= 0 and shape[axis] > 1
            turns.append(loop.turns if varies or depth not in unrolled else 1)
        return (*reversed(turns), 1, self.threads)

    def _active(self, mask: np.ndarray) -> float:
        """The part of warps that has a thread for which a condition holds."""
        lanes = np.broadcast_to(mask, joined_shape(mask.shape, (self.samples, self.threads)))
        return float(self._by_warp(lanes, False).any(axis=-1).mean())

    def _by_warp(self, array: np.ndarray, filler: int | bool) -> np.ndarray:
        missing = self.warps * WARP - self.threads
        if missing:
            pad = np.full((*array.shape[:-1], missing), filler, array.dtype)
            array = np.concatenate([array, pad], axis=-1)
        return array.reshape(*array.shape[:-1], self.warps, WARP)

    def count(self, unit: str, executions: Executions, instructions: float = 1.0) -> None:
        self.total["warp_instructions"] += executions.warps * instructions
        self.total["code_bytes"] += executions.copies * instructions * INSTRUCTION_BYTES
        if unit:
            self.total[unit] += executions.warps * instructions * WARP

    def full_shape(self) -> Shape:
        return (*(loop.turns for loop in reversed(self.loops)), self.samples, self.threads)

    def settle(self) -> None:
        """Loads issued since the last barrier or loop arrive, and registers give up what they hold of shared memory."""
        self.held.clear()
        for kind, waits in self.waiting.items():
            if waits:
                self.total[kind] += self.turns
                self.waiting[kind] = False

    def branched(self, condition: Value, code_bytes: float, waiting: bool) -> None:
        """Results were written under a condition: if that is a branch, its loads arrive before the next one begins.

        Parameters
        ----------
        condition : Value
            It is evaluated for each of the unrolled turns in which it differs.
        code_bytes, waiting
            The code before the condition, and whether loads were on their way. With those, its own are waited for.
        """
        copies = self.executions(condition.shape).copies
        instructions = (self.total["code_bytes"] - code_bytes) / INSTRUCTION_BYTES / copies
        if self.waiting["global_waits"] and not waiting and instructions > _PREDICATED:
            # The last is waited for with whatever follows.
            self.total["global_waits"] += self.turns * (copies - 1)

    def global_access(
        self, buffer: str, places: np.ndarray, unit: int, *, store: bool, fixed: bool, width: int = 0
    ) -> None:
        """A load, store or copy of global memory whose address is known.

        Parameters
        ----------
        buffer : str
        places : ndarray
            The first element that a thread touches.
        unit : int
            Bytes of an element.
        store : bool
        fixed : bool
            Whether the stage leaves the tensor as it is, so that what is asked for once is not asked for again.
        width : int
            Bytes of a thread's registers that pass; 0 for a copy, which passes none.
        """
        executions = self.executions(places.shape, all_loops=not fixed)
        self.count("", executions)
        if places.ndim and places.shape[-1] > 1:
            self.count("int32", self.executions(places.shape, unrolled=False), _ADDRESS)
        sampled, grid, held = self._sampled(places)
        first = np.broadcast_to(_short(sampled * unit), grid)
        if held is not None:
            first = np.where(held, first, -SECTOR * _LINE)
        # Loops that the index varies along are worked out, but for those cut short.
        cut, repeats = 1.0, 1.0
        for depth, loop in enumerate(self.loops):
            axis = len(grid) - 3 - depth
            if axis >= 0 and grid[axis] > 1:
                cut *= loop.turns / grid[axis]
            elif not fixed:
                repeats *= loop.turns
        by_warp = self._by_warp(first, -SECTOR * _LINE)
        sectors, counts = _distinct(by_warp // SECTOR)
        _, lines = _distinct(by_warp // _LINE)
        each = cut * repeats / self.samples
        given = np.where(counts > 0, -(-width * WARP // _LINE), 0)
        passes = np.maximum(np.maximum(lines, -(-counts * SECTOR // _LINE)), given)
        self.total["shared_bytes"] += float(passes.sum()) * each * _LINE * (1 if width else _COPY_PASSES)
        # What warps ask for in one turn of the loops that stay loops is asked for together, and comes once.
        together = [len(grid) - 3 - depth for depth, loop in enumerate(self.loops) if loop.unrolled]
        together = [axis for axis in together if axis >= 0]
        apart = [axis for axis in range(len(grid) - 1) if axis not in together]
        asked = sectors.transpose(*apart, *together, -2, -1).reshape(*(grid[axis] for axis in apart), -1)
        fetched, counts = _distinct(asked)
        moved = float(counts.sum()) * each * SECTOR
        if store:
            self.total["written_bytes"] += moved
            return
        self.total["requested_bytes"] += moved
        places = fetched * self.samples + np.arange(self.samples).reshape(-1, 1)
        self.touched.setdefault(buffer, []).append((_each_once(places[fetched >= 0]), cut))

    def _sampled(self, places: np.ndarray) -> tuple[np.ndarray, Shape, np.ndarray | None]:
        """An index with its condition and their joint shape, their longest loops cut short if there is too much."""
        held = self.mask
        grid = joined_shape(places.shape, (self.samples, self.threads), () if held is None else held.shape)
        while np.prod(grid) > _MOST_POINTS and max(grid[:-2], default=1) > 2:
            axis = int(np.argmax(grid[:-2]))
            kept = max(2, min(grid[axis] - 1, int(grid[axis] * _MOST_POINTS / np.prod(grid))))
            places = _prefix(places, axis - len(grid), kept)
            held = None if held is None else _prefix(held, axis - len(grid), kept)
            grid = (*grid[:axis], kept, *grid[axis + 1 :])
        return places, grid, held

    def _merged(self, places: np.ndarray | None, width: int) -> tuple[np.ndarray | None, int]:
        """How many neighbours that unrolled loops touch become one access, and the place of the first.

        nvcc joins accesses to shared memory, whose alignment it knows; not those to global memory, of which it knows
        the type alone.
        """
        if places is None or width >= WIDEST:
            return places, 1
        for depth in self._unrolled():
            axis = places.ndim - 3 - depth
            if axis < 0 or places.shape[axis] == 1:
                continue
            along = np.moveaxis(places, axis, 0)
            merged = _neighbours(along, WIDEST // width)
            if merged > 1:
                return np.moveaxis(along[::merged], 0, axis), merged
        return places, 1

    def _bank_bytes(self, places: np.ndarray | None, unit: int, width: int) -> float:
        """Bytes of the data path that one warp's access to shared memory takes, conflicts included.

        Threads that read one place read it together from the banks, but each of them is given it: what passes is never
        less than all that a warp's registers take.
        """
        given = float(WARP * width)
        if places is None:
            return given
        one = places[(0,) * (places.ndim - 2)] if places.ndim >= 2 else places
        row = np.broadcast_to(one, (self.samples, self.threads))[0] * unit
        warps = self._by_warp(row, -1)
        transactions = 0
        span = range(max(1, width // BANK_BYTES))
        for warp in warps.tolist():
            # Of so few numbers a set is built faster than NumPy begins to sort.
            words = {place // BANK_BYTES + one for place in warp if place >= 0 for one in span}
            transactions += max(collections.Counter(word % _BANKS for word in words).values(), default=0)
        return max(given, transactions * _LINE / len(warps))


def _short(places: np.ndarray) -> np.ndarray:
    """Places in 32 bits if these hold them, which NumPy orders in half the time."""
    short = places.size > 0 and places.min() >= -(2**31) and places.max() < 2**31
    return places.astype(np.int32) if short else places


def _neighbours(places: np.ndarray, most: int) -> int:
    """How many places along the first axis follow each other from an aligned one, a power of two up to a limit."""
    turns = places.shape[0]
    count = 1 << (min(turns, most).bit_length() - 1)
    while count > 1 and (
        turns % count or bool((places[0] % count).any()) or bool((np.diff(places[:count], axis=0) != 1).any())
    ):
        count //= 2
    return count


def _each_once(places: np.ndarray) -> np.ndarray:
    """Places in order, each once: as ``np.unique``, which hashes integers and takes forty times as long for many."""
    ordered = np.sort(places, axis=None)
    first = np.ones(ordered.shape, bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def _distinct(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places along the last axis in order, negative and repeated ones as -1, and how many are left."""
    ordered = np.sort(places, axis=-1)
    first = np.ones(ordered.shape, bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    kept = np.where(first & (ordered >= 0), ordered, -1)
    return kept, (kept >= 0).sum(axis=-1)


def _prefix(array: np.ndarray, axis: int, kept: int) -> np.ndarray:
    """The first elements along an axis counted from the end, if the array varies along it."""
    if array.ndim < -axis or array.shape[axis] == 1:
        return array
    return array.take(np.arange(kept), axis=axis)
