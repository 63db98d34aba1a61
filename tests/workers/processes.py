"""Which processes there are, and waiting for what they do."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

MARK = "SOUFFLE_TEST_MARK"
"""A variable that all processes inherit, whoever has started them."""


def new_mark(patch: pytest.MonkeyPatch) -> str:
    """Mark what this process starts from now on."""
    mark = uuid.uuid4().hex
    patch.setenv(MARK, mark)
    return mark


def marked(mark: str) -> dict[int, str]:
    """The living processes with a mark, and their names; not this one."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0") and alive(int(folder.name)):
                found[int(folder.name)] = (folder / "comm").read_text().strip()
        except OSError:
            continue
    return found


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    """Until something is so; it is an error if it does not come to be."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it has not come to be"
        time.sleep(0.02)
