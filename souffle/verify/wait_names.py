"""What kernels wait with, and say what others wait for: the device functions by their names, restated."""

from __future__ import annotations

__all__ = [
    "ARRIVAL_FUNCTION",
    "ARRIVE_FUNCTION",
    "AWAIT_FUNCTION",
    "BEGIN_FUNCTION",
    "COMPLETION_FUNCTION",
    "COUNTER_FUNCTION",
    "GRID_WAITS",
    "LEAVE_FUNCTION",
    "WATCHED_AWAIT_FUNCTION",
    "WATCHED_FUNCTION",
]

COUNTER_FUNCTION = "souffle_wait_for_grid"
"""A grid barrier that counts arrivals in memory: ``COUNTER_FUNCTION(state, num_blocks)``."""

WATCHED_FUNCTION = "souffle_watched_wait_for_grid"
"""The same with a limit: ``WATCHED_FUNCTION(state, num_blocks, record, limit, kernel, stage, step)``."""

ARRIVAL_FUNCTION = "souffle_grid_arrival"
"""A block has come to a grid barrier that counts: ``found = ARRIVAL_FUNCTION(state, num_blocks)``."""

COMPLETION_FUNCTION = "souffle_grid_completion"
"""All others have, too: ``COMPLETION_FUNCTION(state, num_blocks, found)``. With its arrival it is a grid barrier; what
stands between the two is :mod:`souffle.verify.prologues`' to read, and nobody else sees arrivals."""

GRID_WAITS = ("tirx.cuda.grid_sync", COUNTER_FUNCTION, WATCHED_FUNCTION, COMPLETION_FUNCTION)
"""What all blocks wait for each other with."""

BEGIN_FUNCTION = "souffle_ticks_before"
"""The number of arrivals before this launch: ``BEGIN_FUNCTION(state)``."""

ARRIVE_FUNCTION = "souffle_arrive"
"""A block says how often it has arrived: ``ARRIVE_FUNCTION(state, tick)``."""

AWAIT_FUNCTION = "souffle_wait_for_slots"
"""The blocks of slots have arrived as often: ``AWAIT_FUNCTION(state, first, last, num_blocks, tick)``."""

WATCHED_AWAIT_FUNCTION = "souffle_watched_wait_for_slots"
"""The same with a limit: ``WATCHED_AWAIT_FUNCTION(..., record, limit, kernel, stage, step, slot)``."""

LEAVE_FUNCTION = "souffle_leave"
"""No block waits any more: ``LEAVE_FUNCTION(state, num_blocks, tick, words)``."""
