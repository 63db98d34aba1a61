"""Arrays of a thread that are slices of the block's shared memory, as arrays of its own: the same registers would be.

::

    if (block < T) fill(block, tid, w, souffle_kept(1024));          float kept[n];
    for step: use(tile, tid, x, y, souffle_kept(1024));         =    if (block < T) fill(block, tid, w, kept);
    block barrier                                                    for step: use(tile, tid, x, y, kept);

    fill: kept[i * threads + tid] = ...                              fill: kept[i] = ...

**Theorem.** The two do the same, with `kept` alive from the first call to the last that is given it, if

1. no element is touched by two threads, and what a thread touches as element ``e`` it does in the other as one element
   of its own, for the functions that are given the array alike;
2. nothing else that is called while it is alive touches those bytes: neither as memory of the pool from its start, nor
   as parts of tensors, nor as another array;
3. a block barrier stands between what touches them before, and the first call, and between the last one and what
   touches them after;
4. no part of a tensor that lies there is written before and read after.

*Proof.* Renaming the bytes of each thread's elements to those of its own array maps one execution to the other: it is
one to one (1), and while the array is alive nothing else is there (2, 4); what was there before or comes after is
ordered (3). Nothing is taken from who made the functions: who touches what is counted out for all threads and turns.

What is then proven of arrays that are kept (:mod:`souffle.verify.kept_memory`) holds of slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from souffle.certificate import Counterexample
from souffle.codegen.plan import Kernel
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import collect, const_int, sequence, statements_of
from souffle.verify.expressions import Axis, Expr, Undecided, linear_terms, variable
from souffle.verify.indices import index_of, operator_name
from souffle.verify.other_forms import launch_of, other_forms, with_launch
from souffle.verify.slice_elements import elements_of, own_place
from souffle.verify.wait_names import ARRIVE_FUNCTION, GRID_WAITS, LEAVE_FUNCTION

__all__ = ["Sliceless", "without_slices"]

_PLACE, _WINDOW = "souffle_kept", "souffle_window"
_WAITS = (*GRID_WAITS, ARRIVE_FUNCTION, LEAVE_FUNCTION)
_WIDEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class Sliceless:
    """Kernels and functions whose threads have arrays of their own in the place of slices.

    Attributes
    ----------
    kernels, functions : mapping of str to PrimFunc
    ends : mapping of str to int
        By the kernels' names: bytes of shared memory that their slices reach to.
    findings : mapping of str to sequence
        By the kernels' names: counterexamples, and what is undecided.
    """

    kernels: Mapping[str, tirx.PrimFunc]
    functions: Mapping[str, tirx.PrimFunc]
    ends: Mapping[str, int] = field(default_factory=dict)
    findings: Mapping[str, Sequence[Counterexample | Undecided]] = field(default_factory=dict)

    def beyond(self, kernel: Kernel) -> Iterator[Counterexample | Undecided]:
        """What is wrong with the slices of a kernel, as it is launched."""
        yield from self.findings.get(kernel.name, ())
        end = self.ends.get(kernel.name, 0)
        if end > kernel.dynamic_shared_bytes:
            why = f"they reach to byte {end} of shared memory, the launch has {kernel.dynamic_shared_bytes}"
            yield Counterexample("does not fit", kernel.name, (), (), (), "slices that are kept", why)


def without_slices(kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc]) -> Sliceless:
    """The same kernels with arrays of threads in the place of slices, as far as these are the same.

    Parameters
    ----------
    kernels, functions : mapping of str to PrimFunc
        By their names; the functions are those that the kernels call.
    """

    def reader_of(name: str, kernel: tirx.PrimFunc) -> _Kernel | None:
        has_any = any(operator_name(call) == _PLACE for call in collect(kernel.body, Call))
        return _Kernel(name, kernel, functions) if has_any else None

    found = other_forms(kernels, functions, reader_of)
    ends = {name: max((s.end for s in one.slices.values()), default=0) for name, one in found.readers.items()}
    # What could not be made whole is as if it were not there: nothing is said of it.
    whole = {name: function for name, function in found.functions.items() if not _slices_of(function)}
    return Sliceless(found.kernels, whole, ends, found.findings)


@dataclass(eq=False)
class _Slice:
    """An array of all threads: where it lies, its elements' type and number, and who is given it as which parameter."""

    start: int
    dtype: str
    elements: int
    threads: int
    takers: dict[str, tirx.Var] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.elements * tvm.DataType(self.dtype).itemsize

    def __str__(self) -> str:
        return f"the slice from byte {self.start} to {self.end} of shared memory"

    @property
    def each(self) -> int:
        """Elements of a thread."""
        return self.elements // self.threads


