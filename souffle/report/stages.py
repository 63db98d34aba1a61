"""The stages of a plan in the launches that run them, and which of them make what others read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from souffle.codegen.dataflow import Dataflow, StageUse, Steps
from souffle.codegen.plan import Launch, Plan, Touched
from souffle.errors import ArtifactError

__all__ = ["LaunchedStage", "launched_stages", "names_outside", "tes_by_stage"]


@dataclass
class LaunchedStage:
    """A stage of the program where it runs.

    Attributes
    ----------
    use : StageUse
    launch : int
    loop : Steps or None
    touched : list of Touched
    needs, needs_before : list of int
        Stages, by their places in the network's order, that make what it reads: in this step, and in an earlier one.
    """

    use: StageUse
    launch: int
    loop: Steps | None
    touched: list[Touched]
    needs: list[int] = field(default_factory=list)
    needs_before: list[int] = field(default_factory=list)


def launched_stages(plan: Plan) -> tuple[LaunchedStage, ...]:
    """The stages of all launches, in the order in which they run.

    Raises
    ------
    ArtifactError
        If the plan does not say which stages its launches run, as files of before that was kept do not.
    """
    dataflow = plan.dataflow
    uses = {} if dataflow is None else {use.name: (use, loop) for use, loop in _uses(dataflow)}
    found: list[LaunchedStage] = []
    for number, launch in enumerate(plan.launches):
        stages: dict[str, LaunchedStage] = {}
        for touched in launch.touched:
            if touched.stage not in stages:
                if touched.stage not in uses:
                    raise _unknown(plan)
                use, loop = uses[touched.stage]
                stages[touched.stage] = LaunchedStage(use, number, loop, [])
            stages[touched.stage].touched.append(touched)
        if not stages:
            raise _unknown(plan)
        found += stages.values()
    if dataflow is not None:
        _connect(dataflow, found)
    return tuple(found)


def names_outside(dataflow: Dataflow) -> dict[str, str]:
    """What tensors of loops are called where launches touch them (:class:`souffle.codegen.plan.Touched`)."""
    named = [name for name, _, _ in dataflow.tensors]
    found: dict[str, str] = {}
    for loop in (item for item in dataflow.items if isinstance(item, Steps)):
        found.update((named[value], named[outer]) for outer, value, _ in loop.collected)
        found.update((named[tensor], found.get(named[value], named[value])) for tensor, value, _ in loop.carried)
        found.update((named[tensor], named[source]) for tensor, source, _ in loop.indexed)
    return found


def tes_by_stage(launch: Launch, stages: Sequence[LaunchedStage]) -> Iterator[tuple[str, ...]]:
    """The TEs of each stage of a launch: both stand in one order, and a stage has the name of its last TE."""
    names = iter(launch.tes)
    for stage in stages:
        own = []
        for name in names:
            own.append(name)
            if name == stage.use.name:
                break
        yield tuple(own)


def _uses(dataflow: Dataflow) -> Iterator[tuple[StageUse, Steps | None]]:
    for item in dataflow.items:
        if isinstance(item, Steps):
            yield from ((use, item) for use in item.body)
        else:
            yield item, None


def _makers(dataflow: Dataflow) -> dict[int, str]:
    """By tensor, the stage that makes it, by its name; of what a loop collects, the stage of its body that does."""
    makers = {tensor: use.name for use, _ in _uses(dataflow) for tensor in use.outputs}
    for loop in (item for item in dataflow.items if isinstance(item, Steps)):
        makers.update((outer, makers[value]) for outer, value, _ in loop.collected)
    return makers


def _connect(dataflow: Dataflow, stages: Sequence[LaunchedStage]) -> None:
    """Say of each stage which others it needs."""
    makers, places = _makers(dataflow), {stage.use.name: number for number, stage in enumerate(stages)}
    here: dict[int, None]
    before: dict[int, None]
    for stage in stages:
        here, before = {}, {}
        sources = {tensor: source for tensor, source, _ in stage.loop.indexed} if stage.loop else {}
        carried = {tensor: (value, initial) for tensor, value, initial in stage.loop.carried} if stage.loop else {}
        for tensor in stage.use.inputs:
            value, initial = carried.get(tensor, (None, ()))
            if makers.get(value) in places:
                before.setdefault(places[makers[value]])
            for made in (sources.get(tensor, tensor), *initial):
                if makers.get(made) in places:
                    here.setdefault(places[makers[made]])
        stage.needs, stage.needs_before = list(here), list(before)


def _unknown(plan: Plan) -> ArtifactError:
    return ArtifactError(
        f"{plan.name} does not say which stages its launches run, as files of before reports do not; compile the model "
        "again, or give the ONNX model"
    )
