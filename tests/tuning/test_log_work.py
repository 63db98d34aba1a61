"""Tuning logs as people use them: the commands, and MetaSchedule's database there and back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tvm import s_tir, te
from tvm.s_tir import meta_schedule as ms

from souffle.cli.main import main
from souffle.schedule.gpu import sketch_of
from souffle.schedule.gpu.device import device_for
from souffle.schedule.log import RECORDS, WORKLOADS, RecordOrigin, TuningLog
from souffle.schedule.lower import cuda_target, lower_stage, text_of
from souffle.schedule.recipe import NATIVE_RULE, Recipe
from souffle.schedule.record import workload_module
from souffle.schedule.tuned import followed, gpu_request
from souffle.tuning.log_work import merge
from souffle.tuning.metaschedule_log import export_log, import_log, recipe_of_trace
from souffle.tuning.sketches import native_context, plain, spaces_of
from souffle.tuning.space import sampled
from souffle.tuning.store import LogWriter, NewRecord

ARCH = "sm_90"
REQUEST = gpu_request(device_for(ARCH))
TARGET = cuda_target(ARCH)
ORIGIN = RecordOrigin("predicted", "H200-SXM5-141GB", "0.27.0.post1", "0.1.0", "2026-01-01", own_seconds=4e-6)


def product(rows: int = 64):
    a, b = te.placeholder((rows, 48), name="a"), te.placeholder((48, 96), name="b")
    k = te.reduce_axis((0, 48), name="k")
    c = te.compute((rows, 96), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    return te.create_prim_func([a, b, c]).with_attr("global_symbol", "stage")


@pytest.fixture(scope="module")
def func():
    return product()


@pytest.fixture(scope="module")
def recipes(func) -> list[Recipe]:
    """The rule's own choice, a neighbour of it, and a tiled trace of MetaSchedule's that makes a schedule."""
    sketch = sketch_of("contraction", func, REQUEST)
    own = dict(sketch.choose())
    other = next(
        {**own, knob.name: value}
        for knob in sketch.knobs
        for value in knob.values
        if value != own[knob.name] and not hasattr(sketch.make({**own, knob.name: value}), "reason")
    )
    space = next(space for space in spaces_of(func, REQUEST, TARGET, seed=1) if space.tiles)
    draws = random.Random(1)
    drawn = (sampled(space, REQUEST.threads, draws) for _ in range(50))
    traces = (Recipe(NATIVE_RULE, {}, processed(func, recipe)) for recipe in drawn)
    tiled = next(recipe for recipe in traces if not hasattr(followed(recipe, func, REQUEST), "reason"))
    return [Recipe("contraction", own), Recipe("contraction", other), tiled]


def processed(func, recipe: Recipe) -> list:
    """A trace with the steps of MetaSchedule's postprocessors."""
    sch = s_tir.Schedule(workload_module(func), debug_mask="none")
    s_tir.schedule.Trace.apply_json_to_schedule(recipe.choices, sch)
    sch.enter_postproc()
    for postproc in native_context(func, REQUEST, TARGET, seed=1).space_generator.postprocs:
        assert postproc.apply(sch)
    return plain(sch.trace.as_json(remove_postproc=False))


def text(func, recipe: Recipe) -> str:
    return text_of(lower_stage("stage", followed(recipe, func, REQUEST), TARGET))


@pytest.fixture
def log(tmp_path: Path, func, recipes) -> Path:
    """Records: two give the text of their figure, one another, one does not fit, one says that it cannot be used."""
    texts = [text(func, recipe) for recipe in recipes]
    own, other, tiled = recipes
    gone = Recipe("contraction", {**own.knobs, "step": 12_345})
    records = [
        NewRecord(own, (4e-6, 4e-6), replace(ORIGIN, text=texts[0], tiles=6)),
        NewRecord(other, (2e-6, 3e-6), replace(ORIGIN, text=texts[0], trial=1)),
        NewRecord(tiled, (3e-6,), replace(ORIGIN, text=texts[2], trial=2, registers=77, spill_bytes=8)),
        NewRecord(gone, (8e-6, 8e-6), replace(ORIGIN, trial=3)),
        NewRecord(gone, (), replace(ORIGIN, trial=4, problem='it "differs"')),
    ]
    LogWriter(tmp_path / "log", ARCH, TARGET).append(func, records, "dense_add")
    return tmp_path / "log"


def said(log: TuningLog) -> list[tuple]:
    return [(one.workload, one.figures, one.origin, one.recipe.key, one.recipe.trace) for one in log.records]


