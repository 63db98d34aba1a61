"""What a worker does with a board: a candidate runs there beside the rule's own schedule, compared with it first.

The functions take and give what those of :mod:`souffle.tuning.measuring` do, with ``address`` in place of ``driver``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from souffle.errors import DeviceError, OptionError
from souffle.tuning.board.address import BoardAddress, parse_board_address
from souffle.tuning.board.kernel import BoardKernel
from souffle.tuning.board.line import BoardError
from souffle.tuning.board.session import BoardSession, board_session
from souffle.tuning.board.timing import in_turn
from souffle.tuning.board.tracker import NoBoardError, no_board, registered_boards
from souffle.tuning.board.values import outputs_differ, random_inputs

__all__ = ["device", "job_seconds", "measure"]

_SPARE_SECONDS = 30.0
"""Of a job, beside its wait and its time on the board: making a library, and what a worker does first."""
_UNWRITTEN = (0xFF, 0x5A)
"""What each byte of the outputs is before a kernel runs: an element that is the same after both was written."""


def job_seconds(address: BoardAddress) -> float:
    """For :attr:`souffle.workers.Job.seconds`: a job of a board limits itself, and says where it was."""
    return address.wait + address.seconds + _SPARE_SECONDS


def device(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """The GPU of a board.

    Parameters
    ----------
    payload : mapping
        ``address``, as :func:`souffle.tuning.board.parse_board_address` reads it.
    shared : mapping

    Returns
    -------
    dict
        ``name`` as the board says, ``arch``, and ``boards``: how many are registered under the key.

    Raises
    ------
    OptionError
        If the address has another form, or nothing is registered under its key.
    DeviceError
        If no board is free in time. A BoardError, if the tracker or the board does not answer.
    """
    address = parse_board_address(payload["address"])
    known = registered_boards(address)
    if not known[address.key]:
        raise OptionError(no_board(address, known))
    try:
        with board_session(address) as session:
            return {"name": session.device.name, "arch": session.device.arch, "boards": known[address.key]}
    except NoBoardError as error:
        # It has been waited for, and is not to be waited for once more.
        raise DeviceError(str(error)) from error


def measure(payload: Mapping[str, Any], shared: Mapping[str, bytes]) -> dict[str, Any]:
    """Seconds of a candidate.

    Parameters
    ----------
    payload : mapping
        ``plan`` of the candidate and ``baseline``, each a pickled plan of one launch, and ``address``.
    shared : mapping

    Returns
    -------
    dict
        ``problem``, which is what the candidate computes wrong; or ``seconds`` with a cold and with a warm second-level
        cache, those of the baseline in the same rounds (``baseline_seconds``), ``left_out``, how many rounds were far
        from the others, and ``device``. Where ``gone`` is true, `problem` is that there is no board any more, which
        says nothing of the candidate.

    Raises
    ------
    BoardError
        If the board, or its tracker, does not do what it is asked. It is an error of the system, for which engines try
        a job once more.
    NoGpuError
        If the machine code is for another architecture.
    OptionError, CompilerNotFoundError
        If a plan is none that a board can be sent, or nothing here links for its host.
    """
    address = parse_board_address(payload["address"])
    candidate, baseline = (BoardKernel.of_plan(pickle.loads(payload[role])) for role in ("plan", "baseline"))
    if candidate.tensors != baseline.tensors:
        raise OptionError(f"kernels {candidate.name} and {baseline.name} do not take and give the same")
    try:
        with board_session(address) as session:
            return _measured(session, candidate, baseline)
    except NoBoardError as error:
        return {"problem": str(error), "gone": True}


def _measured(session: BoardSession, candidate: BoardKernel, baseline: BoardKernel) -> dict[str, Any]:
    inputs = [(one.name, one.shape, one.dtype) for one in baseline.tensors if one.kind == "input"]
    session.give(random_inputs(inputs))
    rule = session.load(baseline, "baseline")
    with session.doing("running the baseline"):
        expected, again = map(rule.outputs, _UNWRITTEN)
    if outputs_differ(again, expected) or any(map(_nothing, expected.values())):
        raise BoardError("the board computes nothing with the rule's own schedule, or not the same twice")
    own = session.load(candidate, "candidate")
    with session.doing("running the candidate"):
        problem = outputs_differ(own.outputs(_UNWRITTEN[0]), expected)
        wrong = bool(problem) and outputs_differ(own.outputs(_UNWRITTEN[0]), expected) == problem
    if wrong:
        return {"problem": problem}
    if problem:
        raise BoardError(f"{problem}, and not the next time: the board, or the candidate, computes not the same twice")
    with session.doing("measuring"):
        turns = in_turn(*(partial(kernel.seconds, session.handle) for kernel in (own, rule)))
    return {
        "problem": "",
        "seconds": list(turns.seconds),
        "baseline_seconds": list(turns.baseline),
        "left_out": turns.left_out,
        "device": session.device.name,
    }


def _nothing(values: np.ndarray) -> bool:
    """Whether values are not a number, all of them: with them nothing can be compared."""
    return values.size > 0 and values.dtype.kind not in "biu" and bool(np.isnan(values).all())
