"""Souffle beside other compilers, and ONNX's suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, decimal, scientific, slashed, table
from benchmarks.results_page.views.typed import typed

__all__ = [
    "bench",
    "calls",
    "host_ratios",
    "host_speed",
    "host_throughput",
    "onnx_suite",
    "quantized",
    "quantized_speed",
    "torch_models",
]


def host_speed(source: Source) -> Table:
    """``target="cpu"`` beside other compilers, the first of which all rows have."""
    peers = list(dict.fromkeys(name for one in source.results for name in one.record("peers")))

    def milliseconds(of: Record, which: str) -> str:
        median, best = of.number(f"{which}us"), of.number(f"{which}best_us")
        return f"{median / 1e3:.3g} ({best / 1e3:.3g})"

    def seconds(of: Record) -> str:
        second = f" / {of.number('second_compile_seconds'):.1f}" if "second_compile_seconds" in of else ""
        return f"{of.number('compile_seconds'):.1f}{second}"

    def cells(of: Record, name: str) -> list[str]:
        if name not in of.record("peers"):
            return ["", ""]
        peer = of.record("peers").record(name)
        return [milliseconds(peer, ""), f"{peer.number('ratio'):.2f} ({peer.number('ratio_of_best'):.2f})"]

    rows = (
        [
            *(one[key] for key in ("model", "batch", "threads")),
            scientific(one.number("error")),
            seconds(one),
            *(one[key] for key in ("file_mb", "peak_mb")),
            milliseconds(one, "ours_"),
            *(cell for name in peers for cell in cells(one, name)),
        ]
        for one in source.results
    )
    header = "model | batch | threads | largest error | compile s, first / second | file MB | peak MB | Souffle ms"
    return table(" | ".join([header, *(f"{name} ms | of {name}" for name in peers)]), rows)


def host_ratios(source: Source) -> Table:
    """The ratios of :func:`host_speed` alone: medians, in brackets of the best times; a row for each network."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for one in source.results:
        peer = one.record("peers").record("ort")
        ratio = f"{peer.number('ratio'):.2f} ({peer.number('ratio_of_best'):.2f})"
        found.setdefault((str(one["model"]), str(one["batch"])), {})[str(one["threads"])] = ratio
    threads = sorted({count for row in found.values() for count in row})
    columns = (f"of ort, {count} thread{'s' if count != '1' else ''}" for count in threads)
    rows = ([*key, *(row.get(count, "") for count in threads)] for key, row in found.items())
    return table(" | ".join(["model | batch", *columns]), rows)


def calls(source: Source) -> Table:
    """What a call costs."""
    keys = ("call", "bound", "onnxruntime", "onnxruntime_binding")
    rows = ([one["network"], *(f"{one.number(key):.1f}" for key in keys)] for one in source.results)
    return table("µs | Souffle, a call | bound | ONNX Runtime, a call | with IO binding", rows)


_MODELS = {"mmoe": "MMoE, tiny", "mmoe_paper": "MMoE, paper size", "efficientnet": "EfficientNet, tiny"}


def bench(*sources: Source) -> Table:
    """Reports of ``souffle bench``: medians with quartiles, ratios with their interval."""

    def time(of: Record) -> str:
        median, lower, upper = (of.number(f"{which}_us") for which in ("median", "lower", "upper"))
        digits = 0 if median >= 1000 else 1
        return f"{decimal(median, digits)} ({decimal(lower, digits)} to {decimal(upper, digits)})"

    def ratio(of: Record) -> str:
        median, low, high = (of.number(which) for which in ("median", "low", "high"))
        return f"{median:.2f} ({low:.2f} to {high:.2f})"

    def rows() -> Iterator[list[object]]:
        for source in sources:
            # Reports name a model of either size alike; their files do not.
            model = source.name.removeprefix("bench_").rpartition("_")[0]
            first = [_MODELS.get(model, model), source.content.record("setting")["threads"]]
            for one in source.content.records("rows"):
                ours = one["name"] == "souffle"
                cells = []
                for cache in ("warm", "cold"):
                    if not one["passed"]:
                        cells += [one["reason"], ""]
                        continue
                    cells.append(time(one.record("times").record(cache)))
                    cells.append("" if ours else ratio(one.record("ratios").record(cache)))
                name = one["name"] if ours else f"{one['name']} {one['version']}"
                yield [*(first if ours else ["", ""]), name, scientific(one["error"]), *cells]

    return table("model | threads |  | error | warm, µs | times ours | cold, µs | times ours", rows())


_TORCH = {
    "resnet18": "ResNet-18",
    "mobilenet_v3_large": "MobileNetV3-Large",
    "gpt2": "GPT-2 small, 128 tokens, with its head (transformers)",
    "vit_b_16": "ViT-B/16",
}


_WAYS = ("eager", "inductor", "souffle", "from_torch", "bound")


