"""What GPUs measured of whole networks: docs/results/gpu-*.json, whose forms grew with what each run asked."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, decimal, table
from benchmarks.results_page.views.typed import notes

__all__ = ["first_run", "first_run_after", "second_run", "second_run_crossed", "third_run", "tiling_choice", "tilings"]

_NAMES = {
    "bert": "BERT", "efficientnet": "EfficientNet", "swin": "Swin", "resnext": "ResNeXt", "lstm": "LSTM", "mmoe": "MMoE"
}  # fmt: skip


def _graph(result: Record) -> float:
    """µs of a network as a CUDA graph."""
    return result.number("graph_us") if "graph_us" in result else result.record("graph").number("median_us")


def _steps(phase: Record) -> dict[str, float]:
    """Of the first run: networks by name."""
    return {
        name.removeprefix("latency ").removesuffix("-synthetic"): _graph(step.record("result"))
        for name, step in phase.record("steps").items()
        if name.startswith("latency ") and step["status"] == "ok"
    }


def _timed(results: Record) -> dict[str, float]:
    return {name.replace("-paper-", "-"): _graph(result) for name, result in results.items()}


def _us(value: float | None, missing: str = "") -> str:
    if value is None:
        return missing
    return decimal(value, 1 if value < 100 else 0)


def first_run(source: Source) -> Table:
    """Levels of each model, with each kind of barrier."""
    variants = ("V0", "V1", "V2", "V3", "V4", "V4-counter", "V4-flags")
    rows = []
    for precision, models in (("fp32", tuple(_NAMES)), ("mixed", tuple(_NAMES)[:4])):
        found = _steps(source.content.record(precision))
        for model in models:
            cells = [_us(found.get(f"{model}-paper-{precision}-{variant}")) for variant in variants]
            rows.append([f"{_NAMES[model]} {precision}", *cells])
    return table("model, paper size | V0 | V1 | V2 | V3 | V4 | V4, counter | V4, flags", rows)


def first_run_after(source: Source) -> Table:
    """Kernels of after the first run's changes, each pair in one process."""
    found = _steps(source.content.record("after"))

    def pair(model: str, precision: str, level: str) -> list[str]:
        name = f"{model}-paper-{precision}-{level}"
        with_counter, plain = found.get(f"before-{name}-counter"), found.get(f"before-{name}")
        before = _us(with_counter if with_counter is not None else plain)
        # V4 of mixed precision had the barrier of cooperative groups, which the head of its column does not say.
        before += " (cooperative)" * (level == "V4" and with_counter is None and plain is not None)
        return [before, _us(found.get(name), "not measured" if before else "")]

    rows = []
    for model, precision in (
        ("bert", "fp32"), ("swin", "fp32"), ("efficientnet", "fp32"), ("lstm", "fp32"),
        ("bert", "mixed"), ("swin", "mixed"),
    ):  # fmt: skip
        cells = [cell for level in ("V2", "V3", "V4") for cell in pair(model, precision, level)]
        rows.append([f"{_NAMES[model]} {precision}", *cells])
    return table(" | V2 before | V2 | V3 before | V3 | V4 before (counter) | V4", rows)


def second_run(source: Source, before: Source) -> Table:
    """Levels in fp32 beside PyTorch; V4 of the first run is as chapters have it."""
    found = _timed(source.content.record("before").record("latency"))
    peers = source.content.record("peers")
    rows = []
    for (name,), first in notes(before).items():
        model = name.lower()
        levels = [found.get(f"{model}-fp32-{level}") for level in ("V2", "V3", "V4")]
        peer = peers.get(f"{model}-paper-fp32-eager")
        beside, over = "", ""
        if peer is not None and levels[-1] is not None:
            beside = f"{_us(_graph(peer))} / {_us(peer.record('launch').number('median_us'))}"
            ratio = _graph(peer) / levels[-1]
            over = f"{ratio:.{2 if ratio < 6 else 1}f}"
        rows.append([name, *first, *map(_us_nmt if model == "nmt" else _us, levels), beside, over])
    columns = "fp32 | V4 of the first run | V2 | V3 | V4 | PyTorch, graph / called | PyTorch's graph over V4"
    return table(columns, rows)


def _us_nmt(value: float | None) -> str:
    return decimal(value, 1)


def second_run_crossed(source: Source, predicted: Source) -> Table:
    """Mixed precision before and after units change places; predictions are as chapters have them."""
    content = source.content
    before, after = (_timed(content.record(part).record("latency")) for part in ("before", "after"))
    beside = _timed(content.record("beside").record("latency"))
    rows = []
    for (name,), told in notes(predicted).items():
        key = f"{name.lower()}-mixed-"
        cells = [before[f"{key}V2"], after[f"{key}V2"]]
        for level in ("V3", "V4"):
            cells += [beside[f"{key}{level}"], after[f"{key}{level}"]]
        rows.append([name, *map(_us, cells), *told])
    columns = "mixed | V2 before | V2 after | V3 before | V3 after | V4 before | V4 after | V4 predicted before / after"
    return table(columns, rows)


def third_run(source: Source) -> Table:
    """Levels before and with loads ahead, each line of one call where one call has it."""
    _, second, third = source.content.records("calls")

    def of(call: Record, *states: str) -> Mapping[str, float]:
        return {
            name: us for state in states if state in call for name, us in _timed(call[state].record("latency")).items()
        }

    before, now = of(third, "before") | of(second, "before", "before, fp32"), of(second, "loads ahead")
    last = of(third, "after")
    rows = []
    for model, precision in (
        ("bert", "mixed"), ("resnext", "mixed"), ("swin", "mixed"), ("efficientnet", "mixed"),
        ("bert", "fp32"), ("swin", "fp32"),
    ):  # fmt: skip
        three, four = (f"{model}-{precision}-{level}" for level in ("V3", "V4"))
        cells = [before[three], now.get(three, last.get(three)), before[four], now.get(four), last[four]]
        rows.append([f"{_NAMES[model]}, {precision}", *(_us(cell, "not run") for cell in cells)])
    return table(
        " | V3 before | V3 with loads ahead | V4 before | V4 with loads ahead | V4 as it was measured last", rows
    )


def tiling_choice(source: Source) -> Table:
    """What a GPU took for the tilings that the estimate chooses with a factor, and for the best: µs in the L2 cache."""
    best = source.content.record("best")
    rows = [
        [decimal(one.number("factor"), 2), *(decimal(one.record("us").number(name), 1) for name in best)]
        for one in source.results
    ]
    rows.append(["the best of all", *(decimal(best.number(name), 1) for name in best)])
    return table(f"factor | {' | '.join(name.replace('x', ' x ') for name in best)}", rows)


def tilings(source: Source, told: Source) -> Table:
    """Products in many tilings each, before and after units change places: µs in the L2 cache and from memory.

    The first tiling of a product is the rule's own; what a later estimate chooses is as chapters have it.
    """
    tried = source.content.record("product_tilings")
    columns = tried["columns"]
    warm, cold = columns.index("warm us"), columns.index("cold us")

    def times(rows: list[list[float]]) -> str:
        return f"{decimal(min(row[warm] for row in rows), 1)} / {decimal(min(row[cold] for row in rows), 1)}"

    rows = []
    for (name,), later in notes(told).items():
        of = [[row for row in tried[state] if row[0] == name.replace(" ", "")] for state in ("padded", "crossed")]
        rows.append([name, *map(times, of), *(times(each[:1]) for each in of), *later])
    head = "rows x columns x products | padded | units change places | the rule's choice: before | now | "
    return table(head + "with today's estimate", rows)
