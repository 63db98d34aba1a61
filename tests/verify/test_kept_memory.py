"""Kernels that are wrong with registers that are kept, made by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from benchmarks.residence import compiled
from souffle.codegen.assemble import CompiledKernels
from souffle.mutation.statement_paths import replaced, sites
from souffle.tvm_compat import collect, sequence
from souffle.verify import PROVEN, REFUTED, Certificate, certify_plan
from souffle.verify.certify import functions_of


@cache
def network() -> CompiledKernels:
    return compiled("Loop of two products")


def certificate(kernel: tirx.PrimFunc, **functions: tirx.PrimFunc) -> Certificate:
    (merged,) = network().merged
    return certify_plan(network().plan, {merged.name: kernel}, {**functions_of(network()), **functions})


def edited(kernel: tirx.PrimFunc, edit: Callable[[tirx.Stmt], tirx.Stmt | None]) -> tirx.PrimFunc:
    """The kernel with statements in the place of others; `edit` gives ``None`` for what stays.

    From the last to the first, so that places stay what they are.
    """
    body = kernel.body
    for site in reversed(list(sites(kernel))):
        new = edit(site.statement)
        if new is not None:
            body = replaced(body, site.path, new)
    return kernel.with_body(body)


def test_steps_that_are_passed_over_are_not_overlooked() -> None:
    """What is proven of the kernel without registers has the loop that the kernel has."""
    (merged,) = network().merged

    def every_other(node: tirx.Stmt) -> tirx.Stmt | None:
        if not isinstance(node, tirx.For) or not isinstance(node.extent, tirx.IntImm):
            return None
        two = tirx.IntImm("int32", 2)
        return tirx.For(node.loop_var, node.min, node.extent, node.kind, node.body, None, node.annotations, two)

    kernel = edited(merged.func, every_other)
    assert not tvm_ffi.structural_equal(kernel, merged.func)
    assert certificate(merged.func).verdict == PROVEN != certificate(kernel).verdict


def with_two_arrays(function: tirx.PrimFunc, fills: bool) -> tirx.PrimFunc:
    """A function that is given a second array of registers: filled like the first, or used in its place."""
    pointer = function.params[-1]
    (declared,) = [d for d in collect(function.body, tirx.DeclBuffer) if d.data.same_as(pointer)]
    second = tirx.Var("second_ptr", pointer.ty)
    other = tirx.decl_buffer(declared.buffer.shape, declared.buffer.dtype, "second", second, scope="local", layout=None)

    def changed(node: Any) -> Any:
        return other if node.same_as(declared.buffer) else second if node.same_as(pointer) else node

    copy = tvm_ffi.structural_map(function.body, (tvm.ir.Var, changed))
    if not fills:
        copy = sequence(tirx.DeclBuffer(declared.buffer, data=pointer), copy)
    return tirx.PrimFunc(
        [*function.params, second], sequence(function.body, copy) if fills else copy, attrs=function.attrs
    )


def test_one_of_several_arrays_that_is_overwritten_is_found() -> None:
    """By a call that is given no other array, and so is none of those that fill what the stage is called with."""
    (merged,) = network().merged
    functions = functions_of(network())
    (call,) = [call for call in merged.shape.stage_calls if call.kept]
    fill, use = call.kept.fill.name, call.functions[0].name
    (array,) = [a.buffer for a in collect(merged.func.body, tirx.AllocBuffer) if str(a.buffer.scope()) == "local"]
    other = tirx.decl_buffer(array.shape, array.dtype, "second", scope="local", layout=None)
    half = tvm.ir.GlobalVar("half")

    def kernel(overwrites: bool) -> tirx.PrimFunc:
        def edit(node: tirx.Stmt) -> tirx.Stmt | None:
            if isinstance(node, tirx.AllocBuffer) and node.buffer.same_as(array):
                return sequence(node, tirx.AllocBuffer(other))
            called = node.value if isinstance(node, tirx.Evaluate) and isinstance(node.value, Call) else None
            name = str(getattr(called.op, "name_hint", "")) if called is not None else ""
            if name not in (fill, use):
                return None
            new = tirx.Evaluate(Call(called.op, [*called.args, other.data]))
            if name == fill or not overwrites:
                return new
            tensors = merged.func.params
            reads = [tensors[call.arguments[number].parameter] for number in call.kept.reads]
            wrong = tirx.Evaluate(Call(half, [called.args[0] + 1, called.args[1], *reads, other.data]))
            return sequence(new, wrong)

        return edited(merged.func, edit)

    both = {fill: with_two_arrays(functions[fill], True), use: with_two_arrays(functions[use], False)}
    both["half"] = functions[fill]
    assert certificate(kernel(overwrites=False), **both).verdict == PROVEN
    assert certificate(kernel(overwrites=True), **both).verdict == REFUTED
