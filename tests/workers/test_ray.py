"""A Ray cluster of several nodes that come and go, on this machine; at last its head goes."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from souffle.workers import WorkersLostError, engine_for, process
from souffle.workers.ray_engine import RayPool, ray_engine
from souffle.workers.retrying import RetryingEngine
from tests.workers.processes import MARK, marked, wait_for
from tests.workers.test_engines import first_line, job, outcome

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")

pytestmark = pytest.mark.xdist_group("workers")


class Grown(NamedTuple):
    """A cluster, of which the head has a core."""

    ray: Any
    client: str
    mark: str


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="package")
def cluster() -> Iterator[Grown]:
    mark, port = secrets.token_hex(8), free_port()
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("PYTHONPATH", os.getcwd())
        # A token would have to be there when Ray is imported.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", folder)
        for name in ("period_ms", "timeout_ms", "initial_delay_ms"):
            patch.setenv(f"RAY_health_check_{name}", "1000")
        patch.setenv("RAY_health_check_failure_threshold", "2")
        options = {"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": port}
        found = cluster_utils.Cluster()
        try:
            found.add_node(**options)
            yield Grown(found, f"127.0.0.1:{port}", mark)
        finally:
            found.shutdown()
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not marked(mark))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def pool(cluster: Grown) -> RayPool:
    return RayPool(cluster.ray.address)


@pytest.fixture(scope="package")
def engine(pool: RayPool) -> Iterator[RetryingEngine]:
    with RetryingEngine("grown", pool) as engine:
        yield engine


def node_of(worker: str) -> str:
    return worker.partition(":")[0]


def test_nodes_come_and_go(cluster: Grown, engine: RetryingEngine, tmp_path) -> None:
    assert engine.workers == 1 and outcome(engine, "double", 1).value == 2
    assert first_line(outcome(engine, "double", 1, resource="gpu")) == "no node of the Ray cluster has a GPU"
    node = cluster.ray.add_node(num_cpus=1, num_gpus=1)
    wait_for(lambda: engine.workers == 2)
    futures = [engine.submit(job("sleep", 0.2)) for _ in range(8)]
    head, second = sorted({node_of(future.result(timeout=60).worker) for future in futures})
    # Where one node has failed, another one tries.
    for number in range(3):
        path = tmp_path / str(number)
        found = outcome(engine, "at_first", (str(path), "full disk"))
        assert found.attempts == 2 and len(set(found.value)) == 2
    owner = node_of((found := outcome(engine, "whereabouts", resource="gpu")).worker)
    assert owner in (head, second)
    assert [outcome(engine, "whereabouts", resource="gpu").value["pid"] for _ in range(3)] == [found.value["pid"]] * 3
    # The actor itself ends, not what is below it.
    path = tmp_path / "gpu"
    future = engine.submit(job("tell_and", (str(path), "sleep", 600.0), resource="gpu"))
    wait_for(path.exists)
    path.unlink()
    [actor] = [pid for pid, name in marked(cluster.mark).items() if name.startswith("ray::GpuTasks")]
    os.kill(actor, signal.SIGKILL)
    wait_for(path.exists)
    assert int(path.read_text()) != found.value["pid"]
    # A node that goes takes its jobs with it; they are done by the other one.
    running = [engine.submit(job("tell_and", (str(tmp_path / f"r{n}"), "sleep", 2.0))) for n in range(2)]
    wait_for(lambda: all((tmp_path / f"r{n}").exists() for n in range(2)))
    cluster.ray.remove_node(node, allow_graceful=False)
    ended = [each.result(timeout=60) for each in running]
    assert [each.value for each in ended] == [2.0] * 2 and sorted(each.attempts for each in ended) == [1, 2]
    assert {node_of(each.worker) for each in ended} == {head if owner == second else second}
    wait_for(lambda: engine.workers == 1)
    assert future.result(timeout=60).failure


def test_rays_own_worker_may_end(cluster: Grown, engine: RetryingEngine, tmp_path) -> None:
    path = tmp_path / "pid"
    future = engine.submit(job("tell_and", (str(path), "sleep", 1.0)))
    wait_for(path.exists)
    for pid, name in marked(cluster.mark).items():
        if name.startswith("ray::run_task"):
            os.kill(pid, signal.SIGKILL)
    found = future.result(timeout=60)
    assert (found.value, found.attempts) == (1.0, 2)


def test_another_version_of_souffle_is_refused(
    engine: RetryingEngine, cluster: Grown, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = f"import sys; sys.path[:] = sys.argv[4:]; import souffle; souffle.__version__ = '9.9'; {process._START}"
    monkeypatch.setattr(process, "_START", patched)
    with engine_for(f"ray:{cluster.ray.address}") as other:
        found = outcome(other, "double", 1)
    assert "and the job comes from 9.9" in first_line(found) and found.attempts == 2
    assert outcome(engine, "double", 1).value == 2


def test_a_gateway_that_is_killed_is_not_the_cluster(
    cluster: Grown, engine: RetryingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that is not connected in time: there is another one."""
    monkeypatch.setattr("souffle.workers.ray_engine._CLIENT_SECONDS", (0.01, 15.0, 15.0, 15.0))
    pool = RayPool(f"ray://{cluster.client}")
    with RetryingEngine("by its client", pool) as other:
        data = os.urandom(10**6)
        key = other.share(data)
        assert outcome(other, "lengths", shared=(key,)).value == {key: 10**6}
        future = other.submit(job("sleep", 600.0))
        pool.process.kill()
        with pytest.raises(WorkersLostError, match=r"by its client are lost: .* ended with signal SIGKILL"):
            future.result(timeout=60)
        with pytest.raises(WorkersLostError):
            other.share(b"more")
    assert outcome(engine, "double", 1).value == 2


def test_the_head_is_killed(cluster: Grown, engine: RetryingEngine, pool: RayPool) -> None:
    """All that is under way and waits says so, and nothing waits for ever."""
    pool.most_silent_seconds = 2.0
    futures = [engine.submit(job("sleep", 600.0)) for _ in range(30)]
    for pid, name in marked(cluster.mark).items():
        if name in ("gcs_server", "raylet"):
            os.kill(pid, signal.SIGKILL)
    for future in futures:
        with pytest.raises(WorkersLostError, match="are lost"):
            future.result(timeout=60)
    with pytest.raises(WorkersLostError):
        engine.submit(job("double", 1))
    assert engine.workers == 0
    with pytest.raises(WorkersLostError, match=r"lets us in at ray://127.0.0.1:\d+ \(its port .* ConnectionRefused"):
        ray_engine(f"//127.0.0.1:{free_port()}")
