"""Tensors that stay in shared memory: which can, that networks stay the same functions, and what it is worth."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te

from souffle.codegen.assemble import CompiledKernels
from souffle.kernel import resident
from souffle.kernel.kernel_shape import LoopCall
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from tests.kernel.residents import compiled, gated, kept, narrow, residual, weight
from tests.testlib import Builder, inputs_for, run_on_cpu_device

pytestmark = pytest.mark.sampled(3)

ORDERS = (
    {"order": "fixed"},
    *({"order": "shuffled", "seed": seed, "blocks": seed} for seed in (1, 2, 3, 7)),
    {"checked": True},
    {"checked": True, "blocks": 2},
)


def check(net: CompiledKernels, program: TEProgram) -> None:
    """Proven, and the function in several orders and grids, also such as leave no room for the parts of a block."""
    assert net.plan.certificate.verdict == "PROVEN", net.plan.certificate
    inputs = inputs_for(program)
    expected = evaluate(program, inputs)
    for options in ORDERS:
        found = run_on_cpu_device(net.plan, inputs, **options)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name}, {options}")


def bytes_moved(net: CompiledKernels) -> tuple[int, int]:
    launches = net.plan.launches
    return sum(launch.bytes_read for launch in launches), sum(launch.bytes_written for launch in launches)


@pytest.mark.parametrize("policy", ["belady", "lru"])
def test_a_residual_is_read_where_its_tiles_were_made(policy: str) -> None:
    program = residual()
    net, without = compiled(program, reuse_policy=policy), compiled(program, disable=["resident"], verify="off")
    (one,) = kept(net)
    assert one.subject == "relu1 from relu1 to plus6" and "tile by tile" in one.reason
    # Others need it as well, so that it is written as before.
    (read, written), (before, wrote) = bytes_moved(net), bytes_moved(without)
    assert (before - read, wrote - written) == (128 * 128 * 4, 0)
    assert "souffle_window(" in net.plan.modules[0].text and not kept(without)
    ((kernel,), (start,)) = net.merged, {one.reason.split()[1]}
    assert str(kernel).count(f" in bytes {start} to ") == 2  # The writer's and the reader's.
    assert "souffle_window(" not in without.plan.modules[0].text
    check(net, program)


def test_rows_that_are_read_again_stay_as_they_are() -> None:
    program = gated(128, 256)
    net = compiled(program)
    (one,) = kept(net)
    assert "tile by tile" not in one.reason
    check(net, program)


def test_outputs_are_written_all_the_same() -> None:
    b = Builder()
    x = b.input(128, 96)
    t = b.relu(b.matmul(x, weight(b, 96, 128)))
    c = b.matmul(t, weight(b, 128, 128))
    y = b.plus(b.matmul(c, weight(b, 128, 128)), t)
    program = b.program(y, t)
    net = compiled(program)
    assert [d.subject for d in kept(net)] == ["relu1 from relu1 to plus4"]
    check(net, program)


def test_a_tensor_that_only_readers_of_its_tiles_need_is_not_written() -> None:
    program = narrow()
    net, without = compiled(program), compiled(program, disable=["resident"], verify="off")
    assert ["written" in d.reason for d in kept(net)] == [True, True]
    (read, written), (before, wrote) = bytes_moved(net), bytes_moved(without)
    # The first is read twice, as the next product's rows and beside its sum.
    assert before - read == 2 * 192 * 16 * 4 and wrote - written == 2 * 192 * 16 * 4
    check(net, program)


@pytest.mark.parametrize("program", [residual, narrow], ids=["residual", "narrow"])
def test_blocks_of_several_tiles_have_a_part_for_each(program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 tiles, and of 6: grids of 7 to 1 have all parts in shared memory, some of them, or the first three."""
    monkeypatch.setattr(resident._Room, "turns", lambda self, stage, waits: 3)
    net = compiled(program())
    assert kept(net) and all("each of its 3 tiles" in decision.reason for decision in kept(net))
    check(net, program())


def test_what_has_no_room_is_left_in_global_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident._Room, "turns", lambda self, stage, waits: 4096)
    net = compiled(residual())
    found = [d for d in net.plan.decisions if d.stage == "resident"]
    assert [d.accepted for d in found] == [False] and "are not free until it is read" in found[0].reason
    assert "souffle_window(" not in net.plan.modules[0].text


def test_where_the_stages_are_predicted_to_take_longer_it_does_not_stay() -> None:
    # On a device that a cost model knows, both stores cost more than the read that they save.
    program = residual(512, 512)
    net = compiled(program, arch="sm_90", disable=["reuse", "attention", "channels", "normalization"], verify="off")
    found = [d for d in net.plan.decisions if d.stage == "resident"]
    assert all(d.accepted or "predicted where it is" in d.reason or "hands it on" in d.reason for d in found)


def test_loops_keep_what_a_step_makes_and_reads() -> None:
    b = Builder()
    x = b.input(64, 64)
    w = [weight(b, 64, 64) for _ in range(2)]
    for _ in range(6):
        t = b.relu(b.matmul(x, w[0]))
        x = b.plus(b.matmul(b.matmul(t, w[1]), w[0]), t)
        x = b.map(lambda v: te.round(v * 0.000244140625), x)
    program = b.program(x)
    net = compiled(program)
    loops = [call for merged in net.merged for call in merged.shape.calls if isinstance(call, LoopCall)]
    assert loops and kept(net)
    assert any(place.window for loop in loops for call in loop.calls for place in call.arguments)
    check(net, program)


@pytest.mark.parametrize("level", ["V0", "V1", "V2", "V3"])
def test_lower_levels_know_nothing_of_it(level: str) -> None:
    net = compiled(residual(), level=level, verify="off")
    assert not [d for d in net.plan.decisions if d.stage == "resident"]
    assert all("souffle_window" not in module.text for module in net.plan.modules)
