"""Asking for memory ahead of its use.

What a processor asks for by itself ends with a page. Weights of a network lie far away, since all others have passed
the cache since they were read last, and a product waits for them at the beginning of each page. Nor does it see that
tiles go down many rows, of data that are to be read and of results, each of them in a page of its own.
"""

from __future__ import annotations

from tvm import tirx

__all__ = ["prefetch"]

_DATA = 1
_SECOND_LEVEL = 2
"""What is asked for is as large as the first-level cache, and is not to push out of it what is used now."""


def prefetch(element: tirx.BufferLoad, *, write: bool = False) -> tirx.Stmt:
    """Ask for the line of an element, which need not be used after all.

    Parameters
    ----------
    element : BufferLoad
        It may lie outside of its buffer.
    write : bool
        Whether it is to be written: a line that is only read would be asked for once more.
    """
    how = (tirx.const(value, "int32") for value in (int(write), _SECOND_LEVEL, _DATA))
    return tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", tirx.address_of(element), *how))
