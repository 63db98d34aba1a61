"""Copies of constants with which a stage begins, apart from it: a kernel makes them while its blocks wait.

A product's pipeline begins with the copies of its first tiles to shared memory, and waits for them
(:mod:`souffle.schedule.gpu.emit.async_copy`). Where all blocks wait for each other before the stage, its activations
are not there yet, but its weights are: they never change. So the stage's function is parted in two::

    stage(tile, tid, x, w, y):           copies(tile, tid, w):       rest(tile, tid, x, w, y):
      copy x, w; commit                    copy w                      copy x; commit
      copy x, w; commit               =    copy w                      copy x; commit
      for turn: wait; barrier; ...                                     for turn: wait; barrier; ...

The copies are issued as a block has arrived at the barrier (:mod:`souffle.kernel.merge`): the first loads of a stage
overlap with the end of the stages before it (paper §6.5). They belong to no group until the rest commits its first one,
so that whoever waits for that waits for them.

What is taken out of a stage is a statement of its own, does nothing but copy, and reads what no kernel writes at places
that depend on the tile and the thread alone. It stands before anything waits or meets, and before anything but copies
touches shared memory: so nothing is overwritten sooner than it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.schedule.gpu.emit.async_copy import COMMIT_FUNCTION, COPY_FUNCTION, COPY_OR_ZERO_FUNCTION
from souffle.schedule.lower.device_function import DeviceFunction
from souffle.schedule.lower.teams import Teams, team_function
from souffle.schedule.lower.uniform_barriers import barrier_scope
from souffle.tvm_compat import collect, sequence, statements_of

__all__ = ["COPIES_SUFFIX", "PROLOGUE", "Prologue", "prologue_by_teams", "prologue_of", "rests_of"]

PROLOGUE = "souffle.prologue"
"""Attribute of a function that is the copies of a prologue."""

COPIES_SUFFIX, _REST_SUFFIX = "_prologue", "_begun"
"""What is added to a stage's name for the function that makes its first copies, and for what finds them made."""

_DECLARED = (tirx.Bind, tirx.DeclBuffer, tirx.AllocBuffer)

_COPIES = (COPY_FUNCTION, COPY_OR_ZERO_FUNCTION)


@dataclass(frozen=True, eq=False)
class Prologue:
    """A stage's function in two.

    Attributes
    ----------
    whole : DeviceFunction
        The stage's function.
    copies : DeviceFunction
        Parameters ``tile``, ``tid``, the tensors that it reads, and the team where it is for one.
    rest : DeviceFunction
        With the parameters of the stage's function.
    reads : tuple of int
        Which of the stage's tensors `copies` is given.
    """

    whole: DeviceFunction
    copies: DeviceFunction
    rest: DeviceFunction
    reads: tuple[int, ...]


_made: WeakKeyDictionary[DeviceFunction, dict[frozenset[int], Prologue | None]] = WeakKeyDictionary()
_by_teams: WeakKeyDictionary[Prologue, dict[Teams, Prologue]] = WeakKeyDictionary()


def prologue_of(function: DeviceFunction, constants: Collection[int]) -> Prologue | None:
    """A stage's function in two, made once; ``None`` where it begins with no copies of constants.

    Parameters
    ----------
    function : DeviceFunction
        In the form for as many threads as a block has, or a team (:mod:`souffle.schedule.lower.fewer_threads`).
    constants : collection of int
        Which of its tensors are never written.
    """
    known, key = _made.setdefault(function, {}), frozenset(constants)
    if key not in known:
        known[key] = _parted(function, key)
    return known[key]


def prologue_by_teams(prologue: Prologue, teams: Teams) -> Prologue:
    """The same for blocks of teams, made once."""
    known = _by_teams.setdefault(prologue, {})
    if teams not in known:
        forms = (team_function(one, teams) for one in (prologue.whole, prologue.copies, prologue.rest))
        known[teams] = replace(prologue, **dict(zip(("whole", "copies", "rest"), forms, strict=True)))
    return known[teams]


def rests_of(function: DeviceFunction) -> tuple[DeviceFunction, ...]:
    """What was left of a function, of which others have made the copies."""
    return tuple(one.rest for one in _made.get(function, {}).values() if one is not None)


