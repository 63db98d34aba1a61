"""A stage's constants on chip: read once by a function of their own, and found there by the stage (paper §6.5).

::

    stage(tile, tid, x, w, y):                    stage_fill(tile, tid, w, kept):
      for i in 0..n:                                for i in 0..n: kept[i] = w[f(tile, tid, i)]
        total += x[g(i)] * w[f(tile, tid, i)]   →
      y[h(tile, tid)] = total                     stage_filled(tile, tid, x, w, y, kept):
                                                    for i in 0..n: total += x[g(i)] * kept[i]
                                                    y[h(tile, tid)] = total

Legal for what the stage reads at places, and under conditions, that its tile, its thread and the turns of loops of
constant length alone decide, from memory that nobody writes: whenever a thread has filled `kept` for a tile, a call for
that tile reads there what it would read in memory. `kept` is in registers, or in a slice of the block's shared memory
that is the thread's own (``kept_arrays.py``). A loop around such a read is unrolled, since registers have names, and
addresses of shared memory that are known are part of the instruction.
What several turns read from neighbours in memory the first function reads together (``wide_fills.py``).
``souffle/verify/kept_memory.py`` proves of each kernel that it does so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.decision import Refused, TooMany
from souffle.schedule.lower.device_function import DeviceFunction
from souffle.schedule.lower.kept_arrays import SCOPES, KeptArrays, held
from souffle.schedule.lower.wide_fills import WideRead, needed, wide_read, widened
from souffle.schedule.resources import aligned
from souffle.tvm_calls import structural_mutate
from souffle.tvm_compat import (
    PrimExpr,
    StatementVisitor,
    choice_parts,
    collect,
    const_int,
    is_branch,
    is_choice,
    only_calculates,
    sequence,
    structural_key,
    substitute,
)
from souffle.wording import counted

__all__ = ["FILLED_SUFFIX", "FILL_SUFFIX", "KeptLoads", "keep_loads"]

FILL_SUFFIX, FILLED_SUFFIX = "_fill", "_filled"
"""What is added to a stage's name for the function that reads its constants, and for what finds them read."""


