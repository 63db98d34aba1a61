"""Registers that the steps of a kernel find as an earlier call has filled them: each call as if it filled them itself.

::

    float kept[n];                                      for step:
    if (block < T) fill(block, tid, w, kept);             for it: tile = it * num_blocks + block
    for step:                                               if (tile < T) whole(tile, tid, x, w, y)
      for it: tile = it * num_blocks + block       =
        if (tile < T) {                                 whole(tile, tid, x, w, y):
          if (num_blocks < T)                             float kept[n];
            fill(tile, tid, w, kept);                     fill(tile, tid, w, kept);
          use(tile, tid, x, w, y, kept); }                use(tile, tid, x, w, y, kept);

The two are the same where the registers of a thread hold, whenever `use` is called for a tile, what `fill` gives for
that tile and thread: it was called for it last, or, with `num_blocks` of T or more, ``it`` is 0 and the tile is the
block. And what `fill` reads no launch writes: constants. So everything else that is proven is proven of kernels without
such registers, and of functions that fill them themselves. Nothing is taken from who made them: which call fills what
is read off the functions, and what does not have this form is tried on grids of a few sizes, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.certificate import Counterexample
from souffle.tvm_compat import StatementVisitor, collect, sequence
from souffle.verify.expressions import Undecided
from souffle.verify.kept_conditions import alike, bound_of, bounds_of, is_data, is_tile, is_turn, meet, whole_number
from souffle.verify.kept_functions import (
    escapes,
    only_fills,
    stores_elsewhere,
    stores_to,
    takes_registers,
    with_registers,
)
from souffle.verify.other_forms import FormsOfConstants, other_forms

__all__ = ["without_kept_memory"]

_RULE = "stale or undefined read"

_STEPS = 2
"""Of a loop of constant turns that are tried first: the first, and one that finds what it has left."""

_MOST_CALLS = 1 << 13
"""That are made in one way to find a tile whose registers hold something else, before it is left undecided."""


def without_kept_memory(
    kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc]
) -> FormsOfConstants:
    """The same kernels with functions that fill their registers themselves, as far as these are the same.

    Parameters
    ----------
    kernels, functions : mapping of str to PrimFunc
        By their names; the functions are those that the kernels call.
    """

    def reader_of(name: str, kernel: tirx.PrimFunc) -> _Reader | None:
        has_any = any(_is_local(alloc.buffer) for alloc in collect(kernel.body, tirx.AllocBuffer))
        return _Reader(name, kernel, functions) if has_any else None

    found = other_forms(kernels, functions, reader_of)
    constants = {name: reader.constants for name, reader in found.readers.items()}
    # What could not be made whole is as if it were not there: nothing is said of it.
    whole = {name: function for name, function in found.functions.items() if not takes_registers(function)}
    return FormsOfConstants(found.kernels, whole, found.findings, constants)


@dataclass(frozen=True, eq=False)
class _Called:
    """A call that is given registers, with the loops and conditions around it, outermost first."""

    name: str
    fills: bool
    arguments: tuple[Any, ...]
    registers: tuple[Any, ...]
    around: tuple[Any, ...]


@dataclass(eq=False)
class _Reader(StatementVisitor):
    """Reads one kernel: statements without registers, and the calls that are given them."""

    kernel: str
    func: tirx.PrimFunc
    functions: Mapping[str, tirx.PrimFunc]
    findings: list[Counterexample | Undecided] = field(default_factory=list)
    changed: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    constants: frozenset[int] = frozenset()
    calls: list[_Called] = field(default_factory=list)
    registers: list[Any] = field(default_factory=list)
    inside: list[Any] = field(default_factory=list)
    block: Any = None
    thread: Any = None
    threads: int = 0

    def whole(self) -> tirx.PrimFunc:
        """The kernel without registers; what it calls in place of functions that use them is in `changed`.

        Raises
        ------
        Undecided
            If its calls do not have a form that is known.
        """
        body = self.visit(self.func.body, ())
        wholes: dict[str, tirx.PrimFunc] = {}
        constants: set[int] = set()
        parameters = list(self.func.params)
        # What fills all registers is looked at before what is in them: an error there is a counterexample.
        filled = [(used, self._fills(used)) for used in self.calls if not used.fills]
        for used, fills in filled:
            if not self._proven(used, fills):
                self._tried(used)
            reads = fills[0].arguments[2:]
            numbers = [next((n for n, p in enumerate(parameters) if p.same_as(one)), None) for one in reads]
            found = self._filled(used, fills[0])
            if None in numbers:
                raise Undecided(f"where {fills[0].name} reads what it keeps")
            constants.update(numbers)
            if used.name in wholes and not tvm_ffi.structural_equal(wholes[used.name], found):
                raise Undecided(f"{used.name}, which is called with registers in two ways")
            wholes[used.name] = found
        self.changed, self.constants = wholes, frozenset(constants)
        return self.func.with_body(body)

    def _fills(self, used: _Called) -> list[_Called]:
        """The calls that fill the registers of a call: all of the same memory, which it is given itself.

        Raises
        ------
        Undecided
            If they are others, which is a finding too.
        """
        fills = [call for call in self.calls if call.fills and meet(call.registers, used.registers)]
        first = fills[0] if fills else used
        parts = next((call for call in fills if not alike(call.registers, used.registers)), None)
        other = next(
            (c for c in fills if c.name != first.name or not alike(c.arguments[2:], first.arguments[2:])), None
        )
        why = ""
        if not fills:
            why = "nothing fills the registers that it is called with"
        elif parts is not None:
            why = f"{parts.name} fills some of its registers, and not those that it is called with"
        elif other is not None:
            same = "calls fill its registers from different memory, so that grids differ in what they compute"
            why = f"{first.name} and {other.name}: {same}"
        if why:
            self._stale(used, "", why)
            raise Undecided(f"the registers of {used.name}")
        self._places(used, first)
        return fills

    # Statements

    def visit_sequence(self, node: tirx.SeqStmt, around: tuple[Any, ...]) -> tirx.Stmt | None:
        parts = [self.visit(part, around) for part in node.seq]
        kept = [part for part in parts if part is not None]
        return sequence(*kept) if kept else None

    def visit_attr(self, node: tirx.AttrStmt, around: tuple[Any, ...]) -> tirx.Stmt | None:
        if node.attr_key == "thread_extent":
            if str(node.node.thread_tag) == "blockIdx.x":
                self.block = node.node.var
            else:
                self.thread, self.threads = node.node.var, int(node.value.value)
        body = self.visit(node.body, around)
        return None if body is None else tirx.AttrStmt(node.node, node.attr_key, node.value, body)

    def visit_alloc_buffer(self, node: tirx.AllocBuffer, around: tuple[Any, ...]) -> tirx.Stmt | None:
        if not _is_local(node.buffer):
            return node
        self.registers.append(node.buffer)
        if any(isinstance(one, tirx.For) for one in around):
            self.inside.append(node.buffer)
        return None

    def visit_for(self, node: tirx.For, around: tuple[Any, ...]) -> tirx.Stmt | None:
        body = self.visit(node.body, (*around, node))
        if body is None:
            return None
        rest = (node.thread_binding, node.annotations, node.step)
        return tirx.For(node.loop_var, node.min, node.extent, node.kind, body, *rest)

    def visit_if_then_else(self, node: tirx.IfThenElse, around: tuple[Any, ...]) -> tirx.Stmt | None:
        then = self.visit(node.then_case, (*around, node.condition))
        other = None if node.else_case is None else self.visit(node.else_case, (*around, tirx.Not(node.condition)))
        if then is None and other is None:
            return None
        return tirx.IfThenElse(node.condition, tirx.Evaluate(0) if then is None else then, other)

    def visit_evaluate(self, node: tirx.Evaluate, around: tuple[Any, ...]) -> tirx.Stmt | None:
        call = node.value
        own = [n for n, a in enumerate(call.args) if self._register(a)] if isinstance(call, Call) else []
        if not own:
            return self.visit_other(node, around)
        name = str(getattr(call.op, "name_hint", ""))
        if name not in self.functions or own != list(range(own[0], len(call.args))) or own[0] < 2:
            raise Undecided(f"a call of {name or call.op} with registers that are kept")
        function = self.functions[name]
        given = function.params[own[0] :]
        fills = stores_to(function, given)
        arguments, registers = tuple(call.args[: own[0]]), tuple(call.args[own[0] :])
        called = _Called(name, fills, arguments, registers, around)
        if fills and stores_elsewhere(function, given):
            self._stale(called, "", "it changes registers that are kept, which its later calls find")
            raise Undecided(f"{name}, which changes registers that are kept")
        self.calls.append(called)
        return None if fills else tirx.Evaluate(Call(call.op, arguments))

    def visit_other(self, node: tirx.Stmt, around: tuple[Any, ...]) -> tirx.Stmt:
        if any(self._register(one) for one in collect(node, tirx.Var)):
            raise Undecided(f"a statement of the kind {type(node).__name__} with registers that are kept")
        return node

    def _register(self, node: Any) -> bool:
        return any(node.same_as(one) for one in self.registers) or any(is_data(node, one) for one in self.registers)

    # What the registers hold

    def _proven(self, used: _Called, fills: Sequence[_Called]) -> bool:
        """Whether `used` finds what its tile needs, by the form at the head of this file."""
        blocks = self.func.params[-1]
        first = [call for call in fills if not any(isinstance(one, tirx.For) for one in call.around)]
        again = [call for call in fills if call not in first]
        own_bounds = bounds_of(used.around)
        loops = [one for one in used.around if isinstance(one, tirx.For)]
        if len(first) != 1 or own_bounds is None or not loops:
            return False
        if not all(call.arguments[1].same_as(self.thread) for call in (used, *fills)):
            return False
        if any(is_data(one, declared) for one in used.registers for declared in self.inside):
            return False
        turn, tile = loops[-1].loop_var, used.arguments[0]
        if not is_turn(loops[-1]) or not is_tile(tile, turn, blocks, self.block):
            return False
        before = [call for call in again if self.calls.index(call) + 1 == self.calls.index(used)]
        if len(before) != 1 or len(again) != sum(
            not call.fills and alike(call.registers, used.registers) for call in self.calls
        ):
            return False
        first_bounds, again_bounds = bounds_of(first[0].around), bounds_of(before[0].around)
        if first_bounds is None or again_bounds is None:
            return False
        if [one for one in before[0].around if isinstance(one, tirx.For)] != loops:
            return False
        same = tvm_ffi.structural_equal(before[0].arguments[0], tile)
        if (
            not same
            or not first[0].arguments[0].same_as(self.block)
            or self.calls.index(first[0]) > self.calls.index(used)
        ):
            return False
        tiles = bound_of(own_bounds, tile)
        prefilled = bound_of(first_bounds, self.block)
        refilled = bound_of(again_bounds, blocks)
        threads = [bound_of(found, self.thread, self.threads) for found in (own_bounds, first_bounds, again_bounds)]
        others = [v for v, _ in again_bounds if not any(alike((v,), (one,)) for one in (tile, self.thread, blocks))]
        others += [v for v, _ in first_bounds if not any(alike((v,), (one,)) for one in (self.block, self.thread))]
        if tiles is None or prefilled is None or refilled is None or others:
            return False
        if bound_of(again_bounds, tile, tiles) < tiles:
            return False
        return tiles <= prefilled and tiles <= refilled and threads[0] <= min(threads[1:])

    def _tried(self, used: _Called) -> None:
        """Look for a grid, a block and a thread for which `used` finds what another tile needs, or nothing."""
        bounds = [pair for call in self.calls for pair in bounds_of(call.around) or ()]
        near = {bound + more for _, bound in bounds for more in (-1, 0, 1)}
        lasts = {bound - 1 for value, bound in bounds if value.same_as(self.thread)}
        grids = sorted({1, 2, 3, *(n for n in near if n > 0)})
        body = self._calls_alone(self.func.body)
        ends, known = sorted({0, self.threads - 1, *lasts} & {*range(self.threads)}), len(self.findings)
        # What one step or one thread alone shows is looked for last, and first where a thread makes few calls.
        ways = ((grids, _STEPS, ends), (grids[::-1], None, ends), (grids[::-1], _STEPS, range(self.threads)))
        for tried, turns, threads in ways:
            left = _MOST_CALLS
            some = [(blocks, block) for blocks in tried for block in _blocks_of(blocks)]
            for (blocks, block), thread in product(some, threads):
                if left > 0:
                    left -= self._tried_once(body, (blocks, block, thread), turns, left)
                if len(self.findings) > known:
                    return
        raise Undecided(f"whether the registers of {used.name} hold what its tiles need")

    def _calls_alone(self, node: tirx.Stmt) -> tirx.Stmt | None:
        """What decides of the calls with registers which are made; ``None`` for a statement without any."""
        if isinstance(node, tirx.SeqStmt):
            parts = [part for part in map(self._calls_alone, node.seq) if part is not None]
            return sequence(*parts) if any(not isinstance(part, tirx.Bind) for part in parts) else None
        if isinstance(node, tirx.AttrStmt):
            inner = self._calls_alone(node.body)
            return None if inner is None else tirx.AttrStmt(node.node, node.attr_key, node.value, inner)
        if isinstance(node, tirx.For):
            inner = self._calls_alone(node.body)
            rest = (node.thread_binding, node.annotations, node.step)
            return None if inner is None else tirx.For(node.loop_var, node.min, node.extent, node.kind, inner, *rest)
        if isinstance(node, tirx.IfThenElse):
            then = self._calls_alone(node.then_case)
            other = None if node.else_case is None else self._calls_alone(node.else_case)
            if then is None and other is None:
                return None
            return tirx.IfThenElse(node.condition, tirx.Evaluate(0) if then is None else then, other)
        if isinstance(node, tirx.Bind):
            return node
        if isinstance(node, tirx.AllocBuffer):
            return node if any(node.buffer.same_as(one) for one in self.registers) else None
        return node if any(self._register(one) for one in collect(node, tirx.Var)) else None

    def _tried_once(self, body: tirx.Stmt, where: tuple[int, int, int], turns: int | None, most: int) -> int:
        """Make the calls of one thread, up to some number, and say how many; a finding where one finds another tile."""
        blocks, block, thread = where
        env = {self.func.params[-1]: blocks, self.block: block, self.thread: thread}
        held: dict[int, tuple[int, int]] = {}
        made = 0
        for made, (called, number, own) in enumerate(self._executed(body, env, turns), 1):
            key = number if called is None else self._key(called.registers[0])
            if called is None:
                held.pop(key, None)
            elif called.fills:
                held[key] = number, own
            elif held.get(key) != (number, own):
                who = f"thread {thread} of block {block} of {blocks}"
                found = _needed(held.get(key), number)
                self._stale(called, who, f"its registers hold {found} where it computes tile {number}")
                break
            if made >= most:
                break
        return made

    def _key(self, register: Any) -> int:
        return next(n for n, one in enumerate(self.registers) if is_data(register, one))

    def _stale(self, used: _Called, who: str, why: str) -> None:
        where = (who,) if who else ()
        self.findings.append(
            Counterexample(_RULE, self.kernel, (used.name,), (), where, "registers that are kept", why)
        )

    def _executed(
        self, node: tirx.Stmt, env: dict[Any, int], steps: int | None
    ) -> Iterator[tuple[_Called | None, int, int]]:
        """The calls with registers that a thread makes, in order, with the tile and the thread that they are for.

        No call, with the number of some registers, where these are declared. Of loops of constant length, `steps`
        turns, or all.
        """
        if isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                yield from self._executed(part, env, steps)
        elif isinstance(node, tirx.AttrStmt):
            yield from self._executed(node.body, env, steps)
        elif isinstance(node, tirx.AllocBuffer) and any(node.buffer.same_as(one) for one in self.registers):
            yield None, self._key(node.buffer.data), 0
        elif isinstance(node, tirx.Bind):
            # What is no number by then may still decide nothing that matters here.
            with suppress(Undecided):
                env[node.var] = whole_number(node.value, env)
        elif isinstance(node, tirx.IfThenElse):
            if whole_number(node.condition, env):
                yield from self._executed(node.then_case, env, steps)
            elif node.else_case is not None:
                yield from self._executed(node.else_case, env, steps)
        elif isinstance(node, tirx.For):
            if not is_turn(node):
                raise Undecided(f"the turns of the loop over {node.loop_var.name}")
            extent = whole_number(node.extent, env)
            short = steps is not None and isinstance(node.extent, tirx.IntImm)
            for turn in range(min(extent, steps) if short else extent):
                yield from self._executed(node.body, {**env, node.loop_var: turn}, steps)
        elif isinstance(node, tirx.Evaluate) and isinstance(node.value, Call):
            call = node.value
            for known in self.calls:
                name = str(getattr(call.op, "name_hint", ""))
                given = (*known.arguments, *known.registers)
                if known.name == name and len(given) == len(call.args) and alike(given, call.args):
                    yield known, whole_number(call.args[0], env), whole_number(call.args[1], env)
                    return

    # Functions

    def _places(self, used: _Called, fill: _Called) -> list[int]:
        """Which of a call's tensors those are that its registers are filled from.

        Raises
        ------
        Undecided
            If it is not given all of them: then it is no stage that finds its own constants.
        """
        places = []
        for own in fill.arguments[2:]:
            place = next((n for n, t in enumerate(used.arguments[2:]) if tvm_ffi.structural_equal(t, own)), None)
            if place is None:
                self._stale(used, "", f"{fill.name} fills its registers from memory that it is not given itself")
                raise Undecided(f"which of its tensors {used.name} has kept")
            places.append(place)
        return places

    def _filled(self, used: _Called, fill: _Called) -> tirx.PrimFunc:
        """The function of a call that uses registers, with what fills them before it."""
        use, filling = self.functions[used.name], self.functions[fill.name]
        count = len(used.arguments)
        registers = use.params[count:]
        if any(escapes(function, function.params[count:]) for function in (use, filling)):
            raise Undecided(f"{used.name}, which gives registers that are kept to others")
        if any(collect(filling.body, tirx.AttrStmt)) or not only_fills(filling, filling.params[len(fill.arguments) :]):
            raise Undecided(f"{fill.name}, which does more than fill registers")
        if stores_to(use, registers):
            raise Undecided(f"{used.name}, which changes registers that are kept")
        places = self._places(used, fill)
        buffers = []
        for number, register in enumerate(used.registers):
            declared = next(one for one in self.registers if is_data(register, one))
            buffers.append(
                tirx.decl_buffer(declared.shape, declared.dtype, f"kept{number}", scope="local", layout=None)
            )
        given = [*use.params[:2], *(use.params[2 + n] for n in places)]
        first = with_registers(filling, given, buffers)
        second = with_registers(use, use.params[:count], buffers)
        return tirx.PrimFunc(
            use.params[:count], sequence(*map(tirx.AllocBuffer, buffers), first, second), attrs=use.attrs
        )


def _needed(held: tuple[int, int] | None, tile: int) -> str:
    """What registers hold that were filled for a tile and a thread, as told to who computes a tile."""
    if held is None:
        return "nothing"
    return f"what tile {held[0]} needs" if held[0] != tile else f"what thread {held[1]} needs"


def _blocks_of(count: int) -> list[int]:
    """Some blocks of a grid."""
    return sorted({0, 1, count // 2, count - 1} & {*range(count)})


def _is_local(buffer: tirx.Buffer) -> bool:
    return str(buffer.scope()) == "local"
