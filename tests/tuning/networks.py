"""A small program that searches are tried with: ``python -m tests.tuning.networks FOLDER TRIALS [SEED]`` has one."""

from __future__ import annotations

import sys
from pathlib import Path

from tvm import te

import souffle

APART = {"level": "V3", "reductions": "one_phase"}
"""The product and the sum of its rows are two stages then."""


def gemm(rows: int = 64, inner: int = 48, columns: int = 96) -> souffle.TEProgram:
    """A product with a bias behind it, and a sum of its rows."""
    a, b = te.placeholder((rows, inner), name="a"), te.placeholder((inner, columns), name="b")
    bias = te.placeholder((columns,), name="bias")
    k, c = te.reduce_axis((0, inner), name="k"), te.reduce_axis((0, columns), name="c")
    product = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
    shifted = te.compute((rows, columns), lambda i, j: product[i, j] + bias[j], name="shifted")
    total = te.compute((rows,), lambda i: te.sum(shifted[i, c], axis=c), name="total")
    return souffle.from_te([a, b, bias], [shifted, total])


def tuned(folder: str | Path, trials: int, seed: int = 0) -> None:
    """Write a log of it."""
    options = {"arch": "sm_90", "on": "here", "measure": "none", **APART}
    souffle.tune(gemm(), trials=trials, log=folder, seed=seed, **options)


if __name__ == "__main__":
    tuned(sys.argv[1], *map(int, sys.argv[2:]))
