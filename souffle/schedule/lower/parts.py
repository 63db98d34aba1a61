"""Parts of a block: some of its threads compute tiles of a stage as a block of so many would (001, HFuse, §III).

Teams of a block are all of one size, that of its kernel's stages. A *part* is any run of whole warps: in 001 the
threads of a block are divided in steps of 128, so that one of two stages may have 384 and the other 128; here in steps
of a warp, too, and among three. The stage is then scheduled for blocks of so many threads. What was a barrier of the
block becomes ``bar.sync id, count`` of a number that is the part's own, and its pool of shared memory begins where that
of the part before ends::

    if first <= tid && tid < first + count:
      part_tid = tid - first
      for it: tile = it * num_blocks + block
        stage(tile, part_tid, ...); bar.sync id, count

A block has one worker of each part. The parts of one division stand between two barriers of the whole block, for their
pools lie where other stages have theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import tvm
from tvm import tirx

from souffle.schedule.lower.device_function import DeviceFunction
from souffle.schedule.lower.fewer_threads import BARRIER_FUNCTION
from souffle.schedule.lower.shared_pool import with_pool_at
from souffle.schedule.lower.uniform_barriers import barrier_scope

__all__ = ["MOST_NUMBER", "Part", "part_forms", "part_function", "part_number"]

MOST_NUMBER = 15
"""The last of a block's named barriers."""


@dataclass(frozen=True)
class Part:
    """A part of a block with what it computes.

    Attributes
    ----------
    function : DeviceFunction
        Of a stage, from :func:`part_function`; the part has as many threads as it takes.
    team_threads : int
        Threads that compute a tile of the kernel's other stages.
    first : int
        Thread of the block.
    number : int
        Of the named barrier that is its own.
    start : int
        Byte of the block's shared memory at which its pool begins.
    count : int
        Parts of its division.
    opens, closes : bool
        Whether it is the first or the last of its division, in the order of the text.
    """

    function: DeviceFunction
    team_threads: int
    first: int
    number: int
    start: int
    count: int = 2
    opens: bool = False
    closes: bool = False

    def __str__(self) -> str:
        return f"threads {self.first} to {self.first + self.function.threads - 1}"

    @property
    def end(self) -> int:
        """Of its pool."""
        return self.start + self.function.shared_bytes

    def barrier(self) -> tirx.Stmt:
        """Of its threads."""
        return _barrier(self.number, self.function.threads)


def part_number(teams: int, order: int) -> int:
    """Which named barrier the part of a place in its division has, behind those of as many teams."""
    return 2 * teams + 1 + order


_forms: WeakKeyDictionary[DeviceFunction, dict[tuple[str, int, int], DeviceFunction]] = WeakKeyDictionary()


def part_forms(function: DeviceFunction) -> Iterator[DeviceFunction]:
    """The forms that were made for parts of what a function of a stage computes."""
    yield from _forms.get(function, {}).values()


def part_function(own: DeviceFunction, function: DeviceFunction, number: int, start: int) -> DeviceFunction:
    """A stage's function for a part of a block, made once.

    Parameters
    ----------
    own : DeviceFunction
        The stage's, as the rest of its kernel would call it.
    function : DeviceFunction
        Of the same stage and its name in the text, for as many threads as the part has; it may be `own`.
    number, start : int
        See :class:`Part`.
    """
    known = _forms.setdefault(own, {})
    key = (function.name, number, start)
    if key not in known:
        name = f"{function.name}_part{number}at{start}"
        known[key] = replace(function, func=_of_a_part(function, number, start), name=name, partial=True)
    return known[key]


def _barrier(number: int, threads: int) -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_extern("int32", f"{BARRIER_FUNCTION}<{number}, {threads}>"))


def _of_a_part(function: DeviceFunction, number: int, start: int) -> tirx.PrimFunc:
    def waits(node: tirx.Evaluate) -> tirx.Stmt:
        named = isinstance(node.value, tvm.ir.Call) and barrier_scope(node.value) == "block"
        return _barrier(number, function.threads) if named else node

    return function.func.with_body(with_pool_at(function.func, start, start, waits))
