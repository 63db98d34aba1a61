"""Checked texts on the CPU device: each kind of defect is found and named, texts without any give none, and counts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import souffle
from souffle import models
from souffle.cli.compare import random_inputs
from souffle.cli.main import main
from souffle.emulator import BarrierError, CheckedBuffer, CheckError, CpuModule, Finding, LaunchReport, compile_text
from souffle.errors import DeviceError, OptionError
from tests.thorough import some

_TEXT = Path(__file__).parent / "cuda" / "checks.cu"
_LINES = _TEXT.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checked")


@pytest.fixture(scope="session")
def checks(cache: Path) -> CpuModule:
    return compile_text(_TEXT.read_text(encoding="utf-8"), cache_dir=cache, checked=True)


def _line(fragment: str) -> int:
    """The number of the one line of the text that holds a fragment."""
    (found,) = [i for i, line in enumerate(_LINES, 1) if fragment in line]
    return found


def _launch(checks: CpuModule, kernel: str, args: list, grid: int = 4, **options) -> LaunchReport:
    return checks.launch(kernel, grid=(grid, 1, 1), block=(64, 1, 1), args=args, **{"raises": False, **options})


def _one(report: LaunchReport) -> Finding:
    (finding,) = report.findings
    return finding


def _floats(n: int = 256) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


# ---- bounds and initialization -----------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [1, 3, 5000, 2**30])
def test_global_accesses_out_of_bounds(checks: CpuModule, distance: int):
    report = _launch(checks, "shifted", [_floats(), _floats(), -distance, 0])
    before = _one(report)
    assert (before.kind, before.space, before.buffer, before.write) == ("out_of_bounds", "global", "argument 0", False)
    assert (before.element, before.size, before.bytes) == (-distance, 256, 4)
    assert (before.block, before.thread, before.count) == ((0, 0, 0), (0, 0, 0), min(distance, 256))
    assert (before.place.function, before.place.line) == ("shifted", _line("void shifted"))
    after = _one(_launch(checks, "shifted", [_floats(), _floats(), 0, distance], workers=1))
    assert (after.kind, after.buffer, after.write) == ("out_of_bounds", "argument 1", True)
    assert after.element == max(256, distance) and after.count == min(distance, 256)


def test_an_error_carries_the_findings_and_the_results_are_there(checks: CpuModule):
    out = np.zeros(256, np.float32)
    with pytest.raises(
        CheckError, match=r"kernel shifted, shifted line \d+, block .*: write out of bounds: el"
    ) as caught:
        _launch(checks, "shifted", [_floats(), out, 0, 1], raises=True)
    assert _one(caught.value.report) == caught.value.findings[0]
    np.testing.assert_array_equal(out[1:], _floats()[:-1])
    record = dataclasses.asdict(caught.value.findings[0])
    assert (record["kind"], record["place"]["function"]) == ("out_of_bounds", "shifted")


def test_findings_beyond_those_asked_for_are_counted(checks: CpuModule):
    report = _launch(checks, "shifted", [_floats(), _floats(), 256, 256], max_findings=1)
    assert len(report.findings) == 1
    assert report.findings[0].count + report.findings_left_out == 512


def test_an_address_outside_all_buffers_stops_the_launch(checks: CpuModule):
    with pytest.raises(DeviceError, match=r"kernel astray, block .* no memory of the launch"):
        _launch(checks, "astray", [_floats(), _floats(), 2**45])


def test_inputs_may_not_be_written(checks: CpuModule):
    constant = _floats()
    constant.flags.writeable = False
    finding = _one(_launch(checks, "shifted", [_floats(), constant, 0, 0]))
    assert (finding.kind, finding.buffer, finding.count) == ("read_only", "argument 1", 256)


def test_elements_that_nothing_wrote(checks: CpuModule):
    args = [_floats(64), _floats(64), 7]
    assert _launch(checks, "unwritten", args, 1).findings == ()
    finding = _one(_launch(checks, "unwritten", args, 1, uninitialized=(1,)))
    assert (finding.kind, finding.buffer, finding.element) == ("uninitialized", "argument 1", 7)
    assert (finding.thread, finding.place.line) == ((7, 0, 0), _line("out[TID] = middle[TID];"))
    assert _launch(checks, "unwritten", [_floats(64), _floats(64), -1], 1, uninitialized=(1,)).findings == ()


def test_static_shared_memory(checks: CpuModule):
    assert _launch(checks, "unwritten_shared", [_floats(), -1, 0], 1).findings == ()
    empty = _one(_launch(checks, "unwritten_shared", [_floats(), 5, 0], 1))
    assert (empty.kind, empty.space, empty.buffer, empty.element) == ("uninitialized", "shared", "s", 20)
    assert empty.thread == (58, 0, 0)
    found = {f.kind: f for f in _launch(checks, "unwritten_shared", [_floats(), -1, 1], 1).findings}
    assert set(found) == {"out_of_bounds", "uninitialized"}
    assert (found["out_of_bounds"].element, found["out_of_bounds"].size) == (256, 256)


def test_shared_memory_begins_empty_in_each_block(checks: CpuModule):
    finding = _one(_launch(checks, "stale_shared", [_floats()], workers=1))
    assert (finding.kind, finding.block, finding.count) == ("uninitialized", (1, 0, 0), 3 * 64)


def test_dynamic_shared_memory_has_the_size_of_the_launch(checks: CpuModule):
    assert _launch(checks, "pool", [_floats(), _floats()], shared_bytes=512).findings == ()
    found = _launch(checks, "pool", [_floats(), _floats()], 1, shared_bytes=400).findings
    for finding in found:
        assert (finding.kind, finding.space, finding.buffer) == ("out_of_bounds", "shared", "right_tile")
        assert (finding.stage, finding.count) == ("stage_reverse", (512 - 400) // 4)
    # Thread 36 is the first to write beyond 400 bytes, thread 0 the first to read there.
    assert [(f.write, f.thread[0], f.element) for f in found] == [(True, 36, 400 - 256), (False, 0, 63 * 4)]


def test_an_asynchronous_copy_is_there_after_the_wait(checks: CpuModule):
    options = {"grid": (1, 1, 1), "block": (32, 1, 1), "raises": False}
    assert checks.launch("early", args=[_floats(), _floats(), 1], **options).findings == ()
    finding = _one(checks.launch("early", args=[_floats(), _floats(), 0], **options))
    assert (finding.kind, finding.buffer, finding.count) == ("uninitialized", "s", 32)
    short = _one(checks.launch("early", args=[_floats(100), _floats(), 1], **options))
    assert (short.kind, short.buffer, short.element) == ("out_of_bounds", "argument 0", 100)


def test_vectors_must_be_aligned(checks: CpuModule):
    assert _launch(checks, "vectors", [_floats(260), _floats(), 0], 1).findings == ()
    with pytest.raises(CheckError) as caught:  # a fault on the CPU too, where it takes the vector in one piece
        _launch(checks, "vectors", [_floats(260), _floats(), 1], 1, raises=True)
    finding = caught.value.findings[0]
    assert (finding.kind, finding.bytes, finding.element) == ("misaligned", 16, 1)


# ---- order of blocks ---------------------------------------------------------------------------------------------

SCHEDULES = [{"workers": 1}, {"workers": 2}, {"order": "shuffled", "seed": 1}, {"order": "shuffled", "seed": 2}]


@pytest.mark.parametrize("options", SCHEDULES)
@pytest.mark.parametrize("kernel", ["exchange", "overwrite"])
def test_a_missing_grid_sync_is_a_race_in_every_schedule(checks: CpuModule, kernel: str, options: dict):
    args = [_floats(), _floats(), _floats()] if kernel == "exchange" else [_floats(), _floats()]
    with_sync = _launch(checks, kernel, [*args, 1], cooperative=True, **options)
    assert (with_sync.findings, with_sync.grid_syncs, with_sync.races_checked) == ((), 1, True)
    without = _launch(checks, kernel, [*args, 0], cooperative=True, **options)
    assert without.findings and {f.kind for f in without.findings} == {"race"}
    buffer = "argument 1" if kernel == "exchange" else "argument 0"
    assert {f.buffer for f in without.findings} == {buffer}
    assert all(f.other.startswith("block (") for f in without.findings)


@pytest.mark.parametrize("options", [{}, *SCHEDULES[2:]])
def test_a_missing_block_barrier_is_a_race_in_every_schedule(checks: CpuModule, options: dict):
    def run(kernel: str, threads: int, choice: int) -> tuple[Finding, ...]:
        args, grid = [_floats(), _floats(), choice], (1, 1, 1)
        found = checks.launch(kernel, grid=grid, block=(threads, 1, 1), args=args, raises=False, **options).findings
        return tuple(finding for finding in found if finding.kind != "uninitialized")

    assert run("handed", 64, 3) == ()
    for keep in (0, 1, 2):
        found = run("handed", 64, keep)
        assert found and {(f.kind, f.space, f.buffer) for f in found} == {("race", "shared", "s")}
        assert {f.other for f in found} <= {"warp 0 of the block", "warp 1 of the block"}
    assert run("halves", 128, 0) == ()
    assert {(f.kind, f.write) for f in run("halves", 128, 1)} == {("race", False)}


def test_a_text_that_orders_its_blocks_by_atomics_is_not_judged(checks: CpuModule):
    report = _launch(checks, "counted", [_floats(), np.zeros(1, np.uint32)])
    assert (report.findings, report.races_checked) == ((), False)


def test_memory_that_tensors_share(checks: CpuModule):
    """Two workspace buffers at one place: reading the first after the second was written is found."""
    both = [CheckedBuffer(name, (64,), "float32", initialized=False, offset=0) for name in ("first", "second")]
    other = CheckedBuffer("input", (64,), "float32", writable=False)
    memory = checks.memory([*both, other], workspace_bytes=256)
    memory.begin()
    first, second, values = memory.arrays
    values[...] = 5

    def copy(source: np.ndarray, target: np.ndarray) -> tuple[Finding, ...]:
        return _launch(checks, "shifted", [source, target, 0, 0], 1, memory=memory).findings

    assert copy(values, first) == ()
    assert (second == 5).all()  # the same pages
    assert copy(values, second) == ()
    (finding,) = copy(first, second)
    assert (finding.kind, finding.buffer, finding.other) == ("foreign", "first", "second")
    memory.begin()
    (finding,) = copy(first, second)
    assert (finding.kind, finding.buffer) == ("uninitialized", "first")


def _trace(checks: CpuModule, cooperative: bool, **options) -> np.ndarray:
    """When each thread (block, thread) ran before and after a block barrier."""
    out, ticket = np.zeros((2, 4, 64), np.int32), np.zeros(1, np.uint32)
    _launch(checks, "trace", [out, ticket], cooperative=cooperative, **options)
    assert sorted(out.ravel()) == list(range(512))
    return out


@pytest.mark.parametrize("cooperative", [False, True])
def test_what_a_seed_decides(checks: CpuModule, cooperative: bool):
    fixed = _trace(checks, cooperative)
    assert (np.diff(fixed, axis=2) > 0).all() and (np.diff(fixed, axis=1) > 0).all()
    runs = [_trace(checks, cooperative, order="shuffled", seed=seed) for seed in range(12)]
    np.testing.assert_array_equal(runs[3], _trace(checks, cooperative, order="shuffled", seed=3))
    blocks = {tuple(np.argsort(run[0, :, 0])) for run in runs}
    threads = [{tuple(np.argsort(run[half, 0])) for run in runs} for half in (0, 1)]
    assert len(blocks) > 6 and all(len(orders) == 12 for orders in threads)
    # Between its two halves a block stops for another one, at times, where all blocks exist at once.
    apart = [run[1, block].min() - run[0, block].max() > 1 for run in runs for block in range(4)]
    assert any(apart) == cooperative and not all(apart)


# ---- barriers ----------------------------------------------------------------------------------------------------


def test_barriers_of_different_lines(checks: CpuModule):
    assert _launch(checks, "two_places", [_floats(), 64], 1).findings == ()
    finding = _one(_launch(checks, "two_places", [_floats(), 32], 1))
    first = _LINES.index("    out[TID] = 1.0f;") + 2
    assert (finding.kind, finding.place.line, finding.other_place.line) == ("divergent_barrier", first, first + 3)
    assert (finding.thread, finding.other) == ((0, 0, 0), "thread (32, 0, 0)")
    assert _launch(checks, "two_grid_places", [_floats(), 4], cooperative=True).findings == ()
    finding = _one(_launch(checks, "two_grid_places", [_floats(), 2], cooperative=True))
    assert finding.kind == "divergent_grid_sync"


# ---- parts of warps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"order": "shuffled", "seed": 3}])
def test_a_mask_of_a_part_of_a_warp_is_found_and_its_results_are_right(cache: Path, checks: CpuModule, options: dict):
    out = np.zeros(64, np.int32)
    assert _launch(checks, "some_active", [out, 32], 1, **options).findings == ()
    np.testing.assert_array_equal(out, np.arange(64) ^ 1)
    finding = _one(_launch(checks, "some_active", [np.zeros(64, np.int32), 6], 1, **options))
    assert (finding.kind, finding.lanes, finding.count) == ("partial_warp", 0x3F, 2)
    assert (finding.place.function, finding.place.line) == ("some_active", _line("= __activemask();"))
    first = finding.thread[0]
    assert first in (0, 32) and finding.other == f"thread ({first + 6}, 0, 0)"
    assert finding.other_place.line == _line("= __activemask();") + 3
    assert "kernel some_active" in str(finding) and "lanes 0x0000003f of a warp come" in str(finding)
    plain = compile_text(_TEXT.read_text(encoding="utf-8"), cache_dir=cache)
    for module in (plain, checks):
        out = np.zeros(64, np.int32)
        _launch(module, "some_active", [out, 6], 1, **options)
        np.testing.assert_array_equal(out, np.where(np.arange(64) % 32 < 6, np.arange(64) ^ 1, 0))


def test_a_shuffle_of_all_lanes_that_some_do_not_come_to_is_found(checks: CpuModule):
    assert _launch(checks, "all_named", [np.zeros(64, np.int32), 32], 1).findings == ()
    with pytest.raises(BarrierError, match=r"__shfl_xor_sync with mask 0xffffffff") as caught:
        _launch(checks, "all_named", [np.zeros(64, np.int32), 7], 1)
    (finding,) = caught.value.findings
    assert (finding.kind, finding.lanes, finding.thread) == ("partial_warp", 0x7F, (0, 0, 0))
    assert (finding.other, finding.other_place.line) == ("thread (7, 0, 0)", finding.place.line + 1)
    assert "kernel all_named, all_named line" in str(caught.value)


def test_a_shuffle_of_lanes_that_have_left_or_that_the_block_lacks_is_found(checks: CpuModule):
    assert _launch(checks, "some_gone", [np.zeros(64, np.int32), 32], 1).findings == ()
    finding = _one(_launch(checks, "some_gone", [np.zeros(64, np.int32), 7], 1))
    assert (finding.kind, finding.lanes, finding.other) == ("partial_warp", 0x7F, "thread (7, 0, 0)")
    report = checks.launch(
        "all_named", grid=(1, 1, 1), block=(48, 1, 1), args=[np.zeros(64, np.int32), 32], raises=False
    )
    finding = _one(report)
    assert (finding.thread, finding.lanes, finding.other) == ((32, 0, 0), 0xFFFF, "lane 16, which the block lacks,")


def test_lanes_that_meet_at_two_shuffles_are_found(checks: CpuModule):
    assert _launch(checks, "two_shuffles", [np.zeros(64, np.int32), 32], 1).findings == ()
    finding = _one(_launch(checks, "two_shuffles", [np.zeros(64, np.int32), 8], 1))
    assert (finding.kind, finding.thread, finding.other) == ("divergent_shuffle", (0, 0, 0), "thread (8, 0, 0)")
    assert finding.other_place.line == finding.place.line + 2


@pytest.mark.parametrize("checked", [False, True])
def test_who_waits_where(cache: Path, checked: bool):
    module = compile_text(_TEXT.read_text(encoding="utf-8"), cache_dir=cache, checked=checked)
    options = {"grid": (2, 1, 1), "block": (64, 1, 1), "args": [np.zeros(64, np.int32)]}
    with pytest.raises(BarrierError) as caught:
        module.launch("left_behind", **options)
    waiting, gone = caught.value.waits
    assert (waiting.state, waiting.operation, waiting.barrier) == ("block barrier", "bar.sync", 5)
    assert (waiting.threads, waiting.first, waiting.arrived, waiting.expected) == (32, (0, 0, 0), 32, 64)
    assert (waiting.place.function, waiting.place.line) == ("left_behind", _line("bar.sync 5"))
    assert (gone.state, gone.threads, gone.first, gone.place) == ("exited", 32, (32, 0, 0), None)
    with pytest.raises(BarrierError, match=r"bar\.sync 1 .*bar\.sync 2 ") as caught:
        module.launch("crossed", **options)
    assert [(w.barrier, w.threads, w.place.line) for w in caught.value.waits] == [
        (1, 32, _line("bar.sync 1")),
        (2, 32, _line("bar.sync 2")),
    ]


def test_blocks_that_miss_a_grid_sync(cache: Path):
    text = (_TEXT.parent / "barriers.cu").read_text(encoding="utf-8")
    module = compile_text(text, cache_dir=cache)
    with pytest.raises(BarrierError, match=r"3 blocks wait at grid sync \(first: block \(0, 0, 0\)") as caught:
        module.launch(
            "one_block_leaves", grid=(4, 1, 1), block=(64, 1, 1), args=[np.zeros(64, np.int32)], cooperative=True
        )
    assert [wait.state for wait in caught.value.waits] == ["grid sync"] * 3 + ["exited"]
    assert caught.value.waits[3].block == (3, 0, 0)


# ---- counts ------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_text(checks: CpuModule):
    data, out, total = _floats(), np.zeros(256, np.float32), np.zeros(1, np.uint32)
    report = _launch(checks, "moved", [data, out, total])
    traffic = dict(report.buffers)
    assert traffic["argument 1"].written == 1024 and traffic["argument 1"].read == 0
    # The text reads an element twice in one expression, which any compiler joins.
    assert traffic["argument 0"].read == 1024
    assert (traffic["argument 2"].atomics, traffic["argument 2"].read, traffic["argument 2"].written) == (4, 0, 0)
    assert (report.shared.read, report.shared.written) == (1024, 1024)
    assert (report.total.read, report.block_barriers, report.grid_syncs) == (1024, 4, 0)


# ---- networks ----------------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("bert")
@pytest.mark.parametrize(
    ("level", "precision", "disable"),
    # Tiles that own channels, which take longest to find, are checked in tests/schedule/test_channel_owned.py.
    some([("V4", "mixed", ("channels",))], [("V4", "mixed", ()), ("V0", "fp32", ())]),
)
def test_a_network_without_defects(cache: Path, level: str, precision: str, disable: tuple[str, ...]):
    options = {"target": "cuda", "device": "cpu", "arch": "sm_90", "cubin": False}
    network = souffle.compile(models.build("bert"), level=level, precision=precision, disable=disable, **options)
    plain = network.on("cpu", cache_dir=cache)
    checked = plain.on("cpu", checked=True)
    inputs = random_inputs(plain.signature.inputs, 0)
    for _ in range(2):  # a second run begins anew
        assert (checked(inputs)["output"] == plain(inputs)["output"]).all()
    counts = checked.counts
    assert len(counts) == len(plain.plan.launches)
    assert sum(report.grid_syncs for report in counts) == sum(kernel.grid_syncs for kernel in plain.plan.kernels)
    # Each element that the plan says is touched is asked for at least once.
    for report, launch in zip(counts, plain.plan.launches, strict=True):
        assert report.races_checked
        assert report.total.written >= launch.bytes_written > 0
        assert report.total.read >= launch.bytes_read > 0


@pytest.mark.xdist_group("bert")
def test_a_grid_sync_taken_out_of_a_network_is_found(cache: Path):
    how = {"target": "cuda", "device": "cpu", "arch": "sm_90", "cubin": False, "grid_barrier": "cooperative"}
    network = souffle.compile(models.build("bert"), level="V3", **how)
    text = network.plan.modules[0].text
    call = "  tvm_builtin_cuda_grid_sync();\n"
    assert text.count(call) == network.plan.kernels[0].grid_syncs
    head, _, tail = text.partition(call)
    module = dataclasses.replace(network.plan.modules[0], text=head + tail)
    broken = type(network)(
        dataclasses.replace(network.plan, modules=(module, *network.plan.modules[1:])),
        device="cpu",
        checked=True,
        cache_dir=cache,
    )
    with pytest.raises(CheckError) as caught:
        broken(random_inputs(network.signature.inputs, 0))
    assert "race" in {finding.kind for finding in caught.value.findings}
    assert all(finding.stage.startswith("stage") for finding in caught.value.findings)


def test_counts_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    network = souffle.compile(models.build("mmoe"), level="V4", target="cuda", device="cpu", arch="sm_90", cubin=False)
    network.save(tmp_path / "mmoe.souffle")
    (spec,) = network.signature.inputs
    np.save(tmp_path / "x.npy", random_inputs((spec,), 0)[spec.name])
    command = ["run", str(tmp_path / "mmoe.souffle"), "--device", "cpu", "--counts", "--quiet"]
    command += ["--input", f"{spec.name}={tmp_path / 'x.npy'}"]
    assert main([*command, "--json"]) == 0
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    kernel = network.plan.kernels[0]
    assert (launch["kernel"], launch["grid_syncs"], launch["findings"]) == (kernel.name, kernel.grid_syncs, [])
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "grid syncs" in table and kernel.name in table


def test_checks_and_counts_are_of_the_cpu_device():
    network = souffle.compile(models.build("bert"), level="V0", target="cuda", device="cpu", arch="sm_90", cubin=False)
    with pytest.raises(OptionError, match="checked"):
        network.on("cuda", checked=True)
    with pytest.raises(OptionError, match="counts"):
        _ = network.counts
