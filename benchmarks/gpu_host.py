"""Everything about a GPU in one script, for a host that has a GPU but neither TVM nor a package registry.

Here, with the compiler::

    python -m benchmarks.gpu_host build --out ARTIFACTS
    python -m benchmarks.gpu_host pack --in ARTIFACTS --to FOLDER

On the host, in FOLDER/part1 and each other part (Python 3.12, NumPy, cuda-bindings; nvcc, compute-sanitizer and PyTorch
where they are)::

    python -m benchmarks.gpu_host run --in artifacts --out RESULTS

``rehearse`` in the place of ``run`` goes through the same steps without a GPU, up to the launches. Every step is a
process bounded in time; what RESULTS/results.json (or the file of ``--resume``) has already is not done again.

``first-contact`` is the first half hour with a GPU: phases of at most eight minutes each, what matters most first, with
a verdict on each; ``latency`` the paper's ablation alone. Both take ``--rehearse``.
"""

from __future__ import annotations

import argparse
import datetime
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
from benchmarks.gpu_pack import pack, read_index
from benchmarks.gpu_plan import PEERS, Phase, chosen_cases, first_contact, steps_for
from benchmarks.gpu_run import run_phases
from benchmarks.gpu_table import across_barriers, phase_table, table
from benchmarks.record import write_json

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parent.parent
_LEVELS = ("V0", "V1", "V2", "V3", "V4")
_MERGED = ("V3", "V4")
_PRECISIONS = ("fp32", "tf32x3", "tf32", "mixed")
_USUAL_PRECISIONS = ("fp32", "mixed")
_KINDS = ("micro", "check", "latency", "once")
_WEIGHTS = ".weights.npz"
_log = logging.getLogger("gpu_host")


# build


@dataclass(frozen=True)
class _Wanted:
    """A network to be built."""

    level: str
    precision: str
    constants: str
    barrier: str


@dataclass(frozen=True)
class _Group:
    """One model and size: one process compiles all its levels, and precisions share its inputs and expected outputs."""

    model: str
    size: str
    precisions: tuple[str, ...]
    steps: str | None

    def stem(self, *precision: str) -> str:
        """Of its files' names, without a precision of what all share. Steps change inputs, so they are part of it."""
        name = re.sub(r"[^A-Za-z0-9.-]", "-", self.model)
        return "-".join([name, self.size, *precision, *([f"{self.steps}steps"] if self.steps else [])])

    def networks(self, options: argparse.Namespace) -> dict[str, _Wanted]:
        """What is to be built, by name: fp32 first."""
        networks: dict[str, _Wanted] = {}
        for precision in self.precisions:
            # A barrier does not depend on the arithmetic: at paper size they are compared in fp32 alone.
            number = len(options.grid_barriers) if precision == "fp32" or self.size == "tiny" else 1
            barriers = options.grid_barriers[:number]
            # Below V3 no kernel waits for all its blocks.
            chosen = [(lv, barrier) for lv in options.levels for barrier in barriers if lv in _MERGED]
            for level, barrier in [*((lv, "counter") for lv in options.levels if lv not in _MERGED), *chosen]:
                stored = self.size == "tiny" or level in options.check_paper
                for constants in [*["stored"] * stored, *["synthetic"] * (self.size != "tiny")]:
                    suffix = "" if barrier == "counter" else f"-{barrier}"
                    suffix += "" if constants == "stored" else f"-{constants}"
                    networks[f"{self.stem(precision)}-{level}{suffix}"] = _Wanted(level, precision, constants, barrier)
        return networks


def _compiler() -> str:
    """A short name of the compiler's and the models' present sources: an artifact of others may be out of date."""
    digest = hashlib.sha256()
    for path in sorted(path for name in ("souffle", "models") for path in (_ROOT / name).rglob("*.py")):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _groups(options: argparse.Namespace) -> Iterator[_Group]:
    steps = dict(item.partition("=")[::2] for item in options.steps)
    for size in options.sizes:
        for model in options.models:
            # Where mixed precision alone is asked for, it is of all.
            single = size == "tiny" and model not in options.mixed and "fp32" in options.precision
            precisions = ("fp32",) if single else tuple(p for p in _PRECISIONS if p in options.precision)
            yield _Group(model, size, precisions, steps.get(model) if size == "paper" else None)


