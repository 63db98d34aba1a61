"""Networks whose tensors stay in shared memory, for the tests of those who keep them there and of those who check it.

On sm_86, of which no cost model knows, whatever can stay does.
"""

from __future__ import annotations

import numpy as np
from tvm import te

import souffle.pipeline
from souffle.codegen.assemble import CompiledKernels
from souffle.decision import Decision
from souffle.program import Tensor, TEProgram
from tests.testlib import Builder

ARCH = "sm_86"


def weight(b: Builder, rows: int, columns: int) -> Tensor:
    """Small whole numbers, whose products and sums are exact in every order."""
    return b.constant(np.random.default_rng(rows + columns).integers(-2, 3, (rows, columns)).astype(np.float32))


def residual(rows: int = 128, columns: int = 128) -> TEProgram:
    """``t = relu(x W)``, ``c = t W + t``, ``y = c W + c + t``: the last product's tiles find those of `t`."""
    b = Builder()
    x = b.input(rows, 96)
    t = b.relu(b.matmul(x, weight(b, 96, columns)))
    c = b.plus(b.matmul(t, weight(b, columns, columns)), t)
    return b.program(b.plus(b.plus(b.matmul(c, weight(b, columns, columns)), c), t))


def narrow() -> TEProgram:
    """Three products of few columns: a tile has whole rows, so that the next product's rows are of the same block."""
    b = Builder()
    x = b.input(192, 16)
    t = b.plus(b.matmul(b.relu(x), weight(b, 16, 16)), x)
    c = b.plus(b.matmul(t, weight(b, 16, 16)), t)
    return b.program(b.map(lambda v: v * 0.5, b.matmul(c, weight(b, 16, 16))))


def gated(rows: int = 64, columns: int = 96) -> TEProgram:
    """Row sums that all rows need, by which each row is then scaled: nobody else reads the rows."""
    b = Builder()
    return b.program(_scaled_by_gates(b, b.input(rows, columns)))


def gated_beside_a_product(rows: int = 128, columns: int = 256) -> TEProgram:
    """The same behind a product that nobody needs before what comes of the rows."""
    b = Builder()
    x, y = b.input(rows, columns), b.input(128, 256)
    product = b.matmul(y, weight(b, 256, 128))
    scaled = _scaled_by_gates(b, x)
    return b.program(scaled, b.matmul(b.reshape(b.reduce(scaled, 1), 1, rows), product))


def _scaled_by_gates(b: Builder, x: Tensor) -> Tensor:
    rows, _ = x.shape
    t = b.tanh(x)
    sums = b.reduce(t, 1)
    gate = b.matmul(b.reshape(sums, 1, rows), weight(b, rows, rows))
    gates = b.relu(b.reshape(gate, rows))
    return b.add(lambda p, q: te.compute(p.shape, lambda i, j: p(i, j) * q(i)), t, gates, name="scaled")


def compiled(program: TEProgram, **options: object) -> CompiledKernels:
    """Compiled without a CUDA compiler, with values proven."""
    given = {"level": "V4", "arch": ARCH, "cubin": False, "verify": "values", **options}
    return souffle.pipeline.compile_cuda(program, **given)


def kept(net: CompiledKernels) -> list[Decision]:
    """The tensors that stay."""
    return [d for d in net.plan.decisions if d.stage == "resident" and d.accepted]
