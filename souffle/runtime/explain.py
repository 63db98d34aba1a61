"""What was compiled, for people and as data: kernels with their predicted times, then the decisions with reasons."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from souffle.codegen.plan import Kernel, Plan, PredictedStage
from souffle.decision import Barrier
from souffle.options import SOUFFLE
from souffle.runtime.plan_json import certificate_to_json
from souffle.wording import counted

__all__ = [
    "certificate_lines",
    "explain",
    "explain_data",
    "launch_counts",
    "predicted_seconds",
    "shared_bytes",
    "spilled_bytes",
    "stack_bytes",
]

_WIDTH = 120
_NAME_WIDTH = 52
"""Columns for a stage's name, which the CUDA text cuts to about as many."""

_LABEL = 4
"""Columns before a stage's line."""

_NUMBER_IN_A_NAME = re.compile(r"(?<=[A-Za-z_])\d+|(?<=[A-Za-z_][./])\d+")


def launch_counts(plan: Plan) -> list[int]:
    """How often one run of the network launches each kernel."""
    counts = [0] * len(plan.kernels)
    for launch in plan.launches:
        counts[launch.kernel] += 1
    return counts


def shared_bytes(kernel: Kernel) -> int:
    """Of a block, static and dynamic."""
    return kernel.dynamic_shared_bytes + (kernel.resources.static_shared_bytes if kernel.resources else 0)


def spilled_bytes(kernel: Kernel) -> int | None:
    """Stores and loads of spilled registers; None where no CUDA compiler was run."""
    used = kernel.resources
    return None if used is None else used.spill_store_bytes + used.spill_load_bytes


def stack_bytes(kernel: Kernel) -> int | None:
    """Local memory of a thread; None where no CUDA compiler was run, or it was not kept."""
    return None if kernel.resources is None else kernel.resources.stack_bytes


def explain_data(plan: Plan) -> dict[str, Any]:
    """What :func:`explain` shows, as data for JSON; times in seconds."""
    total = predicted_seconds(plan)
    return {
        "name": plan.name,
        "level": plan.options.level,
        "disable": list(plan.options.disable),
        "graph": plan.options.graph,
        "precision": plan.options.precision,
        "fusion": plan.options.fusion,
        "partition": plan.options.partition,
        "arch": plan.options.arch,
        "predicted_on": plan.predicted_on or None,
        "predicted_seconds": total,
        "certificate": None if plan.certificate is None else certificate_to_json(plan.certificate),
        "launches": [launch.kernel for launch in plan.launches],
        "kernels": [
            {
                "name": kernel.name,
                "launches": count,
                "grid_syncs": kernel.grid_syncs,
                "arrivals": kernel.arrivals,
                "tiles": kernel.tiles,
                "most_blocks": kernel.most_blocks,
                "threads": kernel.threads,
                "registers": kernel.resources.registers if kernel.resources else None,
                "spill_bytes": spilled_bytes(kernel),
                "stack_bytes": stack_bytes(kernel),
                "code_bytes": None if kernel.resources is None else kernel.resources.code_bytes,
                "shared_bytes": shared_bytes(kernel),
                "predicted": None if kernel.predicted is None else asdict(kernel.predicted),
                "share": count * kernel.predicted.seconds / total if kernel.predicted and total else None,
                "stages": list(kernel.stages),
                "tes": list(kernel.tes),
                "barriers": [asdict(barrier) for barrier in kernel.barriers],
            }
            for kernel, count in zip(plan.kernels, launch_counts(plan), strict=True)
        ],
        "decisions": [decision._asdict() for decision in plan.decisions],
    }


