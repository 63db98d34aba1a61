"""The checkouts of :mod:`benchmarks.compare_texts`: where they lie, what is compiled in them, what is kept of it."""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["REPOSITORY", "Checkout", "Configuration", "Results", "compile_missing"]

REPOSITORY = Path(__file__).resolve().parents[1]
_WORKER = Path(__file__).with_name("compare_texts_worker.py")
_OPTIONS = ("level", "precision", "arch", "partition")


@dataclass(frozen=True)
class Configuration:
    """A model, and how it is compiled."""

    model: str
    size: str
    precision: str
    arch: str
    partition: str
    level: str

    @property
    def but_level(self) -> tuple[str, ...]:
        """All but the level: a row of the table."""
        return (self.model, self.size, self.precision, self.arch, self.partition)

    @property
    def label(self) -> str:
        """In a few words."""
        return " ".join((*self.but_level, self.level))

    @property
    def options(self) -> dict[str, str]:
        """What ``souffle.compile`` is asked for."""
        return {name: getattr(self, name) for name in _OPTIONS}


def _git(folder: Path, *command: str, check: bool = False) -> str | None:
    """What git says; None where it fails."""
    done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True)
    if done.returncode:
        if check:
            raise SystemExit(f"git {' '.join(command)}: {done.stderr.strip()}")
        return None
    return done.stdout.strip()


