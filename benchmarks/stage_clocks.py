"""Where the time of kernels goes on a GPU: a clock read by every block before each stage and each wait.

The text of a network's kernels is compiled once more, with a line before each statement of a kernel's body that writes
the multiprocessor's clock to memory. What such a twin computes is the same; what it takes is a little more.

Here, with nvcc, for networks that ``benchmarks.gpu_host build`` has built::

    python -m benchmarks.stage_clocks build --in ARTIFACTS

The twins travel with the networks, and ``benchmarks.gpu_host`` runs them in its phase ``stages``. To read what it has
found::

    python -m benchmarks.stage_clocks table results.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_pack import read_index
from benchmarks.gpu_plan import is_own
from benchmarks.record import write_json
from souffle.codegen.nvcc import compile_cubin
from souffle.codegen.plan import Plan
from souffle.runtime import load
from souffle.runtime.cuda import Cuda
from souffle.runtime.stamped_run import stamped_run
from souffle.runtime.stamps import CYCLES, Twin, stamped

__all__ = ["Twin", "clocked", "main", "measure", "predictions", "read_twin", "table"]

_LEVELS = ("V2", "V3", "V4")
"""Stages of V2 are V3's in kernels of their own."""
_FORM = re.compile(r"(_begun)?(_\d+x\d+x\d+)?$")
"""Behind the name of a stage whose first copies are made before it, or whose blocks have several teams."""


def clocked(text: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """A module's text with the clocks of multiprocessors; see :func:`souffle.runtime.stamps.stamped`."""
    return stamped(text, CYCLES)


# build


def _twin_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.clocks.npz"


def _build_one(folder: Path, name: str, cubin: bool) -> None:
    plan = load(folder / f"{name}.souffle")
    labels: dict[str, tuple[str, ...]] = {}
    cubins = {}
    for number, module in enumerate(plan.modules):
        text, found = clocked(module.text)
        labels |= found
        image = compile_cubin(text, plan.options.arch)[0] if cubin else hashlib.sha256(text.encode()).digest()
        cubins[f"cubin{number}"] = np.frombuffer(image, np.uint8)
    np.savez_compressed(_twin_path(folder, name), labels=np.array(json.dumps(labels)), **cubins)


def read_twin(path: Path) -> Twin:
    """What ``build`` has written."""
    with np.load(path, allow_pickle=False) as file:
        labels = {name: tuple(found) for name, found in json.loads(str(file["labels"])).items()}
        count = sum(key.startswith("cubin") for key in file.files)
        return Twin(tuple(file[f"cubin{number}"].tobytes() for number in range(count)), labels)


def _build(options: argparse.Namespace) -> int:
    index = read_index(options.input)
    wanted = [
        name
        for name, case in index["cases"].items()
        if case["level"] in options.levels and case["size"] in options.sizes and is_own(case)
        and (not options.models or case["model"] in options.models)
    ]  # fmt: skip
    missing = [name for name in wanted if options.force or not _is_new(options.input, name)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda name: _build_one(options.input, name, options.cubin), missing))
    for name in wanted:
        index["cases"][name]["clocks"] = _twin_path(options.input, name).name
    write_json(options.input / "index.json", index)
    sys.stdout.write(f"{len(missing)} of {len(wanted)} twins compiled\n")
    return 0


def _is_new(folder: Path, name: str) -> bool:
    twin, network = _twin_path(folder, name), folder / f"{name}.souffle"
    return twin.exists() and twin.stat().st_mtime >= network.stat().st_mtime


# run


