"""The persistent planner: one kernel for everything that can be one, unless the cost model says that a cut pays.

Stages loop over their tiles, so that a kernel launched with as many blocks as the device holds computes any of them;
what the paper's rule cuts for is then no reason to cut. But a kernel is on the device as a whole: a stage that takes
many registers leaves few blocks resident for all. A cut there costs a launch in place of a grid sync, and gives the
stages on both sides the occupancy that they have without each other. :mod:`souffle.partition.priced` weighs the two.

Without measured registers, or for a device that no file describes, nothing is weighed and nothing is cut. Operators
that are no TEs are kernels of their own in any case. A loop stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

from souffle.decision import Decision
from souffle.partition.planner import Demand, Partition, PartitionRequest, Subprogram, is_extern
from souffle.partition.priced import PricedRun, Segment
from souffle.schedule.stage import Unit, flat_stages
from souffle.wording import counted

__all__ = ["Persistent"]


class Persistent:
    """See the module."""

    name = "persistent"
    measures = True

    def plan(self, request: PartitionRequest) -> Partition:
        """See :meth:`souffle.partition.planner.Planner.plan`. Loops stay: their stages loop over tiles as all do."""
        runs: list[list[Unit]] = []
        decisions: list[Decision] = []
        for unit in request.stages:
            if runs and not is_extern(unit) and not is_extern(runs[-1][-1]):
                runs[-1].append(unit)
                continue
            if runs:
                decisions.append(_cut(unit, "an operator that is no TE is a kernel of its own"))
            runs.append([unit])
        refusal = _not_weighed(request)
        parts: list[Subprogram] = []
        for run in runs:
            if request.forecast is None or refusal or is_extern(run[0]):
                parts.append(Subprogram(tuple(run)))
                continue
            found, reasons = _weighed(PricedRun(run, request, request.forecast))
            parts += found
            decisions += reasons
        if refusal and runs:
            if len(runs) == 1:
                decisions.append(Decision("partition", "no cut", True, _waves(request)))
            decisions.append(Decision("partition", "cuts by predicted time", False, refusal))
        return Partition(tuple(parts), tuple(decisions))


def _not_weighed(request: PartitionRequest) -> str:
    """Why no cut is weighed, if none is."""
    if request.forecast is None:
        return f"no device file describes {request.device.arch}, so that no time can be predicted"
    if not all(stage.resources.measured for stage in flat_stages(request.stages)):
        return "registers are assumed, not measured (no nvcc was run), and cuts for them would be guesses"
    return ""


def _waves(request: PartitionRequest) -> str:
    total = reduce(Demand.joined, (request.demand(unit) for unit in request.stages))
    wave, figures = total.wave(request.device), total.figures(request.device)
    return f"stages loop over their tiles in waves of {wave} blocks ({figures})"


def _weighed(run: PricedRun) -> tuple[list[Subprogram], list[Decision]]:
    """The kernels of a run, and why."""
    segments = run.best()
    parts, decisions = [], []
    for before, after in pairwise(segments):
        decisions.append(_cut(run.units[after.first], _why_cut(run, before, after)))
    if len(segments) == 1:
        wave = run.demand(run.whole).wave(run.request.device)
        figures = run.demand(run.whole).figures(run.request.device)
        reason = (
            f"predicted {_us(run.seconds(segments))} on {run.forecast.product} as one kernel, whose stages loop over "
            f"their tiles in waves of {wave} blocks ({figures})"
        )
        decisions.append(Decision("partition", "no cut", True, reason))
    else:
        reason = (
            f"predicted {_us(run.seconds(segments))} on {run.forecast.product} in place of "
            f"{_us(run.seconds([run.whole]))} as one kernel"
        )
        decisions.append(Decision("partition", f"{len(segments)} kernels", True, reason))
    split = run.best_split(segments)
    if split is not None:
        decisions.append(_refused(run, segments, split))
    for segment in segments:
        asked, most = run.blocks(segment)
        parts.append(Subprogram(tuple(run.units[n] for n in segment.numbers), asked))
        if len(flat_stages(parts[-1].stages)) > 1 and asked < most:
            reason = f"its stages leave room for {most}, but are predicted to take no longer with {asked}"
            blocks = f"{asked} resident block{'s' if asked > 1 else ''} for the kernel of {parts[-1].name}"
            decisions.append(Decision("partition", blocks, True, reason))
    return parts, decisions


def _cut(unit: Unit, reason: str) -> Decision:
    return Decision("partition", f"cut before {unit.name} ({unit.tes[0].origin})", True, reason)


def _why_cut(run: PricedRun, before: Segment, after: Segment) -> str:
    """The resource that throttles the kernel which two segments would be, and the stage that loses most in it."""
    both = Segment(before.first, after.last)
    lost = {
        number: run.unit_seconds(number, both) - run.unit_seconds(number, own)
        for own in (before, after)
        for number in own.numbers
    }
    worst = max(lost, key=lambda number: lost[number])
    own = before if worst in before.numbers else after
    tiles = max(stage.schedule.tiles for stage in flat_stages([run.units[worst]]))
    return (
        f"{_throttle(run, both, own)}; {run.units[worst].name} ({tiles} tiles) would take "
        f"{_us(run.unit_seconds(worst, both))} instead of {_us(run.unit_seconds(worst, own))}, all stages "
        f"{_us(sum(lost.values()))} more; a launch costs {_launch(run, both)}"
    )


def _throttle(run: PricedRun, kernel: Segment, own: Segment) -> str:
    demand, device = run.demand(kernel), run.request.device
    fits = device.resident_blocks(demand.threads, demand.shared_bytes, demand.registers)
    bound = min(fits, key=lambda resource: fits[resource])
    blocks = f"{counted(fits[bound], 'resident block')} on a multiprocessor"
    alone = run.resident(run.demand(own).registers, run.demand(own).shared_bytes)
    shared = f"{demand.shared_bytes} bytes of shared memory of {demand.of_shared}"
    if alone == fits[bound]:
        return f"{shared} leave less of the L1 cache to each of {blocks}"
    if bound == "registers":
        return f"{demand.registers} registers of {demand.of_registers} leave {blocks} in place of {alone}"
    return f"{shared if bound == 'shared memory' else bound} leave {blocks} in place of {alone}"


def _refused(run: PricedRun, segments: Sequence[Segment], split: tuple[Segment, Segment]) -> Decision:
    """The best cut that was not made."""
    before, after = split
    whole = Segment(before.first, after.last)
    others = [segment for segment in segments if segment != whole]
    now, then = run.seconds(segments), run.seconds([*others, *split])
    gained = run.unit_sum(whole) - run.unit_sum(before) - run.unit_sum(after)
    reason = (
        f"of the cuts not made it is the best: it would give {_us(then)} in place of {_us(now)}, since stages would "
        f"take {_us(gained)} less and a launch costs {_launch(run, whole)}"
    )
    if then < now:
        reason += (
            f"; a cut has to gain more than the factor {run.forecast.error:g} by which half of all predictions are off "
            "at most"
        )
    return Decision("partition", f"cut before {run.units[after.first].name}", False, reason)


def _launch(run: PricedRun, kernel: Segment) -> str:
    return f"{_us(run.forecast.launch_seconds)}, a grid sync {_us(run.sync_seconds(kernel))}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"
