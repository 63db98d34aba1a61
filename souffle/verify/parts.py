"""Kernels in which parts of each block compute stages, as kernels in which the stages have blocks of their own.

::

    block barrier
    if a <= tid && tid < b:                               part b - a, numbered anew:
      part_tid = tid - a
      for it: tile = it * blocks + block             =      for it: tile = it * workers + worker
        stage(tile, part_tid, ...); bar.sync id, b - a        stage(tile, tid, ...); block barrier
    block barrier

Each block has one worker of the part, of ``b - a`` threads in whole warps, and there are as many as blocks: so each
tile is computed once on the left, as on the right. The part is to its stage what a block is if no barrier of it is any
other's or for other threads, and if nobody else touches its shared memory meanwhile. The latter is looked for in the
order of the text: between two barriers of the whole block, which all of its threads come to, neither two parts nor a
part and what all workers compute may have threads, memory, or a barrier's number in common.

Who computes which tile differs from what the number of the tile says in other loops, so each has a numbering of its
own (:mod:`souffle.verify.shares`). What does not have this form is undecided, or refuted with what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.certificate import Counterexample
from souffle.codegen.plan import Kernel
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import collect, const_int, sequence, statements_of, substitute
from souffle.verify.expressions import Axis, Undecided, evaluate, variable
from souffle.verify.indices import index_of, operator_name
from souffle.verify.other_forms import OtherForms, launch_of, other_forms, with_launch
from souffle.verify.shares import NUMBERING
from souffle.verify.wait_names import ARRIVE_FUNCTION, GRID_WAITS

__all__ = ["PART", "beyond_parts", "put_back", "set_apart", "without_parts"]

PART = "souffle_part"
"""Around a loop over tiles: by a worker of how many threads it is, where that is no block of the kernel."""

_BARRIER = re.compile(r"souffle_named_barrier<(-?\d+), *(-?\d+)>")
_TEAM_BARRIER = re.compile(r"souffle_team_barrier<(-?\d+), *(-?\d+)>")
_PLACE = "souffle_part_set_apart"
_KEPT_IN_MEMORY = ("souffle_window", "souffle_kept")
_NUMBERS = 16
_WARP = 32
_TEAM_BINDS = 4
_ALIGNMENT = 128
_MOST_BYTES = 1 << 30


def without_parts(kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc]) -> OtherForms[_Kernel]:
    """The same kernels with workers for stages in the place of parts, as far as these are the same.

    Parameters
    ----------
    kernels, functions : mapping of str to PrimFunc
        By their names; the functions are those that the kernels call.
    """

    def reader_of(name: str, kernel: tirx.PrimFunc) -> _Kernel | None:
        reader = _Kernel(name, kernel, functions)
        return reader if reader.divided else None

    return other_forms(kernels, functions, reader_of)


def beyond_parts(found: OtherForms[_Kernel], kernel: Kernel) -> Iterator[Counterexample | Undecided]:
    """What is wrong with the launch of a kernel as far as parts are concerned."""
    reader = found.readers.get(kernel.name)
    if reader is None:
        return
    yield from reader.findings
    if reader.bytes > kernel.dynamic_shared_bytes:
        why = f"a part's memory reaches to byte {reader.bytes}, and a block has {kernel.dynamic_shared_bytes}"
        yield Counterexample("out of bounds", kernel.name, (), (), (), "shared memory", why)


def set_apart(body: tirx.Stmt) -> tuple[tirx.Stmt, list[tirx.Stmt]]:
    """A kernel's body without what was in parts of its blocks, and that, for what is about the other workers only."""
    apart: list[tirx.Stmt] = []

    def taken(node: tirx.AttrStmt) -> tirx.Stmt:
        if node.attr_key != PART:
            return node
        apart.append(node)
        return tirx.AttrStmt(node.node, _PLACE, tirx.IntImm("int32", len(apart) - 1), tirx.Evaluate(0))

    return structural_map(body, (tirx.AttrStmt, taken)), apart