def _build(options: argparse.Namespace) -> int:
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    index_path = out / "index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else {"cases": {}, "too_large": {}}
    index.setdefault("as_fp32", {})
    index["command"] = " ".join(["python -m benchmarks.gpu_host", *sys.argv[1:]])
    began = time.monotonic()
    compiler, lock = _compiler(), threading.Lock()

    def build(group: _Group) -> bool:
        return _build_group(options, index, group, compiler, lock)

    groups = list(_groups(options))
    with ThreadPoolExecutor(options.jobs) as pool:
        # What takes longest begins first.
        done = [pool.submit(build, group) for group in sorted(groups, key=lambda group: group.size == "tiny")]
        failed = sum(not future.result() for future in done)
    order = {(group.model, group.size): number for number, group in enumerate(groups)}

    def place(case: dict[str, Any]) -> tuple[bool, int]:
        return case["precision"] != "fp32", order.get((case["model"], case["size"]), len(order))

    index["cases"] = dict(sorted(index["cases"].items(), key=lambda item: place(item[1])))
    _drop_weights(out, index["cases"].values())
    kernels = [*grid_barriers.compile_kernels(out, options.arch), *shared_memory.compile_kernels(out, options.arch)]
    index["kernels"] = [path.name for path in kernels]
    index["build_seconds"] = round(index.get("build_seconds", 0.0) + time.monotonic() - began, 1)
    write_json(index_path, index)
    _log.info("%d cases, %d models failed, %.0f s", len(index["cases"]), failed, time.monotonic() - began)
    _log.info("%s", _sizes(out, index))
    return 1 if failed else 0


def _build_group(
    options: argparse.Namespace, index: dict[str, Any], group: _Group, compiler: str, lock: threading.Lock
) -> bool:
    """Compile what of a model is not there yet, and enter it into the index; whether all of it is there now."""
    io, graph = options.out / f"{group.stem()}.npz", options.out / f"{group.stem()}.graph.npz"
    wanted = group.networks(options)
    if options.force:
        io.unlink(missing_ok=True)
        graph.unlink(missing_ok=True)
    missing = {
        name: item
        for name, item in wanted.items()
        if options.force
        or not io.exists()
        or not (
            name in (*index["too_large"], *index["as_fp32"])
            or (name in index["cases"] and (options.out / f"{name}.souffle").exists())
        )
    }
    states = {name: index["cases"].get(name, {}).get("compiler") for name in wanted} | index["as_fp32"]
    old = [name for name in wanted if name not in missing and states[name] != compiler]
    if old:
        _log.warning("%s: %d networks are of another state of the compiler; --force", group.stem(), len(old))
    if not missing and graph.exists():
        with lock:
            _enter_graph(index, wanted, graph)
        return True
    command = [sys.executable, "-m", "benchmarks.gpu_build", group.model, "--size", group.size]
    command += ["--arch", options.arch, "--io", str(io.resolve()), "--graph", str(graph.resolve())]
    for name, network in missing.items():
        what = f"{network.level}:{network.precision}:{network.constants}:{network.barrier}"
        command += ["--save", f"{what}={(options.out / name).resolve()}.souffle"]
        (options.out / f"{name}.json").unlink(missing_ok=True)
    command += ["--steps", group.steps] if group.steps else []
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=options.timeout, check=False)
        error = done.stderr.strip()[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"over {options.timeout} s"
    # A level's file of facts is written last: levels that were done before a failure stay.
    there = [name for name in missing if (options.out / f"{name}.json").exists()]
    with lock:
        for name in there:
            if not _enter(options, index, group, name, missing[name]):
                index["as_fp32"][name] = compiler
            if name in index["cases"]:
                index["cases"][name]["compiler"] = compiler
        _enter_graph(index, wanted, graph)
        write_json(options.out / "index.json", index)
    _log.info("%s: %d of %d networks, %.0f s", group.stem(), len(there), len(missing), time.monotonic() - began)
    if error or len(there) < len(missing):
        _log.error("%s: %s", group.stem(), error)
        return False
    return True


def _enter_graph(index: dict[str, Any], names: Iterable[str], graph: Path) -> None:
    """Name the model's file in its cases; those of before models travelled lack it."""
    for name in names:
        if name in index["cases"]:
            index["cases"][name]["graph"] = graph.name if graph.exists() else None


def _share(weights: Path) -> str:
    """Keep one file for all levels and barriers of equal weights, under the name of its content; the name."""
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:16]
    return weights.replace(weights.with_name(f"{digest}{_WEIGHTS}")).name


def _drop_weights(out: Path, cases: Iterable[dict[str, Any]]) -> None:
    """Remove weights of networks that were built again."""
    named = {case["weights"] for case in cases}
    for path in out.glob(f"*{_WEIGHTS}"):
        if path.name not in named:
            path.unlink()


