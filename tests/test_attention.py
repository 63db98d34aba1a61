"""Attention of many forms becomes one stage, which is right and proven."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from tvm import te, topi

import souffle
from benchmarks import attentions
from benchmarks.attentions import AttentionCase, by_hand, random_tensors, with_operator, written_out
from souffle.options import ON_CHIP
from souffle.runtime.network import Network
from souffle.schedule.stage import Stages, flat_stages
from tests.thorough import THOROUGH, some

CASES = (
    AttentionCase(1, 33, 32, 4, 4),
    AttentionCase(17, 17),
    AttentionCase(40, 40, 64, batch=3, causal=True),
    AttentionCase(23, 57, 32),
    AttentionCase(32, 32, 48, 6, 2, 2, causal=True),
    AttentionCase(16, 16, 256),
)
MAKERS = (written_out, with_operator)
BOTH = (CASES[2], CASES[4])


def compiled(model: object, **options: object) -> tuple[Network, Stages]:
    """A network and its stages."""
    kept: dict[str, Stages] = {}

    def keep(step: str, result: object) -> object:
        kept[step] = result
        return result

    settings = {"target": "cuda", "device": "cpu", "cubin": False, "precision": "mixed", "arch": "sm_90"} | options
    return souffle.compile(model, hook=keep, **settings), kept["schedule"]


def rules(stages: Stages) -> list[str]:
    return [stage.schedule.rule for stage in flat_stages(stages)]


# Each case in one of the forms, which take turns.
FORMS = [
    pytest.param(case, make, id=f"{case.name}-{make.__name__}")
    for number, case in enumerate(CASES)
    for turn, make in enumerate(MAKERS)
    if THOROUGH or (number + turn) % 2 == 0
]


@pytest.mark.parametrize(("case", "make"), FORMS)
def test_results_and_proofs(case: AttentionCase, make: Callable[[AttentionCase], onnx.ModelProto]) -> None:
    model, inputs = make(case), random_tensors(case)
    network, stages = compiled(model, verify="values")
    assert network.plan.certificate.verdict == "PROVEN"
    if case.queries > 1:
        assert rules(stages) == ["chained_products"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (reference,) = session.run(None, inputs)
    shuffled = network.on("cpu", order="shuffled", seed=3)
    first, second = (one(inputs)["y"] for one in (network, shuffled))
    np.testing.assert_allclose(first, reference, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(first, second)


# Each case in one of the forms, here too.
CALCULATED = some([(BOTH[0], "te"), (BOTH[1], "exported")], [(BOTH[0], "exported"), (BOTH[1], "te")])


@pytest.mark.parametrize(("case", "form"), CALCULATED, ids=lambda part: getattr(part, "name", part))
def test_masks_that_are_calculated(case: AttentionCase, form: str) -> None:
    inputs, precision = random_tensors(case), "mixed"
    session = onnxruntime.InferenceSession(written_out(case).SerializeToString(), providers=["CPUExecutionProvider"])
    (reference,) = session.run(None, inputs)
    if form == "te":
        inputs, precision = {name: array.astype(np.float16) for name, array in inputs.items()}, "fp32"
    network, stages = compiled(attentions.MAKERS[form](case), verify="values", precision=precision)
    assert network.plan.certificate.verdict == "PROVEN"
    assert rules(stages) == ["chained_products"]
    (found,) = network(inputs).values()
    np.testing.assert_allclose(found, reference, rtol=1e-2, atol=1e-2)


@pytest.mark.thorough("shorter rows are above")
def test_long_rows_run_along() -> None:
    """They are computed once, a panel of keys after the other."""
    case = AttentionCase(2048, 2048, 64, 2, 2)
    model, inputs = written_out(case), random_tensors(case)
    network, stages = compiled(model)
    (stage,) = flat_stages(stages)
    assert re.search(r"^\d+ panels of \d+ with a running maximum and sum$", stage.schedule.way)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (reference,) = session.run(None, inputs)
    np.testing.assert_allclose(network(inputs)["y"], reference, rtol=1e-2, atol=2e-3)


def test_checked() -> None:
    """No access is out of bounds, no thread races, and all barriers are met."""
    case = AttentionCase(33, 50, 40, 2, 1, causal=False)
    network, stages = compiled(written_out(case))
    assert rules(stages) == ["chained_products"]
    checked = network.on("cpu", checked=True)
    np.testing.assert_array_equal(checked(random_tensors(case))["y"], network(random_tensors(case))["y"])


@pytest.mark.parametrize("precision", some(["mixed"], ["fp32"]))
def test_without(precision: str) -> None:
    """In fp32 there are no tensor cores; and with nothing kept on chip it is what it was."""
    model = written_out(AttentionCase(64, 64, 64))
    _, apart = compiled(model, precision=precision, disable=["attention"])
    assert "chained_products" not in rules(apart)
    _, bare = compiled(model, precision=precision, disable=ON_CHIP)
    _, before = compiled(model, precision=precision, level="V3")
    assert rules(bare) == rules(before)
    _, joined = compiled(model, precision=precision)
    assert ("chained_products" in rules(joined)) == (precision == "mixed")


def test_what_is_not_a_number_stays_so() -> None:
    case = AttentionCase(17, 24)
    inputs = random_tensors(case)
    inputs["q"][0, 0, 3, 5] = np.nan
    inputs["q"][0, 1, 4, 7] = np.inf
    network, _ = compiled(written_out(case))
    found = np.isnan(network(inputs)["y"])
    expected = np.zeros_like(found)
    expected[0, 0, 3] = expected[0, 1, 4] = True
    np.testing.assert_array_equal(found, expected)


def test_a_row_without_keys_is_not_a_number() -> None:
    """As softmax says of minus infinity everywhere; the rows beside it have their keys."""
    q, k, v, mask = (
        te.placeholder(shape, dtype, name=name)
        for name, shape, dtype in (
            ("q", (32, 16), "float16"),
            ("k", (48, 16), "float16"),
            ("v", (48, 16), "float16"),
            ("mask", (32, 48), "float32"),
        )
    )
    output = by_hand(q, k, v, lambda s: topi.add(s, mask))
    network, stages = compiled(souffle.from_te([q, k, v, mask], [output], name="rows"), precision="fp32")
    assert rules(stages) == ["chained_products"]
    generator = np.random.default_rng(0)
    inputs = {
        name: generator.standard_normal(shape).astype(np.float16)
        for name, shape in (("q", (32, 16)), ("k", (48, 16)), ("v", (48, 16)))
    }
    inputs["mask"] = np.zeros((32, 48), np.float32)
    inputs["mask"][5], inputs["mask"][6, 1:] = -np.inf, -np.inf
    (found,) = network(inputs).values()
    assert np.isnan(found[5]).all()
    np.testing.assert_allclose(found[6], inputs["v"][0], rtol=1e-3)
    assert np.isfinite(np.delete(found, 5, 0)).all()
