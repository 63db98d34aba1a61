"""How products of fp32 numbers may be computed where they are summed: words that the data and the rules share."""

from __future__ import annotations

from tvm import tirx

from souffle.program.te import TE, ExternTE
from souffle.tvm_compat import loads, reduce_node, same_expression

__all__ = ["IEEE", "PRODUCTS", "TF32", "TF32X3", "sums_products"]

IEEE = "ieee"
"""Each in fp32, as IEEE 754 has it."""

TF32 = "tf32"
"""Of factors that are rounded to TF32: to 11 bits, as fp16 has, with the exponents of fp32."""

TF32X3 = "tf32x3"
"""Of factors that are sums of two numbers in TF32, without the product of the small ones: about as exact as fp32.

An infinite factor makes it NaN, and so does one beyond 3.4011e38, the largest that TF32 rounds to a number."""

PRODUCTS = (IEEE, TF32X3, TF32)
"""All of them, the most exact first."""


def sums_products(te_: TE | ExternTE) -> bool:
    """Whether a TE adds products of two different factors in fp32."""
    if isinstance(te_, ExternTE) or len(te_.op.body) != 1 or te_.output.dtype != "float32":
        return False
    reduce = reduce_node(te_.op.body[0])
    term = None if reduce is None else reduce.source[0]
    if not isinstance(term, tirx.Mul) or not (loads(term.a) and loads(term.b)):
        return False
    return not same_expression(term.a, term.b)
