"""Kernels merged from stages: where grid syncs stand, what is shared, and that they compute the function."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from tvm import te

import souffle
from souffle.analysis import analyze
from souffle.kernel import plan_calls
from souffle.kernel.calls import CallPlan
from souffle.kernel.grid_barrier import COUNTER_FUNCTION
from souffle.kernel.merge import PREFETCH_FUNCTION
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.lower import LoweringError, cuda_target, lower_stage
from souffle.schedule.lower.stages import lower_stages
from souffle.schedule.stage import Stage
from tests.testlib import Builder, inputs_for, random_program, run_on_cpu_device
from tests.thorough import sized

pytestmark = pytest.mark.sampled(2)

ARCH = "sm_90"
APART = JoinPolicy(across_operators=False)


@dataclass(frozen=True)
class Lowered:
    program: TEProgram
    stages: tuple[Stage, ...]

    def calls(self, **options) -> CallPlan:
        return plan_calls(self.stages, self.program.constants, **{"prefetch": False, **options})


def lower(program: TEProgram) -> Lowered:
    """Every TE a stage of its own."""
    stages, _ = form_stages(program, analyze(program), GpuScheduler(device_for(ARCH)), APART)
    return Lowered(program, lower_stages(stages, cuda_target(ARCH)))


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)


def layers(count: int, width: int = 100) -> TEProgram:
    """Products of several tiles, each of which reads all tiles of the one before."""
    b = Builder()
    x = b.input(4, width)
    for _ in range(count):
        x = b.matmul(x, b.constant(weights(width, width)))
    return b.program(x)


def diamond(rows: int = 40, columns: int = 60) -> TEProgram:
    b = Builder()
    x = b.reduce(b.input(rows, columns, 5), 2)
    left, right = b.reduce(x, 0), b.reduce(x, 1)
    both = b.add(lambda p, q: te.compute((rows, columns), lambda i, j: p(j) + q(i)), left, right, name="join")
    return b.program(both)


def kernel_of(program: TEProgram, level: str = "V3", **options):
    options = {"arch": ARCH, "cubin": False, "device": "cpu", **options}
    return souffle.compile(program, level=level, target="cuda", **options)


def skeleton(text: str) -> str:
    """A kernel's stage calls, barriers and prefetches, in order."""
    lines = []
    for body in re.findall(r'extern "C" __global__ void.*?\{\n(.*?)\n\}', text, re.DOTALL):
        lines.append("kernel")
        inside = before = ""
        for line in body.splitlines():
            if loop := re.match(r"  for \(int (s\d+) = 0; \1 < (\d+);", line):
                inside = "  "
                lines.append(f"  for {loop[1]} in 0 .. {int(loop[2]) - 1}")
            elif line == "  }":
                inside = ""
            guard = " if s0 > 0" if re.search(r"if \(s\d+ > 0\)", before) else ""
            before = line
            for name, arguments in re.findall(r"(\w+)\((.*)\);", line):
                if name.startswith("stage"):
                    what = f"{name}({', '.join(places(arguments))})"
                elif name in ("__syncthreads", COUNTER_FUNCTION):
                    what = "block sync" if name == "__syncthreads" else f"grid sync{guard}"
                elif name == PREFETCH_FUNCTION:
                    what = f"prefetch {places(arguments)[0]}"
                else:
                    continue
                lines.append(f"  {inside}{what}")
    return "\n".join(lines) + "\n"


def places(arguments: str) -> list[str]:
    """The tensors of a call: ``g1``, and in loops ``s0 < 1 ? g0 : g2[s0 - 1]``."""
    return [place(part) for part in parts(arguments) if re.search(r"\bg\d+", part)]


def place(text: str) -> str:
    """One of them."""
    text = bare(re.sub(r"\(\w+\*\)|\(int64_t\)", "", text))
    name, _, inner = text.partition("(")
    if name == "souffle_at":
        pointer, offset = parts(inner[:-1])
        return f"{place(pointer)}[{bare(bare(offset).rpartition(' * ')[0])}]"
    if name == "souffle_choose":
        condition, one, other = parts(inner[:-1])
        return f"{bare(condition)} ? {place(one)} : {place(other)}"
    return text


