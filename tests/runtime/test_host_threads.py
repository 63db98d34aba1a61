"""How many threads compute a call on the processor: those asked for, of what the process may use, and none is left."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle import parallel
from souffle.codegen.plan import Plan
from souffle.errors import OptionError
from souffle.parallel import processor_quota, usable_cores
from souffle.runtime import host_threads
from souffle.runtime.host_calls import Pace
from souffle.runtime.host_network import HostNetwork
from souffle.schedule.cpu import limit_cores
from tests.defects import mended

_ROWS, _WIDTH = 131, 67


def _model() -> bytes:
    """Products and softmaxes of sizes that nothing divides, so that the last parts of loops are shorter or empty."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32), f"w{i}") for i in range(3)
    ]
    nodes = []
    for i in range(3):
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Softmax", [f"m{i}"], [f"x{i + 1}"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (_ROWS, _WIDTH)) for name in ("x0", "x3")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


@functools.cache
def _plan(threads: int | None = None) -> Plan:
    return souffle.compile(_model(), target="cpu", threads=threads).plan


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has; the system shares what it has among them."""
    monkeypatch.setattr(host_threads, "usable_cores", lambda: 4)


def _input(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((_ROWS, _WIDTH)).astype(np.float32)


def _threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.usefixtures("four_cores")
def test_every_number_of_threads_gives_the_same_bits() -> None:
    """Also networks of different numbers in one process that are called at the same time from several threads."""
    session = onnxruntime.InferenceSession(_model(), providers=["CPUExecutionProvider"])
    inputs = [_input(seed) for seed in range(4)]
    networks = [HostNetwork(_plan(), threads=count) for count in (1, 2, 3, 4)]
    expected = [networks[0](x)["x3"] for x in inputs]
    np.testing.assert_allclose(expected[0], session.run(None, {"x0": inputs[0]})[0], rtol=1e-4, atol=1e-6)
    wrong: list[int] = []

    def work(number: int) -> None:
        for call in range(150):
            which = (number + call) % 4
            if not np.array_equal(networks[(number + call // 7) % 4](inputs[which])["x3"], expected[which]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads) and not wrong


@pytest.mark.usefixtures("four_cores")
def test_no_more_threads_are_begun_than_are_asked_for_and_callers_leave_none() -> None:
    x = _input()
    expected = HostNetwork(_plan(), threads=1)(x)["x3"]
    network = HostNetwork(_plan())
    assert network.threads == 4 and HostNetwork(_plan(), threads=9).threads == 4
    network(x)
    before = _threads_of_process()
    seen: list[bool] = []
    for _ in range(20):
        # TVM's pool is one for each thread that calls, and outlives it.
        thread = threading.Thread(target=lambda: seen.append(np.array_equal(network(x)["x3"], expected)))
        thread.start()
        thread.join()
    assert seen == [True] * 20
    end = time.monotonic() + 10
    while _threads_of_process() > before and time.monotonic() < end:
        time.sleep(0.01)  # the system's thread ends after Python's
    assert _threads_of_process() <= before


def test_one_thread_needs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(host_threads, "_limit", asked.append)
    monkeypatch.setattr(host_threads, "usable_cores", lambda: 4)
    x = _input()
    networks = {1: HostNetwork(_plan(1)), 3: HostNetwork(_plan(3)), 2: HostNetwork(_plan(1), threads=2)}
    for count, network in networks.items():
        asked.clear()
        network(x)
        assert asked == [count] and network.threads == count


@pytest.mark.usefixtures("four_cores")
def test_callers_divide_the_cores() -> None:
    """The second has what the first leaves, as many as its share at least; whoever is inside keeps what it has."""
    first, second = (host_threads.ThreadsOfCalls(most, pooled=True) for most in (1, None))
    inside: list[int] = []

    def enter() -> None:
        with second:
            inside.append(host_threads.ThreadsOfCalls._inside[threading.get_ident()])

    for most, expected in ((1, 3), (4, 2)):
        first.most = most
        with first:
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
        assert inside.pop() == expected
    assert not host_threads.ThreadsOfCalls._inside


def test_the_number_is_kept_in_files_copies_and_versions(tmp_path: Path, four_cores: None) -> None:
    network = HostNetwork(_plan(2))
    network.save(tmp_path / "n.souffle")
    loaded = souffle.load(tmp_path / "n.souffle")
    assert loaded.plan.options.threads == loaded.threads == 2
    more = souffle.load(tmp_path / "n.souffle", threads=3)
    for other in (more, copy.copy(more), pickle.loads(pickle.dumps(more))):
        assert other.threads == 3
    HostNetwork(_plan()).save(tmp_path / "n.souffle")
    assert souffle.load(tmp_path / "n.souffle").threads == 4


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", 10**6])
def test_what_is_no_number_of_threads_is_refused(wrong: object, tmp_path: Path) -> None:
    HostNetwork(_plan()).save(tmp_path / "n.souffle")
    for refused in (
        lambda: souffle.compile(_model(), target="cpu", threads=wrong),
        lambda: souffle.load(tmp_path / "n.souffle", threads=wrong),
    ):
        with pytest.raises(OptionError, match="threads="):
            refused()


@pytest.mark.usefixtures("four_cores")
def test_a_child_process_computes_what_its_parent_did() -> None:
    network, x = HostNetwork(_plan()), _input()
    expected = network(x)["x3"]
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.alarm(60)
            same = all(np.array_equal(network(x)["x3"], expected) for _ in range(20))
            os._exit(0 if same and _threads_of_process() == 4 else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_without_a_pool_runs_in_that_of_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of before are; and a call leaves the processors that its thread may use as they are."""
    x = _input()
    expected = HostNetwork(_plan())(x)["x3"]
    monkeypatch.setattr("souffle.runtime.host_network.share_pool", lambda path: False)
    np.testing.assert_array_equal(HostNetwork(_plan(), threads=2)(x)["x3"], expected)
    cpus = os.sched_getaffinity(0)
    if len(cpus) > 1:
        # As where two processors are one core, of which one is taken.
        monkeypatch.setattr("souffle.schedule.cpu.host.physical_cores", lambda: [min(cpus)])
        thread = threading.Thread(target=lambda: (limit_cores(2), seen.append(os.sched_getaffinity(0))))
        seen: list[set[int]] = []
        thread.start()
        thread.join()
        assert seen == [cpus]


