"""What only one thread of a process does at a time, whatever it was that it was asked for.

isl has one context, with one count of operations and one limit on it: a thread that asks while another one's question
has used up the limit gets isl's error in place of an answer. TVM's builders of Relax are on one stack for all threads.
So importing, analysis, transformation and compilation wait for each other. They hold Python's own lock nearly all of
their time in any case.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["one_at_a_time"]

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class _Turn:
    """Whose turn it is; a thread that has it may take it again."""

    def __init__(self) -> None:
        self.renew()
        # A child has one thread, and nobody that would give back what another of its parent's held.
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


_TURN = _Turn()


def one_at_a_time(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The function, for which a thread waits until no other one is in it or in another function of this kind."""

    @wraps(function)
    def in_turn(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with _TURN.lock:
            return function(*args, **kwargs)

    return in_turn
