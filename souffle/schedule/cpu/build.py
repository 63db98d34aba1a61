"""Functions for the CPU, scheduled and compiled by LLVM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import tvm
from tvm import tirx

from souffle.schedule.cpu.schedule import schedule_cpu

__all__ = ["build_cpu"]


def build_cpu(
    funcs: Mapping[str, tirx.PrimFunc], target: tvm.target.Target, *, workers: int | None = None
) -> tvm.runtime.Module:
    """Schedule and compile functions into one module.

    Parameters
    ----------
    funcs : mapping of str to PrimFunc
        By the name that each will have in the module.
    target : Target
        See :func:`host_target`.
    workers : int, optional
        Functions that are scheduled at the same time; the number of processors by default.

    Returns
    -------
    Module
        ``module[name](*tensors)`` runs a function; tensors in the order of its parameters.
    """
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        scheduled = pool.map(lambda item: _prepared(*item, target), funcs.items())
        module = tvm.IRModule(dict(scheduled))
    return tvm.compile(module, target=target).mod


def _prepared(name: str, func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[str, tirx.PrimFunc]:
    return name, schedule_cpu(func, target=target).with_attr("global_symbol", name)
