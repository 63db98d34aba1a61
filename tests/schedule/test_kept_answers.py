"""What the scheduler answers serves all networks of a process, and shows nothing of what was compiled before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tvm import te, tirx

import souffle
from souffle import models
from souffle.cost.device import device_of_arch
from souffle.cost.stage_price import price_on
from souffle.schedule.gpu import RULES, register_rule
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import ANSWERS, LEAST, GpuScheduler
from souffle.tvm_compat import named_key, primfunc_from_tensors, structural_digest


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    ANSWERS.forget()
    LEAST.forget()
    yield
    ANSWERS.forget()
    LEAST.forget()


def rows(source: str = "x", row: str = "i", result: str = "y", extent: int = 48) -> tirx.PrimFunc:
    """A sum of each row, with names of its own."""
    x, k = te.placeholder((24, extent), "float32", source), te.reduce_axis((0, extent), "k")
    sums = {"i": lambda i: te.sum(x[i, k] * x[i, k], axis=[k]), "m": lambda m: te.sum(x[m, k] * x[m, k], axis=[k])}
    return primfunc_from_tensors([x, te.compute((24,), sums[row], name=result)], "stage")


def scheduler(arch: str = "sm_90", priced: bool = True, threads: int = 256) -> GpuScheduler:
    return GpuScheduler(device_for(arch), price_on(device_of_arch(arch)) if priced else None, threads)


def test_an_equal_stage_of_another_network_has_the_same_answer() -> None:
    first, second = scheduler(), scheduler()
    answer = first(rows())
    assert answer.functions and second(rows()) is answer
    assert first.least_seconds(rows()) == second.least_seconds(rows())


@pytest.mark.parametrize("other", [rows("z"), rows(row="m"), rows(result="total")], ids=["input", "axis", "block"])
def test_names_are_its_own(other: tirx.PrimFunc) -> None:
    assert structural_digest(other) == structural_digest(rows()) and named_key(other) != named_key(rows())
    alone = str(scheduler()(other).functions[0].func)
    ANSWERS.forget()
    before = scheduler()(rows())
    after = scheduler()(other)
    assert after is not before and str(after.functions[0].func) == alone


def test_what_an_answer_comes_of_is_asked_for_anew() -> None:
    answer = scheduler()(rows())
    for other in (scheduler("sm_80"), scheduler(priced=False), scheduler(threads=128)):
        assert other(rows()) is not answer
    assert scheduler()(rows(extent=64)) is not answer
    own = replace(RULES["fallback"], name="own")
    register_rule(own, before=next(iter(RULES)))
    try:
        assert scheduler()(rows()) is not answer
    finally:
        del RULES["own"]
    assert scheduler()(rows()) is answer


def test_a_network_has_one_text_whatever_was_compiled_before() -> None:
    def texts(level: str, precision: str = "fp32") -> list[str]:
        options = {"target": "cuda", "arch": "sm_90", "cubin": False, "device": "cpu", "verify": "off"}
        network = souffle.compile(models.build("mmoe"), level=level, precision=precision, **options)
        return [*(module.text for module in network.plan.modules), *map(str, network.plan.decisions)]

    alone = texts("V4")
    assert texts("V4") == alone
    ANSWERS.forget()
    LEAST.forget()
    texts("V0")
    texts("V4", "mixed")
    assert texts("V4") == alone
