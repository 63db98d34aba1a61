"""Kernels and functions in another form than the one in which they run, of which the same is proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import tvm_ffi
from tvm import tirx

from souffle.certificate import Counterexample
from souffle.verify.expressions import Undecided

__all__ = ["FormsOfConstants", "OtherForms", "launch_of", "other_forms", "with_launch"]


def launch_of(func: tirx.PrimFunc) -> tuple[list[tirx.AttrStmt], tirx.Stmt]:
    """The axes of blocks and threads around a kernel's body, the outermost first, and the body."""
    launch: list[tirx.AttrStmt] = []
    body = func.body
    while isinstance(body, tirx.AttrStmt) and body.attr_key == "thread_extent":
        launch.append(body)
        body = body.body
    return launch, body


def with_launch(func: tirx.PrimFunc, launch: Sequence[tirx.AttrStmt], body: tirx.Stmt) -> tirx.PrimFunc:
    """A kernel with another body inside of its axes."""
    for one in reversed(launch):
        body = tirx.AttrStmt(one.node, one.attr_key, one.value, body)
    return func.with_body(body)


class KernelReader(Protocol):
    """Reads one kernel, and gives its other form.

    Attributes
    ----------
    findings : list
        Counterexamples, and what is undecided.
    changed : dict of str to PrimFunc
        The other forms of functions that the kernel calls.
    """

    findings: list[Counterexample | Undecided]
    changed: dict[str, tirx.PrimFunc]

    def whole(self) -> tirx.PrimFunc:
        """The kernel in its other form; raises `Undecided` if it has none that is known."""


_Reader = TypeVar("_Reader", bound=KernelReader)


@dataclass(frozen=True, eq=False)
class OtherForms(Generic[_Reader]):
    """Kernels and functions, some of them in another form.

    Attributes
    ----------
    kernels, functions : mapping of str to PrimFunc
    readers : mapping of str to reader
        Of the kernels that have another form, or should have.
    """

    kernels: Mapping[str, tirx.PrimFunc]
    functions: Mapping[str, tirx.PrimFunc]
    readers: Mapping[str, _Reader]

    @property
    def findings(self) -> dict[str, Sequence[Counterexample | Undecided]]:
        """By the kernels' names."""
        return {name: reader.findings for name, reader in self.readers.items()}


@dataclass(frozen=True, eq=False)
class FormsOfConstants:
    """Kernels and functions in another form, that is the same where some memory holds constants.

    Attributes
    ----------
    kernels, functions : mapping of str to PrimFunc
    findings : mapping of str to sequence
        By the kernels' names: counterexamples, and what is undecided.
    constants : mapping of str to frozenset of int
        By the kernels' names: parameters whose memory must hold constants.
    """

    kernels: Mapping[str, tirx.PrimFunc]
    functions: Mapping[str, tirx.PrimFunc]
    findings: Mapping[str, Sequence[Counterexample | Undecided]]
    constants: Mapping[str, frozenset[int]]


def other_forms(
    kernels: Mapping[str, tirx.PrimFunc],
    functions: Mapping[str, tirx.PrimFunc],
    reader_of: Callable[[str, tirx.PrimFunc], _Reader | None],
) -> OtherForms[_Reader]:
    """Kernels in the form that a reader gives each, as far as there is one.

    Parameters
    ----------
    kernels, functions : mapping of str to PrimFunc
        By their names; the functions are those that the kernels call.
    reader_of : callable
        The reader of a kernel by its name; ``None`` for one that stays as it is.
    """
    changed_kernels, changed = dict(kernels), dict(functions)
    readers: dict[str, _Reader] = {}
    for name, kernel in kernels.items():
        reader = reader_of(name, kernel)
        if reader is None:
            continue
        readers[name] = reader
        try:
            changed_kernels[name] = reader.whole()
        except Undecided as reason:
            reader.findings.append(reason)
            continue
        for called, form in reader.changed.items():
            before = changed.get(called)
            other = before is not None and before is not functions.get(called)
            if other and not tvm_ffi.structural_equal(before, form):
                reader.findings.append(Undecided(f"{called}, which two kernels call in two ways"))
            changed[called] = form
    return OtherForms(changed_kernels, changed, readers)
