"""The played driver: what it runs when, what a capture forbids, and the faults that it plays."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_steps
from benchmarks.rehearsal_driver import RehearsalDriver
from benchmarks.rehearsal_types import CUresult
from souffle.errors import DeviceError
from souffle.runtime import Network, save
from souffle.runtime.cuda import Cuda
from souffle.schedule.gpu.device import device_for
from tests.runtime.plans import cooperative_expected, cooperative_plan
from tests.runtime.played import driver_of

_X = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
_GLOBAL, _RELAXED = 0, 2


class _Played:
    """A driver with a context that stays, and its calls without their status."""

    def __init__(self, **options: Any) -> None:
        self.driver = RehearsalDriver({}, **options)
        self.driver.contexts.append(1)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            status, *results = getattr(self.driver, name)(*args)
            assert int(status) == 0, status.name
            return results[0] if results else None

        return call

    def status(self, name: str, *args: Any) -> str:
        return CUresult(getattr(self.driver, name)(*args)[0]).name.replace("CUDA_", "").replace("ERROR_", "")

    def bytes(self, address: int, count: int = 4) -> list[int]:
        return self.driver._range(address, count).tolist()


# what fits


def test_kernels_fit_as_often_as_their_registers_leave_room() -> None:
    random, plan = np.random.default_rng(0), cooperative_plan()
    device = device_for("sm_90")
    counts = set()
    for _ in range(300):
        registers, threads = int(random.integers(1, 256)), 32 * int(random.integers(1, 33))
        static, dynamic = (int(random.choice([0, 1, 128, 5000, 40_000])) for _ in range(2))
        driver = driver_of(plan, resources={"fused": (registers, static)}, multiprocessors=1)
        cuda = Cuda(0, driver)
        with cuda.current():
            function = cuda.function(cuda.load_module(plan.modules[0].cubin), "fused", dynamic)
            assert cuda.registers(function) == registers and cuda.static_shared_bytes(function) == static
            blocks = cuda.resident_blocks(function, threads, dynamic)
        assert blocks == min(device.resident_blocks(threads, static + dynamic, registers).values())
        counts.add(blocks)
    assert {0, 1, 2, 4, 8} <= counts
    large = replace(plan, kernels=(plan.kernels[0], replace(plan.kernels[1], threads=1024)))
    network = Network(large, driver=driver_of(large, resources={"fused": (40, 0), "bump": (255, 0)}))
    with pytest.raises(DeviceError, match=r"OUT_OF_RESOURCES.*for kernel bump"):
        network(_X)


# when work runs


def test_deferred_work_runs_when_something_waits_for_it() -> None:
    played = _Played(deferred=True)
    first, second = played.cuStreamCreate(1), played.cuStreamCreate(1)
    a, b, c = (played.cuMemAlloc(4) for _ in range(3))
    played.cuMemsetD8Async(a, 1, 4, first)
    played.cuMemcpyDtoDAsync(b, a, 4, second)
    event = played.cuEventCreate(2)
    played.cuEventRecord(event, first)
    played.cuStreamWaitEvent(second, event, 0)
    played.cuMemcpyDtoDAsync(c, a, 4, second)
    played.cuMemsetD8Async(a, 2, 4, first)
    assert played.bytes(a) == played.bytes(b) == played.bytes(c) == [0xA5] * 4
    assert played.status("cuEventQuery", event) == "NOT_READY"
    played.cuStreamSynchronize(second)
    assert played.bytes(b) == [0xA5] * 4, "nothing made this copy wait for the first stream"
    assert played.bytes(c) == [1] * 4 == played.bytes(a), "the event's work is done, what came after it is not"
    assert played.status("cuEventQuery", event) == "SUCCESS"
    played.cuMemFree(c)
    assert played.bytes(a) == [2] * 4, "giving memory back waits for all streams"
    played.cuMemsetD8Async(a, 3, 4, first)
    played.cuEventRecord(event, first)
    played.cuStreamDestroy(first)
    assert [played.status("cuEventQuery", event) for _ in range(3)] == ["NOT_READY", "NOT_READY", "SUCCESS"]
    assert played.bytes(a) == [3] * 4


def test_times_are_there_when_the_work_has_run() -> None:
    played = _Played(deferred=True)
    stream, plain = played.cuStreamCreate(1), played.cuEventCreate(2)
    pair = [played.cuEventCreate(0) for _ in range(2)]
    assert played.status("cuEventElapsedTime", *pair) == "INVALID_HANDLE"
    for event in (*pair, plain):
        played.cuEventRecord(event, stream)
    assert played.status("cuEventElapsedTime", *pair) == "NOT_READY"
    played.cuEventSynchronize(pair[1])
    assert played.cuEventElapsedTime(*pair) >= 0
    assert played.status("cuEventElapsedTime", pair[0], plain) == "INVALID_HANDLE"


def test_memory_that_was_given_back_is_overwritten() -> None:
    played = _Played()
    address = played.cuMemAlloc(8)
    piece = played.driver._range(address, 8)
    played.cuMemFree(address)
    assert set(piece.tolist()) == {0xDD} and played.status("cuMemFree", address) == "INVALID_VALUE"
    assert played.status("cuMemsetD8Async", address, 0, 8, 1) == "INVALID_VALUE"


def test_memory_is_given_back_by_the_garbage_collector_at_any_time() -> None:
    class _Owner:
        def __init__(self) -> None:
            self.address, self.itself = played.cuMemAlloc(8), self

        def __del__(self) -> None:
            played.cuMemFree(self.address)

    played = _Played()
    kept = [played.cuMemAlloc(8) for _ in range(500)]
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for address in kept:
            _Owner()
            assert played.bytes(address) == [0xA5] * 4
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("freed", [False, True])
def test_host_arrays_are_read_late(freed: bool) -> None:
    played = _Played(deferred=True)
    stream, address = played.cuStreamCreate(1), played.cuMemAlloc(1 << 26)
    source = np.ones(1 << 26, np.uint8)  # so large that memory which is freed goes back to the system
    played.cuMemcpyHtoDAsync(address, source.ctypes.data, source.nbytes, stream)
    if freed:
        del source
    else:
        source[5] = 7
    assert played.status("cuStreamSynchronize", stream) == "ILLEGAL_ADDRESS"
    assert b"a host array was freed or overwritten" in played.driver.cuGetErrorString(700)[1]


def test_host_arrays_are_written_late() -> None:
    played = _Played(deferred=True)
    stream, address = played.cuStreamCreate(1), played.cuMemAlloc(16)
    target, other = np.zeros(16, np.uint8), np.zeros(16, np.uint8)
    played.cuMemcpyDtoHAsync(target.ctypes.data, address, 16, stream)
    assert set(target) == {0xC9}
    played.cuStreamSynchronize(stream)
    assert set(target) == {0xA5}
    played.cuMemcpyDtoHAsync(other.ctypes.data, address, 16, stream)
    other[3] = 0  # as whoever gets the memory of an array that was freed
    assert played.status("cuStreamSynchronize", stream) == "ILLEGAL_ADDRESS"
    assert other[3] == 0


def test_a_network_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cooperative_plan()
    networks = [Network(plan, driver=driver_of(plan, deferred=deferred)) for deferred in (False, True)]
    for network in networks:
        network.open()
    monkeypatch.setattr(Cuda, "synchronize", lambda *args: None)
    expected = cooperative_expected(_X)["scores"]
    assert [bool(np.allclose(network(_X)["scores"], expected, rtol=1e-4)) for network in networks] == [True, False]


# captures


@pytest.mark.parametrize("mode", [_GLOBAL, _RELAXED])
@pytest.mark.parametrize("blocking", [False, True])
def test_what_a_capture_forbids(mode: int, blocking: bool) -> None:
    def after(name: str, *args: Any, thread: int = _GLOBAL, event: bool = False) -> tuple[str, str]:
        """The status of a call during a capture, and that of the capture's end."""
        played = _Played()
        stream, address = played.cuStreamCreate(0 if blocking else 1), played.cuMemAlloc(4)
        handles = {
            "address": address,
            "stream": stream,
            "event": played.cuEventCreate(2),
            "own": played.cuEventCreate(2),
        }
        if event:
            played.cuEventRecord(handles["event"], 2)
        played.cuStreamBeginCapture(stream, mode)
        played.cuEventRecord(handles["own"], stream)
        played.cuThreadExchangeStreamCaptureMode(thread)
        found = played.status(name, *(handles.get(arg, arg) for arg in args))
        return found, played.status("cuStreamEndCapture", stream)

    fine = ("SUCCESS", "SUCCESS")
    forbidden = ("STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED")
    for call in (("cuMemAlloc", 4), ("cuMemFree", "address"), ("cuEventQuery", "event")):
        assert after(*call) == (forbidden if mode == _GLOBAL else fine)
        assert after(*call, thread=_RELAXED) == fine
    # What conflicts with any capture, whatever its mode and the thread's.
    default = ("STREAM_CAPTURE_IMPLICIT", "STREAM_CAPTURE_INVALIDATED") if blocking else fine
    for thread in (_GLOBAL, _RELAXED):
        assert after("cuEventRecord", "event", 1, thread=thread) == default
        assert after("cuStreamIsCapturing", 1, thread=thread) == (default[0], "SUCCESS")
    assert after("cuStreamSynchronize", "stream", thread=_RELAXED) == forbidden
    assert after("cuEventQuery", "own", thread=_RELAXED) == ("CAPTURED_EVENT", "STREAM_CAPTURE_INVALIDATED")
    isolated = ("STREAM_CAPTURE_ISOLATION", "STREAM_CAPTURE_INVALIDATED")
    assert after("cuStreamWaitEvent", "stream", "event", 0, event=True) == isolated
    assert after("cuStreamWaitEvent", 2, "own", 0) == ("SUCCESS", "STREAM_CAPTURE_UNJOINED")


