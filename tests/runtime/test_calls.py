"""How networks are called: inputs by name, position and keyword, outputs in arrays of the caller, and bound buffers."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.background import BoundUntilExchanged
from souffle.errors import InputError
from souffle.runtime import BoundNetwork, DeviceArray, Network, TensorSpec
from souffle.runtime.signature import Signature
from tests.runtime.plans import cooperative_expected, cooperative_plan, many_types_plan
from tests.runtime.played import driver_of, on_device

_WEIGHT = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
_KINDS = ("small", "large", "text")
"""Of networks: LLVM code whose tensors are copied or, from 64 KiB on, lent; and CUDA text on the CPU device."""


def _model(rows: int | str) -> bytes:
    """``total`` is ``x + mask`` and ``product`` is ``total @ w``, which is also an input of the network's own name."""
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["total"]),
        helper.make_node("MatMul", ["total", "w"], ["product"]),
    ]
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 8])
        for name in ("x", "mask", "total", "product")
    ]
    graph = helper.make_graph(nodes, "calls", infos[:2], infos[2:], [numpy_helper.from_array(_WEIGHT, "w")])
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


@functools.cache
def _network(kind: str) -> Any:
    if kind == "text":
        return souffle.compile(_model(4), target="cuda", level="V2", arch="sm_90", cubin=False, device="cpu")
    return souffle.compile(_model(2048 if kind == "large" else 4), target="cpu")


def _inputs(network: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(spec.shape).astype(np.float32) for spec in network.inputs)


