"""Predicted times of networks and stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, decimal, maybe, percent, slashed, table

__all__ = [
    "attention",
    "cells_of_lstm",
    "changed_rules",
    "channels",
    "left_out",
    "levels_on_chip",
    "measured_kernels",
    "normalization",
    "precisions",
    "prices",
    "waits",
]

_DEVICES = {"sm_90": "H200", "sm_80": "A100"}
_NAMES = {
    "bert": "BERT", "resnext": "ResNeXt", "efficientnet": "EfficientNet", "swin": "Swin", "mmoe": "MMoE", "lstm": "LSTM"
}  # fmt: skip
_ORDER = ("bert", "resnext", "lstm", "efficientnet", "swin", "mmoe")
_Key = tuple[object, ...]


def _by(rows: Iterable[Record], *keys: str, of: str) -> dict[_Key, dict[object, Record]]:
    """Rows by the values of some keys, and of each the rows by another."""
    found: dict[_Key, dict[object, Record]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row[of]] = row
    return found


def _us(one: Record | None, digits: int = 1) -> str:
    return "" if one is None else decimal(one.number("us"), digits)


def _calls(one: Record | None) -> str:
    """Launches and grid barriers."""
    return "" if one is None else slashed(one["launches"], one["syncs"])


def _timed(one: Record | None, than: Record) -> str:
    """Time with launches and barriers, or that nothing is different."""
    if one is None:
        return ""
    return "=" if (one["us"], _calls(one)) == (than["us"], _calls(than)) else f"{_us(one)} ({_calls(one)})"


def precisions(source: Source) -> Table:
    """Levels by precision; the last column is V4's launches and barriers."""
    order = list(_NAMES)
    found = _by(source.results, "model", "arch", "precision", of="level")
    kinds = ("fp32", "tf32x3", "tf32", "mixed")

    def row(key: _Key, of: Mapping[object, Record]) -> list[object]:
        model, arch, precision = key
        times = [_us(of.get(level)) for level in ("V0", "V2", "V3", "V4")]
        return [_NAMES[str(model)], _DEVICES[str(arch)], precision, *times, _calls(of.get("V4"))]

    keys = sorted(found, key=lambda key: (order.index(key[0]), list(_DEVICES).index(key[1]), kinds.index(key[2])))
    rows = [row(key, found[key]) for key in keys]
    return table("network | device | precision | V0 | V2 | V3 | V4 | ", rows, right=range(3, 7))


def _networks(source: Source) -> dict[_Key, dict[object, Record]]:
    """What is predicted on chip, of each network by variant."""
    found = _by(source.results, "precision", "arch", "model", of="variant")
    kinds = ("mixed", "fp32")
    keys = sorted(found, key=lambda key: (kinds.index(key[0]), list(_DEVICES).index(key[1]), _ORDER.index(key[2])))
    return {key: found[key] for key in keys if {"V3", "V4"} <= found[key].keys()}


def levels_on_chip(source: Source) -> Table:
    """V4 beside V3."""

    def code(one: Record) -> str:
        if one["registers"] is None:
            return ""
        return f"{one['registers']}, {one['spilled_bytes']}, {one.number('code_bytes') / 2**10:.0f}"

    def moved(one: Record) -> str:
        return slashed(*(f"{one.number(key) / 2**20:.0f}" for key in ("bytes_read", "bytes_written")))

    def row(key: _Key, of: Mapping[object, Record]) -> list[object]:
        both = (of["V3"], of["V4"])
        precision, arch, model = key
        less = percent(both[1].number("us") / both[0].number("us"))
        return [
            *(model, precision, _DEVICES[str(arch)], *map(_us, both), less),
            *map(_calls, both),
            *map(moved, both),
            *map(code, both),
        ]

    columns = (
        "network | precision | device | V3 | V4 | against V3 | launches / barriers V3 | V4 | MiB read / written "
        "V3 | V4 | "
        "registers, bytes spilled, KiB of code V3 | V4"
    )
    return table(columns, [row(key, of) for key, of in _networks(source).items()], right=(3, 4, 5))


