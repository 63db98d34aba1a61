"""``souffle debug bisect``: the first step of the compiler after which a network is wrong."""

from __future__ import annotations

import argparse
import dataclasses

from souffle.cli.compiler_options import compiler_options
from souffle.cli.model_options import model_options
from souffle.cli.output import Progress, format_table, write_json
from souffle.debug.bisect import BisectReport, Step, bisect

__all__ = ["debug_bisect"]


def debug_bisect(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command; the exit status is 1 if the network is wrong, or the compiler refuses what it made."""
    options = {"verify": "off"} | compiler_options(arguments)
    report = bisect(
        arguments.model,
        level=arguments.level,
        target=arguments.target,
        seed=arguments.seed,
        progress=progress,
        **model_options(arguments),
        **options,
    )
    progress.done()
    if arguments.json:
        write_json(dataclasses.asdict(report) | {"wrong": None if report.wrong is None else report.wrong.name})
    else:
        print(_text(report))
    return 1 if report.wrong is not None or report.failure else 0


def _text(report: BisectReport) -> str:
    lines = [f"{report.model} at {report.level}, {report.precision}, target {report.target}, beside {report.reference}"]
    rows = [
        (
            step.name,
            "" if step.changed else "as before",
            f"{step.compared} of {step.tes}" if step.compared else "outputs",
            "-" if step.error is None else f"{step.error:.1e}",
            "ok" if step.ok else "WRONG",
        )
        for step in report.steps
    ]
    lines.append(format_table(("after", "", "compared", "error of outputs", "result"), rows))
    wrong = report.wrong
    if report.failure:
        lines.append(f"Compiling failed: {report.failure}")
    if wrong is None:
        if not report.failure:
            lines.append("The network is right: after each step its outputs are within the contract.")
        lines += _inside(report)
        return "\n".join(lines)
    lines += ["", f"The outputs are wrong after {wrong.name}, and right before."] if wrong is not report.steps[0] else [
        "", "The outputs are wrong as the model is imported."
    ]  # fmt: skip
    lines += _departure(wrong)
    if report.decisions:
        lines += ["What was decided about it:", *(f"  {decision}" for decision in report.decisions)]
    if report.switches:
        lines.append(f"Right without any one of: {', '.join(report.switches)} (--disable)")
    return "\n".join(lines)


def _inside(report: BisectReport) -> list[str]:
    """Values within that depart though outputs do not."""
    step = next((step for step in report.steps if step.departure is not None), None)
    if step is None:
        return []
    return ["", f"A value inside departs after {step.name}, though outputs do not:", *_departure(step)]


def _departure(step: Step) -> list[str]:
    found = step.departure
    if found is None:
        return [
            "Each program is right: it is what schedules, lowers or emits them. souffle verify --values compares the "
            "stages of what souffle compile writes."
        ]
    what = f"{found.value!r} of the model" if found.value else "inside of an operator"
    lines = [
        f"The first TE that departs is {found.te} ({what}; nodes {found.nodes}), by {found.error:.1e} from "
        f"{found.source}:",
        *(f"  {line}" for line in found.text.splitlines()),
    ]
    if found.unknown:
        lines.append(f"It needs TEs that nothing can be compared with: {', '.join(found.unknown)}")
    return lines
