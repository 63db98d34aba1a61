"""Whatever is done with a network on a GPU, the calling thread's context is afterwards the one that it was before."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.errors import DeviceError, InputError, NoGpuError
from souffle.runtime import Network
from souffle.runtime.cuda import Cuda
from tests.runtime.plans import cooperative_expected, cooperative_plan
from tests.runtime.played import driver_of, on_device

_X = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
_OTHERS = [[], [2], [1, 2]]
"""What another library has left on the thread's stack: nothing, the context of GPU 1, that one above our own."""


@pytest.fixture(params=_OTHERS, ids=["no context", "another GPU", "two contexts"])
def driver(request: pytest.FixtureRequest, both_modes: bool) -> Iterator[RehearsalDriver]:
    """A driver that fails the test where an entry leaves another context than it found."""
    played = driver_of(cooperative_plan(), devices=2)
    played.contexts[:] = request.param
    yield played
    assert played.contexts == request.param


@contextlib.contextmanager
def _kept(driver: RehearsalDriver) -> Iterator[None]:
    before = list(driver.contexts)
    yield
    assert driver.contexts == before


def test_every_entry_leaves_the_context_as_it_was(driver: RehearsalDriver) -> None:
    network = Network(cooperative_plan(), driver=driver)
    with _kept(driver):
        network.open()
    tensor = on_device(_X, driver)
    with _kept(driver):
        network(_X)
    with _kept(driver):
        outputs = network(tensor)
    for name, value in cooperative_expected(_X).items():
        with _kept(driver):
            np.testing.assert_allclose(outputs[name].numpy(), value, rtol=1e-4)
    with _kept(driver):
        captured = network.capture()
    with _kept(driver):
        captured(_X)
    with _kept(driver):
        network.time(_X, repeats=2, warmup=0, mode="graph")
    capsules = []
    for name, stream in (("scores", None), ("scores", 1), ("scores", -1), ("again", 2)):
        with _kept(driver):
            capsules.append(outputs[name].__dlpack__(stream=stream))
    # What is given back, one after the other: outputs that were lent, and all that the networks have.
    with _kept(driver):
        capsules.clear()
    with _kept(driver):
        outputs.clear()
    with _kept(driver):
        del captured, network, tensor
        gc.collect()
    assert driver.live_bytes() == 0


def test_entries_that_fail_leave_it_too(driver: RehearsalDriver) -> None:
    network = Network(cooperative_plan(), driver=driver)
    with _kept(driver), pytest.raises(InputError):
        network(_X[:5])
    with _kept(driver), pytest.raises(NoGpuError):
        Cuda(7, driver)
    plan = cooperative_plan()
    large = replace(plan, kernels=(replace(plan.kernels[0], dynamic_shared_bytes=1 << 20), plan.kernels[1]))
    with _kept(driver), pytest.raises(DeviceError):
        Network(large, driver=driver).open()
    output = network(on_device(_X, driver))["scores"]
    driver._fault = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with _kept(driver), pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        network(_X)
    with _kept(driver), pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        network.capture()
    with _kept(driver), pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        output.numpy()
    with _kept(driver), pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        output.__dlpack__(stream=1)
    with _kept(driver):
        del network, output
        gc.collect()


@pytest.mark.usefixtures("both_modes")
def test_an_exception_out_of_nowhere_leaves_it_too(driver: RehearsalDriver) -> None:
    """As a signal's, which may come right after any call of the driver."""
    network = Network(cooperative_plan(), driver=driver)
    network(_X)
    left = [0]

    class Interrupted(type(driver)):
        def __getattr__(self, name: str) -> Any:
            called = super().__getattr__(name)

            def call(*args: Any) -> Any:
                result = called(*args)
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
                return result

            return call

    driver.__class__ = Interrupted
    for calls in range(1, 12):
        left[0] = calls
        with _kept(driver), pytest.raises(KeyboardInterrupt):
            network(_X)
    driver.__class__ = Interrupted.__base__
    np.testing.assert_allclose(network(_X)["again"], cooperative_expected(_X)["again"], rtol=1e-4)


def test_work_in_no_context_or_a_wrong_one_is_refused() -> None:
    played = driver_of(cooperative_plan(), devices=2)
    cuda = Cuda(0, played)
    with pytest.raises(DeviceError, match=r"INVALID_CONTEXT .* from cuMemAlloc"):
        cuda.alloc(16)
    with cuda.current():
        stream, address = cuda.stream(), cuda.alloc(16)
    with Cuda(1, played).current(), pytest.raises(DeviceError, match=r"INVALID_HANDLE .* from cuMemsetD8Async"):
        cuda.fill(address, 0, 16, stream)
    cuda.free(address)
    assert played.live_bytes() == 0 and not played.contexts
