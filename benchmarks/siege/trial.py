"""One case of a siege, by its number: made, perhaps spoiled, judged, run, and told in a line."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.siege.case import Case, text_of
from benchmarks.siege.judge import RIGHT, STILLBORN, UNDEFINED, WRONG_VALUE, Judge, Judgement, Outcome
from benchmarks.siege.kernels import random_case
from benchmarks.siege.mistakes import planted
from souffle.mutation.sandbox import Sandbox
from souffle.verify import PROVEN, REFUTED

__all__ = ["BAD", "Trial", "made", "run_batch"]

_RIGHT_SHARE = 0.4
BAD = ("false accept", "values accept", "generator", "error")
"""Classes of trials that say that something is wrong; shares of false rejects are counted, too."""


@dataclass(frozen=True)
class Trial:
    """What came of a case.

    Attributes
    ----------
    seed : int
    note : str
        Its stages.
    right : bool
        Whether it is right by construction.
    mistakes : tuple of str
        Kinds and actions of those that were planted.
    what : tuple of str
        The same in words.
    memory, rules, reason, values, values_reason
        As :class:`benchmarks.siege.judge.Judgement` has them.
    outcome, detail : str
        As :class:`benchmarks.siege.judge.Outcome` has them; empty where the CPU device was not asked, since the case
        is spoiled and refuted.
    seconds : float
    """

    seed: int
    note: str
    right: bool
    mistakes: tuple[str, ...]
    what: tuple[str, ...]
    memory: str
    rules: tuple[str, ...]
    reason: str
    values: str
    values_reason: str
    outcome: str
    detail: str
    seconds: float

    @property
    def kind(self) -> str:
        """A word for it: one of `BAD`, ``"false reject"``, ``"values reject"``, or what is as it should be."""
        if self.memory in ("SLOW", "ERROR"):
            return "error" if self.memory == "ERROR" else "slow"
        if self.outcome == STILLBORN:
            return STILLBORN
        if self.memory == PROVEN and self.outcome == UNDEFINED:
            # Which only values are about.
            return "undefined, refuted by values" if self.values == "differ" else "false accept"
        if self.memory == PROVEN and self.outcome == WRONG_VALUE:
            return {"agree": "values accept", "differ": "refuted by values"}.get(self.values, "values not asked")
        if self.right:
            if self.outcome != RIGHT:
                return "generator"
            if self.memory != PROVEN:
                return "false reject"
            return "values reject" if self.values in ("differ", "UNKNOWN") else "proven, right"
        if self.memory == REFUTED:
            return "refuted"
        if self.memory == PROVEN:
            return "proven, harmless" if self.values != "differ" else "refuted by values, harmless"
        return "unknown" if self.outcome != RIGHT else "unknown, harmless"


def made(seed: int, forms: tuple[str, ...] = ()) -> tuple[Case, Case | None, tuple[tuple[str, str], ...]]:
    """The case that is right, the spoiled one if it is to be spoiled, and its mistakes: kind and action, and words."""
    case = random_case(seed, forms)
    draw = random.Random(-1 - seed)
    if draw.random() < _RIGHT_SHARE:
        return case, None, ()
    spoiled, found = planted(case, draw)
    return case, spoiled, tuple((f"{m.kind}/{m.action}", m.what) for m in found)


@dataclass(eq=False)
class _Entry:
    """A case on its way."""

    seed: int
    case: Case
    spoiled: Case | None
    mistakes: tuple[tuple[str, str], ...]
    judgement: Judgement = field(default_factory=lambda: Judgement(""))
    outcome: Outcome = field(default_factory=lambda: Outcome(""))
    seconds: float = 0.0

    @property
    def tried(self) -> Case:
        return self.case if self.spoiled is None else self.spoiled

    @property
    def open(self) -> bool:
        """Whether the CPU device is to be asked: what is spoiled and refuted needs no witness."""
        return not self.outcome.kind and (self.spoiled is None or self.judgement.memory != REFUTED)


def run_batch(seeds: Sequence[int], timeout: float, forms: tuple[str, ...] = ()) -> list[Trial]:
    """Make cases and ask about them; their texts are compiled together, which takes most of the time."""
    with Sandbox(timeout) as sandbox:
        judge = Judge(sandbox)
        entries = [_judged(seed, judge, forms) for seed in seeds]
        began = time.monotonic()
        open_ = [entry for entry in entries if entry.open]
        text = _text([entry.tried for entry in open_])
        for entry in open_:
            entry.outcome = _asked(judge, entry.tried, text, checked=True)
        doubtful = [e for e in open_ if e.spoiled is not None and e.outcome.kind == RIGHT]
        text = _text([entry.case for entry in doubtful])
        for entry in doubtful:
            right = _asked(judge, entry.case, text, checked=False)
            pairs = zip(entry.outcome.outputs, right.outputs, strict=right.kind == RIGHT)
            if right.kind != RIGHT:
                entry.outcome = Outcome(UNDEFINED, f"before its mistakes: {right.detail}")
            elif any(a.tobytes() != b.tobytes() for a, b in pairs):
                entry.outcome = Outcome(WRONG_VALUE, "another result than before its mistakes")
        for entry in open_:
            entry.seconds += (time.monotonic() - began) / len(open_)
    return [_told(entry) for entry in entries]


def _judged(seed: int, judge: Judge, forms: tuple[str, ...]) -> _Entry:
    began = time.monotonic()
    entry = _Entry(seed, *made(seed, forms))
    try:
        entry.judgement = judge.judgement(entry.tried)
    except (ValueError, TypeError, RuntimeError) as error:
        entry.outcome = Outcome(STILLBORN, str(error)[-300:])
    entry.seconds = time.monotonic() - began
    return entry


def _text(cases: Sequence[Case]) -> str:
    """One text of all; empty where TVM makes none."""
    try:
        return text_of(cases) if cases else ""
    except (ValueError, TypeError, RuntimeError):
        return ""


def _asked(judge: Judge, case: Case, text: str, *, checked: bool) -> Outcome:
    """By the text of all, or where that does not compile by its own."""
    found = judge.outcome(case, text, checked=checked) if text else Outcome(STILLBORN)
    return judge.outcome(case, checked=checked) if found.kind == STILLBORN else found


def _told(entry: _Entry) -> Trial:
    kinds, words = tuple(k for k, _ in entry.mistakes), tuple(w for _, w in entry.mistakes)
    facts = {**asdict(entry.judgement), "outcome": entry.outcome.kind, "detail": entry.outcome.detail[:1000]}
    return Trial(
        entry.seed, entry.case.note, entry.spoiled is None, kinds, words, **facts, seconds=round(entry.seconds, 3)
    )
