"""What each read must find is what the program says: changed kernels whose stages are given other tensors, or steps'.

None of them races, leaves its buffers or reads what nobody wrote; compared stage by stage, all of them are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx

from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.dataflow import Dataflow, StageUse
from souffle.codegen.plan import Plan
from souffle.codegen.tensor_ir import TensorIR, text_of_module, unpack
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.verify import PROVEN, REFUTED, UNKNOWN, Certificate, certify_plan
from souffle.verify.indices import operator_name
from tests.kernel.test_loops import PROGRAMS as LOOPS
from tests.testlib import Builder, inputs_for
from tests.verify.hand_made import THREADS, Memory, Run, kernel, plan_of, stage, tensor


def sums(steps: int) -> TEProgram:
    """Each state is of the two before it, and nothing saturates."""
    b = Builder()
    states = [b.relu(b.input(1, 4)), b.relu(b.input(1, 4))]
    w = b.constant(np.eye(4, dtype=np.float32))
    for _ in range(steps):
        states.append(b.relu(b.plus(b.matmul(states[-1], w), states[-2])))
    return b.program(b.matmul(states[-1], b.constant(np.eye(4, 3, dtype=np.float32))))


PROGRAMS = {**LOOPS, "sums": sums(7)}
Change = Callable[[tirx.PrimFunc], Iterator[tirx.PrimFunc]]


@cache
def compiled(name: str) -> tuple[CompiledKernels, TensorIR]:
    made = compile_cuda(PROGRAMS[name], level="V3", arch="sm_90", cubin=False)
    return made, unpack(made.plan.tensor_ir)


def calls_of(func: tirx.PrimFunc, name: str = "") -> list[tvm.ir.Call]:
    """Calls of an external function, or those of stages."""
    found: list[tvm.ir.Call] = []

    def see(call: tvm.ir.Call) -> None:
        if operator_name(call) == name if name else isinstance(call.op, tvm.ir.GlobalVar):
            found.append(call)

    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, see))
    return found


def with_call(func: tirx.PrimFunc, old: tvm.ir.Call, new: object) -> tirx.PrimFunc:
    def change(call: tvm.ir.Call) -> object:
        return new if tvm_ffi.structural_equal(call, old) else call

    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, change)))


def with_arguments(func: tirx.PrimFunc, call: tvm.ir.Call, changed: dict[int, object]) -> tirx.PrimFunc:
    return with_call(func, call, tvm.ir.Call(call.op, [changed.get(i, a) for i, a in enumerate(call.args)]))


def swapped(func: tirx.PrimFunc) -> Iterator[tirx.PrimFunc]:
    """Two pointers of one type, each for the other."""
    for call in calls_of(func):
        for i, j in itertools.combinations(range(2, len(call.args)), 2):
            yield with_arguments(func, call, {i: call.args[j], j: call.args[i]})


def another(func: tirx.PrimFunc) -> Iterator[tirx.PrimFunc]:
    """Another tensor of the kernel."""
    for call in calls_of(func):
        for i, pointer in itertools.product(range(2, len(call.args)), func.params[:-1]):
            if not tvm_ffi.structural_equal(call.args[i], pointer):
                yield with_arguments(func, call, {i: pointer})


def moved(func: tirx.PrimFunc) -> Iterator[tirx.PrimFunc]:
    """The slot, or the step's part, beside the right one."""
    for call in calls_of(func, "souffle_at"):
        cast, stride = call.args[2].a, call.args[2].b
        for part in (cast + tirx.IntImm("int64", 1), cast - tirx.IntImm("int64", 1), tirx.IntImm("int64", 0)):
            yield with_call(func, call, tirx.call_extern(call.ty, "souffle_at", call.args[1], part * stride))


def chosen(func: tirx.PrimFunc) -> Iterator[tirx.PrimFunc]:
    """The other of two pointers, always or where it was not chosen: the first steps', the last one's."""
    for call in calls_of(func, "souffle_choose"):
        _, condition, one, other = call.args
        yield with_call(func, call, other)
        yield with_call(func, call, tirx.call_extern(call.ty, "souffle_choose", condition, other, one))


