"""The nine kernels and their fusions on a GPU: the paper's Figures 7 and 8, and the bits of each fused kernel.

Where there is nvcc::

    python -m benchmarks.hfuse.gpu build --cubins FOLDER [--arch sm_90]

On the host with the GPU (tree-sitter and its CUDA grammar, NumPy, cuda-bindings; nvcc where FOLDER is not carried; ncu
for the counters of Figure 8)::

    python -m benchmarks.hfuse.gpu run --out FOLDER [--cubins FOLDER] [--seconds 540] [--ratios 0.5 1 2] [--only PAIR]

``rehearse`` in the place of ``run`` goes through the same without a GPU, up to the launches. Tasks run in a process of
their own, which is ended where one of them takes longer than ``--task-seconds``. FOLDER/results.json is written after
each task, FOLDER/tables.txt at the end; what is done is not done again. The exit status is 1 where a task failed or a
bit differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hfuse.gpu_images import Images, candidates
from benchmarks.hfuse.gpu_report import tables
from benchmarks.hfuse.gpu_tasks import Bench, task_names
from benchmarks.hfuse.workloads import GROUPS, KERNELS, parts_of
from benchmarks.record import write_json
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.cli.output import Progress
from souffle.errors import SouffleError
from souffle.hfuse import original
from souffle.runtime.cuda import Cuda

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]
_REHEARSED_SCALE, _POLL_SECONDS, _ENDING_SECONDS = 1e-4, 0.05, 20.0
_PLAYED_ARCH = "sm_90"


def _texts(names: Sequence[str], arch: str, images: Images) -> list[str]:
    """Every text that the tasks of some pairs compile; all are compiled on the way."""
    texts = []
    for name in names:
        parts = parts_of(dict.fromkeys(GROUPS[name], 1))
        texts += [original(part, wrapped=True).text for part in parts]
        texts += [fused.text for kind in candidates(parts, arch, images).values() for fused in kind]
    for text in texts:
        images.compile(text, arch)
    return texts


def _bench(options: argparse.Namespace) -> Bench:
    rehearse = options.rehearse
    images = Images(None if rehearse else options.cubins, played=rehearse)
    if rehearse:
        texts = _texts(options.only or list(GROUPS), _PLAYED_ARCH, images)
        cuda = Cuda(0, RehearsalDriver({text.encode(): text for text in texts}, execute=False))
    else:
        cuda = Cuda(0)
    scale = options.scale if options.scale is not None else (_REHEARSED_SCALE if rehearse else 1.0)
    repeats, warm_seconds = (1, 0.0) if rehearse else (options.repeats, 0.5)
    return Bench(cuda, images, scale, repeats, warm_seconds, ncu=not rehearse)


# the worker: does tasks until none is left


def _done(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {task: entry["result"] for task, entry in record["results"].items() if entry["status"] == "ok"}


def _work(options: argparse.Namespace) -> int:
    path = options.out / "results.json"
    record = json.loads(path.read_text())
    try:
        bench = _bench(options)
    except SouffleError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for task in _left(options, record):
        began = time.monotonic()
        record["now"] = {"task": task, "since": time.time()}
        write_json(path, record)
        try:
            entry: dict[str, Any] = {"status": "ok", "result": bench.run(task, _done(record))}
        except SouffleError as error:
            entry = {"status": "failed", "error": str(error)[:800]}
        record["results"][task] = entry | {"seconds": round(time.monotonic() - began, 2)}
        record["now"] = None
        write_json(path, record)
        if entry["status"] == "failed":
            # After a fault of a kernel a process gets nothing more from its GPU.
            return 3
    return 0


def _left(options: argparse.Namespace, record: Mapping[str, Any]) -> list[str]:
    wanted = task_names(options.only or list(GROUPS), options.ratios)
    return [task for task in wanted if task not in record["results"]]


# the supervisor


def _supervise(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    path, progress = options.out / "results.json", Progress()
    end = time.monotonic() + options.seconds
    if path.exists():
        record = json.loads(path.read_text())
        if record["rehearsal"] != options.rehearse:
            sys.stderr.write(
                f"{path} is of a {'rehearsal' if record['rehearsal'] else 'real run'}; give another --out\n"
            )
            return 2
        record["results"] = {task: e for task, e in record["results"].items() if e["status"] == "ok"}
    else:
        record = {"rehearsal": options.rehearse, "results": {}}
    record |= {"command": " ".join(["python -m benchmarks.hfuse.gpu", *sys.argv[1:]]), "now": None}
    write_json(path, record)
    while _left(options, record) and time.monotonic() < end:
        before = len(record["results"])
        log, state = _watched(options, path, end, progress)
        record = json.loads(path.read_text())
        if record["now"] is not None and time.monotonic() < end:
            task = record["now"]["task"]
            record["results"][task] = {"status": state, "error": log or state, "seconds": None}
        record["now"] = None
        write_json(path, record)
        if len(record["results"]) == before:
            sys.stderr.write(log)
            break
    progress.done()
    text = tables(record)
    (options.out / "tables.txt").write_text(text)
    sys.stdout.write(text)
    entries = record["results"].items()
    bad = [task for task, entry in entries if entry["status"] != "ok" or entry["result"].get("different")]
    return 1 if bad or not record["results"] else 0


def _watched(options: argparse.Namespace, path: Path, end: float, progress: Progress) -> tuple[str, str]:
    """Run a worker to its end, or end it; the end of what it said, and how it went."""
    command = [sys.executable, "-m", "benchmarks.hfuse.gpu", "rehearse" if options.rehearse else "run", "--worker"]
    command += ["--out", str(options.out.resolve()), "--repeats", str(options.repeats)]
    command += ["--ratios", *map(str, options.ratios)]
    command += ["--only", *options.only] if options.only else []
    command += ["--scale", str(options.scale)] if options.scale is not None else []
    command += ["--cubins", str(options.cubins.resolve())] if options.cubins else []
    with (options.out / "worker.log").open("w+") as log:
        worker = subprocess.Popen(command, cwd=_ROOT, stdout=log, stderr=log, start_new_session=True)
        state, known = "failed", ""
        while worker.poll() is None:
            time.sleep(_POLL_SECONDS)
            now = json.loads(path.read_text())["now"]
            if now is not None and now["task"] != known:
                known = now["task"]
                progress(known)
            late = now is not None and time.time() - now["since"] > options.task_seconds
            if late or time.monotonic() > end:
                state = "timeout"
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait(_ENDING_SECONDS)
        log.seek(0)
        return log.read().strip()[-800:], state


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hfuse.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compile every text, for a host without nvcc")
    building.add_argument("--arch", default="sm_90")
    watched = commands.add_parser("single", help="launch one kernel alone, under a profiler")
    watched.add_argument("kernel", choices=KERNELS)
    watched.set_defaults(rehearse=False, repeats=1)
    for each in (building, watched):
        each.add_argument("--cubins", type=Path, required=each is building)
        each.add_argument("--only", nargs="*", choices=list(GROUPS), metavar="PAIR")
    watched.add_argument("--scale", type=float)
    for kind in ("run", "rehearse"):
        running = commands.add_parser(kind, help="on the GPU" if kind == "run" else "the same without one")
        running.add_argument("--out", type=Path, required=True)
        running.add_argument("--cubins", type=Path, help="a folder of build")
        running.add_argument("--only", nargs="*", choices=list(GROUPS), metavar="PAIR", help="such as batchnorm+hist")
        running.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0])
        running.add_argument("--scale", type=float, help="of all sizes")
        running.add_argument("--repeats", type=int, default=9)
        running.add_argument("--seconds", type=float, default=540.0, help="after which no more is done")
        running.add_argument("--task-seconds", type=float, default=90.0, help="after which a task is ended")
        running.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
        running.set_defaults(rehearse=kind == "rehearse")
    options = parser.parse_args(argv)
    if options.command == "build":
        count = len(set(_texts(options.only or list(GROUPS), options.arch, Images(options.cubins))))
        sys.stdout.write(f"{count} texts for {options.arch} in {options.cubins}\n")
        return 0
    if options.command == "single":
        _bench(options).launch(options.kernel)
        return 0
    return _work(options) if options.worker else _supervise(options)


if __name__ == "__main__":
    sys.exit(main())
