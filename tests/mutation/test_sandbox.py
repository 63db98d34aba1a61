"""What runs mutants ends with who asked for it, also in the midst of a mutant that never ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from souffle.mutation.sandbox import Job, Sandbox
from tests.workers.processes import marked, new_mark, wait_for

ROOT = Path(__file__).resolve().parents[2]


class Endless:
    """In the place of a plan: whoever looks at it waits."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        time.sleep(600)


def test_a_mutant_that_never_ends_has_hung() -> None:
    with Sandbox(timeout_seconds=1.0) as sandbox:
        found = sandbox.run(Job(Endless(), (), None))
        assert (found.kind, found.detail) == ("hang", "nothing after 1 s")


def test_it_ends_with_a_mutant_whose_owner_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = new_mark(monkeypatch)
    program = (
        "from souffle.mutation.sandbox import Job, Sandbox; from tests.mutation.test_sandbox import Endless; "
        "Sandbox(600).run(Job(Endless(), (), None))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", program], env=environment)
    # The owner, the server and its fork.
    wait_for(lambda: len(marked(mark)) == 3)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: not marked(mark))
