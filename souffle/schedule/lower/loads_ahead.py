"""What the turns of loops read from global memory, asked for before the first of their stores.

::

    for i in range(6):                                 for i in unrolled(6):
      y[a + 128 * i] = f(x[a + 128 * i], w[b + i])       ahead0[i], ahead1[i] = x[a + 128 * i], w[b + i]
                                                 →     for i in unrolled(6):
                                                         y[a + 128 * i] = f(ahead0[i], ahead1[i])

A compiler that does not know which addresses differ keeps loads behind the stores that stand before them, and a
function's pointers are not told apart any more where it is copied into its kernel: each turn waits for its loads, six
times a latency of memory where one would do. In LayerNormalization, and in what follows a product, that was half of
the time and more (sm_90, nvcc 13.0).

Legal since nobody writes what a stage reads while it runs: not the stage, where it stores to other tensors, and no
other, from which barriers of all blocks divide it. What is read under a condition is read under it as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad

from souffle.schedule.gpu.device import ASSUMED_REGISTERS
from souffle.schedule.lower.local_arrays import OWN_REGISTERS, local_words
from souffle.schedule.lower.wide_fills import needed
from souffle.tvm_calls import structural_map, structural_mutate
from souffle.tvm_compat import (
    PrimExpr,
    buffer_loads,
    choice_parts,
    collect,
    const_int,
    dtype_of,
    is_choice,
    only_calculates,
    sequence,
    statements_of,
)

__all__ = ["with_loads_ahead"]

_MOST_WORDS = 24
"""Registers of a thread for what is held, beside which it has no more than two blocks on a multiprocessor leave it."""

_NUMBERS = (tirx.IntImm, tirx.FloatImm, tirx.Broadcast)


def with_loads_ahead(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """`function` with the loads of its loops ahead of their stores to global memory, where registers hold them."""
    stored = [one.buffer for one in collect(function.body, tirx.BufferStore)]
    # Whoever is given an address may store there.
    stored += [
        one.source for call in collect(function.body, Call) if _takes_address(call) for one in buffer_loads(call)
    ]
    written = [buffer for buffer in stored if _is_global(buffer)]
    left = min(_MOST_WORDS, ASSUMED_REGISTERS - OWN_REGISTERS - local_words(function))

    def ahead(loop: tirx.For, mutator: Any) -> tirx.Stmt:
        nonlocal left
        split = _split_of(loop, written, left)
        if split is None:
            return mutator.default_mutate(loop)
        left -= split.words
        return split.statement()

    return function.with_body(structural_mutate(function.body, [(tirx.For, ahead)]))


def _takes_address(call: Call) -> bool:
    return any(kind in str(getattr(call.op, "name", "")) for kind in ("address_of", "access_ptr"))


def _is_global(buffer: Any) -> bool:
    return str(buffer.scope()) == "global"


def _split_of(loop: tirx.For, written: Sequence[tvm.ir.Var], most_words: float) -> _Split | None:
    """Loops with their reads ahead of their stores, as many turns of the outermost as so many registers hold."""
    # Where nothing is stored a compiler sees to it, and a product's loop over steps has its own reads ahead.
    if not any(_is_global(one.buffer) for one in collect(loop.body, tirx.BufferStore)):
        return None
    nest = _Nest(written)
    if not nest.enter(loop, _Place()) or not nest.reads:
        return None
    turns = const_int(loop.extent)
    for together in range(turns, 1, -1):
        if turns % together == 0 and nest.words(loop, together) <= most_words:
            return _Split(nest, loop, together)
    return None


@dataclass(frozen=True)
class _Place:
    """Where something stands: the loops around it from the outermost, and the conditions under which it is done."""

    loops: tuple[tirx.For, ...] = ()
    conditions: tuple[PrimExpr, ...] = ()


@dataclass(frozen=True, eq=False)
class _Read:
    """What may be read ahead: a load of what is not written, or a choice between one and a number.

    Attributes
    ----------
    value : expression
    loops : tuple of For
        Those in whose turns it differs.
    conditions : tuple of expression
        Under which it is read.
    binds : tuple of Bind
        Names that stand before it.
    """

    value: PrimExpr
    loops: tuple[tirx.For, ...]
    conditions: tuple[PrimExpr, ...]
    binds: tuple[tirx.Bind, ...]

    @property
    def kind(self) -> tvm.DataType:
        return tvm.DataType(dtype_of(self.value))


class _Nest:
    """Loops in loops, and what their turns read."""

    def __init__(self, written: Sequence[tvm.ir.Var]) -> None:
        self.reads: list[_Read] = []
        self._written = written
        self._binds: list[tuple[tirx.Bind, _Place]] = []
        # Names of what may have been stored before, in the same turn.
        self._late: list[tirx.Var] = []
        # Whether something is read in several places, and not under the conditions of the first.
        self._apart = False

    def enter(self, loop: tirx.For, place: _Place) -> bool:
        """Take in what a loop reads; whether all that it does is known."""
        # A loop that is annotated is one that is not to be unrolled.
        plain = loop.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED) and not loop.annotations
        if not plain or not isinstance(loop.extent, tirx.IntImm) or const_int(loop.min) != 0:
            return False
        return self._take(loop.body, _Place((*place.loops, loop), place.conditions))

    def _take(self, body: tirx.Stmt, place: _Place) -> bool:
        return all(self._take_one(one, place) for one in statements_of(body))

    def _take_one(self, one: tirx.Stmt, place: _Place) -> bool:
        if isinstance(one, tirx.For):
            return self.enter(one, place)
        if isinstance(one, tirx.IfThenElse):
            known = one.else_case is None and self._is_early(one.condition)
            return known and self._take(one.then_case, _Place(place.loops, (*place.conditions, one.condition)))
        if not isinstance(one, (tirx.Bind, tirx.BufferStore, tirx.Evaluate)):
            return False
        rest = self.with_reads(one.value, lambda read: self._noted(read, place))
        if isinstance(one, tirx.Bind):
            if self._is_early(rest):
                self._binds.append((one, place))
            else:
                self._late.append(one.var)
        return not self._apart

    def _noted(self, value: PrimExpr, place: _Place) -> PrimExpr:
        known = self.number(value)
        if known is not None and not _begins(self.reads[known].conditions, place.conditions):
            # It is not read in all turns in which it would be needed.
            self._apart = True
        if known is None:
            binds = [(bind, where) for bind, where in self._binds if _contains(where, place)]
            used = needed([*(bind for bind, _ in binds), tirx.Evaluate(value), *map(tirx.Evaluate, place.conditions)])
            named = [(bind, where) for bind, where in binds if any(bind.same_as(one) for one in used)]
            depth = max((len(where.loops) for _, where in named), default=0)
            loops = [
                loop
                for number, loop in enumerate(place.loops)
                if number < depth or _uses((value, *place.conditions), [loop.loop_var])
            ]
            self.reads.append(_Read(value, tuple(loops), place.conditions, tuple(bind for bind, _ in named)))
        return tirx.Var("read", dtype_of(value))

    def number(self, value: PrimExpr) -> int | None:
        """Of a read."""
        return next((n for n, read in enumerate(self.reads) if tvm_ffi.structural_equal(value, read.value)), None)

    def words(self, outermost: tirx.For, together: int) -> int:
        """Registers of a thread for all reads of so many turns of the outermost loop."""
        return sum(
            -(-read.kind.bits * read.kind.lanes // 32) * prod(_extents(read, outermost, together))
            for read in self.reads
        )

    def with_reads(self, value: PrimExpr, rewrite: Callable[[PrimExpr], PrimExpr]) -> PrimExpr:
        """A value with ``rewrite(read)`` for each read that may stand ahead.

        A choice that is no such read stays as it is: what it reads is read in one of its cases alone.
        """

        def load(node: TensorLoad, mutator: Any) -> PrimExpr:
            return rewrite(node) if self._is_movable(node) else mutator.default_mutate(node)

        def choice(node: PrimExpr) -> PrimExpr:
            condition, then, other = choice_parts(node)
            masked = isinstance(then, TensorLoad) and self._is_movable(then) and isinstance(other, _NUMBERS)
            return rewrite(node) if masked and self._is_early(condition) else node

        def call(node: Call, mutator: Any) -> PrimExpr:
            return choice(node) if is_choice(node) else mutator.default_mutate(node)

        pairs = [(TensorLoad, load), (tirx.Select, lambda node, _: choice(node)), (Call, call)]
        return structural_mutate(value, pairs)

    def _is_movable(self, load: TensorLoad) -> bool:
        own = any(load.source.same_as(buffer) for buffer in self._written)
        return _is_global(load.source) and not own and all(map(self._is_early, load.indices))

    def _is_early(self, value: PrimExpr) -> bool:
        return only_calculates(value) and not _uses([value], self._late)


def _contains(outer: _Place, inner: _Place) -> bool:
    """Whether what stands at the one place is done before each turn of what stands behind it at the other."""
    return _begins(outer.loops, inner.loops) and _begins(outer.conditions, inner.conditions)


def _begins(first: Sequence[Any], whole: Sequence[Any]) -> bool:
    return len(first) <= len(whole) and all(one.same_as(other) for one, other in zip(first, whole, strict=False))


def _uses(values: Sequence[PrimExpr], names: Sequence[tirx.Var]) -> bool:
    return any(var.same_as(name) for value in values for var in collect(value, tirx.Var) for name in names)


def _extents(read: _Read, outermost: tirx.For, together: int) -> list[int]:
    return [together if loop.same_as(outermost) else const_int(loop.extent) for loop in read.loops]


class _Split:
    """A nest whose reads stand ahead of its stores."""

    def __init__(self, nest: _Nest, outermost: tirx.For, together: int) -> None:
        self.nest, self.outermost, self.words = nest, outermost, nest.words(outermost, together)
        self.rounds, self.together = const_int(outermost.extent) // together, together
        self.outer = tirx.Var(f"{outermost.loop_var.name}_round", outermost.loop_var.ty)
        self.arrays = []
        for number, read in enumerate(nest.reads):
            size = prod(_extents(read, outermost, together)) * read.kind.lanes
            dtype = str(read.kind.with_lanes(1))
            self.arrays.append(tirx.decl_buffer((size,), dtype, f"ahead{number}", scope="local"))

    def statement(self) -> tirx.Stmt:
        """The statement in the nest's place."""
        asked = [self._asked(number) for number in range(len(self.nest.reads))]
        fixed = [one for one, read in zip(asked, self.nest.reads, strict=True) if not read.loops]
        turning = [one for one, read in zip(asked, self.nest.reads, strict=True) if read.loops]
        body = sequence(*turning, self._with_held(self.outermost, {}))
        if self.rounds > 1:
            extent = tirx.IntImm(dtype_of(self.outer), self.rounds)
            body = tirx.For(self.outer, tirx.IntImm(dtype_of(self.outer), 0), extent, tirx.ForKind.SERIAL, body)
        return sequence(*map(tirx.AllocBuffer, self.arrays), *fixed, body)

    def _asked(self, number: int) -> tirx.Stmt:
        """A read, in all turns in which it differs."""
        read = self.nest.reads[number]
        turns = {loop: tirx.Var(str(loop.loop_var.name), loop.loop_var.ty) for loop in read.loops}
        made: tirx.Stmt = tirx.BufferStore(self.arrays[number], read.value, self._place(number, turns))
        for condition in reversed(read.conditions):
            made = tirx.IfThenElse(condition, made, None)
        made = sequence(*needed([*(self._one_with_held(bind, turns) for bind in read.binds), made]))
        names = {one.var: tirx.Var(str(one.var.name), one.var.ty) for one in collect(made, tirx.Bind)}
        made = self._of_turns(made, {loop.loop_var: turn for loop, turn in turns.items()} | names)
        for loop, extent in reversed([*zip(read.loops, _extents(read, self.outermost, self.together), strict=True)]):
            made = _unrolled(turns[loop], extent, made)
        return made

    def _of_turns(self, body: tirx.Stmt, names: dict[tirx.Var, tirx.Var]) -> tirx.Stmt:
        """A statement with other names; the turn of the outermost loop is counted within a round."""
        own = self.outermost.loop_var
        table = dict(names)
        if own in table and self.rounds > 1:
            table[own] = self.outer * self.together + table[own]
        return structural_map(body, (tvm.ir.Var, lambda var: table.get(var, var)))

    def _with_held(self, loop: tirx.For, turns: dict[tirx.For, tirx.Var]) -> tirx.Stmt:
        """A loop with what is held in the place of its reads."""
        whole = not loop.same_as(self.outermost) or self.rounds == 1
        turn = loop.loop_var if whole else tirx.Var(str(loop.loop_var.name), loop.loop_var.ty)
        parts = [self._one_with_held(one, turns | {loop: turn}) for one in statements_of(loop.body)]
        body = sequence(*parts)
        # Which registers has to be known when a program is compiled.
        if any(loop.same_as(other) for read in self.nest.reads for other in read.loops):
            body = body if whole else self._of_turns(body, {loop.loop_var: turn})
            return _unrolled(turn, const_int(loop.extent) if whole else self.together, body)
        return tirx.For(turn, loop.min, loop.extent, loop.kind, body)

    def _one_with_held(self, one: tirx.Stmt, turns: dict[tirx.For, tirx.Var]) -> tirx.Stmt:
        if isinstance(one, tirx.For):
            return self._with_held(one, turns)
        if isinstance(one, tirx.IfThenElse):
            parts = [self._one_with_held(part, turns) for part in statements_of(one.then_case)]
            return tirx.IfThenElse(one.condition, sequence(*parts), None)

        def held(value: PrimExpr) -> PrimExpr:
            number = self.nest.number(value)
            return tirx.BufferLoad(self.arrays[number], self._place(number, turns))

        value = self.nest.with_reads(one.value, held)
        if isinstance(one, tirx.BufferStore):
            return tirx.BufferStore(one.buffer, value, one.indices)
        return tirx.Bind(one.var, value) if isinstance(one, tirx.Bind) else tirx.Evaluate(value)

    def _place(self, number: int, turns: dict[tirx.For, tirx.Var]) -> list[PrimExpr]:
        """Where a read is held."""
        read = self.nest.reads[number]
        place: PrimExpr = tirx.IntImm("int32", 0)
        for loop, extent in zip(read.loops, _extents(read, self.outermost, self.together), strict=True):
            place = place * extent + turns[loop]
        lanes = read.kind.lanes
        return [place if lanes == 1 else tirx.Ramp(place * lanes, 1, lanes)]


def _unrolled(turn: tirx.Var, extent: int, body: tirx.Stmt) -> tirx.Stmt:
    dtype = dtype_of(turn)
    return tirx.For(turn, tirx.IntImm(dtype, 0), tirx.IntImm(dtype, extent), tirx.ForKind.UNROLLED, body)
