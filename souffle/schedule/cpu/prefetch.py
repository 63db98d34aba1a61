"""Asking for memory ahead of its use.

What a processor asks for by itself ends with a page. Weights of a network lie far away, since all others have passed
the cache since they were read last, and a product waits for them at the beginning of each page.
"""

from __future__ import annotations

from tvm import tirx

__all__ = ["prefetch"]

_READ, _DATA = 0, 1
_SECOND_LEVEL = 2
"""What is asked for is as large as the first-level cache, and is not to push out of it what is used now."""


def prefetch(element: tirx.BufferLoad) -> tirx.Stmt:
    """Ask for the line of an element, which need not be read after all."""
    how = (tirx.const(value, "int32") for value in (_READ, _SECOND_LEVEL, _DATA))
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", tirx.address_of(element), *how))
