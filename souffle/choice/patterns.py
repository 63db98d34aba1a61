"""The kernels of a fusion plan: a pattern is one, as far as its stages need no barrier of the whole grid.

    stages, and the pattern that each is of  →  subprograms

Stages of a pattern that do not depend on each other are packed into one kernel (kernel packing, 003 §5.1), and those
whose dependences stay on one block for every grid run behind a barrier of the block. What else depends on them starts
another kernel: a grid barrier is Souffle's, and no planner of patterns has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, takewhile

from souffle.decision import Barrier, Decision
from souffle.kernel.dependences import TileDependences
from souffle.kernel.kernel_plan import expected_in
from souffle.kernel.waits import Waits
from souffle.partition import Partition, PartitionRequest, Subprogram
from souffle.partition.planner import is_extern
from souffle.program import Item, Tensor
from souffle.schedule.stage import LoopStage, Unit

__all__ = ["PatternKernels"]


class PatternKernels:
    """The partition of a plan of patterns.

    Parameters
    ----------
    pattern_of : mapping of TE, ExternTE or Loop to str
        The pattern of each item of the program. Stages of a pattern follow each other.
    dependences : TileDependences
        What is found out about the tiles of stages is kept in it.
    """

    name = "patterns"
    measures = False

    def __init__(self, pattern_of: Mapping[Item, str], dependences: TileDependences) -> None:
        self.pattern_of, self.dependences = pattern_of, dependences
        self._known: dict[tuple[Unit, ...], Barrier | None] = {}

    def plan(self, request: PartitionRequest) -> Partition:
        """See :meth:`souffle.partition.planner.Planner.plan`."""
        subprograms: list[Subprogram] = []
        decisions: list[Decision] = []
        for _, group in groupby(request.stages, self._pattern):
            units = list(group)
            kernels = self._kernels(units, request, decisions)
            subprograms += [Subprogram(tuple(kernel)) for kernel in kernels]
        return Partition(tuple(subprograms), tuple(decisions))

    def _pattern(self, unit: Unit) -> str:
        return self.pattern_of[unit.loop if isinstance(unit, LoopStage) else unit.tes[0]]

    def _kernels(self, units: list[Unit], request: PartitionRequest, decisions: list[Decision]) -> list[list[Unit]]:
        """The kernels of a pattern, each unit in the first that it can be in; why not in the first of all is noted."""
        kernels: list[list[Unit]] = []
        place: dict[Tensor, int] = {}
        for unit in units:
            first = max((place[tensor] for tensor in unit.inputs if tensor in place), default=0)
            obstacles = (self._obstacle(kernel, unit, request) for kernel in kernels[first:])
            refused = list(takewhile(lambda obstacle: obstacle is not None, obstacles))
            held = first + len(refused)
            if held == len(kernels):
                if refused:
                    subject = f"{unit.name} in the kernel of {kernels[first][-1].name}"
                    decisions.append(Decision("fusion", subject, False, refused[0]))
                kernels.append([])
            kernels[held].append(unit)
            place |= dict.fromkeys(unit.outputs, held)
        return kernels

    def _obstacle(self, kernel: list[Unit], unit: Unit, request: PartitionRequest) -> str | None:
        """Why a unit cannot be in a kernel; ``None`` if it can."""
        if is_extern(unit) or is_extern(kernel[0]):
            return "an operator without an expression is a kernel of its own"
        if isinstance(unit, LoopStage) or isinstance(kernel[0], LoopStage):
            return "a loop is a kernel of its own"
        units = (*kernel, unit)
        if units not in self._known:
            waits = Waits(self.dependences, expected_in(request, units))
            self._known[units] = next((b for b in waits.sequence(units).barriers.values() if b.scope == "grid"), None)
        barrier = self._known[units]
        if barrier is None:
            return None
        return f"it would wait for the whole grid after {barrier.after}, for {barrier.tensor}: {barrier.reason}"
