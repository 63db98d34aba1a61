"""Mutants of small networks: unsafe ones are refuted and seen, equivalent ones stay proven, all are found again."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import islice

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx

from souffle.codegen.assemble import CompiledKernels
from souffle.codegen.plan import Plan
from souffle.mutation.barriers import barrier_changes, barrier_kind
from souffle.mutation.expression_changes import predicate_changes
from souffle.mutation.mutants import Mutant, Mutation, Mutations
from souffle.mutation.sandbox import Job, Sandbox
from souffle.mutation.statement_paths import sites
from souffle.mutation.trial import WRONG_VALUE, Trial, Trials, described, inputs_of, misses, tally
from souffle.mutation.workspace import shared_changes
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.verify import PROVEN, REFUTED
from tests.testlib import Builder, inputs_for
from tests.thorough import sized
from tests.thorough import some as cases
from tests.verify.hand_made import THREADS, Memory, Run, barrier, certificate, extern, sequence, stage, tensor

ARCH = "sm_90"


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)


def layers() -> TEProgram:
    """Matrix products, each of which reads what all blocks of the one before have written."""
    b = Builder()
    x = b.input(64, 96)
    for width in (128, 96, 64):
        x = b.matmul(x, b.constant(weights(x.shape[1], width)))
    return b.program(x)


@cache
def network(level: str = "V3") -> Mutations:
    compiled = compile_cuda(layers(), level=level, arch=ARCH, cubin=False)
    return Mutations(compiled)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as server:
        yield server


@pytest.fixture(scope="module")
def trials(sandbox: Sandbox) -> Trials:
    mutations = network()
    return Trials(mutations, inputs_of(mutations.compiled.plan, inputs_for(layers())), sandbox)


def some(kind: str, action: str = "", stage: bool | None = None, text: str = "") -> list[Mutation]:
    """Mutations of a kind; in a stage function, in the kernel, or either."""
    return [
        m
        for m in network()
        if m.kind == kind
        and m.action.startswith(action)
        and (stage is None or (m.stage is not None) == stage)
        and text in m.text
    ]


def test_the_network_that_is_not_changed_has_its_own_text() -> None:
    mutations = network()
    plan = mutations.compiled.plan
    one = next(iter(mutations))
    mutant = mutations.mutant(one)
    same = Mutant(one, plan, mutations.kernels, mutations.functions, mutant.merged, mutant.changed)
    assert [m.text for m in same.emitted().modules] == [m.text for m in plan.modules]
    assert [m.text for m in mutant.emitted().modules] != [m.text for m in plan.modules]
    assert same.certificate().verdict == PROVEN


def test_enumeration_is_the_same_each_time() -> None:
    mutations = network()
    every = list(mutations)
    assert len(every) == len(mutations) == len({m.identity for m in every})
    again = Mutations(compile_cuda(layers(), level="V3", arch=ARCH, cubin=False))
    assert list(again) == every
    assert again.sample(30, 3) == mutations.sample(30, 3) != mutations.sample(30, 4)
    assert again.sample(10**6, 0) and set(again.sample(10**6, 0)) == set(every)


def test_a_sample_spreads_over_kinds_actions_and_stages() -> None:
    mutations = network()
    kinds = {m.kind for m in mutations}
    assert {"grid barrier", "block barrier", "copy wait", "predicate", "index", "alias"} <= kinds
    drawn = mutations.sample(60)
    for kind in kinds:
        own = [m for m in drawn if m.kind == kind]
        assert len(own) >= min(len(drawn) // len(kinds), len(some(kind)))
        assert len({m.action for m in own}) == min(len(own), len({m.action for m in some(kind)}))
    assert len({m.stage for m in drawn if m.stage}) == len(mutations.functions)
    assert {m.kind for m in mutations.sample(5, kinds=("alias",))} == {"alias"}


@pytest.mark.parametrize("action", ["delete", "swap"])
def test_a_grid_barrier_that_is_needed(trials: Trials, action: str) -> None:
    for mutation in some("grid barrier", action)[-1:]:
        found = trials.run(mutation)
        assert (found.verdict, found.misses_grid_barrier, found.found) == (REFUTED, True, True), described(found)
        assert "race between blocks" in found.rules


def test_a_grid_barrier_moves(trials: Trials) -> None:
    """Over the stage that needs it: unsafe. Into the loop over tiles, all of whose blocks turn equally often: safe."""
    moved = some("grid barrier", "move")
    assert {m.action for m in moved} >= {"move earlier", "move later", "move into the loop after"}
    for mutation in moved[:4]:
        found = trials.run(mutation)
        safe = mutation.action.startswith("move into the loop")
        assert found.verdict == (PROVEN if safe else REFUTED), described(found)
        assert found.found != safe, described(found)


def test_barriers_inside_of_stages(trials: Trials) -> None:
    for mutation in [some("block barrier", "delete", True)[0], some("copy wait", "delete", True, "wait<")[0]]:
        found = trials.run(mutation)
        assert found.verdict == REFUTED and "race in a block" in found.rules, described(found)
    swapped = trials.run(some("block barrier", "swap", True)[0])
    assert swapped.verdict == REFUTED and "divergent barrier" in swapped.rules, described(swapped)
    assert swapped.outcome == "barrier", described(swapped)


def test_predicates_of_the_kernel_leave_tiles_out(trials: Trials) -> None:
    for action in ("branch", "last turn"):
        found = trials.run(some("predicate", action, False)[0])
        assert found.verdict == REFUTED and found.changed, described(found)


def test_indices(trials: Trials) -> None:
    """A store that is one element off, to global memory; a load beyond the end."""
    for mutation in (some("index", "store +", True)[-1], some("index", "pointer -", True)[0]):
        found = trials.run(mutation)
        assert found.verdict == REFUTED and found.changed, described(found)


def test_tensors_that_share_memory(trials: Trials) -> None:
    meeting = some("alias", "lives meet")
    assert meeting
    for mutation in meeting[:1]:
        found = trials.run(mutation)
        assert found.verdict == REFUTED and found.changed, described(found)


@pytest.mark.thorough("some barriers are above")
def test_barriers_around_tiles_that_one_block_takes_together(sandbox: Sandbox) -> None:
    """A barrier outside of the loop over the tiles of a slot does not part them."""
    b = Builder()
    x = b.scaled(b.input(128, 16), 2.0)
    y = b.matmul(x, b.constant(weights(16, 64)))
    program = b.program(b.matmul(y, b.constant(weights(64, 16))))
    compiled = compile_cuda(program, level="V3", arch=ARCH, cubin=False)
    (merged,) = compiled.merged
    assert any(call.assignment and call.assignment.per_slot > 1 for call in merged.shape.stage_calls)
    mutations = Mutations(compiled)
    attempts = Trials(mutations, inputs_of(compiled.plan, inputs_for(program)), sandbox)
    inside = [m for m in mutations if m.stage is None and m.kind in ("block barrier", "grid barrier")]
    found = [attempts.run(mutation) for mutation in inside]
    assert not misses(found), [described(trial) for trial in misses(found)]
    assert any(trial.changed and "out of its loop" in trial.mutation.what for trial in found)


def test_a_stage_that_computes_something_else(trials: Trials) -> None:
    """Within its memory and its barriers nothing is wrong; its values are not those of its definition."""
    mutations = trials.mutations
    assert mutations.definitions.keys() == mutations.functions.keys()
    shorter = some("predicate", "last turn", True, "totals")
    harmless = [m for m in shorter if mutations.mutant(m).certificate().verdict == PROVEN]
    assert harmless
    found = trials.run(harmless[0])
    assert (found.verdict, found.rules, found.changed) == (REFUTED, (WRONG_VALUE,), True), described(found)


def test_what_is_counted() -> None:
    def one(kind: str, verdict: str, outcome: str, rules: tuple[str, ...] = (), checked: str = "") -> Trial:
        mutation = Mutation(kind, "delete", "k", None, 0, "", "")
        return Trial(mutation, verdict, rules, "", outcome, "", checked, "", 0.0)

    races = ("race between blocks",)
    done = [
        one("grid barrier", "REFUTED", "other bits", races),
        one("grid barrier", "REFUTED", "same", races, "finding"),
        one("grid barrier", "REFUTED", "same", races, "same"),
        one("index", "PROVEN", "other bits"),
        one("index", "UNKNOWN", "crash"),
        one("index", "PROVEN", "same"),
        one("index", "PROVEN", "stillborn"),
        one("index", "REFUTED", "other bits", ("wrong value",)),
    ]
    assert dict(tally(done)) == {
        "grid barrier": (3, 1, 3, 0, 0, 0, 3, 2),
        "index": (4, 3, 1, 1, 1, 2, 0, 0),
        "all": (7, 4, 4, 1, 1, 2, 3, 2),
    }
    assert misses(done) == (done[2], done[3], done[4])
    assert not misses([one("grid barrier", "REFUTED", "", races)])  # not run


# Barriers, on functions written by hand


def moved(body) -> dict[str, list[str]]:
    """The statements of each mutant of a stage function, as one letter each, by what was done to its last barrier."""
    func = stage("one", (256, 256), body)
    found: dict[str, list[str]] = {}
    for change in barrier_changes(func):
        found.setdefault(change.action, []).append(skeleton(change.make()))
    return found


def skeleton(func: tirx.PrimFunc) -> str:
    """``s`` a store, ``w`` a wait, ``g`` a grid barrier, ``c`` a call, brackets for loops and branches."""

    def of(node: tirx.Stmt) -> str:
        if isinstance(node, tirx.SeqStmt):
            return "".join(of(part) for part in node.seq)
        if isinstance(node, tirx.For):
            return f"[{of(node.body)}]"
        if isinstance(node, tirx.IfThenElse):
            return f"({of(node.then_case)})"
        if isinstance(node, tirx.BufferStore):
            return "s"
        kind = barrier_kind(node)
        if kind is not None:
            return {"grid barrier": "g", "copy wait": "a"}.get(kind, "w")
        return "c" if isinstance(node, tirx.Evaluate) and isinstance(node.value, tvm.ir.Call) else ""

    return of(func.body)


def test_where_a_barrier_may_go() -> None:
    def body(m: Memory) -> tirx.Stmt:
        put = tirx.BufferStore(m.shared, m.tensors[0][m.tid], [m.tid])
        take = tirx.BufferStore(m.tensors[1], m.shared[m.tid], [m.tid])
        turn = tirx.Var("turn", "int32")
        loop = tirx.For(turn, 0, 4, tirx.ForKind.SERIAL, sequence(put, put))
        branch = tirx.IfThenElse(m.tid < 8, take, None)
        bound = tirx.Bind(tirx.Var("b", "int32"), m.tid + 1)
        return sequence(loop, bound, barrier(), branch)

    assert skeleton(stage("one", (256, 256), body)) == "[ss]w(s)"
    assert moved(body) == {
        "delete": ["[ss](s)"],
        "swap": ["[ss]g(s)"],
        "move earlier": ["w[ss](s)"],
        "move into the loop before": ["[ssw](s)"],
        "move later": ["[ss](s)w"],
        "move into the branch after": ["[ss](ws)"],
    }


def test_a_barrier_leaves_what_it_stands_in() -> None:
    def body(m: Memory) -> tirx.Stmt:
        take = tirx.BufferStore(m.tensors[1], m.shared[m.tid], [m.tid])
        turn = tirx.Var("turn", "int32")
        loop = tirx.For(turn, 0, 4, tirx.ForKind.SERIAL, sequence(take, barrier()))
        return sequence(take, loop, take)

    found = moved(body)
    assert found["move out of its loop, later"] == ["s[s]ws"]
    assert found["move earlier"] == ["s[ws]s"]
    assert "move later" not in found


def test_waits_for_copies() -> None:
    def body(m: Memory) -> tirx.Stmt:
        into, source = tirx.address_of(m.shared[m.tid]), tirx.address_of(m.tensors[0][m.tid])
        copy = extern("souffle_copy_async<4>", into, source)
        return sequence(copy, extern("souffle_copy_commit"), extern("souffle_copy_wait<0>"))

    found = moved(body)
    assert found["delete"] == ["ca", "ca"] and found["loosen"] == ["caa"] and "swap" not in found
    loosened = [c.make() for c in barrier_changes(stage("one", (256, 256), body)) if c.action == "loosen"]
    assert "souffle_copy_wait<1>" in str(loosened[0])


def test_arrays_in_shared_memory_take_the_place_of_each_other() -> None:
    def two(m: Memory) -> tirx.Stmt:
        other = tirx.decl_buffer((THREADS,), "float32", name="other", scope="shared")
        declared = tirx.DeclBuffer(other, data=tirx.address_of(pool_of(m)[4 * THREADS]))
        put = [tirx.BufferStore(b, m.tensors[0][at(m)], [m.tid]) for b in (m.shared, other)]
        value = m.shared[THREADS - 1 - m.tid] + other[m.tid]
        return sequence(declared, put[0], barrier(), put[1], tirx.BufferStore(m.tensors[1], value, [at(m)]))

    def at(m: Memory) -> object:
        return m.tile * THREADS + m.tid

    pools: list[tirx.Buffer] = []

    def pool_of(m: Memory) -> tirx.Buffer:
        pools.append(tirx.decl_buffer((1024,), "uint8", name="pool", scope="shared.dyn"))
        return pools[-1]

    func = stage("one", (256, 256), two)
    real = next(s.statement.buffer for s in sites(func) if isinstance(s.statement, tirx.AllocBuffer))
    func = func.with_body(tvm_ffi.structural_map(func.body, (tirx.DeclBuffer, lambda d: _into(d, pools[0], real))))
    buffers = (tensor("x", 256, "input"), tensor("y", 256, "output"))
    runs = [Run("one", 4, (0, 1))]
    assert certificate(runs, [func], buffers).verdict == PROVEN
    changes = list(shared_changes(func))
    # The larger array has no room behind the smaller one's place.
    assert [c.what for c in changes] == [f"the shared array other begins at byte 0, not {4 * THREADS}"]
    found = certificate(runs, [changes[0].make()], buffers)
    assert {c.rule for c in found.counterexamples} == {"race in a block"}


def _into(declared: tirx.DeclBuffer, pool: tirx.Buffer, real: tirx.Buffer) -> tirx.DeclBuffer:
    """A declaration in the function's own pool."""
    if not isinstance(declared.data, tvm.ir.Call) or not declared.data.args[0].source.same_as(pool):
        return declared
    return tirx.DeclBuffer(declared.buffer, data=tirx.address_of(real[declared.data.args[0].indices[0]]))


