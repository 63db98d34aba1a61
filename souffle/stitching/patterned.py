"""A program whose TEs stand pattern by pattern, as a fusion plan has them: what stages are formed of.

Patterns stand in the plan's order, each in one piece. What a pattern computes again of another one is a TE of its own
here, which only this pattern reads; one that all readers compute again is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from souffle.cost.device import CostDevice
from souffle.decision import Decision
from souffle.program import TE, ExternTE, Item, Loop, Tensor, TEProgram
from souffle.program.names import NameSupply
from souffle.stitching.graph import graph_of
from souffle.stitching.plan import FusionError, FusionPattern, FusionPlan
from souffle.stitching.planner import FusionPlanner, FusionRequest

__all__ = ["PatternedProgram", "patterned"]


@dataclass(frozen=True, eq=False)
class PatternedProgram:
    """A program with the plans that its TEs are ordered by.

    Attributes
    ----------
    program : TEProgram
        Expanded.
    plans : tuple of FusionPlan
        Of the program, then of the body of each loop.
    pattern_of : mapping of TE, ExternTE or Loop to str
        What names the pattern of each, of bodies too.
    """

    program: TEProgram
    plans: tuple[FusionPlan, ...]
    pattern_of: Mapping[Item, str]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What the planner decided, and each pattern of several TEs."""
        found: list[Decision] = []
        for plan in self.plans:
            found += plan.decisions
            found += [Decision("fusion", f"pattern {pattern.name}", True, str(pattern)) for pattern in plan.fused]
        return tuple(found)

    def __str__(self) -> str:
        """The plans, and the program in their order."""
        return "\n\n".join(map(str, (*self.plans, self.program)))


def patterned(
    program: TEProgram, planner: FusionPlanner, device: CostDevice, policy: str | None = None
) -> PatternedProgram:
    """Plan a program and the bodies of its loops, and order their TEs by the plans.

    Parameters
    ----------
    program : TEProgram
        Fused TEs are taken apart: which of their parts are computed together is what the plan says.
    planner : FusionPlanner
    device : CostDevice
        The GPU that it plans for.
    policy : str, optional
        See :class:`souffle.stitching.planner.FusionRequest`.

    Raises
    ------
    FusionError
        If a plan is not valid, or computes again what is no TE.
    """
    whole = program.expanded()
    names = NameSupply(name for item in _every(whole) for name in (item.name, *(t.name for t in item.outputs)))
    maker = _Maker(planner, device, names, policy)
    ordered = maker.ordered(whole)
    return PatternedProgram(ordered, tuple(maker.plans), maker.pattern_of)


def _every(program: TEProgram) -> list[Item]:
    found: list[Item] = []
    for item in program.tes:
        found += (item, *item.body) if isinstance(item, Loop) else (item,)
    return found


class _Maker:
    def __init__(self, planner: FusionPlanner, device: CostDevice, names: NameSupply, policy: str | None) -> None:
        self.planner, self.device, self.names, self.policy = planner, device, names, policy
        self.plans: list[FusionPlan] = []
        self.pattern_of: dict[Item, str] = {}

    def ordered(self, program: TEProgram) -> TEProgram:
        """A program in the order of its plan, with copies of what is computed again."""
        graph = graph_of(program)
        plan = self.planner.plan(FusionRequest(graph, self.device, self.policy))
        plan.check(graph)
        self.plans.append(plan)
        items: list[Item] = []
        for number, pattern in enumerate(plan.patterns):
            made = self.pattern(program, pattern)
            # By number too: patterns of a body may be named as one outside of it.
            self.pattern_of |= dict.fromkeys(made, f"{len(self.plans)}.{number} {pattern.name}")
            items += made
        return program.with_tes(items)

    def pattern(self, program: TEProgram, pattern: FusionPattern) -> list[Item]:
        """The items of a pattern, which read the copies that it has of others."""
        again, copies, items = set(pattern.recomputed), dict[Tensor, Tensor](), list[Item]()
        for number in sorted((*pattern.members, *pattern.recomputed)):
            item = program.tes[number]
            inputs = tuple(copies.get(tensor, tensor) for tensor in getattr(item, "inputs", ()))
            if number in again:
                if not isinstance(item, TE):
                    raise FusionError(f"{item.name} is {type(item).__name__}; only a TE is computed again elsewhere")
                own = tuple(replace(t, name=self.names.fresh(t.name)) for t in item.outputs)
                copies |= dict(zip(item.outputs, own, strict=True))
                item = replace(item, name=self.names.fresh(item.name), inputs=inputs, outputs=own)
            elif isinstance(item, TE):
                item = item.with_inputs(inputs)
            elif isinstance(item, ExternTE):
                item = item if inputs == item.inputs else replace(item, inputs=inputs)
            elif isinstance(item, Loop):
                item = item.with_body(self.ordered(program.body(item)).tes)
            items.append(item)
        return items
