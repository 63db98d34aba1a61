"""What a look leaves of a candidate: another process makes the same text and the same figures of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from souffle.codegen.cuda import emit_cuda
from souffle.codegen.nvcc import compile_cubin, find_nvcc
from souffle.cost import device_of_arch, predict_stage
from souffle.kernel.kernel_shape import kernel_of_stage
from souffle.pipeline import stages_of
from souffle.schedule.follow import followed
from souffle.schedule.gpu import GpuRequest
from souffle.schedule.lower import cuda_target, lower_stage
from souffle.schedule.recipe import Recipe
from souffle.schedule.resources import StageResources
from souffle.tuning import tasks_of
from souffle.tuning.candidate import Candidate, kernel_name, text_of_candidates
from souffle.tuning.space import Space, sampled
from souffle.tuning.stage_work import build, look, packed_setting, packed_stage, predict_built, sketches
from tests.thorough import some
from tests.tuning.networks import APART, gemm

ARCH = "sm_90"
TARGET = cuda_target(ARCH)
DEVICE = device_of_arch(ARCH)
REQUEST = GpuRequest(ARCH)
PAYLOAD = {"stage": "stage", "setting": "setting"}
needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")


@pytest.fixture(scope="module", params=some([(37, 53, 41)], [(64, 96, 128)]), ids=str)
def draft(request):
    """A product and a reduction of its rows."""
    return tasks_of([stages_of(gemm(*request.param), cubin=False, **APART)])[0].stage.draft


@pytest.fixture(scope="module")
def shared(draft) -> dict[str, bytes]:
    return {"stage": packed_stage(draft), "setting": packed_setting(REQUEST, DEVICE)}


@pytest.fixture(scope="module")
def looks(shared) -> list[dict]:
    """Candidates of each kind of sketch."""
    found = []
    for number, data in enumerate(sketches({**PAYLOAD, "seed": 1, "rule": ""}, shared)["spaces"]):
        space, draws, fitting = Space.of_data(data), random.Random(number), 0
        for _ in range(40):
            recipe = sampled(space, REQUEST.threads, draws)
            value = look({**PAYLOAD, "recipe": recipe.data(), "features": False}, shared)
            if not value["problem"] and all(value["text"] != one["text"] for one in found):
                found.append(value)
                fitting += 1
            if fitting == 3:
                break
    assert len({one["recipe"]["rule"] for one in found}) >= 2
    return found


def lowered(draft, value):
    recipe = Recipe.of_data(value["recipe"])
    schedule = followed(recipe, draft.func, REQUEST)
    return recipe, lower_stage("stage", schedule, TARGET, max_shared_bytes=REQUEST.max_shared_bytes)


def test_the_text_is_that_of_the_stage(draft, looks) -> None:
    parameters = [(tensor.dtype, tensor.nbytes) for tensor in (*draft.inputs, *draft.outputs)]
    kernels = []
    for value in looks:
        recipe, functions = lowered(draft, value)
        name = kernel_name(recipe.key)
        kernels.append((name, kernel_of_stage(functions, parameters, f"{name}_part")))
    assert len({name for name, _ in kernels}) == len(looks)
    candidates = [Candidate.of_bytes(value["candidate"]) for value in looks]
    assert text_of_candidates(candidates, TARGET) == emit_cuda(kernels, TARGET)[0]
    for candidate, (name, shape) in zip(candidates, kernels, strict=True):
        found = (candidate.name, candidate.tiles, candidate.threads, candidate.shared_bytes)
        assert found == (name, shape.tiles, shape.threads, shape.shared_bytes)


def test_the_seconds_are_those_of_the_stage(draft, looks) -> None:
    for value in looks:
        _, functions = lowered(draft, value)
        assert value["seconds"] == [predict_stage(functions, DEVICE, warm=warm).seconds for warm in (False, True)]


@pytest.fixture(scope="module")
def one_of_each(looks) -> list[dict]:
    """What nvcc is to compile, which takes it most of a second each time: one candidate of each rule."""
    return list({value["recipe"]["rule"]: value for value in looks}.values())


@needs_nvcc
def test_company_changes_no_figure(draft, shared, one_of_each) -> None:
    packed = [value["candidate"] for value in one_of_each]
    together = predict_built({**PAYLOAD, "candidates": packed[::-1]}, shared)[::-1]
    for value, figures in zip(one_of_each, together, strict=True):
        _, functions = lowered(draft, value)
        pool, threads = (max(getattr(one, what) for one in functions) for what in ("shared_bytes", "threads"))
        candidate = Candidate.of_bytes(value["candidate"])
        used = compile_cubin(text_of_candidates([candidate], TARGET), ARCH)[1][candidate.name]
        resources = StageResources(
            used.registers, used.static_shared_bytes, pool, threads, used.spill_store_bytes, True
        )
        seconds = [predict_stage(functions, DEVICE, resources, warm=warm).seconds for warm in (False, True)]
        assert figures == {
            "problem": "",
            "seconds": seconds,
            "registers": used.registers,
            "spill_bytes": used.spill_store_bytes,
        }


@needs_nvcc
def test_one_that_nvcc_rejects_costs_itself_alone(shared, one_of_each, monkeypatch) -> None:
    packed = [value["candidate"] for value in one_of_each]
    bad = Candidate.of_bytes(packed[1]).name

    def spoilt(text: str, arch: str):
        return compile_cubin(text.replace(f"{bad}(", f"{bad}(undefined_thing "), arch)

    monkeypatch.setattr("souffle.tuning.stage_work.compile_cubin", spoilt)
    found = predict_built({**PAYLOAD, "candidates": packed}, shared)
    assert [one["problem"] != "" for one in found] == [number == 1 for number in range(len(packed))]
    assert "undefined_thing" in found[1]["problem"]
    planned = build({**PAYLOAD, "candidates": packed[:2]}, shared)
    assert [bool(one.get("plan")) for one in planned] == [True, False]


def test_another_process_makes_the_same_text(looks, tmp_path: Path) -> None:
    for number, value in enumerate(looks):
        (tmp_path / str(number)).write_bytes(value["candidate"])
    program = (
        "import sys, pathlib\n"
        "from souffle.tuning.candidate import Candidate, text_of_candidates\n"
        "from souffle.schedule.lower import cuda_target\n"
        "paths = sorted(pathlib.Path(sys.argv[1]).iterdir(), key=lambda path: int(path.name))\n"
        "packed = [path.read_bytes() for path in paths]\n"
        f"print(text_of_candidates([Candidate.of_bytes(one) for one in packed], cuda_target({ARCH!r})), end='')\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    candidates = [Candidate.of_bytes(value["candidate"]) for value in looks]
    assert done.stdout == text_of_candidates(candidates, TARGET)
