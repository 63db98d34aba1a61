"""Figures 7 to 9 of HFuse (001), from records of a GPU, and Table 1 of "Learning to Fuse" (002)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from souffle.evaluation.cells import EMPTY, Cell, Line, PaperTable, absent, measured, predicted, reported
from souffle.evaluation.gpu_records import latest_record
from souffle.evaluation.network_rows import Ordered, Task
from souffle.evaluation.published import published
from souffle.evaluation.setting import A100, Setting
from souffle.evaluation.souffle_rows import Rows, why

__all__ = ["kernels_alone", "learned", "learned_tasks", "no_tasks", "pairs", "pairs_in_detail"]

_MAKES = "no record; benchmarks/hfuse/gpu.py of a checkout makes one on a GPU"


def no_tasks(setting: Setting) -> list[Task]:
    """Nothing has to be made: the kernels are CUDA text that ``benchmarks/hfuse`` runs on a GPU host."""
    return []


def _recorded(record: Mapping[str, Any], value: float | None) -> Cell:
    if value is None:
        return absent("not recorded")
    return measured(value, record["device"], record["date"], f"results/{record['file']}")


def kernels_alone(setting: Setting, rows: Rows) -> PaperTable:
    """001, Figure 8."""
    about, lines = published("hfuse-figure8"), []
    columns = ("ms", "issue slots %", "memory stalls %", "occupancy %")
    for row in about["rows"]:
        for number, gpu in enumerate(about["gpus"]):
            theirs = tuple(map(reported, row["cells"][number :: len(about["gpus"])]))
            lines.append(Line(row["name"], f"paper, {gpu}", theirs))
        found = latest_record(kind="kernel", kernel=row["kernel"])
        names = ("ms", "issue_slot_utilization", "memory_stall", "achieved_occupancy")
        own = tuple(_recorded(found, found.get(name)) if found else absent(_MAKES) for name in names)
        lines.append(Line(row["name"], "here", own))
    remark = "The kernels here are written from the algorithms' definitions and of other sizes: compare the last three."
    return PaperTable("hfuse-figure8", about, columns, tuple(lines), (remark,))


def pairs(setting: Setting, rows: Rows) -> PaperTable:
    """001, Figure 7, which is plotted: what its text says, and ours."""
    about, lines = published("hfuse-figure7"), []
    for row in about["rows"]:
        found = latest_record(kind="pair", pair=row["pair"])
        lines.append(Line(row["name"], f"paper, {' and '.join(about['gpus'])}", tuple(map(reported, row["cells"]))))
        if found is None:
            own = (absent(_MAKES),) * len(about["columns"])
        else:
            percent = found["percent"]
            gains = Cell("yes" if percent["hfuse"] > 0 else "no", "measured", f"on {found['device']}, {found['date']}")
            ways = [_recorded(found, percent.get(way)) for way in ("hfuse", "vfuse", "naive")]
            own = (gains, *(EMPTY if cell is None else way for cell, way in zip(row["cells"][1:], ways, strict=True)))
        lines.append(Line(row["name"], "here, ratio 1", own))
    return PaperTable("hfuse-figure7", about, tuple(about["columns"]), tuple(lines))


def pairs_in_detail(setting: Setting, rows: Rows) -> PaperTable:
    """001, Figure 9: the faster of with and without a bound of registers is ours."""
    about, lines = published("hfuse-figure9"), []
    columns = ("faster", "issue slots", "memory stalls", "occupancy")
    for row in about["rows"]:
        bound = "with" if row["bound"] else "without"
        for number, gpu in enumerate(about["gpus"]):
            own = tuple(map(reported, row["cells"][number :: len(about["gpus"])]))
            lines.append(Line(f"{row['name']}, {bound} bound", f"paper, {gpu}", own))
        found = latest_record(kind="pair", pair=row["pair"])
        counters = absent("counters of fused kernels were not recorded")
        if found is None:
            faster = absent(_MAKES)
        elif (found["best"]["registers"] is not None) != row["bound"]:
            faster = absent("the other bound was the faster one, which alone is recorded")
        else:
            faster = _recorded(found, found["percent"]["hfuse"])
        lines.append(Line(f"{row['name']}, {bound} bound", "here", (faster, *[counters] * 3)))
    return PaperTable("hfuse-figure9", about, columns, tuple(lines))


def learned_tasks(setting: Setting) -> list[Task]:
    """What has to be made."""
    names = dict.fromkeys(row["network"] for row in published("learning-table1")["rows"])
    return [_ordered(setting, name) for name in names]


def _ordered(setting: Setting, network: str) -> Ordered:
    return Ordered(network, setting.size, A100, setting.evaluations)


def learned(setting: Setting, rows: Rows) -> PaperTable:
    """002, Table 1."""
    about, lines = published("learning-table1"), []
    seen: set[str] = set()
    for row in about["rows"]:
        lines.append(Line(row["name"], "paper", tuple(map(reported, row["cells"]))))
        network = row["network"]
        if network in seen:
            continue
        seen.add(network)
        made = rows(_ordered(setting, network))
        bad = why(made)
        own = [bad or _percent(made["us"], way, setting.evaluations) for way in about["columns"]]
        lines.append(Line(row["name"].partition(",")[0], "here, 1 GPU", tuple(own)))
    remarks = (
        "The paper trains a policy for each graph, and has networks of training; here it is the policy that ships, "
        "trained on other graphs too (benchmarks/learning.py trains one for each), and inference on one GPU.",
    )
    return PaperTable("learning-table1", about, tuple(about["columns"]), tuple(lines), remarks)


def _percent(us: Mapping[str, Any], way: str, evaluations: int) -> Cell:
    if isinstance(us[way], str):
        return absent(us[way])
    searched = f", {evaluations} orders" if way == "annealing" else ""
    return predicted(round(100 * (us["none"] / us[way] - 1), 2), f"by the latency-evaluator of 000, {A100}{searched}")
