"""Gathers what travels to a GPU host into parts that each fit a transfer."""

from __future__ import annotations

import argparse
import io
import json
import logging
import lzma
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_plan import chosen_cases, is_own
from benchmarks.record import write_json
from souffle.options import PRECISIONS

__all__ = ["pack", "pack_parser", "read_index", "tree_mib"]

_ROOT = Path(__file__).resolve().parent.parent
# The networks travel as files of souffle/models, which is a link in a checkout.
_TRAVELS = ("souffle", "benchmarks")
_MOST_DICTIONARY = 192 << 20
"""Bytes; levels and variants share much of their machine code, and lie far apart."""
_MOST_TRIES = 6
_log = logging.getLogger("gpu_host")


def read_index(folder: Path) -> dict[str, Any]:
    """What `build` says of the networks in a folder.

    Raises
    ------
    SystemExit
        If nothing was built there, or by an earlier form of `build`.
    """
    path = folder / "index.json"
    if not path.is_file():
        raise SystemExit(f"{folder} holds no networks: {path.name} is missing; make them with build --out {folder}")
    index = json.loads(path.read_text())
    old = [name for name, case in index["cases"].items() if "label" not in case]
    if old:
        what = f"{folder} is of an earlier form of build, which said less of {old[0]}"
        raise SystemExit(f"{what}; build into a new folder")
    return index


