"""Kernels in which some workers compute some stages, as kernels in which all workers compute all.

::

    if a <= team && team < b:                              numbered 1:
      own, count = (team - a) * blocks + block, (b - a) * blocks
      turned = (own + count - c % count) % count
      for it: tile = it * count + turned             =       for it: tile = it * workers + worker
        stage(tile, ...)                                       stage(tile, ...)

Each pair of a block and a team of the range is one number below ``count``, and ``turned`` is these numbers in another
order, for every number of blocks: so each tile is computed once on the left too, by some worker, in the same place of
the text. Which worker it is differs from what the number of the tile says in other loops. So what is proven of the
right side must not take tiles of two loops to be on one worker unless both have one numbering: it says of each loop
which it has, and loops of different numberings share no worker as far as anybody knows.

What does not have these forms is tried, with the numbers of the kernel and grids of a few blocks: what is wrong then is
told with an example, and of the rest nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.certificate import Counterexample
from souffle.tvm_compat import collect, const_int, sequence, statements_of, substitute
from souffle.verify.expressions import Axis, Expr, Undecided, const, evaluate, operation, variable
from souffle.verify.indices import index_of, operator_name
from souffle.verify.other_forms import OtherForms, launch_of, other_forms, with_launch
from souffle.verify.wait_names import ARRIVE_FUNCTION, GRID_WAITS

__all__ = ["NUMBERING", "without_shares"]

NUMBERING = "souffle_numbering"
"""Around a loop over tiles: in which numbering of the workers it is; 0 is the kernel's own."""

_WINDOW = "souffle_window"
_GRIDS = (1, 2, 3, 7)
"""Blocks of the grids that are tried where a form is not the known one."""

_TEAM_BINDS = 4
"""A kernel with teams begins with the team, the thread in it, the worker, and how many workers there are."""


def without_shares(kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc]) -> OtherForms:
    """The same kernels with all workers for all stages, as far as these are the same.

    Parameters
    ----------
    kernels, functions : mapping of str to PrimFunc
        By their names; the functions are those that the kernels call.
    """

    def reader_of(name: str, kernel: tirx.PrimFunc) -> _Kernel | None:
        reader = _Kernel(name, kernel)
        return reader if reader.shared else None

    return other_forms(kernels, functions, reader_of)


@dataclass(frozen=True, eq=False)
class _Workers:
    """Some workers of a kernel: the variables that number and count them, and which numbering that is."""

    number: Any
    count: Any
    first: int
    last: int
    shift: int = 0

    @property
    def form(self) -> tuple[int, int, int]:
        """The same for the same numbering."""
        return self.first, self.last, self.shift


