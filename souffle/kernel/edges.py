"""Which units depend on which, and which stages where units are loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from souffle.program import Tensor
from souffle.schedule.stage import LoopStage, Stage, Unit

__all__ = ["Edge", "edges_between_steps", "edges_of_stages"]


@dataclass(frozen=True)
class Edge:
    """`consumer` depends on `producer`, through a tensor."""

    producer: Unit
    consumer: Unit
    written: Tensor
    read: Tensor

    @property
    def of_loops(self) -> bool:
        """Whether one of the two is a loop."""
        return isinstance(self.producer, LoopStage) or isinstance(self.consumer, LoopStage)


def edges_of_stages(edge: Edge) -> list[Edge] | None:
    """The dependences between stages that one from or to a loop is, in any of its steps.

    ``None`` where a step has its own part of the tensor, and which tiles need which is not looked at. Of stages of one
    tile each it does not matter which part that is: block 0 computes both.
    """
    found: list[Edge] = []
    for producer, written, parted in _writers(edge.producer, edge.written):
        for consumer, read, own in _readers(edge.consumer, edge.read):
            alone = all(function.tiles == 1 for function in (*producer.functions, *consumer.functions))
            if (parted or own) and not alone:
                return None
            if not alone:
                found.append(Edge(producer, consumer, written, read))
    return found


def _writers(unit: Unit, tensor: Tensor) -> Iterator[tuple[Stage, Tensor, bool]]:
    """The stage that writes a tensor, as which of its own, and whether each step writes a part of it."""
    if isinstance(unit, Stage):
        yield unit, tensor, False
        return
    for collected in unit.loop.collected:
        if collected.tensor is tensor:
            yield from ((s, collected.value, collected.every) for s in unit.stages if collected.value in s.outputs)


def _readers(unit: Unit, tensor: Tensor) -> Iterator[tuple[Stage, Tensor, bool]]:
    """The stages that read a tensor, as which of their own, and whether each step reads a part of it."""
    if isinstance(unit, Stage):
        yield unit, tensor, False
        return
    names = [(p.tensor, True) for p in unit.loop.indexed if p.source is tensor]
    names += [(c.tensor, False) for c in unit.loop.carried if tensor in c.initial]
    names += [(tensor, False)] if tensor in unit.loop.invariants else []
    for own, parted in names:
        yield from ((stage, own, parted) for stage in unit.stages if own in stage.inputs)


def edges_between_steps(unit: LoopStage) -> list[tuple[Edge, int, bool]]:
    """What stages of one step do to what others of a later one touch: (dependence, steps, whether the reader is first).

    Values that the steps pass on take turns in memory with one part more than the steps that they are passed on by, so
    that the step after a value's last reader overwrites it. What is only needed within a step lies in one place.
    """
    writer = {t: stage for stage in unit.stages for t in stage.outputs}
    found: list[tuple[Edge, int, bool]] = []
    longest: dict[Tensor, int] = {}
    for c in unit.loop.carried:
        longest[c.value] = max(longest.get(c.value, 0), c.distance)
        for stage in unit.stages:
            if c.tensor in stage.inputs and c.value in writer:
                edge = Edge(writer[c.value], stage, c.value, c.tensor)
                found += [(edge, c.distance, False), (edge, 1, True)]
    kept = {c.value for c in unit.loop.collected if c.every}
    for stage in unit.stages:
        for tensor in stage.inputs:
            if tensor in writer and tensor not in kept:
                found.append((Edge(writer[tensor], stage, tensor, tensor), longest.get(tensor, 0) + 1, True))
    return found
