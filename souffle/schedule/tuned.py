"""Schedules of stages from tuning logs: nothing is searched here, a record's recipe is followed or it is not.

Rules and passes change, so a recipe may make another text than the one that was measured. Its figure says nothing of
this one then, and it is taken for what the cost model predicts of it, as a predicted record is.

Stages are formed before, by the rules alone: which stages there are does not depend on what a log holds, so a record
stays valid when others are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice
from typing import Protocol

from tvm import tirx

from souffle.analysis import Analysis
from souffle.decision import Decision, Refused
from souffle.program import ExternTE, TEProgram
from souffle.program.products import IEEE
from souffle.schedule.drafts import Answer
from souffle.schedule.follow import followed, native_schedule
from souffle.schedule.gpu.device import ASSUMED_REGISTERS, SHARING, GpuDevice
from souffle.schedule.gpu.registry import RULES
from souffle.schedule.gpu.rule import MULTIPLIES, GpuRequest, GpuSchedule
from souffle.schedule.gpu.scheduler import THREADS, gpu_request
from souffle.schedule.log import Record, TuningLog
from souffle.schedule.lower import DeviceFunction, LoweringError, cuda_target, lower_stage, text_of
from souffle.schedule.recipe import Recipe
from souffle.schedule.stage import LoopStage, Stage, StageDraft, Unit, draft_stage, map_stages

__all__ = [
    "KnownSchedule",
    "TunedAnswers",
    "crowding",
    "followed",
    "known_schedules",
    "native_schedule",
    "searched_stages",
    "text_of",
    "tuned_stages",
]

_MOST_PREDICTED = 16
"""Records of a stage that today's model is asked about, those that the model of their day thought best: each has to be
lowered for it, and a search leaves hundreds."""

_MOST_KNOWN = 4
"""Records of a stage that are tried in its kernel, as the model of their day ranked them: whole networks are priced
with each."""

_MOST_REMEMBERED = 1024
"""Schedules of records: those of a hundred stages are asked about again and again."""

_CHANGED = ", of another text than its recipe makes now"


class Price(Protocol):
    """Predictions of lowered stages, in a kernel of several or each in its own."""

    def __call__(self, functions: Sequence[DeviceFunction], registers: int = 0) -> float:
        """Seconds; with the registers of a thread where they are known."""
        ...

    def crowds(self, functions: Sequence[DeviceFunction]) -> bool:
        """Whether it takes more registers than stages leave each other, as estimated."""
        ...


def searched_stages(units: Sequence[Unit], analysis: Analysis) -> Iterator[tuple[Stage, int]]:
    """The stages worth a search, and how often one run of the network computes each.

    Those with a compute-intensive TE or a reduction; the TEs inlined before and after it belong to the stage.

    Parameters
    ----------
    units : sequence of Stage or LoopStage
    analysis : Analysis
        Of the program that they are of.
    """
    for unit in units:
        if isinstance(unit, LoopStage):
            inside = analysis.inside(unit.loop)
            yield from ((stage, unit.loop.steps * runs) for stage, runs in searched_stages(unit.stages, inside))
        elif any(
            not isinstance(te_, ExternTE) and (te_.is_reduction or analysis.is_compute_intensive(te_))
            for te_ in unit.tes
        ):
            yield unit, 1


def tuned_stages(
    units: Sequence[Unit],
    analysis: Analysis,
    logs: Sequence[TuningLog],
    device: GpuDevice,
    *,
    merged: bool = False,
    price: Price | None = None,
) -> tuple[tuple[Unit, ...], tuple[Decision, ...]]:
    """Give stages the schedules that logs hold for them.

    Parameters
    ----------
    units : sequence of Stage or LoopStage
        As the rules scheduled them.
    analysis : Analysis
        Of their program.
    logs : sequence of TuningLog
        The first one's records win among equals.
    device : GpuDevice
        The GPU that is compiled for: what was measured on it comes before what was on another.
    merged : bool
        Whether stages share kernels. A schedule is then not used if it would take that from the others
        (:func:`crowding`), however fast it is alone.
    price : Price, optional
        With it a product that normalizes takes the schedule of the record that
        the same product has without, where it is predicted to be faster so.

    Returns
    -------
    stages : tuple of Stage or LoopStage
    decisions : tuple of Decision
        One for each stage that a search would tune, one for each part of a log that was skipped, and a summary.
    """
    wanted = [stage for stage, _ in searched_stages(units, analysis)]
    answers: dict[str, _Tuned | Refused] = {}
    decisions = []
    for stage in wanted:
        digest = stage.draft.digest
        if digest not in answers:
            found = _best_of_both(stage, logs, device, merged, price)
            answers[digest] = _unless_dearer(found, stage, price)
        best = answers[digest]
        if isinstance(best, Refused):
            reason = f"{best.reason}; rule {stage.schedule.rule}'s own choice"
        else:
            schedule = best.schedule
            reason = f"schedule from the log ({schedule.rule}, {schedule.tiles} tiles): {best.summary}"
        decisions.append(Decision("tuning", stage.name, isinstance(best, _Tuned), reason))
    problems = [Decision("tuning", one.where, False, one.reason) for log in logs for one in log.problems]
    tuned = {digest: best for digest, best in answers.items() if isinstance(best, _Tuned)}
    count = sum(stage.draft.digest in tuned for stage in wanted)
    where = ", ".join(log.name for log in logs) or f"no log for {device.arch}"
    summary = f"{count} of {len(wanted)} stages with a reduction found in tuning logs ({where})"

    def scheduled(stage: Stage) -> Stage:
        best = tuned.get(stage.draft.digest)
        return stage if best is None else replace(stage, schedule=best.schedule, functions=best.functions)

    return map_stages(units, scheduled), (*problems, *decisions, Decision("tuning", "summary", count > 0, summary))


@dataclass(frozen=True, eq=False)
class _Tuned:
    """The schedule of a record, lowered.

    `changed` says that it is another text than the record's figure is of.
    """

    schedule: GpuSchedule
    functions: tuple[DeviceFunction, ...]
    record: Record
    changed: bool = False

    @property
    def measured(self) -> bool:
        """Whether its figure was measured, of this text."""
        return self.record.origin.figure == "measured" and not self.changed

    @property
    def summary(self) -> str:
        """Of the record, and of its age."""
        another = self.changed and self.record.origin.figure == "measured"
        return f"{self.record.summary}{_CHANGED if another else ''}"

    def seconds(self, price: Price) -> float:
        """By the model as it is."""
        return price(self.functions, self.schedule.registers)


def _unless_dearer(best: _Tuned | Refused, stage: Stage, price: Price | None) -> _Tuned | Refused:
    """A record, unless a stage has a schedule that no search begins with and that is predicted to take less."""
    if isinstance(best, Refused) or price is None or stage.schedule.rule in RULES:
        return best
    recorded, own = best.seconds(price), price(stage.functions)
    if recorded < own:
        return best
    return Refused(f"the record's schedule is predicted to take {recorded * 1e6:.1f} µs, this one {own * 1e6:.1f}")


@dataclass(frozen=True, eq=False)
class TunedAnswers:
    """What logs hold for stages on trial, in a kernel of several stages; parameters as for :func:`tuned_stages`."""

    logs: Sequence[TuningLog]
    device: GpuDevice
    price: Price

    def __call__(self, draft: StageDraft, answer: Answer) -> Answer:
        """The answer with the schedule that :func:`tuned_stages` would give the stage."""
        if answer.schedule is None:
            return answer
        stage = Stage(draft, answer.schedule, answer.functions)
        best = _best_of_both(stage, self.logs, self.device, True, self.price)
        if isinstance(best, Refused):
            return answer
        return replace(answer, schedule=best.schedule, tiles=best.schedule.tiles, functions=best.functions)


@dataclass(frozen=True, eq=False)
class KnownSchedule:
    """A schedule that a stage may have, lowered, and where it is from."""

    schedule: GpuSchedule
    functions: tuple[DeviceFunction, ...]
    told: str


def known_schedules(
    stage: Stage, own: Stage, logs: Sequence[TuningLog], device: GpuDevice
) -> tuple[KnownSchedule, ...]:
    """What rules and logs know for a stage, also what would crowd out others: whoever asks knows its kernel.

    Parameters
    ----------
    stage : Stage
        As it is.
    own : Stage
        As the rules scheduled it.
    logs, device
        See :func:`tuned_stages`.

    Returns
    -------
    tuple of KnownSchedule
        The rules' own, then the best records, without those that spill. None where no log has any, or where `stage` has
        a schedule that was measured on a GPU, of which a prediction says nothing new.
    """
    records = _ranked(own.draft.func, logs, device)
    if not records:
        return ()
    of_this = ("", text_of(stage.functions))
    if any(one.origin.figure == "measured" and one.origin.text in of_this for one, _ in records):
        return ()
    found = []
    for record, log in records[:_MOST_KNOWN]:
        tuned = _used(record, log, own, own.draft.func, device, None, False, [])
        if tuned is not None and not record.origin.spill_bytes:
            found.append(KnownSchedule(tuned.schedule, tuned.functions, f"schedule from the log, {tuned.summary}"))
    # A schedule may have been exchanged, which the functions of the one before outlive.
    functions = own.functions if all(f.schedule is own.schedule for f in own.functions) else ()
    functions = functions or _lowered(own.schedule, device.arch)
    if not isinstance(functions, Refused):
        found.insert(0, KnownSchedule(own.schedule, functions, f"rule {own.schedule.rule}'s own choice"))
    return tuple(found)


def crowding(tiles: int, registers: int, shared_bytes: int, own_tiles: int, device: GpuDevice) -> Refused | None:
    """Why a schedule leaves the other stages of its kernel no room, or ``None``.

    A kernel holds one wave of blocks, and as many of them as its hungriest stage allows (paper, §5.4). What is fastest
    alone may end the kernel, or slow the others down; two blocks on a multiprocessor is what schedules leave each
    other.

    Parameters
    ----------
    tiles, registers, shared_bytes : int
        Of the schedule; 0 registers where they are not known.
    own_tiles : int
        Of the schedule that the rules choose, which is as good as they know for the kernel.
    device : GpuDevice
    """
    resident = device.resident_blocks(THREADS, shared_bytes, max(registers, ASSUMED_REGISTERS))
    wave = SHARING * device.sm_count
    bound = min(resident, key=lambda resource: resident[resource])
    if resident[bound] < SHARING:
        figure = f"{registers} registers" if bound == "registers" else f"{shared_bytes} bytes of shared memory"
        return Refused(f"{figure} leave {resident[bound]} block on a multiprocessor")
    if tiles > max(own_tiles, wave):
        return Refused(f"{tiles} tiles exceed a wave of {wave} blocks, and the rule's own {own_tiles} do not")
    return None


def _best_of_both(
    stage: Stage, logs: Sequence[TuningLog], device: GpuDevice, merged: bool, price: Price | None
) -> _Tuned | Refused:
    """The best schedule of the stage's own records and those that its product has without normalizing."""
    own = _best(stage, stage.draft.func, logs, device, merged, price)
    if price is None or (isinstance(own, _Tuned) and (not merged or own.measured)):
        return own
    product_alone = _best_of_product(stage, logs, device, merged, price)
    if product_alone is None:
        return own
    if isinstance(own, _Tuned) and own.seconds(price) <= product_alone.seconds(price):
        return own
    return product_alone


