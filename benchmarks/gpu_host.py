"""Everything about a GPU in one script, for a host that has a GPU but neither TVM nor a package registry.

Here, with the compiler::

    python -m benchmarks.gpu_host build --out DIR

On the host, with the repository and DIR (Python 3.12, NumPy, cuda-bindings, nvcc, compute-sanitizer, PyTorch)::

    python -m benchmarks.gpu_host run --in DIR --out RESULTS

``rehearse`` in the place of ``run`` goes through the same steps without a GPU, up to the launches. Every step is a
process bounded in time; what RESULTS/results.json (or the file of ``--resume``) has already is not done again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parent.parent
_LEVELS = ("V0", "V1", "V2", "V3", "V4")
_TOOLS = ("memcheck", "racecheck", "synccheck")
_log = logging.getLogger("gpu_host")


def _write(path: Path, content: Any) -> None:
    """Replace a file only once its new content is complete, so that a run cut short leaves a readable one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(path)


def _tail(text: str | bytes | None, size: int = 1500) -> str:
    decoded = text.decode(errors="replace") if isinstance(text, bytes) else (text or "")
    return decoded[-size:]


# build


def _build(options: argparse.Namespace) -> int:
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    index_path = out / "index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else {"cases": {}}
    index["command"] = " ".join(sys.argv)
    steps = dict(item.partition("=")[::2] for item in options.steps)
    failed = 0
    for size in options.sizes:
        for model in options.models:
            stem = f"{re.sub(r'[^A-Za-z0-9.-]', '-', model)}-{size}-{options.precision}"
            for level in options.levels:
                kinds = ["stored"] if size == "tiny" else ["synthetic"]
                if size != "tiny" and level in options.check_paper:
                    kinds.append("stored")
                failed += not _build_case(
                    options, index, _Case(stem, model, size, level, tuple(kinds), steps.get(model))
                )
                _write(index_path, index)
    total = sum(path.stat().st_size for path in out.iterdir())
    _log.info("%d cases in %s, %.1f MiB, %d failed", len(index["cases"]), out, total / 2**20, failed)
    return 1 if failed else 0


@dataclass(frozen=True)
class _Case:
    """One compilation, saved with each kind of constants."""

    stem: str
    model: str
    size: str
    level: str
    constants: tuple[str, ...]
    steps: str | None


def _build_case(options: argparse.Namespace, index: dict[str, Any], case: _Case) -> bool:
    # A model's steps change its inputs, so they are part of the file names.
    steps = case.steps if case.size == "paper" else None
    stem = case.stem + (f"-{steps}steps" if steps else "")
    io = options.out / f"{stem}.npz"
    names = {kind: f"{stem}-{case.level}" + ("" if kind == "stored" else f"-{kind}") for kind in case.constants}
    files = {kind: options.out / f"{name}.souffle" for kind, name in names.items()}
    too_large = index.setdefault("too_large", {})
    there = all(name in too_large or (name in index["cases"] and files[kind].exists()) for kind, name in names.items())
    if there and io.exists() and not options.force:
        return True
    command = [sys.executable, "-m", "benchmarks.gpu_build", case.model, "--size", case.size, "--level", case.level]
    command += ["--arch", options.arch, "--precision", options.precision, "--io", str(io.resolve())]
    command += [part for kind, file in files.items() for part in ("--save", f"{kind}={file.resolve()}")]
    command += ["--steps", steps] if steps else []
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        _log.error("%s %s: over %d s", stem, case.level, options.timeout)
        return False
    if done.returncode:
        _log.error("%s %s: %s", stem, case.level, _tail(done.stderr))
        return False
    seconds = round(time.monotonic() - began, 1)
    for kind, file in files.items():
        megabytes = file.stat().st_size / 2**20
        if megabytes > options.max_mib:
            _log.warning("%s: %.1f MiB is over --max-mib %g and stays here", names[kind], megabytes, options.max_mib)
            too_large[names[kind]] = round(megabytes, 1)
            file.unlink()
            continue
        index["cases"][names[kind]] = {
            "model": case.model,
            "size": case.size,
            "level": case.level,
            "precision": options.precision,
            "arch": options.arch,
            "constants": kind,
            "artifact": file.name,
            "io": io.name,
            "build_seconds": seconds,
            **json.loads(done.stdout.splitlines()[-1]),
        }
        _log.info("%s: %.1f MiB, %.0f s", names[kind], megabytes, seconds)
    return True


# run


@dataclass(frozen=True)
class _Step:
    """One bounded process.

    ``arguments`` go to ``benchmarks.gpu_steps``; ``tool`` is a tool of compute-sanitizer under which it runs.
    """

    name: str
    kind: str
    arguments: tuple[str, ...]
    timeout: int
    about: dict[str, Any] = field(default_factory=dict)
    tool: str = ""


