"""What is said of a case: what it is about, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BAD", "OUTCOMES", "PASSED", "CaseResult", "Subject"]

PASSED = ("passed", "constants")
BAD = ("wrong", "exception", "crash", "timeout")
OUTCOMES = (*PASSED, "refused", "inexact", *BAD)


@dataclass(frozen=True)
class Subject:
    """What a case is about.

    Attributes
    ----------
    kind : str
        One of :data:`benchmarks.onnx_suite.cases.KINDS`.
    domain, operator : str
        Of the only node. A model that writes the operator of another case with simpler ones is about that operator.
    element_type : str
        Of the first input of the model, else of its first output.
    """

    kind: str
    domain: str
    operator: str
    element_type: str


@dataclass(frozen=True)
class CaseResult:
    """What became of a case.

    Attributes
    ----------
    name : str
    outcome : str
        One of :data:`OUTCOMES`.
    message : str
        Why it did not pass.
    seconds : float
    refusal : str
        The name of the kind of a refusal (:class:`souffle.errors.Refusal`).
    constants : tuple of str
        Inputs whose values were given at compile time.
    folded : bool
        Nothing is computed when the network runs: its outputs follow from these values.
    extern : tuple of str
        Operators in it that are a kernel of their own, because no TE expresses them.
    certificate : str
        The verdict on its kernels, and what it could not decide; empty where none was asked for.
    """

    name: str
    outcome: str
    message: str = ""
    seconds: float = 0.0
    refusal: str = ""
    constants: tuple[str, ...] = ()
    folded: bool = False
    extern: tuple[str, ...] = ()
    certificate: str = ""
