"""Kernels that wait in vain, and have a limit: they end, the error says where, and the next run is right."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.codegen.plan import Plan
from souffle.emulator import BarrierError, CheckError, module
from souffle.errors import DeviceError, KernelTimeoutError
from souffle.kernel.grid_barrier import COUNTER_FUNCTION
from souffle.runtime import Network
from tests.runtime.plans import cooperative_plan, machine_code
from tests.runtime.played import on_device
from tests.testlib import inputs_for
from tests.watched import CALL, STEPS, looped, watched

pytestmark = pytest.mark.sampled(3)

_BLOCKS = 4
_BAD = "g0[0] < 0.0f"
"""Of the first input; whatever is wrong with a kernel is wrong only then."""
_LAST = STEPS - 1
_MUTANTS: dict[str, tuple[tuple[str, str], dict[str, object]]] = {
    # It is one barrier behind from then on, and not there at the last one.
    "a block passes a barrier": (
        (CALL, f"if (!({_BAD} && blockIdx.x == 1 && s0 == 3)) {CALL}"),
        {"step": _LAST, "arrived": (3, True)},
    ),
    "block 0 passes a barrier": (
        (CALL, f"if (!({_BAD} && blockIdx.x == 0 && s0 == 0)) {CALL}"),
        {"step": _LAST, "arrived": (3, False)},
    ),
    "a block leaves": (
        (CALL, f"if ({_BAD} && blockIdx.x == 2 && s0 == 2) return;\n    {CALL}"),
        {"step": 2, "arrived": (3, True)},
    ),
    "an arrival is not counted": (
        (": 1u;", ": blockIdx.x == 3 && step == 4 && limit % 2 == 1 ? 0u : 1u;"),
        {"step": 4, "arrived": (3, True)},
    ),
    "a block too many is waited for": (
        (CALL, CALL.replace("num_blocks", f"num_blocks + ({_BAD})")),
        {"step": 0, "arrived": (4, True)},
    ),
}


@cache
def whole(watchdog_ms: float | None = 20.0) -> Plan:
    return watched("V3", watchdog_ms).plan


def _edited(plan: Plan, edit: Callable[[str], str]) -> Plan:
    (module,) = plan.modules
    text = edit(module.text)
    return replace(plan, modules=(replace(module, text=text, cubin=machine_code(text)),))


def mutant(name: str, plan: Plan | None = None) -> Plan:
    (old, new), _ = _MUTANTS[name]

    def edit(text: str) -> str:
        made = text.replace(old, new)
        assert made != text and "(int64_t)20000000," in made
        # The device function is not given the input: the limit tells it.
        return made.replace("(int64_t)20000000,", f"(int64_t)20000000 + ({_BAD}),")

    return _edited(plan or whole(), edit)


@cache
def inputs() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Two that differ in the sign of all elements: with the second a mutant waits in vain."""
    (name, value), *_ = inputs_for(looped()).items()
    value = np.abs(value) + np.float32(0.5)
    return {name: value}, {name: -value}


def _same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.tobytes() == expected[key].tobytes()


def _says(error: KernelTimeoutError, name: str, plan: Plan) -> None:
    """Which kernel, stage, step and barrier it was, and which block saw it."""
    (kernel,), expected = plan.kernels, _MUTANTS[name][1]
    wait = error.wait
    assert (wait.kind, wait.kernel, wait.stage, wait.tile) == ("grid barrier", 0, 1, None)
    assert (wait.step, wait.arrived) == (expected["step"], expected["arrived"])
    assert wait.block in range(_BLOCKS)
    text = str(error)
    assert f"kernel {kernel.name} of {plan.name} has ended" in text and f"block {wait.block} waited" in text
    assert "more than 20 ms (watchdog_ms)" in text and "larger watchdog_ms" in text
    assert f"before its stage 1 ({kernel.stages[1]}), step {wait.step} of its loop, for the grid barrier" in text
    count, first = wait.arrived
    assert f"at which {count} of {wait.wanted} blocks had arrived" in text
    assert ("block 0 not among them" in text) != first


# ---- on the CPU device ----


