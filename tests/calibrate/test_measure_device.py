"""Measuring a GPU: kernels do what is counted, clocks become the figures that they stand for, gaps become estimates."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.calibrate import measure_device
from souffle.calibrate.device_bench import Cost, Pairs, cost
from souffle.calibrate.device_meters import GROUPS, Meter, Reading, capacity, plateau, reading
from souffle.cli import measure_device as command
from souffle.codegen.nvcc import find_nvcc
from souffle.cost import CostDevice, cost_device, figures_of
from souffle.errors import DeviceError, NoGpuError
from souffle.runtime.cuda import Cuda

pytestmark = pytest.mark.sampled(4)

_IMAGE = b"the kernels"


def _cuda(text: str | None = None) -> Cuda:
    return Cuda(0, RehearsalDriver({_IMAGE: text or measure_device.SOURCE.read_text()}))


def _measured(text: str | None = None) -> measure_device.Measured:
    return measure_device.measure(_cuda(text), _IMAGE, repeats=1, small=True)


# arithmetic


def test_a_cost_is_the_median_of_pairs() -> None:
    found = cost([210.0, 200.0, 190.0, 9000.0, 205.0], 100.0)
    assert found.value == 2.05 and found.runs == 5 and found.spread == pytest.approx(0.1 / 2.05)
    assert cost([-5.0, 1.0, -3.0], 10.0).spread == math.inf


def test_noise_is_no_figure() -> None:
    assert reading(Cost(2.0, 0.1, 9), "a chain").value == 2.0
    assert reading(Cost(2.0, 0.1, 9), "a chain", lambda clocks: 1 / clocks).value == 0.5
    for found in (Cost(0.0, math.inf, 9), Cost(-1.0, math.inf, 9), Cost(2.0, 0.6, 9)):
        refused = reading(found, "a chain")
        assert refused.value is None and refused.source.startswith("a chain: ")


def test_the_l1_cache_ends_where_the_latency_rises() -> None:
    found = {100: 33.0, 200: 34.0, 300: 90.0, 400: 200.0}
    assert capacity(found, 33.0, 210.0).value == 300
    assert "400 bytes, does not fit" in capacity(found, 33.0, 210.0).source
    assert capacity({100: 33.0, 200: 34.0}, 33.0, 210.0).value is None
    assert capacity({100: 190.0, 200: 200.0}, 33.0, 210.0).value is None
    assert capacity(found, None, 210.0).value is None
    assert capacity(found, 210.0, 33.0).value is None


def test_the_l2_cache_ends_where_the_rate_falls() -> None:
    found = {100: 4000.0, 200: 4100.0, 300: 3800.0, 400: 3600.0, 500: 4000.0}
    assert plateau(found).value == 300
    assert "400 bytes, is read at 88%" in plateau(found).source
    assert plateau({100: None, 200: 4100.0, 300: None, 400: 1000.0}).value == 200
    assert (
        plateau({100: 4000.0, 200: 3999.0}).value is None and "100 to 200 bytes" in plateau({100: 1.0, 200: 1.0}).source
    )


_LATENCIES = {"shared": 23.0, "l1": 33.0, "l2": 250.0, "memory": 600.0}
_ATTRIBUTES = {"L2_CACHE_SIZE": 40 << 20, "CLOCK_RATE": 1_500_000, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 164 << 10}


class _Gpu:
    """A bench of a GPU that is known: clocks follow from what the kernels' comments say, plus a start that cancels."""

    sms, clock, l1_bytes, l2_bytes = 100, 1.5e9, 100_000, 28 << 20
    code_bytes = 130_000
    launch_seconds, node_seconds, sync_seconds, memory_bandwidth = 2e-6, 1e-6, 1.25e-6, 2e12

    def __init__(self) -> None:
        self.repeats, self.stream = 5, 0
        self.rings: dict[int, int] = {}
        self.addresses = 0
        self.queued = 0.0
        nothing = {name: lambda *args: None for name in ("destroy_graph", "fill", "synchronize")}
        self.cuda = SimpleNamespace(
            **nothing,
            multiprocessors=self.sms,
            attribute=_ATTRIBUTES.__getitem__,
            prepare=lambda name, *args, **more: name,
            launch=self._launch,
            begin_capture=lambda stream: self._queue(-self.queued),
            end_capture=self._graph,
            launch_graph=lambda graph, stream: self._queue(graph),
            copy=lambda *args: self._queue(1e-3),
            resident_blocks=lambda *args: 8 * self.sms,
        )

    # what takes time on the GPU

    def _queue(self, seconds: float) -> None:
        self.queued += seconds

    def _launch(self, name: str, stream: int) -> None:
        self._queue({"measure_empty": self.launch_seconds, "measure_busy": 1e-3, "measure_copy": 2e-3}[name])

    def _graph(self, stream: int) -> float:
        nodes, self.queued = self.queued / self.launch_seconds, 0.0
        return nodes * self.node_seconds

    # what a bench does

    def buffer(self, nbytes: int) -> int:
        self.addresses += 1 << 40
        return self.addresses

    def constant(self, values: Any) -> int:
        return self.buffer(values.nbytes)

    def release(self, address: int) -> None:
        self.rings.pop(address, None)

    def function(self, name: str) -> str:
        return name

    def launch(self, name: str, grid: int, threads: int, pointers: list[int], integers: list[int]) -> None:
        if name == "measure_link":
            self.rings[pointers[0]] = integers[0] * integers[1]

    def seconds(self, queue: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
        before()
        self.queued = 0.0
        queue()
        return self.queued + 1e-5

    def differences(self, queues: tuple, before: Callable[[], None] = lambda: None) -> tuple[float, ...]:
        short, long = (self.seconds(queue, before) for queue in queues)
        return (long - short,) * self.repeats

    def pairs(self, name: str, *, grid: int, threads: int, steps: tuple[int, int], **more: Any) -> Pairs:
        given = more.get("integers", lambda count: (count,))
        data = more.get("data", (0,))
        short, long = (1e3 + self._clocks(name, grid, threads, count, data, given(count)) for count in steps)
        seconds = (long - short) / self.clock
        if name == "measure_read" and grid > 1:
            rounds = [math.prod(given(count)) for count in steps]
            seconds = (rounds[1] - rounds[0]) * 64 * threads * grid / self.memory_bandwidth
        return Pairs(*((value,) * 5 for value in (long - short, long - short, seconds)))

    def _clocks(self, name: str, grid: int, threads: int, steps: int, data: Any, integers: tuple[int, ...]) -> float:
        # Operations (or bytes) of a thread in a step, and how many a multiprocessor does in a clock.
        rates = {
            "measure_fp32": (8 * 32, 128.0),
            "measure_int32_multiply": (8 * 32, 64.0),
            "measure_int32_mixed": (8 * 32, 120.0),
            "measure_issue": (64 + 64, 4 * 32.0),
            "measure_special": (8 * 16, 16.0),
            "measure_tensor": (4 * 8 * 2048 / 32, {128: 700.0, 256: 1290.0, 512: 1200.0}.get(threads, 1.0)),
            "measure_tf32": (4 * 8 * 1024 / 32, {128: 400.0, 256: 516.0, 512: 510.0}.get(threads, 1.0)),
            "measure_shared": (32 * 16, 96.0),
        }
        chains = {"measure_dependent": (256, 4.0), "measure_barrier": (32, 21.0)}
        chains["measure_chase_shared"] = (64, _LATENCIES["shared"])
        if name in rates:
            each, rate = rates[name]
            return steps * each * threads / rate
        if name in chains:
            each, wait = chains[name]
            return steps * each * wait
        if name == "measure_code":
            size = integers[0] << 14
            return steps * size / (7.5 if size <= self.code_bytes else 3.25)
        if name == "measure_read":
            held = integers[0] * 4 * 16 * threads * grid <= self.l2_bytes
            return math.prod(integers) * 4 * 16 * threads * grid / (50.0 if grid == 1 else 4000.0 if held else 3000.0)
        if name == "measure_grid_sync":
            return steps * self.sync_seconds * grid / (8 * self.sms) * self.clock
        fits = name == "measure_chase_l1" and self.rings[data[0]] <= self.l1_bytes
        return 16 * steps * _LATENCIES["l1" if fits else "l2" if integers[0] else "memory"]


def test_clocks_become_the_figures_of_the_gpu_that_they_are_of() -> None:
    figures: dict[str, Reading] = {}
    more: dict[str, Any] = {}
    meter = Meter(_Gpu(), False)
    for _, group in GROUPS:
        group(meter, figures, more)
    found = {name: one.value for name, one in figures.items()}
    assert 0.94 * _Gpu.l1_bytes <= found.pop("l1_bytes") <= _Gpu.l1_bytes
    expected = {
        "clock_hz": 1.5e9, "memory_bytes_per_second": 2e12, "l2_bytes_per_clock": 4000, "l2_bytes_per_clock_per_sm": 50,
        "shared_bytes_per_clock_per_sm": 96, "warp_instructions_per_clock_per_sm": 4, "fp32_per_clock_per_sm": 128,
        "int32_per_clock_per_sm": 64, "special_per_clock_per_sm": 16, "tensor_fma_per_clock_per_sm": 1290,
        "tf32_share": 0.4,
        "shared_latency_clocks": 23, "l1_latency_clocks": 33, "l2_latency_clocks": 250, "memory_latency_clocks": 600,
        "arithmetic_latency_clocks": 4, "barrier_clocks": 21, "launch_seconds": 2e-6, "graph_node_seconds": 1e-6,
        "code_bytes_per_clock": 3.25,
    }  # fmt: skip
    assert found.pop("code_cache_bytes") == _Gpu.code_bytes >> 14 << 14
    assert _Gpu.l2_bytes - 100 * 512 * 64 < found.pop("l2_bytes") <= _Gpu.l2_bytes
    blocks, seconds = zip(*found.pop("grid_sync_points"), strict=True)
    assert blocks == tuple(100 * each for each in range(1, 9))
    assert seconds == pytest.approx([1.25e-6 * each / 8 for each in range(1, 9)])
    assert found == pytest.approx(expected, rel=1e-6)
    assert more["int32_mixed_per_clock_per_sm"]["value"] == pytest.approx(120)
    assert more["memory_bytes_per_clock_per_sm"]["value"] == pytest.approx(50)
    assert [one["blocks"] for one in more["grid_syncs"]] == list(blocks)


# kernels


@pytest.mark.usefixtures("both_modes")
def test_the_kernels_do_what_is_counted() -> None:
    driver = RehearsalDriver({_IMAGE: measure_device.SOURCE.read_text()})
    measured = measure_device.measure(Cuda(0, driver), _IMAGE, repeats=1, small=True)
    taken_over = {"tensor_reach", "flag_seconds", "crowded_multiprocessors"}
    assert set(measured.figures) == set(measure_device.FIGURES) - taken_over
    kernels = set(re.findall(r"\b(measure_\w+)\(", measure_device.SOURCE.read_text()))
    assert {launch["name"] for launch in driver.launches} == kernels
    assert driver.live_bytes() == 0


@pytest.mark.parametrize(
    ("kernel", "good", "bad"),
    [
        ("measure_fp32", "u < 32", "u < 31"),
        ("measure_int32_multiply", "u < 32", "u < 31"),
        ("measure_int32_mixed", "u < 16", "u < 15"),
        ("measure_issue", "u < 16", "u < 15"),
        ("measure_special", '"=f"(x[j]) : "f"(negative)', '"=f"(x[j]) : "f"(x[j])'),
        ("measure_tensor", "u < 8", "u < 7"),
        ("measure_tf32", "u < 8", "u < 7"),
        ("measure_shared", "u < 4", "u < 3"),
        ("measure_read", "r < rounds", "r < rounds - 1"),
        ("measure_chase_l1", "u < 16", "u < 15"),
        ("measure_chase_l2", "u < 16", "u < 15"),
        ("measure_chase_shared", "u < 64", "u < 63"),
        ("measure_dependent", "u < 256", "u < 255"),
        ("measure_code", "p < parts", "p < parts - 1"),
        ("measure_grid_sync", "= (unsigned)syncs", "= 0"),
    ],
)
def test_a_kernel_that_does_less_is_found_out(kernel: str, good: str, bad: str) -> None:
    text = measure_device.SOURCE.read_text()
    begin = re.search(rf"\b{kernel}\(", text).start()
    at = text.index(good, begin)
    with pytest.raises(DeviceError, match=f"kernel {kernel} left"):
        _measured(text[:at] + bad + text[at + len(good) :])


def _loops(listing: str) -> dict[str, list[list[str]]]:
    """The instructions of each kernel's loops, from nvdisasm's listing."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"\.section\s+\.text\.", listing)[1:]:
        labels: dict[str, int] = {}
        code: list[str] = []
        loops = found.setdefault(re.match(r"\w+", section)[0], [])
        for line in section.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([\w.]+)([^;]*)", line):
                code.append(instruction[1])
                target = re.search(r"`\((\.L_x_\d+)\)", instruction[2])
                if instruction[1].startswith("BRA") and target and target[1] in labels:
                    loops.append(code[labels[target[1]] :])
    return found


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
def test_nvcc_takes_the_kernels(tmp_path: Path) -> None:
    """Not optimized, for which it takes 20 s."""
    made = tmp_path / "measure.ptx"
    command = [find_nvcc(), "-arch=sm_80", "-G", "-ptx", measure_device.SOURCE, "-o", made]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and made.stat().st_size, done.stderr


@pytest.mark.thorough("nvcc optimizes them for 20 s")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_machine_code_holds_the_measured_instructions_in_its_loops(arch: str, tmp_path: Path) -> None:
    disassembler = shutil.which("nvdisasm")
    if find_nvcc() is None or disassembler is None:
        pytest.skip("needs nvcc and nvdisasm")
    (tmp_path / "measure.cubin").write_bytes(measure_device.machine_code(arch))
    listing = subprocess.run([disassembler, "-c", str(tmp_path / "measure.cubin")], capture_output=True, text=True)
    loops = _loops(listing.stdout)
    wanted = {
        "measure_fp32": ("FFMA", 256), "measure_int32_multiply": ("IMAD", 256), "measure_int32_mixed": ("LOP3", 128),
        "measure_issue": ("FFMA", 64), "measure_special": ("MUFU.EX2", 128), "measure_tensor": ("HMMA.16816.F32", 32),
        "measure_tf32": ("HMMA.1688.F32.TF32", 32),
        "measure_shared": ("LDS.128", 32), "measure_read": ("LDG.E.128", 4), "measure_chase_l1": ("LDG.E.64", 16),
        "measure_chase_l2": ("LDG.E.64.STRONG.GPU", 16), "measure_chase_shared": ("LDS", 64),
        "measure_dependent": ("FFMA", 256), "measure_code": ("FFMA", 20 * 1024), "measure_barrier": ("BAR.SYNC", 32),
    }  # fmt: skip
    for kernel, (instruction, count) in wanted.items():
        # ptxas may unroll a loop further; what comes with its instructions are the counter and the branch.
        counts = [(sum(one.startswith(instruction) for one in loop), len(loop)) for loop in loops[kernel]]
        assert any(inside and inside % count == 0 for inside, _ in counts), (kernel, counts)
        if kernel in ("measure_fp32", "measure_int32_multiply", "measure_special", "measure_tensor", "measure_tf32"):
            assert all(length - inside <= 6 for inside, length in counts if inside), (kernel, counts)


# descriptions


def _known(**changed: float | None) -> measure_device.Measured:
    """A device with the shipped figures of an H200, all measured, but for some."""
    figures = {name: Reading(one.value, "as measured") for name, one in figures_of("H200-SXM5-141GB").items()}
    figures |= {name: Reading(value, "as measured" if value else "too noisy") for name, value in changed.items()}
    del figures["tensor_reach"]
    return measure_device.Measured("NVIDIA H200", "sm_90", figures, {"largest_clock_hz": 2e9})


def test_a_description_has_the_figures_of_the_cost_model(tmp_path: Path) -> None:
    assert set(measure_device.FIGURES) == {field.name for field in fields(CostDevice)} - {"product", "arch"}
    described = measure_device.description(_known(tensor_fma_per_clock_per_sm=1280.0), date="today")
    assert described["product"] == "H200-measured" and described["date"] == "today"
    assert list(described["figures"]) == list(measure_device.FIGURES)
    path = tmp_path / "device.json"
    path.write_text(json.dumps(described))
    device = cost_device(path)
    assert device == replace(cost_device("H200-SXM5-141GB"), product="H200-measured", tensor_reach=1280 / 2048)
    assert device.limits.sm_count == 132
    kinds = {name: figure.kind for name, figure in figures_of(path).items()}
    assert kinds["sm_count"] == "specification" and kinds["fp32_per_clock_per_sm"] == "measurement"
    assert kinds["tensor_reach"] == "measurement"


def test_what_could_not_be_measured_is_an_estimate_and_says_so() -> None:
    figures = measure_device.description(_known(launch_seconds=None, tensor_fma_per_clock_per_sm=None))["figures"]
    shipped = figures_of("H200-SXM5-141GB")
    for name in ("launch_seconds", "tensor_fma_per_clock_per_sm", "tensor_reach"):
        assert figures[name]["kind"] == "estimate" and figures[name]["value"] == shipped[name].value
    source = figures["launch_seconds"]["source"]
    assert "taken over from H200-SXM5-141GB" in source and "too noisy" in source


def test_a_gpu_that_no_file_describes() -> None:
    whole = replace(_known(), name="NVIDIA B300", arch="sm_103")
    figures = measure_device.description(whole)["figures"]
    assert figures["tensor_reach"]["value"] == 1.0 and figures["tensor_reach"]["kind"] == "estimate"
    with pytest.raises(DeviceError, match=r"clock_hz of NVIDIA B300 .* no sm_103"):
        measure_device.description(replace(_known(clock_hz=None), name="NVIDIA B300", arch="sm_103"))


@pytest.mark.parametrize(
    ("name", "arch", "product", "same"),
    [
        ("NVIDIA H200", "sm_90", "H200-SXM5-141GB", True),
        ("NVIDIA H100 80GB HBM3", "sm_90", "H100-SXM5-80GB", True),
        ("NVIDIA A100-SXM4-40GB", "sm_80", "A100-SXM4-40GB", True),
        ("NVIDIA A30", "sm_80", "A100-SXM4-40GB", False),
    ],
)
def test_the_nearest_description(name: str, arch: str, product: str, same: bool) -> None:
    found = measure_device.reference(name, arch)
    assert (found[0], found[2]) == (product, same)


def test_no_description_is_near() -> None:
    assert measure_device.reference("NVIDIA T4", "sm_75") is None


# the command


def test_the_command_writes_a_description_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Cuda", lambda ordinal: _cuda())
    monkeypatch.setattr(command, "machine_code", lambda arch: _IMAGE)
    small = partial(measure_device.measure, small=True)
    monkeypatch.setattr(command, "measure", lambda cuda, image, repeats, progress: small(cuda, image, repeats=1))
    path = tmp_path / "here.json"
    assert command.main(["-o", str(path), "--quiet"]) == 0
    assert set(figures_of(path)) == set(measure_device.FIGURES)
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith("registers_per_sm"))
    assert row == ["registers_per_sm", "specification", "65536", "65536", "1.000"]
    assert str(path) in printed


def test_without_a_gpu_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(ordinal: int) -> Cuda:
        raise NoGpuError("there is no GPU 0: the driver sees 0")

    monkeypatch.setattr(command, "Cuda", none)
    monkeypatch.chdir(tmp_path)
    assert command.main([]) == 2
    assert "NoGpuError: there is no GPU 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
