"""The process that compiles: one request in, one ``.souffle`` file out, then it ends, as it does with its parent."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from souffle.errors import OptionError, SouffleError
from souffle.program.packed import unpack
from souffle.request import CompileRequest
from souffle.runtime.artifact import save
from souffle.schedule.gpu.registry import RULES

__all__ = ["ARTIFACT", "check_rules", "main", "receive"]

ARTIFACT = "network.souffle"
"""The name of the file in the process's folder."""


def main(descriptor: str, folder: str) -> None:
    """Compile what comes over the connection.

    Sends pairs: ``"progress"`` and what is being done, at last ``"end"`` and ``None`` or the error of Souffle's own
    that ended it. Other errors end the process, with a traceback.

    Parameters
    ----------
    descriptor : str
        The number of the connection's file.
    folder : str
        Of the network; everything temporary of this process lies there too.
    """
    parent = Connection(int(descriptor))
    os.dup2(2, 1)  # whatever a library prints
    try:
        request, rules = receive(parent)
    except EOFError:
        _end(folder)
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    try:
        check_rules(rules)
        plan = request.plan(progress=lambda message: parent.send(("progress", message)))
        parent.send(("progress", "writing"))
        save(plan, Path(folder) / ARTIFACT)
        error = None
    except SouffleError as found:
        error = found
    parent.send(("end", error))


def receive(parent: Connection) -> tuple[CompileRequest, tuple[str, ...]]:
    """What to compile, and the names of the rules for schedules that the parent knows.

    Raises
    ------
    EOFError
        If the parent has ended.
    """
    # Arrays of bytes that can be written to, as arrays are where nothing is sent.
    return unpack([bytearray(parent.recv_bytes()) for _ in range(parent.recv())])


def check_rules(rules: tuple[str, ...]) -> None:
    """Refuse to compile by other rules for schedules than the parent would.

    Raises
    ------
    OptionError
        If this process knows others, or in another order.
    """
    if list(rules) != list(RULES):
        other = sorted(set(rules) ^ set(RULES)) or rules
        raise OptionError(
            f"the rules {', '.join(other)} were registered or taken out in the process that asks for the network; "
            "background=True compiles in another one, which does not know of it: compile with background=False"
        )


def _end_with(parent: Connection, folder: str) -> None:
    """Wait for the parent's end: it sends nothing further."""
    try:
        parent.recv_bytes()
    except (EOFError, OSError):
        _end(folder)


def _end(folder: str) -> None:
    """End with all compilers that this process has started; it leads their group."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
