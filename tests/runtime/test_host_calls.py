"""Calls of a network's functions that are put down once: whoever makes them, in one go or in parts."""

from __future__ import annotations

import ctypes
import functools
import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.codegen.plan import Plan
from souffle.errors import DeviceError
from souffle.runtime import host_calls
from souffle.runtime.host_network import HostNetwork


def _model() -> bytes:
    """Functions that depend on each other, of a scalar, of nothing at all, of bytes, truths and halves."""
    rng = np.random.default_rng(3)
    constants = {
        "w": rng.standard_normal((7, 7)).astype(np.float32),
        "few": np.array(0.25, np.float32),
        "none": np.zeros((0, 7), np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Softmax", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["c"]),
        helper.make_node("ReduceSum", ["c"], ["s"], keepdims=0),
        helper.make_node("Mul", ["s", "few"], ["scalar"]),
        helper.make_node("Greater", ["c", "scalar"], ["truths"]),
        helper.make_node("Cast", ["c"], ["halves"], to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["none", "w"], ["nothing"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (5, 7))]
    outputs = [
        helper.make_tensor_value_info(name, dtype, shape)
        for name, dtype, shape in (
            ("scalar", TensorProto.FLOAT, ()),
            ("truths", TensorProto.BOOL, (5, 7)),
            ("halves", TensorProto.FLOAT16, (5, 7)),
            ("nothing", TensorProto.FLOAT, (0, 7)),
        )
    ]
    graph = helper.make_graph(
        nodes, "kinds", inputs, outputs, [numpy_helper.from_array(array, name) for name, array in constants.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


@functools.cache
def _plan() -> Plan:
    return souffle.compile(_model(), target="cpu").plan


def _input() -> np.ndarray:
    return np.random.default_rng(4).standard_normal((5, 7)).astype(np.float32)


def _expected() -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(_model(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, {"x": _input()}), strict=True))


@pytest.fixture(params=["the library", "Python"])
def made_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who goes through the calls; files of before have no function that does."""
    if request.param == "Python":
        monkeypatch.setattr(host_calls, "_RUN", "souffle_of_before")
    return request.param


@pytest.mark.parametrize("nanoseconds", [host_calls._UNINTERRUPTED_NS, 1], ids=["in one go", "one by one"])
def test_values_are_those_of_onnxruntime(made_by: str, nanoseconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_calls, "_UNINTERRUPTED_NS", nanoseconds)
    network, expected = HostNetwork(_plan()), _expected()
    for _ in range(3):
        found = network(_input())
        assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
            name: (value.dtype, value.shape) for name, value in expected.items()
        }
        for name, value in expected.items():
            np.testing.assert_allclose(found[name].astype(np.float32), value.astype(np.float32), rtol=1e-3, atol=1e-6)
    times = network.launch_times(_input())
    assert len(times) == len(_plan().launches) + 1 and list(times) == sorted(times) and times[0] > 0


def test_calls_are_made_once_each_and_in_order(made_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops in between goes on behind what was done."""
    monkeypatch.setattr(host_calls, "_UNINTERRUPTED_NS", 1)
    network = HostNetwork(_plan())
    network.open()
    functions, begins = network._loaded._functions, []

    def watched(runner: host_calls._Runner) -> host_calls._Runner:
        def run(table: int, begin: int, *rest: int) -> int:
            begins.append(begin)
            return runner(table, begin, *rest)

        return run

    monkeypatch.setattr(functions, "_free", watched(functions._free))
    network(_input())
    assert begins == list(range(len(_plan().launches)))


@pytest.mark.parametrize("says", [b"no memory for 12 bytes", None])
def test_a_function_that_fails_is_named_with_what_tvm_says(made_by: str, says: bytes | None) -> None:
    network = HostNetwork(_plan())
    network.open()
    last = _plan().launches[-1].kernel

    @ctypes.CFUNCTYPE(*host_calls._FUNCTION)
    def fails(*_: int) -> int:
        if says is not None:
            tvm_ffi.LIB.TVMFFIErrorSetRaisedFromCStr(b"RuntimeError", says)
        return -1

    network._loaded._functions.addresses[last] = ctypes.cast(fails, ctypes.c_void_p).value
    message = "no memory for 12 bytes" if says else "did not say why"
    for _ in range(2):
        with pytest.raises(DeviceError, match=f"{_plan().kernels[last].name} of {_plan().name} failed: .*{message}"):
            network(_input())
    assert not network._loaded._idle, "a workspace whose call failed is not for the next one"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is loaded")
def test_a_network_that_is_gone_leaves_no_library_behind() -> None:
    def loaded() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[-2] for line in lines if "network.so" in line})

    first = HostNetwork(_plan())
    first(_input())  # whose pool of threads may stay
    before = loaded()
    for _ in range(3):
        HostNetwork(_plan())(_input())
    gc.collect()
    assert before > 0 and loaded() == before


def test_constants_are_there_once_unless_somebody_can_write_to_them(tmp_path: Path) -> None:
    network = HostNetwork(_plan())
    network.save(tmp_path / "kinds.souffle")
    loaded = souffle.load(tmp_path / "kinds.souffle")
    expected = loaded(_input())["halves"]
    for name, array in loaded.plan.constants.items():
        index = next(i for i, buffer in enumerate(loaded.plan.buffers) if buffer.name == name)
        assert not array.nbytes or np.shares_memory(loaded._loaded._constants[index], array)
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    own = {name: array.copy() for name, array in loaded.plan.constants.items()}
    theirs = HostNetwork(replace(loaded.plan, constants=own))
    theirs.open()
    for array in own.values():
        array[...] = 0
    np.testing.assert_array_equal(theirs(_input())["halves"], expected)
