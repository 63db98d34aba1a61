"""The cost model against latencies that a tuner measured on an A100: rank correlation, outliers, a plot.

``python -m benchmarks.cost_against_measured MEASURED.json [--no-nvcc] [--out FILE.json] [--plot FILE.svg]`` takes
a file of groups of kernels, ``{folder: {name: [microseconds, records in the tuning log, tuner]}}``. Kernels whose names
give their shapes without doubt are built as tensor expressions, scheduled for sm_80 as any other network's, and
predicted. Measured are the best schedules that a search found, predicted is ours, so the two should rise together but
not be equal.

Names that are read (``h w`` of the input, ``i o`` channels in and out, ``b`` batch, layout NHWC, padding that keeps the
size before the stride):

=====================================================  ==================================================
``conv1x1_b_h_w_i_o``                                  convolution with a 1x1 kernel
``conv3x3_b_h_w_i_o_3_3``                              convolution, 3x3
``fused_conv7x7_s2_b_h_w_i_o_7_7``                     the same, 7x7 and stride 2
``pointwise_conv_h_w_i_o``                             convolution with a 1x1 kernel, batch 1
``pointwise_conv2d_bn[_short_cut_add]_h_w_i_o_b``      with scale and shift, and a tensor added
``head_conv1x1_bn_swish_b_h_w_i_o_k_k_s``              with scale, shift and ``x sigmoid(x)``; also ``stem_conv3x3``
``se_module_pointwise_conv_i_o_b``                     a matrix and a vector
``depthwise_conv_h_w_c_k_k``                           depthwise convolution, batch 1
``depthwise_conv2d_h_w_c_k_k_ss_b``                    depthwise convolution, stride s
``depthwise_conv2d_bn_swish_h_w_c_k_k_s_b``            with scale, shift and ``x sigmoid(x)``
``fused_conv2d_fixed_nparts_|i+g_b_c_h_w|w+..|...``    grouped convolution, NCHW, all in the name
``[batch_]matmul_tensorcore_b_m_n_k``                  matrix product on tensor cores
``dense_m_n_k``, ``batch_matmul_b_m_n_k``              the same: rates beyond 19.5 TFLOPS show that they are fp16
``cuda_core_matmul_b_m_n_k``                           matrix product in fp32
``reduce_mean_h_w_c``                                  mean over rows and columns
``avgpool_b_h_w_c_h_w``                                mean over a window as large as the input
=====================================================  ==================================================

A kernel measured in several logs counts once, with its best. A measurement below what the A100 could do at its rates
would mean that a name was misread, and ends the run. The tuners ran each kernel again and again on the same tensors, so
predictions take these to be in the L2 cache as far as they fit.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tvm import te, tirx

import souffle
from benchmarks.ranks import pair_correlation, rank_correlation, scatter
from benchmarks.record import save_results
from souffle.analysis import analyze
from souffle.cli.output import format_table
from souffle.codegen.stage_meter import StageMeter
from souffle.cost import CostDevice, Terms, cost_device, predict_stage
from souffle.pipeline import LEVELS, transform_program
from souffle.schedule.form_stages import JoinPolicy, form_stages
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.lower.stages import lower_stages
from souffle.schedule.stage import Stage, flat_stages

PRODUCT = "A100-SXM4-40GB"

_TUNED = 100
"""Records in a log from which on a search deserves the name; the correlation of those is given beside that of all."""


@dataclass(frozen=True)
class Problem:
    """A kernel as its name says.

    Attributes
    ----------
    kind : str
        ``"convolution"``, ``"depthwise"``, ``"dense"``, ``"dense fp16"`` or ``"reduction"``.
    shape : tuple
        All that tells it apart, for those measured more than once.
    build : callable
        Its tensors: placeholders, then the result.
    operations : float
        Floating-point operations; a multiply-add is two.
    """

    kind: str
    shape: tuple
    build: Callable[[], list[te.Tensor]]
    operations: float


def _epilogue(x: te.Tensor, scaled: bool, swish: bool, added: bool) -> tuple[te.Tensor, list[te.Tensor]]:
    """What follows a convolution element by element, and its further inputs."""
    more: list[te.Tensor] = []
    channels = x.shape[-1]
    if scaled:
        scale, shift = (te.placeholder((channels,), "float32", name) for name in ("scale", "shift"))
        y = x
        x = te.compute(x.shape, lambda *i: y[i] * scale[i[-1]] + shift[i[-1]], "scaled")
        more += [scale, shift]
    if swish:
        z = x
        x = te.compute(x.shape, lambda *i: z[i] * tirx.sigmoid(z[i]), "swish")
    if added:
        other = te.placeholder(x.shape, "float32", "other")
        s = x
        x = te.compute(x.shape, lambda *i: s[i] + other[i], "sum")
        more.append(other)
    return x, more


def convolution(
    b: int, h: int, w: int, i: int, o: int, k: int = 1, stride: int = 1, *, scaled=False, swish=False, added=False
) -> Problem:
    """A convolution of NHWC tensors, of which a matrix product is the case of one kernel element."""
    oh, ow = -(-h // stride), -(-w // stride)

    def build() -> list[te.Tensor]:
        data = te.placeholder((b, h, w, i), "float32", "data")
        kernel = te.placeholder((k, k, i, o), "float32", "kernel")
        source = _padded(data, k, stride)
        dy, dx, c = (te.reduce_axis((0, extent)) for extent in (k, k, i))
        result = te.compute(
            (b, oh, ow, o),
            lambda n, y, x, f: te.sum(
                source[n, y * stride + dy, x * stride + dx, c] * kernel[dy, dx, c, f], [dy, dx, c]
            ),
            "conv",
        )
        result, more = _epilogue(result, scaled, swish, added)
        return [data, kernel, *more, result]

    kind = "dense" if h * w == 1 else "convolution"
    shape = ("conv", b, h, w, i, o, k, stride, scaled, swish, added)
    return Problem(kind, shape, build, 2.0 * b * oh * ow * o * i * k * k)


def _padded(data: te.Tensor, k: int, stride: int) -> te.Tensor:
    if k == 1:
        return data
    b, h, w, c = data.shape
    before = (k - 1) // 2 if stride == 1 else (k - stride + 1) // 2

    def element(n, y, x, f):
        inside = tirx.all(y >= before, y < h + before, x >= before, x < w + before)
        return tirx.if_then_else(inside, data[n, y - before, x - before, f], tirx.const(0, "float32"))

    return te.compute((b, h + k - 1, w + k - 1, c), element, "padded")


def depthwise(b: int, h: int, w: int, c: int, k: int, stride: int, *, scaled=False, swish=False) -> Problem:
    """A depthwise convolution of NHWC tensors."""
    oh, ow = -(-h // stride), -(-w // stride)

    def build() -> list[te.Tensor]:
        data, kernel = te.placeholder((b, h, w, c), "float32", "data"), te.placeholder((k, k, c), "float32", "kernel")
        source = _padded(data, k, stride)
        dy, dx = te.reduce_axis((0, k)), te.reduce_axis((0, k))
        result = te.compute(
            (b, oh, ow, c),
            lambda n, y, x, f: te.sum(source[n, y * stride + dy, x * stride + dx, f] * kernel[dy, dx, f], [dy, dx]),
            "conv",
        )
        result, more = _epilogue(result, scaled, swish, False)
        return [data, kernel, *more, result]

    return Problem("depthwise", ("dw", b, h, w, c, k, stride, scaled, swish), build, 2.0 * b * oh * ow * c * k * k)


def grouped(g: int, b: int, c: int, h: int, w: int, o: int, k: int) -> Problem:
    """Several convolutions side by side, each NCHW."""

    def build() -> list[te.Tensor]:
        data = te.placeholder((g, b, c, h, w), "float32", "data")
        kernel = te.placeholder((g, o, c, k, k), "float32", "kernel")
        pad = k // 2

        def element(n, a, f, y, x):
            inside = tirx.all(y >= pad, y < h + pad, x >= pad, x < w + pad)
            return tirx.if_then_else(inside, data[n, a, f, y - pad, x - pad], tirx.const(0, "float32"))

        source = te.compute((g, b, c, h + 2 * pad, w + 2 * pad), element, "padded")
        r, dy, dx = (te.reduce_axis((0, extent)) for extent in (c, k, k))
        result = te.compute(
            (g, b, o, h, w),
            lambda n, a, f, y, x: te.sum(source[n, a, r, y + dy, x + dx] * kernel[n, f, r, dy, dx], [r, dy, dx]),
            "conv",
        )
        return [data, kernel, result]

    return Problem("convolution", ("grouped", g, b, c, h, w, o, k), build, 2.0 * g * b * o * h * w * c * k * k)


def product(b: int, m: int, n: int, k: int, dtype: str) -> Problem:
    """A matrix product, batched or not; totals are fp32 either way."""

    def build() -> list[te.Tensor]:
        left = te.placeholder((b, m, k), dtype, "left")
        right = te.placeholder((b, k, n), dtype, "right")
        r = te.reduce_axis((0, k))

        def wide(x):
            return x if dtype == "float32" else x.astype("float32")

        total = te.compute((b, m, n), lambda a, i, j: te.sum(wide(left[a, i, r]) * wide(right[a, r, j]), r), "product")
        if dtype == "float32":
            return [left, right, total]
        return [left, right, te.compute((b, m, n), lambda *i: total[i].astype(dtype), "narrow")]

    kind = "dense" if dtype == "float32" else "dense fp16"
    return Problem(kind, ("product", b, m, n, k, dtype), build, 2.0 * b * m * n * k)


def mean(b: int, h: int, w: int, c: int) -> Problem:
    """The mean over rows and columns."""

    def build() -> list[te.Tensor]:
        data = te.placeholder((b, h, w, c), "float32", "data")
        y, x = te.reduce_axis((0, h)), te.reduce_axis((0, w))
        total = te.compute((b, c), lambda n, f: te.sum(data[n, y, x, f], [y, x]), "total")
        return [data, te.compute((b, c), lambda *i: total[i] * (1.0 / (h * w)), "mean")]

    return Problem("reduction", ("mean", b, h, w, c), build, float(b * h * w * c))


_N = r"_(\d+)"
_UNIT_STEPS = r"\|ws\+1_1\|wd_1_1\|p\+_1_1"
_NAMES: list[tuple[str, Callable[..., Problem | None]]] = [
    (r"conv1x1" + 5 * _N, convolution),
    (r"conv3x3" + 5 * _N + "_3_3", lambda b, h, w, i, o: convolution(b, h, w, i, o, 3)),
    (r"fused_conv7x7_s2" + 5 * _N + "_7_7", lambda b, h, w, i, o: convolution(b, h, w, i, o, 7, 2)),
    (r"pointwise_conv" + 4 * _N, lambda h, w, i, o: convolution(1, h, w, i, o)),
    (r"pointwise_conv2d_bn" + 5 * _N, lambda h, w, i, o, b: convolution(b, h, w, i, o, scaled=True)),
    (
        r"pointwise_conv2d_bn_short_cut_add" + 5 * _N,
        lambda h, w, i, o, b: convolution(b, h, w, i, o, scaled=True, added=True),
    ),
    (
        r"(?:head_conv1x1|stem_conv3x3)_bn_swish" + 5 * _N + _N + r"_(\d+)" + _N,
        lambda b, h, w, i, o, k, _, s: convolution(b, h, w, i, o, k, s, scaled=True, swish=True),
    ),
    (r"se_module_pointwise_conv" + 3 * _N, lambda i, o, b: convolution(b, 1, 1, i, o)),
    (r"depthwise_conv" + 5 * _N, lambda h, w, c, k, _: depthwise(1, h, w, c, k, 1)),
    (r"depthwise_conv2d" + 5 * _N + r"_s(\d+)" + _N, lambda h, w, c, k, _, s, b: depthwise(b, h, w, c, k, s)),
    (
        r"depthwise_conv2d_bn_swish" + 7 * _N,
        lambda h, w, c, k, _, s, b: depthwise(b, h, w, c, k, s, scaled=True, swish=True),
    ),
    (
        r"fused_conv2d_fixed_nparts_\|i\+(\d+)" + 4 * _N + r"\|w\+_\d+" + _N + r"_\d+_(\d+)_\d+" + _UNIT_STEPS,
        grouped,
    ),
    (r"auto_tvm_tune(?:_batch)?_matmul_tensorcore" + 4 * _N, lambda *s: product(*s, "float16")),
    (r"dense" + 3 * _N, lambda *s: product(1, *s, "float16")),
    (r"batch_matmul" + 4 * _N, lambda *s: product(*s, "float16")),
    (r"cuda_core_matmul" + 4 * _N, lambda *s: product(*s, "float32")),
    (r"(?:reduce_mean|reudce_mean)" + 3 * _N, lambda h, w, c: mean(1, h, w, c)),
    (r"avgpool" + 6 * _N, lambda b, h, w, c, y, x: mean(b, h, w, c) if (h, w) == (y, x) else None),
]
_FAMILY = r"(?:\|?)(?:(?:bert|efficient|resnext_imagenet_50|swin_transformer)_)?"


def problem_of(name: str) -> Problem | None:
    """The kernel that a log's name describes without doubt, or ``None``."""
    stem = name.removesuffix(".log")
    for pattern, make in _NAMES:
        match = re.fullmatch(_FAMILY + pattern, stem)
        if match:
            return make(*(int(part) for part in match.groups()))
    return None


