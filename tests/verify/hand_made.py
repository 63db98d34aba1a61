"""Stage functions, kernels and plans written by hand, for the certificate's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.backend.cuda.op import cuda_grid_sync, cuda_warp_sync

from souffle.codegen.plan import Buffer, Kernel, Launch, Plan
from souffle.options import Options
from souffle.verify import Certificate, certify_plan

THREADS = 64


def pointer(name: str, dtype: str = "float32") -> tirx.Var:
    """A pointer parameter."""
    return tirx.Var(name, tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global"))


def barrier(scope: str = "shared") -> tirx.Stmt:
    """Threads of a block, or of a warp, wait."""
    if scope == "warp":
        return tirx.Evaluate(cuda_warp_sync())
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", scope))


def extern(name: str, *arguments: object) -> tirx.Stmt:
    """A call of a device function by name."""
    return tirx.Evaluate(tirx.call_extern("int32", name, *arguments))


def sequence(*statements: tirx.Stmt) -> tirx.Stmt:
    """In order."""
    return tirx.SeqStmt(list(statements)) if len(statements) > 1 else statements[0]


@dataclass(frozen=True, eq=False)
class Memory:
    """What the body of a stage may use: tile, thread, tensors, shared memory of the same type, and a register."""

    tile: tirx.Var
    tid: tirx.Var
    tensors: Sequence[tirx.Buffer]
    shared: tirx.Buffer
    register: tirx.Buffer


def stage(
    name: str, sizes: Sequence[int], body: Callable[[Memory], tirx.Stmt], *, shared: int = 256, dtype: str = "float32"
) -> tirx.PrimFunc:
    """A stage function over tensors of so many elements, with a pool of so many elements of shared memory."""
    tile, tid = tirx.Var("tile", "int32"), tirx.Var("tid", "int32")
    pointers = [pointer(f"p{i}", dtype) for i in range(len(sizes))]
    tensors = [tirx.decl_buffer((n,), dtype, name=f"t{i}") for i, n in enumerate(sizes)]
    width = tvm.DataType(dtype).bits // 8
    pool = tirx.decl_buffer((shared * width,), "uint8", name="pool", scope="shared.dyn")
    view = tirx.decl_buffer((shared,), dtype, name="s", scope="shared")
    register = tirx.decl_buffer((8,), dtype, name="r", scope="local")
    declared = [tirx.DeclBuffer(t, data=p) for t, p in zip(tensors, pointers)]
    inner = body(Memory(tile, tid, tensors, view, register))
    whole = tirx.SeqStmt(
        [
            tirx.AllocBuffer(pool),
            tirx.AllocBuffer(register),
            *declared,
            tirx.DeclBuffer(view, data=tirx.address_of(pool[0])),
            inner,
        ]
    )
    return tirx.PrimFunc([tile, tid, *pointers], whole).with_attr("global_symbol", name)


@dataclass(frozen=True)
class Window:
    """Where parts of a tensor are, as a kernel says it; `turn` and `tile` are added to what it says of these."""

    start: int
    turns: int
    nbytes: int
    turn: int = 0
    tile: int = 0


@dataclass(frozen=True)
class Run:
    """A stage in a kernel: its function, tiles, the kernel's parameters that it is given, and barriers around it."""

    name: str
    tiles: int
    parameters: tuple[int, ...]
    after: bool = True
    grid_before: bool = False
    threads: int = THREADS
    before: bool = False
    joined: bool = False
    """Whether it stands in the turns of the run before it."""
    places: int = 1
    """Of the first run of a turn: how many tiles a slot has, which all of the turn are called for, one by one."""
    windows: tuple[Window | None, ...] = ()
    """For each parameter, where the parts that tiles make of it are in shared memory."""


