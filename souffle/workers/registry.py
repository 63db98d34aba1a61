"""Engines by the words of a command line, such as ``--on local:4``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from souffle.errors import OptionError
from souffle.workers.here import here_engine
from souffle.workers.job import Engine
from souffle.workers.local import local_engine
from souffle.workers.ray_engine import ray_engine

__all__ = ["ENGINES", "EngineKind", "engine_for"]


class EngineKind(NamedTuple):
    """How engines of one kind are asked for, and made.

    Attributes
    ----------
    usage : tuple of str
        For messages.
    make : callable
        Is given what follows the first colon, or ``None`` where there is none. What it cannot make an engine of is an
        :class:`~souffle.errors.OptionError`.
    """

    usage: tuple[str, ...]
    make: Callable[[str | None], Engine]


def engine_for(word: str) -> Engine:
    """The engine that a word asks for, which is to be closed.

    Parameters
    ----------
    word : str
        ``"here"``, ``"local"``, ``"local:4"``, ``"ray"``, ``"ray:4"``, ``"ray:auto"``, ``"ray:HOST:PORT"``,
        ``"ray://HOST:PORT"``, or what an entry of :data:`ENGINES` adds.

    Raises
    ------
    OptionError
        If there is no such engine, or what it needs is not installed.
    WorkersLostError
        If there is nobody at the address.
    """
    name, colon, rest = word.partition(":")
    if name not in ENGINES:
        raise OptionError(f"there is no engine {word!r}; there are {_usage()}")
    return ENGINES[name].make(rest if colon else None)


def _usage() -> str:
    return ", ".join(usage for kind in ENGINES.values() for usage in kind.usage)


def _here(rest: str | None) -> Engine:
    if rest is not None:
        raise OptionError(f"there is no engine 'here:{rest}': what runs in this process is one worker, 'here'")
    return here_engine()


def _local(rest: str | None) -> Engine:
    if rest is not None and not rest.isdecimal():
        raise OptionError(f"there is no engine 'local:{rest}': after the colon stands how many workers, as in local:4")
    return local_engine(None if rest is None else int(rest))


ENGINES: dict[str, EngineKind] = {
    "here": EngineKind(("here",), _here),
    "local": EngineKind(("local", "local:N"), _local),
    "ray": EngineKind(("ray", "ray:N", "ray:auto", "ray:HOST:PORT", "ray://HOST:PORT"), ray_engine),
}
"""By the word before the colon. An entry makes an engine known to every command that takes one."""
