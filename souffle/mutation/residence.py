"""Mutations of what stays on chip for the steps of a loop: what fills it, when, for whom, and what reads it.

::

    float kept[n];                          left out, of fewer threads, of another tile, from another tensor, moved,
    if (block < T) fill(block, tid, w, kept);     with the registers of another stage
    for step:
      if (tile < T) {
        if (num_blocks < T) fill(...);      the same
        use(tile, tid, x, y, kept); }       overwritten before or after it, in every step or in one

Of ``fill``, elements that are read from another place or another constant, or put into another register, for some
threads or tiles only, or not at all; of ``use``, another register read, and one overwritten for the steps that follow.
What is said of registers is so of a slice of shared memory, too; that may also lie elsewhere, and lack the barriers
around its life.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.definitions import StageDefinition
from souffle.kernel.merge import KEPT_FUNCTION, OFFSET_FUNCTION
from souffle.mutation.barriers import moves
from souffle.mutation.expression_changes import edited, heads, nodes_of
from souffle.mutation.in_part import in_part
from souffle.mutation.mutants import Mutant, Mutation, Mutations
from souffle.mutation.statement_paths import Change, Path, Site, at, nothing, replaced, sites
from souffle.schedule.lower.kept_arrays import SCOPES
from souffle.tvm_compat import collect, sequence
from souffle.verify.bare import bare_functions
from souffle.verify.expressions import Undecided
from souffle.verify.indices import operator_name
from souffle.verify.kept_functions import fills_registers
from souffle.verify.values import Agreement, Mismatch

__all__ = ["ResidenceMutations", "residence_changes"]

_KIND = "residence"
_LOADS = (TensorLoad,)


@dataclass(frozen=True, eq=False)
class _ResidenceMutant(Mutant):
    """One of which the values of all stages that find constants in registers are looked at.

    A kernel that fills them from another constant changes what such a stage computes.
    """

    held: tuple[StageDefinition, ...] = ()

    def values(self) -> Agreement | Mismatch | Undecided | None:
        whole = bare_functions(self.kernels, self.functions)
        found: Agreement | Mismatch | Undecided | None = None
        for definition in self.held:
            if any(name not in whole for name, _, _ in definition.functions):
                return Undecided(f"what {definition.functions[0][0]} finds in its registers")
            found = Mutant.values(replace(self, definition=definition))
            if not isinstance(found, Agreement):
                break
        return found


class ResidenceMutations(Mutations):
    """The mutations of a compiled network that are on what stays in registers, and no others.

    Parameters
    ----------
    compiled : CompiledKernels
        From :func:`souffle.pipeline.compile_cuda`.
    """

    def __init__(self, compiled: CompiledKernels) -> None:
        super().__init__(compiled)
        self.changes = (residence_changes,)
        calls = (call for merged in compiled.merged for call in merged.shape.stage_calls if call.kept)
        self._held = tuple(dict.fromkeys(self.definitions[call.functions[0].name] for call in calls))

    def mutant(self, mutation: Mutation) -> Mutant:
        """The network with a mutation; see :meth:`souffle.mutation.mutants.Mutations.mutant`."""
        made = super().mutant(mutation)
        own = self._held if made.definition is None else (made.definition,)
        fields = (made.plan, made.kernels, made.functions, made.merged, made.changed, made.definition)
        return _ResidenceMutant(mutation, *fields, held=own)


def residence_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    """Of a kernel, its calls that are given registers; of a function that is given some, what it does with them."""
    if any(getattr(parameter.ty, "storage_scope", "") in SCOPES for parameter in func.params):
        yield from _fill_changes(func) if fills_registers(func) else _use_changes(func)
        return
    threads = [s.statement.node.var for s in sites(func) if _is_thread_extent(s.statement)]
    if len(threads) == 2:
        yield from _KernelChanges(func, *threads).all()


def _is_thread_extent(statement: tirx.Stmt) -> bool:
    return isinstance(statement, tirx.AttrStmt) and statement.attr_key == "thread_extent"


def _change(func: tirx.PrimFunc, action: str, what: str, path: Path, new: tirx.Stmt) -> Change:
    """A statement in the place of another."""
    return Change(_KIND, action, what, at(func.body, path), lambda: func.with_body(replaced(func.body, path, new)))


# Kernels


@dataclass(frozen=True, eq=False)
class _Held:
    """A call that is given registers, with those: where they begin, as it is told."""

    site: Site
    tensors: tuple[Any, ...]
    registers: tuple[Any, ...]

    @property
    def call(self) -> Call:
        return self.site.statement.value

    def told(self, tile: Any = None, thread: Any = None, tensors: Any = None, registers: Any = None) -> tirx.Stmt:
        """The call with other arguments."""
        own = self.call.args
        given = self.registers if registers is None else registers
        rest = [*(self.tensors if tensors is None else tensors), *given, *own[2 + len(self.tensors) + len(given) :]]
        first = (own[0] if tile is None else tile, own[1] if thread is None else thread)
        return tirx.Evaluate(Call(self.call.op, [*first, *rest]))


class _KernelChanges:
    """Of one kernel."""

    def __init__(self, func: tirx.PrimFunc, block: Any, thread: Any) -> None:
        self.func, self.block, self.thread = func, block, thread
        self.allocated = [s for s in sites(func) if isinstance(s.statement, tirx.AllocBuffer) and _is_local(s)]
        self.buffers = [site.statement.buffer for site in self.allocated]
        self.held = [one for site in sites(func) if (one := self._held(site)) is not None]
        # Who comes before any loop fills; and so does whoever is the same function.
        names = {_name(one) for one in self.held if not self._loops(one.site.path)}
        self.fills = [one for one in self.held if _name(one) in names]
        self.uses = [one for one in self.held if _name(one) not in names]

    def _held(self, site: Site) -> _Held | None:
        call = site.statement.value if isinstance(site.statement, tirx.Evaluate) else None
        if not (isinstance(call, Call) and isinstance(call.op, tvm.ir.GlobalVar)):
            return None
        own = [n for n, one in enumerate(call.args) if _is_slice(one) or self._size(one) is not None]
        return _Held(site, tuple(call.args[2 : own[0]]), tuple(call.args[n] for n in own)) if own else None

    def _loops(self, path: Path) -> list[tirx.For]:
        around = [at(self.func.body, path[:length]) for length in range(len(path))]
        return [one for one in around if isinstance(one, tirx.For)]

    def all(self) -> Iterator[Change]:
        for fill in self.fills:
            yield from self._who_and_when(fill)
            yield from self._from_where(fill)
        for use in self.uses:
            yield from self._overwritten(use)
        for one in self.held:
            yield from self._other_registers(one)
        for site in self.allocated:
            yield from self._declared_inside(site)
        yield from self._elsewhere()
        yield from self._barriers()

    def _who_and_when(self, fill: _Held) -> Iterator[Change]:
        func, site = self.func, fill.site
        change = partial(_change, func)
        name = _name(fill)
        yield change("left out", f"{name} is not called", site.path, nothing())
        for who, new in in_part(site.statement, fill.call.args[0], self.thread):
            yield change("in part", f"{name} is called for {who}", site.path, new)
        own = fill.call.args[0]
        for what, tile in {"the next tile": own + 1, "the tile before": own - 1, "tile 0": own * 0}.items():
            yield change("another tile", f"{name} is called for {what}", site.path, fill.told(tile=tile))
        one = tirx.IntImm("int32", 1)
        for what, thread in {"the next": self.thread + 1, "its neighbour": tirx.bitwise_xor(self.thread, one)}.items():
            yield change("another thread", f"{name} is called for {what} thread", site.path, fill.told(thread=thread))
        around = site.path
        while around and isinstance(at(func.body, around[:-1]), tirx.IfThenElse):
            around = around[:-1]
            condition = at(func.body, around).condition
            if not isinstance(condition, tirx.LT):
                continue
            inside = at(func.body, around).then_case
            for what, other in {
                "never": tirx.const(False, "bool"),
                "for one less": tirx.LT(condition.a, condition.b - 1),
                "for half": tirx.LT(condition.a, tirx.truncdiv(condition.b, tirx.IntImm("int32", 2))),
                "for the others": tirx.Not(condition),
            }.items():
                new = tirx.IfThenElse(other, inside, None)
                yield change("in part", f"{condition} before {name} holds {what}", around, new)
        outer = site.path
        while outer and isinstance(at(func.body, outer[:-1]), tirx.IfThenElse):
            outer = outer[:-1]
        for path in dict.fromkeys((site.path, outer)):
            for action, what, body in moves(func.body, path):
                make = partial(lambda body: func.with_body(body()), body)
                yield Change(_KIND, action, f"{name} {what}", at(func.body, path), make)

    def _from_where(self, fill: _Held) -> Iterator[Change]:
        """In this call, and in all that fill the same registers."""
        own = [one for one in self.fills if _same(one.registers, fill.registers)]
        for action, what, given in self._other_tensors(fill):
            yield _change(self.func, action, f"{_name(fill)} {what}", fill.site.path, fill.told(tensors=given))
            if fill is own[0] and len(own) > 1:
                make = partial(self._in_all, own, given)
                yield Change(_KIND, action, f"{_name(fill)} {what}, in each call", fill.site.statement, make)

    def _other_tensors(self, fill: _Held) -> Iterator[tuple[str, str, list[Any]]]:
        for number, own in enumerate(fill.tensors):
            for other in self.func.params[:-1]:
                if not other.same_as(own) and str(other.ty) == str(own.ty):
                    given = [*fill.tensors[:number], other, *fill.tensors[number + 1 :]]
                    yield "another tensor", f"reads {other.name} for {own}", given
            further = tirx.call_extern(own.ty, OFFSET_FUNCTION, own, tirx.IntImm("int64", 4))
            given = [*fill.tensors[:number], further, *fill.tensors[number + 1 :]]
            yield "another place", f"reads {own} 4 elements further", given
        for number in range(len(fill.tensors) - 1):
            swapped = [*fill.tensors]
            swapped[number : number + 2] = swapped[number : number + 2][::-1]
            if str(swapped[number].ty) == str(swapped[number + 1].ty):
                what = f"reads {swapped[number]} and {swapped[number + 1]} for each other"
                yield "another tensor", what, swapped

    def _in_all(self, fills: Sequence[_Held], tensors: Sequence[Any]) -> tirx.PrimFunc:
        body = self.func.body
        for one in fills:
            body = replaced(body, one.site.path, one.told(tensors=tensors))
        return self.func.with_body(body)

    def _overwritten(self, use: _Held) -> Iterator[Change]:
        own = next((one for one in self.fills if _same(one.registers, use.registers)), None)
        if own is None:
            return
        steps = self._loops(use.site.path)[0]
        tile = use.call.args[0]
        ways = {"what the next tile needs": own.told(tile=tile + 1), "what tile 0 needs": own.told(tile=tile * 0)}
        # Another stage's constants, as far as there are registers of its types.
        for other in self.fills:
            taken = self._matching(other.registers, use.registers)
            if _name(other) != _name(own) and taken and not self._loops(other.site.path):
                ways[f"what {_name(other)} reads"] = other.told(tile=tile, registers=taken)
        for what, statement in ways.items():
            for when, condition in {
                "": None,
                ", in the last step": tirx.EQ(steps.loop_var, steps.extent - 1),
                ", in step 3": tirx.EQ(steps.loop_var, tirx.IntImm("int32", 3)),
            }.items():
                inside = statement if condition is None else tirx.IfThenElse(condition, statement, None)
                for place, both in (("before", (inside, use.site.statement)), ("after", (use.site.statement, inside))):
                    if place == "after" and "last" in when:
                        continue
                    told = f"the registers of {_name(use)} get {what} {place} it{when}"
                    yield _change(self.func, f"overwritten {place}", told, use.site.path, sequence(*both))

    def _matching(self, wanted: Sequence[Any], preferred: Sequence[Any]) -> list[Any]:
        """Registers of the same types, with room for as much, the preferred ones first; none where there are none."""
        if any(self._size(one) is None for one in (*wanted, *preferred)):
            return []
        known = (*preferred, *(buffer.data for buffer in self.buffers))
        found: list[Any] = []
        for one in wanted:
            found += [b for b in known if str(b.ty) == str(one.ty) and self._size(b) >= self._size(one)][:1]
        return found if len(found) == len(wanted) and any(_same([b], [p]) for b in found for p in preferred) else []

    def _size(self, argument: Any) -> int | None:
        """Elements of the registers that an argument points to, if it does."""
        same = (buffer for buffer in self.buffers if tvm_ffi.structural_equal(argument, buffer.data))
        return next((int(buffer.shape[0]) for buffer in same), None)

    def _other_registers(self, held: _Held) -> Iterator[Change]:
        for number, own in enumerate(held.registers):
            known = {str(one): one for each in self.held for one in each.registers}
            for other in known.values():
                if str(other) != str(own) and str(other.ty) == str(own.ty):
                    given = [*held.registers[:number], other, *held.registers[number + 1 :]]
                    what = f"{_name(held)} is given {other} for {own}"
                    yield _change(self.func, "another array", what, held.site.path, held.told(registers=given))

    def _elsewhere(self) -> Iterator[Change]:
        """Slices from another byte on, of one call or of all."""
        starts = {str(one): one for held in self.held for one in held.registers if _is_slice(one)}
        for own in starts.values():
            for by in (4, 16, -16, 128, -128, 1 << 12):
                moved = Call(own.op, [own.args[0], own.args[1] + by], own.attrs, own.ty_args, own.span, own.ty)
                what = f"{own} begins {by:+d} bytes off"
                for held in self.held:
                    if any(one.same_as(own) or str(one) == str(own) for one in held.registers):
                        given = [moved if str(one) == str(own) else one for one in held.registers]
                        told = f"{what}, for {_name(held)}"
                        yield _change(self.func, "elsewhere", told, held.site.path, held.told(registers=given))
                make = partial(self._all_at, str(own), moved)
                yield Change(_KIND, "elsewhere", f"{what}, for all", self.held[0].site.statement, make)

    def _all_at(self, own: str, place: Any) -> tirx.PrimFunc:
        def other(call: Call) -> Call:
            return place if _is_slice(call) and str(call) == own else call

        return self.func.with_body(tvm_ffi.structural_map(self.func.body, (Call, other)))

    def _barriers(self) -> Iterator[Change]:
        """Barriers around the life of slices, each left out."""
        if not any(_is_slice(one) for held in self.held for one in held.registers):
            return
        for site in sites(self.func):
            waits = [call for call in collect(site.statement, Call) if operator_name(call) == "tirx.tvm_storage_sync"]
            if isinstance(site.statement, tirx.Evaluate) and waits:
                yield _change(self.func, "no barrier", "a block barrier is left out", site.path, nothing())

    def _declared_inside(self, site: Site) -> Iterator[Change]:
        """Registers that are declared in each step anew."""
        body, buffer = self.func.body, site.statement.buffer
        use = next((one for one in self.uses if _same(one.registers, [buffer.data])), None)
        if use is None:
            return
        fills = [one for one in self.fills if _same(one.registers, use.registers)]
        loop = next(p for n in range(len(use.site.path)) if isinstance(at(body, p := use.site.path[:n]), tirx.For))

        def make() -> tirx.PrimFunc:
            made = replaced(body, (*loop, 0), sequence(site.statement, at(body, (*loop, 0))))
            for one in fills:
                if not self._loops(one.site.path):
                    made = replaced(made, one.site.path, nothing())
            return self.func.with_body(replaced(made, site.path, nothing()))

        yield Change(_KIND, "declared inside", f"{buffer.name} is of each step anew", site.statement, make)


def _is_slice(node: Any) -> bool:
    """Whether an argument is where a slice of shared memory begins."""
    return isinstance(node, Call) and operator_name(node) == KEPT_FUNCTION


def _is_local(site: Site) -> bool:
    return str(site.statement.buffer.scope()) == "local"


def _name(held: _Held) -> str:
    return str(held.call.op.name_hint)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        a.same_as(b) or tvm_ffi.structural_equal(a, b) for a, b in zip(some, others, strict=True)
    )


# Functions


def _given(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """The registers, or slices of shared memory, that a function is given."""
    local = [p for p in func.params if getattr(p.ty, "storage_scope", "") in SCOPES]
    declared = [s.statement for s in sites(func) if isinstance(s.statement, tirx.DeclBuffer)]
    return [d.buffer for d in declared if any(p.same_as(d.data) for p in local)]


def _fill_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    registers = _given(func)
    tile, thread = func.params[:2]
    declared = [s.statement.buffer for s in sites(func) if isinstance(s.statement, tirx.DeclBuffer)]
    tensors = [one for one in declared if not any(one.same_as(own) for own in registers)]
    for site in sites(func):
        store = site.statement
        if not isinstance(store, tirx.BufferStore):
            continue
        change = partial(_change, func)
        yield change("left out", f"nothing is put into {store.buffer.name}", site.path, nothing())
        for who, new in in_part(store, tile, thread):
            yield change("in part", f"{store.buffer.name} is filled for {who}", site.path, new)
        for what, indices in _places(store.indices):
            other = tirx.BufferStore(store.buffer, store.value, indices)
            yield change("another register", f"{store.buffer.name} is filled {what}", site.path, other)
        for number, load in enumerate(nodes_of(store.value, _LOADS)):
            for what, by in _distances(load):
                make = edited(func, site.path, 0, _LOADS, number, partial(_further, by))
                yield Change(_KIND, "another place", f"{load.source.name} is read {what}", store, make)
            for what, variable in (("tile", tile), ("thread", thread)):
                for by in (1, -1):
                    if any(v.same_as(variable) for index in load.indices for v in nodes_of(index, (tvm.ir.Var,))):
                        make = edited(func, site.path, 0, _LOADS, number, partial(_of_another, variable, by))
                        told = f"{load.source.name} is read where {what} {by:+d} does"
                        yield Change(_KIND, "another place", told, store, make)
            for other in tensors:
                if not other.same_as(load.source) and str(other.dtype) == str(load.source.dtype):
                    make = edited(func, site.path, 0, _LOADS, number, partial(_of_tensor, other))
                    yield Change(_KIND, "another tensor", f"{other.name} is read for {load.source.name}", store, make)


def _use_changes(func: tirx.PrimFunc) -> Iterator[Change]:
    registers = _given(func)
    tile, thread = func.params[:2]
    for site in sites(func):
        for number, head in enumerate(heads(site.statement)):
            for index, load in enumerate(nodes_of(head, _LOADS)):
                if not any(load.source.same_as(own) for own in registers):
                    continue
                for what, indices in _places(load.indices):
                    make = edited(func, site.path, number, _LOADS, index, partial(_at_places, indices))
                    told = f"{load.source.name} is read {what}"
                    yield Change(_KIND, "another register", told, site.statement, make)
    for buffer in registers:
        count = int(buffer.shape[0])
        for place in dict.fromkeys((0, count // 2, count - 1)):
            index = tirx.IntImm("int32", place)
            neighbour = tirx.IntImm("int32", place - 1 if place else min(1, count - 1))
            values = {"zero": tirx.const(0, str(buffer.dtype)), "its neighbour": buffer[neighbour]}
            for what, value in values.items():
                store = tirx.BufferStore(buffer, value, [index])
                for who, new in (("every tile", store), *in_part(store, tile, thread)):
                    told = f"{buffer.name}[{place}] becomes {what} after a step, for {who}"
                    body = sequence(func.body, new)
                    make = partial(lambda body: func.with_body(body), body)
                    yield Change(_KIND, "overwritten in a step", told, store, make)


def _places(indices: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Registers beside those that are meant, with how it is told."""
    *outer, last = indices
    ramp = isinstance(last, tirx.Ramp)
    start = last.base if ramp else last
    lanes = int(last.lanes) if ramp else 1
    strides = [int(one.b) for one in nodes_of(start, (tirx.Mul,)) if isinstance(one.b, tirx.IntImm)]
    for by in dict.fromkeys((1, -1, lanes, -lanes, *strides)):
        moved = tirx.Ramp(start + by, last.stride, last.lanes) if ramp else start + by
        yield f"{by:+d} registers off", [*outer, moved]
    zero = start * 0
    yield "at the first register", [*outer, tirx.Ramp(zero, last.stride, last.lanes) if ramp else zero]


def _distances(load: Any) -> Iterator[tuple[str, int]]:
    """How far a slice may lie beside what is meant: an element, and each stride that its place is made of."""
    strides = {1: None}
    for factor in nodes_of(load.indices[-1], (tirx.Mul,)):
        if isinstance(factor.b, tirx.IntImm):
            strides[int(factor.b)] = None
    for stride in strides:
        for by in (stride, -stride):
            yield f"{by:+d} elements off", by


def _further(by: int, load: Any) -> Any:
    *outer, last = load.indices
    moved = tirx.Ramp(last.base + by, last.stride, last.lanes) if isinstance(last, tirx.Ramp) else last + by
    return tirx.BufferLoad(load.source, [*outer, moved])


def _of_another(variable: Any, by: int, load: Any) -> Any:
    def other(found: Any) -> Any:
        return variable + by if found.same_as(variable) else found

    return tirx.BufferLoad(load.source, [tvm_ffi.structural_map(i, (tvm.ir.Var, other)) for i in load.indices])


def _of_tensor(other: Any, load: Any) -> Any:
    return tirx.BufferLoad(other, list(load.indices))


def _at_places(indices: Sequence[Any], load: Any) -> Any:
    return tirx.BufferLoad(load.source, list(indices))
