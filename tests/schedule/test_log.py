"""Reading tuning logs: lookup by structure, the order of records, damage, age."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tvm import te

import souffle
from souffle.analysis import Analysis
from souffle.errors import OptionError
from souffle.pipeline import stages_of
from souffle.schedule.gpu import GpuRequest, sketch_of
from souffle.schedule.gpu.device import device_for
from souffle.schedule.gpu.rule import GpuSchedule, Sketch
from souffle.schedule.log import RECORDS, WORKLOADS, RecordOrigin, TuningLog, log_folders, open_log
from souffle.schedule.lower import DeviceFunction, cuda_target, lower_stage
from souffle.schedule.recipe import Recipe
from souffle.schedule.stage import Stage
from souffle.schedule.tuned import crowding, followed, text_of, tuned_stages
from souffle.tuning import LogWriter, NewRecord

REQUEST = GpuRequest("sm_90")
ROWS, INNER, COLUMNS = 33, 48, 40


def product(name: str, rows: int = ROWS) -> list[te.Tensor]:
    a = te.placeholder((rows, INNER), name=f"{name}_left")
    b = te.placeholder((INNER, COLUMNS), name=f"{name}_right")
    k = te.reduce_axis((0, INNER), name=f"{name}_k")
    return [a, b, te.compute((rows, COLUMNS), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name=f"{name}_product")]


def workload(name: str = "t", rows: int = ROWS):
    return te.create_prim_func(product(name, rows)).with_attr("global_symbol", "stage")


def combinations(sketch: Sketch) -> list[dict[str, int]]:
    """Values of the knobs, each at most one away from the rule's own, that go together."""
    own = dict(sketch.choose())
    near = [{**own, knob.name: value} for knob in sketch.knobs for value in knob.values]
    return [values for values in near if not hasattr(sketch.make(values), "reason")]


def values_of(func) -> list[dict[str, int]]:
    """Some values of the contraction rule's knobs that go together."""
    sketch = sketch_of("contraction", func, REQUEST)
    own = dict(sketch.choose())
    found = [own]
    for knob in sketch.knobs:
        for value in knob.values:
            other = {**own, knob.name: value}
            if value != own[knob.name] and not hasattr(sketch.make(other), "reason"):
                found.append(other)
                break
    return found


@pytest.fixture(scope="module")
def func():
    return workload()


@pytest.fixture(scope="module")
def choices(func) -> list[dict[str, int]]:
    found = values_of(func)
    assert len(found) >= 3
    return found


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path, "sm_90", cuda_target("sm_90"))


def origin(figure: str = "predicted", device: str = "H200-SXM5-141GB", **more) -> RecordOrigin:
    return RecordOrigin(figure, device, "0.27.0.post1", "0.1.0", "2026-01-01", **more)


def write(writer: LogWriter, func, values, seconds: float, where: RecordOrigin) -> None:
    writer.append(func, [NewRecord(Recipe("contraction", values), (seconds,), where)])


def compiled(tmp_path: Path | None, name: str = "other", **options) -> souffle.runtime.Network:
    *inputs, result = product(name)
    program = souffle.from_te(inputs, [result])
    return souffle.compile(
        program, target="cuda", arch="sm_90", device="cpu", cubin=False, tuning_log=tmp_path, **options
    )


def reasons(network) -> list[tuple[str, bool, str]]:
    return [decision[1:] for decision in network.plan.decisions if decision[0] == "tuning"]


def test_a_record_serves_another_network_with_other_names(tmp_path, writer, func, choices) -> None:
    write(writer, func, choices[1], 1e-6, origin("measured", "NVIDIA H200", own_seconds=2e-6))
    network = compiled(tmp_path)
    assert any("measured 1.0 µs on NVIDIA H200" in reason for _, _, reason in reasons(network))
    assert reasons(network)[-1][2].startswith("1 of 1 stages with a reduction found")
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(spec.shape).astype(spec.dtype) for spec in network.signature.inputs]
    (found,) = network(*values).values()
    np.testing.assert_allclose(found, values[0] @ values[1], rtol=1e-4, atol=1e-4)
    plain = compiled(None)
    assert not reasons(plain)
    assert network.kernels[0].text != plain.kernels[0].text