def _steps(cases: dict[str, dict[str, Any]], folder: Path, options: argparse.Namespace) -> list[_Step]:
    """All steps, the ones that matter most first."""
    steps = [_Step("device", "device", (), 60), _Step("micro", "micro", ("--repeats", "100"), 180)]
    repeats = ("--repeats", str(options.repeats))

    def files(case: dict[str, Any]) -> tuple[str, ...]:
        return ("--artifact", str((folder / case["artifact"]).resolve()), "--io", str((folder / case["io"]).resolve()))

    def quiet(case: dict[str, Any]) -> tuple[str, ...]:
        # Without a GPU a paper model's kernels would take hours.
        return ("--no-execute",) if options.rehearse and case["size"] != "tiny" else ()

    for name, case in cases.items():
        if case["constants"] == "stored":
            arguments = (*files(case), *repeats, *quiet(case))
            steps.append(_Step(f"check {name}", "check", arguments, options.timeout, case))
    groups: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for case in cases.values():
        levels = groups.setdefault((case["model"], case["size"], case["precision"]), {})
        if case["level"] not in levels or case["constants"] == "stored":
            levels[case["level"]] = case
    for (model, size, precision), levels in groups.items():
        arguments = [
            part
            for level in sorted(levels)
            for part in ("--case", f"{level}={(folder / levels[level]['artifact']).resolve()}")
        ]
        case = next(iter(levels.values()))
        arguments += ["--io", str((folder / case["io"]).resolve()), "--repeats", str(options.latency_repeats)]
        arguments += ["--rounds", str(options.rounds), "--warmup", "1" if options.rehearse else "10", *quiet(case)]
        about = {"model": model, "size": size, "precision": precision}
        steps.append(_Step(f"latency {model} {size} {precision}", "latency", tuple(arguments), options.timeout, about))
    for tool in _TOOLS:
        for name, case in cases.items():
            if case["size"] == "tiny" and case["level"] in options.sanitize:
                arguments = (*files(case), *quiet(case))
                steps.append(
                    _Step(f"{tool} {name}", "sanitize", arguments, options.timeout, {**case, "tool": tool}, tool)
                )
    return steps


