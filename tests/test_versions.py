"""Networks of several versions: which one a call takes, what is padded, compiled on demand, shared and saved."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import threading
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle import api, models
from souffle.cli import main
from souffle.cli.compare import onnxruntime_outputs
from souffle.dimensions import OpenDimensions
from souffle.errors import ArtifactError, InputError, ModelError, OptionError, SouffleError, UnsupportedOperatorError
from souffle.runtime import Network, VersionedNetwork, describe
from souffle.runtime.shared_constants import SharedConstants, UniqueArrays
from tests.runtime.plans import cooperative_plan
from tests.runtime.played import driver_of, on_device

pytestmark = pytest.mark.sampled(2)

WEIGHT = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
LOWEST = np.float32(-1e30)
HOST = {"target": "cpu"}
TEXT = {"target": "cuda", "arch": "sm_90", "device": "cpu", "cubin": False}
LISTS = {"batch": [1, 3], "seq": [5, 7]}


def attention(outputs: dict[str, list | None] | None = None, seq: int | str = "seq") -> onnx.ModelProto:
    """``y`` of each token is a mean of its sequence's rows, which a mask chooses from; ``s`` are the scores."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Transpose", ["h"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["h", "t"], ["s"]),
        helper.make_node("Unsqueeze", ["m", "one"], ["m1"]),
        helper.make_node("Where", ["m1", "s", "lowest"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "h"], ["y"]),
    ]
    given = {"w": WEIGHT, "one": np.array([1]), "lowest": LOWEST}
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", seq, 6])
    m = helper.make_tensor_value_info("m", TensorProto.BOOL, ["batch", seq])
    outputs = outputs or {"y": ["batch", seq, 6], "s": ["batch", seq, seq]}
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in given.items()]
    graph = helper.make_graph(nodes, "attention", [x, m], made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def relu(*shape: int | str | None, output: list | None = None, **more: list) -> onnx.ModelProto:
    shapes = {"x": shape, **more}
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in shapes.items()]
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, output)
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], name="relu")], "relu", given, [made])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def inputs(batch: int, seq: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([seed, batch, seq])
    mask = generator.random((batch, seq)) < 0.7
    mask[:, 0] = True
    return {"x": generator.standard_normal((batch, seq, 6)).astype(np.float32), "m": mask}


def assert_right(found: dict[str, np.ndarray], given: dict[str, np.ndarray]) -> None:
    h = given["x"].astype(np.float64) @ WEIGHT
    s = h @ h.transpose(0, 2, 1)
    e = np.exp(np.where(given["m"][:, None, :], s, -np.inf) - s.max(-1, keepdims=True))
    expected = {"y": (e / e.sum(-1, keepdims=True)) @ h, "s": s}
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].flags.c_contiguous
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-4)


@cache
def padded() -> VersionedNetwork:
    return souffle.compile(attention(), dims=LISTS, pad=True, **HOST)


@cache
def exact() -> VersionedNetwork:
    return VersionedNetwork(padded().plan.dimensions, padded().versions)


@cache
def text_network() -> VersionedNetwork:
    return souffle.compile(attention(), dims={"batch": 2, "seq": [3, 5]}, **TEXT)


def refused(kind: type[SouffleError], function: Callable[[], object], *says: str) -> None:
    with pytest.raises(kind) as caught:
        function()
    assert type(caught.value) is kind
    for text in says:
        assert text in str(caught.value), str(caught.value)


# values of open dimensions