def test_another_shape_does_not_match(tmp_path, writer, choices) -> None:
    func = workload(rows=ROWS + 1)
    write(writer, func, values_of(func)[0], 1e-6, origin())
    (one, summary) = reasons(compiled(tmp_path))
    assert not one[1] and one[2].startswith("no record; rule ")
    assert summary[2].startswith("0 of 1")


def test_measured_beats_predicted_and_the_same_product_another(tmp_path, writer, func, choices) -> None:
    write(writer, func, choices[0], 1e-6, origin())
    write(writer, func, choices[1], 4e-6, origin("measured", "NVIDIA A100-SXM4-40GB"))
    write(writer, func, choices[2], 9e-6, origin("measured", "NVIDIA H200"))
    log = TuningLog(tmp_path / "sm_90", "sm_90")
    ordered = sorted(log.of(func), key=lambda record: record.rank("H200"))
    assert [record.seconds for record in ordered] == pytest.approx([9e-6, 4e-6, 1e-6])
    assert any("measured 9.0 µs on NVIDIA H200" in reason for _, _, reason in reasons(compiled(tmp_path)))


def test_spills_come_last_and_what_is_worse_than_the_rule_is_not_used(tmp_path, writer, func, choices) -> None:
    write(writer, func, choices[0], 1e-6, origin(spill_bytes=64))
    write(writer, func, choices[1], 2e-6, origin())
    write(writer, func, choices[2], 5e-6, origin(own_seconds=4e-6))
    records = TuningLog(tmp_path / "sm_90", "sm_90").of(func)
    ordered = sorted(records, key=lambda record: record.rank("H200"))
    assert [record.seconds for record in ordered] == pytest.approx([2e-6, 5e-6, 1e-6])
    assert [record.useful for record in ordered] == [True, False, True]


@pytest.mark.parametrize(
    "damage",
    [
        b"not json at all\n",
        b"[0, [[[], []], [1e-6]]]\n",
        b'{"workload":"7","arch":"sm_90"}\n',
        b"\xff\xfe\x00\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_damaged_line_is_named_and_skipped(tmp_path, writer, func, choices, damage, caplog) -> None:
    path = tmp_path / "sm_90" / RECORDS
    write(writer, func, choices[0], 1e-6, origin())
    path.write_bytes(damage + path.read_bytes())
    with caplog.at_level(logging.WARNING):
        found = reasons(compiled(tmp_path))
    assert found[0][0] == f"{path}:1" and not found[0][1] and found[0][2]
    assert f"{path}:1" in caplog.text
    assert found[-1][2].startswith("1 of 1")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("workload", "0123456789abcdef", "there is no workload 0123456789abcdef"),
        ("arch", "sm_80", "it is for sm_80, not for sm_90"),
        ("seconds", [float("nan")], "no seconds"),
        ("seconds", [0.0], "no seconds"),
        ("seconds", [10**400], "int too large"),
        ("knobs", {"step": "8"}, "no recipe of rule contraction"),
        ("rule", "metaschedule", "no recipe of rule metaschedule"),
        ("figure", "guessed", "neither measured nor predicted"),
        ("device", None, "its device is None"),
        ("registers", "many", "its registers is 'many'"),
    ],
)
def test_a_line_that_says_what_cannot_be_is_named(tmp_path, writer, func, choices, field, value, said) -> None:
    path = tmp_path / "sm_90" / RECORDS
    write(writer, func, choices[0], 1e-6, origin())
    write(writer, func, choices[1], 2e-6, origin())
    first, second = path.read_text().splitlines()
    path.write_text(json.dumps({**json.loads(first), field: value}) + "\n" + second + "\n")
    log = TuningLog(tmp_path / "sm_90", "sm_90")
    assert [record.seconds for record in log.of(func)] == pytest.approx([2e-6])
    assert [problem.where for problem in log.problems] == [f"{path}:1"] and said in log.problems[0].reason


def test_a_record_cut_off_by_a_crash_loses_only_itself(tmp_path, writer, func, choices) -> None:
    path = tmp_path / "sm_90" / RECORDS
    write(writer, func, choices[0], 1e-6, origin())
    write(writer, func, choices[1], 2e-6, origin())
    path.write_bytes(path.read_bytes()[:-40])
    write(writer, func, choices[2], 3e-6, origin())
    log = TuningLog(tmp_path / "sm_90", "sm_90")
    assert [record.seconds for record in log.of(func)] == pytest.approx([1e-6, 3e-6])
    assert [problem.where for problem in log.problems] == [f"{path}:2"]


