"""Copies that blocks start while they wait for each other, for the stages behind: as if these started them themselves.

::

    found = arrive(state, n)                          wait(state, n)
    if (w < T) copies(w, tid, c);                     for it: tile = it * m + w
    wait(state, n, found)                        =      if (tile < T) whole(tile, tid, x, c)
    for it: tile = it * m + w
      if (tile < T) {
        if (it > 0) copies(tile, tid, c);             whole(tile, tid, x, c):
        rest(tile, tid, x, c); }                        copies(tile, tid, c); rest(tile, tid, x, c)

**Theorem.** The two do the same where

1. `copies` does nothing but start asynchronous copies into shared memory, to and from places that follow from the tile
   and the thread alone, of what no launch writes;
2. the first ones are those that `whole` would make in the turn in which ``it`` is 0: of the same tile and thread, from
   the same memory, under the same conditions;
3. all threads of the block meet before them, and then only ask for memory ahead and wait for the grid.

*Proof.* What is copied does not depend on when (1), and is the same (2). From the meeting to the end of the wait no
thread of the block touches shared memory but by these copies (3), so that to start them before the wait or behind it is
the same for all that touches it before or after. No group of copies is closed in between (3): each belongs to the group
that `rest` closes first. Nothing is taken from who parted the functions.

So everything else is proven of kernels without such copies, and of functions that make them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.certificate import Counterexample
from souffle.tvm_compat import Analyzer, StatementVisitor, collect, sequence, substitute
from souffle.verify.expressions import Undecided
from souffle.verify.indices import operator_name
from souffle.verify.other_forms import FormsOfConstants, other_forms
from souffle.verify.prologue_functions import only_copies, with_copies
from souffle.verify.prologue_runs import CopiesFor, stale_copies
from souffle.verify.wait_names import ARRIVAL_FUNCTION, COMPLETION_FUNCTION, GRID_WAITS

__all__ = ["without_prologues"]

_RULE = "stale or undefined read"

COPIES_SUFFIX, REST_SUFFIX = "_prologue", "_begun"
"""In the names of what starts copies, and of what finds them made. Nothing is proven by them: they say whose copies to
look for where it is looked for what is wrong."""


def without_prologues(
    kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc]
) -> FormsOfConstants:
    """The same kernels with functions that make all of their copies, as far as these are the same.

    Parameters
    ----------
    kernels, functions : mapping of str to PrimFunc
        By their names; the functions are those that the kernels call.
    """
    copying = {name for name, function in functions.items() if only_copies(function)}

    def reader_of(name: str, kernel: tirx.PrimFunc) -> _Reader | None:
        calls = collect(kernel.body, Call)
        halves = any(operator_name(call) in (ARRIVAL_FUNCTION, COMPLETION_FUNCTION) for call in calls)
        concerned = halves or any(_callee(call) in copying for call in calls)
        return _Reader(name, kernel, functions, copying) if concerned else None

    found = other_forms(kernels, functions, reader_of)
    constants = {name: frozenset(reader.constants) for name, reader in found.readers.items()}
    # What copies is a part of what it copies for: nothing is said of it, nor of what it was not found to belong to.
    parted = {name for reader in found.readers.values() for name in reader.rests} - {
        name for reader in found.readers.values() for name in reader.changed
    }
    whole = {name: one for name, one in found.functions.items() if name not in copying and name not in parted}
    return FormsOfConstants(found.kernels, whole, found.findings, constants)


@dataclass(frozen=True, eq=False)
class _Begun:
    """A call that starts copies before a wait, and the conditions under which it is made."""

    call: Call
    conditions: tuple[Any, ...]


@dataclass(eq=False)
class _Reader(StatementVisitor):
    """Reads one kernel: its statements without copies ahead of waits."""

    kernel: str
    func: tirx.PrimFunc
    functions: Mapping[str, tirx.PrimFunc]
    copying: set[str]
    findings: list[Counterexample | Undecided] = field(default_factory=list)
    changed: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    constants: set[int] = field(default_factory=set)
    # What is called behind copies.
    rests: set[str] = field(default_factory=set)
    joined: int = 0

    def whole(self) -> tirx.PrimFunc:
        """The kernel; what it calls in place of functions without their first copies is in `changed`."""
        try:
            return self.without()
        except Undecided:
            # What is not seen to be right may be seen to be wrong.
            found = stale_copies(self.func, self.owners())
            if found is not None:
                self.findings.append(
                    Counterexample(_RULE, self.kernel, (found.stage,), (), (found.who,), "shared memory", found.why)
                )
            raise

    def owners(self) -> dict[str, CopiesFor]:
        """Whose copies are started by what, by their names and those of their parameters."""
        found: dict[str, CopiesFor] = {}
        for copies in self.copying:
            rest = copies.replace(COPIES_SUFFIX, REST_SUFFIX)
            if rest != copies and rest in self.functions:
                names = [str(parameter.name) for parameter in self.functions[rest].params]
                own = [str(parameter.name) for parameter in self.functions[copies].params]
                if set(own) <= set(names):
                    found[copies] = CopiesFor(rest, tuple(map(names.index, own)))
        return found

    def without(self) -> tirx.PrimFunc:
        """The kernel without copies ahead of waits."""
        body = self.visit(self.func.body)
        calls = sum(_callee(call) in self.changed for call in collect(body, Call))
        if calls != self.joined:
            names = ", ".join(sorted(self.changed))
            raise Undecided(f"{names}, of which a call finds copies and another one does not")
        return self.func.with_body(body)

    # Statements

    def visit_sequence(self, node: tirx.SeqStmt) -> tirx.Stmt:
        parts, found, number = list(node.seq), [], 0
        begun: list[_Begun] = []
        while number < len(parts):
            before = number
            started, number = self.started(parts, number)
            if number > before:
                if begun:
                    raise self.unused(begun)
                # The wait is left, which begins with a meeting of the block as well.
                begun = started
                found += [one for one in parts[before:number] if _asks(one) or _waits(one)]
                continue
            part = parts[number]
            number += 1
            if begun and isinstance(part, tirx.For):
                found.append(self.joining(part, begun))
                begun = []
            elif begun and not isinstance(part, tirx.Bind) and not _is_nothing(part):
                raise self.unused(begun)
            else:
                found.append(self.visit(part))
        if begun:
            raise self.unused(begun)
        return sequence(*found)

    def visit_attr(self, node: tirx.AttrStmt) -> tirx.Stmt:
        return tirx.AttrStmt(node.node, node.attr_key, node.value, self.visit(node.body))

    def visit_if_then_else(self, node: tirx.IfThenElse) -> tirx.Stmt:
        otherwise = None if node.else_case is None else self.visit(node.else_case)
        return tirx.IfThenElse(node.condition, self.visit(node.then_case), otherwise)

    def visit_for(self, node: tirx.For) -> tirx.Stmt:
        if self.again(node.loop_var, node.body):
            raise Undecided(f"copies in all turns of {node.loop_var.name} but the first, before which there are none")
        return tirx.For(node.loop_var, node.min, node.extent, node.kind, self.visit(node.body))

    def visit_other(self, node: tirx.Stmt) -> tirx.Stmt:
        return node

    # Before a wait

    def started(self, parts: Sequence[tirx.Stmt], first: int) -> tuple[list[_Begun], int]:
        """What is started from a statement on, and the first one behind the wait; no further where nothing is."""
        meeting, number = parts[first], first + 1
        arrived = isinstance(meeting, tirx.Bind) and _calls(meeting.value, ARRIVAL_FUNCTION)
        if not arrived and not _is_block_barrier(meeting):
            return [], first
        begun = []
        while number < len(parts) and (self.is_start(parts[number]) or (arrived and _asks(parts[number]))):
            begun += [] if _asks(parts[number]) else [_guarded(parts[number])]
            number += 1
        wait = parts[number].value if number < len(parts) and isinstance(parts[number], tirx.Evaluate) else None
        completes = wait is not None and _calls(wait, COMPLETION_FUNCTION)
        if arrived:
            ends = completes and wait.args[3].same_as(meeting.var)
            given = zip(wait.args[1:3], meeting.value.args[1:3], strict=True) if ends else ()
            if not ends or not all(tvm_ffi.structural_equal(*pair) for pair in given):
                # There is no barrier then.
                why = "its blocks arrive at a barrier of the grid and do not wait there for the others"
                self.findings.append(Counterexample("launch", self.kernel, (), (), (), self.kernel, why))
                return begun, number
        elif not begun:
            return [], first
        elif wait is None or not _waits(parts[number]) or completes:
            raise self.unused(begun)
        return begun, number + 1

    def is_start(self, node: tirx.Stmt) -> bool:
        """Whether a statement starts copies."""
        found = _guarded(node)
        return found is not None and _callee(found.call) in self.copying

    def unused(self, begun: Sequence[_Begun]) -> Undecided:
        return Undecided(f"what {_callee(begun[0].call)} copies before anything but a wait and the tiles of a stage")

    # In a loop over tiles

    def again(self, turn: tirx.Var, body: tirx.Stmt) -> list[tirx.IfThenElse]:
        """Where copies are started in all turns but the first."""
        found = (one for one in collect(body, tirx.IfThenElse) if _is_later(one.condition, turn))
        return [one for one in found if self.is_start(one)]

    def joining(self, loop: tirx.For, begun: Sequence[_Begun]) -> tirx.Stmt:
        """A loop over tiles whose stage makes the copies that were begun for its first turn."""
        plain = loop.kind == tirx.ForKind.SERIAL and loop.step is None and isinstance(loop.min, tirx.IntImm)
        if len(begun) != 1 or not plain or int(loop.min.value):
            raise self.unused(begun)
        again, known = self.again(loop.loop_var, loop.body), self.joined
        body = self.turn(loop.body, (), loop.loop_var, begun[0])
        if len(again) != 1 or self.joined != known + 1:
            raise Undecided(f"the tiles behind what {_callee(begun[0].call)} copies")
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)

    def turn(self, node: tirx.Stmt, around: tuple[Any, ...], turn: tirx.Var, begun: _Begun) -> tirx.Stmt:
        """A turn's statements, with the stage that makes all of its copies."""
        if isinstance(node, tirx.IfThenElse) and node.else_case is None and not _is_later(node.condition, turn):
            inside = self.turn(node.then_case, (*around, node.condition), turn, begun)
            return tirx.IfThenElse(node.condition, inside, None)
        if not isinstance(node, tirx.SeqStmt):
            return node
        parts, found = list(node.seq), []
        for number, part in enumerate(parts):
            if not (isinstance(part, tirx.IfThenElse) and _is_later(part.condition, turn) and self.is_start(part)):
                found.append(self.turn(part, around, turn, begun))
                continue
            rest = parts[number + 1].value if number + 1 < len(parts) and _is_call(parts[number + 1]) else None
            if rest is None:
                raise Undecided(f"what follows the copies of {_callee(begun.call)} in its loop")
            self.join(_guarded(part.then_case), rest, around, turn, begun)
        return sequence(*found)

    def join(self, copies: _Begun | None, rest: Call, around: tuple[Any, ...], turn: tirx.Var, begun: _Begun) -> None:
        """Look whether the copies of the first turn are those of the others, and put them into the stage."""
        name = _callee(rest)
        self.rests.add(name)
        if copies is None or copies.conditions:
            raise Undecided(f"under which conditions {name} finds its copies")
        if _callee(copies.call) != _callee(begun.call):
            raise Undecided(f"{name}, for which {_callee(begun.call)} copies in one turn and another one in others")
        first = {turn: tirx.IntImm("int32", 0)}
        if len(around) != len(begun.conditions):
            raise Undecided(f"under which conditions {_callee(begun.call)} copies for {name}")
        for one, other in zip(around, begun.conditions, strict=True):
            self.same(name, substitute(one, first), other, "where")
        for number, (one, other) in enumerate(zip(copies.call.args, begun.call.args, strict=True)):
            what = ("for tile", "for thread")[number] if number < 2 else "from"
            self.same(name, substitute(one, first), other, what)
        places = []
        for argument in copies.call.args:
            place = next((n for n, own in enumerate(rest.args) if tvm_ffi.structural_equal(own, argument)), None)
            if place is None:
                raise Undecided(f"{name}, which is not given {argument}, of which it is copied for it")
            places.append(place)
        if places[:2] != [0, 1]:
            raise Undecided(f"the tile and the thread for which {_callee(copies.call)} copies")
        numbers = {parameter: number for number, parameter in enumerate(self.func.params)}
        pointers = [argument for argument in copies.call.args[2:] if _is_pointer(argument)]
        used = [var for pointer in pointers for var in collect(pointer, tirx.Var) if var in numbers]
        self.constants.update(numbers[var] for var in used if isinstance(var.ty, tvm.ir.PointerType))
        whole = with_copies(self.functions[_callee(copies.call)], self.functions[name], places)
        if name in self.changed and not tvm_ffi.structural_equal(self.changed[name], whole):
            raise Undecided(f"{name}, for which different copies are made")
        self.changed[name] = whole
        self.joined += 1

    def same(self, stage: str, one: Any, other: Any, what: str) -> None:
        """What is so in the first turn of a loop is so for its copies."""
        if not _is_pointer(one):
            analyzer = Analyzer()
            one, other = analyzer.simplify(one), analyzer.simplify(other)
        if not one.same_as(other) and not tvm_ffi.structural_equal(one, other):
            raise Undecided(f"{stage}, whose first turn is {what} {one}, and its copies {what} {other}")


