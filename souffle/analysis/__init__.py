"""The exact, element-wise analysis of a whole TE program (paper §5)."""

from souffle.analysis.access import Access, MatrixForm, Relation, distinct_elements
from souffle.analysis.analysis import Analysis, analyze
from souffle.analysis.classify import Relies, is_one_to_one
from souffle.analysis.dependence_order import DependenceOrder
from souffle.analysis.fused_access import FusedAccess, access_of, share_elements
from souffle.analysis.intensity import THRESHOLD, Arithmetic
from souffle.analysis.reuse import Dependences, LiveRange, Reuse
from souffle.analysis.te_expression import expression_of
from souffle.index.expression import Expression

__all__ = [
    "THRESHOLD",
    "Access",
    "Analysis",
    "Arithmetic",
    "DependenceOrder",
    "Dependences",
    "Expression",
    "FusedAccess",
    "LiveRange",
    "MatrixForm",
    "Relation",
    "Relies",
    "Reuse",
    "access_of",
    "analyze",
    "distinct_elements",
    "expression_of",
    "is_one_to_one",
    "share_elements",
]
