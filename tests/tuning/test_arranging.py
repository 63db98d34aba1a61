"""Ways to compute independent stages side by side: measured on a played GPU, written down, and taken by compilation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import souffle
from benchmarks.side_by_side import branches
from souffle.cli.main import main
from souffle.codegen.nvcc import find_nvcc
from souffle.codegen.plan import Plan
from souffle.errors import OptionError
from souffle.kernel.group_kernel import kernel_of_group
from souffle.kernel.side_by_side import Considered
from souffle.pipeline import compile_cuda, independent_stages_of
from souffle.schedule.arrangement import Arrangement, Arrangements, arrangement_line, arrangement_of
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.scheduler import gpu_request
from souffle.schedule.log import ARRANGEMENTS, TuningLog
from souffle.schedule.lower import cuda_target
from souffle.tuning import ArrangingReport, LogWriter, MeasuringBench, arrange, cost_device_for
from souffle.tuning.log_work import logs_in, merge, prune
from souffle.verify import PROVEN
from souffle.workers import Job, engine_for

ARCH, GPU = "sm_90", "NVIDIA H200"
OPTIONS = {"level": "V4", "arch": ARCH, "cubin": False, "disable": ("reuse", "attention", "resident", "channels")}
GIVEN = {"driver": "tests.tuning.played_gpu:driver"}


@pytest.fixture(scope="module")
def group() -> Considered:
    """A map beside a sum, between the same two barriers."""
    (found,) = independent_stages_of(branches(2), **OPTIONS)
    return found


@pytest.fixture(scope="module")
def measured(group: Considered, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ArrangingReport]:
    """A log with two ways, and what was said of them."""
    if find_nvcc() is None:
        pytest.skip("no nvcc here")
    folder = tmp_path_factory.mktemp("measured")
    return folder, searched([group], folder, 2)


def searched(groups: Sequence[Considered], folder: Path, trials: int) -> ArrangingReport:
    with engine_for("here") as engine:
        job = Job("souffle.tuning.measuring:device", GIVEN, "the GPU", resource="gpu")
        name = engine.submit(job).result().value["name"]
        return arrange(
            groups,
            trials=trials,
            request=gpu_request(device_for(ARCH)),
            cost_device=cost_device_for(ARCH, None),
            bench=MeasuringBench(name, "tests.tuning.played_gpu:measure", GIVEN),
            writer=LogWriter(folder, ARCH, cuda_target(ARCH)),
            engine=engine,
        )


def hfuse_of(folder: Path) -> tuple[Plan, list[str]]:
    """The network with a log, and what was decided of its independent stages."""
    plan = compile_cuda(branches(2), verify="memory", tuning_log=folder, **OPTIONS).plan
    assert plan.certificate.verdict == PROVEN
    return plan, [f"{d.accepted} {d.subject}: {d.reason}" for d in plan.decisions if d.stage == "hfuse"]


def written(folder: Path, several: Sequence[Arrangement]) -> Path:
    LogWriter(folder, ARCH, cuda_target(ARCH)).append_arrangements(several)
    return folder


def test_ways_are_compared_measured_and_gone_on_with(group: Considered, measured) -> None:
    folder, report = measured
    assert report.figure == "measured" and report.new_trials == 2 and not report.interrupted
    (found,) = report.groups
    assert len(found.ways) == 2 and all(way.seconds > 0 and way.apart_seconds > 0 for way in found.ways)
    assert [way.seconds for way in found.ways] == sorted(way.seconds for way in found.ways)
    lines = TuningLog(folder / ARCH, ARCH).arrangements
    assert {tuple(stage.share for stage in one.stages) for one in lines} == {
        tuple(share.form for share in way.shares) for way in group.ways[:2]
    }
    assert all(one.origin.registers > 0 and one.origin.own_seconds > 0 for one in lines)
    again = searched([group, group], folder, 2)
    assert again.new_trials == 0 and again.groups[0].runs == 2 * group.runs
    assert [way.seconds for way in again.groups[0].ways] == [way.seconds for way in found.ways]


def test_a_way_that_computes_something_else_is_no_way(
    group: Considered, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_nvcc() is None:
        pytest.skip("no nvcc here")

    def without_a_stage(stages, shares, block, bound):
        shape = kernel_of_group(stages, shares, block, bound)
        apart = all(share.form == (0, 0, 0, 0) for share in shares)
        return shape if apart else replace(shape, calls=shape.calls[:1])

    monkeypatch.setattr("souffle.tuning.arranging.kernel_of_group", without_a_stage)
    report = searched([group], tmp_path, 1)
    (way,) = report.groups[0].ways
    assert way.seconds is None and "output1" in way.problem
    assert searched([group], tmp_path, 1).new_trials == 0
    assert hfuse_of(tmp_path)[1] == hfuse_of(Path(tmp_path))[1] and "predicted" in hfuse_of(tmp_path)[1][0]


def test_what_was_measured_decides(measured, tmp_path) -> None:
    lines = TuningLog(measured[0] / ARCH, ARCH).arrangements
    parted = next(one for one in lines if any(stage.part for stage in one.stages))

    def figured(one: Arrangement, seconds: float, device: str = GPU) -> Arrangement:
        return replace(one, figures=(seconds,), origin=replace(one.origin, own_seconds=4e-6, device=device))

    # The parts gain most, though the model thinks otherwise.
    plan, said = hfuse_of(written(tmp_path / "parts", [figured(one, 2e-6 if one is parted else 3e-6) for one in lines]))
    threads = [stage.share[-1] for stage in parted.stages]
    assert len(said) == 1 and said[0].startswith("True") and f"(threads 0 to {threads[0] - 1})" in said[0], said
    assert f"measured on {GPU} to take 2.00 µs side by side, 4.00 µs one after the other" in said[0]
    assert "part_tid" in plan.modules[0].text
    # None gains.
    plan, said = hfuse_of(written(tmp_path / "apart", [figured(one, 5e-6) for one in lines]))
    names = [stage.name for stage in parted.stages]
    assert not any(one.startswith("True") and all(name in one for name in names) for one in said), said
    assert "part_tid" not in plan.modules[0].text
    # Of other schedules, or in other blocks, nothing is known.
    unlike = [replace(one, stages=(replace(one.stages[0], text="0" * 16), *one.stages[1:])) for one in lines]
    unlike += [replace(one, block=replace(one.block, resident=1)) for one in lines]
    _, said = hfuse_of(written(tmp_path / "unlike", [figured(one, 5e-6) for one in unlike]))
    assert said[0].startswith("True") and "predicted to take" in said[0]
    # Blocks cannot be divided so.
    odd = [(0, 0, 0, 100), (0, 0, 0, 4096), (1, 0, 0, 0), (0, 3, 0, 0)]
    strange = [replace(parted, stages=tuple(replace(own, share=form) for own in parted.stages)) for form in odd]
    _, said = hfuse_of(written(tmp_path / "strange", [figured(one, 1e-6) for one in strange]))
    assert "predicted to take" in said[0]
    # A part whose function is another now.
    stages = tuple(replace(stage, part="0" * 16) for stage in parted.stages)
    _, said = hfuse_of(written(tmp_path / "changed", [figured(replace(parted, stages=stages), 1e-6)]))
    assert "predicted to take" in said[0]


def test_what_was_measured_on_the_gpu_that_is_compiled_for_counts_first(measured) -> None:
    one, *_ = TuningLog(measured[0] / ARCH, ARCH).arrangements
    texts = [stage.text for stage in one.stages]

    def on(device: str, seconds: float, own: float = 1.0) -> Arrangement:
        return replace(one, figures=(seconds,), origin=replace(one.origin, device=device, own_seconds=own))

    several = [on("NVIDIA H100 PCIe", 0.1), on(GPU, 0.5), on(GPU, 0.3)]
    assert [known.seconds for known in Arrangements(several, "H200").of(one.block, texts)] == [0.3, 0.5]
    assert [known.seconds for known in Arrangements(several[:1], "H200").of(one.block, texts)] == [0.1]
    predicted = replace(one, origin=replace(one.origin, figure="predicted"))
    failed = replace(one, figures=())
    assert not Arrangements([predicted, failed], "H200") and not Arrangements([]).of(one.block, texts)


def test_lines_are_read_back_put_in_order_and_told_if_damaged(measured, tmp_path) -> None:
    lines = TuningLog(measured[0] / ARCH, ARCH).arrangements
    for one in lines:
        data = json.loads(arrangement_line(one, ARCH))
        assert replace(arrangement_of(one.where, data, ARCH), where="") == replace(one, where="")
    text = b"".join(arrangement_line(one, ARCH) for one in reversed(lines))
    bad = json.loads(arrangement_line(lines[0], ARCH))
    damaged = [
        {**bad, "arch": "sm_80"}, {**bad, "seconds": [-1.0]}, {**bad, "block": [256, 1]}, {**bad, "stages": []},
        {**bad, "figure": "guessed"}, {**bad, "stages": [{**own, "share": [0, 0, -1, 0]} for own in bad["stages"]]},
    ]  # fmt: skip
    folder = tmp_path / ARCH
    folder.mkdir()
    (folder / ARRANGEMENTS).write_bytes(text + text + b"".join(json.dumps(d).encode() + b"\n" for d in damaged) + b"{")
    log = TuningLog(folder, ARCH)
    assert len(log.arrangements) == 2 * len(lines) and len(log.problems) == len(damaged) + 1
    assert [found.arch for found in logs_in(tmp_path)] == [ARCH]
    LogWriter(tmp_path, ARCH, cuda_target(ARCH)).sort()
    assert (folder / ARRANGEMENTS).read_bytes() == (measured[0] / ARCH / ARRANGEMENTS).read_bytes()
    (merged,) = merge([TuningLog(folder, ARCH), TuningLog(measured[0] / ARCH, ARCH)], tmp_path / "both")
    assert len(merged.arrangements) == len(lines)
    assert len(prune(merged, 1).arrangements) == len(prune(merged, 1, tmp_path / "kept").arrangements) == len(lines)


def test_without_a_gpu_the_command_says_what_is_predicted(measured, tmp_path, capsys, monkeypatch) -> None:
    def found(*_: object, **__: object) -> object:
        return independent_stages_of(branches(2), **OPTIONS)

    monkeypatch.setattr("souffle.searching.independent_stages_of", found)
    monkeypatch.setattr("souffle.searching.programs_of", lambda *_: [("", branches(2))])
    command = ["tune", "x.onnx", "--side-by-side", "--trials", "2", "--arch", ARCH, "--log", str(tmp_path / "log")]
    assert main([*command, "--measure", "none", "--on", "here", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "tile 0 on worker" in out and "nothing was measured or written" in out and "measured µs" not in out
    assert not (tmp_path / "log").exists()
    assert main([*command, "--measure", "none", "--on", "here", "--quiet", "--tasks", "nothing"]) == 2
    assert "with 'nothing'; there are: map5 | sum19" in capsys.readouterr().err
    assert main(["log", "show", str(measured[0])]) == 0
    out = capsys.readouterr().out
    assert "stages beside each other" in out and "threads" in out and "2 arrangements" in out
    assert main(["log", "verify", str(measured[0])]) == 0
    with pytest.raises(OptionError, match="level='V4'"):
        souffle.tune_side_by_side(branches(2), trials=1, arch=ARCH, level="V3")
    with pytest.raises(OptionError, match="trials=0"):
        souffle.tune_side_by_side(branches(2), trials=0, arch=ARCH)
