"""What ``torch.compile(backend="souffle")`` leaves to PyTorch, and why: said once in the log, and kept."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

__all__ = ["Break", "breaks", "note", "reset"]

_LOG = logging.getLogger("souffle.torch")
_KEPT = 1000
"""Breaks that are remembered, against a program that makes new ones for ever."""
_known: dict[Break, int] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Break:
    """A part of a model that does not run in Souffle.

    Attributes
    ----------
    kind : str
        ``"graph break"``, where TorchDynamo ends a graph: what stands there runs in Python, and the graphs before and
        behind it are compiled; or why a whole graph runs in PyTorch: ``"gradient"``, a gradient is asked for;
        ``"mutation"``, it writes to its inputs, parameters or buffers; ``"random"``, it draws random numbers;
        ``"aliasing"``, its outputs share memory; ``"export"``, PyTorch does not write it as ONNX; ``"refused"``,
        Souffle does not import it; ``"device"``, its tensors are of a kind or on devices that a network has not;
        ``"weights"``, its weights are others in each call; ``"shapes"``, its inputs had many shapes before.
    reason : str
        In words, with the operator.
    where : str
        File and line of the user's code, as far as they are known.
    operators : tuple of str
        Those of the graph that runs in PyTorch, each once.
    """

    kind: str
    reason: str
    where: str
    operators: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f" [{', '.join(self.operators)}]" if self.operators else ""
        at = f" at {self.where}" if self.where else ""
        return f"{self.kind}{at}: {self.reason}{names}"


def note(found: Break) -> None:
    """Remember a break, and say it in the log if it is a new one."""
    with _lock:
        new = found not in _known
        if new and len(_known) == _KEPT:
            return
        _known[found] = _known.get(found, 0) + 1
    if new:
        _LOG.warning("%s", found)


def breaks() -> dict[Break, int]:
    """What has run in PyTorch so far, of graphs that ``torch.compile(backend="souffle")`` was given.

    Returns
    -------
    dict of Break to int
        In the order in which they were found first, and how many graphs had each.
    """
    with _lock:
        return dict(_known)


def reset() -> None:
    """Forget all of them, so that each is said in the log again."""
    with _lock:
        _known.clear()
