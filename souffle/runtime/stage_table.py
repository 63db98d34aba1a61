"""The stages of a compiled network as its plan has them: a table for people, made without the compiler."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from souffle.codegen.dataflow import StageUse
from souffle.codegen.plan import Plan, PredictedStage

__all__ = ["StageInfo", "StageTable", "stages_of_plan"]

_WIDTH = 120


@dataclass(frozen=True)
class StageInfo:
    """A stage function of a kernel; equal stages are one.

    Attributes
    ----------
    name : str
        In the kernel's text.
    kernel : str
    calls : int
        How often it stands in the text of the kernel.
    tiles, threads : int or None
        Of one call; None where the plan does not say.
    reads, writes : tuple of str
        The tensors of the first stage that it computes.
    predicted : PredictedStage or None
        What the cost model says of it, where a device is described.
    """

    name: str
    kernel: str
    calls: int
    tiles: int | None
    threads: int | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    predicted: PredictedStage | None


class StageTable(tuple[StageInfo, ...]):
    """The stages of a network in the order of its kernels, which print as a table for each kernel."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def stages_of_plan(plan: Plan) -> StageTable:
    """The stages of a plan: of kernels in the order of their first launch."""
    tensors = () if plan.dataflow is None else plan.dataflow.tensors
    uses: dict[str, tuple[int, int, StageUse]] = {}
    for use in _uses(plan):
        for forms in use.functions:
            for name, tiles, threads in forms:
                uses.setdefault(name, (tiles, threads, use))
    found = []
    for index in dict.fromkeys(launch.kernel for launch in plan.launches):
        kernel = plan.kernels[index]
        predicted = {} if kernel.predicted is None else {stage.name: stage for stage in kernel.predicted.stages}
        for name in dict.fromkeys(kernel.stages):
            tiles, threads, use = uses.get(name, (None, None, None))
            reads, writes = ((), ()) if use is None else (use.inputs, use.outputs)
            found.append(
                StageInfo(
                    name,
                    kernel.name,
                    kernel.stages.count(name),
                    tiles,
                    threads,
                    tuple(tensors[number][0] for number in reads),
                    tuple(tensors[number][0] for number in writes),
                    predicted.get(name if use is None else _predicted_name(name, use)),
                )
            )
    return StageTable(found)


def _predicted_name(name: str, use: StageUse) -> str:
    """What predictions call a function: of the first of a stage, in whatever form, by the stage's label."""
    return use.label if use.label and any(name == form for form, _, _ in use.functions[0]) else name


def _uses(plan: Plan) -> Iterator[StageUse]:
    """The stages of the program, those of a loop once."""
    for item in () if plan.dataflow is None else plan.dataflow.items:
        yield from (item,) if isinstance(item, StageUse) else item.body


def _lines(stages: Sequence[StageInfo]) -> list[str]:
    columns = ("stage", "calls", "tiles", "threads", "registers", "shared B", "µs")
    lines: list[str] = []
    for kernel in dict.fromkeys(stage.kernel for stage in stages):
        inside = [stage for stage in stages if stage.kernel == kernel]
        rows = [columns, *map(_cells, inside)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
        texts = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        lines += ["", f"kernel {kernel}"] if lines else [f"kernel {kernel}"]
        lines.append(f"  {texts[0]}")
        for text, stage in zip(texts[1:], inside, strict=True):
            lines.append(f"  {text}")
            lines += _wrapped("reads", stage.reads) + _wrapped("writes", stage.writes)
    return lines


def _wrapped(what: str, names: Sequence[str]) -> list[str]:
    text = f"{what} {', '.join(names)}"
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8) if names else []


def _cells(stage: StageInfo) -> tuple[str, ...]:
    numbers: list[int | None] = [stage.calls, stage.tiles, stage.threads]
    seconds = "-"
    if stage.predicted is not None:
        numbers += [stage.predicted.registers, stage.predicted.shared_bytes]
        seconds = f"{stage.predicted.seconds * 1e6:.1f}"
    else:
        numbers += [None, None]
    return (stage.name, *("-" if number is None else str(number) for number in numbers), seconds)