@dataclass(eq=False)
class _Kernel:
    """Reads one kernel."""

    name: str
    func: tirx.PrimFunc
    functions: Mapping[str, tirx.PrimFunc]
    findings: list[Counterexample | Undecided] = field(default_factory=list)
    changed: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    slices: dict[int, _Slice] = field(default_factory=dict)

    def whole(self) -> tirx.PrimFunc:
        """The kernel with arrays of threads; what it calls is in `changed`."""
        launch, body = launch_of(self.func)
        threads = [one for one in launch if str(one.node.thread_tag) == "threadIdx.x"]
        if len(threads) != 1:
            raise Undecided("how many threads the blocks of the kernel have")
        statements = statements_of(body)
        for call, who in _calls(body, threads[0].node.var, const_int(threads[0].value)):
            self.given(call, who)
        for one in self.slices.values():
            self.alone(one, statements)
        for name in dict.fromkeys(name for one in self.slices.values() for name in one.takers):
            self.changed[name] = self.function(name)
        own = {
            one.start: tirx.decl_buffer((one.each,), one.dtype, f"slice{number}", scope="local", layout=None)
            for number, one in enumerate(self.slices.values())
        }
        body = structural_map(
            body, (Call, lambda call: own[_start(call)].data if operator_name(call) == _PLACE else call)
        )
        body = sequence(*(tirx.AllocBuffer(buffer) for buffer in own.values()), body)
        return with_launch(self.func, launch, body)

    def wrong(self, rule: str, element: str, why: str, *stages: str) -> None:
        """A counterexample."""
        self.findings.append(Counterexample(rule, self.name, stages, (), (), element, why))

    # What there is

    def given(self, call: Call, threads: int) -> None:
        """Read the slices that a call by so many threads is given."""
        places = [n for n, a in enumerate(call.args) if isinstance(a, Call) and operator_name(a) == _PLACE]
        if not places:
            return
        name = str(getattr(call.op, "name_hint", ""))
        if name not in self.functions:
            raise Undecided(f"a call of {name or call.op} with a slice of shared memory")
        function = self.functions[name]
        for place in places:
            start, parameter = _start(call.args[place]), function.params[place]
            declared = [d.buffer for d in collect(function.body, tirx.DeclBuffer) if d.data.same_as(parameter)]
            if len(declared) != 1 or len(declared[0].shape) != 1:
                raise Undecided(f"the slice {parameter.name} of {name}")
            dtype, elements = str(declared[0].dtype), const_int(declared[0].shape[0])
            known = self.slices.setdefault(start, _Slice(start, dtype, elements, threads))
            if (known.dtype, known.elements, known.threads) != (dtype, elements, threads) or elements % threads:
                raise Undecided(f"the slice of {name} at byte {start}, which others take for another one")
            if start % _WIDEST_BYTES or start < 0:
                self.wrong("misaligned", str(known), f"it begins within {_WIDEST_BYTES} bytes", name)
                raise Undecided(str(known))
            if not known.takers.setdefault(name, parameter).same_as(parameter):
                raise Undecided(f"{name}, which is given one slice twice")

    # Nothing else is there meanwhile

    def alone(self, one: _Slice, statements: Sequence[tirx.Stmt]) -> None:
        """No byte of a slice is anything else's while it is alive, and barriers stand around its life.

        Raises
        ------
        Undecided
            If that is not so, which is a finding too.
        """

        def touches(node: tirx.Stmt) -> str:
            return next((what for what, low, high in self.touched(node, one) if low < one.end and one.start < high), "")

        used = [number for number, statement in enumerate(statements) if _given(statement, one)]
        before, meanwhile = statements[: used[0]], statements[used[0] : used[-1] + 1]
        after = statements[used[-1] + 1 :]
        open_ = ""
        for statement in before:
            open_ = self.left(statement, touches, open_)
        if open_:
            self.taken(one, f"{open_} has bytes of it before, and no block barrier stands between")
        open_ = ""
        for statement in meanwhile:
            if what := touches(statement):
                self.taken(one, f"{what} has bytes of it while threads keep theirs there")
            open_ = self.left(statement, lambda node: "kept" if _given(node, one) else "", open_)
        for statement in after:
            if open_ and (what := touches(statement)):
                self.taken(one, f"{what} has bytes of it after, and no block barrier stands between")
            open_ = self.left(statement, lambda node: "", open_)
        for low, high in self.windows(before) & self.windows(after):
            if low < one.end and one.start < high:
                raise Undecided(f"whether {one} overwrites parts of a tensor that are read after it")

    def taken(self, one: _Slice, why: str) -> None:
        self.wrong("race in a block", str(one), why, *one.takers)
        raise Undecided(str(one))

    def left(self, node: tirx.Stmt, touches: Callable[[tirx.Stmt], str], open_: str) -> str:
        """What a block may still be at behind a statement, with what it may be at before it."""
        if isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                open_ = self.left(part, touches, open_)
            return open_
        if _is_barrier(node):
            return ""
        if isinstance(node, tirx.For | tirx.AttrStmt):
            return self.left(node.body, touches, "") or open_
        if isinstance(node, tirx.IfThenElse):
            cases = [node.then_case, *([] if node.else_case is None else [node.else_case])]
            return next((found for case in cases if (found := self.left(case, touches, ""))), open_)
        return touches(node) or open_

    def touched(self, node: tirx.Stmt, apart: _Slice) -> Iterator[tuple[str, int, int]]:
        """What the calls of a statement touch of shared memory, but for one slice: who, from where, to where."""
        for call in collect(node, Call):
            if operator_name(call) == _PLACE and _start(call) != apart.start:
                other = self.slices[_start(call)]
                yield f"the slice at {other.start}", other.start, other.end
            name = str(getattr(call.op, "name_hint", ""))
            if not isinstance(call.op, tvm.ir.GlobalVar):
                continue
            if name not in self.functions:
                raise Undecided(f"the shared memory of {name}")
            pools = collect(self.functions[name].body, tirx.AllocBuffer)
            own = [const_int(one.buffer.shape[0]) for one in pools if str(one.buffer.scope()) == "shared.dyn"]
            if own:
                yield name, 0, max(own)
            for argument in call.args:
                if isinstance(argument, Call) and operator_name(argument) == _WINDOW:
                    yield (f"a tensor that {name} finds there", *_window(argument, call))

    def windows(self, statements: Sequence[tirx.Stmt]) -> set[tuple[int, int]]:
        """Where parts of tensors lie that some statements touch."""
        found = set()
        for call in (call for statement in statements for call in collect(statement, Call)):
            for argument in call.args if isinstance(call.op, tvm.ir.GlobalVar) else ():
                if isinstance(argument, Call) and operator_name(argument) == _WINDOW:
                    found.add(_window(argument, call))
        return found

    # The functions

    def function(self, name: str) -> tirx.PrimFunc:
        """A function with arrays of its threads in the place of slices.

        Raises
        ------
        Undecided
            If it may touch what is another thread's: then with a counterexample, where it does.
        """
        func, own = self.functions[name], [one for one in self.slices.values() if name in one.takers]
        table: dict[Any, Any] = {}
        forms: dict[Any, tuple[_Slice, tirx.Buffer]] = {}
        for one in own:
            (declared,) = (d.buffer for d in collect(func.body, tirx.DeclBuffer) if d.data.same_as(one.takers[name]))
            pointer = tvm.ir.PointerType(tvm.ir.PrimType(one.dtype), "local")
            parameter = tirx.Var(str(one.takers[name].name), pointer)
            buffer = tirx.decl_buffer((one.each,), one.dtype, str(declared.name), parameter, scope="local", layout=None)
            table[one.takers[name]], forms[declared] = parameter, (one, buffer)
        self.only_elements(name, func, [*forms], list(table))
        for one in own:
            self.owned(one)

        def place(source: tirx.Buffer, indices: Sequence[Any]) -> tuple[tirx.Buffer, list[Any]]:
            one, buffer = forms[source]
            return buffer, [own_place(indices[0], func.params[1], one.threads)]

        def load(node: TensorLoad) -> Any:
            if node.source not in forms:
                return node
            return tirx.BufferLoad(*place(node.source, node.indices))

        def store(node: tirx.BufferStore) -> Any:
            if node.buffer not in forms:
                return node
            buffer, indices = place(node.buffer, node.indices)
            return tirx.BufferStore(buffer, node.value, indices)

        def declare(node: tirx.DeclBuffer) -> Any:
            return node if node.buffer not in forms else tirx.DeclBuffer(forms[node.buffer][1], data=table[node.data])

        body = structural_map(
            func.body, [(TensorLoad, load), (tirx.BufferStore, store), (tirx.DeclBuffer, declare)]
        )
        parameters = [table.get(parameter, parameter) for parameter in func.params]
        return tirx.PrimFunc(parameters, body, func.ret_type, func.attrs, func.span)

    def only_elements(
        self, name: str, func: tirx.PrimFunc, buffers: Sequence[tirx.Buffer], pointers: Sequence[tirx.Var]
    ) -> None:
        """A function touches its slices element by element, and hands them on to nobody."""
        for call in collect(func.body, Call):
            for argument in call.args:
                source = getattr(argument, "source", None)
                taken = source is not None and operator_name(call) == "tirx.address_of"
                known = taken and any(source.same_as(buffer) for buffer in buffers)
                if known or any(argument.same_as(pointer) for pointer in pointers):
                    raise Undecided(f"{name}, which gives a slice of shared memory to others")

    def owned(self, one: _Slice) -> None:
        """Each element of a slice is touched by one thread, as the same of its own, whoever is given the slice."""
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for name, parameter in one.takers.items():
            found += elements_of(name, self.functions[name], parameter, one.threads)
        if not found:
            return
        threads, elements, own = (np.concatenate(parts) for parts in zip(*found, strict=True))
        subject = str(one)
        outside = np.flatnonzero((elements < 0) | (elements >= one.elements) | (own < 0) | (own >= one.each))
        if outside.size:
            at = int(outside[0])
            why = f"thread {threads[at]} touches element {elements[at]}, of {one.elements}"
            self.wrong("out of bounds", subject, why, *one.takers)
            raise Undecided(subject)
        owner = np.full(one.elements, -1, np.int64)
        owner[elements] = threads
        other = np.flatnonzero(owner[elements] != threads)
        if other.size:
            at = int(other[0])
            why = f"threads {threads[at]} and {owner[elements[at]]} both touch element {elements[at]}"
            self.wrong("race in a block", subject, why, *one.takers)
            raise Undecided(subject)
        # One element of a thread's own for each of the slice, and the other way round.
        forth, back = np.full(one.elements, -1, np.int64), np.full(one.elements, -1, np.int64)
        key = threads * one.each + own
        forth[elements], back[key] = own, elements
        if (forth[elements] != own).any() or (back[key] != elements).any():
            raise Undecided(f"which elements of {subject} are the same in {' and '.join(one.takers)}")


