"""Compiles what goes to a GPU host: ``python -m benchmarks.gpu_host build``.

A process for each model and size compiles its networks; they, and what they have in common, go into one folder with an
index, ``index.json``. A case of the index has what ``souffle ablate`` tells of a row, and the names of its files.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import grid_barriers, shared_memory
from benchmarks.gpu_networks import NAMES, VERSIONS
from benchmarks.gpu_variants import chosen_variants, file_name
from benchmarks.record import write_json
from souffle import models
from souffle.evaluation.ablation import Variant
from souffle.evaluation.result_file import result_header, source_digest
from souffle.options import LEVELS, PRECISIONS

__all__ = ["build", "build_parser"]

_ROOT = Path(__file__).resolve().parent.parent
_USUAL_PRECISIONS = ("fp32", "mixed")
_WEIGHTS = ".weights.npz"
_log = logging.getLogger("gpu_host")


@dataclass(frozen=True)
class _Network:
    """One to be built."""

    variant: Variant
    precision: str
    constants: str


@dataclass(frozen=True)
class _Group:
    """One model and size: one process compiles all of it, and precisions share its inputs and expected outputs."""

    model: str
    size: str
    steps: str | None

    def stem(self, *precision: str) -> str:
        """Of its files' names, without a precision of what all share. Steps change inputs, so they are part of it."""
        name = re.sub(r"[^A-Za-z0-9.-]", "-", self.model)
        return "-".join([name, self.size, *precision, *([f"{self.steps}steps"] if self.steps else [])])

    def name(self, network: _Network) -> str:
        """Of a network, and of its files."""
        suffix = "" if network.constants == "stored" else f"-{network.constants}"
        return f"{self.stem(network.precision)}-{file_name(network.variant)}{suffix}"

    def networks(self, options: argparse.Namespace, variants: Iterable[Variant]) -> dict[str, _Network]:
        """What is to be built, by name: fp32 first."""
        networks: dict[str, _Network] = {}
        for precision in (one for one in PRECISIONS if one in options.precision):
            for variant in variants:
                # Versions share constants in one file.
                stored = self.size == "tiny" or self.model in VERSIONS or variant.level in options.check_paper
                synthetic = self.size != "tiny" and self.model not in VERSIONS
                for constants in [*["stored"] * stored, *["synthetic"] * synthetic]:
                    network = _Network(variant, precision, constants)
                    networks[self.name(network)] = network
        return networks


