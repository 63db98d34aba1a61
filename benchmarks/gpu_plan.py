"""What is done on a GPU host, and in which order: phases of steps, each bounded in time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PEERS", "TOOLS", "Phase", "Step", "barrier_of", "chosen_cases", "first_contact", "peer_name", "steps_for"]

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
"""Of compute-sanitizer."""
PEERS = {"eager": 1, "inductor": 2, "autotuned": 3}
"""PyTorch call by call, its Inductor, and that with ``max-autotune``; and how many times as long as another process
each may take, for compilation takes minutes."""
_MERGED = ("V3", "V4")
_Case = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One process, or more where a case crashes and the others go on without it.

    Attributes
    ----------
    kind : str
        Of ``benchmarks.gpu_steps``.
    label : str
        The first word of its entries in the results: ``"check NAME"`` for each case.
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
        Seconds that it may take, at most 480.
    steps : tuple of Step
    """

    name: str
    question: str
    bound: float
    steps: tuple[Step, ...]


def barrier_of(case: _Case) -> str:
    """How the blocks of a case's kernels wait for each other."""
    return case.get("grid_barrier", "counter")


def peer_name(values: str, precision: str, peer: str) -> str:
    """A peer's case in the results, of the file of a model's inputs and outputs and the peer's name."""
    return f"{Path(values).stem}-{precision}-{peer}"


