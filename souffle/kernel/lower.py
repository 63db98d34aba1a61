"""Lower one scheduled stage, alone, to a device function that a kernel can call (paper §6.4).

The stage's own thread extents are what TVM's passes for shared memory, fragments and cross-thread reductions need, so
they run here, before stages are joined. Afterwards ``blockIdx.x`` becomes the parameter ``tile`` and ``threadIdx``
comes from the parameter ``tid``, the linear index of the thread; shared memory becomes offsets into one pool that all
stages of a kernel have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx.build import split_host_device_mods

from souffle.errors import SouffleError
from souffle.schedule.gpu.rule import GpuSchedule
from souffle.tvm_compat import Analyzer, const_int, dtype_of, substitute

__all__ = ["DeviceFunction", "Lowering", "LoweringError", "cuda_target", "lower_stage", "lowering_problem"]

_POOL_ALIGNMENT = 128
"""Bytes; wmma and 16-byte copies want aligned buffers in the pool."""


class LoweringError(SouffleError):
    """A scheduled stage could not be lowered; the message names it and the pass or the rule that it breaks."""


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
        Threads that take part, a prefix of the block.
    shared_bytes : int
        Bytes of the shared-memory pool that it uses, from offset 0.
    has_barrier : bool
        Whether it holds block barriers, so that all threads of the block must take part.
    """

    func: tirx.PrimFunc
    tiles: int
    threads: int
    shared_bytes: int
    has_barrier: bool


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


def _passes(vectorize: bool) -> tuple[tvm.transform.Pass, tvm.transform.Pass]:
    """TVM's pipeline from TensorIR blocks to per-thread code with barriers, as ``default_s_tir_pipeline`` orders it.

    In two parts: vectors are made at the beginning of the second.
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
            tensor_ir.CompactBufferAllocation(),
            tensor_ir.LowerAutoCopy(),
            tensor_ir.UnifyThreadBinding(),
            tensor_ir.LowerMatchBuffer(),
            low.StmtSimplify(),
            tensor_ir.InjectPermutedLayout(),
            tensor_ir.AnnotateIrregularLoop(),
            tensor_ir.InjectSoftwarePipeline(),
            tensor_ir.TransformMmaBufferLayout(),
            tensor_ir.LowerOpaqueBlock(),
            low.FlattenBuffer(),
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
            tensor_ir.HoistIfThenElse(),
            low.UnrollLoop(),
            tensor_ir.RenormalizeSplitPattern(),
            low.StmtSimplify(),
            low.RemoveNoOp(),
            tensor_ir.RewriteUnsafeSelect(),
            low.CommonSubexprElim(),
            low.FP8ComputeLegalize(),
            low.VerifyMemory(),
            tensor_ir.ThreadSync("shared"),
            tensor_ir.ThreadSync("shared.dyn"),
            tensor_ir.ThreadSync("warp"),
            tensor_ir.InferFragment(),
            tensor_ir.LowerThreadAllreduce(),
            low.SplitHostDevice(),
            low.MakePackedAPI(),
            low.FP8StorageLegalize(),
            low.BF16StorageLegalize(),
        ]
    )
    return first, second


def _device_passes() -> tvm.transform.Pass:
    low = tirx.transform
    return tvm.transform.Sequential([low.LowerWarpMemory(), low.StmtSimplify(), low.RemoveNoOp(), low.LowerIntrin()])


def lower_stage(name: str, schedule: GpuSchedule, target: tvm.target.Target) -> tuple[DeviceFunction, ...]:
    """Lower a scheduled stage to device functions.

    Parameters
    ----------
    name : str
        The functions' name; with several, a number is appended.
    schedule : GpuSchedule
    target : Target
        See :func:`cuda_target`.

    Returns
    -------
    tuple of DeviceFunction
        One for each of the stage's root-level loop nests, in order; usually one. Several do not depend on each other.

    Raises
    ------
    LoweringError
        If a pass of TVM refuses the stage, or it uses a launch dimension other than blockIdx.x and threadIdx.
    """
    original = schedule.func
    functions = _device_kernels(name, schedule, target, vectorize=True)
    if any(_has_vector_gather(function) for function in functions):
        # One that comes about in a later pass, which :func:`_without_gathers` could not see.
        functions = _device_kernels(name, schedule, target, vectorize=False)
    functions.sort(key=lambda f: (len(str(f.attrs["global_symbol"])), str(f.attrs["global_symbol"])))
    parameters = [str(p.name) for p in original.params]
    result = []
    for index, function in enumerate(functions):
        label = name if len(functions) == 1 else f"{name}_{index}"
        result.append(_device_function(label, function, parameters, original))
    return tuple(result)


def lowering_problem(schedule: GpuSchedule, target: tvm.target.Target) -> str | None:
    """Why a schedule cannot be lowered, or ``None`` if it can: a schedule is only as good as the code that it gives."""
    try:
        lower_stage("stage", schedule, target)
    except LoweringError as error:
        return str(error)
    return None


class Lowering:
    """Lowers schedules for one target, each once: to see that it can be, to predict its time, and for its kernel.

    What is known of a schedule is forgotten with the schedule.

    Parameters
    ----------
    target : Target
        See :func:`cuda_target`.
    """

    def __init__(self, target: tvm.target.Target) -> None:
        self.target = target
        self._known: WeakKeyDictionary[GpuSchedule, tuple[DeviceFunction, ...] | str] = WeakKeyDictionary()

    def functions(self, schedule: GpuSchedule) -> tuple[DeviceFunction, ...]:
        """See :func:`lower_stage`; the functions' own names say nothing.

        Raises
        ------
        LoweringError
            If the schedule cannot be lowered.
        """
        found = self._found(schedule)
        if isinstance(found, str):
            raise LoweringError(found)
        return found

    def problem(self, schedule: GpuSchedule) -> str | None:
        """Why a schedule cannot be lowered, or ``None`` if it can."""
        found = self._found(schedule)
        return found if isinstance(found, str) else None

    def _found(self, schedule: GpuSchedule) -> tuple[DeviceFunction, ...] | str:
        found = self._known.get(schedule)
        if found is None:
            try:
                found = lower_stage("stage", schedule, self.target)
            except LoweringError as error:
                found = str(error)
            self._known[schedule] = found
        return found


def _device_kernels(
    name: str, schedule: GpuSchedule, target: tvm.target.Target, *, vectorize: bool
) -> list[tirx.PrimFunc]:
    module = tvm.IRModule({name: schedule.func.with_attr("global_symbol", name)})
    try:
        with tvm.transform.PassContext(opt_level=3):
            module = s_tir.transform.CanonicalizeLoop()(tirx.transform.BindTarget(target)(module))
            first, second = _passes(vectorize)
            module = first(tvm.IRModule({gv: _paired_conditions(f) for gv, f in module.functions.items()}))
            module = second(tvm.IRModule({gv: _without_gathers(f) for gv, f in module.functions.items()}))
            _, device = split_host_device_mods(module)
            return [f for mod in device.values() for f in _device_passes()(mod).functions.values()]
    except (ValueError, TypeError, RuntimeError) as error:
        raise LoweringError(
            f"stage {name} (rule {schedule.rule}) cannot be lowered: {str(error).strip().splitlines()[-1]}"
        ) from error


def _paired_conditions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Write a block's condition that is no conjunction twice, as ``condition and condition``.

    LowerCrossThreadReduction carries over to the block that writes a reduction's result the conditions that it finds
    under an ``And``, and forgets one that stands alone; threads without a row would then write beyond the tile.
    """

    def paired(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        if isinstance(realize.predicate, (tirx.And, tirx.IntImm)):
            return realize
        condition = tirx.And(realize.predicate, realize.predicate)
        return s_tir.SBlockRealize(list(realize.iter_values), condition, realize.block)

    return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlockRealize, paired)))


