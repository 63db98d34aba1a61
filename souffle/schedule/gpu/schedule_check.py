"""What every schedule of a stage must obey, whoever made it: the scheduler asserts it."""

from __future__ import annotations

from tvm import ir, s_tir, tirx

from souffle.errors import SouffleError
from souffle.schedule.gpu.forms.blocks import is_reduction, product
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.tvm_compat import collect, const_int, statements_of

__all__ = ["ScheduleError", "check_schedule"]


class ScheduleError(SouffleError):
    """A schedule breaks a rule of stages (a bug of the rule that made it); the message names the rule and buffer."""


def check_schedule(schedule: GpuSchedule, request: GpuRequest) -> None:
    """Assert that `schedule` obeys the rules of stages.

    Every root-level nest is bound to ``blockIdx.x``, all to ``schedule.tiles``; threads come to ``request.threads``,
    or to fewer where no barrier is needed; no intermediate is in global memory; and no output is read, since another
    thread may have written it.

    Raises
    ------
    ScheduleError
        Naming the rule, the buffer or the axis.
    """
    func, rule = schedule.func, schedule.rule
    extents: dict[str, set[int]] = {}
    threads_of: list[tirx.Var] = []
    for loop in collect(func.body, tirx.For):
        if loop.thread_binding is not None:
            extents.setdefault(loop.thread_binding.thread_tag, set()).add(const_int(loop.extent))
            if loop.thread_binding.thread_tag.startswith("threadIdx"):
                threads_of.append(loop.loop_var)
    needs_barrier = False
    for realize in collect(func.body, s_tir.SBlockRealize):
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
            if is_reduction(axis):
                needs_barrier |= any(v.same_as(thread) for v in collect(value, ir.Var) for thread in threads_of)
        for buffer in realize.block.alloc_buffers:
            if buffer.scope() in ("", "global"):
                raise ScheduleError(f"rule {rule}: intermediate {buffer.name} is in global memory")
            needs_barrier |= buffer.scope().startswith("shared")
    for nest in statements_of(func.body.block.body):
        binding = nest.thread_binding if isinstance(nest, tirx.For) else None
        if binding is None or binding.thread_tag != "blockIdx.x":
            raise ScheduleError(f"rule {rule}: a root-level nest is not bound to blockIdx.x:\n{nest}")
    for tag, values in extents.items():
        if len(values) != 1:
            raise ScheduleError(f"rule {rule}: nests bind {tag} to different extents {sorted(values)}")
        if tag not in ("blockIdx.x", "threadIdx.x", "threadIdx.y", "threadIdx.z"):
            raise ScheduleError(f"rule {rule}: binds {tag}, which kernels do not have")
    if extents.get("blockIdx.x") != {schedule.tiles}:
        raise ScheduleError(f"rule {rule}: {schedule.tiles} tiles, but blockIdx.x has {extents.get('blockIdx.x')}")
    threads = product(min(values) for tag, values in extents.items() if tag.startswith("threadIdx"))
    if threads != schedule.threads:
        raise ScheduleError(f"rule {rule}: {schedule.threads} threads, but the loops bind {threads}")
    if threads > request.threads or (needs_barrier and threads != request.threads):
        raise ScheduleError(f"rule {rule}: binds {threads} threads, a block of this kernel has {request.threads}")
    _check_outputs(func, rule)


def _check_outputs(func: tirx.PrimFunc, rule: str) -> None:
    written = [store.buffer for store in collect(func.body, tirx.BufferStore)]
    # Statements alone: the regions that blocks declare still name an output that `cache_write` replaced in an index.
    statements = [s for kind in (tirx.BufferStore, tirx.Bind, tirx.Evaluate) for s in collect(func.body, kind)]
    read = [load.source for statement in statements for load in collect(statement, ir.TensorLoad)]
    for parameter in func.params:
        if any(parameter.same_as(w) for w in written) and any(parameter.same_as(r) for r in read):
            raise ScheduleError(f"rule {rule}: output {parameter.name} is read in the stage that writes it")
