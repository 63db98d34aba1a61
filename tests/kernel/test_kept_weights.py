"""Constants that stay in registers for the steps of a loop: right on every grid, proven, each error found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

import souffle
from benchmarks.recurrent import recurrent
from souffle.choice import Trial, stationary
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.codegen.assemble import CompiledKernels
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of, misses
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.schedule.stage import flat_stages
from souffle.tvm_compat import collect
from souffle.verify import PROVEN, REFUTED, certify_plan, without_kept_memory
from souffle.verify.certify import functions_of
from souffle.verify.saved import verify_plan
from tests.testlib import ORDERS, Builder, assert_on_every_grid, inputs_for, run_on_cpu_device
from tests.thorough import sized, some

CELLS = {
    "LSTM": recurrent("LSTM", 48, 48, steps=7),
    "LSTM of primes, batch 4": recurrent("LSTM", 31, 37, 37, steps=8, batch=4),
    "LSTM of two layers": recurrent("LSTM", 24, 48, 48, steps=9),
    "GRU, reset behind the product": recurrent("GRU", 40, 40, steps=7, linear_before_reset=1),
    "GRU, reset before the product": recurrent("GRU", 40, 40, steps=6, linear_before_reset=0),
    "RNN": recurrent("RNN", 64, 72, steps=8),
    "GRU of padded sequences": recurrent("GRU", 40, 40, steps=8, batch=3, padded=True, linear_before_reset=1),
    "LSTM of padded sequences": recurrent("LSTM", 24, 40, steps=9, batch=4, padded=True),
}
# LSTMs take the compiler longest, and batches.
FEW = ("GRU, reset behind the product", "RNN", "GRU of padded sequences")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can stay does, whether or not it pays."""
    monkeypatch.setattr(stationary, "pays", lambda made, before: True)


def compiled(program: onnx.ModelProto | TEProgram, **options: object) -> CompiledKernels:
    program = program if isinstance(program, TEProgram) else souffle.import_onnx(program)
    return compile_cuda(program, **{"level": "V4", "arch": "sm_90", "cubin": False, "verify": "values", **options})


def taken(net: CompiledKernels) -> list[str]:
    return [d.reason for d in net.plan.decisions if d.stage == "weights" and d.accepted]


@pytest.mark.parametrize("name", some(FEW, (name for name in CELLS if name not in FEW)))
def test_cells_keep_their_weights(always: None, name: str) -> None:
    """The same bits on every grid: one of fewer blocks than tiles reads again what a block has no room for."""
    model = CELLS[name]
    net = compiled(model)
    assert taken(net) and "_fill(" in net.plan.modules[0].text
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    inputs = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    if len(model.graph.input) == 2:
        inputs["lengths"] = np.array([shape[0], 0, 5, 1][: shape[1]], np.int32)
    found = run_on_cpu_device(net.plan, inputs)
    result = compare(found, onnxruntime_outputs(model, inputs), "fp32")
    assert result.ok, f"largest error {result.error:.2e} of the output's magnitude"
    for options in ORDERS:
        again = run_on_cpu_device(net.plan, inputs, **options)
        for output, value in found.items():
            np.testing.assert_array_equal(again[output], value, err_msg=str(options))


def power(rows: int = 3, size: int = 96, steps: int = 6) -> TEProgram:
    """``x = round(x W / 8)``, again and again: no cell, a batch of rows, whole numbers."""
    b = Builder()
    x = b.input(rows, size)
    w = b.constant(np.random.default_rng(size).integers(-2, 3, (size, size)).astype(np.float32))
    for _ in range(steps):
        x = b.map(lambda v: te.round(v * 0.125), b.matmul(x, w))
    return b.program(x)


@pytest.mark.parametrize("rows", some([1, 8], [3]))
def test_whatever_a_loop_multiplies_by(always: None, rows: int) -> None:
    program = power(rows)
    net = compiled(program)
    assert taken(net)
    assert_on_every_grid(net.plan, program)


def test_a_saved_network_is_proven_again(always: None, tmp_path) -> None:
    net = souffle.compile(power(), target="cuda", device="cpu", cubin=False, verify="values")
    net.save(tmp_path / "power.souffle")
    plan = souffle.load(tmp_path / "power.souffle", device="cpu").plan
    assert verify_plan(plan, values=True).verdict == PROVEN
    assert "of each thread" in str(net.plan.decisions) and "read before the loop" in str(compiled(power()).merged[0])


def test_what_does_not_pay_is_left_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stationary, "pays", lambda made, before: False)
    net = compiled(power(), verify="off")
    reasons = [d.reason for d in net.plan.decisions if d.stage == "weights"]
    assert reasons and not taken(net) and "predicted to take" in reasons[0]
    assert "_fill(" not in net.plan.modules[0].text


