"""What :mod:`benchmarks.hfuse.gpu` does on a GPU, task by task.

A task has a name and gives what JSON holds: ``device``; ``reference/KERNEL``, a kernel alone against NumPy or hashlib;
``check/PAIR``, the bits of fused kernels against those of the kernels alone; ``figure8/KERNEL``, a kernel's time and
counters; ``figure7/PAIR/RATIO``, fused kernels against the kernels side by side.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_figures import read_clocks
from benchmarks.hfuse.gpu_images import Images, candidates, native_splits
from benchmarks.hfuse.hash_references import DIGESTS, searched
from benchmarks.hfuse.references import REFERENCES, batchnorm_exact, named
from benchmarks.hfuse.workloads import BLOCK, GPU_SIZES, GROUPS, KERNELS, PAIRS, TRIPLE, launch_of, parts_of
from souffle.hfuse import FusedKernel, multiprocessor_of, original, search
from souffle.hfuse.profile import Profiler
from souffle.runtime.cuda import Cuda

__all__ = ["METRICS", "Bench", "ncu_metrics", "task_names"]

_ROOT = Path(__file__).resolve().parents[2]
_CHECK_SIZE = 96
"""So many blocks that several share a multiprocessor, and small enough for seconds."""
_NCU_SECONDS = 75.0
_MOST_FACTOR = 4.0
"""By which a size is changed to get a ratio of times."""
_MOST_ELEMENTS = 2**30
"""Of a buffer; kernels count in 32 bits, and the host has to fill it."""

METRICS = {
    "issue_slot_utilization": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "memory_stall": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "all_stalls": "smsp__average_warp_latency_per_inst_issued.ratio",
    "achieved_occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""The metrics of the paper's Figure 8 in the words of Nsight Compute. A stall for memory is one for the long
scoreboard, as a share of all cycles that a warp spends from one instruction to the next."""


def task_names(chosen: Sequence[str], ratios: Sequence[float]) -> list[str]:
    """All tasks, what matters most first: whether results are right, then the ratio that is nearest to one."""
    kernels = [kernel for kernel in KERNELS if any(kernel in GROUPS[name] for name in chosen)]
    names = ["device", *(f"reference/{kernel}" for kernel in kernels)]
    names += [*(f"check/{name}" for name in chosen), *(f"figure8/{kernel}" for kernel in kernels)]
    triple = "+".join(TRIPLE)
    for ratio in sorted(ratios, key=lambda ratio: max(ratio, 1 / ratio)):
        names += [f"figure7/{name}/{ratio:g}" for name in chosen if name != triple]
    return names + [f"figure7/{triple}/1" for name in chosen if name == triple]


