"""Schedules are lowered once, whoever asks, and forgotten with the schedule."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
from tvm import s_tir, te, tirx

from souffle.schedule.gpu import GpuRequest, GpuSchedule, schedule_gpu
from souffle.schedule.lower import Lowering, LoweringError, cuda_target, lower_stage
from souffle.tvm_compat import primfunc_from_tensors, structural_digest

ARCH = "sm_80"


def primfunc(size: int) -> tirx.PrimFunc:
    x = te.placeholder((size,), "float32", "x")
    return primfunc_from_tensors([x, te.compute((size,), lambda i: x[i] * 2.0, "y")], "stage")


def schedule(size: int = 600) -> GpuSchedule:
    return schedule_gpu(primfunc(size), GpuRequest(ARCH))[0]


def test_a_schedule_is_lowered_once() -> None:
    lowering, own = Lowering(cuda_target(ARCH)), schedule()
    assert lowering.problem(own) is None
    (first,) = lowering.functions(own)
    assert lowering.functions(own)[0] is first
    (again,) = lower_stage("stage", own, lowering.target)
    assert again is not first and structural_digest(again.func) == structural_digest(first.func)
    assert lowering.functions(schedule(700))[0].func.body is not first.func.body


def test_what_cannot_be_lowered_says_so_each_time() -> None:
    lowering, own = Lowering(cuda_target(ARCH)), schedule()
    sch = s_tir.Schedule(primfunc(600))
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    outer, inner = sch.split(sch.get_loops(block)[0], [None, 256])
    sch.bind(outer, "clusterCtaIdx.x")
    sch.bind(inner, "threadIdx.x")
    odd = replace(own, func=sch.mod["main"])
    reason = lowering.problem(odd)
    assert "clusterCtaIdx.x" in reason
    for _ in range(2):
        with pytest.raises(LoweringError) as caught:
            lowering.functions(odd)
        assert str(caught.value) == reason


def test_functions_go_with_their_schedule() -> None:
    lowering, own = Lowering(cuda_target(ARCH)), schedule()
    function = weakref.ref(lowering.functions(own)[0])
    assert function() is not None
    del own
    gc.collect()
    assert function() is None
