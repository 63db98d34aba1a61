"""Schedules of stages from tuning logs: nothing is searched here, a record is replayed or it is not.

Stages are formed before, by the rules alone: which stages there are does not depend on what a log holds, so a record
stays valid when others are added.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

from souffle.analysis import Analysis
from souffle.decision import Decision, Refused
from souffle.errors import SouffleError
from souffle.program import ExternTE, TEProgram
from souffle.program.products import IEEE
from souffle.schedule.drafts import Answer
from souffle.schedule.gpu import sketch_of
from souffle.schedule.gpu.device import ASSUMED_REGISTERS, SHARING, GpuDevice
from souffle.schedule.gpu.forms.blocks import product
from souffle.schedule.gpu.registry import RULES
from souffle.schedule.gpu.rule import MULTIPLIES, GpuRequest, GpuSchedule
from souffle.schedule.gpu.schedule_check import ScheduleError, check_schedule
from souffle.schedule.gpu.scheduler import THREADS, gpu_request
from souffle.schedule.log import KNOB, RULE, Record, TuningLog, workload_module
from souffle.schedule.lower import DeviceFunction, LoweringError, cuda_target, lower_stage
from souffle.schedule.stage import LoopStage, Stage, StageDraft, Unit, draft_stage, map_stages
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import collect, const_int

__all__ = [
    "NATIVE_RULE",
    "TunedAnswers",
    "crowding",
    "native_schedule",
    "replayed",
    "schedule_of_trace",
    "searched_stages",
    "tuned_stages",
]

NATIVE_RULE = "metaschedule"
"""The rule of schedules that MetaSchedule's own sketches give."""

_REPLAYING = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, SouffleError)
"""What a trace raises that does not fit the workload, or is no trace."""

_TENSOR_CORE_CALLS = ("tvm_mma_sync", "ptx_mma", "mma_sync")


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
            reason = f"schedule from the log ({schedule.rule}, {schedule.tiles} tiles): {best.record.summary}"
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
    """The schedule of a record, lowered."""

    schedule: GpuSchedule
    functions: tuple[DeviceFunction, ...]
    record: Record

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
    if price is None or (isinstance(own, _Tuned) and (not merged or own.record.origin.figure == "measured")):
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
    if price is None or first.record.origin.figure == "measured":
        return first
    # By rank, what follows a predicted record is predicted.
    seconds = {one: (one.record.origin.spill_bytes > 0, one.seconds(price)) for one in (first, *usable)}
    best = min(seconds, key=seconds.__getitem__)
    if recorded is stage.draft.func and price(stage.functions) < seconds[best][1]:
        where = " as one of several stages of a kernel" if merged else f": now {seconds[best][1] * 1e6:.1f} µs"
        return Refused(f"{best.record.summary}, which takes longer{where}")
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
    workload, request = _Workload(stage.draft.digest, stage.draft.func), gpu_request(device)
    records = [(record, log) for log in logs for record in log.of(recorded) if record.useful]
    for record, log in sorted(records, key=lambda pair: pair[0].rank(device.name)):
        answer = _replayed(record, workload, request)
        # Those of the product alone say nothing of what is ahead of its sum.
        registers = record.origin.registers if recorded is workload.func else 0
        crowded: Refused | None = None
        if merged and isinstance(answer, GpuSchedule):
            used = (record.origin.registers, record.origin.shared_bytes)
            crowded = crowding(answer.tiles, *used, stage.schedule.tiles, device)
        if crowded is None and isinstance(answer, GpuSchedule):
            functions = _lowered(answer, device.arch)
            if isinstance(functions, Refused):
                answer = functions
            elif price is not None and not registers and price.crowds(functions):
                crowded = Refused("it takes more registers, as estimated, than stages leave each other")
            else:
                yield _Tuned(replace(answer, registers=registers), functions, record)
                continue
        if crowded is not None:
            left_out.append(f"{record.summary}, not used in a kernel of several stages: {crowded.reason}")
        elif isinstance(answer, Refused) and recorded is workload.func:
            log.problem(record.where, f"its schedule does not fit any more: {answer.reason}")


