"""How much of a family of cases is tried: what stands for the others, or all of it with ``make test-all``.

``make test`` has to end in 25 minutes on two cores. What takes long and repeats in large what others show in small,
such as one more network at one more level, or more mutants of one kernel, is for ``make test-all``, which asks for it
by ``SOUFFLE_TESTS=all``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

__all__ = ["THOROUGH", "sized", "some"]

T = TypeVar("T")

THOROUGH = os.environ.get("SOUFFLE_TESTS") == "all"


def some(few: Iterable[T], others: Iterable[T]) -> list[T]:
    """The cases that always run, and the others where all are asked for."""
    return [*few, *(others if THOROUGH else ())]


def sized(few: int, many: int) -> int:
    """How many there are to be: few, or as many as there may be where all are asked for."""
    return many if THOROUGH else few
