"""A network beside other compilers: all are prepared, all outputs are compared, and only then those that passed are
timed, in turn."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from souffle.benchmark.host_way import settle
from souffle.benchmark.ours import ways_of
from souffle.benchmark.peer import Peer, Way
from souffle.benchmark.report import CACHES, OURS, BenchmarkReport, BenchmarkRow
from souffle.benchmark.rounds import figures_of, ratio_of, run_in_turn
from souffle.options import Progress, quiet
from souffle.runtime.comparison import compare
from souffle.runtime.cuda import Cuda

__all__ = ["machine_name", "measure"]

_Ran = tuple[BenchmarkRow, Way]


def measure(
    model: onnx.ModelProto,
    network: Any,
    peers: Sequence[Peer],
    report: BenchmarkReport,
    *,
    inputs: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    seconds: float,
    prepared: float = 0.0,
    version: str = "",
    progress: Progress = quiet,
    rest: Callable[[], None] = settle,
) -> None:
    """Fill a report.

    Parameters
    ----------
    model : ModelProto
        What peers compile.
    network : Network or HostNetwork
        What Souffle has compiled of it.
    peers : sequence of Peer
    report : BenchmarkReport
        Without rows. After an interrupt it has what was finished, and says so.
    inputs, expected : mapping of str to array
        By the model's names; what outputs are compared with.
    seconds : float
        The most that the timed runs of one row may take in all, by its first run.
    prepared : float
        Seconds that compiling `network` took.
    version : str
        Of Souffle.
    progress : callable
    rest : callable
        Done before each run.
    """
    try:
        ready: list[_Ran] = []
        for way in ways_of(network, inputs):
            row = BenchmarkRow(OURS, version, prepare_seconds=prepared)
            report.rows.append(row)
            ready += _compared(row, way, expected, report, seconds, ())
        for peer in peers:
            progress(f"preparing {peer.name}")
            ready += _prepared(peer, model, inputs, expected, report, seconds)
        _timed(ready, report, progress, rest)
    except KeyboardInterrupt:
        report.interrupted = True


def machine_name(device: str) -> str:
    """The GPU, or the processor, in words."""
    if device == "cuda":
        return Cuda().label
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _prepared(
    peer: Peer,
    model: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    report: BenchmarkReport,
    seconds: float,
) -> list[_Ran]:
    """The ways of a peer that gave the right outputs; a row for each, or one that says what is lacking."""
    row = BenchmarkRow(peer.name)
    report.rows.append(row)
    row.reason = peer.lacking(report.setting)
    if row.reason:
        return []
    row.version, row.reason = peer.version(), "interrupted before it was prepared"
    begin = time.perf_counter()
    try:
        ways = peer.prepare(model, inputs, report.setting)
    except peer.failures as error:
        row.reason = _said(error)
        return []
    row.prepare_seconds = time.perf_counter() - begin
    rows = [row, *(BenchmarkRow(peer.name, row.version, prepare_seconds=row.prepare_seconds) for _ in ways[1:])]
    report.rows.extend(rows[1:])
    return [
        ran
        for one, way in zip(rows, ways, strict=True)
        for ran in _compared(one, way, expected, report, seconds, peer.failures)
    ]


def _compared(
    row: BenchmarkRow,
    way: Way,
    expected: Mapping[str, np.ndarray],
    report: BenchmarkReport,
    seconds: float,
    failures: tuple[type[Exception], ...],
) -> list[_Ran]:
    """The way, if its outputs are right and it is quick enough; the row says what is wrong otherwise."""
    row.form, row.clock, row.reason = way.form, way.clock, "interrupted before it was compared"
    begin = time.perf_counter()
    try:
        outputs = way.outputs()
        first = time.perf_counter()
        row.prepare_seconds = (row.prepare_seconds or 0.0) + first - begin if row.name != OURS else row.prepare_seconds
        outputs = way.outputs()
        once = time.perf_counter() - first
    except failures as error:
        row.reason = _said(error)
        return []
    result = compare(outputs, expected, report.setting.precision)
    row.error, row.passed = result.error, result.ok
    if not result.ok:
        row.reason = f"its outputs are wrong: off by {result.error:.1e} of the largest; so it was not timed"
        return []
    if way.untimed:
        row.reason = way.untimed
        return []
    # A warm run is one that counts and one before it.
    needed = once * (2 + 1) * (report.runs + report.warmup)
    if needed > seconds:
        row.reason = f"a run takes {once:.3g} s, and all would take {needed:.0f} s; more are allowed by --seconds"
        return []
    row.reason = "interrupted before it was timed"
    return [(row, way)]


def _said(error: Exception) -> str:
    """An error in one line, with its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return f"it fails: {type(error).__name__}: {lines[0][:300]}" if lines else f"it fails: {type(error).__name__}"


def _timed(ready: Sequence[_Ran], report: BenchmarkReport, progress: Progress, rest: Callable[[], None]) -> None:
    """Times and ratios; after an interrupt, of the rounds that are whole."""
    for cache in CACHES:
        if not ready:
            return
        progress(f"timing {report.runs} rounds of {len(ready)}, caches {cache}")
        samples: list[list[float]] = [[] for _ in ready]
        try:
            run_in_turn(
                [way for _, way in ready],
                runs=report.runs,
                warmup=report.warmup,
                cold=cache == "cold",
                samples=samples,
                rest=rest,
            )
        finally:
            whole = min(map(len, samples))
            ours = {row.form: found for (row, _), found in zip(ready, samples, strict=True) if row.name == OURS}
            for (row, _), found in zip(ready, samples, strict=True) if whole else ():
                row.reason, row.times[cache] = "", figures_of(found[:whole])
                beside = ours.get(row.form)
                if row.name != OURS and beside is not None:
                    row.ratios[cache] = ratio_of(found[:whole], beside[:whole])
