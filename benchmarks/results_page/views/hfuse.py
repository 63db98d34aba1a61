"""HFuse: stages side by side in a kernel, and kernels fused as text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, decimal, percent, slashed, table

__all__ = [
    "fused_kernels",
    "fused_speed",
    "independent_stages",
    "parts_of_blocks",
    "side_by_side",
    "side_by_side_compiled",
    "splits_of_stages",
]

_NAMES = {
    "resnext": "ResNeXt", "bert": "BERT", "efficientnet": "EfficientNet", "lstm": "LSTM", "mmoe": "MMoE", "swin": "Swin"
}  # fmt: skip


def _name(one: Record) -> str:
    return _NAMES.get(one["model"], one["model"])


def _times(one: Record) -> str:
    return f"{decimal(one.number('us_without'), 1)} → {decimal(one.number('us'), 1)}"


def side_by_side(source: Source) -> Table:
    """What networks have of independent stages, and what they gain."""
    rows = [[_name(one), one["precision"], one["sets"], len(one["taken"]), _times(one)] for one in source.results]
    columns = "network, paper size | precision | sets | taken | H200 µs, without → with"
    return table(columns, rows)


def _gaining(source: Source) -> list[tuple[Record, Record]]:
    """The sets of stages that gain by something, each with its network."""
    return [
        (one, row)
        for one in source.results
        for row in one.records("best")
        if min(us for us, _ in row["ways"].values()) < row["apart"] - _LEAST_US
    ]


def _stages(row: Record) -> str:
    return " \\| ".join(row["stages"][:_NAMED]) + (" ..." if len(row["stages"]) > _NAMED else "")


def splits_of_stages(source: Source) -> Table:
    """What each set takes by who computes its stages, and what bounds their registers."""
    rows = [
        [
            f"{_name(one)}, {one['precision']}",
            _stages(row),
            slashed(row["registers"], row["r0"]),
            decimal(row.number("apart"), 2),
            ", ".join(f"{split}: {decimal(us, 2)}" for split, us in islice(row["splits"].items(), _SPLITS)).replace(
                "|", "\\|"
            ),
        ]
        for one, row in _gaining(source)
    ]
    return table("network | stages | registers / r0 | one after the other, µs | µs by split", rows)


def independent_stages(source: Source) -> Table:
    """Each set of stages that gains by something, with the best way of each kind."""

    def way(row: Record, kind: str) -> str:
        if kind not in row["ways"]:
            return ""
        us, words = row["ways"][kind]
        return f"{decimal(us, 2)} ({words})" if us < row["apart"] else "no gain"

    rows = [
        [
            f"{_name(one)}, {one['precision']}",
            _stages(row),
            slashed(*row["bound"][:_NAMED]),
            decimal(row.number("apart"), 2),
            *(way(row, kind).replace("|", "\\|") for kind in ("blocks", "teams", "parts")),
        ]
        for one, row in _gaining(source)
    ]
    columns = "network | stages | bound by | one after the other, µs | block space | teams | parts"
    return table(columns, rows)


_NAMED = 3
"""Stages of a set that a row names."""

_SPLITS = 8
"""Ways that a row has, those that gain most."""

_LEAST_US = 0.3
"""What a set gains that has a row: about what the model resolves."""


def parts_of_blocks(source: Source) -> Table:
    """What parts of a block's threads gain, in steps of 128 and in whole warps."""
    rows = [
        [
            f"{_name(one)}, {one['precision']}",
            {"sm_80": "A100", "sm_90": "H200"}[one["arch"]],
            *(decimal(one.number(key), 1) for key in ("us_without", "us_in_steps", "us")),
            _divisions(one["taken"]),
            one["verdict"],
        ]
        for one in source.results
        if one["taken"]
    ]
    columns = "network, paper size | GPU | teams only, µs | parts of 128 | in warps | taken | certificate"
    return table(columns, rows)


def _divisions(decisions: Iterable[str]) -> str:
    """The threads of each division that decisions name, such as ``384 + 128``."""
    several = [
        " + ".join(str(int(last) - int(first) + 1) for first, last in re.findall(r"\(threads (\d+) to (\d+)\)", text))
        for text in decisions
    ]
    return ", ".join(filter(None, several))


