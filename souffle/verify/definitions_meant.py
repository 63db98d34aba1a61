"""What the program says that each run of a stage function reads and makes: definitions, and which step's.

A definition is a tensor of the program, or what one step of a loop makes of a tensor of its body. A loop's parameters
are no definitions of their own: what is carried is the value of an earlier step, or one from outside; what is indexed
is a part of a tensor from outside; what is collected of a step is the part of the result that it becomes.

Which run of the text is which stage of the program at which step is not taken from anybody: it is looked for. A run may
be any use of its function whose inputs lie where its pointers point to, and the first in the program's order that was
not seen yet is taken. No trust is needed in that choice (:mod:`souffle.verify.definitions_found`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from souffle.codegen.dataflow import Dataflow, Steps
from souffle.verify.tiles_in_a_row import StageRun

__all__ = ["Definition", "Pointee", "Program"]


class Definition(NamedTuple):
    """A tensor of the program; of a loop's body, as one step makes it.

    Two of the same tensor and step are equal.
    """

    tensor: int
    step: int = -1


class Pointee(NamedTuple):
    """What a pointer points to: a definition, so many bytes from its start."""

    of: Definition
    first: int = 0


class StageAtStep(NamedTuple):
    """A stage of the program, at one step: its functions, and what their pointers point to."""

    functions: tuple[tuple[tuple[str, int, int], ...], ...]
    parts: tuple[Pointee, ...]


class Program:
    """The uses of each function, and what is known of definitions.

    Parameters
    ----------
    dataflow : Dataflow
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self.equal: dict[int, int] = {}
        self.open: dict[str, list[StageAtStep]] = {}
        self.last: dict[str, StageAtStep] = {}
        # A stage of several functions that has begun: it, those that are left, and where its tensors are.
        self.begun: tuple[StageAtStep, int, tuple[object, ...]] | None = None
        made: dict[tuple, tuple[int, ...]] = {}
        for item in dataflow.items:
            if isinstance(item, Steps):
                for use in _in_steps(item, dataflow, self.outer):
                    self._add(use)
                continue
            inputs = tuple(map(self.outer, item.inputs))
            # What the same functions make of the same tensors is the same.
            same = made.setdefault((item.functions, inputs), item.outputs)
            self.equal.update(zip(item.outputs, same, strict=True))
            self._add(StageAtStep(item.functions, (*inputs, *map(self.outer, item.outputs))))

    def _add(self, use: StageAtStep) -> None:
        for name, _, _ in use.functions[0]:
            self.open.setdefault(name, []).append(use)

    def outer(self, tensor: int) -> Pointee:
        """A tensor that is not of a loop's body."""
        return Pointee(Definition(self.equal.get(tensor, tensor)))

    def run(
        self, run: StageRun, places: tuple[object, ...], fits: Callable[[tuple[Pointee, ...]], bool]
    ) -> tuple[Pointee, ...] | None:
        """What the pointers of a run should point to: by the first use of its function that fits, else the first.

        The functions of one stage run in a row with the same tensors: what they leave halfway is no definition.
        ``None`` for a run that is no use of its function.
        """
        if self.begun is not None:
            use, number, where = self.begun
            self.begun = (use, number + 1, where) if number + 1 < len(use.functions) else None
            return use.parts if _calls(run, use.functions[number]) and where == places else None
        uses = self.open.get(run.name, [])
        found = next((i for i, use in enumerate(uses) if fits(use.parts)), None)
        use = self.last.get(run.name)
        if uses and not (found is None and use is not None and fits(use.parts)):
            use = self.last[run.name] = uses.pop(found or 0)
        if use is not None and len(use.functions) > 1:
            self.begun = (use, 1, places)
        return use.parts if use is not None and _calls(run, use.functions[0]) else None

    def nbytes(self, of: Definition) -> int:
        """Of all of it."""
        _, elements, size = self.dataflow.tensors[of.tensor]
        return elements * size

    def unit(self, of: Definition) -> int:
        """Bytes of an element."""
        return max(1, self.dataflow.tensors[of.tensor][2])

    def name(self, of: Definition) -> str:
        """For messages."""
        name = self.dataflow.tensors[of.tensor][0]
        return name if of.step < 0 else f"{name} of step {of.step}"


def _calls(run: StageRun, function: tuple[tuple[str, int, int], ...]) -> bool:
    """Whether it is a run of all of a function's tiles by all of its threads, in one of its forms."""
    return (run.name, run.tiles, run.threads) in function


def _in_steps(loop: Steps, dataflow: Dataflow, outer: Callable[[int], Pointee]) -> Iterator[StageAtStep]:
    """The stages of a loop, step by step."""
    inside = {tensor for use in loop.body for tensor in use.outputs}
    kept = {value: (tensor, every) for tensor, value, every in loop.collected}
    indexed = {tensor: (source, stride) for tensor, source, stride in loop.indexed}
    carried = {tensor: (value, initial) for tensor, value, initial in loop.carried}

    def made(value: int, step: int) -> Pointee:
        tensor, every = kept.get(value, (-1, False))
        _, elements, size = dataflow.tensors[value]
        if every:
            return Pointee(outer(tensor).of, step * elements * size)
        return outer(tensor) if tensor >= 0 and step == loop.steps - 1 else Pointee(Definition(value, step))

    def at(tensor: int, step: int) -> Pointee:
        if tensor in indexed:
            source, stride = indexed[tensor]
            return Pointee(outer(source).of, step * stride * dataflow.tensors[source][2])
        if tensor in carried:
            value, initial = carried[tensor]
            return outer(initial[step]) if step < len(initial) else made(value, step - len(initial))
        return made(tensor, step) if tensor in inside else outer(tensor)

    for step in range(loop.steps):
        for use in loop.body:
            yield StageAtStep(use.functions, tuple(at(tensor, step) for tensor in (*use.inputs, *use.outputs)))
