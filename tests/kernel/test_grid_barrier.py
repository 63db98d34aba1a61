"""Grid barriers as a part to exchange: what is emitted with each, and that networks do not see which one it was."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import souffle
from souffle import models
from souffle.codegen.nvcc import find_nvcc
from souffle.errors import OptionError
from souffle.kernel.grid_barrier import COUNTER_FUNCTION, GRID_BARRIERS
from souffle.pipeline import compile_cuda
from souffle.runtime import Network
from souffle.runtime.artifact import load, save

_COUNTS = re.compile(rf"(?<!int ){COUNTER_FUNCTION}\(grid_state, num_blocks\);")
needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")


@cache
def compiled(name: str, barrier: str, level: str = "V3", precision: str = "fp32") -> Network:
    return souffle.compile(
        models.build(name), level=level, target="cuda", device="cpu", arch="sm_90", precision=precision, cubin=False,
        grid_barrier=barrier,
    )  # fmt: skip


def test_one_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"grid_barrier='spin' is not valid; choose one of cooperative, counter"):
        souffle.compile(models.build("lstm"), target="cuda", arch="sm_90", cubin=False, grid_barrier="spin")


@pytest.mark.parametrize("name", ["lstm", "bert"])
def test_what_is_emitted(name: str) -> None:
    """Wherever one barrier stands the other would, in loops too; only the counter has memory."""
    one, other = (compiled(name, barrier).plan for barrier in GRID_BARRIERS)
    assert (one.options.grid_barrier, other.options.grid_barrier) == ("cooperative", "counter")
    text, counted = one.modules[0].text, other.modules[0].text
    assert COUNTER_FUNCTION not in text and "tvm_builtin_cuda_grid_sync" not in counted
    assert "cooperative_groups" not in counted
    assert counted.count(GRID_BARRIERS["counter"].text.strip()) == 1
    places = len(_COUNTS.findall(counted))
    assert places == text.count("tvm_builtin_cuda_grid_sync();") > 0
    (kernel,) = other.kernels
    assert kernel.cooperative and kernel.grid_syncs == one.kernels[0].grid_syncs >= places
    assert other.buffers[:-1] == one.buffers
    state = other.buffers[-1]
    assert (state.kind, state.dtype, state.offset) == ("state", "uint32", 0) and state.nbytes >= 4
    assert other.workspace_bytes == one.workspace_bytes
    assert other.launches[0].buffers == (*one.launches[0].buffers, len(one.buffers))


def test_kernels_that_do_not_wait_keep_nothing() -> None:
    plan = compiled("lstm", "counter", "V0").plan
    assert plan.options.grid_barrier == "counter" and all(kernel.grid_syncs == 0 for kernel in plan.kernels)
    assert "state" not in {buffer.kind for buffer in plan.buffers}
    assert all(COUNTER_FUNCTION not in module.text for module in plan.modules)


@pytest.mark.parametrize(("name", "precision"), [("lstm", "fp32"), ("mmoe", "mixed"), ("bert", "mixed")])
def test_results_are_the_same_bits(name: str, precision: str) -> None:
    one, other = (compiled(name, barrier, precision=precision) for barrier in GRID_BARRIERS)
    inputs = models.random_inputs(models.build(name), seed=3)
    expected = one.on("cpu")(inputs)
    for blocks, options in ((4, {}), (4, {"order": "shuffled", "seed": 1}), (7, {"order": "shuffled", "seed": 2})):
        network = other.on("cpu", blocks=blocks, **options)
        for _ in range(2):  # the second call finds the counter as the first left it
            for key, value in network(inputs).items():
                assert value.tobytes() == expected[key].tobytes()


def test_checked_runs_see_it_as_a_grid_sync() -> None:
    network = compiled("lstm", "counter").on("cpu", checked=True, order="shuffled", seed=4)
    inputs = models.random_inputs(models.build("lstm"), seed=3)
    for _ in range(2):
        network(inputs)
        (report,) = network.counts
        assert (report.findings, report.races_checked) == ((), True)
        assert report.grid_syncs == network.plan.kernels[0].grid_syncs
    plain = compiled("lstm", "cooperative").on("cpu", checked=True)
    plain(inputs)
    moved = [dict(n.counts[0].buffers) for n in (network, plain)]
    del moved[0]["grid barrier"]
    assert moved[0] == moved[1], "waiting is no traffic"


def test_a_file_keeps_it(tmp_path: Path) -> None:
    network = compiled("lstm", "counter")
    save(network.plan, tmp_path / "lstm.souffle")
    plan = load(tmp_path / "lstm.souffle")
    assert (plan.options.grid_barrier, plan.buffers, plan.launches) == (
        network.plan.options.grid_barrier, network.plan.buffers, network.plan.launches,
    )  # fmt: skip
    inputs = models.random_inputs(models.build("lstm"), seed=5)
    for key, value in Network(plan, device="cpu")(inputs).items():
        np.testing.assert_array_equal(value, network.on("cpu")(inputs)[key])


# ---- what nvcc makes of it ----


def ptx_of(text: str, arch: str, folder: Path) -> str:
    source = folder / "text.cu"
    source.write_text(text, encoding="utf-8")
    command = [str(find_nvcc()), "-ptx", "-w", f"-arch={arch}", "-o", str(folder / "text.ptx"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return (folder / "text.ptx").read_text(encoding="utf-8")


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_one_arrival_and_one_poll(arch: str, tmp_path: Path) -> None:
    kernel = 'extern "C" __global__ void wait(unsigned* state, int n) { ' + COUNTER_FUNCTION + "(state, n); }"
    text = ptx_of(GRID_BARRIERS["counter"].text + kernel, arch, tmp_path)
    words = "bar|atom|red|ld.acquire|ld.relaxed|fence|membar|nanosleep".replace(".", r"\.")
    code = re.findall(rf"^\s+(?:@!?%p\d+ )?((?:{words})\S*)", text, re.MULTILINE)
    arrival, poll = "atom.add.acq_rel.gpu.global.u32", "ld.acquire.gpu.global.u32"
    assert code == ["bar.sync", arrival, poll, "bar.sync"]


def origins(body: str, register: str, of: dict[str, set[str]]) -> set[str]:
    """The parameters of a kernel that a register of its PTX may point into."""
    found: set[str] = set()
    todo, seen = [register], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for operands in of.get(name, ()):
            found.update(re.findall(r"\[(\w+_param_\d+)", operands))
            todo += re.findall(r"%rd\d+", operands)
    return found


def cached_and_written(ptx: str) -> tuple[set[str], set[str]]:
    """Parameters of a kernel that are read past the coherent cache, and those that it or a function writes."""
    body = ptx[ptx.index(".entry") :]
    of: dict[str, set[str]] = {}
    for line in body.splitlines():
        one = re.match(r"\s+(?:@!?%p\d+ )?(ld\.param|cvta|add|sub|mov|selp|mad|mul)\S*\s+(%rd\d+), (.*);", line)
        if one and not one[1].startswith("mul"):
            of.setdefault(one[2], set()).add(one[3])
    cached, written = set(), set()
    for line in body.splitlines():
        if one := re.search(r"ld\.global\.nc\S*\s+.*\[(%rd\d+)", line):
            cached |= origins(body, one[1], of)
        if one := re.search(r"\b(?:st\.global|atom|red)\S*\s+(?:%\w+, )?\[(%rd\d+)", line):
            written |= origins(body, one[1], of)
        # What a call is given it may write.
        if one := re.search(r"st\.param\.b64\s+\[\w+\+?\d*\], (%rd\d+)", line):
            written |= origins(body, one[1], of)
    return cached, written


@needs_nvcc
@pytest.mark.parametrize("barrier", GRID_BARRIERS)
@pytest.mark.parametrize(("name", "precision"), [("bert", "mixed"), ("mmoe", "fp32")])
def test_what_a_kernel_writes_is_not_read_past_the_coherent_cache(
    name: str, precision: str, barrier: str, tmp_path: Path
) -> None:
    """The stage functions' pointers are ``__restrict__``, and no barrier orders ``ld.global.nc``."""
    (module,) = compiled(name, barrier, precision=precision).plan.modules
    cached, written = cached_and_written(ptx_of(module.text, "sm_90", tmp_path))
    assert written and cached
    assert not cached & written


@needs_nvcc
def test_such_a_read_would_be_seen(tmp_path: Path) -> None:
    text = """
extern "C" __global__ void one(float* a, float* b, float* c, int n) {
  int i = threadIdx.x;
  b[i] = a[i];
  __syncthreads();
  c[i] = __ldg((i < n ? b : a) + n - i);
}"""
    cached, written = cached_and_written(ptx_of(text, "sm_90", tmp_path))
    assert (cached, written) == ({"one_param_0", "one_param_1"}, {"one_param_1", "one_param_2"})


def test_the_program_can_be_compiled_without_the_front_door() -> None:
    program = souffle.import_onnx(models.build("mmoe"))
    plan = compile_cuda(program, level="V3", arch="sm_80", cubin=False, grid_barrier="counter").plan
    assert plan.options.grid_barrier == "counter"
