"""Templates in the compiler: a hook that gives some TEs of a program the schedules of templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from souffle.program import TE, TEProgram
from souffle.schedule.gpu import GpuRequest, schedule_gpu
from souffle.schedule.stage import Stage, Stages, Unit, draft_stage
from souffle.stitching.template import Template, TemplateError
from souffle.stitching.template_schedule import stage_by

__all__ = ["by_templates"]


def by_templates(
    *templates: Template | str, cta_size: int = 256, cta_num: int | None = None, arch: str = "sm_90"
) -> Callable[[str, object], object]:
    """A hook for :func:`souffle.compile`, which schedules patterns of TEs by templates and others as without it.

    A pattern is the TEs that a template names and, written into these, the element-wise TEs that only they read. The
    last one's result is in global memory; the others' may be needed by the pattern alone. Level ``"V0"`` leaves the TEs
    as the program has them.

    Parameters
    ----------
    templates : Template or str
        One for each pattern; a template without names is of a program's only TE.
    cta_size, cta_num
        See :func:`souffle.stitching.template_schedule.scheduled_by`.
    arch : str
        What stages are scheduled for that a pattern has taken TEs of.

    Raises
    ------
    TemplateError
        While the program is compiled, if a template does not go with it.
    """
    given = [Template(one) if isinstance(one, str) else one for one in templates]
    programs: list[TEProgram] = []

    def hook(name: str, result: object) -> object:
        if name == "roll":
            programs[:] = [result]
        if name != "schedule":
            return result
        (program,) = programs
        made = []
        for template in given:
            tes = _pattern(program, template)
            made.append(stage_by(tes, program, template, cta_size=cta_size, cta_num=cta_num))
        return _replaced(result, made, program, GpuRequest(arch))

    return hook


def _pattern(program: TEProgram, template: Template) -> list[TE]:
    """The TEs that a template is of."""
    named = [schedule.name for schedule in template.schedules]
    known = {item.name for item in program.tes}
    if not named[0]:
        if len(program.tes) != 1:
            raise TemplateError(f"{template} names no TE, and {program.name} has {len(program.tes)}")
        return list(program.tes)
    for name in named:
        if name not in known:
            raise TemplateError(f"{name} is no TE of {program.name}, whose TEs are {', '.join(sorted(known))}")
    found: set[object] = set()
    for item in reversed(program.tes):
        inlined = isinstance(item, TE) and not item.is_reduction and not any(t in program.outputs for t in item.outputs)
        readers = [reader for tensor in item.outputs for reader in program.consumers[tensor]]
        if item.name in named or (inlined and readers and all(reader in found for reader in readers)):
            found.add(item)
    return [item for item in program.tes if item in found]


def _replaced(units: Sequence[Unit], made: Sequence[Stage], program: TEProgram, request: GpuRequest) -> Stages:
    """Stages with some for whose TEs there are others now, in topological order."""
    taken: set[object] = set()
    for stage in made:
        twice = [one.name for one in stage.tes if one in taken]
        if twice:
            raise TemplateError(f"{', '.join(twice)} is of two patterns")
        taken |= set(stage.tes)
    waiting: list[Unit] = list(made)
    for unit in units:
        rest = [one for one in unit.tes if one not in taken]
        if len(rest) == len(unit.tes):
            waiting.append(unit)
            continue
        for one in rest:
            draft = draft_stage([one], program)
            waiting.append(Stage(draft, schedule_gpu(draft.func, request)[0]))
    defined = {tensor for unit in waiting for tensor in unit.outputs}
    order: list[Unit] = []
    while waiting:
        ready = [unit for unit in waiting if not any(tensor in defined for tensor in unit.inputs)]
        order += ready
        defined -= {tensor for unit in ready for tensor in unit.outputs}
        waiting = [unit for unit in waiting if unit not in ready]
        if not ready:
            raise TemplateError(f"{', '.join(unit.name for unit in waiting)} need each other: a pattern is not convex")
    return Stages(order)
