"""Schedules are lowered once, whoever asks, and a schedule that was exchanged is lowered anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import s_tir, te, tirx

from souffle.analysis import analyze
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu import GpuRequest, GpuSchedule, schedule_gpu
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.lower import LoweringError, cuda_target, lower_stage
from souffle.schedule.lower.stages import lower_stages
from souffle.schedule.stage import Stage
from souffle.tvm_compat import primfunc_from_tensors, structural_digest
from tests.testlib import Builder, calls_made

ARCH = "sm_80"


def primfunc(size: int) -> tirx.PrimFunc:
    x = te.placeholder((size,), "float32", "x")
    return primfunc_from_tensors([x, te.compute((size,), lambda i: x[i] * 2.0, "y")], "stage")


def schedule(size: int = 600) -> GpuSchedule:
    return schedule_gpu(primfunc(size), GpuRequest(ARCH))[0]


def clustered(own: GpuSchedule) -> GpuSchedule:
    """A schedule that uses what stages do not."""
    sch = s_tir.Schedule(primfunc(600))
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    outer, inner = sch.split(sch.get_loops(block)[0], [None, 256])
    sch.bind(outer, "clusterCtaIdx.x")
    sch.bind(inner, "threadIdx.x")
    return replace(own, func=sch.mod["main"])


def stages() -> tuple[Stage, ...]:
    """Two equal ones and one of another size."""
    b = Builder()
    x, y, z = b.input(600), b.input(600), b.input(700)
    program = b.program(b.relu(x), b.relu(y), b.relu(z))
    return form_stages(program, analyze(program), GpuScheduler(device_for(ARCH)), JoinPolicy(False))[0]


def test_a_stage_is_lowered_once() -> None:
    scheduler = GpuScheduler(device_for(ARCH))
    answer = scheduler(primfunc(600))
    (function,) = answer.functions
    assert scheduler(primfunc(600)).functions[0] is function and function.schedule is answer.schedule
    (again,) = lower_stage("stage", answer.schedule, scheduler.target)
    assert again is not function and structural_digest(again.func) == structural_digest(function.func)
    assert scheduler(primfunc(700)).functions[0].func.body is not function.func.body


def test_equal_stages_share_functions_with_names_of_their_own() -> None:
    formed = stages()
    one, same, other = lower_stages(formed, cuda_target(ARCH))
    assert one.functions is same.functions and one.functions[0].func is formed[0].functions[0].func
    assert [stage.label for stage in (one, same, other)] == ["stage0_relu0", "stage0_relu0", "stage1_relu2"]
    assert calls_made(lambda: lower_stages(formed, cuda_target(ARCH))) < 2000


def test_what_cannot_be_lowered_says_so() -> None:
    with pytest.raises(LoweringError, match=r"clusterCtaIdx\.x"):
        lower_stage("stage", clustered(schedule()), cuda_target(ARCH))


def test_a_schedule_that_was_exchanged_is_lowered_anew() -> None:
    first, *_ = stages()
    fewer = GpuScheduler(device_for(ARCH), threads=128)(first.draft.func).schedule
    (changed,) = lower_stages((replace(first, schedule=fewer),), cuda_target(ARCH))
    assert changed.functions[0].threads == 128 and changed.functions[0].schedule is fewer
    with pytest.raises(LoweringError, match=r"clusterCtaIdx\.x"):
        lower_stages((replace(first, schedule=clustered(first.schedule)),), cuda_target(ARCH))
