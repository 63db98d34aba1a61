"""One network, called from many threads at the same time: each call gives what it would give alone."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.codegen.plan import Plan
from souffle.errors import InputError
from souffle.runtime import DeviceArray, Network
from tests.runtime.plans import cooperative_expected, cooperative_plan, machine_code
from tests.runtime.played import driver_of

pytestmark = pytest.mark.sampled(4)

_THREADS, _CALLS = 8, 100
_SHAPE = (256, 16)
_PLAYED = ("CUDA", "CUDA, deferred")


def _model() -> bytes:
    """Layers with a sum around each, so that the workspace holds several tensors and is used again; two outputs."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for layer in range(2):
        weights.append(numpy_helper.from_array(rng.standard_normal((16, 16)).astype(np.float32) / 4, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [f"x{layer}", f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Softmax", [f"m{layer}"], [f"s{layer}"]))
        nodes.append(helper.make_node("Add", [f"s{layer}", f"x{layer}"], [f"x{layer + 1}"]))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, _SHAPE) for name in ("x0", "x2", "s1")]
    graph = helper.make_graph(nodes, "layers", infos[:1], infos[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


@functools.cache
def _compiled(kind: str) -> Network | souffle.HostNetwork:
    if kind == "LLVM":
        return souffle.compile(_model(), target="cpu")
    barrier = "cooperative" if kind.endswith("cooperative") else "counter"
    network = souffle.compile(_model(), target="cuda", level="V3", cubin=False, grid_barrier=barrier)
    assert sum(kernel.grid_syncs for kernel in network.kernels) > 0
    return network


def _network(kind: str) -> Network | souffle.HostNetwork:
    """A new one, which has not been opened."""
    network = _compiled(kind)
    if kind not in _PLAYED:
        return copy.copy(network) if kind == "LLVM" else network.on("cpu", blocks=2)
    plan = network.plan
    plan = replace(plan, modules=tuple(replace(m, cubin=machine_code(m.text)) for m in plan.modules))
    return _played(plan, **({"deferred": True} if kind == "CUDA, deferred" else {}))


def _played(plan: Plan, **options: bool) -> Network:
    return Network(plan, driver=driver_of(plan, multiprocessors=1, **options))


@pytest.fixture(autouse=True)
def _threads_change_places_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def _inputs(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).standard_normal(_SHAPE).astype(np.float32) for seed in range(count)]


def _run(*works: Callable[[], None]) -> None:
    """Run all at once, and raise what the first of them raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        try:
            start.wait(60)
            work()
        except BaseException as error:  # whatever a thread raises is the test's failure
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("kind", ["LLVM", "CUDA text, cooperative", "CUDA text, counter", *_PLAYED])
def test_eight_threads_call_one_network(kind: str, tmp_path: Path) -> None:
    """The first calls come at once, to a network from a file too; some calls are refused, and outputs stay as given."""
    network = _network(kind)
    offsets = [buffer.offset for buffer in network.plan.buffers if buffer.kind == "workspace"]
    assert len(set(offsets)) < len(offsets) or kind != "LLVM", "no memory is used again"
    inputs = _inputs(25)
    expected = [network(x) for x in inputs]
    for run in range(2):
        shared = copy.copy(network)
        if kind not in _PLAYED and run:
            network.save(tmp_path / "n.souffle")
            shared = souffle.load(tmp_path / "n.souffle", device="cpu")

        def work(thread: int, shared: Network | souffle.HostNetwork = shared) -> None:
            earlier: list[tuple[int, dict[str, np.ndarray]]] = []
            for call in range(_CALLS // 2):
                which = (7 * thread + call) % len(inputs)
                if call % 10 == thread:
                    with pytest.raises(InputError):
                        shared(inputs[which][:2])
                earlier.append((which, shared(inputs[which])))
                if len(earlier) == 5:
                    for index, outputs in earlier:
                        for name, value in outputs.items():
                            np.testing.assert_array_equal(value, expected[index][name])
                    earlier.clear()

        _run(*(lambda thread=thread: work(thread) for thread in range(_THREADS)))


@pytest.mark.parametrize("kind", ["LLVM", "CUDA text, counter"])
def test_interrupted_calls_leave_the_network_as_it_was(kind: str) -> None:
    network = _network(kind)
    inputs = _inputs(3)
    expected = [network(x) for x in inputs]
    over = threading.Event()

    def right(which: int) -> None:
        for name, value in network(inputs[which]).items():
            np.testing.assert_array_equal(value, expected[which][name])

    def work(which: int) -> None:
        while not over.is_set():
            right(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in (1, 2)]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for thread in threads:
            thread.start()
        while interrupted < 20:
            signal.setitimer(signal.ITIMER_REAL, 1e-3 + 1e-4 * interrupted)
            try:
                while True:
                    right(0)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        over.set()
    for thread in threads:
        thread.join()
    right(0)


@pytest.mark.usefixtures("both_modes")
def test_calls_outlive_the_last_name_of_their_network() -> None:
    inputs = _inputs(4)
    for kind in ("LLVM", "CUDA"):
        network = _network(kind)
        driver = None if kind == "LLVM" else network._options["driver"]
        expected = [network(x)["x2"] for x in inputs]
        works = [lambda x=x, y=y, call=network.__call__: np.testing.assert_array_equal(call(x)["x2"], y)
                 for x, y in zip(inputs, expected, strict=True)]  # fmt: skip
        del network
        _run(*works)
        del works
        gc.collect()
        assert driver is None or driver.live_bytes() == 0


@pytest.mark.usefixtures("both_modes")
def test_on_a_gpu_only_what_a_call_writes_is_there_for_each_call() -> None:
    """Constants are uploaded once by eight first calls, and no workspace is kept for a call that was refused."""
    network = _played(cooperative_plan())
    driver = network._options["driver"]
    x = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)

    def work() -> None:
        for _ in range(20):
            with pytest.raises(InputError):
                network(x[:5])
            np.testing.assert_allclose(network(x)["again"], cooperative_expected(x)["again"], rtol=1e-4)

    _run(*[work] * 8)
    contexts = [name for name, _ in driver.calls].count("cuDevicePrimaryCtxRetain")
    uploads = [args[0] for name, args in driver.calls if name == "cuMemcpyHtoDAsync"]
    streams = len(driver._streams)
    assert contexts == 1 and len(network._runner._idle) == streams <= 8
    assert len(set(uploads)) <= 1 + streams, "the constant, and an input's place in each workspace"


@pytest.mark.usefixtures("both_modes")
def test_an_output_is_copied_while_a_graph_is_captured() -> None:
    network = _played(cooperative_plan())
    driver = network._options["driver"]
    x = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
    workspace = network._runner._idle[0] if network.open() is None else None
    device = network._runner._code.cuda
    with device.current():
        block = workspace.pool.take(400)
        device.to_device(block.address, x, workspace.stream.handle)
        ready = type(workspace.stream)(device.event(), lambda event: None)
    given = DeviceArray(device, workspace.stream, ready, block, (10, 10), "float32")
    output = network(given)["scores"]
    values: list[np.ndarray] = []

    class Watched(type(driver)):
        def _cuLaunchKernelEx(self, *args: object) -> object:
            thread = threading.Thread(target=lambda: values.append(output.numpy()))
            thread.start()
            thread.join()
            return super()._cuLaunchKernelEx(*args)

    driver.__class__ = Watched
    captured = network.capture()
    assert len(values) == len(network.plan.launches)
    for value in (*values, captured(x)["scores"]):
        np.testing.assert_allclose(value, cooperative_expected(x)["scores"], rtol=1e-4)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
@pytest.mark.parametrize("opened", [False, True])
def test_a_copy_shares_nothing_but_the_plan(copied: Callable, opened: bool) -> None:
    x = np.ones((10, 10), np.float32)
    network = Network(cooperative_plan(), device="cpu", blocks=3)
    if opened:
        network.open()
    other = copied(network)
    np.testing.assert_allclose(other(x)["again"], cooperative_expected(x)["again"], rtol=1e-4)
    assert other._runner is not network._runner and other._runner.grids == (3, 3)


@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.BOOL, TensorProto.INT64])
def test_large_aligned_inputs_are_read_in_place(element: int) -> None:
    shape = (100, 1000)
    node = helper.make_node("Not" if element == TensorProto.BOOL else "Neg", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(name, element, shape) for name in "xy")
    opsets = [helper.make_opsetid("", 17)]
    network = souffle.compile(
        helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=9), target="cpu"
    )
    dtype = helper.tensor_dtype_to_np_dtype(element)
    raw = np.zeros(100_000 * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    given = raw[start : start + 100_000 * dtype.itemsize].view(dtype).reshape(shape)
    given[...] = np.arange(100_000).reshape(shape) % 100 - 3
    for value in (given, given.copy()):
        expected = ~value if element == TensorProto.BOOL else -value
        for writable in (True, False):
            value.flags.writeable = writable
            np.testing.assert_array_equal(network(value)["y"], expected)
