"""Souffle itself in a benchmark: LLVM code on the processor, or kernels on a GPU, launched and as one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from souffle.benchmark.host_way import HostWay
from souffle.benchmark.peer import GRAPH, LAUNCHES, Way
from souffle.runtime import Network

__all__ = ["GpuWay", "ways_of"]


class GpuWay:
    """A network on a GPU, timed by CUDA events; copies of inputs and outputs are left out.

    Parameters
    ----------
    network : Network
    inputs : mapping of str to array
    form : str
        :data:`souffle.benchmark.peer.LAUNCHES` or :data:`souffle.benchmark.peer.GRAPH`.
    """

    clock, untimed = "CUDA events", ""

    def __init__(self, network: Network, inputs: Mapping[str, np.ndarray], form: str) -> None:
        self.form = form
        self._network, self._inputs = network.on(network.device, graph=form == GRAPH), dict(inputs)
        self._mode = "graph" if form == GRAPH else "launch"

    def outputs(self) -> Mapping[str, np.ndarray]:
        """Run once: outputs by the model's names."""
        return {name: np.asarray(value) for name, value in self._network(self._inputs).items()}

    def sample(self, cold: bool) -> float:
        """Run once, and say how many microseconds that took; see :class:`souffle.benchmark.peer.Way`."""
        timed = self._network.time(self._inputs, repeats=1, warmup=0 if cold else 1, mode=self._mode, flush=cold)
        return timed["median_us"]


def ways_of(network: Any, inputs: Mapping[str, np.ndarray]) -> Sequence[Way]:
    """The ways to run a compiled network: of a GPU both forms, graph first."""
    given = dict(inputs)
    if isinstance(network, Network) and network.device == "cpu":
        why = "no GPU is usable here: its kernels ran on the CPU device, whose time says nothing"
        return [HostWay(lambda: network(given), lambda outputs: outputs, form=LAUNCHES, clock="-", untimed=why)]
    if isinstance(network, Network):
        return [GpuWay(network, inputs, form) for form in (GRAPH, LAUNCHES)]
    return [HostWay(lambda: network(given), lambda outputs: outputs)]
