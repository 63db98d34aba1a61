"""Which TEs one schedule computes together: joins, refusals and their reasons, by a scheduler made up for the test."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from tvm import te, tirx

import souffle
from souffle.analysis import analyze
from souffle.decision import Decision
from souffle.errors import ModelError
from souffle.program import TEProgram, fuse
from souffle.schedule.drafts import Answer
from souffle.schedule.form_stages import JoinPolicy, StageError, form_stages
from souffle.schedule.stage import Stage, draft_stage
from tests.testlib import Builder, random_program

FUSED = JoinPolicy(across_operators=False)
ACROSS = JoinPolicy(across_operators=True)
ON_CHIP = JoinPolicy(across_operators=True, on_chip=frozenset({"reuse"}))


class Played:
    """A scheduler that answers, and knows times, as a test says."""

    error = 1.0

    def __init__(self, answer: Callable[[tirx.PrimFunc], Answer], seconds: Callable[[Answer], float | None]) -> None:
        self.answer = answer
        self.seconds = seconds

    def __call__(self, func: tirx.PrimFunc) -> Answer:
        return self.answer(func)


def willing(func: tirx.PrimFunc) -> Answer:
    return Answer(object(), "any", 0, True, 8, "")


def answer(**changes: object) -> Callable[[tirx.PrimFunc], Answer]:
    """A scheduler that answers so where a function has several blocks."""
    standard = {"schedule": object(), "rule": "good", "rank": 1, "rowwise": True, "tiles": 8, "reason": ""}

    def scheduler(func: tirx.PrimFunc) -> Answer:
        several = len([n for n in str(func).split("\n") if 'T.sblock("t' in n]) > 1
        return Answer(**(standard | (changes if several else {})))

    return scheduler


def formed(
    program: TEProgram,
    answers: Callable[[tirx.PrimFunc], Answer],
    policy: JoinPolicy,
    seconds: Callable[[Answer], float | None] = lambda answer: None,
) -> tuple[tuple[Stage, ...], tuple[Decision, ...]]:
    return form_stages(program, analyze(program.expanded()), Played(answers, seconds), policy)


def form(program: TEProgram, policy: JoinPolicy, scheduler=willing) -> tuple[list[list[str]], tuple[Decision, ...]]:
    """The names of each stage's TEs, and the decisions about joins."""
    stages, decisions = formed(program, scheduler, policy)
    chosen = [d.subject for d in decisions if d.stage == "stage"]
    assert chosen == [stage.name for stage in stages]
    return [[te_.name for te_ in stage.tes] for stage in stages], tuple(d for d in decisions if d.stage != "stage")


