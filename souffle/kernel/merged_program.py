"""All kernels of a network: each subprogram merged, equal ones once, with their launches and when tensors are alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm

from souffle.decision import Barrier, Decision
from souffle.kernel.calls import CallPlan
from souffle.kernel.dependences import TileDependences
from souffle.kernel.grid_barrier import barrier_for
from souffle.kernel.kernel_plan import plan_kernel
from souffle.kernel.kernel_shape import KernelShape
from souffle.kernel.merge import MergedKernel, merge
from souffle.kernel.text import format_calls, format_parameters
from souffle.options import LEVELS, Options
from souffle.partition import Partition, PartitionRequest
from souffle.program import Tensor
from souffle.schedule.group import Group
from souffle.schedule.lower.stages import readable_name
from souffle.schedule.stage import Stage, Unit
from souffle.wording import counted

__all__ = ["MergedLaunch", "MergedProgram", "merge_program"]


@dataclass(frozen=True, eq=False)
class MergedLaunch:
    """One launch of a merged kernel.

    Attributes
    ----------
    kernel : int
        Index into :attr:`MergedProgram.kernels`.
    tensors : tuple of Tensor
        For each of the kernel's tensor parameters.
    stages : tuple of Stage or LoopStage
        What it computes, in the order to run.
    groups : tuple of Group
        Stages of it that are computed side by side.
    begun : frozenset of Stage
        Stages of it whose first copies are made while blocks wait.
    """

    kernel: int
    tensors: tuple[Tensor, ...]
    stages: tuple[Unit, ...]
    groups: tuple[Group, ...] = ()
    begun: frozenset[Stage] = frozenset()


@dataclass(frozen=True, eq=False)
class MergedProgram:
    """The kernels of a network.

    Attributes
    ----------
    kernels : tuple of MergedKernel
        Distinct ones, in the order of their first launches.
    barriers : tuple of tuple of Barrier
        Why each kernel waits (in its first launch), in the order of its text.
    launches : tuple of MergedLaunch
        In the order to run.
    decisions : tuple of Decision
        On their blocks.
    first, last : mapping of Tensor to int
        The epochs in which a tensor that kernels write is first written and last touched, over all launches.
    """

    kernels: tuple[MergedKernel, ...]
    barriers: tuple[tuple[Barrier, ...], ...]
    launches: tuple[MergedLaunch, ...]
    decisions: tuple[Decision, ...]
    first: Mapping[Tensor, int]
    last: Mapping[Tensor, int]

    def __str__(self) -> str:
        """The launches in their order, each kernel's calls at its first one; then the kernels' TensorIR."""
        first: dict[int, int] = {}
        texts = [f"{counted(len(self.launches), 'launch', 'launches')} of {counted(len(self.kernels), 'kernel')}"]
        for number, launch in enumerate(self.launches):
            kernel = self.kernels[launch.kernel]
            name = f"launch {number}, {kernel.name}"
            known = first.setdefault(launch.kernel, number)
            if known == number:
                texts.append(f"{name}: {format_calls(kernel.shape, launch.tensors, self.barriers[launch.kernel])}")
            else:
                given = format_parameters(kernel.shape, launch.tensors)
                texts.append("\n".join([f"{name}: as launch {known}, given", *given]))
        texts += [f"TensorIR of {kernel.name}\n{kernel.func.script().rstrip()}" for kernel in self.kernels]
        return "\n\n".join(texts)


def merge_program(
    request: PartitionRequest, partition: Partition, options: Options, dependences: TileDependences | None = None
) -> MergedProgram:
    """Merge each subprogram into one kernel.

    Parameters
    ----------
    request : PartitionRequest
        The stages, lowered, and the analysis of their program.
    partition : Partition
        Where kernels begin and end.
    options : Options
        Its level says whether weights are asked for ahead of barriers (V4); it has the grid barrier and its limit.
    dependences : TileDependences, optional
        Those that are known already.
    """
    constants, live, prefetch = request.analysis.program.constants, _Liveness(), LEVELS[options.level].reuse
    dependences = TileDependences() if dependences is None else dependences
    shapes: dict[KernelShape, int] = {}
    reasons: list[tuple[Barrier, ...]] = []
    decisions: list[Decision] = []
    launches: list[MergedLaunch] = []
    for subprogram in partition.subprograms:
        calls = plan_kernel(subprogram, request, constants, options.waiting, dependences, prefetch=prefetch, parts=True)
        number = shapes.setdefault(calls.shape, len(shapes))
        if number == len(reasons):
            reasons.append(calls.barriers)
            decisions += calls.decisions
        launches.append(MergedLaunch(number, calls.tensors, calls.stages, calls.groups, calls.begun))
        live.kernel(calls)
    names = _kernel_names(len(shapes), launches)
    functions = dict.fromkeys(function for shape in shapes for function in shape.called)
    global_vars = {function: tvm.ir.GlobalVar(function.name) for function in functions}
    barrier = barrier_for(options.grid_barrier, options.watchdog_ms)
    blocks = max((shape.tiles for shape in shapes if shape.ticks), default=0)
    kernels = tuple(
        merge(name, shape, global_vars, barrier, number, blocks)
        for number, (name, shape) in enumerate(zip(names, shapes, strict=True))
    )
    return MergedProgram(kernels, tuple(reasons), tuple(launches), tuple(decisions), live.first, live.last)


class _Liveness:
    """First and last epoch of each tensor, over all kernels of a network."""

    def __init__(self) -> None:
        self.epoch = 0
        self.first: dict[Tensor, int] = {}
        self.last: dict[Tensor, int] = {}

    def kernel(self, calls: CallPlan) -> None:
        for touch in calls.touches:
            if touch.writes:
                begins = self.epoch + touch.first
                self.first[touch.tensor] = min(begins, self.first.get(touch.tensor, begins))
            if touch.tensor in self.first:
                self.last[touch.tensor] = max(self.epoch + touch.last, self.last.get(touch.tensor, 0))
        # What a kernel only reads nvcc may load with ld.global.nc, past the coherent cache: PTX wants such memory
        # unwritten until the kernel ends, under whatever name.
        written = {touch.tensor for touch in calls.touches if touch.writes}
        for tensor in {touch.tensor for touch in calls.touches} & self.first.keys() - written:
            self.last[tensor] = self.epoch + calls.length - 1
        self.epoch += calls.length


def _kernel_names(count: int, launches: Sequence[MergedLaunch]) -> list[str]:
    """Names that say what the kernel computes: after the last stage of its first launch."""
    names = [""] * count
    for launch in launches:
        name = f"kernel{launch.kernel}_{readable_name(launch.stages[-1].name)}"
        names[launch.kernel] = names[launch.kernel] or name
    return names