_LEFT_OUT = ("attention", "normalization", "interleaving", "channels", "resident", "weights", "teams")


def left_out(source: Source) -> Table:
    """V4 without each thing that keeps tensors on chip."""
    rows = []
    for (precision, arch, model), of in _networks(source).items():
        cells = [_timed(of.get(f"V4 without {name}"), of["V4"]) for name in _LEFT_OUT]
        if any(cells):
            rows.append([model, precision, _DEVICES[str(arch)], f"{_us(of['V4'])} ({_calls(of['V4'])})", *cells])
    columns = ["network", "precision", "device", "V4", "without attention", *_LEFT_OUT[1:]]
    return table(" | ".join(columns), rows)


def normalization(source: Source) -> Table:
    """V4 with and without normalizations as part of products."""
    rows = []
    for (precision, arch, model), of in sorted(_networks(source).items(), key=lambda entry: entry[0][2]):
        without = of.get("V4 without normalization")
        if without is not None:
            both = (without, of["V4"])
            rows.append([model, precision, _DEVICES[str(arch)], *map(_calls, both), *map(_us, both)])
    columns = "network | precision | device | launches / barriers without | with | µs without | with"
    return table(columns, rows, right=(5, 6))


def channels(source: Source) -> Table:
    """EfficientNet at V3 and V4."""
    found = [(key, of) for key, of in _networks(source).items() if key[2] == "efficientnet"]
    rows = []
    for (precision, arch, _), of in sorted(found, key=lambda entry: (entry[0][0], entry[0][1])):
        both = (of["V3"], of["V4"])
        less = 1 - both[1].number("us") / both[0].number("us")
        calls = [cell for one in both for cell in (_calls(one), _us(one))]
        rows.append([f"{precision}, {_DEVICES[str(arch)]}", *calls, f"{100 * less:.0f} %"])
    columns = "EfficientNet, paper size | V3: launches / barriers | V3, µs | V4: launches / barriers | V4, µs | less"
    return table(columns, rows, right=(2, 4, 5))


def cells_of_lstm(source: Source) -> Table:
    """The LSTM without what its cells gain by."""
    rows = []
    variants = ("V3", "V4 without interleaving", "V4 without weights", "V4")
    for (precision, arch, model), of in _networks(source).items():
        if model != "lstm" or precision != "fp32":
            continue
        whole = of["V4"]
        code = whole.get("code_us", 0.0)
        stages = whole.number("us") - whole.number("sync_us") - whole.number("launch_us") - code
        parts = [stages, whole.number("sync_us"), whole.number("launch_us"), code]
        barriers = [
            f"{_us(of[name])} ({of[name]['syncs']}{' barriers' * (not rows and name == 'V3')})" for name in variants
        ]
        rows.append([_DEVICES[str(arch)], *barriers, *(decimal(part, 1) for part in parts)])
    columns = " | ".join(["LSTM, paper size", *variants, "of which stages", "barriers", "launch", "code"])
    return table(columns, rows, right=range(1, 9))


def waits(source: Source) -> Table:
    """Barriers, flags, and whatever takes less."""
    ways = ("barriers", "flags", "auto")

    def each(one: Record) -> str:
        return slashed(one["launches"], one["syncs"], one["flag_waits"], one["block_barriers"])

    found = _by(source.results, "model", "arch", of="way")
    rows = []
    for model, arch in sorted(found, key=lambda key: (_ORDER.index(key[0]), list(_DEVICES).index(key[1]))):
        of = found[model, arch]
        rows.append([
            *(model, _DEVICES[str(arch)], *(_us(of[way]) for way in ways), of["auto"]["teams"]),
            *(each(of[way]) for way in ways),
        ])  # fmt: skip
    columns = (
        "network | device | barriers | flags | auto | teams of a block | launches / grid barriers / flag waits / "
        "block barriers, barriers | flags | auto"
    )
    return table(columns, rows, right=range(2, 6))


