"""HFuse: stages side by side in a kernel, and kernels fused as text."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.results_page.files import Record, Source
from benchmarks.results_page.tables import Table, decimal, percent, slashed, table
from benchmarks.results_page.views.typed import notes

__all__ = ["fused_kernels", "fused_speed", "parts_of_blocks", "side_by_side", "side_by_side_compiled"]

_NAMES = {"resnext": "ResNeXt"}
_ARCHS = ("sm_80", "sm_90")


def _by_arch(source: Source) -> dict[tuple[str, str], dict[str, Record]]:
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for one in source.results:
        name = _NAMES.get(one["model"], one["model"])
        found.setdefault((name, one["precision"]), {})[one["arch"]] = one
    return found


def _times(one: Record) -> str:
    return f"{decimal(one.number('us_without'), 1)} → {decimal(one.number('us'), 1)}"


def side_by_side(source: Source, told: Source) -> Table:
    """What networks gain; what gains most is as it was read from the pairs."""
    found = _by_arch(source)

    def rows() -> Iterator[list[str]]:
        for (name, precision), most in notes(told, keys=2).items():
            of = found.get((name, precision))
            if of is None:
                yield [name, precision, "none", "", "", "", *most]
                continue
            both = [of[arch] for arch in _ARCHS]
            counts = [slashed(*(one["pairs"] for one in both)), slashed(*(len(one["taken"]) for one in both))]
            yield [name, precision, *counts, *map(_times, both), *most]

    columns = (
        "network, paper size | precision | pairs (A100 / H200) | taken | A100 µs, without → with | H200 µs, "
        "without → with | "
        "what gains most (H200)"
    )
    return table(columns, rows())


def parts_of_blocks(source: Source, told: Source) -> Table:
    """What parts of a block's threads gain; what gains most is as it was read from the pairs."""
    found = _by_arch(source)
    rows = []
    for (name, precision), most in notes(told, keys=2).items():
        of = found.get((name, precision), {})
        times = [_times(of[arch]) if arch in of and of[arch]["taken"] else "none" for arch in _ARCHS]
        rows.append([name, precision, *times, *most])
    columns = "network, paper size | precision | A100 µs, teams only → with parts | H200 µs | what gains most"
    return table(columns, rows)


_TAKEN = {
    "bert+resnext": "BERT and ResNeXt", "nmt": "nmt", "resnext": "ResNeXt", "bi-rnn": "bi-rnn"
}  # fmt: skip


def side_by_side_compiled(source: Source, alone: Source) -> Table:
    """Compiled with nvcc; the times of two networks alone are of other compilations."""
    told = notes(alone)

    def asked(one: Record) -> str:
        (kernel,) = one.records("asked")
        return ", ".join(f"{kernel.number(key):,}" for key in ("registers", "shared", "threads", "blocks"))

    def row(one: Record) -> list[object]:
        name = f"{_TAKEN[one['network']]}, {one['precision']}"
        both = [one.record(which) for which in ("without", "with")]
        resources = [asked(of) for of in both]
        same = resources[0] == resources[1] and (name,) not in told
        return [
            name,
            *told.get((name,), ("",)),
            *(decimal(of.number("us"), 1) for of in both),
            both[1]["taken"],
            slashed(resources[0], "the same" if same else resources[1]),
            "PROVEN" if all(of["verdict"] == "PROVEN" for of in both) else slashed(*(of["verdict"] for of in both)),
        ]

    order = list(_TAKEN)
    rows = sorted(source.results, key=lambda one: (order.index(one["network"]) > 0, source.results.index(one)))
    columns = (
        "compiled with nvcc, sm_90 | alone, µs | together without | together with | taken | registers, shared bytes, "
        "threads, resident blocks: without / with | certificate"
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
