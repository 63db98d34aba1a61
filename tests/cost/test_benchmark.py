"""The comparison with measured latencies: names are read right, ranks correlate as by hand, the plot is well-formed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.cost_against_measured import (
    PRODUCT,
    floor_seconds,
    measure,
    plot,
    problem_of,
    product,
    rank_correlation,
    summary,
)
from benchmarks.ranks import pair_correlation
from souffle.cost import cost_device


@pytest.mark.parametrize(
    ("name", "kind", "operations", "shapes"),
    [
        (
            "conv1x1_4_14_14_512_1024.log",
            "convolution",
            2 * 4 * 196 * 512 * 1024,
            [(4, 14, 14, 512), (4, 14, 14, 1024)],
        ),
        (
            "efficient_pointwise_conv_28_28_40_240",
            "convolution",
            2 * 784 * 40 * 240,
            [(1, 28, 28, 40), (1, 28, 28, 240)],
        ),
        (
            "efficient_pointwise_conv2d_bn_short_cut_add_14_14_480_80_4.log",
            "convolution",
            2 * 4 * 196 * 480 * 80,
            [(4, 14, 14, 480), (4, 14, 14, 80)],
        ),
        (
            "efficient_stem_conv3x3_bn_swish_1_224_224_3_32_3_3_2",
            "convolution",
            2 * 112 * 112 * 27 * 32,
            [(1, 224, 224, 3), (1, 112, 112, 32)],
        ),
        (
            "efficient_depthwise_conv2d_56_56_144_5_5_s2_1",
            "depthwise",
            2 * 28 * 28 * 144 * 25,
            [(1, 56, 56, 144), (1, 28, 28, 144)],
        ),
        (
            "fused_conv2d_fixed_nparts_|i+64_1_8_28_28|w+_64_8_8_3_3|ws+1_1|wd_1_1|p+_1_1.log",
            "convolution",
            2 * 64 * 784 * 8 * 8 * 9,
            [(64, 1, 8, 28, 28), (64, 1, 8, 28, 28)],
        ),
        (
            "swin_transformer_dense_196_1536_512.log",
            "dense fp16",
            2 * 196 * 1536 * 512,
            [(1, 196, 512), (1, 196, 1536)],
        ),
        ("efficient_se_module_pointwise_conv_480_20_1", "dense", 2 * 480 * 20, [(1, 1, 1, 480), (1, 1, 1, 20)]),
        ("efficient_reudce_mean_28_28_144", "reduction", 784 * 144, [(1, 28, 28, 144), (1, 144)]),
    ],
)
def test_names_that_give_their_shapes(name: str, kind: str, operations: float, shapes: list[tuple]) -> None:
    problem = problem_of(name)
    assert (problem.kind, problem.operations) == (kind, operations)
    tensors = problem.build()
    assert [tuple(int(extent) for extent in tensors[at].shape) for at in (0, -1)] == shapes


@pytest.mark.parametrize(
    "name",
    [
        "efficient_depthwise_conv_112_112_96_3_3_2_1.log",
        "resnext_imagenet_50_fused_conv1x1_1_14_14_2048_32_64_s2.log",
        "resnext_imagenet_50_maxpool_1_112_112_64_3_3_2.log",
        "swin_transformer_softmax_norm_6272_49.log",
        "thread_fused_matmul_1_289_1024_448.log",
        "efficientnet-b0_autotvm.log",
        "conv1x1_4_14_14_512",
    ],
)
def test_names_that_leave_a_doubt(name: str) -> None:
    assert problem_of(name) is None


def test_correlation_of_pairs() -> None:
    assert pair_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert pair_correlation([1, 2, 3, 4], [8, 4, 2, 1]) == pytest.approx(-1)
    # Of ten pairs two are turned around.
    assert pair_correlation([1, 2, 3, 4, 5], [2, 1, 9, 8, 99]) == pytest.approx(0.6)
    # One pair is equal on the left: 2 of sqrt(2 x 3).
    assert pair_correlation([7, 7, 9], [1, 2, 3]) == pytest.approx(2 / 6**0.5)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [8, 4, 2, 1]) == pytest.approx(-1)
    # Ranks 1 2 3 4 5 and 2 1 4 3 5: 1 - 6 * 4 / (5 * 24).
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 9, 8, 99]) == pytest.approx(0.8)
    # Equal values share a rank: 1.5 1.5 3 and 1 2 3.
    assert rank_correlation([7, 7, 9], [1, 2, 3]) == pytest.approx(0.8660254)


def test_the_floor_is_the_roofline() -> None:
    device = cost_device(PRODUCT)
    problem = product(1, 4096, 4096, 4096, "float16")
    assert floor_seconds(problem, problem.build(), device) == pytest.approx(2 * 4096**3 / 312e12, rel=0.01)


def _file(tmp_path: Path, latency: float) -> Path:
    path = tmp_path / "measured.json"
    one = {
        "conv1x1_1_14_14_64_64.log": [9.0, 50, "x"],
        "resnext_imagenet_50_conv1x1_1_14_14_64_64": [latency, 500, "x"],
    }
    two = {"dense_64_64_64": [8.0, 500, "x"], "odd_1": [1, 1, "x"]}
    path.write_text(json.dumps({"a/one/kernels": one, "a/two/kernels": two}))
    return path


def test_each_kernel_counts_once_with_its_best(tmp_path: Path) -> None:
    results, counts = measure(_file(tmp_path, 5.0), cost_device(PRODUCT), False, None)
    assert counts == {"names": 4, "read": 3, "kernels": 2}
    assert [(r["measured_us"], r["records"]) for r in results] == [(5.0, 500), (8.0, 500)]
    assert all(r["predicted_us"] > r["floor_us"] > 0 for r in results)
    assert summary(results)[0]["kernels"] == 2
    root = ElementTree.fromstring(plot(results, 0.5))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}title")) == 2


def test_a_measurement_below_the_roofline_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="at the rates that are reached"):
        measure(_file(tmp_path, 1e-3), cost_device(PRODUCT), False, None)
