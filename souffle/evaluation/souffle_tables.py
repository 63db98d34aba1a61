"""Tables 3 to 6 of Souffle's paper (004): for each what has to be made, and the table of what was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from souffle.evaluation.cells import EMPTY, Cell, Line, PaperTable, absent, counted, measured, reported
from souffle.evaluation.gpu_records import latest_record
from souffle.evaluation.network_rows import Benched, Planned, Task
from souffle.evaluation.published import published
from souffle.evaluation.setting import A100, Setting
from souffle.evaluation.souffle_rows import (
    LAST,
    PAPERS_PRECISION,
    WAVEFRONTS,
    Rows,
    compiled,
    megabytes,
    networks,
    predicted_ms,
    why,
)
from souffle.options import LEVELS

__all__ = [
    "table3",
    "table3_tasks",
    "table4",
    "table4_tasks",
    "table5",
    "table5_tasks",
    "table6",
    "table6_tasks",
]

_PRECISIONS = (PAPERS_PRECISION, "fp32")
_XLA = "xla-rules"
_OTHER_PEERS = {"PyTorch": "eager", "Inductor": "inductor", "ONNX Runtime": "ort"}
"""Columns that the paper does not have, and the peers of ``souffle bench``."""
_PAPERS_PEERS = {"XLA": "xla", "TensorRT": "tensorrt"}
"""Columns of the paper that are peers."""


def _precisions(setting: Setting) -> tuple[str, ...]:
    """What is compiled: without a GPU figures of fp32 come from records alone."""
    return _PRECISIONS if setting.gpu else _PRECISIONS[:1]


# Table 3: latency end to end


def table3_tasks(setting: Setting) -> list[Task]:
    """What has to be made."""
    wanted = [(network, precision) for _, network, _ in networks("table3") for precision in _precisions(setting)]
    tasks: list[Task] = [compiled(setting, network, LAST, precision) for network, precision in wanted]
    return tasks + ([_benched(setting, *one) for one in wanted] if setting.gpu else [])


def table3(setting: Setting, rows: Rows) -> PaperTable:
    """The table."""
    about, lines = published("table3"), []
    none_beside = (EMPTY,) * len(_OTHER_PEERS)
    for name, network, cells in networks("table3"):
        lines.append(Line(name, f"paper, {about['gpus'][0]}", (*map(reported, cells), *none_beside)))
        for precision in _PRECISIONS:
            benched = rows(_benched(setting, network, precision)) if setting.gpu else None
            theirs = [_peer(setting, benched, network, precision, system) for system in about["columns"][:-1]]
            others = [_peer(setting, benched, network, precision, system) for system in _OTHER_PEERS]
            ours = setting.latency(rows(compiled(setting, network, LAST, precision)), network, LAST, precision)
            lines.append(Line(name, f"here, {precision}", (*theirs, ours, *others)))
        of_model = predicted_ms(setting, rows(compiled(setting, network, LAST)))
        lines.append(Line(name, "here, by model", (*[EMPTY] * (len(cells) - 1), of_model, *none_beside)))
    remark = "PyTorch beside mixed precision is in float16; all are CUDA graphs, medians of their runs."
    return PaperTable("table3", about, (*about["columns"], *_OTHER_PEERS), tuple(lines), (remark,))


def _benched(setting: Setting, network: str, precision: str) -> Benched:
    return Benched(network, setting.size, precision, (*_OTHER_PEERS.values(), *_PAPERS_PEERS.values()))


def _peer(setting: Setting, benched: Mapping[str, Any] | None, network: str, precision: str, system: str) -> Cell:
    """Another compiler's latency in ms: timed now, or recorded."""
    peer = {**_OTHER_PEERS, **_PAPERS_PEERS}.get(system)
    if peer is None:
        return absent(f"{system} is not among the peers of souffle bench")
    if setting.gpu is None:
        found = latest_record(kind="peer", peer=peer, model=network, precision=precision)
        if found is None or setting.size != "paper":
            return absent(f"no GPU here, and no record of {system}")
        return measured(found["graph_us"] / 1e3, found["device"], found["date"], f"results/{found['file']}")
    if (bad := why(benched)) is not None:
        return bad
    row = benched["peers"].get(peer, {"reason": "not timed"})
    us = row.get("graph", row.get("launches"))
    return absent(row["reason"]) if us is None else measured(us / 1e3, setting.gpu, setting.date, row["version"])