def _best_of_product(
    stage: Stage, logs: Sequence[TuningLog], device: GpuDevice, merged: bool, price: Price
) -> _Tuned | None:
    """The schedule that the stage's product has in a log without normalizing, where it is the faster one with it."""
    tes = [te_ for te_ in stage.tes if not isinstance(te_, ExternTE) and te_.placement is None]
    if len(tes) == len(stage.tes) or not tes:
        return None
    defined = {tensor for te_ in tes for tensor in te_.outputs}
    inputs = tuple(dict.fromkeys(t for te_ in tes for t in te_.inputs if t not in defined))
    outputs = tuple(t for te_ in tes for t in te_.outputs if t in stage.outputs)
    names = [tuple(tensor.name for tensor in tensors) for tensors in (inputs, outputs)]
    products = str(stage.draft.func.attrs.get(MULTIPLIES, IEEE))
    alone = draft_stage(tes, TEProgram(inputs, outputs, tuple(tes), {}, *names, products=products))
    best = _best(stage, alone.func, logs, device, merged, price)
    if isinstance(best, Refused) or price.crowds(best.functions):
        return None
    return best if price(best.functions) < price(stage.functions) else None


def _best(
    stage: Stage,
    recorded: tirx.PrimFunc,
    logs: Sequence[TuningLog],
    device: GpuDevice,
    merged: bool,
    price: Price | None = None,
) -> _Tuned | Refused:
    """The schedule of the best record of `recorded`, or why there is none.

    Measured records are taken by their own figure. Where all were predicted, each as if it were launched alone and by
    the model of that day, the model of today says which is best, and whether any is better than the rule's own choice:
    a kernel of several stages gives them other neighbours and another start, and rules have learned since.
    """
    left_out: list[str] = []
    usable = _usable(stage, recorded, logs, device, price if merged else None, merged, left_out)
    first = next(usable, None)
    if first is None:
        return Refused(left_out[0] if left_out else "no record")
    if price is None or first.measured:
        return first
    # What follows one that is not measured is not measured either.
    several = islice(chain((first,), usable), _MOST_PREDICTED)
    seconds = {one: (one.record.origin.spill_bytes > 0, one.seconds(price)) for one in several}
    best = min(seconds, key=seconds.__getitem__)
    if recorded is stage.draft.func and price(stage.functions) < seconds[best][1]:
        where = " as one of several stages of a kernel" if merged else f": now {seconds[best][1] * 1e6:.1f} µs"
        return Refused(f"{best.summary}, which takes longer{where}")
    return best


