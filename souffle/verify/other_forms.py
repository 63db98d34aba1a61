"""Functions in another form than the one in which kernels call them, of which the same is proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tvm_ffi
from tvm import tirx

from souffle.verify.expressions import Undecided

__all__ = ["taken_over"]


def taken_over(
    changed: dict[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc], forms: Mapping[str, tirx.PrimFunc]
) -> Iterator[Undecided]:
    """Put the forms that a kernel gives some functions into `changed`; what another kernel gave another one is told.

    Parameters
    ----------
    changed : dict of str to PrimFunc
        All functions by their names, with the forms that other kernels gave some.
    functions : mapping of str to PrimFunc
        The same as they are called.
    forms : mapping of str to PrimFunc
    """
    for name, form in forms.items():
        before = changed.get(name)
        other = before is not None and before is not functions.get(name)
        if other and not tvm_ffi.structural_equal(before, form):
            yield Undecided(f"{name}, which two kernels call in two ways")
        changed[name] = form