def test_metaschedules_database_and_back(log: Path, tmp_path: Path, func, recipes) -> None:
    ours = TuningLog(log / ARCH, ARCH)
    assert export_log(ours, tmp_path / "database" / ARCH) == 5
    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "database" / ARCH))
    assert len(database) == 5 and database.has_workload(workload_module(func))
    top = database.get_top_k(database.commit_workload(workload_module(func)), 5)
    assert [float(record.run_secs[0]) for record in top][:2] == pytest.approx([2e-6, 3e-6])
    notes = []
    for record in top:
        assert str(record.target.attrs["arch"]) == ARCH
        sch = s_tir.Schedule(workload_module(func))
        record.trace.apply_to_schedule(sch, remove_postproc=False)
        notes.append(dict(sch.get(sch.get_sblock("root")).annotations))
        if "souffle.rule" not in notes[-1]:
            bindings = [sch.get(loop).thread_binding for loop in loops(sch)]
            bound = {str(binding.thread_tag) for binding in bindings if binding is not None}
            assert {"blockIdx.x", "threadIdx.x"} <= bound
    best, tiled = notes[:2]
    knobs = {key.removeprefix("souffle.knob."): int(value) for key, value in best.items() if "knob" in key}
    assert best["souffle.rule"] == "contraction" and knobs == dict(recipes[1].knobs)
    assert best["souffle.origin.figure"] == "predicted" and int(best["souffle.origin.trial"]) == 1
    assert float(tiled["souffle.origin.own_seconds"]) == pytest.approx(4e-6)

    assert import_log(tmp_path / "database", tmp_path / "again").records == {ARCH: 5}
    LogWriter(log, ARCH, TARGET).sort()
    again = TuningLog(tmp_path / "again" / ARCH, ARCH)
    assert sorted(said(again), key=repr) == sorted(said(TuningLog(log / ARCH, ARCH)), key=repr)
    assert (tmp_path / "again" / ARCH / RECORDS).read_bytes() == (log / ARCH / RECORDS).read_bytes()


def loops(sch: s_tir.Schedule) -> list:
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    return [loop for block in blocks for loop in sch.get_loops(block)]


def test_what_metaschedule_measured_by_itself(tmp_path: Path, func, recipes) -> None:
    """Its records say nothing of a device; damaged lines are named; the trace of an older log of ours is read."""
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    workload = database.commit_workload(workload_module(func))
    sch = s_tir.Schedule(workload_module(func))
    s_tir.schedule.Trace.apply_json_to_schedule(recipes[2].trace, sch)
    arguments = ms.arg_info.ArgInfo.from_prim_func(func)
    for seconds in ([1e-6, 2e-6, 3e-6], [1e10]):
        database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, seconds, TARGET, arguments))
    path = tmp_path / "database_tuning_record.json"
    path.write_text(path.read_text() + "[9,[]]\n" + path.read_text().replace("[0,", "[4,", 1))
    skipped = import_log(tmp_path, tmp_path / "log")
    assert not skipped.records and "no device was named" in skipped.problems[0].reason
    done = import_log(tmp_path, tmp_path / "log", "NVIDIA L40S")
    assert done.records == {ARCH: 3}
    assert [problem.where for problem in done.problems] == [f"{path}:3", f"{path}:4"]
    records = TuningLog(tmp_path / "log" / ARCH, ARCH).of(func)
    assert {(one.figures, one.origin.figure, one.origin.device) for one in records} == {
        ((1e-6, 2e-6, 3e-6), "measured", "NVIDIA L40S"),
        ((), "measured", "NVIDIA L40S"),
    }
    assert {text(func, one.recipe) for one in records} == {text(func, recipes[2])}

    drawn = ["SampleCategorical", [], [[8, 16], [0.5, 0.5]], ["v1"]]
    steps = [
        ["GetSBlock", [], ["root", "main"], ["b0"]],
        *(drawn, ["Annotate", ["b0", "v1"], ["souffle.knob.step"], []]),
        ["Annotate", ["b0", '"contraction"'], ["souffle.rule"], []],
        *(["EnterPostproc", [], [], []], ["Annotate", ["b0", '"measured"'], ["souffle.origin.figure"], []]),
    ]
    recipe, origin = recipe_of_trace([steps, [[1, 1]]])
    assert (recipe.rule, recipe.knobs, recipe.trace) == ("contraction", {"step": 16}, None)
    assert origin == {"figure": "measured"}


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_show(log: Path, capsys) -> None:
    status, out, _ = run(capsys, "log", "show", log, "--quiet")
    row = out.splitlines()[-1].split()
    assert status == 0 and row[:7] == ["dense_add", "5", "5", "3", "2.50", "1.60", "predicted"]
    assert "float32[64,48]" in out and "5 records of 1 stages" in out.splitlines()[0]
    status, out, _ = run(capsys, "log", "show", log, "--json", "--quiet", "--replay", "--tasks", "^dense")
    (found,) = json.loads(out)
    (stage,) = found["stages"]
    assert (stage["failed"], stage["useful"], stage["outcome"], stage["gain"]) == (1, 3, "another", pytest.approx(1.6))
    _, out, _ = run(capsys, "log", "show", log, "--json", "--quiet", "--tasks", "other")
    assert json.loads(out)[0]["stages"] == []


