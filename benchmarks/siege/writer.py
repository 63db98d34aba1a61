"""The TensorIR of kernels that call stages: tensors, calls, and how blocks share tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.backend.cuda.op import cuda_grid_sync

from benchmarks.siege.body import as_kernel, number, pointer
from benchmarks.siege.setting import Stage
from souffle.kernel.grid_barrier import COUNTER_FUNCTION, STATE_DTYPE
from souffle.kernel.merge import OFFSET_FUNCTION
from souffle.tvm_compat import PrimExpr, sequence

__all__ = ["Assignment", "Call", "Step", "Tensor", "Writer"]


@dataclass(eq=False)
class Tensor:
    """A tensor of the case; `first` and `last` are the calls that touch it first and last."""

    name: str
    count: int
    dtype: str
    kind: str
    first: int = -1
    last: int = -1
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return 4 * self.count

    def touch(self, number: int) -> None:
        """A call touches it."""
        self.first = number if self.first < 0 else self.first
        self.last = max(self.last, number)


@dataclass(frozen=True, eq=False)
class Step:
    """A pointer into a ring: of a loop's step into one of its slots, or without `slots` into slot `ahead`.

    `last` says that what the last step made is there.
    """

    tensor: Tensor
    slots: int
    stride: int
    ahead: int
    last: bool = False


@dataclass(frozen=True)
class Assignment:
    """Which tiles a block computes: so many together, neighbours or far from each other, in an order of `rows`."""

    together: int = 1
    far: bool = False
    rows: int = 1

    def tile(self, slot: PrimExpr, place: PrimExpr, slots: int) -> PrimExpr:
        """The tile at a place of a slot."""
        if self.rows > 1:
            slot = tirx.truncmod(slot, self.rows) * (slots // self.rows) + tirx.truncdiv(slot, self.rows)
        if self.together == 1:
            return slot
        return place * slots + slot if self.far else slot * self.together + place


@dataclass(frozen=True, eq=False)
class Call:
    """A stage with its tensors, what waits before it, and whether the threads wait after each tile.

    `launch` is the launch that it stands in; `steps` calls of one loop follow each other where it is not 0; `joined`
    says that it stands in the turn of the call before it.
    """

    stage: Stage
    arguments: tuple[Tensor | Step, ...]
    before: str
    after: bool
    launch: int = 0
    steps: int = 0
    joined: bool = False
    assignment: Assignment = Assignment()

    @property
    def slots(self) -> int:
        """What blocks share."""
        return self.stage.setting.tiles // self.assignment.together


class Writer:
    """Writes a kernel's TensorIR."""

    def __init__(
        self, used: Sequence[Tensor], threads: int, barrier: str, variables: Mapping[str, tvm.ir.GlobalVar]
    ) -> None:
        self.threads = threads
        self.counter = barrier == "counter"
        self.block, self.tid, self.blocks = (tirx.Var(n, "int32") for n in ("block", "tid", "num_blocks"))
        self.pointers = {t: pointer(f"g{i}", t.dtype) for i, t in enumerate(used)}
        self.state = pointer("grid_state", STATE_DTYPE)
        self.syncs = 0
        self.counts = False
        self.variables = variables

    def kernel(self, name: str, calls: Sequence[Call]) -> tirx.PrimFunc:
        statements: list[tirx.Stmt] = []
        place = 0
        while place < len(calls):
            count = 1
            while place + count < len(calls) and calls[place + count].joined:
                count += 1
            statements += self.calls(calls[place : place + count])
            place += count
        body = sequence(*statements)
        for tag, var, extent in (
            ("threadIdx.x", self.tid, number(self.threads)),
            ("blockIdx.x", self.block, self.blocks),
        ):
            axis = tirx.IterVar((0, extent), var, tirx.IterVar.ThreadIndex, tag)
            body = tirx.AttrStmt(axis, "thread_extent", extent, body)
        state = [self.state] if self.counts else []
        func = tirx.PrimFunc([*self.pointers.values(), *state, self.blocks], body)
        return as_kernel(func.with_attr("global_symbol", name))

    def calls(self, calls: Sequence[Call]) -> list[tirx.Stmt]:
        """The calls of one turn, in a loop over steps where the first has some."""
        head = calls[0]
        step = tirx.Var("step", "int32") if head.steps else None
        before: list[tirx.Stmt] = []
        if head.before == "grid":
            self.syncs += max(1, head.steps)
            before.append(self.wait())
        elif head.before == "block":
            before.append(_barrier())
        loop = self.tiles(calls, step)
        if step is None:
            return [*before, loop]
        return [tirx.For(step, 0, head.steps, tirx.ForKind.SERIAL, sequence(*before, loop))]

    def wait(self) -> tirx.Stmt:
        if not self.counter:
            return tirx.Evaluate(cuda_grid_sync())
        self.counts = True
        return tirx.Evaluate(tirx.call_extern("int32", COUNTER_FUNCTION, self.state, self.blocks))

    def tiles(self, calls: Sequence[Call], step: tirx.Var | None) -> tirx.Stmt:
        it, place = tirx.Var("it", "int32"), tirx.Var("place", "int32")
        slot = it * self.blocks + self.block
        slots, assignment = calls[0].slots, calls[0].assignment
        tile = assignment.tile(slot, place, slots)
        statements: list[tirx.Stmt] = []
        for one in calls:
            arguments = [tile, self.tid, *(self.pointer(a, step) for a in one.arguments)]
            inner: tirx.Stmt = tirx.Evaluate(tvm.ir.Call(self.variables[one.stage.name], arguments))
            if one.stage.setting.threads < self.threads:
                inner = tirx.IfThenElse(self.tid < one.stage.setting.threads, inner, None)
            statements.append(inner)
            if one.after:
                statements.append(_barrier())
        body = sequence(*statements)
        if assignment.together > 1:
            body = tirx.For(place, 0, assignment.together, tirx.ForKind.SERIAL, body)
        turns = tirx.truncdiv(number(slots - 1) + self.blocks, self.blocks)
        return tirx.For(it, 0, turns, tirx.ForKind.SERIAL, tirx.IfThenElse(slot < slots, body, None))

    def pointer(self, argument: Tensor | Step, step: tirx.Var | None) -> PrimExpr:
        if isinstance(argument, Tensor):
            return self.pointers[argument]
        base = self.pointers[argument.tensor]
        part = number(argument.ahead)
        if step is not None and argument.slots:
            part = tirx.truncmod(step + argument.ahead if argument.ahead else step, argument.slots)
        elif not argument.ahead:
            return base
        offset = tirx.Cast("int64", part) * number(argument.stride, "int64")
        return tirx.call_extern(base.ty, OFFSET_FUNCTION, base, offset)


def _barrier() -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))
