"""What the steps of a GPU host read: artifacts as networks, on a GPU or with a played driver, and their values."""

from __future__ import annotations

import argparse
import hashlib
import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rehearsal_driver import RehearsalDriver
from benchmarks.weights import read_weights
from souffle.codegen.plan import CudaModule, Plan
from souffle.runtime import Network, VersionedNetwork, describe
from souffle.runtime.plan_versions import PlanVersions

__all__ = ["Task", "network_of", "optional", "played_driver", "values_of", "versions_of", "with_weights"]

_MULTIPROCESSORS, _PLAYED = 132, 2
"""Of an H100 or H200, played where no kernel runs; where kernels run, on the CPU, so few that stages loop and blocks
share a multiprocessor."""


@dataclass(frozen=True)
class Task:
    """One case: a saved network, its inputs and expected outputs, its weights, the model that has their draws, and its
    kernels with clocks."""

    name: str
    artifact: str
    io: str
    weights: str | None = None
    graph: str | None = None
    clocks: str | None = None


def optional(name: str) -> Any:
    """A module, or None where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _rehearsed(plan: Plan) -> Plan:
    """A plan that was compiled without nvcc, with something in the place of machine code."""
    return replace(
        plan,
        modules=tuple(
            CudaModule(module.text, module.cubin or hashlib.sha256(module.text.encode()).digest())
            for module in plan.modules
        ),
    )


def network_of(plan: Plan, options: argparse.Namespace, **more: Any) -> Network:
    """A plan on the GPU; when rehearsing, with a played driver."""
    if not options.rehearse:
        return Network(plan, device="cuda", **more)
    plan = _rehearsed(plan)
    texts = {module.cubin: module.text for module in plan.modules}
    return Network(plan, device="cuda", driver=played_driver(plan, texts, options), **more)


def versions_of(plan: PlanVersions, options: argparse.Namespace) -> VersionedNetwork:
    """The same of a network of several versions, with one driver for all."""
    plans = {extents: _rehearsed(one) if options.rehearse else one for extents, one in plan.plans.items()}
    driver = None
    if options.rehearse:
        texts = {module.cubin: module.text for one in plans.values() for module in one.modules}
        driver = played_driver(next(iter(plans.values())), texts, options)
    networks = {key: Network(one, device="cuda", driver=driver, poison=True) for key, one in plans.items()}
    return VersionedNetwork(plan.dimensions, networks, padding=plan.padding)


def played_driver(plan: Plan, texts: dict[bytes, str], options: argparse.Namespace) -> RehearsalDriver:
    """The played driver, for a plan's kernels."""
    arch = plan.options.arch[3:].rstrip("af")
    return RehearsalDriver(
        texts,
        types=optional("cuda.bindings.driver"),
        capability=(int(arch[:-1]), int(arch[-1])),
        execute=options.execute,
        multiprocessors=_PLAYED if options.execute else _MULTIPROCESSORS,
        resources={
            kernel.name: (kernel.resources.registers, kernel.resources.static_shared_bytes)
            for kernel in plan.kernels
            if kernel.resources
        },
        deferred=options.deferred,
        fault=options.fault,
    )


def with_weights(plan: Plan, task: Task) -> tuple[Plan, str]:
    """A plan with its true constants where they can be had, and what its constants are."""
    if describe(task.artifact).constants == "stored":
        return plan, "stored"
    if task.weights is None or task.graph is None:
        return plan, "synthetic"
    weights = read_weights(Path(task.weights), Path(task.graph))
    return replace(plan, constants={**plan.constants, **weights}), "drawn"


def values_of(path: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Inputs and expected outputs by the model's names."""
    with np.load(path, allow_pickle=False) as file:
        groups: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
        for key in file.files:
            kind, _, name = key.partition("/")
            groups[kind == "output"][name] = file[key]
    return groups
