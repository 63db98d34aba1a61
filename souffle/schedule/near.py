"""Stages that are alike but for their extents, and recipes of one that are carried over to another.

What is fast for a product of one shape is a good place to start for the same product of another: the rule is the same,
and the tiles of a block are mostly as large. A recipe does not fit as it stands: knobs offer other values, and parts of
an axis multiply to its extent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log, prod
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Var

from souffle.decision import Refused
from souffle.schedule.gpu import GpuRequest, sketch_of
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.tvm_calls import collect, structural_walk
from souffle.tvm_compat import dtype_of

__all__ = ["distance", "fitted", "fitted_knobs", "fitted_trace", "outline", "structure_of"]

_TILES = "SamplePerfectTile"
_INDICES = ("int", "uint", "bool")


def outline(signature: tuple) -> tuple:
    """Of a stage's parameters what near stages have in common: how many, and the rank and dtype of each."""
    return tuple((len(shape), dtype) for shape, dtype in signature)


def distance(left: tuple, right: tuple) -> float:
    """Between two signatures of one outline: by how many factors of e their extents differ, in all."""
    extents = zip(left, right, strict=True)
    return sum(
        abs(log(max(a, 1) / max(b, 1)))
        for (ours, _), (theirs, _) in extents
        for a, b in zip(ours, theirs, strict=True)
    )


def structure_of(func: tirx.PrimFunc) -> tuple:
    """What kinds of blocks a stage has, whatever their extents: their axes, how much they read, what they calculate.

    What the function is asked for by attributes of Souffle's belongs to it.
    """
    blocks = [block for block in collect(func.body, s_tir.SBlock) if str(block.name_hint) != "root"]
    kinds = tuple((_axes(block), len(block.reads), len(block.writes), _operations(block)) for block in blocks)
    asked = sorted((str(key), str(value)) for key, value in func.attrs.items() if str(key).startswith("souffle."))
    return (kinds, tuple(asked))


def _axes(block: s_tir.SBlock) -> tuple[int, ...]:
    return tuple(int(axis.iter_type) for axis in block.iter_vars)


def _operations(block: s_tir.SBlock) -> tuple[str, ...]:
    """By name, of elements; indices and bounds change with extents."""
    found: set[str] = set()

    def see(node: Any) -> None:
        operation = getattr(node, "op", None)
        dtype = dtype_of(node) if hasattr(node, "ty") and not isinstance(node, Var) else ""
        if dtype and not dtype.startswith(_INDICES):
            found.add(type(node).__name__ if operation is None else str(operation.name))

    structural_walk(block.body, (object, see))
    return tuple(sorted(found))


def fitted(
    recipe: Recipe, func: tirx.PrimFunc, request: GpuRequest, traces: Iterable[Sequence[Any]] = ()
) -> Recipe | Refused:
    """A recipe of a near stage for this one.

    Parameters
    ----------
    recipe : Recipe
    func : PrimFunc
        The stage before it is scheduled.
    request : GpuRequest
    traces : iterable of trace
        MetaSchedule's sketches of the stage, with any decisions: the JSON of steps and decisions.

    Returns
    -------
    Recipe or Refused
        Of our rule it makes a schedule; whether MetaSchedule's does is seen when it is followed.
    """
    if recipe.rule == NATIVE_RULE:
        several = (fitted_trace(recipe, trace) for trace in traces)
        return next((one for one in several if one is not None), Refused("no sketch has these steps and extents"))
    sketch = sketch_of(recipe.rule, func, request)
    if isinstance(sketch, Refused):
        return sketch
    former = {knob.name: knob.former for knob in sketch.knobs if knob.former is not None}
    offered = {knob.name: knob.values for knob in sketch.knobs}
    near = fitted_knobs(Recipe(recipe.rule, {**former, **recipe.knobs}), offered)
    if near is None:
        return Refused(f"rule {recipe.rule} has other knobs now: {', '.join(offered)}")
    made = sketch.with_values(near.knobs)
    return made if isinstance(made, Refused) else near


def fitted_knobs(recipe: Recipe, offered: Mapping[str, Sequence[int]]) -> Recipe | None:
    """A recipe of a rule with the nearest value of each knob that is offered, by their ratio; ``None`` if one lacks."""
    if not offered.keys() <= recipe.knobs.keys() or not all(offered.values()):
        return None
    return Recipe(recipe.rule, {name: _nearest(recipe.knobs[name], values) for name, values in offered.items()})


def _nearest(wanted: int, offered: Sequence[int]) -> int:
    def ratio(value: int) -> tuple[float, int]:
        # Of a switch's values 0 and 1 neither is a multiple of the other.
        return (abs(log((value + 1) / (wanted + 1))), value)

    return min(offered, key=ratio) if wanted not in offered else wanted


def fitted_trace(recipe: Recipe, trace: Sequence[Any]) -> Recipe | None:
    """A trace with the tiles of another stage's recipe: inner parts stay, the outermost takes what is left.

    Parameters
    ----------
    recipe : Recipe
        MetaSchedule's, of a near stage.
    trace : trace
        A sketch of this stage with any decisions.

    Returns
    -------
    Recipe or None
        Without the steps that follow from its choices. ``None`` where the steps differ, or an extent cannot be divided
        so.
    """
    steps, decisions = Recipe(NATIVE_RULE, {}, [*trace]).choices
    theirs, chosen = recipe.choices
    if theirs != steps:
        return None
    wanted, fitting = dict(chosen), []
    for number, decision in decisions:
        value = wanted.get(number, decision)
        if steps[number][0] == _TILES:
            extent, inner = prod(decision), value[1:]
            if len(value) != len(decision) or extent % prod(inner):
                return None
            value = [extent // prod(inner), *inner]
        fitting.append([number, value])
    return Recipe(NATIVE_RULE, {}, [steps, fitting])
