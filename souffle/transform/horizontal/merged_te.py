"""The merged TE of a plan. TEs of plans of one structure share one expression, so TVM builds it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from souffle.program import TE, Origin, Tensor, make_te
from souffle.program.shared import OncePer
from souffle.transform.handles import Handles, read
from souffle.transform.horizontal.operands import Fit, Load, Member, TETemplate
from souffle.transform.horizontal.packs import Pack, Packs
from souffle.transform.horizontal.runs import MergePlan, Run
from souffle.transform.vertical.compose import simplified
from souffle.tvm_compat import PrimExpr, fresh_axis, load_indices, map_bodies, substitute

__all__ = ["followed_te", "merged_te"]

_Column = tuple[tuple[Run, Tensor], ...]


@dataclass(frozen=True)
class _Built:
    """A TE of some structure, and which of the structure's tensors its inputs are."""

    te: TE
    order: tuple[int, ...]


_built: OncePer[_Built] = OncePer()


def merged_te(plan: MergePlan, name: str, origin: Origin, packs: Packs) -> TE:
    """The TE that computes what the members of a plan compute.

    Parameters
    ----------
    plan : MergePlan
    name : str
        Of the TE and its output.
    origin : Origin
    packs : Packs
        Gives the tensors of the plan's packs.
    """
    columns = tuple(
        tuple((run, packs.tensor(run.tensor) if isinstance(run.tensor, Pack) else run.tensor) for run in runs)
        for runs in plan.runs
    )
    first = plan.members[0]
    template = first.template
    if plan.axis is None:
        axis = None
        shape = (len(plan.members), *first.shape)
        kind = ("stacked", len(plan.members), template.key)
    else:
        axis = plan.axis
        shape = (*first.shape[:axis], plan.offsets[-1], *first.shape[axis + 1 :])
        kind = ("joined", axis, plan.offsets, template.along[axis][0])
    output = Tensor(name, shape, first.te.output.dtype)
    return _shared(kind, columns, lambda: _build(template, plan, columns, name, origin), name, origin, (output,))


def followed_te(member: Member) -> TE:
    """A TE that is not merged, reading what its operands have become."""
    if not member.moved:
        return member.te
    columns = tuple(
        ((Run(o.tensor, 1, tuple(map(Fit, o.lead)), tuple(map(Fit, o.values))), o.tensor),) for o in member.operands
    )
    te_, template = member.te, member.template

    def build() -> TE:
        handles = Handles()
        rewritten = _rewritten(template, columns, handles, tirx.IntImm("int32", 0), ())
        return _tidied(make_te(te_.name, template.axes, rewritten, handles.pairs(), te_.origin))

    followed = _shared(("one", template.key), columns, build, te_.name, te_.origin, te_.outputs)
    return followed.placed(te_.placement)


def _shared(kind: tuple, columns: Sequence[_Column], build, name: str, origin: Origin, outputs: Sequence[Tensor]) -> TE:
    """What ``build()`` gives, built once for all TEs of one structure."""
    numbers: dict[Tensor, int] = {}
    pattern = []
    for column in columns:
        for run, tensor in column:
            number = numbers.setdefault(tensor, len(numbers))
            pattern.append((number, run.stop, run.lead, run.fits, run.chosen))
        pattern.append(None)
    key = (kind, tuple(pattern), tuple((t.shape, t.dtype) for t in numbers))

    def once() -> _Built:
        made = build()
        return _Built(made, tuple(numbers[t] for t in made.inputs))

    found = _built(key, once)
    tensors = list(numbers)
    inputs = tuple(tensors[number] for number in found.order)
    return replace(found.te, name=name, inputs=inputs, outputs=tuple(outputs), origin=origin)


def _build(template: TETemplate, plan: MergePlan, columns: Sequence[_Column], name: str, origin: Origin) -> TE:
    handles = Handles()
    if plan.axis is None:
        group = fresh_axis(len(plan.members), "g")
        bodies = _rewritten(template, columns, handles, group.var, plan.offsets)
        return _tidied(make_te(name, [group, *template.axes], bodies, handles.pairs(), origin))
    old = template.axes[plan.axis]
    joined = fresh_axis(plan.offsets[-1], str(old.var.name))
    bodies = _rewritten(template, columns, handles, joined.var, plan.offsets)
    axes = [joined if number == plan.axis else axis for number, axis in enumerate(template.axes)]
    whole = [substitute(body, {old.var: joined.var}) for body in bodies]
    return _tidied(make_te(name, axes, whole, handles.pairs(), origin))


def _tidied(te_: TE) -> TE:
    bodies = simplified(te_.op.body, te_)
    reads = list(zip(te_.placeholders, te_.inputs, strict=True))
    return make_te(te_.name, te_.axes, bodies, reads, te_.origin, te_.outputs)


def _rewritten(
    template: TETemplate, columns: Sequence[_Column], handles: Handles, number: PrimExpr, offsets: Sequence[int]
) -> list[PrimExpr]:
    """The template's bodies, reading the columns' tensors.

    `number` is the group's axis, or the one along which its members stand one after another at `offsets`.
    """
    position = -1

    def rewrite(load: PrimExpr) -> PrimExpr:
        nonlocal position
        position += 1
        known, choice = template.loads[position], None
        for run, tensor in reversed(columns[position]):
            indices = _indices(load, known, run, number)
            if run.chosen:
                indices = [_member_at(number, offsets), *indices]
            here = read(handles.of(tensor), indices)
            choice = here if choice is None else tirx.if_then_else(number < offsets[run.stop], here, choice)
        return choice

    return map_bodies(template.bodies, rewrite)


def _indices(load: PrimExpr, known: Load, run: Run, number: PrimExpr) -> list[PrimExpr]:
    mapping = {slot: formula.of(number) for slot, formula in zip(known.slots, run.fits, strict=True)}
    result = [formula.of(number) for formula in run.lead]
    for index, term in zip(load_indices(load), known.terms, strict=True):
        # A constant term of 0 leaves nothing behind, also where TVM cannot simplify.
        slot = known.slots[term]
        if run.fits[term] == Fit(0) and not index.same_as(slot):
            index = index.a
        result.append(substitute(index, mapping))
    return result


def _member_at(number: PrimExpr, offsets: Sequence[int]) -> PrimExpr:
    """Which member the element `number` of a joined axis belongs to."""
    last = len(offsets) - 2
    found: PrimExpr = tirx.IntImm("int32", last)
    for member in reversed(range(last)):
        found = tirx.Select(number < offsets[member + 1], tirx.IntImm("int32", member), found)
    return found
