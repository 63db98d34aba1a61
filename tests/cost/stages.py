"""Stages that the tests of the cost model look at."""

from __future__ import annotations

from tvm import te

from souffle.schedule.gpu import schedule_gpu
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.lower import DeviceFunction, cuda_target, lower_stage
from souffle.tvm_compat import primfunc_from_tensors

TARGET = cuda_target("sm_80")


def lowered(tensors: list[te.Tensor], sm_count: int = 108) -> tuple[str, DeviceFunction]:
    """The rule that schedules some tensors, and the function that they are lowered to."""
    schedule, _ = schedule_gpu(primfunc_from_tensors(tensors, "stage"), GpuRequest("sm_80", 256, sm_count))
    (function,) = lower_stage("stage", schedule, TARGET)
    return schedule.rule, function


def affine(size: int) -> list[te.Tensor]:
    x = te.placeholder((size,), "float32", "x")
    return [x, te.compute((size,), lambda i: x[i] * 2.0 + 1.0, "y")]


def product(m: int, n: int, k: int, dtype: str) -> list[te.Tensor]:
    a, b = te.placeholder((m, k), dtype, "a"), te.placeholder((k, n), dtype, "b")
    r = te.reduce_axis((0, k), "r")
    wide = (lambda x: x) if dtype == "float32" else (lambda x: x.astype("float32"))
    return [a, b, te.compute((m, n), lambda i, j: te.sum(wide(a[i, r]) * wide(b[r, j]), r), "c")]
