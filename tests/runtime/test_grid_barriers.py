"""The counter barrier at run time: it orders blocks as a grid sync does, what is broken is found, and its state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.codegen.plan import Buffer, Plan
from souffle.emulator import BarrierError, CpuModule, LaunchReport, compile_text
from souffle.errors import DeviceError
from souffle.kernel.grid_barrier import GRID_BARRIERS
from souffle.runtime import Network
from tests.runtime.plans import cooperative_expected, cooperative_plan, machine_code

pytestmark = pytest.mark.sampled(2)

_BARRIER = GRID_BARRIERS["counter"].text
_KERNEL = """
extern "C" __global__ void neighbours(float* out, float* middle, unsigned* state, int rounds, int num_blocks) {
  int at = blockIdx.x * blockDim.x + threadIdx.x, all = num_blocks * blockDim.x;
  float sum = 0.0f;
  for (int round = 0; round < rounds; ++round) {
    middle[at] = (float)(at + round);
    souffle_wait_for_grid(state, num_blocks);
    sum += middle[(at + blockDim.x + 1) % all];
    souffle_wait_for_grid(state, num_blocks);
  }
  out[at] = sum;
}
"""
_CALL = "    souffle_wait_for_grid(state, num_blocks);\n"
_ARRIVAL = "atom.add.acq_rel.gpu.global.u32"
_MUTANTS = {
    "no wait before the read": (_KERNEL.replace(_CALL, "", 1), _BARRIER),
    "no wait before the next write": (_CALL.join(_KERNEL.split(_CALL)[:2]) + _KERNEL.split(_CALL)[2], _BARRIER),
    "arrives before its own threads": (_KERNEL, _BARRIER.replace("  __syncthreads();\n", "", 1)),
    "lets threads go on alone": (_KERNEL, _BARRIER.replace("  __syncthreads();\n  return", "  return")),
    "arrival is no release": (_KERNEL, _BARRIER.replace(_ARRIVAL, "atom.add.relaxed.gpu.global.u32")),
    "arrival releases to its block only": (_KERNEL, _BARRIER.replace("acq_rel.gpu", "acq_rel.cta")),
    "does not wait": (_KERNEL, _BARRIER.replace("0x80000000u) == 0", "0x80000000u) == 1")),
    "counts one block less": (_KERNEL, _BARRIER.replace("(num_blocks - 1)", "(num_blocks - 2)")),
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grid_barriers")


@pytest.fixture(scope="session")
def plain(cache: Path) -> CpuModule:
    return compile_text(_BARRIER + _KERNEL, cache_dir=cache)


@pytest.fixture(scope="session")
def checked(cache: Path) -> CpuModule:
    return compile_text(_BARRIER + _KERNEL, cache_dir=cache, checked=True)


def _run(
    module: CpuModule, state: np.ndarray, *, blocks: int, rounds: int = 3, threads: int = 64, **options
) -> tuple[LaunchReport, np.ndarray]:
    out, middle = (np.zeros(blocks * threads, np.float32) for _ in range(2))
    options = {"cooperative": True, "raises": False, **options}
    args = [out, middle, state, rounds, blocks]
    return module.launch("neighbours", grid=(blocks, 1, 1), block=(threads, 1, 1), args=args, **options), out


def _expected(blocks: int, rounds: int = 3, threads: int = 64) -> np.ndarray:
    at = (np.arange(blocks * threads) + threads + 1) % (blocks * threads)
    return sum((at + r).astype(np.float32) for r in range(rounds))


@pytest.mark.parametrize("options", [{}, {"order": "shuffled", "seed": 3}, {"workers": 2}])
@pytest.mark.parametrize("begins", [0, 1 << 31])
def test_launches_of_any_grid_share_a_counter_that_wraps(plain: CpuModule, begins: int, options: dict):
    state = np.array([begins], np.uint32)
    for blocks in (1, 2, 7, 4, 1, 12):
        _, out = _run(plain, state, blocks=blocks, **options)
        np.testing.assert_array_equal(out, _expected(blocks))
        assert state[0] in (0, 1 << 31), "a launch leaves arrivals behind"


@pytest.mark.parametrize("options", [{}, {"order": "shuffled", "seed": 5}])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_it_orders_blocks_as_a_grid_sync_does(checked: CpuModule, blocks: int, options: dict):
    state = np.zeros(32, np.uint32)
    for _ in range(2):
        report, out = _run(checked, state, blocks=blocks, **options)
        np.testing.assert_array_equal(out, _expected(blocks))
        assert (report.findings, report.races_checked, report.grid_syncs) == ((), True, 6)
    # Polls are no traffic: how many there are is chance.
    traffic = dict(report.buffers)["argument 2"]
    assert (traffic.read, traffic.written, traffic.atomics) == (0, 0, 6 * blocks)


@pytest.mark.parametrize("options", [{}, {"order": "shuffled", "seed": 5}])
@pytest.mark.parametrize("name", _MUTANTS)
def test_what_is_broken_in_it_is_found(cache: Path, name: str, options: dict):
    kernel, barrier = _MUTANTS[name]
    assert (kernel, barrier) != (_KERNEL, _BARRIER)
    module = compile_text(barrier + kernel, cache_dir=cache, checked=True)
    try:
        report, _ = _run(module, np.zeros(32, np.uint32), blocks=4, timeout_seconds=1.0, **options)
    except BarrierError as error:
        found = {finding.kind for finding in error.findings}
        assert "deadlock" in str(error)
    else:
        found = {finding.kind for finding in report.findings}
        # Acquires and releases of a block alone are not followed, and it says so.
        assert report.races_checked or name == "arrival releases to its block only"
    assert "race" in found or name in ("arrival releases to its block only", "counts one block less")


_ABSENT = _KERNEL.replace("float sum = 0.0f;", "float sum = 0.0f;\n  if (blockIdx.x == 2) return;")
_TOO_MANY = _KERNEL.replace("souffle_wait_for_grid(state, num_blocks)", "souffle_wait_for_grid(state, num_blocks + 1)")


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("kernel", [_ABSENT, _TOO_MANY])
def test_a_wait_that_never_ends_is_a_deadlock(cache: Path, kernel: str, check: bool):
    module = compile_text(_BARRIER + kernel, cache_dir=cache, checked=check)
    with pytest.raises(BarrierError, match=r"kernel neighbours, block \(3, 0, 0\): deadlock.*polled") as caught:
        _run(module, np.zeros(1, np.uint32), blocks=4, timeout_seconds=1.0)
    polling, waiting, *gone = caught.value.waits
    assert (polling.threads, polling.first, waiting.threads, waiting.first) == (1, (0, 0, 0), 63, (1, 0, 0))
    assert polling.place.function == "neighbours" and waiting.operation == "__syncthreads"
    assert [(one.state, one.block) for one in gone] == ([("exited", (2, 0, 0))] if kernel is _ABSENT else [])
    assert ("1 block exited (first: block (2, 0, 0))" in str(caught.value)) == (kernel is _ABSENT)
    assert "1 thread poll memory (first: thread (0, 0, 0), neighbours" in str(caught.value)


# ---- the state, which belongs to a network ----

_X = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)


def _plan(barrier: str = _BARRIER) -> Plan:
    """The plan of the runtime's tests, with a counter; its first kernel is launched twice."""
    plan = cooperative_plan()
    module = plan.modules[0]
    text = module.text.replace("cooperative_groups::this_grid().sync()", "souffle_wait_for_grid(state, num_blocks)")
    text = barrier + text.replace("float* y, int num_blocks", "float* y, unsigned* state, int num_blocks")
    first = replace(plan.launches[0], buffers=(*plan.launches[0].buffers, len(plan.buffers)))
    return replace(
        plan,
        buffers=(*plan.buffers, Buffer("grid barrier", (32,), "uint32", "state", "grid barrier")),
        modules=(replace(module, text=text, cubin=machine_code(text)), plan.modules[1]),
        launches=(first, first, *plan.launches[1:]),
        options=replace(plan.options, grid_barrier="counter"),
    )


