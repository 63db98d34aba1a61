"""Kernels of stages that run on the CPU device and are compared with the plain function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import te, tirx

from souffle.codegen.cuda import emit_cuda
from souffle.emulator import compile_text
from souffle.kernel import KernelShape
from souffle.kernel.kernel_shape import ArgumentPlace, StageCall
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import MULTIPLIES, GpuRequest, GpuSchedule, Rule, Sketch
from souffle.schedule.gpu.schedule_check import check_schedule
from souffle.schedule.lower import DeviceFunction, cuda_target, lower_stage
from souffle.tvm_compat import const_int, primfunc_from_tensors

A100 = GpuRequest("sm_80", sm_count=108, max_shared_bytes=163 * 1024)
SMALL = GpuRequest("sm_80", threads=128, sm_count=4, max_shared_bytes=163 * 1024)
# Of plain functions to compare with: LLVM takes longer to optimize one than it takes to run.
PLAIN = tvm.target.Target({"kind": "llvm", "opt-level": 0})

Tensors = tuple[te.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """A stage with what is asked for, and values for the knobs where they are not the rule's own."""

    name: str
    inputs: Tensors
    outputs: Tensors
    request: GpuRequest = SMALL
    values: tuple[tuple[str, int], ...] = ()

    @property
    def func(self) -> tirx.PrimFunc:
        return primfunc_from_tensors([*self.inputs, *self.outputs], self.name)


class WordCase(Case):
    """A case whose products may be computed in TF32, as its name says."""

    @property
    def func(self) -> tirx.PrimFunc:
        return super().func.with_attr(MULTIPLIES, self.name.rpartition("_")[2])


@dataclass(frozen=True, eq=False)
class Built:
    """All cases as one CUDA text, since each compilation costs more than a case."""

    schedules: Mapping[str, GpuSchedule]
    functions: Mapping[str, DeviceFunction]
    module: object
    reference: object


def data(*shape: int, dtype: str = "float16", name: str = "x") -> te.Tensor:
    return te.placeholder(shape, dtype, name=name)


def shape_of(tensor: te.Tensor) -> tuple[int, ...]:
    return tuple(const_int(extent) for extent in tensor.shape)


def scheduled(case: Case, rule: Rule) -> GpuSchedule:
    sketch = rule.sketch(StageForms(case.func), case.request)
    assert isinstance(sketch, Sketch), f"{case.name}: {sketch}"
    schedule = sketch.with_values(dict(case.values)) if case.values else sketch.chosen()
    assert isinstance(schedule, GpuSchedule), f"{case.name}: {schedule}"
    check_schedule(schedule, case.request)
    return schedule


def kernels(schedules: Mapping[str, GpuSchedule], arch: str) -> tuple[str, dict[str, DeviceFunction]]:
    """The text of a kernel ``run_NAME`` for each, and its function."""
    target = cuda_target(arch)
    functions = {}
    shapes = []
    for name, schedule in schedules.items():
        (functions[name],) = lower_stage(name, schedule, target)
        sizes = tuple((str(p.ty.dtype), 0) for p in schedule.func.params)
        call = StageCall((functions[name],), tuple(ArgumentPlace(i) for i in range(len(sizes))), False, ())
        shapes.append((f"run_{name}", KernelShape((call,), sizes)))
    return emit_cuda(shapes, target)[0], functions


def build(cases: Sequence[Case], rule: Rule, arch: str = "sm_80") -> Built:
    schedules = {case.name: scheduled(case, rule) for case in cases}
    text, functions = kernels(schedules, arch)
    plain = tvm.IRModule({case.name: case.func for case in cases})
    return Built(schedules, functions, compile_text(text), tvm.compile(plain, target=PLAIN))


def random_inputs(case: Case) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    inputs = []
    for tensor in case.inputs:
        dtype, shape = np.dtype(str(tensor.dtype)), shape_of(tensor)
        values = generator.integers(0, 72, shape) if dtype.kind == "i" else generator.uniform(-1, 1, shape)
        inputs.append(np.asarray(values, dtype))
    return inputs


def launched(case: Case, built: Built, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the kernel gives, the same bits in a fixed and in a shuffled order with fewer blocks than tiles."""
    schedule, function = built.schedules[case.name], built.functions[case.name]
    seen = []
    for order, blocks in (("fixed", schedule.tiles), ("shuffled", max(1, schedule.tiles // 2))):
        outputs = [np.full(shape_of(tensor), 7, str(tensor.dtype)) for tensor in case.outputs]
        built.module.launch(
            f"run_{case.name}",
            grid=(blocks, 1, 1),
            block=(schedule.threads, 1, 1),
            args=[*inputs, *outputs, blocks],
            shared_bytes=function.shared_bytes,
            order=order,
        )
        seen.append(outputs)
    # Sums are added in one order, whichever warp comes first.
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*seen, strict=True))
    return seen[0]


def compare(case: Case, built: Built, narrow: float = 1e-2, wide: float = 1e-2) -> None:
    """With random inputs, to tolerances for results in 16 bits and wider."""
    inputs = random_inputs(case)
    expected = [tvm.runtime.tensor(np.full(shape_of(t), 7, str(t.dtype))) for t in case.outputs]
    built.reference[case.name](*map(tvm.runtime.tensor, inputs), *expected)
    for output, reference in zip(launched(case, built, inputs), expected, strict=True):
        tolerance = narrow if "16" in str(output.dtype) else wide
        scale = max(1.0, float(np.abs(reference.numpy()).max()))
        np.testing.assert_allclose(output, reference.numpy(), rtol=tolerance, atol=tolerance * scale)
