"""Merge the stages of a subprogram into one TensorIR kernel with grid-wide barriers (paper §6.4).

::

    stage A; stage B            kernel(a, b, c, num_blocks):
    (B reads what A writes) →     for it: tile = it * num_blocks + blockIdx.x; if tile < tiles_A: A(tile, tid, a, b)
                                  grid sync
                                  for it: tile = it * num_blocks + blockIdx.x; if tile < tiles_B: B(tile, tid, b, c)

Legal for every grid of at least one block that is on the device at once: each stage computes all its tiles, and every
pair of stages that touch one tensor, at least one of them writing, has a grid sync between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.backend.cuda.op import cuda_grid_sync

from souffle.kernel.lower import DeviceFunction, LoweringError
from souffle.program import Tensor
from souffle.schedule.stage import Stage

__all__ = ["CallPlan", "KernelShape", "MergedKernel", "StageCall", "merge", "plan_calls"]


@dataclass(frozen=True)
class StageCall:
    """One stage of a kernel.

    Attributes
    ----------
    functions : tuple of DeviceFunction
        What :func:`souffle.kernel.lower.lower_stage` gave for it.
    arguments : tuple of int
        For each parameter of the stage, which parameter of the kernel.
    sync_before : bool
        Whether a grid sync stands before it.
    prefetch : tuple of int
        Parameters of the kernel whose tensors are asked into the L2 cache before the barrier that this stage waits at
        (level V4, paper §6.5).
    """

    functions: tuple[DeviceFunction, ...]
    arguments: tuple[int, ...]
    sync_before: bool
    prefetch: tuple[int, ...]


@dataclass(frozen=True)
class KernelShape:
    """A kernel up to the tensors that it is launched with: equal shapes are one kernel launched several times.

    Attributes
    ----------
    calls : tuple of StageCall
    parameters : tuple of (str, int)
        Type and bytes of each tensor parameter.
    """

    calls: tuple[StageCall, ...]
    parameters: tuple[tuple[str, int], ...]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return max(f.threads for call in self.calls for f in call.functions)

    @property
    def tiles(self) -> int:
        """Most tiles of a stage."""
        return max(f.tiles for call in self.calls for f in call.functions)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: all stages use one pool from its start."""
        return max(f.shared_bytes for call in self.calls for f in call.functions)

    @property
    def grid_syncs(self) -> int:
        """Grid-wide barriers."""
        return sum(call.sync_before for call in self.calls)


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


@dataclass(frozen=True, eq=False)
class CallPlan:
    """The stages of a kernel in the order to run, and what its first launch is given.

    Attributes
    ----------
    shape : KernelShape
    stages : tuple of Stage
        By epoch; otherwise in the order given.
    epochs : tuple of int
        For each stage, how many grid syncs stand before it.
    tensors : tuple of Tensor
        For each parameter of the kernel.
    """

    shape: KernelShape
    stages: tuple[Stage, ...]
    epochs: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def plan_calls(
    stages: Sequence[Stage],
    functions: Mapping[Stage, tuple[DeviceFunction, ...]],
    constants: Mapping[Tensor, object],
    *,
    prefetch: bool,
) -> CallPlan:
    """Decide where a kernel needs grid syncs, and with which tensors it is launched.

    A stage runs in the epoch after the last one that defines an input of it, so there are as many grid syncs as the
    longest path of dependent stages has edges. Tensors are written once, and workspace is reused across epochs only, so
    that reads after writes are the only conflicts.

    Parameters
    ----------
    stages : sequence of Stage
        In topological order.
    functions : mapping of Stage to its lowered functions
    constants : mapping of Tensor
        Tensors that no kernel writes.
    prefetch : bool
        Whether weights of the stages after a barrier are prefetched before it.
    """
    ready: dict[Tensor, int] = {}
    epoch_of: dict[Stage, int] = {}
    for stage in stages:
        epoch_of[stage] = max((ready[t] for t in stage.inputs if t in ready), default=0)
        ready.update(dict.fromkeys(stage.outputs, epoch_of[stage] + 1))
    ordered = sorted(stages, key=lambda stage: epoch_of[stage])
    tensors = tuple(dict.fromkeys(t for stage in ordered for t in (*stage.inputs, *stage.outputs)))
    position = {tensor: i for i, tensor in enumerate(tensors)}
    calls: list[StageCall] = []
    before = 0
    for stage in ordered:
        sync = epoch_of[stage] > before
        before = epoch_of[stage]
        ahead = tuple(position[t] for t in stage.inputs if t in constants) if prefetch and sync else ()
        arguments = tuple(position[t] for t in (*stage.inputs, *stage.outputs))
        calls.append(StageCall(functions[stage], arguments, sync, ahead))
    shape = KernelShape(tuple(calls), tuple((t.dtype, t.nbytes) for t in tensors))
    return CallPlan(shape, tuple(ordered), tuple(epoch_of[stage] for stage in ordered), tensors)


