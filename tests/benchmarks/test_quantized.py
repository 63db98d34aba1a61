"""Small quantized networks by ONNX Runtime's quantizer: equal to ONNX Runtime on both targets."""

from __future__ import annotations

import numpy as np
import pytest
from onnxruntime.quantization import QuantFormat, QuantType

import souffle
from benchmarks.quantized import differences, instructions, quantum_of, runtime_outputs
from benchmarks.quantized_networks import dynamic, mobilenet_v2, random_image, resnet, static
from souffle.models.bert import BertConfig, build_bert
from souffle.reference import sums_are_exact

exact = pytest.mark.skipif(
    not sums_are_exact(), reason="ONNX Runtime's optimizations make products of bytes whose sums it cuts off here"
)


def small_resnet():
    return static(resnet(image=16, width=8, blocks=(1,), classes=10), QuantFormat.QDQ, QuantType.QInt8)


def small_mobilenet():
    network = mobilenet_v2(image=32, classes=10, stages=((1, 8, 1, 1), (6, 8, 1, 1)), last=32)
    return static(network, QuantFormat.QOperator, QuantType.QUInt8)


def small_bert():
    return dynamic(build_bert(BertConfig(layers=1, tokens=8, hidden=16, heads=2, ffn=32), 0))


@exact
@pytest.mark.parametrize("make", [small_resnet, small_mobilenet, small_bert])
def test_equal_on_the_processor(make):
    model = make()
    inputs = random_image(model, 7)
    found = souffle.compile(model, target="cpu")(inputs)
    largest, _, count = differences(model, found, runtime_outputs(model, inputs))
    assert largest < 1e-2 and count >= 10


@exact
def test_equal_in_cuda_text():
    model = static(resnet(image=16, width=16, blocks=(), classes=10), QuantFormat.QDQ, QuantType.QInt8)
    inputs = random_image(model, 7)
    options = {"target": "cuda", "arch": "sm_90", "device": "cpu", "cubin": False, "level": "V2"}
    network = souffle.compile(model, **options)
    assert instructions(network.plan)["mma.m16n8k32"] > 0
    assert differences(model, network(inputs), runtime_outputs(model, inputs))[:2] == (0, 0)
    apart = souffle.compile(model, disable=["integers"], **options)
    assert not any(instructions(apart.plan).values())


def test_a_quantum_is_the_scale_of_the_output():
    model = small_resnet()
    (output,) = (info.name for info in model.graph.output)
    value = np.array([0.0, 1.0])
    assert 0 < quantum_of(model, output, value) != quantum_of(small_bert(), output, value) == 1 / 255