@dataclass(eq=False)
class Checkout:
    """One side.

    Attributes
    ----------
    name : str
        As it was given.
    folder : Path
    commit : str
        Under which its results are kept. Empty where they are not: the folder has changes, or is no work tree of git.
    revision : str
        What is checked out at the folder when it is first needed, and removed at the end; empty where it is there.
    """

    name: str
    folder: Path
    commit: str
    revision: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, scratch: Path) -> Checkout:
        """A folder that has Souffle in it, else a revision, which is checked out at `scratch` when it is needed."""
        folder = Path(name).resolve()
        if (folder / "souffle").is_dir():
            return cls(name, folder, _clean_commit(folder))
        commit = _git(REPOSITORY, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if commit is None:
            raise SystemExit(f"{name} is neither a folder with souffle/ in it nor a revision of {REPOSITORY}")
        return cls(name, scratch, commit, commit)

    def prepare(self) -> None:
        """Make the folder where it is not there yet."""
        with self._lock:
            if self.revision and not self.folder.exists():
                _git(REPOSITORY, "worktree", "add", "--detach", str(self.folder), self.revision, check=True)

    def remove(self) -> None:
        """Take away what :meth:`prepare` made."""
        if self.revision and self.folder.exists():
            _git(REPOSITORY, "worktree", "remove", "--force", str(self.folder))

    def start(self, work: dict[str, Any], errors: Path) -> subprocess.Popen[str]:
        """Start the worker within the checkout; this process's own modules are out of its sight."""
        self.prepare()
        environment = {key: value for key, value in os.environ.items() if key != "SOUFFLE_TUNING_LOGS"}
        environment["PYTHONPATH"] = str(self.folder)
        command = [sys.executable, "-c", _WORKER.read_text(), json.dumps(work)]
        with errors.open("w") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._started.append(process)
        return process

    def stop(self) -> None:
        """End the workers that still run."""
        for process in self._started:
            process.terminate()


def _clean_commit(folder: Path) -> str:
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != folder or _git(folder, "status", "--porcelain") != "":
        return ""
    return _git(folder, "rev-parse", "HEAD") or ""


class Results:
    """What came of each configuration: lines of JSON, and the texts beside them by their hashes.

    Parameters
    ----------
    path : Path or None
        Where those of commits are kept, and found by later calls.
    scratch : Path
        For the others, as long as this call lasts.
    """

    def __init__(self, path: Path | None, scratch: Path) -> None:
        self._path, self._scratch = path, scratch
        self._found: dict[tuple[str, Configuration], dict[str, Any]] = {}
        self._lock = threading.Lock()
        # The division of a network's kernels into modules looks at the machine's cores.
        self._where = {"cores": os.cpu_count(), "tvm": importlib.metadata.version("apache-tvm")}
        if path is not None and path.exists():
            for line in _whole_lines(path):
                if line["where"] == self._where and all(self._file(path, key).exists() for key in _hashes(line)):
                    self._found[line["commit"], Configuration(**line["configuration"])] = line

    @staticmethod
    def _file(path: Path, digest: str) -> Path:
        return path.with_suffix(".texts") / f"{digest}.gz"

    @staticmethod
    def _key(checkout: Checkout) -> str:
        return checkout.commit or f"not kept: {id(checkout)}"

    def has(self, checkout: Checkout, configuration: Configuration) -> bool:
        """Whether it is there."""
        return (self._key(checkout), configuration) in self._found

    def get(self, checkout: Checkout, configuration: Configuration) -> dict[str, Any]:
        """What the worker gave, texts and layout included; ``{"failed": why}`` where there is nothing."""
        line = self._found[self._key(checkout), configuration]
        if "failed" in line:
            return line
        parts = [self._read(digest) for digest in _hashes(line)]
        return {**line, "modules": parts[1:], **json.loads(parts[0])}

    def _read(self, digest: str) -> str:
        kept = None if self._path is None else self._file(self._path, digest)
        file = kept if kept is not None and kept.exists() else self._file(self._scratch, digest)
        return gzip.decompress(file.read_bytes()).decode()

    def add(self, checkout: Checkout, configuration: Configuration, onnx: str, found: dict[str, Any]) -> None:
        """Keep what came of a configuration; a failure for this call only."""
        if "failed" in found:
            line = {"failed": found["failed"]}
        else:
            kept = self._path is not None and checkout.commit
            path = self._path if kept else self._scratch
            plan = json.dumps({"layout": found["layout"], "names": found["names"]})
            line = {
                "commit": checkout.commit,
                "configuration": asdict(configuration),
                "onnx": onnx,
                "where": self._where,
                "seconds": found["seconds"],
                "predicted_us": found["predicted_us"],
                "plan": self._write(path, plan),
                "modules": [self._write(path, text) for text in found["modules"]],
            }
            if kept:
                with self._lock, path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        with self._lock:
            self._found[self._key(checkout), configuration] = line

    def _write(self, path: Path, text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        file = self._file(path, digest)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{digest}.{threading.get_ident()}.part")
            part.write_bytes(gzip.compress(text.encode(), mtime=0))
            part.replace(file)
        return digest


def _hashes(line: dict[str, Any]) -> list[str]:
    return [line["plan"], *line["modules"]]


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, of which a call that was cut short may have left half of the last, which is cut off."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    for line in content[:end].splitlines():
        yield json.loads(line)


def compile_missing(
    checkouts: Sequence[Checkout],
    configurations: Sequence[Configuration],
    results: Results,
    scratch: Path,
    jobs: int,
    timeout: float,
) -> None:
    """Compile what is not there yet.

    A model's file is made once, by the first checkout, for both. One process of a checkout imports it and compiles all
    of its configurations.

    Parameters
    ----------
    checkouts : sequence of Checkout
    configurations : sequence of Configuration
    results : Results
        What is there, and where the rest goes.
    scratch : Path
        For the models' files.
    jobs : int
        Processes at a time.
    timeout : float
        Seconds of one process.
    """
    models: dict[tuple[str, str], list[Configuration]] = {}
    for configuration in configurations:
        models.setdefault((configuration.model, configuration.size), []).append(configuration)
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        started = []
        for (model, size), wanted in models.items():
            missing = [(c, [one for one in wanted if not results.has(c, one)]) for c in checkouts]
            missing = [(checkout, some) for checkout, some in missing if some]
            path = scratch / f"{model.replace(':', '-')}-{size}.onnx"
            file = _ModelFile(checkouts[0], model, size, path, timeout, len(missing))
            started += [pool.submit(_compile, checkout, some, file, results, timeout) for checkout, some in missing]
        try:
            for future in started:
                future.result()
        finally:
            # Nothing is left to end here, unless this is cut short.
            for future in started:
                future.cancel()
            for checkout in checkouts:
                checkout.stop()


class _ModelFile:
    """A model's file, made when its first reader asks for it, and removed when its last has read it."""

    def __init__(self, checkout: Checkout, model: str, size: str, path: Path, timeout: float, readers: int) -> None:
        self.path, self.digest, self.failed = path, "", ""
        self._checkout, self._model, self._timeout = checkout, (model, size), timeout
        self._readers, self._lock = readers, threading.Lock()

    def open(self) -> None:
        """Make it unless it is there, or could not be made, of which `failed` gives the reason."""
        with self._lock:
            if self.digest or self.failed:
                return
            errors = self.path.with_suffix(".log")
            process = self._checkout.start({"build": self._model, "model": str(self.path)}, errors)
            try:
                process.communicate(timeout=self._timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            if process.returncode:
                self.failed = f"building the model: {_last_words(process, errors)}"
            else:
                self.digest = hashlib.sha256(self.path.read_bytes()).hexdigest()

    def close(self) -> None:
        """A reader is done."""
        with self._lock:
            self._readers -= 1
            if not self._readers:
                self.path.unlink(missing_ok=True)


def _compile(
    checkout: Checkout, configurations: Sequence[Configuration], file: _ModelFile, results: Results, timeout: float
) -> None:
    """Compile a model's configurations in one process of a checkout."""
    label = " ".join((checkout.name, *configurations[0].but_level[:2]))
    print(f"{label}: {len(configurations)} configurations", file=sys.stderr, flush=True)
    began, waiting = time.monotonic(), list(configurations)
    file.open()
    failed = file.failed
    if not failed:
        errors = file.path.with_suffix(f".{id(checkout)}.log")
        asked = [configuration.options for configuration in configurations]
        process = checkout.start({"model": str(file.path), "configurations": asked}, errors)
        watch = threading.Timer(timeout, process.kill)
        watch.start()
        for line in process.stdout:
            results.add(checkout, waiting.pop(0), file.digest, json.loads(line))
        process.wait()
        watch.cancel()
        failed = _last_words(process, errors)
    file.close()
    for configuration in waiting:
        results.add(checkout, configuration, file.digest, {"failed": failed})
    print(f"{label}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _last_words(process: subprocess.Popen[str], errors: Path) -> str:
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit status {process.returncode}: {lines[-1] if lines else 'nothing was said'}"
