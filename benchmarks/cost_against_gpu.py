"""The cost model against a GPU: rank correlation over hundreds of schedules of a dozen TEs.

Here, with the compiler and nvcc, and no GPU::

    python -m benchmarks.cost_against_gpu build --out BUILD
    python -m benchmarks.cost_against_gpu pack --in BUILD --to FOLDER

On the host, in FOLDER (Python 3.10 to 3.12, NumPy, cuda-bindings)::

    python -m benchmarks.cost_against_gpu run --in build --out RESULTS

``rehearse`` in the place of ``run`` goes through the same steps without a GPU; a build with ``--small`` is one whose
kernels the CPU device then runs. ``predict`` repeats the predictions of a build for another description of the device,
and ``report`` makes the tables and plots again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cost_against_gpu_report import MODES, joined, outliers, plot, summary, table

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parent.parent
_TRAVELS = ("souffle", "benchmarks")
_MOST_FAULTS = 10
"""Processes that may end in a fault or a hang; each costs a start."""
_log = logging.getLogger("cost_against_gpu")


def _write(path: Path, content: Any) -> None:
    """Replace a file only once its new content is complete. What is not a number has no place in JSON."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n")
    part.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


# pack


def _pack(options: argparse.Namespace) -> int:
    if options.to.exists() and any(options.to.iterdir()):
        _log.error("%s is not empty; give a new folder", options.to)
        return 2
    target = options.to / "build"
    target.mkdir(parents=True)
    for name in _TRAVELS:
        shutil.copytree(_ROOT / name, options.to / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "build"))
    manifest = _manifest(options.input)
    files = {entry["file"] for case in manifest["cases"].values() for entry in case["schedules"].values()}
    for file in sorted(files | {"manifest.json", manifest["measure"]}):
        shutil.copy(options.input / file, target)
        text = (options.input / file).with_suffix(".cu")
        if manifest["small"] and text.exists():
            shutil.copy(text, target)
    total = sum(path.stat().st_size for path in options.to.rglob("*") if path.is_file())
    _log.info("%s holds %.1f MiB", options.to, total / 2**20)
    if total > options.max_mib * 2**20:
        _log.error("that is over --max-mib %g; build fewer --schedules", options.max_mib)
        return 1
    return 0


# run


def _child(options: argparse.Namespace, answer: Path, log: Path, skip: list[str], end: float) -> int | None:
    """Exit status of a process that measures, or None where it was ended at the end of the time."""
    left = end - time.monotonic()
    command = [sys.executable, "-m", "benchmarks.cost_against_gpu_run", "--in", str(options.input.resolve())]
    # Half a minute of what is left is for the start and for the last schedule.
    command += ["--json", str(answer), "--rounds", str(options.rounds), "--seconds", str(max(5.0, left - 30))]
    command += ["--rehearse"] if options.rehearse else []
    command += [] if options.execute else ["--no-execute"]
    command += ["--skip", *skip] if skip else []
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            return process.wait(max(10.0, left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def _run(options: argparse.Namespace) -> int:
    manifest = _manifest(options.input)
    options.execute = not options.rehearse or manifest["small"]
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    failed: dict[str, str] = {}
    content: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cost-against-gpu-") as temporary:
        answer, log = Path(temporary) / "answer.json", Path(temporary) / "log"
        while len(failed) < _MOST_FAULTS and end - time.monotonic() > 10:
            status = _child(options, answer, log, list(failed), end)
            content = json.loads(answer.read_text()) if answer.exists() else {}
            if content and content["now"] is None:
                break
            name = content.get("now") or "start"
            again = name in failed or name == "start"
            failed[name] = ("out of time; " if status is None else "") + log.read_text(errors="replace").strip()[-1500:]
            _log.warning("%s: %s", name, failed[name][-300:])
            if again:
                break
    results = {
        "name": (content.get("device") or {}).get("device", "no device"),
        "command": " ".join(["python -m benchmarks.cost_against_gpu", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rehearsal": options.rehearse,
        "executed": options.execute,
        "build": {key: manifest[key] for key in ("command", "arch", "seed", "small")},
        "failed": failed,
        "checks": content.get("checks", {}),
        "times": content.get("times", {}),
        "rounds": content.get("rounds", 0),
        "device": content.get("device"),
    }
    return _conclude(options, manifest, results)


def _conclude(options: argparse.Namespace, manifest: dict[str, Any], results: dict[str, Any]) -> int:
    """Join with the predictions, write, plot and print."""
    rows = joined(manifest, results["times"])
    results["predicted_for"] = manifest["device"]
    results["schedules"] = rows
    results["correlation"] = {mode: summary(rows, mode) for mode in MODES}
    results["outliers"] = {mode: outliers(rows, mode, options.outliers) for mode in MODES}
    _write(options.out / "results.json", results)
    if results["device"]:
        _write(options.out / "device.json", results["device"])
    for mode in MODES:
        if rows:
            value = next(row["spearman"] for row in results["correlation"][mode] if row["te"] == "mean of the TEs")
            title = f"{len(rows)} schedules, {results['name']}, {mode}: mean rank correlation of the TEs {value:.3f}"
            (options.out / f"{mode}.svg").write_text(plot(rows, mode, title))
    sys.stdout.write(table(results))
    wrong = [name for name, check in results["checks"].items() if not check["ok"]]
    return 0 if rows and not wrong and not results["failed"] else 1


def _report(options: argparse.Namespace) -> int:
    results = json.loads((options.out / "results.json").read_text())
    return _conclude(options, _manifest(options.input), results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_against_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="build and predict have options of their own: python -m benchmarks.cost_against_gpu build --help",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="gather what travels into one folder")
    pack.add_argument("--in", dest="input", type=Path, required=True)
    pack.add_argument("--to", type=Path, required=True)
    pack.add_argument("--max-mib", type=float, default=60.0, help="more than this is an error")
    pack.set_defaults(action=_pack)
    helped = {"run": "every step on the host", "rehearse": "the same without a GPU", "report": "tables, plots again"}
    for name, text in helped.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--in", dest="input", type=Path, required=True, help="the folder of the build")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--outliers", type=int, default=12, help="how many to list in results.json")
        command.set_defaults(action=_report)
        if name != "report":
            quick = name == "rehearse"
            command.add_argument("--rounds", type=int, default=2 if quick else 30)
            command.add_argument("--budget", type=float, default=280.0, help="seconds for all")
            command.set_defaults(action=_run, rehearse=quick)
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; see the module's text. Exit status 0 where every schedule was right and timed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    given = sys.argv[1:] if argv is None else argv
    if given[:1] in (["build"], ["predict"]):
        # The host has no compiler to import.
        return importlib.import_module("benchmarks.cost_against_gpu_build").main(given)
    options = _parser().parse_args(given)
    return options.action(options)


if __name__ == "__main__":
    sys.exit(main())