@pytest.mark.parametrize(
    ("model", "options", "shapes"),
    [
        (relu("b", "s", 4), {"dims": {"b": 2, "s": 3}}, [(2, 3, 4)]),
        (relu("b", "s", 4), {"batch": 2, "dims": {"s": np.int64(3)}}, [(2, 3, 4)]),
        (relu("b", None, z=["b", None]), {"batch": 2, "dims": {"x:1": 3, "z:1": 5}}, [(2, 3), (2, 5)]),
        (relu(-1, 4), {"dims": {"x:0": 7}}, [(7, 4)]),
        (relu("b", "s", z=["s + 2*b", "s // b"]), {"dims": {"b": 2, "s": 5}}, [(2, 5), (9, 2)]),
        (relu("2*b"), {"dims": {"2*b": 6}}, [(6,)]),
        (relu("2*b", z=["b"]), {"batch": 3}, [(6,), (3,)]),
        (relu("batch-size", "s"), {"dims": {"batch-size": 2, "s": 1}}, [(2, 1)]),
        (relu(4, "s"), {"batch": 4, "dims": {"s": 1}}, [(4, 1)]),
    ],
)
def test_values_by_name(model: onnx.ModelProto, options: dict, shapes: list[tuple[int, ...]]) -> None:
    program = souffle.import_onnx(model, **options)
    assert [tensor.shape for tensor in program.inputs] == shapes
    assert program.outputs[0].shape == shapes[0]


@pytest.mark.parametrize(
    ("kind", "model", "options", "says"),
    [
        (ModelError, relu("b", "s", None), {}, ('dims={"b": ..., "s": ..., "x:2": ...}', "(b) of input 'x'")),
        (ModelError, relu("b", "s"), {"batch": 2}, ('dims={"s": ...}', "dimension 1 (s) of input 'x'", "Relu")),
        (ModelError, relu("b", "s"), {"dims": {"s": 2}}, ("dimension 0 (b)", 'batch=... or dims={"b"')),
        (OptionError, relu("b", "seq"), {"dims": {"sed": 2}}, ("'b' (dimension 0 of input 'x'), 'seq'", "mean 'seq'?")),
        (OptionError, relu(2, 3), {"dims": {"s": 2}}, ("no dimension of the given model is open",)),
        (OptionError, relu("b", "s"), {"batch": 2, "dims": {"b": 2, "s": 1}}, ("batch=2 and dims both", "'b'")),
        (OptionError, relu("b"), {"dims": {"b": 0}}, ("'b' the value 0", "at least 1")),
        (OptionError, relu("b"), {"dims": {"b": True}}, ("True",)),
        (OptionError, relu("b"), {"dims": {"b": "4"}}, ("'4'",)),
        (OptionError, relu("a", "b", z=["a - b"]), {"dims": {"a": 1, "b": 2}}, ("a - b has no size with a=1, b=2",)),
        (OptionError, relu(3, "s"), {"batch": 4, "dims": {"s": 2}}, ("batch=4 has no effect", "first dimensions")),
    ],
)
def test_values_that_are_none(kind: type[SouffleError], model: onnx.ModelProto, options: dict, says: tuple) -> None:
    refused(kind, lambda: souffle.import_onnx(model, **options), *says)
    refused(kind, lambda: souffle.compile(model, **HOST, **options), *says)


def test_options_that_do_not_fit() -> None:
    model = attention()
    refused(OptionError, lambda: souffle.compile(model, dims=[1]), "dims=[1]", "dict")
    for more in ({"pad": True}, {"on_demand": True}, {"pad_values": {"x": 1}}):
        refused(OptionError, lambda more=more: souffle.compile(model, dims={"batch": 1, "seq": 5}, **more), "versions")
    refused(OptionError, lambda: souffle.compile(model, dims=LISTS, background=True), "background=True")
    refused(OptionError, lambda: souffle.compile(model, dims={"batch": [], "seq": 1}, **HOST), "empty list")
    refused(ModelError, lambda: souffle.compile(model, dims={"seq": [1, 2]}, **HOST), 'dims={"batch": ...}')
    refused(OptionError, lambda: souffle.compile(model, dims=LISTS, pad=["sec"], **HOST), "'sec'", "'batch', 'seq'")
    refused(OptionError, lambda: souffle.compile(model, dims=LISTS, pad="seq", **HOST), "pad='seq'", "list")
    refused(OptionError, lambda: souffle.compile(model, dims=LISTS, pad_values={"x": 1}, **HOST), "pad=True")
    program = souffle.import_onnx(model, dims={"batch": 1, "seq": 5})
    refused(OptionError, lambda: souffle.compile(program, dims=LISTS), "dims={'batch': [1, 3]", "(1, 5, 6)")
    one = {"dims": {"batch": [1], "seq": 5}, "pad": True, **HOST}
    for value in (0.5, float("nan"), 300, "1", [1]):
        refused(OptionError, lambda v=value: souffle.compile(model, pad_values={"m": v}, **one), "'m'", "bool")
    refused(OptionError, lambda: souffle.compile(model, pad_values={"z": 0}, **one), "'z'", "has x, m")


