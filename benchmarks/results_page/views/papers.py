"""What the papers report, beside what is made here: planners, learning, workloads, and their tables by one command."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, decimal, scientific, table
from souffle.evaluation.published import published

__all__ = [
    "learned",
    "learned_compiled",
    "paper_table",
    "paper_table_4",
    "planners_compiled",
    "planners_of_paper_size",
    "plans",
    "plans_beside_papers",
    "plans_in_memory",
    "template_patterns",
    "workloads",
    "workloads_of_paper_size",
]

_PLANNERS = ("stitching-ilp", "stitching-dp", "xla-rules", "tvm")
_DEVICES = ("A100-SXM4-40GB", "H200-SXM5-141GB", "V100-PCIE-16GB")


def _short(value: float | None) -> str:
    """Three or four digits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plans(source: Source) -> Table:
    """What each planner makes of each model."""

    def row(one: Record) -> list[object]:
        planners = [one.record("planners").record(name) for name in _PLANNERS]
        kernels = ", ".join(f"{of['kernels']:,}" for of in planners)
        times = [", ".join(_short(of.record("predicted_us")[device]) for of in planners) for device in _DEVICES]
        seconds = [of.record("planning_s").number(_DEVICES[0]) for of in planners[:2]]
        return [one["model"], f"{one['tes']:,}", kernels, *times, *seconds]

    columns = "model | TEs | kernels: 2019, 2021, XLA, TVM | µs on A100 | on H200 | on V100 | planning s, 2019 | 2021"
    return table(columns, map(row, source.results))


def plans_in_memory(source: Source) -> Table:
    """Bytes between kernels, schemes, packed patterns and shared memory."""

    def mib(value: float) -> str:
        value /= 2**20
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

    def shared(of: Record) -> str:
        asked = of.number("shared_requested")
        return f"{asked:,} → {of['shared_allocated']:,}" if asked else "0"

    def row(one: Record) -> list[object]:
        planners = [one.record("planners").record(name) for name in _PLANNERS]
        both = planners[:2]
        return [
            one["model"],
            ", ".join(mib(of.number("between")) for of in planners),
            *(" ".join(map(str, of.record("schemes").values())) for of in both),
            *(f"{of['packed']} of {of['patterns']}" for of in both),
            *map(shared, both),
        ]

    columns = (
        "model | MiB between kernels: 2019, 2021, XLA, TVM | TEs by packing, thread, warp, block: 2019 | 2021 | "
        "packed patterns of all: 2019 | 2021 | shared bytes asked → given: 2019 | 2021"
    )
    return table(columns, map(row, source.results))


_COMPILED = {"stitching-ilp": "2019", "stitching-dp": "2021", "xla-rules": "XLA", "tvm": "TVM", "souffle": "Souffle"}


def planners_compiled(source: Source) -> Table:
    """Tiny models compiled by each planner."""
    found = {(one["model"], one["level"], one["fusion"]): one for one in source.results}

    def of(model: str, level: str) -> list[Record]:
        return [found[model, level, planner] for planner in _COMPILED]

    def row(model: str) -> Iterator[object]:
        yield model
        yield from (one["launches"] for one in of(model, "V0"))
        yield from (decimal(one.record("us").number(_DEVICES[0]), 1) for one in of(model, "V0"))
        yield from (f"{one['launches']}, {one['barriers']}" for one in of(model, "V3"))
        yield from (decimal(one.record("us").number(_DEVICES[0]), 1) for one in of(model, "V3"))

    kinds = ("kernels at V0", "µs at V0", "launches, barriers at V3", "µs at V3")
    heads = [f"{kind}: 2019 | 2021 | XLA | TVM | Souffle" for kind in kinds]
    models = dict.fromkeys(one["model"] for one in source.results)
    return table(" | ".join(["model", *heads]), (list(row(model)) for model in models), right=range(1, 21))


_BY_RULE = ("default", "greedy")
_SEARCHED = ("random", "annealing", "policy alone", "learned")
_OTHERS = ("tvm", "xla-rules", "stitching-dp", "stitching-ilp")


def learned(source: Source) -> Table:
    """By how many percent each way of planning is faster than no fusion: means over seeds and their spread.

    In brackets by how much more than the default order.
    """
    found: dict[tuple[str, str], list[Record]] = {}
    for one in source.results:
        found.setdefault((one["graph"], one["way"]), []).append(one)

    def speedups(graph: str, way: str) -> list[float]:
        (alone,) = found[graph, "none"]
        return [alone.number("us") / one.number("us") for one in found.get((graph, way), ()) if one["us"] is not None]

    def cell(graph: str, way: str) -> str:
        reached = speedups(graph, way)
        if not reached:
            return "no kernel"
        spread = f" ± {100 * statistics.stdev(reached):.1f}" if len(reached) > 1 else ""
        text = f"{100 * (statistics.mean(reached) - 1):,.1f}{spread}"
        if way == "learned":
            (default,) = speedups(graph, "default")
            text += f" ({100 * (statistics.mean(reached) / default - 1):+.2f})"
        return text

    rows = []
    for graph in dict.fromkeys(one["graph"] for one in source.results):
        (alone,) = found[graph, "none"]
        ways = (*_BY_RULE, *_SEARCHED, *_OTHERS)
        name = f"{graph}{' (held out)' * alone['held_out']}"
        rows.append(
            [name, f"{alone['vertices']:,}", decimal(alone.number("us"), 1), *(cell(graph, way) for way in ways)]
        )
    columns = ["graph", "TEs", "no fusion, µs", *_BY_RULE, *_SEARCHED, *_OTHERS]
    return table(" | ".join(columns), rows)