def floor_seconds(problem: Problem, tensors: Sequence[te.Tensor], device: CostDevice) -> float:
    """What the device needs at the rates that it reaches, its tensors in the L2 cache as far as they fit."""
    rate = 2.0 * device.sm_count * device.clock_hz
    rate *= device.tensor_fma_per_clock_per_sm if problem.kind == "dense fp16" else device.fp32_per_clock_per_sm
    nbytes = sum(math.prod(int(e) for e in t.shape) * (2 if str(t.dtype) == "float16" else 4) for t in tensors)
    through_cache = nbytes / (device.l2_bytes_per_clock * device.clock_hz)
    beyond = max(0.0, nbytes - device.l2_bytes) / device.memory_bytes_per_second
    return max(problem.operations / rate, through_cache, beyond)


class Compiler:
    """Schedules and lowers one kernel after another for the A100, and predicts them."""

    def __init__(self, device: CostDevice, nvcc: bool, cache: Path | None) -> None:
        self.device = device
        self.scheduler = GpuScheduler(device.limits)
        self.meter = StageMeter(device.arch, self.scheduler.target, measure=nvcc, cache_dir=cache)

    def lowered(self, problems: Sequence[Problem]) -> list[list[Stage]]:
        """For each problem its stages, with the functions and resources of all compiled together."""
        counts, every = [], []
        for problem in problems:
            tensors = problem.build()
            program = souffle.from_te(tensors[:-1], tensors[-1:])
            program, _ = transform_program(program, LEVELS["V2"], "fp32")
            stages, _ = form_stages(program, analyze(program.expanded()), self.scheduler, JoinPolicy(True))
            flat = lower_stages(flat_stages(stages), self.scheduler.target)
            every += flat
            counts.append(len(flat))
        measured = iter(self.meter.measured(every))
        return [list(islice(measured, count)) for count in counts]


