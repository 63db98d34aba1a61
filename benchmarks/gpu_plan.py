"""What is done on a GPU host, and in which order: phases of steps, each bounded in time, what is worth most first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from souffle.benchmark.registry import PEERS
from souffle.options import LEVELS

__all__ = [
    "ELSEWHERE",
    "PHASES",
    "SLOW_PEERS",
    "TOOLS",
    "Phase",
    "Step",
    "ablation_labels",
    "chosen_cases",
    "is_own",
    "phases_of",
]

TOOLS = ("memcheck", "synccheck", "racecheck", "initcheck")
"""Of compute-sanitizer."""
ELSEWHERE = {"xla": "its peer is for the processor alone", "tvm": "TVM is not on the host"}
"""Peers of ``souffle bench`` that are not asked."""
SLOW_PEERS = {"inductor": 2, "autotuned": 3}
"""Peers that compile for minutes, each in a process of its own, and how many times as long as another it may take."""
_ABLATION = "ablation"
_CHECKED, _TIMED = 4, 8
"""The most networks that one process checks, and variants that one process times: what takes too long loses few."""
_MERGED = tuple(name for name, level in LEVELS.items() if level.merge)
_LAST = list(LEVELS)[-1]
_Case = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One process, or more where a case crashes and the others go on without it.

    Attributes
    ----------
    kind : str
        Of ``benchmarks.gpu_steps``.
    label : str
        The first words of its entries in the results: ``"check NAME"`` for each case.
    names : tuple of str
        The cases; the results are kept and resumed by case.
    arguments : tuple of str
    timeout : float
        Seconds for each process.
    tool : str
        Of compute-sanitizer, under which it runs.
    together : bool
        Whether it may run beside other such steps: nothing is timed in it.
    optional : bool
        Whether all is well where what it needs is not there.
    """

    kind: str
    label: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    timeout: float
    tool: str = ""
    together: bool = False
    optional: bool = False

    @property
    def accepted(self) -> tuple[str, ...]:
        """The states of its cases with which all is well."""
        return ("ok", "missing") if self.optional else ("ok",)

    def key(self, name: str) -> str:
        """A case's name in the results."""
        return name if name == self.label else f"{self.label} {name}"


@dataclass(frozen=True)
class Phase:
    """Steps that answer one question.

    Attributes
    ----------
    name : str
    question : str
    bound : float
        Seconds that it may take.
    steps : tuple of Step
    """

    name: str
    question: str
    bound: float
    steps: tuple[Step, ...]


def is_own(case: _Case) -> bool:
    """Whether a network is what the compiler makes of a level by itself."""
    return case["label"] == case["level"]