@dataclass(frozen=True, eq=False)
class Bench:
    """A GPU with what tasks on it have in common.

    Attributes
    ----------
    cuda : Cuda
    images : Images
    scale : float
        Of the sizes in :data:`~benchmarks.hfuse.workloads.GPU_SIZES`.
    repeats : int
    warm_seconds : float
    ncu : bool
        Whether to ask Nsight Compute, where it is installed.
    """

    cuda: Cuda
    images: Images
    scale: float
    repeats: int
    warm_seconds: float
    ncu: bool

    def run(self, task: str, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Do one task; `results` are those of earlier ones by name."""
        kind, *rest = task.split("/")
        if kind == "reference":
            return self._reference(rest[0])
        if kind == "check":
            return self._check(GROUPS[rest[0]])
        if kind == "figure8":
            return self._figure8(rest[0])
        if kind == "figure7":
            return self._figure7(rest[0], float(rest[1]), results)
        return {"name": self.cuda.name, "arch": self.cuda.arch, "clocks": read_clocks()}

    def _size(self, kernel: str, factor: float = 1.0) -> int:
        size = max(1, round(GPU_SIZES[kernel] * self.scale * factor))
        most = max(argument.count for argument in launch_of(kernel, size).arguments)
        return size if most <= _MOST_ELEMENTS else int(size * _MOST_ELEMENTS / most)

    def _profiler(self, parts: Sequence[Any], splits: Sequence[int], repeats: int, warm_seconds: float) -> Profiler:
        return Profiler(
            self.cuda, parts, splits, repeats=repeats, warm_seconds=warm_seconds, compiler=self.images.compile
        )

    def _reference(self, kernel: str) -> dict[str, Any]:
        """The outputs of a kernel alone that are not those of its reference in each bit, and by how much.

        Where a GPU contracts products and sums, in ``batchnorm`` and ``upsample``, results may differ from NumPy's.
        """
        parts = parts_of({kernel: 1})
        launch, splits = parts[0].launch, native_splits(parts)
        given = named(launch, launch.arrays(0))
        if kernel in DIGESTS:
            wanted = searched(kernel, given, launch.grid[0] * splits[0] * given["tries"])
        elif kernel == "batchnorm":
            wanted = batchnorm_exact(given, launch.block_of(splits[0]))
        else:
            wanted = REFERENCES[kernel](given)
        with self._profiler(parts, splits, 1, 0.0) as profiler:
            arrays = profiler.results()[0]
        buffers = [argument.name for argument in launch.arguments if argument.dtype is not None]
        outcome = dict(zip(buffers, arrays, strict=True))
        errors = {} if self.images.played else {n: _error(outcome[n], value) for n, value in wanted.items()}
        contracted = kernel in ("batchnorm", "upsample")
        different = [name for name, error in errors.items() if error and not contracted]
        return {"different": different, "errors": errors, "contracted": contracted}

    def _check(self, kernels: Sequence[str]) -> dict[str, Any]:
        """The same bits from each fused kernel as from its parts alone, with as many threads each."""
        size = max(1, round(_CHECK_SIZE * min(1.0, self.scale * 100)))
        parts = parts_of(dict.fromkeys(kernels, size))
        kinds = candidates(parts, self.cuda.arch, self.images)
        expected: dict[tuple[int, ...], list[list[np.ndarray]]] = {}
        different, count = [], 0
        for fused in [*kinds["hfuse"], *kinds["vfuse"]]:
            if fused.splits not in expected:
                with self._profiler(parts, fused.splits, 1, 0.0) as profiler:
                    expected[fused.splits] = profiler.results()
            with self._profiler(parts, fused.splits, 1, 0.0) as profiler:
                outcome = profiler.results(fused)
            count += 1
            same = all(
                left.tobytes() == right.tobytes()
                for wanted, given in zip(expected[fused.splits], outcome, strict=True)
                for left, right in zip(wanted, given, strict=True)
            )
            if not same:
                different.append(f"{fused.space} {' + '.join(map(str, fused.splits))}{_bound_text(fused)}")
        return {"kernels": count, "different": different}

    def _figure8(self, kernel: str) -> dict[str, Any]:
        parts = parts_of({kernel: self._size(kernel)})
        threads = native_splits(parts)
        text = original(parts[0], wrapped=True)
        used = self.images.usage(self.cuda.arch, text.text, text.name)
        multiprocessor = multiprocessor_of(self.cuda.arch)
        shared = used.static_shared_bytes + parts[0].shared_bytes
        resident = multiprocessor.resident(threads[0], shared, used.registers)
        with self._profiler(parts, threads, self.repeats, self.warm_seconds) as profiler:
            seconds = profiler.times([]).alone[0]
        found = {
            "size": self._size(kernel),
            "threads": threads[0],
            "registers": used.registers,
            "seconds": seconds,
            "resident": resident,
            "occupancy": 100.0 * resident * threads[0] / multiprocessor.threads,
        }
        return found | {"ncu": self._ncu(kernel) if self.ncu else None}

    def launch(self, kernel: str) -> None:
        """Launch one kernel alone, for a profiler that watches the process."""
        parts = parts_of({kernel: self._size(kernel)})
        with self._profiler(parts, native_splits(parts), 1, 0.0) as profiler:
            profiler.times([])

    def _ncu(self, kernel: str) -> dict[str, float] | str | None:
        """Figure 8's metrics, why there are none, or None where Nsight Compute is not installed."""
        program = shutil.which("ncu")
        if program is None:
            return None
        command = [program, "--csv", "--page", "raw", "--clock-control", "none", "--launch-count", "1"]
        command += ["--metrics", ",".join(METRICS.values())]
        command += [sys.executable, "-m", "benchmarks.hfuse.gpu", "single", kernel, "--scale", str(self.scale)]
        command += ["--cubins", str(self.images.folder.resolve())] if self.images.folder is not None else []
        try:
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_NCU_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"ncu was ended after {_NCU_SECONDS:.0f} s"
        return ncu_metrics(done.stdout) or (done.stderr or done.stdout).strip()[-400:]

    def _figure7(self, name: str, ratio: float, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        kernels = GROUPS[name]
        sizes = {kernel: self._size(kernel) for kernel in kernels}
        starred = next((pair.starred for pair in PAIRS if pair.name == name), None)
        if starred is not None:
            alone = {kernel: results.get(f"figure8/{kernel}", {}).get("seconds") for kernel in kernels}
            other = next(kernel for kernel in kernels if kernel != starred)
            known = alone[starred] and alone[other]
            factor = ratio * (alone[other] / alone[starred] if known else 1.0)
            # A kernel's time grows with its size, not in proportion: the measured ratio stands beside the result.
            sizes[starred] = self._size(starred, min(_MOST_FACTOR, max(1 / _MOST_FACTOR, factor)))
        parts, arch = parts_of(sizes), self.cuda.arch
        kinds = candidates(parts, arch, self.images)
        with self._profiler(parts, native_splits(parts), self.repeats, self.warm_seconds) as profiler:
            searched = search(
                parts,
                BLOCK,
                profiler.seconds,
                usage=partial(self.images.usage, arch),
                multiprocessor=multiprocessor_of(arch),
            )
            best = searched.best
            # Once more, in turns with all that it is compared with: the fastest of many is in part the luckiest.
            times = profiler.times([best.fused, *kinds["vfuse"], *kinds["naive"]])
        seconds = dict(zip(("hfuse", "vfuse", "naive"), times.fused))
        first, second = (kernels.index(starred), 1 - kernels.index(starred)) if starred else (0, 1)
        return {
            "sizes": sizes,
            "starred": starred,
            "ratio": times.alone[first] / max(times.alone[second], 1e-12),
            "alone": list(times.alone),
            "native": times.parallel,
            "serial": times.serial,
            "fused": seconds,
            "speedup": {kind: times.parallel / max(value, 1e-12) - 1 for kind, value in seconds.items()},
            "best": {"splits": list(best.splits), "registers": best.registers, "blocks": best.blocks},
            "trials": [
                {"splits": list(trial.splits), "registers": trial.registers, "seconds": trial.seconds}
                for trial in searched.trials
            ],
        }


def _bound_text(fused: FusedKernel) -> str:
    return f", at least {fused.bound.blocks} blocks" if fused.bound is not None else ""


def _error(outcome: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference of any two elements, or 0 where all bits are the same."""
    if outcome.tobytes() == wanted.tobytes():
        return 0.0
    return float(np.abs(outcome.astype(np.float64) - wanted.astype(np.float64)).max())


def ncu_metrics(text: str) -> dict[str, float] | None:
    """Figure 8's metrics in percent from what ``ncu --csv --page raw`` prints, or None where it has none."""
    rows = list(csv.reader(io.StringIO("\n".join(line for line in text.splitlines() if line.startswith('"')))))
    if len(rows) < 3:
        return None
    # Names, units, and the one kernel.
    values = dict(zip(rows[0], rows[2]))
    found = {}
    for key, metric in METRICS.items():
        try:
            found[key] = float(values[metric].replace(",", ""))
        except (KeyError, ValueError):
            return None
    stalls = found.pop("all_stalls")
    found["memory_stall"] = 100.0 * found["memory_stall"] / stalls if stalls else 0.0
    return found