def _run_step(step: _Step, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        kind = "once" if step.kind == "sanitize" else step.kind
        command = [sys.executable, "-m", "benchmarks.gpu_steps", kind, "--json", str(answer), *step.arguments]
        command += ["--rehearse"] if options.rehearse else []
        if step.tool and not options.rehearse:
            sanitizer = shutil.which("compute-sanitizer")
            if sanitizer is None:
                return {"status": "missing", "error": "compute-sanitizer is not on PATH"}
            command = [sanitizer, "--tool", step.tool, "--error-exitcode", "9", *command]
        result: dict[str, Any] = {"command": command, "about": step.about}
        try:
            done = subprocess.run(
                command, cwd=_ROOT, capture_output=True, text=True, timeout=min(step.timeout, limit), check=False
            )
        except subprocess.TimeoutExpired as error:
            return {
                **result,
                "status": "timeout",
                "seconds": round(time.monotonic() - began, 1),
                "error": _tail(error.output),
            }
        result["seconds"] = round(time.monotonic() - began, 1)
        result["result"] = json.loads(answer.read_text()) if answer.exists() else {}
        result["status"] = "ok" if done.returncode == 0 and answer.exists() else "failed"
        if result["status"] == "failed":
            result["error"] = result["result"].get("error") or _tail(done.stderr + done.stdout)
        return result


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.input
    index = json.loads((folder / "index.json").read_text())
    cases = {
        name: case for name, case in index["cases"].items() if not options.models or case["model"] in options.models
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    earlier = options.resume or path
    results: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {"steps": {}}
    if results.get("rehearsal", options.rehearse) != options.rehearse:
        _log.error("%s is of a %s; give another --out", earlier, "rehearsal" if results["rehearsal"] else "real run")
        return 2
    results["rehearsal"] = options.rehearse
    results["command"] = " ".join(sys.argv)
    results["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    end = time.monotonic() + options.budget
    steps = _steps(cases, folder, options)
    for number, step in enumerate(steps, 1):
        if results["steps"].get(step.name, {}).get("status") == "ok":
            continue
        left = end - time.monotonic()
        if left < 5:
            _log.warning("the budget is spent: %d steps are left; run again to go on", len(steps) - number + 1)
            break
        result = _run_step(step, options, left)
        results["steps"][step.name] = result
        _write(path, results)
        _log.info("%d/%d %s: %s, %s s", number, len(steps), step.name, result["status"], result.get("seconds", 0))
        if step.kind == "device" and result["status"] != "ok":
            _log.error("%s", result.get("error"))
            break
    _write(path, results)
    sys.stdout.write(_table(results, steps))
    wanted = [results["steps"].get(step.name, {}).get("status") for step in steps]
    return 0 if all(status == "ok" for status in wanted) else 1


def _table(results: dict[str, Any], steps: list[_Step]) -> str:
    """What was found, short."""
    found = results["steps"]
    lines = ["rehearsal without a GPU: times mean nothing"] if results["rehearsal"] else []
    device = found.get("device", {}).get("result", {})
    lines.append(f"{device.get('name')} {device.get('arch')}, driver {device.get('driver')}, {results['date']}")
    micro = found.get("micro", {}).get("result", {})
    if micro.get("ok"):
        syncs = ", ".join(f"{item['us']:.2f} ({item['blocks']}x{item['threads']})" for item in micro["grid_sync"])
        lines.append(f"grid sync µs (blocks x threads): {syncs}")
        lines.append(
            f"launch {micro['launch_us']:.2f} µs, graph node {micro['graph_node_us']:.2f} µs, copy "
            f"{micro['driver_copy_gb_s']:.0f} GB/s by the driver, {micro['kernel_copy_gb_s']:.0f} by a kernel"
        )
    lines += ["", f"{'check':44} {'status':8} {'of tolerance':>12} {'same bits':>9}"]
    for step in steps:
        if step.kind == "check":
            entry = found.get(step.name, {})
            result = entry.get("result", {})
            worst = max((item.get("of_tolerance", 0.0) for item in result.get("outputs", {}).values()), default=None)
            runs = f"{result['identical_runs']}/{result['runs']}" if "runs" in result else "-"
            shown = "-" if worst is None else f"{worst:.3f}"
            lines.append(f"{step.name[6:]:44} {entry.get('status', 'not run'):8} {shown:>12} {runs:>9}")
    head = f"{'latency µs, median (min)':30} {'level':5} {'launches':>8} {'syncs':>5} {'plain':>20} {'graph':>20}"
    lines += ["", head]
    for step in steps:
        if step.kind != "latency":
            continue
        entry = found.get(step.name, {})
        if entry.get("status") != "ok":
            lines.append(f"{step.name[8:]:30} {entry.get('status', 'not run')}")
        for level, row in entry.get("result", {}).get("levels", {}).items():
            plain, graph = (f"{row[mode]['median_us']:.1f} ({row[mode]['min_us']:.1f})" for mode in ("launch", "graph"))
            mark = " synthetic" if row["constants"] == "synthetic" else ""
            lines.append(
                f"{step.name[8:]:30} {level:5} {row['launches']:>8} {row['grid_syncs']:>5} "
                f"{plain:>20} {graph:>20}{mark}"
            )
    lines.append("")
    for tool in _TOOLS:
        states = [found.get(step.name, {}).get("status", "not run") for step in steps if step.tool == tool]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines.append(f"{tool}: {counts or 'nothing to do'}")
    failures = [(step, found[step.name]) for step in steps if step.name in found and found[step.name]["status"] != "ok"]
    lines += [f"FAILED {step.name}: {str(entry.get('error', '')).strip()[-200:]}" for step, entry in failures]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The command; see the module's text. Exit status 0 where every step went well."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile what goes to the host")
    build.add_argument("--out", type=Path, required=True)
    build.add_argument("--models", nargs="+", default=["bert", "resnext", "lstm", "efficientnet", "swin", "mmoe"])
    build.add_argument("--sizes", nargs="+", default=["tiny", "paper"], choices=("tiny", "paper"))
    build.add_argument("--levels", nargs="+", default=list(_LEVELS), choices=_LEVELS)
    build.add_argument("--arch", default="sm_90")
    build.add_argument("--precision", default="fp32")
    build.add_argument("--steps", nargs="*", default=["lstm=8"], metavar="MODEL=N", help="time steps of paper models")
    build.add_argument(
        "--check-paper", nargs="*", default=["V4"], choices=_LEVELS, metavar="LEVEL",
        help="levels of paper models that also travel with their true constants, for checking",
    )  # fmt: skip
    build.add_argument("--max-mib", type=float, default=60.0, help="larger files stay here")
    build.add_argument("--timeout", type=int, default=1200, help="seconds for one case")
    build.add_argument("--force", action="store_true", help="build again what is there")
    for name in ("run", "rehearse"):
        run = commands.add_parser(name, help="every step on the host" if name == "run" else "the same without a GPU")
        run.add_argument("--in", dest="input", type=Path, required=True)
        run.add_argument("--out", type=Path, required=True)
        run.add_argument("--resume", type=Path, help="results.json of an earlier run that was cut short")
        run.add_argument("--models", nargs="*", default=[], help="only these")
        run.add_argument(
            "--sanitize", nargs="*", default=["V3", "V4"], choices=_LEVELS, help="levels under the sanitizer"
        )
        run.add_argument(
            "--repeats", type=int, default=2 if name == "rehearse" else 50, help="runs that must agree bit by bit"
        )
        run.add_argument("--latency-repeats", type=int, default=1 if name == "rehearse" else 50)
        run.add_argument("--rounds", type=int, default=1 if name == "rehearse" else 6)
        run.add_argument("--timeout", type=int, default=180, help="seconds for one step")
        run.add_argument("--budget", type=float, default=540.0, help="seconds for all; no step starts after them")
        run.set_defaults(rehearse=name == "rehearse")
    options = parser.parse_args(argv)
    return _build(options) if options.command == "build" else _run(options)


if __name__ == "__main__":
    sys.exit(main())
