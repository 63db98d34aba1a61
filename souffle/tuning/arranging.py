"""The search for who computes independent stages of a kernel (001, Figure 6): measured where there is a GPU.

A trial is a kernel of such stages alone, with the blocks of theirs (:mod:`souffle.kernel.group_kernel`), timed in turns
with the same stages one after the other and compared with it first. Trials are the ways that the cost model thinks
best; where there is nothing to measure on, its predictions are all that is said, and no log is written, for compilation
asks the model itself.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from souffle.codegen.cuda import merged_kernels
from souffle.cost import CostDevice
from souffle.errors import OptionError
from souffle.kernel.group_kernel import group_tensors, kernel_of_group
from souffle.kernel.side_by_side import Considered
from souffle.schedule.arrangement import ArrangedStage, Arrangement, BlockForm
from souffle.schedule.gpu import GpuRequest
from souffle.schedule.lower import text_of
from souffle.schedule.lower.shares import ALL_WORKERS, Share
from souffle.tuning.bench import MeasuringBench
from souffle.tuning.candidate import Candidate, kernel_name
from souffle.tuning.kept_in_log import KeptInLog, kept_in_log
from souffle.tuning.report import ArrangingReport, GroupReport, WayReport
from souffle.tuning.shared_stage import Limits, SharedStage
from souffle.tuning.stage_work import packed_setting
from souffle.tuning.store import LogWriter, origin_now
from souffle.tuning.tasks import expression
from souffle.workers import Engine
from souffle.workers.cases import Asking, Cases

__all__ = ["arrange", "sets_named"]


@dataclass(frozen=True, eq=False)
class _Built:
    """What a worker compiles."""

    candidate: bytes


def arrange(
    groups: Sequence[Considered],
    *,
    trials: int,
    request: GpuRequest,
    cost_device: CostDevice,
    bench: MeasuringBench | None,
    writer: LogWriter | None,
    engine: Engine,
    limits: Limits | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> ArrangingReport:
    """Measure ways to compute independent stages side by side, and append what they take to a log.

    Parameters
    ----------
    groups : sequence of Considered
    trials : int
        Ways of each, with those that the log holds already.
    request : GpuRequest
    cost_device : CostDevice
        Whose predictions say which ways are tried.
    bench : MeasuringBench or None
    writer : LogWriter or None
        Without both nothing is measured.
    engine : Engine
        Closed by the caller.
    limits : Limits, optional
        Of one job.
    seconds : float, optional
        After so many nothing further is begun.
    progress : callable

    Returns
    -------
    ArrangingReport
        Also where the user stopped it: what was measured is in the log.

    Raises
    ------
    WorkersLostError
        If no worker is left; what was measured is in the log.
    """
    begin = time.monotonic()
    device = cost_device.product if bench is None else bench.device
    several = _distinct(groups, trials, [] if writer is None else writer.read().arrangements, device)
    ended = KeptInLog()
    if bench is not None and writer is not None:
        setting = engine.share(packed_setting(request, cost_device))

        def cases() -> Iterator[tuple[_Group, Asking[None]]]:
            for group in several:
                if group.left and (seconds is None or time.monotonic() - begin < seconds):
                    own = SharedStage(group.name, engine.share(group.ends), setting, limits or Limits())
                    yield group, group.measure(bench, own, writer)

        with kept_in_log(writer) as ended:
            for number, (group, _) in enumerate(Cases(engine, cases()), 1):
                progress(f"group {number}/{len(several)} {group.name}")
    return ArrangingReport(
        groups=tuple(group.report() for group in several),
        figure="predicted" if bench is None else bench.figure,
        device=device,
        log="" if writer is None else str(writer.folder),
        interrupted=ended.interrupted,
        seconds=time.monotonic() - begin,
        engine=engine.name,
    )


def sets_named(several: Sequence[Considered], names: str) -> list[Considered]:
    """The sets with a stage in whose name a regular expression is found.

    Raises
    ------
    OptionError
        If it is no regular expression, or there are sets and none of such a name.
    """
    wanted = expression(names)
    found = [one for one in several if any(wanted.search(stage.name) for stage in one.stages)]
    if several and not found:
        known = ", ".join(" | ".join(stage.name for stage in one.stages) for one in several)
        raise OptionError(f"no set of independent stages has a name with {names!r}; there are: {known}")
    return found


def _distinct(
    groups: Sequence[Considered], trials: int, known: Sequence[Arrangement], device: str
) -> list[_Group]:
    """Each group once, with how often it is computed: equal layers have equal stages."""
    found: dict[tuple[BlockForm, tuple[str, ...]], _Group] = {}
    for one in groups:
        texts = tuple(text_of(stage.functions) for stage in one.stages)
        group = found.setdefault((one.block, texts), _Group(one, texts, trials))
        group.runs += one.runs
    for arrangement in known:
        texts = tuple(stage.text for stage in arrangement.stages)
        group = found.get((arrangement.block, texts))
        if group is not None and arrangement.origin.device == device:
            group.recall(arrangement)
    return list(found.values())


class _Group:
    """Stages that are measured together.

    Parameters
    ----------
    given : Considered
    texts : tuple of str
        Of the stages.
    trials : int
    """

    def __init__(self, given: Considered, texts: tuple[str, ...], trials: int) -> None:
        self.given, self.texts, self.runs = given, texts, 0
        self.name = " | ".join(stage.name for stage in given.stages)
        # Blocks of a kernel of these alone would have fewer threads.
        self.alike = max(stage.functions[0].threads for stage in given.stages) == given.block.threads
        self.ways = given.ways[:trials]
        self.known: dict[tuple[tuple[int, ...], ...], WayReport] = {}
        self.new = 0

    @property
    def left(self) -> list[int]:
        """The ways that have no figure yet, by number."""
        return [n for n, way in enumerate(self.ways) if _forms(way.shares) not in self.known] if self.alike else []

    @property
    def ends(self) -> bytes:
        """What :func:`souffle.tuning.stage_work.build` has to know of a stage."""
        tensors = ([(tensor.shape, tensor.dtype) for tensor in end] for end in group_tensors(self.given.stages))
        # Equal names and shapes may have other schedules, whose results have other bits.
        return pickle.dumps((self.name, " ".join(self.texts), *tensors))

    def recall(self, arrangement: Arrangement) -> None:
        """Take in what a log holds."""
        forms = tuple(stage.share for stage in arrangement.stages)
        found = next((way for way in self.ways if _forms(way.shares) == forms), None)
        if found is None or [_part_text(share) for share in found.shares] == [one.part for one in arrangement.stages]:
            words = tuple(map(str, found.shares)) if found else tuple(stage.workers for stage in arrangement.stages)
            predicted = self.given.apart - found.gain if found else None
            seconds = arrangement.seconds if arrangement.figures else None
            own = arrangement.origin.own_seconds or None
            self.known[forms] = WayReport(words, predicted, seconds, own, arrangement.origin.problem)

    def measure(self, bench: MeasuringBench, shared: SharedStage, writer: LogWriter) -> Asking[None]:
        """Have the ways measured that have no figure yet, and append their lines."""
        left = self.left
        apart = self._built((ALL_WORKERS,) * len(self.texts), max(way.grid for way in self.ways))
        built = [self._built(self.ways[n].shares, self.ways[n].grid) for n in left]
        found = yield from bench.figures(shared, built, apart)
        lines = []
        for number, figures in zip(left, found, strict=True):
            way = self.ways[number]
            own = sum(figures.own_seconds) / len(figures.own_seconds) if figures.own_seconds else 0.0
            device = figures.device or bench.device
            used = {"spill_bytes": figures.spill_bytes, "registers": figures.registers, "problem": figures.problem}
            stages = tuple(
                ArrangedStage(stage.name, text, share.form, _part_text(share))
                for stage, text, share in zip(self.given.stages, self.texts, way.shares, strict=True)
            )
            origin = origin_now(bench.figure, device, own, trial=number, **used)
            lines.append(Arrangement("", self.given.block, stages, figures.seconds, origin))
        writer.append_arrangements(lines)
        self.new += len(lines)
        for line in lines:
            self.recall(line)

    def _built(self, shares: Sequence[Share], grid: int) -> _Built:
        """The kernel of a way."""
        given = self.given
        shape = kernel_of_group(given.stages, shares, given.block, given.bound)
        name = kernel_name(f"{self.name} {self.texts} {_forms(shares)} {given.block}")
        (merged,), functions = merged_kernels([(name, shape)])
        return _Built(Candidate(name, grid, shape.threads, shape.shared_bytes, (), merged.func, functions).packed())

    def report(self) -> GroupReport:
        """What was found, the quickest first."""
        given = self.given
        ways = [
            self.known.get(_forms(way.shares))
            or WayReport(tuple(map(str, way.shares)), given.apart - way.gain, None, None)
            for way in self.ways
        ]
        ways += [one for forms, one in self.known.items() if all(forms != _forms(way.shares) for way in self.ways)]
        ways.sort(key=lambda one: (one.seconds is None, one.seconds or one.predicted_seconds or float("inf")))
        names = tuple(stage.name for stage in given.stages)
        return GroupReport(names, self.runs, str(given.block), given.apart, tuple(ways), self.new, self.alike)


def _forms(shares: Sequence[Share]) -> tuple[tuple[int, ...], ...]:
    return tuple(share.form for share in shares)


def _part_text(share: Share) -> str:
    """Digest of the function of a part; empty where there is none."""
    return text_of([share.part.function]) if share.part else ""
