"""The certificate: an independent proof that merged kernels are free of races, or a counterexample."""

from souffle.certificate import PROVEN, REFUTED, UNKNOWN, Certificate, Counterexample, Section, printed
from souffle.verify.certify import certify, certify_plan

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
]
