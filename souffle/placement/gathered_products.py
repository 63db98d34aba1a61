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

``G`` and ``P_m`` are no expressions, which readers would take in, but pieces (:mod:`souffle.program.pieces`), that lie
in their wholes where they can. So steps that differ in their pieces alone are one function. Where the ``X_m`` are
slices of one tensor or pieces of one, the product reads that.

Worth it where the product of all, and a copy of what it reads and gives, is predicted to take less time: a tile of few
rows is bound by reading its weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from tvm import te, tirx

from souffle.analysis import DependenceOrder
from souffle.decision import Decision
from souffle.program import TE, ExternTE, Item, Origin, Tensor, TEProgram
from souffle.program.names import NameSupply
from souffle.program.pieces import ALIGNMENT, piece_te, stack_te
from souffle.program.shared import OncePer
from souffle.schedule.cpu import function_cycles, host_target, machine_of
from souffle.transform.horizontal.merged_te import merged_te
from souffle.transform.horizontal.operands import LoadOperand, Member, member_of, template_of
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


def gathered_products(
    program: TEProgram, processor: str | None = None
) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Join independent products with the same weights, where that is predicted to take less time.

    Parameters
    ----------
    program : TEProgram
    processor : str, optional
        By LLVM's name; this machine's without.

    Returns
    -------
    program : TEProgram
        The same object where nothing was joined.
    decisions : tuple of Decision
        One for each set of products that could be joined.
    """
    gathering = _Gathering(program, processor)
    for products in _with_equal_weights(program):
        gathering.join(products)
    return gathering.result(), tuple(gathering.decisions)


def _with_equal_weights(program: TEProgram) -> list[list[TE]]:
    """Products that differ in one tensor only, which is no constant."""
    groups: dict[Hashable, list[TE]] = {}
    for te_ in program.tes:
        if not isinstance(te_, TE) or not contracts(te_) or len(te_.outputs) != 1:
            continue
        loads = template_of(te_).loads
        varied = {load.input for load in loads if te_.inputs[load.input] not in program.constants}
        if len(varied) != 1 or len(varied) == len(te_.inputs):
            continue
        fixed = tuple((None if n in varied else tensor) for n, tensor in enumerate(te_.inputs))
        key = (template_of(te_).key, fixed, tuple((load.input, load.values) for load in loads))
        groups.setdefault(key, []).append(te_)
    return [group for group in groups.values() if len(group) > 1]


class _Gathering:
    """The sets that are joined so far."""

    def __init__(self, program: TEProgram, processor: str | None) -> None:
        self.program = program
        self.decisions: list[Decision] = []
        self._order = DependenceOrder(program)
        self._pieces = {*program.inputs, *program.outputs}
        self._machine = machine_of(host_target(processor=processor))
        self._names = NameSupply(tensor.name for tensor in program.tensors())
        self._packs = Packs(program.constants, self._names.fresh)
        self._wholes: dict[frozenset[Tensor], dict[Tensor, tuple[Tensor, int]]] = {}
        self._gone: set[Item] = set()
        self._made: list[Item] = []
        self._cycles: OncePer[float | None] = OncePer()

    def join(self, products: Sequence[TE]) -> None:
        """Join those of some products with the same weights that are independent."""
        for independent in self._order.independent(products):
            count = -(-len(independent) // _MOST_TENSORS)
            for part in range(count):
                self._try(independent[part * len(independent) // count : (part + 1) * len(independent) // count])

    def result(self) -> TEProgram:
        """The program of the joined products."""
        if not self._made:
            return self.program
        return self.program.with_tes([*(te_ for te_ in self.program.tes if te_ not in self._gone), *self._made])

    def _try(self, products: Sequence[TE]) -> None:
        if len(products) < 2:
            return
        rows = tuple(self._varied(te_) for te_ in products)
        known = self._wholes.get(frozenset(rows))
        if known is not None and len(known) == len(products):
            # In the order in which they lie there, as the steps of a layer that runs backwards do not.
            products = sorted(products, key=lambda te_: known[self._varied(te_)][1])
            rows = tuple(self._varied(te_) for te_ in products)
            gathered = known[rows[0]][0]
        else:
            gathered = self._gathered(rows)
        whole = gathered if isinstance(gathered, Tensor) else gathered.outputs[0]
        joined = self._joined(products, rows, whole)
        apart, together = self._price(products[0]), self._price(joined)
        if apart is None or together is None:
            return
        apart, together = len(products) * apart, together + _CALL_CYCLES
        if isinstance(gathered, ExternTE) and not all(self._lies_in_place(tensor) for tensor in rows):
            together += _CALL_CYCLES + 2 * whole.nbytes / _COPIED_BYTES
        results = [te_.output for te_ in products if not self._lies_in_place(te_.output)]
        together += sum(_CALL_CYCLES + 2 * tensor.nbytes / _COPIED_BYTES for tensor in results)
        figures = f"{together / 1e3:.0f} thousand cycles predicted for one product, {apart / 1e3:.0f} for all"
        names, accepted = ", ".join(te_.name for te_ in products), together < apart
        self.decisions.append(Decision("gathered", f"{names}: {joined.name}" if accepted else names, accepted, figures))
        if not accepted:
            return
        self._order.join(products)
        self._gone.update(products)
        self._note(rows, whole)
        self._note([te_.output for te_ in products], joined.output)
        self._made += [joined] if gathered is whole else [gathered, joined]
        self._made += [piece_te(joined.output, n, te_.output, te_.origin) for n, te_ in enumerate(products)]

    def _note(self, pieces: Sequence[Tensor], whole: Tensor) -> None:
        self._wholes[frozenset(pieces)] = {piece: (whole, number) for number, piece in enumerate(pieces)}
        self._pieces.update(pieces)

    def _lies_in_place(self, piece: Tensor) -> bool:
        return piece.nbytes % ALIGNMENT == 0 and piece not in self._pieces

    def _varied(self, product: TE) -> Tensor:
        return next(tensor for tensor in product.inputs if tensor not in self.program.constants)

    def _joined(self, products: Sequence[TE], rows: Sequence[Tensor], whole: Tensor) -> TE:
        members = [
            _reading(member_of(te_, {}), tensor, whole, number)
            for number, (te_, tensor) in enumerate(zip(products, rows, strict=True))
        ]
        first = products[0]
        origin = first.origin.merged(*(te_.origin for te_ in products))
        return merged_te(self._plan(members), self._names.fresh(f"{first.name}_x{len(products)}"), origin, self._packs)

    def _plan(self, members: Sequence[Member]) -> MergePlan:
        return stacked_plan(members, self.program.constants.__contains__)

    def _gathered(self, rows: Sequence[Tensor]) -> TE | ExternTE:
        """What puts tensors behind each other."""
        producers = [self.program.producers.get(tensor) for tensor in rows]
        slices = self._slices([te_ for te_ in producers if isinstance(te_, TE)], len(rows))
        if slices is not None:
            return slices
        first = rows[0]
        name = self._names.fresh(f"{first.name}_and_{len(rows) - 1}_more")
        origins = [te_.origin for te_ in producers if te_ is not None]
        return stack_te(name, rows, origins[0].merged(*origins[1:]) if origins else Origin((), (), name))

    def _slices(self, producers: Sequence[TE], count: int) -> TE | None:
        """A TE whose first axis counts tensors, where all are read from the same tensors by one formula."""
        if len(producers) < count or any(len(te_.outputs) != 1 or te_.is_reduction for te_ in producers):
            return None
        members = [member_of(te_, {}) for te_ in producers]
        first = members[0]
        if any(m.template.key != first.template.key or m.te.inputs != first.te.inputs for m in members):
            return None
        plan = self._plan(members)
        if plan.chooses or plan.members != tuple(members) or work_of(first.te).operations:
            return None
        origin = first.te.origin.merged(*(m.te.origin for m in members))
        return merged_te(plan, self._names.fresh(f"{first.te.name}_x{count}"), origin, self._packs)

    def _price(self, te_: TE) -> float | None:
        """Cycles of a product, asked once for equal ones."""
        constants = tuple(n for n, tensor in enumerate(te_.inputs) if tensor in self.program.constants)
        return self._cycles((te_.op, constants), lambda: function_cycles(_function(te_), constants, self._machine))


def _function(te_: TE) -> tirx.PrimFunc:
    inputs = [te.placeholder(t.shape, t.dtype, name=f"in{number}") for number, t in enumerate(te_.inputs)]
    return primfunc_from_tensors([*inputs, *te_.on(inputs, name="t0")], "stage")


def _reading(member: Member, tensor: Tensor, whole: Tensor, number: int) -> Member:
    """A member that reads `tensor` as one of a stack."""
    operands = tuple(
        LoadOperand(whole, (number,), operand.values) if operand.tensor is tensor else operand
        for operand in member.operands
    )
    return replace(member, operands=operands, moved=True)