def measure(
    plan: Plan, twin: Twin, inputs: dict[str, np.ndarray], cuda: Cuda, *, runs: int, spin: float = 0.0
) -> dict[str, Any]:
    """Clocks of each label of each launch: a JSON object.

    Parameters
    ----------
    plan : Plan
    twin : Twin
    inputs : dict of str to array
        By the model's names.
    cuda : Cuda
    runs : int
        Of the whole network; medians over them are given.
    spin : float
        Seconds of runs before, that do not count; one at least.

    Returns
    -------
    dict
        ``"launches"``: for each kernel and number of blocks, how often it is launched, and ``"segments"``, of which
        each is ``[label, times, clocks of the quickest block, of the mean, of the slowest]``, summed over all of its
        runs; of a wait, the quickest is the block that came last. ``"us"``: a whole run, between events.
    """
    with stamped_run(plan, twin, inputs, cuda) as running:
        end = time.monotonic() + spin
        running.run()
        while time.monotonic() < end:
            running.run()
        samples = [running.run() for _ in range(runs)]
        grids = running.grids
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for number, launch in enumerate(plan.launches):
        name, blocks = plan.kernels[launch.kernel].name, grids[launch.kernel]
        entry = found.setdefault((name, blocks), {"kernel": name, "blocks": blocks, "runs": 0, "segments": {}})
        entry["runs"] += 1
        clocks = np.stack([np.diff(sample[1][number], axis=0) for sample in samples])
        over_blocks = np.stack([np.median(part(clocks, axis=2), axis=0) for part in (np.min, np.mean, np.max)], axis=1)
        for label, row in zip(twin.labels[name], over_blocks, strict=True):
            total = entry["segments"].setdefault(label, np.zeros(4))
            total += [1, *row]
    for entry in found.values():
        entry["segments"] = [
            [label, *np.rint(total).astype(int).tolist()] for label, total in entry["segments"].items()
        ]
    return {"us": statistics.median(sample[0] for sample in samples), "launches": list(found.values())}


# table


def table(result: dict[str, Any], predicted: dict[str, float], clock_hz: float) -> str:
    """One network's stages and waits, those that take longest first.

    Parameters
    ----------
    result : dict
        Of :func:`measure`.
    predicted : dict of str to float
        Seconds of all runs of a stage, by its name.
    clock_hz : float
    """
    rows: dict[str, list[float]] = {}
    for launch in result["launches"]:
        for label, times, low, mean, high in launch["segments"]:
            row = rows.setdefault(label, [0, 0.0, 0.0, 0.0])
            for place, value in enumerate((times, low, mean, high)):
                row[place] += value
    micro = 1e6 / clock_hz
    lines = [f"{'µs in all':60} {'times':>6} {'quickest':>9} {'mean':>9} {'slowest':>9} {'predicted':>9}"]
    for label, (times, low, mean, high) in sorted(rows.items(), key=lambda item: -item[1][2]):
        seconds = predicted.get(_FORM.sub("", label))
        of_model = f"{'':>9}" if seconds is None else f"{seconds * 1e6:9.1f}"
        lines.append(f"{label:60.60} {times:6} {low * micro:9.1f} {mean * micro:9.1f} {high * micro:9.1f} {of_model}")
    inside = sum(row[2] for row in rows.values()) * micro
    lines.append(f"{'all':60} {'':6} {'':9} {inside:9.1f}; launched, between events: {result['us']:.1f}")
    return "\n".join(lines) + "\n"


def predictions(plan: Plan) -> dict[str, float]:
    """Seconds of all runs of each stage, as the cost model has them."""
    found: dict[str, float] = {}
    for launch in plan.launches:
        kernel = plan.kernels[launch.kernel]
        for stage in kernel.predicted.stages if kernel.predicted else ():
            found[stage.name] = found.get(stage.name, 0.0) + stage.seconds
    return found


def main(argv: list[str] | None = None) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stage_clocks", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the twins of networks that are built")
    build.add_argument("--in", dest="input", type=Path, required=True)
    build.add_argument("--models", nargs="*", default=[], help="only these")
    build.add_argument("--levels", nargs="+", default=list(_LEVELS))
    build.add_argument("--sizes", nargs="+", default=["paper"])
    build.add_argument("--jobs", type=int, default=2)
    build.add_argument("--force", action="store_true", help="compile again what is there")
    build.add_argument("--no-cubin", dest="cubin", action="store_false", help="without nvcc, for rehearsals alone")
    shown = commands.add_parser("table", help="show what the phase `stages` has found")
    shown.add_argument("results", type=Path)
    shown.add_argument("--clock-mhz", type=float, required=True, help="of the multiprocessors, while it ran")
    options = parser.parse_args(argv)
    if options.command == "build":
        return _build(options)
    for name, entry in json.loads(options.results.read_text())["steps"].items():
        if name.startswith("stages ") and entry["status"] == "ok":
            result = entry["result"]
            sys.stdout.write(f"{name}\n{table(result, result['predicted'], options.clock_mhz * 1e6)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
