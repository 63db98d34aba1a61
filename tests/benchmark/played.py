"""Peers that are played: their outputs, their times and what goes wrong are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from souffle.benchmark.peer import HOST, Setting

__all__ = ["PlayedPeer", "PlayedWay"]


class PlayedWay:
    """A run that writes its name down, and takes what is said."""

    clock, untimed = "played", ""

    def __init__(
        self,
        name: str,
        log: list[str],
        outputs: Mapping[str, np.ndarray],
        microseconds: Callable[[int], float] = lambda number: 1.0,
        form: str = HOST,
    ) -> None:
        self.name, self.log, self.form, self._outputs, self._microseconds = name, log, form, outputs, microseconds
        self.samples = 0

    def outputs(self) -> Mapping[str, np.ndarray]:
        self.log.append(f"{self.name} outputs")
        return self._outputs

    def sample(self, cold: bool) -> float:
        self.log.append(f"{self.name} {'cold' if cold else 'warm'}")
        self.samples += 1
        return self._microseconds(self.samples)


class PlayedPeer:
    """A peer with ways that are given, or a reason, or an error."""

    failures: tuple[type[Exception], ...] = (ArithmeticError,)

    def __init__(self, name: str, ways: Sequence[PlayedWay] = (), reason: str = "", error: Exception | None = None):
        self.name, self._ways, self._reason, self._error = name, ways, reason, error

    def lacking(self, setting: Setting) -> str:
        return self._reason

    def version(self) -> str:
        return "1.2"

    def prepare(self, model: object, inputs: object, setting: Setting) -> Sequence[PlayedWay]:
        if self._error is not None:
            raise self._error
        return self._ways
