"""Outputs that other libraries use on streams of theirs, and calls beside their captures of CUDA graphs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.errors import DeviceError
from souffle.runtime import DeviceArray, Network, dlpack
from tests.runtime.plans import cooperative_expected, cooperative_plan
from tests.runtime.played import driver_of, on_device

_X = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
_GLOBAL, _NON_BLOCKING = 0, 1

pytestmark = pytest.mark.usefixtures("both_modes")


class _Library:
    """Another library on the same device, with a context, a stream and memory of its own."""

    def __init__(self, driver: RehearsalDriver, flags: int = _NON_BLOCKING) -> None:
        self._driver = driver
        self("cuCtxPushCurrent", 1)
        self.stream = self("cuStreamCreate", flags)

    def __call__(self, name: str, *args: Any) -> Any:
        status, *results = getattr(self._driver, name)(*args)
        assert int(status) == 0, f"{name}: {status.name}"
        return results[0] if results else None

    def read_later(self, capsule: Any, output: DeviceArray, stream: int) -> int:
        """Queue a copy of a lent output on a stream; where it goes."""
        place = self("cuMemAlloc", output.nbytes)
        self("cuMemcpyDtoDAsync", place, output._block.address, output.nbytes, stream)
        return place

    def values(self, place: int, count: int, stream: int) -> np.ndarray:
        found = np.empty(count, np.float32)
        self("cuMemcpyDtoHAsync", found.ctypes.data, place, found.nbytes, stream)
        self("cuStreamSynchronize", stream)
        return found


class _Captured:
    """A tensor whose library makes whoever reads it wait for a stream of its own, as PyTorch's do."""

    def __init__(self, library: _Library, held: DeviceArray) -> None:
        self._library, self._held = library, held

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int) -> Any:
        event = self._library("cuEventCreate", 2)
        self._library("cuEventRecord", event, self._library.stream)
        self._library("cuStreamWaitEvent", stream, event, 0)
        return self._held.__dlpack__(stream=-1)


def _opened() -> tuple[Network, RehearsalDriver, DeviceArray]:
    plan = cooperative_plan()
    driver = driver_of(plan)
    network = Network(plan, driver=driver)
    network.open()
    return network, driver, on_device(_X, driver)


def _agrees(found: dict[str, Any]) -> None:
    for name, value in cooperative_expected(_X).items():
        array = found[name].numpy() if isinstance(found[name], DeviceArray) else found[name]
        np.testing.assert_allclose(array, value, rtol=1e-4)


@pytest.mark.parametrize("stream", ["legacy", "per thread", "of its own", "of its own, destroyed"])
def test_memory_is_not_used_again_before_its_reader_has_read_it(stream: str) -> None:
    network, driver, tensor = _opened()
    other = on_device(2 * _X, driver)
    library = _Library(driver)
    handle = {"legacy": 1, "per thread": 2}.get(stream, library.stream)
    expected = cooperative_expected(_X)["scores"]
    places = []
    for _ in range(40):
        output = network(tensor)["scores"]
        capsule = output.__dlpack__(stream=handle)
        places.append(library.read_later(capsule, output, handle))
        del output, capsule
        network(other)
        network(other)
    if stream == "of its own, destroyed":
        event = library("cuEventCreate", 2)
        library("cuEventRecord", event, handle)
        library("cuStreamDestroy", handle)
        network(other)
        library("cuEventSynchronize", event)
        handle = 2
    for place in places:
        np.testing.assert_allclose(library.values(place, 7, handle), expected, rtol=1e-4)


def test_inputs_are_kept_until_they_were_read() -> None:
    """Memory that its library has again is used at once, in the order of that library's stream alone."""
    network, driver, _ = _opened()
    library = _Library(driver)
    address = library("cuMemAlloc", _X.nbytes)
    library("cuMemcpyHtoDAsync", address, _X.ctypes.data, _X.nbytes, library.stream)
    library("cuStreamSynchronize", library.stream)
    given_back: list[int] = []

    def reuse() -> None:
        given_back.append(address)
        library("cuMemsetD8Async", address, 0, _X.nbytes, library.stream)
        library("cuStreamSynchronize", library.stream)

    class Tensor:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (dlpack.CUDA, 0)

        def __dlpack__(self, *, stream: int) -> Any:
            owner = threading.Event()  # anything that can be watched
            weakref.finalize(owner, reuse)
            return dlpack.capsule(address, _X.shape, "float32", (dlpack.CUDA, 0), owner)

    outputs = network(Tensor())
    assert not given_back
    _agrees(outputs)
    while not given_back:
        network(_X)