@pytest.mark.parametrize("options", [{}, {"order": "shuffled", "seed": 3}, {"checked": True}])
@pytest.mark.parametrize("name", _MUTANTS)
def test_what_waits_in_vain_ends_and_the_next_run_is_right(name: str, options: dict) -> None:
    good, bad = inputs()
    expected = Network(whole(None), device="cpu", blocks=_BLOCKS)(good)
    network = Network(mutant(name), device="cpu", blocks=_BLOCKS, **options)
    _same(network(good), expected)
    for _ in range(2):
        with pytest.raises((KernelTimeoutError, CheckError)) as caught:
            network(bad)
        error = caught.value
        if isinstance(error, CheckError):
            # A block that is ahead of the others races with them too.
            assert options.get("checked") and "passes" in name and "race" in {f.kind for f in error.findings}
            assert error.stopped == str(error.__cause__)
            error = error.__cause__
        _says(error, name, network.plan)
        _same(network(good), expected)


def test_a_limit_is_come_to_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit counts the text's own time: where none is set, no patience with threads that only poll is a deadlock."""
    monkeypatch.setattr(module, "_SPIN_SECONDS", 0.0)
    with pytest.raises(KernelTimeoutError):
        Network(mutant("a block leaves"), device="cpu", blocks=_BLOCKS)(inputs()[1])
    call = f"{COUNTER_FUNCTION}(grid_state, num_blocks);"
    leaves = f"if ({_BAD} && blockIdx.x == 2) return;\n    {call}"
    plan = _edited(whole(None), lambda text: text.replace(call, leaves))
    with pytest.raises(BarrierError, match="polled that nothing writes"):
        Network(plan, device="cpu", blocks=_BLOCKS)(inputs()[1])


def test_the_error_travels() -> None:
    with pytest.raises(KernelTimeoutError) as caught:
        Network(mutant("a block leaves"), device="cpu", blocks=_BLOCKS)(inputs()[1])
    back = pickle.loads(pickle.dumps(caught.value))
    assert str(back) == str(caught.value) and back.wait == caught.value.wait


# ---- on a GPU that is played ----


def _pair(plan: Plan, **options: object) -> tuple[Network, RehearsalDriver]:
    texts = {module.cubin: module.text for p in (plan, cooperative_plan()) for module in p.modules}
    driver = RehearsalDriver(texts, **options)
    return Network(plan, driver=driver), driver


def _twice(plan: Plan) -> Plan:
    """The kernel launched two times in a run."""
    return replace(plan, launches=plan.launches * 2)


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize("name", ["a block leaves", "a block passes a barrier"])
def test_a_gpu_ends_and_the_next_run_is_right(name: str) -> None:
    good, bad = inputs()
    plan = _twice(mutant(name))
    network, driver = _pair(plan)
    expected = Network(whole(None), device="cpu")(good)
    _same(network(good), expected)
    before = driver.live_bytes()
    for run in (network, network, network.capture()):
        with pytest.raises(KernelTimeoutError) as caught:
            run(bad)
        _says(caught.value, name, plan)
        _same(run(good), expected)
    del caught
    gc.collect()
    assert len(network._runner._idle) == 1
    # What an aborted run had is given back, its page too; the graph has places of its own for inputs and outputs.
    graph = sum(buffer.nbytes for buffer in plan.buffers if buffer.kind in ("input", "output"))
    assert driver.live_bytes() <= before + 2 * graph
    pages = [name for name, _ in driver.calls]
    assert pages.count("cuMemHostAlloc") == pages.count("cuMemFreeHost") + 1 == 4


@pytest.mark.usefixtures("both_modes")
def test_the_first_of_all_launches_is_named_and_the_others_end_at_once() -> None:
    plan = mutant("a block leaves")
    kernels = (plan.kernels[0], replace(plan.kernels[0], stages=("other", "stages")))
    launches = (*plan.launches, replace(plan.launches[0], kernel=1))
    network, driver = _pair(replace(plan, kernels=kernels, launches=launches))
    with pytest.raises(KernelTimeoutError, match=rf"stage 1 \({plan.kernels[0].stages[1]}\), step 2 "):
        network(inputs()[1])
    assert len(driver.launches) == 2, "both were queued before anything was known"


