"""Did a refactoring change a kernel: the CUDA texts and plans of two checkouts, compiled without nvcc, side by side.

``python -m benchmarks.compare_texts BEFORE AFTER [--models bert] [--sizes tiny paper] [--out FILE.jsonl]``, where each
is a folder or a revision of this repository. A configuration is ``equal``, byte for byte; ``renamed``, equal but for
the names of functions and variables and for white space; or it ``differs``. The exit status is 1 where one differs or
cannot be compiled. ``--out`` keeps what a commit gave, with the texts in ``FILE.texts/``, so that it is not made again;
what a folder gave with changes that are not committed is never kept. BEFORE alone is compiled and kept. Of one commit
twice the second is compiled afresh: two runs of one compiler.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compare_texts_work import Checkout, Configuration, Results, compile_missing
from benchmarks.text_renaming import TextDifference, compare_texts
from souffle.cli.output import format_table

MODELS = ("bert", "resnext", "lstm", "efficientnet", "swin", "mmoe")
LEVELS = ("V0", "V1", "V2", "V3", "V4")
_SHOWN_LINES = 40


@dataclass(frozen=True)
class Verdict:
    """What the two sides of a configuration are to each other.

    Attributes
    ----------
    word : str
        ``"equal"``, ``"renamed"``, ``"differs"``, or ``"failed"`` where a side has no result.
    reason : str
        Where it is not ``"equal"``.
    diff : tuple of str
    """

    word: str
    reason: str = ""
    diff: tuple[str, ...] = ()


def judge(before: dict[str, Any], after: dict[str, Any]) -> Verdict:
    """Compare what two checkouts gave for one configuration."""
    for side, result in (("before", before), ("after", after)):
        if "failed" in result:
            return Verdict("failed", f"{side}: {result['failed']}")
    if before["onnx"] != after["onnx"]:
        return Verdict("failed", "the two were given different models; remove the lines of --out that are out of date")
    old, new = before["modules"], after["modules"]
    if old == new and before["names"] == after["names"] and before["layout"] == after["layout"]:
        return Verdict("equal")
    if len(old) != len(new):
        return Verdict("differs", f"{len(old)} modules before, {len(new)} after")
    counts = [len(side["names"]["kernels"]) for side in (before, after)]
    if counts[0] != counts[1]:
        return Verdict("differs", f"{counts[0]} kernels before, {counts[1]} after")
    kernels = list(zip(before["names"]["kernels"], after["names"]["kernels"], strict=True))
    homes = [kernel[0] for kernel in before["layout"]["kernels"]]
    names: set[tuple[str, str]] = {pair for pair in kernels if pair[0] != pair[1]}
    for number, texts in enumerate(zip(old, new, strict=True)):
        own = [pair for pair, home in zip(kernels, homes, strict=True) if home == number]
        found = compare_texts(*texts, own)
        if isinstance(found, TextDifference):
            return Verdict("differs", found.reason, found.diff)
        names |= {pair for pair in found.forth.items() if pair[0] != pair[1]}
    where = first_difference(before["layout"], after["layout"], "plan")
    if where:
        return Verdict("differs", where)
    some = ", ".join(f"{first} is {second}" for first, second in sorted(names)[:3])
    return Verdict("renamed", some or "local names, buffers, comments or white space only")


def first_difference(before: Any, after: Any, where: str) -> str:
    """The path to the first entry that differs, with both values; empty where none does."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        pairs = [(f"{where}.{key}", before[key], after[key]) for key in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"{where}[{at}]", *both) for at, both in enumerate(zip(before, after, strict=True))]
    elif isinstance(before, list) and isinstance(after, list):
        return f"{where} has {len(before)} entries before, {len(after)} after"
    else:
        return "" if before == after else f"{where} is {before!r} before, {after!r} after"
    return next((found for name, one, other in pairs if (found := first_difference(one, other, name))), "")


