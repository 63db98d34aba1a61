"""A template as a schedule: blocks, warps and threads of TensorIR loops (FusionStitching 2019, §5.1 to §5.3).

A TE whose result the pattern gives is a root, and its result is in global memory; what others of the pattern read as
well is stored by the blocks that have it, each element once. Every other TE is attached to what reads it, by the
paper's composition schemes:

- **packing**: a root. Roots that share nothing are loops of their own.
- **block**: its schedule has an ``S``. It is computed by each block with a schedule of its own, and its result is in
  shared memory. The layout constraint (§5.3: "only accessed within a single thread block context") is that a block
  computes just what it reads of it, which ``template_grid.py`` sees to.
- **warp**: its schedule has no ``S`` and reduces across the lanes of a warp (``CTA`` beside ``WARP``). The result is in
  registers of all lanes, computed in the loop over warps of what reads it.
- **thread**: its schedule has no ``S`` and reduces nothing across threads. It is computed in registers of the thread
  that reads it, once for each that does. An element-wise TE without a schedule is written into what reads it.

All nests share the threads of the block: where two divide them differently, as 8 warps of 32 lanes and 64 rows of 4
threads, ``threadIdx`` gets the dimensions that both can be written in. What comes out is an ordinary schedule of a
stage, lowered, checked and proven as others are. What does not fit is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import s_tir, tirx

from souffle.program import TE, ExternTE, TEProgram
from souffle.schedule.gpu.rule import GpuSchedule, does_not_apply
from souffle.schedule.stage import Stage, draft_stage
from souffle.stitching.graph import pattern_graph
from souffle.stitching.layout import AxisSet, axis_sets
from souffle.stitching.template import OpSchedule, Template, TemplateError
from souffle.stitching.template_launch import TemplateOp, Tiling
from souffle.stitching.template_nests import Nests
from souffle.stitching.template_ops import op_of
from souffle.stitching.template_pattern import Pattern

__all__ = ["scheduled_by", "stage_by"]

RULE = "template"
"""What ``explain`` shows in the place of a rule's name."""

_MOST_DIMENSIONS = 3
"""Of ``threadIdx``: x, y and z."""


def stage_by(
    tes: Sequence[TE | ExternTE],
    program: TEProgram,
    template: Template | str,
    *,
    cta_size: int = 256,
    cta_num: int | None = None,
) -> Stage:
    """Some TEs of a program as one stage that a template schedules.

    Parameters
    ----------
    tes : sequence of TE
        In topological order. Those that others of the program need have schedules, too.
    program : TEProgram
        Which they are of.
    template, cta_size, cta_num
        See :func:`scheduled_by`. The names in the template are those of the TEs.

    Raises
    ------
    TemplateError
        If the template is not one of these TEs, or cannot be had; the message says why.
    """
    template = Template(template) if isinstance(template, str) else template
    for one in tes:
        if not isinstance(one, TE):
            raise TemplateError(f"{one.name} is {type(one).__name__}; a template schedules TEs of one statement")
        if len(one.outputs) != 1:
            raise TemplateError(f"{one.name} has {len(one.outputs)} outputs; a template schedules TEs of one")
    draft = draft_stage(tes, program)
    graph = pattern_graph(tes, program)
    kept = [number for number, one in enumerate(tes) if getattr(template.of_te(one.name), "shared", False)]
    sets = axis_sets(graph, range(len(tes)), kept)
    ops = [op_of(one) for one in tes]
    return Stage(draft, scheduled_by(draft.func, ops, template, sets=sets, cta_size=cta_size, cta_num=cta_num))


def scheduled_by(
    func: tirx.PrimFunc,
    ops: Sequence[TemplateOp],
    template: Template,
    *,
    sets: Sequence[AxisSet] = (),
    cta_size: int = 256,
    cta_num: int | None = None,
) -> GpuSchedule:
    """The schedule of a stage's function by a template.

    Parameters
    ----------
    func : tirx.PrimFunc
        A block for each operation, in order, named ``t0``, ``t1`` and so on.
    ops : sequence of Op
        In topological order.
    template : Template
        A template without names is of the only operation.
    sets : sequence of AxisSet
        Which of the operations' axes are one, of those that several nests can cut.
    cta_size : int
        Threads of a block.
    cta_num : int, optional
        Blocks, each of which takes several of those that ``GRID`` names where there are fewer; as many if not given.

    Raises
    ------
    TemplateError
        If it does not go with the operations, or with the machine.
    """
    known = _named(ops, template)
    try:
        pattern = Pattern(func, ops, known, cta_size)
        nests = Nests(pattern, _dimensions(pattern.tilings.values(), cta_size))
        grids = nests.grids(sets)
        most = max(grid.units for grid in grids.values())
        if cta_num is not None and not 1 <= cta_num <= most:
            raise TemplateError(f"cta_num={cta_num}: GRID divides {ops[-1].name} into {most}, for 1 to {most} blocks")
        made = nests.scheduled(grids, cta_num)
    except s_tir.ScheduleError as error:
        raise TemplateError(f"{template}: {does_not_apply(error).reason}") from error
    return GpuSchedule(made, RULE, cta_num or most, cta_size, way=str(template))


def _named(ops: Sequence[TemplateOp], template: Template) -> dict[int, OpSchedule]:
    """The schedule of each operation that has one."""
    names = [op.name for op in ops]
    first = template.schedules[0]
    if not first.name:
        if len(ops) != 1:
            raise TemplateError(f"{template} names no TE, and the pattern has {len(ops)}: {', '.join(names)}")
        return {0: first}
    for schedule in template.schedules:
        if schedule.name not in names:
            raise TemplateError(f"{schedule.name} is none of the pattern's TEs, which are {', '.join(names)}")
    found = {names.index(one.name): one for one in template.schedules}
    for number, op in enumerate(ops):
        if number not in found and (any(op.reduced) or number == len(ops) - 1):
            what = "a reduction" if any(op.reduced) else "the pattern's last TE"
            raise TemplateError(f"{op.name} has no schedule; {what} needs one, others are written into their readers")
    return found


def _dimensions(tilings: Iterable[Tiling], cta_size: int) -> tuple[int, ...]:
    """Extents of ``threadIdx`` from x on, in which every operation's groups are products of some that are adjacent."""
    borders = sorted({border for tiling in tilings for border in tiling.borders})
    for inner, outer in zip(borders, [*borders[1:], cta_size][: len(borders)], strict=True):
        if outer % inner:
            raise TemplateError(f"one schedule divides the {cta_size} threads into {inner}, another into {outer}")
    if len(borders) >= _MOST_DIMENSIONS:
        raise TemplateError(
            f"threads are divided at {', '.join(map(str, borders))} of {cta_size}; blocks have three dimensions"
        )
    return tuple(outer // inner for inner, outer in zip([1, *borders], [*borders, cta_size], strict=True))