def explain(plan: Plan) -> str:
    """What was compiled and why, in lines of at most 120 columns.

    Kernels come first, in the order of their first launch, each with its stages, what they ask for, and what the cost
    model says of their time; then where kernels end; then the other decisions by the compiler's stages in their order.
    Decisions that differ only in numbers inside of names, as those of equal layers do, are shown once with their count.
    """
    how = plan.options
    level = how.level + (f" without {', '.join(how.disable)}" if how.disable else "")
    runs = ", for a CUDA graph" if how.graph else ""
    runs += "" if how.watchdog_ms is None else f", waits limited to {how.watchdog_ms:g} ms"
    fusion = "" if how.fusion == SOUFFLE else f"fusion {how.fusion}, "
    lines = [f"{plan.name}: level {level}, {how.precision}, {fusion}partition {how.partition}, {how.arch}{runs}"]
    if plan.others:
        names = (other.processor for other in plan.others)
        lines.append(f"  saved with code for {', '.join(names)}, which takes its place where that suits")
    lines += _summary(plan)
    lines += ["", "subprograms (of a stage: its runs, tiles of one run, what a block asks for alone, time of all runs)"]
    counts, total = launch_counts(plan), predicted_seconds(plan)
    for index in dict.fromkeys([*(launch.kernel for launch in plan.launches), *range(len(plan.kernels))]):
        lines += _kernel(plan.kernels[index], counts[index], total)
    groups: dict[str, list[tuple[str, bool, str]]] = {"partition": []}
    for stage, subject, accepted, reason in plan.decisions:
        groups.setdefault(stage, []).append((subject, accepted, reason))
    for stage, decisions in groups.items():
        if decisions:
            done = sum(accepted for _, accepted, _ in decisions)
            lines += ["", f"{stage}: {done} done, {len(decisions) - done} refused", *_decisions(decisions)]
    return "\n".join(lines)


def _flags(arrivals: int) -> str:
    """Where tiles wait for tiles: how often each block says that it is done."""
    return f", {arrivals} arrivals at flags" if arrivals else ""


def _summary(plan: Plan) -> list[str]:
    syncs = sum(plan.kernels[launch.kernel].grid_syncs for launch in plan.launches)
    arrivals = sum(plan.kernels[launch.kernel].arrivals for launch in plan.launches)
    constants = sum(buffer.nbytes for buffer in plan.buffers if buffer.kind == "constant")
    lines = [
        f"  {len(plan.launches)} launches of {len(plan.kernels)} kernels, {syncs} grid syncs{_flags(arrivals)}; "
        f"{constants} bytes of constants, {plan.workspace_bytes} bytes of workspace"
    ]
    total = predicted_seconds(plan)
    if total is not None:
        parts = [plan.kernels[launch.kernel].predicted for launch in plan.launches]
        launching, waiting = sum(one.launch_seconds for one in parts), sum(one.sync_seconds for one in parts)
        code = sum(one.code_seconds for one in parts)
        what = "waits" if arrivals else "grid syncs"
        lines.append(
            f"  predicted {_us(total)} µs on {plan.predicted_on}, not measured: stages "
            f"{_us(total - launching - waiting - code)}, {what} {_us(waiting)}, launches {_us(launching)}"
            + (f", machine code that is fetched {_us(code)}" if code else "")
        )
    elif not plan.predicted_on:
        lines.append(f"  no times are predicted: no description of a device for {plan.options.arch} was at hand")
    return [*lines, *certificate_lines(plan)]


def certificate_lines(plan: Plan) -> list[str]:
    """The verdict in one line, and each reason where not all was decided; nothing for LLVM code."""
    if plan.options.arch.startswith("llvm"):
        return []
    if plan.certificate is None:
        return ["  certificate: none was made"]
    undecided = [line for reason in plan.certificate.unknown for line in _wrapped(f"undecided: {reason}", 4)]
    assumed = _wrapped(f"assumed: {plan.certificate.assumed}", 4) if plan.certificate.assumed else []
    return [f"  certificate: {plan.certificate.summary}", *assumed, *undecided]


def predicted_seconds(plan: Plan) -> float | None:
    """The time of one run, if every kernel's is predicted."""
    predicted = [plan.kernels[launch.kernel].predicted for launch in plan.launches]
    if not plan.predicted_on or any(one is None for one in predicted):
        return None
    return sum(one.seconds for one in predicted)


