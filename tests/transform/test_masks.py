"""Constants that are calculated from their indices: exactly those, the same bits, and right where they are used."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import souffle
from benchmarks.attention import compiled
from benchmarks.attentions import AttentionCase, exported, random_tensors
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.models.builder import GraphBuilder
from souffle.pipeline import LEVELS, transform_program
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from souffle.transform import masks_by_index
from tests.testlib import run_on_cpu_device
from tests.thorough import some

pytestmark = pytest.mark.sampled(6)

ROWS, COLUMNS = np.indices((23, 31))
LOWEST = float(np.finfo(np.float32).min)
REGIONS = {
    "causal": ROWS >= COLUMNS,
    "strict": ROWS > COLUMNS,
    "later": COLUMNS - ROWS <= 8,
    "ahead": COLUMNS > ROWS + 3,
    "window": abs(ROWS - COLUMNS) <= 4,
    "beyond": abs(ROWS - COLUMNS) > 4,
    "padded": COLUMNS < 29,
    "steep": 2 * ROWS + COLUMNS < 40,
    "against": ROWS + COLUMNS >= 23,
}


def program_with(operator: str, mask: np.ndarray) -> TEProgram:
    """An element of the input and one of the mask, as V4 has it ahead of placement."""
    b = GraphBuilder("g", 0)
    b.output(b.node(operator, b.input("x", mask.shape), b.parameter("mask", mask)), "y", mask.shape)
    return transform_program(souffle.import_onnx(b.model()), LEVELS["V4"], "fp32")[0]


def assert_calculated(mask: np.ndarray) -> None:
    """The expression has the bits of the mask: added to -0.0, which keeps those of any number."""
    made, decisions = masks_by_index(program_with("Add", mask))
    assert not made.constants and len(decisions) == 1
    (found,) = evaluate(made, [np.full(mask.shape, -0.0, np.float32)]).values()
    assert found.tobytes() == mask.tobytes(), decisions


@pytest.mark.parametrize("other", [-np.inf, -1e9, LOWEST, 1.5], ids=str)
@pytest.mark.parametrize("region", REGIONS)
def test_two_values_by_a_condition(region: str, other: float) -> None:
    assert_calculated(np.where(REGIONS[region], 0.0, other).astype(np.float32))
    assert_calculated(np.where(REGIONS[region], other, 0.0).astype(np.float32)[None, None])


@pytest.mark.parametrize("seed", range(20))
def test_random_ones_are_exact_or_left_alone(seed: int) -> None:
    """Of up to three axes, and with one element that is wrong wherever it may be."""
    random = np.random.default_rng(seed)
    shape = (*random.integers(1, 9, random.integers(1, 4)).tolist(), int(random.choice([1, 7, 13])))
    places = np.indices(shape)
    multiples = random.integers(-2, 3, len(shape))
    distance = sum(m * place for m, place in zip(multiples, places, strict=True)) + np.zeros(shape, int)
    mask = np.where((distance >= random.integers(-6, 3)) & (distance <= random.integers(0, 9)), 0.0, -np.inf)
    for wrong in (False, True):
        mask = mask.astype(np.float32)
        if wrong:
            mask[tuple(random.integers(0, extent) for extent in shape)] = random.choice([0.0, -0.0, -np.inf])
        program = program_with("Add", mask)
        made, _ = masks_by_index(program)
        (found,) = evaluate(made, [np.full(shape, -0.0, np.float32)]).values()
        assert found.tobytes() == mask.tobytes()


@pytest.mark.parametrize("value", [0.0, -np.inf, -0.0, np.nan], ids=str)
def test_one_wrong_element_leaves_a_tensor(value: float) -> None:
    mask = np.where(REGIONS["causal"], 0.0, -np.inf).astype(np.float32)
    place = (3, 9) if value == 0.0 and not np.signbit(value) else (20, 4)
    mask[place] = value
    program = program_with("Add", mask)
    assert masks_by_index(program)[0] is program and program.constants


def test_the_sign_of_a_zero_is_not_lost() -> None:
    program = program_with("Add", np.where(REGIONS["causal"], 0.0, -0.0).astype(np.float32))
    assert masks_by_index(program)[0] is program


def test_an_operand_of_a_product_stays_a_tensor() -> None:
    program = program_with("MatMul", np.tril(np.ones((24, 24), np.float32)))
    assert masks_by_index(program)[0] is program


def masked(region: np.ndarray, hidden: float, operator: str) -> onnx.ModelProto:
    """Attention of 40 queries behind a mask, which is added or chooses."""
    b, keys = GraphBuilder("g", 0), region.shape[1]
    q, k, v = (b.input(name, (2, rows, 32)) for name, rows in (("q", 40), ("k", keys), ("v", keys)))
    scores = b.node("MatMul", q, b.node("Transpose", k, perm=[0, 2, 1]))
    if operator == "Add":
        scores = b.node("Add", scores, b.parameter("mask", np.where(region, 0.0, hidden).astype(np.float32)[None]))
    else:
        scores = b.node("Where", b.parameter("mask", region[None]), scores, b.constant(hidden))
    b.output(b.node("MatMul", b.node("Softmax", scores, axis=-1), v), "y", (2, 40, 32))
    return b.model()


@pytest.mark.parametrize(
    ("hidden", "keys", "operator"),
    some([(LOWEST, 72, "Add")], [(-np.inf, 520, "Where"), (-np.inf, 520, "Add"), (LOWEST, 72, "Where")]),
)
def test_attention_behind_it(operator: str, hidden: float, keys: int) -> None:
    # With minus infinity a mask by index is quicker only where it leaves out many keys.
    i, j = np.indices((40, keys))
    model = masked(j <= i + 32, hidden, operator)
    inputs = souffle.models.random_inputs(model)
    reference = onnxruntime_outputs(model, inputs)
    options = {"target": "cuda", "device": "cpu", "cubin": False, "precision": "mixed", "verify": "values"}
    network = souffle.compile(model, **options)
    plan = network.plan
    assert [d.stage for d in plan.decisions].count("masks") == 1
    assert plan.certificate.verdict == "PROVEN"
    found = run_on_cpu_device(plan, inputs)
    assert compare(found, reference, "mixed").ok
    for order in ({"order": "shuffled", "seed": 1}, {"checked": True}):
        assert found["y"].tobytes() == run_on_cpu_device(plan, inputs, **order)["y"].tobytes()
    assert not any(d.stage == "masks" for d in souffle.compile(model, **options, disable=["attention"]).plan.decisions)


@pytest.mark.thorough("masks are conditions above; panels are left out in tests/schedule/test_chained_products.py")
def test_panels_that_an_exporters_mask_hides_are_left_out() -> None:
    case = AttentionCase(1000, 1000, 64, 1, 1, causal=True)
    network, stages = compiled(case, "exported", "sm_80", verify="off")
    assert "the mask hides the others" in stages[0]
    inputs = random_tensors(case)
    found = run_on_cpu_device(network.plan, inputs)
    assert compare(found, onnxruntime_outputs(exported(case), inputs), "mixed").ok