@dataclass(frozen=True)
class _Workload:
    """A stage's function, equal to others of the same structure."""

    digest: str
    func: tirx.PrimFunc = field(compare=False)


@lru_cache(maxsize=256)
def _replayed(record: Record, workload: _Workload, request: GpuRequest) -> GpuSchedule | Refused:
    """As :func:`replayed`. The same stages are asked about with some reductions placed otherwise, or joined."""
    return replayed(record, workload.func, request)


@lru_cache(maxsize=256)
def _lowered(schedule: GpuSchedule, arch: str) -> tuple[DeviceFunction, ...] | Refused:
    """What a schedule is lowered to, or why it cannot be."""
    try:
        return lower_stage("stage", schedule, cuda_target(arch))
    except LoweringError as error:
        return Refused(str(error))


def replayed(record: Record, func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule | Refused:
    """The schedule of a record, or why there is none."""
    if any(step[0] == "Tensorize" for step in record.trace[0]):
        # It registers the intrinsics that such steps name, and reading all of them takes TVM half a minute.
        importlib.import_module("tvm.s_tir.tensor_intrin")
    try:
        sch = s_tir.Schedule(workload_module(func), debug_mask="none", error_render_level="none")
        Trace.apply_json_to_schedule(record.trace, sch)
        return schedule_of_trace(sch, func, request)
    except _REPLAYING as error:
        lines = str(error).strip().splitlines()
        return Refused(f"{type(error).__name__}: {lines[-1][:200] if lines else ''}")


def schedule_of_trace(sch: s_tir.Schedule, func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule | Refused:
    """The schedule that a replayed trace stands for.

    A trace with the annotation ``souffle.rule`` names one of our rules and the values of its knobs, and the rule makes
    the schedule. Any other trace is MetaSchedule's own, and `sch` holds its schedule.

    Parameters
    ----------
    sch : Schedule
        Of :func:`souffle.schedule.log.workload_module`, after the trace.
    func : PrimFunc
        The stage before.
    request : GpuRequest

    Raises
    ------
    SouffleError
        If a knob does not offer the value, or the schedule breaks a rule of stages.
    """
    root = sch.get_sblock("root")
    notes = dict(sch.get(root).annotations)
    rule = notes.get(RULE)
    if rule is None:
        for key in notes:
            if str(key).startswith("souffle."):
                sch.unannotate(root, key)
        return native_schedule(sch.mod["main"].with_attr("global_symbol", "stage"), request)
    sketch = sketch_of(str(rule), func, request)
    if isinstance(sketch, Refused):
        return sketch
    values = {str(k).removeprefix(KNOB): const_int(v) for k, v in notes.items() if str(k).startswith(KNOB)}
    schedule = sketch.with_values(values)
    if isinstance(schedule, GpuSchedule):
        check_schedule(schedule, request)
    return schedule


def native_schedule(func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule:
    """A function that MetaSchedule scheduled, as a stage.

    Virtual threads stay: lowering makes statements of them. All else must obey :func:`check_schedule`.

    Raises
    ------
    ScheduleError
        If it breaks a rule of stages.
    """
    extents: dict[str, int] = {}

    def see(loop: tirx.For) -> tirx.For:
        binding = loop.thread_binding
        if binding is None:
            return loop
        tag = str(binding.thread_tag)
        if tag.startswith("vthread"):
            return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
        extents[tag] = const_int(loop.extent)
        return loop

    body = structural_map(func.body, (tirx.For, see))
    threads = product([extent for tag, extent in extents.items() if tag.startswith("threadIdx")])
    calls = {str(getattr(call.op, "name", "")) for call in collect(func.body, tvm.ir.Call)}
    tensor_cores = any(part in name for name in calls for part in _TENSOR_CORE_CALLS)
    checked = GpuSchedule(func.with_body(body), NATIVE_RULE, extents.get("blockIdx.x", 0), threads, tensor_cores)
    if threads != request.threads:
        raise ScheduleError(f"rule {NATIVE_RULE}: {threads} threads, a block of this kernel has {request.threads}")
    check_schedule(checked, request)
    return replace(checked, func=func)
