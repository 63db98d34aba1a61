"""Constants that stay in shared memory, each thread's in a slice of its own: right, proven, each error found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from benchmarks.residence import NETWORKS, compiled
from benchmarks.teams import asked_for
from souffle.choice import stationary
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.codegen.assemble import CompiledKernels
from souffle.decision import TooMany
from souffle.kernel import kernel_plan
from souffle.kernel.kernel_shape import LoopCall
from souffle.mutation.residence import ResidenceMutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of, misses
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.schedule.lower import KeptLoads, keep_loads
from souffle.tvm_compat import collect
from souffle.verify import PROVEN, REFUTED, certify_plan
from souffle.verify.certify import functions_of
from tests.testlib import ORDERS, Builder, assert_on_every_grid, inputs_for, run_on_cpu_device
from tests.thorough import sized, some


def between(rows: int = 64, size: int = 96, steps: int = 6) -> TEProgram:
    """Products with tiles in shared memory before and after a loop whose constants stay; whole numbers."""
    b = Builder()
    x = b.input(rows, size)
    rng = np.random.default_rng(size)
    w, v, u = (b.constant(rng.integers(-2, 3, (size, size)).astype(np.float32)) for _ in range(3))
    y = b.map(lambda a: te.round(a * 0.125), b.matmul(x, v))
    total = b.slice(y, 0, 1, 2)
    for _ in range(steps):
        total = b.map(lambda a: te.round(a * 0.125), b.matmul(total, w))
    z = b.add(lambda p, q: te.compute((rows, size), lambda i, j: p[i, j] + q[0, j]), y, total)
    return b.program(b.matmul(z, u))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can stay in shared memory does, whether or not it pays."""
    monkeypatch.setattr(stationary, "pays", lambda made, before: True)
    monkeypatch.setattr(stationary, "SCOPES", ("shared",))


def kept_of(net: CompiledKernels) -> list[KeptLoads]:
    return [call.kept for merged in net.merged for call in merged.shape.stage_calls if call.kept]


def right(net: CompiledKernels, program: TEProgram) -> None:
    """Proven, and the same as the program on every grid."""
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    assert_on_every_grid(net.plan, program)


@pytest.mark.parametrize(("name", "precision"), some([("GRU, reset before", "mixed")], [("LSTM", "fp32")]))
def test_cells_keep_their_weights_in_shared_memory(name: str, precision: str) -> None:
    """As ONNX Runtime has it, and the same bits on every grid."""
    net, model = compiled(name, "shared", precision=precision), NETWORKS[name][0]()
    assert kept_of(net) and all(one.shared_bytes and not one.registers for one in kept_of(net))
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    inputs = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    expected = run_on_cpu_device(net.plan, inputs)
    result = compare(expected, onnxruntime_outputs(model, inputs), precision)
    assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"
    for options in ORDERS:
        found = run_on_cpu_device(net.plan, inputs, **options)
        for output, value in expected.items():
            np.testing.assert_array_equal(found[output], value, err_msg=str(options))


@pytest.mark.thorough("changes of slices are below")
def test_memory_that_other_stages_have_before_and_after_is_used_meanwhile(always: None) -> None:
    program = between()
    net = compile_cuda(program, level="V4", arch="sm_90", cubin=False, verify="values")
    (shape,) = (merged.shape for merged in net.merged)
    (loop,) = (call for call in shape.calls if isinstance(call, LoopCall))
    others = [call.shared_bytes for call in shape.calls if call is not loop]
    first = min(start for starts in loop.kept_places.values() for start in starts)
    assert first < max(others) and shape.shared_bytes == max(loop.shared_bytes, *others)
    right(net, program)
    # With what stands around: slices elsewhere, and barriers left out.
    mutations = ResidenceMutations(net)
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs_of(net.plan, inputs_for(program)), sandbox)
        kinds = [[one for one in mutations if one.action == action] for action in ("elsewhere", "no barrier")]
        found = [trials.run(one) for kind in kinds for one in kind[: sized(2, len(kind))]]
    assert not misses(found), "\n".join(map(described, misses(found)))
    for action in ("elsewhere", "no barrier"):
        assert any(one.changed and one.mutation.action == action for one in found), action


def power(rows: int = 1, size: int = 200, steps: int = 6) -> TEProgram:
    """``x = round(x W / n)``, again and again, with whole numbers that stay as large as they are."""
    b = Builder()
    x = b.input(rows, size)
    w = b.constant(np.random.default_rng(size).integers(-2, 3, (size, size)).astype(np.float32))
    factor = 2.0 ** -round(np.log2(1.5 * np.sqrt(size)))
    for _ in range(steps):
        x = b.map(lambda v: te.round(v * factor), b.matmul(x, w))
    return b.program(x)


