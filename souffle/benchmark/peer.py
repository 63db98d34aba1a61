"""What another compiler is to a benchmark: it prepares a model, and gives ways to run it that can be timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import onnx

__all__ = ["GRAPH", "HOST", "LAUNCHES", "Peer", "Setting", "Way"]

HOST, LAUNCHES, GRAPH = "host", "launches", "graph"
"""How a network runs: by the processor; on a GPU kernel by kernel, as its library launches them; as one CUDA graph."""


@dataclass(frozen=True)
class Setting:
    """What all that are compared run under.

    Attributes
    ----------
    device : str
        ``"cpu"`` or ``"cuda"``.
    threads : int
        Of the processor, equal for all.
    precision : str
        Of :data:`souffle.options.PRECISIONS`.
    """

    device: str
    threads: int
    precision: str


class Way(Protocol):
    """A prepared network that can be run again and again with the same inputs.

    Attributes
    ----------
    form : str
        :data:`HOST`, :data:`LAUNCHES` or :data:`GRAPH`.
    clock : str
        What times it, in words.
    untimed : str
        Why its time would say nothing; empty where it says something.
    """

    form: str
    clock: str
    untimed: str

    def outputs(self) -> Mapping[str, np.ndarray]:
        """Run once: outputs by the model's names."""
        ...

    def sample(self, cold: bool) -> float:
        """Run once, and say how many microseconds that took.

        Parameters
        ----------
        cold : bool
            Whether the caches are overwritten right before; else the same way has run right before, untimed.
        """
        ...


class Peer(Protocol):
    """Another compiler.

    Attributes
    ----------
    name : str
        As ``--against`` takes it.
    failures : tuple of type
        What its library raises where it cannot compile or run a model.
    """

    name: str
    failures: tuple[type[Exception], ...]

    def lacking(self, setting: Setting) -> str:
        """Why it cannot take part here, and what would help; empty where it can."""
        ...

    def version(self) -> str:
        """Of its library; asked only where nothing is lacking."""
        ...

    def prepare(self, model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], setting: Setting) -> Sequence[Way]:
        """Compile a model for inputs that stay the same.

        Parameters
        ----------
        model : ModelProto
            With its weights.
        inputs : mapping of str to array
            By the model's names.
        setting : Setting
        """
        ...