def test_streams_join_a_capture_and_leave_it() -> None:
    played = _Played()
    first, second, address = played.cuStreamCreate(1), played.cuStreamCreate(1), played.cuMemAlloc(4)
    forth, back = played.cuEventCreate(2), played.cuEventCreate(2)
    played.cuStreamBeginCapture(first, _GLOBAL)
    played.cuEventRecord(forth, first)
    played.cuStreamWaitEvent(second, forth, 0)
    assert int(played.cuStreamIsCapturing(second)) == 1
    played.cuMemsetD8Async(address, 9, 4, second)
    played.cuEventRecord(back, second)
    played.cuStreamWaitEvent(first, back, 0)
    graph = played.cuGraphInstantiate(played.cuStreamEndCapture(first), 0)
    assert int(played.cuStreamIsCapturing(second)) == 0 and played.bytes(address) == [0xA5] * 4
    played.cuGraphLaunch(graph, first)
    assert played.bytes(address) == [9] * 4


# faults


@pytest.mark.parametrize("deferred", [False, True])
def test_faults_are_played(deferred: bool) -> None:
    plan = cooperative_plan()

    def network(fault: str) -> Network:
        return Network(plan, driver=driver_of(plan, deferred=deferred, fault=fault))

    expected = network("")(_X)
    sticky = network("sticky:5")
    sticky(_X)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"kernels fused, bump.*CUDA_ERROR_ILLEGAL_ADDRESS"):
            sticky(_X)
    for fault, changed in (("wrong:2:fused", "scores"), ("wrong:6", "again"), ("wrong:1:none", None)):
        wrong = network(fault)
        wrong(_X)
        found = wrong(_X)
        different = {name: int((found[name] != value).sum()) for name, value in expected.items()}
        # Later kernels read what the first one has left.
        names = {"scores": ["scores", "more/scores", "again"], "again": ["again"], None: []}[changed]
        assert different == {name: int(name in names) for name in expected}
        assert all(np.array_equal(value, expected[name]) for name, value in wrong(_X).items())
    with pytest.raises(ValueError, match="fault 'wrong:x' is none of"):
        network("wrong:x")


