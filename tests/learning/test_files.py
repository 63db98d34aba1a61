"""Files of policies and checkpoints: what was written comes back, and anything else is refused with a reason."""

from __future__ import annotations

import json
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("safetensors")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from souffle.learning import Policy, PolicyConfig, PolicyError, PpoConfig, load_policy, save_policy, train  # noqa: E402
from tests.learning.toys import Chain, Toy, graph  # noqa: E402

SIZES = PolicyConfig(2, width=8, graph_layers=1, attention_layers=1, heads=2, levels=8)
PROVENANCE = {"graphs": {"chain": 16}, "updates": 3}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    save_policy(tmp_path / "a.safetensors", Policy(SIZES, seed=1), PROVENANCE)
    return tmp_path / "a.safetensors"


def altered(path: Path, tensors: dict | None = None, **values: object) -> Path:
    """A file with other metadata or tensors, which safetensors itself is content with."""
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["souffle"]) | values
        found = {name: file.get_tensor(name).clone() for name in file.keys()} | (tensors or {})  # noqa: SIM118
    save_file(
        {name: value for name, value in found.items() if value is not None}, path, {"souffle": json.dumps(metadata)}
    )
    return path


def test_a_policy_comes_back(stored: Path) -> None:
    found = load_policy(stored, features=2)
    assert found.provenance == PROVENANCE and found.policy.config == SIZES
    own = Policy(SIZES, seed=1).state_dict()
    assert all(torch.equal(value, own[name]) for name, value in found.policy.state_dict().items())
    before = stored.read_bytes()
    save_policy(stored, found.policy, found.provenance)
    assert stored.read_bytes() == before
    assert os.listdir(stored.parent) == [stored.name]


def test_the_default_policy_is_a_small_file(tmp_path: Path) -> None:
    save_policy(tmp_path / "a", Policy(PolicyConfig(32)), PROVENANCE)
    assert (tmp_path / "a").stat().st_size < 600_000


