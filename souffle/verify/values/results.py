"""What comes of comparing a stage's functions with its definition."""

from __future__ import annotations

from dataclasses import dataclass

from souffle.verify.values.sightings import Sighting

__all__ = ["Agreement", "FunctionComparison", "Mismatch"]


@dataclass(frozen=True)
class FunctionComparison:
    """What was compared of one function.

    Attributes
    ----------
    tiles : tuple of int
        The tiles that were run.
    of : int
        How many it has.
    elements : tuple of (str, int)
        For each output that they wrote, how many elements were compared, counted anew at each point.
    """

    tiles: tuple[int, ...]
    of: int
    elements: tuple[tuple[str, int], ...]

    def with_(self, other: FunctionComparison) -> FunctionComparison:
        """This one and another of the same function."""
        names = dict.fromkeys(name for name, _ in (*self.elements, *other.elements))
        counts = tuple((n, dict(self.elements).get(n, 0) + dict(other.elements).get(n, 0)) for n in names)
        return FunctionComparison(tuple(sorted({*self.tiles, *other.tiles})), self.of, counts)


@dataclass(frozen=True)
class Agreement:
    """All elements that were compared are equal.

    Attributes
    ----------
    functions : tuple of FunctionComparison
    points : int
        How many different random inputs there were.
    covered : bool
        Whether each element of the outputs is known to be written by some tile, those that were not run among them.
    comparisons : int
        How many comparisons of data the definition and the functions have in what was run.
    unseen : tuple of Sighting
        Those of them that did not come out in all ways at any point.
    exponentials : bool
        Whether they are equal because ``exp(a + b) = exp(a) exp(b)``, see
        :mod:`souffle.verify.values.exponentials`.
    """

    functions: tuple[FunctionComparison, ...]
    points: int
    covered: bool
    comparisons: int = 0
    unseen: tuple[Sighting, ...] = ()
    exponentials: bool = False

    @property
    def complete(self) -> bool:
        """Whether all tiles were run."""
        return all(len(c.tiles) == c.of for c in self.functions)

    def __str__(self) -> str:
        return "; ".join(
            f"{len(c.tiles)} of {c.of} tiles, " + ", ".join(f"{n} elements of {t}" for t, n in c.elements)
            for c in self.functions
        ) + (f", at {self.points} points" if self.points > 1 else "")


@dataclass(frozen=True)
class Mismatch:
    """An element that is not what the definition says.

    Attributes
    ----------
    function : int
        Which of the stage's functions.
    tile, thread : int or None
        Who wrote it; ``None`` where nobody did.
    tensor : str
    element : tuple of int
        Its index, empty where it is not known.
    statement : str
        What wrote it.
    reason : str
    """

    function: int
    tile: int | None
    thread: int | None
    tensor: str
    element: tuple[int, ...]
    statement: str
    reason: str

    def __str__(self) -> str:
        who = f", by thread {self.thread} of tile {self.tile} in `{self.statement}`" if self.tile is not None else ""
        return f"{self.tensor}{list(self.element)}{who}: {self.reason}"
