"""Load a saved network: CUDA networks need neither TVM nor the compiler, those for the CPU need TVM's runtime."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from souffle.codegen.plan import Plan
from souffle.options import checked_threads
from souffle.runtime import Network, artifact
from souffle.runtime.plan_versions import PlanVersions
from souffle.runtime.versioned_network import VersionedNetwork

__all__ = ["load", "network_of"]


def network_of(plan: Plan, *, device: str = "auto", threads: int | None = None, **options: Any):
    """The network that runs a plan; parameters and result as for :func:`load`."""
    if plan.options.arch.startswith("llvm"):
        return importlib.import_module("souffle.runtime.host_network").HostNetwork(plan, threads=threads)
    return Network(plan, device=device, **options)


def _suited(processors: Sequence[str]) -> int:
    """Which of several processors' code suits this machine; asked only of a file that has several."""
    return importlib.import_module("souffle.schedule.cpu").best_processor(processors)


def load(path: str | os.PathLike, *, device: str = "auto", threads: int | None = None, **options: Any):
    """Load a ``.souffle`` file. Nothing in it is executed before the network is called.

    Parameters
    ----------
    path : path
    device : str
        For a CUDA network, see :func:`souffle.compile`.
    threads : int, optional
        For a network of the CPU, see :func:`souffle.compile`; the number that it was compiled with where not given.
    options
        For a CUDA network, further ones of :class:`souffle.runtime.Network`, such as ``checked``.

    Returns
    -------
    Network, HostNetwork or VersionedNetwork
        As from :func:`souffle.compile`, for any number of threads. A network of several versions has those that it had
        when it was saved. Of one for several processors, the code for this machine's is read, and no other.

    Raises
    ------
    ArtifactError
        If the file is damaged, foreign or of a later version.
    OptionError
        If `threads` is not valid.
    """
    threads = None if threads is None else checked_threads(threads)
    found = artifact.read(path, _suited)
    if not isinstance(found, PlanVersions):
        return network_of(found, device=device, threads=threads, **options)
    networks = {
        extents: network_of(plan, device=device, threads=threads, **options) for extents, plan in found.plans.items()
    }
    return VersionedNetwork(found.dimensions, networks, padding=found.padding)
