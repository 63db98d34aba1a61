"""Loops in kernels: one text for all steps, each with its own parts of the tensors, and a grid sync between."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence

import numpy as np
import pytest
from tvm import te

import souffle
from souffle.errors import OptionError
from souffle.kernel import KernelShape, LoopCall
from souffle.partition import PLANNERS, PartitionRequest, planner_for
from souffle.program import Loop, TEProgram
from souffle.program.evaluate import evaluate
from souffle.schedule.gpu.device import device_for
from souffle.schedule.lower import LoweringError
from souffle.schedule.resources import StageResources
from souffle.schedule.stage import LoopStage, Unit, map_stages
from souffle.transform import roll
from tests.kernel.test_merge import ARCH, definition, kernel_of, skeleton
from tests.testlib import Builder, inputs_for, run_on_cpu_device
from tests.thorough import sized
from tests.transform.test_roll import layers, padded, recurrence, repeated, weights

pytestmark = pytest.mark.sampled(3)


def two_kept(steps: int) -> TEProgram:
    """The last state is an output of the network, and is carried too."""
    b = Builder()
    x = b.relu(b.input(4, 4))
    for _ in range(steps):
        x = b.tanh(b.matmul(x, b.constant(weights(4, 4))))
    return b.program(x)


def from_the_start(steps: int, width: int = 4) -> TEProgram:
    """The loop is all there is: nothing stands before its first step."""
    b = Builder()
    x = b.input(4, width)
    for _ in range(steps):
        x = b.matmul(x, b.constant(weights(width, width)))
    return b.program(x)


def two_states_back(steps: int) -> TEProgram:
    b = Builder()
    states = [b.relu(b.input(1, 4)), b.relu(b.input(1, 4))]
    w = b.constant(weights(4, 4))
    for _ in range(steps):
        states.append(b.tanh(b.plus(b.matmul(states[-1], w), states[-2])))
    return b.program(b.matmul(states[-1], b.constant(weights(4, 3))))


PROGRAMS = {
    "layers": layers(5),
    "recurrence": recurrence(6),
    "two_states_back": two_states_back(7),
    "every_step": recurrence(6, keep=True),
    "output": two_kept(5),
    "from_the_start": from_the_start(4),
    "several_tiles": from_the_start(4, 100),
    "numbers": padded(6, float),
}


def shape_of(program: TEProgram, level: str = "V3") -> tuple[KernelShape, object]:
    """The only kernel's shape, and the network."""
    net = kernel_of(program, level)
    compiled = souffle.pipeline.compile_cuda(program, level=level, arch=ARCH, cubin=False)
    (merged,) = compiled.merged
    return merged.shape, net


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("level", ["V3", "V4"])
def test_a_loop_computes_the_function_in_any_order(name: str, level: str) -> None:
    program = PROGRAMS[name]
    net, inputs = kernel_of(program, level), inputs_for(program)
    assert any(d[0] == "roll" and d[2] for d in net.plan.decisions)
    expected = evaluate(program, inputs)
    for options in ({"order": "fixed"}, *({"order": "shuffled", "seed": s, "blocks": 1 + s} for s in range(3))):
        found = run_on_cpu_device(net.plan, inputs, **options)
        for output, value in expected.items():
            np.testing.assert_array_equal(found[output], value, err_msg=f"{output}, {options}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_skeletons_of_loops(golden, name: str) -> None:
    golden(f"kernel_loop_{name}.txt", skeleton(definition(kernel_of(PROGRAMS[name]).plan.modules[0].text)))


def test_steps_cost_the_barriers_that_they_would_cost_apart() -> None:
    program = from_the_start(6, 100)
    shape, net = shape_of(program)
    (loop,) = shape.calls
    assert isinstance(loop, LoopCall) and loop.steps == 6 and not loop.sync_first
    assert shape.grid_syncs == 5 and net.plan.kernels[0].grid_syncs == 5
    later, _ = shape_of(layers(5, 100))
    (loop,) = (call for call in later.calls if isinstance(call, LoopCall))
    assert loop.sync_first


def test_neither_text_nor_parameters_grow_with_the_steps() -> None:
    short, long = (kernel_of(recurrence(steps)).plan for steps in (8, 32))
    assert len(long.modules[0].text) < len(short.modules[0].text) + 100
    assert len(long.launches[0].buffers) == len(short.launches[0].buffers)


def test_a_carried_value_takes_turns_in_as_many_parts_as_are_alive() -> None:
    plan = kernel_of(two_states_back(12)).plan
    (ring,) = [b for b in plan.buffers if b.name.endswith("_ring")]
    assert ring.shape == (3, 4)


def test_weights_of_a_step_are_prefetched_and_fixed_ones_are_not() -> None:
    shape, _ = shape_of(layers(5), "V4")
    (loop,) = (call for call in shape.calls if isinstance(call, LoopCall))
    # Those that are small in all are asked for at once, before the loop.
    asked = [place for place, _ in loop.prefetch]
    assert asked and not any(call.prefetch for call in loop.calls)
    wide, _ = shape_of(layers(5, 96), "V4")
    (loop,) = (call for call in wide.calls if isinstance(call, LoopCall))
    asked = [place for call in loop.calls for place, _ in call.prefetch]
    assert asked and all(place.stride for place in asked)
    fixed, _ = shape_of(recurrence(6), "V4")
    (loop,) = (call for call in fixed.calls if isinstance(call, LoopCall))
    assert not any(call.prefetch for call in loop.calls)


def asked(program: TEProgram) -> PartitionRequest:
    """What the planner is asked about the rolled program, without shared memory."""
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        seen[stage] = result
        return result

    souffle.pipeline.compile_cuda(program, level="V3", arch=ARCH, cubin=False, hook=hook)
    return PartitionRequest(assuming(seen["schedule"]), device_for(ARCH), seen["analysis"])


def assuming(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Stages that need no shared memory, and whose registers are assumed."""
    return map_stages(units, lambda stage: dataclasses.replace(stage, resources=StageResources.assumed(0, 256)))


def test_a_loop_that_a_wave_does_not_hold_is_named_with_the_figures() -> None:
    given = asked(layers(5, width=300))
    rule = planner_for("souffle")
    assert rule.plan(given).unroll == {}
    (loop,) = (unit for unit in given.stages if isinstance(unit, LoopStage))
    none = dataclasses.replace(given, device=dataclasses.replace(given.device, sm_count=1))
    ((name, reason),) = rule.plan(none).unroll.items()
    assert name == loop.name
    figures = r"\d+ blocks of \w+ exceed the 2 of one wave \(1 SMs × 2 .*: 128 registers.*\(assumed\).*ends inside"
    assert re.match(figures, reason)
    assert planner_for("persistent").plan(none).unroll == {}
    for planner in PLANNERS.values():
        assert [len(part.stages) for part in planner.plan(given).subprograms] == [len(given.stages)]


def with_row_sums(steps: int) -> TEProgram:
    """Layers of a compute-intensive product and of a memory-intensive sum."""
    b = Builder()
    x = b.input(16, 16)
    for _ in range(steps):
        x = b.matmul(x, b.constant(weights(16, 16)))
        x = b.plus(x, b.broadcast(b.reduce(x, 1), 16))
    return b.program(b.reduce(x, 0))


def test_memory_intensive_stages_of_a_loop_do_not_count() -> None:
    given = asked(with_row_sums(5))
    (loop,) = (unit for unit in given.stages if isinstance(unit, LoopStage))
    intensive = given.intensive(loop)
    others = [stage for stage in loop.stages if stage not in intensive]
    assert intensive and others
    one = given.device.sm_count * 2

    def with_tiles(changed: list) -> PartitionRequest:
        """The same stages, those in `changed` with more tiles than a wave."""
        new = {
            stage: dataclasses.replace(stage, schedule=dataclasses.replace(stage.schedule, tiles=one + 1))
            for stage in changed
        }
        return dataclasses.replace(given, stages=map_stages(given.stages, lambda stage: new.get(stage, stage)))

    rule = planner_for("souffle")
    assert rule.plan(with_tiles(others)).unroll == {}
    assert list(rule.plan(with_tiles(list(intensive))).unroll) == [loop.name]


def wide_layers(steps: int) -> TEProgram:
    """Layers whose products have more blocks than one wave of a small device holds."""
    b = Builder()
    x = b.input(65536, 32)
    for _ in range(steps):
        x = b.matmul(x, b.constant(weights(32, 32)))
    return b.program(b.reduce(x, 0))


def test_the_paper_s_rule_takes_apart_a_loop_that_it_would_cut() -> None:
    compiled = {
        name: souffle.pipeline.compile_cuda(wide_layers(4), level="V3", arch="sm_75", partition=name, cubin=False).plan
        for name in PLANNERS
    }
    assert len(compiled["persistent"].launches) == 1
    assert any(d[0] == "roll" and d[2] for d in compiled["persistent"].decisions)
    plan = compiled["souffle"]
    assert len(plan.launches) == 4, "the products one by one, the sum with the last"
    (refused,) = (d for d in plan.decisions if d[0] == "roll" and "wave" in d[3])
    assert not refused[2] and "a kernel ends inside" in refused[3]
    assert not any(d[0] == "roll" and d[2] for d in plan.decisions)


def test_a_loop_that_was_given_stays_one() -> None:
    rolled, _ = roll(wide_layers(4))
    plan = souffle.pipeline.compile_cuda(rolled, level="V3", arch="sm_75", cubin=False).plan
    # A block's rows of a layer need its own rows of the one before; the sum at the end needs all rows.
    assert len(plan.launches) == 1 and plan.kernels[0].grid_syncs == 1
    assert not any(d[0] == "roll" for d in plan.decisions)


@pytest.mark.parametrize("seed", range(sized(4, 8)))
def test_random_repetitions_at_both_levels_and_partitions(seed: int) -> None:
    program = repeated(random.Random(seed).choice, 6 + seed % 3, seed)
    inputs = inputs_for(program)
    expected = evaluate(program, inputs)
    net = kernel_of(program, "V4" if seed % 2 else "V3", partition="persistent" if seed % 3 else "souffle")
    for options in ({"order": "fixed"}, {"order": "shuffled", "seed": seed, "blocks": 3}):
        found = run_on_cpu_device(net.plan, inputs, **options)
        for output, value in expected.items():
            np.testing.assert_array_equal(found[output], value, err_msg=f"{output}, {options}")


@pytest.mark.parametrize("level", ["V0", "V2", "V4"])
def test_a_program_may_hold_loops_before_it_is_compiled(level: str) -> None:
    program = PROGRAMS["every_step"]
    rolled, _ = roll(program)
    assert any(isinstance(item, Loop) for item in rolled.tes)
    net, inputs = kernel_of(rolled, level), inputs_for(program)
    expected = evaluate(program, inputs)
    for options in ({"order": "fixed"}, {"order": "shuffled", "seed": 1}):
        found = run_on_cpu_device(net.plan, inputs, **options)
        np.testing.assert_array_equal(found["out0"], expected["out0"])


def test_where_loops_cannot_go_the_message_says_what_would_help() -> None:
    rolled, _ = roll(PROGRAMS["layers"])
    with pytest.raises(OptionError, match=r"target='cuda' only; for target='cpu' give the program before"):
        souffle.compile(rolled, target="cpu")
    with pytest.raises(OptionError, match="precision='mixed' does not reach into loops"):
        kernel_of(rolled, "V4", precision="mixed")


def test_a_loop_built_by_hand_must_be_aligned() -> None:
    rolled, _ = roll(PROGRAMS["recurrence"])
    (loop,) = (item for item in rolled.tes if isinstance(item, Loop))
    odd = dataclasses.replace(loop, indexed=tuple(dataclasses.replace(p, stride=3) for p in loop.indexed))
    program = dataclasses.replace(rolled, tes=tuple(odd if item is loop else item for item in rolled.tes))
    with pytest.raises(LoweringError, match=r"moves 12 bytes further in relu.*multiple of 16"):
        kernel_of(program)


def test_no_prefetch_passes_the_end_of_what_steps_read_row_by_row() -> None:
    """A table of more bytes than are asked for at once, of which each step reads a row further on."""
    b = Builder()
    x, w, table = b.input(1, 512), b.constant(weights(512, 512)), b.constant(weights(40, 512))
    for step in range(40):

        def moved(p: te.Tensor, rows: te.Tensor, step: int = step) -> te.Tensor:
            return te.compute(p.shape, lambda i, j: te.round((p(i, j) + rows(step, j)) * 0.0078125))

        x = b.add(moved, b.matmul(x, w), table, name=f"moved{step}")
    program = b.program(x)
    net = kernel_of(program, "V4")
    assert net.certificate.verdict == "PROVEN", net.certificate
    inputs = inputs_for(program)
    found = run_on_cpu_device(net.plan, inputs)
    for name, value in evaluate(program, inputs).items():
        np.testing.assert_array_equal(found[name], value)
