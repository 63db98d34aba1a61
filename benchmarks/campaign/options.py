"""What campaigns are asked for on the command line: which cases, by whom, and within which limits."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path

from souffle.errors import OptionError

__all__ = ["add_seed_options", "add_worker_options", "count_of", "seeds", "where"]


def add_seed_options(parser: argparse.ArgumentParser, case: str) -> None:
    """The options ``--seeds``, ``--count``, ``--minutes`` and ``--out`` of a campaign of cases that are called so."""
    parser.add_argument("--seeds", metavar="A:B", help="these seeds")
    parser.add_argument("--count", type=int, metavar="N", help="the next N seeds that the file lacks")
    parser.add_argument("--minutes", type=float, metavar="M", help="as many as fit into M minutes")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"one line of JSON for each {case}; gone on with")


def add_worker_options(parser: argparse.ArgumentParser, short: str = "--workers", memory_mb: int = 8192) -> None:
    """The options ``--on``, one that is short for processes of this machine, and ``--memory-mb``."""
    parser.add_argument(
        "--on",
        metavar="WHERE",
        help="local:N, ray, ray:N, ray://HOST:PORT, or here, where what dies ends the campaign (default: local:1)",
    )
    parser.add_argument(short, dest="workers", type=int, metavar="N", help="processes: short for --on local:N")
    parser.add_argument(
        "--memory-mb", type=int, default=memory_mb, metavar="MB", help="for one job (default: %(default)s)"
    )


def where(arguments: argparse.Namespace) -> str:
    """The engine that the options ask for, as :func:`souffle.workers.engine_for` has it.

    Raises
    ------
    OptionError
        If they ask for two.
    """
    if arguments.on is not None and arguments.workers is not None:
        raise OptionError(f"--on {arguments.on} says already which workers there are; leave the number of them out")
    return arguments.on or f"local:{1 if arguments.workers is None else arguments.workers}"


def seeds(span: str | None, count: int | None, done: Collection[int]) -> Iterator[int]:
    """The seeds of ``--seeds``, or of ``--count`` from 0 on, without those that are done.

    Parameters
    ----------
    span : str or None
        ``"A:B"`` for A to B - 1, ``"A"`` for one.
    count : int or None
        How many, where there is no span; ``None`` for no end.
    done : collection of int
    """
    if span:
        yield from (seed for seed in _range(span) if seed not in done)
        return
    seed, given = 0, 0
    while count is None or given < count:
        if seed not in done:
            given += 1
            yield seed
        seed += 1


def count_of(span: str | None, count: int | None, done: Collection[int]) -> int | None:
    """How many there are of :func:`seeds`; ``None`` for no end."""
    return len(_range(span)) - sum(seed in _range(span) for seed in done) if span else count


def _range(span: str) -> range:
    first, _, end = span.partition(":")
    return range(int(first), int(end or int(first) + 1))