def kernel(runs: Sequence[Run], parameters: int, name: str = "kernel") -> tirx.PrimFunc:
    """A kernel that runs stages over their tiles, as its TensorIR stands before the text is made."""
    block, tid, count = (tirx.Var(n, "int32") for n in ("block", "tid", "num_blocks"))
    pointers = [pointer(f"g{i}") for i in range(parameters)]
    statements: list[tirx.Stmt] = []
    callees = {run.name: tvm.ir.GlobalVar(run.name) for run in runs}
    loops: list[list[Run]] = []
    for run in runs:
        if run.joined:
            loops[-1].append(run)
        else:
            loops.append([run])
    for turn in loops:
        if turn[0].grid_before:
            statements.append(tirx.Evaluate(cuda_grid_sync()))
        it = tirx.Var("it", "int32")
        slot, place, places = it * count + block, tirx.Var("place", "int32"), turn[0].places
        tile = slot if places == 1 else slot * places + place
        calls: dict[int, list[tirx.Stmt]] = {}
        for run in turn:
            arguments = [tile, tid, *(pointers[i] for i in run.parameters)]
            for number, window in enumerate(run.windows):
                if window is not None:
                    numbers = [tirx.IntImm("int32", n) for n in (window.start, window.turns, window.nbytes)]
                    turn = (it if places == 1 else it * places + place) + window.turn
                    given = arguments[2 + number]
                    found = tirx.call_extern(given.ty, "souffle_window", given, *numbers, turn, tile + window.tile)
                    arguments[2 + number] = found
            body: tirx.Stmt = tirx.Evaluate(tvm.ir.Call(callees[run.name], arguments))
            if run.threads < THREADS:
                body = tirx.IfThenElse(tid < run.threads, body, None)
            around = ([barrier()] if run.before else [], [barrier()] if run.after else [])
            calls.setdefault(run.tiles, []).extend([*around[0], body, *around[1]])
        guarded = []
        for tiles, body in calls.items():
            all_places = tirx.For(place, 0, places, tirx.ForKind.SERIAL, sequence(*body))
            guarded.append(
                tirx.IfThenElse(slot < tiles // places, sequence(*body) if places == 1 else all_places, None)
            )
        turns = tirx.truncdiv(tirx.IntImm("int32", max(calls) // places - 1) + count, count)
        statements.append(tirx.For(it, 0, turns, tirx.ForKind.SERIAL, sequence(*guarded)))
    body = sequence(*statements)
    for tag, var, extent in (("threadIdx.x", tid, tirx.IntImm("int32", THREADS)), ("blockIdx.x", block, count)):
        axis = tirx.IterVar((0, extent), var, tirx.IterVar.ThreadIndex, tag)
        body = tirx.AttrStmt(axis, "thread_extent", extent, body)
    return tirx.PrimFunc([*pointers, count], body).with_attr("global_symbol", name)


def tensor(name: str, size: int, kind: str, offset: int = 0, dtype: str = "float32") -> Buffer:
    """A tensor of a plan."""
    return Buffer(name, (size,), dtype, kind, name, offset)


def certificate(
    runs: Sequence[Run], functions: Sequence[tirx.PrimFunc], buffers: Sequence[Buffer], *, shared: int = 1024
) -> Certificate:
    """Of one kernel, launched once with all buffers."""
    plan = plan_of(buffers, runs, shared)
    named = {str(f.attrs["global_symbol"]): f for f in functions}
    return certify_plan(plan, {"kernel": kernel(runs, len(buffers))}, named)


def plan_of(buffers: Sequence[Buffer], runs: Sequence[Run], shared: int) -> Plan:
    """A plan of one kernel."""
    syncs = sum(run.grid_before for run in runs)
    tiles = max(run.tiles for run in runs)
    one = Kernel("kernel", 0, tiles, THREADS, shared, syncs, None, tuple(r.name for r in runs), ())
    work = max((b.offset + b.nbytes for b in buffers if b.kind == "workspace"), default=0)
    launch = Launch(0, tuple(range(len(buffers))), ())
    return Plan("hand", Options(level="V3"), tuple(buffers), {}, (), (one,), (launch,), work, ())
