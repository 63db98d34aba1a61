"""Blocks of several teams: the threads of a team compute tiles as those of a block of its own would (paper §6.4).

A grid barrier costs by the blocks that arrive at it. So where several blocks of a kernel would share a multiprocessor,
they are one block there, with their threads and their shared memory side by side, as HFuse puts two kernels into one
block: what was a barrier of a block becomes a named barrier of PTX, ``bar.sync id, count``, of a number that is the
team's own, and its pool of shared memory begins where the pool of the team before ends.

A function learns of which team it is by one more parameter, its last. What waits for the whole block it has none of: a
stage never does, and the kernel only where it waits for the grid.

Of the sixteen numbers of a block's barriers number 0 is that of the whole block, then come those of all threads of a
team, then those of some threads of a team (:mod:`souffle.schedule.lower.fewer_threads`). They are chosen at run time;
PTX takes a register there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import tvm
from tvm import tirx

from souffle.schedule.gpu.device import GpuDevice
from souffle.schedule.lower.device_function import DeviceFunction
from souffle.schedule.lower.fewer_threads import BARRIER_FUNCTION
from souffle.schedule.lower.kept_loads import KeptLoads
from souffle.schedule.lower.shared_pool import with_pool_at
from souffle.schedule.lower.uniform_barriers import barrier_scope
from souffle.schedule.resources import StageResources, aligned
from souffle.tvm_compat import PrimExpr

__all__ = [
    "TEAM_BARRIER_FUNCTION",
    "Teams",
    "kept_by_teams",
    "team_counts",
    "team_forms",
    "team_function",
]

TEAM_BARRIER_FUNCTION = "souffle_team_barrier"
"""``bar.sync first + team, count``, with `first` and `count` as template arguments and the team as its argument
(:mod:`souffle.codegen.device_functions`)."""

_NUMBERS = 16
"""Named barriers of a block."""

_MOST_THREADS = 1024
"""Of a block."""

_WARP = 32

_MOST_TEAMS = (_NUMBERS - 1) // 2
"""Each takes two numbers, and one is the block's."""


@dataclass(frozen=True)
class Teams:
    """How a block is divided.

    Attributes
    ----------
    count : int
        Teams of a block.
    threads : int
        Of a team: those from ``team * threads`` on, whole warps.
    shared_bytes : int
        Of a team's pool, which begins at byte ``team * shared_bytes`` of the block's.
    """

    count: int
    threads: int
    shared_bytes: int

    def barrier(self, team: PrimExpr, threads: int | None = None) -> tirx.Stmt:
        """A barrier of all threads of a team, or of its first so many."""
        first, count = (1, self.threads) if threads is None else (1 + self.count, threads)
        return tirx.Evaluate(tirx.call_extern("int32", f"{TEAM_BARRIER_FUNCTION}<{first}, {count}>", team))


def team_counts(block: StageResources, device: GpuDevice, tiles: int) -> range:
    """How many blocks of a kernel that share a multiprocessor can be the teams of one; nothing where none can.

    Parameters
    ----------
    block : StageResources
        What each of the blocks asks for.
    device : GpuDevice
    tiles : int
        That the blocks share. As long as each has a multiprocessor for itself, none of them share one.
    """
    if block.threads % _WARP or block.static_shared_bytes:
        return range(0)
    resident = min(device.resident_blocks(block.threads, block.shared_bytes, block.registers).values())
    pool = aligned(block.shared_bytes)
    room = device.shared_per_block // pool if pool else _MOST_TEAMS
    each = -(-tiles // device.sm_count)
    return range(2, min(resident, room, each, _MOST_TEAMS, _MOST_THREADS // block.threads) + 1)


_forms: WeakKeyDictionary[DeviceFunction, dict[Teams, DeviceFunction]] = WeakKeyDictionary()
_kept: WeakKeyDictionary[KeptLoads, dict[Teams, KeptLoads]] = WeakKeyDictionary()


def team_forms(function: DeviceFunction) -> Iterator[DeviceFunction]:
    """The forms that were made of a function."""
    yield from _forms.get(function, {}).values()


def team_function(function: DeviceFunction, teams: Teams) -> DeviceFunction:
    """A function for blocks of teams, made once; one with neither barriers nor shared memory is as it was.

    Parameters
    ----------
    function : DeviceFunction
        In the form for as many threads as a team has (:func:`souffle.schedule.lower.fewer_threads.fit_functions`).
    teams : Teams
    """
    if not function.has_barrier and not function.shared_bytes:
        return function
    known = _forms.setdefault(function, {})
    if teams not in known:
        name = f"{function.name}_{teams.count}x{teams.threads}x{teams.shared_bytes}"
        known[teams] = replace(function, func=_of_a_team(function, teams), name=name, in_team=True)
    return known[teams]


def kept_by_teams(kept: KeptLoads, teams: Teams) -> KeptLoads:
    """A stage that keeps its constants, for blocks of teams, made once."""
    known = _kept.setdefault(kept, {})
    if teams not in known:
        known[teams] = replace(kept, fill=team_function(kept.fill, teams), use=team_function(kept.use, teams))
    return known[teams]


def _of_a_team(function: DeviceFunction, teams: Teams) -> tirx.PrimFunc:
    func, team = function.func, tirx.Var("team", "int32")

    def waits(node: tirx.Evaluate) -> tirx.Stmt:
        if not isinstance(node.value, tvm.ir.Call):
            return node
        if barrier_scope(node.value) == "block":
            return teams.barrier(team)
        named = str(getattr(node.value.op, "name", "")) == "tirx.call_extern"
        if named and str(node.value.args[0].value).startswith(BARRIER_FUNCTION + "<"):
            return teams.barrier(team, function.threads)
        return node

    # As much of the last team's part as the function uses.
    body = with_pool_at(func, team * teams.shared_bytes, (teams.count - 1) * teams.shared_bytes, waits)
    return tirx.PrimFunc([*func.params, team], body, func.ret_type).with_attr(dict(func.attrs.items()))
