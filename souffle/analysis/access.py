"""Which input elements each output element reads, as isl maps taken from a TE's own expression (paper §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from souffle.analysis.evaluation_counts import PointCounter
from souffle.analysis.te_expression import expression_of
from souffle.analysis.text import describe_read
from souffle.index import isl
from souffle.index.expression import Expression, Path
from souffle.index.quasi_affine import AffineView
from souffle.program import TE, ExternTE, Loop, Tensor

__all__ = ["Access", "MatrixForm", "Read", "Relation", "distinct_elements", "reads", "relation", "whole_relation"]

_DATA_INDEX = "an index depends on data"
_NOT_AFFINE = "an index is not quasi-affine"
_CONDITION = "a condition depends on data or is not quasi-affine"
_BUDGET = "isl ran out of its operation budget"
_EXTERN = "the operator has no tensor expression"
_LOOP = "a loop may read all of it, in one step or another"


@dataclass(frozen=True)
class Read:
    """One load of the expression, wherever it is evaluated.

    Attributes
    ----------
    indices : tuple of int
        Node numbers of its indices.
    paths : frozenset of Path
        The conditions under which it is evaluated; an empty path means always.
    reduced : bool
        Whether it is evaluated for each point of the reduction axes.
    """

    indices: tuple[int, ...]
    paths: frozenset[Path]
    reduced: bool


@dataclass(frozen=True, eq=False)
class Relation:
    """Output elements to elements of one input, without names.

    Attributes
    ----------
    elements : isl.Map
        Output index to input index; the reduction axes are existential.
    points : isl.Map
        Points of the whole iteration space (output index, then reduction axes) to input index.
    inexact : tuple of str
        Why it may relate to more elements than are read; empty for an exact relation.
    """

    elements: isl.Map
    points: isl.Map
    inexact: tuple[str, ...]


@dataclass(frozen=True)
class MatrixForm:
    """The paper's ``M v + c``: element ``matrix @ v + constant`` of the input for output index ``v``."""

    matrix: tuple[tuple[int, ...], ...]
    constant: tuple[int, ...]

    def __str__(self) -> str:
        rows = ", ".join("[" + ", ".join(map(str, row)) + "]" for row in self.matrix)
        return f"[{rows}] v + [{', '.join(map(str, self.constant))}]"


@lru_cache(maxsize=4096)
def reads(expression: Expression, position: int) -> tuple[Read, ...]:
    """The different loads of input `position`, without asking isl."""
    found: list[Read] = []
    for region in expression.regions:
        for number, paths in sorted(expression.reach(region).items()):
            node = expression.nodes[number]
            if node.kind == "load" and node.value == position:
                found.append(Read(node.args, paths, region.reduced))
    return tuple(found)


@lru_cache(maxsize=4096)
def relation(expression: Expression, position: int) -> Relation:
    """The access relation of input `position`; isl objects are built here and shared by equal TEs."""
    found = isl.within_budget(lambda: _relation(expression, position))
    if found is not None:
        return found
    return whole_relation(expression.axes, expression.reduce_axes, expression.inputs[position][0], _BUDGET)


def whole_relation(
    axes: tuple[tuple[int, int], ...], reduce_axes: tuple[tuple[int, int], ...], shape: tuple[int, ...], reason: str
) -> Relation:
    """Every output element to every input element, because of `reason`."""
    everything: list[None] = [None] * len(shape)
    elements = isl.map_to(isl.box(axes), everything, shape)
    points = isl.map_to(isl.box(axes + reduce_axes), everything, shape)
    return Relation(elements, points, (reason,))


def _relation(expression: Expression, position: int) -> Relation:
    view = AffineView(expression)
    shape = expression.inputs[position][0]
    whole: isl.Map | None = None
    inexact: dict[str, None] = {}
    for read in reads(expression, position):
        domain: isl.Set | None = None
        for path in read.paths:
            part, exact = view.domain(path)
            domain = part if domain is None else domain.union(part)
            if not exact:
                inexact[_CONDITION] = None
        indices = [view.value(number) for number in read.indices]
        for number, index in zip(read.indices, indices, strict=True):
            if index is None:
                inexact[_DATA_INDEX if expression.nodes[number].data else _NOT_AFFINE] = None
        piece = isl.map_to(view.space if domain is None else domain, indices, shape)
        whole = piece if whole is None else whole.union(piece)
    if whole is None:
        whole = isl.map_to(isl.nothing(view.dimensions), [None] * len(shape), shape)
    whole = whole.coalesce()
    elements = isl.only_inputs(whole, len(expression.axes)).coalesce() if expression.reduce_axes else whole
    return Relation(elements, whole, tuple(inexact))


