"""A ranking of candidates that learns from measured ones by which factor the cost model is wrong.

Let ``p`` be a candidate's predicted seconds, ``t`` the measured ones, and ``x`` its features. Trees of xgboost are
fitted to ``log t - log p``, less its mean over the candidates of a workload: a factor that all of them have in common
changes no ranking, and would otherwise be learnt instead of what does. A candidate's score is

    log p + trees(x)

so with nothing learnt it is the cost model's ranking. Fitted without ``p``, to ``log t`` alone, the same trees rank
candidates of other workloads worse than the cost model does (``benchmarks/learned_ranking.py``).
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from souffle.errors import OptionError
from souffle.tuning.learned.features import FEATURES, PREDICTED
from souffle.tuning.learned.samples import Sample

__all__ = ["MISSING", "Ranker", "Table", "table_of", "xgboost_library"]

MISSING = "xgboost is not installed: pip install 'souffle-dl[tune]'"
"""What to tell where it is."""

_SHAPE = {"max_depth": 3, "eta": 0.1, "min_child_weight": 5}
_ROUNDS = 100
"""Few and shallow trees: a log has hundreds of records. Half and twice as many rounds, depths of 2 to 4 and a rate half
as high change what held-out workloads are ranked with by less than 0.03."""

_FORMAT = "souffle ranker 1"


def xgboost_library() -> ModuleType | None:
    """The module, or ``None`` where it is not installed; imported by whoever asks, since it takes half a second."""
    try:
        return importlib.import_module("xgboost")
    except ImportError:
        return None


@dataclass(frozen=True, eq=False)
class Table:
    """Samples as arrays, in the order of their names.

    Attributes
    ----------
    features : array of float64
        Of shape (samples, features).
    seconds : array of float64
    groups : array of int
        The place of each sample's workload in `workloads`.
    workloads : tuple of str
    """

    features: np.ndarray
    seconds: np.ndarray
    groups: np.ndarray
    workloads: tuple[str, ...]

    @property
    def predicted(self) -> np.ndarray:
        """Logarithm of the predicted seconds of each."""
        return self.features[:, PREDICTED]

    def part(self, chosen: np.ndarray) -> Table:
        """Some of the samples."""
        return Table(self.features[chosen], self.seconds[chosen], self.groups[chosen], self.workloads)


def table_of(samples: Iterable[Sample]) -> Table:
    """The samples that can be learnt from.

    What has no time or no predicted time is left out; a candidate that was measured several times counts once, with the
    median. The order of the samples changes nothing.

    Raises
    ------
    OptionError
        If a sample has other features than :data:`souffle.tuning.learned.features.FEATURES`.
    """
    times: dict[tuple[str, str], list[float]] = {}
    features: dict[tuple[str, str], tuple[float, ...]] = {}
    for sample in samples:
        _check_width(len(sample.features), len(FEATURES))
        if math.isfinite(sample.seconds) and sample.seconds > 0 and math.isfinite(sample.features[PREDICTED]):
            key = (sample.workload, sample.candidate)
            times.setdefault(key, []).append(sample.seconds)
            features[key] = min(features.get(key, sample.features), sample.features)
    keys = sorted(times)
    workloads = tuple(sorted({workload for workload, _ in keys}))
    places = {workload: place for place, workload in enumerate(workloads)}
    return Table(
        np.array([features[key] for key in keys], np.float64).reshape(len(keys), len(FEATURES)),
        np.array([np.median(times[key]) for key in keys], np.float64),
        np.array([places[workload] for workload, _ in keys], np.int64),
        workloads,
    )


def _check_width(width: int, wanted: int) -> None:
    if width != wanted:
        raise OptionError(f"a candidate has {width} features, and a ranking reads {wanted}")


class Ranker:
    """A trained ranking.

    Parameters
    ----------
    booster : xgboost.Booster
    """

    def __init__(self, booster: Any) -> None:
        self._booster = booster

    @classmethod
    def trained(cls, samples: Iterable[Sample] | Table) -> Ranker:
        """Learn from samples; equal samples, in whatever order, give equal scores.

        Workloads with one sample teach nothing.

        Raises
        ------
        OptionError
            If xgboost is not installed, or no workload has two samples.
        """
        xgboost = xgboost_library()
        if xgboost is None:
            raise OptionError(MISSING)
        table = samples if isinstance(samples, Table) else table_of(samples)
        counts = np.bincount(table.groups, minlength=len(table.workloads))
        table = table.part(counts[table.groups] > 1)
        if not len(table.seconds):
            raise OptionError("there is nothing to learn a ranking from: no stage has two measured candidates")
        wrong = np.log(table.seconds) - table.predicted
        means = np.bincount(table.groups, wrong) / np.maximum(np.bincount(table.groups), 1)
        matrix = xgboost.DMatrix(_finite(table.features), label=wrong - means[table.groups], nthread=1)
        settings = {"objective": "reg:squarederror", "tree_method": "hist", "nthread": 1, "seed": 0, **_SHAPE}
        return cls(xgboost.train(settings, matrix, _ROUNDS))

    def scores(self, features: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
        """Rank candidates: lower is better; only those of one stage and GPU are to be compared.

        Parameters
        ----------
        features : array of float, of shape (candidates, features)
            As :func:`souffle.tuning.learned.features.features_of` gives them. What is no number counts as not known; a
            candidate whose predicted time is none comes last.

        Returns
        -------
        array of float64
            Logarithms of seconds, up to a number that is the same for all candidates of a stage.
        """
        rows = np.asarray(features, np.float64)
        if rows.size == 0:
            return np.zeros(0)
        if rows.ndim != 2:
            raise OptionError(f"features have shape {rows.shape}; they are a table, one row for each candidate")
        _check_width(rows.shape[1], self._booster.num_features())
        rows = _finite(rows)
        matrix = xgboost_library().DMatrix(rows, nthread=1)
        base = rows[:, PREDICTED]
        return np.where(np.isnan(base), np.inf, base + self._booster.predict(matrix))

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        trees = json.loads(bytes(self._booster.save_raw("json")))
        path.write_text(json.dumps({"format": _FORMAT, "features": FEATURES, "trees": trees}))

    @classmethod
    def load(cls, path: Path) -> Ranker:
        """What :meth:`save` wrote.

        Raises
        ------
        OptionError
            If xgboost is not installed, or the file is none of this kind, is damaged, or reads other features than
            there are now.
        """
        xgboost = xgboost_library()
        if xgboost is None:
            raise OptionError(MISSING)
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            if tuple(content["features"]) != FEATURES:
                raise ValueError("it reads other features than this version gives; train it anew")
            booster = xgboost.Booster({"nthread": 1})
            booster.load_model(bytearray(json.dumps(content["trees"]).encode()))
            if booster.num_features() != len(FEATURES):
                raise ValueError(f"its trees read {booster.num_features()} features")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise OptionError(f"{path} is no ranking of candidates: {error}") from error
        return cls(booster)


def _finite(features: np.ndarray) -> np.ndarray:
    """Numbers, and what xgboost takes for not known."""
    return np.where(np.isfinite(features), features, np.nan)
