"""Lower one scheduled stage, alone, to a device function that a kernel can call (paper §6.4).

The stage's own thread extents are what TVM's passes for shared memory, fragments and cross-thread reductions need, so
they run here, before stages are joined. Afterwards ``blockIdx`` comes from the parameter ``tile``, the linear index of
the block, and ``threadIdx`` from the parameter ``tid``, that of the thread; shared memory becomes offsets into one pool
that all stages of a kernel have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import tvm
from tvm import s_tir, tirx
from tvm.tirx.build import split_host_device_mods

from souffle.program.divisors import positive_divisors
from souffle.program.flattening import flatten_buffers
from souffle.program.ieee import with_ieee_arithmetic
from souffle.program.tvm_passes import simplifying_passes
from souffle.program.wide import with_long_shapes, with_wide_indices
from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.lower.constant_waits import with_constant_waits
from souffle.schedule.lower.loads_ahead import with_loads_ahead
from souffle.schedule.lower.printed_conditions import has_vector_select, with_plain_conditions
from souffle.schedule.lower.shuffle_masks import with_full_masks
from souffle.schedule.lower.shuffled_values import with_written_values
from souffle.schedule.lower.thread_sync import synchronized
from souffle.schedule.lower.tvm_defects import (
    has_vector_gather,
    has_vector_without_type,
    named_results,
    one_scope,
    paired_conditions,
    without_gathers,
    without_names,
)
from souffle.schedule.lower.uniform_barriers import LoweringError, barrier_scope, with_whole_warps
from souffle.schedule.lower.unrolled_indices import with_short_indices
from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import PrimExpr, collect, const_int, sequence, statements_of, substitute

__all__ = [
    "WINDOWS",
    "DeviceFunction",
    "LoweringError",
    "cuda_target",
    "lower_stage",
]

_POOL_ALIGNMENT = 128
"""Bytes; wmma and 16-byte copies want aligned buffers in the pool."""

_MOST_THREADS = 1024
"""Of a block, on every GPU."""

_MOST_TILES = 2**30
"""Of a stage: a kernel counts them and the blocks of its grid, of which there are no more, in 32 bits together."""


WINDOWS = "souffle.windows"
"""Attribute of a device function whose tensors are in part in shared memory: their numbers, from 0."""

_UNWRITTEN = (has_vector_gather, has_vector_select, has_vector_without_type)
"""Vectors that TVM's CUDA generator writes wrong text for, or none."""


@dataclass(frozen=True, eq=False)
class DeviceFunction:
    """A lowered stage.

    Attributes
    ----------
    func : tirx.PrimFunc
        Parameters ``tile: int32``, ``tid: int32``, then one pointer for each parameter of the stage, in its order.
    tiles : int
        How many tiles there are; the function computes one.
    threads : int
        Threads that must call it, a prefix of the block.
    shared_bytes : int
        Bytes of the shared-memory pool that it uses, from offset 0.
    has_barrier : bool
        Whether it holds barriers of a block or a warp.
    schedule : GpuSchedule
        What it was lowered from.
    name : str
        In the text. The functions of a schedule that is only looked at have equal ones, which say nothing.
    partial : bool
        Whether its barriers are those of `threads` alone, and not of the block
        (:func:`souffle.schedule.lower.fewer_threads.partial_function`).
    in_team : bool
        Whether a team of a block calls it, whose number is then its last parameter
        (:mod:`souffle.schedule.lower.teams`).
    """

    func: tirx.PrimFunc
    tiles: int
    threads: int
    shared_bytes: int
    has_barrier: bool
    schedule: GpuSchedule
    name: str
    partial: bool = False
    in_team: bool = False


@cache
def cuda_target(arch: str) -> tvm.target.Target:
    """TVM's target for a GPU architecture such as ``"sm_90"``."""
    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 48 * 1024,
            "thread_warp_size": 32,
            "max_num_threads": 1024,
            "registers_per_block": 65536,
        },
        host="llvm",
    )


