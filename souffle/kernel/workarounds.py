"""What TVM's passes and its CUDA generator get wrong, kept from them."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad

from souffle.tvm_compat import Analyzer, dtype_of, substitute

__all__ = ["has_vector_gather", "one_scope", "paired_conditions", "without_gathers"]


def one_scope(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Dynamic shared buffers as plain ones: both become parts of the pool, and TVM takes one dynamic buffer at most."""
    known: list[tuple[tirx.Var, tirx.Var]] = []

    def plain(var: tirx.Var) -> tirx.Var:
        if not tirx.is_buffer_var(var) or str(var.scope()) != "shared.dyn":
            return var
        for old, new in known:
            if old.same_as(var):
                return new
        own = {"strides": var.strides or None, "elem_offset": var.elem_offset, "data_alignment": var.data_alignment}
        new = tirx.decl_buffer(var.shape, var.dtype, var.name, scope="shared", offset_factor=var.offset_factor, **own)
        known.append((var, new))
        return new

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.Var, plain)))


def paired_conditions(function: tirx.PrimFunc) -> tirx.PrimFunc:
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


def without_gathers(function: tirx.PrimFunc) -> tirx.PrimFunc:
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


def has_vector_gather(function: tirx.PrimFunc) -> bool:
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
