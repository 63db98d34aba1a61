"""Whole networks whose outputs are as long as data makes them, wherever and however they run."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import souffle
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle import onnx_backend
from souffle.cli import main
from souffle.codegen.plan import Plan
from souffle.counted_axes import cut
from souffle.debug.bisect import bisect
from souffle.errors import ArtifactError, DeviceError, InputError, OptionError
from souffle.runtime import DeviceArray, Network, dlpack
from souffle.runtime.archive import COUNTED
from souffle.runtime.artifact import describe
from tests.frontend.support import assert_same, model_of, reference
from tests.runtime.plans import cooperative_plan, machine_code
from tests.runtime.played import on_device

F = "float32"
HOST = {"target": "cpu"}
TEXT = {"target": "cuda", "arch": "sm_90", "device": "cpu", "cubin": False}
node = helper.make_node


def detector(boxes: int = 13, classes: int = 2, most: int = 3) -> onnx.ModelProto:
    """Boxes [boxes, 4] and scores of each class: those that are left, with score and class, and how many they are."""
    nodes = [
        node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["selected"], "nms"),
        node("Gather", ["selected", "two"], ["places"], axis=1),
        node("Slice", ["selected", "one", "two1", "one"], ["class"]),
        node("Gather", ["boxes", "places"], ["chosen"], axis=1),
        node("Squeeze", ["chosen", "zero"], ["corners"]),
        node("GatherND", ["scores", "selected"], ["score"]),
        node("Unsqueeze", ["score", "one"], ["column"]),
        node("Cast", ["class"], ["number"], to=1),
        node("Concat", ["corners", "column", "number"], ["found"], axis=1),
        node("Shape", ["selected"], ["shape"]),
        node("Gather", ["shape", "first"], ["amount"]),
    ]
    constants = {
        "most": np.array([most]), "overlap": np.array([0.4], F), "least": np.array([0.3], F), "two": np.array(2),
        "one": np.array([1]), "two1": np.array([2]), "zero": np.array([0]), "first": np.array(0),
    }  # fmt: skip
    inputs = {"boxes": (F, (1, boxes, 4)), "scores": (F, (1, classes, boxes))}
    return model_of(nodes, inputs, ["found", "class", "amount"], constants)


def scenes(boxes: int = 13, classes: int = 2) -> list[dict[str, np.ndarray]]:
    """Inputs of :func:`detector`: any, ties, boxes that are all the same, none, scores that are NaN."""
    rng = np.random.default_rng(boxes)
    feeds = []
    for kind in ("any", "ties", "same", "none", "nan"):
        corners, scores = rng.random((1, boxes, 4)).astype(F), rng.random((1, classes, boxes)).astype(F)
        if kind == "ties":
            scores = np.round(scores * 2) / 2
        if kind == "same":
            corners[:] = [0, 0, 1, 1]
        if kind == "none":
            scores[:] = 0
        if kind == "nan":
            scores[0, 0, ::2] = np.nan
        feeds.append({"boxes": corners, "scores": scores})
    return feeds


def selector(rows: int = 7, name: int | str | None = None) -> onnx.ModelProto:
    """What is above one of x [rows, 3]: where, its values, and which rows have any of it."""
    nodes = [
        node("Greater", ["x", "most"], ["above"]),
        node("NonZero", ["above"], ["where"], "where"),
        node("Transpose", ["where"], ["places"]),
        node("GatherND", ["x", "places"], ["values"]),
        node("Split", ["where", "halves"], ["row", "column"], axis=0),
        node("Squeeze", ["row", "zero"], ["rows"]),
        node("Gather", ["x", "rows"], ["picked"], axis=0),
        node("Exp", ["picked"], ["result"]),
    ]
    constants = {"most": np.array(1, F), "halves": np.array([1, 1]), "zero": np.array([0])}
    return model_of(nodes, {"x": (F, (name or rows, 3))}, ["where", "values", "result"], constants)


def rows_of(rows: int = 7) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(rows)
    return [{"x": (rng.random((rows, 3)) + part).astype(F)} for part in (-1, 0.5, 2)]


CASES = {"detector": (detector(), scenes()), "selector": (selector(), rows_of()), "one": (selector(1), rows_of(1))}


def agrees(network: Any, case: str) -> None:
    model, feeds = CASES[case]
    for feed in feeds:
        assert_same(network(feed), reference(model, feed))


@pytest.fixture(scope="module")
def text() -> Network:
    return souffle.compile(detector(), **TEXT)


@pytest.fixture(scope="module")
def host() -> Any:
    return souffle.compile(selector(), **HOST)


def test_the_processor_and_the_text_give_what_onnx_runtime_gives(text: Network, host: Any) -> None:
    agrees(text, "detector")
    agrees(text.on("cpu", checked=True, order="shuffled"), "detector")
    agrees(host, "selector")
    assert text.certificate.verdict == "PROVEN"
    assert [str(spec) for spec in text.outputs] == [
        "'found' (float32 <=6 x 6)",
        "'class' (int64 <=6 x 1)",
        "'amount' (int64 scalar)",
    ]
    assert [spec.shape for spec in host.outputs] == [(2, 21), (21,), (21, 3)]
    assert [spec.counted for spec in host.outputs] == [(1,), (0,), (0,)]


def test_arrays_of_the_caller_are_for_outputs_of_fixed_extents(text: Network) -> None:
    model, feeds = CASES["detector"]
    amount = np.array(-1, np.int64)
    found = text(feeds[0], out={"amount": amount})
    assert found["amount"] is amount
    assert_same(found, reference(model, feeds[0]))
    with pytest.raises(InputError, match=r"out= for 'found'.*data decides how long it is, 'found' \(float32 <=6 x 6\)"):
        text(feeds[0], out={"found": np.zeros((6, 6), F)})
    with pytest.raises(InputError, match="data decides how long its output 'found'"):
        text.bind()


@pytest.mark.parametrize(("case", "level", "target"), [("one", "V1", TEXT), ("one", "V0", HOST)])
def test_levels_and_extents_of_one(case: str, level: str, target: dict) -> None:
    agrees(souffle.compile(CASES[case][0], level=level, **target), case)


def test_a_bisection_compares_what_is_there() -> None:
    assert bisect(selector(), level="V1").wrong is None


def test_files_say_that_they_have_counts(text: Network, tmp_path: Path) -> None:
    text.save(tmp_path / "net.souffle")
    assert describe(tmp_path / "net.souffle").format == COUNTED


def test_files_copies_and_pickles_keep_the_counts(text: Network, host: Any, tmp_path: Path) -> None:
    for network, case in ((text, "detector"), (host, "selector")):
        file = tmp_path / f"{case}.souffle"
        network.save(file)
        loaded = souffle.load(file, device="cpu") if network is text else souffle.load(file)
        assert loaded.outputs == network.outputs
        agrees(loaded, case)
        agrees(pickle.loads(pickle.dumps(network)), case)
        agrees(copy.copy(network), case)


@pytest.mark.parametrize("counts", [[[0, "nobody"]], [[2, "found#0"]], [[0, "class"]], [["0", "found#0"]], [7], 7])
def test_a_file_with_wrong_counts_is_refused(text: Network, tmp_path: Path, counts: Any) -> None:
    file, wrong = tmp_path / "right.souffle", tmp_path / "wrong.souffle"
    text.save(file)
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    plan = json.loads(members["plan.json"])
    (found,) = [buffer for buffer in plan["buffers"] if buffer["label"] == "found"]
    assert found["counts"] == [[0, "found#0"]]
    found["counts"] = counts
    rewrite(members, plan, wrong)
    with pytest.raises(ArtifactError):
        souffle.load(wrong, device="cpu")


def rewrite(members: dict[str, bytes], plan: Any, path: Path) -> None:
    """A file of other content whose sums are right."""
    members["plan.json"] = json.dumps(plan).encode()
    manifest = json.loads(members["manifest.json"])
    entry = manifest["members"]["plan.json"]
    entry.update(sha256=hashlib.sha256(members["plan.json"]).hexdigest(), size=len(members["plan.json"]))
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_versions_and_networks_together(host: Any) -> None:
    versions = souffle.compile(selector(name="n"), dims={"n": [2, 5]}, **HOST)
    for rows in (2, 5):
        for feed in rows_of(rows):
            assert_same(versions(feed), reference(selector(rows), feed))
    with pytest.raises(OptionError, match="the data decides how long output 'where' is"):
        souffle.compile(selector(name="n"), dims={"n": [2]}, pad=["n"], **HOST)
    programs = {"a": souffle.import_onnx(selector()), "b": souffle.import_onnx(selector(1))}
    both = souffle.compile(souffle.together(programs), **HOST)
    feed = {"a.x": rows_of()[1]["x"], "b.x": rows_of(1)[2]["x"]}
    found = both(feed)
    assert list(found) == [f"{part}.{name}" for part in "ab" for name in ("where", "values", "result")]
    wanted = reference(selector(1), {"x": feed["b.x"]})
    assert_same({name: found[f"b.{name}"] for name in wanted}, wanted)
    assert found["a.values"].shape == (int((feed["a.x"] > 1).sum()),)


def test_the_backend_and_the_command_line(host: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    feed = rows_of()[1]
    wanted = reference(selector(), feed)
    assert_same(onnx_backend.prepare(selector()).run([feed["x"]])._asdict(), wanted)
    model, file, given, made = (tmp_path / name for name in ("m.onnx", "m.souffle", "x.npy", "y.npz"))
    onnx.save(selector(), model)
    host.save(file)
    np.save(given, feed["x"])
    assert main.main(["run", str(file), "--input", f"x={given}", "--output", str(made), "--quiet"]) == 0
    assert_same(dict(np.load(made)), wanted)
    np.save(given, np.zeros((7, 3), F))
    assert main.main(["run", str(file), "--input", f"x={given}", "--quiet"]) == 0
    assert "2x0" in capsys.readouterr().out
    assert main.main(["check", str(model), "--levels", "V2", "--quiet"]) == 0
    assert "ok" in capsys.readouterr().out


@pytest.mark.parametrize("graph", [False, True])
def test_what_stays_on_a_gpu_is_as_long_as_the_device_counted(text: Network, graph: bool) -> None:
    plan, driver = played(text.plan)
    network = Network(plan, driver=driver, graph=graph, poison=True)
    for feed in CASES["detector"][1]:
        wanted = reference(detector(), feed)
        assert_same(network(feed), wanted)
        found = network({name: on_device(array, driver) for name, array in feed.items()})
        assert all(isinstance(array, DeviceArray) for array in found.values())
        assert found["found"].shape == wanted["found"].shape and found["found"].room == (6, 6)
        assert_same({name: array.numpy() for name, array in found.items()}, wanted)


def test_a_part_of_a_row_is_lent_with_strides() -> None:
    plan, driver = played(souffle.compile(selector(), **TEXT, level="V2").plan)
    network, feed = Network(plan, driver=driver), rows_of()[1]
    where = network(on_device(feed["x"], driver))["where"]
    count = int((feed["x"] > 1).sum())
    assert (where.shape, where.room, where.nbytes) == ((2, count), (2, 21), 2 * count * 8)
    np.testing.assert_array_equal(where.numpy(), np.stack(np.nonzero(feed["x"] > 1)))
    tensor = dlpack.read(where, 1)
    assert tensor.shape == (2, count) and not tensor.contiguous


def played(plan: Plan) -> tuple[Plan, RehearsalDriver]:
    """A plan with machine code, and a driver that knows it and what :func:`on_device` runs."""
    plan = replace(plan, modules=tuple(replace(m, cubin=machine_code(m.text)) for m in plan.modules))
    known = (*plan.modules, *cooperative_plan().modules)
    return plan, RehearsalDriver({module.cubin: module.text for module in known})


def test_a_count_that_is_none_is_an_error() -> None:
    outputs = {"y": np.zeros((3, 2)), "n": np.array(4)}
    with pytest.raises(DeviceError, match="output 'y' has room for 3 along axis 0, and the network counted 4"):
        cut(outputs, {"y": ((0, "n"),)})
    with pytest.raises(DeviceError, match="counted -1"):
        cut({**outputs, "n": np.array(-1)}, {"y": ((0, "n"),)})