def _expected(x: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    total = x + mask
    return {"total": total, "product": total @ _WEIGHT}


def _aligned(shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """NaN at an address that is a multiple of 64, or so many bytes behind one."""
    nbytes = 4 * int(np.prod(shape))
    raw = np.empty(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    array = raw[start : start + nbytes].view(np.float32).reshape(shape)
    array[...] = np.nan
    return array


def _agrees(found: Any, expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), value, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _threads_change_places_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


# inputs


def test_the_signature_is_told_in_specs() -> None:
    for network in (_network("small"), _network("text")):
        assert network.inputs == (TensorSpec("x", (4, 8), "float32"), TensorSpec("mask", (4, 8), "float32"))
        assert network.outputs == network.signature.outputs
        assert [spec.name for spec in network.outputs] == ["total", "product"]


@pytest.mark.parametrize("kind", _KINDS)
def test_inputs_by_keyword(kind: str) -> None:
    network = _network(kind)
    x, mask = _inputs(network)
    for found in (network(x=x, mask=mask), network(mask=mask, x=x), network(x, mask=mask), network(x, mask)):
        _agrees(found, _expected(x, mask))


def test_inputs_that_are_wrong_are_told_by_name() -> None:
    network = _network("small")
    x, mask = _inputs(network)
    for args, named, says in (
        ((x,), {"x": x}, "its input 'x' twice"),
        ((x,), {"maks": mask}, "no input named 'maks'"),
        ((), {"x": x}, "was not given its input 'mask'"),
        (({"x": x},), {"mask": mask}, "a dict of inputs and keywords"),
        ((x, mask, x), {"mask": mask}, "takes 2 inputs"),
    ):
        with pytest.raises(InputError, match=says):
            network(*args, **named)


def test_a_look_at_all_inputs_is_one_at_each() -> None:
    """Whatever is given: the same arrays of the same memory, or the same words."""
    whole = np.arange(32, dtype=np.float32).reshape(4, 8)
    frozen = whole.copy()
    frozen.flags.writeable = False

    class Own(np.ndarray):
        pass

    values = [
        *(whole, frozen, whole.view(Own), np.ma.masked_array(whole), memoryview(whole), whole.tolist(), None),
        *(np.asfortranarray(whole), whole[:, ::-1], np.broadcast_to(np.float32(1), (4, 8)), whole[:0], whole[0]),
        *(whole.astype(">f4"), whole.astype(np.float64), whole.view(np.int32), whole.view("V4"), np.float32(3)),
    ]
    for shape in ((4, 8), (), (0, 8)):
        spec = TensorSpec("x", shape, "float32")
        signature = Signature("net", (spec, TensorSpec("mask", (4, 8), "float32")))
        for value in values:
            try:
                wanted: Any = signature.host_array(spec, value)
            except InputError as error:
                with pytest.raises(InputError, match=re.escape(str(error))):
                    signature.host_arrays((value, whole))
                continue
            for found, other in (
                signature.host_arrays((value, whole)),
                signature.host_arrays(({"mask": whole, "x": value},)),
                signature.host_arrays((), {"mask": whole, "x": value}),
            ):
                assert type(found) is np.ndarray and found.flags.c_contiguous and found.shape == spec.shape
                assert found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()
                assert np.shares_memory(other, whole)
                assert np.shares_memory(found, value) == np.shares_memory(wanted, value)


@pytest.mark.parametrize("element", ["float8_e4m3fn", "int4", "bfloat16", "bool"])
def test_elements_of_any_type_are_looked_at(element: str) -> None:
    spec = TensorSpec("x", (3,), element)
    signature = Signature("net", (spec,))
    value = np.ones(3, np.dtype(element))
    (found,) = signature.host_arrays((value,))
    assert found.dtype == signature.host_array(spec, value).dtype and np.shares_memory(found, value)
    for other in ("uint8", "float16"):
        with pytest.raises(InputError, match="Souffle casts nothing"):
            signature.host_arrays((value.view(np.uint8).astype(other)[:3],))


def test_an_input_may_have_any_name() -> None:
    """Names that are parameters of Python's own, or no identifiers."""
    for name, by_keyword in (("self", True), ("out", False), ("a.b", False)):
        infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in (name, "y")]
        graph = helper.make_graph([helper.make_node("Neg", [name], ["y"])], "g", infos[:1], infos[1:])
        network = souffle.compile(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), target="cpu"
        )
        value = np.array([1, -2], np.float32)
        for args, named in (((value,), {}), (({name: value},), {}), *([((), {name: value})] if by_keyword else [])):
            np.testing.assert_array_equal(network(*args, **named)["y"], -value)


# outputs in arrays of the caller


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("kind", _KINDS)
def test_outputs_are_written_where_they_are_wanted(kind: str, offset: int) -> None:
    network = _network(kind)
    for seed in range(2):
        x, mask = _inputs(network, seed)
        wanted = {spec.name: _aligned(spec.shape, offset) for spec in network.outputs}
        found = network(x, mask, out=wanted)
        assert all(found[name] is wanted[name] for name in wanted)
        _agrees(found, _expected(x, mask))
    # The caller's memory is let go of: later calls have their own.
    kept = {name: array.copy() for name, array in wanted.items()}
    later = network(*_inputs(network, 7))
    for name, array in wanted.items():
        np.testing.assert_array_equal(array, kept[name])
        assert not np.shares_memory(later[name], array)


@pytest.mark.parametrize("kind", _KINDS)
def test_some_outputs_are_wanted_somewhere(kind: str) -> None:
    network = _network(kind)
    x, mask = _inputs(network)
    array = _aligned(network.outputs[1].shape)
    for out in ({"product": array}, [None, array], {"product": array, "total": None}):
        array[...] = np.nan
        found = network(x=x, mask=mask, out=out)
        assert found["product"] is array and found["total"] is not array
        _agrees(found, _expected(x, mask))
    only = Network(cooperative_plan(), device="cpu")
    with pytest.raises(InputError, match="has 1 arrays, and its outputs are"):
        only(np.zeros((10, 10), np.float32), out=np.zeros(7, np.float32))


@pytest.mark.parametrize("kind", _KINDS)
def test_outputs_may_take_the_place_of_inputs(kind: str) -> None:
    """What is read and what is written at one place, whole or shifted: the result is as if they were apart."""
    network = _network(kind)
    rows, columns = network.inputs[0].shape
    for shift in (0, 1):
        whole = _aligned((rows + 16, columns))
        x, mask = _inputs(network)
        whole[:rows] = x
        into = whole[16 * shift : 16 * shift + rows]
        expected = _expected(x, mask)
        _agrees(network(whole[:rows], mask, out={"total": into}), expected)
        x2, mask2 = _aligned(x.shape), _aligned(x.shape)
        x2[...], mask2[...] = x, mask
        _agrees(network(x2, mask2, out=[mask2, x2]), expected)


@pytest.mark.parametrize("kind", _KINDS)
def test_arrays_that_cannot_hold_an_output_are_refused(kind: str) -> None:
    network = _network(kind)
    x, mask = _inputs(network)
    shape = network.outputs[0].shape
    frozen = np.zeros(shape, np.float32)
    frozen.flags.writeable = False
    good = np.full(shape, 3, np.float32)
    both = np.zeros((shape[0] + 1, 8), np.float32)
    before = good.copy()
    for out, says in (
        ({"total": np.zeros(shape, np.float64)}, "must be float32 and is float64"),
        ({"total": np.zeros(shape, ">f4")}, "must be float32 and is >f4"),
        ({"total": np.zeros((*shape, 1), np.float32)}, "must have shape"),
        ({"total": np.zeros((8, shape[0]), np.float32).T}, "is not contiguous"),
        ({"total": np.zeros((2 * shape[0], 8), np.float32)[::2]}, "is not contiguous"),
        ({"total": frozen}, "is read-only"),
        ({"total": good, "product": good}, "share memory"),
        ([both[:-1], both[1:]], "share memory"),
        ({"totals": good}, "no output named 'totals'; did you mean 'total'"),
        ([good], "has 1 arrays"),
        (good, "has 1 arrays"),
        ({"total": good.tolist()}, "is a list"),
        ({"total": good, "product": np.zeros(3, np.float32)}, "must have shape"),
    ):
        with pytest.raises(InputError, match=says):
            network(x, mask, out=out)
    np.testing.assert_array_equal(good, before)
    _agrees(network(x, mask), _expected(x, mask))


def test_outputs_of_many_types() -> None:
    network = Network(many_types_plan(), device="cpu")
    out = {"negated": np.zeros(3, bool), "counts": np.zeros(3, np.int64), "values": np.zeros(3, np.float32)}
    found = network(np.array([True, False, True]), np.array(5), out=out)
    assert all(found[name] is out[name] for name in out)
    np.testing.assert_array_equal(out["negated"], [False, True, False])
    np.testing.assert_array_equal(out["counts"], [5, 6, 7])
    np.testing.assert_array_equal(out["values"], [0.5, -2, 65504])


# bound buffers


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("kind", _KINDS)
def test_bound_buffers_are_read_and_written_by_each_call(kind: str, offset: int) -> None:
    network = _network(kind)
    inputs = {spec.name: _aligned(spec.shape, offset) for spec in network.inputs}
    outputs = {spec.name: _aligned(spec.shape, offset) for spec in network.outputs}
    bound = network.bind(inputs=inputs, outputs=outputs)
    for seed in range(3):
        x, mask = _inputs(network, seed)
        inputs["x"][...], inputs["mask"][...] = x, mask
        found = bound()
        assert all(found[name] is outputs[name] for name in outputs)
        _agrees(found, _expected(x, mask))
        # Calls of the network itself are apart from it.
        _agrees(network(*_inputs(network, 9)), _expected(*_inputs(network, 9)))
        _agrees(outputs, _expected(x, mask))


@pytest.mark.parametrize("kind", _KINDS)
def test_buffers_are_made_where_none_are_given(kind: str) -> None:
    network = _network(kind)
    x, mask = _inputs(network)
    for bound in (network.bind(), network.bind({"x": x}), network.bind(outputs=[None, _aligned(x.shape)])):
        assert isinstance(bound, BoundNetwork)
        if bound.inputs["x"] is not x:
            bound.inputs["x"][...] = x
        np.testing.assert_array_equal(bound.inputs["mask"], np.zeros_like(mask))
        bound.inputs["mask"][...] = mask
        _agrees(bound(), _expected(x, mask))


@pytest.mark.parametrize("kind", _KINDS)
def test_bound_outputs_may_take_the_place_of_inputs(kind: str) -> None:
    """A network that goes on from its own result: the second call adds the mask once more."""
    network = _network(kind)
    x, mask = (_aligned(spec.shape) for spec in network.inputs)
    x[...], mask[...] = _inputs(network)
    start = x.copy()
    bound = network.bind([x, mask], {"total": x})
    bound()
    _agrees(bound(), _expected(start + mask, mask))
    np.testing.assert_array_equal(x, start + mask + mask)


def test_read_only_inputs_can_be_bound() -> None:
    network = _network("large")
    x, mask = _inputs(network)
    x.flags.writeable = False
    _agrees(network.bind([x, mask])(), _expected(x, mask))


def test_what_cannot_be_bound_is_refused() -> None:
    network = _network("small")
    x, _ = _inputs(network)
    for inputs, outputs, says in (
        ({"x": np.asfortranarray(x)}, None, "is not contiguous, and what is bound is read where it lies"),
        ({"x": x.astype(np.float64)}, None, "must be float32"),
        ({"y": x}, None, "no input named 'y'"),
        ([x], None, "takes 2 inputs"),
        ({"x": [1.0]}, None, "was given a list"),
        (None, {"total": x[:1]}, "must have shape"),
        (None, [x, x], "share memory"),
    ):
        with pytest.raises(InputError, match=says):
            network.bind(inputs, outputs)
    counting = Network(many_types_plan(), device="cpu")
    with pytest.raises(InputError, match="is a scalar"):
        counting.bind({"count": np.int64(3)})


@pytest.mark.parametrize("kind", _KINDS)
def test_eight_threads_with_bound_buffers_each(kind: str) -> None:
    network = _network(kind)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            bound = network.bind()
            for step in range(10 if kind == "text" else 25):
                x, mask = _inputs(network, 100 * thread + step)
                bound.inputs["x"][...], bound.inputs["mask"][...] = x, mask
                _agrees(bound(), _expected(x, mask))
        except BaseException as error:  # whatever a thread raises is the test's failure
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[0]


def test_one_bound_object_has_one_call_at_a_time() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def run() -> None:
        inside.set()
        assert go_on.wait(60)

    bound = BoundNetwork(_network("small").bind().buffers, run)
    thread = threading.Thread(target=bound)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(InputError, match="in a call on another thread"):
        bound()
    go_on.set()
    thread.join(60)
    assert bound() is bound.outputs

    def fail() -> None:
        raise KeyboardInterrupt

    stopped = BoundNetwork(bound.buffers, fail)
    for _ in range(2):  # a call that is interrupted leaves it as it was
        with pytest.raises(KeyboardInterrupt):
            stopped()


# other networks


@pytest.mark.parametrize("kind", ["small", "text"])
def test_copies_and_files_are_called_alike(kind: str, tmp_path: Path) -> None:
    network = _network(kind)
    network.save(tmp_path / "n.souffle")
    x, mask = _inputs(network)
    for other in (
        copy.copy(network),
        pickle.loads(pickle.dumps(network)),
        souffle.load(tmp_path / "n.souffle", device="cpu"),
    ):
        assert (other.inputs, other.outputs) == (network.inputs, network.outputs)
        array = _aligned(x.shape)
        found = other(x=x, mask=mask, out={"total": array})
        assert found["total"] is array
        _agrees(found, _expected(x, mask))
        _agrees(other.bind([x, mask])(), _expected(x, mask))


def test_networks_of_several_versions() -> None:
    network = souffle.compile(_model("rows"), dims={"rows": [3, 5]}, target="cpu", pad=True, verify="off")
    assert [spec.shape for spec in (*network.inputs, *network.outputs)] == [("rows", 8)] * 4
    rng = np.random.default_rng(0)
    for rows in (3, 5, 4, 1):
        x, mask = (rng.standard_normal((rows, 8)).astype(np.float32) for _ in range(2))
        array = np.full((rows, 8), np.nan, np.float32)
        found = network(x, mask=mask, out={"product": array})
        assert found["product"] is array and found["total"].shape == (rows, 8)
        _agrees(found, _expected(x, mask))
        with pytest.raises(InputError, match=r"must have shape \(\d, 8\) and has \(\d, 8\)"):
            network(x, mask, out={"product": np.zeros((rows % 5 + 1, 8), np.float32)})
        if rows in (3, 5):
            _agrees(network.bind({"x": x, "mask": mask}, [None, array])(), _expected(x, mask))
        else:
            with pytest.raises(InputError, match="would be padded"):
                network.bind([x, mask])
    with pytest.raises(InputError, match="share memory"):
        network(x, mask, out=[array, array])


def test_networks_that_are_exchanged() -> None:
    first, second = _network("small"), _network("text")

    class Exchange:
        network = first

    x, mask = _inputs(first)
    bound = BoundUntilExchanged(Exchange, first, first.bind([x, mask]))
    outputs = dict(bound.outputs)
    _agrees(bound(), _expected(x, mask))
    Exchange.network = second
    x[...] = 2
    found = bound()
    assert all(found[name] is outputs[name] for name in outputs)
    _agrees(found, _expected(x, mask))
    network = souffle.compile(_model(4), target="cpu", level="V0", background=True)
    assert network.inputs == first.inputs and network.outputs == first.outputs
    array = _aligned(x.shape)
    assert network(x=x, mask=mask, out={"total": array})["total"] is array
    _agrees(network.bind([x, mask])(), _expected(x, mask))


# on a GPU that is played

_X = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
_SHAPES = {"scores": (7,), "more/scores": (1, 7), "again": (7,)}


def _host(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, DeviceArray) else value


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("place", [lambda value, driver: value, on_device], ids=["host", "device"])
def test_outputs_on_a_gpu(place: Callable, graph: bool, poison: bool) -> None:
    plan = cooperative_plan()
    driver = driver_of(plan)
    network = Network(plan, driver=driver, graph=graph, poison=poison)
    there = on_device(np.full(7, np.nan, np.float32), driver)
    here = np.full((1, 7), np.nan, np.float32)
    for scale in (1, 2):
        expected = cooperative_expected(scale * _X)
        found = network(place(scale * _X, driver), out={"again": there, "more/scores": here})
        assert found["again"] is there and found["more/scores"] is here
        for name, value in expected.items():
            np.testing.assert_allclose(_host(found[name]), value, rtol=1e-4)
    # Outputs that were asked for are whole, and later calls have memory of their own.
    network(place(_X, driver))
    np.testing.assert_allclose(there.numpy(), expected["again"], rtol=1e-4)


def test_outputs_on_a_gpu_that_overlap() -> None:
    plan = cooperative_plan()
    driver = driver_of(plan)
    network = Network(plan, driver=driver)
    there, other = (on_device(np.zeros(7, np.float32), driver) for _ in range(2))
    x = on_device(_X, driver)

    class Part:
        """The first rows of the input, as memory for an output."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, *, stream: int) -> Any:
            part = DeviceArray(x._cuda, x._stream, x._ready, x._block, (7,), "float32")
            return part.__dlpack__(stream=stream)

    with pytest.raises(InputError, match="share memory"):
        network(x, out={"scores": there, "again": there})
    with pytest.raises(InputError, match=r"must have shape \(1, 7\) and has \(7,\)"):
        network(x, out={"more/scores": other})
    part = Part()
    found = network(x, out={"scores": part, "again": there})
    assert found["scores"] is part
    for name, value in cooperative_expected(_X).items():
        seen = x.numpy().reshape(-1)[:7] if name == "scores" else _host(found[name])
        np.testing.assert_allclose(np.asarray(seen), value, rtol=1e-4)
    on_cpu = Network(plan, device="cpu")
    with pytest.raises(InputError, match="is on a GPU, and this call writes on the host"):
        on_cpu(_X, out={"again": there})


@pytest.mark.parametrize("graph", [False, True])
def test_bound_buffers_on_a_gpu(graph: bool) -> None:
    plan = cooperative_plan()
    driver = driver_of(plan)
    network = Network(plan, driver=driver, graph=graph)
    there = on_device(np.zeros(7, np.float32), driver)
    x = np.zeros((10, 10), np.float32)
    bound = network.bind([x], {"again": there})
    for scale in (1, 2):
        x[...] = scale * _X
        found = bound()
        assert found["again"] is there and isinstance(found["scores"], np.ndarray)
        for name, value in cooperative_expected(x).items():
            np.testing.assert_allclose(_host(found[name]), value, rtol=1e-4)
    staying = network.bind([on_device(_X, driver)], {"again": there})
    for name, value in cooperative_expected(_X).items():
        np.testing.assert_allclose(_host(staying()[name]), value, rtol=1e-4)
