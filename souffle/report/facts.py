"""A plan → the data of its report. Everything in it is the compiler's own; nothing here needs TVM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from souffle import __version__
from souffle.codegen.plan import Kernel, Plan
from souffle.errors import ArtifactError, OptionError
from souffle.multiprocessor import MOST_REGISTERS, MOST_THREADS, MULTIPROCESSORS
from souffle.options import LEVELS
from souffle.report.schema import (
    FORMAT,
    DeviceFacts,
    KernelFacts,
    LaunchFacts,
    LoopFacts,
    Report,
    StageFacts,
    TeFacts,
    TensorFacts,
    TouchFacts,
    WaitFacts,
)
from souffle.report.stages import LaunchedStage, launched_stages, names_outside, tes_by_stage
from souffle.report.totals import totals
from souffle.runtime.explain import shared_bytes, spilled_bytes, stack_bytes
from souffle.runtime.plan_json import certificate_to_json

__all__ = ["report_of"]

_WORD = re.compile(r"[^\W\d]\w*")


def report_of(plan: Plan, others: Sequence[Plan] = (), tes: Mapping[str, TeFacts] | None = None) -> Report:
    """The data of a report.

    Parameters
    ----------
    plan : Plan
        Of CUDA kernels: what is shown.
    others : sequence of Plan
        The same network at other levels, to compare it with.
    tes : mapping of str to TeFacts, optional
        The TEs of `plan` by name.

    Raises
    ------
    OptionError
        If the plan is of code for the processor.
    ArtifactError
        If it was saved before plans said which stages their launches run.
    """
    if plan.options.arch not in MULTIPROCESSORS:
        raise OptionError(
            f"{plan.name} is compiled for {plan.options.arch}; a report is of CUDA kernels, target='cuda'"
        )
    stages = launched_stages(plan)
    names = {name: number for number, name in enumerate(_tensor_names(stages))}
    first: dict[int, int] = {}
    for number, launch in enumerate(plan.launches):
        first.setdefault(launch.kernel, number)
    loops, loop_of = _loops(stages)
    facts = _stages(plan, stages, names, loop_of)
    _mention(facts, plan)
    levels = sorted([totals(one) for one in (plan, *others)], key=lambda one: one["level"])
    return Report(
        format=FORMAT,
        souffle=__version__,
        name=plan.name,
        shown=plan.options.level,
        merges=LEVELS[plan.options.level].merge,
        options={
            key: getattr(plan.options, key)
            for key in ("precision", "fusion", "partition", "waits", "disable", "graph", "grid_barrier", "watchdog_ms")
        },
        device=_device(plan),
        levels=levels,
        launches=[
            LaunchFacts(
                kernel=launch.kernel,
                like=first[launch.kernel],
                stages=[place for place, stage in enumerate(stages) if stage.launch == number],
                bytes_read=launch.bytes_read,
                bytes_written=launch.bytes_written,
            )
            for number, launch in enumerate(plan.launches)
        ],
        kernels=[_kernel(plan, number) for number in range(len(plan.kernels))],
        stages=facts,
        loops=loops,
        waits=_waits(plan, first, facts, loops, names),
        tensors=_tensors(plan, stages, names),
        decisions=[tuple(decision) for decision in plan.decisions],
        certificate=None if plan.certificate is None else certificate_to_json(plan.certificate),
        tes={} if tes is None else dict(tes),
    )


def _device(plan: Plan) -> DeviceFacts:
    limits = MULTIPROCESSORS[plan.options.arch]
    return DeviceFacts(
        arch=plan.options.arch,
        predicted_on=plan.predicted_on,
        registers=limits.registers,
        registers_of_thread=MOST_REGISTERS,
        shared_bytes=limits.shared_bytes,
        shared_bytes_of_block=limits.shared_bytes - limits.system_bytes,
        threads=limits.threads,
        threads_of_block=MOST_THREADS,
        blocks=limits.blocks,
    )


def _kernel(plan: Plan, number: int) -> KernelFacts:
    kernel = plan.kernels[number]
    used, predicted = kernel.resources, kernel.predicted
    room = None
    if used is not None:
        room = MULTIPROCESSORS[plan.options.arch].room(kernel.threads, shared_bytes(kernel), used.registers)
    return KernelFacts(
        name=kernel.name,
        module=kernel.module,
        launches=[place for place, launch in enumerate(plan.launches) if launch.kernel == number],
        tiles=kernel.tiles,
        threads=kernel.threads,
        teams=kernel.teams,
        grid_syncs=kernel.grid_syncs,
        arrivals=kernel.arrivals,
        most_blocks=kernel.most_blocks,
        registers=None if used is None else used.registers,
        shared_bytes=shared_bytes(kernel),
        spill_bytes=spilled_bytes(kernel),
        stack_bytes=stack_bytes(kernel),
        code_bytes=None if used is None else used.code_bytes,
        room=room,
        blocks_per_sm=None if predicted is None else predicted.blocks_per_sm,
        seconds=None if predicted is None else predicted.seconds,
        launch_seconds=None if predicted is None else predicted.launch_seconds,
        wait_seconds=None if predicted is None else predicted.sync_seconds,
        code_seconds=None if predicted is None else predicted.code_seconds,
    )


def _loops(stages: Sequence[LaunchedStage]) -> tuple[list[LoopFacts], list[int | None]]:
    """The loops of all launches, and for each stage the number of its own."""
    numbers: dict[tuple[int, int], int] = {}
    loops: list[LoopFacts] = []
    loop_of: list[int | None] = []
    for place, stage in enumerate(stages):
        if stage.loop is None:
            loop_of.append(None)
            continue
        number = numbers.setdefault((stage.launch, id(stage.loop)), len(loops))
        if number == len(loops):
            loops.append(LoopFacts(name=stage.loop.name, launch=stage.launch, steps=stage.loop.steps, stages=[]))
        loops[number]["stages"].append(place)
        loop_of.append(number)
    return loops, loop_of


def _stages(
    plan: Plan, stages: Sequence[LaunchedStage], names: Mapping[str, int], loop_of: Sequence[int | None]
) -> list[StageFacts]:
    tes: list[tuple[str, ...]] = []
    for number, launch in enumerate(plan.launches):
        tes += tes_by_stage(launch, [stage for stage in stages if stage.launch == number])
    found = []
    for place, stage in enumerate(stages):
        kernel, runs = plan.kernels[plan.launches[stage.launch].kernel], stage.loop.steps if stage.loop else 1
        functions = _functions(stage, kernel)
        predicted = {} if kernel.predicted is None else {one.name: one for one in kernel.predicted.stages}
        known = predicted.get(stage.use.label)
        found.append(
            StageFacts(
                name=stage.use.name,
                launch=stage.launch,
                loop=loop_of[place],
                runs=runs,
                function=functions[0][0],
                functions=[name for name, _, _ in functions],
                tiles=max(tiles for _, tiles, _ in functions),
                threads=max(threads for _, _, threads in functions),
                touched=[
                    TouchFacts(tensor=names[one.tensor], where=one.where, written=one.written, bytes=one.nbytes)
                    for one in stage.touched
                ],
                needs=stage.needs,
                needs_before=stage.needs_before,
                tes=list(tes[place]),
                decisions=[],
                seconds=None if known is None else known.seconds * runs / known.runs,
                bound=None if known is None else known.bound,
                registers=None if known is None else known.registers,
                shared_bytes=None if known is None else known.shared_bytes,
                stack_bytes=None if known is None else known.stack_bytes,
            )
        )
    return found


def _functions(stage: LaunchedStage, kernel: Kernel) -> list[tuple[str, int, int]]:
    """Of each function of a stage the form that its kernel calls."""
    called = set(kernel.stages)
    return [next((form for form in forms if form[0] in called), forms[0]) for forms in stage.use.functions]


def _mention(facts: Sequence[StageFacts], plan: Plan) -> None:
    """Give each stage the decisions that speak of it."""
    owners: dict[str, list[int]] = {}
    for place, stage in enumerate(facts):
        for name in dict.fromkeys((stage["name"], *stage["tes"], *stage["functions"])):
            owners.setdefault(name, []).append(place)
    for number, decision in enumerate(plan.decisions):
        words = _WORD.findall(f"{decision.subject} {decision.reason}")
        for place in dict.fromkeys(place for word in words for place in owners.get(word, ())):
            facts[place]["decisions"].append(number)


def _waits(
    plan: Plan,
    first: Mapping[int, int],
    facts: Sequence[StageFacts],
    loops: Sequence[LoopFacts],
    names: Mapping[str, int],
) -> list[WaitFacts]:
    """Why each kernel waits, in its first launch."""
    found = []
    outside = {} if plan.dataflow is None else names_outside(plan.dataflow)
    for number, launch in first.items():
        kernel = plan.kernels[number]
        runs = sum(barrier.runs for barrier in kernel.barriers if barrier.scope != "block")
        # A name is a stage's, or a loop's, which begins with one stage and ends with another.
        ends = {stage["name"]: (place, place) for place, stage in enumerate(facts) if stage["launch"] == launch}
        own = {loop["name"]: (loop["stages"][0], loop["stages"][-1]) for loop in loops if loop["launch"] == launch}
        ends.update(own)
        entered: set[int] = set()
        for barrier in kernel.barriers:
            if barrier.before not in ends or barrier.after not in ends:
                raise ArtifactError(
                    f"{kernel.name} waits before {barrier.before}, after {barrier.after}: no stages of it"
                )
            at, after = ends[barrier.before][0], ends[barrier.after][1]
            place, loop = "loop" if barrier.before in own else "before", facts[at]["loop"]
            if place == "before" and loop is not None and loop not in entered:
                # The first that a loop's text has is the one between its steps.
                entered.add(loop)
                place, at = "steps", loops[loop]["stages"][0]
            seconds = None if kernel.predicted is None else 0.0
            if kernel.predicted is not None and barrier.scope != "block":
                seconds = kernel.predicted.sync_seconds * barrier.runs / runs
            found.append(
                WaitFacts(
                    launch=launch,
                    scope=barrier.scope,
                    place=place,
                    at=at,
                    before=ends[barrier.before][0],
                    after=after,
                    tensor=names.get(outside.get(barrier.tensor, barrier.tensor)),
                    tensor_name=barrier.tensor,
                    reason=barrier.reason,
                    runs=barrier.runs,
                    seconds=seconds,
                )
            )
    return found


def _tensor_names(stages: Sequence[LaunchedStage]) -> dict[str, None]:
    """The tensors that stages touch, each once, in the order in which they first do."""
    return dict.fromkeys(one.tensor for stage in stages for one in stage.touched)


def _tensors(plan: Plan, stages: Sequence[LaunchedStage], names: Mapping[str, int]) -> list[TensorFacts]:
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    sizes = {name: elements * size for name, elements, size in plan.dataflow.tensors} if plan.dataflow else {}
    found = []
    for name in names:
        buffer = buffers.get(name)
        found.append(
            TensorFacts(
                name=name,
                label=name if buffer is None else buffer.label,
                kind="chip" if buffer is None else buffer.kind,
                shape=None if buffer is None else list(buffer.shape),
                dtype=None if buffer is None else buffer.dtype,
                bytes=sizes.get(name, 0) if buffer is None else buffer.nbytes,
                read=0,
                written=0,
                makers=[],
                readers=[],
                near=0,
            )
        )
    for place, stage in enumerate(stages):
        for one in stage.touched:
            tensor = found[names[one.tensor]]
            tensor["written" if one.written else "read"] += one.nbytes
            stages_of = tensor["makers" if one.written else "readers"]
            stages_of += [place] if place not in stages_of else []
            tensor["near"] += one.where != "global"
    return found