class _Folder:
    """The artifacts and their index, into which several threads enter networks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path = options.out
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        self._options = options
        path = self.path / "index.json"
        self.index: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}}
        for key in ("too_large", "equal", "failed"):
            self.index.setdefault(key, {})
        self.compiler = source_digest()

    def write(self) -> None:
        """Keep the index."""
        write_json(self.path / "index.json", self.index)

    def has(self, name: str) -> bool:
        """Whether a network needs not be compiled; one that could not be is tried again."""
        return any(name in self.index[key] for key in ("too_large", "equal")) or (
            name in self.index["cases"] and (self.path / f"{name}.souffle").exists()
        )

    def states(self, names: Iterable[str]) -> dict[str, str | None]:
        """By which state of the compiler each was made."""
        equal = self.index["equal"]
        return {name: (equal.get(name) or self.index["cases"].get(name, {})).get("compiler") for name in names}

    def enter_graph(self, names: Iterable[str], graph: Path) -> None:
        """Name the model's file in its cases; those of before models travelled lack it."""
        for name in names:
            if name in self.index["cases"]:
                self.index["cases"][name]["graph"] = graph.name if graph.exists() else None

    def enter(self, group: _Group, name: str, network: _Network) -> None:
        """Put a network that was built into the index, unless it equals another, or is too large to travel."""
        facts = self.path / f"{name}.json"
        about = json.loads(facts.read_text())
        facts.unlink()
        for key in ("too_large", "equal", "failed", "cases"):
            self.index[key].pop(name, None)
        if "failed" in about:
            self.index["failed"][name] = about["failed"]
            _log.warning("%s: %s", name, about["failed"])
            return
        twin = "fp32" if about.get("as_fp32") else self._twin(group, name, network, about)
        if twin is not None:
            self.index["equal"][name] = {"to": twin, "compiler": self.compiler}
            self._remove(name)
            _log.info("%s: the same as %s", name, twin)
            return
        artifact, weights = self.path / f"{name}.souffle", self.path / f"{name}{_WEIGHTS}"
        limit = self._options.max_mib * 2**20
        if artifact.stat().st_size > limit:
            size = artifact.stat().st_size / 2**20
            _log.warning("%s: %.1f MiB is over --max-mib %g and stays here", name, size, self._options.max_mib)
            self.index["too_large"][name] = round(size, 1)
            self._remove(name)
            return
        if weights.exists() and weights.stat().st_size > limit:
            _log.warning("%s: weights that cannot be made again are over --max-mib; it is only timed", name)
            weights.unlink()
        variant = network.variant
        self.index["cases"][name] = {
            **about,
            "model": group.model,
            "size": group.size,
            "level": variant.level,
            "label": variant.label,
            "options": variant.options,
            "precision": network.precision,
            "arch": self._options.arch,
            "steps": int(group.steps) if group.steps else None,
            "constants": network.constants,
            "artifact": artifact.name,
            "weights": _share(weights) if weights.exists() else None,
            "io": f"{group.stem()}.npz",
            "compiler": self.compiler,
        }

    def _remove(self, name: str) -> None:
        for suffix in (".souffle", _WEIGHTS):
            (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def _twin(self, group: _Group, name: str, network: _Network, about: dict[str, Any]) -> str | None:
        """What is there already and runs the very same kernels, in this precision or in fp32."""
        for other, case in self.index["cases"].items():
            same = (case["model"], case["size"], case["constants"]) == (group.model, group.size, network.constants)
            precise = case["precision"] in (network.precision, "fp32")
            if other != name and same and precise and case.get("fingerprint") == about["fingerprint"]:
                return other
        return None

    def drop_weights(self) -> None:
        """Remove weights of networks that were built again."""
        named = {case["weights"] for case in self.index["cases"].values()}
        for path in self.path.glob(f"*{_WEIGHTS}"):
            if path.name not in named:
                path.unlink()

    def sizes(self) -> str:
        """MiB of each model and of all, and the largest file."""
        files_of: dict[str, set[str]] = {}
        for case in self.index["cases"].values():
            key = f"{case['model']} {case['size']} {case['precision']}"
            files_of.setdefault(key, set()).update(case[kind] for kind in ("artifact", "weights") if case[kind])
        sizes = {key: sum((self.path / file).stat().st_size for file in names) for key, names in files_of.items()}
        lines = [f"{key:32} {size / 2**20:8.2f} MiB" for key, size in sizes.items()]
        files = [path for path in self.path.iterdir() if path.is_file()]
        total = sum(path.stat().st_size for path in files)
        largest = max(files, key=lambda path: path.stat().st_size)
        lines.append(f"{'all':32} {total / 2**20:8.2f} MiB, the largest {largest.name}")
        return "\n".join(lines)


def _share(weights: Path) -> str:
    """Keep one file for all networks of equal weights, under the name of its content; the name."""
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    return weights.replace(weights.with_name(f"{digest}{_WEIGHTS}")).name


def _groups(options: argparse.Namespace) -> Iterator[_Group]:
    steps = dict(item.partition("=")[::2] for item in options.steps)
    for size in options.sizes:
        for model in options.models:
            yield _Group(model, size, steps.get(model) if size == "paper" else None)


def build(options: argparse.Namespace) -> int:
    """Compile what is not there yet."""
    try:
        variants = chosen_variants(options.levels, options.variants)
    except ValueError as error:
        _log.error("%s", error)
        return 2
    folder = _Folder(options)
    folder.index["built"] = result_header({}, None) | {
        "command": " ".join(["python -m benchmarks.gpu_host", *sys.argv[1:]])
    }
    began = time.monotonic()
    groups = list(_groups(options))
    with ThreadPoolExecutor(options.jobs) as pool:
        # What takes longest begins first.
        ordered = sorted(groups, key=lambda group: group.size == "tiny")
        done = [pool.submit(_build_group, options, folder, group, variants) for group in ordered]
        failed = sum(not future.result() for future in done)
    order = {(group.model, group.size): number for number, group in enumerate(groups)}

    def place(case: dict[str, Any]) -> tuple[bool, int]:
        return case["precision"] != "fp32", order.get((case["model"], case["size"]), len(order))

    index = folder.index
    index["cases"] = dict(sorted(index["cases"].items(), key=lambda item: place(item[1])))
    folder.drop_weights()
    kernels = [
        *grid_barriers.compile_kernels(folder.path, options.arch),
        *shared_memory.compile_kernels(folder.path, options.arch),
    ]
    index["kernels"] = [path.name for path in kernels]
    index["build_seconds"] = round(index.get("build_seconds", 0.0) + time.monotonic() - began, 1)
    folder.write()
    _log.info("%d cases, %d models failed, %.0f s", len(index["cases"]), failed, time.monotonic() - began)
    _log.info("%s", folder.sizes())
    return 1 if failed else 0


def _build_group(options: argparse.Namespace, folder: _Folder, group: _Group, variants: Iterable[Variant]) -> bool:
    """Compile what of a model is not there yet, and enter it into the index; whether all of it is there now."""
    io, graph = folder.path / f"{group.stem()}.npz", folder.path / f"{group.stem()}.graph.npz"
    wanted = group.networks(options, variants)
    if options.force:
        io.unlink(missing_ok=True)
        graph.unlink(missing_ok=True)
    missing = {
        name: item for name, item in wanted.items() if options.force or not io.exists() or not folder.has(name)
    }
    states = folder.states(set(wanted) - set(missing))
    old = [name for name, state in states.items() if state not in (folder.compiler, None)]
    if old:
        _log.warning("%s: %d networks are of another state of the compiler; --force", group.stem(), len(old))
    if not missing and graph.exists():
        with folder.lock:
            folder.enter_graph(wanted, graph)
        return True
    command = [sys.executable, "-m", "benchmarks.gpu_build_network", group.model, "--size", group.size]
    command += ["--arch", options.arch, "--io", str(io.resolve()), "--graph", str(graph.resolve())]
    command += ["--wanted", json.dumps(_jobs(folder, group, missing))]
    command += [] if options.cubin else ["--no-cubin"]
    command += ["--steps", group.steps] if group.steps else []
    for name in missing:
        (folder.path / f"{name}.json").unlink(missing_ok=True)
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=options.timeout, check=False)
        error = done.stderr.strip()[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"over {options.timeout} s"
    # A network's file of facts is written last: those that were done before a failure stay.
    there = [name for name in missing if (folder.path / f"{name}.json").exists()]
    with folder.lock:
        for name in there:
            folder.enter(group, name, missing[name])
        folder.enter_graph(wanted, graph)
        folder.write()
    _log.info("%s: %d of %d networks, %.0f s", group.stem(), len(there), len(missing), time.monotonic() - began)
    if error or len(there) < len(missing):
        _log.error("%s: %s", group.stem(), error)
        return False
    return True


def _jobs(folder: _Folder, group: _Group, missing: dict[str, _Network]) -> list[dict[str, Any]]:
    """What the process is told: one compilation each, with the files of its constants."""
    jobs: dict[tuple[str, Variant], dict[str, Any]] = {}
    for name, network in missing.items():
        fields = dataclasses.asdict(network.variant)
        new = {"variant": fields, "precision": network.precision, "beside_fp32": True, "files": {}}
        job = jobs.setdefault((network.precision, network.variant), new)
        job["files"][network.constants] = f"{(folder.path / name).resolve()}.souffle"
        plain = group.name(dataclasses.replace(network, precision="fp32"))
        job["beside_fp32"] &= plain in missing or folder.has(plain)
    return list(jobs.values())


def build_parser() -> argparse.ArgumentParser:
    """Of the command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_host build", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(models.NAMES), choices=NAMES, metavar="MODEL")
    parser.add_argument("--sizes", nargs="+", default=["tiny", "paper"], choices=("tiny", "paper"))
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--precision", nargs="+", default=list(_USUAL_PRECISIONS), choices=PRECISIONS)
    parser.add_argument(
        "--variants", nargs="*", default=[], metavar="WORD",
        help="of these levels also what is not as usual: all, or an option such as disable, fusion, waits, or one of "
        "its values, such as disable=teams",
    )  # fmt: skip
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--no-cubin", dest="cubin", action="store_false", help="without nvcc, for rehearsals alone")
    parser.add_argument("--steps", nargs="*", default=[], metavar="MODEL=N", help="time steps of paper models")
    parser.add_argument(
        "--check-paper", nargs="*", default=[], choices=LEVELS, metavar="LEVEL",
        help="levels of paper models whose true constants travel too, where these cannot be drawn again",
    )  # fmt: skip
    parser.add_argument("--max-mib", type=float, default=16.0, help="larger files stay here")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time; one of paper size takes up to 4 GiB")
    parser.add_argument("--timeout", type=int, default=5400, help="seconds for all networks of one model")
    parser.add_argument("--force", action="store_true", help="build again what is there")
    return parser