_TAKEN = {
    "bert+resnext": "BERT and ResNeXt", "nmt": "nmt", "resnext": "ResNeXt", "bi-rnn": "bi-rnn"
}  # fmt: skip


def side_by_side_compiled(source: Source) -> Table:
    """Compiled with nvcc; the times of two networks alone are of other compilations."""

    def asked(one: Record) -> str:
        """Of the kernel that waits most, which is nearly all of the network."""
        kernel = max(one.records("asked"), key=lambda kernel: kernel["waits"])
        return ", ".join(f"{kernel.number(key):,}" for key in ("registers", "shared", "threads", "blocks"))

    def row(one: Record) -> list[object]:
        name = f"{_TAKEN[one['network']]}, {one['precision']}"
        both = [one.record(which) for which in ("without", "with")]
        resources = [asked(of) for of in both]
        same = resources[0] == resources[1]
        alone = one.get("alone_us", [])
        total = f" = {decimal(sum(alone), 1)}" if len(alone) > 1 else ""
        return [
            name,
            " + ".join(decimal(us, 1) for us in alone) + total,
            *(decimal(of.number("us"), 1) for of in both),
            slashed(*(of["kernels"] for of in both)),
            both[1]["taken"],
            slashed(resources[0], "the same" if same else resources[1]),
            _divisions(both[1]["first"]),
            "PROVEN" if all(of["verdict"] == "PROVEN" for of in both) else slashed(*(of["verdict"] for of in both)),
        ]

    order = list(_TAKEN)
    rows = sorted(source.results, key=lambda one: (order.index(one["network"]) > 0, source.results.index(one)))
    columns = (
        "compiled with nvcc, sm_90 | alone, µs | without | with | kernels | taken | registers, shared bytes, "
        "threads, resident blocks: without / with | parts of blocks | certificate"
    )
    return table(columns, map(row, rows))


def fused_kernels(source: Source) -> Table:
    """Registers, spills and resident blocks of fused kernels, for sm_90."""

    def registers(one: Record) -> str:
        spilled = one["spill_bytes"]
        return f"{one['registers']}{f' ({spilled} B spilled)' if spilled else ''}"

    def row(one: Record) -> list[object]:
        of = one.record("compiled").record("sm_90")
        alone = of.records("alone")
        return [
            one["name"],
            " + ".join(map(str, of["splits"])),
            slashed(*(part["registers"] for part in alone)),
            registers(of.record("fused")),
            of["r0"],
            *(registers(of.record(key)) for key in ("bounded", "sequence")),
            slashed(*(part["resident"] for part in alone)),
            *(of.record(key)["resident"] for key in ("fused", "bounded")),
        ]

    columns = "kernels | threads | alone | fused | r0 | bounded | sequence | resident: alone | fused | bounded"
    return table(columns, map(row, source.results))


_CRYPTO = ("blake", "ethash", "sha")


def fused_speed(source: Source) -> Table:
    """001's Figure 7: fused kernels over the same on streams side by side, at equal times."""
    found = {
        name.split("/")[1]: one
        for name, one in source.content.record("hfuse").items()
        if name.startswith("figure7/") and "speedup" in one
    }

    def row(name: str, one: Record) -> list[object]:
        speedup, best = one.record("speedup"), one.record("best")
        gains = [percent(1 + speedup.number(kind)) if speedup.get(kind) is not None else "" for kind in _KINDS]
        splits = " + ".join(map(str, best["splits"]))
        registers = best["registers"] or "free"
        return [
            name,
            f"{one.number('ratio'):.2f}",
            f"{1e3 * one.number('native'):.2f}",
            *gains,
            f"{splits}, {registers}",
        ]

    order = sorted(found, key=lambda name: (name.startswith(_CRYPTO), name))
    rows = (row(name, found[name]) for name in order)
    return table("kernels | ratio | native ms | VFuse | HFuse | naive | best partition, registers", rows)


_KINDS = ("vfuse", "hfuse", "naive")