def measure(path: Path, device: CostDevice, nvcc: bool, cache: Path | None) -> tuple[list[dict], dict[str, int]]:
    """Predict every kernel of a file that can be read; the results, and how many names were read and not."""
    best: dict[tuple, tuple[float, str, int, Problem]] = {}
    counts = {"names": 0, "read": 0}
    for folder, logs in json.loads(path.read_text()).items():
        for name, (microseconds, records, _) in logs.items():
            counts["names"] += 1
            problem = problem_of(name)
            if problem is None:
                continue
            counts["read"] += 1
            known = best.get(problem.shape)
            if known is None or microseconds < known[0]:
                best[problem.shape] = (microseconds, f"{folder.split('/')[-2]}/{name}", records, problem)
    counts["kernels"] = len(best)
    kernels = list(best.values())
    results = []
    lowered = Compiler(device, nvcc, cache).lowered([problem for *_, problem in kernels])
    for (microseconds, name, records, problem), stages in zip(kernels, lowered, strict=True):
        least = floor_seconds(problem, problem.build(), device)
        if least * 1e6 > microseconds:
            raise SystemExit(
                f"{name}: measured {microseconds} us, at the rates that are reached it takes {least * 1e6:.2f}"
            )
        predictions = [predict_stage(stage.functions, device, stage.resources, warm=True) for stage in stages]
        terms = [one for prediction in predictions for one in prediction.terms]
        slowest = max(terms, key=lambda one: max(one.multiprocessors, one.l2, one.memory))
        results.append(
            {
                "name": name.removesuffix(".log"),
                "kind": problem.kind,
                "measured_us": round(microseconds, 3),
                "predicted_us": round(sum(p.seconds for p in predictions) * 1e6, 3),
                "floor_us": round(least * 1e6, 3),
                "records": records,
                "rule": "+".join(stage.schedule.rule for stage in stages),
                "registers": max(stage.resources.registers for stage in stages),
                "bound": slowest.bound,
                **_parts(slowest),
            }
        )
    return results, counts


