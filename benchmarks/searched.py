"""What searched schedules bring: ``python -m benchmarks.searched [--models bert lstm mmoe] --out FILE.json``.

Each model at paper size is compiled for each architecture in each precision: with the rules' own schedules, and with
those of a tuning log. Told are the predicted times of a run, how many candidates of the model's distinct stages were
tried, and how many stages take a schedule of the log.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import souffle
from benchmarks.record import kept_results, save_results
from benchmarks.search_scaling import model_tasks
from souffle import models
from souffle.cli.output import format_table
from souffle.cost import device_of_arch
from souffle.runtime.explain import predicted_seconds
from souffle.schedule.log import TuningLog
from souffle.schedule.log_folders import shipped_log

_COLUMNS = ("model", "arch", "precision", "stages", "tried", "taken", "own_us", "log_us", "ratio")


def row(name: str, arch: str, precision: str, folder: Path) -> dict[str, Any]:
    """One model for one architecture in one precision.

    Parameters
    ----------
    name, arch, precision : str
    folder : Path
        Of the logs.
    """
    model = models.build(name, "paper")
    tasks = model_tasks([name], arch=arch, precision=precision)
    log, product = TuningLog(folder / arch, arch), device_of_arch(arch).product
    tried = [_trials(log, task.stage.draft.func, product) for task in tasks]
    times = {}
    taken = 0
    for kind, given in (("own", None), ("log", folder)):
        network = souffle.compile(
            model, arch=arch, target="cuda", device="cpu", precision=precision, tuning_log=given, verify="off"
        )
        seconds = predicted_seconds(network.plan)
        if seconds is None:
            raise SystemExit(f"{name}, {arch}: nothing is predicted without nvcc")
        times[kind] = 1e6 * seconds
        taken = _taken(network.plan.decisions)
    return {
        **{"model": name, "arch": arch, "precision": precision, "device": product},
        **{"stages": len(tasks), "tried": sum(tried)},
        **{"taken": taken, "own_us": times["own"], "log_us": times["log"], "ratio": times["own"] / times["log"]},
    }


def _trials(log: TuningLog, func: Any, product: str) -> int:
    of_figure = [one for one in log.of(func) if (one.origin.figure, one.origin.device) == ("predicted", product)]
    return len({one.recipe.key for one in of_figure}) + len(log.marks_of(func, "predicted", product))


def _taken(decisions: Any) -> int:
    """Stages whose schedule is one of the log."""
    return sum(bool(taken) for kind, place, taken, _ in decisions if kind == "tuning" and place != "summary")


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert", "lstm", "mmoe"], choices=models.NAMES)
    parser.add_argument("--archs", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "mixed"])
    parser.add_argument("--log", default=str(shipped_log()))
    parser.add_argument("--out", help="where to write the results as JSON")
    arguments = parser.parse_args()
    rows = kept_results(arguments.out)
    done = {(one["model"], one["arch"], one["precision"]) for one in rows}
    for arch in arguments.archs:
        for precision in arguments.precisions:
            for name in arguments.models:
                if (name, arch, precision) in done:
                    continue
                rows.append(row(name, arch, precision, Path(arguments.log)))
                print(rows[-1], flush=True)
                if arguments.out:
                    save_results(arguments.out, "benchmarks.searched", rows)
    print(format_table(list(_COLUMNS), [[_shown(one[name]) for name in _COLUMNS] for one in rows]))


def _shown(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
