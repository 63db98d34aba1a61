"""Bytes that kernels touch: by hand for small programs, and the CPU device's own counts for the paper's models."""

from __future__ import annotations

import json

import numpy as np
import pytest

import souffle
from benchmarks.traffic_table import COUNTINGS, main, network_traffic
from souffle import models
from souffle.codegen.assemble import CompiledKernels
from souffle.evaluation.traffic_counting import CountingError, Moved, count_functions, count_shape
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.schedule.lower.teams import Teams, team_function
from tests.kernel.test_loops import from_the_start
from tests.testlib import Builder, inputs_for
from tests.thorough import some


def compiled(program: TEProgram, level: str = "V3", precision: str = "fp32") -> CompiledKernels:
    return compile_cuda(program, level=level, arch="sm_80", precision=precision, cubin=False, verify="off")


def asked(kernels: CompiledKernels, *, as_written: bool) -> list[tuple[int, int]]:
    """Bytes that threads read and write in each launch."""
    known = count_functions((f for kernel in kernels.merged for f in kernel.shape.functions), as_written=as_written)
    shapes = {kernel.name: count_shape(kernel.shape, known).asked for kernel in kernels.merged}
    own = [shapes[kernels.plan.kernels[launch.kernel].name] for launch in kernels.plan.launches]
    return [(moved.read, moved.written) for moved in own]


def counts(kernels: CompiledKernels, inputs: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """The same by the CPU device."""
    # With a block for each tile, all that stays on chip has its place there.
    blocks = max(kernel.tiles for kernel in kernels.plan.kernels)
    net = Network(kernels.plan, device="cpu", checked=True, blocks=blocks)
    net(inputs)
    return [(report.total.read, report.total.written) for report in net.counts]


@pytest.mark.parametrize(
    ("name", "level", "precision"),
    some(
        [("mmoe", "V2", "fp32"), ("mmoe", "V4", "mixed")],
        [
            *((name, "V2", "fp32") for name in ("bert", "lstm", "swin", "efficientnet", "resnext")),
            ("bert", "V4", "mixed"),
        ],
    ),
)
def test_every_kernel_asks_for_what_the_cpu_device_counts(name: str, level: str, precision: str) -> None:
    model = models.build(name)
    kernels = compiled(souffle.import_onnx(model), level, precision)
    assert asked(kernels, as_written=True) == counts(kernels, models.random_inputs(model, seed=1))
    planned = [(launch.bytes_read, launch.bytes_written) for launch in kernels.plan.launches]
    assert network_traffic(kernels)["stage"] == Moved(*(sum(parts) for parts in zip(*planned, strict=True)))


def test_a_team_moves_what_a_block_moves() -> None:
    b = Builder()
    kernels = compiled(b.program(b.matmul(b.input(64, 64), b.constant(np.ones((64, 64), np.float32)))))
    (function,) = kernels.merged[0].shape.functions
    of_team = team_function(function, Teams(2, function.threads, function.shared_bytes))
    assert of_team.in_team and len(of_team.func.params) == len(function.func.params) + 1
    counted = count_functions([function, of_team])
    for attribute in ("asked", "once_per_tile"):
        assert getattr(counted[of_team], attribute) == getattr(counted[function], attribute)
    for block, team in zip(counted[function].read, counted[of_team].read, strict=True):
        assert np.array_equal(block, team)


def test_an_elementwise_stage_touches_each_element_once() -> None:
    b = Builder()
    kernels = compiled(b.program(b.relu(b.input(300, 40))))
    once = Moved(4 * 300 * 40, 4 * 300 * 40)
    assert network_traffic(kernels) == dict.fromkeys(COUNTINGS, once)


def test_what_tiles_have_in_common_is_read_once_for_a_stage() -> None:
    b = Builder()
    w = np.ones((64, 512), np.float32)
    kernels = compiled(b.program(b.matmul(b.input(256, 64), b.constant(w))))
    found = network_traffic(kernels)
    operands, result = 4 * (256 * 64 + 64 * 512), 4 * 256 * 512
    assert found["stage"] == found["launch"] == Moved(operands, result)
    assert found["asked"].read >= found["tile"].read > operands
    assert found["asked"].written == found["tile"].written == result


def test_a_loop_counts_as_often_as_it_turns_and_a_launch_reads_each_weight_once() -> None:
    steps, width = 5, 100
    program = from_the_start(steps, width)
    kernels = compiled(program)
    (launch,) = kernels.plan.launches
    found = network_traffic(kernels)
    state, weight = 4 * 4 * width, 4 * width * width
    assert found["stage"] == Moved(steps * (state + weight), steps * state)
    assert found["stage"] == Moved(launch.bytes_read, launch.bytes_written)
    # The carried state has two places that take turns, and the last step writes the output.
    assert found["launch"] == Moved(state + steps * weight, 3 * state)
    assert counts(kernels, inputs_for(program))[0][1] == found["asked"].written == steps * state


def test_elements_that_depend_on_data_are_refused() -> None:
    b = Builder()
    rows = b.input(30, dtype="int32")
    kernels = compiled(b.program(b.gather(b.input(300, 40), rows)))
    with pytest.raises(CountingError, match="which elements are touched depends on data"):
        network_traffic(kernels)


def test_the_table_of_a_tiny_model(tmp_path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "traffic.json"
    assert main(["--models", "mmoe", "--size", "tiny", "--level", "V4", "--precision", "fp32", "--out", str(out)]) == 0
    assert "mmoe" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["results"]
    assert row["asked"]["read"] >= row["tile"]["read"] >= row["stage"]["read"] >= row["launch"]["read"] > 0
