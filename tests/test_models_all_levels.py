"""The paper's models in their tiny size: every level, both ways to run on the CPU, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import onnx
import pytest

import souffle
from souffle import models
from souffle.certificate import PROVEN
from souffle.cli.compare import compare, onnxruntime_outputs
from souffle.models import efficientnet, lstm, resnext, swin
from souffle.models.bert import SIZES
from souffle.models.efficientnet import StageConfig
from souffle.pipeline import LEVELS
from souffle.program import TEProgram
from souffle.program.evaluate import evaluate
from tests.thorough import THOROUGH, some

SOME_SE = ("se:M0", "se:M7")

# Those that take longest to compile, with fewer of each kind of block; EfficientNet's have a stride for all.
FEWER_BLOCKS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "swin": partial(swin.build_swin, replace(swin.SIZES["tiny"], depths=(2,), heads=(2,))),
    "resnext": partial(resnext.build_resnext, replace(resnext.SIZES["tiny"], blocks=(2,), widths=(16,))),
    "efficientnet": partial(
        efficientnet.build_efficientnet,
        replace(efficientnet.SIZES["tiny"], stages=(StageConfig(1, 3, 2, 12, 1), StageConfig(4, 5, 1, 12, 1))),
    ),
    "lstm": partial(lstm.build_lstm, replace(lstm.SIZES["tiny"], layers=2, steps=3)),
}


@cache
def model(name: str) -> onnx.ModelProto:
    return models.build(name) if THOROUGH or name not in FEWER_BLOCKS else FEWER_BLOCKS[name](0)


@cache
def program(name: str) -> TEProgram:
    return souffle.import_onnx(model(name))


@cache
def inputs(name: str) -> dict[str, np.ndarray]:
    return models.random_inputs(model(name), seed=1)


@cache
def reference(name: str) -> dict[str, np.ndarray]:
    return onnxruntime_outputs(model(name), inputs(name))


def compiled(name: str, **options):
    """Proven, unless that is left out."""
    chosen = {"target": "cuda", "arch": "sm_90", "cubin": False, "device": "cpu"} | options
    network = souffle.compile(program(name), **chosen)
    if options.get("verify") != "off":
        assert network.certificate.verdict == PROVEN, str(network.certificate)
        assert len(network.certificate.kernels) == len(network.plan.kernels)
    return network


def check(name: str, network, precision: str = "fp32") -> None:
    found = {key: np.asarray(value) for key, value in network(inputs(name)).items()}
    result = compare(found, reference(name), precision)
    assert result.ok, f"{network!r}: largest error {result.error:.2e} of the output's magnitude"


# Of the largest networks, V4 has most of what the other levels have, and V0 and V3 have all of V1 and V2.
LARGEST = ("swin", "resnext", "efficientnet")
FP32 = some(
    [
        *((name, level) for name in ("bert", "se:M7") for level in LEVELS),
        ("se:M0", "V4"),
        *((name, level) for name in ("lstm", "mmoe") for level in ("V0", "V3")),
        *((name, "V4") for name in ("lstm", "mmoe", *LARGEST)),
        # At V4 in tests/test_deep_models.py; at V1 and V2 it is what the other LSTM is.
        ("lstm-unrolled", "V3"),
    ],
    [
        *((name, level) for name in LARGEST for level in ("V0", "V3")),
        *(("se:M0", level) for level in LEVELS if level != "V4"),
        *((name, level) for name in ("lstm", "mmoe") for level in ("V1", "V2")),
        ("lstm-unrolled", "V0"),
    ],
)


# Tiles that own channels take most of the time of convolutions, which the others of the largest have.
APART = {"swin": ("channels",)}


@pytest.mark.parametrize(("name", "level"), FP32)
def test_fp32(name: str, level: str) -> None:
    network = compiled(name, level=level, disable=() if THOROUGH else APART.get(name, ()))
    check(name, network)
    check(name, network.on("cpu", order="shuffled", seed=7, blocks=3))


@pytest.mark.parametrize("name", some(["se:M4"], [se for se in models.SE_NAMES if se not in (*SOME_SE, "se:M4")]))
def test_every_squeeze_and_excitation_module(name: str) -> None:
    check(name, compiled(name, level="V4"))


def on_tensor_cores(network: souffle.Network) -> bool:
    return any("mma.sync" in module.text for module in network.plan.modules)


# V3 has the stages of V0, which the smallest network shows.
@pytest.mark.parametrize(
    ("name", "level"),
    some(
        [("bert", "V0"), ("bert", "V4")],
        [("bert", "V3"), ("swin", "V3"), ("swin", "V4"), ("resnext", "V3"), ("resnext", "V4")],
    ),
)
def test_mixed_precision_on_tensor_cores(name: str, level: str) -> None:
    # So small networks are faster at V4 in tiles that own channels, on CUDA cores.
    network = compiled(name, level=level, precision="mixed", disable=("channels",))
    assert on_tensor_cores(network)
    check(name, network, "mixed")
    check(name, network.on("cpu", order="shuffled", seed=7, blocks=3), "mixed")


# Each kind of fragments through a network of each kind, and at the level with most around them.
@pytest.mark.parametrize(
    ("name", "level", "precision"),
    some([("bert", "V4", "tf32x3"), ("bert", "V3", "tf32")], [("resnext", "V3", "tf32"), ("swin", "V3", "tf32x3")]),
)
def test_products_in_tf32(name: str, level: str, precision: str) -> None:
    network = compiled(name, level=level, precision=precision, disable=("channels",))
    assert on_tensor_cores(network)
    check(name, network, precision)
    check(name, network.on("cpu", order="shuffled", seed=7, blocks=3), precision)


# LSTMs at V4, in mixed precision and as one persistent kernel, are in ``tests/test_deep_models.py``.
@pytest.mark.parametrize(("name", "level"), some([("lstm", "V3"), ("mmoe", "V4")], [("efficientnet", "V4")]))
def test_mixed_precision_of_the_others(name: str, level: str) -> None:
    check(name, compiled(name, level=level, precision="mixed"), "mixed")


@pytest.mark.parametrize(("name", "level"), [("bert", "V3"), ("lstm", "V3")])
def test_persistent_partition(name: str, level: str) -> None:
    check(name, compiled(name, level=level, partition="persistent"))


@pytest.mark.parametrize(
    ("name", "level"),
    some(
        [*((name, "V4") for name in ("bert", "lstm", "mmoe", "resnext")), ("mmoe", "V0")],
        [("bert", "V0"), ("lstm", "V0"), ("swin", "V4"), ("efficientnet", "V4")],
    ),
)
def test_llvm_code(name: str, level: str) -> None:
    network = souffle.compile(program(name), level=level, target="cpu")
    check(name, network)
    check(name, network)


@pytest.mark.parametrize("name", models.NAMES)
def test_the_imported_program(name: str) -> None:
    result = compare(evaluate(program(name), inputs(name)), reference(name), "fp32")
    assert result.ok, result


@pytest.mark.parametrize("name", ["lstm", "mmoe"])
def test_recurrent_and_expert_networks_are_one_kernel(name: str) -> None:
    plan = compiled(name, level="V3").plan
    assert len(plan.kernels) == len(plan.launches) == 1


@pytest.mark.parametrize("name", ["bert", "mmoe"])
def test_a_level_never_reads_or_launches_more_than_the_one_before(name: str) -> None:
    # Parts of a reduction in two phases are written and read, where the time that they save is worth it.
    options = {"reductions": "one_phase", "verify": "off"}
    plans = [compiled(name, level=level, **options).plan for level in LEVELS]
    launches = [len(plan.launches) for plan in plans]
    assert launches == sorted(launches, reverse=True)
    traffic = [sum(launch.bytes_read + launch.bytes_written for launch in plan.launches) for plan in plans]
    assert traffic[3] <= traffic[0] and traffic[4] <= traffic[3]
    if name == "bert":
        assert launches[0] > launches[1] > launches[2]
        assert launches[3] < 2 * SIZES["tiny"].layers


@pytest.mark.xdist_group("bert")
def test_equal_layers_share_a_kernel() -> None:
    plan = compiled("bert", level="V2").plan
    assert max(np.bincount([launch.kernel for launch in plan.launches])) >= SIZES["tiny"].layers