@pytest.mark.parametrize("name", ["n", "k"])
def test_padding_that_changes_outputs_is_refused(name: str) -> None:
    model = relu("n", "k", output=["n", "k"])
    model.graph.node[0].op_type = "Softmax"
    call = partial(souffle.compile, model, dims={"n": [2, 3], "k": [4, 6]}, pad=[name], **HOST)
    if name == "k":
        refused(OptionError, call, "along 'k'", "n=2, k=4", "n=2, k=6", 'verify="off"')
        net = call(verify="off")
        assert "were not compared" in net.explain()
        assert not np.allclose(net(np.ones((2, 5), np.float32))["y"], 0.2)
        refused(InputError, lambda: net.run_in((3, 6), np.ones((2, 6), np.float32)), "(3, 6)")
    else:
        net = call()
        assert "with and without padding are " in net.explain()
        np.testing.assert_allclose(net.run_in((3, 4), np.ones((1, 4), np.float32))["y"], np.full((1, 4), 0.25))


# which version runs


@pytest.mark.parametrize("options", [HOST, TEXT], ids=["host", "text"])
def test_a_version_for_each_shape(options: dict, tmp_path: Path) -> None:
    net = exact() if options is HOST else text_network()
    net.save(tmp_path / "net.souffle")
    device = "auto" if options is HOST else "cpu"
    others = (souffle.load(tmp_path / "net.souffle", device=device), pickle.loads(pickle.dumps(net)), copy.copy(net))
    for it in (net, *others):
        for extents, version in it.versions.items():
            given = inputs(*extents)
            assert_right(it(given), given)
            assert_right(it(given["x"], given["m"]), given)
            assert_right(it.run_in(extents, given), given)
            assert it.chosen(given) is version and version.signature.inputs[0].shape == (*extents, 6)
            assert options is HOST or version.certificate.verdict == "PROVEN"
        held = [id(array) for version in it.versions.values() for array in version.plan.constants.values()]
        assert len(set(held)) < len(held)
        refused(InputError, lambda it=it: it(inputs(2, 6)), "batch=2, seq=6", "versions: (batch=")
    assert str(net.signature) == "'x' (float32 batch x seq x 6), 'm' (bool batch x seq)"
    assert [spec.shape for spec in net.outputs] == [("batch", "seq", 6), ("batch", "seq", "seq")]
    assert "padding: none" in net.explain() and net.explain().count("\nversion batch=") == len(net.versions)


def test_what_does_not_fit_is_said_of_all_versions() -> None:
    net, good = exact(), inputs(1, 5)
    for wrong, *says in (
        ({**good, "m": inputs(3, 5)["m"]}, "(batch, seq)", "(3, 5)", "other inputs have batch=1, seq=5"),
        ({**good, "x": good["x"][..., :5]}, "(batch, seq, 6)", "(1, 5, 5)"),
        ({**good, "x": good["x"][0]}, "(batch, seq, 6)", "(5, 6)"),
        ({**good, "x": good["x"].astype(np.float64)}, "float32", "casts nothing"),
        ({**good, "x": good["x"].tolist()}, "was given a list"),
        ({"x": good["x"]}, "'m'"),
        ({**good, "z": good["x"]}, "'z'"),
    ):
        refused(InputError, lambda wrong=wrong: net(wrong), *says)
    refused(InputError, lambda: net(good["x"]), "2 inputs")
    refused(OptionError, lambda: net.on("cpu"), "processor")


