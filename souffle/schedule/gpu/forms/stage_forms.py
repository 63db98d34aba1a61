"""The forms of a stage, each read once for all rules that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tvm import tirx

from souffle.decision import Refused

__all__ = ["StageForms"]

_Form = TypeVar("_Form")


class StageForms:
    """A stage that rules look at.

    Parameters
    ----------
    func : PrimFunc
        A small group of TEs, as ``te.create_prim_func`` gives it.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self._known: dict[Callable, Any] = {}

    def read(self, reader: Callable[[StageForms], _Form | Refused]) -> _Form | Refused:
        """What a reader finds in the stage; it is asked once. A reader may read other forms first.

        Parameters
        ----------
        reader : callable
            From these forms to one more; or the reason why the stage has not that form, naming the block.
        """
        if reader not in self._known:
            self._known[reader] = reader(self)
        return self._known[reader]