@pytest.mark.parametrize("damage", ["not json", '{"digest":"1"}', "function"])
def test_a_damaged_workload_is_named_and_its_records_skipped(tmp_path, writer, func, choices, damage) -> None:
    write(writer, func, choices[0], 1e-6, origin())
    path = tmp_path / "sm_90" / WORKLOADS
    if damage == "function":
        data = json.loads(path.read_text())
        packed = data["function"]
        # A checksum is part of it: one wrong character is seen, whatever it still decodes to.
        data["function"] = packed[:200] + ("A" if packed[200] != "A" else "B") + packed[201:]
        damage = json.dumps(data)
    path.write_text(damage + "\n")
    log = TuningLog(tmp_path / "sm_90", "sm_90")
    assert log.of(func) == []
    assert f"{path}:1" in [problem.where for problem in log.problems]


def test_nothing_is_decoded_before_a_stage_with_the_same_parameters_asks(tmp_path, writer, func, choices) -> None:
    other = workload(rows=ROWS + 1)
    write(writer, func, choices[0], 1e-6, origin())
    write(writer, other, values_of(other)[0], 1e-6, origin())
    log = TuningLog(tmp_path / "sm_90", "sm_90")
    assert len(log.of(func)) == 1
    decoded = {workload.signature[0][0] for workload in log.table.workloads.values() if "func" in vars(workload)}
    assert decoded == {(ROWS, INNER)}


def test_what_a_rule_does_not_offer_any_more_is_skipped(tmp_path, writer, func, choices) -> None:
    knob = next(iter(choices[0]))
    write(writer, func, {**choices[0], knob: 1_000_003}, 1e-6, origin())
    write(writer, func, choices[1], 2e-6, origin())
    found = reasons(compiled(tmp_path))
    assert found[0][0] == f"{tmp_path / 'sm_90' / RECORDS}:1" and "is none of" in found[0][2]
    assert "predicted 2.0 µs" in found[1][2]


def test_a_rule_that_is_gone_and_a_trace_of_another_stage_are_refused(func, choices) -> None:
    assert "no rule 'contractions'" in followed(Recipe("contractions", choices[0]), func, REQUEST).reason
    steps = [["GetSBlock", [], ["elsewhere", "main"], ["b0"]]]
    refused = followed(Recipe("metaschedule", {}, [steps, []]), func, REQUEST)
    assert refused.reason == "ScheduleError: Cannot find a block with the specified name"
    unbound = followed(Recipe("metaschedule", {}, [[], []]), func, REQUEST)
    assert "1 threads, a block of this kernel has 256" in unbound.reason
    assert "NoStep" in followed(Recipe("metaschedule", {}, [[["NoStep", [], [], []]], []]), func, REQUEST).reason


def test_a_log_of_the_former_form_is_named(tmp_path, func) -> None:
    folder = tmp_path / "sm_90"
    folder.mkdir()
    (folder / "database_tuning_record.json").write_text("[]\n")
    log = TuningLog(folder, "sm_90")
    assert log.of(func) == [] and "souffle log import" in log.problems[0].reason


def text(func, values) -> str:
    schedule = followed(Recipe("contraction", values), func, REQUEST)
    return text_of(lower_stage("any name", schedule, cuda_target("sm_90")))


def test_a_text_has_one_digest_whatever_is_called_how(func, choices) -> None:
    assert text(func, choices[0]) == text(workload("other"), choices[0])
    assert len({text(func, values) for values in choices[:3]}) == 3


def test_a_figure_of_another_text_is_no_measurement_of_this_one(tmp_path, writer, func, choices) -> None:
    """By its own figure it is the fastest; measured of this text is what counts, then what the model says."""
    old = origin("measured", "NVIDIA H200", text="0123456789abcdef", registers=250)
    write(writer, func, choices[1], 1e-6, old)
    found = reasons(compiled(tmp_path))
    assert "measured 1.0 µs on NVIDIA H200, of another text than its recipe makes now" in found[0][2]
    assert found[0][0] == f"{tmp_path / 'sm_90' / RECORDS}:1" and not found[0][1]
    assert "of another text" in found[1][2]
    write(writer, func, choices[2], 7e-6, origin("measured", "NVIDIA H200", text=text(func, choices[2])))
    assert "measured 7.0 µs on NVIDIA H200" in reasons(compiled(tmp_path))[-2][2]


