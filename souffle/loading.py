"""Load a saved network: CUDA networks need neither TVM nor the compiler, those for the CPU need TVM's runtime."""

from __future__ import annotations

import importlib
import os
from typing import Any

from souffle.codegen.plan import Plan
from souffle.runtime import Network, artifact

__all__ = ["load", "network_of"]


def network_of(plan: Plan, *, device: str = "auto", **options: Any):
    """The network that runs a plan; parameters and result as for :func:`load`."""
    if plan.options.arch.startswith("llvm"):
        return importlib.import_module("souffle.runtime.host_network").HostNetwork(plan)
    return Network(plan, device=device, **options)


def load(path: str | os.PathLike, *, device: str = "auto", **options: Any):
    """Load a ``.souffle`` file. Nothing in it is executed before the network is called.

    Parameters
    ----------
    path : path
    device : str
        For a CUDA network, see :func:`souffle.compile`.
    options
        For a CUDA network, further ones of :class:`souffle.runtime.Network`, such as ``checked``.

    Returns
    -------
    Network or HostNetwork
        As from :func:`souffle.compile`, for any number of threads.

    Raises
    ------
    ArtifactError
        If the file is damaged, foreign or of a later version.
    """
    return network_of(artifact.load(path), device=device, **options)
