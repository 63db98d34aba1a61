"""Figures 1 and 6 of Souffle's paper (004)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from souffle.evaluation.cells import EMPTY, Cell, Line, PaperTable, absent, counted, measured, predicted, reported
from souffle.evaluation.network_rows import Compiled, Task
from souffle.evaluation.published import published
from souffle.evaluation.setting import Setting
from souffle.evaluation.souffle_rows import Rows, compiled, why
from souffle.evaluation.unfused import UNFUSED_NAME
from souffle.options import SOUFFLE

__all__ = ["figure1", "figure1_tasks", "figure6", "figure6_tasks"]

# Figure 1: how a part of BERT becomes kernels. Here it is a layer, for the paper does not say where its part ends.

_LAYER_LEVELS = ("V0", "V2", "V3", "V4")
_STAGES_NAMED = 8


def figure1_tasks(setting: Setting) -> list[Task]:
    """What has to be made."""
    return [compiled(setting, published("figure1")["network"], level) for level in _LAYER_LEVELS]


def figure1(setting: Setting, rows: Rows) -> PaperTable:
    """The table."""
    about, lines = published("figure1"), []
    layers = about["layers"][setting.size]
    made = {task.level: rows(task) for task in figure1_tasks(setting) if isinstance(task, Compiled)}
    for row in about["rows"]:
        theirs = map(reported, row["cells"])
        own = [_of_a_layer(setting, one, row["figure"], layers) for one in made.values()]
        lines.append(Line(row["name"], f"paper, {about['gpus'][0]}", (*theirs, *[EMPTY] * len(own))))
        lines.append(Line(row["name"], "here", (*[EMPTY] * len(row["cells"]), *own)))
    remarks = [
        "The paper's part is not a whole layer. A layer is the network's figures over its layers, which are equal; "
        "where one kernel holds all of them, a layer has a part of a kernel."
    ]
    for level, one in made.items():
        if why(one) is None:
            stages = ", ".join(stage["stage"] for stage in one["stage_us"][:_STAGES_NAMED])
            what = f"{one['launches']} launches of {one['kernels']} kernels"
            remarks.append(f"{level}: {what}; the stages that take longest: {stages}")
    columns = (*about["columns"], *(f"a layer, {level}" for level in _LAYER_LEVELS))
    return PaperTable("figure1", about, columns, tuple(lines), tuple(remarks))


def _of_a_layer(setting: Setting, row: Mapping[str, Any] | None, figure: str, layers: int) -> Cell:
    if (bad := why(row)) is not None:
        return bad
    if figure == "launches":
        return counted(row["launches"] / layers, f"launches {setting.kernels_of}, over {layers} layers")
    if figure == "bytes":
        return counted(row["bytes_read"] / 1e6 / layers, f"once for each run of a stage, over {layers} layers")
    us = row["predicted_us"] if figure == "us" else row[figure]
    on = f"{setting.predicted_on(row)}, over {layers} layers"
    return predicted(None if row["predicted_us"] is None else us / layers, on)


# Figure 6: squeeze-and-excitation modules in four ways

_MODULE_WAYS = (("V0", UNFUSED_NAME), ("V0", SOUFFLE), ("V3", SOUFFLE), ("V4", SOUFFLE))


def figure6_tasks(setting: Setting) -> list[Task]:
    """What has to be made."""
    names = [row["network"] for row in published("figure6")["rows"] if "network" in row]
    return [task for name in names for task in _in_all_ways(setting, name)]


def _in_all_ways(setting: Setting, network: str) -> list[Compiled]:
    return [compiled(setting, network, level, "fp32", fusion) for level, fusion in _MODULE_WAYS]


def figure6(setting: Setting, rows: Rows) -> PaperTable:
    """The table."""
    about, lines = published("figure6"), []
    all_times: list[list[float]] = []
    for row in about["rows"]:
        lines.append(Line(row["name"], f"paper, {about['gpus'][0]}", tuple(map(reported, row["cells"]))))
        if "network" not in row:
            means = [_mean(setting, [times[way] for times in all_times]) for way in range(len(_MODULE_WAYS))]
            lines.append(Line(row["name"], "here", tuple(means)))
            continue
        made = [rows(task) for task in _in_all_ways(setting, row["network"])]
        bad = next((cell for one in made if (cell := why(one)) is not None), None)
        if bad is None and any(_us(one) is None for one in made):
            bad = absent("the model has no figure for it")
        if bad is not None:
            lines.append(Line(row["name"], "here", (bad,) * len(made)))
            continue
        times = [_us(made[0]) / _us(one) for one in made]
        all_times.append(times)
        cells = [_faster(setting, ratio, one) for ratio, one in zip(times, made, strict=True)]
        lines.append(Line(row["name"], "here", tuple(cells)))
    remarks = ("V0 with a kernel for each TE, V0, V3 and V4, in fp32; of predictions, kernels and launches.",)
    return PaperTable("figure6", about, tuple(about["columns"]), tuple(lines), remarks)


def _us(row: Mapping[str, Any]) -> float | None:
    return row["predicted_us"] if row["latency_us"] is None else row["latency_us"]


def _faster(setting: Setting, ratio: float, row: Mapping[str, Any]) -> Cell:
    if row["latency_us"] is not None and setting.gpu is not None:
        return measured(round(ratio, 2), setting.gpu, setting.date)
    return predicted(round(ratio, 2), setting.predicted_on(row))


def _mean(setting: Setting, ratios: Sequence[float]) -> Cell:
    if not ratios:
        return absent("there are none")
    mean = round(statistics.fmean(ratios), 2)
    if setting.gpu is None:
        return predicted(mean, f"the mean of {len(ratios)}")
    return measured(mean, setting.gpu, setting.date, f"the mean of {len(ratios)}")