def test_folders(tmp_path, monkeypatch) -> None:
    assert log_folders(None) == ()
    assert log_folders(tmp_path) == (tmp_path,)
    with pytest.raises(OptionError, match="souffle tune"):
        log_folders(tmp_path / "missing")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.setenv("SOUFFLE_TUNING_LOGS", f"{first}:{second}:{tmp_path / 'missing'}")
    assert log_folders("auto")[:2] == (first, second)
    assert open_log(first, "sm_90") == ()
    shutil.copytree(second, first / "sm_90")
    assert [log.folder for log in open_log(first, "sm_90")] == [first / "sm_90"]


H200 = device_for("sm_90")


@pytest.mark.parametrize(
    ("tiles", "registers", "shared_bytes", "own_tiles", "reason"),
    [
        (264, 128, 64 * 1024, 100, None),
        (264, 0, 0, 100, None),
        (265, 128, 0, 100, "265 tiles exceed a wave of 264 blocks"),
        (300, 128, 0, 300, None),
        (72, 160, 0, 72, "160 registers leave 1 block"),
        (72, 96, 120 * 1024, 72, "122880 bytes of shared memory leave 1 block"),
    ],
)
def test_what_a_schedule_leaves_to_the_others_of_its_kernel(tiles, registers, shared_bytes, own_tiles, reason) -> None:
    crowded = crowding(tiles, registers, shared_bytes, own_tiles, H200)
    assert crowded is None if reason is None else crowded.reason.startswith(reason)


def test_a_greedy_schedule_is_used_where_stages_are_kernels_of_their_own(tmp_path, writer, func, choices) -> None:
    greedy = replace(origin(), registers=200)
    write(writer, func, choices[0], 1e-6, greedy)
    write(writer, func, choices[1], 2e-6, origin())
    merged, alone = (reasons(compiled(tmp_path, level=level)) for level in ("V3", "V2"))
    assert "predicted 2.0 µs" in merged[0][2] and "predicted 1.0 µs" in alone[0][2]
    (tmp_path / "sm_90" / RECORDS).write_text((tmp_path / "sm_90" / RECORDS).read_text().splitlines()[0] + "\n")
    (found, *_) = reasons(compiled(tmp_path, level="V3"))
    assert not found[1] and "200 registers leave 1 block" in found[2] and "own choice" in found[2]


@dataclass(frozen=True)
class Prices:
    """Of a kernel of several stages, by the tiles of each: seconds, and whether it takes many registers."""

    of_tiles: Mapping[int, float]
    greedy: tuple[int, ...] = ()

    def __call__(self, functions: Sequence[DeviceFunction], registers: int = 0) -> float:
        return self.of_tiles[functions[0].tiles]

    def crowds(self, functions: Sequence[DeviceFunction]) -> bool:
        return functions[0].tiles in self.greedy


def one_stage() -> tuple[list[Stage], Analysis]:
    *inputs, result = product("other")
    stages, analysis = stages_of(souffle.from_te(inputs, [result]), level="V3", cubin=False, tuning_log=None)
    return list(stages), analysis


def test_predicted_records_are_chosen_by_what_they_take_now(tmp_path, writer, func) -> None:
    """As recorded the first is the fastest; each of the others where today's prices, or its registers, say so."""
    stages, analysis = one_stage()
    own = stages[0].schedule.tiles
    sketch = sketch_of("contraction", stages[0].draft.func, REQUEST)
    of_tiles = {sketch.make(values).tiles: values for values in combinations(sketch)}
    few, many = sorted(of_tiles.keys() - {own})[:2]
    write(writer, func, of_tiles[few], 1e-6, origin())
    write(writer, func, of_tiles[many], 2e-6, origin(registers=90))
    (log,) = open_log(tmp_path, "sm_90")

    def chosen(price: Prices | None, *, merged: bool = True) -> GpuSchedule:
        (stage,), _ = tuned_stages(stages, analysis, [log], H200, merged=merged, price=price)
        return stage.schedule

    assert chosen(None).tiles == chosen(None, merged=False).tiles == few
    assert chosen(Prices({own: 9, few: 1, many: 2})).tiles == few
    assert chosen(Prices({own: 9, few: 2, many: 1})).tiles == many
    assert chosen(Prices({own: 9, few: 2, many: 1}), merged=False).tiles == many
    for merged in (True, False):
        assert chosen(Prices({own: 1, few: 3, many: 2}), merged=merged) is stages[0].schedule
    # What no compiler has said is estimated; what one has is what the kernel is reckoned with.
    assert chosen(Prices({own: 9, few: 1, many: 2}, greedy=(few, many))).tiles == many
    assert (chosen(Prices({own: 9, few: 2, many: 1})).registers, chosen(None).registers) == (90, 0)


