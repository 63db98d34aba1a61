"""What a rule of the GPU is, what it takes and what it gives.

A rule looks at one form of a stage (``forms/``), such as its rows or its sum of products, and answers with a sketch
(Ansor's word): the structure of the schedule is settled, its numbers are knobs. The rule's own choice of them costs no
search; a tuned one comes from a log. Or it says why it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, prod
from typing import Any

from tvm import s_tir, tirx

from souffle.decision import Refused
from souffle.errors import OptionError
from souffle.schedule.gpu.forms.stage_forms import StageForms

__all__ = [
    "MULTIPLIES",
    "NORMALIZES",
    "OWNS_TILES",
    "STARTS_IN_TILES",
    "GpuRequest",
    "GpuSchedule",
    "Knob",
    "Rule",
    "Sketch",
    "Values",
    "does_not_apply",
]

Values = Mapping[str, int]
"""A value for each knob, by its name."""

STARTS_IN_TILES = "souffle.starts_in_tiles"
"""Attribute of a stage's function that holds a reduction to be computed in the tiles of its contraction (§6.3)."""

OWNS_TILES = "souffle.owns_tiles"
"""Attribute of a stage's function whose tiles are to own what they compute from its first block to its last (§6.5)."""

NORMALIZES = "souffle.normalizes"
"""Attribute of a stage's function whose contraction normalizes what it reads, or begins to normalize what it computes:
the name of its block. Reductions ahead of it are of its rows, those behind it moments of its results."""

MULTIPLIES = "souffle.multiplies"
"""Attribute of a stage's function that has sums of products of fp32 operands: how these may be computed, if not in fp32
(:mod:`souffle.program.products`)."""


@dataclass(frozen=True)
class GpuRequest:
    """What a schedule is made for.

    Attributes
    ----------
    arch : str
        Such as ``"sm_90"``.
    threads : int
        Threads of a block: a rule's schedule binds exactly so many (as ``threadIdx.x`` times ``threadIdx.y`` times
        ``threadIdx.z``), or fewer if it has no barrier inside. So the stages of a kernel keep all its threads busy.
    sm_count : int
        Multiprocessors of the device, to choose tiles that keep all of them busy.
    max_shared_bytes : int
        Shared memory that one block may use, in bytes.
    """

    arch: str
    threads: int = 256
    sm_count: int = 132
    max_shared_bytes: int = 48 * 1024


@dataclass(frozen=True, eq=False)
class GpuSchedule:
    """A scheduled stage.

    Attributes
    ----------
    func : tirx.PrimFunc
        Loops bound to ``blockIdx.x/y/z`` and ``threadIdx.x/y/z``. Rules use ``blockIdx.x`` alone, and every root-level
        nest of theirs has one extent; a schedule that is brought along may have any grid and block.
    rule : str
        The rule that made it, for ``explain``.
    tiles : int
        Product of the extents of ``blockIdx``.
    threads : int
        Product of the extents of ``threadIdx``.
    tensor_cores : bool
        Whether it uses tensor-core instructions.
    way : str
        Which of several ways of its rule it takes, in a few words.
    registers : int
        Of a thread, as the compiler said that it was recorded with; 0 where none did.
    """

    func: tirx.PrimFunc
    rule: str
    tiles: int
    threads: int
    tensor_cores: bool = False
    way: str = ""
    registers: int = 0


@dataclass(frozen=True)
class Knob:
    """One number to choose.

    Attributes
    ----------
    name : str
    values : tuple of int
        Those that it may take, in ascending order. Not every combination with other knobs need be possible.
    former : int, optional
        What schedules had that were recorded before there was this knob; None for one that was always there.
    """

    name: str
    values: tuple[int, ...]
    former: int | None = None


