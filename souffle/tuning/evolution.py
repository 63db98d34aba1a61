"""Which candidates of a stage to build next: an evolution whose only memory is the log.

MetaSchedule's ``EvolutionarySearch`` draws the first generation itself, without regard to the number of threads, and
measures again after a restart what the database already holds (its source says so). Here tiles are drawn with the
threads right, nothing is tried twice, and a search goes on as if it had never stopped.

Drawing goes in rounds: all recipes of a round are looked at by workers, in whatever order, and what is drawn next
depends on what was drawn before alone. So the number of workers changes nothing but the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from souffle.schedule.recipe import Recipe
from souffle.tuning.space import Space, mutated, sampled

__all__ = ["Look", "Looks", "next_candidates"]

_PARENTS = 8
"""The best so far, which the first generation starts from."""
_DRAWN_PER_PICK, _GENERATIONS, _CHILDREN_PER_PICK = 2, 2, 1
"""Candidates looked at for each one that is built. Looking costs about as long as building does: a schedule is made and
lowered for it."""
_RANDOM_SHARE = 0.2
"""Of the picks, taken without asking the cost model, which may be wrong."""
_TRIES = 6
"""Draws for each candidate that is wanted; choices that do not go together are drawn again."""


@dataclass(frozen=True, eq=False)
class Look:
    """A recipe that obeys the rules of stages and lowers.

    Attributes
    ----------
    space : Space
        The sketch that it is of.
    recipe : Recipe
        With the steps that MetaSchedule's postprocessors added.
    times : tuple of float
        Seconds as the cost model predicts them without a compiler's report, with a cold and with a warm second-level
        cache.
    tiles, shared_bytes : int
        Blocks, and shared memory of one.
    text : str
        Digest of what it is lowered to.
    candidate : bytes
        What a worker compiles, :class:`souffle.tuning.candidate.Candidate` packed; empty once that was done.
    features : tuple of float
        What a learnt ranking is told of it; empty where there is none.
    """

    space: Space
    recipe: Recipe
    times: tuple[float, ...]
    tiles: int
    shared_bytes: int
    text: str
    candidate: bytes
    features: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """The mean of the two times."""
        return sum(self.times) / len(self.times)


_Result = TypeVar("_Result")
_Drawing = Generator[Sequence[tuple[Space, Recipe]], Sequence[Look | None], _Result]
Looks = _Drawing[list[Look]]
"""Asks for looks at recipes, several at a time, and ends with the candidates to build."""


def next_candidates(
    spaces: Sequence[Space],
    best: Sequence[tuple[Space, Recipe]],
    known: Container[str],
    count: int,
    threads: int,
    rng: random.Random,
    rank: Callable[[Sequence[Look]], Sequence[float]],
) -> Looks:
    """Candidates to build next, none of them known; fewer than asked for where the sketches hold no more.

    Parameters
    ----------
    spaces : sequence of Space
    best : sequence of (Space, Recipe)
        What was found so far, or what is thought to be near; the best first.
    known : container of str
        Keys of what was built already.
    count : int
    threads : int
        Of a block.
    rng : Random
    rank : callable
        A number for each of some looks; the smaller, the better it is thought to be.
    """
    population: dict[str, Look] = {}
    seen: set[str] = set()

    def see(drawn: Sequence[tuple[Space, Recipe]]) -> _Drawing[int]:
        """How many of what was drawn are candidates that were not seen before."""
        asked = []
        for space, recipe in drawn:
            if recipe.key not in seen:
                seen.add(recipe.key)
                asked.append((space, recipe))
        looks = (yield asked) if asked else []
        fitting = [look for look in looks if look is not None]
        population.update((look.recipe.key, look) for look in fitting)
        return len(fitting)

    def draw(wanted: int, make: Callable[[], tuple[Space, Recipe]]) -> _Drawing[None]:
        """Draw until so many new candidates were seen, or too many draws gave none."""
        found = tries = 0
        while (count := _draws(wanted, found, tries)) > 0:
            tries += count
            found += yield from see([make() for _ in range(count)])

    order = rng.sample(list(spaces), len(spaces))
    # Sketches take turns, however few of the draws of one fit.
    wanted = [sum(place % len(order) == own for place in range(count * _DRAWN_PER_PICK)) for own in range(len(order))]
    found, tries = [0] * len(order), [0] * len(order)
    first = list(best[:_PARENTS])
    while any(counts := [_draws(*each) for each in zip(wanted, found, tries, strict=True)]) or first:
        drawn = [[sampled(space, threads, rng) for _ in range(n)] for space, n in zip(order, counts, strict=True)]
        yield from see([*first, *((space, one) for space, each in zip(order, drawn, strict=True) for one in each)])
        first = []
        for number, each in enumerate(drawn):
            tries[number] += len(each)
            found[number] += sum(key in population for key in {recipe.key for recipe in each})
    fresh = [look for look in population.values() if look.recipe.key not in known]
    for _ in range(_GENERATIONS):
        if not population:
            break
        parents = _sorted(list(population.values()), rank)[: max(_PARENTS, count)]
        weights = [1 / (place + 1) for place in range(len(parents))]

        def child(parents: list[Look] = parents, weights: list[float] = weights) -> tuple[Space, Recipe]:
            parent = rng.choices(parents, weights)[0]
            return parent.space, mutated(parent.space, parent.recipe, threads, rng)

        yield from draw(count * _CHILDREN_PER_PICK, child)
    new = [look for look in population.values() if look.recipe.key not in known]
    picked = _sorted(new, rank)[: count - int(count * _RANDOM_SHARE)]
    rest = [look for look in fresh if look not in picked]
    rng.shuffle(rest)
    more = [look for look in new if look not in picked and look not in rest]
    return [*picked, *rest, *more][:count]


def _draws(wanted: int, found: int, tries: int) -> int:
    """How many to draw next: as many as give what is missing, if as many fit as before. Rounds cost more than draws."""
    if found >= wanted:
        return 0
    return min(-(-(wanted - found) * max(tries, 1) // max(found, 1)) if tries else wanted, wanted * _TRIES - tries)


def _sorted(looks: list[Look], rank: Callable[[Sequence[Look]], Sequence[float]]) -> list[Look]:
    numbers = dict(zip(map(id, looks), rank(looks), strict=True))
    return sorted(looks, key=lambda look: numbers[id(look)])