def _parts(terms: Terms) -> dict[str, float]:
    """The terms in microseconds."""
    names = ("issue", "fp32", "int32", "tensor", "shared", "l2_port", "chain", "l2", "memory", "multiprocessors")
    parts = {name: round(getattr(terms, name) * 1e6, 3) for name in names}
    return {**parts, "tiles": terms.tiles, "resident": terms.resident, "waves": terms.waves}


_COLORS = {
    "convolution": "#1f77b4",
    "depthwise": "#2ca02c",
    "dense": "#9467bd",
    "dense fp16": "#d62728",
    "reduction": "#ff7f0e",
}


def plot(results: Sequence[dict], correlation: float) -> str:
    """An SVG: predicted over measured, both logarithmic, one mark for each kernel."""
    marks = [
        (one["measured_us"], one["predicted_us"], one["kind"],
         f"{one['name']}: measured {one['measured_us']}, predicted {one['predicted_us']}")
        for one in results
    ]  # fmt: skip
    title = f"{len(results)} kernels, A100: rank correlation {correlation:.3f}"
    return scatter(marks, _COLORS, title, "measured, best schedule found, us", "predicted, our schedule, us")


def summary(results: Sequence[dict]) -> list[dict]:
    """Rank correlation of all, of each kind, and of those that were searched for long enough.

    Beside the model's stands that of the roofline alone, which knows the shape and the device but no schedule.
    """
    groups = {"all": list(results), f"{_TUNED} records or more": [r for r in results if r["records"] >= _TUNED]}
    groups |= {kind: [r for r in results if r["kind"] == kind] for kind in _COLORS}
    rows = []
    for label, members in groups.items():
        if not members:
            continue
        measured = [r["measured_us"] for r in members]
        ratios = [r["predicted_us"] / r["measured_us"] for r in members]
        rows.append(
            {
                "kernels_of": label,
                "kernels": len(members),
                "spearman": round(rank_correlation(measured, [r["predicted_us"] for r in members]), 3),
                "kendall": round(pair_correlation(measured, [r["predicted_us"] for r in members]), 3),
                "roofline_spearman": round(rank_correlation(measured, [r["floor_us"] for r in members]), 3),
                "median_ratio": round(float(np.median(ratios)), 3),
                "within_factor_2": round(float(np.mean([0.5 <= ratio <= 2 for ratio in ratios])), 3),
            }
        )
    return rows


