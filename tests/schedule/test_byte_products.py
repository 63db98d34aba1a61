"""Products of 8-bit integers: the instructions that add four of them at once, on both targets, and what proves them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tvm import tirx

import souffle
from souffle.certificate import PROVEN
from souffle.errors import CertificateError
from souffle.schedule.cpu.host import host_target, machine_of
from souffle.schedule.cpu.words import dots_of
from souffle.schedule.gpu.emit import mma_instructions
from tests.frontend.support import node_model, reference

CUDA = {"target": "cuda", "device": "cpu", "cubin": False}
PAIRS = list(itertools.product(("uint8", "int8"), repeat=2))
DOTS = dots_of(host_target(), machine_of(host_target()).vector_bits)
RNG = np.random.default_rng(1)


def numbers(dtype, *shape):
    kind = np.iinfo(dtype)
    return RNG.integers(kind.min, kind.max + 1, shape).astype(dtype)


def product(left, right, rows=33, inner=37, columns=29):
    """A matrix product none of whose extents is a multiple of anything, and what to give it."""
    x, w = numbers(left, rows, inner), numbers(right, inner, columns)
    return node_model("MatMulInteger", [(left, x.shape), w, np.array(7, left)]), {"x0": x}


def convolution(left, right, channels):
    x, w = numbers(left, 1, channels, 5, 5), numbers(right, 8, channels, 3, 3)
    return node_model("ConvInteger", [(left, x.shape), w, np.array(7, left)], pads=[1, 1, 1, 1]), {"x0": x}


def agrees(network, model, feeds):
    (want,) = reference(model, feeds).values()
    return np.array_equal(np.asarray(network(feeds)["y0"]), want)


@pytest.mark.parametrize(("left", "right"), [PAIRS[0], PAIRS[3]])
def test_tensor_cores_multiply_fragments_of_bytes(left, right):
    model, feeds = product(left, right)
    network = souffle.compile(model, arch="sm_80", verify="values", **CUDA)
    types = ".".join(mma_instructions.BYTE_TYPES[dtype] for dtype in (left, right))
    other = ".".join(types.split(".")[::-1])
    # Rows and columns may change places.
    text = network.plan.modules[0].text
    assert f"m16n8k32.row.col.s32.{types}.s32" in text or f"m16n8k32.row.col.s32.{other}.s32" in text
    assert network.plan.certificate.verdict == PROVEN and agrees(network, model, feeds)


@pytest.mark.parametrize(("left", "right"), PAIRS[2:3])
def test_older_devices_multiply_words(left, right):
    model, feeds = product(left, right)
    network = souffle.compile(model, arch="sm_75", verify="values", **CUDA)
    text = network.plan.modules[0].text
    assert "dp4a." in text and "mma.sync" not in text
    assert network.plan.certificate.verdict == PROVEN and agrees(network, model, feeds)


def test_words_of_a_convolution_go_through_all_axes_where_none_is_whole_words():
    model, feeds = convolution("uint8", "int8", 3)
    network = souffle.compile(model, arch="sm_80", **CUDA)
    assert "m16n8k32" in network.plan.modules[0].text
    assert network.plan.certificate.verdict == PROVEN and agrees(network, model, feeds)


def test_a_sign_taken_for_none_is_refuted(monkeypatch):
    monkeypatch.setattr(mma_instructions, "BYTE_TYPES", {"int8": "u8", "uint8": "s8"})
    with pytest.raises(CertificateError, match="wrong value"):
        souffle.compile(product("uint8", "int8")[0], arch="sm_80", verify="values", **CUDA)


@pytest.mark.parametrize(("left", "right"), PAIRS[:2])
def test_the_processor_multiplies_words(left, right):
    model, feeds = product(left, right)
    assert agrees(souffle.compile(model, target="cpu"), model, feeds)
    for model, feeds in (product(left, right, inner=64), convolution(left, right, 4)):
        network = souffle.compile(model, target="cpu")
        assert agrees(network, model, feeds)
        packed = [buffer for buffer in network.plan.buffers if buffer.kind == "constant" and "panels" in buffer.name]
        assert [buffer.dtype for buffer in packed] == ["int32"] * bool(DOTS)


def test_what_a_processor_has_is_what_it_is_asked_for():
    target = host_target()
    dots = dots_of(target, machine_of(target).vector_bits)
    assert all(dot.numbers in (2, 4) and dot.lanes * 32 == dot.bits for dot in dots)
    assert [dot.numbers for dot in dots] == sorted((dot.numbers for dot in dots), reverse=True)
    for dot in dots:
        words = tirx.Broadcast(tirx.const(0, "int32"), dot.lanes)
        assert str(dot.apply(words, words, words).ty.dtype) == f"int32x{dot.lanes}"
    assert dots_of(target, 128) == ()