def put_back(body: tirx.Stmt, apart: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """A kernel's body with that again."""

    def put(node: tirx.AttrStmt) -> tirx.Stmt:
        return apart[int(node.value)] if node.attr_key == _PLACE else node

    return structural_map(body, (tirx.AttrStmt, put)) if apart else body


@dataclass(frozen=True)
class _User:
    """What has threads of a block, its memory and its barriers, between two barriers of all of it."""

    name: str
    threads: range
    memory: range
    numbers: frozenset[int]
    is_part: bool

    def conflict(self, other: _User) -> str:
        """Why two cannot be between the same two barriers of the block; nothing where they can."""
        if _meet(self.memory, other.memory):
            return f"{self.name} and {other.name} have bytes of shared memory in common, and no block barrier between"
        both = self.numbers & other.numbers
        if both:
            return f"{self.name} and {other.name} wait at barrier {min(both)}, and no block barrier stands between"
        return ""


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


@dataclass(eq=False)
class _Kernel:
    """Reads one kernel."""

    name: str
    func: tirx.PrimFunc
    functions: Mapping[str, tirx.PrimFunc]
    findings: list[Counterexample | Undecided] = field(default_factory=list)
    changed: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    bytes: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        self.launch, body = launch_of(self.func)
        axes = {str(one.node.thread_tag): one for one in self.launch}
        self.block = axes["blockIdx.x"].node.var if "blockIdx.x" in axes else None
        self.thread = axes["threadIdx.x"].node.var if "threadIdx.x" in axes else None
        self.extent = const_int(axes["threadIdx.x"].value) if "threadIdx.x" in axes else 0
        self.blocks = self.func.params[-1]
        self.statements = statements_of(body)
        head = self.statements[:_TEAM_BINDS]
        self.head = head if len(head) == _TEAM_BINDS and all(isinstance(one, tirx.Bind) for one in head) else []
        self.head = [] if any(isinstance(one.value, Call) and _named(one.value) for one in self.head) else self.head
        self.divided = any(self.is_part(one) for one in self.outside(self.statements))
        # Who may still be at work since the last barrier of the whole block.
        self.busy: list[_User] = []
        self.told: set[str] = set()

    def is_part(self, node: tirx.Stmt) -> bool:
        """Whether a statement outside of loops over tiles is for some threads of the block."""
        return isinstance(node, tirx.IfThenElse) and self.thread in {*collect(node.condition, tvm.ir.Var)}

    def outside(self, statements: Sequence[tirx.Stmt]) -> Iterator[tirx.Stmt]:
        """Statements that all threads come to equally often."""
        for one in statements:
            yield one
            if _is_loop(one):
                yield from self.outside(statements_of(one.body))

    def whole(self) -> tirx.PrimFunc:
        """The kernel with stages of their own in the place of parts; what they call is in `changed`."""
        names = {operator_name(call) for call in collect(self.func.body, Call)}
        if names & {*_KEPT_IN_MEMORY}:
            raise Undecided("parts of a block beside what stays in its shared memory")
        body = sequence(*self.head, *self.in_order(self.statements[len(self.head) :]))
        return with_launch(self.func, self.launch, body)

    def in_order(self, statements: Sequence[tirx.Stmt]) -> list[tirx.Stmt]:
        """Statements in the order of the text, and what of the block is in use at each."""
        made: list[tirx.Stmt] = []
        for one in statements:
            if self.is_part(one):
                made.append(self.part(one))
            elif _is_loop(one):
                inside = self.in_order(statements_of(one.body))
                # A step begins as the one before has ended.
                self.in_order(statements_of(one.body))
                made.append(tirx.For(one.loop_var, one.min, one.extent, one.kind, sequence(*inside)))
            elif self.whole_block_waits(one):
                self.busy.clear()
                # Of teams a barrier of the block says no more than this.
                if not (self.head and operator_name(one.value) == "tirx.tvm_storage_sync"):
                    made.append(one)
            else:
                self.uses(self.workers(one))
                made.append(one)
        return made

    def whole_block_waits(self, node: tirx.Stmt) -> bool:
        """Whether all threads of a block wait for each other at a statement."""
        if isinstance(node, tirx.IfThenElse):
            # A loop's first step may have no wait, and is what a launch begins with or has waited for.
            return False
        if not (isinstance(node, tirx.Evaluate) and isinstance(node.value, Call)):
            return False
        return operator_name(node.value) in ("tirx.tvm_storage_sync", *GRID_WAITS)

    def uses(self, user: _User | None) -> None:
        """What is at work from here to the next barrier of the block, if it is at work with nobody who disturbs it."""
        if user is None:
            return
        for other in self.busy:
            why = user.conflict(other) if user.is_part or other.is_part else ""
            if why and why not in self.told:
                self.told.add(why)
                self.findings.append(Counterexample("race in a block", self.name, (user.name,), (), (), user.name, why))
        self.busy.append(user)

    def workers(self, node: tirx.Stmt) -> _User | None:
        """What all workers compute: of their memory and barriers no more is known here than that there are any."""
        numbers: set[int] = set()
        memory, names = range(0), []
        for call in collect(node, Call):
            name = operator_name(call)
            numbers |= self.numbers(name)
            if isinstance(call.op, tvm.ir.GlobalVar) and str(call.op.name_hint) in self.functions:
                names.append(str(call.op.name_hint))
                body = self.functions[names[-1]].body
                numbers |= {n for inner in collect(body, Call) for n in self.numbers(operator_name(inner))}
                pools = [a.buffer for a in collect(body, tirx.AllocBuffer) if str(a.buffer.scope()) == "shared.dyn"]
                memory = range(max([len(memory), *(const_int(pool.shape[0]) for pool in pools)]))
        if not (memory or numbers) or (not self.head and _ends_with_a_barrier(node)):
            return None
        return _User(names[-1] if names else self.name, range(self.extent), memory, frozenset(numbers), False)

    def numbers(self, name: str) -> set[int]:
        """The barriers at which a call waits; those of all teams."""
        own, team = _BARRIER.fullmatch(name), _TEAM_BARRIER.fullmatch(name)
        if own:
            return {int(own[1])}
        divisors = collect(self.head[0].value, tirx.IntImm) if self.head else []
        teams = self.extent // max(1, const_int(divisors[0])) if divisors else 1
        return set(range(int(team[1]), int(team[1]) + teams)) if team else set()

    # A part

    def part(self, node: tirx.IfThenElse) -> tirx.Stmt:
        """A part as workers of its own; raises where that is not known."""
        first, last = self.threads_of(node.condition)
        count = last - first
        if node.else_case is not None:
            raise Undecided(f"what other threads do than those of {node.condition}")
        for call in collect(node.then_case, Call):
            name = operator_name(call)
            if name in ("tirx.tvm_storage_sync", *GRID_WAITS, ARRIVE_FUNCTION):
                self.wrong("divergent barrier", name, f"only threads {first} to {last - 1} of a block come to it")
                raise Undecided(f"{name} for some threads of a block")
        numbers: set[int] = set()
        body = _mapped(node.then_case, lambda one: self.barrier(one, count, numbers))
        bind, *loops = statements_of(body)
        if not isinstance(bind, tirx.Bind):
            raise Undecided(f"how the threads of a part are counted under {node.condition}")
        self.counted(bind, first, last)
        called = [c for c in collect(body, Call) if isinstance(c.op, tvm.ir.GlobalVar)]
        lowest, end, stages = _MOST_BYTES, 0, []
        for name in dict.fromkeys(str(call.op.name_hint) for call in called):
            stages.append(name)
            start, stop = self.function(name, count, numbers)
            if stop > start:
                lowest, end = min(lowest, start), max(end, stop)
        if first % _WARP or last % _WARP:
            raise Undecided(f"threads {first} to {last - 1}, which are not whole warps")
        self.bytes = max(self.bytes, end)
        memory = range(min(lowest, end), end)
        self.uses(_User(stages[-1] if stages else self.name, range(first, last), memory, frozenset(numbers), True))
        number, workers, tid = self.block, self.blocks, self.thread
        if self.head:
            tid, number, workers = (self.head[n].var for n in (1, 2, 3))
        made = substitute(sequence(*loops), {bind.var: tid, self.block: number, self.blocks: workers})
        allowed = {tid} if not self.head else set()
        if self.thread in {*collect(made, tvm.ir.Var)} - allowed:
            raise Undecided("a thread of the block in what a part does")
        if not all(isinstance(one, tirx.For) for one in loops):
            raise Undecided(f"what threads {first} to {last - 1} do beside loops over tiles")
        self.count += 1
        counted = tirx.AttrStmt(tirx.IntImm("int32", -self.count), NUMBERING, tirx.IntImm("int32", -self.count), made)
        return tirx.AttrStmt(tirx.IntImm("int32", count), PART, tirx.IntImm("int32", count), counted)

    def threads_of(self, condition: Any) -> tuple[int, int]:
        """The threads of ``a <= tid && tid < b``."""
        axis = Axis("tid", self.extent)
        holds = evaluate(index_of(condition, {self.thread: variable(axis)}), {axis: np.arange(self.extent)}, {})
        threads = np.flatnonzero(np.broadcast_to(holds, self.extent))
        if not threads.size or threads[-1] - threads[0] >= threads.size:
            raise Undecided(f"the threads for which {condition}")
        return int(threads[0]), int(threads[-1]) + 1

    def counted(self, bind: tirx.Bind, first: int, last: int) -> None:
        """The threads of a part are its first, its second and so on."""
        axis = Axis("tid", self.extent)
        found = evaluate(index_of(bind.value, {self.thread: variable(axis)}), {axis: np.arange(first, last)}, {})
        found = np.broadcast_to(found, last - first)
        if not np.array_equal(found, np.arange(last - first)):
            if not np.array_equal(np.unique(found), np.arange(last - first)):
                why = f"threads {first} to {last - 1} are not threads 0 to {last - first - 1} of their part, each once"
                self.wrong("launch", str(bind.var.name), why)
            raise Undecided("threads of a part that are counted in another way than the known one")

    def barrier(self, node: tirx.Evaluate, count: int, numbers: set[int], stage: str = "") -> tirx.Stmt:
        """A barrier of a part as one of a block; anything else as it is."""
        name = operator_name(node.value) if isinstance(node.value, Call) else ""
        if _TEAM_BARRIER.fullmatch(name):
            raise Undecided(f"a part waits at {name}")
        found = _BARRIER.fullmatch(name)
        if found is None:
            return node
        number, waits = int(found[1]), int(found[2])
        if not 0 < number < _NUMBERS:
            why = f"a part waits at it; number 0 is the block's, and there are {_NUMBERS}"
            self.wrong("divergent barrier", f"barrier {number}", why, stage)
        if waits != count:
            why = f"it waits for {waits} threads, and {count} of a part come"
            self.wrong("divergent barrier", f"barrier {number}", why, stage)
            raise Undecided(why)
        numbers.add(number)
        return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))

    def function(self, name: str, count: int, numbers: set[int]) -> tuple[int, int]:
        """Make a function as blocks of `count` threads call it; its bytes of the block's shared memory."""
        if name not in self.functions:
            raise Undecided(f"what {name} is, which a part calls")
        func = self.functions[name]
        for call in collect(func.body, Call):
            if operator_name(call) == "tirx.tvm_storage_sync" and str(call.args[0].value) != "warp":
                why = "threads of a part come to a barrier of the block without the others"
                self.wrong("divergent barrier", name, why, name)
                raise Undecided(f"the barriers of {name}, which are no part's own")
        allocated = [alloc.buffer for alloc in collect(func.body, tirx.AllocBuffer)]
        if any(str(buffer.scope()) == "shared" for buffer in allocated):
            raise Undecided(f"the shared memory of {name}, which is no part's own")
        pools = {buffer for buffer in allocated if str(buffer.scope()) == "shared.dyn"}
        loads = [c.args[0] for c in collect(func.body, Call) if operator_name(c) == "tirx.address_of"]
        starts = [load.indices[0] for load in loads if load.source in pools]
        if not all(isinstance(start, tirx.IntImm) for start in starts):
            raise Undecided(f"where the shared memory of {name} is")
        # What lies at a multiple of this does so in both forms.
        lowest = min((int(start) for start in starts), default=0) // _ALIGNMENT * _ALIGNMENT
        if lowest < 0:
            self.wrong("out of bounds", "shared memory", f"it begins at byte {lowest}", name)
            raise Undecided(f"where the shared memory of {name} is")
        ends = [const_int(buffer.shape[0]) for buffer in pools]
        body = _mapped(func.body, lambda one: self.barrier(one, count, numbers, name))
        if lowest:
            body = _moved(body, pools, lowest)
        made = func.with_body(body)
        known = self.changed.setdefault(name, made)
        if not tvm_ffi.structural_equal(known, made):
            raise Undecided(f"{name}, which two parts call in two ways")
        return (lowest, max(ends)) if starts else (0, 0)

    def wrong(self, rule: str, element: str, why: str, stage: str = "") -> None:
        """A counterexample."""
        self.findings.append(Counterexample(rule, self.name, (stage,) if stage else (), (), (), element, why))