# Table 4: latency with one optimization more at a time


def table4_tasks(setting: Setting) -> list[Task]:
    """What has to be made."""
    return [
        compiled(setting, network, level, precision)
        for _, network, _ in networks("table4")
        for precision in _precisions(setting)
        for level in LEVELS
    ]


def table4(setting: Setting, rows: Rows) -> PaperTable:
    """The table."""
    about, lines = published("table4"), []
    for name, network, cells in networks("table4"):
        lines.append(Line(name, f"paper, {about['gpus'][0]}", tuple(map(reported, cells))))
        for precision in _PRECISIONS:
            made = {level: rows(compiled(setting, network, level, precision)) for level in LEVELS}
            own = [setting.latency(row, network, level, precision) for level, row in made.items()]
            lines.append(Line(name, f"here, {precision}", tuple(own)))
        own = [predicted_ms(setting, rows(compiled(setting, network, level))) for level in LEVELS]
        lines.append(Line(name, "here, by model", tuple(own)))
    return PaperTable("table4", about, tuple(about["columns"]), tuple(lines))


# Table 5: kernel calls and bytes of global memory


def table5_tasks(setting: Setting) -> list[Task]:
    """What has to be made."""
    names = [network for _, network, _ in networks("table5")]
    plans: list[Task] = [_planned(setting, network) for network in names]
    return [*(compiled(setting, network, LAST) for network in names), *plans]


def table5(setting: Setting, rows: Rows) -> PaperTable:
    """The table."""
    about, lines = published("table5"), []
    unknown = tuple(absent(f"{system} has to be run and profiled") for system in ("TensorRT", "Apollo"))
    for name, network, cells in networks("table5"):
        row, plan = rows(compiled(setting, network, LAST)), rows(_planned(setting, network))
        xla, calls = why(plan), why(row)
        if xla is None:
            xla = counted(plan["planners"][_XLA]["kernels"], f"in the plan of {_XLA}; a product is a kernel")
        if calls is None:
            calls = counted(row["launches"], f"launches {setting.kernels_of}, {LAST}, {PAPERS_PRECISION}")
        lines += [
            Line(name, f"paper, {about['gpus'][0]}", tuple(map(reported, cells))),
            Line(name, "here, once a stage", (*unknown, xla, calls, *unknown, megabytes(row, "once_per_stage"))),
            Line(name, "here, once a launch", (*[EMPTY] * 6, megabytes(row, "once_per_launch"))),
        ]
    remarks = (
        "Bytes that are read: each element once for each run of a stage, as if L2 kept a stage's data and nothing "
        "else; and once for each launch and nothing that the launch wrote, as if it kept all of a kernel's.",
        "The paper's are what Nsight Compute calls loaded; it does not say between which memories.",
    )
    return PaperTable("table5", about, tuple(about["columns"]), tuple(lines), remarks)


def _planned(setting: Setting, network: str) -> Planned:
    return Planned(network, setting.size, (_XLA,), A100)


# Table 6: counters of the LSTM


def table6_tasks(setting: Setting) -> list[Task]:
    """What has to be made: beside the last level the counterpart of Rammer."""
    network = published("table6")["network"]
    return [compiled(setting, network, level) for level in (WAVEFRONTS, LAST)]


def table6(setting: Setting, rows: Rows) -> PaperTable:
    """The table."""
    about, lines = published("table6"), []
    made = [rows(task) for task in table6_tasks(setting)]
    counter = absent("a counter of Nsight Compute, which needs a GPU that may be profiled")
    for row in about["rows"]:
        own = [megabytes(one, "once_per_launch") if row["figure"] == "bytes" else counter for one in made]
        lines.append(Line(row["name"], f"paper, {about['gpus'][0]}", tuple(map(reported, row["cells"]))))
        lines.append(Line(row["name"], f"here: {WAVEFRONTS}, {LAST}", tuple(own)))
    remark = f"In the place of Rammer stands {WAVEFRONTS}: a kernel for each wavefront, nothing is kept between them."
    return PaperTable("table6", about, tuple(about["columns"]), tuple(lines), (remark,))