def wrong(plan: Plan, ir: TensorIR, name: str) -> bool:
    """Whether the CPU device gives other bits for the text of a changed kernel."""
    text = text_of_module(plan, 0, ir)
    networks = [
        Network(one, device="cpu") for one in (plan, replace(plan, modules=(replace(plan.modules[0], text=text),)))
    ]
    rng = np.random.default_rng(0)
    inputs = {k: rng.normal(0.0, 1.0, v.shape).astype(v.dtype) for k, v in inputs_for(PROGRAMS[name]).items()}
    wanted, found = (network(inputs) for network in networks)
    return any(not np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("name", "change", "least"),
    [
        ("every_step", swapped, 4),
        ("every_step", moved, 4),
        ("sums", chosen, 2),
        ("from_the_start", another, 4),
    ],
)
def test_another_definition_is_found(name: str, change: Change, least: int) -> None:
    """Those that were proven while only a tensor's own bytes counted: the program refutes each, and the bits differ."""
    made, ir = compiled(name)
    (merged,) = made.merged
    unseen = replace(made.plan, dataflow=None)
    assert made.plan.certificate.verdict == PROVEN
    misled = 0
    for func in change(merged.func):
        kernels = {merged.name: func}
        found = certify_plan(made.plan, kernels, ir.functions)
        assert found.verdict == REFUTED
        if certify_plan(unseen, kernels, ir.functions).verdict != PROVEN:
            continue
        assert {one.rule for one in found.counterexamples} <= {"wrong definition", "stale or undefined read"}
        if not misled:
            assert wrong(made.plan, replace(ir, kernels=kernels), name)
        misled += 1
    assert misled >= least


# by hand


def doubled(m: Memory) -> tirx.Stmt:
    at = m.tile * THREADS + m.tid
    return tirx.BufferStore(m.tensors[1], m.tensors[0][at] * tirx.const(2.0), [at])


def difference(m: Memory) -> tirx.Stmt:
    at = m.tile * THREADS + m.tid
    return tirx.BufferStore(m.tensors[2], m.tensors[0][at] - m.tensors[1][at], [at])


SIZE = 2 * THREADS


def use(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> StageUse:
    return StageUse((((name, 2, THREADS),),), inputs, outputs)


TENSORS = tuple((name, SIZE, 4) for name in ("x", "a", "b", "y"))
USES = (
    use("double", (0,), (1,)),
    use("double", (1,), (2,)),
    use("minus", (1, 2), (3,)),
)
TWICE = (USES[0], use("double", (0,), (2,)), USES[2])


@pytest.mark.parametrize(
    ("uses", "parameters", "shared", "verdict"),
    [
        (USES, ((0, 1), (1, 2), (1, 2, 3)), False, PROVEN),
        (USES, ((0, 1), (1, 2), (2, 1, 3)), False, REFUTED),
        (USES, ((0, 1), (1, 2), (1, 1, 3)), False, REFUTED),
        (USES, ((0, 2), (2, 1), (2, 1, 3)), False, PROVEN),
        (USES, ((0, 1), (0, 2), (1, 2, 3)), False, REFUTED),
        (USES, ((0, 1), (1, 2), (1, 2, 3)), True, REFUTED),
        # Of two that are the same it does not matter which is which.
        (TWICE, ((0, 2), (0, 1), (1, 2, 3)), False, PROVEN),
        (TWICE, ((0, 1), (0, 2), (1, 1, 3)), False, PROVEN),
        (TWICE, ((0, 1), (1, 2), (1, 2, 3)), False, REFUTED),
    ],
)
def test_places_do_not_matter_and_definitions_do(
    uses: tuple[StageUse, ...], parameters: tuple[tuple[int, ...], ...], shared: bool, verdict: str
) -> None:
    """A use is known by what it reads, so that tensors may lie anywhere, and nowhere else."""
    kinds = {"x": "input", "y": "output"}
    offsets = {"b": 0 if shared else 4 * SIZE}
    buffers = [tensor(n, SIZE, kinds.get(n, "workspace"), offsets.get(n, 0)) for n, *_ in TENSORS]
    names = ("double", "double", "minus")
    runs = [Run(n, 2, p, grid_before=i > 0) for i, (n, p) in enumerate(zip(names, parameters, strict=True))]
    functions = {"double": stage("double", (SIZE,) * 2, doubled), "minus": stage("minus", (SIZE,) * 3, difference)}
    plan = replace(plan_of(buffers, runs, 1024), dataflow=Dataflow(TENSORS, (("x", 0),), (), (("y", 3),), uses))
    found = certify_plan(plan, {"kernel": kernel(runs, 4)}, functions)
    assert found.verdict == verdict, str(found)


def added(m: Memory) -> tirx.Stmt:
    at = m.tile * THREADS + m.tid
    return tirx.BufferStore(m.tensors[1], m.tensors[1][at] + m.tensors[0][at], [at])


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ((("double", 0, 1), ("add", 0, 1), ("minus", 0, 1, 3)), PROVEN),
        # The two in turn for each tile of a slot.
        ((("double", 0, 1), ("add", 0, 1), ("minus", 0, 1, 3)), UNKNOWN),
        ((("double", 0, 1), ("minus", 0, 1, 3)), REFUTED),
        ((("double", 0, 1), ("minus", 0, 1, 3), ("add", 0, 1)), REFUTED),
        ((("double", 0, 1), ("add", 0, 1), ("add", 0, 1), ("minus", 0, 1, 3)), REFUTED),
        ((("double", 0, 1), ("double", 0, 2), ("add", 0, 2), ("minus", 0, 1, 3)), REFUTED),
        ((("double", 0, 1), ("add", 0, 1), ("minus", 0, 1, 3), ("double", 0, 1)), REFUTED),
    ],
)
def test_what_a_stage_leaves_halfway_is_no_definition(calls: tuple[tuple, ...], verdict: str) -> None:
    """A stage of two functions, of which the second goes on with what the first has left."""
    kinds = {"x": "input", "y": "output"}
    buffers = [tensor(n, SIZE, kinds.get(n, "workspace"), 4 * SIZE if n == "b" else 0) for n, *_ in TENSORS]
    runs = [Run(n, 2, tuple(p), grid_before=i > 0) for i, (n, *p) in enumerate(calls)]
    if verdict == UNKNOWN:
        runs[:2] = [replace(runs[0], places=2), replace(runs[1], joined=True)]
    uses = (StageUse(tuple(((n, 2, THREADS),) for n in ("double", "add")), (0,), (1,)), use("minus", (0, 1), (3,)))
    made = {"double": doubled, "add": added, "minus": difference}
    functions = {n: stage(n, (SIZE,) * (3 if n == "minus" else 2), body) for n, body in made.items()}
    plan = replace(plan_of(buffers, runs, 1024), dataflow=Dataflow(TENSORS, (("x", 0),), (), (("y", 3),), uses))
    found = certify_plan(plan, {"kernel": kernel(runs, 4)}, functions)
    assert found.verdict == verdict, str(found)


