"""What the certificate and the CPU device say of a mutant, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from souffle.codegen.plan import Plan
from souffle.errors import DeviceError
from souffle.mutation.mutants import Mutant, Mutation, Mutations
from souffle.mutation.sandbox import Job, Sandbox
from souffle.verify import PROVEN, REFUTED, UNKNOWN
from souffle.verify.expressions import Undecided
from souffle.verify.values import Mismatch

__all__ = ["COUNTS", "WRONG_VALUE", "Trial", "Trials", "described", "inputs_of", "misses", "tally"]

WRONG_VALUE = "wrong value"
"""The rule that a stage breaks which does not compute what it is defined to."""


@dataclass(frozen=True)
class Trial:
    """One mutant's.

    Attributes
    ----------
    mutation : Mutation
    verdict : str
        The certificate's: of memory and barriers, and if it does not refute those, of the stage's values.
    rules : tuple of str
        Those that it says are broken; ``"wrong value"`` for values.
    reason : str
        Its first counterexample in a line, or the first reason why it cannot say.
    outcome : str
        Of the run in order and the shuffled ones, see :class:`souffle.mutation.sandbox.Outcome`; empty where that was
        not asked.
    detail : str
    checked : str
        The outcome with every access looked at; empty where that was not asked.
    checked_detail : str
    seconds : float
    """

    mutation: Mutation
    verdict: str
    rules: tuple[str, ...]
    reason: str
    outcome: str
    detail: str
    checked: str
    checked_detail: str
    seconds: float

    @property
    def counts(self) -> bool:
        """Whether there is such a mutant at all: its text compiles."""
        return self.outcome != "stillborn"

    @property
    def changed(self) -> bool:
        """Whether any run gave another result, or none."""
        return self.outcome not in ("", "same", "stillborn")

    @property
    def missed(self) -> bool:
        """Whether it is shown to be wrong, and the certificate does not refute it."""
        return self.found and self.verdict != REFUTED

    @property
    def misses_grid_barrier(self) -> bool:
        """Whether it was refuted because a grid barrier is missing, tiles of different blocks race, and was run."""
        blocks = "race between blocks" in self.rules and "divergent barrier" not in self.rules
        return self.outcome not in ("", "stillborn") and self.mutation.kind == "grid barrier" and blocks

    @property
    def found(self) -> bool:
        """Whether the CPU device shows that something is wrong, by other bits or by what it reports."""
        return self.changed or self.checked not in ("", "same", "stillborn")


class Trials:
    """Tries mutants of one network.

    Parameters
    ----------
    mutations : Mutations
    inputs : sequence of array
        In the order of the plan's inputs, of their types.
    sandbox : Sandbox

    Raises
    ------
    DeviceError
        If the network itself gives other bits in other orders.
    """

    def __init__(self, mutations: Mutations, inputs: Sequence[np.ndarray], sandbox: Sandbox) -> None:
        self.mutations = mutations
        self.sandbox = sandbox
        self.inputs = tuple(inputs)
        plan = mutations.compiled.plan
        found = sandbox.run(Job(plan, self.inputs, None, base=plan))
        if found.kind != "same":
            raise DeviceError(f"{plan.name} itself does not give the same bits in all orders: {found.detail}")
        self.expected = found.outputs

    def run(self, mutation: Mutation, *, refuted: bool = True) -> Trial:
        """Ask both about one mutant.

        Parameters
        ----------
        mutation : Mutation
        refuted : bool
            Whether those that are refuted are run, too. If not, the others are also run with every access looked at.
        """
        began = time.monotonic()
        mutant = self.mutations.mutant(mutation)
        trial = replace(_judged(mutant), seconds=0.0)
        try:
            plan = mutant.emitted()
        except (ValueError, TypeError, RuntimeError) as error:
            return replace(trial, outcome="stillborn", detail=str(error).strip()[-300:])
        if not refuted and trial.verdict == REFUTED:
            return replace(trial, seconds=time.monotonic() - began)
        job = Job(plan, self.inputs, self.expected, base=self.mutations.compiled.plan)
        outcome = self.sandbox.run(job)
        trial = replace(trial, outcome=outcome.kind, detail=outcome.detail)
        if (trial.misses_grid_barrier or (not refuted and trial.counts)) and not trial.changed:
            checked = self.sandbox.run(replace(job, checked=True, runs=1))
            trial = replace(trial, checked=checked.kind, checked_detail=checked.detail)
        return replace(trial, seconds=time.monotonic() - began)


def _judged(mutant: Mutant) -> Trial:
    certificate = mutant.certificate()
    rules = tuple(dict.fromkeys(c.rule for c in certificate.counterexamples))
    first = next(iter(certificate.counterexamples), None)
    reason = next(iter(certificate.unknown), "")
    if first is not None:
        reason = f"{first.rule}: {' and '.join(first.stages)}: {'; '.join(first.statements)}: {first.reason}"
    verdict = certificate.verdict
    if verdict != REFUTED:
        values = mutant.values()
        if isinstance(values, Mismatch):
            verdict, rules, reason = REFUTED, (WRONG_VALUE,), f"{WRONG_VALUE}: {values}"
        elif isinstance(values, Undecided) and verdict == PROVEN:
            verdict, reason = UNKNOWN, f"values: {values}"
    return Trial(mutant.mutation, verdict, rules, reason, "", "", "", "", 0.0)


def misses(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Those that change the result and are not refuted, and those that lack a grid barrier and are not found."""
    return tuple(t for t in trials if t.missed or (t.misses_grid_barrier and not t.found))


COUNTS = (
    *("mutants", "change the result", "refuted", "by values alone", "unknown", "changed, not refuted"),
    *("grid barrier missing", "of these found"),
)
"""What is counted: the last two are of mutants that the certificate refutes because blocks race."""


def tally(trials: Iterable[Trial]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """For each kind of mutation, and for all: the numbers that `COUNTS` names."""
    rows: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.counts:
            rows.setdefault(trial.mutation.kind, []).append(trial)
    every = [t for own in rows.values() for t in own]
    return tuple((kind, _counts(own)) for kind, own in (*rows.items(), ("all", every)))


def _counts(trials: Sequence[Trial]) -> tuple[int, ...]:
    lacking = [t for t in trials if t.misses_grid_barrier]
    return (
        len(trials),
        sum(t.changed for t in trials),
        sum(t.verdict == REFUTED for t in trials),
        sum(t.rules == (WRONG_VALUE,) for t in trials),
        sum(t.verdict == UNKNOWN for t in trials),
        sum(t.missed for t in trials),
        len(lacking),
        sum(t.found for t in lacking),
    )


def described(trial: Trial) -> str:
    """A trial in a few lines."""
    mutation = trial.mutation
    where = " ".join(part for part in (mutation.kernel, mutation.stage) if part)
    lines = [f"{mutation.identity}: {mutation.what}", f"in {where}: {mutation.text}" if mutation.text else ""]
    lines.append(f"certificate: {trial.verdict} {trial.reason}")
    lines.append(f"CPU device: {trial.outcome} {trial.detail}")
    lines.append(f"CPU device, checked: {trial.checked} {trial.checked_detail}" if trial.checked else "")
    return "\n    ".join(line for line in lines if line)


def inputs_of(plan: Plan, named: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Inputs by the model's names, in the plan's order and of its types."""
    return tuple(np.ascontiguousarray(named[b.label], b.dtype) for b in plan.buffers if b.kind == "input")
