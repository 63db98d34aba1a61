"""Networks on the CPU device, and what they say about themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from souffle.errors import InputError, NoGpuError, OptionError
from souffle.runtime import Network, cuda
from tests.runtime.plans import cooperative_expected, cooperative_plan, many_types_plan

_ROOT = Path(__file__).resolve().parents[2]
_X = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(cooperative_plan(), device="cpu")


def _agrees(found: dict[str, np.ndarray]) -> None:
    for name, value in cooperative_expected(_X).items():
        assert found[name].shape == value.shape and found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], value, rtol=1e-4)


@pytest.mark.parametrize("blocks", [1, 3, 4, 100])
@pytest.mark.parametrize("order", ["fixed", "shuffled"])
def test_any_grid_and_order_gives_the_function(blocks: int, order: str) -> None:
    _agrees(Network(cooperative_plan(), device="cpu", blocks=blocks, order=order, seed=blocks)(_X))


def test_outputs_of_two_calls_are_apart(network: Network) -> None:
    first = network({"input.1": _X})
    kept = first["scores"].copy()
    second = network(2 * _X)
    np.testing.assert_array_equal(first["scores"], kept)
    np.testing.assert_allclose(second["scores"], 2 * kept, rtol=1e-4)
    assert list(first) == ["scores", "more/scores", "again"]


def test_arrays_of_any_layout_and_dlpack_are_taken(network: Network) -> None:
    class Lent:
        def __dlpack__(self, **options):
            return _X.__dlpack__(**options)

        def __dlpack_device__(self):
            return _X.__dlpack_device__()

    raw = np.zeros(_X.nbytes + 4, np.uint8)[4:].view(np.float32).reshape(_X.shape)
    raw[...] = _X
    for value in (np.asfortranarray(_X), np.repeat(_X, 2, axis=1)[:, ::2], raw, Lent()):
        _agrees(network(value))


def test_scalars_bool_and_half() -> None:
    found = Network(many_types_plan(), device="cpu")(np.array([True, False, True]), np.int64(2**40))
    assert found["negated"].dtype == np.bool_
    np.testing.assert_array_equal(found["negated"], [False, True, False])
    np.testing.assert_array_equal(found["counts"], 2**40 + np.arange(3))
    np.testing.assert_array_equal(found["values"], [0.5, -2, 65504])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (({"input.2": _X},), ["'input.2'", "did you mean 'input.1'", "float32 10x10"]),
        (({},), ["not given its input 'input.1'"]),
        (({"input.1": _X, "mask": _X},), ["no input named 'mask'"]),
        ((_X, _X), ["takes 1 inputs and was given 2"]),
        ((), ["was given 0"]),
        ((_X[:5],), ["shape (10, 10)", "(5, 10)", "batch of 5"]),
        ((_X.ravel(),), ["2 dimensions, not 1"]),
        ((_X.astype(np.float64),), ["'input.1'", "must be float32", "float64", "casts nothing"]),
        ((_X.astype(">f4"),), ["must be float32", ">f4"]),
        ((_X.tolist(),), ["list", "np.asarray"]),
        ((None,), ["NoneType"]),
        ((np.full((10, 10), None),), ["object"]),
    ],
)
def test_wrong_inputs_are_named(network: Network, args: tuple, says: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        network(*args)
    assert all(text in str(caught.value) for text in ["two_stage", *says])


def test_two_missing_inputs_are_both_named() -> None:
    with pytest.raises(InputError, match=r"inputs 'mask', 'count'.*count' \(int64 scalar\)"):
        Network(many_types_plan(), device="cpu")({})


@pytest.mark.parametrize(
    "options",
    [{"device": "gpu"}, {"order": "random"}, {"blocks": 0}, {"device": "cpu", "graph": True}, {"device": "cpu:1"}],
)
def test_wrong_options_are_refused(options: dict) -> None:
    with pytest.raises(OptionError):
        Network(cooperative_plan(), **options)


def test_kernels_and_explanation() -> None:
    network = Network(cooperative_plan())
    fused, bump = network.kernels
    assert (fused.name, fused.grid, fused.block, fused.registers) == ("fused", (7, 1, 1), (32, 1, 1), 24)
    assert (fused.shared_bytes, fused.spill_bytes, fused.stack_bytes) == (128, 0, None)
    assert (fused.grid_syncs, fused.launches) == (1, 1)
    assert "__global__" in fused.text and bump.tes == ("z", "again") and bump.launches == 2
    text = network.explain()
    assert "3 launches of 2 kernels, 1 grid syncs" in text
    assert text.index("partition: 1 done, 1 refused") < text.index("horizontal: 0 done, 1 refused")
    assert "  - y, z: z is cheap" in text
    assert Network(cooperative_plan(compiled=False)).kernels[0].registers is None
    assert network.on("cpu", blocks=2).device == "cpu"


def test_without_a_gpu_the_message_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_bindings", None)
    with pytest.raises(NoGpuError, match=r"cuda-bindings is not installed.*device=\"cpu\" runs"):
        Network(cooperative_plan())(_X)
    with pytest.raises(OptionError, match="says nothing about the time"):
        Network(cooperative_plan(), device="cpu").time(_X)


def test_the_runtime_needs_no_compiler() -> None:
    program = (
        "import sys\n"
        "for name in ('tvm', 'onnx', 'islpy', 'torch'): sys.modules[name] = None\n"
        "import souffle.runtime, benchmarks.gpu_steps, benchmarks.gpu_host\n"
        "assert souffle.runtime.Network"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
