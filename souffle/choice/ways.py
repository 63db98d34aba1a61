"""Which way a program is transformed: where several are staged, the one that is predicted to take least."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from souffle.decision import Decision

__all__ = ["accepted", "ways_taken"]


def accepted(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    """What was done, which says what became of a program."""
    return tuple(decision for decision in decisions if decision.accepted)


def ways_taken(seconds: Mapping[tuple[Decision, ...], float]) -> list[Decision]:
    """Why a program's reductions are where they are.

    Parameters
    ----------
    seconds : mapping of tuple of Decision to float
        For each way, by what was done, what the network is predicted to take. The first is that of the level below.

    Returns
    -------
    list of Decision
        One for each way but the first.
    """
    (first, least), *others = seconds.items()
    taken = min(seconds, key=seconds.__getitem__)
    found = []
    for way, own in others:
        what = ", ".join(dict.fromkeys(decision.stage for decision in way if decision not in first)) or "no stage alone"
        reason = f"the network is predicted to take {own * 1e6:.1f} µs with them and {least * 1e6:.1f} µs without"
        found.append(Decision("choice", f"reductions placed by {what}", way == taken, reason))
    return found
