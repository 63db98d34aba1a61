"""Which reductions are worth two phases on a device: those whose predicted time falls by more than the model may err.

A stage that has fewer tiles than the device has multiprocessors leaves some idle, and one block alone on each shows its
latencies. Sharing the reduced range among more tiles keeps them busy; it costs a grid sync, the partial results and
their combination. All of it is predicted from the schedules that both phases would have, in a kernel of which two
blocks share a multiprocessor: merged kernels take the registers of their most demanding stage.
"""

from __future__ import annotations

from collections import Counter
from math import inf, prod

from souffle.cost.device import CostDevice
from souffle.cost.kernel import MEDIAN_ERROR
from souffle.cost.predict import Terms
from souffle.placement.trial import Trials, seconds_of
from souffle.placement.two_phase import Phases, Split
from souffle.program import TE, FusedTE, TEProgram, parts_of
from souffle.schedule.drafts import Scheduler
from souffle.schedule.lower import Lowering

__all__ = ["SplitByCost"]

_MOST_WAVES = 2
"""Tiles for each multiprocessor that a split may make: more of them only add partial results."""


class SplitByCost:
    """Answers how a reduction is to be split; ``split`` for :func:`souffle.placement.two_phase`.

    Parameters
    ----------
    program : TEProgram
        That the reductions are of.
    device : CostDevice or None
        ``None`` where no product of the architecture is described: nothing is split then.
    scheduler : callable
        Answers for a TensorIR function.
    lowering : Lowering
        Knows the schedules that the scheduler looked at.
    """

    def __init__(
        self, program: TEProgram, device: CostDevice | None, scheduler: Scheduler, lowering: Lowering
    ) -> None:
        self.device = device
        self._trials = Trials(program, device, scheduler, lowering)
        parts = (part for item in program.tes for part in parts_of(item) if isinstance(part, TE))
        self._in_group = Counter(part.origin.group for part in parts if part.is_reduction)

    def __call__(self, whole: TE | FusedTE) -> Split:
        """The number of parts that is predicted to be fastest, 1 where none is worth it."""
        device = self.device
        if device is None:
            return Split(1, "no product of this architecture is described, so that no time can be predicted")
        reduction = next(part for part in parts_of(whole) if part.is_reduction)
        if self.shares_rows(whole):
            return Split(1, "another reduction of its operator is computed on the same rows")
        answer, draft = self._trials.answer(whole)
        if answer.schedule is None:
            return Split(1, f"it is no stage of its own: {answer.reason}")
        if answer.tiles >= device.sm_count:
            return Split(1, f"its {answer.tiles} tiles keep all {device.sm_count} multiprocessors busy")
        terms = self._trials.predicted([self._trials.lowered(answer, draft)])
        alone = sum(map(seconds_of, terms))
        now = f"{answer.tiles} tile{'s' * (answer.tiles != 1)} take {alone * 1e6:.1f} µs"
        at_best = 2 * device.grid_sync_seconds + sum(map(_evenly, terms))
        if at_best * MEDIAN_ERROR >= alone:
            return Split(1, f"{now}; spread evenly, and with a grid sync more, its work takes {at_best * 1e6:.1f} µs")
        most = min(_MOST_WAVES * device.sm_count // answer.tiles, prod(reduction.reduction_shape))
        return self._best(whole, max(most, 2), alone, now)

    def shares_rows(self, whole: TE | FusedTE) -> bool:
        """Whether its operator has other reductions, as a softmax has, which one stage computes with it."""
        return any(part.is_reduction and self._in_group[part.origin.group] > 1 for part in parts_of(whole))

    def _best(self, whole: TE | FusedTE, most: int, alone: float, now: str) -> Split:
        """Climbs from as many parts as give each multiprocessor a tile, in powers of two up to `most`."""
        powers = [2**n for n in range(1, most.bit_length())]
        times: dict[int, float | str] = {}

        def price(place: int) -> float:
            if not 0 <= place < len(powers):
                return inf
            if powers[place] not in times:
                times[powers[place]] = self._both(whole, powers[place])
            found = times[powers[place]]
            return inf if isinstance(found, str) else found

        place = max(0, len(powers) - _MOST_WAVES)
        step = -1 if price(place - 1) < price(place) else 1
        while price(place + step) < price(place):
            place += step
        parts, best = powers[place], times[powers[place]]
        if isinstance(best, str):
            return Split(1, f"{now}; {best}")
        found = f"{now}, {parts} parts and their combination {best * 1e6:.1f} µs with a grid sync more"
        if best * MEDIAN_ERROR >= alone:
            return Split(1, f"{found}, which is not less by the factor {MEDIAN_ERROR} that the model may err")
        return Split(parts, found)

    def _both(self, whole: TE | FusedTE, parts: int) -> float | str:
        """Seconds of both phases in one kernel, or why they cannot be."""
        phases = Phases.of(whole, parts)
        if isinstance(phases, str):
            return phases
        stages = self._trials.stages((phases.partial, phases.total))
        return stages if isinstance(stages, str) else sum(map(seconds_of, self._trials.predicted(stages)))


def _evenly(terms: Terms) -> float:
    """Seconds of the busiest unit, cache or memory, if every multiprocessor had the same part of the work."""
    units = (terms.issue, terms.fp32, terms.int32, terms.special, terms.tensor, terms.shared, terms.l2_port)
    return max(*units, terms.l2, terms.memory)
