"""Whether a learnt ranking is to be used: judged on workloads that it did not learn from.

Records are divided by workload into folds. Each is ranked by what was learnt from the others, and by the cost model
alone. The learnt ranking is used if

- there are enough workloads to tell (:data:`FEWEST_WORKLOADS`, of :data:`FEWEST_RECORDS` records each),
- its rank correlation with the measured times is higher than the cost model's, by more than chance explains (Wilcoxon's
  signed ranks of the workloads), and
- it finds no fewer of the best candidates.

How many records it takes is read off a learning curve: the same folds, learnt from a part of their records.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from souffle.tuning.learned.ranker import MISSING, Ranker, Table, table_of, xgboost_library
from souffle.tuning.learned.samples import Sample

__all__ = [
    "FEWEST_RECORDS",
    "FEWEST_WORKLOADS",
    "CurvePoint",
    "HeldOut",
    "Judgement",
    "RankFigures",
    "judge",
    "not_judged",
    "rank_figures",
]

FEWEST_WORKLOADS = 5
"""If both rankings were equally good, so many workloads would all speak for one of them once in 32 times, fewer more
often than :data:`_CHANCE` allows."""

FEWEST_RECORDS = 16
"""Of a workload, for its rank correlation to say something: of 16 records in random order it is within 0.26 two times
in three, of 8 within 0.38."""

_CHANCE = 0.05
_FOLDS = 5
_PARTS = ((1 / 16, 3), (1 / 8, 3), (1 / 4, 2), (1 / 2, 2), (1.0, 1))
"""Of the records of a fold, for the points of the learning curve, and how many draws of so many a point is the mean
of."""
_BEST_PART = 4
"""A ranking is to find the best candidates, one in so many: a search builds one of five that it looks at."""
_FURTHEST = 3
"""Doublings of what there is, up to which the curve is followed to say how many records would do."""


@dataclass(frozen=True)
class RankFigures:
    """How well a ranking orders measured candidates of a workload, or the mean over several.

    Attributes
    ----------
    correlation : float
        Spearman's, of the ranking and the measured seconds; 0 where all are ranked alike.
    recall : float
        The part of its first quarter of the candidates that is as quick as the best quarter.
    slowdown : float
        What it has first takes so many times as long as the best.
    """

    correlation: float
    recall: float
    slowdown: float


@dataclass(frozen=True)
class HeldOut:
    """A workload that was not learnt from.

    Attributes
    ----------
    workload : str
    records : int
    learned, predicted : RankFigures
        Of the learnt ranking, and of the cost model's.
    """

    workload: str
    records: int
    learned: RankFigures
    predicted: RankFigures


@dataclass(frozen=True)
class CurvePoint:
    """Mean correlations with some records to learn from.

    Attributes
    ----------
    records : int
        Mean over the folds.
    learned, predicted : float
    chance : float
        As for :class:`Judgement`.
    """

    records: int
    learned: float
    predicted: float
    chance: float

    @property
    def ahead(self) -> bool:
        """Whether what is learnt ranks better, by more than chance explains."""
        return self.learned > self.predicted and self.chance <= _CHANCE


@dataclass(frozen=True)
class Judgement:
    """Whether a learnt ranking is to be used, and why.

    Attributes
    ----------
    use : bool
    reason : str
        For people.
    records, workloads : int
        That it was judged on.
    learned, predicted : RankFigures or None
        Means over the workloads that were held out; ``None`` where nothing was learnt.
    chance : float
        How likely rankings that are equally good would differ so.
    needed : int or None
        Records to learn from that it takes to rank better than the cost model, by the curve; ``None`` where it does not
        say.
    curve : tuple of CurvePoint
    held_out : tuple of HeldOut
    """

    use: bool
    reason: str
    records: int = 0
    workloads: int = 0
    learned: RankFigures | None = None
    predicted: RankFigures | None = None
    chance: float = 1.0
    needed: int | None = None
    curve: tuple[CurvePoint, ...] = ()
    held_out: tuple[HeldOut, ...] = ()


def judge(samples: Iterable[Sample], *, seed: int = 0) -> Judgement:
    """Judge what can be learnt from samples of one GPU, in whatever order.

    Parameters
    ----------
    samples : iterable of Sample
    seed : int
        Of the folds and of the parts of their records.
    """
    table = _judged(table_of(samples))
    records, workloads = len(table.seconds), len(table.workloads)
    hopeless = not_judged(records, workloads)
    if hopeless is not None:
        return hopeless
    folds = _folds(workloads, seed)
    curve = []
    for part, draws in _PARTS:
        rankings = [_ranked(table, folds, part, f"{seed}:{draw}") for draw in range(draws)]
        held_out = [_mean_of_draws(same) for same in zip(*(ranked for ranked, _ in rankings), strict=True)]
        learned, predicted = (_mean([getattr(one, name) for one in held_out]) for name in ("learned", "predicted"))
        point = CurvePoint(rankings[0][1], learned.correlation, predicted.correlation, _chance(held_out))
        curve.append(point)
    use = point.ahead and learned.recall >= predicted.recall
    needed = _needed(curve)
    reason = _reason(use, point, learned, predicted, needed, workloads)
    return Judgement(
        use, reason, records, workloads, learned, predicted, point.chance, needed, tuple(curve), tuple(held_out)
    )


def not_judged(records: int, workloads: int) -> Judgement | None:
    """Why so many workloads, with enough records each, cannot be judged; ``None`` where they can."""
    if xgboost_library() is None:
        return Judgement(False, MISSING, records, workloads)
    if workloads >= FEWEST_WORKLOADS:
        return None
    reason = (
        f"{workloads or 'no'} stage{'' if workloads == 1 else 's'} with {FEWEST_RECORDS} measured candidates or more: "
        f"it takes {FEWEST_WORKLOADS} to tell whether a learnt ranking is better than the cost model"
    )
    return Judgement(False, reason, records, workloads)


def _judged(table: Table) -> Table:
    """The workloads with enough candidates, of which not all take the same time."""
    numbers = [
        number
        for number in range(len(table.workloads))
        if np.count_nonzero(table.groups == number) >= FEWEST_RECORDS
        and np.ptp(table.seconds[table.groups == number]) > 0
    ]
    kept = np.isin(table.groups, numbers)
    places = np.searchsorted(numbers, table.groups[kept]) if numbers else table.groups[kept]
    names = tuple(table.workloads[number] for number in numbers)
    return Table(table.features[kept], table.seconds[kept], places, names)


def _folds(workloads: int, seed: int) -> np.ndarray:
    """The fold of each workload."""
    order = list(range(workloads))
    random.Random(seed).shuffle(order)
    folds = np.empty(workloads, np.int64)
    folds[order] = np.arange(workloads) % min(_FOLDS, workloads)
    return folds


def _ranked(table: Table, folds: np.ndarray, part: float, draw: str) -> tuple[list[HeldOut], int]:
    """Each workload, ranked by what was learnt from a part of the other folds' records; and how many those were."""
    order = np.array(random.Random(draw).sample(range(len(table.seconds)), len(table.seconds)))
    scores = np.empty(len(table.seconds))
    learnt_from = []
    for fold in range(folds.max() + 1):
        own = folds[table.groups] == fold
        others = order[~own[order]]
        chosen = np.sort(others[: max(2, round(part * len(others)))])
        learnt_from.append(len(chosen))
        training = table.part(chosen)
        if np.bincount(training.groups).max() > 1:
            scores[own] = Ranker.trained(training).scores(table.features[own])
        else:
            scores[own] = table.predicted[own]
    held_out = []
    for number, name in enumerate(table.workloads):
        own = table.groups == number
        seconds = table.seconds[own]
        learned, predicted = (rank_figures(ranking[own], seconds) for ranking in (scores, table.predicted))
        held_out.append(HeldOut(name, len(seconds), learned, predicted))
    return held_out, round(float(np.mean(learnt_from)))


