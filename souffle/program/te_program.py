"""A whole model as tensor expressions: the data that every stage of the compiler works on (paper §3, §4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from souffle.counted_axes import Counts, check_counts
from souffle.program.evaluate import evaluate
from souffle.program.fused import FusedTE, parts_of
from souffle.program.loop import Loop
from souffle.program.printer import format_item
from souffle.program.products import IEEE
from souffle.program.shared import OncePer
from souffle.program.te import ELEMENT_TYPES, TE, ExternTE, ProgramError, Tensor
from souffle.tvm_compat import const_int

__all__ = ["Item", "TEProgram"]

Item = TE | FusedTE | ExternTE | Loop
"""What a program is a sequence of."""


@dataclass(frozen=True, eq=False)
class TEProgram:
    """A whole model: TEs in topological order.

    Attributes
    ----------
    inputs : tuple of Tensor
        ``input_names`` holds the model's own names for them.
    outputs : tuple of Tensor
        Each defined by a different output of a TE; never an input or a constant. One without elements has no TE.
    tes : tuple of TE, FusedTE, ExternTE or Loop
    constants : mapping of Tensor to array
        Weights, each with the shape and type of its tensor.
    products : str
        How sums of products of fp32 factors may be computed on a GPU, of :mod:`souffle.program.products`.
    small_types : mapping of str to str
        The element types, by their own names, of inputs and outputs that are of a small type and held as bytes.
    counts : mapping of str to tuple of (int, str)
        By the name of an output, its axes of which only the first positions are there, each with the name of the output
        that says how many (:mod:`souffle.counted_axes`). :meth:`run` cuts them, and does not give the counts.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    tes: tuple[Item, ...]
    constants: Mapping[Tensor, np.ndarray]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    name: str = field(default="main")
    products: str = IEEE
    small_types: Mapping[str, str] = field(default_factory=dict)
    counts: Counts = field(default_factory=dict)

    def __str__(self) -> str:
        """Its inputs, constants, TEs and outputs; the same for the same program in every run."""
        lines = [f"program {self.name}{'' if self.products == IEEE else f', products in {self.products}'}"]
        lines += [
            f"input  {tensor!r}{'' if name == tensor.name else f'   # {name}'}{self._notes(name)}"
            for name, tensor in zip(self.input_names, self.inputs, strict=True)
        ]
        lines += [f"const  {tensor!r}" for tensor in self.constants]
        for te_ in self.tes:
            lines += format_item(te_)
        lines += [
            f"output {tensor.name}{'' if name == tensor.name else f'   # {name}'}{self._notes(name)}"
            for name, tensor in zip(self.output_names, self.outputs, strict=True)
        ]
        return "\n".join(lines)

    def _notes(self, name: str) -> str:
        small = f"   # of {self.small_types[name]}" if name in self.small_types else ""
        return small + "".join(f"   # axis {k} is as long as {count} says" for k, count in self.counts.get(name, ()))

    def run(self, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run every TE on the CPU, one after another: the reference that the compiler is held to.

        Parameters and errors as for :func:`souffle.program.evaluate.evaluate`.
        """
        return evaluate(self, inputs)

    @cached_property
    def producers(self) -> dict[Tensor, Item]:
        """The TE that defines each tensor; inputs and constants have none."""
        return {tensor: te_ for te_ in self.tes for tensor in te_.outputs}

    @cached_property
    def consumers(self) -> dict[Tensor, tuple[Item, ...]]:
        """The TEs that read each tensor, in program order; tensors that are not read have an empty entry."""
        table: dict[Tensor, list[Item]] = {t: [] for t in self.tensors()}
        for te_ in self.tes:
            for tensor in dict.fromkeys(te_.inputs):
                table[tensor].append(te_)
        return {tensor: tuple(tes) for tensor, tes in table.items()}

    def tensors(self) -> Iterator[Tensor]:
        """Inputs, constants, then what the TEs define."""
        yield from self.inputs
        yield from self.constants
        for te_ in self.tes:
            yield from te_.outputs

    def expanded(self) -> TEProgram:
        """The same program with the parts of each fused TE in its place, in the bodies of loops too."""
        items: list[Item] = []
        for item in self.tes:
            if isinstance(item, Loop):
                items.append(item.with_body(tuple(part for inner in item.body for part in parts_of(inner))))
            else:
                items.extend(parts_of(item))
        return self if tuple(items) == self.tes else replace(self, tes=tuple(items))

    def body(self, loop: Loop) -> TEProgram:
        """The body of one of its loops as a program: what it reads are inputs; what is carried or collected are
        outputs."""
        inputs = (*loop.invariants, *(p.tensor for p in (*loop.indexed, *loop.carried)))
        needed = {c.value for c in (*loop.carried, *loop.collected)}
        outputs = tuple(t for item in loop.body for t in item.outputs if t in needed)
        names = tuple(t.name for t in inputs), tuple(t.name for t in outputs)
        return TEProgram(inputs, outputs, loop.body, {}, *names, loop.name, self.products)

    def with_tes(
        self,
        tes: Iterable[Item],
        *,
        constants: Mapping[Tensor, np.ndarray] | None = None,
    ) -> TEProgram:
        """A program of other TEs: sorted topologically, what no output needs dropped, and checked.

        Parameters
        ----------
        tes : iterable of TE, ExternTE or Loop
            In any order; ties keep the order given.
        constants : mapping, optional
            Constants to add to the present ones.
        """
        known = dict(self.constants) | dict(constants or {})
        ordered = _live_in_order(list(tes), self.outputs)
        read = {tensor for te_ in ordered for tensor in te_.inputs}
        kept = {tensor: array for tensor, array in known.items() if tensor in read}
        program = replace(self, tes=tuple(ordered), constants=kept)
        program.check()
        return program

    def check(self) -> None:
        """Check the program's own rules.

        Raises
        ------
        ProgramError
            Naming the first TE and tensor that break one: unique names, definitions before uses, matching shapes and
            types, types that tensors can hold, outputs defined by TEs.
        """
        for tensor in (*self.inputs, *self.constants):
            _check_type(tensor, "an input or a constant")
        defined: set[Tensor] = set(self.inputs) | set(self.constants)
        names = {tensor.name for tensor in defined}
        for te_ in self.tes:
            for tensor in te_.inputs:
                if tensor not in defined:
                    raise ProgramError(f"TE {te_.name} ({te_.origin}) reads {tensor}, which nothing before it defines")
            for part in parts_of(te_):
                if isinstance(part, TE):
                    _check_reads(part)
            if isinstance(te_, Loop):
                te_.check()
                self.body(te_).check()
            if isinstance(te_, FusedTE):
                te_.check()
            for tensor in (t for part in parts_of(te_) for t in part.outputs):
                if tensor in defined or tensor.name in names:
                    raise ProgramError(f"TE {te_.name} ({te_.origin}) defines {tensor} a second time")
                _check_type(tensor, f"defined by TE {te_.name} ({te_.origin})")
                names.add(tensor.name)
            defined.update(te_.outputs)
        for name, tensor in zip(self.output_names, self.outputs, strict=True):
            if tensor.size and tensor not in self.producers:
                raise ProgramError(f"output {name!r} is {tensor}, which no TE defines")
        pairs = zip(self.output_names, self.outputs, strict=True)
        try:
            check_counts(self.counts, {name: (tensor.shape, tensor.dtype) for name, tensor in pairs})
        except ValueError as error:
            raise ProgramError(str(error)) from error


def _check_type(tensor: Tensor, role: str) -> None:
    if tensor.dtype not in ELEMENT_TYPES:
        known = ", ".join(sorted(ELEMENT_TYPES))
        raise ProgramError(f"{tensor}, {role}, is of a type that tensors cannot hold; they hold {known}")


_read_as: OncePer[tuple[tuple[tuple[int, ...], str], ...]] = OncePer()


def _check_reads(te_: TE) -> None:
    """Each placeholder has the shape and type of the tensor that it stands for."""
    declared = _read_as(te_.op, lambda: tuple((tuple(map(const_int, p.shape)), str(p.dtype)) for p in te_.placeholders))
    for (shape, dtype), tensor in zip(declared, te_.inputs, strict=True):
        if shape != tensor.shape or dtype != tensor.dtype:
            raise ProgramError(f"TE {te_.name} ({te_.origin}) reads {tensor} as {dtype}{shape}")


def _live_in_order(tes: list[Item], outputs: Sequence[Tensor]) -> list[Item]:
    """`tes` without those that no output needs, definitions before uses, otherwise in the order given."""
    producers = {tensor: te_ for te_ in tes for tensor in te_.outputs}
    live: set[Item] = set()
    pending = [producers[t] for t in outputs if t in producers]
    while pending:
        te_ = pending.pop()
        if te_ not in live:
            live.add(te_)
            pending.extend(producers[t] for t in te_.inputs if t in producers)
    order: list[Item] = []
    placed: set[Item] = set()
    for root in tes:
        stack = [root] if root in live and root not in placed else []
        while stack:
            te_ = stack[-1]
            missing = [producers[t] for t in te_.inputs if t in producers and producers[t] not in placed]
            if missing:
                if len(stack) > len(tes):
                    raise ProgramError(f"TE {te_.name} ({te_.origin}) depends on itself")
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if te_ not in placed:
                placed.add(te_)
                order.append(te_)
    return order
