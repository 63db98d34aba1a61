"""Which joins are offered where tiles can own what both stages compute."""

from __future__ import annotations

from tvm import te, tirx

from souffle.analysis import analyze
from souffle.cost.device import cost_device
from souffle.cost.stage_price import price_on
from souffle.schedule.drafts import Answer, Drafts, Formed
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.owned_tiles import join_owned
from tests.testlib import Builder


class Priced(GpuScheduler):
    """By which two stages take two seconds, and so many times as long where tiles own what both compute."""

    def __init__(self, factor: float) -> None:
        super().__init__(device_for("sm_80"), price_on(cost_device("A100-SXM4-40GB")))
        self.factor = factor

    def least_seconds(self, func: tirx.PrimFunc) -> float:
        return 0.0

    def seconds(self, answer: Answer) -> float:
        return 2.0 * self.factor if answer.rule == "channel_owned" else 1.0


def joined(factor: float) -> tuple[list[Formed], list[Formed], list[bool]]:
    """Three sums in a row within 64 channels, apart and as they are joined; and what was decided."""
    b = Builder()
    tensor = b.input(64, 8, 8, 8)
    for axes in (3, 2, 1):
        r = te.reduce_axis((0, 8), "r")
        tensor = b.add(
            lambda t, axes=axes, r=r: te.compute((64, 8, 8)[:axes], lambda *at: te.sum(t[(*at, r)], [r])), tensor
        )
    analysis = analyze(b.program(tensor))
    drafts = Drafts(analysis.program, Priced(factor))
    apart = [drafts.formed([te_]) for te_ in analysis.program.tes]
    stages, decisions = join_owned(apart, analysis, drafts)
    return apart, stages, [decision.accepted for decision in decisions]


def test_what_is_faster_is_joined_as_far_as_it_goes() -> None:
    _, stages, accepted = joined(0.9)
    (stage,) = stages
    assert accepted == [True, True] and len(stage.tes) == 3 and len(stage.parts[0].tes) == 2


def test_what_is_nearly_as_fast_is_offered_once() -> None:
    """Taken apart again, all that is joined for certain is left."""
    apart, stages, accepted = joined(1.1)
    assert accepted == [False, False, True]
    assert [len(stage.tes) for stage in stages] == [2, 1]
    assert stages[0].parts == (apart[0], apart[1]) and stages[1] is apart[2]


def test_what_is_slower_by_more_than_the_model_errs_is_not() -> None:
    apart, stages, accepted = joined(1.3)
    assert accepted == [False, False] and stages == apart