def _passes(vectorize: bool, compact: bool) -> tuple[tvm.transform.Pass, ...]:
    """TVM's pipeline from TensorIR blocks to per-thread code with barriers, as ``default_s_tir_pipeline`` orders it.

    In five parts: the second makes vectors and gives out memory, and the fourth makes the barriers. Without `compact`,
    buffers keep the size that they are declared with.
    """
    tensor_ir, low = s_tir.transform, tirx.transform
    first = tvm.transform.Sequential(
        [
            tensor_ir.LowerCrossThreadReduction(),
            tensor_ir.LowerInitBlock(),
            tensor_ir.PlanAndUpdateBufferAllocationLocation(),
            tensor_ir.ConvertBlocksToOpaque(),
            tensor_ir.LiftThreadBinding(),
            tensor_ir.ManifestSharedMemoryLocalStage(),
            *([tensor_ir.CompactBufferAllocation()] if compact else []),
            tensor_ir.LowerAutoCopy(),
            tensor_ir.UnifyThreadBinding(),
            tensor_ir.LowerMatchBuffer(),
            low.StmtSimplify(),
            tensor_ir.InjectPermutedLayout(),
            tensor_ir.AnnotateIrregularLoop(),
            tensor_ir.InjectSoftwarePipeline(),
            tensor_ir.TransformMmaBufferLayout(),
            tensor_ir.LowerOpaqueBlock(),
            flatten_buffers(),
            low.BF16ComputeLegalize(),
            low.NarrowDataType(32),
            tensor_ir.LoopPartition(),
        ]
    )
    second = tvm.transform.Sequential(
        [
            low.VectorizeLoop(vectorize),
            tensor_ir.InjectVirtualThread(),
            tensor_ir.InjectDoubleBuffer(),
            low.StorageRewrite(),
        ]
    )
    third = tvm.transform.Sequential(simplifying_passes())
    barriers = tvm.transform.Sequential([tensor_ir.ThreadSync("shared"), tensor_ir.ThreadSync("warp")])
    last = tvm.transform.Sequential(
        [
            tensor_ir.InferFragment(),
            tensor_ir.LowerThreadAllreduce(),
            low.SplitHostDevice(),
            low.MakePackedAPI(),
            low.FP8StorageLegalize(),
            low.BF16StorageLegalize(),
        ]
    )
    return first, second, third, barriers, last


def _device_passes() -> tvm.transform.Pass:
    low = tirx.transform
    return tvm.transform.Sequential(
        [low.LowerWarpMemory(), low.StmtSimplify(), low.RemoveNoOp(), positive_divisors(), low.LowerIntrin()]
    )


def lower_stage(
    name: str, schedule: GpuSchedule, target: tvm.target.Target, *, max_shared_bytes: int | None = None
) -> tuple[DeviceFunction, ...]:
    """Lower a scheduled stage to device functions.

    Parameters
    ----------
    name : str
        The functions' name; with several, a number is appended.
    schedule : GpuSchedule
    target : Target
        See :func:`cuda_target`.
    max_shared_bytes : int, optional
        Shared memory that a block may use: a schedule that needs more is refused before its loops are unrolled, which
        can take seconds.

    Returns
    -------
    tuple of DeviceFunction
        One for each of the stage's root-level loop nests, in order; usually one. Several do not depend on each other.

    Raises
    ------
    LoweringError
        If a pass of TVM refuses the stage, it uses launch dimensions other than blockIdx and threadIdx, or more shared
        memory than a block may.
    """
    most = max_shared_bytes
    functions = _device_kernels(name, schedule, target, most, vectorize=True)
    if any(check(function) for check in _UNWRITTEN for function in functions):
        # One that comes about in a later pass, which :func:`without_gathers` could not see.
        functions = _device_kernels(name, schedule, target, most, vectorize=False)
    functions.sort(key=lambda f: (len(str(f.attrs["global_symbol"])), str(f.attrs["global_symbol"])))
    result = []
    for index, function in enumerate(functions):
        label = name if len(functions) == 1 else f"{name}_{index}"
        result.append(_device_function(label, function, schedule))
    _check_shared_bytes(name, max(function.shared_bytes for function in result), most)
    return tuple(result)


def _check_shared_bytes(name: str, needed: int, most: int | None) -> None:
    if most is not None and needed > most:
        raise LoweringError(f"stage {name} needs {needed} bytes of shared memory, a block may use {most}")


