"""What programs, schedules and machine code are: transformations, levels, compilations, instructions."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, decimal, scientific, slashed, table
from benchmarks.results_page.views.typed import notes
from souffle.evaluation.published import published

__all__ = [
    "code_of_tiles",
    "compilations",
    "compiled_before",
    "growth",
    "launches_beside_paper",
    "levels",
    "light_networks",
    "network_errors",
    "product_errors",
    "product_instructions",
    "transformations",
]

_LEVELS = ("V0", "V1", "V2", "V3", "V4")


def transformations(source: Source) -> Table:
    """A line for each model: what the analysis finds, and what each transformation leaves."""

    def row(one: Record) -> list[object]:
        before, after = one.record("before"), one.record("after")
        steps = [one.record(name) for name in ("horizontal", "vertical", "roll")]
        seconds = [step.number("seconds") for step in (before, *steps, after)]
        return [
            one["model"],
            before["tes"],
            *(step["tes"] for step in steps),
            slashed(before["one"], before["many"]),
            slashed(after["one"], after["many"]),
            f"{before['access_maps']}" if before["exact"] == before["access_maps"] else "not all exact",
            slashed(*(f"{before.number(key) / 2**20:.1f}" for key in ("spatial_bytes", "temporal_bytes"))),
            f"{one.number('operations_ratio'):.4f}",
            *(f"{second:.2f}" for second in seconds[:4]),
            f"{sum(seconds):.2f}",
        ]

    columns = (
        "model | TEs | after horizontal | after vertical | rolled | one-to-one / one-to-many before | after | "
        "access maps, "
        "all exact | reuse found, MiB: spatial / temporal | operations | analysis s | horizontal s | vertical s "
        "| roll s | "
        "all s"
    )
    return table(columns, map(row, source.results))


_REPEATED = {"bert": "encoder layers", "swin": "blocks of the third stage", "lstm": "time steps of 10 layers"}


def growth(source: Source) -> Table:
    """Seconds of the analysis and all transformations by repetitions of a part of a model."""
    counts = sorted({one.number("count") for one in source.results})
    found = {(one["model"], one["count"]): one for one in source.results}

    def cell(one: Record) -> str:
        seconds = sum(one.number(f"{step}_s") for step in ("analysis", "horizontal", "vertical", "roll"))
        return f"{seconds:.2f} ({one['tes']})"

    rows = [[f"{model}, {part}", *(cell(found[model, count]) for count in counts)] for model, part in _REPEATED.items()]
    return table(" | ".join(["repetitions", *map(str, counts)]), rows)


def levels(*sources: Source) -> Table:
    """Launches, grid barriers and the largest error of each level."""

    def row(one: Record) -> list[object]:
        launches, syncs = one.record("launches"), one.record("grid_syncs")
        errors = one.record("error")
        return [
            one["model"],
            one["size"],
            one["precision"],
            *(launches[level] for level in _LEVELS),
            syncs["V3"],
            syncs["V4"],
            scientific(max(errors.number(level) for level in errors)),
            scientific(one.number("host_error")),
            "ok" if one["ok"] else "WRONG",
        ]

    columns = (
        "model | size | precision | V0 launches | V1 | V2 | V3 | V4 | grid syncs V3 | V4 | largest error | host | "
        "result"
    )
    return table(columns, (row(one) for source in sources for one in source.results))


def compilations(source: Source) -> Table:
    """What compiling each model takes and gives."""
    shown = ("model", "arch", "tes", "stages", "distinct_stages", "launches", "kernels", "grid_syncs", "registers")
    more = ("spill_bytes", "stack_bytes")
    rows = (
        [one[key] for key in (*shown, *more)] + [f"{one.number('compile_s'):.2f}", one["peak_mb"]]
        for one in source.results
    )
    columns = (
        "model | arch | TEs | stages | distinct | launches | kernels | grid syncs | most registers | spill bytes | "
        "stack bytes | seconds | peak MB"
    )
    return table(columns, rows)


def compiled_before(source: Source) -> Table:
    """The first and the second compilation of each network."""
    rows = (
        [
            *(one[key] for key in ("model", "target", "level", "precision")),
            f"{one.number('constant_bytes') / 1e6:.1f}",
            f"{one.number('first_s'):.1f}",
            f"{one.number('second_s'):.2f}",
            "yes" if one["equal"] else "NO",
        ]
        for one in source.results
    )
    return table("model | target | level | precision | MB of constants | first, s | second, s | equal", rows)


def launches_beside_paper(source: Source) -> Table:
    """Launches at V3 of each architecture, below those of the paper's Table 5."""
    found = {(one["model"], one["arch"]): one["launches"] for one in source.results}
    paper = published("table5")
    place = paper["columns"].index("calls: Souffle")
    calls = {row["network"]: row["cells"][place] for row in paper["rows"]}
    archs = dict.fromkeys(arch for _, arch in found)
    rows = [["paper, A100", *calls.values()], *([arch, *(found[name, arch] for name in calls)] for arch in archs)]
    return table(" | ".join(["", *calls]), rows)


