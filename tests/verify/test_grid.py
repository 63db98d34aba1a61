"""Grid barriers that count in memory, and memory with two names, as the certificate sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx

from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.plan import Plan
from souffle.kernel.grid_barrier import COUNTER_FUNCTION
from souffle.partition import Subprogram
from souffle.pipeline import compile_cuda
from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate, certify_plan
from tests.testlib import Builder
from tests.verify.hand_made import THREADS, Memory, Run, certificate, stage, tensor


@cache
def compiled(**options: object) -> CompiledKernels:
    b = Builder()
    x = b.input(40, 48)
    for width in (64, 48, 56, 40, 24):
        x = b.matmul(x, b.constant(np.ones((x.shape[1], width), np.float32)))
    return compile_cuda(b.program(x), level="V3", arch="sm_90", cubin=False, grid_barrier="counter", **options)


def verdict(plan: Plan, kernels: CompiledKernels, edit: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> Certificate:
    names = {kernel.name: kernel.stages for kernel in plan.kernels}
    functions = {n: f.func for k in kernels.merged for n, f in zip(names[k.name], k.shape.functions, strict=True)}
    return certify_plan(plan, {k.name: edit(k.func) for k in kernels.merged}, functions)


def waits(edit: Callable[[int, tirx.Evaluate], tirx.Stmt]) -> Callable[[tirx.PrimFunc], tirx.PrimFunc]:
    """Every wait for the grid replaced by what `edit` makes of its number and itself."""

    def of(func: tirx.PrimFunc) -> tirx.PrimFunc:
        seen = -1

        def see(node: tirx.Evaluate) -> tirx.Stmt:
            nonlocal seen
            call = node.value
            if not isinstance(call, tvm.ir.Call) or str(getattr(call.args[0], "value", "")) != COUNTER_FUNCTION:
                return node
            seen += 1
            return edit(seen, node)

        return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Evaluate, see)))

    return of


def as_it_is(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return func


def test_it_is_read_as_a_grid_barrier() -> None:
    kernels = compiled()
    found = verdict(kernels.plan, kernels, as_it_is)
    assert found.verdict == PROVEN, found
    (section,) = found.kernels
    assert dict(section.facts)["grid barriers"] == kernels.plan.kernels[0].grid_syncs > 2


def test_each_one_that_is_missing_is_refuted() -> None:
    kernels = compiled()
    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    for number in range(kernels.plan.kernels[0].grid_syncs):
        found = verdict(kernels.plan, kernels, waits(lambda n, node, at=number: nothing if n == at else node))
        assert found.verdict == REFUTED
        assert "race between blocks" in {c.rule for c in found.counterexamples}


def recounted(node: tirx.Evaluate) -> tirx.Stmt:
    name, state, blocks = node.value.args
    return tirx.Evaluate(tirx.call_extern("int32", name.value, state, blocks + 1))


def elsewhere(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The waits count in the first tensor."""

    def move(number: int, node: tirx.Evaluate) -> tirx.Stmt:
        name, _, blocks = node.value.args
        return tirx.Evaluate(tirx.call_extern("int32", name.value, func.params[0], blocks))

    return waits(move)(func)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (waits(lambda n, node: recounted(node) if n == 1 else node), "which is not the grid that is launched"),
        (elsewhere, "not memory that begins as zero"),
    ],
)
def test_what_it_counts_and_where(edit: Callable[[tirx.PrimFunc], tirx.PrimFunc], reason: str) -> None:
    kernels = compiled()
    found = verdict(kernels.plan, kernels, edit)
    assert found.verdict == REFUTED and any(reason in c.reason for c in found.counterexamples)


def test_nothing_else_is_given_its_memory() -> None:
    kernels = compiled()
    plan = kernels.plan
    state = next(i for i, b in enumerate(plan.buffers) if b.kind == "state")
    launch = dataclasses.replace(plan.launches[0], buffers=(state, *plan.launches[0].buffers[1:]))
    found = verdict(dataclasses.replace(plan, launches=(launch,)), kernels, as_it_is)
    assert any("is given the memory of a grid barrier" in c.reason for c in found.counterexamples)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("acq_rel.gpu", "relaxed.gpu"),
        ("  __syncthreads();\n  return 0;", "  return 0;"),
        ("(num_blocks - 1)", "(num_blocks - 2)"),
    ],
)
def test_only_the_text_that_is_known_counts(old: str, new: str) -> None:
    kernels = compiled()
    (module,) = kernels.plan.modules
    assert old in module.text
    plan = dataclasses.replace(kernels.plan, modules=(dataclasses.replace(module, text=module.text.replace(old, new)),))
    found = verdict(plan, kernels, as_it_is)
    assert found.verdict == UNKNOWN and COUNTER_FUNCTION in found.unknown[0]


# ---- memory with two names ----

SIZE = 4 * THREADS


def shifted(by: int) -> Callable[[Memory], tirx.Stmt]:
    def body(m: Memory) -> tirx.Stmt:
        at = m.tile * THREADS + m.tid
        return tirx.BufferStore(m.tensors[1], m.tensors[0][(at + by) % SIZE], [at])

    return body


def test_memory_that_is_only_read_is_written_under_no_other_name() -> None:
    """``g`` is read before the first barrier and ``h`` written into its memory after the second."""
    functions = [stage(n, (SIZE, SIZE), shifted(THREADS)) for n in ("one", "two", "three")]
    first, second = Run("one", 4, (0, 1)), Run("two", 4, (1, 2), grid_before=True)
    runs = [first, second, Run("three", 4, (2, 3), grid_before=True)]

    def with_offset(offset: int) -> Certificate:
        buffers = [tensor("g", SIZE, "input"), tensor("a", SIZE, "workspace", 4 * SIZE)]
        buffers += [tensor("h", SIZE, "workspace", offset), tensor("y", SIZE, "output")]
        return certificate(runs, functions, buffers)

    assert with_offset(0).verdict == PROVEN
    # The same with g in the workspace, where an earlier launch would have written it.
    kernels = compiled(hook=_cut)
    plan = kernels.plan
    assert len(plan.launches) == 2 and verdict(plan, kernels, as_it_is).verdict == PROVEN
    last = plan.launches[1]
    (given,) = (plan.buffers[i] for i in plan.launches[0].buffers if i in last.buffers and _works(plan, i))
    late = [i for i in last.buffers if _works(plan, i) and plan.buffers[i] is not given]
    assert late and not any(_overlap(plan.buffers[i], given) for i in late), "the placement keeps them apart"
    found = []
    for i in late:
        if plan.buffers[i].nbytes <= given.nbytes:
            moved = list(plan.buffers)
            moved[i] = dataclasses.replace(moved[i], offset=given.offset)
            found.append(verdict(dataclasses.replace(plan, buffers=tuple(moved)), kernels, as_it_is))
    assert found and all("aliased pointers" in {c.rule for c in one.counterexamples} for one in found)
    # For one of them that is all that is wrong with it.
    assert any({c.rule for c in one.counterexamples} == {"aliased pointers"} for one in found)


def _works(plan: Plan, index: int) -> bool:
    return plan.buffers[index].kind == "workspace"


def _overlap(one, other) -> bool:
    return one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes


def _cut(name: str, result: object) -> object:
    """The first stage in a kernel of its own."""
    if name != "partition":
        return result
    (whole,) = result.subprograms
    return replace(result, subprograms=(Subprogram(whole.stages[:1]), Subprogram(whole.stages[1:])))
