"""Rolled repetition: a loop over one body whose tensors are indexed by the step.

::

    H_1 = f(H_0, W_0)             for s in 0 .. n-1:
    H_2 = f(H_1, W_1)       ⇔         h = f(before, w)      before = initial if s = 0 else h of step s - 1
    ...                                                     w = elements s · |W_0| .. of W, the stack of all W_s
    H_n = f(H_n-1, W_n-1)         H_n = h of the last step

So neither what is analysed nor the kernel grows with the number of steps of a recurrence, or of equal layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from souffle.program.te import TE, ExternTE, Origin, ProgramError, Tensor

__all__ = ["ALIGNMENT", "Carried", "Collected", "Indexed", "Loop"]

ALIGNMENT = 16
"""Bytes of the widest read or write of a GPU thread: what the step chooses of a tensor starts at a multiple of it."""


@dataclass(frozen=True, eq=False)
class Indexed:
    """A tensor of the body that is another part of one outer tensor in each step.

    Attributes
    ----------
    tensor : Tensor
        What the body reads.
    source : Tensor
        The outer tensor.
    stride : int
        At step ``s``, element 0 of `tensor` is element ``s * stride`` of `source`, both in row-major order. The body
        reads only elements that `source` has; `tensor` may be declared larger than what is left of it.
    """

    tensor: Tensor
    source: Tensor
    stride: int

    def at(self, array: np.ndarray, step: int) -> np.ndarray:
        """The value of `tensor` at a step, given that of `source`; zeros where `source` has no element."""
        flat = np.ascontiguousarray(array).reshape(-1)
        part = flat[max(0, step * self.stride) : max(0, step * self.stride + self.tensor.size)]
        before = min(self.tensor.size, max(0, -step * self.stride))
        whole = np.zeros(self.tensor.size, array.dtype)
        whole[before : before + part.size] = part[: self.tensor.size - before]
        return whole.reshape(self.tensor.shape)


@dataclass(frozen=True, eq=False)
class Carried:
    """A tensor of the body that an earlier step has computed.

    Attributes
    ----------
    tensor : Tensor
        What the body reads.
    value : Tensor
        What the body defines: `tensor` is this of ``distance`` steps before.
    initial : tuple of Tensor
        Outer tensors: what the first ``distance`` steps read.
    """

    tensor: Tensor
    value: Tensor
    initial: tuple[Tensor, ...]

    @property
    def distance(self) -> int:
        """How many steps before."""
        return len(self.initial)


@dataclass(frozen=True, eq=False)
class Collected:
    """An outer tensor that the loop defines.

    Attributes
    ----------
    tensor : Tensor
        Of the shape of `value`; with a leading axis of the steps if `every`.
    value : Tensor
        What the body defines.
    every : bool
        Whether all steps are kept, or only the last one.
    """

    tensor: Tensor
    value: Tensor
    every: bool


@dataclass(frozen=True, eq=False)
class Loop:
    """One body, run ``steps`` times in order. Stands in a program beside the TEs.

    Attributes
    ----------
    name : str
    steps : int
    body : tuple of TE, FusedTE or ExternTE
        In topological order. Reads parameters (`indexed` and `carried`), what the body defines, and outer tensors that
        are the same in every step.
    indexed : tuple of Indexed
    carried : tuple of Carried
    collected : tuple of Collected
    origin : Origin
        Of the first step.
    """

    name: str
    steps: int
    body: tuple[TE | ExternTE, ...]
    indexed: tuple[Indexed, ...]
    carried: tuple[Carried, ...]
    collected: tuple[Collected, ...]
    origin: Origin

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """Outer tensors that it reads, each once."""
        outer = [p.source for p in self.indexed]
        outer += [tensor for p in self.carried for tensor in p.initial]
        return tuple(dict.fromkeys([*self.invariants, *outer]))

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """Outer tensors that it defines."""
        return tuple(c.tensor for c in self.collected)

    @cached_property
    def invariants(self) -> tuple[Tensor, ...]:
        """Outer tensors that the body reads as they are, the same in every step."""
        inside = {p.tensor for p in (*self.indexed, *self.carried)} | {t for item in self.body for t in item.outputs}
        return tuple(dict.fromkeys(t for item in self.body for t in item.inputs if t not in inside))

    def with_body(self, body: tuple[TE | ExternTE, ...]) -> Loop:
        """The same loop over another body that defines the same carried and collected tensors."""
        return self if body == self.body else replace(self, body=body)

    def parameters(
        self, step: int, outer: Mapping[Tensor, np.ndarray], past: Sequence[Mapping[Tensor, np.ndarray]]
    ) -> dict[Tensor, np.ndarray]:
        """The values of the body's parameters at a step.

        Parameters
        ----------
        step : int
        outer : mapping of Tensor to array
        past : sequence of mappings
            What the body defined in each step before.
        """
        values = {p.tensor: p.at(outer[p.source], step) for p in self.indexed}
        for p in self.carried:
            first = step < p.distance
            values[p.tensor] = outer[p.initial[step]] if first else past[step - p.distance][p.value]
        return values

    def check(self) -> None:
        """Check the loop's own rules.

        Raises
        ------
        ProgramError
            Naming the tensor that breaks one.
        """
        defined = {t for item in self.body for t in item.outputs}
        if any(isinstance(item, Loop) for item in self.body):
            raise ProgramError(f"loop {self.name} holds a loop")
        if self.steps < 1 or not self.body or not self.collected:
            raise ProgramError(f"loop {self.name} has no step, no body or no result")
        for c in self.carried:
            if c.value not in defined or not c.initial:
                raise ProgramError(f"loop {self.name} carries {c.tensor}, which no step before defines")
            if any((t.shape, t.dtype) != (c.tensor.shape, c.tensor.dtype) for t in (c.value, *c.initial)):
                raise ProgramError(f"loop {self.name} carries {c.tensor}, but its value or start has another type")
        for c in self.collected:
            shape = (self.steps, *c.value.shape) if c.every else c.value.shape
            if c.value not in defined or c.tensor.shape != shape or c.tensor.dtype != c.value.dtype:
                raise ProgramError(f"loop {self.name} gives {c.tensor} as {c.value}, of another type or not its own")
        for p in self.indexed:
            if p.tensor.dtype != p.source.dtype:
                raise ProgramError(f"loop {self.name} reads {p.source} as {p.tensor}, of another type")

    def __repr__(self) -> str:
        return f"Loop({self.name}, {self.steps} steps)"


