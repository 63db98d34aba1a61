"""Where the search for a stage that has no records begins: at what logs hold of stages that are like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from souffle.schedule.log import TuningLog
from souffle.schedule.near import fitted_knobs, fitted_trace
from souffle.schedule.recipe import Recipe
from souffle.schedule.record import workload_digest
from souffle.tuning.space import Space
from souffle.tuning.tasks import Task

__all__ = ["fitted_recipe", "recipes_nearby"]

_NEAR = 4
"""Recipes that a search begins with: half of the parents of its first generation."""


def recipes_nearby(logs: Sequence[TuningLog], tasks: Sequence[Task], product: str) -> Callable[[Task], list[Recipe]]:
    """Gives recipes of stages like a task's, the nearest first.

    Those of the stages that are tuned now do not count: what one search knows of another would depend on which of them
    is ahead.

    Parameters
    ----------
    logs : sequence of TuningLog
    tasks : sequence of Task
        All that are tuned now.
    product : str
        The GPU that schedules are for.
    """
    tuned = {workload_digest(task.stage.draft.func) for task in tasks}

    def nearby(task: Task) -> list[Recipe]:
        found: dict[str, Recipe] = {}
        for log in logs:
            for record in log.near(task.stage.draft.func, _NEAR + len(tuned), product):
                if record.workload not in tuned:
                    found.setdefault(record.recipe.key, record.recipe)
        return list(found.values())[:_NEAR]

    return nearby


def fitted_recipe(recipe: Recipe, spaces: Sequence[Space]) -> Recipe | None:
    """A recipe of a near stage, as one that a sketch of this stage offers; ``None`` if none has its knobs or steps.

    Parameters
    ----------
    recipe : Recipe
    spaces : sequence of Space
        Of the stage.
    """
    for space in spaces:
        if space.rule == recipe.rule:
            if space.trace is None:
                fitted = fitted_knobs(recipe, dict(space.knobs))
            else:
                fitted = fitted_trace(recipe, space.trace)
            if fitted is not None:
                return fitted
    return None
