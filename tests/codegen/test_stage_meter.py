"""What stages ask of a multiprocessor: from the compiler where there is one, assumed where there is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import souffle
from souffle.cache import read_entry, write_entry
from souffle.codegen import nvcc, stage_meter
from souffle.codegen.nvcc import find_nvcc
from souffle.codegen.plan import Resources
from souffle.codegen.stage_meter import StageMeter, smaller_waves
from souffle.decision import Decision
from souffle.partition import PartitionRequest
from souffle.program import TEProgram
from souffle.schedule.gpu.device import ASSUMED_REGISTERS, device_for
from souffle.schedule.lower import cuda_target
from souffle.schedule.resources import StageResources
from tests.kernel.test_merge import ARCH, lower, weights
from tests.testlib import Builder

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")


def network(width: int = 64, first: int = 0) -> TEProgram:
    """Two equal products, a sum of rows, and element-wise work before the first where asked."""
    b = Builder()
    x = b.input(64, width)
    for _ in range(first):
        x = b.tanh(x)
    for _ in range(2):
        x = b.matmul(x, b.constant(weights(width, width)))
    return b.program(b.reduce(x, 1))


def measured(program: TEProgram, **options) -> dict[str, StageResources]:
    lowered = lower(program)
    meter = StageMeter(ARCH, cuda_target(ARCH), **({"measure": True} | options))
    return {stage.name: stage.resources for stage in meter.measured(lowered.stages)}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels each run of the compiler was given."""
    runs: list[int] = []
    real = nvcc.compile_cubin

    def compile_cubin(text: str, arch: str, **options):
        image, report = real(text, arch, **options)
        runs.append(len(report))
        return image, report

    monkeypatch.setattr(stage_meter, "compile_cubin", compile_cubin)
    return runs


@needs_nvcc
def test_each_distinct_stage_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    lowered = lower(network())
    meter = StageMeter(ARCH, cuda_target(ARCH), measure=True)
    stages = meter.measured(lowered.stages)
    assert runs == [2] and [stage.draft for stage in stages] == [stage.draft for stage in lowered.stages]
    one, two, row_sum = (stage.resources for stage in stages)
    assert one == two and one.registers > row_sum.registers > 0
    for stage in stages:
        (function,), used = stage.functions, stage.resources
        assert used.measured and used.threads == 256
        assert used.dynamic_shared_bytes == used.shared_bytes == function.shared_bytes
    meter.measured(lowered.stages)
    assert runs == [2]


@needs_nvcc
def test_figures_are_kept_for_other_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    first = measured(network(), cache_dir=tmp_path)
    assert runs == [2] and len(list(tmp_path.iterdir())) == 2
    # Equal stages stand at other places there, under other names; only the new one is compiled.
    later = measured(network(first=1), cache_dir=tmp_path)
    assert runs == [2, 1]
    assert [*later.values()][1:] == [*first.values()]
    measured(network(width=32), cache_dir=tmp_path)
    assert runs == [2, 1, 2]


@needs_nvcc
def test_stages_are_split_over_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    monkeypatch.setattr(stage_meter.os, "cpu_count", lambda: 2)
    b = Builder()
    x = b.input(8, 8)
    outputs = [b.reduce(b.matmul(x, b.constant(weights(8, 8 * n))), 1) for n in range(1, 6)]
    together = measured(b.program(*outputs))
    assert sorted(runs) == [5, 5] and all(used.measured for used in together.values())


@needs_nvcc
def test_figures_of_before_stacks_were_kept_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = counted(monkeypatch)
    first = measured(network(), cache_dir=tmp_path)
    for path in tmp_path.iterdir():
        figures = json.loads(read_entry(path))
        del figures["stack_bytes"]
        write_entry(path, json.dumps(figures).encode())
    assert [used.stack_bytes for used in measured(network(), cache_dir=tmp_path).values()] == [0, 0, 0]
    assert runs == [2, 2] and [used.stack_bytes for used in first.values()] == [0, 0, 0]