def _enter(options: argparse.Namespace, index: dict[str, Any], group: _Group, name: str, network: _Wanted) -> bool:
    """Put a network that was built into the index, unless it is too large to travel; whether it is one of its own."""
    facts = options.out / f"{name}.json"
    about = json.loads(facts.read_text())
    facts.unlink()
    if about.get("as_fp32"):
        _log.info("%s: mixed precision changes nothing in it", name)
        return False
    index["as_fp32"].pop(name, None)
    artifact, weights = options.out / f"{name}.souffle", options.out / f"{name}{_WEIGHTS}"
    limit = options.max_mib * 2**20
    if artifact.stat().st_size > limit:
        size = artifact.stat().st_size / 2**20
        _log.warning("%s: %.1f MiB is over --max-mib %g and stays here", name, size, options.max_mib)
        index["too_large"][name] = round(size, 1)
        artifact.unlink()
        weights.unlink(missing_ok=True)
        return True
    if weights.exists() and weights.stat().st_size > limit:
        _log.warning("%s: weights that cannot be made again are over --max-mib; it is only timed", name)
        weights.unlink()
    index["cases"][name] = {
        "model": group.model,
        "size": group.size,
        "level": network.level,
        "grid_barrier": network.barrier,
        "precision": network.precision,
        "arch": options.arch,
        "steps": int(group.steps) if group.steps else None,
        "constants": network.constants,
        "artifact": artifact.name,
        "weights": _share(weights) if weights.exists() else None,
        "io": f"{group.stem()}.npz",
        **about,
    }
    return True