def test_shared_memory_is_for_what_registers_have_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its price: said where it is decided, and shown in the kernel."""
    program, made = power(1, 600, 12), []

    def no_registers(function: object, constants: object, most: int, scope: str) -> object:
        made.append(scope)
        return keep_loads(function, constants, 0 if scope == "local" else most, scope)

    monkeypatch.setattr(stationary, "keep_loads", no_registers)
    net = compile_cuda(program, level="V4", arch="sm_90", cubin=False, verify="values")
    (decided, *_) = [d for d in net.plan.decisions if d.stage == "weights"]
    assert set(made) == {"local", "shared"}
    assert decided.accepted and "bytes of shared memory for 12 steps" in decided.reason, decided
    assert "bytes of shared memory, read before the loop" in str(net.merged[0])
    assert net.plan.kernels[0].dynamic_shared_bytes >= sum(one.shared_bytes for one in kept_of(net)) > 0
    right(net, program)


def test_registers_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stationary, "pays", lambda made, before: True)
    net = compile_cuda(power(), level="V4", arch="sm_90", cubin=False, verify="off")
    assert kept_of(net) and all(one.registers and not one.shared_bytes for one in kept_of(net))


def test_more_than_a_block_may_ask_for_is_refused(always: None) -> None:
    net = compile_cuda(power(), level="V4", arch="sm_90", cubin=False, verify="off")
    (kept,) = kept_of(net)
    assert kept.shared_bytes % 128 == 0 and kept.nbytes <= kept.shared_bytes
    plain = compile_cuda(power(), level="V4", arch="sm_90", cubin=False, verify="off", disable=["weights"])
    (function,) = {f for merged in plain.merged for call in merged.shape.stage_calls for f in call.functions}
    refused = keep_loads(function, [1], 128, "shared")
    assert isinstance(refused, TooMany) and "bytes of shared memory of 128 at most" in refused.reason
    # And a launch that has less than the slices reach to.
    less = replace(net.plan.kernels[0], dynamic_shared_bytes=kept.shared_bytes - 4)
    kernels = {merged.name: merged.func for merged in net.merged}
    certificate = certify_plan(replace(net.plan, kernels=(less,)), kernels, functions_of(net))
    assert certificate.verdict == REFUTED
    assert any(one.rule == "does not fit" and "slices" in one.element for one in certificate.counterexamples)


@pytest.mark.parametrize("teams", some([3], [2]))
def test_each_team_has_its_own(always: None, monkeypatch: pytest.MonkeyPatch, teams: int) -> None:
    monkeypatch.setattr(kernel_plan, "_teams", asked_for(teams))
    program = power(3)
    net = compile_cuda(program, level="V4", arch="sm_90", cubin=False, verify="values")
    (kernel,) = net.plan.kernels
    assert kernel.teams == teams and re.search(r"souffle_kept\(+team \* \d+", net.plan.modules[0].text)
    right(net, program)


def test_what_another_thread_touches_is_refuted(always: None) -> None:
    """Whoever reads or fills the slice of a neighbour, whether or not both do so alike."""
    net = compile_cuda(power(2, 40, 4), level="V4", arch="sm_90", cubin=False, verify="off")
    kernels, functions = {merged.name: merged.func for merged in net.merged}, functions_of(net)
    assert certify_plan(net.plan, kernels, functions).verdict == PROVEN

    def other(func: tirx.PrimFunc, change: Callable[[object], object]) -> tirx.PrimFunc:
        """The function with other indices of its slice."""
        given = [p for p in func.params if getattr(p.ty, "storage_scope", "") == "shared"]
        (slice_,) = (d.buffer for d in collect(func.body, tirx.DeclBuffer) if d.data.same_as(given[0]))

        def moved(index: object) -> object:
            if isinstance(index, tirx.Ramp):
                return tirx.Ramp(change(index.base), index.stride, index.lanes)
            return change(index)

        def load(node: tvm.ir.expr.TensorLoad) -> object:
            return tirx.BufferLoad(slice_, [moved(node.indices[0])]) if node.source.same_as(slice_) else node

        def store(node: tirx.BufferStore) -> object:
            same = node.buffer.same_as(slice_)
            return tirx.BufferStore(slice_, node.value, [moved(node.indices[0])]) if same else node

        changes = [(tvm.ir.expr.TensorLoad, load), (tirx.BufferStore, store)]
        return func.with_body(tvm_ffi.structural_map(func.body, changes))

    fill, use = (next(n for n in functions if n.endswith(end)) for end in ("_fill", "_filled"))
    ways = {
        "the next element": lambda index: index + 1,
        "before the first": lambda index: index - 1,
        "all the same": lambda index: index * 0,
        "half": lambda index: tirx.truncdiv(index, tirx.IntImm("int32", 2)),
    }
    for what, change in ways.items():
        for names in ((fill,), (use,), (fill, use)):
            changed = {name: other(func, change) if name in names else func for name, func in functions.items()}
            assert certify_plan(net.plan, kernels, changed).verdict == REFUTED, (what, names)


def test_each_change_that_matters_is_refuted() -> None:
    net = compiled("Loop of two products", "shared")
    mutations = ResidenceMutations(net)
    inputs = tuple(
        np.random.default_rng(3).standard_normal(b.shape).astype(b.dtype)
        for b in net.plan.buffers
        if b.kind == "input"
    )
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs, sandbox)
        found = [trials.run(mutation) for mutation in mutations.sample(sized(4, 12), seed=7)]
    assert not misses(found), "\n".join(map(described, misses(found)))
    assert sum(trial.changed for trial in found) > sized(0, 4)
