"""The data of a report: of the shape that is described, and in agreement with the plan and with itself."""

from __future__ import annotations

import json
import subprocess
import sys
import types
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import souffle
from souffle import models
from souffle.errors import ArtifactError, OptionError
from souffle.options import LateHook
from souffle.report import FORMAT, Report, report_of
from souffle.runtime import artifact
from souffle.runtime.explain import predicted_seconds
from souffle.runtime.plan_json import plan_to_json
from tests.report.networks import plan_of
from tests.runtime.plans import cooperative_plan


def relu() -> onnx.ModelProto:
    """One operator, of which a dimension is open."""
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }'
    )


# Compiled once, by one worker.
pytestmark = pytest.mark.xdist_group("reports")

NETWORKS = [("deep", "V3"), ("mmoe", "V4"), ("mmoe", "V2")]


@pytest.fixture(params=NETWORKS, ids=" ".join)
def plan(request: pytest.FixtureRequest):
    return plan_of(*request.param)


def conforms(value: Any, kind: Any, where: str) -> None:
    """Fail unless a value is of a type, all the way down."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        assert isinstance(value, dict) and value.keys() == hints.keys(), where
        for key, of in hints.items():
            conforms(value[key], of, f"{where}.{key}")
    elif origin is types.UnionType:
        assert any(value is None if of is type(None) else _is(value, of, where) for of in inner), f"{where}: {value!r}"
    elif origin is list:
        assert isinstance(value, list), where
        for number, one in enumerate(value):
            conforms(one, inner[0], f"{where}[{number}]")
    elif origin is tuple:
        assert len(value) == len(inner), where
        for number, of in enumerate(inner):
            conforms(value[number], of, f"{where}[{number}]")
    elif origin is dict:
        assert isinstance(value, dict), where
        for key, one in value.items():
            conforms(key, inner[0], where)
            conforms(one, inner[1], f"{where}[{key!r}]")
    else:
        assert type(value) is kind or (kind is float and type(value) is int), f"{where}: {value!r} is no {kind}"


def _is(value: Any, kind: Any, where: str) -> bool:
    try:
        conforms(value, kind, where)
    except AssertionError:
        return False
    return True


def test_it_is_what_the_schema_says(plan) -> None:
    report = report_of(plan)
    conforms(report, Report, "report")
    assert report["format"] == FORMAT
    again = json.loads(json.dumps(report, allow_nan=False))
    assert again == json.loads(json.dumps(report_of(plan), allow_nan=False))


def test_a_changed_type_does_not_conform(plan) -> None:
    report = report_of(plan)
    report["stages"][-1]["tiles"] = "many"
    assert not _is(report, Report, "report")
    del report["stages"]
    assert not _is(report, Report, "report")


def test_bytes_of_tensors_and_stages_are_those_of_launches(plan) -> None:
    report = report_of(plan)
    for read, total in (("read", "bytes_read"), ("written", "bytes_written")):
        of_launches = sum(getattr(launch, total) for launch in plan.launches)
        assert sum(tensor[read] for tensor in report["tensors"]) == of_launches == report["levels"][0][total] > 0
        for launch in report["launches"]:
            touched = [one for stage in launch["stages"] for one in report["stages"][stage]["touched"]]
            assert sum(one["bytes"] for one in touched if one["written"] is (read == "written")) == launch[total]


def test_stages_are_in_launches_in_order_with_all_tes(plan) -> None:
    report = report_of(plan)
    places = [stage for launch in report["launches"] for stage in launch["stages"]]
    assert places == list(range(len(report["stages"])))
    for number, launch in enumerate(plan.launches):
        own = [report["stages"][stage] for stage in report["launches"][number]["stages"]]
        assert tuple(te for stage in own for te in stage["tes"]) == launch.tes
        assert all(stage["name"] == stage["tes"][-1] for stage in own)
        assert {f for stage in own for f in stage["functions"]} == set(plan.kernels[launch.kernel].stages)


def test_what_a_stage_needs_is_what_makes_its_tensors(plan) -> None:
    report = report_of(plan)
    links = 0
    for place, stage in enumerate(report["stages"]):
        assert all(maker < place for maker in stage["needs"])
        assert all(report["stages"][maker]["loop"] == stage["loop"] is not None for maker in stage["needs_before"])
        needed = {*stage["needs"], *stage["needs_before"]}
        for one in stage["touched"]:
            makers = report["tensors"][one["tensor"]]["makers"]
            if not one["written"]:
                assert needed >= {maker for maker in makers if maker < place}
                links += len(makers)
            else:
                assert place in makers
    assert links


def test_waits_are_those_that_the_kernel_has(plan) -> None:
    report = report_of(plan)
    for number, kernel in enumerate(plan.kernels):
        waits = [w for w in report["waits"] if report["launches"][w["launch"]]["kernel"] == number]
        assert sum(wait["runs"] for wait in waits if wait["scope"] == "grid") == kernel.grid_syncs
        assert sum(wait["seconds"] for wait in waits) == pytest.approx(kernel.predicted.sync_seconds)
        for wait in waits:
            before, after = report["stages"][wait["before"]], report["stages"][wait["after"]]
            assert before["launch"] == after["launch"] == wait["launch"]
            if wait["place"] == "before":
                assert wait["after"] < wait["at"] == wait["before"]
                reads = [one["tensor"] for one in before["touched"] if not one["written"]]
                assert wait["tensor"] in reads
            else:
                assert report["stages"][wait["at"]]["loop"] is not None


def test_a_loop_waits_between_its_steps() -> None:
    report = report_of(plan_of("deep", "V3"))
    (loop,) = report["loops"]
    steps = [wait for wait in report["waits"] if wait["place"] == "steps"]
    assert [wait["at"] for wait in steps] == [loop["stages"][0]]
    # What a step hands to the next has another name in the step that reads it.
    assert all(wait["tensor"] is not None for wait in report["waits"])
    makers = report["tensors"][steps[0]["tensor"]]["makers"]
    assert set(makers) & set(loop["stages"]) and steps[0]["after"] in makers
    inside = [report["stages"][stage] for stage in loop["stages"]]
    assert all(stage["runs"] == loop["steps"] > 1 for stage in inside)
    assert any(stage["needs_before"] for stage in inside)


def test_the_parts_of_the_time_are_the_whole(plan) -> None:
    report = report_of(plan)
    for launch in report["launches"]:
        kernel = report["kernels"][launch["kernel"]]
        stages = sum(report["stages"][stage]["seconds"] for stage in launch["stages"])
        parts = stages + kernel["launch_seconds"] + kernel["wait_seconds"] + kernel["code_seconds"]
        assert parts == pytest.approx(kernel["seconds"])
    level = report["levels"][0]
    assert level["predicted_seconds"] == pytest.approx(predicted_seconds(plan))
    assert sum(level["bound_seconds"].values()) == pytest.approx(sum(s["seconds"] for s in report["stages"]))


def test_each_decision_is_told_where_it_names_a_stage(plan) -> None:
    report = report_of(plan)
    assert [tuple(one) for one in report["decisions"]] == [tuple(one) for one in plan.decisions]
    for number, decision in enumerate(plan.decisions):
        for stage in report["stages"]:
            if decision.subject == stage["name"]:
                assert number in stage["decisions"]
    assert all(number < len(plan.decisions) for stage in report["stages"] for number in stage["decisions"])
    named = {number for stage in report["stages"] for number in stage["decisions"]}
    # Those on TEs that others took in, as horizontal and vertical transformations did, name no stage.
    assert {"schedule", "tuning"} <= {plan.decisions[number].stage for number in named}


def test_a_saved_network_has_the_same_report(plan, tmp_path: Path) -> None:
    artifact.save(plan, tmp_path / "net.souffle")
    written = souffle.write_report(tmp_path / "net.souffle", tmp_path / "net.html")
    assert json.dumps(written) == json.dumps(report_of(plan))
    with pytest.raises(OptionError, match="arch is for a model"):
        souffle.write_report(tmp_path / "net.souffle", tmp_path / "net.html", arch="sm_80")


def test_levels_side_by_side(tmp_path: Path) -> None:
    options = {"arch": "sm_90", "cubin": False, "device": "cpu"}
    model = models.build("mmoe", "tiny")
    report = souffle.write_report(model, tmp_path / "mmoe.html", levels=["V4", "V2"], **options)
    conforms(report, Report, "report")
    assert [level["level"] for level in report["levels"]] == ["V2", "V4"] and report["shown"] == "V4"
    assert [level["kernels"] for level in report["levels"]] == [len(plan_of("mmoe", n).kernels) for n in ("V2", "V4")]
    tes = {te for stage in report["stages"] for te in stage["tes"]}
    assert tes == report["tes"].keys() and all(one["text"] and one["origin"] for one in report["tes"].values())
    # Tensors inside of a stage are none that stages touch.
    touched = {tensor["name"] for tensor in report["tensors"]}
    inside = {name for one in report["tes"].values() for name, _ in one["inside"]}
    assert inside and not inside & touched
    with pytest.raises(OptionError, match="'V5' is not one of V0"):
        souffle.write_report(model, tmp_path / "mmoe.html", levels=["V5"], **options)
    with pytest.raises(OptionError, match="needs a level"):
        souffle.write_report(model, tmp_path / "mmoe.html", levels=[], **options)


def test_what_stays_in_shared_memory_is_told() -> None:
    """Against the windows of the merged kernel, which the plan does not keep."""
    seen: list[Any] = []
    stages: list[str] = []

    def hook(stage: str, result: object) -> object:
        stages.append(stage)
        seen.append(result) if stage == "merge" else None
        return result

    net = souffle.compile(
        models.build("mmoe", "tiny"), target="cuda", arch="sm_90", cubin=False, device="cpu", hook=LateHook(hook)
    )
    # What comes late is all that it is asked about, and it changes nothing.
    assert stages == ["partition", "merge", "text"]
    assert plan_to_json(net.plan) == plan_to_json(plan_of("mmoe", "V4"))
    report = report_of(net.plan)
    windows = {
        (stage.name, tensor.name)
        for launch in seen[-1].launches
        for stage in launch.stages
        for tensor, _ in stage.windows
    }
    found = {
        (stage["name"], report["tensors"][one["tensor"]]["name"])
        for stage in report["stages"]
        for one in stage["touched"]
        if one["where"] == "shared"
    }
    assert found == windows != set()
    assert sum(tensor["near"] for tensor in report["tensors"]) == len(found)


def test_what_has_no_report_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="compile the model again"):
        report_of(cooperative_plan())
    model = relu()
    host = souffle.compile(model, dims={"n": 1}, target="cpu").plan
    with pytest.raises(OptionError, match="CUDA"):
        report_of(host)
    plan = plan_of("mmoe", "V4")
    with pytest.raises(ArtifactError):
        report_of(replace(plan, dataflow=None))
    versions = {"dims": {"n": [1, 2]}, "cubin": False, "device": "cpu"}
    with pytest.raises(OptionError, match="one version"):
        souffle.write_report(model, tmp_path / "relu.html", levels=["V0"], arch="sm_90", **versions)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="no/such is not a folder"):
        souffle.write_report(model, tmp_path / "no/such/relu.html")
    with pytest.raises(OptionError, match="it is a folder"):
        souffle.write_report(model, tmp_path)


def test_resources_are_held_against_the_device() -> None:
    """As nvcc would report them: the room of each resource, of which the least counts."""
    plan = plan_of("mmoe", "V4")
    kernel = replace(plan.kernels[0], resources=cooperative_plan().kernels[0].resources)
    report = report_of(replace(plan, kernels=(kernel,)))
    room = report["kernels"][0]["room"]
    assert set(room) == {"registers", "shared memory", "threads", "block slots"}
    # 24 registers of 256 threads: 65536 // (24 * 32 rounded up to 768) = 85 warps, 84 of four schedulers, 10 blocks.
    assert room["registers"] == 10 and room["threads"] == 2048 // 256
    assert np.isclose(report["device"]["shared_bytes_of_block"], 227 * 1024)


_BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tvm", "tvm_ffi", "onnx", "islpy"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from souffle.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_needs_no_compiler_for_a_saved_network(tmp_path: Path) -> None:
    plan = plan_of("mmoe", "V4")
    artifact.save(plan, tmp_path / "net.souffle")
    command = [sys.executable, "-c", _BLOCKED, "report", str(tmp_path / "net.souffle"), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(souffle.__file__).parents[1])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["report"] == json.loads(json.dumps(report_of(plan)))
    page = (tmp_path / "net.html").read_bytes()
    assert said["file"] == str(tmp_path / "net.html") and said["bytes"] == len(page)
    assert page.startswith(b"<!DOCTYPE html>") and plan.kernels[0].name.encode() in page
