"""``souffle learn`` and ``fusion="learned"``: from two files to a network that is right; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import souffle
from souffle import learning, models
from souffle.certificate import PROVEN
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.cli.main import main
from souffle.cost import cost_device
from souffle.errors import OptionError
from souffle.learning import PolicyError
from souffle.stitching import FusionRequest, graph_of
from souffle.stitching.priority import FusionRules, planners

LIBRARIES = ("torch", "torch_geometric", "safetensors", "matplotlib")
FUSED = {"target": "cuda", "arch": "sm_80", "cubin": False, "device": "cpu", "fusion": "learned"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two networks, which is the current one."""
    for name in ("mmoe", "var-encoder"):
        (tmp_path / f"{name}.onnx").write_bytes(models.build(name).SerializeToString())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_the_extra_it_says_what_to_install(files: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """All else works, such as the other orders of priority fusion."""
    monkeypatch.setattr(learning.problem, "_import_problem", lambda name: f"No module named {name!r}")
    wanted = "priorities need torch (No module named 'torch'), torch_geometric"
    assert main(["learn", "mmoe.onnx", "-o", "p.safetensors"]) == 2
    told = capsys.readouterr().err
    assert wanted in told and "pip install 'souffle-dl[learn]'" in told and "Traceback" not in told
    with pytest.raises(PolicyError, match=r"pip install 'souffle-dl\[learn\]'"):
        souffle.compile("mmoe.onnx", **FUSED)
    souffle.compile("mmoe.onnx", **FUSED | {"fusion": "priority-greedy", "level": "V0"})


def test_what_is_wrong_is_said(files: Path) -> None:
    with pytest.raises(OptionError, match="level='V4' is not valid; choose one of V0, V1, V2"):
        souffle.learn("mmoe.onnx", out="p.safetensors", level="V4")
    with pytest.raises(OptionError, match=r'give fusion="learned" with it'):
        souffle.compile("mmoe.onnx", target="cuda", policy="p.safetensors")
    for library in LIBRARIES:
        pytest.importorskip(library)
    (files / "text.safetensors").write_text("no policy")
    with pytest.raises(PolicyError, match=r"text\.safetensors: no policy of Souffle, or a damaged one"):
        souffle.compile("mmoe.onnx", **FUSED, policy="text.safetensors")
    with pytest.raises(PolicyError, match=r"none\.safetensors: the policy cannot be read"):
        souffle.learn("mmoe.onnx", out="p.safetensors", start="none.safetensors")
    with pytest.raises(OptionError, match="1 graphs, 1 evaluations of each: training needs"):
        souffle.learn("mmoe.onnx", out="p.safetensors", evaluations=1)


def test_a_policy_is_trained_and_orders_the_fusions_of_another_network(files: Path, capsys) -> None:
    for library in LIBRARIES:
        pytest.importorskip(library)
    command = ["learn", "mmoe.onnx", "var-encoder.onnx", "-o", "p.safetensors", "--seed", "3", "--quiet"]
    assert main([*command, "--evaluations", "48", "--curves", "curves.svg", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in report["graphs"]] == ["mmoe", "var-encoder"] and report["updates"] == 3
    for one in report["graphs"]:
        assert one["best_seconds"] < one["unfused_seconds"] and one["evaluations"] == 48
    assert "<svg" in Path("curves.svg").read_text() and Path("p.safetensors.checkpoint").exists()

    # More evaluations go on from the checkpoint, to the same bits as at once.
    assert main([*command, "--evaluations", "80"]) == 0
    told = capsys.readouterr().out
    assert "souffle compile MODEL --fusion learned --policy p.safetensors" in told and "5 updates" in told
    souffle.learn(["mmoe.onnx", "var-encoder.onnx"], out="q.safetensors", seed=3, evaluations=80)
    assert Path("p.safetensors").read_bytes() == Path("q.safetensors").read_bytes()

    # What may be fused is what was in the training.
    souffle.learn("mmoe.onnx", out="two.safetensors", evaluations=16, limit=2)
    graph = graph_of(souffle.import_onnx("mmoe.onnx"))
    plan = planners.LearnedFusion().plan(FusionRequest(graph, cost_device("A100-SXM4-40GB"), "two.safetensors"))
    assert max(map(len, plan.patterns)) == 2

    model = models.build("nmt")
    network = souffle.compile(model, **FUSED, level="V0", policy="p.safetensors", verify="values")
    assert network.certificate.verdict == PROVEN
    assert any("a policy, 64 orders tried" in one.subject for one in network.plan.decisions)
    inputs = models.random_inputs(model, seed=1)
    found = {name: np.asarray(value) for name, value in network(inputs).items()}
    assert compare(found, onnxruntime_outputs(model, inputs), "fp32").ok


def test_the_policy_that_ships_is_one_of_these_features() -> None:
    """Its parameters are read as any other file's, and it is for the rules that planners have by default."""
    assert planners.SHIPPED.exists() and planners.SHIPPED.stat().st_size < 700_000
    for library in LIBRARIES[:3]:
        pytest.importorskip(library)
    stored = learning.load_policy(planners.SHIPPED, len(souffle.stitching.priority.FEATURES))
    assert planners.trained_rules(stored.provenance) == FusionRules() and len(stored.provenance["graphs"]) > 8
