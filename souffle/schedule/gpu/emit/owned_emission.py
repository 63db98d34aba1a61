"""The kernel of a chain whose tiles own units: its steps one after another, each as its own rule would write it.

A step that is a kernel of its own elsewhere has a block for each of its tiles; here one block runs through them. What
steps leave to each other is in shared memory, and a barrier stands before each step that reads some of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil, prod
from typing import Any

from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.schedule.gpu.emit.async_copy import barrier
from souffle.schedule.gpu.emit.contraction_emission import ContractionKernel
from souffle.schedule.gpu.emit.contraction_statements import Binder, guarded, kernel_func, local_buffer, loop
from souffle.schedule.gpu.emit.direct_emission import DirectKernel
from souffle.schedule.gpu.emit.mma_emission import MmaKernel
from souffle.schedule.gpu.emit.wide_reads import WideReads
from souffle.schedule.gpu.forms.contraction_expressions import depends, substitute_axes
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.tiling.contraction_tiling import ContractionTiling
from souffle.schedule.gpu.tiling.direct_tiling import DirectTiling
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling, tile_operands
from souffle.schedule.gpu.tiling.owned_steps import Mapped, OwnedStep
from souffle.schedule.gpu.tiling.owned_tiling import OwnedTiling
from souffle.tvm_calls import structural_map
from souffle.tvm_compat import PrimExpr, collect, const_int, sequence

__all__ = ["emit_owned"]


def emit_owned(tiling: OwnedTiling, request: GpuRequest) -> tuple[tirx.PrimFunc, int]:
    """The stage with its body replaced by the kernel, and the kernel's tiles."""
    tile = tiling.tile
    kernels = [_kernel(step, numbers, request) for step, numbers in zip(tile.steps, tiling.steps, strict=True)]
    registers = _Registers([kernel.buffers for kernel in kernels])
    shared = [buffer for kernel in kernels for buffer in kernel.buffers if not _in_registers(buffer)]
    buffers = [*tile.buffers, *shared, *registers.buffers]

    def body(block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        number, part = block, None
        if tiling.spread > 1:
            number, part = tirx.floordiv(block, tiling.spread), tirx.floormod(block, tiling.spread)
        statements: list[tirx.Stmt | None] = [tirx.Bind(tile.number, number)]
        for step, kernel in zip(tile.steps, kernels, strict=True):
            statements.append(barrier() if step.waits else None)
            last = step is tile.steps[-1] and part is not None
            own = kernel.body(part, thread) if last else _rounds(kernel, thread)
            statements.append(registers.used_by(own))
        return sequence(*statements)

    return kernel_func(tile.chain.func, tiling.tiles, request.threads, buffers, body), tiling.tiles


def _in_registers(buffer: Any) -> bool:
    return str(buffer.scope()) == "local"


class _Registers:
    """The arrays of all steps in one set: a step has nothing in registers for the next, so that arrays are used again.

    Parameters
    ----------
    steps : sequence of sequence of buffer
        Those of each step, with its shared memory.
    """

    def __init__(self, steps: Sequence[Sequence[Any]]) -> None:
        sizes: dict[tuple[str, int], int] = {}
        places: list[tuple[Any, tuple[str, int]]] = []
        for step in steps:
            own = sorted(filter(_in_registers, step), key=_elements, reverse=True)
            counts: Counter[str] = Counter()
            for buffer in own:
                dtype = str(buffer.dtype)
                key = (dtype, counts[dtype])
                counts[dtype] += 1
                sizes[key] = max(sizes.get(key, 0), _elements(buffer))
                places.append((buffer, key))
        made = {key: local_buffer(f"held_{key[0]}_{key[1]}", size, key[0]) for key, size in sizes.items()}
        self.buffers = list(made.values())
        self._shared = [(buffer, made[key]) for buffer, key in places]

    def used_by(self, statement: tirx.Stmt) -> tirx.Stmt:
        """A step's statement with the common arrays in place of its own."""

        def place(buffer: Any) -> Any:
            return next((common for own, common in self._shared if own.same_as(buffer)), buffer)

        def load(node: TensorLoad) -> PrimExpr:
            common = place(node.source)
            return node if common.same_as(node.source) else common[tuple(node.indices)]

        def store(node: tirx.BufferStore) -> tirx.Stmt:
            common = place(node.buffer)
            return node if common.same_as(node.buffer) else tirx.BufferStore(common, node.value, node.indices)

        return structural_map(statement, [(TensorLoad, load), (tirx.BufferStore, store)])


def _elements(buffer: Any) -> int:
    return prod(map(const_int, buffer.shape))


class _MappedKernel:
    """A step that reduces nothing: its elements one after another, several in one access where they are neighbours."""

    def __init__(self, mapped: Mapped, lanes: int, threads: int) -> None:
        self.mapped, self.lanes, self.threads = mapped, lanes, threads
        self.units = prod(axis.extent for axis in mapped.axes) // lanes
        self.tiles = ceil(self.units / threads)
        computed = lanes > 1 and bool(collect(mapped.store.value, Call))
        self.result = local_buffer("result", lanes, str(mapped.store.buffer.dtype)) if computed else None
        self.wide = WideReads([mapped.store.value], mapped.axes[-1], lanes) if computed else None
        self.buffers: tuple[Any, ...] = () if self.result is None else (self.result, *self.wide.registers)

    def body(self, block: PrimExpr, thread: PrimExpr) -> tirx.Stmt:
        """What a thread does in a round."""
        axes, store, lanes = self.mapped.axes, self.mapped.store, self.lanes
        binder = Binder()
        unit = binder.name("unit", block * self.threads + thread)
        conditions = [tirx.LT(unit, self.units)] if self.units % self.threads else []
        parts = (store.value, *store.indices)
        places = binder.locate(axes, unit, lambda axis: any(depends(part, axis) for part in parts), lanes)

        def here(lane: PrimExpr) -> dict[tirx.Var, PrimExpr]:
            last = axes[-1].var if axes else None
            return {var: place + lane if var is last and lanes > 1 else place for var, place in places.items()}

        def write(lane: PrimExpr, held: Any = None) -> tirx.Stmt:
            own = substitute_axes(store.value, here(lane)) if held is None else held[lane]
            return tirx.BufferStore(store.buffer, own, [substitute_axes(index, here(lane)) for index in store.indices])

        if self.result is None:
            stored = loop("lane", lanes, write, "vectorized")
        else:
            result, wide = self.result, self.wide

            def compute(lane: PrimExpr) -> tirx.Stmt:
                return tirx.BufferStore(result, substitute_axes(wide.value(0, lane), here(lane)), [lane])

            stored = sequence(
                wide.statement(lambda load, lane: substitute_axes(load, here(lane))),
                loop("lane", lanes, compute, "unrolled"),
                loop("lane", lanes, lambda lane: write(lane, result), "vectorized"),
            )
        return sequence(*binder.statements, guarded(conditions, stored))


_Kernel = DirectKernel | ContractionKernel | MmaKernel | _MappedKernel


def _kernel(step: OwnedStep, numbers: Any, request: GpuRequest) -> _Kernel:
    if isinstance(numbers, DirectTiling):
        return DirectKernel(step.sum, numbers, request.threads)
    if isinstance(numbers, ContractionTiling):
        return ContractionKernel(step.product, numbers, request)
    if isinstance(numbers, MmaTiling):
        # A step among others: addresses that are the same for all tiles would take registers from all of them.
        operands = tile_operands(step.product, numbers, request).rolled()
        return MmaKernel(step.product, numbers, operands, request.threads)
    return _MappedKernel(step.mapped, numbers, request.threads)


def _rounds(kernel: _Kernel, thread: PrimExpr) -> tirx.Stmt:
    """All tiles of a step. What they have in shared memory for themselves is used again by the next."""
    own = any(str(buffer.scope()) == "shared" for buffer in kernel.buffers)

    def one(number: PrimExpr) -> tirx.Stmt:
        return sequence(kernel.body(number, thread), barrier() if own and kernel.tiles > 1 else None)

    return loop("round", kernel.tiles, one, "rolled")
