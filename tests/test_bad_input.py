"""What a user can get wrong: each a :class:`SouffleError` that names the thing and says what would help."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import souffle
from souffle import SouffleError, errors, models
from souffle.codegen.plan import CudaModule
from souffle.errors import (
    ArtifactError,
    CompilerNotFoundError,
    IncompatibleEnvironmentError,
    InputError,
    ModelError,
    NoGpuError,
    OptionError,
    UnsupportedOperatorError,
)
from souffle.runtime import cuda
from souffle.runtime.host_network import HostNetwork
from souffle.tvm_pair import TVM_FFI_PIN, TVM_PIN, check_tvm_pair, installed_version

CUDA = {"target": "cuda", "arch": "sm_90", "cubin": False}


@cache
def model() -> onnx.ModelProto:
    return models.build("mmoe")


def refuses(kind: type[SouffleError], function, *says: str) -> str:
    """`function` fails with `kind` alone, and the message holds every text of `says`."""
    with pytest.raises(kind) as caught:
        function()
    message = str(caught.value)
    assert type(caught.value) is kind and issubclass(kind, SouffleError)
    for text in says:
        assert text in message, message
    return message


def one_node(operator: str, shape: list, *, domain: str = "", dtype: int = TensorProto.FLOAT, **attributes):
    x = helper.make_tensor_value_info("x", dtype, shape)
    y = helper.make_tensor_value_info("y", dtype, None)
    node = helper.make_node(operator, ["x"], ["y"], name="the_node", domain=domain, **attributes)
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(helper.make_graph([node], "graph", [x], [y]), opset_imports=opsets, ir_version=9)


def test_every_error_is_a_souffle_error() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(kind, SouffleError) for kind in kinds if issubclass(kind, Exception))
    assert issubclass(UnsupportedOperatorError, ModelError)


# models


def test_a_missing_file() -> None:
    refuses(ModelError, lambda: souffle.compile("no/such.onnx"), "no/such.onnx", "no such file")
    refuses(ModelError, lambda: souffle.import_onnx(Path("folder")), "folder")


@pytest.mark.parametrize("content", [b"", b"this is no model", b"\x00" * 100, b"\x08\x07PK\x03\x04"])
def test_a_file_that_is_not_onnx(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "thing.onnx"
    path.write_bytes(content)
    refuses(ModelError, lambda: souffle.compile(path), str(path), "not")
    refuses(ModelError, lambda: souffle.import_onnx(content), "not")


def test_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "half.onnx"
    data = model().SerializeToString()
    path.write_bytes(data[: len(data) // 2])
    refuses(ModelError, lambda: souffle.compile(path), str(path))


@pytest.mark.parametrize("thing", [None, 7, ["bert.onnx"], {"model": 1}])
def test_something_that_is_no_model(thing) -> None:
    refuses(ModelError, lambda: souffle.compile(thing), type(thing).__name__)


def test_an_operator_that_is_not_known() -> None:
    proto = one_node("NoSuchOperator", [2, 3], domain="my.domain")
    refuses(UnsupportedOperatorError, lambda: souffle.import_onnx(proto), "NoSuchOperator", "the_node")


def test_an_operator_that_onnx_does_not_have() -> None:
    refuses(ModelError, lambda: souffle.import_onnx(one_node("Reluu", [2, 3])), "Reluu")


def test_open_dimensions() -> None:
    proto = one_node("Relu", ["N", 3])
    refuses(ModelError, lambda: souffle.compile(proto), "dimension 0 (N) of input 'x'", "batch=")
    proto = one_node("Relu", [2, "length"])
    refuses(ModelError, lambda: souffle.compile(proto, batch=2), "dimension 1 (length) of input 'x'", 'dims={"length"')


def test_a_batch_that_is_none() -> None:
    refuses(OptionError, lambda: souffle.import_onnx(one_node("Relu", ["N", 3]), batch=0), "batch is 0", "at least 1")


def test_a_batch_that_would_change_nothing() -> None:
    says = ("batch=4 has no effect on the given model", "'x'", "symbolic first dimension")
    refuses(OptionError, lambda: souffle.compile(one_node("Relu", [1, 3]), batch=4), "(1, 3)", *says)
    refuses(OptionError, lambda: souffle.import_onnx(one_node("Relu", []), batch=4), "scalar", *says)
    program = souffle.import_onnx(one_node("Relu", ["N", 3]), batch=4)
    assert program.inputs[0].shape == souffle.import_onnx(one_node("Relu", [4, 3]), batch=4).inputs[0].shape == (4, 3)
    for call in (lambda: souffle.compile(program, batch=4), lambda: souffle.tune(program, trials=1, batch=4)):
        refuses(OptionError, call, "batch=4 has no effect on the program", "'x' (4, 3)", "souffle.import_onnx")


def test_shapes_that_do_not_fit() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 5])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="the_node")
    proto = helper.make_model(
        helper.make_graph([node], "graph", [x, w], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    with pytest.raises(ModelError, match=r"(?s)MatMul.*the_node|the_node.*MatMul"):
        souffle.import_onnx(proto)


def test_weights_that_are_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "outer.onnx"
    onnx.save(models.build("mmoe"), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    refuses(ModelError, lambda: souffle.compile(path), "outer.onnx", "weights.bin")


# options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": "V5"}, ["level='V5'", "V0, V1, V2, V3, V4"]),
        ({"level": 3}, ["level=3", "V0, V1, V2, V3, V4"]),
        ({"target": "rocm"}, ["target='rocm'", "auto, cuda, cpu"]),
        ({"arch": "sm_21"}, ["'sm_21'", "sm_90"]),
        ({"arch": "gfx90a"}, ["'gfx90a'", "sm_80"]),
        ({"precision": "fp8"}, ["precision='fp8'", "fp32, tf32x3, tf32, mixed"]),
        ({"partition": "greedy"}, ["partition='greedy'", "souffle, persistent"]),
        ({"device": "tpu"}, ["'tpu'", "cuda"]),
    ],
)
def test_options_that_do_not_exist(options: dict, says: list[str]) -> None:
    refuses(OptionError, lambda: souffle.compile(model(), **(CUDA | options)), *says)


@pytest.mark.parametrize("options", [{"level": "V5"}, {"precision": "fp8"}, {"partition": "greedy"}])
def test_options_of_the_cpu_target_are_checked_too(options: dict) -> None:
    refuses(OptionError, lambda: souffle.compile(model(), target="cpu", **options), next(iter(options)))


# calls


@pytest.fixture(scope="module", params=["cuda text", "cpu"])
def network(request: pytest.FixtureRequest):
    options = CUDA | {"device": "cpu"} if request.param == "cuda text" else {"target": "cpu"}
    return souffle.compile(model(), level="V2", **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: {"inputs": x}, ["no input named 'inputs'", "float32"]),
        (lambda x: {}, ["was not given its input"]),
        (lambda x: x.astype(np.float64), ["must be float32", "float64", "casts nothing"]),
        (lambda x: x.astype(np.int32), ["must be float32", "int32"]),
        (lambda x: x[:, :-1], ["must have shape", "was given"]),
        (lambda x: np.concatenate([x, x]), ["compile the model for that batch"]),
        (lambda x: x.ravel(), ["dimensions"]),
        (lambda x: x.tolist(), ["list", "np.asarray"]),
    ],
)
def test_wrong_inputs(network, change, says: list[str]) -> None:
    ((name, x),) = models.random_inputs(model()).items()
    value = change(x)
    arguments = value if isinstance(value, dict) else {name: value}
    message = refuses(InputError, lambda: network(arguments), *says)
    assert name in message


def test_the_wrong_number_of_inputs(network) -> None:
    ((_, x),) = models.random_inputs(model()).items()
    refuses(InputError, lambda: network(x, x), "takes 1 inputs and was given 2")
    refuses(InputError, lambda: network(), "was given 0")


# machines


def test_a_cuda_network_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_bindings", None)
    net = souffle.compile(model(), level="V0", **CUDA)
    refuses(NoGpuError, lambda: net(models.random_inputs(model())), 'device="cpu"')


def test_a_cuda_network_that_was_not_compiled_for_a_gpu_says_so() -> None:
    explanation = souffle.compile(model(), level="V0", **CUDA).explain()
    assert "not compiled for a GPU" in explanation


def test_no_cuda_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("souffle.codegen.nvcc.find_nvcc", lambda: None)
    refuses(
        CompilerNotFoundError,
        lambda: souffle.compile(model(), target="cuda", arch="sm_90"),
        "no nvcc",
        "pip install",
        "cubin=False",
    )


@pytest.mark.parametrize(
    ("tvm", "ffi"), [("0.26.0", TVM_FFI_PIN), (TVM_PIN, "0.1.13"), (None, TVM_FFI_PIN), (TVM_PIN, None), (None, None)]
)
def test_a_pair_of_tvm_that_is_known_to_crash(tvm: str | None, ffi: str | None) -> None:
    refuses(
        IncompatibleEnvironmentError,
        lambda: check_tvm_pair(tvm, ffi),
        f"apache-tvm {tvm or 'not installed'}",
        f"apache-tvm-ffi {ffi or 'not installed'}",
        f"pip install 'apache-tvm=={TVM_PIN}' 'apache-tvm-ffi=={TVM_FFI_PIN}'",
    )


def test_the_pair_that_was_checked_is_accepted() -> None:
    check_tvm_pair(TVM_PIN, TVM_FFI_PIN)
    assert installed_version("no-such-distribution") is None


# files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "net.souffle"
    souffle.compile(model(), level="V2", target="cpu").save(path)
    return path


def test_a_file_that_does_not_exist() -> None:
    refuses(ArtifactError, lambda: souffle.load("no/such.souffle"), "no/such.souffle")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and nothing more", b"\x7fELF", b"\x80\x04N."])
def test_a_foreign_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "foreign.souffle"
    path.write_bytes(content)
    refuses(ArtifactError, lambda: souffle.load(path), str(path))


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.souffle"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"\x80\x04N.")
    refuses(ArtifactError, lambda: souffle.load(path), str(path), "Network.save")


@pytest.mark.parametrize("part", [0.3, 0.6, 0.99])
def test_half_a_network(saved: Path, part: float, tmp_path: Path) -> None:
    path = tmp_path / "half.souffle"
    data = saved.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    refuses(ArtifactError, lambda: souffle.load(path), str(path))


def test_flipped_bits_are_found_or_change_nothing(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "flipped.souffle"
    data, plan = saved.read_bytes(), souffle.load(saved).plan
    for at in range(50, len(data), len(data) // 40):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        try:
            found = souffle.load(path).plan
        except ArtifactError as error:
            assert str(path) in str(error)
            continue
        assert [m.cubin for m in found.modules] == [m.cubin for m in plan.modules]
        assert all(np.array_equal(found.constants[name], array) for name, array in plan.constants.items())


def test_machine_code_that_does_not_load_here(saved: Path) -> None:
    plan = replace(souffle.load(saved).plan, modules=(CudaModule("", b"of another machine"),))
    x = models.random_inputs(model())
    refuses(ArtifactError, lambda: HostNetwork(plan)(x), plan.options.arch, "compile the model on this machine")