def test_memory_that_other_streams_had_goes_back_some_pieces_at_a_time() -> None:
    network, driver, tensor = _opened()
    library = _Library(driver)
    lent, calls = 3 * 40, []
    network(tensor)
    before = driver.live_bytes()
    driver.calls.clear()
    for _ in range(lent // 3):
        outputs = network(tensor)
        for output in outputs.values():
            output.__dlpack__(stream=library.stream)
        del outputs, output
        calls.append([name for name, _ in driver.calls].count("cuMemFree"))
    assert len(set(calls)) <= 1 + lent // 17 and calls[-1] >= lent - 20
    assert driver.live_bytes() <= before + 20 * 28
    del network, tensor
    gc.collect()
    assert driver.live_bytes() == 0


def test_memory_that_waits_is_given_back_where_memory_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    network, driver, tensor = _opened()
    library = _Library(driver)
    for output in network(tensor).values():
        output.__dlpack__(stream=library.stream)
    del output
    most, allocate = driver.live_bytes(), RehearsalDriver._cuMemAlloc

    def limited(self: RehearsalDriver, nbytes: int) -> Any:
        full = self.live_bytes() + nbytes > most
        return self.CUresult.CUDA_ERROR_OUT_OF_MEMORY if full else allocate(self, nbytes)

    monkeypatch.setattr(RehearsalDriver, "_cuMemAlloc", limited)
    held = network(tensor)
    _agrees(held)
    with pytest.raises(DeviceError, match=r"OUT_OF_MEMORY.*an output of 28 bytes"):
        network(tensor)


@pytest.mark.parametrize("flags", [_NON_BLOCKING, 0])
@pytest.mark.parametrize("where", ["the same thread", "another thread"])
def test_another_librarys_capture_stays_valid(flags: int, where: str) -> None:
    """Whatever of ours happens meanwhile: calls, copies, outputs that come and go, a network that is let go of."""
    network, driver, tensor = _opened()
    spare = Network(cooperative_plan(), driver=driver)
    spare(_X)
    library = _Library(driver, flags)
    before = {name: network(tensor) for name in ("legacy", "side", "own")}
    capsules = [before["legacy"][name].__dlpack__(stream=1) for name in ("scores", "again")]
    capsules.append(before["side"]["scores"].__dlpack__(stream=library.stream))
    library("cuStreamBeginCapture", library.stream, _GLOBAL)

    def meanwhile() -> None:
        if not driver.contexts:
            driver.contexts.append(1)
        # The host waits for the content: what is captured cannot.
        capsules.append(before["own"]["scores"].__dlpack__(stream=library.stream))
        capsules.append(before["own"]["scores"].__dlpack__(stream=1))
        _agrees(before["own"])
        capsules.clear()
        before.clear()
        gc.collect()
        for _ in range(20):
            _agrees(network(tensor))
            _agrees(network(_X))
            for output in network(tensor).values():
                output.__dlpack__(stream=2)
        del output
        _agrees(network.capture()(_X))
        network.time(_X, repeats=2, warmup=0)

    if where == "the same thread":
        meanwhile()
    else:
        failures: list[BaseException] = []

        def guarded() -> None:
            try:
                meanwhile()
            except BaseException as error:  # whatever the thread raises is the test's failure
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join(60)
        assert not thread.is_alive() and not failures, failures
    del spare
    gc.collect()
    assert int(library("cuStreamIsCapturing", library.stream)) == 1
    graph = library("cuStreamEndCapture", library.stream)
    assert not driver._graphs[graph], "nothing of ours has become a part of it"
    _agrees(network(tensor))
    assert getattr(driver._thread, "mode", _GLOBAL) == _GLOBAL and driver.contexts == [1]


def test_what_the_default_stream_had_waits_for_the_end_of_a_capture() -> None:
    """Beside a capture on a stream that waits for the default stream, that one cannot be asked."""
    network, driver, tensor = _opened()
    library = _Library(driver, flags=0)
    output = network(tensor)["scores"]
    address, capsule = output._block.address, output.__dlpack__(stream=1)
    library("cuStreamBeginCapture", library.stream, _GLOBAL)
    del output, capsule
    driver.launches.clear()
    for _ in range(3):
        _agrees(network(tensor))
    assert all(address not in launch["pointers"] for launch in driver.launches)
    library("cuStreamEndCapture", library.stream)
    _agrees(network(tensor))
    assert address in driver.launches[-3]["pointers"]


def test_a_call_inside_of_a_capture_of_its_inputs_stream_is_refused() -> None:
    network, driver, tensor = _opened()
    library = _Library(driver)
    library("cuStreamBeginCapture", library.stream, _GLOBAL)
    with pytest.raises(DeviceError, match=r"two_stage was called while another library captures.*Network\.capture"):
        network(_Captured(library, tensor))
    status = driver.cuStreamEndCapture(library.stream)[0]
    assert status != 0, "its library is told as well"
    _agrees(network(_Captured(library, tensor)))
