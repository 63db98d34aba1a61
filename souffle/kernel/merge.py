"""Merge the stages of a subprogram into one TensorIR kernel with grid-wide barriers (paper §6.4).

::

    stage A; stage B            kernel(a, b, c, num_blocks):
    (B reads what A writes) →     for it: tile = it * num_blocks + blockIdx.x; if tile < tiles_A: A(tile, tid, a, b)
                                  grid sync
                                  for it: tile = it * num_blocks + blockIdx.x; if tile < tiles_B: B(tile, tid, b, c)

Legal for every grid of at least one block that is on the device at once: each stage computes all its tiles, and every
pair of stages that touch one tensor, at least one of them writing, has a grid sync between. A loop over stages is a
loop in the kernel, with a grid sync between its steps; each step passes its stages its own parts of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.backend.cuda.op import cuda_grid_sync

from souffle.kernel.calls import KernelShape, LoopCall, Place, StageCall
from souffle.kernel.lower import DeviceFunction, LoweringError
from souffle.tvm_compat import PrimExpr

__all__ = ["CHOICE_FUNCTION", "OFFSET_FUNCTION", "PREFETCH_FUNCTION", "MergedKernel", "merge"]


@dataclass(frozen=True, eq=False)
class MergedKernel:
    """A merged kernel: its TensorIR and the functions that it calls.

    Attributes
    ----------
    name : str
    func : tirx.PrimFunc
        Parameters: one pointer for each of the shape's parameters, then ``num_blocks``.
    shape : KernelShape
    """

    name: str
    func: tirx.PrimFunc
    shape: KernelShape


PREFETCH_FUNCTION = "souffle_prefetch_l2"
"""Asks for a range of global memory in the L2 cache; its text is in :mod:`souffle.codegen.cuda`."""

OFFSET_FUNCTION = "souffle_at"
"""A pointer some elements further."""

CHOICE_FUNCTION = "souffle_choose"
"""One of two pointers."""


def merge(name: str, shape: KernelShape, global_vars: Mapping[DeviceFunction, tvm.ir.GlobalVar]) -> MergedKernel:
    """The kernel's TensorIR function.

    Parameters
    ----------
    name : str
    shape : KernelShape
    global_vars : mapping of DeviceFunction to GlobalVar
        How the functions are called in the module that the kernel will be part of.
    """
    block, tid = tirx.Var("block", "int32"), tirx.Var("tid", "int32")
    num_blocks = tirx.Var("num_blocks", "int32")
    pointers = [
        tirx.Var(f"g{i}", tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global"))
        for i, (dtype, _) in enumerate(shape.parameters)
    ]
    writer = _Writer(shape, global_vars, pointers, block, tid, num_blocks)
    statements = [statement for call in shape.calls for statement in writer.call(call)]
    body = tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]
    body = _thread("threadIdx.x", tid, tirx.IntImm("int32", shape.threads), body)
    body = _thread("blockIdx.x", block, num_blocks, body)
    func = tirx.PrimFunc([*pointers, num_blocks], body).with_attr("global_symbol", name)
    target = shape.functions[0].func.attrs["target"]
    func = func.with_attr("target", target).with_attr("calling_conv", 2).with_attr("tirx.is_global_func", True)
    return MergedKernel(name, func, shape)


def _thread(tag: str, var: tirx.Var, extent: object, body: tirx.Stmt) -> tirx.Stmt:
    axis = tirx.IterVar((0, extent), var, tirx.IterVar.ThreadIndex, tag)
    return tirx.AttrStmt(axis, "thread_extent", extent, body)


class _Writer:
    """Writes the statements of one kernel."""

    def __init__(
        self,
        shape: KernelShape,
        global_vars: Mapping[DeviceFunction, tvm.ir.GlobalVar],
        pointers: Sequence[tirx.Var],
        block: tirx.Var,
        tid: tirx.Var,
        num_blocks: tirx.Var,
    ) -> None:
        self.shape = shape
        self.global_vars = global_vars
        self.pointers = pointers
        self.block = block
        self.tid = tid
        self.num_blocks = num_blocks
        self.loops = 0

    def call(self, call: StageCall | LoopCall) -> list[tirx.Stmt]:
        """A stage, or a loop over stages."""
        if isinstance(call, StageCall):
            return self.stage(call, None, 0, True)
        step = tirx.Var(f"s{self.loops}", "int32")
        self.loops += 1
        inside: list[tirx.Stmt] = []
        for number, stage in enumerate(call.calls):
            inside += self.stage(stage, step, call.steps, call.sync_first or number > 0)
        return [tirx.For(step, 0, call.steps, tirx.ForKind.SERIAL, tirx.SeqStmt(inside))]

    def stage(self, call: StageCall, step: tirx.Var | None, steps: int, sync_first: bool) -> list[tirx.Stmt]:
        """A stage with the barrier before it; `sync_first` says whether a loop's first step waits there too."""
        statements: list[tirx.Stmt] = []
        if call.sync_before:
            for place, nbytes in call.prefetch:
                where = (self.pointer(place, step, steps), tirx.IntImm("int64", nbytes))
                ahead = tirx.call_extern("int32", PREFETCH_FUNCTION, *where, self.block, self.tid, self.num_blocks)
                statements.append(tirx.Evaluate(ahead))
            wait = tirx.Evaluate(cuda_grid_sync())
            # The condition is the same in all blocks.
            statements.append(wait if sync_first else tirx.IfThenElse(step > 0, wait, None))
        arguments = [self.pointer(place, step, steps) for place in call.arguments]
        statements += [self.tile_loop(function, arguments) for function in call.functions]
        return statements

    def pointer(self, place: Place, step: tirx.Var | None, steps: int) -> PrimExpr:
        """A place, as a pointer."""
        here: PrimExpr = self.pointers[place.parameter]
        if place.stride:
            lag = len(place.first)
            part = step - lag if lag else step
            part = tirx.truncmod(part, place.ring) if place.ring else part
            offset = tirx.Cast("int64", part) * tirx.IntImm("int64", place.stride)
            here = tirx.call_extern(self.pointers[place.parameter].ty, OFFSET_FUNCTION, here, offset)
        if place.last is not None:
            here = self.choice(step == steps - 1, self.pointers[place.last], here)
        for number in reversed(range(len(place.first))):
            here = self.choice(step < number + 1, self.pointers[place.first[number]], here)
        return here

    def choice(self, condition: PrimExpr, one: tirx.Var, other: PrimExpr) -> PrimExpr:
        return tirx.call_extern(one.ty, CHOICE_FUNCTION, condition, one, other)

    def tile_loop(self, function: DeviceFunction, arguments: Sequence[PrimExpr]) -> tirx.Stmt:
        """All tiles of a stage that are this block's; conditions are uniform in a block, so barriers are safe."""
        it = tirx.Var("it", "int32")
        callee = self.global_vars[function]
        tile = it * self.num_blocks + self.block
        body: tirx.Stmt = tirx.Evaluate(tvm.ir.Call(callee, [tile, self.tid, *arguments]))
        if function.threads < self.shape.threads:
            if function.has_barrier:
                raise LoweringError(
                    f"stage {callee.name_hint} has block barriers and {function.threads} threads in a kernel of "
                    f"{self.shape.threads}"
                )
            body = tirx.IfThenElse(self.tid < function.threads, body, None)
        if function.shared_bytes:
            # The next tile, or the next stage, writes the pool that this one reads.
            body = tirx.SeqStmt([body, tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))])
        body = tirx.IfThenElse(tile < function.tiles, body, None)
        turns = tirx.truncdiv(tirx.IntImm("int32", function.tiles - 1) + self.num_blocks, self.num_blocks)
        return tirx.For(it, 0, turns, tirx.ForKind.SERIAL, body)