def prices(source: Source) -> Table:
    """Networks by the prices of before and of after."""

    def row(one: Record) -> list[object]:
        then, old, new = (one.record(key) for key in ("then", "old_schedules", "new_schedules"))
        return [
            *(one["model"], one["precision"], _DEVICES[one["arch"]], *map(_us, (then, old, new)), _calls(new)),
            *(decimal(of.number("sync_us")) for of in (then, old)),
        ]

    columns = (
        "network | precision | device | before | old schedules, new prices | new schedules | launches / barriers | "
        "barriers before | now"
    )
    rows = sorted(source.results, key=lambda one: (_ORDER.index(one["model"]), one["precision"], one["arch"]))
    return table(columns, map(row, rows), right=(3, 4, 5, 7, 8))


def changed_rules(source: Source) -> Table:
    """Stages whose rule the cost model changes."""
    rows = (
        [
            f"{one['model']} {one['size']}",
            *(one["arch"], one["precision"], f"`{stage['stage']}`", stage["runs"], stage["before"], stage["after"]),
            *(f"{us:.1f}" for us in stage["us"]),
        ]
        for one in source.results
        for stage in one.records("stages")
    )
    columns = "network | arch | precision | stage | runs | before | after | µs before | µs after"
    return table(columns, rows, right=(4, 7, 8))


_FORMS = ("operator", "exported", "te")


def attention(source: Source) -> Table:
    """Attention of many forms, with one stage and apart."""

    def mark(one: Record) -> str:
        stages = " ".join(one["stages"])
        if len(one["stages"]) > 1:
            return " a"
        return " r" * ("running" in stages) + " v" * ("channel_owned" in stages)

    def cell(one: Record | None) -> str:
        if one is None:
            return "–"
        times = slashed(decimal(one.number("us"), 1), decimal(one.number("us_apart"), 1))
        return times + mark(one) + maybe(one["verdict"] == "not asked", " *")

    found = _by(source.results, "case", of="case")
    all_of = {(one["case"], one["form"], one["arch"]): one for one in source.results}
    rows = (
        [f"`{case}`", *(cell(all_of.get((case, form, arch))) for arch in _DEVICES for form in _FORMS)]
        for (case,) in found
    )
    columns = ["queries, keys, head, heads (groups, batch)"]
    columns += [f"{form}, {device}" for device in _DEVICES.values() for form in _FORMS]
    return table(" | ".join(columns), rows)


_KERNELS = {
    "all": "all", "100 records or more": "100 records of the tuner or more", "convolution": "convolution",
    "depthwise": "depthwise convolution", "dense": "dense fp32", "dense fp16": "dense fp16", "reduction": "reduction",
}  # fmt: skip


def measured_kernels(source: Source, before: Source) -> Table:
    """Predictions against kernels that Ansor and AutoTVM measured, and those of an earlier state."""
    earlier = {one["kernels_of"]: one for one in before.content.records("correlation")}

    def row(one: Record) -> list[object]:
        then = earlier[one["kernels_of"]]
        within = 100 * one.number("within_factor_2")
        return [
            _KERNELS[one["kernels_of"]],
            one["kernels"],
            *(f"{one.number(key):.3f}" for key in ("spearman", "kendall")),
            *(f"{of.number(key):.3f}" for of, key in ((then, "spearman"), (one, "roofline_spearman"))),
            *(f"{of.number('median_ratio'):.2f}" for of in (one, then)),
            f"{within:.0f} %" if within == 100 else f"{within:.1f} %",
        ]

    columns = (
        f"kernels | n | Spearman | Kendall | Spearman at {before.origin.commit} | a roofline alone | median "
        f"predicted / "
        f"measured | at {before.origin.commit} | within a factor of 2"
    )
    return table(columns, map(row, source.content.records("correlation")))