PREFETCH_FUNCTION = "souffle_prefetch_l2"
"""Asks for a range of global memory in the L2 cache; its text is in :mod:`souffle.codegen.cuda`."""


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
    statements: list[tirx.Stmt] = []
    for index, call in enumerate(shape.calls):
        if call.sync_before:
            for parameter in call.prefetch:
                nbytes = tirx.IntImm("int64", shape.parameters[parameter][1])
                where = (pointers[parameter], nbytes, block, tid, num_blocks)
                ahead = tirx.call_extern("int32", PREFETCH_FUNCTION, *where)
                statements.append(tirx.Evaluate(ahead))
            statements.append(tirx.Evaluate(cuda_grid_sync()))
        for number, function in enumerate(call.functions):
            arguments = [pointers[i] for i in call.arguments]
            it = tirx.Var(f"it{index}_{number}", "int32")
            statements.append(
                _tile_loop(it, function, global_vars[function], arguments, block, tid, num_blocks, shape.threads)
            )
    body = tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]
    body = _thread("threadIdx.x", tid, tirx.IntImm("int32", shape.threads), body)
    body = _thread("blockIdx.x", block, num_blocks, body)
    func = tirx.PrimFunc([*pointers, num_blocks], body).with_attr("global_symbol", name)
    target = shape.calls[0].functions[0].func.attrs["target"]
    func = func.with_attr("target", target).with_attr("calling_conv", 2).with_attr("tirx.is_global_func", True)
    return MergedKernel(name, func, shape)


def _thread(tag: str, var: tirx.Var, extent: object, body: tirx.Stmt) -> tirx.Stmt:
    axis = tirx.IterVar((0, extent), var, tirx.IterVar.ThreadIndex, tag)
    return tirx.AttrStmt(axis, "thread_extent", extent, body)


def _tile_loop(
    it: tirx.Var,
    function: DeviceFunction,
    callee: tvm.ir.GlobalVar,
    arguments: Sequence[tirx.Var],
    block: tirx.Var,
    tid: tirx.Var,
    num_blocks: tirx.Var,
    threads: int,
) -> tirx.Stmt:
    """All tiles of a stage that are this block's. Conditions are uniform in a block, so barriers inside are safe."""
    tile = it * num_blocks + block
    body: tirx.Stmt = tirx.Evaluate(tvm.ir.Call(callee, [tile, tid, *arguments]))
    if function.threads < threads:
        if function.has_barrier:
            raise LoweringError(
                f"stage {callee.name_hint} has block barriers and {function.threads} threads in a kernel of {threads}"
            )
        body = tirx.IfThenElse(tid < function.threads, body, None)
    if function.shared_bytes:
        # The next tile, or the next stage, writes the pool that this one reads.
        body = tirx.SeqStmt([body, tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))])
    body = tirx.IfThenElse(tile < function.tiles, body, None)
    turns = tirx.truncdiv(tirx.IntImm("int32", function.tiles - 1) + num_blocks, num_blocks)
    return tirx.For(it, 0, turns, tirx.ForKind.SERIAL, body)
