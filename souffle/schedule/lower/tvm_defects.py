"""What the passes of TVM 0.27 and its CUDA generator get wrong, kept from them.

docs/tvm-defects.md lists all such defects, and the test that watches each.
"""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx
from tvm.ir.expr import TensorLoad

from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import Analyzer, PrimExpr, const_int, dtype_of, substitute, variables

__all__ = [
    "has_vector_gather",
    "has_vector_without_type",
    "named_results",
    "one_scope",
    "paired_conditions",
    "without_gathers",
    "without_names",
]


def one_scope(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Dynamic shared buffers as plain ones: both become parts of the pool, the one dynamic buffer of a kernel."""
    replaced: list[tuple[tirx.Var, tirx.Var]] = []

    def plain(var: tirx.Var) -> tirx.Var:
        if not tirx.is_buffer_var(var) or str(var.scope()) != "shared.dyn":
            return var
        for old, new in replaced:
            if old.same_as(var):
                return new
        layout = {"strides": var.strides or None, "elem_offset": var.elem_offset, "data_alignment": var.data_alignment}
        new = tirx.decl_buffer(
            var.shape, var.dtype, var.name, scope="shared", offset_factor=var.offset_factor, **layout
        )
        replaced.append((var, new))
        return new

    return function.with_body(structural_map(function.body, (tirx.Var, plain)))


def paired_conditions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Write a block's condition that is no conjunction twice, as ``condition and condition``.

    LowerCrossThreadReduction carries over to the block that writes a reduction's result the conditions that it finds
    under an ``And``, and forgets one that stands alone: ``row < 5``, but not ``row < 5 and row < 5``. Threads without a
    row would then write beyond the result. Right would be to carry over any condition on the block's own axes.
    """

    def paired(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        if isinstance(realize.predicate, (tirx.And, tirx.IntImm)):
            return realize
        condition = tirx.And(realize.predicate, realize.predicate)
        return s_tir.SBlockRealize(list(realize.iter_values), condition, realize.block)

    return function.with_body(structural_map(function.body, (s_tir.SBlockRealize, paired)))


def without_gathers(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Unroll the loops that would become vectors of narrow elements which are not neighbours in memory, or unaligned,
    and those whose lanes are selected each by a condition of its own.

    TVM's CUDA generator builds such a vector of its elements as if each were a whole word: eight halves become
    ``make_uint4`` of eight arguments, which no compiler takes, and of four truth values the lanes are mixed up. Right
    would be to pack each element into its part of a word. Other loops keep theirs.
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

        def see_select(select: tirx.Select) -> None:
            nonlocal gathers
            gathers = gathers or any(loop.loop_var.same_as(var) for var in variables(select.condition))

        structural_walk(loop.body, [(TensorLoad, see), (tirx.BufferStore, see), (tirx.Select, see_select)])
        if not gathers:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)

    return function.with_body(structural_map(function.body, (tirx.For, unrolled)))


def named_results(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Name the results of reductions across threads at the end of their scope, so that nothing takes their place.

    ::

        allreduce(x[0] → t[0])                    allreduce(x[0] → t[0])
        y[0] = exp(t[0])                     →    y[0] = exp(t[0])
                                                  t

    StorageRewrite gives ``y`` the memory of ``t`` where that is its last reader, which is right for a thread's own
    variable. LowerThreadAllreduce, which runs later, makes one variable of a row's threads of it, and each of them
    would take the exponential again. :func:`without_names` removes the names when memory is given out. A mere copy of
    a result may take its place: it stores what is there.
    """
    results = _Results(function)
    named = [buffer for buffer in results.buffers if results.is_overwritten(buffer)]
    if not named:
        return function

    def scope(sequence: tirx.SeqStmt) -> tirx.SeqStmt:
        allocated = [s.buffer for s in sequence.seq if isinstance(s, tirx.AllocBuffer)]
        names = [tirx.Evaluate(buffer.data) for buffer in allocated if _among(buffer, named)]
        return tirx.SeqStmt([*sequence.seq, *names]) if names else sequence

    return function.with_body(structural_map(function.body, (tirx.SeqStmt, scope)))


def without_names(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Drop statements that only name a buffer, as :func:`named_results` makes them."""

    def unnamed(statement: tirx.Evaluate) -> tirx.Evaluate:
        name = getattr(getattr(statement.value, "op", None), "name", "")
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if name == "tirx.buffer_data" else statement

    return function.with_body(structural_map(function.body, (tirx.Evaluate, unnamed)))


class _Results:
    """Where the results of a function's reductions across threads go.

    Attributes
    ----------
    buffers : list of Var
        The reductions' results, and buffers of a thread's own that hold nothing but a copy of one.
    """

    def __init__(self, function: tirx.PrimFunc) -> None:
        self.buffers: list[tirx.Var] = []
        self._stores: list[tirx.BufferStore] = []

        def see_call(call: tvm.ir.Call) -> None:
            if getattr(call.op, "name", "") == "tirx.tvm_thread_allreduce":
                count = const_int(call.args[0])
                self.buffers += [result.source for result in call.args[2 + count : 2 + 2 * count]]

        structural_walk(function.body, [(tvm.ir.Call, see_call), (tirx.BufferStore, self._stores.append)])
        while copies := [s.buffer for s in self._stores if self._is_copy(s.buffer)]:
            self.buffers += copies

    def is_overwritten(self, buffer: tirx.Var) -> bool:
        """Whether a store that is more than a copy reads a result."""
        return any(_reads(s.value, buffer) for s in self._stores if not _among(s.buffer, self.buffers))

    def _is_copy(self, buffer: tirx.Var) -> bool:
        """Whether all stores into a thread's own buffer, which is not yet known as a result, copy the same result."""
        if str(buffer.scope()) != "local" or _among(buffer, self.buffers):
            return False
        values = [store.value for store in self._stores if store.buffer.same_as(buffer)]
        sources = [value.source for value in values if isinstance(value, TensorLoad)]
        same = len(sources) == len(values) and all(source.same_as(sources[0]) for source in sources)
        return same and _among(sources[0], self.buffers)


def _among(buffer: tirx.Var, buffers: list[tirx.Var]) -> bool:
    return any(buffer.same_as(other) for other in buffers)


def _reads(value: PrimExpr, buffer: tirx.Var) -> bool:
    loads: list[TensorLoad] = []
    structural_walk(value, (TensorLoad, loads.append))
    return any(load.source.same_as(buffer) for load in loads)


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

    structural_walk(function.body, [(TensorLoad, see), (tirx.BufferStore, see)])
    return found


def has_vector_without_type(function: tirx.PrimFunc) -> bool:
    """Whether a vector in it is longer than CUDA's vectors of its elements: four of 64 bits or of truth values.

    TVM's CUDA generator has no type for it and fails; right would be to write several vectors.
    """
    found = False

    def see(node: tvm.ir.Expr) -> None:
        nonlocal found
        if isinstance(node.ty, tvm.ir.PrimType):
            value = tvm.DataType(dtype_of(node))
            found = found or (value.lanes > 4 and (value.bits == 64 or str(value).startswith("bool")))

    structural_walk(function.body, (tvm.ir.Expr, see))
    return found


def _is_aligned(index: tirx.Ramp, lanes: int, analyzer: Analyzer) -> bool:
    known = analyzer.modular_set(index.base)
    neighbours = isinstance(index.stride, tirx.IntImm) and int(index.stride.value) == 1
    return neighbours and int(known.coeff) % lanes == 0 and int(known.base) % lanes == 0
