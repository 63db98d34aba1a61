"""Tensors that are read more than once, and when tensors are alive (paper §5.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from souffle.analysis.fused_access import access_of
from souffle.index import isl
from souffle.program import TE, ExternTE, FusedTE, Tensor, TEProgram

__all__ = ["Dependences", "LiveRange", "Reuse", "find_live_ranges", "find_reuse"]

AnyTE = TE | FusedTE | ExternTE


class Dependences:
    """Which TE of a program depends on which, directly or through others.

    One bit for each pair, so that 15,000 TEs take 28 MB and a query takes no search.
    """

    def __init__(self, program: TEProgram) -> None:
        self._index = {te: position for position, te in enumerate(program.tes)}
        self._above: list[int] = []
        for te in program.tes:
            mask = 0
            for tensor in dict.fromkeys(te.inputs):
                producer = program.producers.get(tensor)
                if producer is not None:
                    position = self._index[producer]
                    mask |= self._above[position] | (1 << position)
            self._above.append(mask)

    def index(self, te: AnyTE) -> int:
        """The position of `te` in the program."""
        return self._index[te]

    def depends(self, later: AnyTE, earlier: AnyTE) -> bool:
        """Whether `later` needs `earlier`, directly or through others; not true of a TE and itself."""
        return bool(self._above[self._index[later]] >> self._index[earlier] & 1)

    def independent(self, one: AnyTE, other: AnyTE) -> bool:
        """Whether neither needs the other, and they are two."""
        return one is not other and not self.depends(one, other) and not self.depends(other, one)


@dataclass(frozen=True)
class LiveRange:
    """When a tensor must be kept, as positions in the program's order.

    Attributes
    ----------
    definition : int
        Of the TE that defines it; -1 for inputs and constants.
    last_use : int
        Of the last TE that reads it; the number of TEs for an output of the program. The definition itself if nothing
        reads it.
    """

    definition: int
    last_use: int


def find_live_ranges(program: TEProgram) -> dict[Tensor, LiveRange]:
    """The live range of every tensor of `program`."""
    first = dict.fromkeys((*program.inputs, *program.constants), -1)
    last: dict[Tensor, int] = {}
    for position, te in enumerate(program.tes):
        for tensor in te.inputs:
            last[tensor] = position
        for tensor in te.outputs:
            first[tensor] = position
    last.update({tensor: len(program.tes) for tensor in program.outputs})
    return {tensor: LiveRange(position, last.get(tensor, position)) for tensor, position in first.items()}


@dataclass(frozen=True, eq=False)
class Reuse:
    """A tensor that several TEs read: the paper's ``s(t)``, and which of them can share what they read.

    Attributes
    ----------
    tensor : Tensor
    consumers : tuple of TE
        In program order.
    spatial : tuple of tuples of TE
        Disjoint sets of at least two mutually independent consumers: candidates for horizontal transformation.
    temporal : tuple of (TE, TE)
        For each consumer that depends on earlier ones, the last of these and it: the tensor can be kept on chip from
        the first to the second.
    """

    tensor: Tensor
    consumers: tuple[AnyTE, ...]
    spatial: tuple[tuple[AnyTE, ...], ...]
    temporal: tuple[tuple[AnyTE, AnyTE], ...]

    @cached_property
    def spatial_bytes(self) -> int:
        """Bytes of global memory not read again if each spatial set reads its common elements once."""
        return self.tensor.itemsize * sum(_common(self.tensor, group) for group in self.spatial)

    @cached_property
    def temporal_bytes(self) -> int:
        """Bytes not read again if the second of each temporal pair finds on chip what the first has read."""
        return self.tensor.itemsize * sum(_common(self.tensor, pair) for pair in self.temporal)

    def __str__(self) -> str:
        lines = [f"{self.tensor}"]
        for group in self.spatial:
            lines.append("  spatial {" + ", ".join(te.name for te in group) + "}")
        for first, second in self.temporal:
            lines.append(f"  temporal {first.name} … {second.name}")
        return "\n".join(lines)


def _common(tensor: Tensor, consumers: Sequence[AnyTE]) -> int:
    """How many element reads are repetitions: the sum of what each consumer reads, less what all read together."""
    accesses = [access_of(te, te.inputs.index(tensor)) for te in consumers]
    counts = [access.elements for access in accesses]
    if any(access.covers for access in accesses):
        return sum(counts) - tensor.size
    footprint = accesses[0].footprint
    for access in accesses[1:]:
        footprint = footprint.union(access.footprint)
    return max(0, sum(counts) - isl.count_points(footprint))


def find_reuse(program: TEProgram, dependences: Dependences) -> dict[Tensor, Reuse]:
    """Every tensor with several consumers, in program order."""
    return {
        tensor: _reuse(tensor, consumers, dependences.depends)
        for tensor, consumers in program.consumers.items()
        if len(consumers) > 1
    }


def _reuse(tensor: Tensor, consumers: tuple[AnyTE, ...], depends: Callable[[AnyTE, AnyTE], bool]) -> Reuse:
    groups: list[list[AnyTE]] = []
    temporal: list[tuple[AnyTE, AnyTE]] = []
    for position, te in enumerate(consumers):
        earlier = [other for other in consumers[:position] if depends(te, other)]
        if earlier:
            temporal.append((earlier[-1], te))
        # Program order is topological, so only `te` can depend on the members of a group, and not they on it.
        blocked = set(earlier)
        home = next((group for group in groups if not blocked.intersection(group)), None)
        if home is None:
            groups.append([te])
        else:
            home.append(te)
    spatial = tuple(tuple(group) for group in groups if len(group) > 1)
    return Reuse(tensor, consumers, spatial, tuple(temporal))
