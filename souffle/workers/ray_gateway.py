"""The process that is connected with a Ray cluster: requests come by a stream, answers go by it.

It ends with its owner, and a cluster that it has started ends with it.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import LocalRayletDiedError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import souffle
from souffle.workers.framing import framed, receive
from souffle.workers.harness import Answer, Caught, reason
from souffle.workers.ray_task import GpuTasks, run_task
from souffle.workers.watch import end_with_owner

__all__ = ["main"]

_HEARTBEAT_SECONDS = 1.0

_CONNECT_SECONDS = 10.0
"""For the port of a cluster to be found open."""


def main(stream: int, lifeline: int, folder: str, workplace: str, shared: str, cluster: str) -> None:
    """Connect, and serve until the owner closes the stream.

    Parameters
    ----------
    stream, lifeline, folder, workplace, shared
        See :func:`souffle.workers.worker.main`.
    cluster : str
        What :class:`souffle.workers.ray_engine.RayPool` takes, as JSON.
    """
    end_with_owner(lifeline, workplace, stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = socket.socket(fileno=stream)
    owner.set_inheritable(False)
    with Caught() as connecting:
        options = json.loads(cluster)
        _connect(**options)
    if connecting.error is not None:
        why = reason(connecting.error)
        owner.sendall(framed(pickle.dumps(("lost", f"{_asked_for(options['address'])}: {why}"))))
    else:
        _Gateway(owner, Path(shared), own=options["address"] is None).serve()
    with Caught():
        ray.shutdown()
    os._exit(0)


def _asked_for(address: str | None) -> str:
    if address is None:
        return "no Ray cluster can be started on this machine"
    return (
        f"no Ray cluster lets us in at {address} (its port must be reachable, its version ours, and RAY_AUTH_MODE and "
        "RAY_AUTH_TOKEN set as they are there)"
    )


def _connect(address: str | None, cores: int, gpus: int | None) -> None:
    if address is not None:
        if address != "auto":
            # Ray would look for a head that is not there for minutes.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        return
    # Its files go with ours.
    os.environ["RAY_TMPDIR"] = os.environ["TMPDIR"]
    # Its workers find the modules that this process finds.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ray.init(
        address="local",
        num_cpus=cores,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )


class _Gateway:
    """All that happens comes by one queue and is dealt with in one thread."""

    def __init__(self, owner: socket.socket, shared: Path, *, own: bool) -> None:
        self._owner, self._shared, self._own = owner, shared, own
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._references: dict[str, list[ray.ObjectRef]] = {}
        self._task = ray.remote(num_cpus=1, max_retries=0)(run_task)
        self._nodes: list[str] = []
        self._turns = itertools.count()
        self._beats = 0
        # Errors of Ray, with the beat at which they came: is it Ray itself that is gone?
        self._doubtful: list[tuple[int, int, Answer]] = []
        self._gpus = _Gpus(self)

    def serve(self) -> None:
        """Until the owner is gone, or the cluster."""
        for work in (self._read, self._watch):
            threading.Thread(target=work, daemon=True).start()
        while True:
            kind, *content = self._events.get()
            if kind == "end":
                return
            if kind == "lost":
                self._send("lost", *content)
                return
            getattr(self, f"_on_{kind}")(*content)

    def _read(self) -> None:
        while (message := receive(self._owner)) is not None:
            self._events.put(("job", *pickle.loads(message)))
        self._events.put(("end",))

    def _watch(self) -> None:
        """Look at the cluster again and again. What is asked here shows whether its head answers."""
        pause = threading.Event()
        while True:
            with Caught() as asking:
                nodes = ray.nodes()
            if asking.error is not None:
                self._events.put(("lost", f"the head of the Ray cluster does not answer: {reason(asking.error)}"))
                return
            self._events.put(("nodes", nodes))
            pause.wait(_HEARTBEAT_SECONDS)

    def _send(self, *message: Any) -> None:
        self._owner.sendall(framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))

    def _on_nodes(self, nodes: list[dict[str, Any]]) -> None:
        resources = [node["Resources"] for node in nodes if node["Alive"]]
        if self._own and not resources:
            self._events.put(("lost", "the node of the Ray cluster of this machine has ended"))
            return
        self._nodes = [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        gpus = sum(int(each.get("GPU", 0)) for each in resources)
        self._send("nodes", sum(int(each.get("CPU", 0)) for each in resources), gpus)
        self._gpus.there_are(gpus)
        # The beat that comes next may have been asked for before.
        self._beats += 1
        while self._doubtful and self._doubtful[0][0] < self._beats - 1:
            _, number, answer = self._doubtful.pop(0)
            self.answer(number, answer)

    def _on_job(self, number: int, request: tuple[Any, ...], resource: str, avoid: str) -> None:
        if resource == "gpu":
            self._gpus.accept(number, request, avoid)
            return
        others = [node for node in self._nodes if node != avoid] if avoid else []
        strategy: Any = "DEFAULT"
        if others and len(others) < len(self._nodes):
            strategy = NodeAffinitySchedulingStrategy(others[next(self._turns) % len(others)], soft=True)
        with Caught() as asking:
            task = self._task.options(scheduling_strategy=strategy)
            self.follow(number, task.remote(*self.arguments(request)))
        if asking.error is not None:
            self._doubt(number, asking.error)

    def _doubt(self, number: int, error: BaseException) -> None:
        """An error of Ray's, which is an answer if Ray itself is still there."""
        if isinstance(error, LocalRayletDiedError):
            self._events.put(("lost", f"the Ray node of this machine has ended: {error}"))
        else:
            answer = Answer(b"", f"Ray has given it up: {type(error).__name__}\n{error}", elsewhere=True)
            self._doubtful.append((self._beats, number, answer))

    def arguments(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of a task."""
        keys = request[2]
        for key in keys:
            if key not in self._references:
                self._references[key] = [ray.put((self._shared / key).read_bytes())]
        return souffle.__version__, request, {key: self._references[key] for key in keys}

    def follow(self, number: int, reference: ray.ObjectRef) -> None:
        """Have what a task gives come by the queue."""
        reference.future().add_done_callback(lambda done: self._events.put(("done", number, done)))

    def answer(self, number: int, answer: Answer) -> None:
        """Tell the owner, without a worker."""
        self._send("answer", number, tuple(answer), "", "")

    def _on_done(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        answer, worker, node = done.result() if error is None else (None, "", "")
        self._gpus.freed(number, node, alive=error is None or isinstance(error, RayTaskError))
        if error is None:
            self._send("answer", number, answer, worker, node)
        elif isinstance(error, RayTaskError):
            self.answer(number, Answer(b"", f"its worker cannot begin: {reason(error.cause or error)}", True))
        else:
            self._doubt(number, error)


class _Gpus:
    """Actors, one for each GPU of the cluster, and the jobs that wait for them."""

    def __init__(self, gateway: _Gateway) -> None:
        self._gateway = gateway
        self._actor = ray.remote(num_gpus=1, num_cpus=0, max_restarts=0, max_task_retries=0)(GpuTasks)
        self._most = 0
        self._idle: list[tuple[Any, str]] = []
        self._busy: dict[int, Any] = {}
        self._waiting: deque[tuple[int, tuple[Any, ...], str]] = deque()

    def there_are(self, count: int) -> None:
        """So many GPUs are in the cluster."""
        self._most = count
        self._pump()

    def accept(self, number: int, request: tuple[Any, ...], avoid: str) -> None:
        """Have a job wait for a GPU, not of the node `avoid` if there is another."""
        self._waiting.append((number, request, avoid))
        self._pump()

    def freed(self, number: int, node: str, *, alive: bool) -> None:
        """A job has ended on a node, if it was one of these; its actor with it, if that is not alive."""
        actor = self._busy.pop(number, None)
        if actor is not None:
            if alive:
                self._idle.append((actor, node))
            self._pump()

    def _pump(self) -> None:
        while self._waiting and not self._most:
            number, *_ = self._waiting.popleft()
            self._gateway.answer(number, Answer(b"", "no node of the Ray cluster has a GPU"))
        while self._waiting and (self._idle or len(self._busy) < self._most):
            number, request, avoid = self._waiting.popleft()
            self._idle.sort(key=lambda each: each[1] == avoid)
            actor = self._idle.pop(0)[0] if self._idle else self._actor.remote()
            self._busy[number] = actor
            self._gateway.follow(number, actor.run.remote(*self._gateway.arguments(request)))
