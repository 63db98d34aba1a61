"""What the checker says of a case, and what the CPU device shows."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.siege.case import Case
from souffle.mutation.sandbox import Job, Sandbox
from souffle.verify import PROVEN, certify_plan
from souffle.verify.values import Agreement, Mismatch, values_agree

__all__ = ["RIGHT", "STILLBORN", "UNDEFINED", "WRONG_VALUE", "Judge", "Judgement", "Outcome"]

RIGHT, UNDEFINED, WRONG_VALUE, STILLBORN = "right", "undefined", "wrong value", "stillborn"
_CHECKED_RUNS = 4
_SECONDS = 40.0
"""For the checker, of one case."""


class _TooLong(Exception):
    """The checker takes more time than a case is worth."""


@dataclass(frozen=True)
class Judgement:
    """What the checker says.

    Attributes
    ----------
    memory : str
        The certificate's verdict; ``"SLOW"`` where it takes too long, ``"ERROR"`` where it fails.
    rules : tuple of str
    reason : str
    values : str
        ``"agree"``, ``"differ"``, ``"UNKNOWN"``, or empty where nothing is defined.
    values_reason : str
    """

    memory: str
    rules: tuple[str, ...] = ()
    reason: str = ""
    values: str = ""
    values_reason: str = ""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the CPU device shows.

    Attributes
    ----------
    kind : str
        `RIGHT` where all runs give the same; `UNDEFINED` where there is a finding, an error or other bits in another
        order; `WRONG_VALUE` where the same is not what is right; `STILLBORN` where the text does not compile.
    detail : str
    outputs : tuple of array
        For two inputs.
    """

    kind: str
    detail: str = ""
    outputs: tuple[np.ndarray, ...] = ()


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Judge:
    """Asks both.

    Parameters
    ----------
    sandbox : Sandbox
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def judgement(self, case: Case, *, values: bool = True) -> Judgement:
        """The checker's.

        Raises
        ------
        ValueError, TypeError, RuntimeError
            From TVM, if no text can be made of the case.
        """
        plan = case.emitted()
        try:
            with _limited(_SECONDS):
                certificate = certify_plan(plan, dict(case.kernels), dict(case.functions))
                rules = tuple(dict.fromkeys(c.rule for c in certificate.counterexamples))
                first = next(iter(certificate.counterexamples), None)
                reason = next(iter(certificate.unknown), "") if first is None else f"{first.rule}: {first.reason}"
                compared = self._values(case) if values and certificate.verdict == PROVEN else ("", "")
        except _TooLong:
            return Judgement("SLOW", (), f"more than {_SECONDS:.0f} s")
        except (ArithmeticError, LookupError, AssertionError, ValueError, TypeError, AttributeError) as error:
            # A checker that falls over has proven nothing; it is a mistake of its own.
            return Judgement("ERROR", (), f"{type(error).__name__}: {error}")
        return Judgement(certificate.verdict, rules, reason, *compared)

    @staticmethod
    def _values(case: Case) -> tuple[str, str]:
        if set(case.definitions) != set(case.functions):
            return "", "not all stages are defined"
        for name, (definition, tiles, threads) in case.definitions.items():
            found = values_agree(definition, [(case.functions[name], tiles, threads)])
            if isinstance(found, Mismatch):
                return "differ", f"{name}: {found}"
            if not isinstance(found, Agreement):
                return "UNKNOWN", f"{name}: {found}"
        return "agree", ""

    def outcome(self, case: Case, text: str = "", *, checked: bool = True) -> Outcome:
        """The CPU device's: in order, in 20 shuffled orders with several grids, and with every access looked at.

        Parameters
        ----------
        case : Case
        text : str
            One that holds that of the case; it is compiled once.
        checked : bool
            Whether accesses are looked at.
        """
        plan, inputs = case.emitted(text), case.inputs()
        found = self.sandbox.run(Job(plan, inputs, None, base=plan))
        if found.kind == "stillborn":
            return Outcome(STILLBORN, found.detail)
        if found.kind != "same":
            return Outcome(UNDEFINED, f"{found.kind}: {found.detail}")
        outputs = found.outputs
        # Other data take other branches.
        found = self.sandbox.run(Job(plan, case.inputs(1), None, runs=_CHECKED_RUNS, base=plan))
        if found.kind != "same":
            return Outcome(UNDEFINED, f"other inputs: {found.kind}: {found.detail}")
        outputs += found.outputs
        if checked:
            found = self.sandbox.run(Job(plan, inputs, None, checked=True, runs=_CHECKED_RUNS, base=plan))
            if found.kind not in ("same", "stillborn"):
                return Outcome(UNDEFINED, f"checked: {found.kind}: {found.detail}")
        return Outcome(RIGHT, "", outputs)