def main() -> int:
    """Predict, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="the file of measured latencies")
    parser.add_argument("--no-nvcc", action="store_true", help="estimate registers instead of asking ptxas")
    parser.add_argument("--cache", type=Path, help="where ptxas' reports are kept")
    parser.add_argument("--outliers", type=int, default=12, help="how many to list")
    parser.add_argument("--out", help="where to write the results as JSON")
    parser.add_argument("--plot", type=Path, help="where to write the plot as SVG")
    arguments = parser.parse_args()
    device = cost_device(PRODUCT)
    results, counts = measure(arguments.measured, device, not arguments.no_nvcc, arguments.cache)
    rows = summary(results)
    print(f"{counts['names']} names, {counts['read']} read, {counts['kernels']} kernels")
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    results.sort(key=lambda r: -abs(math.log(r["predicted_us"] / r["measured_us"])))
    columns = ["name", "kind", "measured_us", "predicted_us", "bound", "tiles", "resident", "multiprocessors", "chain"]
    columns += ["issue", "fp32", "int32", "shared", "l2_port", "l2", "registers", "records"]
    print(format_table(columns, [[r[c] for c in columns] for r in results[: arguments.outliers]]))
    if arguments.out:
        save_results(
            arguments.out, "benchmarks.cost_against_measured", results, product=PRODUCT, **counts, correlation=rows
        )
    if arguments.plot:
        arguments.plot.write_text(plot(results, rows[0]["spearman"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
