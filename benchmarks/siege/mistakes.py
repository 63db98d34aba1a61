"""Plants mistakes in a case: changes of its TensorIR, of its tensors' places, and of what its plan says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.siege.case import Case
from souffle.mutation.barriers import barrier_changes
from souffle.mutation.comparisons import comparison_changes
from souffle.mutation.expression_changes import index_changes, predicate_changes
from souffle.mutation.numbers import number_changes
from souffle.mutation.structure import structure_changes
from souffle.mutation.workspace import aliased, aliases, shared_changes

__all__ = ["Mistake", "mistakes", "planted"]

_CHANGES = (
    *(barrier_changes, predicate_changes, comparison_changes, index_changes, shared_changes),
    *(number_changes, structure_changes),
)


@dataclass(frozen=True, eq=False)
class Mistake:
    """One way to spoil a case.

    Attributes
    ----------
    kind, action, what : str
        As :class:`souffle.mutation.statement_paths.Change` has them.
    make : callable
        Gives the spoiled case.
    """

    kind: str
    action: str
    what: str
    make: Callable[[], Case]


def mistakes(case: Case) -> Iterator[Mistake]:
    """All that there are."""
    for held in ("kernels", "functions"):
        for name, func in getattr(case, held).items():
            for changes in _CHANGES:
                for change in changes(func):

                    def make(change=change, held=held, name=name) -> Case:
                        return replace(case, **{held: {**getattr(case, held), name: change.make()}})

                    yield Mistake(change.kind, change.action, f"{name}: {change.what}", make)
    yield from _of_plan(case)


def _of_plan(case: Case) -> Iterator[Mistake]:
    plan = case.plan
    for alias in aliases(plan, case.kernels):
        one, other = plan.buffers[alias.moved].name, plan.buffers[alias.onto].name
        make = lambda a=alias: replace(case, plan=aliased(plan, a))  # noqa: E731
        yield Mistake("alias", "tensors", f"{one} lies where {other} does", make)
    for number, kernel in enumerate(plan.kernels):
        changed = {
            "shared memory": replace(kernel, dynamic_shared_bytes=kernel.dynamic_shared_bytes // 2),
            "cooperative": replace(kernel, grid_syncs=0),
        }
        for action, other in changed.items():
            if other != kernel:
                kernels = (*plan.kernels[:number], other, *plan.kernels[number + 1 :])
                make = lambda k=kernels: replace(case, plan=replace(plan, kernels=k))  # noqa: E731
                yield Mistake("launch", action, f"{kernel.name} has less: {action}", make)
    for number, buffer in enumerate(plan.buffers):
        if buffer.kind in ("workspace", "output") and buffer.shape[0] > 1:
            smaller = replace(buffer, shape=(buffer.shape[0] // 2,))
            buffers = (*plan.buffers[:number], smaller, *plan.buffers[number + 1 :])
            make = lambda b=buffers: replace(case, plan=replace(plan, buffers=b))  # noqa: E731
            yield Mistake("launch", "tensor", f"{buffer.name} has half of its elements", make)
    if plan.workspace_bytes:
        make = lambda: replace(case, plan=replace(plan, workspace_bytes=plan.workspace_bytes // 2))  # noqa: E731
        yield Mistake("launch", "workspace", "the workspace has half of its bytes", make)
    for number, launch in enumerate(plan.launches[:-1]):
        order = [*plan.launches[:number], plan.launches[number + 1], launch, *plan.launches[number + 2 :]]
        make = lambda o=order: replace(case, plan=replace(plan, launches=tuple(o)))  # noqa: E731
        yield Mistake("order", "launches", f"launches {number} and {number + 1} are swapped", make)
    for number, launch in enumerate(plan.launches):
        for place, index in enumerate(launch.buffers):
            for other, buffer in enumerate(plan.buffers):
                own = plan.buffers[index]
                alike = (buffer.dtype, buffer.shape) == (own.dtype, own.shape)
                if other == index or not alike or "state" in (buffer.kind, own.kind):
                    continue
                given = (*launch.buffers[:place], other, *launch.buffers[place + 1 :])
                launches = (*plan.launches[:number], replace(launch, buffers=given), *plan.launches[number + 1 :])
                make = lambda n=launches: replace(case, plan=replace(plan, launches=n))  # noqa: E731
                yield Mistake("tensor", "launch", f"launch {number} is given {buffer.name} for {own.name}", make)


def planted(case: Case, draw: random.Random) -> tuple[Case, tuple[Mistake, ...]]:
    """A case with some mistakes, mostly one; kinds are drawn first, so that rare ones are not lost."""
    found: list[Mistake] = []
    for _ in range(draw.choice([1, 1, 1, 1, 2, 3])):
        groups: dict[str, dict[str, list[Mistake]]] = {}
        for mistake in mistakes(case):
            groups.setdefault(mistake.kind, {}).setdefault(mistake.action, []).append(mistake)
        kind = draw.choice(sorted(groups))
        action = draw.choice(sorted(groups[kind]))
        mistake = draw.choice(groups[kind][action])
        case = mistake.make()
        found.append(mistake)
    return case, tuple(found)