_LEARNED = ("priority-default", "priority-greedy", "priority-annealing", "learned", "stitching-dp", "xla-rules", "tvm")


def learned_compiled(source: Source) -> Table:
    """Networks of paper size compiled by plans of priorities and others, at V0."""
    found = {(one["model"], one["fusion"]): one for one in source.results}

    def cell(one: Record | None) -> str:
        if one is None:
            return "-"
        times = " / ".join(decimal(one.record("us").number(device), 1) for device in _DEVICES[:2])
        return f"{times} ({one['launches']}, {one['cut']})"

    models = dict.fromkeys(one["model"] for one in source.results)
    rows = ([model, *(cell(found.get((model, way))) for way in _LEARNED)] for model in models)
    return table(" | ".join(["network", *_LEARNED]), rows)


def workloads(source: Source) -> Table:
    """Workloads at three levels, run on the CPU device."""
    found: dict[str, dict[str, Record]] = {}
    for one in source.results:
        found.setdefault(one["model"], {})[one["level"]] = one
    rows = []
    for model, of in found.items():
        each = [of[level] for level in ("V0", "V3", "V4")]
        launches = ", ".join(str(one["launches"]) for one in each)
        barriers = ", ".join(str(one["barriers"]) for one in each[1:])
        times = (decimal(one.record("us").number(_DEVICES[0]), 1) for one in each)
        rows.append([model, launches, barriers, *times, scientific(max(one.number("error") for one in each))])
    columns = "workload | launches V0, V3, V4 | barriers V3, V4 | A100 µs V0 | V3 | V4 | largest error"
    return table(columns, rows)


def template_patterns(source: Source) -> Table:
    """Patterns by templates over the same by rules."""

    def row(one: Record) -> list[object]:
        words = one.text("schemes").split()
        counts = dict(zip(words[1::2], words[::2]))
        schemes = ", ".join(
            f"{counts[name]} {name}" for name in ("packing", "thread", "warp", "block") if name in counts
        )
        ratios = (f"{one.number(key):.2f}" for key in ("template / rules", "best", "worst"))
        refused = one.number("refused by templates") + one.number("by rules")
        return [one["network"], one["patterns"], refused, *ratios, schemes, one["s"]]

    columns = (
        "network | distinct patterns | refused | template / rule, geometric mean | best | worst | TEs by scheme | s"
    )
    return table(columns, map(row, source.results))


def workloads_of_paper_size(source: Source) -> Table:
    """Workloads at three levels by prediction, beside what the papers gain."""
    theirs = _published_gains()
    found: dict[str, dict[str, Record]] = {}
    for one in source.results:
        found.setdefault(one["model"], {})[one["level"]] = one

    def us(one: Record | None, device: str) -> str:
        value = None if one is None else one.record("us").number(device)
        return "-" if value is None else decimal(value, 0 if value >= 1000 else 1)

    def mb(one: Record | None) -> str:
        value = None if one is None else (one.number("bytes_read") + one.number("bytes_written")) / 1e6
        return "-" if value is None else decimal(value, 0 if value >= 1000 else 1)

    def row(model: str) -> Iterator[object]:
        of = [found[model].get(level) for level in ("V0", "V3", "V4")]
        first, _, last = of
        yield model
        yield first["tes"] if first else "-"
        yield ", ".join("-" if one is None else str(one["launches"]) for one in of)
        yield ", ".join("-" if one is None else str(one["barriers"]) for one in of[1:])
        yield from (us(one, device) for device in _DEVICES[:2] for one in of)
        yield from (mb(first), mb(last))
        if first is None or last is None:
            yield from ("-", "-", "-")
        else:
            yield f"{first.number('launches') / last.number('launches'):.0f}"
            yield f"{first.record('us').number(_DEVICES[0]) / last.record('us').number(_DEVICES[0]):.2f}"
            yield f"{last.number('compile_s'):.0f}"
        yield from theirs.get(model, ("-", "-"))

    columns = (
        "workload | TEs | launches V0, V3, V4 | barriers V3, V4 | A100 µs V0 | V3 | V4 | H200 µs V0 | V3 | V4 | "
        "MB V0 | V4 "
        "| V0 / V4 kernels | A100 V0 / V4 | compile s V4 | papers: kernels | papers: speed"
    )
    return table(columns, (list(row(model)) for model in found))


