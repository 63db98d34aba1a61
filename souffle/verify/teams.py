"""Kernels whose blocks are several teams, as kernels in which each team is a block.

::

    kernel<<<blocks, k * T>>>(..., blocks):               kernel<<<k * blocks, T>>>(..., k * blocks):
      team, tid = threadIdx / T, threadIdx % T
      worker, workers = team * blocks + blockIdx, k * blocks    =
      for it: tile = it * workers + worker                        for it: tile = it * num_blocks + block
        stage(tile, tid, ..., team); team barrier                   stage(tile, tid, ...); block barrier
      grid barrier                                                grid barrier

The two are the same where a team is to the kernel what a block is: each pair of a block and a team is one worker, and
there is no other worker; a team is whole warps; no barrier of a team is any other team's or the block's, and it waits
for threads of that team alone; what a team finds in shared memory is in a part that no other team touches; and nothing
else depends on the block, the thread or the team. A grid barrier lets nobody go before all threads of all blocks have
come, which are those of all workers. What is proven of the right side is proven for every number of blocks, so for a
multiple of `k`. So everything else is proven of kernels without teams.

What does not have these forms is tried, with the numbers of the kernel and grids of a few blocks: what is wrong then is
told with an example, and of the rest nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from souffle.certificate import Counterexample
from souffle.codegen.plan import Kernel, Plan
from souffle.schedule.gpu.device import device_for
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import collect, const_int, sequence, statements_of, substitute
from souffle.verify.bounds import fit
from souffle.verify.expressions import Axis, Expr, Undecided, evaluate, linear_terms, variable
from souffle.verify.indices import index_of, operator_name
from souffle.verify.kernel_reader import KernelText
from souffle.verify.other_forms import launch_of, other_forms
from souffle.verify.parts import put_back, set_apart
from souffle.verify.wait_names import GRID_WAITS

__all__ = ["Teamless", "without_teams"]

_BARRIER = re.compile(r"souffle_team_barrier<(-?\d+), *(-?\d+)>")
_BARRIER_TEXT = """
template <int first, int threads> static __device__ __forceinline__ int souffle_team_barrier(int team) {
  asm volatile("bar.sync %0, %1;" : : "r"(first + team), "n"(threads) : "memory");
  return 0;
}
"""
_NAMED = "souffle_named_barrier"
_PREFETCH = "souffle_prefetch_l2"
_WINDOW = "souffle_window"
_PLACE = "souffle_kept"
_NUMBERS = 16
_WARP = 32
_GRIDS = (1, 2, 3, 7)
"""Blocks of the grids that are tried where a form is not the known one."""


@dataclass(frozen=True)
class _Division:
    """Of a kernel's blocks: how many teams, bytes from one's memory to the next's, and whether teams have barriers."""

    count: int
    nbytes: int
    waits: bool