def torch_models(source: Source) -> Table:
    """Networks of PyTorch beside eager and Inductor: the processor's time."""

    def time(quartiles: list[float]) -> str:
        low, median, high = quartiles
        digits = 0 if median >= 100 else 1
        return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    found = {one["model"]: one for one in source.results}
    rows = []
    for model, name in _TORCH.items():
        one = found[model]
        error = scientific(max(one.record("errors").values())).replace("e-0", "e-")
        compiled, times = one.record("compile_s"), one.record("cpu_ms")
        # Inductor may have been left out.
        ways = [time(times[way]) if way in times else "" for way in _WAYS]
        ratios = [f"{one.record('of_eager').number('souffle'):.2f}"]
        ratios.append(f"{one.number('of_inductor'):.2f}" if "inductor" in times else "")
        seconds = [compiled[way][1] if way in compiled else "" for way in ("souffle", "inductor")]
        rows.append([name, error, *seconds, one["launches"], *ways, *ratios])
    columns = (
        "network | error | compile s | Inductor's | launches | eager ms | Inductor ms | `torch.compile` ms | "
        "`from_torch` ms | bound ms | of eager | of Inductor"
    )
    return table(columns, rows)


_BAD = ("wrong", "exception", "crash", "timeout")


def onnx_suite(source: Source) -> Table:
    """ONNX's suite of operators by outcome, beside ONNX Runtime."""
    ours, theirs = (source.content.record("runs").record(run).record("totals") for run in ("cpu", "ort"))

    def row(name: str, own: dict[str, int], other: dict[str, int]) -> list[object]:
        counts = [*(own.get(key, 0) for key in ("passed", "constants", "refused", "inexact"))]
        counts.append(sum(own.get(key, 0) for key in _BAD))
        beside = slashed(*(decimal(other.get(key, 0)) for key in ("passed", "refused", "wrong")))
        return [f"{name} ({sum(own.values()):,})", *map(decimal, counts), beside]

    def added(totals: Record) -> dict[str, int]:
        keys = dict.fromkeys(key for part in totals.values() for key in part)
        return {key: sum(part.get(key, 0) for part in totals.values()) for key in keys}

    rows = [row(name, ours[name], theirs[name]) for name in ours]
    rows.append(row("all", added(ours), added(theirs)))
    columns = (
        " | passed | with parameters | refused | inexact | wrong, exception, crash, timeout | ONNX Runtime: passed / "
        "refused / wrong"
    )
    return table(columns, rows)


_QUANTIZED = {"resnet50": "ResNet-50", "bert-tiny": "BERT tiny", "mobilenet_v2": "MobileNetV2"}


def quantized(source: Source, whole: Source) -> Table:
    """Quantized networks that were run, and those of whole size that were compiled and proven."""

    def quanta(value: float) -> str:
        text = f"{value:.2g}" if value < 0.01 else f"{value:.1f}"
        text = text.removesuffix(".0").replace("e-0", "e-")
        return f"**{text}**" if value > 1.05 else text

    def row(one: Record, name: str) -> list[object]:
        size = one.text("size")
        size = f"{size.partition(' x ')[0]}²" if " x " in size else size
        counts = one.record("instructions")
        # One or two among thousands are not products.
        least = max(counts.values()) // 1000
        beside = (one.number("onnxruntime_quanta"), one.number("onnxruntime_nearby_quanta"))
        return [
            name,
            f"{'cpu' if one['target'] == 'cpu' else 'CUDA text'}, {size}",
            slashed(one["kernels"], one["launches"]),
            ", ".join(f"{count:,} {name}" for name, count in counts.items() if count > least),
            one.get("certificate") or "-",
            quanta(one.number("largest_quanta")),
            f"{one['differing']:,} of {one['elements']:,}",
            ", ".join(map(quanta, beside)),
        ]

    rows: list[Sequence[object]] = []
    for network, name in _QUANTIZED.items():
        own = [one for one in source.results if one["network"] == network]
        for place, one in enumerate(own):
            kind = ", " + " ".join(part for part in one.text("form").split(", ")[:2] if "int8" not in part)
            rows.append(row(one, name + kind * (place == 0)))
        rows += [cells for cells in typed(whole).rows if cells[0] == name]
    columns = (
        "network | target, size | kernels / launches | instructions on integers in the text | certificate | largest "
        "difference in quanta | elements that differ | ONNX Runtime from itself, in quanta"
    )
    return table(columns, rows)


def quantized_speed(source: Source) -> Table:
    """Calls of quantized networks on the CPU target beside ONNX Runtime's."""

    def milliseconds(one: Record, who: str) -> str:
        return f"{one.number(f'{who}_us') / 1e3:.3g} ({one.number(f'{who}_best_us') / 1e3:.3g})"

    rows = (
        [
            _QUANTIZED[one.text("network")],
            one["threads"],
            milliseconds(one, "ours"),
            milliseconds(one, "ort"),
            f"{one.number('ratio'):.2f} ({one.number('ours_best_us') / one.number('ort_best_us'):.2f})",
        ]
        for one in source.results
    )
    return table("network | threads | Souffle ms | ONNX Runtime ms | of it", rows)


def host_throughput(source: Source) -> Table:
    """Calls a second of one network by threads that call it at the same time, beside ONNX Runtime's."""
    rows = (
        [
            *(one[key] for key in ("model", "threads", "callers")),
            *(f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" for rate in one["calls_per_second"].values()),
            f"{one.number('of_ort'):.2f}",
            "yes" if one["equal_bits"] else "no",
        ]
        for one in source.results
    )
    return table("model | threads of a call | callers | calls/s | ONNX Runtime's | of that | the same bits", rows)