def test_other_features_are_refused(stored: Path) -> None:
    with pytest.raises(PolicyError, match=r"knows 2 features of a vertex, and 5 are given; .* train one again"):
        load_policy(stored, features=5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": 2}, "format 2 of another version of Souffle, which reads 1"),
        ({"kind": "checkpoint"}, "a 'checkpoint' and no policy"),
        ({"policy": {**SIZES.as_json(), "width": 10**12}}, "width of a policy is 1000000000000, and should be an int"),
        ({"policy": {**SIZES.as_json(), "segment": 10**9}}, "segment of a policy"),
        ({"policy": {**SIZES.as_json(), "width": True}}, "width of a policy is True"),
        ({"policy": {**SIZES.as_json(), "width": 256}}, r"and its policy has torch.float32 \("),
        ({"policy": {**SIZES.as_json(), "graph_layers": 8}}, "the parameter graph.1.* is missing"),
        ({"policy": {**SIZES.as_json(), "graph_layers": 0}}, "the parameter graph.0.* is not one of its policy"),
        ({"policy": {"width": 8}}, "should have attention_layers, features"),
        ({"policy": [1]}, "should have attention_layers, features"),
        ({"provenance": None}, "does not say where the policy comes from"),
    ],
)
def test_metadata_that_are_not_those_of_the_policy_are_refused(stored: Path, values: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(altered(stored, **values))


def test_parameters_that_are_not_those_of_the_policy_are_refused(stored: Path) -> None:
    bias = torch.zeros(8)
    for value, message in (
        (bias.double(), "head.bias is torch.float64"),
        (bias[:7], r"head.bias is torch.float32 \(7,\), and its policy has torch.float32 \(8,\)"),
        (bias + float("nan"), "no finite numbers"),
        (None, "head.bias is missing"),
    ):
        with pytest.raises(PolicyError, match=message):
            load_policy(altered(stored, {"head.bias": value}))


class _Mine:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_a_pickled_file_is_refused_and_its_code_does_not_run(tmp_path: Path) -> None:
    torch.save(_Mine(tmp_path / "ran"), tmp_path / "a")
    (tmp_path / "b").write_bytes(pickle.dumps(_Mine(tmp_path / "ran")))
    for name in ("a", "b"):
        with pytest.raises(PolicyError, match="no policy of Souffle, or a damaged one"):
            load_policy(tmp_path / name)
        with pytest.raises(PolicyError, match="no checkpoint of Souffle, or a damaged one"):
            train(Policy(SIZES), [Chain(5, 0)], checkpoint=tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot be read: .*No such file"):
        load_policy(tmp_path / "none")
    with pytest.raises(PolicyError, match=r"no policy|cannot be read"):
        load_policy(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(PolicyError, match="Souffle did not write this file"):
        load_policy(tmp_path / "foreign")
    for text in ("[" * 100_000, "3", "{}", "9" * 10_000):
        save_file({"a": torch.zeros(2)}, tmp_path / "foreign", {"souffle": text})
        with pytest.raises(PolicyError, match=r"did not write|does not say what it holds"):
            load_policy(tmp_path / "foreign")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PolicyError, match="too many for a policy"):
        load_policy(tmp_path / "large")
    with pytest.raises(PolicyError, match="cannot be written"):
        save_policy(tmp_path / "foreign" / "a", Policy(SIZES), {})


def test_damaged_files_load_or_are_refused(stored: Path) -> None:
    content = stored.read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.choice([rng.randrange(len(content)), rng.randrange(8), rng.randrange(600)])] = rng.randrange(
                256
            )
        stored.write_bytes(damaged[: rng.choice([len(content), rng.randrange(len(content))])])
        try:
            load_policy(stored)
        except PolicyError as error:
            assert str(stored) in str(error)
            refused += 1
    assert refused > 50


CONFIG = PpoConfig(updates=2, draws=4)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    train(Policy(SIZES), [Chain(5, 0)], CONFIG, checkpoint=tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_of_another_training_is_refused(checkpoint: Path) -> None:
    other_graph = Toy(graph(np.ones((5, 2)), [], name="chain 0"), Chain(5, 0).baseline_seconds, lambda priorities: 1.0)
    for policy, environment, config, message in (
        (Policy(replace(SIZES, levels=4)), Chain(5, 0), CONFIG, "its policy are not"),
        (Policy(SIZES, seed=7), Chain(5, 0), CONFIG, "its first parameters are not"),
        (Policy(SIZES), other_graph, CONFIG, "its graphs are not"),
        (Policy(SIZES), Chain(5, 0), replace(CONFIG, clip=0.1), "its hyperparameters are not"),
    ):
        with pytest.raises(PolicyError, match=f"{message} the same; delete it"):
            train(policy, [environment], config, checkpoint=checkpoint)
    with pytest.raises(PolicyError, match="a 'checkpoint' and no policy"):
        load_policy(checkpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("history", torch.zeros(2, 3)),
        ("history", torch.full((2, 10), 7.0)),
        ("history", None),
        ("generator", torch.zeros(3)),
        ("generator", torch.zeros(3, dtype=torch.uint8)),
        ("adam.0.exp_avg", torch.zeros(3)),
        ("adam.0.exp_avg", None),
        ("adam.x.exp_avg", torch.zeros(3)),
        ("best.7", torch.zeros(3)),
        ("policy.head.bias", torch.zeros(3)),
    ],
)
def test_a_damaged_checkpoint_is_refused(checkpoint: Path, name: str, value: object) -> None:
    with pytest.raises(PolicyError, match=r"damaged"):
        train(Policy(SIZES), [Chain(5, 0)], replace(CONFIG, updates=3), checkpoint=altered(checkpoint, {name: value}))


def test_who_interrupts_the_writing_finds_the_file_before(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoint.read_bytes()

    def interrupted(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(Policy(SIZES), [Chain(5, 0)], replace(CONFIG, updates=5), checkpoint=checkpoint, every=1)
    assert checkpoint.read_bytes() == before and os.listdir(checkpoint.parent) == [checkpoint.name]
    trained = train(Policy(SIZES), [Chain(5, 0)], replace(CONFIG, updates=5), checkpoint=checkpoint, every=1)
    assert [row.update for row in trained.history] == [0, 1, 2, 3, 4]
