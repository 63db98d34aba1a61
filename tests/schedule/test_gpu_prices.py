"""The scheduler takes the rule that is predicted to be cheaper, beyond the cost model's error."""

from __future__ import annotations

import pytest
from tvm import te, tirx, topi

from souffle.cost.device import device_of_arch
from souffle.cost.stage_price import StagePrices, price_on
from souffle.schedule.gpu import RULES, GpuRequest, Offers, Rule, schedule_gpu
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.tvm_compat import primfunc_from_tensors

ARCHES = ("sm_80", "sm_90")


def grouped(channels: int, size: int, groups: int) -> tirx.PrimFunc:
    """A grouped 3 x 3 convolution of fp16 with fp32 sums."""
    x = te.placeholder((1, groups * channels, size + 2, size + 2), "float16", "x")
    w = te.placeholder((groups * channels, channels, 3, 3), "float16", "w")
    return primfunc_from_tensors([x, w, topi.nn.group_conv2d_nchw(x, w, 1, 0, 1, groups, "float32")], "conv")


def product(rows: int, columns: int, inner: int) -> tirx.PrimFunc:
    x, w = te.placeholder((rows, inner), "float32", "x"), te.placeholder((inner, columns), "float32", "w")
    return primfunc_from_tensors([x, w, topi.matmul(x, w)], "product")


def scheduler(arch: str, price: StagePrices | None = None) -> GpuScheduler:
    return GpuScheduler(device_for(arch), price)


@pytest.mark.parametrize("arch", ARCHES)
def test_few_channels_of_a_group_leave_the_tensor_cores(arch: str) -> None:
    func, price = grouped(4, 56, 64), price_on(device_of_arch(arch))
    preferred, cheaper = scheduler(arch)(func), scheduler(arch, price)(func)
    assert (preferred.rule, cheaper.rule) == ("mma_contraction", "window")
    assert price(preferred.functions) > price.error * price(cheaper.functions)
    assert "µs predicted" in cheaper.reason and "by window" in cheaper.reason
    # As good as what is preferred, for those who weigh one stage against two.
    assert cheaper.rank == preferred.rank


@pytest.mark.parametrize("arch", ARCHES)
def test_what_differs_by_less_than_the_error_keeps_its_order(arch: str) -> None:
    class Doubtful(StagePrices):
        error = 1000.0

    func = grouped(4, 56, 64)
    assert scheduler(arch, Doubtful(device_of_arch(arch)))(func).rule == "mma_contraction"


@pytest.mark.parametrize("arch", ARCHES)
def test_a_large_product_stays_what_it_is(arch: str) -> None:
    func = product(384, 768, 768)
    assert scheduler(arch, price_on(device_of_arch(arch)))(func).rule == scheduler(arch)(func).rule == "contraction"


def test_a_window_yields_to_tiles_that_estimate_fewer_clocks() -> None:
    x, w = te.placeholder((1, 3, 230, 230), "float32", "x"), te.placeholder((64, 3, 7, 7), "float32", "w")
    func = primfunc_from_tensors([x, w, topi.nn.conv2d_nchw(x, w, 2, 0, 1)], "stem")
    request = GpuRequest("sm_90", 256, 132, 227 * 1024)
    offers = Offers(func, request)
    assert offers.clocks(RULES["contraction"]) < offers.clocks(RULES["window"])
    order = [rule.name for rule in offers.preferred()]
    assert order.index("contraction") + 1 == order.index("window")
    assert sorted(order) == sorted(RULES)
    assert schedule_gpu(func, request)[0].rule == "contraction"


def test_only_promising_rules_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering and predicting take most of the time: a rule that estimates more than the first has no part in it."""
    asked = []
    schedule = Offers.schedule

    def noted(offers: Offers, rule: Rule) -> object:
        asked.append(rule.name)
        return schedule(offers, rule)

    monkeypatch.setattr(Offers, "schedule", noted)
    scheduler("sm_90", price_on(device_of_arch("sm_90")))(product(384, 768, 768))
    assert "reduction" not in asked and "fallback" not in asked


def test_estimates_bound_themselves() -> None:
    for func in (grouped(4, 56, 64), grouped(16, 14, 64), product(49, 1024, 4096), product(8, 8, 8)):
        offers = Offers(func, GpuRequest("sm_80", 256, 108, 163 * 1024))
        for rule in RULES.values():
            if offers.estimates(rule):
                assert offers.clocks(rule) >= offers.sketch(rule).least
                assert offers.clocks(rule, below=0.0) == float("inf")
