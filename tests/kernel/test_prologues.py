"""Copies that blocks start while they wait: the same bits as without, on every grid, proven, each error found."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tvm import te

from benchmarks.prologues import layers, prologues_of
from benchmarks.teams import forced
from souffle.codegen.assemble import CompiledKernels
from souffle.cost.counting import Work
from souffle.cost.device import cost_device
from souffle.cost.predict import predict_work
from souffle.kernel.grid_barrier import ARRIVAL_FUNCTION, COMPLETION_FUNCTION
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of, misses
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.schedule.lower.prologues import prologue_of
from souffle.schedule.resources import StageResources
from souffle.verify import PROVEN, REFUTED, UNKNOWN, certify_plan
from souffle.verify.certify import functions_of
from souffle.verify.saved import verify_plan
from tests.testlib import ORDERS, Builder, inputs_for, run_on_cpu_device
from tests.thorough import sized, some

_APART = ("reuse", "attention", "normalization", "channels")


def compiled(program: TEProgram, teams: int = 1, **options: object) -> CompiledKernels:
    given = {"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", "waits": "barriers", "disable": _APART}
    with forced(teams):
        return compile_cuda(program, **{**given, **options})


def assert_same_bits(one: CompiledKernels, other: CompiledKernels, program: TEProgram) -> None:
    """One gives in every order what the other gives."""
    inputs = inputs_for(program)
    expected = run_on_cpu_device(other.plan, inputs)
    for order in ORDERS:
        found = run_on_cpu_device(one.plan, inputs, **order)
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes(), (name, order)


@pytest.fixture(scope="module")
def chain() -> TEProgram:
    return layers(113, (192, 256, 104))


@pytest.fixture(scope="module")
def net(chain: TEProgram) -> CompiledKernels:
    """A product behind a grid barrier, whose weights are copied to shared memory while blocks wait."""
    return compiled(chain, precision="mixed")


def test_weights_are_copied_between_arrival_and_wait(net: CompiledKernels):
    (module,) = net.plan.modules
    kernel = module.text[module.text.index("__global__") :]
    assert prologues_of(net) == 1
    names = (ARRIVAL_FUNCTION, "prologue", COMPLETION_FUNCTION, "prologue", "begun")
    assert re.search(".*".join(f"{name}" for name in names), kernel, re.DOTALL)
    copies = next(f for f in functions_of(net) if "prologue" in f)
    assert f"__forceinline__ void {copies}(" in module.text
    assert "has begun to copy" in str(net.merged[0])


@pytest.mark.parametrize(
    ("options", "teams"),
    some(
        [({"precision": "mixed", "arch": "sm_80"}, 2), ({"precision": "tf32x3", "grid_barrier": "cooperative"}, 1)],
        [({"precision": "mixed"}, 1), ({"precision": "mixed", "watchdog_ms": 5e3}, 1)],
    ),
)
def test_the_same_bits_as_without(chain: TEProgram, options: dict[str, object], teams: int):
    with_them = compiled(chain, teams, **options)
    without = compiled(chain, teams, **{**options, "disable": (*_APART, "prologues"), "verify": "off"})
    assert prologues_of(with_them) and not prologues_of(without)
    assert with_them.plan.certificate.verdict == PROVEN, with_them.plan.certificate
    assert_same_bits(with_them, without, chain)


def test_in_a_loop_each_step_copies_its_own_weights():
    program = layers(64, (128,) * 6)
    net = compiled(program, precision="mixed")
    (loop,) = (call for call in net.merged[0].shape.calls if hasattr(call, "steps"))
    assert any(call.prologue for call in loop.calls)
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    without = compiled(program, precision="mixed", disable=(*_APART, "prologues"), verify="off")
    assert_same_bits(net, without, program)


def test_a_network_of_a_file_is_proven_again(net: CompiledKernels):
    assert verify_plan(net.plan).verdict == PROVEN


def test_below_v4_and_with_flags_there_are_none(chain: TEProgram):
    assert not prologues_of(compiled(chain, precision="mixed", level="V3", verify="off"))
    assert not prologues_of(compiled(chain, precision="mixed", waits="flags", verify="off"))


def test_what_is_no_constant_is_refuted(net: CompiledKernels):
    """The same kernel with weights that the caller gives, which another launch may write."""
    kernels = {merged.name: merged.func for merged in net.merged}
    names = [b.name for b in net.plan.buffers if b.kind == "constant"]
    buffers = tuple(replace(b, kind="input") if b.kind == "constant" else b for b in net.plan.buffers)
    certificate = certify_plan(replace(net.plan, buffers=buffers), kernels, functions_of(net))
    assert certificate.verdict == REFUTED
    assert any("no constant but input" in str(one) for one in certificate.counterexamples), names


def test_another_text_of_the_halves_is_not_known(net: CompiledKernels):
    (module,) = net.plan.modules
    text = module.text.replace("ld.acquire.gpu", "ld.relaxed.gpu")
    plan = replace(net.plan, modules=(replace(module, text=text),))
    kernels = {merged.name: merged.func for merged in net.merged}
    certificate = certify_plan(plan, kernels, functions_of(net))
    assert certificate.verdict == UNKNOWN and COMPLETION_FUNCTION in str(certificate.unknown)


def test_mutants():
    program = layers(33, (64, 72, 40))
    net = compiled(program, precision="mixed", verify="off")
    with Sandbox() as sandbox:
        trials = Trials(Mutations(net), inputs_of(net.plan, inputs_for(program)), sandbox)
        found = [trials.run(one) for one in Mutations(net).sample(sized(6, 16), seed=3, kinds=("prologue",))]
    assert sum(trial.changed for trial in found) >= 2
    assert not misses(found), "\n".join(map(described, misses(found)))


def test_copies_at_places_that_data_says_stay():
    """An embedding's rows: where they lie is read from what a kernel may have written."""
    b = Builder()
    rows, table, weights = b.input(64), b.constant(np.ones((512, 128), np.float32)), np.ones((128, 128), np.float32)
    numbers = b.add(lambda r: te.compute((64,), lambda i: te.round(te.abs(r[i])).astype("int32")), rows, name="number")
    taken = b.add(
        lambda n, t: te.compute((64, 128), lambda i, j: t[te.max(0, te.min(n[i], 511)), j]), numbers, table, name="row"
    )
    program = b.program(b.matmul(taken, b.constant(weights)))
    net = compiled(program, precision="tf32x3")
    assert net.plan.certificate.verdict == PROVEN
    without = compiled(program, precision="tf32x3", disable=(*_APART, "prologues"), verify="off")
    assert_same_bits(net, without, program)


def test_a_function_without_copies_of_constants_is_not_parted(net: CompiledKernels):
    stages = [call for call in net.merged[0].shape.stage_calls if not call.prologue]
    assert stages and not any(prologue_of(f, range(9)) for call in stages for f in call.functions if not f.has_barrier)
    begun = next(call for call in net.merged[0].shape.stage_calls if call.prologue)
    # What is left has no copies of constants to begin with.
    assert prologue_of(begun.functions[0], begun.prologue.reads) is None


def test_what_is_predicted_to_gain_is_the_way_to_memory():
    device = cost_device("H200-SXM5-141GB")
    own, work = StageResources(64, 0, 1 << 14, 256, 0, True), Work(global_waits=2.0, fp32=100.0)
    nearer = (device.memory_latency_clocks - device.l2_latency_clocks) / device.clock_hz
    for tiles in (1, device.sm_count, 40 * device.sm_count):
        plain, begun = (predict_work(work, tiles, own, device, 1e6, begun=way) for way in (False, True))
        assert plain.multiprocessors - begun.multiprocessors == pytest.approx(nearer)
    near = [predict_work(work, 1, own, device, 1e6, warm=True, begun=way).multiprocessors for way in (False, True)]
    assert near[0] == near[1]
