"""Functions of elements behind a product that read its columns in equal groups, such as the gates of a recurrent cell.

Before::

    for c < 4 * U: B[c] = sum over k of x[k] * W[k, c]
    for u < U:     h[u] = f(B[u], B[U + u], B[2 * U + u], B[3 * U + u])

After, with panels that have `w` columns of each group::

    for q < U // w:
        for g < 4, i < w: B[g * U + q * w + i] = ...     a panel
        for i < w:        h[q * w + i] = f(...)          behind it, by the same thread

So the cell waits for no other thread, and what it reads is in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tvm import tirx

from souffle.schedule.cpu.contraction_form import Followers, without_units
from souffle.schedule.cpu.contraction_tiling import grouped_vectors
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.nest import Axis, Nest, flat_index, product, replace_variables, simplify
from souffle.tvm_compat import PrimExpr, buffer_loads

__all__ = ["GroupedProduct", "grouped_product"]


@dataclass(frozen=True, eq=False)
class GroupedProduct:
    """A product, and what is computed of its columns in groups.

    Attributes
    ----------
    nest : Nest
        The product, its columns counted by the part, the group and the column within the part.
    followers : Followers
    vectors : int
        Of a panel.
    taken : int
        How many of the nests behind the product these are.
    """

    nest: Nest
    followers: Followers
    vectors: int
    taken: int

    @property
    def width(self) -> int:
        """The columns of all groups."""
        return product(axis.extent for axis in self.nest.spatial[-3:])


def grouped_product(
    reduction: Nest, behind: Sequence[Nest | tirx.Stmt], machine: Machine
) -> GroupedProduct | None:
    """A product with the nests that follow it and read its columns in groups; ``None`` if the first does not.

    Parameters
    ----------
    reduction : Nest
    behind : sequence of Nest or Stmt
        What is computed next, in order.
    machine : Machine
    """
    nest = without_units(reduction)
    if not nest.single or not nest.reduce or not nest.spatial:
        return None
    reading = _Reading(nest)
    if not reading.columns_follow_each_other or not reading.take(list(map(without_units, takewhile(_is_nest, behind)))):
        return None
    groups, units = reading.groups, reading.units
    rows = product(axis.extent for axis in nest.spatial[:-1])
    vectors = grouped_vectors(rows, units.extent, groups, machine, str(nest.body.buffer.dtype))
    if vectors is None:
        return None
    part = vectors * machine.lanes(str(nest.body.buffer.dtype)) // groups
    columns, index = nest.spatial[-1], nest.spatial[-1].dtype
    outer, group, inner = (
        Axis(tirx.Var(f"{columns.var.name}_{name}", index), extent)
        for name, extent in (("q", units.extent // part), ("g", groups), ("i", part))
    )
    bound = nest.bind({columns.var: group.var * units.extent + outer.var * part + inner.var})
    divided = replace(bound, spatial=(*nest.spatial[:-1], outer, group, inner))
    return GroupedProduct(divided, Followers(tuple(reading.nests), units, part), vectors, reading.taken)


def _is_nest(item: Nest | tirx.Stmt) -> bool:
    return isinstance(item, Nest) and item.injective


class _Reading:
    """Which nests read a product in groups."""

    def __init__(self, nest: Nest) -> None:
        self._product = nest
        *self._rows, self._columns = nest.spatial
        store = nest.body if nest.epilogue is None else nest.epilogue
        self._result = store.buffer, flat_index(store.buffer, list(store.indices))
        self._written: list[tuple[tirx.Buffer, PrimExpr]] = []
        self.units = self._columns
        self.nests: list[Nest] = []
        self.taken = 0

    @property
    def columns_follow_each_other(self) -> bool:
        """Whether the product's last loop is along memory."""
        (_, place), column = self._result, self._columns.var
        step = simplify(replace_variables(place, {column: column + 1}) - place, (*self._rows, self._columns))
        return isinstance(step, tirx.IntImm) and int(step.value) == 1

    @property
    def groups(self) -> int:
        """How many groups of columns there are."""
        return self._columns.extent // self.units.extent

    def take(self, nests: Sequence[Nest]) -> bool:
        """Take the first of some nests, as far as they are computed behind the panels; whether there is any."""
        like = list(takewhile(self._has_rows, nests))
        for count in range(len(like), 0, -1):
            size = min(nest.spatial[-1].extent for nest in like[:count])
            self.units = Axis(tirx.Var(like[0].spatial[-1].var.name, self._columns.dtype), size)
            self.nests, self._written, self.taken = [], [], 0
            if self._columns.extent % size or self.groups < 2:
                continue
            while self.taken < count and self._takes(like[self.taken]):
                self.taken += 1
            if self.taken == count:
                return True
        return False

    def _has_rows(self, nest: Nest) -> bool:
        extents = [axis.extent for axis in nest.spatial]
        return bool(extents) and extents[:-1] == [axis.extent for axis in self._rows]

    def _takes(self, nest: Nest) -> bool:
        """Take the next nest, which may have several groups of elements itself."""
        last, buffer = nest.spatial[-1], nest.body.buffer
        count, rest = divmod(last.extent, self.units.extent)
        # Other tasks may not have read yet what the product reads.
        if rest or any(buffer.same_as(read) for read in self._product.reads):
            return False
        rows = {axis.var: like.var for axis, like in zip(nest.spatial[:-1], self._rows, strict=True)}
        parts = [
            replace(
                nest.bind({**rows, last.var: self.units.var + group * self.units.extent}),
                spatial=(*self._rows, self.units),
            )
            for group in range(count)
        ]
        if not all(map(self._reads_in_groups, parts)):
            return False
        self.nests += parts
        self._written += [(buffer, flat_index(buffer, list(part.body.indices))) for part in parts]
        return True

    def _reads_in_groups(self, nest: Nest) -> bool:
        """Whether a nest reads, of what is computed here, what the same task has computed, and some of it."""
        found = False
        for load in buffer_loads(nest.body):
            places = [place for buffer, place in self._written if buffer.same_as(load.source)]
            if load.source.same_as(self._result[0]):
                places = [
                    replace_variables(self._result[1], {self._columns.var: self.units.var + group * self.units.extent})
                    for group in range(self.groups)
                ]
            if not places:
                continue
            found = True
            at = flat_index(load.source, list(load.indices))
            if not any(self._are_equal(at, place) for place in places):
                return False
        return found

    def _are_equal(self, one: PrimExpr, other: PrimExpr) -> bool:
        away = simplify(one - other, (*self._rows, self.units))
        return isinstance(away, tirx.IntImm) and int(away.value) == 0