def parts(text: str) -> list[str]:
    """`text` cut at the commas that stand in no parenthesis."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def bare(text: str) -> str:
    """`text` without parentheses around all of it."""
    text = text.strip()
    while text.startswith("(") and text.endswith(")"):
        depths = [text[: k + 1].count("(") - text[: k + 1].count(")") for k in range(len(text) - 1)]
        if min(depths) < 1:
            break
        text = text[1:-1].strip()
    return text


def definition(text: str) -> str:
    """Only the kernels of a text, without their declarations."""
    return re.sub(r'extern "C" __global__ void[^{;]*;', "", text)


def test_a_chain_has_a_sync_before_each_dependent_stage() -> None:
    plan = lower(layers(3)).calls()
    assert [call.sync_before for call in plan.shape.calls] == [False, True, True]
    assert plan.epochs == (0, 1, 2) and plan.shape.grid_syncs == 2


def test_independent_stages_have_no_sync_between_them() -> None:
    b = Builder()
    x = b.input(4, 6)
    plan = lower(b.program(b.reduce(x, 0), b.reduce(x, 1))).calls()
    assert plan.shape.grid_syncs == 0 and plan.epochs == (0, 0)


def test_a_diamond_needs_as_many_syncs_as_its_longest_path() -> None:
    plan = lower(diamond()).calls()
    assert plan.epochs == (0, 1, 1, 2)
    assert [call.sync_before for call in plan.shape.calls] == [False, True, False, True]
    assert [barrier.scope for barrier in plan.barriers] == ["grid", "grid"]


def test_stages_are_ordered_by_epoch() -> None:
    b = Builder()
    x, y = b.input(4, 6), b.input(3, 5)
    first = b.matmul(b.matmul(x, b.constant(weights(6, 100))), b.constant(weights(100, 6)))
    second = b.matmul(b.matmul(y, b.constant(weights(5, 100))), b.constant(weights(100, 5)))
    lowered = lower(b.program(first, second))
    plan = lowered.calls()
    assert plan.epochs == (0, 0, 1, 1) and plan.shape.grid_syncs == 1
    assert [s.name for s in plan.stages] == ["matmul0", "matmul2", "matmul1", "matmul3"]


def test_prefetch_asks_for_the_constants_of_the_stage_after_a_barrier() -> None:
    lowered = lower(layers(2))
    assert all(not call.prefetch for call in lowered.calls().shape.calls)
    plan = lowered.calls(prefetch=True)
    first, second = plan.shape.calls
    assert first.prefetch == ()
    assert [plan.tensors[place.parameter] for place, _ in second.prefetch] == [lowered.program.tes[1].inputs[1]]


def test_identical_layers_are_lowered_once() -> None:
    lowered = lower(layers(4))
    assert len({id(stage.functions) for stage in lowered.stages}) == 1
    text = kernel_of(layers(2)).kernels[0].text
    assert len(re.findall(r"^static __device__ __noinline__ void stage0_matmul0\(.*\{$", text, re.MULTILINE)) == 1


def test_identical_layers_share_a_kernel_below_v3() -> None:
    net = kernel_of(layers(4), "V2")
    assert len(net.plan.kernels) == 1 and len(net.plan.launches) == 4
    assert net.kernels[0].launches == 4
    assert net.kernels[0].tes == ("matmul0", "matmul1", "matmul2", "matmul3")


def test_a_kernel_s_parameters_are_its_tensors_and_the_grid() -> None:
    net = kernel_of(diamond())
    (kernel,) = net.plan.kernels
    (launch,) = net.plan.launches
    found = re.search(rf"__launch_bounds__\({kernel.threads}\) {kernel.name}\((.*)\) \{{", net.plan.modules[0].text)
    assert found and len(found[1].split(",")) == len(launch.buffers) + 1
    assert found[1].endswith("int num_blocks")


@pytest.mark.parametrize(
    ("name", "program", "level"),
    [("chain", layers(3), "V3"), ("diamond", diamond(), "V3"), ("prefetch", layers(3), "V4")],
)
def test_skeletons(golden, name: str, program: TEProgram, level: str) -> None:
    golden(f"kernel_{name}.txt", skeleton(definition(kernel_of(program, level).plan.modules[0].text)))


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("program", [layers(3, 40), diamond()], ids=["layers", "diamond"])
def test_any_grid_and_order_of_threads_gives_the_function(program: TEProgram, blocks: int) -> None:
    net, inputs = kernel_of(program), inputs_for(program)
    expected = evaluate(program, inputs)
    for options in ({"order": "fixed"}, {"order": "shuffled", "seed": blocks}):
        found = run_on_cpu_device(net.plan, inputs, blocks=blocks, **options)
        np.testing.assert_array_equal(found["out0"], expected["out0"])


def test_rows_that_a_block_lacks_are_not_written_to_shared_memory() -> None:
    """A tensor between two reductions has fewer rows than the block: what lies behind it in the pool stays whole."""
    b = Builder()
    x = b.reduce(b.input(2, 3, 4, 4), 2)
    pairs = b.add(lambda p: te.compute((3, 4, 2), lambda i, j, g: p(g, i, j) + p(1 - g, i, j)), x, name="pairs")
    program = b.program(b.scaled(b.reduce(pairs, 2), 2.0))
    net, inputs = kernel_of(program, "V4"), inputs_for(program)
    expected = evaluate(program, inputs)
    for seed in range(3):
        found = run_on_cpu_device(net.plan, inputs, order="shuffled", seed=seed)
        np.testing.assert_array_equal(found["out0"], expected["out0"])


def test_a_single_element_that_is_read_at_an_index_from_a_table() -> None:
    b = Builder()
    x = b.pad(b.reduce(b.input(1, 60), 1), 0, 1, 2)
    rows = b.constant(np.array([0, 1, 1, 3], np.int32))
    program = b.program(b.matmul(b.gather(x, rows), b.constant(weights(4, 3))))
    inputs = inputs_for(program)
    found = run_on_cpu_device(kernel_of(program, "V4").plan, inputs)
    np.testing.assert_array_equal(found["out0"], evaluate(program, inputs)["out0"])


def test_an_operator_that_is_no_te_runs_between_kernels() -> None:
    b = Builder()
    program = b.program(b.scaled(b.extern_sort(b.relu(b.input(5, 7))), 2.0))
    inputs = inputs_for(program)
    expected = evaluate(program, inputs)["out0"]
    np.testing.assert_array_equal(expected, 2 * np.sort(np.maximum(inputs["in0"], 0), axis=1))
    for level in ("V0", "V4"):
        net = kernel_of(program, level)
        assert len(net.plan.launches) == 3
        np.testing.assert_array_equal(run_on_cpu_device(net.plan, inputs)["out0"], expected)


def test_a_stage_that_cannot_be_lowered_is_named() -> None:
    lowered = lower(layers(1))
    schedule = lowered.stages[0].schedule
    columns = tvm.s_tir.Schedule(lowered.stages[0].draft.func)
    block = columns.get_child_blocks(columns.get_sblock("root"))[0]
    for loop, tag in zip(columns.get_loops(block)[:2], ("blockIdx.x", "clusterCtaIdx.x"), strict=True):
        columns.bind(loop, tag)
    with pytest.raises(LoweringError, match=r"stage odd uses \['clusterCtaIdx.x'\]"):
        lower_stage("odd", replace(schedule, func=columns.mod["main"]), cuda_target(ARCH))


LEVELS = (("V0", "souffle"), ("V1", "persistent"), ("V2", "souffle"), ("V3", "persistent"), ("V4", "souffle"))


@pytest.mark.parametrize("seed", range(sized(5, 10)))
def test_random_programs_at_every_level(seed: int) -> None:
    program = random_program(random.Random(seed).choice, 12, seed)
    inputs = inputs_for(program)
    expected = evaluate(program, inputs)
    level, partition = LEVELS[seed % len(LEVELS)]
    precision = "mixed" if seed % 3 == 0 else "fp32"
    net = kernel_of(program, level, partition=partition, precision=precision)
    for options in ({"order": "fixed"}, {"order": "shuffled", "seed": seed, "blocks": 3}):
        found = run_on_cpu_device(net.plan, inputs, **options)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name}, {options}")


@pytest.mark.parametrize("seed", range(100, 100 + sized(2, 4)))
def test_random_programs_on_the_host(seed: int) -> None:
    program = random_program(random.Random(seed).choice, 8, seed)
    inputs = inputs_for(program)
    found = souffle.compile(program, level="V4" if seed % 2 else "V0", target="cpu")(inputs)
    for name, value in evaluate(program, inputs).items():
        np.testing.assert_array_equal(found[name], value)
