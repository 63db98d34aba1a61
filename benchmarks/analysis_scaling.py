"""How the time of the analysis and the transformations grows with a model: once for each number of layers.

``python -m benchmarks.analysis_scaling [--models bert swin lstm] [--counts 1 2 4 8 16 32] [--out FILE.json]``. Widths
are the paper's; what is counted is BERT's encoder layers, blocks of Swin's third stage and time steps of the LSTM. Each
point is measured in a process of its own, in seconds of that process. ``growth`` is the seconds of a row, less import,
divided by those of the row before, over the ratio of their TEs: 1 is linear growth, 2 is quadratic growth at doubled
counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from onnx import ModelProto

import souffle
from benchmarks.record import save_results
from benchmarks.transform_table import analyzed, transformed
from souffle import transform
from souffle.cli.output import format_table
from souffle.models import bert, lstm, swin

_DEEP_STAGE = 2


def _swin(blocks: int) -> ModelProto:
    """The deepest stage with so many blocks; the second of each pair has shifted windows."""
    config = swin.SIZES["paper"]
    depths = tuple(blocks if stage == _DEEP_STAGE else depth for stage, depth in enumerate(config.depths))
    return swin.build_swin(replace(config, depths=depths), 0)


_SCALED: dict[str, tuple[str, Callable[[int], ModelProto]]] = {
    "bert": ("layers", lambda count: bert.build_bert(replace(bert.SIZES["paper"], layers=count), 0)),
    "swin": ("blocks", _swin),
    "lstm": ("steps", lambda count: lstm.build_lstm(replace(lstm.SIZES["paper"], steps=count), 0)),
}


def measure(name: str, count: int) -> dict:
    """Import, analyse and transform one model of so many layers in this process."""
    model = _SCALED[name][1](count)
    start = time.process_time()
    program = souffle.import_onnx(model)
    result = {"model": name, "count": count, "import_s": round(time.process_time() - start, 3)}
    found = analyzed(program)[1]
    result |= {"tes": found["tes"], "analysis_s": found["cpu_seconds"]}
    for step in ("horizontal", "vertical", "roll"):
        if hasattr(transform, step):
            program, figures = transformed(program, step)
            result |= {f"{step}_tes": figures["tes"], f"{step}_s": figures["cpu_seconds"]}
    return result


def _seconds(result: dict) -> float:
    """All but the import."""
    return sum(value for key, value in result.items() if key.endswith("_s") and key != "import_s")


def _rows(results: list[dict]) -> list[list]:
    rows = []
    for before, result in zip([None, *results], results, strict=False):
        growth = "-"
        if before is not None and before["model"] == result["model"]:
            growth = f"{_seconds(result) / _seconds(before) / (result['tes'] / before['tes']):.2f}"
        seconds = [result.get(f"{step}_s", "-") for step in ("import", "analysis", "horizontal", "vertical", "roll")]
        whole = _seconds(result)
        unit = _SCALED[result["model"]][0]
        per_layer, per_te = f"{1e3 * whole / result['count']:.1f}", f"{1e3 * whole / result['tes']:.3f}"
        row = [result["model"], f"{result['count']} {unit}", result["tes"], result["vertical_tes"]]
        rows.append([*row, *seconds, f"{whole:.3f}", per_layer, per_te, growth])
    return rows


def main() -> int:
    """Measure all points asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(_SCALED), choices=list(_SCALED))
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one point")
    parser.add_argument("--out", help="where to write the results as JSON")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "COUNT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], int(arguments.one[1]))))
        return 0
    results = []
    for name in arguments.models:
        for count in sorted(arguments.counts):
            print(f"{name} {count} ...", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.analysis_scaling", "--one", name, str(count)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=arguments.timeout)
            results.append(json.loads(done.stdout))
            if arguments.out:
                save_results(arguments.out, "benchmarks.analysis_scaling", results)
    columns = ["model", "count", "TEs", "after vertical", "import s", "analysis s", "horizontal s", "vertical s"]
    columns += ["roll s", "all but import s", "ms/layer", "ms/TE", "growth"]
    print(format_table(columns, _rows(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
