"""Values as a part of the certificate: when compiling, of a file, and on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm_ffi
from tvm import tirx

import souffle
from souffle.analysis import analyze
from souffle.certificate import PROVEN, REFUTED, UNKNOWN, VALUES, Certificate, Section
from souffle.codegen.definitions import stage_definitions
from souffle.codegen.tensor_ir import TensorIR, called_names, pack, text_of_module, unpack
from souffle.errors import CertificateError
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.runtime import Network, artifact
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu import scheduler
from souffle.schedule.gpu.device import device_for
from souffle.schedule.lower import cuda_target, partial_function
from souffle.schedule.lower.stages import lower_stages
from souffle.verify.certified_step import values_of
from souffle.verify.saved import verify_plan
from tests.kernel.launch_shapes import ARCH, crosswise, rescheduled, staged
from tests.testlib import Builder
from tests.verify.wired import MODEL, change, compiled, run


def values(certificate: Certificate) -> Section:
    (found,) = [section for section in certificate.sections if section.name == VALUES]
    return found


@pytest.fixture(scope="module")
def with_values() -> Network:
    return compiled(verify="values")


def miscalculated(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with its first sum of numbers made a difference, if it has one; it makes the same accesses."""
    done = False

    def turn(node: tirx.Add) -> object:
        nonlocal done
        if done or str(node.ty.dtype) != "float32":
            return node
        done = True
        return tirx.Sub(node.a, node.b)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Add, turn)))