def test_verify_names_what_does_not_fit(log: Path, capsys) -> None:
    status, out, _ = run(capsys, "log", "verify", log, "--quiet")
    lines = out.splitlines()
    path = log / ARCH / RECORDS
    assert status == 1
    assert lines[0].startswith(f"{path}:2: another (dense_add, contraction ")
    assert lines[1].startswith(f"{path}:4: unfit: OptionError: step=12345 is none of")
    assert lines[2] == "4 records followed:" and [line.split()[0] for line in lines[3:]] == ["2", "1", "1", "1"]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    status, out, _ = run(capsys, "log", "verify", log, "--quiet", "--json", "--all")
    assert status == 0 and [one["outcome"] for one in json.loads(out)["records"]] == ["same", "another", "same"]
    path.write_bytes(path.read_bytes() + b"{\n")
    status, out, _ = run(capsys, "log", "verify", log, "--quiet")
    assert status == 1 and out.startswith(f"{path}:4: JSONDecodeError")


def test_merge_and_prune(log: Path, tmp_path: Path, capsys, recipes) -> None:
    more = tmp_path / "more"
    one = NewRecord(recipes[0], (1e-6, 1e-6), replace(ORIGIN, figure="measured", device="NVIDIA H200"))
    LogWriter(more, ARCH, TARGET).append(product(32), [one], "other")
    LogWriter(more, "sm_80", cuda_target("sm_80")).append(product(), [one])
    (more / ARCH / RECORDS).write_bytes((more / ARCH / RECORDS).read_bytes() + b"half a li")
    status, out, _ = run(capsys, "log", "merge", log, more, log, "-o", tmp_path / "all", "--quiet")
    assert status == 0 and f"{tmp_path / 'all' / ARCH}: 6 records of 2 stages" in out and "5 + 1 + 5" in out
    texts = [sorted((tmp_path / "all" / arch / RECORDS).read_bytes().splitlines()) for arch in (ARCH, "sm_80")]
    merge([TuningLog(folder / ARCH, ARCH) for folder in (more, log)], tmp_path / "turned")
    for name in (RECORDS, WORKLOADS):
        assert (tmp_path / "turned" / ARCH / name).read_bytes() == (tmp_path / "all" / ARCH / name).read_bytes()
    assert [len(lines) for lines in texts] == [6, 1]

    before = [(tmp_path / "all" / ARCH / name).read_bytes() for name in (RECORDS, WORKLOADS)]
    assert run(capsys, "log", "merge", tmp_path / "all", "-o", tmp_path / "all", "--quiet")[0] == 0
    assert [(tmp_path / "all" / ARCH / name).read_bytes() for name in (RECORDS, WORKLOADS)] == before

    status, out, _ = run(capsys, "log", "prune", tmp_path / "all", "--keep", 1, "-o", tmp_path / "few", "--quiet")
    assert status == 0 and "6 records of 2 stages -> " in out
    assert len(TuningLog(tmp_path / "all" / ARCH, ARCH).records) == 6
    run(capsys, "log", "prune", tmp_path / "all", "--keep", 1, "--arch", ARCH, "--quiet")
    kept = TuningLog(tmp_path / "all" / ARCH, ARCH)
    seconds = {kept.table.workloads[one.workload].name: one.seconds for one in kept.records}
    assert len(kept.records) == 2 and seconds == pytest.approx({"dense_add": 2.5e-6, "other": 1e-6})
    for name in (RECORDS, WORKLOADS):
        assert (tmp_path / "few" / ARCH / name).read_bytes() == (tmp_path / "all" / ARCH / name).read_bytes()


def test_export_import_and_what_is_no_log(log: Path, tmp_path: Path, capsys) -> None:
    export = ("log", "export", log, "-o", tmp_path / "ms", "--to", "metaschedule", "--quiet", "--json")
    status, out, _ = run(capsys, *export)
    assert status == 0 and json.loads(out) == {str(tmp_path / "ms" / ARCH): 5}
    status, out, _ = run(capsys, "log", "import", tmp_path / "ms", "-o", tmp_path / "new", "--quiet")
    assert status == 0 and "5 records imported" in out
    for arguments, words in (
        (("show", tmp_path / "ms"), "no tuning log"),
        (("import", log, "-o", tmp_path / "x"), "no database of MetaSchedule's"),
        (("verify", log, "--arch", "sm_80"), "only for sm_90"),
        (("prune", log, "--keep", 0), "at least one record"),
        (("merge", tmp_path / "nowhere", "-o", tmp_path / "x"), "no tuning log"),
    ):
        status, _, err = run(capsys, "log", *arguments, "--quiet")
        assert status == 2 and words in err, err
    assert not (tmp_path / "x").exists()
