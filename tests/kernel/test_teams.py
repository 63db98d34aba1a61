"""Blocks of several teams: the same bits as blocks without, on every grid, proven, each error found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

import souffle
from benchmarks.recurrent import recurrent
from benchmarks.teams import asked_for
from souffle.choice import stationary
from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.nvcc import find_nvcc
from souffle.cost.device import device_of_arch
from souffle.emulator import CheckError
from souffle.errors import KernelTimeoutError
from souffle.kernel import kernel_plan
from souffle.kernel.grid_barrier import ARRIVAL_FUNCTION, COMPLETION_FUNCTION, COUNTER_FUNCTION
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of, misses
from souffle.options import ON_CHIP
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.schedule.gpu.device import device_for
from souffle.schedule.lower.teams import team_counts
from souffle.schedule.resources import StageResources
from souffle.tvm_compat import collect
from souffle.verify import PROVEN, REFUTED, UNKNOWN, certify_plan, without_kept_memory
from souffle.verify.certify import functions_of
from souffle.verify.kernel_reader import read_kernel
from souffle.verify.prologues import without_prologues
from souffle.verify.saved import verify_plan
from souffle.verify.teams import without_teams
from tests.kernel.launch_shapes import by_rule, crosswise, rescheduled, staged
from tests.kernel.residents import residual
from tests.testlib import ORDERS, Builder, inputs_for, run_on_cpu_device
from tests.thorough import sized, some

pytestmark = pytest.mark.sampled(3)

Force = Callable[[int], None]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Blocks of so many teams wherever they have room, whether or not it pays."""

    return lambda count: monkeypatch.setattr(kernel_plan, "_teams", asked_for(count))


def compiled(program: TEProgram, **options: object) -> CompiledKernels:
    given = {"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", "waits": "barriers", **options}
    return compile_cuda(program, **given)


def same_as_without(program: TEProgram, net: CompiledKernels, teams: int, **options: object) -> None:
    """Proven, and the bits of the network without teams in several orders and grids."""
    assert {kernel.teams for kernel in net.plan.kernels} == {teams}, net.plan.kernels
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    without = compiled(program, verify="off", disable=["teams", *options.pop("disable", ())], **options)
    inputs = inputs_for(program)
    expected = run_on_cpu_device(without.plan, inputs)
    for how in ({}, *ORDERS):
        found = run_on_cpu_device(net.plan, inputs, **how)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=str(how))


def columns(rows: int = 300, width: int = 40) -> TEProgram:
    """Rows, then columns of them, then rows again: each waits for all of the one before."""
    b = Builder()
    x = b.input(rows, width)
    for number in range(2):
        w = b.constant(np.random.default_rng(number).integers(-2, 3, (width, width)).astype(np.float32))
        x = b.map(lambda v: te.round(v * 0.125), b.matmul(x, w))
        most = b.add(_most, x, name="most")
        x = b.add(lambda v, m: te.compute(v.shape, lambda i, j: v[i, j] - m[j]), x, most, name="less")
    return b.program(x)


def _most(x: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, x.shape[0]), "k")
    return te.compute((x.shape[1],), lambda j: te.max(x[k, j], k))


@pytest.mark.parametrize(("teams", "watchdog_ms"), some([(2, None), (3, 5000)], [(4, None)]))
def test_teams_compute_what_blocks_do(force: Force, teams: int, watchdog_ms: float | None) -> None:
    program = columns()
    force(teams)
    # At V4 kernels are taken apart where launches are predicted to cost less than waits.
    net = compiled(program, level="V3", watchdog_ms=watchdog_ms)
    (kernel,) = net.plan.kernels
    assert kernel.grid_syncs and kernel.threads % teams == 0
    text = net.plan.modules[0].text
    assert f"__launch_bounds__({kernel.threads}" in text
    assert f"souffle_team_barrier<1, {kernel.threads // teams}>" in text
    assert "__syncthreads" not in text[text.index("__global__") :]
    same_as_without(program, net, teams, level="V3")