def _parted(function: DeviceFunction, constants: frozenset[int]) -> Prologue | None:
    func, pointers = function.func, function.func.params[2:]
    outer, around, statements = _opened(func.body)
    declared = [one for one in (*outer, *statements) if isinstance(one, tirx.DeclBuffer)]
    numbers = {pointer: number for number, pointer in enumerate(pointers)}
    sources = {d.buffer: numbers[d.data] for d in declared if isinstance(d.data, tvm.ir.Var) and d.data in numbers}
    shared = {d.buffer for d in declared if str(d.buffer.scope()).startswith("shared")}
    taken: list[tirx.Stmt] = []
    rest: list[tirx.Stmt] = []
    reads: dict[int, None] = {}
    begins = True
    for one in statements:
        begins = begins and not _meets(one)
        copied = _copied(one) if begins else None
        begins = begins and (copied is not None or not _touches(one, shared))
        if copied is not None and all(sources.get(buffer) in constants for buffer in copied):
            taken.append(one)
            reads.update((sources[buffer], None) for buffer in copied)
            continue
        rest.append(one)
    if not taken:
        return None
    # Names and buffers that the copies need, in their order.
    before = [one for one in (*outer, *statements) if isinstance(one, _DECLARED)]
    first = _needed(before, taken)
    if any(isinstance(one, tirx.Bind) and collect(one.value, TensorLoad) for one in first):
        return None
    left = sequence(*rest)
    for one in reversed(around):
        left = tirx.AttrStmt(one.node, one.attr_key, one.value, left)
    given = tuple(sorted(reads))
    attributes = {**dict(func.attrs.items()), PROLOGUE: True}
    parameters = [*func.params[:2], *(pointers[number] for number in given)]
    copies = tirx.PrimFunc(parameters, sequence(*first, *taken), func.ret_type).with_attr(attributes)
    return Prologue(
        function,
        replace(function, func=copies, has_barrier=False, name=function.name + COPIES_SUFFIX),
        replace(function, func=func.with_body(sequence(*outer, left)), name=function.name + _REST_SUFFIX),
        given,
    )


def _opened(body: tirx.Stmt) -> tuple[list[tirx.Stmt], list[tirx.AttrStmt], list[tirx.Stmt]]:
    """A body's declarations, the attributes around what follows, and its statements inside of these."""
    outer: list[tirx.Stmt] = []
    around: list[tirx.AttrStmt] = []
    statements = statements_of(body)
    while isinstance(statements[-1], tirx.AttrStmt) and all(isinstance(one, _DECLARED) for one in statements[:-1]):
        outer += statements[:-1]
        around.append(statements[-1])
        statements = statements_of(around[-1].body)
    return outer, around, statements


def _meets(statement: tirx.Stmt) -> bool:
    """Whether threads wait in a statement, for each other or for their copies, or it does what is not looked at."""
    for call in collect(statement, tvm.ir.Call):
        if barrier_scope(call) is not None:
            return True
        name = _called(call)
        if name and name not in _COPIES and name != COMMIT_FUNCTION:
            return True
    return False


def _copied(statement: tirx.Stmt) -> tuple[object, ...] | None:
    """The buffers from which a statement copies, if it does nothing else, at places that no memory says."""
    if isinstance(statement, tirx.For):
        plain = not collect(statement.min, TensorLoad) and not collect(statement.extent, TensorLoad)
        return _copied(statement.body) if plain else None
    if isinstance(statement, tirx.IfThenElse):
        alone = statement.else_case is None and not collect(statement.condition, TensorLoad)
        return _copied(statement.then_case) if alone else None
    if isinstance(statement, tirx.SeqStmt):
        found: list[object] = []
        for one in statement.seq:
            if isinstance(one, tirx.Bind) and not collect(one.value, TensorLoad):
                continue
            own = _copied(one)
            if own is None:
                return None
            found += own
        return tuple(found) or None
    if not (isinstance(statement, tirx.Evaluate) and isinstance(statement.value, tvm.ir.Call)):
        return None
    if _called(statement.value) not in _COPIES:
        return None
    target, source, *whether = statement.value.args[1:]
    places = [index for pointer in (target, source) for index in pointer.args[0].indices]
    return None if any(collect(place, TensorLoad) for place in (*places, *whether)) else (source.args[0].source,)


def _called(call: tvm.ir.Call) -> str:
    """The name of a function of the text without its template arguments; empty for what is no such call."""
    if str(getattr(call.op, "name", "")) != "tirx.call_extern":
        return ""
    return str(call.args[0].value).partition("<")[0]


def _touches(statement: tirx.Stmt, shared: Collection[object]) -> bool:
    """Whether a statement loads from shared memory or stores to it, and does not only declare it."""
    if isinstance(statement, _DECLARED[1:]):
        return False
    touched = [load.source for load in collect(statement, TensorLoad)]
    touched += [store.buffer for store in collect(statement, tirx.BufferStore)]
    return any(buffer in shared for buffer in touched)


def _needed(before: Sequence[tirx.Stmt], statements: Sequence[tirx.Stmt]) -> list[tirx.Stmt]:
    """Of declarations and names, those that statements behind them need, in their order."""
    used = _uses(statements)
    found: list[tirx.Stmt] = []
    for one in reversed(before):
        own = one.var if isinstance(one, tirx.Bind) else one.buffer
        if own in used:
            used |= _uses([one])
            found.append(one)
    return found[::-1]


def _uses(statements: Sequence[tirx.Stmt]) -> set[object]:
    used: set[object] = set()
    for one in statements:
        used.update(collect(one, tirx.Var))
        used.update(load.source for load in collect(one, TensorLoad))
    return used