def _slices_of(function: tirx.PrimFunc) -> bool:
    return any(getattr(parameter.ty, "storage_scope", "") == "shared" for parameter in function.params)


def _given(node: tirx.Stmt, one: _Slice) -> bool:
    """Whether something in a statement is given a slice."""
    return any(operator_name(call) == _PLACE and _start(call) == one.start for call in collect(node, Call))


def _start(call: Call) -> int:
    """The byte at which a slice begins."""
    if not isinstance(call.args[1], tirx.IntImm):
        raise Undecided(f"where {call} is")
    return const_int(call.args[1])


def _window(window: Call, call: Call) -> tuple[int, int]:
    """Where the parts lie that a call finds in shared memory; of its own tile, in a turn that is counted from 0."""
    start, turns, nbytes, turn, tile = window.args[2:]
    if not all(isinstance(one, tirx.IntImm) for one in (start, turns, nbytes)):
        raise Undecided(f"where {window} is")
    axes: dict[Any, Expr] = {v: variable(Axis(str(v.name), 2)) for v in collect(turn, tvm.ir.Var)}
    _, first = linear_terms(index_of(turn, axes))
    if first or not tvm_ffi.structural_equal(tile, call.args[0]):
        raise Undecided(f"where {window} is")
    return const_int(start), const_int(start) + const_int(turns) * const_int(nbytes)