@dataclass(frozen=True, eq=False)
class Teamless:
    """Kernels and functions in which each team is a block.

    Attributes
    ----------
    kernels, functions : mapping of str to PrimFunc
    teams : mapping of str to _Division
        By the kernels' names, of those that had any.
    findings : mapping of str to sequence
        By the kernels' names: counterexamples, and what is undecided.
    """

    kernels: Mapping[str, tirx.PrimFunc]
    functions: Mapping[str, tirx.PrimFunc]
    teams: Mapping[str, _Division] = field(default_factory=dict)
    findings: Mapping[str, Sequence[Counterexample | Undecided]] = field(default_factory=dict)

    def of(self, plan: Plan) -> Plan:
        """A plan of these kernels."""
        return replace(plan, kernels=tuple(map(self._kernel, plan.kernels)))

    def _kernel(self, kernel: Kernel) -> Kernel:
        if kernel.name not in self.teams:
            return kernel
        own = self.teams[kernel.name]
        shared = own.nbytes or kernel.dynamic_shared_bytes // own.count
        threads, tiles = kernel.threads // own.count, kernel.tiles * own.count
        return replace(kernel, threads=threads, tiles=tiles, dynamic_shared_bytes=shared, teams=1)

    def beyond(self, plan: Plan, kernel: Kernel, text: KernelText) -> Iterator[Counterexample | Undecided]:
        """What is wrong with a launch of a kernel, as far as its blocks are teams.

        The plan and the kernel are those with teams; the text is the one without.
        """
        if kernel.name not in self.teams:
            return
        yield from self.findings[kernel.name]
        own = self.teams[kernel.name]
        yield from fit(kernel, replace(text, threads=text.threads * own.count), device_for(plan.options.arch), 0)
        if own.count * own.nbytes > kernel.dynamic_shared_bytes:
            why = f"{own.count} teams have {own.nbytes} bytes each, and a block {kernel.dynamic_shared_bytes}"
            yield Counterexample("out of bounds", kernel.name, (), (), (), "shared memory", why)
        module = plan.modules[kernel.module]
        if own.waits and not module.edited and _BARRIER_TEXT.strip() not in module.text:
            yield Undecided(f"what souffle_team_barrier is in the text of {kernel.name}")


def without_teams(kernels: Mapping[str, tirx.PrimFunc], functions: Mapping[str, tirx.PrimFunc]) -> Teamless:
    """The same kernels with blocks in the place of teams, as far as these are the same.

    Parameters
    ----------
    kernels, functions : mapping of str to PrimFunc
        By their names; the functions are those that the kernels call.
    """

    def reader_of(name: str, kernel: tirx.PrimFunc) -> _Kernel | None:
        reader = _Kernel(name, kernel, functions)
        return reader if reader.divided else None

    found = other_forms(kernels, functions, reader_of)
    teams = {name: _Division(one.count, one.nbytes, bool(one.numbers)) for name, one in found.readers.items()}
    return Teamless(found.kernels, found.functions, teams, found.findings)