def test_values_that_only_know_dlpack() -> None:
    class Lent:
        def __init__(self, array: np.ndarray) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    given = inputs(3, 7)
    assert_right(exact()({"x": Lent(given["x"]), "m": given["m"]}), given)


# padding


def test_inputs_are_padded_to_the_smallest_version() -> None:
    net = padded()
    for extents in itertools.product((1, 2, 3), (1, 4, 5, 6, 7)):
        given = inputs(*extents)
        before = {name: value.copy() for name, value in given.items()}
        assert_right(net(given), given)
        assert all(np.array_equal(before[name], given[name]) for name in given)
    chosen = {(1, 5): (1, 5), (1, 1): (1, 5), (2, 5): (3, 5), (1, 6): (1, 7), (3, 6): (3, 7)}
    for extents, version in chosen.items():
        assert net.chosen(inputs(*extents)) is net.versions[version]
    for extents in ((4, 5), (1, 8)):
        refused(InputError, lambda e=extents: net(inputs(*e)), "no version that holds", "(batch=3, seq=7)")
    refused(InputError, lambda: net({**inputs(2, 4), "x": np.zeros((2, 4, 6))}), "float32")
    assert "padding: along batch, seq" in net.explain() and "x with 0, m with 0" in net.explain()
    on_gpu = on_device(inputs(2, 4)["x"], driver_of(cooperative_plan()))
    refused(InputError, lambda: net({**inputs(2, 4), "x": on_gpu}), "on a GPU", "(3, 5, 6)")


def test_padding_is_along_what_is_named_and_with_what_is_said(tmp_path: Path) -> None:
    model = relu("n", "k", output=["n", "k"])
    net = souffle.compile(model, dims={"n": [2, 4], "k": [3]}, pad=["n"], pad_values={"x": np.float32(7)}, **HOST)
    net.save(tmp_path / "net.souffle")
    for it in (net, souffle.load(tmp_path / "net.souffle")):
        x = np.array([[-1, 2, np.nan]] * 3, np.float32)
        np.testing.assert_array_equal(it(x)["y"], np.maximum(x, 0))
        refused(InputError, lambda it=it: it(np.ones((3, 2), np.float32)), "no version that holds")
        assert it.padding.names == ("n",) and "x with 7" in it.explain()


@pytest.mark.parametrize("shape", [None, ["batch", None, 6], ["batch", "other", 6], ["seq", "batch", 6]])
def test_padding_needs_outputs_of_known_shapes(shape: list | None) -> None:
    model, dims = attention({"y": shape}), {"batch": [2], "seq": [3]}
    refused(OptionError, lambda: souffle.compile(model, dims=dims, pad=True, **HOST), "'y'", "cannot be padded")


def test_outputs_follow_expressions() -> None:
    dimensions = OpenDimensions(("a", "b"), (("x", ("a", "b")),), (("y", ("2*a + b - 1", 3)),))
    assert dimensions.shape(dimensions.outputs[0][1], {"a": 4, "b": 2}) == (9, 3)
    assert dimensions.knows("a*(b+1)") and not dimensions.knows("a*c") and not dimensions.knows(None)
    for words in ("a**b", "f(a)", "a.b", "a if b else 3", "-a", "a < b", "'a'", "(" * 300, "a/b", "a b"):
        assert not dimensions.knows(words)


# on demand


def test_other_shapes_are_compiled_once_for_all_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = souffle.compile(attention(), dims={"batch": 1, "seq": [5]}, on_demand=True, **HOST)
    made: list[tuple[int, ...]] = []
    take = api.import_loaded
    monkeypatch.setattr(api, "import_loaded", lambda loaded: made.append(loaded.inputs[0][1]) or take(loaded))
    start, failures = threading.Barrier(8), []

    def run(number: int) -> None:
        start.wait()
        for extents in ((2, 3), (1, 5), (1, 2))[:: 1 if number % 2 else -1]:
            given = inputs(*extents, seed=number)
            try:
                assert_right(net(given), given)
            except (AssertionError, SouffleError) as error:
                failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and sorted(made) == [(1, 2, 6), (2, 3, 6)]
    assert set(net.versions) == {(1, 5), (2, 3), (1, 2)}
    weights = [version.plan.constants for version in net.versions.values()]
    assert len({id(array) for held in weights for array in held.values() if array.shape == (6, 6)}) == 1
    net.save(tmp_path / "net.souffle")
    assert set(souffle.load(tmp_path / "net.souffle").versions) == set(net.versions)
    refused(InputError, lambda: pickle.loads(pickle.dumps(net))(inputs(2, 2)), "no version for batch=2, seq=2")