def turned(m: Memory) -> tirx.Stmt:
    """The other of two tiles."""
    value = m.tensors[0][(1 - m.tile) * THREADS + m.tid]
    return tirx.BufferStore(m.tensors[1], value, [m.tile * THREADS + m.tid])


def in_turn(names: tuple[str, ...], joined: bool, uses: tuple[StageUse, ...]) -> Certificate:
    """The second and the third stage in turn for the two tiles of a slot, or each by itself; they share a tensor."""
    tensors = tuple((name, SIZE, 4) for name in ("x", "a", "b", "c", "y"))
    kinds = {"x": "input", "y": "output"}
    buffers = [tensor(n, SIZE, kinds.get(n, "workspace"), 4 * SIZE * (n == "b")) for n in ("x", "a", "b", "y")]
    runs = [
        Run(names[0], 2, (0, 1)),
        Run(names[1], 2, (1, 2), grid_before=True, places=2),
        Run(names[2], 2, (2, 1), grid_before=not joined, joined=joined),
        Run(names[3], 2, (2, 1, 3), grid_before=True),
    ]
    made = {"double": doubled, "turn": turned, "add": added, "minus": difference}
    functions = {n: stage(n, (SIZE,) * (3 if n == "minus" else 2), body) for n, body in made.items()}
    plan = replace(plan_of(buffers, runs, 1024), dataflow=Dataflow(tensors, (("x", 0),), (), (("y", 4),), uses))
    return certify_plan(plan, {"kernel": kernel(runs, 4)}, functions)


@pytest.mark.parametrize(
    ("second", "joined", "verdict"),
    [("double", True, PROVEN), ("double", False, PROVEN), ("turn", False, PROVEN), ("turn", True, REFUTED)],
)
def test_stages_in_turn_for_the_tiles_of_a_slot(second: str, joined: bool, verdict: str) -> None:
    """Where the third writes over its tile what the second reads for the next one, their order alone is wrong."""
    uses = (use("double", (0,), (1,)), use(second, (1,), (2,)), use("double", (2,), (3,)), use("minus", (2, 3), (4,)))
    found = in_turn(("double", second, "double", "minus"), joined, uses)
    assert found.verdict == verdict, str(found)
    assert {one.rule for one in found.counterexamples} == ({"stale or undefined read"} if verdict == REFUTED else set())


@pytest.mark.parametrize(("tiles", "threads"), [(2, THREADS), (1, THREADS), (2, THREADS // 2), (2, 1)])
def test_all_threads_of_all_tiles_are_called(tiles: int, threads: int) -> None:
    """Whoever is left out may have had a part of a total; that all is written does not say that none had."""

    def first(m: Memory) -> tirx.Stmt:
        return tirx.IfThenElse(m.tid < 1, tirx.BufferStore(m.tensors[1], m.tensors[0][0], [0]), None)

    runs = [Run("double", tiles, (0, 1), threads=threads)]
    buffers = [tensor("x", SIZE, "input"), tensor("y", 1, "output")]
    tensors = (("x", SIZE, 4), ("y", 1, 4))
    dataflow = Dataflow(tensors, (("x", 0),), (), (("y", 1),), (use("double", (0,), (1,)),))
    plan = replace(plan_of(buffers, runs, 1024), dataflow=dataflow)
    found = certify_plan(plan, {"kernel": kernel(runs, 2)}, {"double": stage("double", (SIZE, 1), first)})
    wrongly = {one.rule for one in found.counterexamples if one.rule == "wrong definition"}
    assert bool(wrongly) == ((tiles, threads) != (2, THREADS)), str(found)