@dataclass(eq=False)
class _Kernel:
    """Reads one kernel."""

    name: str
    func: tirx.PrimFunc
    functions: Mapping[str, tirx.PrimFunc]
    findings: list[Counterexample | Undecided] = field(default_factory=list)
    changed: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    count: int = 1
    threads: int = 0
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.block = self.thread = None
        launch, self.body = launch_of(self.func)
        for axis in launch:
            if str(axis.node.thread_tag) == "threadIdx.x":
                self.thread, self.extent = axis.node.var, axis.value
            else:
                self.block = axis.node.var
        self.blocks = self.func.params[-1]
        self.statements = statements_of(self.body)
        first = self.statements[0] if self.statements else None
        # Nothing else in a kernel begins with a calculation.
        self.divided = isinstance(first, tirx.Bind) and not isinstance(first.value, Call)
        self.numbers: dict[int, tuple[int, str]] = {}
        self.strides: dict[int, str] = {}
        self.team: tirx.Var | None = None

    def whole(self) -> tirx.PrimFunc:
        """The kernel with blocks in the place of teams; what it calls is in `changed`."""
        binds = [statement for statement in self.statements[:4] if isinstance(statement, tirx.Bind)]
        if len(binds) < 4 or self.block is None or not isinstance(self.extent, tirx.IntImm):
            raise Undecided("how the blocks of the kernel are divided into teams")
        self.divide(binds)
        self.team, tid, worker, workers = (bind.var for bind in binds)
        body = sequence(*self.statements[4:])
        self.only_launches(body)
        self.whole_blocks_wait(body, {tid, worker, workers})
        # What parts of a block compute no team does.
        body, apart = set_apart(body)
        body = _mapped(body, Call, self.call)
        body = _mapped(body, tirx.Evaluate, self.evaluated)
        body = put_back(body, apart)
        body = substitute(body, {tid: self.thread, worker: self.block, workers: self.blocks})
        if self.team in {*collect(body, tvm.ir.Var)}:
            raise Undecided("what depends on the number of a team")
        self.settle()
        for node, extent in ((self.thread, tirx.IntImm("int32", self.threads)), (self.block, self.blocks)):
            tag = "threadIdx.x" if node is self.thread else "blockIdx.x"
            axis = tirx.IterVar((0, extent), node, tirx.IterVar.ThreadIndex, tag)
            body = tirx.AttrStmt(axis, "thread_extent", extent, body)
        return self.func.with_body(body)

    def wrong(self, rule: str, element: str, why: str, stage: str = "") -> None:
        """A counterexample."""
        self.findings.append(Counterexample(rule, self.name, (stage,) if stage else (), (), (), element, why))

    # Who computes what

    def divide(self, binds: Sequence[tirx.Bind]) -> None:
        """``team``, ``tid``, ``worker`` and ``workers``: in the known forms, or tried."""
        team, tid, worker, workers = (bind.value for bind in binds)
        extent = const_int(self.extent)
        divisor = next((const_int(c) for c in collect(team, tirx.IntImm)), 0)
        self.threads = divisor if 0 < divisor <= extent else extent
        self.count = extent // self.threads
        if extent % self.threads or self.threads % _WARP:
            why = f"{extent} threads are not teams of {self.threads} in whole warps"
            self.wrong("launch", self.name, why)
            raise Undecided(why)
        first = binds[0].var
        forms = (
            tirx.truncdiv(self.thread, self.threads),
            tirx.truncmod(self.thread, self.threads),
            first * self.blocks + self.block,
            self.blocks * self.count,
        )
        given = (team, tid, worker, workers)
        if not all(tvm_ffi.structural_equal(a, b, map_free_vars=False) for a, b in zip(given, forms, strict=True)):
            self.tried(binds)

    def tried(self, binds: Sequence[tirx.Bind]) -> None:
        """Divisions of a block that are not the known one, on a few grids; raises in any case."""
        thread, block, blocks = Axis("thread", const_int(self.extent)), Axis("block", 64), Axis("blocks", 64)
        env: dict[Any, Expr] = {
            self.thread: variable(thread), self.block: variable(block), self.blocks: variable(blocks)
        }  # fmt: skip
        for bind in binds:
            env[bind.var] = index_of(bind.value, env)
        for grid in _GRIDS:
            shape = (grid, const_int(self.extent))
            axes = {thread: np.arange(shape[1])[None, :], block: np.arange(grid)[:, None], blocks: np.array(grid)}
            team, tid, worker, workers = (np.broadcast_to(evaluate(env[b.var], axes, {}), shape) for b in binds)
            lanes = np.unique((worker * self.threads + tid)[(tid >= 0) & (tid < self.threads)])
            if (workers != grid * self.count).any() or not np.array_equal(lanes, np.arange(grid * shape[1])):
                why = f"with {grid} blocks its teams are not the workers 0 to {grid * self.count - 1}, each once"
                self.wrong("launch", self.name, why)
                break
            if (team != np.arange(shape[1]) // self.threads).any():
                self.wrong("launch", self.name, "threads of one team are taken for those of another")
                break
        raise Undecided("another division of blocks into teams than the known one")

    def only_launches(self, body: tirx.Stmt) -> None:
        """The block, the thread and the grid as they are stand in grid barriers and prefetches alone."""
        own = {self.block, self.thread, self.blocks}
        allowed = [c for c in collect(body, Call) if operator_name(c) in (*GRID_WAITS, _PREFETCH)]
        inside = sum(v in own for call in allowed for a in call.args for v in collect(a, tvm.ir.Var))
        if sum(v in own for v in collect(body, tvm.ir.Var)) != inside:
            raise Undecided("what depends on a block of several teams")

    def whole_blocks_wait(self, body: tirx.Stmt, of_teams: set[tirx.Var]) -> None:
        """A grid barrier is of the blocks that there are, and knows of no team."""
        for call in collect(body, Call):
            if operator_name(call) in GRID_WAITS and of_teams & {*collect(call, tvm.ir.Var)}:
                why = f"it waits for other blocks than those that come: {call}"
                self.wrong("divergent barrier", "grid barrier", why)
                raise Undecided("a grid barrier of teams")

    # Calls

    def call(self, call: Call) -> Any:
        """A call of a stage without the team; a window, and a place where constants stay, as that of the first team."""
        name = operator_name(call)
        if name == _WINDOW:
            start, _ = self.first_part(call.args[2], self.team, name)
            return _with_arguments(call, [*call.args[:2], start, *call.args[3:]])
        if name == _PLACE:
            start, _ = self.first_part(call.args[1], self.team, name)
            return _with_arguments(call, [call.args[0], start])
        if not isinstance(call.op, tvm.ir.GlobalVar):
            return call
        called = str(call.op.name_hint)
        function = self.functions.get(called)
        if function is None:
            return call
        self.own_memory(called, function)
        if not _takes_team(function):
            # Its barriers are the block's, whatever they look like.
            _mapped(function.body, tirx.Evaluate, lambda node: self.evaluated(node, self.team, called))
            return call
        if not call.args[-1].same_as(self.team):
            self.wrong("race in a block", called, f"team {call.args[-1]} is told to all teams", called)
            raise Undecided(f"the team {call.args[-1]} of {called}")
        if called not in self.changed:
            self.changed[called] = self.function(called, function)
        return _with_arguments(call, call.args[:-1])

    def own_memory(self, name: str, function: tirx.PrimFunc) -> None:
        """No shared memory of a function is the same for all teams."""
        scopes = {str(alloc.buffer.scope()) for alloc in collect(function.body, tirx.AllocBuffer)}
        if "shared" in scopes or ("shared.dyn" in scopes and not _takes_team(function)):
            self.wrong("race in a block", name, "all teams use its shared memory at the same time", name)
            raise Undecided(f"the shared memory of {name}, which is no team's own")

    def function(self, name: str, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """A function as the blocks of the other kernel call it."""
        *parameters, team = function.params
        pools = {b.buffer for b in collect(function.body, tirx.AllocBuffer) if str(b.buffer.scope()) == "shared.dyn"}
        own: dict[int, None] = {}

        def address(call: Call) -> Any:
            if operator_name(call) != "tirx.address_of" or call.args[0].source not in pools:
                return call
            start, stride = self.first_part(call.args[0].indices[0], team, name)
            own[stride] = None
            return tirx.address_of(call.args[0].source[start])

        body = _mapped(function.body, Call, address)
        before = (self.count - 1) * max(own, default=0)
        pool = {buffer: _buffer_of(buffer, max(1, const_int(buffer.shape[0]) - before)) for buffer in pools}
        body = structural_map(body, (tvm.ir.Var, lambda var: pool.get(var, var)))
        body = _mapped(body, tirx.Evaluate, lambda node: self.evaluated(node, team, name))
        if team in {*collect(body, tvm.ir.Var)}:
            raise Undecided(f"what depends on the number of a team in {name}")
        return tirx.PrimFunc(parameters, body, function.ret_type, function.attrs, function.span)

    def first_part(self, place: Any, team: tirx.Var, name: str) -> tuple[Any, int]:
        """``team * nbytes + constant`` of the first team: the constant; and the bytes."""
        axis = Axis("team", self.count)
        terms, constant = linear_terms(index_of(place, {team: variable(axis)}))
        stride = terms.get(variable(axis), 0)
        if terms.keys() - {variable(axis)}:
            raise Undecided(f"the place {place} of a team's memory in {name}")
        self.strides.setdefault(stride, name)
        return tirx.IntImm("int32", constant), stride

    def evaluated(self, node: tirx.Evaluate, team: tirx.Var | None = None, stage: str = "") -> tirx.Stmt:
        """A barrier of a team as one of a block; anything else as it is."""
        team = self.team if team is None else team
        if not isinstance(node.value, Call):
            return node
        name = operator_name(node.value)
        found = _BARRIER.fullmatch(name)
        if found is None:
            if name in ("tirx.tvm_storage_sync", "tirx.cuda.cta_sync") or name.startswith(_NAMED):
                self.wrong("divergent barrier", stage or self.name, "teams come to a barrier of the block apart", stage)
                raise Undecided(f"the barrier {name}, which is no team's own")
            return node
        first, count = int(found[1]), int(found[2])
        axis = Axis("team", self.count)
        number = index_of(node.value.args[1], {team: variable(axis)})
        whose = np.broadcast_to(evaluate(number, {axis: np.arange(self.count)}, {}), self.count) + first
        for own, at in enumerate(whose.tolist()):
            other = self.numbers.setdefault(at, (own, name))
            if not 0 < at < _NUMBERS:
                why = f"team {own} waits at it; number 0 is the block's, and there are {_NUMBERS}"
                self.wrong("divergent barrier", f"barrier {at}", why, stage)
            elif other[0] != own:
                self.wrong("divergent barrier", f"barrier {at}", f"teams {other[0]} and {own} both wait at it", stage)
        if not node.value.args[1].same_as(team):
            raise Undecided(f"at which barrier a team waits in {node.value}")
        if not 0 < count <= self.threads or count % _WARP:
            why = f"it waits for {count} threads, and teams have {self.threads}"
            self.wrong("divergent barrier", f"barrier {first}", why, stage)
        if first == 1 and count == self.threads:
            return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
        if not stage:
            # Outside of stages all threads of a team come to it. What it orders is not known, and taken for nothing.
            self.findings.append(Undecided(f"what {name} orders, to which {self.threads} threads of a team come"))
            if count > 0 and self.threads % count:
                why = f"{self.threads} threads of a team come to it, it waits for {count}, and the last of them stay"
                self.wrong("divergent barrier", f"barrier {first}", why)
            return tirx.Evaluate(tirx.IntImm("int32", 0))
        # The number of all threads of a team is to it what 0 is to a block.
        own = 0 if first == 1 else first
        return tirx.Evaluate(tirx.call_extern("int32", f"{_NAMED}<{own}, {count}>"))

    def settle(self) -> None:
        """The memory of a team is where all functions say, and of no more than lies before the next team's."""
        if not self.strides:
            return
        self.nbytes = min(self.strides)
        if len(self.strides) > 1 or self.nbytes <= 0:
            (one, first), (other, second) = (*sorted(self.strides.items()), (self.nbytes, self.name))[:2]
            if self.nbytes <= 0:
                why = f"the memory of each team begins {one} bytes after that of the last one"
                self.wrong("race in a block", first, why, first)
            raise Undecided(f"teams {one} bytes apart in {first}, {other} in {second}")


def _mapped(body: tirx.Stmt, kind: type, change: Callable[[Any], Any]) -> tirx.Stmt:
    """A statement with its nodes of a kind changed; raises what the first of them raised, which TVM would wrap."""
    reasons: list[Undecided] = []

    def changed(node: Any) -> Any:
        try:
            return change(node)
        except Undecided as reason:
            reasons.append(reason)
            return node

    made = structural_map(body, (kind, changed))
    if reasons:
        raise reasons[0]
    return made


def _buffer_of(pool: tirx.Buffer, nbytes: int) -> tirx.Buffer:
    """A pool of so many bytes."""
    return tirx.decl_buffer((nbytes,), pool.dtype, name=pool.name, scope="shared.dyn")


def _with_arguments(call: Call, arguments: Sequence[Any]) -> Call:
    return Call(call.op, list(arguments), call.attrs, call.ty_args, call.span, call.ty)


def _takes_team(function: tirx.PrimFunc) -> bool:
    """Whether the last parameter is a number, behind the tile and the thread."""
    return len(function.params) > 2 and str(getattr(function.params[-1].ty, "dtype", "")) == "int32"
