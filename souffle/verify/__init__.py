"""The certificate: an independent proof that merged kernels are free of races, or a counterexample."""

from souffle.certificate import PROVEN, REFUTED, UNKNOWN, Certificate, Counterexample, Section, printed
from souffle.verify.certify import certify, certify_plan
from souffle.verify.kept_memory import without_kept_memory

__all__ = [
    "PROVEN",
    "REFUTED",
    "UNKNOWN",
    "Certificate",
    "Counterexample",
    "Section",
    "certify",
    "certify_plan",
    "printed",
    "without_kept_memory",
]