def test_what_holds_for_one_value_never_holds() -> None:
    def body(m: Memory) -> tirx.Stmt:
        put = tirx.BufferStore(m.tensors[1], m.tensors[0][m.tid], [m.tid])
        return sequence(tirx.IfThenElse(m.tid == 3, put, None), tirx.IfThenElse(m.tid >= 5, put, None))

    changes = list(predicate_changes(stage("one", (256, 256), body)))
    assert [c.what for c in changes] == ["tid == 3 never holds", "tid >= 5 holds for one value less"]
    assert [c.action for c in changes] == ["branch", "branch"]
    texts = [str(c.make()) for c in changes]
    assert "tid == 3" not in texts[0] and "if 6 <= tid" in texts[1].replace("tid >= 6", "6 <= tid")


def test_what_a_mutation_leaves_alone() -> None:
    """Each mutant differs from the network in one function, and there in few statements."""
    mutations = network()
    for mutation in mutations.sample(40, 1):
        mutant = mutations.mutant(mutation)
        if mutant.changed is None:
            changed = [a for a, b in zip(mutant.plan.buffers, mutations.compiled.plan.buffers) if a != b]
            assert len(changed) == 1 and changed[0].kind == "workspace"
            continue
        others = {**mutations.kernels, **mutations.functions}
        new = {**mutant.kernels, **mutant.functions}
        assert [n for n in others if new[n] is not others[n]] == [mutant.changed]
        before, after = others[mutant.changed], new[mutant.changed]
        assert not tvm_ffi.structural_equal(before, after), described_text(mutation)
        assert abs(len(list(sites(before))) - len(list(sites(after)))) <= 2


