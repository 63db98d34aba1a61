"""``ray``: jobs on a Ray cluster, one that is started here and ended with the engine, or one that there is.

Ray ends the process that is connected with it where its head is gone for long, prints what it likes, and takes
signals. So a process of its own is connected (:mod:`souffle.workers.ray_gateway`), and what is here only talks with
that one. Ray's tasks have jobs done by a worker's process below them (:mod:`souffle.workers.ray_task`), which has the
limits that all engines have, and says why it ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import pickle
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from souffle.errors import OptionError
from souffle.parallel import usable_cores
from souffle.workers.errors import WorkersLostError
from souffle.workers.harness import Answer
from souffle.workers.loop import LoopPool, Wire
from souffle.workers.process import ONE_THREAD, ChildProcess, Workplace
from souffle.workers.retrying import Attempt, RetryingEngine

__all__ = ["RayPool", "ray_engine"]

_MOST_CHARACTERS = 107 - len("/0/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Of the folder in which Ray has its sockets, whose paths the system limits."""

_START_SECONDS = 90.0
"""For a cluster to begin, or to answer."""

_CLIENT_SECONDS = (20.0, 20.0, 20.0)
"""For Ray's client to be connected, which takes two, if it does not fail: then it is tried anew. The server that Ray
2.60 forks for each client, among threads of gRPC, does not come up one time in four."""

_OWN_SILENCE_SECONDS, _SILENCE_SECONDS = 20.0, 60.0
"""Of the head, which is asked each second, until the cluster is given up; others may have one that is started anew."""

_END_SECONDS = 10.0
"""For a cluster of ours to end by itself."""


def ray_engine(rest: str | None = None) -> RetryingEngine:
    """An engine of a Ray cluster.

    Parameters
    ----------
    rest : str, optional
        Without it, a cluster of this machine's cores is started here; ``"4"``: of four. ``"HOST:PORT"`` or ``"auto"``
        is a cluster that this machine is a part of, ``"//HOST:PORT"`` one that Ray's client reaches.

    Raises
    ------
    OptionError
        If Ray is not installed, or that is no address.
    WorkersLostError
        If no cluster answers.
    """
    name = "ray" if rest is None else f"ray:{rest}"
    if rest is None or rest.isdecimal():
        address, cores = None, usable_cores() if rest is None else int(rest)
        if cores < 1:
            raise OptionError(f"{name} is not valid: there is at least one worker")
    elif re.fullmatch(r"auto|(//)?[^/:\s]+:\d+|(//)?\[[^/\s]+\]:\d+", rest):
        address, cores = name if rest.startswith("//") else rest, 0
    else:
        raise OptionError(
            f"there is no engine {name!r}: after the colon stands how many workers, 'auto', HOST:PORT or //HOST:PORT"
        )
    if importlib.util.find_spec("ray") is None:
        raise OptionError(f"the engine {name} needs Ray: pip install 'souffle-dl[cluster]'")
    return RetryingEngine(name, RayPool(address, cores))