@pytest.mark.usefixtures("both_modes")
def test_outputs_that_stay_on_the_device_say_it_when_they_are_read() -> None:
    good, bad = inputs()
    network, driver = _pair(mutant("a block leaves"))
    expected = Network(whole(None), device="cpu")(good)
    (name,) = good
    outputs = network({name: on_device(bad[name], driver)})
    for _ in range(2):
        with pytest.raises(KernelTimeoutError, match="step 2 of its loop"):
            next(iter(outputs.values())).numpy()
    _same(network(good), expected)
    again = network({name: on_device(good[name], driver)})
    _same({key: value.numpy() for key, value in again.items()}, expected)


@pytest.mark.usefixtures("both_modes")
def test_outputs_of_calls_that_ended_before_stay_what_they_are() -> None:
    good, bad = inputs()
    network, driver = _pair(mutant("a block leaves"))
    expected = Network(whole(None), device="cpu")(good)
    (name,) = good
    read, followed = (network({name: on_device(good[name], driver)}) for _ in range(2))
    _same({key: value.numpy() for key, value in read.items()}, expected)
    _same(network(good), expected)
    with pytest.raises(KernelTimeoutError):
        network(bad)
    for outputs in (read, followed):
        _same({key: value.numpy() for key, value in outputs.items()}, expected)


@pytest.mark.usefixtures("both_modes")
def test_a_call_that_nobody_asked_about_is_told_by_the_next() -> None:
    good, bad = inputs()
    network, driver = _pair(mutant("a block leaves"))
    (name,) = good
    kept = network({name: on_device(bad[name], driver)})
    with pytest.raises(KernelTimeoutError, match="step 2 of its loop"):
        network(good)
    _same(network(good), Network(whole(None), device="cpu")(good))
    # The page of the call lives as long as its outputs.
    with pytest.raises(KernelTimeoutError):
        next(iter(kept.values())).numpy()


@pytest.mark.usefixtures("both_modes")
def test_it_is_said_though_a_later_kernel_has_faulted() -> None:
    """Kernels that follow work on what the one that ended has left."""
    network, _ = _pair(_twice(mutant("a block leaves")), fault="sticky:2")
    with pytest.raises(KernelTimeoutError, match="step 2 of its loop") as caught:
        network(inputs()[1])
    assert isinstance(caught.value.__context__, DeviceError)


@pytest.mark.usefixtures("both_modes")
def test_timing_ends_too() -> None:
    network, _ = _pair(mutant("a block leaves"))
    with pytest.raises(KernelTimeoutError):
        network.time(inputs()[1], repeats=2, warmup=0)
    assert network.time(inputs()[0], repeats=2, warmup=0)["repeats"] == 2


# ---- a grid that is not there at once ----


def test_a_device_without_cooperative_launches_is_refused_when_loading() -> None:
    for plan in (_edited(whole(), lambda text: text), cooperative_plan()):
        network, driver = _pair(plan, cooperative=False)
        with pytest.raises(DeviceError, match=r"waits for all of its blocks, and GPU 0 .* has no cooperative launches"):
            network.open()
        assert not driver.launches
    plan = watched("V2", None).plan
    modules = tuple(replace(module, cubin=machine_code(module.text)) for module in plan.modules)
    network, _ = _pair(replace(plan, modules=modules), cooperative=False)
    network.open()


def test_no_more_blocks_are_launched_than_are_there_at_once() -> None:
    plan = _edited(whole(), lambda text: text)
    for blocks_each, multiprocessors in ((1, 1), (1, 3), (2, 2)):
        network, driver = _pair(plan, blocks_each=blocks_each, multiprocessors=multiprocessors)
        network(inputs()[0])
        assert [launch["grid"] for launch in driver.launches] == [blocks_each * multiprocessors]
        assert all(launch["cooperative"] for launch in driver.launches)
    network, driver = _pair(plan, blocks_each=0)
    with pytest.raises(DeviceError, match="does not fit on a multiprocessor"):
        network.open()
    assert not driver.launches