def _guarded(node: tirx.Stmt) -> _Begun | None:
    """A call of a function under conditions; ``None`` for anything else."""
    conditions = []
    while isinstance(node, tirx.IfThenElse) and node.else_case is None:
        conditions.append(node.condition)
        node = node.then_case
    return _Begun(node.value, tuple(conditions)) if _is_call(node) else None


def _is_call(node: tirx.Stmt) -> bool:
    return isinstance(node, tirx.Evaluate) and isinstance(node.value, Call) and bool(_callee(node.value))


def _callee(call: Call) -> str:
    """The function of the module that is called; empty for operators and functions of the text."""
    return str(call.op.name_hint) if isinstance(call.op, tvm.ir.GlobalVar) else ""


def _asks(node: tirx.Stmt) -> bool:
    """Whether a statement asks for memory ahead, which is none of a program's reads."""
    return isinstance(node, tirx.Evaluate) and _calls(node.value, "souffle_prefetch_l2")


def _waits(node: tirx.Stmt) -> bool:
    """Whether all blocks wait for each other at a statement."""
    return isinstance(node, tirx.Evaluate) and isinstance(node.value, Call) and operator_name(node.value) in GRID_WAITS


def _is_nothing(node: tirx.Stmt) -> bool:
    return isinstance(node, tirx.Evaluate) and isinstance(node.value, tirx.IntImm)


def _calls(node: Any, name: str) -> bool:
    return isinstance(node, Call) and operator_name(node) == name


def _is_block_barrier(node: tirx.Stmt) -> bool:
    """Whether all threads of a block meet at a statement."""
    if not isinstance(node, tirx.Evaluate) or not _calls(node.value, "tirx.tvm_storage_sync"):
        return False
    return len(node.value.args) == 1 and str(node.value.args[0].value) in ("shared", "shared.dyn")


def _is_later(condition: Any, turn: tirx.Var) -> bool:
    """Whether a condition holds in all turns but the first."""
    if isinstance(condition, tirx.GT):
        value, bound = condition.a, condition.b
    elif isinstance(condition, tirx.LT):
        bound, value = condition.a, condition.b
    else:
        return False
    return value.same_as(turn) and isinstance(bound, tirx.IntImm) and int(bound.value) == 0


def _is_pointer(node: Any) -> bool:
    return isinstance(getattr(node, "ty", None), tvm.ir.PointerType)
