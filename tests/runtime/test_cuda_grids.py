"""Cooperative launches that the device refuses as too large, though the driver has said that they fit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.errors import DeviceError
from souffle.runtime import Network
from souffle.runtime.cuda import LaunchTooLargeError
from souffle.runtime.cuda_grids import Grids
from tests.runtime.plans import cooperative_expected, cooperative_plan
from tests.runtime.played import driver_of

_X = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)


def _pair(**options: Any) -> tuple[Network, RehearsalDriver]:
    """Its first kernel is launched twice."""
    plan = cooperative_plan()
    plan = replace(plan, launches=(plan.launches[0], *plan.launches))
    driver = driver_of(plan, **options)
    return Network(plan, driver=driver), driver


def _agrees(found: dict[str, np.ndarray]) -> None:
    for name, value in cooperative_expected(_X).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4)


def _grids(driver: RehearsalDriver) -> list[tuple[int, tuple[int, ...]]]:
    return [(launch["grid"], launch["integers"]) for launch in driver.launches if launch["name"] == "fused"]


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "souffle"):
        yield caplog


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize(("most", "taken"), [(3, 2), (2, 2), (1, 1)])
def test_half_of_a_refused_grid_is_tried(most: int, taken: int, warnings: pytest.LogCaptureFixture) -> None:
    network, driver = _pair(fault=f"too-large:{most}")
    _agrees(network(_X))
    _agrees(network(_X))
    assert _grids(driver) == [(taken, (taken,))] * 4 and network.kernels[0].grid == (taken, 1, 1)
    refused = [name for name, _ in driver.calls].count("cuLaunchKernelEx") - len(driver.launches)
    assert refused == {2: 1, 1: 2}[taken], "once for all launches of the kernel"
    # Workspaces that are made later, and graphs, have it too.
    workspace = network._runner._idle.pop()
    _agrees(network(_X))
    _agrees(network.capture()(_X))
    assert set(_grids(driver)) == {(taken, (taken,))}
    workspace.release()
    (record,) = warnings.records
    assert "kernel fused: the device refused a grid of 4" in record.message
    assert f"launched with {taken} from now on" in record.message
    assert "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE" in record.message


@pytest.mark.usefixtures("both_modes")
def test_nothing_is_said_where_nothing_is_refused(warnings: pytest.LogCaptureFixture) -> None:
    network, driver = _pair()
    _agrees(network.capture()(_X))
    assert set(_grids(driver)) == {(4, (4,))} and not warnings.records


@pytest.mark.usefixtures("both_modes")
def test_one_block_that_does_not_fit_is_an_error() -> None:
    network, driver = _pair(fault="too-large:0")
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"fused, bump.*COOPERATIVE_LAUNCH_TOO_LARGE .* kernel fused"):
            network(_X)
    driver._most_blocks = 4
    _agrees(network(_X))
    assert set(_grids(driver)) == {(4, (4,))}, "it was not the size that was refused"


@pytest.mark.usefixtures("both_modes")
@pytest.mark.parametrize("where", ["_cuLaunchKernelEx", "_cuGraphInstantiate", "_cuGraphLaunch"])
def test_a_graph_that_is_refused_is_captured_again(
    where: str, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    """The driver may speak of it when the launch is recorded, when the graph is made, or when it is to run."""
    network, driver = _pair()
    begun = [0]
    begin, action = RehearsalDriver._cuStreamBeginCapture, getattr(RehearsalDriver, where)

    def count(self: RehearsalDriver, *args: Any) -> Any:
        begun.append(len(self.launches))
        return begin(self, *args)

    def refuse(self: RehearsalDriver, *args: Any) -> Any:
        held = [args[0].gridDimX] if where == "_cuLaunchKernelEx" else [grid for grid, _ in _grids(self)[-2:]]
        if held[0] > 1 and (where != "_cuLaunchKernelEx" or bool(args[0].numAttrs)):
            return self.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
        return action(self, *args)

    monkeypatch.setattr(RehearsalDriver, "_cuStreamBeginCapture", count)
    monkeypatch.setattr(RehearsalDriver, where, refuse)
    captured = network.capture()
    for _ in range(2):
        _agrees(captured(_X))
    assert len(begun) == 1 + 3, "with 4 blocks, with 2 and with 1"
    assert _grids(driver)[-2:] == [(1, (1,))] * 2 and network.kernels[0].grid == (1, 1, 1)
    (record,) = warnings.records
    assert "refused a grid of 4" in record.message and "launched with 1 from now on" in record.message
    assert not driver._captures and len(driver._graphs) == 1
    assert network.time(_X, repeats=2, mode="graph")["min_us"] > 0


def test_calls_that_meet_the_same_refusal_halve_it_once() -> None:
    grids, error = Grids(["a", "b"], [8, 6]), LaunchTooLargeError("refused")
    grids.halve({0: 8}, error)
    grids.halve({0: 8}, error)
    assert tuple(grids) == (4, 6)
    grids.halve({0: 8, 1: 6}, error)
    assert tuple(grids) == (4, 6), "a graph with a grid that is smaller by now"
    grids.halve({0: 4, 1: 6}, error)
    assert tuple(grids) == (2, 3)


@pytest.mark.usefixtures("both_modes")
def test_a_kernel_may_be_launched_with_fewer_blocks_than_fit() -> None:
    plan = cooperative_plan()
    fused, bump = plan.kernels
    plan = replace(plan, kernels=(replace(fused, most_blocks=3), bump))
    driver = driver_of(plan)
    network = Network(plan, driver=driver)
    _agrees(network(_X))
    assert _grids(driver) == [(3, (3,))] and network.kernels[0].grid == (3, 1, 1)
