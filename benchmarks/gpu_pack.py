"""Gathers what travels to a GPU host into folders that each fit a transfer."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.record import write_json

__all__ = ["pack"]

_ROOT = Path(__file__).resolve().parent.parent
# The networks travel as files of souffle/models, which is a link in a checkout.
_TRAVELS = ("souffle", "benchmarks")
_log = logging.getLogger("gpu_host")


def read_index(folder: Path) -> dict[str, Any]:
    """What `build` says of the networks in a folder.

    Raises
    ------
    SystemExit
        If nothing was built there.
    """
    path = folder / "index.json"
    if not path.is_file():
        raise SystemExit(f"{folder} holds no networks: {path.name} is missing; make them with build --out {folder}")
    return json.loads(path.read_text())


def _files(names: Iterable[str], cases: dict[str, dict[str, Any]]) -> list[str]:
    keys = ("artifact", "io", "graph", "weights", "clocks")
    return sorted({cases[name][key] for name in names for key in keys if cases[name].get(key)})


def _parts(folder: Path, index: dict[str, Any], room: float) -> list[list[str]]:
    """Cases for one transfer after the other, in the order in which first contact wants them.

    That is a small network first, then those of paper size, then the others; of each fp32 before mixed precision, and
    most grid syncs first. Those of one model, size and precision stay together where they fit, for their latencies are
    compared.
    """
    cases = index["cases"]

    def size(names: Iterable[str]) -> int:
        return sum((folder / file).stat().st_size for file in _files(names, cases))

    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, case in cases.items():
        groups.setdefault((case["size"], case["model"], case["precision"]), []).append(name)
    syncs = {key: max(cases[name].get("grid_syncs", 0) for name in names) for key, names in groups.items()}
    smallest = min(groups, key=lambda key: (key[2] != "fp32", size(groups[key])), default=None)
    parts: list[list[str]] = []
    for key in sorted(groups, key=lambda key: (key != smallest, key[0] == "tiny", key[2] != "fp32", -syncs[key])):
        names = groups[key]
        for chunk in [names] if size(names) <= room else [[name] for name in names]:
            part = next((part for part in parts if size([*part, *chunk]) <= room), None)
            if part is None:
                parts.append(part := [])
            part += chunk
    return parts


def pack(options: argparse.Namespace) -> int:
    """Gather what must travel into folders that fit, each with the runtime, this script and its artifacts."""
    index = read_index(options.input)
    if options.models:
        index["cases"] = {name: case for name, case in index["cases"].items() if case["model"] in options.models}
    if options.to.exists() and any(options.to.iterdir()):
        _log.error("%s is not empty; give a new folder", options.to)
        return 2
    walks = (os.walk(_ROOT / name, followlinks=True) for name in _TRAVELS)
    sources = [Path(base, file) for walk in walks for base, _, found in walk for file in found]
    room = options.max_mib * 2**20 - sum(path.stat().st_size for path in sources if "__pycache__" not in path.parts)
    beside = [options.input / file for file in ("index.json", *index.get("kernels", []))]
    room -= sum(path.stat().st_size for path in [*beside, _ROOT / "pyproject.toml"])
    over, contents = 0, {}
    for number, names in enumerate(_parts(options.input, index, room), 1):
        part = options.to / f"part{number}"
        artifacts = part / "artifacts"
        artifacts.mkdir(parents=True)
        for name in _TRAVELS:
            shutil.copytree(_ROOT / name, part / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "build"))
        shutil.copy(_ROOT / "pyproject.toml", part)
        for file in [*_files(names, index["cases"]), *index.get("kernels", [])]:
            shutil.copy(options.input / file, artifacts)
        chosen = {name: index["cases"][name] for name in names}
        write_json(artifacts / "index.json", {**index, "cases": chosen})
        total = sum(Path(base, file).stat().st_size for base, _, found in os.walk(part) for file in found)
        over += total > options.max_mib * 2**20
        models = sorted({f"{case['model']} {case['size']} {case['precision']}" for case in chosen.values()})
        contents[part.name] = {"mib": round(total / 2**20, 1), "networks": models, "cases": names}
        _log.info("%s: %.1f MiB, %d cases: %s", part, total / 2**20, len(names), ", ".join(models))
    write_json(options.to / "index.json", contents)
    if over:
        _log.error("a part is over --max-mib %g: one network alone is", options.max_mib)
    return 1 if over else 0
