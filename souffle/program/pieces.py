"""Tensors that are pieces of another one, behind each other: operators that move them, or say where they lie.

An operator of the two kinds copies, so that it is right wherever it is computed. What places tensors in memory may give
the pieces the memory of the whole instead (:mod:`souffle.codegen.in_place`). They are no TEs, for nothing is to be put
into what reads them: a product would look for each element in all pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from souffle.program.shared import OncePer
from souffle.program.te import ExternTE, Origin, Tensor
from souffle.tvm_compat import PrimExpr, primfunc_from_tensors

__all__ = ["ALIGNMENT", "piece_te", "pieces_of", "stack_te"]

ALIGNMENT = 64
"""Bytes that a piece has to be a multiple of to lie in its whole: what LLVM's code relies on of every tensor."""

_FIRST_PIECE = "souffle.first_piece"
"""An attribute of the function: the number of the piece that it takes out, or -1 where it puts all together."""
_functions: OncePer[tirx.PrimFunc] = OncePer()


def stack_te(name: str, pieces: Sequence[Tensor], origin: Origin) -> ExternTE:
    """An operator that puts tensors of one shape and type behind each other, along a new first axis."""
    first = pieces[0]
    whole = Tensor(name, (len(pieces), *first.shape), first.dtype)
    key = (len(pieces), first.shape, first.dtype)
    return ExternTE(name, _functions(key, lambda: _stacking(*key)), tuple(pieces), (whole,), origin)


def piece_te(whole: Tensor, number: int, piece: Tensor, origin: Origin) -> ExternTE:
    """An operator that takes one tensor out of such a stack."""
    key = ("piece", number, whole.shape, whole.dtype)
    func = _functions(key, lambda: _taking(number, whole))
    return ExternTE(piece.name, func, (whole,), (piece,), origin)


def pieces_of(operator: object) -> tuple[Tensor, tuple[tuple[Tensor, int], ...]] | None:
    """The whole that an operator is about, and of each piece that it moves at which byte of the whole it lies.

    ``None`` where it is none of these operators.
    """
    attrs = operator.func.attrs if isinstance(operator, ExternTE) else None
    number = None if attrs is None else attrs.get(_FIRST_PIECE)
    if number is None:
        return None
    if int(number) >= 0:
        (piece,) = operator.outputs
        return operator.inputs[0], ((piece, int(number) * piece.nbytes),)
    return operator.outputs[0], tuple((piece, at * piece.nbytes) for at, piece in enumerate(operator.inputs))


def _stacking(count: int, shape: tuple[int, ...], dtype: str) -> tirx.PrimFunc:
    parts = [te.placeholder(shape, dtype, name=f"in{number}") for number in range(count)]

    def element(number: tirx.Var, *indices: tirx.Var) -> PrimExpr:
        value = parts[-1](*indices)
        for last, part in reversed(list(enumerate(parts[:-1]))):
            value = tirx.if_then_else(number <= last, part(*indices), value)
        return value

    whole = te.compute((count, *shape), element, name="t0")
    return primfunc_from_tensors([*parts, whole], "stage").with_attr(_FIRST_PIECE, -1)


def _taking(number: int, whole: Tensor) -> tirx.PrimFunc:
    source = te.placeholder(whole.shape, whole.dtype, name="in0")
    piece = te.compute(whole.shape[1:], lambda *indices: source(number, *indices), name="t0")
    return primfunc_from_tensors([source, piece], "stage").with_attr(_FIRST_PIECE, number)
