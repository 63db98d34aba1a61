"""Which candidates of a stage to build next: an evolution whose only memory is the log.

MetaSchedule's ``EvolutionarySearch`` draws the first generation itself, without regard to the number of threads, and
measures again after a restart what the database already holds (its source says so). Here tiles are drawn with the
threads right, nothing is tried twice, and a search goes on as if it had never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from tvm.s_tir.schedule import Trace

from souffle.decision import Refused
from souffle.tuning.candidate import Candidate, Evaluator
from souffle.tuning.space import Space, mutated, sampled

__all__ = ["next_candidates"]

_PARENTS = 8
"""The best so far, which the first generation starts from."""
_DRAWN_PER_PICK, _GENERATIONS, _CHILDREN_PER_PICK = 2, 2, 1
"""Candidates looked at for each one that is built. Looking costs about as long as building does: a schedule is made and
lowered for it."""
_RANDOM_SHARE = 0.2
"""Of the picks, taken without asking the cost model, which may be wrong."""
_TRIES = 6
"""Draws for each candidate that is wanted; choices that do not go together are drawn again."""


def next_candidates(
    spaces: Sequence[Space],
    evaluator: Evaluator,
    best: Sequence[tuple[Space, Trace]],
    known: Collection[str],
    count: int,
    rng: random.Random,
) -> list[Candidate]:
    """Candidates to build next, none of them known; fewer than asked for where the sketches hold no more.

    Parameters
    ----------
    spaces : sequence of Space
    evaluator : Evaluator
    best : sequence of (Space, Trace)
        What was found so far, best first.
    known : collection of str
        Keys of what was built already.
    count : int
    rng : Random
    """
    threads = evaluator.request.threads
    population: dict[str, Candidate] = {}

    def see(space: Space, trace: Trace) -> bool:
        candidate = evaluator.candidate(space, trace)
        if isinstance(candidate, Refused) or candidate.key in population:
            return False
        population[candidate.key] = candidate
        return True

    for space, trace in best[:_PARENTS]:
        see(space, trace)
    order = rng.sample(spaces, len(spaces))
    for number in range(count * _DRAWN_PER_PICK):
        # Sketches take turns, however few of the draws of one fit.
        space = order[number % len(order)]
        _draw(1, lambda space=space: (space, sampled(space, threads, rng)), see)
    fresh = [candidate for candidate in population.values() if candidate.key not in known]
    for _ in range(_GENERATIONS):
        if not population:
            break
        parents = sorted(population.values(), key=lambda one: one.seconds)[: max(_PARENTS, count)]
        weights = [1 / (place + 1) for place in range(len(parents))]

        def child(parents: list[Candidate] = parents, weights: list[float] = weights) -> tuple[Space, Trace]:
            parent = rng.choices(parents, weights)[0]
            return parent.space, mutated(parent.space, _choices(parent), threads, rng)

        _draw(count * _CHILDREN_PER_PICK, child, see)
    new = [candidate for candidate in population.values() if candidate.key not in known]
    picked = sorted(new, key=lambda one: one.seconds)[: count - int(count * _RANDOM_SHARE)]
    rest = [candidate for candidate in fresh if candidate not in picked]
    rng.shuffle(rest)
    more = [candidate for candidate in new if candidate not in picked and candidate not in rest]
    return [*picked, *rest, *more][:count]


def _choices(candidate: Candidate) -> Trace:
    return candidate.trace.simplified(remove_postproc=True)


def _draw(count: int, draw: Callable[[], tuple[Space, Trace]], see: Callable[[Space, Trace], bool]) -> None:
    """Draw until so many new candidates were seen, or too many draws gave none."""
    seen = tries = 0
    while seen < count and tries < count * _TRIES:
        seen += see(*draw())
        tries += 1