def test_a_shape_that_cannot_be_compiled_is_an_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an interrupt leaves the way to it open."""
    model = relu("n", output=[2, "k"])
    model.graph.node[0].output[0] = "r"
    model.graph.node.append(helper.make_node("Reshape", ["r", "two"], ["y"], name="halves"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, -1]), "two"))
    net = souffle.compile(model, dims={"n": [4]}, on_demand=True, **HOST)
    for _ in range(2):
        refused(UnsupportedOperatorError, lambda: net(np.ones(5, np.float32)), "halves")

    def interrupt(loaded: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(api, "import_loaded", interrupt)
        with pytest.raises(KeyboardInterrupt):
            net(np.ones(6, np.float32))
    assert net(np.ones(6, np.float32))["y"].shape == (2, 3)


# what versions have in common


def test_equal_arrays_are_one() -> None:
    unique = UniqueArrays()
    zero, scalar = np.zeros((2, 3), np.float32), np.float32(0).reshape(())
    first = unique.of({"a": zero, "b": scalar, "e": np.zeros((0, 3), np.float32)})
    again = {"a": zero.copy(), "b": scalar.copy(), "t": zero.reshape(3, 2), "i": zero.astype(np.int32), "n": -zero}
    found = unique.of(again)
    assert first["a"] is zero and found["a"] is zero and found["b"] is scalar
    assert all(found[name] is again[name] for name in "tin")


def test_a_constant_is_on_a_gpu_once() -> None:
    plan = cooperative_plan()
    driver, shared = driver_of(plan), SharedConstants()
    alone = Network(plan, driver=driver)
    alone.open()
    pair = [Network(plan, driver=driver).sharing(shared) for _ in range(2)]
    for net in pair:
        net.open()
    codes = [net._runner._code for net in (alone, *pair)]
    assert codes[1].constants == codes[2].constants and codes[0].constants != codes[1].constants
    x = np.linspace(0, 1, 100, dtype=np.float32).reshape(10, 10)
    expected = alone(x)
    taken = driver.live_bytes()
    del pair[0], codes, net, alone
    np.testing.assert_array_equal(pair[0](x)["scores"], expected["scores"])
    assert driver.live_bytes() < taken
    del pair, shared
    assert driver.live_bytes() == 0


def test_a_file_says_what_it_is_and_holds_weights_once(tmp_path: Path) -> None:
    path, one = tmp_path / "net.souffle", tmp_path / "one.souffle"
    net = padded()
    net.save(path)
    net.versions[(1, 5)].save(one)
    said = describe(path)
    assert (said.format, said.name) == (2, "attention") and describe(one).format == 1 and describe(one).versions == ()
    assert said.versions == tuple(f"batch={b}, seq={s}" for b, s in itertools.product(*LISTS.values()))
    with zipfile.ZipFile(path) as archive:
        stored = [np.load(archive.open(name)) for name in archive.namelist() if name.endswith(".npy")]
    # In panels, of which all versions have the same.
    assert sum(np.isin(WEIGHT, array).all() for array in stored) == 1
    refused(ArtifactError, lambda: souffle.runtime.load(path), "4 versions", "souffle.load")
    net.save(tmp_path / "again.souffle")
    assert path.read_bytes() == (tmp_path / "again.souffle").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(plans=[]),
        lambda said: said.update(plans=said["plans"] * 2),
        lambda said: said["plans"][0].update(extents=[1]),
        lambda said: said["plans"][0].update(extents=[1, 6]),
        lambda said: said["plans"][0].update(extents=[1, True]),
        lambda said: said["plans"][0].pop("stored"),
        lambda said: said.update(names=["batch"]),
        lambda said: said.update(names=["batch", "batch"]),
        lambda said: said.update(names=["batch", "other"]),
        lambda said: said.update(inputs=said["inputs"][:1]),
        lambda said: said["inputs"][0].reverse(),
        lambda said: said["outputs"][0].__setitem__(1, ["batch", "seq", 5]),
        lambda said: said["outputs"][0].__setitem__(0, "z"),
        lambda said: said.update(padding=3),
        lambda said: said["padding"].update(names=["other"]),
        lambda said: said["padding"].update(values={"x": "1"}),
    ],
)
def test_files_with_other_versions_than_they_say(change: Callable[[dict], None], tmp_path: Path) -> None:
    path = tmp_path / "net.souffle"
    padded().save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"])
    change(manifest["versions"])
    members["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    refused(ArtifactError, lambda: souffle.load(path), str(path))


# the command line, and a model of ours


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, file = tmp_path / "net.onnx", tmp_path / "net.souffle"
    onnx.save(attention(), model)

    def run(*words: object) -> tuple[int, str, str]:
        status = main.main([*map(str, words), "--quiet"])
        return status, *capsys.readouterr()

    dims = ("--dim", "batch=2", "--dim", "seq=3,5")
    words = (*dims, "--target", "cpu", "--level", "V1", "--pad", "--pad-value", "x=1", "--dump", tmp_path / "steps")
    status, out, err = run("compile", model, *words)
    assert (status, err) == (0, "") and "version batch=2, seq=5\n" in out and f"{file}: 2 versions, " in out
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {"batch=2,seq=3", "batch=2,seq=5"}
    given = inputs(1, 2)
    arguments = []
    for name, value in given.items():
        np.save(tmp_path / f"{name}.npy", value)
        arguments += ["--input", f"{name}={tmp_path / name}.npy"]
    status, out, _ = run("run", file, *arguments, "--json")
    assert status == 0 and json.loads(out)["s"]["shape"] == [1, 2, 2]
    status, out, _ = run("explain", file)
    assert status == 0 and "x with 1, m with 0" in out and "version batch=2, seq=3\n" in out
    text_network().save(file)
    status, out, _ = run("check", model, "--file", file)
    assert status == 0 and out.count(" ok") == 2 and "batch=2, seq=5  V4" in out
    status, out, _ = run("check", model, *dims, "--levels", "V4", "--json")
    assert status == 0 and [run["version"] for run in json.loads(out)["runs"]] == ["batch=2, seq=3", "batch=2, seq=5"]
    status, out, _ = run("verify", file)
    assert status == 0 and out.count("version batch=2") == 2
    status, _, err = run("compile", model, "--dim", "seq=3", "--dim", "seq=4")
    assert status == 2 and "twice" in err
    with pytest.raises(SystemExit):
        run("compile", model, "--dim", "seq")


def test_bert_with_open_dimensions() -> None:
    net = souffle.compile(
        models.build("bert", open_dimensions=True),
        dims={"batch": [2], "sequence": [16]},
        pad=True,
        level="V1",
        **HOST,
    )
    fixed = models.build("bert")
    x = models.random_inputs(fixed)["input"]
    expected = onnxruntime_outputs(fixed, {"input": x})["output"]
    found = net({"input": x, "attention_mask": np.ones((1, 16), np.int64)})["output"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # What the mask leaves out, and what fills a sequence up, are the same to the rest.
    masked = net({"input": x, "attention_mask": (np.arange(16) < 11)[None].astype(np.int64)})["output"]
    filled = net({"input": x[:, :11], "attention_mask": np.ones((1, 11), np.int64)})["output"]
    np.testing.assert_allclose(filled, masked[:, :11], rtol=1e-4, atol=1e-5)
    refused(OptionError, lambda: models.build("lstm", open_dimensions=True), "open_dimensions is for bert")
