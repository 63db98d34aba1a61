"""A second ranking of candidates, learnt from measured records where these are enough (xgboost, optional)."""

from souffle.tuning.learned.features import FEATURES, features_of
from souffle.tuning.learned.judge import CurvePoint, HeldOut, Judgement, RankFigures, judge
from souffle.tuning.learned.ranker import Ranker
from souffle.tuning.learned.ranking import learned_ranking
from souffle.tuning.learned.samples import Sample, measured_samples

__all__ = [
    "FEATURES",
    "CurvePoint",
    "HeldOut",
    "Judgement",
    "RankFigures",
    "Ranker",
    "Sample",
    "features_of",
    "judge",
    "learned_ranking",
    "measured_samples",
]