def test_what_stays_in_shared_memory_is_each_team_s_own(force: Force) -> None:
    force(2)
    program = residual()
    # Nobody knows what barriers cost there, so that whatever can stay does.
    net = compiled(program, arch="sm_86")
    assert "souffle_window(" in net.plan.modules[0].text
    same_as_without(program, net, 2, arch="sm_86")


@pytest.mark.thorough("what stays in shared memory is each team's own below")
@pytest.mark.parametrize(
    "model",
    some(
        [pytest.param(recurrent("GRU", 40, 40, steps=6), id="GRU")],
        [pytest.param(recurrent("LSTM", 31, 37, steps=5, batch=4), id="LSTM")],
    ),
)
def test_constants_stay_in_the_registers_of_teams(force: Force, monkeypatch: pytest.MonkeyPatch, model) -> None:
    monkeypatch.setattr(stationary, "pays", lambda made, before: True)
    force(2)
    program = souffle.import_onnx(model)
    net = compiled(program)
    assert "_fill(" in net.plan.modules[0].text or "_fill_2x" in net.plan.modules[0].text
    same_as_without(program, net, 2)


def test_stages_of_fewer_threads_wait_for_theirs_in_the_team(force: Force) -> None:
    """Two numbers for each team: of all of its threads, and of the 128 that have the stage."""
    b = Builder()
    y = b.reduce(b.input(6, 20, 90), 2)
    z = b.matmul(y, b.constant(np.random.default_rng(0).integers(-3, 4, (20, 33)).astype(np.float32)))
    program = b.program(b.reduce(b.matmul(z, b.constant(np.ones((33, 17), np.float32))), 1))
    hook = rescheduled({0: crosswise(100), 1: staged(4, 8, 5), 2: by_rule(256)})
    force(3)
    net = compiled(program, hook=hook, disable=[name for name in ON_CHIP if name != "teams"], reductions="one_phase")
    (kernel,) = net.plan.kernels
    numbers = set(re.findall(r"souffle_team_barrier<(\d+), (\d+)>\(", net.plan.modules[0].text))
    assert kernel.teams == 3 and {first for first, _ in numbers} == {"1", "4"}, numbers
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    inputs = inputs_for(program)
    expected = evaluate(program, inputs)["out0"]
    for how in ({}, *ORDERS):
        np.testing.assert_array_equal(run_on_cpu_device(net.plan, inputs, **how)["out0"], expected)