def forecast(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Predicted microseconds of both sides, in words; empty where there are none."""
    times = [side.get("predicted_us") for side in (before, after)]
    return "" if None in times else f"predicted {times[0]:.2f} us before, {times[1]:.2f} us after"


def report(rows: Sequence[tuple[Configuration, Verdict, str]], shifted: Sequence[str]) -> None:
    """Print each distinct difference once, forecasts that moved under equal texts, then the table."""
    seen: dict[tuple[str, tuple[str, ...]], str] = {}
    for configuration, verdict, times in rows:
        if verdict.word == "equal":
            continue
        about = f"{configuration.label}: {verdict.word}: {verdict.reason}" + (f"; {times}" if times else "")
        key = (verdict.reason, verdict.diff)
        if key in seen:
            print(f"{about}; as {seen[key]}" if verdict.diff else about)
            continue
        seen[key] = configuration.label
        print(about)
        for line in verdict.diff[:_SHOWN_LINES]:
            print(f"    {line}")
        if len(verdict.diff) > _SHOWN_LINES:
            print(f"    ... and {len(verdict.diff) - _SHOWN_LINES} more lines")
    for line in shifted:
        print(line)
    levels = list(dict.fromkeys(configuration.level for configuration, _, _ in rows))
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for configuration, verdict, _ in rows:
        table.setdefault(configuration.but_level, {})[configuration.level] = verdict.word
    header = ["model", "size", "precision", "arch", "partition", *levels]
    print(format_table(header, [[*key, *(words.get(level, "-") for level in levels)] for key, words in table.items()]))
    counts = Counter(verdict.word for _, verdict, _ in rows)
    print(f"{len(rows)} configurations: " + ", ".join(f"{count} {word}" for word, count in counts.most_common()))


def compare(checkouts: Sequence[Checkout], configurations: Sequence[Configuration], results: Results) -> int:
    """Compare two checkouts whose results are there, report, and give the exit status."""
    rows, shifted = [], []
    for configuration in configurations:
        before, after = (results.get(checkout, configuration) for checkout in checkouts)
        verdict, times = judge(before, after), forecast(before, after)
        if verdict.word == "equal" and before["predicted_us"] != after["predicted_us"]:
            shifted.append(f"{configuration.label}: equal, but {times or 'predicted on one side only'}")
        rows.append((configuration, verdict, times))
    report(rows, shifted)
    return int(any(verdict.word not in ("equal", "renamed") for _, verdict, _ in rows))


def keep(checkout: Checkout, configurations: Sequence[Configuration], results: Results) -> int:
    """Say what is there of one checkout, and give the exit status."""
    found = [(configuration, results.get(checkout, configuration)) for configuration in configurations]
    failed = [(configuration, result["failed"]) for configuration, result in found if "failed" in result]
    for configuration, reason in failed:
        print(f"{configuration.label}: failed: {reason}")
    seconds = sum(result["seconds"] for _, result in found if "failed" not in result)
    print(f"{len(found) - len(failed)} of {len(found)} configurations compiled, in {seconds:.0f} s of a core")
    return int(bool(failed))


def main(argv: Sequence[str] | None = None) -> int:
    """Compile what is missing on either side, compare, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_texts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", help="a checkout's folder, or a revision of this repository")
    parser.add_argument("after", nargs="?", help="as before; without it nothing is compared")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", default=["tiny", "paper"])
    parser.add_argument("--levels", nargs="+", default=list(LEVELS))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "mixed"])
    parser.add_argument("--archs", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument("--partitions", nargs="+", default=["souffle"])
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="where results of commits are kept")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one model of one checkout")
    options = parser.parse_args(argv)
    if options.after is None and options.out is None:
        parser.error("BEFORE alone is compiled to be kept: give --out")
    configurations = [
        Configuration(model, size, precision, arch, partition, level)
        for size in options.sizes
        for model in options.models
        for partition in options.partitions
        for precision in options.precisions
        for arch in options.archs
        for level in options.levels
    ]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-texts-")))
        names = [name for name in (options.before, options.after) if name is not None]
        checkouts = [Checkout.of(name, scratch / f"checkout{number}") for number, name in enumerate(names)]
        if len(checkouts) == 2 and checkouts[0].commit == checkouts[1].commit:
            checkouts[1] = replace(checkouts[1], commit="")
        for checkout in checkouts:
            stack.callback(checkout.remove)
        results = Results(options.out, scratch / "results")
        compile_missing(checkouts, configurations, results, scratch, options.jobs, options.timeout)
        if len(checkouts) == 1:
            return keep(checkouts[0], configurations, results)
        return compare(checkouts, configurations, results)


if __name__ == "__main__":
    # Whoever ends this by a signal leaves no worker, and no work tree in the repository.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
