"""Grid barriers by the paper's rule and by coarser ones, on programs small enough to place them by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from tvm import te

import souffle
from benchmarks.sync_table import main, relies, rule_syncs, runs, stays_on_block
from souffle.analysis import Analysis, Relies, analyze
from souffle.kernel.dependences import TileDependences
from souffle.program import TEProgram
from souffle.schedule.stage import LoopStage
from tests.kernel.test_loops import from_the_start
from tests.kernel.test_merge import ARCH, diamond, layers, lower
from tests.testlib import Builder


def apart(program: TEProgram):
    """Every TE a stage of its own."""
    return rule_syncs(lower(program).stages, analyze(program), stays_on_block(TileDependences()))


def together(program: TEProgram, level: str = "V3"):
    """The units of the only kernel, the analysis of the transformed program, and what was compiled."""
    seen: dict[str, object] = {}

    def hook(stage: str, result: object) -> object:
        seen[stage] = result
        return result

    kernels = souffle.pipeline.compile_cuda(program, level=level, arch=ARCH, cubin=False, verify="off", hook=hook)
    (only,), analysis = seen["partition"].subprograms, seen["analysis"]
    assert isinstance(analysis, Analysis)
    return only.stages, analysis, kernels


def test_each_product_of_a_chain_waits_by_every_rule() -> None:
    found = apart(layers(3))
    assert (found.paper, found.any, found.each, found.races) == (2, 2, 2, frozenset())


def test_elementwise_neighbours_wait_by_the_rules_without_classes_only() -> None:
    b = Builder()
    found = apart(b.program(b.scaled(b.relu(b.input(300, 40)), 2.0)))
    assert (found.paper, found.any, found.each, found.races) == (0, 1, 1, frozenset())


def test_a_transposition_relies_on_one_element_of_another_block() -> None:
    b = Builder()
    x = b.scaled(b.input(300, 400), 2.0)
    turned = b.add(lambda p: te.compute((400, 300), lambda i, j: p(j, i)), x, name="turned")
    found = apart(b.program(turned))
    assert (found.paper, found.any) == (0, 1)
    assert found.races == {("scale0", "turned1", x.name)}


def test_one_barrier_serves_all_that_was_written_before_it() -> None:
    # Sums of rows and of columns of one tensor, and what joins them element by element.
    found = apart(diamond())
    assert (found.paper, found.any, found.each) == (1, 2, 3)


def test_a_stage_relies_on_many_where_a_te_behind_its_first_does() -> None:
    b = Builder()
    x, w, bias = b.input(4, 100), b.input(100, 50), b.input(50)
    scaled = b.scaled(x, 3.0)
    program = b.program(b.reduce(scaled, 1), b.bias(b.matmul(scaled, w), bias))
    analysis = analyze(program)
    scale, total, product, added = program.tes

    def of(tensor, *tes) -> Relies:
        return relies(SimpleNamespace(tes=tes), tensor, analysis)

    assert of(x, scale) is Relies.ONE
    assert of(x, scale, total) is of(scaled, total) is Relies.MANY
    # What only an element-wise end reads is relied on as one on one.
    assert of(x, scale, product, added) is of(w, product, added) is Relies.MANY
    assert of(bias, product, added) is Relies.ONE


def test_steps_of_a_loop_depend_on_the_steps_before() -> None:
    units, analysis, kernels = together(from_the_start(4, 100))
    (loop,) = units
    assert isinstance(loop, LoopStage)
    listed = list(runs(units))
    assert [[read.run for read in reads] for _, _, reads in listed] == [[], [0], [1], [2]]
    found = rule_syncs(units, analysis, stays_on_block(TileDependences()))
    assert (found.paper, found.any, found.each, found.races) == (3, 3, 3, frozenset())
    assert kernels.plan.kernels[0].grid_syncs == 3


def test_block_barriers_are_counted_for_each_step() -> None:
    # One tile, so that what a step needs of the one before stays on its block.
    _, _, kernels = together(from_the_start(6, 4))
    (merged,) = kernels.merged
    assert kernels.plan.kernels[0].grid_syncs == 0
    assert merged.shape.block_syncs == 6


def test_a_tiny_model(tmp_path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "syncs.json"
    options = ["--models", "mmoe", "--size", "tiny", "--level", "V3", "--precision", "fp32", "--partition", "souffle"]
    assert main([*options, "--out", str(out)]) == 0
    assert "paper" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["results"]
    assert row["grid"] <= row["paper"] <= row["any"] <= row["each"] < row["stage_runs"] and "races" in row
