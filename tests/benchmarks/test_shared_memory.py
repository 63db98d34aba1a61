"""Kernels with 100 KiB of shared memory and with all that there is: on the played driver, and in a network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import shared_memory
from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.codegen.nvcc import find_nvcc
from souffle.errors import DeviceError
from souffle.runtime import Network
from souffle.runtime.cuda import Cuda
from tests.runtime.plans import cooperative_expected, cooperative_plan, machine_code
from tests.runtime.played import driver_of

_MOST = 232_448
"""Of a block on sm_90."""


def _checked(text: str = shared_memory.SOURCE) -> list[dict]:
    return shared_memory.check(Cuda(0, RehearsalDriver({b"the kernels": text})), b"the kernels")


def test_all_of_it_is_there() -> None:
    rows = _checked()
    found = [(row["kernel"], row["dynamic_bytes"], row.get("wrong_words")) for row in rows]
    for kernel in ("shared_words", "shared_vectors"):
        mine = [row for row in found if row[0] == kernel]
        assert mine == [(kernel, 102_400, 0), (kernel, _MOST, 0), (kernel, _MOST + 1, None)]
    assert [row["blocks_per_multiprocessor"] for row in rows if "wrong_words" in row] == [2, 1] * 2
    refusals = [row["refused"] for row in rows if "refused" in row]
    assert all(f"needs {_MOST + 1} bytes of shared memory a block" in text for text in refusals) and len(refusals) == 2


@pytest.mark.parametrize("kernel", ["shared_words", "shared_vectors"])
def test_memory_that_is_there_twice_leaves_wrong_words(kernel: str) -> None:
    """Places 128 KiB apart are one."""
    write = {"shared_words": "memory[at] = pattern", "shared_vectors": "vectors[at] = make"}[kernel]
    wraps = {"shared_words": "memory[at % 32768] = pattern", "shared_vectors": "vectors[at % 8192] = make"}[kernel]
    rows = _checked(shared_memory.SOURCE.replace(write, wraps))
    wrong = {(row["kernel"], row["dynamic_bytes"]) for row in rows if row.get("wrong_words")}
    assert wrong == {(kernel, _MOST)}


@pytest.mark.parametrize("nbytes", [102_400, _MOST])
def test_a_network_asks_for_it_before_it_asks_how_many_blocks_fit(nbytes: int) -> None:
    x = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
    plan = _plan(nbytes)
    driver = driver_of(plan)
    network = Network(plan, driver=driver)
    for found in (network(x), network.capture()(x)):
        np.testing.assert_allclose(found["again"], cooperative_expected(x)["again"], rtol=1e-4)
    names = [name for name, _ in driver.calls]
    (asked,) = [args for name, args in driver.calls if name == "cuFuncSetAttribute"]
    assert asked[2] == nbytes
    occupancy = names.index("cuOccupancyMaxActiveBlocksPerMultiprocessor")
    assert names.index("cuFuncSetAttribute") < occupancy and driver.calls[occupancy][1][2] == nbytes
    launch = driver.launches[0]
    assert (launch["grid"], launch["shared"]) == (4 if nbytes < _MOST else 2, nbytes)


def test_one_byte_more_than_there_is_is_refused() -> None:
    plan = _plan(_MOST + 1)
    message = rf"kernel fused needs {_MOST + 1} bytes of shared memory a block and .* has {_MOST}; compile for this"
    with pytest.raises(DeviceError, match=message):
        Network(plan, driver=driver_of(plan)).open()


def _plan(nbytes: int):
    """The network of the runtime's tests, whose first kernel keeps its sums at the end of its shared memory."""
    plan = cooperative_plan()
    at = nbytes // 4 - 32
    text = plan.modules[0].text.replace("partial[", f"partial[{at} + ").replace(f"partial[{at} + ];", "partial[];")
    assert text.count(f"partial[{at} + ") == 2
    return replace(
        plan,
        modules=(replace(plan.modules[0], text=text, cubin=machine_code(text)), plan.modules[1]),
        kernels=(replace(plan.kernels[0], dynamic_shared_bytes=nbytes), plan.kernels[1]),
    )


def test_it_is_built_and_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    kept = tmp_path / "shared.json"
    assert shared_memory.main(["build", "--out", str(tmp_path / "built")]) == 0
    assert shared_memory.main(["rehearse", "--in", str(tmp_path / "built"), "--json", str(kept)]) == 0
    assert "a rehearsal without a GPU" in capsys.readouterr().out
    assert json.loads(kept.read_text())["ok"]