def _is_loop(node: tirx.Stmt) -> bool:
    """Whether a statement is a loop over the steps of the network, and not over tiles."""
    return isinstance(node, tirx.For) and isinstance(node.extent, tirx.IntImm)


def _named(call: Call) -> bool:
    return isinstance(call.op, tvm.ir.GlobalVar) or str(getattr(call.op, "name", "")).startswith("tirx.call_")


def _ends_with_a_barrier(node: tirx.Stmt) -> bool:
    """Whether each turn of a loop over tiles ends with a barrier of the whole block."""
    while isinstance(node, tirx.For | tirx.IfThenElse | tirx.SeqStmt):
        node = node.body if isinstance(node, tirx.For) else statements_of(getattr(node, "then_case", node))[-1]
    return isinstance(node, tirx.Evaluate) and operator_name(node.value) == "tirx.tvm_storage_sync"


def _mapped(body: tirx.Stmt, change: Any) -> tirx.Stmt:
    """A statement with its evaluations changed; raises what the first of them raised, which TVM would wrap."""
    reasons: list[Undecided] = []

    def changed(node: tirx.Evaluate) -> tirx.Stmt:
        try:
            return change(node)
        except Undecided as reason:
            reasons.append(reason)
            return node

    made = structural_map(body, (tirx.Evaluate, changed))
    if reasons:
        raise reasons[0]
    return made


def _moved(body: tirx.Stmt, pools: set[tirx.Buffer], nbytes: int) -> tirx.Stmt:
    """A function's body with its pools so many bytes shorter, and what lies in them as many bytes before."""
    shorter = {
        pool: tirx.decl_buffer((max(1, const_int(pool.shape[0]) - nbytes),), pool.dtype, pool.name, scope="shared.dyn")
        for pool in pools
    }

    def address(call: Call) -> Any:
        if operator_name(call) != "tirx.address_of" or call.args[0].source not in pools:
            return call
        load = call.args[0]
        return tirx.address_of(load.source[tirx.IntImm("int32", int(load.indices[0]) - nbytes)])

    body = structural_map(body, (Call, address))
    return structural_map(body, (tvm.ir.Var, lambda var: shorter.get(var, var)))