def test_they_are_where_blocks_would_share_a_multiprocessor() -> None:
    program, small = columns(6000, 16), columns(60)
    net, without = compiled(program), compiled(program, disable=["teams"], verify="off")
    ((kernel,), (plain,)) = net.plan.kernels, without.plan.kernels
    each = device_of_arch("sm_90").sm_count
    assert kernel.tiles > each and kernel.teams > 1 and plain.teams == 1
    assert (kernel.threads, kernel.dynamic_shared_bytes) == (
        kernel.teams * plain.threads, kernel.teams * (-(-plain.dynamic_shared_bytes // 128) * 128)
    )  # fmt: skip
    assert kernel.predicted.sync_seconds < plain.predicted.sync_seconds
    assert kernel.predicted.seconds < plain.predicted.seconds
    assert kernel.predicted.blocks_per_sm * kernel.teams <= plain.predicted.blocks_per_sm
    assert (kernel.most_blocks or each) % each == 0
    assert {k.teams for k in compiled(small, verify="off").plan.kernels} == {1}
    (decision,) = (d for d in net.plan.decisions if d.stage == "teams")
    assert decision.accepted and f"with {kernel.teams} of {plain.threads} threads its waits" in decision.reason
    # Flags are of blocks, and below V3 no kernel waits.
    assert {k.teams for k in compiled(program, waits="flags", verify="off").plan.kernels} == {1}
    assert max(k.teams for k in compiled(program, level="V3", verify="off").plan.kernels) > 1
    assert {k.teams for k in compiled(program, level="V2", verify="off").plan.kernels} == {1}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_multiprocessor_holds_as_many_teams_as_blocks(arch: str) -> None:
    device = device_for(arch)
    seen = set()
    for threads in (32, 96, 128, 256, 384, 512, 1024):
        for registers in (32, 64, 96, 128, 168, 255):
            for shared in (0, 1024, 30000, 50048, 81920, 110080, device.shared_per_block):
                block = StageResources.assumed(shared, threads, registers)
                fit = min(device.resident_blocks(threads, shared, registers).values())
                for teams in team_counts(block, device, 10**6):
                    seen.add(teams)
                    whole = device.resident_blocks(teams * threads, teams * shared, registers)
                    assert min(whole.values()) >= fit // teams, (block, teams, whole)
                    assert teams * threads <= 1024 and teams * shared <= device.shared_per_block and 2 * teams < 16
                assert not team_counts(block, device, device.sm_count)
                assert max(team_counts(block, device, device.sm_count + 1), default=2) == 2
    assert seen == {2, 3, 4, 5, 6, 7}


def test_a_saved_network_is_proven_again(force: Force, tmp_path) -> None:
    force(2)
    program = columns()
    net = souffle.compile(program, target="cuda", device="cpu", arch="sm_90", cubin=False, waits="barriers")
    net.save(tmp_path / "net.souffle")
    loaded = souffle.load(tmp_path / "net.souffle", device="cpu")
    assert [kernel.teams for kernel in loaded.plan.kernels] == [2]
    assert verify_plan(loaded.plan).verdict == PROVEN
    inputs = inputs_for(program)
    np.testing.assert_array_equal(loaded(inputs)["out0"], net(inputs)["out0"])
    assert "2 teams" in str(loaded.explain())


def test_a_wait_that_is_over_ends_all_teams(force: Force) -> None:
    force(2)

    def broken(stage: str, result: object) -> object:
        leaves = '  int over = 0;\n  if (blockIdx.x == 1 && stage > 0) asm volatile("exit;");'
        return result.replace("  int over = 0;", leaves) if stage == "text" else result

    program = columns()
    net = compiled(program, watchdog_ms=50, hook=broken, verify="off")
    with pytest.raises(KernelTimeoutError, match="for the grid barrier"):
        run_on_cpu_device(net.plan, inputs_for(program), blocks=3)


def test_a_finding_names_the_array_behind_a_team_s_part(force: Force) -> None:
    force(2)
    program = columns()
    net = compiled(program, verify="off")
    (module,) = net.plan.modules
    first = module.text.index("souffle_team_barrier<1, 256>(team);", module.text.index("void stage1"))
    text = module.text[:first] + module.text[first:].replace("souffle_team_barrier<1, 256>(team);", "", 2)
    assert re.search(r"own_t1 = \(\(float\*\)\(&\(pool_ptr\[\((?:\d+ \+ \()?team \* \d+", text)
    with pytest.raises(CheckError, match=r"shared own_t1\b"):
        run_on_cpu_device(replace(net.plan, modules=(replace(module, text=text),)), inputs_for(program), checked=True)


def test_what_a_launch_has_no_room_for_is_refuted(force: Force) -> None:
    force(2)
    net = compiled(columns())
    kernels = {merged.name: merged.func for merged in net.merged}
    (kernel,) = net.plan.kernels
    for changed in (
        replace(kernel, dynamic_shared_bytes=kernel.dynamic_shared_bytes - 128),
        replace(kernel, threads=kernel.threads // 2),
        replace(kernel, threads=2 * kernel.threads),
    ):
        found = certify_plan(replace(net.plan, kernels=(changed,)), kernels, functions_of(net))
        assert found.verdict == REFUTED, found
    text = net.plan.modules[0].text.replace('"r"(first + team)', '"r"(first)')
    assert text != net.plan.modules[0].text
    plan = replace(net.plan, modules=(replace(net.plan.modules[0], text=text),))
    assert certify_plan(plan, kernels, functions_of(net)).verdict == UNKNOWN
    # Where no team waits, its text has no such function.
    alone = without_prologues(kernels, functions_of(net))
    found = without_teams(alone.kernels, alone.functions)
    bare = without_kept_memory(found.kernels, found.functions)
    written = read_kernel(bare.kernels[kernel.name])
    silent = replace(found, teams={name: replace(own, waits=False) for name, own in found.teams.items()})
    assert [*found.beyond(plan, kernel, written)] and not [*silent.beyond(plan, kernel, written)]


def test_functions_that_know_of_no_team_are_refuted(force: Force) -> None:
    """Of a kernel of teams, with barriers of the block, or with memory that is the block's."""
    program = columns()
    force(1)
    plain = compiled(program, verify="off")
    force(2)
    net = compiled(program, verify="off")
    ((without,), (merged,)) = plain.merged, net.merged
    name = {function.name.split("_2x")[0]: function.name for function in merged.shape.called}
    own = {name[function.name]: function.func for function in without.shape.called}

    def alone(call: tvm.ir.Call) -> tvm.ir.Call:
        if not isinstance(call.op, tvm.ir.GlobalVar):
            return call
        return tvm.ir.Call(call.op, [*call.args[:-1]])

    func = merged.func.with_body(tvm_ffi.structural_map(merged.func.body, (tvm.ir.Call, alone)))
    found = certify_plan(net.plan, {merged.name: func}, own)
    assert found.verdict == REFUTED and "shared memory" in found.counterexamples[0].reason, found
    # With memory of their own, which no text gives them, and the barriers.
    bare = {n: f.with_body(tvm_ffi.structural_map(f.body, (tirx.AllocBuffer, of_a_thread))) for n, f in own.items()}
    found = certify_plan(net.plan, {merged.name: func}, bare)
    assert found.verdict == REFUTED and "come to a barrier of the block apart" in found.counterexamples[0].reason, found


def test_a_grid_barrier_is_of_blocks(force: Force) -> None:
    force(2)
    net = compiled(columns(), grid_barrier="counter", verify="memory")
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    (merged,) = net.merged
    workers = next(bind.var for bind in collect(merged.func.body, tirx.Bind) if str(bind.var.name) == "workers")

    def of_teams(call: tvm.ir.Call) -> tvm.ir.Call:
        waits = COUNTER_FUNCTION, ARRIVAL_FUNCTION, COMPLETION_FUNCTION
        if str(getattr(call.op, "name", "")) != "tirx.call_extern" or str(call.args[0].value) not in waits:
            return call
        name, state, _, *found = call.args
        return tvm.ir.Call(call.op, [name, state, workers, *found], call.attrs, call.ty_args, call.span, call.ty)

    func = merged.func.with_body(tvm_ffi.structural_map(merged.func.body, (tvm.ir.Call, of_teams)))
    found = certify_plan(net.plan, {merged.name: func}, functions_of(net))
    assert found.verdict == REFUTED and "waits for other blocks" in found.counterexamples[0].reason, found


def of_a_thread(alloc: tirx.AllocBuffer) -> tirx.Stmt:
    shared = str(alloc.buffer.scope()) == "shared.dyn"
    return tirx.Evaluate(tirx.IntImm("int32", 0)) if shared else alloc


def test_each_change_that_matters_is_refuted(force: Force) -> None:
    """In 20 shuffled runs; what changes nothing may be proven or unknown. ``benchmarks.teams`` has five networks."""
    force(3)
    program = columns()
    net = compiled(program, verify="off")
    mutations = Mutations(net)
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs_of(net.plan, inputs_for(program)), sandbox)
        found = [trials.run(mutation) for mutation in mutations.sample(sized(6, 16), seed=1, kinds=("team",))]
    assert not misses(found), "\n".join(map(described, misses(found)))
    assert sum(trial.changed for trial in found) >= sized(5, 10)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_nvcc_takes_numbers_of_barriers_from_registers(force: Force) -> None:
    force(2)
    (kernel,) = compiled(columns(), cubin=True, verify="off").plan.kernels
    assert kernel.teams == 2 and kernel.resources.registers <= 65536 // kernel.threads