def _kernel(kernel: Kernel, count: int, total: float | None) -> list[str]:
    predicted = kernel.predicted
    used = "not compiled for a GPU"
    if kernel.resources is not None:
        spills, stack = spilled_bytes(kernel), stack_bytes(kernel)
        used = f"{kernel.resources.registers} registers" + (f", {spills} bytes spilled" if spills else "")
        used += f", {stack} bytes of stack{_with_a_stack(kernel)}" if stack else ""
        code = kernel.resources.code_bytes
        used += f", {code} bytes of machine code" if code else ""
    head = f"{kernel.name} x{count}"
    if predicted is not None:
        head += f": {_us(count * predicted.seconds)} µs" + (
            f", {100 * count * predicted.seconds / total:.1f} % of the total" if total else ""
        )
    facts = (
        f"{len(kernel.stages)} stages of {len(kernel.tes)} TEs, {kernel.grid_syncs} grid syncs"
        f"{_flags(kernel.arrivals)}, {kernel.tiles} tiles of {kernel.threads // kernel.teams} threads, "
        f"{shared_bytes(kernel)} bytes shared, {used}"
    )
    waits = _barriers(kernel)
    if predicted is None:
        stages = _wrapped(f"stages {', '.join(kernel.stages)}", 4)
        return [*_wrapped(head, 2), *_wrapped(facts, 4), *stages, *waits]
    facts += f", {counted(predicted.blocks_per_sm, 'resident block')} on a multiprocessor"
    facts += f", each of {kernel.teams} teams, which compute tiles as blocks would" * (kernel.teams > 1)
    facts += f", launched with {kernel.most_blocks}, whose barriers take less than those of all that fit" * (
        kernel.most_blocks is not None
    )
    if count > 1:
        facts += f"; each launch {_us(predicted.seconds)} µs"
    return [*_wrapped(head, 2), *_wrapped(facts, 4), *_stages(predicted.stages, predicted.seconds), *waits]


def _with_a_stack(kernel: Kernel) -> str:
    """Which stages have a stack when compiled alone; the others' may be that of registers spilled where all meet."""
    stages = () if kernel.predicted is None else kernel.predicted.stages
    own = [f"{stage.name} {stage.stack_bytes}" for stage in stages if stage.stack_bytes]
    return f" (alone: {', '.join(own)})" if own else ""


def _barriers(kernel: Kernel) -> list[str]:
    """Why the kernel waits where it does; reasons that differ in numbers only, as those of equal layers do, once."""
    alike: dict[str, list[Barrier]] = {}
    for barrier in kernel.barriers:
        alike.setdefault(re.sub(r"\d+", "#", str(replace(barrier, runs=1))), []).append(barrier)
    lines = []
    for barriers in alike.values():
        lines += _wrapped(f"| {replace(barriers[0], runs=sum(barrier.runs for barrier in barriers))}", 4)
    return lines


def _stages(stages: Sequence[PredictedStage], seconds: float) -> list[str]:
    """A table: what each stage asks for alone, and its time in the kernel."""
    columns = ("runs", "tiles", "registers", "shared B", "µs", "share")
    rows = [
        (
            str(stage.runs),
            str(stage.tiles),
            str(stage.registers),
            str(stage.shared_bytes),
            _us(stage.seconds),
            f"{100 * stage.seconds / seconds:.1f} %",
        )
        for stage in stages
    ]
    widths = [max(len(name), *(len(row[i]) for row in rows)) for i, name in enumerate(columns)]
    name_width = min(_NAME_WIDTH, max(len("stage"), *(len(stage.name) for stage in stages)))

    def line(name: str, cells: Sequence[str], bound: str) -> str:
        right = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return f"{' ' * _LABEL}{name.ljust(name_width)}  {right}  {bound}".rstrip()

    return [
        line("stage", columns, "bound by"),
        *(line(_tail(stage.name, name_width), row, stage.bound) for stage, row in zip(stages, rows, strict=True)),
    ]


def _tail(name: str, width: int) -> str:
    return name if len(name) <= width else "…" + name[1 - width :]


def _decisions(decisions: Sequence[tuple[str, bool, str]]) -> list[str]:
    alike: dict[tuple[str, bool], list[str]] = {}
    for subject, accepted, reason in decisions:
        text = f"{subject}: {reason}"
        pattern = _NUMBER_IN_A_NAME.sub("#", text)
        alike.setdefault((pattern, accepted), []).append(text)
    lines = []
    for (_, accepted), texts in alike.items():
        times = f"{len(texts)} x " if len(texts) > 1 else ""
        lines += _wrapped(f"{'+' if accepted else '-'} {times}{texts[0]}", 2)
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    spaces = " " * indent
    return textwrap.wrap(text, _WIDTH, initial_indent=spaces, subsequent_indent=spaces + "    ", break_on_hyphens=False)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
