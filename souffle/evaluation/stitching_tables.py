"""Tables of the papers on FusionStitching: Table 2 of 2021 (000), Tables 2 to 4 of 2019 (003), from plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from souffle.evaluation.cells import EMPTY, Cell, Line, PaperTable, absent, counted, predicted, reported
from souffle.evaluation.network_rows import Planned, Task
from souffle.evaluation.published import published
from souffle.evaluation.setting import V100, Setting
from souffle.evaluation.souffle_rows import Rows, why
from souffle.evaluation.unfused import UNFUSED, UNFUSED_NAME

__all__ = [
    "breakdown",
    "breakdown_tasks",
    "characteristics",
    "ratios",
    "shared_memory",
    "workload_tasks",
]

_XLA, _OF_2019, _OF_2021, _TVM = "xla-rules", "stitching-ilp", "stitching-dp", "tvm"
_NOT_PUBLIC = absent("the network is not public")
_ON_V100 = f"by the latency-evaluator of 000, {V100}"


def _planned(setting: Setting, network: str, *planners: str) -> Planned:
    return Planned(network, setting.size, planners, V100)


# 2021, Table 2: time and calls by kind

_SYSTEMS = {"XLA": _XLA, "FusionStitching": _OF_2021}


def breakdown_tasks(setting: Setting) -> list[Task]:
    """What has to be made."""
    names = dict.fromkeys(row["network"] for row in published("stitching-2021-table2")["rows"] if "network" in row)
    return [_planned(setting, name, _XLA, _OF_2021) for name in names]


def breakdown(setting: Setting, rows: Rows) -> PaperTable:
    """The table: of each kind the calls and the time, which a plan has of kernels alone."""
    about, lines = published("stitching-2021-table2"), []
    host = absent("what the host does is not planned")
    for row in about["rows"]:
        name = f"{row['name']}, {row['system']}"
        lines.append(Line(name, f"paper, ms, {about['gpus'][0]}", tuple(map(reported, row["cells"]))))
        lines.append(Line(name, "paper, calls", tuple(map(reported, row["calls"]))))
        if "network" not in row:
            lines.append(Line(name, "here", (absent("training of this network is not built here"),) * 5))
            continue
        if row["system"] not in _SYSTEMS:
            lines.append(Line(name, "here", (absent("TensorFlow is not among what is compiled here"),) * 5))
            continue
        plan = rows(_planned(setting, row["network"], _XLA, _OF_2021))
        if (bad := why(plan)) is not None:
            lines.append(Line(name, "here", (bad,) * 5))
            continue
        planner = _SYSTEMS[row["system"]]
        of = plan["planners"][planner]
        products = of["kernels"] - of["memory_kernels"]
        note = f"kernels in the plan of {planner}"
        kinds = (counted(products, note), counted(of["memory_kernels"], note))
        calls = (EMPTY, *kinds, host, counted(of["kernels"], note))
        all_us, memory_us = of["kernels_us"], of["memory_us"]
        math_ms = None if all_us is None or memory_us is None else (all_us - memory_us) / 1e3
        end_ms = None if all_us is None else (all_us + of["launch_us"]) / 1e3
        times = (host, predicted(math_ms, _ON_V100), predicted(memory_us and memory_us / 1e3, _ON_V100), host)
        lines.append(Line(name, "here, ms", (*times, predicted(end_ms, f"{_ON_V100}, with launches"))))
        lines.append(Line(name, "here, calls", calls))
    remarks = (
        "Networks here are of the sizes that the paper names as far as it does, batch 1 where it does not "
        "(souffle/models); products are the evaluator's and no library's, so Math says little.",
    )
    return PaperTable("stitching-2021-table2", about, tuple(about["columns"]), tuple(lines), remarks)


# 2019, Tables 2 to 4: what workloads are like, kernels and time, shared memory


def workload_tasks(setting: Setting) -> list[Task]:
    """What has to be made for all three."""
    names = dict.fromkeys(row["network"] for row in published("stitching-2019-table3")["rows"] if "network" in row)
    return [_workload(setting, name) for name in names]


def _workload(setting: Setting, network: str) -> Planned:
    return _planned(setting, network, UNFUSED_NAME, _TVM, _XLA, _OF_2019)


def characteristics(setting: Setting, rows: Rows) -> PaperTable:
    """Table 2: without fusion, as TensorFlow runs a network."""

    def cells(plan: Mapping[str, Any]) -> tuple[Cell, ...]:
        of = plan["planners"][UNFUSED.name]
        us, kernels = of["kernels_us"], of["kernels"]
        share = None if not us or of["memory_us"] is None else round(100 * of["memory_us"] / us, 1)
        mean = None if us is None else round(us / kernels, 2)
        return (
            counted(plan["tes"], "TEs"),
            counted(kernels, "a kernel for each TE"),
            predicted(mean, f"{_ON_V100}, unfused"),
            predicted(share, f"{_ON_V100}, unfused"),
        )

    return _table("stitching-2019-table2", setting, rows, cells)


def ratios(setting: Setting, rows: Rows) -> PaperTable:
    """Table 3: kernels and time without fusion over those with it."""

    def cells(plan: Mapping[str, Any]) -> tuple[Cell, ...]:
        of, alone = plan["planners"], plan["planners"][UNFUSED.name]
        kernels = [
            counted(round(alone["kernels"] / of[name]["kernels"], 2), f"TEs over kernels in the plan of {name}")
            for name in (_XLA, _OF_2019)
        ]
        return (*kernels, *(_speed(alone, of[name]) for name in (_XLA, _OF_2019)))

    return _table("stitching-2019-table3", setting, rows, cells)


def _speed(alone: Mapping[str, Any], fused: Mapping[str, Any]) -> Cell:
    both = [None if one["kernels_us"] is None else one["kernels_us"] + one["launch_us"] for one in (alone, fused)]
    ratio = None if None in both else round(both[0] / both[1], 2)
    return predicted(ratio, f"{_ON_V100}, with launches, over unfused")


def shared_memory(setting: Setting, rows: Rows) -> PaperTable:
    """Table 4: of the patterns of the plan of 2019."""

    def cells(plan: Mapping[str, Any]) -> tuple[Cell, ...]:
        of = plan["planners"][_OF_2019]
        number = of["patterns_with_shared"]
        note = f"in the plan of {_OF_2019}"
        if not number:
            return (counted(0, note), *[absent("no pattern of the plan has shared memory")] * 4)
        share = None if not of["kernels_us"] else round(100 * of["shared_patterns_us"] / of["kernels_us"], 1)
        unit = f"{note}, of one unit of work"
        return (
            counted(round(100 * number / max(1, of["patterns"]), 1), note),
            predicted(share, _ON_V100),
            counted(round(of["shared_given"] / number / 1e3, 3), unit),
            counted(round(of["shared_most"] / 1e3, 3), unit),
            counted(round(of["shared_given"] / of["shared_requested"], 2), unit),
        )

    return _table("stitching-2019-table4", setting, rows, cells)


def _table(name: str, setting: Setting, rows: Rows, cells: Any) -> PaperTable:
    about, lines = published(name), []
    for row in about["rows"]:
        lines.append(Line(row["name"], f"paper, {about['gpus'][0]}", tuple(map(reported, row["cells"]))))
        if "network" not in row:
            own = (_NOT_PUBLIC,) * len(row["cells"])
        else:
            plan = rows(_workload(setting, row["network"]))
            bad = why(plan)
            own = cells(plan) if bad is None else (bad,) * len(row["cells"])
        lines.append(Line(row["name"], f"here, {row['network']}" if "network" in row else "here", own))
    remark = "TensorFlow runs an operator at a time, with copies and control flow; here it is a kernel for each TE."
    return PaperTable(name, about, tuple(about["columns"]), tuple(lines), (remark,))