def test_what_was_measured_is_not_asked_of_the_model(tmp_path, writer, func) -> None:
    stages, analysis = one_stage()
    own = stages[0].schedule.tiles
    sketch = sketch_of("contraction", stages[0].draft.func, REQUEST)
    of_tiles = {sketch.make(values).tiles: values for values in combinations(sketch)}
    few, many = sorted(of_tiles.keys() - {own})[:2]
    write(writer, func, of_tiles[few], 3e-6, origin("measured", "NVIDIA H200"))
    write(writer, func, of_tiles[many], 1e-6, origin())
    (log,) = open_log(tmp_path, "sm_90")
    price = Prices({own: 1, few: 9, many: 2})
    (stage,), _ = tuned_stages(stages, analysis, [log], H200, merged=True, price=price)
    assert stage.schedule.tiles == few


def test_a_kernel_is_reckoned_with_the_registers_of_a_record(tmp_path, writer, func, choices) -> None:
    """Without a compiler: those that one has counted when it was recorded, in place of an estimate."""
    write(writer, func, choices[1], 1e-6, origin("measured", "NVIDIA H200", registers=77))
    (kernel,) = compiled(tmp_path).plan.kernels
    assert [stage.registers for stage in kernel.predicted.stages] == [77]


def test_what_was_measured_of_another_text_is_asked_of_the_model(tmp_path, writer, func) -> None:
    """And its registers are not those of this text."""
    stages, analysis = one_stage()
    own = stages[0].schedule.tiles
    sketch = sketch_of("contraction", stages[0].draft.func, REQUEST)
    of_tiles = {sketch.make(values).tiles: values for values in combinations(sketch)}
    few, many = sorted(of_tiles.keys() - {own})[:2]
    write(writer, func, of_tiles[few], 3e-6, origin("measured", "NVIDIA H200", text="another", registers=250))
    write(writer, func, of_tiles[many], 9e-6, origin(registers=90))
    (log,) = open_log(tmp_path, "sm_90")

    def chosen(prices: dict[int, float]) -> GpuSchedule:
        (stage,), decisions = tuned_stages(stages, analysis, [log], H200, merged=True, price=Prices(prices))
        assert any("of another text" in decision.reason for decision in decisions)
        return stage.schedule

    assert (chosen({own: 9, few: 1, many: 2}).tiles, chosen({own: 9, few: 1, many: 2}).registers) == (few, 0)
    assert (chosen({own: 9, few: 2, many: 1}).tiles, chosen({own: 9, few: 2, many: 1}).registers) == (many, 90)
    assert chosen({own: 1, few: 3, many: 2}) is stages[0].schedule
    # Without a model the order of figures decides, and it is one of those that were predicted.
    (stage,), _ = tuned_stages(stages, analysis, [log], H200)
    assert stage.schedule.tiles == few


def test_of_many_predicted_records_the_best_are_asked_about(tmp_path, writer, func) -> None:
    """Each has to be lowered; what a search leaves of a stage would take a compilation minutes."""
    stages, analysis = one_stage()
    sketch = sketch_of("contraction", stages[0].draft.func, REQUEST)
    several = combinations(sketch)
    assert len(several) > 18
    for number, values in enumerate(several):
        write(writer, func, values, 1e-6 * (1 + number), origin())
    asked = []

    def price(functions: Sequence[DeviceFunction], registers: int = 0) -> float:
        asked.append(text_of(functions))
        return 1.0

    tuned_stages(stages, analysis, open_log(tmp_path, "sm_90"), H200, price=price)
    own = text_of(stages[0].functions)
    assert set(asked) - {own} == {text(func, values) for values in several[:16]} - {own}
