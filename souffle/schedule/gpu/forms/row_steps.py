"""What is done to the rows of a product: passes over their elements, and reductions of them to a value for each row."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from souffle.tvm_compat import PrimExpr

__all__ = ["RowReduction", "RowStep"]


@dataclass(frozen=True, eq=False)
class RowReduction:
    """One value for each row of the first product.

    Attributes
    ----------
    name : str
        The reduction block's name.
    result : Var
        What stands for it in later expressions.
    combine : type
        ``tirx.Add``, ``tirx.Mul``, ``tirx.Max`` or ``tirx.Min``.
    initial : expression
        Its identity.
    term : expression
        What an element contributes, over the axes, the element and earlier results.
    """

    name: str
    result: tirx.Var
    combine: type
    initial: PrimExpr
    term: PrimExpr


@dataclass(frozen=True, eq=False)
class RowStep:
    """A pass over the elements of rows.

    Attributes
    ----------
    update : expression or None
        What each element becomes first, over the axes, the element and results of earlier steps.
    reductions : tuple of RowReduction
        Of the elements as they are then; none reads another's result.
    """

    update: PrimExpr | None
    reductions: tuple[RowReduction, ...]
