"""``souffle measure-device``: the description of the GPU at hand, for the cost model.

Needs neither TVM nor ONNX; where these are not installed, ``python -m souffle.cli.measure_device`` is the command.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from souffle.calibrate.measure_device import description, machine_code, measure, reference
from souffle.cli.interruption import interruptible, run_process, status_of
from souffle.cli.output import Progress, format_table, write_json
from souffle.runtime.cuda import Cuda

__all__ = ["add_arguments", "main", "measure_device"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's own options."""
    command.add_argument("-o", "--output", metavar="FILE.json", type=Path, help="default: named after the product")
    command.add_argument("--device", type=int, default=0, metavar="N", help="the GPU's number")
    command.add_argument("--repeats", type=int, default=15, help="pairs of runs of each kernel; the median counts")
    command.set_defaults(command=measure_device)


def measure_device(arguments: argparse.Namespace, progress: Progress) -> int:
    """Run the command."""
    cuda = Cuda(arguments.device)
    progress(f"nvcc for {cuda.arch}")
    image = machine_code(cuda.arch)
    measured = measure(cuda, image, repeats=arguments.repeats, progress=progress)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    described = description(measured, date=now, cuda_of_driver=cuda.driver_version, repeats=arguments.repeats)
    path = arguments.output or Path(f"{described['product']}.json")
    path.write_text(json.dumps(described, indent=1) + "\n")
    progress.done()
    if arguments.json:
        write_json({"file": str(path), **described})
        return 0
    print(table(described))
    print(f"{path}: {measured.name}, {measured.arch}")
    return 0


def table(described: dict[str, Any]) -> str:
    """Each figure beside that of the nearest description that is shipped.

    Parameters
    ----------
    described : dict
        What :func:`souffle.calibrate.measure_device.description` gives.
    """
    nearest = reference(described["device"], described["arch"])
    shipped = {} if nearest is None else nearest[1]
    label = "shipped" if nearest is None else nearest[0] if nearest[2] else f"{nearest[0]} (same architecture)"
    rows = []
    for name, figure in described["figures"].items():
        other = shipped[name]["value"] if name in shipped else None
        if not isinstance(figure["value"], (int, float)):
            rows += [(f"{name}, {number}", figure["kind"], f"{each:.6g}", "-", "-") for number, each in figure["value"]]
            rows += [(f"{name}, {number}", label, "-", f"{each:.6g}", "-") for number, each in other or ()]
            continue
        ratio = "-" if other is None else f"{figure['value'] / other:.3f}"
        rows.append((name, figure["kind"], f"{figure['value']:.6g}", "-" if other is None else f"{other:.6g}", ratio))
    text = format_table(("figure", "kind", "here", label, "ratio"), rows)
    estimates = [f"{name}: {figure['source']}" for name, figure in described["figures"].items()
                 if figure["kind"] == "estimate"]  # fmt: skip
    return "\n".join([text, *estimates])


def main(argv: Sequence[str] | None = None) -> int:
    """The command alone; exit status 0, or 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m souffle.cli.measure_device", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    progress = Progress(arguments.quiet)
    return interruptible(lambda: status_of(lambda: measure_device(arguments, progress), progress), progress)


if __name__ == "__main__":
    run_process(main)
