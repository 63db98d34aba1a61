"""``souffle verify``: a saved network is proven again from its file, and what was changed in it is found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import souffle
import souffle.codegen.cuda
from souffle.certificate import PROVEN, REFUTED, UNKNOWN
from souffle.codegen import nvcc
from souffle.codegen.tensor_ir import TensorIR, pack, text_of_module, unpack
from souffle.errors import ArtifactError
from souffle.runtime import Network, artifact
from souffle.runtime.plan_json import certificate_to_json
from souffle.verify import saved
from souffle.verify.saved import verify_plan
from tests.test_architecture import ROOT, _blocked
from tests.verify.wired import change, compiled, run, without_grid_barrier


def test_a_file_holds_the_certificate_and_what_it_is_about(network: Network, file: Path) -> None:
    back = souffle.load(file, device="cpu")
    assert back.certificate == network.certificate
    assert back.plan.tensor_ir == network.plan.tensor_ir
    back.save(file.with_name("again"))
    assert file.with_name("again").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("which", ["network", "in_modules"])
def test_verify_proves_a_file_again(which: str, tmp_path: Path, request, capsys: pytest.CaptureFixture) -> None:
    network, file = request.getfixturevalue(which), tmp_path / "f"
    network.save(file)
    status, out, err = run(capsys, "verify", file)
    assert status == 0 and "proving" in err
    for name in [*(kernel.name for kernel in network.kernels), "text of module 0"]:
        assert any(line.startswith(name) and " PROVEN" in line for line in out.splitlines()), name
    status, out, _ = run(capsys, "verify", file, "--json", "--quiet")
    record = json.loads(out)
    assert status == 0 and record["verdict"] == record["recorded"] == PROVEN
    recorded = certificate_to_json(network.certificate)
    assert (record["kernels"], record["launches"]) == (recorded["kernels"], recorded["launches"])
    assert [part["name"] for part in record["others"]] == [
        f"text of module {number}" for number in range(len(network.plan.modules))
    ]


def test_verify_finds_a_changed_text(file: Path, capsys: pytest.CaptureFixture) -> None:
    def edit(members: dict[str, bytes]) -> None:
        text = members["text/0.cu"].decode()
        place = text.index("__syncthreads();")
        members["text/0.cu"] = (text[:place] + ";" + text[place + len("__syncthreads();") :]).encode()

    change(file, edit)
    assert souffle.load(file).certificate.verdict == PROVEN
    status, out, _ = run(capsys, "verify", file, "--quiet")
    assert status == 1
    assert "stored:  ;" in out and "emitted: __syncthreads();" in out
    assert "When it was compiled, this was recorded: PROVEN" in out


def with_ir(edit: Callable[[TensorIR], TensorIR], *, text: bool) -> Callable[[dict[str, bytes]], None]:
    """Change a file's TensorIR, and its text with it where asked."""

    def apply(members: dict[str, bytes]) -> None:
        ir = edit(unpack(members["tensorir.z"]))
        members["tensorir.z"] = pack(ir.kernels, ir.functions)
        if text:
            members["text/0.cu"] = text_of_module(compiled().plan, 0, ir).encode()

    return apply


def racing(ir: TensorIR) -> TensorIR:
    return replace(ir, kernels={name: without_grid_barrier(func) for name, func in ir.kernels.items()})


@pytest.mark.parametrize(("text", "rules"), [(False, {"race between blocks", "text"}), (True, {"race between blocks"})])
def test_verify_finds_a_changed_tensor_ir(file: Path, text: bool, rules: set[str]) -> None:
    change(file, with_ir(racing, text=text))
    certificate = verify_plan(artifact.load(file))
    assert certificate.verdict == REFUTED and {found.rule for found in certificate.counterexamples} >= rules
    assert text == all(found.rule != "text" for found in certificate.counterexamples)


def test_verify_finds_a_plan_that_lets_tensors_share_memory(file: Path) -> None:
    plan = artifact.load(file)
    work = [buffer for buffer in plan.buffers if buffer.kind == "workspace"]
    assert len(work) > 1
    buffers = tuple(replace(b, offset=0) if b.kind == "workspace" else b for b in plan.buffers)
    certificate = verify_plan(replace(plan, buffers=buffers))
    assert certificate.verdict == REFUTED


def test_a_file_that_does_not_say_what_stages_read_is_undecided(file: Path) -> None:
    plan = artifact.load(file)
    certificate = verify_plan(replace(plan, dataflow=None))
    assert certificate.verdict == UNKNOWN and not certificate.counterexamples
    (why,) = certificate.unknown
    assert "does not say which tensors its stages are to be given" in why


def test_what_a_file_says_of_the_program_comes_back(network: Network, file: Path) -> None:
    assert artifact.load(file).dataflow == network.plan.dataflow is not None


