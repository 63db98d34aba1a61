"""Priority fusion, and who gives the priorities: orders by rule, annealing, and a policy that was trained (002)."""

from souffle.stitching.priority.annealing import Annealed, anneal
from souffle.stitching.priority.environment import FusionEnvironment
from souffle.stitching.priority.features import FEATURES, features_of
from souffle.stitching.priority.fusing import FusionRules, PriorityFusion
from souffle.stitching.priority.lessons import GraphLesson, LearningReport, learn_fusion
from souffle.stitching.priority.orders import by_priority, by_saved_bytes, topological
from souffle.stitching.priority.planners import AnnealedFusion, DefaultFusion, GreedyFusion, LearnedFusion
from souffle.stitching.priority.prices import PatternPrices

__all__ = [
    "FEATURES",
    "Annealed",
    "AnnealedFusion",
    "DefaultFusion",
    "FusionEnvironment",
    "FusionRules",
    "GraphLesson",
    "GreedyFusion",
    "LearnedFusion",
    "LearningReport",
    "PatternPrices",
    "PriorityFusion",
    "anneal",
    "by_priority",
    "by_saved_bytes",
    "features_of",
    "learn_fusion",
    "topological",
]
