"""Access maps of fused TEs: those of the parts, composed from each output back to each input (paper §5.2, §6.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from souffle.analysis.access import Access, MatrixForm, Relation, whole_relation
from souffle.index import isl
from souffle.program import TE, ExternTE, FusedTE, Tensor
from souffle.program.shared import OncePer

__all__ = ["FusedAccess", "access_of", "share_elements"]

_BUDGET = "isl ran out of its operation budget"

_relations: OncePer[Relation] = OncePer()
_single: OncePer[bool] = OncePer()
_counts: OncePer[int] = OncePer()
_ways: OncePer[tuple[isl.Map, ...] | None] = OncePer()


def access_of(te: TE | FusedTE | ExternTE, position: int) -> Access:
    """How `te` reads its input number `position`."""
    return FusedAccess(te, position) if isinstance(te, FusedTE) else Access(te, position)


class FusedAccess(Access):
    """How a fused TE reads one of its inputs, seen from its outputs. The last output stands for all where one is asked.

    An element of an output needs what its part reads, and what the parts read that it takes elements of: the union
    where several ways lead to the input. Equal fused TEs share what is found.
    """

    te: FusedTE

    @cached_property
    def parts(self) -> tuple[Access, ...]:
        """The accesses of the parts that read the input themselves."""
        return tuple(Access(p, p.inputs.index(self.tensor)) for p in self.te.parts if self.tensor in p.inputs)

    def relation_from(self, output: int) -> Relation:
        """From output number `output`.

        ``points`` is ``elements``: a fused TE iterates over its elements, and reductions are of its parts.
        """
        key = (self.te.wiring, self.position, output)
        return _relations(key, lambda: self._bounded(self.te.outputs[output]))

    @cached_property
    def relation(self) -> Relation:
        """From the last output."""
        return self.relation_from(len(self.te.outputs) - 1)

    @property
    def map(self) -> isl.Map:
        """Element of the last output to input elements, named by the tensors."""
        return self.maps[-1]

    @property
    def maps(self) -> tuple[isl.Map, ...]:
        """The map from each output, named by the tensors."""
        return tuple(
            isl.named_map(self.relation_from(number).elements, output.name, self.tensor.name)
            for number, output in enumerate(self.te.outputs)
        )

    @property
    def inexact_because(self) -> tuple[str, ...]:
        """Why the map from one of the outputs is not exact."""
        found = [reason for number in range(len(self.te.outputs)) for reason in self.relation_from(number).inexact]
        return tuple(dict.fromkeys(found))

    @property
    def exact(self) -> bool:
        """Whether the maps hold exactly the elements that are needed; otherwise they hold more."""
        return not self.inexact_because

    @property
    def single_valued(self) -> bool:
        """Whether each element of each output needs at most one element of this input."""
        outputs = range(len(self.te.outputs))
        return _single((self.te.wiring, self.position), lambda: all(map(self._single_from, outputs)))

    @property
    def matrix_form(self) -> MatrixForm | None:
        """``None``: each part has its own."""
        return None

    @property
    def footprint(self) -> isl.Set:
        """The elements of the input that any part reads, named by the tensor."""
        result = self.parts[0].footprint
        for access in self.parts[1:]:
            result = result.union(access.footprint)
        return result

    @property
    def elements(self) -> int:
        """Number of distinct elements that the parts read; an upper bound where an access is not exact."""
        return _counts((self.te.wiring, self.position), self._elements)

    @property
    def positions(self) -> int:
        """Number of different loads of this input in the parts."""
        return sum(access.positions for access in self.parts)

    @property
    def times(self) -> int:
        """How many element reads one evaluation of all parts performs."""
        return sum(access.times for access in self.parts)

    def __str__(self) -> str:
        """Those of the parts, one line for each read."""
        return "\n".join(dict.fromkeys(line for access in self.parts for line in str(access).splitlines()))

    def _elements(self) -> int:
        counts = [access.elements for access in self.parts]
        if len(counts) == 1 or max(counts) == self.tensor.size:
            return max(counts)
        return min(sum(counts), self.tensor.size, isl.count_points(self.footprint))

    def _bounded(self, output: Tensor) -> Relation:
        # Those of the parts have budgets of their own.
        known = {(p, i): Access(p, i).relation for p in self.te.parts for i in range(len(p.inputs))}
        found = isl.within_budget(lambda: self._composed(output, known))
        if found is not None:
            return found
        return whole_relation(tuple((0, extent) for extent in output.shape), (), self.tensor.shape, _BUDGET)

    def _composed(self, output: Tensor, known: Mapping[tuple[TE, int], Relation]) -> Relation:
        source = self.tensor
        maps: dict[Tensor, isl.Map] = {}
        inexact: dict[Tensor, dict[str, None]] = {}
        for part in self.te.parts:
            whole = isl.map_to(isl.nothing(len(part.outputs[0].shape)), [None] * len(source.shape), source.shape)
            reasons: dict[str, None] = {}
            for position, tensor in enumerate(part.inputs):
                if tensor is not source and tensor not in maps:
                    continue
                own = known[part, position]
                whole = whole.union(own.elements if tensor is source else own.elements.apply_range(maps[tensor]))
                reasons |= dict.fromkeys(own.inexact) | inexact.get(tensor, {})
            maps.update(dict.fromkeys(part.outputs, whole.coalesce()))
            inexact.update(dict.fromkeys(part.outputs, reasons))
        return Relation(maps[output], maps[output], tuple(inexact[output]))

    def _single_from(self, output: int) -> bool:
        way = self._only_way(self.te.outputs[output])
        if way is not None and all(access.single_valued for access in way):
            return True
        known = self.relation_from(output)
        return not known.inexact and isl.is_single_valued(known.elements)

    def _only_way(self, output: Tensor) -> list[Access] | None:
        """The accesses from an output back to the input where one way leads there, or none does."""
        ways: dict[Tensor, list[list[Access]]] = {self.tensor: [[]]}
        for part in self.te.parts:
            reached = [[Access(part, i), *way] for i, t in enumerate(part.inputs) for way in ways.get(t, [])]
            # Two ways are as good as many: nobody asks which.
            ways.update(dict.fromkeys(part.outputs, reached[:2]))
        found = ways.get(output, [])
        return None if len(found) > 1 else [access for way in found for access in way]


def share_elements(parts: Sequence[TE]) -> bool:
    """Whether one thread can compute an element of every part, and each element of each part is some thread's.

    So it is where every part reads at least one before it, each tensor of the others at one element for each of its own
    and each at another, and all ways back to the first part lead to the same element of it.
    """
    return _ways_to_first(tuple(parts)) is not None


def _ways_to_first(parts: tuple[TE, ...]) -> tuple[isl.Map, ...] | None:
    """From the elements of each part to those of the first."""
    home = {tensor: (n, k) for n, part in enumerate(parts) for k, tensor in enumerate(part.outputs)}
    key = tuple((part.op, tuple(home.get(tensor) for tensor in part.inputs)) for part in parts)
    return _ways(key, lambda: _find_ways(parts, home))


def _find_ways(parts: tuple[TE, ...], home: Mapping[Tensor, tuple[int, int]]) -> tuple[isl.Map, ...] | None:
    if len(parts) == 1:
        return (isl.identity(len(parts[0].outputs[0].shape)),)
    before = _ways_to_first(parts[:-1])
    if before is None:
        return None
    way: isl.Map | None = None
    for position, tensor in enumerate(parts[-1].inputs):
        if tensor not in home:
            continue
        access = Access(parts[-1], position)
        if not access.bijective:
            return None
        first = before[home[tensor][0]]
        found = isl.within_budget(access.relation.elements.apply_range(first).coalesce)
        if found is None or not (way is None or isl.are_equal(way, found)):
            return None
        way = found
    return None if way is None else (*before, way)
