"""What is told of a candidate to a model that learns: the terms of its predicted time, without its size.

A term is given as its share of the whole, so that candidates of small and of large workloads are alike where they wait
for the same. The predicted time itself comes first: what is learnt is by which factor it is wrong
(:mod:`souffle.tuning.learned.ranker`).

MetaSchedule's features of a schedule (``PerStoreFeature``: for each store 164 numbers of its loops and the buffers that
it touches) were tried beside these and are not here. They say nothing of what our rules' kernels do by calls, such as
products of fragments and asynchronous copies: all tilings of a product on tensor cores have one store each.
``benchmarks/learned_ranking.py`` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from souffle.cost import CostDevice, Terms, Work, estimated_registers, predict_stage, work_of
from souffle.schedule.lower import DeviceFunction

__all__ = ["FEATURES", "PREDICTED", "features_of"]

_UNITS = ("issue", "fp32", "int32", "special", "tensor", "shared", "l2_port")
_WAITS = ("barriers", "global_waits", "prefetched_waits", "shared_waits", "arithmetic_waits")

PREDICTED = 0
"""Place of the logarithm of the predicted seconds."""

FEATURES = (
    "log_seconds",
    *(f"{name}_share" for name in ("start", *_UNITS, "chain", "cold_chain", "l2", "memory", "multiprocessors")),
    "cold_by_warm",
    "log_tiles",
    "log_waves",
    "last_wave",
    "evenness",
    "resident",
    "threads",
    "registers",
    "shared_memory",
    "functions",
    *(f"log_{name}" for name in _WAITS),
    "code",
)
"""Names, in the order of the numbers.

The shares are of the predicted time, a mean of that with a cold and with a warm second-level cache. ``last_wave`` is
the part of all places for tiles that is filled, ``evenness`` how evenly multiprocessors share the tiles, ``threads``,
``shared_memory`` and ``code`` what the tiles side by side take of a multiprocessor's. Grid, waits and code are those of
the function that takes longest. Registers are estimated: candidates are ranked before they are compiled.
"""


def features_of(functions: Sequence[DeviceFunction], device: CostDevice) -> np.ndarray:
    """Describe a lowered candidate.

    Parameters
    ----------
    functions : sequence of DeviceFunction
        See :func:`souffle.schedule.lower.lower_stage`.
    device : CostDevice
        The GPU that it is for.

    Returns
    -------
    array of float64
        One number for each of :data:`FEATURES`.

    Raises
    ------
    OptionError
        If a block does not fit on the device.
    """
    cold, warm = (predict_stage(functions, device, warm=warm) for warm in (False, True))
    seconds = (cold.seconds + warm.seconds) / 2
    slowest = max(range(len(functions)), key=lambda number: _own_seconds(cold.terms[number]))
    terms, function = warm.terms[slowest], functions[slowest]
    work = work_of(function)
    places = terms.resident * device.sm_count

    def share(of: Sequence[Terms], name: str) -> float:
        return sum(getattr(one, name) for one in of) / seconds

    numbers = (
        math.log(seconds),
        *(share(warm.terms, name) for name in ("start", *_UNITS, "chain")),
        share(cold.terms, "chain"),
        share(warm.terms, "l2"),
        share(cold.terms, "memory"),
        share(warm.terms, "multiprocessors"),
        cold.seconds / warm.seconds,
        math.log(terms.tiles),
        math.log(terms.waves),
        terms.tiles / (terms.waves * places),
        terms.tiles / device.sm_count / -(-terms.tiles // device.sm_count),
        terms.resident,
        terms.resident * function.threads / device.threads_per_sm,
        estimated_registers(function),
        terms.resident * function.shared_bytes / device.shared_per_sm,
        len(functions),
        *(math.log1p(_waits(work, name)) for name in _WAITS),
        work.code_bytes / device.code_cache_bytes,
    )
    return np.array(numbers, np.float64)


def _own_seconds(terms: Terms) -> float:
    return max(terms.multiprocessors, terms.l2, terms.memory)


def _waits(work: Work, name: str) -> float:
    return max(0.0, float(getattr(work, name)))
