"""Which tiles stages read and write, which tiles a block takes together, and where it waits."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tvm import te, tirx

import souffle
from souffle.errors import CertificateError
from souffle.index import isl
from souffle.kernel.assignment import Assignment, fit, turns
from souffle.kernel.dependences import TileDependences
from souffle.kernel.tile_maps import tile_maps
from souffle.kernel.waits import Expected
from souffle.partition import PartitionRequest
from souffle.program import Tensor, TEProgram
from souffle.program.evaluate import evaluate
from souffle.schedule.stage import Stage
from tests.kernel.test_loops import from_the_start, two_states_back
from tests.kernel.test_merge import ARCH, kernel_of, layers, lower, weights
from tests.testlib import Builder, inputs_for, random_program, run_on_cpu_device
from tests.thorough import some

pytestmark = pytest.mark.sampled(2)

ORDERS = ({"order": "fixed"}, *({"order": "shuffled", "seed": s, "blocks": s} for s in (1, 2, 3, 5)))


def compiled(program: TEProgram, arch: str = ARCH):
    return souffle.pipeline.compile_cuda(program, level="V3", arch=arch, cubin=False)


def check(net, program: TEProgram) -> None:
    """The certificate's verdict, and the function on the CPU device in several orders and grids."""
    assert net.certificate.verdict == "PROVEN", net.certificate
    inputs = inputs_for(program)
    expected = evaluate(program, inputs)
    for options in ORDERS:
        found = run_on_cpu_device(net.plan, inputs, **options)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name}, {options}")


# Which elements tiles touch


def touched(stage: Stage, tensor) -> dict[int, set[tuple[int, ...]]]:
    """What each tile reads or writes of a tensor, according to isl."""
    reads = tensor in stage.inputs
    place = stage.inputs.index(tensor) if reads else len(stage.inputs) + stage.outputs.index(tensor)
    maps = tile_maps(stage.schedule)
    relation = maps.reads(place) if reads else maps.writes(place)
    found: dict[int, set[tuple[int, ...]]] = {}
    for (tile,), element in isl.pairs(relation):
        found.setdefault(tile, set()).add(element)
    return found


def test_a_product_s_tiles_write_rectangles_and_read_whole_rows() -> None:
    (stage,) = lower(layers(1, 100)).stages
    (x, w), (y,) = stage.inputs, stage.outputs
    written = touched(stage, y)
    everything = [(i, j) for i in range(4) for j in range(100)]
    assert sorted(e for elements in written.values() for e in elements) == everything
    for tile, elements in written.items():
        rows, columns = {i for i, _ in elements}, {j for _, j in elements}
        assert len(elements) == len(rows) * len(columns)
        assert touched(stage, x)[tile] >= {(i, k) for i in rows for k in range(100)}
        assert touched(stage, w)[tile] >= {(k, j) for k in range(100) for j in columns}


def test_what_one_tile_reads_is_its_part_of_what_all_read() -> None:
    (stage,) = lower(layers(1, 100)).stages
    maps = tile_maps(stage.schedule)
    for tile in range(maps.tiles):
        assert {*isl.points(maps.read_by(0, tile))} == touched(stage, stage.inputs[0])[tile]


def test_a_statement_that_is_not_known_may_touch_anything() -> None:
    (stage,) = lower(layers(1, 100)).stages
    func = stage.schedule.func
    maps = tile_maps(replace(stage.schedule, func=func.with_body(tirx.While(tirx.const(False, "bool"), func.body))))
    for number, tensor in enumerate((*stage.inputs, *stage.outputs)):
        everything = [(tile, at) for tile in range(maps.tiles) for at in np.ndindex(tensor.shape)]
        for relation in (maps.reads(number), maps.writes(number)):
            assert sorted((tile, tuple(at)) for (tile,), at in isl.pairs(relation)) == everything


def test_an_index_from_data_may_read_any_row() -> None:
    b = Builder()
    x = b.relu(b.input(120, 40))
    rows = b.constant(np.arange(119, -1, -1).astype(np.int32))
    lowered = lower(b.program(b.gather(x, rows)))
    relu, gather = lowered.stages
    (x,) = relu.outputs
    assert len(touched(relu, x)) > 1
    assert all(len(elements) == 120 * 40 for elements in touched(gather, x).values())
    assert [barrier.scope for barrier in lowered.calls().barriers] == ["grid"]


