"""What each stage function of a network is to compute: the TensorIR that its stage was scheduled from, and of what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tvm import tirx

from souffle.codegen.dataflow import Dataflow, StageUse, Steps
from souffle.program import Loop, Tensor, TEProgram
from souffle.schedule.lower import DeviceFunction, LoweringError, partial_function
from souffle.schedule.lower.parts import part_forms
from souffle.schedule.lower.prologues import rests_of
from souffle.schedule.lower.teams import team_forms
from souffle.schedule.stage import LoopStage, Stage, Unit, flat_stages

__all__ = ["StageDefinition", "dataflow_of", "stage_definitions"]


@dataclass(frozen=True, eq=False)
class StageDefinition:
    """A stage as it was before it was scheduled, and what computes it.

    Attributes
    ----------
    func : tirx.PrimFunc
        Not scheduled; inputs, then outputs.
    functions : tuple of (str, int, int)
        The names of its functions in the text, with their tiles and threads; together they make the outputs. A stage
        whose functions are called in two forms (:mod:`souffle.schedule.lower.fewer_threads`) has a definition for each.
    """

    func: tirx.PrimFunc
    functions: tuple[tuple[str, int, int], ...]


def stage_definitions(units: Sequence[Unit], called: Collection[DeviceFunction]) -> tuple[StageDefinition, ...]:
    """The distinct stages of a network.

    Parameters
    ----------
    units : sequence of Stage or LoopStage
        All of them, lowered.
    called : collection of DeviceFunction
        Those that kernels call, in the form in which they do; each is in a definition.
    """
    found: dict[tuple, StageDefinition] = {}
    for stage in flat_stages(units):
        forms = [[form for form in _forms(function) if form in called] for function in stage.functions]
        if not all(forms):
            continue
        for number in range(max(map(len, forms))):
            chosen = tuple(several[min(number, len(several) - 1)] for several in forms)
            listed = tuple((f.name, f.tiles, f.threads) for f in chosen)
            found.setdefault((stage.draft.digest, *chosen), StageDefinition(stage.draft.func, listed))
    return tuple(found.values())


def dataflow_of(program: TEProgram, units: Sequence[Unit], called: Collection[DeviceFunction]) -> Dataflow:
    """What a program says of its stages: which definitions each reads and makes.

    Parameters
    ----------
    program : TEProgram
    units : sequence of Stage or LoopStage
        All of its stages, lowered, in topological order.
    called : collection of DeviceFunction
        Those that kernels call, in the form in which they do.
    """
    numbers: dict[Tensor, int] = {}

    def number(tensor: Tensor) -> int:
        return numbers.setdefault(tensor, len(numbers))

    def use(stage: Stage) -> StageUse:
        listed = tuple(
            tuple((form.name, form.tiles, form.threads) for form in _forms(own) if form in called)
            for own in stage.functions
        )
        inputs, outputs = (tuple(map(number, tensors)) for tensors in (stage.inputs, stage.outputs))
        return StageUse(listed, inputs, outputs, stage.name, stage.label)

    def steps(loop: Loop, stages: Sequence[Stage]) -> Steps:
        indexed = tuple((number(p.tensor), number(p.source), p.stride) for p in loop.indexed)
        carried = tuple((number(p.tensor), number(p.value), tuple(map(number, p.initial))) for p in loop.carried)
        collected = tuple((number(c.tensor), number(c.value), c.every) for c in loop.collected)
        return Steps(loop.steps, tuple(map(use, stages)), indexed, carried, collected, loop.name)

    items = tuple(steps(unit.loop, unit.stages) if isinstance(unit, LoopStage) else use(unit) for unit in units)
    inputs = zip(program.input_names, map(number, program.inputs), strict=True)
    outputs = zip(program.output_names, map(number, program.outputs), strict=True)
    constants = ((tensor.name, number(tensor)) for tensor in program.constants)
    edges = tuple(inputs), tuple(constants), tuple(outputs)
    return Dataflow(tuple((t.name, t.size, t.itemsize) for t in numbers), *edges, items)


def _forms(function: DeviceFunction) -> tuple[DeviceFunction, ...]:
    forms = [function, *part_forms(function)]
    with suppress(LoweringError):
        forms.append(partial_function(function))
    forms += [rest for one in forms for rest in rests_of(one)]
    in_teams = [form for one in forms for form in team_forms(one)]
    return tuple(dict.fromkeys((*forms, *in_teams)))
