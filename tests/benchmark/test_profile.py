"""Traces: valid events of Chrome's format, one for each launch, stage and wait, on each of the three devices."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import souffle
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle import models
from souffle.benchmark.profile import gpu_trace, profile_of, twin_of
from souffle.benchmark.trace import Slice, Trace
from souffle.cli.main import main
from souffle.codegen.plan import CudaModule, Plan
from souffle.runtime.cuda import Cuda


def _slices(text: str) -> dict[str, list[dict[str, Any]]]:
    """The slices of each track, in time, of what is a valid trace."""
    found = json.loads(text)
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"} and found["displayTimeUnit"] in ("ms", "ns")
    names, tracks = {}, defaultdict(list)
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str) and event["ph"] in "MX" and isinstance(event["pid"], int)
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        if event["ph"] == "X":
            assert all(isinstance(event[key], Real) and event[key] >= 0 for key in ("ts", "dur"))
            tracks[event["tid"]].append(event)
    assert set(tracks) == set(names) and len(set(names.values())) == len(names)
    for events in tracks.values():
        events.sort(key=lambda event: event["ts"])
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6, "slices of a track do not overlap here"
    return {names[number]: events for number, events in tracks.items()}


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    return models.random_inputs(models.build("mmoe", "tiny"))


def test_the_processor_is_timed_launch_by_launch(inputs: dict[str, np.ndarray]) -> None:
    network = souffle.compile(models.build("mmoe", "tiny"), target="cpu")
    (launches,) = _slices(profile_of(network, inputs).text()).values()
    plan = network.plan
    assert [event["name"] for event in launches] == [plan.kernels[launch.kernel].name for launch in plan.launches]
    assert [event["args"]["TEs"] for event in launches] == [list(launch.tes) for launch in plan.launches]
    assert all(event["dur"] > 0 for event in launches)
    times = network.launch_times(inputs)
    assert len(times) == len(plan.launches) + 1 and list(times) == sorted(times)


def test_the_cpu_device_counts(inputs: dict[str, np.ndarray]) -> None:
    network = souffle.compile(models.build("mmoe", "tiny"), level="V2", target="cuda", cubin=False, device="cpu")
    trace = profile_of(network, inputs)
    (launches,) = _slices(trace.text()).values()
    assert "not time" in trace.clock and len(launches) == len(network.plan.launches)
    checked = network.on("cpu", checked=True)
    checked(inputs)
    total = sum(report.total.read for report in checked.counts)
    assert sum(event["args"]["bytes read"] for event in launches) == total > 0


def test_every_block_of_a_played_gpu_shows_every_stage(inputs: dict[str, np.ndarray]) -> None:
    plan: Plan = souffle.compile(models.build("mmoe", "tiny"), level="V3", target="cuda", cubin=False).plan
    texts: dict[bytes, str] = {}

    def compiled(text: str) -> bytes:
        return texts.setdefault(f"module {len(texts)}".encode(), text) and f"module {len(texts) - 1}".encode()

    twin = twin_of(plan, compiled)
    plan = replace(plan, modules=tuple(CudaModule(m.text, c) for m, c in zip(plan.modules, twin.cubins, strict=True)))
    trace = gpu_trace(plan, twin, inputs, Cuda(0, RehearsalDriver(texts, multiprocessors=2)))
    tracks = _slices(trace.text())
    kernels = tracks.pop("kernels")
    assert [event["name"] for event in kernels] == [plan.kernels[launch.kernel].name for launch in plan.launches]
    assert set(tracks) == {f"block {number}" for number in range(max(event["args"]["blocks"] for event in kernels))}
    for name, events in tracks.items():
        found = Counter(event["name"] for event in events)
        assert found == sum((Counter(twin.labels[e["name"]]) for e in kernels if _has(e, name)), Counter())
        for event in events:
            kernel = kernels[event["args"]["launch"]]
            assert kernel["ts"] <= event["ts"] and event["ts"] + event["dur"] <= kernel["ts"] + kernel["dur"] + 1e-6
    stages = {event["name"] for event in tracks["block 0"] if event["name"].startswith("stage")}
    assert len(stages) > 2


def _has(kernel: dict[str, Any], track: str) -> bool:
    return int(track.split()[1]) < kernel["args"]["blocks"]


def test_names_that_are_no_plain_text_survive() -> None:
    one = Slice('a "stage"\n\\ of µ', "träck", 0.5, 0.25, {"n": 1})
    ((event,),) = _slices(Trace("net", "µs", (one,)).text()).values()
    assert (event["name"], event["ts"], event["dur"]) == (one.name, 0.5, 0.25)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("souffle.benchmark.bench.gpu_arch", lambda: None)
    model, out = tmp_path / "m.onnx", tmp_path / "trace.json"
    model.write_bytes(models.build("mmoe", "tiny").SerializeToString())
    words = ["bench", str(model), "--target", "cuda", "--against", "tensorrt", "--quiet", "--profile"]
    assert main([*words, str(out)]) == 0
    assert list(_slices(out.read_text())) == ["launches"]
    assert "the CPU device, whose time says nothing" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "none" / "trace.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
