"""What a search found, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ArrangingReport", "GroupReport", "SearchReport", "TaskReport", "TuningReport", "WayReport"]


@dataclass(frozen=True)
class TaskReport:
    """One task.

    Attributes
    ----------
    name : str
    weight : int
        How often one run of the networks computes it.
    own_seconds, best_seconds : float or None
        Of the rule's own schedule, and of the best one, which may be the rule's own; ``None`` where it was not tried or
        none works.
    best : str
        The rule and what it was given, or that it is the rule's own; why none works.
    trials, new_trials : int
        Candidates with figures: in the log, and of this search.
    drawn, fitting : int
        Candidates looked at by this search, and those that obey the rules of stages and lower.
    seconds : float
        That this search spent on it.
    """

    name: str
    weight: int
    own_seconds: float | None
    best_seconds: float | None
    best: str
    trials: int
    new_trials: int
    drawn: int
    fitting: int
    seconds: float

    @property
    def gain(self) -> float | None:
        """How many times faster the best is than the rule's own."""
        if self.own_seconds is None or not self.best_seconds:
            return None
        return self.own_seconds / self.best_seconds


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """A search.

    Attributes
    ----------
    figure : str
        ``"measured"`` or ``"predicted"``.
    device : str
        The GPU measured on, or the product whose cost model predicted.
    log : str
        Folder of the records; empty where nothing was written.
    interrupted : bool
        Whether the user stopped it.
    seconds : float
    engine : str
        Where candidates were made, such as ``"local:2"``.
    """

    figure: str
    device: str
    log: str
    interrupted: bool
    seconds: float
    engine: str = "here"

    @property
    def source(self) -> str:
        """``measured on X``, or ``predicted with the cost model of X``."""
        if self.figure == "measured":
            return f"measured on {self.device}"
        return f"predicted with the cost model of {self.device}"


@dataclass(frozen=True, kw_only=True)
class TuningReport(SearchReport):
    """All tasks.

    Attributes
    ----------
    tasks : tuple of TaskReport
    ranking : str
        By what candidates were ranked before they were measured, and why; empty where nothing is measured.
    lost : int
        Attempts that ended with their worker, or took too long, or gave what cannot be true.
    """

    tasks: tuple[TaskReport, ...]
    lost: int = 0
    ranking: str = ""

    @property
    def new_trials(self) -> int:
        """Candidates with figures of this search."""
        return sum(task.new_trials for task in self.tasks)


@dataclass(frozen=True)
class WayReport:
    """One way to compute stages side by side.

    Attributes
    ----------
    shares : tuple of str
        Who computes the tiles of each stage.
    predicted_seconds : float or None
        Of the stages, in all; ``None`` of a way that a log has and the compiler does not offer any more.
    seconds, apart_seconds : float or None
        As measured, and of the stages one after the other in the same turns; both with a launch.
    problem : str
        Why it could not be measured.
    """

    shares: tuple[str, ...]
    predicted_seconds: float | None
    seconds: float | None
    apart_seconds: float | None
    problem: str = ""

    @property
    def gain(self) -> float | None:
        """The stages take so many times as long one after the other, as measured."""
        return self.apart_seconds / self.seconds if self.seconds and self.apart_seconds else None


@dataclass(frozen=True)
class GroupReport:
    """Independent stages of a kernel.

    Attributes
    ----------
    stages : tuple of str
    runs : int
        How often one run of the networks computes them.
    block : str
        Of their kernel.
    apart_seconds : float
        That they are predicted to take one after the other.
    ways : tuple of WayReport
        The quickest first.
    new_trials : int
    alike : bool
        Whether a kernel of these stages alone has the threads of theirs, so that they can be measured.
    """

    stages: tuple[str, ...]
    runs: int
    block: str
    apart_seconds: float
    ways: tuple[WayReport, ...]
    new_trials: int = 0
    alike: bool = True


@dataclass(frozen=True, kw_only=True)
class ArrangingReport(SearchReport):
    """All independent stages.

    Attributes
    ----------
    groups : tuple of GroupReport
    """

    groups: tuple[GroupReport, ...]

    @property
    def new_trials(self) -> int:
        """Ways that were measured now."""
        return sum(group.new_trials for group in self.groups)