@pytest.mark.usefixtures("four_cores")
def test_tvm_keeps_the_pool_of_a_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("souffle.runtime.host_network.share_pool", lambda path: False)
    network, x = HostNetwork(_plan(), threads=2), _input()
    network(x)
    before = _threads_of_process()
    for _ in range(5):
        thread = threading.Thread(target=lambda: network(x))
        thread.start()
        thread.join()
    if _threads_of_process() < before + 5:
        pytest.fail(mended("the reason of souffle/codegen/host_pool.cpp to be there for short-lived threads"))


def test_tvm_confines_the_thread_that_calls() -> None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) == 1:
        pytest.skip("one processor")
    found: list[set[int]] = []

    def work() -> None:
        tvm.get_global_func("runtime.config_threadpool")(-3, 2, [str(min(cpus))] * 2)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if found == [cpus]:
        pytest.fail(mended("sched_setaffinity in souffle/schedule/cpu/host.py, limit_cores"))
    assert found == [{min(cpus)}]


def _proc(folder: Path, groups: str, mounts: str) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc" / "cgroup").write_text(groups)
    (folder / "proc" / "mountinfo").write_text(mounts)
    return folder / "proc"


_V2 = "30 23 0:26 {root} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
_PERIOD = {"a/cpu.cfs_period_us": "100000\n"}
_V1 = "31 23 0:27 {root} {point} rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.mark.parametrize(
    ("groups", "mount", "root", "files", "quota"),
    [
        ("0::/a/b\n", _V2, "/", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", _V2, "/", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", _V2, "/", {"a/b/cpu.max": "max 100000\n"}, None),
        # What a container sees is a part of the machine's groups, or names of the machine that it does not see.
        ("0::/box/a\n", _V2, "/box", {"a/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/elsewhere\n", _V2, "/", {"cpu.max": "200000 100000\n"}, 2.0),
        ("4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n", _V1, "/", {"a/cpu.cfs_quota_us": "250000\n"} | _PERIOD, 2.5),
        ("3:cpu,cpuacct:/a\n", _V1, "/", {"a/cpu.cfs_quota_us": "-1\n"} | _PERIOD, None),
        ("3:cpu,cpuacct:/a\n", _V1, "/", {"a/cpu.cfs_quota_us": "1\n", "a/cpu.cfs_period_us": "0\n"}, None),
        ("nonsense\n\n", _V1, "/", {}, None),
    ],
)  # fmt: skip
def test_the_quota_of_a_container(
    groups: str, mount: str, root: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    point = tmp_path / "groups"
    point.mkdir()
    for name, text in files.items():
        (point / name).parent.mkdir(parents=True, exist_ok=True)
        (point / name).write_text(text)
    assert processor_quota(_proc(tmp_path, groups, "x\n" + mount.format(root=root, point=point))) == quota


@pytest.mark.parametrize(("quota", "cores"), [(None, 3), (0.2, 1), (1.5, 2), (2.0, 2), (64.0, 3)])
def test_a_quota_bounds_the_threads(quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "physical_cores", lambda: [0, 2, 4])
    monkeypatch.setattr(parallel, "processor_quota", lambda: quota)
    assert usable_cores() == cores


@pytest.fixture(autouse=True)
def _nobody_is_inside() -> Iterator[None]:
    yield
    assert not host_threads.ThreadsOfCalls._inside



@pytest.mark.parametrize(("seconds", "short"), [(1.9e-5, True), (4e-4, False)])
def test_networks_that_are_over_at_once_keep_the_lock_of_python(seconds: float, short: bool) -> None:
    pace = Pace()
    for call in range(3 * pace.calls_left):
        assert not pace.short or not pace.calls_left
        pace.learn(1.0 if call == 1 else seconds)  # one was stopped by the system
    assert pace.calls_left == 0 and pace.short is short


def test_the_calls_that_are_timed_and_those_behind_them_give_the_same() -> None:
    network, x = HostNetwork(_plan()), _input()
    found = [network(x)["x3"] for _ in range(12)]
    assert all(np.array_equal(each, found[0]) for each in found)
    assert network._loaded._pace.calls_left == 0