def described_text(mutation: Mutation) -> str:
    return f"{mutation.identity}: {mutation.what}: {mutation.text}"


# The process that mutants run in


def test_a_mutant_of_which_only_a_function_is_compiled_does_the_same(trials: Trials, sandbox: Sandbox) -> None:
    kinds = set()
    wrong, racing = some("predicate", "branch", True)[0], some("block barrier", "delete", True)[0]
    ways = cases([(wrong, 4, False), (racing, 1, True)], [(wrong, 1, True), (racing, 4, False)])
    for mutation, runs, checked in ways:
        job = Job(trials.mutations.mutant(mutation).emitted(), trials.inputs, trials.expected, checked, runs)
        divided = dataclasses.replace(job, base=trials.mutations.compiled.plan)
        alone, beside = sandbox.run(job), sandbox.run(divided)
        assert alone.kind == beside.kind, (described_text(mutation), alone.detail, beside.detail)
        kinds.add(alone.kind)
    assert len(kinds) > 1


def test_a_mutant_that_does_not_end_or_crashes_harms_nobody(trials: Trials) -> None:
    plan = trials.mutations.compiled.plan

    def with_line(line: str) -> Plan:
        module = plan.modules[0]
        head, brace, rest = module.text.rpartition(") {\n")
        text = f"{head}{brace}  {line}\n{rest}"
        return type(plan)(**{**vars(plan), "modules": (type(module)(text, b""), *plan.modules[1:])})

    outcomes = {}
    with Sandbox(timeout_seconds=6) as own:
        endless = with_line("volatile int forever = 1; while (forever) {}")
        outcomes["hang"] = own.run(Job(endless, trials.inputs, trials.expected))
    with Sandbox(timeout_seconds=120) as own:
        for name, line in (
            ("null", "*(volatile int*)nullptr = 1;"),
            ("syntax", "this is no C++"),
            ("exit", 'asm volatile("mov $60, %%eax\\n mov $3, %%edi\\n syscall" ::: "memory");'),
        ):
            outcomes[name] = own.run(Job(with_line(line), trials.inputs, trials.expected))
        same = own.run(Job(plan, trials.inputs, trials.expected))
    assert outcomes["null"].kind in ("error", "crash") and outcomes["null"].changed
    assert outcomes["hang"].kind in ("hang", "error") and outcomes["hang"].changed
    assert outcomes["syntax"].kind == "stillborn" and not outcomes["syntax"].changed
    assert outcomes["exit"].kind in ("crash", "stillborn")
    assert same.kind == "same" and not same.changed


