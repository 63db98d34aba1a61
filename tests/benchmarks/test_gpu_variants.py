"""What a GPU host is asked about is what the compiler has: its levels, switches, planners and values of options."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")
from benchmarks import gpu_build_network, gpu_networks, gpu_steps, gpu_variants
from benchmarks.gpu_variants import ROWS_OF_THEIR_OWN, all_variants, chosen_variants, file_name, words_of
from souffle.evaluation.ablation import Variant
from souffle.options import CHOICES, LEVELS, SWITCHES, Options
from souffle.partition.registry import PLANNERS
from souffle.stitching import FUSION_PLANNERS
from tests.thorough import some

_NO_VARIANTS = {
    "arch": "what the GPU is", "policy": "a file", "tuning_log": "a file", "cache_dir": "a folder",
    "cubin": "a GPU runs nothing else", "watchdog_ms": "a time limit, for services", "threads": "of the processor",
    "processor": "of what is no GPU",
}  # fmt: skip
"""Options of which nothing is compiled for a GPU host beside the usual, and why."""


def test_every_choice_of_the_compiler_is_a_variant() -> None:
    words = {word for variant in all_variants() for word in words_of(variant)}
    assert {variant.level for variant in all_variants() if not words_of(variant)} == set(LEVELS)
    assert {f"disable={name}" for name in SWITCHES} <= words
    assert {f"fusion={name}" for name in FUSION_PLANNERS} <= words
    usual = Options()
    for field in dataclasses.fields(Options):
        if field.name in (*ROWS_OF_THEIR_OWN, *_NO_VARIANTS):
            assert field.name not in words
            continue
        assert field.name in words, f"{field.name} is compiled for no GPU: name it in _NO_VARIANTS with the reason"
        lists = {**CHOICES, "partition": tuple(PLANNERS)}
        values = [value for value in lists.get(field.name, ()) if value != getattr(usual, field.name)]
        assert {f"{field.name}={value}" for value in values} <= words


def test_a_new_switch_planner_or_value_is_there_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_variants, "SWITCHES", (*SWITCHES, "new-switch"))
    monkeypatch.setitem(FUSION_PLANNERS, "new-planner", object())
    monkeypatch.setitem(CHOICES, "waits", (*CHOICES["waits"], "new-wait"))
    labels = [variant.label for variant in all_variants()]
    assert {"V0, new-planner", "V4, new-planner", "V4, waits=new-wait", "V4 without new-switch"} <= set(labels)
    assert len(labels) == len(set(labels))


def test_variants_are_valid_options_and_have_names_of_their_own() -> None:
    every = all_variants()
    names = [file_name(variant) for variant in every]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)
    for variant in every:
        made, usual = Options(**variant.options), Options(level=variant.level)
        changed = [f.name for f in dataclasses.fields(Options) if getattr(made, f.name) != getattr(usual, f.name)]
        assert changed == list(words_of(variant)[:1]), variant


def test_words_choose() -> None:
    def labels(levels: tuple[str, ...], *words: str) -> list[str]:
        return [variant.label for variant in chosen_variants(levels, words)]

    assert labels(("V2", "V4")) == ["V2", "V4"]
    waits = ["V4, waits=barriers", "V4, waits=flags"]
    assert labels(("V4",), "disable=teams", "waits") == ["V4", "V4 without teams", *waits]
    assert labels(("V0",), "fusion=tvm", "disable") == ["V0", "V0, tvm"]
    assert chosen_variants(tuple(LEVELS), ("all",)) == all_variants()
    with pytest.raises(ValueError, match="no variant is called waits=none; choose from all, disable, "):
        chosen_variants(("V4",), ("waits=none",))


@pytest.mark.parametrize("name", some(["nonzero"], ["suppression", "batches"]))
def test_what_is_no_network_of_a_paper_is_built_and_checked(name: str, tmp_path: Path) -> None:
    """By the played driver, against ONNX Runtime: outputs as long as data makes them, and several versions."""
    pytest.importorskip("onnxruntime")
    assert name in gpu_networks.NAMES
    files = {"artifact": tmp_path / "net.souffle", "io": tmp_path / "net.npz", "graph": tmp_path / "net.graph.npz"}
    fields = dataclasses.asdict(Variant("V4"))
    stored = {"stored": str(files["artifact"])}
    wanted = [{"variant": fields, "precision": "fp32", "beside_fp32": True, "files": stored}]
    command = [name, "--size", "tiny", "--arch", "sm_90", "--no-cubin", "--wanted", json.dumps(wanted)]
    gpu_build_network.main([*command, "--io", str(files["io"]), "--graph", str(files["graph"])])
    about: dict[str, Any] = json.loads(files["artifact"].with_suffix(".json").read_text())
    assert about["launches"] >= 1 and about["fingerprint"]
    (tmp_path / "tasks.json").write_text(json.dumps([{"name": "net"} | {k: str(p) for k, p in files.items()}]))
    command = ["check", "--rehearse", "--repeats", "2", "--tasks", str(tmp_path / "tasks.json")]
    assert gpu_steps.main([*command, "--json", str(tmp_path / "answer.json")]) == 0
    result = json.loads((tmp_path / "answer.json").read_text())["done"]["net"]
    assert result["ok"] and result["outputs"]
    if name == "batches":
        assert about["versions"] == [[1], [24]] and set(result["outputs"]) == {"0/y", "1/y"} and result["runs"] == 4
        with np.load(files["io"]) as file:
            values = dict(file)
        values["output/1/y"] = values["output/1/y"] + 1
        np.savez(files["io"], **values)
        assert gpu_steps.main([*command, "--json", str(tmp_path / "answer.json")]) == 1, "the second is looked at, too"
    else:
        assert result["out_identical"] is None, "arrays for such outputs cannot be given"