def tree_mib() -> float:
    """MiB of the files of this checkout that travel with it: those that git knows or does not ignore."""
    command = ["git", "-C", str(_ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return sum((_ROOT / name).stat().st_size for name in names if name and (_ROOT / name).is_file()) / 2**20


def _files(names: Iterable[str], cases: dict[str, dict[str, Any]]) -> list[str]:
    keys = ("artifact", "io", "graph", "weights", "clocks")
    return sorted({cases[name][key] for name in names for key in keys if cases[name].get(key)})


class _Packing:
    """What is to travel, and where it comes from."""

    def __init__(self, options: argparse.Namespace, index: dict[str, Any], cases: dict[str, dict[str, Any]]) -> None:
        self.folder: Path = options.input
        self.index, self.cases = index, cases
        self.kernels = [file for file in index.get("kernels", []) if (self.folder / file).exists()]

    def ordered(self) -> list[list[str]]:
        """Cases that stay together where they fit, for their latencies are compared; what is worth most first.

        That is paper size before tiny, and what the compiler chooses before its variants; among these the order in
        which models and precisions were asked for.
        """
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, case in self.cases.items():
            # What variants are beside is timed again with them, and is there by then.
            key = (case["size"] == "tiny", not is_own(case), case["model"], case["precision"])
            groups.setdefault(key, []).append(name)
        return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]

    def size(self, names: Iterable[str]) -> int:
        """Bytes of their files."""
        return sum((self.folder / file).stat().st_size for file in _files(names, self.cases))

    def part_index(self, names: Iterable[str]) -> dict[str, Any]:
        """The index of a part."""
        return {**self.index, "cases": {name: self.cases[name] for name in names}, "kernels": self.kernels}

    def archived(self, names: list[str], path: Path) -> int:
        """Write ``artifacts/`` with these cases as one archive; its bytes."""
        files = [*_files(names, self.cases), *self.kernels]
        total = sum((self.folder / file).stat().st_size for file in files)
        dictionary = min(_MOST_DICTIONARY, max(1 << 20, total))
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": dictionary}]
        with lzma.open(path, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
            about = json.dumps(self.part_index(names)).encode()
            entry = tarfile.TarInfo("artifacts/index.json")
            entry.size = len(about)
            archive.addfile(entry, io.BytesIO(about))
            for file in files:
                archive.add(self.folder / file, f"artifacts/{file}", recursive=False)
        return path.stat().st_size


def _parts(packing: _Packing, room: float) -> list[list[str]]:
    """Cases for one transfer after the other, by the size of their files."""
    parts: list[list[str]] = []
    for names in packing.ordered():
        for chunk in [names] if packing.size(names) <= room else [[name] for name in names]:
            part = next((part for part in parts if packing.size([*part, *chunk]) <= room), None)
            if part is None:
                parts.append(part := [])
            part += chunk
    return parts


def _with_sources(packing: _Packing, options: argparse.Namespace, limit: float) -> dict[str, dict[str, Any]]:
    """Folders with the runtime, this script and the artifacts, for hosts that have nothing."""
    walks = (os.walk(_ROOT / name, followlinks=True) for name in _TRAVELS)
    sources = [Path(base, file) for walk in walks for base, _, found in walk for file in found]
    room = limit - sum(path.stat().st_size for path in sources if "__pycache__" not in path.parts)
    beside = [packing.folder / file for file in ("index.json", *packing.kernels)]
    room -= sum(path.stat().st_size for path in [*beside, _ROOT / "pyproject.toml"])
    contents = {}
    for number, names in enumerate(_parts(packing, room), 1):
        part = options.to / f"part{number}"
        artifacts = part / "artifacts"
        artifacts.mkdir(parents=True)
        for name in _TRAVELS:
            shutil.copytree(_ROOT / name, part / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "build"))
        shutil.copy(_ROOT / "pyproject.toml", part)
        for file in [*_files(names, packing.cases), *packing.kernels]:
            shutil.copy(packing.folder / file, artifacts)
        write_json(artifacts / "index.json", packing.part_index(names))
        total = sum(Path(base, file).stat().st_size for base, _, found in os.walk(part) for file in found)
        contents[part.name] = {"bytes": total, "cases": names}
    return contents


def _archives(packing: _Packing, options: argparse.Namespace, limit: float) -> dict[str, dict[str, Any]]:
    """Archives of artifacts alone, for hosts to which the checkout travels anyway."""
    options.to.mkdir(parents=True, exist_ok=True)
    left, contents = [name for names in packing.ordered() for name in names], {}
    while left:
        path, names = options.to / f"part{len(contents) + 1}.tar.xz", list(left)
        for _ in range(_MOST_TRIES):
            size = packing.archived(names, path)
            if size <= limit or len(names) == 1:
                break
            # As much as fits if all is compressed as well as this was.
            room = 0.97 * packing.size(names) * limit / size
            while len(names) > 1 and packing.size(names) > room:
                names.pop()
        contents[path.name] = {"bytes": path.stat().st_size, "cases": names}
        left = [name for name in left if name not in names]
    return contents


def pack(options: argparse.Namespace) -> int:
    """Gather what must travel into parts that fit."""
    index = read_index(options.input)
    if options.to.exists() and any(options.to.iterdir()):
        _log.error("%s is not empty; give a new folder", options.to)
        return 2
    cases = {
        name: case
        for name, case in chosen_cases(index["cases"], options.models, options.precision).items()
        if not options.only or any(_KINDS[kind](case, index["cases"]) for kind in options.only)
    }
    tree = tree_mib() if options.archive else 0.0
    limit = ((64 - 1 - tree) if options.max_mib is None and options.archive else options.max_mib or 45.0) * 2**20
    packing = _Packing(options, index, cases)
    contents = (_archives if options.archive else _with_sources)(packing, options, limit)
    over = 0
    for name, part in contents.items():
        found = [cases[case] for case in part["cases"]]
        over += part["bytes"] > limit
        part["mib"] = round(part.pop("bytes") / 2**20, 1)
        part["networks"] = sorted({f"{case['model']} {case['size']} {case['precision']}" for case in found})
        _log.info("%s: %.1f MiB, %d cases: %s", name, part["mib"], len(found), ", ".join(part["networks"]))
    if options.archive:
        _log.info("the checkout, which travels too, has %.1f MiB; a part may have %.1f", tree, limit / 2**20)
    write_json(options.to / "index.json", contents)
    if over:
        _log.error("a part is over %.1f MiB: one network alone is", limit / 2**20)
    return 1 if over else 0


def _is_timed_with_variants(case: dict[str, Any], cases: dict[str, dict[str, Any]]) -> bool:
    """Whether a network is a variant, or what variants are timed beside."""
    parts = ("model", "size", "precision", "level")
    return case["size"] == "paper" and any(
        not is_own(other) and all(other[part] == case[part] for part in parts) for other in cases.values()
    )


_KINDS: dict[str, Callable[[dict[str, Any], dict[str, dict[str, Any]]], bool]] = {
    "own": lambda case, cases: case["size"] == "paper" and is_own(case),
    "variants": _is_timed_with_variants,
    "tiny": lambda case, cases: case["size"] == "tiny",
}
"""Which cases may travel alone."""


def pack_parser() -> argparse.ArgumentParser:
    """Of the command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_host pack", description=__doc__)
    parser.add_argument("--in", dest="input", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=[], help="only these, in this order")
    parser.add_argument("--precision", nargs="*", default=[], choices=PRECISIONS, help="only these, in this order")
    parser.add_argument(
        "--only", nargs="+", choices=_KINDS, default=[],
        help="own: what the compiler makes of each level at paper size by itself; variants of that, with what they are "
        "timed beside; tiny networks",
    )  # fmt: skip
    parser.add_argument(
        "--archive", action="store_true",
        help="compressed artifacts without sources, for a host to which the checkout travels as well",
    )  # fmt: skip
    parser.add_argument("--max-mib", type=float, help="of each part; 45, of an archive what the checkout leaves of 63")
    return parser
