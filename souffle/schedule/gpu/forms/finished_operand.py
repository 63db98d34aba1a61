"""A left operand that is a copy of memory, scaled and shifted: copied by tiles, finished where fragments are taken.

A left operand that values of rows are applied to is no plain memory, so that asynchronous copies cannot bring it. If it
is an element of 16 bits times a value of the element's row, plus another perhaps (``forms/row_values.py``), then that
element can be copied, and each thread scales and shifts those of its fragments, two in an instruction::

    left[m, k] = copy[m, k] * scale[m] + shift[m]        all in fp16; scale and shift may differ from chunk to chunk
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import TensorLoad

from souffle.decision import Refused
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.row_values import RowValue
from souffle.schedule.gpu.forms.two_operands import Operand
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["FinishedOperand", "finished_operand"]


@dataclass(frozen=True, eq=False)
class FinishedOperand:
    """How an operand is finished.

    Attributes
    ----------
    plain : Operand
        What is copied.
    scale : RowValue
    shift : RowValue or None
        ``None`` where nothing is added.
    """

    plain: Operand
    scale: RowValue
    shift: RowValue | None


def finished_operand(problem: Contraction) -> FinishedOperand | Refused:
    """The left operand of a contraction as a copy and what is made of it; or why it is none."""
    value = problem.left.value
    scaled, added = (value.a, value.b) if isinstance(value, tirx.Add) else (value, None)
    if not isinstance(scaled, tirx.Mul) or dtype_of(value) != "float16":
        return Refused("its left operand is no element of 16 bits times a value of its row, plus another")
    element, scale = scaled.a, _row_value(problem, scaled.b)
    shift = None if added is None else _row_value(problem, added)
    if not isinstance(element, TensorLoad) or scale is None or (shift is None and added is not None):
        return Refused("its left operand is scaled or shifted by what is no value of its row")
    if shift is not None and shift.chunks not in (None, scale.chunks):
        return Refused("its shift is of chunks of rows, its scale is not")
    return FinishedOperand(replace(problem.left, value=element), scale, shift)


def _row_value(problem: Contraction, expression: PrimExpr) -> RowValue | None:
    return next((value for value in problem.row_values.values if value.var.same_as(expression)), None)
