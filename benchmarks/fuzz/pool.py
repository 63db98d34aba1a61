"""A worker process that is started again where it dies or takes too long."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["Worker"]

_NETWORKS = 400
"""After so many a new process is started: what a compiler leaves behind in memory adds up."""


class Worker:
    """One process, as a context.

    Parameters
    ----------
    folder : Path
        For compiled texts and what the process prints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen | None = None
        self._buffer = b""
        self._served = 0
        self._cancelled = False
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def printed(self) -> str:
        """The end of what the process printed."""
        path = self._folder / "worker.log"
        return path.read_text(errors="replace")[-1500:] if path.exists() else ""

    def cancel(self) -> None:
        """End the request in progress, from another thread; there will be no other."""
        self._cancelled = True
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()
        self._process = None

    def _start(self) -> None:
        self.stop()
        shutil.rmtree(self._folder / "cache", ignore_errors=True)
        self._buffer, self._served = b"", 0
        environment = {
            **os.environ,
            "SOUFFLE_CACHE": str(self._folder / "cache"),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        with (self._folder / "worker.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fuzz.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._line(time.monotonic() + 120)

    def _line(self, deadline: float) -> dict | str:
        """The next answer; ``"crash"`` or ``"timeout"`` where there is none."""
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return "timeout"
            data = os.read(descriptor, 1 << 16)
            if not data:
                return "crash"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def run(self, request: dict, seconds: float) -> dict:
        """What comes of a request: ``{"generate": facts, "outcomes": {target: record}}``.

        Parameters
        ----------
        request : dict
            See :mod:`benchmarks.fuzz.worker`.
        seconds : float
            For each target.
        """
        result: dict = {"generate": {}, "outcomes": {}}
        left = list(request["targets"])
        while not self._cancelled:
            if self._process is None or self._process.poll() is not None or self._served >= _NETWORKS:
                self._start()
            self._served += 1
            try:
                self._process.stdin.write((json.dumps({**request, "targets": left}) + "\n").encode())
                self._process.stdin.flush()
            except BrokenPipeError:
                continue
            doing = "generate"
            while True:
                answer = self._line(time.monotonic() + seconds)
                if isinstance(answer, str):
                    result["outcomes"][doing] = self._death(answer, doing, request)
                    break
                if answer.get("done"):
                    return result
                if "begin" in answer:
                    doing = answer["begin"]
                elif "end" in answer:
                    where = result if doing == "generate" else result["outcomes"]
                    where[answer.pop("end")] = answer
            if doing == "generate":
                return result
            left = left[left.index(doing) + 1 :]
            if not left:
                break
        return result

    def _death(self, how: str, doing: str, request: dict) -> dict:
        process = self._process
        status = process.wait() if how == "crash" else None
        tail = self.printed.strip().splitlines()
        record = {"kind": how, "detail": f"exit status {status}: {tail[-1][:200] if tail else ''}" if status else ""}
        if request.get("failures"):
            running = Path(request["failures"]) / f"running-{process.pid}.json"
            if running.exists() and doing != "generate":
                path = running.with_name(f"{request.get('seed', 0)}-{doing}.json")
                data = json.loads(running.read_text())
                path.write_text(json.dumps({"target": doing, **record, **data}, indent=1) + "\n")
                record["file"] = str(path)
            running.unlink(missing_ok=True)
        self.stop()
        if doing == "generate":
            # Only ONNX Runtime has run yet.
            return {"kind": "unsure", "detail": f"{how} of the oracle: {record['detail']}"}
        return record
