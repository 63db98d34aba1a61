"""The element types that are held as bytes, by name; compiler and runtime take them from here."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    # It enters the names of these types, and bfloat16, into NumPy; a runtime alone may do without it.
    import ml_dtypes  # noqa: F401

__all__ = ["SMALL_TYPES"]

SMALL_TYPES = frozenset(
    ["int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e8m0fnu"]
    + [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")]
)
"""What tensors hold as ``uint8``, a byte for each element; a network's inputs and outputs may be arrays of them."""