def _calls(node: tirx.Stmt, thread: tirx.Var, threads: int) -> Iterator[tuple[Call, int]]:
    """The calls in a statement, each with the threads that make it: those below a bound around it, or all."""
    if isinstance(node, tirx.SeqStmt):
        for part in node.seq:
            yield from _calls(part, thread, threads)
    elif isinstance(node, tirx.For | tirx.AttrStmt):
        yield from _calls(node.body, thread, threads)
    elif isinstance(node, tirx.IfThenElse):
        condition, bound = node.condition, threads
        if isinstance(condition, tirx.LT) and condition.a.same_as(thread) and isinstance(condition.b, tirx.IntImm):
            bound = min(threads, const_int(condition.b))
        yield from _calls(node.then_case, thread, bound)
        if node.else_case is not None:
            yield from _calls(node.else_case, thread, threads)
    else:
        yield from ((call, threads) for call in collect(node, Call))


def _is_barrier(node: tirx.Stmt) -> bool:
    """Whether all threads of a block wait there."""
    if not (isinstance(node, tirx.Evaluate) and isinstance(node.value, Call)):
        return False
    name = operator_name(node.value)
    if name == "tirx.tvm_storage_sync":
        return len(node.value.args) == 1 and str(node.value.args[0].value) in ("shared", "shared.dyn")
    return name in _WAITS