def test_what_pays_for_all_stages_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no stage gains that keeps its constants alone, such as where others are computed beside it."""

    def kept(trial: Trial) -> int:
        return sum(stage.kept is not None for stage in flat_stages(trial.request.stages))

    asked = []

    def pays(made: Trial, before: Trial) -> bool:
        asked.append((kept(made), kept(before)))
        return kept(made) > 1 and not kept(before)

    monkeypatch.setattr(stationary, "pays", pays)
    net = compiled(CELLS["LSTM of two layers"])
    assert {(1, 0), (2, 0)} <= {*asked}
    assert any("one by one" in reason for reason in taken(net)) and net.plan.modules[0].text.count("_fill(") > 2
    assert net.plan.certificate.verdict == PROVEN, net.plan.certificate


def test_it_can_be_left_out_and_is_not_at_lower_levels() -> None:
    for options in ({"disable": ["weights"]}, {"level": "V3"}):
        net = compiled(power(), verify="off", **options)
        assert not [d for d in net.plan.decisions if d.stage == "weights"]


# What is wrong, and found


def changed_kernel(net: CompiledKernels, change: Callable[[object], object], kind: type) -> Iterator[dict]:
    """The kernel with one statement of a kind changed, each that `change` does not leave as it is."""
    (merged,) = net.merged
    for number, node in enumerate(collect(merged.func.body, kind)):
        other = change(node)
        if other is None:
            continue
        seen = iter(range(1 << 30))

        def exchanged(one, number=number, other=other, seen=seen):
            return other if next(seen) == number else one

        yield {merged.name: merged.func.with_body(tvm_ffi.structural_map(merged.func.body, (kind, exchanged)))}


def calls_fill(node: tirx.Stmt) -> bool:
    names = [str(getattr(call.op, "name_hint", "")) for call in collect(node, tvm.ir.Call)]
    return any(name.endswith("_fill") for name in names) and not any(name.endswith("_filled") for name in names)


def verdict(net: CompiledKernels, kernels: dict) -> str:
    return certify_plan(net.plan, kernels, functions_of(net)).verdict


def test_calls_that_do_not_fill_are_refuted(always: None) -> None:
    """Left out, for another tile, under another condition: each is shown with a grid and a block."""
    net = compiled(power())
    assert verdict(net, {net.merged[0].name: net.merged[0].func}) == PROVEN

    def dropped(node: tirx.IfThenElse) -> object:
        return tirx.Evaluate(0) if calls_fill(node) else None

    def fewer(node: tirx.IfThenElse) -> object:
        condition = node.condition
        if not calls_fill(node) or not isinstance(condition, tirx.LT):
            return None
        return tirx.IfThenElse(tirx.LT(condition.a, condition.b - 1), node.then_case, None)

    def another(node: tirx.Evaluate) -> object:
        if not calls_fill(node):
            return None
        call = node.value
        return tirx.Evaluate(tvm.ir.Call(call.op, [call.args[0] + 1, *call.args[1:]]))

    def other_thread(node: tirx.Evaluate) -> object:
        if not calls_fill(node):
            return None
        call = node.value
        return tirx.Evaluate(tvm.ir.Call(call.op, [call.args[0], call.args[1] + 1, *call.args[2:]]))

    tried = 0
    changes = ((dropped, tirx.IfThenElse), (fewer, tirx.IfThenElse), (another, tirx.Evaluate))
    for change, kind in (*changes, (other_thread, tirx.Evaluate)):
        for kernels in changed_kernel(net, change, kind):
            tried += 1
            assert verdict(net, kernels) == REFUTED, change.__name__
    assert tried >= 8


def test_what_is_filled_from_what_changes_is_refuted(always: None) -> None:
    net = compiled(power())
    buffers = [replace(b, kind="state") if b.kind == "constant" else b for b in net.plan.buffers]
    kernels = {merged.name: merged.func for merged in net.merged}
    certificate = certify_plan(replace(net.plan, buffers=tuple(buffers)), kernels, functions_of(net))
    assert certificate.verdict == REFUTED
    assert any("it is no constant" in one.reason for one in certificate.counterexamples)


def test_each_random_change_that_matters_is_refuted(always: None) -> None:
    """Changes of the kernel, and of the functions that fill and use."""
    program = power(2, 40, 4)
    net = compiled(program)
    mutations = Mutations(net, thorough=True)
    inputs = inputs_of(net.plan, inputs_for(program))
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs, sandbox)
        found = [trials.run(mutation) for mutation in mutations.sample(sized(10, 36), seed=5)]
    assert not misses(found), "\n".join(map(described, misses(found)))
    assert any(t.mutation.stage and t.mutation.stage.endswith("_fill") and t.changed for t in found)


def test_functions_without_registers_are_as_they_were() -> None:
    net = compiled(power(), disable=["weights"], verify="off")
    kernels = {merged.name: merged.func for merged in net.merged}
    whole = without_kept_memory(kernels, functions_of(net))
    assert whole.kernels == kernels and not whole.findings and not whole.constants
