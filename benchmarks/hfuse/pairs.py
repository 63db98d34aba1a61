"""The sixteen pairs of HFuse's evaluation and a triple, fused: the same bits as the kernels alone, and what they take.

``python -m benchmarks.hfuse.pairs [--orders 20] [--size 1] [--arch sm_80 sm_90] [--out FILE.json] [--table FILE.md]``

On the CPU device, in so many shuffled orders: every partition of 1024 threads that the paper's Figure 6 tries in thread
space, and an even and an uneven one in block space and in sequence. From nvcc, for the even partition: registers and
spilled bytes of the kernels alone, of the fused kernel without and with the bound r0 of Figure 6, and of the other two
spaces. Each pair is written when it is done, and the same command goes on where it stopped; a pair whose texts have
changed since is done again. The exit status is 1 where any bit differs.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hfuse.workloads import BLOCK, GROUPS, parts_of
from benchmarks.record import kept_results, save_results
from souffle.cli.output import Progress
from souffle.hfuse import (
    SPACES,
    Bound,
    Part,
    check,
    compiled_usage,
    even_split,
    fuse,
    multiprocessor_of,
    original,
    partitions,
    register_bound,
)

__all__ = ["main", "markdown", "measured"]

_ARCHS = ("sm_80", "sm_90")


def _candidates(parts: Sequence[Part]) -> list[tuple[str, tuple[int, ...]]]:
    """Spaces and partitions that are run."""
    tunable = [part.threads is None for part in parts]
    # Where all parts have the whole block their barrier is the block's; where not, a named one.
    half = tuple(part.threads or BLOCK // 2 for part in parts)
    uneven = tuple(part.threads or (BLOCK // 4 if index == 0 else BLOCK // 2) for index, part in enumerate(parts))
    others = [half, uneven] if any(tunable) else [half]
    splits = list(partitions(parts, BLOCK))
    return [("thread", each) for each in splits] + [(space, each) for space in SPACES[1:] for each in others]


def _checked(parts: Sequence[Part], orders: int, progress: Progress) -> list[dict[str, Any]]:
    rows = []
    for space, splits in _candidates(parts):
        progress(f"{space} {' + '.join(map(str, splits))}")
        outcome = check(fuse(parts, splits, space=space), orders=orders)
        rows.append(
            {
                "space": space,
                "splits": list(splits),
                "orders": outcome.orders,
                "buffers": outcome.buffers,
                "differences": [str(difference) for difference in outcome.differences],
            }
        )
    return rows


def _compiled(parts: Sequence[Part], arch: str) -> dict[str, Any]:
    usage, multiprocessor = compiled_usage(arch), multiprocessor_of(arch)

    def entry(text: str, name: str, threads: int, dynamic: int) -> dict[str, Any]:
        used = usage(text, name)
        shared = used.static_shared_bytes + dynamic
        return {
            "threads": threads,
            "registers": used.registers,
            "spill_bytes": used.spill_store_bytes + used.spill_load_bytes,
            "shared_bytes": shared,
            "resident": multiprocessor.resident(threads, shared, used.registers),
        }

    splits = even_split(parts, BLOCK)
    texts = [original(part, wrapped=True) for part in parts]
    alone = [
        entry(text.text, text.name, threads, part.shared_bytes)
        for part, text, threads in zip(parts, texts, splits, strict=True)
    ]

    def fused(space: str, bound: Bound | None = None) -> dict[str, Any]:
        kernel = fuse(parts, splits, space=space, bound=bound)
        return entry(kernel.text, kernel.name, kernel.block, kernel.shared_bytes)

    free = fused("thread")
    bound = register_bound(splits, [each["registers"] for each in alone], free["shared_bytes"], multiprocessor)
    return {
        "splits": list(splits),
        "alone": alone,
        "fused": free,
        "r0": bound.registers,
        "b0": bound.blocks,
        "bounded": fused("thread", Bound(blocks=bound.blocks)),
        "block": fused("block"),
        "sequence": fused("sequence"),
    }


def measured(parts: Sequence[Part], orders: int, archs: Sequence[str], progress: Progress) -> dict[str, Any]:
    """All about one pair or triple."""
    began = time.monotonic()
    checks = _checked(parts, orders, progress)
    compiled = {}
    for arch in archs:
        progress(f"nvcc for {arch}")
        compiled[arch] = _compiled(parts, arch)
    return {"checks": checks, "compiled": compiled, "seconds": round(time.monotonic() - began, 1)}


def _digest(parts: Sequence[Part], orders: int, archs: Sequence[str]) -> str:
    """Of everything that a result depends on but the compilers."""
    texts = [fuse(parts, splits, space=space).text for space, splits in _candidates(parts)]
    launches = [str(part.launch.to_json()) for part in parts]
    return hashlib.sha256("\0".join([*texts, *launches, str(orders), *archs]).encode()).hexdigest()[:16]


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _joined(entries: Sequence[dict[str, Any]], key: str) -> str:
    return " / ".join(str(entry[key]) for entry in entries)


def _bounded_text(entry: dict[str, Any]) -> str:
    spilled = f" ({entry['spill_bytes']} B spilled)" if entry["spill_bytes"] else ""
    return f"{entry['registers']}{spilled}"


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Tables of checks and, for each architecture, of resources."""
    header = ("kernels", "thread", "block", "sequence", "orders of each", "buffers", "differences")
    lines = [_row(header), _row(["---"] * len(header))]
    for result in results:
        checks = result["checks"]
        counts = [sum(check["space"] == space for check in checks) for space in SPACES]
        different = sum(len(check["differences"]) for check in checks)
        lines.append(_row([result["name"], *counts, checks[0]["orders"], checks[0]["buffers"], different]))
    for arch in dict.fromkeys(arch for result in results for arch in result["compiled"]):
        header = ("kernels", "threads", "alone", "fused", "r0", "bounded", "block space", "sequence", "shared bytes",
                  "resident: alone", "fused", "bounded", "sequence")  # fmt: skip
        lines += ["", f"Registers of a thread and resident blocks, {arch}:", "", _row(header), _row(["---"] * 13)]
        for result in results:
            found = result["compiled"].get(arch)
            if found is None:
                continue
            cells = [result["name"], " + ".join(map(str, found["splits"])), _joined(found["alone"], "registers")]
            cells += [_bounded_text(found["fused"]), found["r0"], _bounded_text(found["bounded"])]
            cells += [_bounded_text(found["block"]), _bounded_text(found["sequence"]), found["fused"]["shared_bytes"]]
            cells += [_joined(found["alone"], "resident"), found["fused"]["resident"], found["bounded"]["resident"]]
            lines.append(_row([*cells, found["sequence"]["resident"]]))
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hfuse.pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--orders", type=int, default=20, help="shuffled orders of each fused kernel")
    parser.add_argument("--size", type=int, default=1, help="of all kernels")
    parser.add_argument("--arch", nargs="*", default=list(_ARCHS), help="for nvcc; none leaves it out")
    parser.add_argument("--only", nargs="*", choices=list(GROUPS), metavar="PAIR", help="such as batchnorm+hist")
    parser.add_argument("--out", help="where to keep the results, to go on from")
    parser.add_argument("--table", type=Path, help="where to write the tables")
    options = parser.parse_args(argv)
    kept = {result["name"]: result for result in kept_results(options.out)}
    progress, results = Progress(), []
    for name, kernels in GROUPS.items():
        result = kept.get(name)
        if options.only is None or name in options.only:
            parts = parts_of(dict.fromkeys(kernels, options.size))
            digest = _digest(parts, options.orders, options.arch)
            if result is None or result["digest"] != digest:
                progress.prefix = f"{name}: "
                result = {"name": name, "digest": digest} | measured(parts, options.orders, options.arch, progress)
                kept[name] = result
                if options.out:
                    save_results(options.out, "benchmarks.hfuse.pairs", list(kept.values()))
        if result is not None:
            results.append(result)
    progress.done()
    text = markdown(results)
    sys.stdout.write(text)
    if options.table:
        options.table.write_text(text)
    return 1 if any(check["differences"] for result in results for check in result["checks"]) else 0


if __name__ == "__main__":
    sys.exit(main())