class RayPool(LoopPool):
    """Has attempts done by the tasks and actors of a cluster.

    Parameters
    ----------
    address : str or None
        As ``ray.init`` takes it; ``None`` for a cluster that begins and ends with the pool.
    cores, gpus : int or None
        Of that cluster; Ray looks for GPUs itself if it is not told.

    Attributes
    ----------
    most_silent_seconds : float
        Of the cluster's head; then it is given up.
    process : ChildProcess or None
        The one that is connected.
    """

    def __init__(self, address: str | None, cores: int = 1, gpus: int | None = None) -> None:
        super().__init__("souffle ray")
        self._arguments = json.dumps({"address": address, "cores": cores, "gpus": gpus})
        self.most_silent_seconds = _OWN_SILENCE_SECONDS if address is None else _SILENCE_SECONDS
        self._environment = {"RAY_USAGE_STATS_ENABLED": "0"} | ONE_THREAD
        if address is None:
            # It listens to the network: let in is who has a token, which Ray would otherwise keep in the user's home.
            self._environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._by_client = address is not None and address.startswith("ray://")
        self._what = "a Ray cluster of this machine" if address is None else f"the Ray cluster at {address}"
        self._workplace = Workplace(_MOST_CHARACTERS)
        self._lanes = {"cpu": _Lane(), "gpu": _Lane()}
        self._under_way: dict[int, Attempt] = {}
        self._numbers = itertools.count()
        self._settled = threading.Event()
        self._why_lost = ""
        self._heard = time.monotonic()
        self.process: ChildProcess | None = None

    @property
    def workers(self) -> int:
        """See :class:`souffle.workers.retrying.Pool`."""
        return self._lanes["cpu"].workers

    @property
    def gpu_workers(self) -> int:
        """The GPUs of the cluster now."""
        return self._lanes["gpu"].workers

    def open(self, lost: Callable[[str], None]) -> None:
        """See :class:`souffle.workers.retrying.Pool`.

        Raises
        ------
        WorkersLostError
            If there is no cluster.
        """

        def tell(why: str) -> None:
            self._why_lost = self._why_lost or why
            self._settled.set()
            lost(why)

        with contextlib.ExitStack() as unless_open:
            unless_open.callback(self.close)
            super().open(tell)
            if not self._settled.wait(_START_SECONDS):
                said = "" if self.process is None else self.process.said
                self._why_lost = f"{self._what} has not answered for {_START_SECONDS:g} s; it said\n{said}"
            if self._why_lost:
                raise WorkersLostError(self._why_lost)
            unless_open.pop_all()

    def share(self, key: str, data: bytes) -> None:
        """See :class:`souffle.workers.retrying.Pool`."""
        self._workplace.put(key, data)

    def _begin(self) -> None:
        self._connect(iter(_CLIENT_SECONDS if self._by_client else ()))
        self._listen()

    def _connect(self, times: Iterator[float]) -> None:
        """Start the process that is connected, anew if it is not by so many seconds, in turn."""
        if self._settled.is_set():
            return
        if self.process is not None:
            self._wire.abort()
            self.process.end()
        self.process = ChildProcess(
            "souffle.workers.ray_gateway", self._workplace, (self._arguments,), self._environment
        )
        self._wire = Wire(self._received, self._closed)
        self._wire.connect(self.loop, self.process.stream)
        seconds = next(times, None)
        if seconds is not None:
            self.loop.call_later(seconds, self._connect, times)

    def _listen(self) -> None:
        silent = time.monotonic() - self._heard
        if silent > self.most_silent_seconds and self._settled.is_set():
            self._lose(f"the head of {self._what} has said nothing for {silent:.0f} s")
        self.loop.call_later(1.0, self._listen)

    def _received(self, message: bytes) -> None:
        if self._why_lost:
            return
        kind, *content = pickle.loads(message)
        if kind == "nodes":
            for lane, workers in zip(self._lanes.values(), content, strict=True):
                lane.workers = workers
            self._heard = time.monotonic()
            self._settled.set()
        elif kind == "answer":
            number, answer, worker, place = content
            attempt = self._under_way.pop(number)
            self._lanes[attempt.job.resource].under_way -= 1
            attempt.end(Answer(*answer), worker, place)
        else:
            self._lose(*content)
        self._pump()

    def _closed(self, fault: str) -> None:
        how, _, said = self.process.end(at_once=bool(fault)).partition("\n")
        self._lose(f"the process that was connected with {self._what} {fault or f'ended with {how}'}; it said\n{said}")

    def _lose(self, why: str) -> None:
        if not self._why_lost:
            self._lost(why)
            for lane in self._lanes.values():
                lane.waiting.clear()
            self._under_way.clear()

    def _accept(self, attempt: Attempt) -> None:
        self._lanes[attempt.job.resource].waiting.append(attempt)

    def _pump(self) -> None:
        if self._why_lost:
            return
        for lane in self._lanes.values():
            while lane.waiting and lane.has_room:
                attempt = lane.waiting.popleft()
                if attempt.wanted:
                    number = next(self._numbers)
                    self._under_way[number] = attempt
                    lane.under_way += 1
                    content = (number, tuple(attempt.request), attempt.job.resource, attempt.avoid)
                    self._wire.send(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))

    def _end(self) -> None:
        if self.process is not None:
            self._wire.abort()
            # Its stream is closed: the cluster, if it is ours, ends in order, or else with the group of the process.
            self.process.stream.close()
            self.process.end(at_once=bool(self._why_lost), seconds=_END_SECONDS)
        self._workplace.close()


class _Lane:
    """The jobs that wait for a resource. A few more than can run are with Ray, so that no worker waits for us."""

    def __init__(self) -> None:
        self.waiting: deque[Attempt] = deque()
        self.workers = self.under_way = 0

    @property
    def has_room(self) -> bool:
        return self.under_way < 2 * self.workers + 8