def chosen_cases(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One case of each model, size, precision, level and barrier: that with stored constants where there are two."""
    chosen: dict[tuple[str, ...], str] = {}
    for name, case in cases.items():
        key = (*(case[part] for part in ("model", "size", "precision", "level")), barrier_of(case))
        if key not in chosen or case["constants"] == "stored":
            chosen[key] = name
    return {name: cases[name] for name in cases if name in chosen.values()}


class _Steps:
    """Makes steps of cases."""

    def __init__(self, cases: Mapping[str, _Case], options: argparse.Namespace) -> None:
        self._cases, self._options = cases, options

    def groups(self, wanted: Callable[[_Case], bool]) -> list[tuple[str, ...]]:
        """Names of the cases that are wanted, those of one model, size and precision together."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for name, case in self._cases.items():
            if wanted(case):
                found.setdefault((case["size"], case["model"], case["precision"]), []).append(name)
        return [tuple(names) for names in found.values()]

    def _quiet(self, names: tuple[str, ...]) -> tuple[str, ...]:
        # Without a GPU a paper model's kernels would take hours.
        large = any(self._cases[name]["size"] != "tiny" for name in names)
        return ("--no-execute",) if self._options.rehearse and large else ()

    def check(self, names: tuple[str, ...], repeats: int, timeout: float, *, together: bool = True) -> Step:
        """Right, the same bits again and again, the same as a graph and through PyTorch."""
        figures = ("--repeats", str(repeats), "--seconds", str(timeout / 2))
        return Step("check", "check", names, (*figures, *self._quiet(names)), timeout, together=together)

    def _figures(self) -> tuple[str, ...]:
        options = self._options
        figures = ("--repeats", str(options.latency_repeats), "--rounds", str(options.rounds))
        return (*figures, "--warmup", "1" if options.rehearse else "10", "--seconds", str(options.timeout / 4))

    def latency(self, names: tuple[str, ...]) -> list[Step]:
        """Levels side by side."""
        figures = self._figures()
        quiet = self._quiet(names)
        # Several paper models at once would fill the memory of a small machine.
        parts = [(name,) for name in names] if quiet else [names]
        return [Step("latency", "latency", part, (*figures, *quiet), self._options.timeout) for part in parts]

    def peer(self, names: tuple[str, ...], peer: str) -> Step:
        """One of ``PEERS`` with the model of these cases: a process of its own, for its compilation may not end."""
        case = next((self._cases[name] for name in names if self._cases[name].get("graph")), self._cases[names[0]])
        about = ("--peer", peer, "--precision", case["precision"], "--values", case["io"])
        # Artifacts of before models travelled lack it.
        about += ("--graph", case["graph"]) if case.get("graph") else ()
        bound = PEERS[peer] * self._options.timeout
        name = peer_name(case["io"], case["precision"], peer)
        return Step("peers", "peers", (name,), (*about, *self._figures()), bound, optional=True)

    def stages(self, name: str) -> Step:
        """The clocks of a network's stages."""
        repeats = "1" if self._options.rehearse else "21"
        arguments = ("--repeats", repeats, *self._quiet((name,)))
        return Step("stages", "stages", (name,), arguments, min(60, self._options.timeout))

    def under(self, tool: str, names: tuple[str, ...], *, together: bool = True) -> list[Step]:
        """One call of each network under one of compute-sanitizer's tools."""
        return [
            Step("once", tool, (name,), self._quiet((name,)), self._options.timeout, tool, together) for name in names
        ]


_DEVICE = Step("device", "device", ("device",), (), 60)


def _micro(options: argparse.Namespace) -> Step:
    return Step("micro", "micro", ("micro",), ("--repeats", "1" if options.rehearse else "25"), 120)


def steps_for(cases: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[Step]:
    """All steps, the ones that matter most first."""
    make = _Steps(cases, options)

    def checks(tiny: bool) -> list[Step]:
        found = make.groups(lambda case: (case["size"] == "tiny") == tiny)
        return [make.check(names, options.repeats, options.timeout) for names in found]

    def latencies(tiny: bool) -> list[Step]:
        found = make.groups(lambda case: (case["size"] == "tiny") == tiny)
        return [step for names in found for step in make.latency(names)]

    steps = [_DEVICE, _micro(options), *checks(True), *latencies(False), *checks(False), *latencies(True)]
    under = tuple(n for n, case in cases.items() if case["size"] == "tiny" and case["level"] in options.sanitize)
    for tool in TOOLS:
        steps += make.under(tool, under)
    return [step for step in steps if step.kind == "device" or options.only is None or step.kind in options.only]


def first_contact(cases: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[Phase]:
    """What a GPU is asked first: most important first, and what may hang only after what shows why.

    The networks that make the barriers work are those of paper size: of the tiny ones, no stage has more tiles than the
    GPU has multiprocessors, so none loops and no two blocks share one.
    """
    make = _Steps(cases, options)
    few, many = (2, 2) if options.rehearse else (50, 1000)

    def chosen(wanted: Callable[[_Case], bool]) -> list[str]:
        """Networks of fp32 first, and of one kernel and many stages."""
        names = [name for name, case in cases.items() if wanted(case)]
        return sorted(names, key=lambda name: (cases[name]["precision"] != "fp32", -cases[name].get("grid_syncs", 0)))

    def merged(case: _Case) -> bool:
        return case["size"] == "paper" and case["level"] in _MERGED

    def single(case: _Case) -> bool:
        return case["size"] == "paper" and case["precision"] == "fp32"

    def mixed(case: _Case) -> bool:
        return case["size"] == "paper" and case["precision"] != "fp32"

    paper = chosen(lambda case: merged(case) and single(case))
    smallest = min(
        chosen(lambda case: case["size"] == "tiny" and case["precision"] == "fp32"),
        key=lambda name: cases[name].get("machine_code_bytes", 0),
        default=None,
    )
    smoke = make.groups(
        lambda case: (
            smallest is not None and all(case[part] == cases[smallest][part] for part in ("model", "size", "precision"))
        )
    )
    rest = make.groups(lambda case: not merged(case))
    clocked = chosen(lambda case: case.get("clocks") is not None)
    large, halves = make.groups(single), make.groups(mixed)
    syncing = tuple(paper[:1])
    tiny = tuple(chosen(lambda case: case["size"] == "tiny" and case["level"] in (*_MERGED, "V0")))

    def barriers(kind: str) -> Step:
        return Step(kind, kind, (kind,), (), 60)

    return [
        Phase("device", "Is there a GPU, and which?", 60, (_DEVICE,)),
        Phase("barriers", "Do the grid barriers hold, at 1 to 8 blocks a multiprocessor?", 90, (barriers("barriers"),)),
        Phase("smoke", "Is the smallest network right at every level?", 120,
              tuple(make.check((name,), few, min(30, options.timeout), together=False)
                    for names in smoke for name in names)),
        Phase("paper", "Are merged networks of paper size right, run after run, with each barrier?", 480,
              tuple(make.check((name,), many, min(60, options.timeout), together=False) for name in paper)),
        Phase("shared", "Do kernels run that use 100 KiB of shared memory, and all that there is?", 60,
              (barriers("shared"),)),
        Phase("latency", "How long do V0 to V4 take at paper size, and PyTorch?", 480,
              (*(step for names in large for step in make.latency(names)),
               *(make.peer(names, peer) for peer in options.peers for names in large))),
        Phase("stages", "Where does the time of V2 to V4 go, stage by stage?", 240,
              tuple(make.stages(name) for name in clocked)),
        Phase("constants", "What do launches, syncs and memory cost?", 150, (_micro(options),)),
        # What is timed is compared first: nothing before has run it.
        Phase("mixed", "Is mixed precision right at paper size, and how long do V0 to V4 take?", 480,
              (*(make.check((name,), few, min(60, options.timeout), together=False)
                 for name in chosen(lambda case: merged(case) and mixed(case))),
               *(step for names in halves for step in make.latency(names)),
               # PyTorch has what it calls TF32, and float16.
               *(make.peer(names, peer) for peer in options.peers for names in halves
                 if cases[names[0]]["precision"] != "tf32x3"))),
        Phase("rest", "Is every other network right?", 480,
              tuple(make.check(names, few, options.timeout) for names in rest)),
        Phase("memory", "Does compute-sanitizer find stray or misplaced accesses and waits?", 480,
              tuple(step for tool in ("memcheck", "synccheck") for step in make.under(tool, (*tiny, *syncing)))),
        Phase("races", "Does compute-sanitizer find races or reads of what nobody wrote?", 480,
              tuple(step for tool in ("racecheck", "initcheck") for step in make.under(tool, tiny))),
    ]  # fmt: skip