def _device_kernels(
    name: str, schedule: GpuSchedule, target: tvm.target.Target, max_shared_bytes: int | None, *, vectorize: bool
) -> list[tirx.PrimFunc]:
    function = with_long_shapes(schedule.func.with_body(with_ieee_arithmetic(schedule.func.body)))
    module = tvm.IRModule({name: one_scope(function).with_attr("global_symbol", name)})
    try:
        with tvm.transform.PassContext(opt_level=3):
            module = s_tir.transform.CanonicalizeLoop()(tirx.transform.BindTarget(target)(module))
            # In a kernel that is written out, without blocks, buffers have the size that they need. To find that takes
            # longer than all other passes together, as the square of its statements; and CompactBufferAllocation
            # would cut buffers down to the elements that pointers are taken of, without what they lead to.
            first, second, third, barriers, last = _passes(vectorize, compact=_has_blocks(function))
            module = first(_mapped(module, paired_conditions))
            module = second(_mapped(module, without_gathers, named_results))
            least = max(map(_least_shared_bytes, module.functions.values()))
            _check_shared_bytes(name, least, max_shared_bytes)
            module = third(_mapped(module, without_names, with_constant_waits))
            _, device = split_host_device_mods(last(synchronized(module, barriers)))
            plain = [
                _mapped(_device_passes()(mod), with_plain_conditions, with_loads_ahead, with_short_indices)
                for mod in device.values()
            ]
            return [function for mod in plain for function in mod.functions.values()]
    except (ValueError, TypeError, RuntimeError) as error:
        raise LoweringError(
            f"stage {name} (rule {schedule.rule}) cannot be lowered: {str(error).strip().splitlines()[-1]}"
        ) from error


def _has_blocks(function: tirx.PrimFunc) -> bool:
    """Whether a function has blocks inside its root block, as a schedule of TVM's has."""
    return len(collect(function.body, s_tir.SBlock)) > 1


