"""LLVM code for a transformed program: what ``target="cpu"`` runs, with parallel and vectorized schedules."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tvm import tirx

from souffle.analysis import Analysis
from souffle.codegen.assemble import traffic
from souffle.codegen.plan import CudaModule, Kernel, Launch, Plan
from souffle.codegen.workspace_layout import place_buffers
from souffle.decision import Decision
from souffle.options import Options
from souffle.program import Tensor, TEProgram
from souffle.schedule.cpu import build_cpu, host_target
from souffle.schedule.drafts import Answer
from souffle.schedule.stage import Stage

__all__ = ["HostScheduler", "assemble_host"]


class HostScheduler:
    """Every draft can be one function on the CPU; dependent reductions stay apart, since they would not share loops."""

    error = 1.0

    def __call__(self, func: tirx.PrimFunc) -> Answer:
        """See :class:`souffle.schedule.drafts.Scheduler`."""
        return Answer(func, "llvm", 0, False, 1, "")

    def least_seconds(self, func: tirx.PrimFunc) -> None:
        """See :class:`souffle.schedule.drafts.Scheduler`: nothing predicts times of the host."""

    def seconds(self, answer: Answer) -> None:
        """None is known."""


def assemble_host(
    program: TEProgram,
    analysis: Analysis,
    stages: Sequence[Stage],
    decisions: Sequence[Decision],
    options: Options,
    progress: Callable[[str], None],
) -> Plan:
    """Compile each distinct stage to LLVM code and place buffers.

    Parameters
    ----------
    program : TEProgram
        The transformed program.
    analysis : Analysis
        Of `program`.
    stages : sequence of Stage
        In order of execution.
    decisions : sequence of Decision
    options : Options
    progress : callable

    Returns
    -------
    Plan
        Its ``arch`` is ``"llvm"`` and the processor, its one module a shared library.
    """
    target = host_target()
    symbols: dict[str, str] = {}
    functions: dict[str, tirx.PrimFunc] = {}
    for stage in stages:
        digest = stage.draft.digest
        if digest not in symbols:
            symbols[digest] = f"stage{len(symbols)}_{re.sub(r'[^0-9A-Za-z_]+', '_', stage.name)[-40:].strip('_')}"
            functions[symbols[digest]] = stage.draft.func
    progress(f"LLVM: {len(functions)} functions for {len(stages)} stages")
    unscheduled: list[tuple[str, str]] = []
    module = build_cpu(functions, target, report=unscheduled)
    decisions = (*decisions, *(Decision("host", name, False, f"no schedule: {why}") for name, why in unscheduled))
    with tempfile.TemporaryDirectory(prefix="souffle-llvm-") as folder:
        library = Path(folder) / "network.so"
        module.export_library(str(library))
        image = library.read_bytes()
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    for time, stage in enumerate(stages):
        for tensor in stage.outputs:
            first[tensor] = last[tensor] = time
        for tensor in stage.inputs:
            last[tensor] = time
    buffers, index, workspace = place_buffers(program, first, last)
    names = list(functions)
    return Plan(
        name=program.name,
        options=replace(options, partition="none", arch=f"llvm {target.attrs.get('mcpu', 'generic')}"),
        buffers=buffers,
        constants={tensor.name: array for tensor, array in program.constants.items()},
        modules=(CudaModule("", image),),
        kernels=tuple(Kernel(name, 0, 1, 1, 0, 0, None, (name,), _members(name, stages, symbols)) for name in names),
        launches=tuple(
            Launch(
                names.index(symbols[stage.draft.digest]),
                tuple(index[t] for t in (*stage.inputs, *stage.outputs)),
                tuple(te.name for te in stage.tes),
                *traffic([stage], analysis),
            )
            for stage in stages
        ),
        workspace_bytes=workspace,
        decisions=tuple(decisions),
    )


def _members(name: str, stages: Sequence[Stage], symbols: dict[str, str]) -> tuple[str, ...]:
    return next(tuple(te.name for te in s.tes) for s in stages if symbols[s.draft.digest] == name)