def chosen_cases(
    cases: Mapping[str, dict[str, Any]], models: Iterable[str] = (), precisions: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """One case of each model, size, precision and variant: that with stored constants where there are two.

    Parameters
    ----------
    cases : mapping
        By name.
    models, precisions : iterable of str
        Only these, and in their order; all where there are none.
    """
    chosen: dict[tuple[str, ...], str] = {}
    for name, case in cases.items():
        key = tuple(case[part] for part in ("model", "size", "precision", "label"))
        if key not in chosen or case["constants"] == "stored":
            chosen[key] = name
    orders = [(list(models), "model"), (list(precisions), "precision")]
    names = [name for name in cases if name in chosen.values()]
    for order, part in reversed(orders):
        if order:
            names = [name for name in names if cases[name][part] in order]
            names.sort(key=lambda name: order.index(cases[name][part]))
    return {name: cases[name] for name in names}


class _Steps:
    """Makes steps of cases."""

    def __init__(self, cases: Mapping[str, _Case], options: argparse.Namespace) -> None:
        self._cases, self._options = cases, options

    def groups(self, wanted: Callable[[_Case], bool]) -> list[tuple[str, ...]]:
        """Names of the cases that are wanted, those of one model, size and precision together."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for name, case in self._cases.items():
            if wanted(case):
                found.setdefault((case["model"], case["size"], case["precision"]), []).append(name)
        return [tuple(names) for names in found.values()]

    def _quiet(self, names: tuple[str, ...], *, outputs: bool = True) -> tuple[str, ...]:
        # Without a GPU a paper model's kernels would take hours. What counts its outputs is small, and has to count
        # where these are looked at.
        cases = [self._cases[name] for name in names]
        large = any(case["size"] != "tiny" and not (outputs and case.get("counted")) for case in cases)
        return ("--no-execute",) if self._options.rehearse and large else ()

    def checks(self, wanted: Callable[[_Case], bool]) -> list[Step]:
        """Right, the same bits again and again, the same as a graph and in each other way to call it."""
        return [step for group in self.groups(wanted) for step in self._checks(group)]

    def _checks(self, group: Sequence[str]) -> Iterator[Step]:
        repeats, limit = str(self._options.repeats), self._options.timeout
        for names in _parts(group, _CHECKED):
            arguments = ("--repeats", repeats, "--seconds", str(limit / 2 / len(names)), *self._quiet(names))
            yield Step("check", "check", names, arguments, limit, together=True)

    def latency(self, names: tuple[str, ...], label: str = "latency") -> list[Step]:
        """Cases side by side in one process."""
        options = self._options
        figures = ("--repeats", str(options.latency_repeats), "--rounds", str(options.rounds))
        figures += ("--warmup", "1" if options.rehearse else "10", "--seconds", str(options.timeout / 4))
        quiet = self._quiet(names, outputs=False)
        # Several paper models at once would fill the memory of a small machine.
        parts = [(name,) for name in names] if quiet else [names]
        return [Step("latency", label, part, (*figures, *quiet), options.timeout) for part in parts]

    def ablation(self, beside: Callable[[_Case], bool], varied: Callable[[_Case], bool]) -> Iterable[Step]:
        """Variants: those of a model are checked, and then timed in processes of a few, each with what they are beside,
        which is timed again."""
        for group in self.groups(lambda case: beside(case) or varied(case)):
            firsts = tuple(name for name in group if not varied(self._cases[name]))
            others = [name for name in group if name not in firsts]
            yield from self._checks(others)
            for number, names in enumerate(_parts(others, _TIMED)):
                yield from self.latency((*firsts, *names), f"{_ABLATION}{number or ''}")

    def peers(self, names: Iterable[str]) -> Iterable[Step]:
        """Networks beside what the options name: what is quick in one process and first, what compiles in its own."""
        options = self._options
        asked = [peer for peer in PEERS if peer in options.peers]
        quick = tuple(peer for peer in asked if peer not in SLOW_PEERS)
        figures = ("--repeats", str(options.latency_repeats), "--warmup", "1" if options.rehearse else "10")
        for peers in [*([quick] if quick else []), *((peer,) for peer in asked if peer in SLOW_PEERS)]:
            limit = max(SLOW_PEERS.get(peer, 1) for peer in peers) * options.timeout
            for name in names:
                arguments = ("--against", *peers, *figures, "--seconds", str(limit / 4), *self._quiet((name,)))
                yield Step("bench", f"bench {'+'.join(peers)}", (name,), arguments, limit, optional=True)

    def stages(self, kind: str, name: str) -> Step:
        """The clocks of a network's stages, or its trace."""
        arguments = ("--repeats", "1" if self._options.rehearse else "21", *self._quiet((name,)))
        return Step(kind, kind, (name,), arguments, min(60, self._options.timeout))

    def under(self, tools: Iterable[str], names: Iterable[str]) -> tuple[Step, ...]:
        """One call of each network under compute-sanitizer's tools."""
        limit = self._options.timeout
        return tuple(
            Step("once", tool, (name,), self._quiet((name,)), limit, tool, together=True)
            for tool in tools
            for name in names
        )


def _parts(names: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """In their order, so many at a time, and not one alone behind many."""
    count = -(-len(names) // most)
    return [tuple(names[len(names) * k // count : len(names) * (k + 1) // count]) for k in range(count)]


def ablation_labels(steps: Iterable[str]) -> list[str]:
    """Under which labels variants were timed, of the keys of results: each of one process for each model."""
    labels = {key.split()[0] for key in steps if key.startswith(_ABLATION)}
    return sorted(labels, key=lambda label: (len(label), label))


def _alone(kind: str, timeout: float, *arguments: str) -> tuple[Step, ...]:
    return (Step(kind, kind, (kind,), arguments, timeout),)


PHASES = {
    "device": "Is there a GPU, and which?",
    "right": "Are the networks of paper size right, run after run, in each way to call them?",
    "latency": "How long do the levels take at paper size?",
    "peers": "How long do other compilers take beside the last level?",
    "ablation": "What does each thing give: without it, by another planner, with another option?",
    "stages": "Where does the time of the merged levels go, stage by stage?",
    "profile": "Does the trace of souffle bench --profile come out of a GPU?",
    "races": "Does compute-sanitizer find races or reads of what nobody wrote?",
    "constants": "What do launches, syncs and memory cost?",
    "barriers": "Do the grid barriers hold, at 1 to 8 blocks a multiprocessor?",
    "shared": "Do kernels run that use 100 KiB of shared memory, and all that there is?",
    "smoke": "Is the smallest network right at every level?",
    "rest": "Is every other network right?",
    "memory": "Does compute-sanitizer find stray or misplaced accesses and waits?",
}
"""By name, what is worth most first: its question."""


def phases_of(cases: Mapping[str, _Case], options: argparse.Namespace) -> list[Phase]:
    """All phases, or those of ``options.phases`` in their order there; the device is always asked for first.

    Parameters
    ----------
    cases : mapping
        By name, in the order in which they are wanted.
    options
        ``rehearse``, ``timeout``, ``repeats``, ``latency_repeats``, ``rounds``, ``peers``, ``phases`` of the command.
    """
    make = _Steps(cases, options)

    def own(case: _Case) -> bool:
        return case["size"] == "paper" and is_own(case)

    def timed(case: _Case) -> bool:
        return own(case) and "versions" not in case

    def last(case: _Case) -> bool:
        return timed(case) and case["level"] == _LAST

    def varied(case: _Case) -> bool:
        return case["size"] == "paper" and not is_own(case) and "versions" not in case

    def tiny(case: _Case) -> bool:
        return case["size"] == "tiny"

    # Beside what they are variants of, which is timed again: clocks and caches are of one process.
    beside = {(case["model"], case["precision"], case["level"]) for case in cases.values() if varied(case)}

    def has_variants(case: _Case) -> bool:
        return timed(case) and (case["model"], case["precision"], case["level"]) in beside

    smallest = min(filter(tiny, cases.values()), key=lambda case: case.get("code_bytes") or 0, default=None)
    merged = [name for name, case in cases.items() if tiny(case) and case["level"] in _MERGED]
    ends = [name for names in make.groups(last) for name in names]
    # The trace's kernels are compiled on the host.
    shortest = sorted(ends, key=lambda name: cases[name].get("text_bytes", 0))[:1]
    syncs = {name: case.get("grid_syncs", 0) for name, case in cases.items() if own(case)}
    most = [name for name in syncs if syncs[name] == max(syncs.values())][:1]
    steps: dict[str, tuple[Step, ...]] = {
        "device": _alone("device", 60),
        "right": tuple(make.checks(own)),
        "latency": tuple(step for names in make.groups(timed) for step in make.latency(names)),
        "peers": tuple(make.peers(ends)),
        "ablation": tuple(make.ablation(has_variants, varied)),
        "stages": tuple(make.stages("stages", name) for name, case in cases.items() if case.get("clocks")),
        "profile": tuple(make.stages("profile", name) for name in shortest),
        "races": make.under(("racecheck", "initcheck"), merged),
        "constants": _alone("micro", 120, "--repeats", "1" if options.rehearse else "25"),
        "barriers": _alone("barriers", 60),
        "shared": _alone("shared", 60),
        "smoke": tuple(
            make.checks(lambda case: tiny(case) and smallest is not None and case["model"] == smallest["model"])
        ),
        "rest": tuple(make.checks(tiny)),
        "memory": make.under(("memcheck", "synccheck"), (*merged, *most)),
    }
    names = ["device", *(name for name in options.phases or PHASES if name != "device")]
    return [Phase(name, PHASES[name], _BOUNDS[name], steps[name]) for name in names]


_BOUNDS = {
    **dict.fromkeys(PHASES, 120.0),
    **{"device": 60.0, "right": 240.0, "latency": 300.0, "peers": 480.0, "ablation": 240.0, "stages": 240.0},
    **{"profile": 60.0, "rest": 480.0, "races": 240.0, "memory": 480.0},
}
"""Seconds for each phase; ``--budget`` is for all."""
