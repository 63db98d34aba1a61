"""The choices that a rule leaves open for a stage: what a search varies and a tuning log remembers.

A rule looks at a stage once and answers with a sketch (Ansor's word): the structure of the schedule is settled, its
numbers are knobs. The rule's own choice of them costs no search; a tuned one comes from a log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from souffle.decision import Refused
from souffle.errors import OptionError
from souffle.schedule.gpu.rule import GpuSchedule

__all__ = ["Knob", "Sketch", "Values"]

Values = Mapping[str, int]
"""A value for each knob, by its name."""


@dataclass(frozen=True)
class Knob:
    """One number to choose.

    Attributes
    ----------
    name : str
    values : tuple of int
        Those that it may take, in ascending order. Not every combination with other knobs need be possible.
    """

    name: str
    values: tuple[int, ...]


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
    """

    rule: str
    knobs: tuple[Knob, ...]
    choose: Callable[[], Values | Refused]
    make: Callable[[Values], GpuSchedule | Refused]

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
        if values.keys() != known.keys():
            raise OptionError(f"rule {self.rule} has the knobs {', '.join(known)}, not {', '.join(values)}")
        for name, value in values.items():
            if value not in known[name].values:
                raise OptionError(f"{name}={value} is none of {known[name].values}, which rule {self.rule} offers")
        return self.make(values)

    @classmethod
    def settled(cls, rule: str, make: Callable[[], GpuSchedule | Refused]) -> Sketch:
        """A sketch that leaves nothing open."""
        return cls(rule, (), dict, lambda values: make())