def weights(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def epilogue(group: str = "") -> TEProgram:
    b = Builder().grouped(group)
    x = b.matmul(b.input(4, 6), b.constant(weights(6, 5)))
    return b.program(b.relu(x))


def fused_chain() -> TEProgram:
    """A prologue, a reduction and two statements behind it, as one TE."""
    b = Builder()
    x = b.matmul(b.scaled(b.input(4, 6), 2.0), b.constant(weights(6, 5)))
    plain = b.program(b.tanh(b.relu(x)))
    return plain.with_tes([fuse(plain.tes, plain.outputs)])


def form_fused(program: TEProgram, scheduler) -> list[list[str]]:
    stages, _ = formed(program, scheduler, ACROSS)
    return [[te_.name for te_ in stage.tes] for stage in stages]


def test_the_statements_of_a_fused_te_are_tried_at_once() -> None:
    asked = []

    def counting(func: tirx.PrimFunc) -> Answer:
        asked.append(str(func).count('T.sblock("t'))
        return willing(func)

    assert form_fused(fused_chain(), counting) == [["scale0", "matmul1", "relu2", "tanh3"]]
    # The first alone, all of them, and the reduction alone to compare with.
    assert sorted(asked) == [1, 1, 4]


def test_statements_that_no_schedule_computes_at_once_are_joined_one_by_one() -> None:
    def small(func: tirx.PrimFunc) -> Answer:
        blocks = str(func).count('T.sblock("t')
        return willing(func) if blocks < 3 else Answer(None, "none", 9, False, 0, "too many")

    assert form_fused(fused_chain(), small) == [["scale0", "matmul1"], ["relu2", "tanh3"]]


def test_a_reduction_behind_its_prologue_is_held_to_its_own_schedule() -> None:
    def scheduler(func: tirx.PrimFunc) -> Answer:
        text = str(func)
        several, reduces = text.count('T.sblock("t') > 1, "T.init()" in text
        rank = 1 if several else (0 if reduces else 2)
        return Answer(object(), f"rule{rank}", rank, True, 8, "")

    assert form_fused(fused_chain(), scheduler)[0] == ["scale0"]


def test_an_element_wise_te_joins_the_reduction_before_it() -> None:
    names, (decision,) = form(epilogue(), ACROSS)
    assert names == [["matmul0", "relu1"]]
    assert decision == Decision("schedule", "relu1 into the stage of matmul0", True, "one schedule (any) computes both")


def test_below_v2_only_members_of_a_fusion_group_join() -> None:
    names, (decision,) = form(epilogue(), FUSED)
    assert names == [["matmul0"], ["relu1"]]
    assert decision.reason == "TVM's operator fusion keeps them apart"
    assert form(epilogue("fused"), FUSED)[0] == [["matmul0", "relu1"]]


def two_sums(*shape: int, group: str = "") -> TEProgram:
    b = Builder().grouped(group)
    return b.program(b.reduce(b.reduce(b.input(*shape), 2), 1))


def test_dependent_reductions_of_operators_meet_at_a_grid_sync_below_v4() -> None:
    names, (decision,) = form(two_sums(4, 6, 5), ACROSS)
    assert len(names) == 2 and "meet at a grid sync" in decision.reason


def test_at_v4_they_share_tiles_and_what_passes_between_stays_on_chip() -> None:
    names, (_, decision) = form(two_sums(4, 6, 5), ON_CHIP)
    assert names == [["sum0", "sum1"]]
    assert decision == Decision("reuse", "sum1 on the tiles of sum0", True, "what passes between them stays on chip")


@pytest.mark.parametrize("together", [1.0, 9.0, 11.0])
def test_stages_are_joined_on_chip_where_that_takes_no_longer(together: float) -> None:
    prices = iter((together * 1e-6, 4e-6, 6e-6))
    stages, decisions = formed(two_sums(4, 6, 5), answer(), ON_CHIP, lambda answer: next(prices))
    decision = next(d for d in decisions if d.stage == "reuse")
    assert decision.accepted == (len(stages) == 1) == (together <= 10.0)
    if together > 10.0:
        assert decision.reason == "together they would take 11.0 µs, apart 10.0 µs"


@pytest.mark.parametrize(("group", "policy"), [("", ON_CHIP), ("softmax", FUSED)])
def test_dependent_reductions_need_matching_tiles(group: str, policy: JoinPolicy) -> None:
    names, decisions = form(two_sums(4, 6, 5, group=group), policy, answer(rowwise=False, reason="one block reads all"))
    assert len(names) == 2
    assert decisions[-1].reason == "their tiles do not match: one block reads all"


def test_a_block_that_would_work_longer_than_a_barrier_takes_keeps_them_apart() -> None:
    names, (_, decision) = form(two_sums(64, 64, 64), ON_CHIP, answer(tiles=1))
    assert len(names) == 2 and "266240 elements alone" in decision.reason
    assert len(form(two_sums(64, 64, 64, group="softmax"), FUSED, answer(tiles=1))[0]) == 1


def test_a_compute_intensive_reduction_is_tiled_on_its_own() -> None:
    b = Builder()
    x = b.matmul(b.input(32, 64), b.constant(weights(64, 48)))
    program = b.program(b.matmul(x, b.constant(weights(48, 32))))
    names, (_, decision) = form(program, ON_CHIP)
    assert len(names) == 2 and "tiled on its own" in decision.reason


def test_a_worse_joint_schedule_is_refused_with_both_rules() -> None:
    names, (decision,) = form(epilogue(), ACROSS, answer(rank=3, rule="fallback", reason="rowwise: no"))
    assert len(names) == 2
    assert decision.reason == "the joint schedule would be worse (fallback instead of good): rowwise: no"


def test_a_draft_without_a_schedule_is_refused_with_the_scheduler_s_reason() -> None:
    names, (decision,) = form(epilogue(), ACROSS, answer(schedule=None, reason="t1 needs all of t0"))
    assert len(names) == 2 and decision.reason == "t1 needs all of t0"


def test_a_prologue_joins_the_reduction_that_reads_it() -> None:
    b = Builder()
    program = b.program(b.reduce(b.plus(b.input(4, 6), b.inputs[0]), 1))
    assert form(program, ACROSS)[0] == [["plus0", "sum1"]]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda b, x: (b.reduce(x, 1), b.reduce(x, 0)), "other TEs read the stage too"),
        (lambda b, x: (x, b.reduce(x, 1)), "the stage holds an output of the network"),
    ],
)
def test_a_prologue_that_others_need_stays(make, says: str) -> None:
    b = Builder()
    x = b.scaled(b.input(4, 6), 2.0)
    _, decisions = form(b.program(*make(b, x)), ACROSS)
    assert says in decisions[0].reason


def test_an_expensive_prologue_stays() -> None:
    b = Builder()
    _, (decision,) = form(b.program(b.reduce(b.tanh(b.input(4, 6)), 1)), ACROSS)
    assert decision.reason == "the reduction would repeat an expensive expression"


def test_elements_that_are_not_the_stage_s_would_repeat_its_reduction() -> None:
    b = Builder()
    _, (decision,) = form(b.program(b.broadcast(b.reduce(b.input(4, 6), 1), 3)), ACROSS)
    assert "would repeat the reduction" in decision.reason
    b = Builder()
    _, (decision,) = form(b.program(b.broadcast(b.tanh(b.input(4, 6)), 3)), ACROSS)
    assert "would repeat an expensive expression" in decision.reason


