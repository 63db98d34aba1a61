"""A product that normalizes takes the schedule that a log has for it without, where it is predicted to be faster so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import souffle
from souffle.models.builder import GraphBuilder
from souffle.models.layers import layer_norm, linear
from souffle.pipeline import compile_cuda
from souffle.placement.normalization import Chosen, normalize_in_products
from souffle.program import TEProgram
from souffle.schedule.drafts import Answer
from souffle.schedule.gpu import GpuRequest, sketch_of
from souffle.schedule.gpu.device import device_for
from souffle.schedule.log import RecordOrigin, open_log
from souffle.schedule.lower import DeviceFunction, cuda_target
from souffle.schedule.recipe import Recipe
from souffle.schedule.stage import Stage, draft_stage, flat_stages
from souffle.schedule.tuned import TunedAnswers
from souffle.tuning import LogWriter, NewRecord

REQUEST = GpuRequest("sm_90")
RULE = "mma_contraction"
TILES = 4


@dataclass(frozen=True)
class Prices:
    """Fewer tiles are faster, or slower."""

    fewer_are_faster: bool = True
    crowded: bool = False

    def __call__(self, functions: Sequence[DeviceFunction], registers: int = 0) -> float:
        tiles = sum(function.tiles for function in functions)
        return float(tiles if self.fewer_are_faster else -tiles)

    def crowds(self, functions: Sequence[DeviceFunction]) -> bool:
        return self.crowded


@pytest.fixture(scope="module")
def stage() -> Stage:
    """The reader of a normalization, with what is ahead of its sum."""
    b = GraphBuilder("g", 0)
    h = linear(b, b.input("x", (1, 128, 64)), 64, 64, bias=False)
    b.output(linear(b, layer_norm(b, h, 64, 1e-5), 64, 128, bias=False), "z", (1, 128, 128))
    seen: dict[str, object] = {}

    def hook(step: str, result: object) -> object:
        seen[step] = result
        chosen = Chosen(32, False, "asked for")
        return normalize_in_products(result, lambda *_: chosen)[0] if step == "narrow" else result

    options = {"precision": "mixed", "reductions": "one_phase", "cubin": False, "arch": "sm_90", "tuning_log": None}
    options["disable"] = ["attention", "channels", "reuse"]
    compile_cuda(souffle.import_onnx(b.model()), hook=hook, **options)
    return flat_stages(seen["schedule"])[-1]


@pytest.fixture
def logs(stage: Stage, tmp_path: Path):
    """A log with the product alone, in few tiles."""
    tes = [te_ for te_ in stage.tes if te_.placement is None]
    assert 0 < len(tes) < len(stage.tes)
    inputs, outputs = tuple(t for te_ in tes for t in te_.inputs), tes[-1].outputs
    names = [tuple(t.name for t in tensors) for tensors in (inputs, outputs)]
    func = draft_stage(tes, TEProgram(inputs, outputs, tuple(tes), {}, *names)).func
    sketch = sketch_of(RULE, func, REQUEST)
    # 2 x 4 warps of 2 x 2 fragments: tiles of 64 x 64.
    values = {"warps_along_rows": 2, "warps_along_inner": 1, "mma_rows": 2, "mma_columns": 2, "step": 32, "stages": 2}
    assert sketch.make(values).tiles == TILES
    writer = LogWriter(tmp_path, "sm_90", cuda_target("sm_90"))
    origin = RecordOrigin("predicted", "H200-SXM5-141GB", "0.27.0.post1", "0.1.0", "2026-01-01")
    writer.append(func, [NewRecord(Recipe(RULE, values), (1e-6,), origin)])
    return open_log(tmp_path, "sm_90")


@pytest.mark.parametrize(
    ("prices", "taken"), [(Prices(), True), (Prices(fewer_are_faster=False), False), (Prices(crowded=True), False)]
)
def test_the_products_record_is_taken_where_it_is_faster(stage: Stage, logs, prices: Prices, taken: bool) -> None:
    own = stage.schedule
    assert own.rule == RULE and own.tiles > TILES
    before = Answer(own, RULE, 0, False, own.tiles, "", stage.functions)
    after = TunedAnswers(logs, device_for("sm_90"), prices)(stage.draft, before)
    assert after.tiles == (TILES if taken else own.tiles) and (after is before) is not taken
    assert not logs[0].problems
