"""LLVM code for a transformed program: what ``target="cpu"`` runs, with parallel and vectorized schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from tvm import tirx

from souffle.analysis import Analysis
from souffle.codegen.assemble import traffic
from souffle.codegen.host_library import linked_library
from souffle.codegen.host_order import backwards, by_constants
from souffle.codegen.in_place import in_place
from souffle.codegen.plan import Buffer, CudaModule, Kernel, Launch, Plan
from souffle.codegen.workspace_layout import place_buffers
from souffle.decision import Decision
from souffle.options import WINOGRAD, Options
from souffle.program import Tensor, TEProgram
from souffle.schedule.column_joins import ColumnJoins
from souffle.schedule.cpu import Layout, ScheduledFunction, build_objects, host_target, takes_followers
from souffle.schedule.drafts import Answer
from souffle.schedule.stage import Stage

__all__ = ["HostScheduler", "assemble_host", "host_joins"]


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


def host_joins(options: Options) -> ColumnJoins:
    """Which stages are joined for the threads that a network is compiled for."""
    target = host_target(options.threads, options.processor)
    return ColumnJoins(lambda func, constants: takes_followers(func, constants, target))


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
        In an order of execution; another one may be taken (:mod:`souffle.codegen.host_order`).
    decisions : sequence of Decision
    options : Options
    progress : callable

    Returns
    -------
    Plan
        Its ``arch`` is ``"llvm"`` and the processor, its one module a shared library.
    """
    target = host_target(options.threads, options.processor)
    placed = in_place(program, by_constants(stages, program.constants))
    stages = placed.stages
    symbols: dict[tuple[str, tuple[int, ...], bool], str] = {}
    functions: dict[str, tirx.PrimFunc] = {}
    held: dict[str, tuple[int, ...]] = {}
    members: dict[str, tuple[str, ...]] = {}
    called: list[str] = []
    turned: set[str] = set()
    for stage, back in zip(stages, backwards(stages, program.constants), strict=True):
        # Stages are one function where its text is one, the same of its inputs are constants, and are read one way.
        constant = tuple(i for i, tensor in enumerate(stage.inputs) if tensor in program.constants)
        key = stage.draft.digest, constant, back
        if key not in symbols:
            name = f"stage{len(symbols)}_{re.sub(r'[^0-9A-Za-z_]+', '_', stage.name)[-40:].strip('_')}"
            symbols[key], functions[name], held[name] = name, stage.draft.func, constant
            members[name] = tuple(te.name for te in stage.tes)
            if back:
                turned.add(name)
        called.append(symbols[key])
    progress(f"LLVM: {len(functions)} functions for {len(stages)} stages")
    unscheduled: list[tuple[str, str]] = []
    scheduled: dict[str, ScheduledFunction] = {}
    objects = build_objects(
        functions,
        target,
        folder=options.cache_dir,
        report=unscheduled,
        constants=held,
        scheduled=scheduled,
        winograd=WINOGRAD not in options.disable,
        backwards=turned,
    )
    decisions = (*decisions, *(Decision("host", name, False, f"no schedule: {why}") for name, why in unscheduled))
    image = linked_library(objects)
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    for time, stage in enumerate(stages):
        # What lies in place is first seen where a piece is written, or the whole is read.
        for tensor in (*stage.outputs, *stage.inputs):
            first.setdefault(tensor, time)
            last[tensor] = time
    buffers, index, workspace = place_buffers(program, first, last, placed.within)
    names = list(functions)
    constants = _Constants(program, buffers, index)
    arguments = [constants.arguments(stage, scheduled[name]) for stage, name in zip(stages, called, strict=True)]
    buffers, values, places = constants.kept(arguments)
    return Plan(
        name=program.name,
        options=replace(options, partition="none", arch=f"llvm {target.attrs.get('mcpu', 'generic')}"),
        buffers=buffers,
        constants=values,
        modules=(CudaModule("", image),),
        kernels=tuple(Kernel(n, 0, 1, 1, 0, 0, None, (n,), members[n]) for n in names),
        launches=tuple(
            Launch(
                names.index(name),
                tuple(places[i] for i in given),
                tuple(te.name for te in stage.tes),
                *traffic([stage], analysis),
            )
            for stage, name, given in zip(stages, called, arguments, strict=True)
        ),
        workspace_bytes=workspace,
        decisions=tuple(decisions),
    )


class _Constants:
    """The constants of a network as its functions take them: as they are, or packed.

    Parameters
    ----------
    program : TEProgram
    buffers : sequence of Buffer
    index : mapping of Tensor to int
        Where each tensor is among them.
    """

    def __init__(self, program: TEProgram, buffers: Sequence[Buffer], index: Mapping[Tensor, int]) -> None:
        self._program, self._index = program, index
        self._buffers = list(buffers)
        self._packed: dict[tuple[Tensor, Layout], int] = {}
        self._values = {index[tensor]: array for tensor, array in program.constants.items()}

    def arguments(self, stage: Stage, function: ScheduledFunction) -> tuple[int, ...]:
        """The buffers that a stage's function is called with."""
        tensors = (*stage.inputs, *stage.outputs)
        return tuple(
            self._index[tensors[position]] if layout is None else self._place(tensors[position], layout)
            for position, layout in function.parameters
        )

    def _place(self, tensor: Tensor, layout: Layout) -> int:
        if (tensor, layout) not in self._packed:
            number = sum(1 for other, _ in self._packed if other is tensor)
            name = f"{tensor.name} in panels{f' {number + 1}' if number else ''}"
            self._packed[tensor, layout] = at = len(self._buffers)
            self._values[at] = packed = layout.pack(self._program.constants[tensor])
            packed.flags.writeable = False  # so it is not copied to be called with
            self._buffers.append(Buffer(name, packed.shape, str(packed.dtype), "constant", name))
        return self._packed[tensor, layout]

    def kept(
        self, arguments: Sequence[Sequence[int]]
    ) -> tuple[tuple[Buffer, ...], dict[str, np.ndarray], dict[int, int]]:
        """The buffers without constants that no function takes, the constants, and where each buffer is now."""
        used = {index for each in arguments for index in each}
        kept = [i for i, buffer in enumerate(self._buffers) if buffer.kind != "constant" or i in used]
        values = {self._buffers[i].name: self._values[i] for i in kept if i in self._values}
        return tuple(self._buffers[i] for i in kept), values, {old: new for new, old in enumerate(kept)}