@dataclass(frozen=True, eq=False)
class Sketch:
    """A stage's schedule with its numbers open.

    Attributes
    ----------
    rule : str
        The rule that it is of.
    knobs : tuple of Knob
        Empty where nothing is open.
    choose : callable
        The rule's own values, from an estimate; or the reason why there are none.
    make : callable
        The schedule with given values; or the reason why these do not go together, as where they need more shared
        memory than a block may have.
    clocks : callable, optional
        The rule's own estimate of what the whole grid takes with its own values, in clocks; infinite if there are none.
        A rule without one is taken by its place in the order alone.
    least : float
        Clocks below which that estimate cannot be, known without working it out.
    """

    rule: str
    knobs: tuple[Knob, ...]
    choose: Callable[[], Values | Refused]
    make: Callable[[Values], GpuSchedule | Refused]
    clocks: Callable[[], float] | None = None
    least: float = 0.0

    @property
    def size(self) -> int:
        """Combinations of values, those that do not go together too."""
        return prod(len(knob.values) for knob in self.knobs)

    def chosen(self) -> GpuSchedule | Refused:
        """The schedule with the rule's own values."""
        values = self.choose()
        return values if isinstance(values, Refused) else self.make(values)

    def with_values(self, values: Values) -> GpuSchedule | Refused:
        """The schedule with given values.

        Raises
        ------
        OptionError
            If they are not of this sketch's knobs; the message names the knob and what it may be.
        """
        known = {knob.name: knob for knob in self.knobs}
        values = {**{knob.name: knob.former for knob in self.knobs if knob.former is not None}, **values}
        if values.keys() != known.keys():
            raise OptionError(f"rule {self.rule} has the knobs {', '.join(known)}, not {', '.join(values)}")
        for name, value in values.items():
            if value not in known[name].values:
                raise OptionError(f"{name}={value} is none of {known[name].values}, which rule {self.rule} offers")
        return self.make(values)

    @classmethod
    def of_least(
        cls,
        rule: str,
        knobs: tuple[Knob, ...],
        best: Callable[[], tuple[float, Any] | None],
        unfit: Refused,
        make: Callable[[Values], GpuSchedule | Refused],
        least: float = 0.0,
    ) -> Sketch:
        """A sketch whose own values are those of least estimated time.

        Parameters
        ----------
        best : callable
            That time in clocks, with the tiling that has the values; ``None`` if none fit. Asked once at most.
        unfit : Refused
            Why there are none then.
        rule, knobs, make, least
            See :class:`Sketch`.
        """
        asked = cache(best)

        def choose() -> Values | Refused:
            timed = asked()
            return unfit if timed is None else timed[1].values

        def clocks() -> float:
            timed = asked()
            return inf if timed is None else timed[0]

        return cls(rule, knobs, choose, make, clocks, least)

    @classmethod
    def settled(cls, rule: str, make: Callable[[], GpuSchedule | Refused]) -> Sketch:
        """A sketch that leaves nothing open."""
        return cls(rule, (), dict, lambda values: make())


@dataclass(frozen=True)
class Rule:
    """One way to schedule stages of one form.

    Attributes
    ----------
    name : str
        As ``explain`` shows it and a tuning log's records have it.
    reads : callable
        Finds the form in a stage, or says what the stage lacks of it; see
        :meth:`souffle.schedule.gpu.forms.stage_forms.StageForms.read`.
    apply : callable
        From the form and a :class:`GpuRequest` to the sketch; or the reason why there is none, which names the block.
    whole_rows : bool
        Whether its tiles hold whole rows, so that reductions that depend on each other stay within a block.
    yields : bool
        Whether it is preferred only to those later rules that estimate no fewer clocks.
    starts_reductions : bool
        Whether reductions over a sum of products can start in its tiles (``STARTS_IN_TILES``).
    normalizes : bool
        Whether its tiles can begin and finish the normalization of rows (``NORMALIZES``).
    """

    name: str
    reads: Callable[[StageForms], Any]
    apply: Callable[[Any, GpuRequest], Sketch | Refused]
    whole_rows: bool = False
    yields: bool = False
    starts_reductions: bool = False
    normalizes: bool = False

    def sketch(self, stage: StageForms, request: GpuRequest) -> Sketch | Refused:
        """What the rule offers for a stage."""
        try:
            form = stage.read(self.reads)
            return form if isinstance(form, Refused) else self.apply(form, request)
        except s_tir.ScheduleError as error:
            return does_not_apply(error)


def does_not_apply(error: s_tir.ScheduleError) -> Refused:
    """What TVM's scheduling says of a step, as a rule's refusal."""
    return Refused(f"a scheduling step does not apply: {str(error).strip().splitlines()[0]}")
