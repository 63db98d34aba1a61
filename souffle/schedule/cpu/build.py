"""Functions for the CPU, scheduled and compiled by LLVM."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import tvm
from tvm import tirx
from tvm.error import InternalError

from souffle.parallel import map_in_threads
from souffle.program.extrema import with_llvm_extrema
from souffle.program.ieee import with_ieee_arithmetic
from souffle.program.llvm_pipeline import compile_llvm
from souffle.schedule.cpu.elementary import rounded_to_bfloat16
from souffle.schedule.cpu.schedule import schedule_cpu

__all__ = ["build_cpu"]

# Buffers are as large here as they should be, and for an index such as (48 * task + c) % 32 TVM would shrink one to an
# extent that depends on the loops inside.
_DISABLED = ["s_tir.CompactBufferAllocation"]
_LOG = logging.getLogger(__name__)


def build_cpu(
    funcs: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
    *,
    workers: int | None = None,
    report: list[tuple[str, str]] | None = None,
) -> tvm.runtime.Module:
    """Schedule and compile functions.

    LLVM works outside of Python's lock, so the functions are divided among threads, one module each.

    Parameters
    ----------
    funcs : mapping of str to PrimFunc
        By the name that each will have in the module.
    target : Target
        See :func:`host_target`.
    workers : int, optional
        Threads; the number of processors by default.
    report : list, optional
        Gets ``(name, reason)`` for each function that is compiled without a schedule, in the order of `funcs`.

    Returns
    -------
    Module
        ``module.get_function(name, query_imports=True)`` is a function of tensors, in the order of its parameters.
        Compiled functions use as many cores as TVM's pool has: see :func:`use_cores`.
    """
    names = list(funcs)
    count = max(1, min(workers or os.cpu_count() or 1, len(names)))
    parts = [names[i::count] for i in range(count)]
    unscheduled: dict[str, str] = {}
    modules = map_in_threads(
        count, lambda part: _compile({name: funcs[name] for name in part}, target, unscheduled), parts
    )
    if report is not None:
        report.extend((name, unscheduled[name]) for name in names if name in unscheduled)
    first = modules[0]
    for module in modules[1:]:
        first.import_module(module)
    return first


def _compile(
    funcs: Mapping[str, tirx.PrimFunc], target: tvm.target.Target, unscheduled: dict[str, str]
) -> tvm.runtime.Module:
    try:
        return _module({name: schedule_cpu(func, target=target) for name, func in funcs.items()}, target)
    except (InternalError, ValueError) as error:
        if len(funcs) > 1:
            modules = [_compile({name: func}, target, unscheduled) for name, func in funcs.items()]
            for module in modules[1:]:
                modules[0].import_module(module)
            return modules[0]
        # One function that TVM does not lower as scheduled must not cost the whole network.
        (name,) = funcs
        # TVM's message begins with what failed; where it was thrown follows.
        unscheduled[name] = str(error).strip().partition("\n")[0]
        _LOG.info("function %s is compiled without a schedule: %s", name, unscheduled[name])
        return _module(funcs, target)


def _module(funcs: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> tvm.runtime.Module:
    named = {name: _exact(func).with_attr("global_symbol", name) for name, func in funcs.items()}
    with tvm.transform.PassContext(disabled_pass=_DISABLED):
        return compile_llvm(named, target).mod


def _exact(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return rounded_to_bfloat16(with_llvm_extrema(func.with_body(with_ieee_arithmetic(func.body))))
