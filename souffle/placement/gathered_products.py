"""Products with the same weights as one product of more rows, on a processor.

::

    P_0[i, j] = sum over k of X_0[i, k] * W[k, j]             G[m, i, k] = X_m[i, k]
    ...                                                  →    P[m, i, j] = sum over k of G[m, i, k] * W[k, j]
    P_n-1[i, j] = sum over k of X_n-1[i, k] * W[k, j]         P_m[i, j]  = P[m, i, j]

Legal where no ``P_m`` depends on another: an element is then the same sum of the same elements, and what needs one of
them waits for all, which none of them waits for (:class:`souffle.analysis.DependenceOrder`). Unlike the horizontal
transformation this does not ask for one depth. So it takes the products of a recurrent layer's inputs of all steps,
whose inputs become known one after another; each of them reads the weights, and so do the products of its states,
which depend on each other and stay as they are.

``G`` is no expression, which a product would take in and evaluate for each of its own elements, but a copy; where the
``X_m`` are slices of one tensor there is none, and where they stand in one already they are read there.

Worth it where the product of all, the copy included, is predicted to take less time: a tile of few rows is bound by
reading its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from tvm import te, tirx

from souffle.analysis import DependenceOrder
from souffle.decision import Decision
from souffle.program import TE, ExternTE, Item, Origin, Tensor, TEProgram
from souffle.program.names import NameSupply
from souffle.program.shared import OncePer
from souffle.schedule.cpu import function_cycles, host_target, machine_of
from souffle.transform.horizontal.merged_te import followed_te, merged_te
from souffle.transform.horizontal.operands import LoadOperand, Member, PackedPlace, member_of, template_of
from souffle.transform.horizontal.operators import contracts
from souffle.transform.horizontal.packs import Packs
from souffle.transform.horizontal.runs import MergePlan, stacked_plan
from souffle.transform.vertical.compose import work_of
from souffle.tvm_compat import primfunc_from_tensors

__all__ = ["gathered_products"]

_MOST_TENSORS = 64
"""That are copied by one function: its code grows with them, and more rows make a product no faster."""
_CALL_CYCLES = 2000
"""Of a function that does nothing, from Python: 0.7 µs, as measured."""
_COPIED_BYTES = 8
"""A cycle; what is copied is read from the second-level cache and written to it."""


def gathered_products(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Join independent products with the same weights, where that is predicted to take less time on this machine.

    Parameters
    ----------
    program : TEProgram

    Returns
    -------
    program : TEProgram
        The same object where nothing was joined.
    decisions : tuple of Decision
        One for each set of products that could be joined.
    """
    gathering = _Gathering(program)
    for products in _with_equal_weights(program):
        gathering.join(products)
    return gathering.result(), tuple(gathering.decisions)


def _with_equal_weights(program: TEProgram) -> list[list[TE]]:
    """Products that differ in one tensor only, which is no constant."""
    groups: dict[Hashable, list[TE]] = {}
    for te_ in program.tes:
        if not isinstance(te_, TE) or not contracts(te_) or not _movable(te_, program):
            continue
        loads = template_of(te_).loads
        varied = {load.input for load in loads if te_.inputs[load.input] not in program.constants}
        if len(varied) != 1 or len(varied) == len(te_.inputs):
            continue
        fixed = tuple((None if n in varied else tensor) for n, tensor in enumerate(te_.inputs))
        key = (template_of(te_).key, fixed, tuple((load.input, load.values) for load in loads))
        groups.setdefault(key, []).append(te_)
    return [group for group in groups.values() if len(group) > 1]


def _movable(te_: TE, program: TEProgram) -> bool:
    """Whether all that reads a TE can read its elements in a larger tensor."""
    if len(te_.outputs) != 1 or te_.output in program.outputs:
        return False
    return all(isinstance(reader, TE) for reader in program.consumers[te_.output])


