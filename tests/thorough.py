"""How much of a family of cases is tried: what stands for the others, or all of it with ``make test-all``.

``make test`` has to end in 25 minutes on two cores. What takes long and repeats in large what others show in small,
such as one more network at one more level, or more mutants of one kernel, is for ``make test-all``, which asks for it
by ``SOUFFLE_TESTS=all``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

import pytest

__all__ = ["THOROUGH", "chosen", "sized", "some"]

T = TypeVar("T")

THOROUGH = os.environ.get("SOUFFLE_TESTS") == "all"


def some(few: Iterable[T], others: Iterable[T]) -> list[T]:
    """The cases that always run, and the others where all are asked for."""
    return [*few, *(others if THOROUGH else ())]


def sized(few: int, many: int) -> int:
    """How many there are to be: few, or as many as there may be where all are asked for."""
    return many if THOROUGH else few


def chosen(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The items of ``make test``.

    None that is marked ``thorough(why)``, where ``why`` says what stands for it, or why it takes long. Of those that
    are marked ``sampled(n)``, each test with one of n of its parameters: which ones, their names say, in no order that
    parameters have, so that of each some are there; always the first.
    """
    seen: set[tuple[object, str]] = set()
    for item in items:
        if item.get_closest_marker("thorough") is not None:
            continue
        mark = item.get_closest_marker("sampled")
        if mark is not None and hasattr(item, "callspec"):
            test = (item.parent, item.originalname)
            chance = zlib.crc32(item.callspec.id.encode()) % mark.args[0]
            if chance and test in seen:
                continue
            seen.add(test)
        yield item