def _sizes(folder: Path, index: dict[str, Any]) -> str:
    """MiB of each model and of all, and the largest file."""
    files_of: dict[str, set[str]] = {}
    for case in index["cases"].values():
        key = f"{case['model']} {case['size']} {case['precision']}"
        files_of.setdefault(key, set()).update(case[kind] for kind in ("artifact", "weights") if case[kind])
    sizes = {key: sum((folder / file).stat().st_size for file in names) for key, names in files_of.items()}
    lines = [f"{key:32} {size / 2**20:8.2f} MiB" for key, size in sizes.items()]
    files = [path for path in folder.iterdir() if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    largest = max(files, key=lambda path: path.stat().st_size)
    lines.append(f"{'all':32} {total / 2**20:8.2f} MiB, the largest {largest.name}")
    return "\n".join(lines)


# run


def _phases(options: argparse.Namespace, cases: dict[str, dict[str, Any]]) -> list[Phase]:
    """What the command is to do."""
    phases = first_contact(cases, options) if options.command != "run" else []
    if options.command == "first-contact":
        return [phase for phase in phases if not options.phases or phase.name in ("device", *options.phases)]
    if options.command == "latency":
        return [phase for phase in phases if phase.name in ("device", "latency", "constants", "mixed")]
    return [Phase("all", "Is all well?", options.budget, tuple(steps_for(cases, options)))]


def _run(options: argparse.Namespace) -> int:
    index = read_index(options.input)
    cases = chosen_cases(
        {name: case for name, case in index["cases"].items() if not options.models or case["model"] in options.models}
    )
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    earlier = options.resume or path
    results: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {"steps": {}}
    if results.get("rehearsal", options.rehearse) != options.rehearse:
        _log.error("%s is of a %s; give another --out", earlier, "rehearsal" if results["rehearsal"] else "real run")
        return 2
    results["rehearsal"] = options.rehearse
    results["command"] = " ".join(["python -m benchmarks.gpu_host", *sys.argv[1:]])
    results["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    # What was run with an earlier part of the artifacts is still in the table.
    results["cases"] = results.get("cases", {}) | cases
    results["as_fp32"] = sorted(index.get("as_fp32", {}))
    phases = _phases(options, cases)
    run_phases(phases, cases, options, results, lambda: write_json(path, results))
    write_json(path, results)
    steps = [step for phase in phases for step in phase.steps]
    text = table(results, steps, cases)
    if options.command == "first-contact":
        text += "\n" + phase_table(results, _phases(options, results["cases"]))
    (options.out / "table.txt").write_text(text)
    sys.stdout.write(text)
    states = [(results["steps"].get(step.key(name), {}).get("status"), step) for step in steps for name in step.names]
    different = across_barriers(cases, results["steps"])[1]
    return 0 if all(state in step.accepted for state, step in states) and not different else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile what goes to the host")
    build.add_argument("--out", type=Path, required=True)
    build.add_argument("--models", nargs="+", default=["mmoe", "lstm", "efficientnet", "bert", "swin", "resnext"])
    build.add_argument("--sizes", nargs="+", default=["tiny", "paper"], choices=("tiny", "paper"))
    build.add_argument("--levels", nargs="+", default=list(_LEVELS), choices=_LEVELS)
    build.add_argument(
        "--grid-barriers", nargs="+", default=["counter"], metavar="NAME",
        help="V3 and V4 are built once with each: counter, cooperative, flags; blocks: counter, without teams; apart: "
        "counter, without hfuse; unasked: counter, without weights asked for ahead",
    )  # fmt: skip
    build.add_argument("--arch", default="sm_90")
    build.add_argument("--precision", nargs="+", default=list(_USUAL_PRECISIONS), choices=_PRECISIONS)
    build.add_argument(
        "--mixed", nargs="*", default=["bert", "swin", "resnext"],
        help="tiny models that are built in mixed precision too; all are at paper size, with the first grid barrier",
    )  # fmt: skip
    build.add_argument("--steps", nargs="*", default=[], metavar="MODEL=N", help="time steps of paper models")
    build.add_argument(
        "--check-paper", nargs="*", default=[], choices=_LEVELS, metavar="LEVEL",
        help="levels of paper models whose true constants travel too, for a host without onnx to make them again with",
    )  # fmt: skip
    build.add_argument("--max-mib", type=float, default=16.0, help="larger files stay here")
    build.add_argument("--jobs", type=int, default=2, help="models at a time; one of paper size takes up to 4 GiB")
    build.add_argument("--timeout", type=int, default=5400, help="seconds for all levels of one model")
    build.add_argument("--force", action="store_true", help="build again what is there")
    pack = commands.add_parser("pack", help="gather what travels into folders, one for each transfer")
    pack.add_argument("--in", dest="input", type=Path, required=True)
    pack.add_argument("--to", type=Path, required=True)
    pack.add_argument("--models", nargs="*", default=[], help="only these")
    pack.add_argument("--max-mib", type=float, default=45.0, help="of each folder")
    about = {
        "run": "every step on the host",
        "rehearse": "the same without a GPU",
        "first-contact": "the first half hour on the host, most important first",
        "latency": "V0 to V4 and PyTorch at paper size, and what launches, syncs and memory cost",
    }
    for name, text in about.items():
        run = commands.add_parser(name, help=text)
        run.add_argument("--in", dest="input", type=Path, default=Path("artifacts"))
        run.add_argument("--out", type=Path, required=True)
        run.add_argument("--resume", type=Path, help="results.json of an earlier run that was cut short")
        run.add_argument("--models", nargs="*", default=[], help="only these")
        if name in ("run", "rehearse"):
            run.add_argument("--only", nargs="+", choices=_KINDS, help="only these steps; once is compute-sanitizer's")
            run.add_argument("--sanitize", nargs="*", default=list(_LEVELS), choices=_LEVELS, help="levels under it")
            run.add_argument("--repeats", type=int, help="runs that must agree bit by bit; 20")
            run.set_defaults(rehearse=name == "rehearse", command="run")
        else:
            run.add_argument("--rehearse", action="store_true", help="without a GPU")
            run.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="timed after all levels")
        if name != "run":
            run.add_argument("--deferred", action="store_true", help="rehearse with work that runs as late as it can")
            run.add_argument(
                "--fault", metavar="KIND:N", help="rehearse a fault: too-large:N, sticky:N, hang:N, wrong:N"
            )
        if name == "first-contact":
            run.add_argument("--phases", nargs="+", metavar="NAME", default=[], help="only these; the table names all")
        run.add_argument("--retry", action="store_true", help="do again what failed")
        run.add_argument("--latency-repeats", type=int, help="50")
        run.add_argument("--rounds", type=int, help="6")
        run.add_argument("--jobs", type=int, help="steps at a time where nothing is timed; 8, first-contact 1")
        run.add_argument("--timeout", type=float, default=120.0, help="seconds for one process")
        run.add_argument("--budget", type=float, default=540.0, help="seconds for all")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; see the module's text. Exit status 0 where every step went well."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    options = _parser().parse_args(argv)
    if options.command not in ("build", "pack"):
        quick = options.rehearse
        usual = {"latency_repeats": 50, "rounds": 6, "jobs": 1 if options.command == "first-contact" else 8}
        for key, value in (usual | ({"repeats": 20} if options.command == "run" else {})).items():
            if getattr(options, key) is None:
                setattr(options, key, {"repeats": 2}.get(key, 1) if quick else value)
    return {"build": _build, "pack": pack}.get(options.command, _run)(options)


if __name__ == "__main__":
    sys.exit(main())