def _usable(
    stage: Stage,
    recorded: tirx.PrimFunc,
    logs: Sequence[TuningLog],
    device: GpuDevice,
    price: Price | None,
    merged: bool,
    left_out: list[str],
) -> Iterator[_Tuned]:
    """The schedules of the records of `recorded` that can be used, the best rank first.

    What would crowd out other stages is named in `left_out`. What does not fit any more is noted in its log and
    skipped, if it is the stage's own record.
    """
    records = _ranked(recorded, logs, device)
    measured = [pair for pair in records if pair[0].origin.figure == "measured"]
    changed: list[_Tuned] = []
    for record, log in measured:
        tuned = _used(record, log, stage, recorded, device, price, merged, left_out)
        if tuned is not None and tuned.changed:
            changed.append(tuned)
        elif tuned is not None:
            yield tuned
    waiting = iter(changed)
    following = next(waiting, None)
    for record, log in records[len(measured) :]:
        while following is not None and following.record.rank(device.name, measured=False) < record.rank(device.name):
            yield following
            following = next(waiting, None)
        tuned = _used(record, log, stage, recorded, device, price, merged, left_out)
        if tuned is not None:
            yield tuned
    if following is not None:
        yield from (following, *waiting)


def _ranked(func: tirx.PrimFunc, logs: Sequence[TuningLog], device: GpuDevice) -> list[tuple[Record, TuningLog]]:
    """The useful records of a stage, the best first, each with its log."""
    records = [(record, log) for log in logs for record in log.of(func) if record.useful]
    return sorted(records, key=lambda pair: pair[0].rank(device.name))


