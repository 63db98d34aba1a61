"""The certificate as a step of the compiler: what is refuted is not handed out, and the verdict is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import souffle
import souffle.kernel.merged_program
from souffle.certificate import PROVEN, REFUTED, UNKNOWN
from souffle.errors import CertificateError, OptionError
from souffle.runtime import Network
from souffle.runtime.plan_json import certificate_to_json
from tests.verify.wired import MODEL, compiled, run, without_grid_barrier


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merger with a bug: it leaves out a kernel's first grid barrier."""
    merge = souffle.kernel.merged_program.merge

    def forgets(*arguments, **options):
        merged = merge(*arguments, **options)
        func = without_grid_barrier(merged.func) if merged.shape.grid_syncs else merged.func
        return replace(merged, func=func)

    monkeypatch.setattr(souffle.kernel.merged_program, "merge", forgets)


def test_what_is_compiled_is_proven_and_says_so(network: Network) -> None:
    certificate = network.certificate
    assert certificate.verdict == PROVEN
    assert [section.name for section in certificate.kernels] == [kernel.name for kernel in network.kernels]
    text = str(certificate)
    (kernel,) = network.kernels
    row = next(line for line in text.splitlines() if line.startswith(kernel.name))
    assert " PROVEN " in row and all(len(line) <= 120 for line in text.splitlines())
    assert certificate.summary in text
    assert f"{kernel.grid_syncs} grid barriers" in certificate.summary and kernel.grid_syncs
    assert f"  certificate: {certificate.summary}\n" in network.explain()


def test_off_proves_nothing_and_other_words_are_refused() -> None:
    network = compiled(verify="off")
    assert network.certificate is None and "certificate: none was made" in network.explain()
    with pytest.raises(OptionError, match="verify='all' is not valid; choose one of memory, values, off"):
        compiled(verify="all")


def test_compiling_fails_on_a_counterexample(forgetful: None) -> None:
    with pytest.raises(CertificateError) as raised:
        compiled()
    message = str(raised.value)
    found = raised.value.certificate.counterexamples[0]
    assert found.rule == "race between blocks"
    assert f"race between blocks in {found.kernel}: " in message
    assert len(found.stages) == len(found.statements) == len(found.blocks) == 2
    for stage, statement in zip(found.stages, found.statements, strict=True):
        assert f"in {stage}: {statement}" in message
    assert f"{found.element}; {' and '.join(found.blocks)}" in message
    assert "report it with the model" in message and 'verify="off"' in message
    assert raised.value.certificate.verdict == REFUTED
    assert compiled(verify="off").certificate is None


def test_the_command_line_fails_on_a_counterexample(
    forgetful: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    onnx.save(MODEL, tmp_path / "m.onnx")
    arguments = ("compile", tmp_path / "m.onnx", "--level", "V3", "--arch", "sm_90", "--no-cubin", "--quiet")
    status, out, err = run(capsys, *arguments, "-o", tmp_path / "m.souffle")
    assert status == 1 and not out and "CertificateError" in err and "race between blocks" in err
    assert not (tmp_path / "m.souffle").exists()
    status, out, _ = run(capsys, *arguments, "-o", tmp_path / "m.souffle", "--verify", "off")
    assert status == 0 and "certificate: none was made" in out
    status, out, _ = run(capsys, "verify", tmp_path / "m.souffle", "--quiet")
    assert status == 1 and "race between blocks" in out


def test_the_command_line_shows_the_verdict(network: Network, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    onnx.save(MODEL, tmp_path / "m.onnx")
    arguments = (
        tmp_path / "m.onnx",
        "--level",
        "V3",
        "--arch",
        "sm_90",
        "--no-cubin",
        "--tuning-log",
        "none",
        "--quiet",
    )
    line = f"certificate: {network.certificate.summary}"
    status, out, _ = run(capsys, "compile", *arguments, "-o", tmp_path / "m.souffle")
    assert status == 0 and line in out.splitlines()
    status, out, _ = run(capsys, "compile", *arguments, "-o", tmp_path / "m.souffle", "--json")
    assert status == 0 and json.loads(out)["certificate"] == certificate_to_json(network.certificate)
    status, out, _ = run(capsys, "explain", *arguments)
    assert status == 0 and f"  {line}" in out.splitlines()
    status, out, _ = run(capsys, "explain", *arguments, "--verify", "off", "--json")
    assert status == 0 and json.loads(out)["certificate"] is None


def test_a_replaced_text_is_not_what_was_proven(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    network = compiled(hook=lambda stage, result: result + "\n// edited\n" if stage == "text" else result)
    assert network.certificate.verdict == UNKNOWN
    assert len(network.certificate.unknown) == 2 and "a hook replaced the text" in network.certificate.unknown[0]
    assert "undecided: a hook replaced the text" in network.explain()
    network.save(tmp_path / "f")
    assert souffle.load(tmp_path / "f").certificate == network.certificate
    status, out, _ = run(capsys, "verify", tmp_path / "f", "--quiet")
    assert status == 3 and "text of module 0: a hook replaced it after it was emitted" in out
    same = compiled(hook=lambda stage, result: str(result) if stage == "text" else result)
    assert same.certificate.verdict == PROVEN


def test_a_replaced_text_may_mend_what_is_refuted(forgetful: None) -> None:
    network = compiled(hook=lambda stage, result: result + "\n" if stage == "text" else result)
    assert network.certificate.verdict == UNKNOWN and not network.certificate.counterexamples


def test_networks_for_the_host_have_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    network = souffle.compile(MODEL, target="cpu")
    assert network.certificate is None and "certificate" not in network.explain()
    network.save(tmp_path / "f")
    status, _, err = run(capsys, "verify", tmp_path / "f", "--quiet")
    assert status == 2 and "certificates are of CUDA kernels" in err
