"""Kernels with clocks: what is labelled, that every stamp is written, and that nothing else changes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import souffle
from benchmarks import stage_clocks
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle import models
from souffle.codegen.plan import CudaModule, Plan
from souffle.runtime.cuda import Cuda
from tests.thorough import some


def _plan(model: str, level: str, waits: str) -> Plan:
    return souffle.compile(models.build(model, "tiny"), level=level, target="cuda", waits=waits, cubin=False).plan


@pytest.mark.parametrize(
    ("model", "level", "waits"),
    some([("lstm", "V3", "flags"), ("mmoe", "V4", "barriers")], [("bert", "V4", "barriers")]),
)
def test_every_block_writes_every_stamp(model: str, level: str, waits: str) -> None:
    plan = _plan(model, level, waits)
    texts, labels = [], {}
    for module in plan.modules:
        text, found = stage_clocks.clocked(module.text)
        texts.append(text)
        labels |= found
    cubins = tuple(f"module {number}".encode() for number in range(len(texts)))
    plan = replace(plan, modules=tuple(CudaModule(m.text, c) for m, c in zip(plan.modules, cubins, strict=True)))
    driver = RehearsalDriver(dict(zip(cubins, texts, strict=True)), multiprocessors=2)
    inputs = models.random_inputs(models.build(model, "tiny"))
    twin = stage_clocks.Twin(cubins, labels)
    found = stage_clocks.measure(plan, twin, inputs, Cuda(0, driver), runs=1)
    assert sum(run["runs"] for run in found["launches"]) == len(plan.launches)
    for run in found["launches"]:
        kernel = next(kernel for kernel in plan.kernels if kernel.name == run["kernel"])
        written = labels[kernel.name]
        # Stages of a loop once for each step; what a kernel's text has, stands under a label.
        times = {label: count for label, count, *_ in run["segments"]}
        assert times == {label: run["runs"] * written.count(label) for label in written}
        body = texts[kernel.module].split(f" {kernel.name}(")[-1].split("\n}\n")[0]
        assert set(re.findall(r"\b(stage\w+)\(", body)) == {name for name in times if name.startswith("stage")}
        waits = sum(count for name, count in times.items() if "grid" in name)
        assert waits == kernel.grid_syncs * run["runs"] or waits > kernel.grid_syncs > 0
        # A stamp that nobody wrote is 0, and what stands around it differs from it by a clock's whole value.
        assert all(0 <= low <= mean <= high < 1 << 44 for _, _, low, mean, high in run["segments"])
    shown = stage_clocks.table(found, stage_clocks.predictions(plan), 1e9)
    assert all(name[:60] in shown for name in set().union(*labels.values()))


def test_the_results_are_the_same() -> None:
    """Through the runtime, which gives the twin's kernels no place for their clocks: its parameter is dropped again."""
    plan = _plan("mmoe", "V4", "flags")
    text = stage_clocks.clocked(plan.modules[0].text)[0]
    there = text.replace(
        "unsigned long long* souffle_stamps, int num_blocks) {\n  int souffle_place",
        "int num_blocks) {\n  unsigned long long souffle_stamps[8192];\n  int souffle_place",
    )
    assert there != text
    inputs = models.random_inputs(models.build("mmoe", "tiny"))
    found = [
        souffle.runtime.Network(replace(plan, modules=(CudaModule(one, b""),)), device="cpu")(inputs)
        for one in (plan.modules[0].text, there)
    ]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])


def test_a_kernel_that_does_not_know_its_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel k does not end with num_blocks"):
        stage_clocks.clocked('\n\nextern "C" __global__ void k(float* a) {\n  f(a);\n}\n')
