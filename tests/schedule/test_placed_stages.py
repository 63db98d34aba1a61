"""Where stages stand when some are joined with earlier ones."""

from __future__ import annotations

from souffle.analysis import analyze
from souffle.schedule.drafts import Drafts
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.placed_stages import PlacedStages
from tests.testlib import Builder


def test_a_joined_stage_stands_where_its_last_te_does() -> None:
    b = Builder()
    x = b.input(8)
    first = b.relu(x)
    second, third = b.relu(first), b.relu(first)
    program = analyze(b.program(second, third)).program
    drafts = Drafts(program, GpuScheduler(device_for("sm_80")))
    stages = [drafts.formed([te_]) for te_ in program.tes]
    placed = PlacedStages(program)
    assert placed.before(stages[0]) is None
    placed.place(stages[0])
    placed.place(stages[1])
    assert placed.before(stages[2]) is stages[0]
    members = (*stages[0].tes, *stages[2].tes)
    readers = placed.other_readers(stages[0], members)
    assert readers == list(stages[1].tes) and placed.first_placed(readers) is stages[1].tes[0]
    assert placed.first_placed(stages[2].tes) is None
    joined = drafts.formed(members)
    placed.place(joined)
    assert placed.stages == [stages[1], joined]