def _driver(plan: Plan) -> RehearsalDriver:
    return RehearsalDriver({module.cubin: module.text for module in plan.modules})


def _agrees(found: dict[str, np.ndarray]) -> None:
    for name, value in cooperative_expected(_X).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4)


@pytest.mark.usefixtures("both_modes")
def test_each_network_counts_in_memory_of_its_own_that_no_run_resets() -> None:
    plan = _plan()
    driver = _driver(plan)
    one, other = (Network(plan, driver=driver, poison=True) for _ in range(2))
    for network in (one, other, one):
        _agrees(network(_X))
    states = {launch["pointers"][4] for launch in driver.launches if launch["name"] == "fused"}
    assert len(states) == 2
    fills = [call[1] for call in driver.calls if call[0] == "cuMemsetD8Async"]
    assert sorted(fill[0] for fill in fills if fill[1] == 0) == sorted(states), "zeroed once, when it is loaded"
    assert all(fill[0] not in states for fill in fills if fill[1] != 0), "never poisoned"
    captured = one.capture()
    for _ in range(2):
        _agrees(captured(_X))
    _agrees(one(_X))


@pytest.mark.usefixtures("both_modes")
def test_a_call_that_failed_on_a_gpu_leaves_no_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan()
    driver = _driver(plan)
    network = Network(plan, driver=driver)
    _agrees(network(_X))
    (state,) = {launch["pointers"][4] for launch in driver.launches if launch["name"] == "fused"}
    driver._memory[state].view(np.uint32)[0] = 3  # as an aborted launch may leave it

    def refused(self: RehearsalDriver, *args: object) -> object:
        return self.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE

    with monkeypatch.context() as broken:
        broken.setattr(RehearsalDriver, "_cuLaunchKernelEx", refused)
        with pytest.raises(DeviceError, match="kernels fused, bump"):
            network(_X)
    _agrees(network(_X))


@pytest.mark.parametrize("checked", [False, True])
def test_a_call_that_failed_on_the_cpu_leaves_no_arrivals(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block leaves while an input is negative, and the others wait in vain, not as long as they would."""
    plan = _plan()
    module = plan.modules[0]
    text = module.text.replace("unsigned* state, int num_blocks) {\n  for", _LEAVES, 1)
    assert text != module.text
    modules = (replace(module, text=text), plan.modules[1])
    network = Network(replace(plan, modules=modules), device="cpu", checked=checked)
    good = np.abs(_X)
    before = network(good)
    with monkeypatch.context() as patch, pytest.raises(BarrierError, match=r"kernel fused.*deadlock.*polled"):
        patch.setattr("souffle.emulator.module._SPIN_SECONDS", 2.0)
        network(-good)
    for key, value in network(good).items():
        np.testing.assert_array_equal(value, before[key])


_LEAVES = """unsigned* state, int num_blocks) {
  if (blockIdx.x == 0 && x[0] < 0.0f) return;
  for"""
