"""What a search may choose from for one stage, as plain data: sketches of our rules and of MetaSchedule's.

Workers make sketches (:mod:`souffle.tuning.sketches`) and schedules; whoever searches only draws numbers, so that one
process can keep many workers busy.

A stage has blocks of exactly so many threads as all stages have. MetaSchedule draws tile sizes without regard to it,
and one draw in many fits; so tiles are drawn here (:mod:`souffle.tuning.tiles`), with the threads right from the start.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from souffle.schedule.recipe import Recipe
from souffle.tuning.tiles import TileAxis, draw_tiles, move_factor

__all__ = ["Space", "mutated", "sampled"]

_NEAR = 0.5
"""How often a mutated knob takes a neighbouring value: values ascend, and neighbours behave alike."""

_Nest = tuple[TileAxis, ...]


@dataclass(frozen=True)
class Space:
    """One sketch.

    Attributes
    ----------
    rule : str
        Ours, or ``"metaschedule"``.
    knobs : tuple of (str, tuple of int)
        Of our rule, with the values that each may take, ascending.
    trace : list, optional
        MetaSchedule's, as JSON, with any decisions; those are what a search chooses.
    choices : tuple of (int, int)
        Steps of the trace that choose one of so many.
    tiles : tuple of (tuple of TileAxis)
        MetaSchedule's tiled nests: the axes of each, with the sampling steps that tile them.
    lanes : int
        Threads that a nest has beside those of its tiles: a warp for tensor cores, else 1.
    """

    rule: str
    knobs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    trace: list[Any] | None = None
    choices: tuple[tuple[int, int], ...] = ()
    tiles: tuple[_Nest, ...] = ()
    lanes: int = 1

    @property
    def size(self) -> int:
        """Combinations of our knobs; 0 where they are not counted."""
        return prod(len(values) for _, values in self.knobs) if self.trace is None else 0

    def offers(self, recipe: Recipe) -> bool:
        """Whether a recipe is of this sketch."""
        if recipe.rule != self.rule:
            return False
        if self.trace is None or recipe.trace is None:
            offered = dict(self.knobs)
            return offered.keys() == recipe.knobs.keys() and all(
                value in offered[name] for name, value in recipe.knobs.items()
            )
        return recipe.choices[0] == self.trace[0]

    def data(self) -> dict[str, Any]:
        """As a worker gives it."""
        return asdict(self)

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Space:
        """As a worker gave it."""
        knobs = tuple((name, tuple(values)) for name, values in data["knobs"])
        choices = tuple((step, count) for step, count in data["choices"])
        tiles = tuple(tuple(TileAxis(**axis) for axis in nest) for nest in data["tiles"])
        return cls(data["rule"], knobs, data["trace"], choices, tiles, data["lanes"])


def sampled(space: Space, threads: int, rng: random.Random) -> Recipe:
    """One recipe of a sketch, drawn evenly from its choices."""
    if space.trace is None:
        return Recipe(space.rule, {name: rng.choice(values) for name, values in space.knobs})
    decided: dict[int, Any] = {step: rng.randrange(count) for step, count in space.choices}
    for nest in space.tiles:
        decided |= draw_tiles(nest, threads // space.lanes, rng)
    return _decided(space, space.trace, decided)


def mutated(space: Space, recipe: Recipe, threads: int, rng: random.Random) -> Recipe:
    """A recipe near another of the same sketch: one choice differs, or one nest is tiled anew."""
    if recipe.trace is None:
        open_ = [(name, values) for name, values in space.knobs if len(values) > 1]
        if not open_:
            return recipe
        name, values = rng.choice(open_)
        changed = values[_other(values.index(recipe.knobs[name]), len(values), rng)]
        return Recipe(recipe.rule, {**recipe.knobs, name: changed})
    trace = recipe.choices
    decisions = dict(trace[1])
    choices: list[tuple[int, int] | _Nest] = [choice for choice in space.choices if choice[1] > 1]
    choices += space.tiles
    if not choices:
        return recipe
    choice = rng.choice(choices)
    first = choice[0]
    if isinstance(first, TileAxis):
        nest = [axis for axis in choice if isinstance(axis, TileAxis)]
        if rng.random() < _NEAR:
            axis = rng.choice(nest)
            return _decided(space, trace, {axis.step: move_factor(axis, decisions[axis.step], rng)})
        return _decided(space, trace, draw_tiles(nest, threads // space.lanes, rng))
    step, count = choice
    return _decided(space, trace, {step: _other(decisions[step], count, rng)})


def _other(now: int, count: int, rng: random.Random) -> int:
    near = [index for index in (now - 1, now + 1) if 0 <= index < count]
    return rng.choice(near if rng.random() < _NEAR else [index for index in range(count) if index != now])


def _decided(space: Space, trace: list[Any], decided: Mapping[int, Any]) -> Recipe:
    """A trace with some of its decisions replaced."""
    steps, decisions = trace
    return Recipe(space.rule, {}, [steps, [[step, decided.get(step, decision)] for step, decision in decisions]])
