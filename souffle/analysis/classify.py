"""One-relies-on-one or one-relies-on-many, decided from the access maps and not from operators' names (paper §5.2)."""

from __future__ import annotations

import enum

from souffle.analysis.access import Access
from souffle.analysis.fused_access import access_of
from souffle.analysis.te_expression import expression_of
from souffle.program import TE, ExternTE, FusedTE, Loop, parts_of

__all__ = ["Relies", "is_one_to_one", "relies_on", "relies_on_input"]


class Relies(enum.Enum):
    """What an output element relies on."""

    ONE = "one-relies-on-one"
    MANY = "one-relies-on-many"

    def __str__(self) -> str:
        return self.value


def relies_on_input(access: Access) -> Relies:
    """Of one input: ``ONE`` if every output element reads at most one element of it."""
    return Relies.ONE if access.single_valued else Relies.MANY


def relies_on(te: TE | FusedTE | ExternTE) -> Relies:
    """Of a TE: ``MANY`` if it is so of any input. A TE without inputs relies on nothing, which counts as ``ONE``."""
    if isinstance(te, (ExternTE, Loop)):
        return Relies.MANY
    one = all(access_of(te, position).single_valued for position in range(len(te.inputs)))
    return Relies.ONE if one else Relies.MANY


def is_one_to_one(te: TE | FusedTE | ExternTE) -> bool:
    """Whether `te` has no reduction and each output element reads at most one element of each input.

    Mostly decided by the text of the expression; isl is asked only about inputs that are read at several positions
    (the branches of a concatenation read disjoint parts; ``x[i] + x[i + 1]`` does not).
    """
    plain = all(isinstance(part, TE) and not expression_of(part).reduce_axes for part in parts_of(te))
    return plain and relies_on(te) is Relies.ONE