@dataclass(eq=False)
class _Kernel:
    """Reads one kernel."""

    name: str
    func: tirx.PrimFunc
    findings: list[Counterexample | Undecided] = field(default_factory=list)
    changed: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    numberings: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.launch, body = launch_of(self.func)
        tags = {str(one.node.thread_tag): one.node.var for one in self.launch}
        self.block, self.thread = tags.get("blockIdx.x"), tags.get("threadIdx.x")
        self.blocks = self.func.params[-1]
        statements = statements_of(body)
        binds = [one for one in statements[:_TEAM_BINDS] if _calculates(one)]
        self.head = statements[:_TEAM_BINDS] if len(binds) == _TEAM_BINDS else []
        self.team = self.head[0].var if self.head else None
        self.rest = statements[len(self.head) :]
        self.shared = any(_calculates(one) for one in self._outside(self.rest)) or any(
            self.team in {*collect(one.condition, tvm.ir.Var)}
            for one in self._outside(self.rest)
            if isinstance(one, tirx.IfThenElse) and self.team is not None
        )

    def _outside(self, statements: Sequence[tirx.Stmt]) -> list[tirx.Stmt]:
        """Statements outside of loops over tiles."""
        found = []
        for one in statements:
            found.append(one)
            if isinstance(one, tirx.IfThenElse):
                found += self._outside(statements_of(one.then_case))
            elif isinstance(one, tirx.For) and isinstance(one.extent, tirx.IntImm):
                found += self._outside(statements_of(one.body))
        return found

    def whole(self) -> tirx.PrimFunc:
        """The kernel with all workers for all stages."""
        if self.head:
            threads = next(one.value for one in self.launch if str(one.node.thread_tag) == "threadIdx.x")
            divisors = collect(self.head[0].value, tirx.IntImm)
            teams = const_int(threads) // max(1, const_int(divisors[0])) if divisors else 1
            every = _Workers(self.head[2].var, self.head[3].var, 0, teams)
        else:
            every = _Workers(self.block, self.blocks, 0, 1)
        self.every = every
        self.numberings[every.form] = 0
        body = sequence(*self.head, *self.statements(self.rest, every))
        return with_launch(self.func, self.launch, body)

    def statements(self, statements: Sequence[tirx.Stmt], among: _Workers) -> list[tirx.Stmt]:
        """Statements that the workers `among` come to, for all workers."""
        made: list[tirx.Stmt] = []
        counted, pending = [among], None
        for one in statements:
            if _calculates(one):
                pending = self.count(one, pending, counted)
            elif isinstance(one, tirx.IfThenElse) and self.team in {*collect(one.condition, tvm.ir.Var)}:
                if one.else_case is not None or among is not self.every:
                    raise Undecided(f"what is done under {one.condition}")
                made += self.of_some(one)
            elif isinstance(one, tirx.For) and isinstance(one.extent, tirx.IntImm):
                inside = sequence(*self.statements(statements_of(one.body), among))
                made.append(tirx.For(one.loop_var, one.min, one.extent, one.kind, inside))
            else:
                made.append(self.of_all(one, counted))
        return made

    def of_some(self, node: tirx.IfThenElse) -> list[tirx.Stmt]:
        """What the teams of a range do."""
        first, last = self.range_of(node.condition)
        for call in collect(node.then_case, Call):
            if operator_name(call) in (*GRID_WAITS, ARRIVE_FUNCTION):
                why = f"only teams {first} to {last - 1} come to it"
                self.findings.append(
                    Counterexample("divergent barrier", self.name, (), (), (), operator_name(call), why)
                )
                raise Undecided("a barrier of the grid for some teams")
        return self.statements(statements_of(node.then_case), _Workers(None, None, first, last))

    def range_of(self, condition: Any) -> tuple[int, int]:
        """The teams of ``a <= team && team < b``."""
        axis = Axis("team", self.every.last)
        holds = evaluate(index_of(condition, {self.team: variable(axis)}), {axis: np.arange(axis.extent)}, {})
        teams = np.flatnonzero(np.broadcast_to(holds, axis.extent))
        if not teams.size or teams[-1] - teams[0] >= teams.size:
            raise Undecided(f"the teams for which {condition}")
        return int(teams[0]), int(teams[-1]) + 1

    def count(self, bind: tirx.Bind, pending: tirx.Bind | None, counted: list[_Workers]) -> tirx.Bind | None:
        """A calculation: the number of a worker of a range, before its count; that count; or another order."""
        among, last = counted[0], counted[-1]
        if among.number is None and pending is None and last is among:
            return bind
        if pending is not None:
            own = _Workers(pending.var, bind.var, among.first, among.last)
            number = (self.team - among.first) * self.blocks + self.block
            count = self.blocks * (among.last - among.first)
            if not (_equal(pending.value, number) and _equal(bind.value, count)):
                self.tried([pending, bind], own)
        else:
            before = next(workers for workers in reversed(counted) if not workers.shift)
            shift = next((const_int(one) for one in collect(bind.value, tirx.IntImm)), 0)
            own = _Workers(bind.var, before.count, before.first, before.last, shift)
            back = before.count - tirx.truncmod(tirx.IntImm("int32", shift), before.count)
            if shift <= 0 or not _equal(bind.value, tirx.truncmod(before.number + back, before.count)):
                self.tried([bind], own, before)
        counted.append(own)
        return None

    def of_all(self, node: tirx.Stmt, counted: Sequence[_Workers]) -> tirx.Stmt:
        """A loop over the tiles of some workers for all; anything else as it is."""
        used = {*collect(node, tvm.ir.Var)}
        anew = [workers for workers in counted if workers is not self.every and workers.number in used]
        if not anew and counted[0] is self.every:
            return node
        if not isinstance(node, tirx.For) or len(anew) != 1:
            raise Undecided(f"a statement of the kind {type(node).__name__} for some workers")
        (workers,) = anew
        others = {one for every in (self.every, *counted) for one in (every.number, every.count)}
        others |= {self.block, self.blocks}
        if used & (others - {workers.number, workers.count}) or (self.team in used and not self._told(node)):
            raise Undecided("a loop over tiles that are numbered in two ways")
        if any(operator_name(call) == _WINDOW for call in collect(node, Call)):
            raise Undecided("tiles that stay in shared memory of workers that are counted anew")
        body = substitute(node, {workers.number: self.every.number, workers.count: self.every.count})
        number = self.numberings.setdefault(workers.form, len(self.numberings))
        return tirx.AttrStmt(tirx.IntImm("int32", number), NUMBERING, tirx.IntImm("int32", number), body)

    def _told(self, node: tirx.Stmt) -> bool:
        """Whether the team is only told to functions and to barriers, as everywhere."""
        calls = [call for call in collect(node, Call) if _is_function(call) or "team_barrier" in operator_name(call)]
        inside = sum(arg.same_as(self.team) for call in calls for arg in call.args)
        return inside == sum(var.same_as(self.team) for var in collect(node, tvm.ir.Var))

    def tried(self, binds: Sequence[tirx.Bind], own: _Workers, before: _Workers | None = None) -> None:
        """Numbers that do not have the known form, on a few grids; raises in any case."""
        teams = self.every.last
        team, block, beside = Axis("team", teams), Axis("block", 64), Axis("other blocks", 64)
        for grid in _GRIDS:
            at = {team: np.arange(teams)[:, None], block: np.arange(grid)[None, :], beside: np.array(grid - 1)}
            blocks = operation("add", variable(beside), const(1))
            env: dict[Any, Expr] = {self.block: variable(block), self.blocks: blocks}
            if self.team is not None:
                env[self.team] = variable(team)
            for bind in self.head[2:]:
                env[bind.var] = index_of(bind.value, env)
            if before is not None and before.number not in env:
                width = own.last - own.first
                env[before.number] = index_of((self.team - own.first) * self.blocks + self.block, env)
                env[before.count] = index_of(self.blocks * width, env)
            for bind in binds:
                env[bind.var] = index_of(bind.value, env)
            shape = (teams, grid)
            numbers, counts = (
                np.broadcast_to(evaluate(env[var], at, {}), shape)[own.first : own.last].reshape(-1)
                for var in (own.number, own.count)
            )
            if (counts != counts.size).any() or not np.array_equal(np.sort(numbers), np.arange(counts.size)):
                why = f"with {grid} blocks its {counts.size} workers are not numbered 0 to {counts.size - 1}, each once"
                self.findings.append(Counterexample("launch", self.name, (), (), (), str(binds[-1].var.name), why))
                break
        raise Undecided("workers that are counted in another way than the known ones")


def _calculates(node: tirx.Stmt) -> bool:
    """Whether a statement gives a calculated number a name; what flags begin with is a call."""
    return isinstance(node, tirx.Bind) and not (isinstance(node.value, Call) and _calls_text(node.value))


def _calls_text(call: Call) -> bool:
    return str(getattr(call.op, "name", "")) in ("tirx.call_extern", "tirx.call_pure_extern") or _is_function(call)


def _is_function(call: Call) -> bool:
    return isinstance(call.op, tvm.ir.GlobalVar)


def _equal(one: Any, other: Any) -> bool:
    return tvm_ffi.structural_equal(one, other, map_free_vars=False)
