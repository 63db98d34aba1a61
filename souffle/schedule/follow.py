"""The schedule that a recipe makes of a stage, or why there is none."""

from __future__ import annotations

import importlib
from dataclasses import replace

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import Trace

from souffle.decision import Refused
from souffle.errors import SouffleError
from souffle.schedule.gpu import sketch_of
from souffle.schedule.gpu.forms.blocks import product
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.schedule_check import ScheduleError, check_schedule
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.schedule.record import workload_module
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import collect, const_int

__all__ = ["followed", "native_schedule"]

_REPLAYING = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, SouffleError)
"""What a trace raises that does not fit the workload, or is no trace."""

_TENSOR_CORE_CALLS = ("tvm_mma_sync", "ptx_mma", "mma_sync")


def followed(recipe: Recipe, func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule | Refused:
    """The schedule that a recipe makes.

    A rule of ours makes the schedule itself, of the values of its knobs. MetaSchedule's trace is replayed; its last
    steps are those of its postprocessors.

    Parameters
    ----------
    recipe : Recipe
        Of whatever age: a rule or a step that is gone, or a value that is not offered any more, is refused.
    func : PrimFunc
        The stage before it is scheduled.
    request : GpuRequest
    """
    try:
        return _of_rule(recipe, func, request) if recipe.trace is None else _of_trace(recipe.trace, func, request)
    except _REPLAYING as error:
        name = type(error).__name__
        lines = str(error).strip().splitlines()
        return Refused(f"{name}: {lines[-1].removeprefix(f'{name}: ')[:200] if lines else ''}")


def _of_rule(recipe: Recipe, func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule | Refused:
    sketch = sketch_of(recipe.rule, func, request)
    if isinstance(sketch, Refused):
        return sketch
    schedule = sketch.with_values(recipe.knobs)
    if isinstance(schedule, GpuSchedule):
        check_schedule(schedule, request)
    return schedule


def _of_trace(trace: list, func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule:
    if any(step[0] == "Tensorize" for step in trace[0]):
        # It registers the intrinsics that such steps name, and reading all of them takes TVM half a minute.
        importlib.import_module("tvm.s_tir.tensor_intrin")
    sch = s_tir.Schedule(workload_module(func), debug_mask="none", error_render_level="fast")
    Trace.apply_json_to_schedule(trace, sch)
    return native_schedule(sch.mod["main"].with_attr("global_symbol", "stage"), request)


def native_schedule(func: tirx.PrimFunc, request: GpuRequest) -> GpuSchedule:
    """A function that MetaSchedule scheduled, as a stage.

    Virtual threads stay: lowering makes statements of them. All else must obey :func:`check_schedule`.

    Raises
    ------
    ScheduleError
        If it breaks a rule of stages.
    """
    extents: dict[str, int] = {}

    def see(loop: tirx.For) -> tirx.For:
        binding = loop.thread_binding
        if binding is None:
            return loop
        tag = str(binding.thread_tag)
        if tag.startswith("vthread"):
            return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
        extents[tag] = const_int(loop.extent)
        return loop

    body = structural_map(func.body, (tirx.For, see))
    threads = product([extent for tag, extent in extents.items() if tag.startswith("threadIdx")])
    calls = {str(getattr(call.op, "name", "")) for call in collect(func.body, tvm.ir.Call)}
    tensor_cores = any(part in name for name in calls for part in _TENSOR_CORE_CALLS)
    checked = GpuSchedule(func.with_body(body), NATIVE_RULE, extents.get("blockIdx.x", 0), threads, tensor_cores)
    if threads != request.threads:
        raise ScheduleError(f"rule {NATIVE_RULE}: {threads} threads, a block of this kernel has {request.threads}")
    check_schedule(checked, request)
    return replace(checked, func=func)
