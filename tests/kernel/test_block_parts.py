"""Parts of a block in steps of 128 threads and of warps: chosen by price, the same bits, proven, changes refuted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tvm import te

from benchmarks.side_by_side import branches, compiled, forced, one_program
from souffle.codegen.nvcc import find_nvcc
from souffle.cost.side_by_side import in_rows
from souffle.kernel import kernel_plan
from souffle.kernel.block_parts import PART_STEP, Divisions, parts_together
from souffle.kernel.calls import CallPlan
from souffle.kernel.kernel_shape import StageCall
from souffle.kernel.part_text import of_a_part
from souffle.mutation.mutants import Mutations
from souffle.mutation.sandbox import Sandbox
from souffle.mutation.trial import Trials, described, inputs_of, misses
from souffle.pipeline import compile_cuda
from souffle.program import TEProgram
from souffle.schedule.lower.device_function import LoweringError
from souffle.schedule.lower.parts import MOST_NUMBER, Part
from souffle.schedule.lower.shares import ALL_WORKERS, Share
from souffle.schedule.resources import aligned
from souffle.verify import PROVEN, REFUTED, certify_plan
from souffle.verify.certify import functions_of
from tests.testlib import Builder, inputs_for
from tests.thorough import sized

pytestmark = pytest.mark.sampled(2)


def product_and_columns() -> TEProgram:
    """A product beside long columns, both with readers behind a barrier of the grid."""
    b = Builder()
    x, y = b.input(4000, 512), b.input(384, 768)
    w = b.constant(np.random.default_rng(0).integers(-2, 3, (768, 1024)).astype(np.float32))
    product = b.matmul(y, w)
    most = b.add(_most, x, name="most")
    less = b.add(lambda v, m: te.compute(v.shape, lambda i, j: v[i, j] - m[j]), x, most, name="less")
    return b.program(less, b.add(_most, b.map(lambda v: te.round(v * 0.5), product), name="most2"))


def _most(x: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, x.shape[0]), "k")
    return te.compute((x.shape[1],), lambda j: te.max(x[k, j], k))


def test_what_is_predicted_to_pay_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"level": "V4", "arch": "sm_90", "precision": "mixed", "cubin": False}
    net = compile_cuda(product_and_columns(), verify="values", **options).plan
    assert net.certificate.verdict == PROVEN, net.certificate
    taken = [d for d in net.decisions if d.stage == "hfuse" and d.accepted]
    assert any("(threads 0 to 383)" in d.subject and "(threads 384 to 511)" in d.subject for d in taken), taken
    text = "".join(module.text for module in net.modules)
    assert "souffle_named_barrier<5, 384>" in text and "part_tid" in text
    monkeypatch.setattr(Divisions, "of", lambda *_: iter(()))
    without = compile_cuda(product_and_columns(), verify="off", **options).plan
    ((kernel,), (plain,)) = net.kernels, without.kernels
    assert kernel.predicted.seconds < 0.97 * plain.predicted.seconds
    # Of shared memory a part of fewer threads may ask for less than a team.
    assert kernel.dynamic_shared_bytes <= plain.dynamic_shared_bytes
    same = ("threads", "teams", "grid_syncs")
    assert [getattr(kernel, name) for name in same] == [getattr(plain, name) for name in same]


@pytest.mark.parametrize("seed", [0, 2])
def test_random_divisions_give_the_same_bits(seed: int) -> None:
    """``benchmarks.side_by_side siege`` has a hundred."""
    found = one_program(seed)
    assert found["parts"] and found["verdict"] == PROVEN and found["other_bits"] == 0, found
    assert found["whole_warps"] and found["three_parts"] == (seed == 0), found


def test_each_change_that_matters_is_refuted() -> None:
    program = branches(1)
    with forced(1, 2):
        net = compiled(program, verify="off")
    mutations = Mutations(net)
    with Sandbox() as sandbox:
        trials = Trials(mutations, inputs_of(net.plan, inputs_for(program)), sandbox)
        found = [trials.run(mutation) for mutation in mutations.sample(sized(5, 12), seed=1, kinds=("part",))]
    assert not misses(found), "\n".join(map(described, misses(found)))
    assert sum(trial.verdict == REFUTED for trial in found) >= sized(3, 8)
    assert sum(trial.changed for trial in found) >= sized(2, 6)


def test_what_a_launch_has_no_room_for_is_refuted() -> None:
    with forced(8, 2):
        net = compiled(branches(8), verify="off")
    kernels = {merged.name: merged.func for merged in net.merged}
    (kernel,) = net.plan.kernels
    assert certify_plan(net.plan, kernels, functions_of(net)).verdict == PROVEN
    changed = replace(kernel, dynamic_shared_bytes=256)
    found = certify_plan(replace(net.plan, kernels=(changed,)), kernels, functions_of(net))
    assert found.verdict == REFUTED and "a part's memory reaches to" in str(found), found


@pytest.fixture(scope="module")
def planned() -> CallPlan:
    """The kernel of a product beside columns, whose last stages are independent, too."""
    seen: list[tuple[CallPlan, int]] = []

    def spied(plan: CallPlan, forecast: object, teams: int, planned: object, **parts: bool) -> CallPlan:
        seen.append((plan, teams))
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_plan, "side_by_side", spied)
        compile_cuda(product_and_columns(), level="V4", arch="sm_90", precision="mixed", cubin=False, verify="off")
    return seen[-1][0]


def test_divisions_have_their_own_threads_numbers_and_memory(planned: CallPlan) -> None:
    stages = planned.orders[0].units[:2]
    for teams in (1, 2, 4):
        divisions = Divisions(planned.shape, teams, "sm_90")
        sizes = set()
        for shares in divisions.of(stages, (0, 1)):
            one, other = (share.part for share in shares)
            assert one.first == 0 and other.first == one.function.threads and not other.first % PART_STEP
            assert other.first + other.function.threads <= divisions.threads == 256 * teams
            assert one.start == 0 and other.start == aligned(one.function.shared_bytes)
            assert other.end <= divisions.shared_bytes == teams * aligned(planned.shape.shared_bytes)
            assert 2 * teams < one.number < other.number <= MOST_NUMBER
            sizes.add((one.function.threads, other.function.threads))
        assert (128, 128) in sizes
        assert ((384, 128) in sizes) == (teams > 1)
    assert not [*Divisions(planned.shape, 7, "sm_90").of(stages, (0, 1))]


def test_warps_go_from_one_part_to_another(planned: CallPlan) -> None:
    stages, divisions = planned.orders[0].units[:2], Divisions(planned.shape, 2, "sm_90")
    (shares,) = divisions.made(stages, (0, 1), (384, 128))
    sizes = {tuple(share.form[-1] for share in near) for near in divisions.near(stages, shares)}
    # 512 threads are all that there are, so that none is left for both to grow.
    assert sizes == {(384 - n, 128 + n) for n in (32, 64, 96)} | {(384 + n, 128 - n) for n in (32, 64, 96)}
    (shares,) = divisions.made(stages, (0, 1), (128, 128))
    sizes = {tuple(share.form[-1] for share in near) for near in divisions.near(stages, shares)}
    assert {(224, 128), (128, 224), (32, 224), (224, 32)} <= sizes and all(sum(pair) <= 512 for pair in sizes)
    assert not [*divisions.near(stages, (ALL_WORKERS, ALL_WORKERS))]
    three = planned.orders[0].units
    found = {tuple(share.form[-1] for share in shares) for shares in divisions.of(three, range(len(three)))}
    assert any(sum(size > 0 for size in sizes) == 3 for sizes in found)
    for shares in divisions.of(three, range(len(three))):
        parts = [share.part for share in shares if share.part]
        assert [part.count for part in parts] == [len(parts)] * len(parts)
        assert [part.first for part in parts[1:]] == [part.first + part.function.threads for part in parts[:-1]]
        assert len({part.number for part in parts}) == len(parts)


def test_parts_stand_together_and_in_their_block() -> None:
    function = SimpleNamespace(name="f", threads=128, shared_bytes=512, has_barrier=True, tiles=4)
    opens, closes = Part(function, 256, 0, 3, 0), Part(function, 256, 128, 4, 512)
    first, plain, last = (StageCall((), (), share=s) for s in (Share(part=opens), ALL_WORKERS, Share(part=closes)))
    for one, other in ((first, last), (last, first)):
        found = parts_together([plain, one, plain, other, plain, other, one])
        kept = [call.share.part for call in found]
        assert [part and part.first for part in kept] == [
            None, one.share.part.first, other.share.part.first, None, None,
            other.share.part.first, one.share.part.first,
        ]  # fmt: skip
        assert [part.opens for part in kept if part] == [True, False, True, False]
        assert [part.closes for part in kept if part] == [False, True, False, True]
    assert parts_together([plain, plain]) == (plain, plain)
    three = [StageCall((), (), share=Share(part=replace(opens, first=n, count=3))) for n in (0, 128, 256)]
    found = [call.share.part for call in parts_together([three[1], plain, three[0], plain, three[2], first, last])]
    assert [part and part.first for part in found] == [128, 0, 256, None, None, 0, 128]
    assert [part.opens for part in found if part] == [True, False, False, True, False]
    assert [part.closes for part in found if part] == [False, False, True, False, True]
    assert (opens.end, closes.end, str(closes)) == (512, 1024, "threads 128 to 255")
    for room in ((256, 1023), (255, 1024)):
        with pytest.raises(LoweringError, match=r"stage f has threads 128 to 255 and shared memory up to byte 1024"):
            of_a_part(closes, None, (), (None, None, None), room)


def test_each_part_has_a_row_of_workers() -> None:
    everywhere, one, other = np.full((2, 3), 5), np.full((1, 3), 1), np.full((1, 3), 2)
    found = in_rows([everywhere, one, other], [False, True, True])
    np.testing.assert_array_equal(np.stack(found)[:, :, 0], [[5, 5], [1, 0], [0, 2]])
    assert [len(table) for table in in_rows([one, other], [False, False])] == [1, 1]
    np.testing.assert_array_equal(Share(part=Part(None, 256, 0, 3, 0)).tiles_of(7, 3, 2), [[3, 2, 2]])


@pytest.mark.thorough("nvcc takes teams in tests/kernel/test_teams.py")
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_nvcc_takes_it_with_the_registers_of_a_block() -> None:
    net = compile_cuda(product_and_columns(), level="V4", arch="sm_90", precision="mixed", verify="off").plan
    (kernel,) = net.kernels
    assert "part_tid" in net.modules[0].text
    assert kernel.resources.registers <= 65536 // kernel.threads and not kernel.resources.stack_bytes
