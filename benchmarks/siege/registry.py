"""The register of forms of stages, and what they are written with."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from benchmarks.siege.body import Body
from benchmarks.siege.setting import Formula, Read, Setting, Stage, defined

__all__ = ["FORMS", "WARP", "ZERO", "Form", "body_of", "form", "staged", "whole"]

Form = Callable[[Setting], Stage | None]
FORMS: dict[str, tuple[float, Form]] = {}
"""By name, with weights."""

ZERO = tirx.FloatImm("float32", 0.0)
WARP = 32


def form(weight: float) -> Callable[[Form], Form]:
    """Register a form: ``None`` says that a setting does not suit it."""

    def register(one: Form) -> Form:
        FORMS[one.__name__] = (weight, one)
        return one

    return register


def body_of(s: Setting, reads: int = 1, dtypes: tuple[str, ...] = (), scratch: int = 0) -> Body:
    """A function over so many inputs, tensors of its own in the workspace, and an output."""
    dtypes = dtypes or ("float32",) * reads
    return Body(s.name, [*((s.count, d) for d in dtypes), *(((s.count, "float32"),) * (scratch + 1))])


def staged(
    s: Setting,
    b: Body,
    name: str,
    reads: tuple[Read, ...],
    element: Formula | None,
    *,
    own: bool = True,
    scratch: int = 0,
) -> Stage:
    """The stage of a body that is written, defined by what each element of the output is."""
    definition = None if element is None else defined(s, [r.dtype for r in reads], element)
    return whole(s, b, name, reads, definition, own=own, scratch=scratch)


def whole(
    s: Setting,
    b: Body,
    name: str,
    reads: tuple[Read, ...],
    definition: tirx.PrimFunc | None,
    *,
    own: bool = True,
    scratch: int = 0,
) -> Stage:
    """As :func:`staged`, with a definition that is made otherwise."""
    return Stage(b.function(), s, reads, scratch, definition, own, name, b.shared_bytes, b.static_bytes)
