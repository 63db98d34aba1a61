"""TVM's pass for block barriers, kept from leaving out one that is needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.tvm_calls import structural_map, structural_walk
from souffle.tvm_compat import Analyzer, PrimExpr, collect, const_int, substitute

__all__ = ["synchronized"]


def synchronized(module: tvm.IRModule, barriers: tvm.transform.Pass) -> tvm.IRModule:
    """`module` with the barriers of shared memory.

    ThreadSync takes a write and a read at one index for one thread's own if the index names the innermost thread axis.
    With several axes, or an index such as ``threadIdx.x / 2``, it is that of several threads; and where arrays of
    elements of different sizes take turns in one memory, one thread's element is a part of another's. TVM 0.27 leaves
    out the barrier there; right would be to compare what each thread touches. Where that is so, the pass is shown one
    more axis, of one thread, inside all others: no index names it, and every barrier is made.

    Parameters
    ----------
    module : IRModule
        Of functions for the device, before barriers.
    barriers : Pass
        ThreadSync, for all scopes.
    """
    functions = module.functions.items()
    shared = {gv for gv, function in functions if _shares_elements(function) or _has_two_sizes(function)}
    if not shared:
        return barriers(module)
    shown = {gv: _with_one_more(f) if gv in shared else f for gv, f in module.functions.items()}
    return tvm.IRModule({gv: _without(f) for gv, f in barriers(tvm.IRModule(shown)).functions.items()})


_TAG = "threadIdx.one"


def _with_one_more(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """One thread axis more, inside the innermost."""
    one = tirx.IntImm("int32", 1)

    def inner(attr: tirx.AttrStmt) -> tirx.AttrStmt:
        if attr.attr_key != "thread_extent" or _has_axis(attr.body):
            return attr
        axis = tirx.IterVar((0, one), tirx.Var("one", "int32"), tirx.IterVar.ThreadIndex, _TAG)
        body = tirx.AttrStmt(axis, "thread_extent", one, attr.body)
        return tirx.AttrStmt(attr.node, attr.attr_key, attr.value, body)

    return function.with_body(structural_map(function.body, (tirx.AttrStmt, inner)))


def _has_axis(node: tirx.Stmt) -> bool:
    found = False

    def see(attr: tirx.AttrStmt) -> None:
        nonlocal found
        found = found or attr.attr_key == "thread_extent"

    structural_walk(node, (tirx.AttrStmt, see))
    return found


def _without(function: tirx.PrimFunc) -> tirx.PrimFunc:
    def gone(attr: tirx.AttrStmt) -> tirx.Stmt:
        is_shown_axis = attr.attr_key == "thread_extent" and str(attr.node.thread_tag) == _TAG
        return attr.body if is_shown_axis else attr

    return function.with_body(structural_map(function.body, (tirx.AttrStmt, gone)))


def _shares_elements(function: tirx.PrimFunc) -> bool:
    """Whether several threads write and read a shared element at one index that names the innermost thread axis."""
    return any(_shares_in(launch) for launch in _launches(function.body))


def _launches(body: tirx.Stmt) -> list[tirx.AttrStmt]:
    """The outermost thread axes: those of each root-level nest, which has an order of its own."""
    axes = [attr for attr in collect(body, tirx.AttrStmt) if attr.attr_key == "thread_extent"]
    inner = [one for attr in axes for one in collect(attr.body, tirx.AttrStmt)]
    return [attr for attr in axes if not any(attr.same_as(one) for one in inner)]


def _shares_in(launch: tirx.AttrStmt) -> bool:
    axes: list[tuple[tirx.Var, int]] = []  # of more than one thread, innermost first
    writes: list[tuple[tirx.Var, PrimExpr]] = []
    reads: list[tuple[tirx.Var, PrimExpr]] = []

    def see_axis(attr: tirx.AttrStmt) -> None:
        if attr.attr_key == "thread_extent" and str(attr.node.thread_tag).startswith("threadIdx"):
            extent = const_int(attr.value)
            if extent > 1:
                axes.append((attr.node.var, extent))

    def see_store(store: tirx.BufferStore) -> None:
        if str(store.buffer.scope()).startswith("shared") and len(store.indices) == 1:
            writes.append((store.buffer, store.indices[0]))

    def see_load(load: TensorLoad) -> None:
        if str(load.source.scope()).startswith("shared") and len(load.indices) == 1:
            reads.append((load.source, load.indices[0]))

    structural_walk(launch, [(tirx.AttrStmt, see_axis), (tirx.BufferStore, see_store), (TensorLoad, see_load)])
    if not axes:
        return False
    # A walk comes to the inner of two nested statements first.
    innermost = axes[0][0]
    return any(
        buffer.same_as(other)
        and tvm_ffi.structural_equal(index, place)
        and _uses(index, innermost)
        and not _of_one_thread(index, axes)
        for buffer, index in writes
        for other, place in reads
    )


def _has_two_sizes(function: tirx.PrimFunc) -> bool:
    """Whether one piece of shared memory holds elements of one size and later of another."""
    allocated = {alloc.buffer: alloc.buffer for alloc in collect(function.body, tirx.AllocBuffer)}
    sizes: dict[tirx.Var, set[int]] = {}
    for declared in collect(function.body, tirx.DeclBuffer):
        sources = [var for var in collect(declared.data, tirx.Var) if str(declared.buffer.scope()).startswith("shared")]
        for source in sources:
            root = allocated.get(source, source)
            allocated[declared.buffer] = root
            held = sizes.setdefault(root, {tvm.DataType(str(root.dtype)).bits})
            held.add(tvm.DataType(str(declared.buffer.dtype)).bits)
    return any(len(held) > 1 for held in sizes.values())


def _uses(index: PrimExpr, var: tirx.Var) -> bool:
    found = False

    def see(other: tirx.Var) -> None:
        nonlocal found
        found = found or other.same_as(var)

    if isinstance(index, tirx.Var):
        return index.same_as(var)
    structural_walk(index, (tirx.Var, see))
    return found


def _of_one_thread(index: PrimExpr, axes: Sequence[tuple[tirx.Var, int]]) -> bool:
    """Whether different threads have different values of an index; loops are at their first turn."""
    analyzer = Analyzer()
    base = index.base if isinstance(index, tirx.Ramp) else index
    others: list[tirx.Var] = []

    def see(var: tirx.Var) -> None:
        if not any(var.same_as(known) for known, _ in axes):
            others.append(var)

    if isinstance(base, tirx.Var):
        return len(axes) == 1
    structural_walk(base, (tirx.Var, see))
    base = substitute(base, {var: tirx.IntImm("int32", 0) for var in others})
    values = set()
    for threads in itertools.product(*(range(extent) for _, extent in axes)):
        place = {var: tirx.IntImm("int32", value) for (var, _), value in zip(axes, threads, strict=True)}
        value = analyzer.simplify(substitute(base, place))
        if not isinstance(value, tirx.IntImm) or int(value) in values:
            return False
        values.add(int(value))
    return True