def _published_gains() -> dict[str, tuple[str, str]]:
    """By how much FusionStitching has fewer kernels than XLA, and is faster: 003's Table 3, 000's Table 2."""
    gains = {}
    for row in published("stitching-2019-table3")["rows"]:
        if "network" in row:
            kernels, fewer, speed, faster = row["cells"]
            gains[row["network"]] = (f"{fewer / kernels:.2f}", f"{faster / speed:.2f}")
    of = {(row.get("network"), row["system"]): row for row in published("stitching-2021-table2")["rows"]}
    for network, system in of:
        if system == "XLA" and network:
            xla, ours = of[network, "XLA"], of[network, "FusionStitching"]
            calls, ends = xla["calls"][-1] / ours["calls"][-1], xla["cells"][-1] / ours["cells"][-1]
            gains[network] = (f"{calls:.2f}", f"{ends:.2f}")
    return gains


def plans_beside_papers(source: Source) -> Table:
    """Kernels by planner over others, beside the papers' ratios."""
    third = {row["name"]: row["cells"][:2] for row in published("stitching-2019-table3")["rows"]}
    calls = {(row.get("network"), row["system"]): row["calls"][2] for row in published("stitching-2021-table2")["rows"]}

    def row(one: Record) -> list[object]:
        name, of = one.text("model").removesuffix("-train"), one.record("planners")
        theirs = ", ".join(f"{ratio:g}" for ratio in third.get(name, ()))
        alone = (one.number("tes") / of.record(planner).number("kernels") for planner in ("xla-rules", "stitching-ilp"))
        both = [calls.get((name, system)) for system in ("FusionStitching", "XLA")]
        of_2021 = f"{both[0]} / {both[1]} = {both[0] / both[1]:.2f}" if both[0] and both[1] else ""
        ours = [of.record(planner).number("memory_kernels") for planner in ("stitching-dp", "xla-rules")]
        part = f"{ours[0]} / {ours[1]} = {ours[0] / ours[1]:.2f}" if ours[1] else ""
        return [one["model"], theirs, ", ".join(f"{ratio:.2f}" for ratio in alone), of_2021, part]

    rows = [cells for cells in map(row, source.results) if cells[1] or cells[3]]
    columns = (
        "model | 003: xla/tf, fs/tf | here: TEs over kernels of XLA's rules, of 2019 | 000: FS over XLA | here: "
        "2021 over "
        "XLA's rules"
    )
    return table(columns, rows)


def planners_of_paper_size(source: Source) -> Table:
    """Networks of paper size by planner: µs on both devices, with launches, barriers and MB."""
    ways = (
        ("stitching-ilp", "V0"), ("stitching-dp", "V0"), ("xla-rules", "V0"), ("tvm", "V0"), ("stitching-ilp", "V3"),
        ("stitching-dp", "V3"), ("souffle", "V3"), ("souffle", "V4"),
    )  # fmt: skip
    found = {(one["model"], one["fusion"], one["level"]): one for one in source.results}

    def us(value: float) -> str:
        return decimal(value, 0 if value >= 1000 else 1)

    def cell(one: Record) -> str:
        times = " / ".join(us(one.record("us").number(device)) for device in _DEVICES[:2])
        moved = (one.number("read") + one.number("written")) / 1e6
        return f"{times} ({one['launches']}, {one['barriers']}; {decimal(moved, 1)})"

    models = dict.fromkeys(one["model"] for one in source.results)
    rows = ([model, *(cell(found[(model, *way)]) for way in ways)] for model in models)
    heads = [f"{_COMPILED[way]}{'' if way == 'souffle' else ','} {level}" for way, level in ways]
    return table(" | ".join(["model", *heads]), rows)


def _value(cell: Record) -> str:
    value = cell["value"]
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


def paper_table(source: Source) -> Table:
    """A table of a paper as ``souffle reproduce`` makes it; letters say how a cell came to be."""
    notes: dict[str, str] = {}

    def cell(one: Record) -> str:
        note = one["note"]
        mark = notes.setdefault(note, chr(ord("a") + len(notes))) if note else ""
        return f"{_value(one)} {mark}".rstrip()

    rows = []
    for one in source.results:
        cells = one.records("cells")
        if all(cell["value"] == "plotted" for cell in cells):
            continue
        rows.append([one["row"], one["whose"], *map(cell, cells)])
    return table(" | ".join([" ", " ", *source.content["columns"]]), rows)


_LINES = ("paper, A100", "here, mixed", "here, fp32", "here, by model")


def paper_table_4(source: Source) -> Table:
    """Table 4 of Souffle's paper, a line for each model: what the paper has, an H100 took, and is predicted."""

    def cell(one: Record) -> str:
        value = one["value"]
        if one["how"] == "published" or value is None:
            return _value(one)
        if value < 0.1:
            return decimal(value, 4)
        return decimal(value, 3) if value < 1 else f"{value:.4g}"

    def line(one: Record) -> str:
        cells = [cell(each) for each in one.records("cells")]
        return ", ".join(cells) if any(text != "-" for text in cells) else "-"

    found = {(one["row"], one["whose"]): one for one in source.results}
    models = dict.fromkeys(one["row"] for one in source.results)
    rows = ([model, *(line(found[model, whose]) for whose in _LINES)] for model in models)
    return table(" | paper, A100 | H100, mixed | H100, fp32 | A100, predicted", rows)