@dataclass(frozen=True, eq=False)
class KeptLoads:
    """A stage's function in two.

    Attributes
    ----------
    fill : DeviceFunction
        Takes ``tile``, ``tid``, a pointer for each of `reads`, and one for each of `arrays`.
    use : DeviceFunction
        Takes what the stage does, and a pointer for each of `arrays`.
    arrays : tuple of (str, int)
        Type and elements of each array of a thread.
    reads : tuple of int
        Of the stage's tensors, by their numbers, those that `fill` reads.
    scope : str
        Where the arrays are, of :data:`souffle.schedule.lower.kept_arrays.SCOPES`.
    """

    fill: DeviceFunction
    use: DeviceFunction
    arrays: tuple[tuple[str, int], ...]
    reads: tuple[int, ...]
    scope: str = "local"

    @property
    def registers(self) -> int:
        """Of a thread, for all arrays."""
        if self.scope != "local":
            return 0
        return sum(-(-tvm.DataType(dtype).itemsize * count // 4) for dtype, count in self.arrays)

    @property
    def shared_bytes(self) -> int:
        """Of a block, for all arrays."""
        return sum(self.sizes) if self.scope == "shared" else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each array for all threads, up to where the next may begin."""
        return tuple(aligned(self.use.threads * held([array])) for array in self.arrays)

    @property
    def where(self) -> str:
        """In words, where the constants are."""
        if self.scope == "shared":
            return f"{self.shared_bytes} bytes of shared memory"
        return f"{counted(self.registers, 'register')} of each thread"

    @property
    def working_copies(self) -> int:
        """Registers of a thread that arrays of `use` seem to take and do not, since all that they hold is kept."""
        kept = {declared.buffer for declared in collect(self.use.func.body, tirx.DeclBuffer) if _is_local(declared)}
        stores = collect(self.use.func.body, tirx.BufferStore)
        found = 0
        for alloc in collect(self.use.func.body, tirx.AllocBuffer):
            own = [store.value for store in stores if store.buffer.same_as(alloc.buffer)]
            copied = all(isinstance(v, TensorLoad) and any(v.source.same_as(one) for one in kept) for v in own)
            if copied and str(alloc.buffer.scope()) == "local":
                elements = prod(const_int(extent) for extent in alloc.buffer.shape)
                found += -(-tvm.DataType(str(alloc.buffer.dtype)).itemsize * elements // 4)
        return found

    @property
    def nbytes(self) -> int:
        """Of all threads of a tile, for all arrays."""
        return self.use.threads * held(self.arrays)

    def named(self, name: str) -> KeptLoads:
        """The same, of a stage of another name."""
        fill, use = replace(self.fill, name=name + FILL_SUFFIX), replace(self.use, name=name + FILLED_SUFFIX)
        return replace(self, fill=fill, use=use)


def keep_loads(
    function: DeviceFunction, constants: Collection[int], most: int, scope: str = "local"
) -> KeptLoads | Refused:
    """A stage's function in two: one that reads its constants into its threads' arrays, and one that finds them there.

    Parameters
    ----------
    function : DeviceFunction
        With as many threads as its kernel has, or without barriers of fewer.
    constants : collection of int
        Of its tensors, by their numbers, those that nobody writes while the kernel runs.
    most : int
        Registers of a thread that may hold them, or bytes of a block.
    scope : str
        Where the arrays are: ``"local"`` for registers, or ``"shared"``.

    Returns
    -------
    KeptLoads or Refused
    """
    if scope not in SCOPES:
        raise ValueError(f"constants stay in {' or '.join(SCOPES)} memory, not in {scope}")
    if function.partial:
        return Refused(f"{function.name} has fewer threads than its kernel")
    sizes: dict[str, int] = {}
    fill = None
    # How many there are is known when all are found, and arrays say their size.
    for _ in range(2):
        split = _Split(function, constants, scope, sizes)
        fill, use = split.visit(function.func.body, _Context())
        sizes = split.arrays.used()
    if fill is None:
        return Refused(f"{function.name} reads no constants at places that tile, thread and turn alone decide")
    kept = split.made(fill, use)
    wanted, what = (kept.registers, "registers") if scope == "local" else (kept.shared_bytes, "bytes of shared memory")
    if wanted > most:
        of = "of each thread, " if scope == "local" else ""
        return TooMany(f"the constants of a tile take {wanted} {what} {of}of {most} at most", what, wanted, most)
    return kept


@dataclass(frozen=True)
class _Context:
    """What is around a statement: loops of constant length, conditions, and whether it is known when it runs."""

    loops: tuple[tirx.For, ...] = ()
    branches: tuple[int, ...] = ()
    conditions: tuple[PrimExpr, ...] = ()
    known: bool = True


_Parts = tuple[tirx.Stmt | None, tirx.Stmt]
"""Of a statement: what of it reads constants, and what is left of it."""


class _Split(StatementVisitor):
    """Parts the statements of one function."""

    def __init__(
        self, function: DeviceFunction, constants: Collection[int], scope: str, sizes: dict[str, int]
    ) -> None:
        self.function = function
        tile, thread, *self.pointers = function.func.params
        # By each name that is known, the loops that decide its value.
        self.loops_of: dict[tirx.Var, tuple[tirx.For, ...]] = {tile: (), thread: ()}
        # What such names stand for, in no names but of tile, thread and turns.
        self.values: dict[tirx.Var, PrimExpr] = {}
        self.wide: list[tuple[tirx.BufferStore, WideRead]] = []
        chosen = [self.pointers[number] for number in sorted(constants)]
        self.declared = [
            d for d in collect(function.func.body, tirx.DeclBuffer) if any(d.data.same_as(one) for one in chosen)
        ]
        self.read: dict[int, None] = {}
        self.arrays = KeptArrays(scope, thread, function.threads, sizes)
        self.branches = 0

    # Statements

    def visit_sequence(self, node: tirx.SeqStmt, context: _Context) -> _Parts:
        parts = [self.visit(part, context) for part in node.seq]
        fills = needed([fill for fill, _ in parts if fill is not None])
        return sequence(*fills) if fills else None, sequence(*(use for _, use in parts))

    def visit_attr(self, node: tirx.AttrStmt, context: _Context) -> _Parts:
        fill, use = self.visit(node.body, context)
        return fill, tirx.AttrStmt(node.node, node.attr_key, node.value, use)

    def visit_bind(self, node: tirx.Bind, context: _Context) -> _Parts:
        loops = self.decided_by(node.value)
        if loops is not None:
            self.loops_of[node.var] = loops
            self.values[node.var] = substitute(node.value, self.values)
            return node, node
        fill, value = self.kept(node.value, context)
        return fill, tirx.Bind(node.var, value)

    def visit_buffer_store(self, node: tirx.BufferStore, context: _Context) -> _Parts:
        fill, value = self.kept(node.value, context)
        return fill, tirx.BufferStore(node.buffer, value, node.indices)

    def visit_evaluate(self, node: tirx.Evaluate, context: _Context) -> _Parts:
        return None, node

    def visit_for(self, node: tirx.For, context: _Context) -> _Parts:
        counted = isinstance(node.extent, tirx.IntImm) and isinstance(node.min, tirx.IntImm) and node.step is None
        if counted and const_int(node.min) == 0 and node.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED):
            self.loops_of[node.loop_var] = (node,)
            fill, use = self.visit(node.body, replace(context, loops=(*context.loops, node)))
        else:
            fill, use = self.visit(node.body, replace(context, known=False))
        fill = None if fill is None or isinstance(fill, tirx.Bind) else widened(node, fill, self.wide)
        kind = node.kind if fill is None else tirx.ForKind.UNROLLED
        return fill, tirx.For(node.loop_var, node.min, node.extent, kind, use)

    def visit_if_then_else(self, node: tirx.IfThenElse, context: _Context) -> _Parts:
        self.branches += 1
        loops = self.decided_by(node.condition)
        inside = replace(
            context,
            branches=(*context.branches, self.branches),
            conditions=(*context.conditions, substitute(node.condition, self.values)),
            known=context.known and loops is not None,
        )
        fill, then = self.visit(node.then_case, inside)
        other_fill, other = None, None
        if node.else_case is not None:
            other_fill, other = self.visit(node.else_case, replace(inside, branches=(*inside.branches, 0)))
        fill, other_fill = (None if isinstance(one, tirx.Bind) else one for one in (fill, other_fill))
        parts = [tirx.IfThenElse(node.condition, fill, None)] if fill is not None else []
        parts += [tirx.IfThenElse(tirx.Not(node.condition), other_fill, None)] if other_fill is not None else []
        return sequence(*parts) if parts else None, tirx.IfThenElse(node.condition, then, other)

    def visit_other(self, node: tirx.Stmt, context: _Context) -> _Parts:
        """Declarations; in a loop that depends on data nothing is kept."""
        return None, node

    # Expressions

    def decided_by(self, value: PrimExpr) -> tuple[tirx.For, ...] | None:
        """The loops that decide a value beside tile and thread; ``None`` if something else does."""
        if not only_calculates(value):
            return None
        found: list[tirx.For] = []
        for variable in collect(value, tirx.Var):
            if variable not in self.loops_of:
                return None
            found += [loop for loop in self.loops_of[variable] if not any(loop.same_as(one) for one in found)]
        return tuple(found)

    def kept(self, value: PrimExpr, context: _Context) -> _Parts:
        """What reads the constants of an expression, and the expression that finds them read."""
        fills: list[tirx.Stmt] = []

        def taken(node: PrimExpr, mutator: object) -> PrimExpr:
            loops = self.constant(node) if context.known else None
            if loops is None:
                return mutator.default_mutate(node)
            around = tuple(loop for loop in context.loops if _among(loop, loops))
            wide = wide_read(substitute(node, self.values), around, context.conditions)
            key = (structural_key(node), context.branches)
            element, together, new = self.arrays.place(node, key, around, wide)
            if new:
                fills.append(tirx.BufferStore(element.source, node if wide is None else wide.value, [together]))
                self.wide += [] if wide is None else [(fills[-1], wide)]
            return element

        def call(node: tvm.ir.Call, mutator: object) -> PrimExpr:
            if not is_branch(node):
                return mutator.default_mutate(node)
            # What is read on one side of a branch alone may lie outside of its tensor on the other.
            return taken(node, mutator) if context.known and self.constant(node) is not None else node

        if not collect(value, TensorLoad):
            return None, value
        rewritten = structural_mutate(value, [(TensorLoad, taken), (tirx.Select, taken), (tvm.ir.Call, call)])
        return (sequence(*fills) if fills else None), rewritten

    def constant(self, node: PrimExpr) -> tuple[tirx.For, ...] | None:
        """The loops that decide what is read of a constant, or of a constant where there is one; else ``None``."""
        if is_choice(node):
            condition, then, other = choice_parts(node)
            decided = self.decided_by(condition)
            read = self.constant(then) if isinstance(then, TensorLoad) else None
            other = other.value if isinstance(other, tirx.Broadcast) else other
            if decided is None or read is None or not isinstance(other, (tirx.FloatImm, tirx.IntImm)):
                return None
            return (*decided, *read)
        declared = next((d for d in self.declared if d.buffer.same_as(node.source)), None)
        if declared is None:
            return None
        (index,) = node.indices
        start = index.base if isinstance(index, tirx.Ramp) else index
        if isinstance(index, tirx.Ramp) and not isinstance(index.stride, tirx.IntImm):
            return None
        loops = self.decided_by(start)
        if loops is not None:
            self.read[next(n for n, p in enumerate(self.pointers) if p.same_as(declared.data))] = None
        return loops

    # The functions

    def made(self, fill: tirx.Stmt, use: tirx.Stmt) -> KeptLoads:
        """Both functions."""
        func, reads = self.function.func, tuple(sorted(self.read))
        pointers, arrays = self.arrays.pointers(), self.arrays.declared()
        tensors = [d for d in self.declared if any(self.pointers[number].same_as(d.data) for number in reads)]
        filling = _with(
            func, [*func.params[:2], *(self.pointers[n] for n in reads), *pointers], [*tensors, *arrays, fill]
        )
        using = _with(func, [*func.params, *pointers], [*arrays, use])
        first = replace(self.function, func=filling, shared_bytes=0, has_barrier=False)
        kept = KeptLoads(
            first,
            replace(self.function, func=using),
            tuple(self.arrays.used().items()),
            reads,
            self.arrays.scope,
        )
        return kept.named(self.function.name)


def _with(func: tirx.PrimFunc, parameters: Sequence[tirx.Var], statements: Sequence[tirx.Stmt]) -> tirx.PrimFunc:
    """A function with other parameters and statements, and the same attributes."""
    return tirx.PrimFunc([*parameters], sequence(*statements), attrs=func.attrs)


def _is_local(declared: tirx.DeclBuffer) -> bool:
    return str(declared.buffer.scope()) == "local"


def _among(loop: tirx.For, loops: Sequence[tirx.For]) -> bool:
    return any(loop.same_as(one) for one in loops)