@pytest.fixture
def miscalculating(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering with a bug."""
    lowered = scheduler.lower_stage

    def wrong(*arguments: object) -> tuple:
        return tuple(replace(f, func=miscalculated(f.func)) for f in lowered(*arguments))

    monkeypatch.setattr(scheduler, "lower_stage", wrong)


def test_values_are_a_part_of_the_certificate(with_values: Network, network: Network) -> None:
    section = values(with_values.certificate)
    assert section.verdict == with_values.certificate.verdict == PROVEN
    definitions = unpack(with_values.plan.tensor_ir).definitions
    assert dict(section.facts)["distinct stages"] == len(definitions) > 1
    assert any(line.startswith(VALUES) for line in str(with_values.certificate).splitlines())
    assert VALUES not in {section.name for section in network.certificate.sections}
    assert with_values.certificate.kernels == network.certificate.kernels
    assert VALUES in with_values.certificate.summary and VALUES not in network.certificate.summary


def test_every_function_that_is_called_is_defined(with_values: Network, in_modules: Network) -> None:
    for one in (with_values, in_modules):
        ir = unpack(one.plan.tensor_ir)
        defined = {name for definition in ir.definitions for name, _, _ in definition.functions}
        assert defined == set(ir.functions) == set().union(*map(called_names, ir.kernels.values()))


def test_compiling_fails_on_a_wrong_value(miscalculating: None) -> None:
    assert compiled().certificate.verdict == PROVEN
    with pytest.raises(CertificateError) as raised:
        compiled(verify="values")
    certificate = raised.value.certificate
    assert certificate.verdict == REFUTED and {one.rule for one in certificate.counterexamples} == {"wrong value"}
    found = certificate.counterexamples[0]
    assert f"wrong value in {found.kernel}: " in str(raised.value) and found.stages[0] in str(raised.value)
    assert found.kernel and found.element


def test_a_replaced_text_makes_values_undecided() -> None:
    network = compiled(verify="values", hook=lambda stage, made: made + "\n" if stage == "text" else made)
    assert values(network.certificate).verdict == UNKNOWN
    assert "a hook replaced the text" in values(network.certificate).unknown[0]


def test_what_is_not_defined_is_undecided() -> None:
    kernels = compile_cuda(souffle.import_onnx(MODEL), level="V3", arch=ARCH, cubin=False, verify="off")
    functions = unpack(kernels.plan.tensor_ir).functions
    *known, last = kernels.definitions
    section = values_of(kernels.plan, unpack(kernels.plan.tensor_ir).kernels, functions, known)
    assert section.verdict == UNKNOWN
    assert section.unknown == tuple(f"nothing says what {name} is to compute" for name, _, _ in last.functions)


# forms of a stage


def products() -> TEProgram:
    """Rows of 90 summed, times a matrix, and once more: the last stage has the most threads."""
    b = Builder()
    y = b.reduce(b.input(6, 20, 90), 2)
    z = b.matmul(y, b.constant(np.ones((20, 33), np.float32)))
    return b.program(b.reduce(b.matmul(z, b.constant(np.ones((33, 17), np.float32))), 1))


HOW = {0: crosswise(96), 1: staged(4, 24, 4)}


def test_partial_forms_are_compared_too() -> None:
    options = {"level": "V3", "arch": ARCH, "cubin": False, "verify": "values"}
    made = compile_cuda(products(), hook=rescheduled(HOW), **options)
    names = {name for one in made.definitions for name, _, _ in one.functions}
    assert any(name.endswith("_partial") for name in names)
    assert values(made.plan.certificate).verdict == PROVEN


def test_a_stage_that_is_called_in_two_forms_has_two_definitions() -> None:
    program = products()
    policy = JoinPolicy(False)
    stages, _ = form_stages(program, analyze(program), scheduler.GpuScheduler(device_for(ARCH)), policy)
    stages = lower_stages(rescheduled(HOW)("schedule", stages), cuda_target(ARCH))
    (first,) = stages[0].functions
    part = partial_function(first)
    assert part is not first

    def listed(*called) -> list[tuple]:
        return [one.functions for one in stage_definitions(stages, called)]

    def entry(function) -> tuple:
        return ((function.name, function.tiles, function.threads),)

    assert listed(first, part) == [entry(first), entry(part)]
    assert listed(part) == [entry(part)]
    assert listed() == []


# files


def with_wrong_function(ir: TensorIR) -> TensorIR:
    return replace(ir, functions={name: miscalculated(func) for name, func in ir.functions.items()})


def edited(edit, *, text: bool):
    """Change a file's TensorIR, and its text with it where asked."""

    def apply(members: dict[str, bytes]) -> None:
        ir = edit(unpack(members["tensorir.z"]))
        members["tensorir.z"] = pack(ir.kernels, ir.functions, ir.definitions)
        if text:
            members["text/0.cu"] = text_of_module(compiled().plan, 0, ir).encode()

    return apply


def test_verify_compares_the_values_of_a_file(
    network: Network, with_values: Network, file: Path, capsys: pytest.CaptureFixture
) -> None:
    status, out, err = run(capsys, "verify", file, "--values")
    assert status == 0 and "evaluating" in err
    assert any(line.startswith(VALUES) and " PROVEN " in line for line in out.splitlines())
    status, out, _ = run(capsys, "verify", file, "--quiet")
    assert status == 0 and VALUES not in out
    again = verify_plan(artifact.load(file), values=True)
    assert values(again) == values(with_values.certificate)


def test_verify_finds_a_stage_that_computes_something_else(file: Path, capsys: pytest.CaptureFixture) -> None:
    change(file, edited(with_wrong_function, text=True))
    assert run(capsys, "verify", file, "--quiet")[0] == 0
    status, out, _ = run(capsys, "verify", file, "--values", "--quiet", "--json")
    record = json.loads(out)
    assert status == 1
    found = [one for part in record["others"] for one in part["counterexamples"]]
    assert {one["rule"] for one in found} == {"wrong value"}


def test_an_older_file_says_that_it_has_no_definitions(file: Path, capsys: pytest.CaptureFixture) -> None:
    change(file, edited(lambda ir: replace(ir, definitions=None), text=False))
    assert run(capsys, "verify", file, "--quiet")[0] == 0
    status, _, err = run(capsys, "verify", file, "--values", "--quiet")
    assert status == 2 and "does not say what the stages are to compute" in err and "save it again" in err


def test_definitions_that_are_none_are_an_error(file: Path, capsys: pytest.CaptureFixture) -> None:
    def renamed(ir: TensorIR) -> TensorIR:
        first, *rest = ir.definitions
        ((name, tiles, threads), *others) = first.functions
        return replace(ir, definitions=(replace(first, functions=((name + "x", tiles, threads), *others)), *rest))

    def empty(ir: TensorIR) -> TensorIR:
        return replace(ir, definitions=(replace(ir.definitions[0], functions=()),))

    whole = file.read_bytes()
    for edit, says in ((renamed, "which is not there"), (empty, "a definition of a stage")):
        file.write_bytes(whole)
        change(file, edited(edit, text=False))
        status, _, err = run(capsys, "verify", file, "--quiet")
        assert status == 2 and "ArtifactError" in err and says in err


# the command line


def test_compile_explain_check_and_ablate_take_it(
    with_values: Network, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    onnx.save(MODEL, tmp_path / "m.onnx")
    options = ("--arch", ARCH, "--verify", "values", "--quiet")
    one = (tmp_path / "m.onnx", "--level", "V3", "--no-cubin", "--tuning-log", "none", *options)
    status, out, _ = run(capsys, "compile", *one, "-o", tmp_path / "m.souffle", "--json")
    certificate = json.loads(out)["certificate"]
    assert status == 0 and VALUES in [part["name"] for part in certificate["others"]]
    assert souffle.load(tmp_path / "m.souffle").certificate == with_values.certificate
    status, out, _ = run(capsys, "explain", *one)
    assert status == 0 and f"certificate: {with_values.certificate.summary}" in out


@pytest.mark.parametrize("verify", ["values", "off"])
def test_check_and_ablate_prove_what_is_asked_for(
    verify: str, miscalculating: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    onnx.save(MODEL, tmp_path / "m.onnx")
    options = ("--arch", ARCH, "--verify", verify, "--quiet")
    status, _, err = run(capsys, "ablate", tmp_path / "m.onnx", "--no-run", "--no-cubin", *options)
    assert (status, "wrong value" in err) == ((1, True) if verify == "values" else (0, False))
    status, out, err = run(capsys, "check", tmp_path / "m.onnx", "--levels", "V3", *options)
    # Without it the outputs themselves are found to differ.
    assert status == 1 and ("wrong value" in err) == (verify == "values") and ("MISMATCH" in out) == (verify == "off")
