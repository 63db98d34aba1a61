"""Precision of products: fp16 operands with fp32 accumulation for GEMM and convolution, fp32 elsewhere (paper §7.1); or
products of fp32 operands in TF32.

::

    O[v] = sum(A[f] * B[h])   →   A16[u] = half(A[u]);  B16[u] = half(B[u]);  O[v] = sum(float(A16[f]) * float(B16[h]))

The conversions are one-relies-on-one TEs of their own, so the vertical transformation puts them where they are cheap;
constants are converted at compile time. TF32 changes no expression: numbers of it are stored as fp32, and what rounds
them is how a stage multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from tvm import te, tirx

from souffle.alone import one_at_a_time
from souffle.analysis import Analysis, analyze
from souffle.decision import Decision, Refused
from souffle.program import TE, Loop, Origin, Tensor, TEProgram, parts_of
from souffle.program.names import NameSupply
from souffle.program.products import TF32, TF32X3
from souffle.program.shared import OncePer
from souffle.transform.handles import read
from souffle.transform.narrow import conversion
from souffle.tvm_compat import PrimExpr, compute_op, is_load, load_indices, load_tensor, map_bodies, reduce_node

__all__ = ["mixed_precision", "tensor_float"]

_SAID = {
    TF32: "on tensor cores its factors are in TF32, with fp32 accumulation",
    TF32X3: "on tensor cores its factors are sums of two numbers in TF32, with fp32 accumulation",
}


@one_at_a_time
def mixed_precision(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Convert the operands of sums of products to fp16.

    Parameters
    ----------
    program : TEProgram

    Returns
    -------
    program : TEProgram
    decisions : tuple of Decision
        One for each compute-intensive TE.
    """
    analysis = analyze(program)
    decisions: list[Decision] = []
    halves: dict[Tensor, Tensor] = {}
    constants: dict[Tensor, np.ndarray] = {}
    names = NameSupply(tensor.name for tensor in program.tensors())
    tes = []
    for te_ in program.tes:
        if not isinstance(te_, TE) or not analysis.is_compute_intensive(te_):
            tes.append(te_)
            continue
        refusal = _refusal(te_)
        reason = "fp16 operands, fp32 accumulation" if refusal is None else refusal.reason
        decisions.append(Decision("precision", te_.name, refusal is None, reason))
        if refusal is not None:
            tes.append(te_)
            continue
        for tensor in te_.inputs:
            if tensor in halves:
                continue
            name = names.fresh(f"{tensor.name}_fp16")
            half = Tensor(name, tensor.shape, "float16")
            halves[tensor] = half
            if tensor in program.constants:
                constants[half] = program.constants[tensor].astype(np.float16)
            else:
                tes.append(_cast(tensor, half, te_.origin))
        tes.append(_with_half_operands(te_, halves))
    return (program.with_tes(tes, constants=constants) if halves else program), tuple(decisions)


@one_at_a_time
def tensor_float(program: TEProgram, products: str) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Let sums of products of fp32 operands be computed in TF32 where the scheduler has a rule for it, in loops, too.

    Parameters
    ----------
    program : TEProgram
    products : str
        ``TF32`` or ``TF32X3`` of :mod:`souffle.program.products`.

    Returns
    -------
    program : TEProgram
    decisions : tuple of Decision
        One for each compute-intensive TE.
    """
    return replace(program, products=products), tuple(_said(analyze(program), products))


def _said(analysis: Analysis, products: str) -> Iterator[Decision]:
    for item in analysis.program.tes:
        if isinstance(item, Loop):
            yield from _said(analysis.inside(item), products)
            continue
        for part in parts_of(item):
            if isinstance(part, TE) and analysis.is_compute_intensive(part):
                refusal = _refusal(part)
                yield Decision("precision", part.name, refusal is None, refusal.reason if refusal else _SAID[products])


def _refusal(te_: TE) -> Refused | None:
    """Why the operands of a TE stay as they are, or ``None``."""
    reduce = reduce_node(te_.body)
    if reduce is None or len(te_.op.body) != 1:
        return Refused("it is no reduction to one tensor")
    source = reduce.source[0]
    if not (isinstance(source, tirx.Mul) and is_load(source.a) and is_load(source.b)):
        return Refused("its reduction is not over products of two operands")
    dtypes = {tensor.dtype for tensor in (*te_.inputs, te_.output)}
    if dtypes != {"float32"}:
        return Refused(f"its tensors are {', '.join(sorted(dtypes))}, not float32")
    return None


def _cast(tensor: Tensor, half: Tensor, origin: Origin) -> TE:
    cast_origin = Origin(origin.nodes, tuple("Cast" for _ in origin.nodes), f"{origin.group}_cast")
    return conversion(tensor, half, cast_origin)


_halved: OncePer[tuple[te.ComputeOp, tuple[te.Tensor, ...]]] = OncePer()


def _with_half_operands(te_: TE, halves: dict[Tensor, Tensor]) -> TE:
    op, placeholders = _halved(te_.op, lambda: _halve(te_))
    return replace(te_, op=op, placeholders=placeholders, inputs=tuple(halves[tensor] for tensor in te_.inputs))


def _halve(te_: TE) -> tuple[te.ComputeOp, tuple[te.Tensor, ...]]:
    """The expression of a TE over fp16 operands."""
    new = tuple(te.placeholder(old.shape, "float16", name=old.op.name) for old in te_.placeholders)

    def rewrite(load: PrimExpr) -> PrimExpr:
        position = next(n for n, old in enumerate(te_.placeholders) if old.same_as(load_tensor(load)))
        return read(new[position], load_indices(load)).astype("float32")

    return compute_op(te_.name, te_.axes, map_bodies(te_.op.body, rewrite), te_.op.tag), new