def _mapped(module: tvm.IRModule, *steps: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> tvm.IRModule:
    functions = dict(module.functions.items())
    for step in steps:
        functions = {gv: step(function) for gv, function in functions.items()}
    return tvm.IRModule(functions)


def _device_function(name: str, kernel: tirx.PrimFunc, schedule: GpuSchedule) -> DeviceFunction:
    grid, block, bound = _launched(name, kernel)
    tiles, threads = prod(grid), prod(block)
    tile, tid = tirx.Var("tile", "int32"), tirx.Var("tid", "int32")
    barrier = _waits(name, kernel)
    body, pool, pool_bytes = _pooled(kernel)
    coordinates = {**_coordinates("blockIdx", tile, grid), **_coordinates("threadIdx", tid, block)}
    body = substitute(body, {var: coordinates[tag] for tag, var in bound})
    body = with_wide_indices(body, {tile: tiles, tid: threads})
    if barrier:
        body = with_whole_warps(name, body, tid, threads)
    body = with_full_masks(with_written_values(body), tid, threads)
    if pool_bytes:
        body = sequence(tirx.AllocBuffer(pool), body)
    func = tirx.PrimFunc([tile, tid, *_pointers(name, kernel, schedule.func)], body).with_attr("global_symbol", name)
    func = func.with_attr("tirx.noalias", True).with_attr("calling_conv", 0).with_attr("target", kernel.attrs["target"])
    return DeviceFunction(func, tiles, threads, pool_bytes, barrier, schedule, name)


def _launched(name: str, kernel: tirx.PrimFunc) -> tuple[list[int], list[int], list[tuple[str, tirx.Var]]]:
    """Blocks and threads along x, y and z, and the variables of each."""
    several: dict[str, set[int]] = {}
    bound: list[tuple[str, tirx.Var]] = []

    def see(attr: tirx.AttrStmt) -> None:
        if attr.attr_key == "thread_extent":
            tag = str(attr.node.thread_tag)
            several.setdefault(tag, set()).add(const_int(attr.value))
            bound.append((tag, attr.node.var))

    structural_walk(kernel.body, (tirx.AttrStmt, see))
    for tag, values in several.items():
        if len(values) > 1:
            raise LoweringError(f"stage {name} binds {tag} to {' and to '.join(map(str, sorted(values)))}")
    extents = {tag: extent for tag, values in several.items() for extent in values}
    known = {f"{part}.{d}" for part in ("blockIdx", "threadIdx") for d in "xyz"}
    if not set(extents) <= known:
        raise LoweringError(f"stage {name} uses {sorted(set(extents) - known)}; stages use blockIdx and threadIdx only")
    grid, block = ([extents.get(f"{part}.{d}", 1) for d in "xyz"] for part in ("blockIdx", "threadIdx"))
    if prod(block) > _MOST_THREADS:
        raise LoweringError(f"stage {name} has blocks of {prod(block)} threads; a block holds {_MOST_THREADS} at most")
    if prod(grid) > _MOST_TILES:
        raise LoweringError(f"stage {name} has {prod(grid)} tiles; kernels count up to {_MOST_TILES}")
    return grid, block, bound


def _waits(name: str, kernel: tirx.PrimFunc) -> bool:
    """Whether threads wait for each other in it."""
    scopes = {barrier_scope(call) for call in collect(kernel.body, tvm.ir.Call)}
    if "grid" in scopes:
        raise LoweringError(f"stage {name} waits for the whole grid; a kernel does that between its stages")
    return bool(scopes - {None})


def _pooled(kernel: tirx.PrimFunc) -> tuple[tirx.Stmt, tirx.Buffer, int]:
    """The body with its shared memory as parts of one pool, with no threads bound; the pool, and its bytes."""
    pool_bytes = 0
    offsets: list[tuple[tirx.Buffer, int]] = []
    for buffer, nbytes in _shared_buffers(kernel.body):
        offsets.append((buffer, pool_bytes))
        pool_bytes += nbytes
    pool = tirx.decl_buffer((max(pool_bytes, 1),), "uint8", name="pool", scope="shared.dyn")

    def strip(attr: tirx.AttrStmt) -> tirx.Stmt:
        return attr.body if attr.attr_key == "thread_extent" else attr

    def place(alloc: tirx.AllocBuffer) -> tirx.Stmt:
        offset = next((offset for buffer, offset in offsets if buffer.same_as(alloc.buffer)), None)
        if offset is None:
            return alloc
        return tirx.DeclBuffer(alloc.buffer, data=tirx.address_of(pool[offset]))

    body = structural_map(kernel.body, [(tirx.AttrStmt, strip), (tirx.AllocBuffer, place)])
    return body, pool, pool_bytes


def _shared_buffers(statement: tirx.Stmt) -> list[tuple[tirx.Buffer, int]]:
    """What is allocated of shared memory, with the bytes that each takes in the pool."""
    found = []
    for alloc in collect(statement, tirx.AllocBuffer):
        if str(alloc.buffer.scope()) in ("shared", "shared.dyn"):
            element = tvm.DataType(str(alloc.buffer.dtype))
            elements = prod(const_int(extent) for extent in alloc.buffer.shape)
            nbytes = elements * element.lanes * max(1, element.bits // 8)
            found.append((alloc.buffer, -(-nbytes // _POOL_ALIGNMENT) * _POOL_ALIGNMENT))
    return found


def _least_shared_bytes(function: tirx.PrimFunc) -> int:
    """What a block needs of shared memory at least, of a function whose parts may be kernels of their own."""
    return max(sum(nbytes for _, nbytes in _shared_buffers(part)) for part in statements_of(function.body))


def _pointers(name: str, kernel: tirx.PrimFunc, original: tirx.PrimFunc) -> list[tirx.Var]:
    """A pointer for each parameter that the function had before it was lowered."""
    parameters = [str(p.name) for p in original.params]
    by_name = {str(p.name).removesuffix("_ptr"): p for p in kernel.params}
    unknown = set(by_name) - set(parameters)
    if unknown:
        raise LoweringError(f"stage {name} was lowered to a kernel with parameters {sorted(unknown)} that it lacks")
    return [
        by_name.get(p) if p in by_name else tirx.Var(f"{p}_unused", _pointer(original, i))
        for i, p in enumerate(parameters)
    ]


def _coordinates(part: str, linear: tirx.Var, extents: Sequence[int]) -> dict[str, PrimExpr]:
    """``part.x``, ``part.y`` and ``part.z`` from a linear index, x fastest, as CUDA counts."""
    found: dict[str, PrimExpr] = {}
    before = 1
    for d, extent in zip("xyz", extents, strict=True):
        here: PrimExpr = tirx.truncdiv(linear, before) if before > 1 else linear
        before *= extent
        # The outermost dimension needs no remainder.
        here = tirx.truncmod(here, extent) if before < prod(extents) else here
        found[f"{part}.{d}"] = here if extent > 1 else tirx.IntImm("int32", 0)
    return found


def _pointer(func: tirx.PrimFunc, index: int) -> tvm.ir.PointerType:
    return tvm.ir.PointerType(tvm.ir.PrimType(str(func.params[index].ty.dtype)), "global")