class _Gathering:
    """The sets that are joined so far."""

    def __init__(self, program: TEProgram) -> None:
        self.program = program
        self.decisions: list[Decision] = []
        self._order = DependenceOrder(program)
        self._machine = machine_of(host_target())
        self._names = NameSupply(tensor.name for tensor in program.tensors())
        self._packs = Packs(program.constants, self._names.fresh)
        self._moved: dict[Tensor, PackedPlace] = {}
        self._copied: set[Tensor] = set()
        self._gone: set[Item] = set()
        self._made: list[Item] = []
        self._cycles: OncePer[float | None] = OncePer()

    def join(self, products: Sequence[TE]) -> None:
        """Join those of some products with the same weights that are independent."""
        for independent in self._order.independent(products):
            left = [te_ for te_ in independent if te_.output not in self._copied]
            count = -(-len(left) // _MOST_TENSORS)
            for part in range(count):
                self._try(left[part * len(left) // count : (part + 1) * len(left) // count])

    def result(self) -> TEProgram:
        """The program of the joined products."""
        if not self._made:
            return self.program
        kept = [
            followed_te(member_of(te_, self._moved)) if isinstance(te_, TE) else te_
            for te_ in self.program.tes
            if te_ not in self._gone
        ]
        return self.program.with_tes([*kept, *self._made])

    def _try(self, products: Sequence[TE]) -> None:
        if len(products) < 2:
            return
        found = self._gathered([member_of(te_, self._moved) for te_ in products])
        if found is None:
            return
        plan, before = found
        first = products[0]
        origin = first.origin.merged(*(te_.origin for te_ in products))
        joined = merged_te(plan, self._names.fresh(f"{first.name}_x{len(products)}"), origin, self._packs)
        apart, together = self._price(first), self._price(joined)
        if apart is None or together is None:
            return
        apart, together = len(products) * (apart + _CALL_CYCLES), together + _CALL_CYCLES
        if isinstance(before, ExternTE):
            together += 2 * before.outputs[0].nbytes / _COPIED_BYTES + _CALL_CYCLES
        names = ", ".join(te_.name for te_ in products)
        figures = f"{together / 1e3:.0f} thousand cycles predicted for one product, {apart / 1e3:.0f} for all"
        accepted = together < apart
        subject = f"{names}: {joined.name}" if accepted else names
        self.decisions.append(Decision("gathered", subject, accepted, figures))
        if not accepted:
            return
        self._order.join(products)
        self._gone.update(products)
        self._made += [joined] if before is None else [before, joined]
        if isinstance(before, ExternTE):
            self._copied.update(before.inputs)
        for number, te_ in enumerate(plan.members):
            self._moved[te_.te.output] = plan.place(number, joined.output)

    def _gathered(self, members: Sequence[Member]) -> tuple[MergePlan, Item | None] | None:
        """How products become one, and what puts their rows together if they are not; ``None`` where nothing can."""
        plan = self._plan(members)
        if not plan.chooses:
            return plan, None
        varied = [self._varied(member) for member in members]
        if any(tensor in self._moved for tensor in varied):
            return None
        whole = self._slices(varied) or self._copy(varied)
        within = [_reading(m, t, whole.outputs[0], n) for n, (m, t) in enumerate(zip(members, varied, strict=True))]
        return self._plan(within), whole

    def _plan(self, members: Sequence[Member]) -> MergePlan:
        return stacked_plan(members, self.program.constants.__contains__)

    def _varied(self, member: Member) -> Tensor:
        return next(tensor for tensor in member.te.inputs if tensor not in self.program.constants)

    def _slices(self, tensors: Sequence[Tensor]) -> TE | None:
        """A TE whose first axis counts the tensors, where they are all read from the same tensors by one formula."""
        producers = [self.program.producers.get(tensor) for tensor in tensors]
        if not all(isinstance(te_, TE) and len(te_.outputs) == 1 and not te_.is_reduction for te_ in producers):
            return None
        members = [member_of(te_, self._moved) for te_ in producers]
        first = members[0]
        if any(m.template.key != first.template.key or m.te.inputs != first.te.inputs for m in members):
            return None
        plan = self._plan(members)
        if plan.chooses or plan.members != tuple(members) or work_of(first.te).operations:
            return None
        origin = first.te.origin.merged(*(m.te.origin for m in members))
        return merged_te(plan, self._names.fresh(f"{first.te.name}_x{len(members)}"), origin, self._packs)

    def _copy(self, tensors: Sequence[Tensor]) -> ExternTE:
        first = tensors[0]
        name = self._names.fresh(f"{first.name}_and_{len(tensors) - 1}_more")
        whole = Tensor(name, (len(tensors), *first.shape), first.dtype)
        producers = [self.program.producers.get(tensor) for tensor in tensors]
        origins = [te_.origin for te_ in producers if te_ is not None]
        origin = origins[0].merged(*origins[1:]) if origins else Origin((), (), name)
        func = _copies(len(tensors), (first.shape, first.dtype), lambda: _copying(len(tensors), first))
        return ExternTE(name, func, tuple(tensors), (whole,), origin)

    def _price(self, te_: TE) -> float | None:
        """Cycles of a product, asked once for equal ones."""
        constants = tuple(n for n, tensor in enumerate(te_.inputs) if tensor in self.program.constants)
        return self._cycles((te_.op, constants), lambda: function_cycles(_function(te_), constants, self._machine))


def _function(te_: TE) -> tirx.PrimFunc:
    inputs = [te.placeholder(t.shape, t.dtype, name=f"in{number}") for number, t in enumerate(te_.inputs)]
    return primfunc_from_tensors([*inputs, *te_.on(inputs, name="t0")], "stage")


_copying_functions: OncePer[tirx.PrimFunc] = OncePer()


def _copies(count: int, of: tuple[tuple[int, ...], str], make: Callable[[], tirx.PrimFunc]) -> tirx.PrimFunc:
    return _copying_functions((count, of), make)


def _copying(count: int, like: Tensor) -> tirx.PrimFunc:
    """A function that puts tensors behind each other."""
    parts = [te.placeholder(like.shape, like.dtype, name=f"in{number}") for number in range(count)]

    def element(number: tirx.Var, *indices: tirx.Var) -> tirx.PrimExpr:
        value = parts[-1](*indices)
        for last, part in reversed(list(enumerate(parts[:-1]))):
            value = tirx.if_then_else(number <= last, part(*indices), value)
        return value

    whole = te.compute((count, *like.shape), element, name="t0")
    return primfunc_from_tensors([*parts, whole], "stage")


def _reading(member: Member, tensor: Tensor, whole: Tensor, number: int) -> Member:
    """A member that reads `tensor` as one of a stack."""
    operands = tuple(
        LoadOperand(whole, (number,), operand.values) if operand.tensor is tensor else operand
        for operand in member.operands
    )
    return replace(member, operands=operands, moved=True)