@lru_cache(maxsize=4096)
def _single_valued(expression: Expression, position: int) -> bool:
    found = reads(expression, position)
    if len(found) <= 1 and not any(_reduced_index(expression, read) for read in found):
        # One position, found by the output index alone (be it through data): one element, whatever the function is.
        return True
    known = relation(expression, position)
    return not known.inexact and isl.is_single_valued(known.elements)


def _reduced_index(expression: Expression, read: Read) -> bool:
    """Whether an index of `read` varies along a reduction axis."""
    if not (read.reduced and expression.reduce_axes):
        return False
    bounds = expression.axes + expression.reduce_axes
    stack, seen = list(read.indices), set()
    while stack:
        number = stack.pop()
        if number in seen:
            continue
        seen.add(number)
        node = expression.nodes[number]
        if node.kind == "axis" and node.value >= len(expression.axes) and bounds[node.value][1] > 1:
            return True
        stack.extend(node.args)
    return False


@lru_cache(maxsize=4096)
def _footprint(expression: Expression, position: int) -> isl.Set:
    known = relation(expression, position)
    found = isl.within_budget(lambda: known.elements.range().coalesce())
    return isl.box([(0, extent) for extent in expression.inputs[position][0]]) if found is None else found


@lru_cache(maxsize=4096)
def _times(expression: Expression, position: int) -> int:
    counter = PointCounter(expression)
    return sum(counter.times(read.reduced, read.paths) for read in reads(expression, position))


@lru_cache(maxsize=4096)
def _elements(expression: Expression, position: int) -> int:
    shape = expression.inputs[position][0]
    found = reads(expression, position)
    size = 1
    for extent in shape:
        size *= extent
    if any(_covers(expression, read, shape) for read in found):
        return size
    executed = _times(expression, position)
    if relation(expression, position).inexact:
        # No more elements than loads are executed; for a gather that is far less than its table.
        return min(size, executed)
    return min(size, executed, isl.count_points(_footprint(expression, position)))


def distinct_elements(accesses: Sequence[Access]) -> int:
    """How many elements of one tensor some accesses read together; an upper bound where one is not exact.

    Parameters
    ----------
    accesses : sequence of Access
        Of one tensor, by one TE or by several.
    """
    counts = [access.elements for access in accesses]
    size = accesses[0].tensor.size
    if max(counts) == size or len(accesses) == 1:
        return max(counts)
    if not all(isinstance(access.te, TE) and access.exact for access in accesses):
        return min(size, sum(counts))
    return _together(frozenset((expression_of(access.te), access.position) for access in accesses))


@lru_cache(maxsize=4096)
def _together(reads_: frozenset[tuple[Expression, int]]) -> int:
    first, *others = (_footprint(expression, position) for expression, position in reads_)
    for other in others:
        first = first.union(other)
    return isl.count_points(first.coalesce())


def _covers(expression: Expression, read: Read, shape: tuple[int, ...]) -> bool:
    """Whether `read` plainly reads every element: always evaluated, and each index an axis of the full extent."""
    bounds = expression.axes + expression.reduce_axes
    nodes = [expression.nodes[number] for number in read.indices]
    if frozenset() not in read.paths or any(node.kind != "axis" for node in nodes):
        return False
    positions = [node.value for node in nodes]
    if len(set(positions)) < len(positions):
        return False
    return all(bounds[position] == (0, extent) for position, extent in zip(positions, shape, strict=True))


@lru_cache(maxsize=4096)
def _matrix_form(expression: Expression, position: int) -> MatrixForm | None:
    found = reads(expression, position)
    if len(found) != 1 or relation(expression, position).inexact or _reduced_index(expression, found[0]):
        return None
    view = AffineView(expression)
    rows = isl.within_budget(lambda: [isl.affine_row(view.value(number)) for number in found[0].indices])
    if rows is None or any(row is None for row in rows):
        return None
    split = len(expression.axes)
    return MatrixForm(tuple(row[0][:split] for row in rows), tuple(row[1] for row in rows))