def _used(
    record: Record,
    log: TuningLog,
    stage: Stage,
    recorded: tirx.PrimFunc,
    device: GpuDevice,
    price: Price | None,
    merged: bool,
    left_out: list[str],
) -> _Tuned | None:
    """The schedule of one record, or why not: in `left_out`, or in its log."""
    workload, origin = _Workload(stage.draft.digest, stage.draft.func), record.origin
    own, own_tiles = recorded is workload.func, stage.schedule.tiles
    answer = _followed(record.recipe, workload, gpu_request(device))
    if isinstance(answer, Refused):
        if own:
            log.problem(record.where, f"its schedule does not fit any more: {answer.reason}")
        return None
    crowded = crowding(answer.tiles, origin.registers, origin.shared_bytes, own_tiles, device) if merged else None
    if crowded is not None and not (own and origin.text):
        left_out.append(_unfit(record, crowded))
        return None
    functions = _lowered(answer, device.arch)
    if isinstance(functions, Refused):
        if own:
            log.problem(record.where, f"its schedule does not fit any more: {functions.reason}")
        return None
    changed = own and bool(origin.text) and origin.text != text_of(functions)
    if changed and origin.figure == "measured":
        log.remark(record.where, f"{record.summary}{_CHANGED}, and taken for what is predicted of this one")
    if changed and merged:
        crowded = crowding(answer.tiles, 0, max(each.shared_bytes for each in functions), own_tiles, device)
    # Those of the product alone say nothing of what is ahead of its sum, those of another text nothing of this one.
    registers = origin.registers if own and not changed else 0
    if crowded is None and price is not None and not registers and price.crowds(functions):
        crowded = Refused("it takes more registers, as estimated, than stages leave each other")
    if crowded is not None:
        left_out.append(_unfit(record, crowded))
        return None
    return _Tuned(_with_registers(answer, registers), functions, record, changed)


def _unfit(record: Record, crowded: Refused) -> str:
    return f"{record.summary}, not used in a kernel of several stages: {crowded.reason}"


@dataclass(frozen=True)
class _Workload:
    """A stage's function, equal to others of the same structure."""

    digest: str
    func: tirx.PrimFunc = field(compare=False)


@lru_cache(maxsize=_MOST_REMEMBERED)
def _followed(recipe: Recipe, workload: _Workload, request: GpuRequest) -> GpuSchedule | Refused:
    """As :func:`followed`. The same stages are asked about with some reductions placed otherwise, or joined."""
    return followed(recipe, workload.func, request)


@lru_cache(maxsize=_MOST_REMEMBERED)
def _with_registers(schedule: GpuSchedule, registers: int) -> GpuSchedule:
    """One object for equal ones: what is known of a schedule's tiles is known by it."""
    return replace(schedule, registers=registers)


@lru_cache(maxsize=_MOST_REMEMBERED)
def _lowered(schedule: GpuSchedule, arch: str) -> tuple[DeviceFunction, ...] | Refused:
    """What a schedule is lowered to, or why it cannot be."""
    try:
        return lower_stage("stage", schedule, cuda_target(arch))
    except LoweringError as error:
        return Refused(str(error))
