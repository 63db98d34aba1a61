"""The register of recipes: each adds an operator, or a few that belong together, to a draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.fuzz.draft import Draft

__all__ = ["RECIPES", "Recipe", "recipe"]


@dataclass(frozen=True)
class Recipe:
    """How to add something to a draft; `weight` is how often, `since` the first operator set that has it."""

    name: str
    add: Callable[[Draft], object]
    weight: float
    since: int


RECIPES: dict[str, Recipe] = {}


def recipe(*names: str, weight: float = 1.0, since: int = 1) -> Callable:
    """Register a function of a draft, or of a draft and the operator's name where there are several names."""

    def register(function: Callable) -> Callable:
        for name in names:
            add = function if len(names) == 1 else _bound(function, name)
            RECIPES[name] = Recipe(name, add, weight, since)
        return function

    return register


def _bound(function: Callable, name: str) -> Callable[[Draft], object]:
    return lambda draft: function(draft, name)