@pytest.mark.parametrize(("copies", "together", "joined"), [(512, 9.0, False), (512, 7.0, True), (511, 9.0, True)])
def test_few_tiles_of_a_reduction_take_no_long_te_that_takes_less_alone(
    copies: int, together: float, joined: bool
) -> None:
    b = Builder().grouped("scatter")
    program = b.program(b.broadcast(b.reduce(b.input(64, 6), 1), copies))
    stages, (decision, *_) = formed(
        program, answer(tiles=2), FUSED, lambda found: 1e-6 * (together if found.tiles == 2 else 4.0)
    )
    assert decision.accepted == (len(stages) == 1) == joined
    if not joined:
        assert decision.reason == "2 tiles take 9.0 µs for both, apart they take 8.0"


def test_a_stage_that_another_one_reads_already_is_not_joined() -> None:
    b = Builder()
    x = b.reduce(b.input(4, 6, 5), 2)
    y = b.reduce(b.transpose(x, 1, 0), 0)
    program = b.program(b.plus(b.relu(x), x), y)
    names, _ = form(program, ACROSS)
    order = [name for stage in names for name in stage]
    assert sorted(order) == sorted(te_.name for te_ in program.tes)


def test_an_operator_that_is_no_te_stands_alone() -> None:
    b = Builder()
    x = b.relu(b.input(4, 6))
    program = b.program(b.scaled(b.extern_sort(x), 2.0))
    assert form(program, ON_CHIP)[0] == [["relu0"], ["sort1"], ["scale2"]]


def test_the_rule_of_each_stage_is_a_decision() -> None:
    program = epilogue()
    _, decisions = formed(program, answer(reason="rowwise: no rows"), ACROSS)
    assert decisions[-1] == Decision("stage", "relu1", True, "rule good, 8 tiles; rowwise: no rows")


def test_a_te_without_any_schedule_is_an_error_that_names_it() -> None:
    program = epilogue()
    nothing = Answer(None, "none", 9, False, 0, "fallback: no loops")
    with pytest.raises(StageError, match=r"TE matmul0 \(Matmul matmul0\), shape \(4, 5\), .*fallback: no loops"):
        formed(program, lambda func: nothing, ACROSS)


def test_the_scheduler_is_asked_once_for_each_distinct_function() -> None:
    b = Builder()
    x = b.input(4, 6)
    for _ in range(5):
        x = b.matmul(x, b.constant(weights(6, 6)))
    asked = []

    def counting(func: tirx.PrimFunc) -> Answer:
        asked.append(func)
        return willing(func)

    names, _ = form(b.program(x), ACROSS, counting)
    assert len(names) == 5 and len(asked) == 1


def test_equal_stages_of_different_layers_have_one_digest() -> None:
    b = Builder()
    x = b.input(4, 6)
    w = [b.constant(weights(6, 6)) for _ in range(2)]
    x = b.matmul(b.matmul(x, w[0]), w[1])
    program = b.program(x)
    first, second = (draft_stage([te_], program) for te_ in program.tes)
    assert first.digest == second.digest and first.name == "matmul0" and second.name == "matmul1"
    assert first.outputs == (program.tes[0].output,) and first.inputs == program.tes[0].inputs


def test_tensors_inside_a_stage_are_no_outputs() -> None:
    program = epilogue()
    draft = draft_stage(program.tes, program)
    assert draft.outputs == program.outputs and len(draft.inputs) == 2
    assert len(draft.func.params) == 3


def _defined_before_use(program: TEProgram, stages: tuple[Stage, ...]) -> None:
    known = {*program.inputs, *program.constants}
    for stage in stages:
        assert set(stage.inputs) <= known, f"{stage.name} is too early"
        known.update(stage.outputs)
    assert set(program.outputs) <= known
    assert sorted(t.name for s in stages for t in s.tes) == sorted(t.name for t in program.tes)


@pytest.mark.parametrize("policy", [FUSED, ACROSS, ON_CHIP], ids=["fused", "across", "on chip"])
@pytest.mark.parametrize("seed", range(6))
def test_stages_stay_in_topological_order(seed: int, policy: JoinPolicy) -> None:
    program = random_program(random.Random(seed).choice, 14, seed)
    refusing = random.Random(seed)

    def moody(func: tirx.PrimFunc) -> Answer:
        several = len([n for n in str(func).split("\n") if 'T.sblock("t' in n]) > 1
        return Answer(None, "none", 9, False, 0, "no") if several and refusing.random() < 0.3 else willing(func)

    stages, _ = formed(program, moody, policy)
    _defined_before_use(program, stages)


def test_what_tvm_falls_over_is_named() -> None:
    x = te.placeholder((64,), "float32", name="x")
    # It joins both divisions to one by a number beyond 32 bits.
    y = te.compute((64,), lambda i: x[(i // 7) // (2**30 + 7)], name="y")
    with pytest.raises(ModelError, match=r"TVM makes no TensorIR of y: .*7516192817.*; smaller constants"):
        souffle.compile(souffle.from_te([x], [y]), target="cpu")