def test_the_network_itself_gives_the_same_bits_in_all_orders(trials: Trials, sandbox: Sandbox) -> None:
    compiled: CompiledKernels = trials.mutations.compiled
    assert len(trials.expected) == 1 and np.isfinite(trials.expected[0]).all()
    again = sandbox.run(Job(compiled.plan, trials.inputs, trials.expected, checked=True, runs=1))
    assert again.kind == "same", again.detail
    other = tuple(e + 1 for e in trials.expected)
    assert sandbox.run(Job(compiled.plan, trials.inputs, other)).kind == "other bits"


def test_a_mutant_that_reads_outside_of_a_tensor_finds_the_same_wherever_it_runs(trials: Trials) -> None:
    """All ones, that is NaN, for some elements; and so what is said of it is the same, too."""
    plan = trials.mutations.compiled.plan
    mutants = map(trials.mutations.mutant, some("index", "load", stage=True))
    broken = ((one, {c.rule for c in one.certificate().counterexamples}) for one in mutants)
    count = sized(1, 3)
    outside = [one.emitted() for one, rules in islice((o for o in broken if "out of bounds" in o[1]), count)]
    assert len(outside) == count
    found = []
    for _ in range(2):
        with Sandbox() as own:
            jobs = [Job(one, trials.inputs, trials.expected, base=plan, runs=2) for one in outside]
            found.append([(outcome.kind, outcome.detail) for outcome in map(own.run, jobs)])
    assert found[0] == found[1] and any(": nan for " in detail for _, detail in found[0])
