"""What the transformations make of the six networks."""

from __future__ import annotations

from functools import cache

import pytest

import souffle
from souffle import models
from souffle.analysis import Analysis, analyze
from souffle.program import Item, TEProgram, parts_of
from souffle.transform import horizontal, roll, vertical


@cache
def transformed(name: str) -> tuple[TEProgram, Analysis]:
    program = vertical(horizontal(souffle.import_onnx(models.build(name, "tiny")))[0])[0]
    return program, analyze(program)


def contracting(program: TEProgram) -> list[Item]:
    """TEs that multiply and add up: one per GEMM, batched GEMM or convolution."""
    return [t for t in program.tes if any(p.is_reduction and len(p.inputs) > 1 for p in parts_of(t))]


def operators(item: Item) -> set[str]:
    return set(item.origin.operators)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", models.NAMES)
def test_every_te_and_every_operand_is_classified(name: str) -> None:
    program, analysis = transformed(name)
    for item in program.tes:
        assert str(analysis.relies(item)) in ("one-relies-on-one", "one-relies-on-many")
        for access in analysis.accesses(item):
            assert access.exact or access.inexact_because


def test_query_key_and_value_are_one_gemm_for_each_layer() -> None:
    program, _ = transformed("bert")
    nodes = [" ".join(t.origin.nodes) for t in contracting(program)]
    together = [n for n in nodes if all(f"self/{part}/MatMul" in n for part in ("query", "key", "value"))]
    apart = [n for n in nodes if any(f"self/{part}/MatMul" in n for part in ("query", "key", "value"))]
    assert len(together) == len(apart) == 2


@pytest.mark.parametrize("name", ["bert", "resnext", "efficientnet", "swin", "mmoe"])
def test_nothing_that_only_moves_data_is_left(name: str) -> None:
    """Reshapes and transposes; Swin's window partition and its cyclic shift."""
    program, analysis = transformed(name)
    moving = [t.name for t in program.tes if analysis.arithmetic(t).operations == 0]
    assert moving == []


@pytest.mark.parametrize("name", ["resnext", "efficientnet"])
def test_element_wise_work_is_gone_into_its_neighbours(name: str) -> None:
    program, _ = transformed(name)
    assert [t.name for t in program.tes if not any(p.is_reduction for p in parts_of(t))] == []


def test_the_experts_are_one_te() -> None:
    program, _ = transformed("mmoe")
    experts = [t for t in contracting(program) if any("experts" in node and "Gemm" in node for node in t.origin.nodes)]
    assert len(experts) == 1
    assert len([n for n in experts[0].origin.nodes if "experts" in n]) == 4


def test_a_wavefront_is_two_tes_and_the_steady_ones_are_a_loop() -> None:
    program = souffle.import_onnx(models.build("lstm", "tiny", steps=12))
    result, _ = roll(vertical(horizontal(program)[0])[0])
    (loop,) = (item for item in result.tes if hasattr(item, "steps"))
    gemv, cell = loop.body
    assert gemv.output.shape[0] == 2 * 3 - 1 and "if_then_else" not in str(gemv.body)
    assert {tensor.shape for tensor in cell.outputs} == {(3, 1, 16)} and len(cell.outputs) == 2
