"""The TEs of ``benchmarks.cost_against_gpu``: one of each kind that is scheduled, and how NumPy computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm import te, tirx

from benchmarks.cost_against_measured import Problem, convolution, depthwise, grouped, mean, product

__all__ = ["Case", "cases"]


@dataclass(frozen=True)
class Case:
    """A TE to schedule in many ways.

    Attributes
    ----------
    name : str
    build : callable
        Its tensors: placeholders, then the result.
    reference : dict
        ``{"op": ...}`` and its parameters: see ``benchmarks.cost_against_gpu_run``.
    """

    name: str
    build: Callable[[], list[te.Tensor]]
    reference: dict[str, Any] = field(default_factory=dict)


def _softmax(rows: int, columns: int) -> list[te.Tensor]:
    x = te.placeholder((rows, columns), "float32", "x")
    j, k = te.reduce_axis((0, columns)), te.reduce_axis((0, columns))
    top = te.compute((rows,), lambda i: te.max(x[i, j], j), "top")
    power = te.compute((rows, columns), lambda i, c: tirx.exp(x[i, c] - top[i]), "power")
    total = te.compute((rows,), lambda i: te.sum(power[i, k], k), "total")
    return [x, te.compute((rows, columns), lambda i, c: power[i, c] / total[i], "softmax")]


def _layer_norm(rows: int, columns: int) -> list[te.Tensor]:
    x = te.placeholder((rows, columns), "float32", "x")
    scale, shift = (te.placeholder((columns,), "float32", name) for name in ("scale", "shift"))
    j, k = te.reduce_axis((0, columns)), te.reduce_axis((0, columns))
    total = te.compute((rows,), lambda i: te.sum(x[i, j], j), "total")
    centred = te.compute((rows, columns), lambda i, c: x[i, c] - total[i] * (1.0 / columns), "centred")
    square = te.compute((rows,), lambda i: te.sum(centred[i, k] * centred[i, k], k), "square")
    result = te.compute(
        (rows, columns),
        lambda i, c: centred[i, c] * tirx.rsqrt(square[i] * (1.0 / columns) + 1e-5) * scale[c] + shift[c],
        "normal",
    )
    return [x, scale, shift, result]


def _row_sum(rows: int, columns: int) -> list[te.Tensor]:
    x = te.placeholder((rows, columns), "float32", "x")
    j = te.reduce_axis((0, columns))
    return [x, te.compute((rows,), lambda i: te.sum(x[i, j], j), "total")]


def _max_pool(h: int, w: int, c: int, k: int, stride: int) -> list[te.Tensor]:
    x = te.placeholder((1, h, w, c), "float32", "x")
    dy, dx = te.reduce_axis((0, k)), te.reduce_axis((0, k))
    shape = (1, (h - k) // stride + 1, (w - k) // stride + 1, c)
    return [
        x,
        te.compute(shape, lambda n, y, z, f: te.max(x[n, y * stride + dy, z * stride + dx, f], [dy, dx]), "pooled"),
    ]


def _of(name: str, problem: Problem, **reference: Any) -> Case:
    return Case(name, problem.build, reference)


def cases(small: bool) -> tuple[Case, ...]:
    """All of them.

    Parameters
    ----------
    small : bool
        In sizes that the CPU device computes in a moment; otherwise as in networks.
    """

    def size(full: int, little: int) -> int:
        return little if small else full

    contract = {"op": "contract", "spec": "bmk,bkn->bmn"}
    image = {"op": "convolution", "spec": "nyxcij,ijcf->nyxf", "axes": [1, 2]}
    # As in BERT, a vision transformer of 197 patches, ResNet, ResNeXt and EfficientNet.
    m, wide, head = size(384, 40), size(768, 48), size(12, 2)
    h, c = size(56, 9), size(64, 8)
    return (
        _of("gemm", product(1, m, wide, wide, "float32"), **contract),
        _of("gemm_fp16", product(1, m, 4 * wide, wide, "float16"), **contract),
        _of("batched_gemm", product(head, m, m, size(64, 16), "float32"), **contract),
        _of("batched_gemm_fp16_ragged", product(head, size(197, 37), size(197, 37), 64, "float16"), **contract),
        _of("gemv", product(1, 1, size(4096, 96), size(1024, 64), "float32"), **contract),
        _of("convolution", convolution(1, h, h, c, c, 3), **image, k=3, stride=1),
        _of("convolution_strided", convolution(1, h, h, 2 * c, 2 * c, 3, 2), **image, k=3, stride=2),
        _of(
            "convolution_grouped", grouped(size(32, 4), 1, 8, h, h, 8, 3),
            op="convolution", spec="gbcyxij,gocij->gboyx", axes=[3, 4], k=3, stride=1,
        ),
        _of(
            "depthwise", depthwise(1, h, h, size(144, 12), 5, 1),
            op="convolution", spec="nyxcij,ijc->nyxc", axes=[1, 2], k=5, stride=1,
        ),
        Case("softmax", lambda: _softmax(head * m, m), {"op": "softmax"}),
        Case("layer_norm", lambda: _layer_norm(size(4096, 40), wide), {"op": "layer_norm"}),
        Case("row_sum", lambda: _row_sum(size(4096, 40), size(1000, 100)), {"op": "sum", "axes": [1]}),
        _of("mean", mean(1, h, h, 4 * c), op="mean", axes=[1, 2]),
        Case("max_pool", lambda: _max_pool(2 * h, 2 * h, c, 3, 2), {"op": "max_pool", "k": 3, "stride": 2}),
    )  # fmt: skip
