"""Loops whose turns decide how many copies are waited for are written out; others stay."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tvm import te, tirx

import souffle
from souffle.cost import device_of_arch
from souffle.pipeline import stages_of
from souffle.schedule.gpu import GpuRequest
from souffle.schedule.lower import cuda_target, device_function
from souffle.schedule.lower.constant_waits import with_constant_waits
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.tuning import LogWriter, NewRecord, tasks_of
from souffle.tuning.space import Space, sampled
from souffle.tuning.stage_work import look, packed_setting, packed_stage, sketches
from souffle.tuning.store import origin_now
from souffle.tvm_compat import Analyzer, PrimExpr, collect
from tests.defects import fails_without

ARCH = "sm_90"
COUNT = "async_wait_inflight_count"


def waiting(turns: int, left: int, *, alike: bool = False) -> tirx.PrimFunc:
    """In each turn, a wait until so many copies are left, and a number written down under a name."""
    turn, name = tirx.Var("turn", "int32"), tirx.Var("name", "int32")
    out = tirx.decl_buffer((turns,), "int32", name="out")
    count = tirx.IntImm("int32", left) if alike else left - turn
    store = tirx.SeqStmt([tirx.Bind(name, turn * 3), tirx.BufferStore(out, name, [turn])])
    wait = tirx.AttrStmt(tirx.IntImm("int32", 0), "async_wait_queue_scope", tirx.IntImm("int32", 0), store)
    body = tirx.AttrStmt(tirx.IntImm("int32", 0), COUNT, count, wait)
    return tirx.PrimFunc([out], tirx.For(turn, 0, turns, tirx.ForKind.UNROLLED, body))


def counts(function: tirx.PrimFunc) -> list[PrimExpr]:
    return [one.value for one in collect(function.body, tirx.AttrStmt) if one.attr_key == COUNT]


def test_a_loop_that_decides_is_written_out() -> None:
    function = with_constant_waits(waiting(3, 2))
    assert [int(Analyzer().simplify(count)) for count in counts(function)] == [2, 1, 0]
    assert not collect(function.body, tirx.For)
    names = [bind.var for bind in collect(function.body, tirx.Bind)]
    assert len(names) == 3 and not any(a.same_as(b) for a in names for b in names if a is not b)


@pytest.mark.parametrize("function", [waiting(3, 2, alike=True), waiting(64, 64)], ids=["alike", "long"])
def test_others_stay(function: tirx.PrimFunc) -> None:
    assert len(collect(with_constant_waits(function).body, tirx.For)) == 1


def pipelined(program: souffle.TEProgram, folder: Path, seed: int) -> souffle.Network:
    """With one of MetaSchedule's own pipelines of asynchronous copies, drawn at random, in a log."""
    (task,) = tasks_of([stages_of(program, cubin=False, level="V0", arch=ARCH)])
    device, request = device_of_arch(ARCH), GpuRequest(ARCH)
    shared = {"stage": packed_stage(task.stage.draft), "setting": packed_setting(request, device)}
    payload = {"stage": "stage", "setting": "setting"}
    found = sketches({**payload, "seed": 1, "rule": task.stage.schedule.rule}, shared)["spaces"]
    spaces = [Space.of_data(data) for data in found if "software_pipeline_async_stages" in str(data["trace"])]
    rng = random.Random(seed)
    recipes = (sampled(rng.choice(spaces), request.threads, rng) for _ in range(200))
    looks = (look({**payload, "recipe": recipe.data(), "features": False}, shared) for recipe in recipes)
    fitting = next(one for one in looks if not one["problem"])
    recipe = Recipe.of_data(fitting["recipe"])
    assert recipe.rule == NATIVE_RULE
    origin = origin_now("measured", device.product, text=fitting["text"])
    LogWriter(folder, ARCH, cuda_target(ARCH)).append(task.stage.draft.func, [NewRecord(recipe, (1e-6,), origin)])
    options = {"device": "cpu", "cubin": False, "tuning_log": folder, "level": "V0", "arch": ARCH}
    return souffle.compile(program, target="cuda", **options)


def product(columns: int) -> souffle.TEProgram:
    a, b = te.placeholder((32, 96), name="a"), te.placeholder((columns, 96), name="b")
    k = te.reduce_axis((0, 96), name="k")
    out = te.compute((32, columns), lambda i, j: te.sum(a[i, k] * b[j, k], axis=k), name="c")
    return souffle.from_te([a, b], [out])


def test_generated_pipelines_need_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM's CUDA generator takes no wait whose number a loop decides; MetaSchedule's pipelines end in such loops."""
    texts = []
    for seed in range(4):
        network = pipelined(product(48), tmp_path / str(seed), seed)
        texts.append(network.plan.modules[0].text)
        rng = np.random.default_rng(1)
        x, y = (rng.standard_normal(shape).astype("float32") for shape in ((32, 96), (48, 96)))
        (found,) = network(x, y).values()
        np.testing.assert_allclose(found, x @ y.T, rtol=1e-4, atol=1e-4)
    assert any("cp.async" in text for text in texts)
    monkeypatch.setattr(device_function, "with_constant_waits", lambda function: function)
    with fails_without("with_constant_waits", Exception, match="cp_async_wait_group"):
        # What was lowered before is remembered, so that it has to be another program.
        for seed in range(4):
            pipelined(product(64), tmp_path / f"without {seed}", seed)
