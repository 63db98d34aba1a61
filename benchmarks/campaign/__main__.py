"""Whether two files of a campaign hold the same, times aside: ``python -m benchmarks.campaign A.jsonl B.jsonl``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.campaign.records import read_records, without_times

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print what only one of them holds; 1 if there is anything."""
    parser = argparse.ArgumentParser(prog="benchmarks.campaign", description=__doc__)
    parser.add_argument("files", type=Path, nargs=2, metavar="FILE")
    paths = parser.parse_args(argv).files
    lines = [[json.dumps(without_times(record)) for record in read_records(path)] for path in paths]
    for path, own, other in zip(paths, lines, lines[::-1], strict=True):
        for line in own:
            if line not in other:
                print(f"only in {path}: {line[:1000]}")
    same = lines[0] == lines[1]
    words = "the same" if same else "not the same" if set(lines[0]) ^ set(lines[1]) else "the same in another order"
    print(f"{len(lines[0])} and {len(lines[1])} lines: {words}, times aside")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