def test_another_tvm_may_emit_another_text(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = artifact.load(file)
    module = replace(plan.modules[0], text=plan.modules[0].text + "\n")
    changed = replace(plan, modules=(module,))
    assert verify_plan(changed).verdict == REFUTED
    monkeypatch.setattr(saved, "unpack", lambda data: replace(unpack(data), tvm="0.1"))
    assert verify_plan(plan).verdict == PROVEN
    certificate = verify_plan(changed)
    assert certificate.verdict == UNKNOWN and "TVM 0.1 emitted it" in certificate.unknown[0]


def older(members: dict[str, bytes]) -> None:
    """As files were before certificates."""
    members.pop("tensorir.z")
    plan = json.loads(members["plan.json"])
    for key in ("certificate", "edited", "compiler"):
        del plan[key]
    members["plan.json"] = json.dumps(plan).encode()


def test_older_files_load_and_cannot_be_verified(network: Network, file: Path, capsys: pytest.CaptureFixture) -> None:
    change(file, older)
    back = souffle.load(file, device="cpu")
    assert back.certificate is None and "certificate: none was made" in back.explain()
    x = np.random.default_rng(1).standard_normal((96, 96)).astype(np.float32)
    np.testing.assert_array_equal(back(x)["y"], network(x)["y"])
    status, _, err = run(capsys, "verify", file, "--quiet")
    assert status == 2 and "holds no TensorIR" in err and "compile the model" in err


def emptied(key: str) -> Callable[[TensorIR], TensorIR]:
    return lambda ir: replace(ir, **{key: {}})


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m.update({"tensorir.z": b"\x00" * 40}), "the TensorIR cannot be read"),
        (lambda m: m.update({"tensorir.z": m["tensorir.z"][:-200]}), "cut short"),
        (with_ir(emptied("functions"), text=False), "which is not there"),
        (with_ir(emptied("kernels"), text=False), "its TensorIR holds no kernel"),
    ],
)
def test_a_tensor_ir_that_is_none_is_an_error(file: Path, edit, says: str, capsys: pytest.CaptureFixture) -> None:
    change(file, edit)
    souffle.load(file)
    status, _, err = run(capsys, "verify", file, "--quiet")
    assert status == 2 and "ArtifactError" in err and says in err


def test_a_damaged_certificate_is_named(file: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        plan = json.loads(members["plan.json"])
        plan["certificate"]["launches"]["facts"][0] = ["launches", "many"]
        members["plan.json"] = json.dumps(plan).encode()

    change(file, edit)
    with pytest.raises(ArtifactError, match="a fact of the certificate is not"):
        souffle.load(file)


# machine code


@pytest.mark.skipif(nvcc.find_nvcc() is None, reason="no nvcc here")
def test_verify_compiles_the_text_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    network = compiled(cubin=True, cache_dir=tmp_path / "cache")
    network.save(tmp_path / "f")
    status, out, _ = run(capsys, "verify", tmp_path / "f", "--rebuild", "--quiet")
    assert status == 0 and "machine code of module 0" in out
    plan = network.plan
    module = plan.modules[0]
    half = len(module.cubin) // 2
    other = module.cubin[:half] + bytes([module.cubin[half] ^ 1]) + module.cubin[half + 1 :]
    changed = replace(plan, modules=(replace(module, cubin=other),))
    assert verify_plan(changed).verdict == PROVEN
    assert {found.rule for found in verify_plan(changed, rebuild=True).counterexamples} == {"machine code"}
    certificate = verify_plan(replace(plan, compiler="release 1.0"), rebuild=True)
    assert certificate.verdict == UNKNOWN and "release 1.0 made it" in certificate.unknown[0]


def test_there_may_be_no_machine_code_to_compare(network: Network) -> None:
    certificate = verify_plan(network.plan, rebuild=True)
    assert certificate.verdict == UNKNOWN and "the file holds none" in certificate.unknown[0]


# without the compiler


def test_the_recorded_certificate_needs_no_tvm(network: Network, file: Path) -> None:
    done = _blocked(f"import souffle\nprint(souffle.load({str(file)!r}).certificate)\nassert 'tvm' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{network.certificate}\n"


def test_a_command_that_needs_tvm_says_so(file: Path) -> None:
    missing = "import sys\nsys.modules.update(dict.fromkeys(('tvm', 'tvm_ffi', 'onnx', 'islpy')))\n"
    program = missing + "from souffle.cli.main import main\nsys.exit(main([{command!r}, {file!r}, '--quiet']))"
    verify, explain = (
        subprocess.run(
            [sys.executable, "-c", program.format(command=command, file=str(file))],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )
        for command in ("verify", "explain")
    )  # fmt: skip
    assert verify.returncode == 2 and not verify.stdout
    assert verify.stderr.startswith("souffle: this command needs the compiler") and "Traceback" not in verify.stderr
    # Of a file it says what the file does.
    assert explain.returncode == 0 and explain.stdout


def test_a_saved_network_runs_from_the_command_line_without_tvm(network: Network, file: Path) -> None:
    x = np.zeros((96, 96), np.float32)
    np.save(file.with_name("x.npy"), x)
    command = ["run", str(file), "--input", f"x={file.with_name('x.npy')}", "--device", "cpu", "--json", "--quiet"]
    done = _blocked(f"from souffle.cli.main import main\nsys.exit(main({command!r}))")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"y": {"shape": [96, 96], "dtype": "float32"}}