def test_spills_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_cubin(text: str, arch: str):
        kernels = re.findall(r"__global__ void __launch_bounds__\(\d+\) (\w+)\(", text)
        return b"", {name: Resources(255, 16, 96, 100, 104) for name in kernels}

    monkeypatch.setattr(stage_meter, "compile_cubin", compile_cubin)
    monkeypatch.setattr(stage_meter, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(stage_meter, "compiler_version", lambda path: "1")
    for used in measured(network()).values():
        assert (used.registers, used.static_shared_bytes, used.spill_bytes, used.measured) == (255, 16, 96, True)
        assert used.stack_bytes == 104


@pytest.mark.parametrize("why", ["not wanted", "no compiler"])
def test_without_a_compiler_registers_are_assumed_and_memory_is_known(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_meter, "find_nvcc", lambda: None)
    lowered = lower(network())
    meter = StageMeter(ARCH, cuda_target(ARCH), measure=why == "no compiler")
    for stage in meter.measured(lowered.stages):
        used = stage.resources
        assert used.registers == ASSUMED_REGISTERS and not used.measured
        assert used.dynamic_shared_bytes == stage.functions[0].shared_bytes
    assert any(function.shared_bytes for stage in lowered.stages for function in stage.functions)


def cuts(program: TEProgram, **options) -> tuple[tuple[str, str, bool, str], ...]:
    net = souffle.compile(program, level="V3", target="cuda", arch=ARCH, device="cpu", **options)
    return tuple(d for d in net.plan.decisions if d[0] == "partition")


def test_decisions_say_that_registers_are_assumed() -> None:
    ((_, subject, _, reason),) = cuts(network(), cubin=False)
    assert subject == "no cut" and f"{ASSUMED_REGISTERS} registers" in reason and "(assumed)" in reason


@needs_nvcc
def test_decisions_say_that_registers_are_measured() -> None:
    ((_, _, _, reason),) = cuts(network(), cubin=True)
    assert "(measured)" in reason
    (_, subject, _, reason), *_ = cuts(network(), cubin=True, partition="persistent")
    assert subject == "no cut" and "predicted" in reason and "(measured)" in reason
    (*_, (_, subject, accepted, reason)) = cuts(network(), cubin=False, partition="persistent")
    assert subject == "cuts by predicted time" and not accepted and "registers are assumed" in reason


def test_lowering_gives_names_that_the_figures_do_not_depend_on() -> None:
    """The key of a stage is its text, so what differs between networks may not stand in it."""
    meter = StageMeter(ARCH, cuda_target(ARCH), measure=False)

    def keys(program: TEProgram) -> set[str]:
        return {meter._key(stage) for stage in lower(program).stages}

    one, other = keys(network()), keys(network(first=2))
    assert len(one) == 2 and one < other


def test_a_kernel_that_takes_more_registers_than_its_stages_says_so() -> None:
    """Merged, the same stages hold fewer blocks at once than was planned on."""
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        seen[stage] = result
        return result

    how = {"arch": ARCH, "cubin": False, "hook": hook, "disable": ["teams"]}
    plan = souffle.pipeline.compile_cuda(network(300), level="V3", **how).plan
    subprograms = seen["partition"].subprograms
    grid = max(stage.schedule.tiles for stage in seen["schedule"][:2])
    used = StageResources(128, 0, 0, 256, 0, True)
    stages = tuple(replace(stage, resources=used) for stage in seen["schedule"])
    subprograms = [replace(part, stages=tuple(replace(s, resources=used) for s in part.stages)) for part in subprograms]
    # At 128 registers two blocks share a multiprocessor, at 200 each has one.
    device = replace(device_for(ARCH), sm_count=-(-grid // 2))
    request = PartitionRequest(stages, device, seen["analysis"])
    wave = 2 * device.sm_count

    def compiled(registers: int) -> tuple[Decision, ...]:
        (kernel,) = plan.kernels
        kernels = (replace(kernel, resources=Resources(registers, 0, 0, 0)),)
        return smaller_waves(replace(plan, kernels=kernels), subprograms, request)

    assert grid > 1 and plan.kernels[0].cooperative
    assert compiled(128) == () and smaller_waves(plan, subprograms, request) == ()
    (decision,) = compiled(200)
    assert not decision.accepted and decision.subject == f"a wave of {wave} blocks for {plan.kernels[0].name}"
    assert f"it has 200 registers a thread, and {wave // 2} blocks are on the device at once" in decision.reason