def _without_gathers(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Unroll the loops that would become vectors of narrow elements which are not neighbours in memory, or unaligned.

    TVM's CUDA generator writes wrong text for such vectors. Other loops keep theirs. Statements that only name a buffer
    (:func:`souffle.schedule.gpu.statements.kernel_func`) have done their work and go.
    """
    analyzer = Analyzer()

    def unrolled(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(loop.extent, tirx.IntImm):
            return loop
        lanes, gathers = int(loop.extent), False

        def see(access: TensorLoad | tirx.BufferStore) -> None:
            nonlocal gathers
            if len(access.indices) != 1 or gathers:
                return
            value = tvm.DataType(dtype_of(access.value if isinstance(access, tirx.BufferStore) else access))
            first, second = (substitute(access.indices[0], {loop.loop_var: loop.min + lane}) for lane in (0, 1))
            if value.bits >= 32 or first.same_as(second):
                return
            step = analyzer.simplify(second - first)
            if isinstance(step, tirx.IntImm) and int(step) == 0:
                return
            known = analyzer.modular_set(first)
            neighbours = isinstance(step, tirx.IntImm) and int(step) == 1
            gathers = not (neighbours and int(known.coeff) % lanes == 0 and int(known.base) % lanes == 0)

        tvm_ffi.structural_walk(loop.body, [(TensorLoad, see), (tirx.BufferStore, see)])
        if not gathers:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)

    def unnamed(statement: tirx.Evaluate) -> tirx.Evaluate:
        # A buffer that is named as a whole has its size by now.
        name = getattr(getattr(statement.value, "op", None), "name", "")
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if name == "tirx.buffer_data" else statement

    return function.with_body(tvm_ffi.structural_map(function.body, [(tirx.For, unrolled), (tirx.Evaluate, unnamed)]))


def _has_vector_gather(function: tirx.PrimFunc) -> bool:
    """Whether it reads or writes several narrow elements at once that TVM cannot show to be one aligned vector."""
    found = False
    analyzer = Analyzer()

    def see(access: TensorLoad | tirx.BufferStore) -> None:
        nonlocal found
        index = access.indices[0]
        value = tvm.DataType(dtype_of(access.value if isinstance(access, tirx.BufferStore) else access))
        if value.lanes > 1 and value.bits < 32:
            found = found or not (isinstance(index, tirx.Ramp) and _is_aligned(index, value.lanes, analyzer))

    tvm_ffi.structural_walk(function.body, [(TensorLoad, see), (tirx.BufferStore, see)])
    return found


def _is_aligned(index: tirx.Ramp, lanes: int, analyzer: Analyzer) -> bool:
    known = analyzer.modular_set(index.base)
    neighbours = isinstance(index.stride, tirx.IntImm) and int(index.stride.value) == 1
    return neighbours and int(known.coeff) % lanes == 0 and int(known.base) % lanes == 0


def _device_function(
    name: str, kernel: tirx.PrimFunc, parameters: list[str], original: tirx.PrimFunc
) -> DeviceFunction:
    tile = tirx.Var("tile", "int32")
    tid = tirx.Var("tid", "int32")
    extents: dict[str, int] = {}
    bound: list[tuple[str, tirx.Var]] = []

    def see_extent(attr: tirx.AttrStmt) -> None:
        if attr.attr_key == "thread_extent":
            tag, extent = str(attr.node.thread_tag), const_int(attr.value)
            if extents.setdefault(tag, extent) != extent:
                raise LoweringError(f"stage {name} binds {tag} to {extents[tag]} and to {extent}")
            bound.append((tag, attr.node.var))

    tvm_ffi.structural_walk(kernel.body, (tirx.AttrStmt, see_extent))
    if not set(extents) <= {"blockIdx.x", "threadIdx.x", "threadIdx.y", "threadIdx.z"}:
        raise LoweringError(f"stage {name} uses {sorted(extents)}; stages use blockIdx.x and threadIdx only")
    x, y, z = (extents.get(f"threadIdx.{d}", 1) for d in "xyz")
    coordinates = {
        "blockIdx.x": tile,
        "threadIdx.x": tid if y * z == 1 else tirx.truncmod(tid, x),
        "threadIdx.y": tirx.truncdiv(tid, x) if z == 1 else tirx.truncmod(tirx.truncdiv(tid, x), y),
        "threadIdx.z": tirx.truncdiv(tid, x * y),
    }

    pool_bytes = 0
    decls: list[tuple[tirx.AllocBuffer, int]] = []
    barrier = False

    def see_alloc(alloc: tirx.AllocBuffer) -> None:
        nonlocal pool_bytes
        if str(alloc.buffer.scope()) in ("shared", "shared.dyn"):
            elements = 1
            for extent in alloc.buffer.shape:
                elements *= const_int(extent)
            decls.append((alloc, pool_bytes))
            element = tvm.DataType(str(alloc.buffer.dtype))
            nbytes = elements * element.lanes * max(1, element.bits // 8)
            pool_bytes += -(-nbytes // _POOL_ALIGNMENT) * _POOL_ALIGNMENT

    def see_call(call: tvm.ir.Call) -> None:
        nonlocal barrier
        barrier = barrier or getattr(call.op, "name", "") == "tirx.tvm_storage_sync"

    tvm_ffi.structural_walk(kernel.body, [(tirx.AllocBuffer, see_alloc), (tvm.ir.Call, see_call)])

    pool = tirx.decl_buffer((max(pool_bytes, 1),), "uint8", name="pool", scope="shared.dyn")

    def strip(attr: tirx.AttrStmt) -> tirx.Stmt:
        return attr.body if attr.attr_key == "thread_extent" else attr

    def place(alloc: tirx.AllocBuffer) -> tirx.Stmt:
        offset = next((o for candidate, o in decls if candidate.buffer.same_as(alloc.buffer)), None)
        if offset is None:
            return alloc
        return tirx.DeclBuffer(alloc.buffer, data=tirx.address_of(pool[offset]))

    body = tvm_ffi.structural_map(kernel.body, [(tirx.AttrStmt, strip), (tirx.AllocBuffer, place)])
    body = substitute(body, {var: coordinates[tag] for tag, var in bound})
    if pool_bytes:
        body = tirx.SeqStmt([tirx.AllocBuffer(pool), body])

    by_name = {str(p.name).removesuffix("_ptr"): p for p in kernel.params}
    unknown = set(by_name) - set(parameters)
    if unknown:
        raise LoweringError(f"stage {name} was lowered to a kernel with parameters {sorted(unknown)} that it lacks")
    pointers = [
        by_name.get(p) if p in by_name else tirx.Var(f"{p}_unused", _pointer(original, i))
        for i, p in enumerate(parameters)
    ]
    func = tirx.PrimFunc([tile, tid, *pointers], body).with_attr("global_symbol", name)
    func = func.with_attr("tirx.noalias", True).with_attr("calling_conv", 0).with_attr("target", kernel.attrs["target"])
    return DeviceFunction(func, extents.get("blockIdx.x", 1), x * y * z, pool_bytes, barrier)


def _pointer(func: tirx.PrimFunc, index: int) -> tvm.ir.PointerType:
    return tvm.ir.PointerType(tvm.ir.PrimType(str(func.params[index].ty.dtype)), "global")