# TileDependences


def rows_then_columns(rows: int = 64, columns: int = 96) -> TEProgram:
    b = Builder()
    x = b.scaled(b.input(rows, columns), 2.0)
    turned = b.add(lambda p: te.compute((columns, rows), lambda i, j: p(j, i)), x, name="turned")
    return b.program(b.reduce(turned, 1), b.reduce(turned, 0))


def dependence(program: TEProgram, producer: str, consumer: str):
    stages = {stage.name: stage for stage in lower(program).stages}
    tensor = next(t for t in stages[consumer].inputs if t in stages[producer].outputs)
    return TileDependences().between(stages[producer], tensor, stages[consumer], tensor)


def sums_of_some_rows(seed: int) -> TEProgram:
    """Sums of rows at multiples, in blocks and from the end, of what another stage writes."""
    choose = random.Random(seed)
    rows, columns = choose.choice((257, 512, 1000)), choose.choice((31, 64, 300))
    step, shift = choose.randint(1, 3), choose.randint(0, 5)
    count = (rows - shift) // step
    b = Builder()
    x = b.scaled(b.input(rows, columns), 2.0)

    def some(at: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> Tensor:
        k = te.reduce_axis((0, columns))
        return b.add(lambda p: te.compute((count,), lambda i: te.sum(p(at(i), k), axis=k)), x, name="some")

    return b.program(x, some(lambda i: i * step + shift), some(lambda i: rows - 1 - i * step), some(lambda i: i // 3))


@pytest.mark.parametrize("listed", [True, False], ids=["pairs", "lexicographic"])
@pytest.mark.parametrize("seed", some([0, 2], [1, 3]))
def test_the_ends_of_what_tiles_need(seed: int, listed: bool) -> None:
    first_stage, *others = lower(sums_of_some_rows(seed)).stages
    (x,) = first_stage.outputs
    written = touched(first_stage, x)
    told = 0
    for stage in others:
        found = TileDependences().between(first_stage, x, stage, x)
        if not listed:
            # Too many to be looked at one by one.
            found.__dict__["pairs"] = None
        read = touched(stage, x)
        met = {(c, p) for c in read for p in written if read[c] & written[p]}
        tiles = stage.schedule.tiles, first_stage.schedule.tiles
        for ends, pairs, among in (
            (found.needed, met, tiles[1]),
            (found.needing, {(p, c) for c, p in met}, tiles[0]),
        ):
            told += ends[0].any()
            for tile, (first, last) in enumerate(zip(*ends, strict=True)):
                own = [other for mine, other in pairs if mine == tile]
                exact = (min(own), max(own)) if own else (0, -1)
                assert (first, last) == exact if ends[0].any() else first == 0 and last in (exact[1], among - 1)
    assert told


def test_elementwise_neighbours_depend_tile_by_tile() -> None:
    b = Builder()
    x = b.relu(b.input(300, 40))
    y = b.scaled(x, 3.0)
    found = dependence(b.program(y), "relu0", "scale1")
    assert found.same and str(found) == "each tile reads what the tile of equal number wrote"


def test_a_product_depends_on_all_tiles_of_a_row() -> None:
    found = dependence(layers(2), "matmul0", "matmul1")
    assert not found.same and found.sources == (0, 1, 2)
    assert found.pairs.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


# Assignments


@pytest.mark.parametrize("seed", range(20))
def test_digits_are_found_again(seed: int) -> None:
    random_ = random.Random(seed)
    extents = [random_.randint(1, 5) for _ in range(4)]
    strides, below = [], 1
    for extent in extents:
        strides.append(below)
        below *= extent
    digits = list(zip(extents, strides, strict=True))
    random_.shuffle(digits)
    cut = random_.randint(0, 4)
    table = Assignment(0, tuple(digits[:cut]), tuple(digits[cut:])).tiles()
    assert sorted(table.ravel()) == list(range(below))
    found = fit(np.array([random_.sample(row, len(row)) for row in table.tolist()]).reshape(table.shape))
    np.testing.assert_array_equal(np.sort(found.tiles(), axis=1), np.sort(table, axis=1))


def test_no_digits_say_an_irregular_table() -> None:
    assert fit(np.array([[0], [1], [3], [2]])) is None
    assert fit(np.array([[0, 1], [2, 4], [3, 5]])) is None


def test_the_busiest_block() -> None:
    assert (turns(10, 1, 4), turns(5, 2, 4), turns(5, 2, 5)) == (3, 4, 2)


# Where kernels wait


def rowwise_chain() -> TEProgram:
    b = Builder()
    x = b.input(600, 16)
    for width, next_width in ((16, 12), (12, 14), (14, 16)):
        x = b.matmul(x, b.constant(weights(width, next_width)))
    return b.program(x)


def test_a_chain_within_rows_waits_for_its_own_block_only() -> None:
    net = kernel_of(rowwise_chain())
    (kernel,) = net.plan.kernels
    assert kernel.tiles > 1 and kernel.grid_syncs == 0
    assert [barrier.scope for barrier in kernel.barriers] == ["block", "block"]
    assert "block barrier before matmul1, after matmul0" in net.explain()
    check(net, rowwise_chain())


def test_without_its_block_barriers_the_certificate_names_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    monkeypatch.setattr(importlib.import_module("souffle.kernel.merge"), "_block_barrier", lambda: nothing)
    with pytest.raises(CertificateError, match="race in a block"):
        compiled(rowwise_chain())


UNKNOWN_TO_THE_COST_MODEL = "sm_75"


@pytest.mark.parametrize("blocks", [1, 2])
def test_tiles_are_taken_together_where_no_block_computes_more(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    monkeypatch.setattr(PartitionRequest, "blocks", lambda self, units: blocks)
    program = rows_then_columns()
    net = kernel_of(program, arch=UNKNOWN_TO_THE_COST_MODEL)
    shape = compiled(program, arch=UNKNOWN_TO_THE_COST_MODEL).merged[0].shape
    used = [call.assignment for call in shape.stage_calls if call.assignment]
    assert used and any(assignment.per_slot > 1 for assignment in used)
    assert sum(barrier.scope == "grid" for barrier in net.plan.kernels[0].barriers) == blocks - 1
    check(net, program)


def test_a_large_device_computes_tiles_apart() -> None:
    shapes = [merged.shape for merged in compiled(rows_then_columns(), arch=UNKNOWN_TO_THE_COST_MODEL).merged]
    assert not any(call.assignment for shape in shapes for call in shape.stage_calls)


def test_more_tiles_on_a_block_may_take_less_time_than_a_grid_barrier() -> None:
    program = rows_then_columns(16, 32)
    apart = compiled(program, arch=UNKNOWN_TO_THE_COST_MODEL).plan.kernels[0]
    net = kernel_of(program)
    (kernel,) = net.plan.kernels
    assert kernel.grid_syncs < apart.grid_syncs
    assert any(barrier.reason.endswith("which the same block computes") for barrier in kernel.barriers)
    check(net, program)
    costly = Expected(1000, 1e-6, lambda stage: 1e-3)
    assert costly.extra_seconds(lower(layers(1)).stages[0], 2) > costly.sync_seconds


@pytest.mark.parametrize("seed", range(10))
def test_random_programs_on_a_small_device(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(PartitionRequest, "blocks", lambda self, units: 1 + seed % 3)
    program = random_program(random.Random(seed).choice, 10, seed)
    check(kernel_of(program, "V4" if seed % 2 else "V3"), program)


# Loops


def test_steps_that_stay_on_a_block_have_no_grid_barrier() -> None:
    program = from_the_start(5)
    net = kernel_of(program)
    (kernel,) = net.plan.kernels
    assert kernel.grid_syncs == 0
    assert [(barrier.scope, barrier.runs) for barrier in kernel.barriers] == [("block", 5)]
    check(net, program)


def test_steps_that_need_all_tiles_wait_for_all_blocks() -> None:
    net = kernel_of(from_the_start(5, 100))
    (kernel,) = net.plan.kernels
    assert [(barrier.scope, barrier.runs) for barrier in kernel.barriers] == [("grid", 4)]
    assert "what 2 tiles, 0 to 1, wrote" in kernel.barriers[0].reason


@pytest.mark.parametrize("program", [layers(4), from_the_start(5, 100), two_states_back(7)], ids=str)
def test_barriers_say_how_often_a_launch_waits(program: TEProgram) -> None:
    for kernel in compiled(program).plan.kernels:
        assert kernel.grid_syncs == sum(barrier.runs for barrier in kernel.barriers if barrier.scope == "grid")
