"""Fused TEs: several statements that are computed together, for what one ``te.ComputeOp`` cannot hold (paper §6.2).

A reduction must be the whole body of a ``te.ComputeOp``, and a ``te.ComputeOp`` without reduction defines one tensor.
So a GEMM with the bias and GELU behind it, or a cell that gives both its state and its output, are several *parts*, and
one TE all the same: a thread computes an element of every part and keeps what passes between them in registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from souffle.program.te import TE, Computed, InTiles, Origin, ProgramError, Tensor

__all__ = ["FusedTE", "fuse", "parts_of", "with_parts"]


@dataclass(frozen=True, eq=False)
class FusedTE(Computed):
    """Several TEs that stand as one.

    At most one part is a reduction. From it on, or without one from the first part on, all have the same number of
    elements, and each reads tensors of others at one element for one of its own, each at another
    (``transform/vertical/epilogue.py`` decides it from the access maps). What stands before the reduction is its
    prologue: the reduction alone reads it, and the schedule decides whether an element is kept or computed again.

    Attributes
    ----------
    name : str
        That of its last part.
    parts : tuple of TE
        At least two, in topological order.
    inputs : tuple of Tensor
        What the parts read and do not define, in order of the first read.
    outputs : tuple of Tensor
        What others need of the tensors that the parts define, in order of definition.
    origin : Origin
    """

    name: str
    parts: tuple[TE, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    origin: Origin

    @cached_property
    def internal(self) -> tuple[Tensor, ...]:
        """What passes between the parts alone."""
        return tuple(t for part in self.parts for t in part.outputs if t not in self.outputs)

    @property
    def prologue(self) -> tuple[TE, ...]:
        """The parts before the reduction; none where it comes first or there is none."""
        first = next((number for number, part in enumerate(self.parts) if part.is_reduction), 0)
        return self.parts[:first]

    @cached_property
    def wiring(self) -> tuple:
        """What it computes without names: for each part its ``op`` and where it reads; then which tensors are outputs.

        An integer is an input of the whole; a pair is a part and one of its outputs. Equal for equal layers.
        """
        source: dict[Tensor, object] = {tensor: position for position, tensor in enumerate(self.inputs)}
        steps = []
        for number, part in enumerate(self.parts):
            steps.append((part.op, tuple(source[tensor] for tensor in part.inputs)))
            source.update({tensor: (number, position) for position, tensor in enumerate(part.outputs)})
        return (*steps, tuple(source[tensor] for tensor in self.outputs))

    @property
    def placement(self) -> InTiles | None:
        """That of its parts, which are computed together."""
        return next((part.placement for part in self.parts if part.placement is not None), None)

    @property
    def is_reduction(self) -> bool:
        """Whether one of its parts is one."""
        return any(part.is_reduction for part in self.parts)

    def check(self) -> None:
        """Check the rules that need no access map.

        Raises
        ------
        ProgramError
            Naming the part that breaks one.
        """
        where = f"fused TE {self.name} ({self.origin})"
        if len(self.parts) < 2:
            raise ProgramError(f"{where} has less than two parts")
        before = {tensor for part in self.prologue for tensor in part.outputs}
        first, *rest = self.parts[len(self.prologue) :]
        defined = set(first.outputs)
        for part in rest:
            if part.outputs[0].size != first.outputs[0].size:
                raise ProgramError(f"{where}: part {part.name} has {part.outputs[0].size} elements, others have not")
            if part.is_reduction:
                raise ProgramError(f"{where}: part {part.name} is a second reduction")
            if not defined.intersection(part.inputs) or before.intersection(part.inputs):
                raise ProgramError(f"{where}: part {part.name} reads no part before it, or one before the reduction")
            defined.update(part.outputs)
        if before.intersection(self.outputs) or not before.issubset(t for part in self.parts for t in part.inputs):
            raise ProgramError(f"{where}: a part before the reduction is read by other than the reduction")
        if (self.inputs, self.outputs) != _ends(self.parts, self.outputs):
            raise ProgramError(f"{where}: its inputs or outputs are not those of its parts")

    def __repr__(self) -> str:
        return f"FusedTE({', '.join(part.name for part in self.parts)})"


def fuse(parts: Sequence[TE], needed: Iterable[Tensor]) -> FusedTE:
    """Some TEs as one.

    Parameters
    ----------
    parts : sequence of TE
        In topological order.
    needed : iterable of Tensor
        Tensors that others need; those that no part defines are passed over.

    Raises
    ------
    ProgramError
        If they break a rule of fused TEs that needs no access map.
    """
    inputs, outputs = _ends(parts, frozenset(needed))
    made = FusedTE(
        parts[-1].name, tuple(parts), inputs, outputs, parts[-1].origin.merged(*(p.origin for p in parts[-2::-1]))
    )
    made.check()
    return made


def parts_of(item: object) -> tuple:
    """The parts of a fused TE; anything else alone."""
    return item.parts if isinstance(item, FusedTE) else (item,)


def with_parts(item: TE | FusedTE, parts: Sequence[TE]) -> TE | FusedTE:
    """`item` of other parts, as many, that define the same tensors."""
    if not isinstance(item, FusedTE):
        return parts[0]
    inside = {t for part in parts for t in part.outputs}
    inputs = tuple(dict.fromkeys(t for part in parts for t in part.inputs if t not in inside))
    return replace(item, parts=tuple(parts), inputs=inputs)


def _ends(parts: Sequence[TE], needed: Iterable[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    defined = [tensor for part in parts for tensor in part.outputs]
    inside = set(defined)
    read = dict.fromkeys(t for part in parts for t in part.inputs if t not in inside)
    return tuple(read), tuple(t for t in defined if t in needed)
