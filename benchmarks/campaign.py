"""Campaigns of numbered random cases: which numbers, and a file with a line of JSON for each, which is gone on with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["add_seed_options", "append_record", "read_records", "seeds"]


def add_seed_options(parser: argparse.ArgumentParser, case: str) -> None:
    """The options ``--seeds``, ``--count``, ``--minutes`` and ``--out`` of a campaign of cases that are called so."""
    parser.add_argument("--seeds", metavar="A:B", help="these seeds")
    parser.add_argument("--count", type=int, metavar="N", help="the next N seeds that the file lacks")
    parser.add_argument("--minutes", type=float, metavar="M", help="as many as fit into M minutes")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"one line of JSON for each {case}; gone on with")


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
        first, _, end = span.partition(":")
        yield from (seed for seed in range(int(first), int(end or int(first) + 1)) if seed not in done)
        return
    seed, given = 0, 0
    while count is None or given < count:
        if seed not in done:
            given += 1
            yield seed
        seed += 1


def read_records(path: Path | None) -> list[dict[str, Any]]:
    """The lines of a campaign's file, but for one that was being written as the machine stopped; of no file, none."""
    if path is None or not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line; one that was not finished before stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")
