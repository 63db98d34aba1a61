"""Measured arrangements of independent stages, as lines of a tuning log.

001 runs each partition of a block's threads between two kernels and takes the quickest (Figure 6). A line here is one
arrangement of stages that a kernel can compute side by side: which workers have the tiles of each
(:mod:`souffle.schedule.lower.shares`), what that takes in a kernel of these stages alone with the blocks of theirs, and
what the same stages take there one after the other, in the same turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from souffle.schedule.record import FAILED_SECONDS, RecordOrigin, check_arch, figures_of, json_line

__all__ = ["ArrangedStage", "Arrangement", "Arrangements", "BlockForm", "arrangement_line", "arrangement_of"]

_NUMBERS = 4
"""Of a share as it is written (:attr:`souffle.schedule.lower.shares.Share.form`)."""


@dataclass(frozen=True)
class BlockForm:
    """What the blocks of a kernel are, as far as what stages gain beside each other depends on it.

    Attributes
    ----------
    threads : int
        That compute a tile: of a team.
    teams : int
        Of a block.
    resident : int
        Blocks on the device at once.
    """

    threads: int
    teams: int
    resident: int

    def __str__(self) -> str:
        team = f"{self.teams} teams of {self.threads}" if self.teams > 1 else str(self.threads)
        return f"{team} threads, {self.resident} blocks"


@dataclass(frozen=True)
class ArrangedStage:
    """One of the stages of an arrangement.

    Attributes
    ----------
    name : str
        For people.
    text : str
        Digest of what its schedule was lowered to (:func:`souffle.schedule.lower.text_of`).
    share : tuple of int
        Who computes its tiles (:attr:`souffle.schedule.lower.shares.Share.form`).
    part : str
        Digest of the function of its part of the block; empty where it has none.
    """

    name: str
    text: str
    share: tuple[int, ...]
    part: str = ""

    @property
    def workers(self) -> str:
        """Who computes its tiles, in words."""
        team, teams, shift, threads = self.share
        if threads:
            return f"{threads} threads"
        return f"teams {team} to {team + teams - 1}" if teams else f"from worker {shift}" if shift else "all workers"


@dataclass(frozen=True)
class Arrangement:
    """What one arrangement takes.

    Attributes
    ----------
    where : str
        File and line.
    block : BlockForm
    stages : tuple of ArrangedStage
        In the order of the kernel's text.
    figures : tuple of float
        Seconds with a cold and with a warm second-level cache; empty where it cannot be used.
    origin : RecordOrigin
        Its ``own_seconds`` are of the stages one after the other, the mean of both.
    """

    where: str
    block: BlockForm
    stages: tuple[ArrangedStage, ...]
    figures: tuple[float, ...]
    origin: RecordOrigin

    @property
    def seconds(self) -> float:
        """The mean of its figures."""
        return sum(self.figures) / len(self.figures) if self.figures else FAILED_SECONDS

    @property
    def gain(self) -> float:
        """Seconds that it takes less than the stages one after the other."""
        return self.origin.own_seconds - self.seconds

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is a figure of, and where that comes from."""
        shared = tuple((one.text, one.share, one.part) for one in self.stages)
        return self.block, shared, self.origin.figure, self.origin.device


def arrangement_line(one: Arrangement, arch: str) -> bytes:
    """An arrangement as a line of JSON, its end too.

    Raises
    ------
    ValueError
        If a figure is no time.
    """
    figures = figures_of(one.figures, f", of {', '.join(stage.name for stage in one.stages)}")
    said = [{name: value for name, value in vars(stage).items() if value != ""} for stage in one.stages]
    block = [one.block.threads, one.block.teams, one.block.resident]
    return json_line({"arch": arch, "block": block, "stages": said, "seconds": figures, **one.origin.data()})


def arrangement_of(where: str, data: Mapping[str, Any], arch: str) -> Arrangement:
    """A line, as JSON.

    Raises
    ------
    ValueError, LookupError, TypeError
        If it is none, or of another architecture.
    """
    check_arch(data, arch)
    figures = tuple(figures_of(data["seconds"]))
    numbers = [data["block"], *(one["share"] for one in data["stages"])]
    if not all(type(number) is int and number >= 0 for several in numbers for number in several):
        raise ValueError(f"{numbers} are no blocks and shares")
    stages = tuple(
        ArrangedStage(str(one.get("name", "")), str(one["text"]), tuple(one["share"]), str(one.get("part", "")))
        for one in data["stages"]
    )
    if len(stages) < 2 or any(len(stage.share) != _NUMBERS for stage in stages):
        raise ValueError("it is no arrangement of stages")
    return Arrangement(where, BlockForm(*data["block"]), stages, figures, RecordOrigin.of_data(data))


class Arrangements:
    """The measured arrangements of some logs.

    Parameters
    ----------
    several : iterable of Arrangement
    product : str
        The GPU that is compiled for: what was measured on it counts before what was on another.
    """

    def __init__(self, several: Iterable[Arrangement], product: str = "") -> None:
        self._product = product
        self._known: dict[tuple[BlockForm, tuple[str, ...]], list[Arrangement]] = {}
        for one in several:
            if one.figures and one.origin.figure == "measured":
                self._known.setdefault((one.block, tuple(stage.text for stage in one.stages)), []).append(one)

    def __bool__(self) -> bool:
        return bool(self._known)

    def of(self, block: BlockForm, texts: Sequence[str]) -> list[Arrangement]:
        """Those of stages in such blocks, the best first; of one GPU alone.

        Parameters
        ----------
        block : BlockForm
        texts : sequence of str
            Of the stages, in the order of the kernel's text.
        """
        found = self._known.get((block, tuple(texts)), [])
        here = [one for one in found if self._product in one.origin.device.replace("-", " ").split()]
        device = {one.origin.device for one in here} or {one.origin.device for one in found[-1:]}
        return sorted((one for one in here or found if one.origin.device in device), key=lambda one: -one.gain)