@dataclass(frozen=True)
class Access:
    """How one TE reads one of its inputs. Everything is worked out when it is first asked for.

    Attributes
    ----------
    te : TE, ExternTE or Loop
    position : int
        Which of ``te.inputs``.
    """

    te: TE | ExternTE | Loop
    position: int

    @property
    def tensor(self) -> Tensor:
        """The tensor read."""
        return self.te.inputs[self.position]

    @cached_property
    def relation(self) -> Relation:
        """The relation without names, shared by equal TEs."""
        if isinstance(self.te, (ExternTE, Loop)):
            shape = self.te.outputs[0].shape
            reason = _LOOP if isinstance(self.te, Loop) else _EXTERN
            return whole_relation(tuple((0, extent) for extent in shape), (), self.tensor.shape, reason)
        return relation(expression_of(self.te), self.position)

    @property
    def map(self) -> isl.Map:
        """Output element to input elements, named by the tensors."""
        return isl.named_map(self.relation.elements, self.te.outputs[0].name, self.tensor.name)

    @property
    def iteration_map(self) -> isl.Map:
        """Point of the iteration space (output index, reduction axes) to input elements, named by TE and tensor."""
        return isl.named_map(self.relation.points, self.te.name, self.tensor.name)

    @property
    def exact(self) -> bool:
        """Whether the map holds exactly the elements that are read; otherwise it holds more."""
        return not self.relation.inexact

    @property
    def inexact_because(self) -> tuple[str, ...]:
        """Why it is not exact."""
        return self.relation.inexact

    @property
    def single_valued(self) -> bool:
        """Whether each output element reads at most one element of this input.

        That can be known of a map that is not exact: a gather reads one row, though which is known at run time only.
        """
        return isinstance(self.te, TE) and _single_valued(expression_of(self.te), self.position)

    @property
    def bijective(self) -> bool:
        """Whether each output element reads one element of this input, each another, and all of them are read.

        Where data decides whether an element is read, as if it always were.
        """
        if self.te.outputs[0].size != self.tensor.size:
            return False
        bounds = [(0, extent) for extent in self.te.outputs[0].shape]
        return isl.is_bijection(self.relation.elements, bounds)

    @property
    def matrix_form(self) -> MatrixForm | None:
        """``M v + c`` where the access is one affine function of the output index; otherwise ``None``."""
        return _matrix_form(expression_of(self.te), self.position) if isinstance(self.te, TE) else None

    @property
    def footprint(self) -> isl.Set:
        """The elements of the input that are read at all, named by the tensor."""
        if isinstance(self.te, (ExternTE, Loop)):
            return isl.named_set(isl.box([(0, extent) for extent in self.tensor.shape]), self.tensor.name)
        return isl.named_set(_footprint(expression_of(self.te), self.position), self.tensor.name)

    @property
    def elements(self) -> int:
        """Number of distinct elements read; an upper bound where the access is not exact."""
        return _elements(expression_of(self.te), self.position) if isinstance(self.te, TE) else self.tensor.size

    @property
    def positions(self) -> int:
        """Number of different loads of this input in the expression."""
        return len(reads(expression_of(self.te), self.position)) if isinstance(self.te, TE) else 1

    @property
    def times(self) -> int:
        """How many element reads one evaluation of the TE performs: each load at the points where it is evaluated.

        More than :attr:`elements` means that elements are read again, so that computing them where they are read would
        repeat arithmetic.
        """
        return _times(expression_of(self.te), self.position) if isinstance(self.te, TE) else self.tensor.size

    @property
    def covers(self) -> bool:
        """Whether every element of the input is read."""
        return self.elements == self.tensor.size

    def __str__(self) -> str:
        """As the paper writes it, one line for each read: ``O0[i, j] → I0[i, rk], 0 ≤ rk < 64``."""
        if isinstance(self.te, (ExternTE, Loop)):
            star = ", ".join("*" for _ in self.tensor.shape)
            return f"{self.te.outputs[0].name}[...] → {self.tensor.name}[{star}]"
        expression = expression_of(self.te)
        lines = [
            describe_read(self.te, expression, self.tensor.name, read.indices, read.paths)
            for read in reads(expression, self.position)
        ]
        return "\n".join(dict.fromkeys(lines))
