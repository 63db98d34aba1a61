"""All stages of a network, compared with their definitions: a part of its certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tvm import tirx

from souffle.certificate import Counterexample, Section
from souffle.tvm_compat import structural_digest
from souffle.verify.values.agreement import Result, StageFunction, values_agree
from souffle.verify.values.results import Agreement, Mismatch

__all__ = ["StageText", "compare_stages", "values_section"]


@dataclass(frozen=True, eq=False)
class StageText:
    """A stage: what it is to compute, and what does.

    Attributes
    ----------
    names : tuple of str
        Of its functions.
    definition : tirx.PrimFunc
        As it was before it was scheduled; inputs, then outputs.
    functions : tuple of (PrimFunc, int, int)
        With tiles and threads; together they make the outputs.
    """

    names: tuple[str, ...]
    definition: tirx.PrimFunc
    functions: tuple[StageFunction, ...]


def compare_stages(
    stages: Iterable[StageText],
    *,
    seed: int = 0,
    tiles: int | Literal["all"] | None = None,
    points: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> tuple[tuple[StageText, Result], ...]:
    """The result for each distinct stage, the first that has it.

    Parameters
    ----------
    stages : iterable of StageText
        Stages of equal definition and functions are compared once.
    seed, tiles, points
        See :func:`values_agree`.
    progress : callable
        Told which stage is next.
    """
    found: dict[tuple, tuple[StageText, Result]] = {}
    for stage in stages:
        key = (
            structural_digest(_unnamed(stage.definition)),
            *((structural_digest(_unnamed(f)), count, threads) for f, count, threads in stage.functions),
        )
        if key not in found:
            progress(f"evaluating {stage.names[0]}")
            result = values_agree(stage.definition, stage.functions, seed=seed, tiles=tiles, points=points)
            found[key] = stage, result
    return tuple(found.values())


def values_section(found: Sequence[tuple[StageText, Result]]) -> Section:
    """What :func:`compare_stages` found, as a part of a certificate.

    Parameters
    ----------
    found : sequence of (StageText, result)
    """
    wrong, unknown, notes = [], [], []
    tiles = of = elements = points = covered = comparisons = seen = exponentials = 0
    for stage, result in found:
        if isinstance(result, Mismatch):
            name = stage.names[result.function]
            who = () if result.tile is None else (f"thread {result.thread} of tile {result.tile}",)
            texts = (result.statement,) if result.statement else ()
            element = f"{result.tensor}{list(result.element) if result.element else ''}"
            wrong.append(Counterexample("wrong value", "", (name,), texts, who, element, result.reason))
        elif isinstance(result, Agreement):
            tiles += sum(len(c.tiles) for c in result.functions)
            of += sum(c.of for c in result.functions)
            elements += sum(count for c in result.functions for _, count in c.elements)
            points += result.points
            covered += result.covered
            exponentials += result.exponentials
            comparisons += result.comparisons
            seen += result.comparisons - len(result.unseen)
            notes += [f"{stage.names[0]}: {one}" for one in result.unseen]
        else:
            unknown.append(f"{stage.names[0]}: {result}")
    facts = (
        ("distinct stages", len(found)),
        ("seen to write all elements", covered),
        ("random inputs", points),
        ("tiles run", tiles),
        ("tiles in all", of),
        ("elements compared", elements),
        ("comparisons of data", comparisons),
        ("seen to come out in all ways", seen),
        *((("equal by exp(a + b) = exp(a) exp(b)", exponentials),) if exponentials else ()),
    )
    return Section("values of stages", tuple(wrong), tuple(unknown), facts, tuple(dict.fromkeys(notes)))


def _unnamed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return func.without_attr("global_symbol") if func.attrs and "global_symbol" in func.attrs else func
