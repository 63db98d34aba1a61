"""Functions for the CPU, scheduled and compiled by LLVM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import tvm
from tvm import tirx
from tvm.error import InternalError

from souffle.parallel import map_in_threads, usable_cores
from souffle.program.extrema import with_llvm_extrema
from souffle.program.ieee import with_ieee_arithmetic
from souffle.program.llvm_pipeline import compile_llvm
from souffle.schedule.cpu.elementary import rounded_to_bfloat16
from souffle.schedule.cpu.schedule import ScheduledFunction, schedule_with_constants

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
    constants: Mapping[str, Collection[int]] | None = None,
    scheduled: dict[str, ScheduledFunction] | None = None,
    winograd: bool = True,
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
        Threads; by default as many as this process may use.
    report : list, optional
        Gets ``(name, reason)`` for each function that is compiled without a schedule, in the order of `funcs`.
    constants : mapping of str to collection of int, optional
        By function, the positions of parameters that hold the same in every call.
    scheduled : dict, optional
        Gets what was compiled of each function, whose parameters say which constants it takes packed. Needed with
        `constants`.
    winograd : bool
        Whether convolutions with constant weights may be computed by minimal filtering.

    Returns
    -------
    Module
        ``module.get_function(name, query_imports=True)`` is a function of tensors, in the order of its parameters as
        scheduled.
        Compiled functions use as many cores as TVM's pool has (:func:`use_cores`), or what a library is linked with.
    """
    names = list(funcs)
    count = max(1, min(workers or usable_cores(), len(names)))
    parts = [names[i::count] for i in range(count)]
    known = {name: (constants or {}).get(name, ()) for name in names}

    def scheduler(name: str) -> ScheduledFunction:
        return schedule_with_constants(funcs[name], target=target, constants=known[name], winograd=winograd)

    unscheduled: dict[str, str] = {}
    compiled: dict[str, ScheduledFunction] = {} if scheduled is None else scheduled
    modules = map_in_threads(
        count, lambda part: _compile({n: funcs[n] for n in part}, scheduler, target, unscheduled, compiled), parts
    )
    if report is not None:
        report.extend((name, unscheduled[name]) for name in names if name in unscheduled)
    first = modules[0]
    for module in modules[1:]:
        first.import_module(module)
    return first


def _compile(
    funcs: Mapping[str, tirx.PrimFunc],
    scheduler: Callable[[str], ScheduledFunction],
    target: tvm.target.Target,
    unscheduled: dict[str, str],
    compiled: dict[str, ScheduledFunction],
) -> tvm.runtime.Module:
    try:
        scheduled = {name: scheduler(name) for name in funcs}
        module = _module({name: each.func for name, each in scheduled.items()}, target)
        compiled.update(scheduled)
        return module
    except (InternalError, ValueError) as error:
        if len(funcs) > 1:
            modules = [
                _compile({name: func}, scheduler, target, unscheduled, compiled) for name, func in funcs.items()
            ]
            for module in modules[1:]:
                modules[0].import_module(module)
            return modules[0]
        # One function that TVM does not lower as scheduled must not cost the whole network.
        (name,) = funcs
        # TVM's message begins with what failed; where it was thrown follows.
        unscheduled[name] = str(error).strip().partition("\n")[0]
        _LOG.info("function %s is compiled without a schedule: %s", name, unscheduled[name])
        compiled[name] = ScheduledFunction.as_it_is(funcs[name])
        return _module(funcs, target)


def _module(funcs: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> tvm.runtime.Module:
    named = {name: _exact(func).with_attr("global_symbol", name) for name, func in funcs.items()}
    with tvm.transform.PassContext(disabled_pass=_DISABLED):
        return compile_llvm(named, target).mod


def _exact(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return rounded_to_bfloat16(with_llvm_extrema(func.with_body(with_ieee_arithmetic(func.body))))