def test_the_host_script_plays_what_it_is_told(tmp_path: Path) -> None:
    save(cooperative_plan(), tmp_path / "two.souffle")
    expected = {f"output/{name}": value.astype(np.float32) for name, value in cooperative_expected(_X).items()}
    np.savez(tmp_path / "two.npz", **{"input/input.1": _X}, **expected)
    case = {"name": "two", "artifact": str(tmp_path / "two.souffle"), "io": str(tmp_path / "two.npz")}
    (tmp_path / "tasks.json").write_text(json.dumps([case]))
    command = ["check", "--rehearse", "--deferred", "--repeats", "3", "--json", str(tmp_path / "found.json")]
    command += ["--tasks", str(tmp_path / "tasks.json")]
    for fault, status, identical in (("", 0, 3), ("wrong:3:fused", 1, 2)):
        assert gpu_steps.main([*command, "--fault", fault]) == status
        result = json.loads((tmp_path / "found.json").read_text())["done"]["two"]
        assert (result["ok"], result["identical_runs"]) == (status == 0, identical)


def test_a_hang_lasts_until_its_process_is_killed() -> None:
    program = (
        "import numpy as np; from souffle.runtime import Network; from tests.runtime.played import driver_of\n"
        "from tests.runtime.plans import cooperative_plan as plan\n"
        "net = Network(plan(), driver=driver_of(plan(), deferred=True, fault='hang:4')); x = np.ones((10, 10), 'f')\n"
        "net(x); print('once', flush=True); net(x)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "once\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()