def rank_figures(scores: np.ndarray, seconds: np.ndarray) -> RankFigures:
    """How well scores, of which lower is better, order the measured seconds of one workload."""
    first = np.argsort(scores, kind="stable")
    count = max(1, len(seconds) // _BEST_PART)
    recall = float(np.mean(seconds[first[:count]] <= np.sort(seconds)[count - 1]))
    correlation = 0.0
    if np.ptp(scores) > 0:
        correlation = float(importlib.import_module("scipy.stats").spearmanr(scores, seconds).statistic)
    return RankFigures(correlation, recall, float(seconds[first[0]] / seconds.min()))


def _mean(figures: list[RankFigures]) -> RankFigures:
    rows = [(one.correlation, one.recall, one.slowdown) for one in figures]
    return RankFigures(*(float(value) for value in np.mean(rows, axis=0)))


def _mean_of_draws(same: tuple[HeldOut, ...]) -> HeldOut:
    one = same[0]
    return HeldOut(one.workload, one.records, _mean([other.learned for other in same]), one.predicted)


def _chance(held_out: list[HeldOut]) -> float:
    differences = np.array([one.learned.correlation - one.predicted.correlation for one in held_out])
    if not differences.any():
        return 1.0
    return float(importlib.import_module("scipy.stats").wilcoxon(differences, alternative="greater").pvalue)


def _needed(curve: list[CurvePoint]) -> int | None:
    """From how many records on the learnt ranking is the better one, or would be if the curve went on as it ends."""
    last, before = curve[-1], curve[-2]
    if last.ahead:
        return next(point.records for place, point in enumerate(curve) if all(one.ahead for one in curve[place:]))
    gain = (last.learned - before.learned) / math.log2(last.records / before.records)
    if last.learned > last.predicted or gain <= 0:
        return None
    doublings = (last.predicted - last.learned) / gain
    return math.ceil(last.records * 2**doublings) if doublings <= _FURTHEST else None


def _reason(
    use: bool,
    point: CurvePoint,
    learned: RankFigures,
    predicted: RankFigures,
    needed: int | None,
    workloads: int,
) -> str:
    said = (
        f"on {workloads} stages held out the rank correlation of what is learnt from {point.records} records is "
        f"{learned.correlation:.2f}, the cost model's {predicted.correlation:.2f}"
    )
    if use:
        return f"{said} (chance {point.chance:.3f}); {needed} records to learn from were enough"
    if point.ahead:
        return f"{said}, but it finds {learned.recall:.0%} of the best candidates, that {predicted.recall:.0%}"
    if learned.correlation > predicted.correlation:
        return f"{said}, which may be chance ({point.chance:.2f}): more stages would tell"
    if needed is None:
        return f"{said}, and more records do not bring them nearer"
    return f"{said}; about {needed} records to learn from would do, if it goes on learning as it does"