def product_instructions(source: Source) -> Table:
    """Instructions of stages on tensor cores, in machine code."""
    counted = ("HMMA.16816", "LDSM", "LDGSTS.BYPASS.128")
    keys = ("product", "tiles", "shared_bytes", "registers", "spill_bytes")

    def row(one: Record) -> list[object]:
        instructions, predicted = one.record("instructions"), one.record("predicted_us")
        return [
            *(one[key] for key in keys),
            *(instructions[name] for name in counted),
            decimal(predicted.number("H200-SXM5-141GB"), 1),
        ]

    columns = " | ".join(["stage", "tiles", "shared bytes", "registers", "spill bytes", *counted, "predicted µs, H200"])
    return table(columns, map(row, source.results))


def product_errors(source: Source) -> Table:
    """Errors of single products, by their length."""
    ways = ("fp32", "tf32x3", "tf32", "mixed", "truncated inside", "truncated, added outside")
    rows = (
        [one["inner"], one["numbers"], *(scientific(one.record("errors").number(way)) for way in ways)]
        for one in source.results
        if "inner" in one
    )
    columns = "products | numbers | fp32 | tf32x3 | tf32 | mixed | tf32x3 in one sum that truncates | added outside"
    return table(columns, rows)


_NAMES = {"bert": "BERT", "resnext": "ResNeXt", "mmoe": "MMoE", "swin": "Swin", "efficientnet": "EfficientNet"}


def network_errors(source: Source) -> Table:
    """Errors of whole networks, by precision."""
    ways = ("fp32", "tf32x3", "tf32", "mixed")
    rows = (
        [_NAMES[one["model"]], *(scientific(one.record("errors").number(way)) for way in ways)]
        for one in source.results
        if "model" in one
    )
    return table(" | ".join(["network", *ways]), rows)


def code_of_tiles(source: Source, before: Source) -> Table:
    """Instructions of a tile as the cost model counts and as it counted them, beside those in machine code."""
    counted = notes(before, keys=3)

    def row(one: Record) -> list[object]:
        least, most = one["sass_least"], one["sass_most"]
        key = (one.text("layer").removeprefix("layer "), one["arch"], one["rule"])
        return [*key, *counted[key], one["counted"], least if least == most else f"{least} to {most}"]

    columns = "layer | arch | rule | counted before | counted now | machine code, least to most"
    return table(columns, map(row, source.results), right=(3, 4))


def light_networks(source: Source) -> Table:
    """Whole networks of the onnx package."""

    def row(one: Record) -> Iterable[object]:
        yield one["model"]
        yield "LLVM" if one["level"] == "cpu" else one["level"]
        yield one["tes"]
        yield f"{one.number('compile_seconds'):.0f}"
        yield f"{one.number('processor_seconds'):.1f}"
        yield from (one["launches"], one["kernels"], one["grid_barriers"], one["verdict"] or "-")
        yield f"{one.number('run_seconds'):.1f}"
        yield scientific(one.number("error"))

    columns = (
        "network | level | TEs | compile s | of a processor | launches | kernels | grid barriers | certificate "
        "| run s | "
        "largest error"
    )
    return table(columns, (list(row(one)) for one in source.results))
