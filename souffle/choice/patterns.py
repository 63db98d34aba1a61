"""The kernels of a fusion plan: a pattern is one, as far as its stages need no barrier of the whole grid.

    stages, and the pattern that each is of  →  subprograms

Stages of a pattern that do not depend on each other are packed into one kernel (kernel packing, 003 §5.1), and those
whose dependences stay on one block for every grid run behind a barrier of the block. What else depends on them starts
another kernel: a grid barrier is Souffle's, and no planner of patterns has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from souffle.decision import Barrier, Decision
from souffle.kernel.dependences import TileDependences
from souffle.kernel.merged_program import expected_in
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
        """The kernels of a pattern, each unit in the first that it can be in."""
        kernels: list[list[Unit]] = []
        place: dict[Tensor, int] = {}
        for unit in units:
            first = max((place[tensor] for tensor in unit.inputs if tensor in place), default=0)
            held = next((n for n in range(first, len(kernels)) if self._holds(kernels[n], unit, request)), None)
            if held is None:
                if first < len(kernels):
                    decisions.append(self._cut(kernels[first], unit, request))
                held = len(kernels)
                kernels.append([])
            kernels[held].append(unit)
            place |= dict.fromkeys(unit.outputs, held)
        return kernels

    def _holds(self, kernel: list[Unit], unit: Unit, request: PartitionRequest) -> bool:
        return self._obstacle(kernel, unit, request) is None

    def _cut(self, kernel: list[Unit], unit: Unit, request: PartitionRequest) -> Decision:
        obstacle = self._obstacle(kernel, unit, request)
        if isinstance(obstacle, Barrier):
            waits = f"it would wait for the whole grid after {obstacle.after}, for {obstacle.tensor}"
            reason = f"{waits}: {obstacle.reason}"
        else:
            reason = str(obstacle)
        return Decision("fusion", f"{unit.name} in the kernel of {kernel[-1].name}", False, reason)

    def _obstacle(self, kernel: list[Unit], unit: Unit, request: PartitionRequest) -> Barrier | str | None:
        """Why a unit cannot be in a kernel; ``None`` if it can."""
        if is_extern(unit) or is_extern(kernel[0]):
            return "an operator without an expression is a kernel of its own"
        if isinstance(unit, LoopStage) or isinstance(kernel[0], LoopStage):
            return "a loop is a kernel of its own"
        units = (*kernel, unit)
        if units not in self._known:
            waits = Waits(self.dependences, expected_in(request, units))
            barriers = waits.sequence(units).barriers.values()
            self._known[units] = next((barrier for barrier in barriers if barrier.scope == "grid"), None)
        return self._known[units]
