"""Products of 8-bit integers: the instructions that add four of them at once, on both targets, and what proves them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from onnx.reference import ReferenceEvaluator
from tvm import te, tirx

import souffle
from souffle.certificate import PROVEN
from souffle.errors import CertificateError
from souffle.schedule.cpu import build_cpu
from souffle.schedule.cpu.host import host_target, machine_of, missing_instructions
from souffle.schedule.cpu.words import dots_of
from souffle.schedule.gpu.emit import mma_instructions
from tests.frontend.support import node_model

pytestmark = pytest.mark.sampled(2)

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
    """Against ONNX's own evaluator: ONNX Runtime's sums of a byte without a sign and one with it are cut off to 16 bits
    where a processor has no instruction that adds them as words."""
    (want,) = ReferenceEvaluator(model).run(None, feeds)
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


@pytest.mark.parametrize("processor", [None, "cascadelake"])
@pytest.mark.parametrize(("left", "right"), PAIRS[1:3])
def test_short_sums_are_not_what_llvm_makes_of_them(left, right, processor):
    """Of 8 and of 16 products, LLVM 22 takes a part of the sum where it may add words."""
    if processor is not None and missing_instructions(processor):
        pytest.skip(f"this machine is no {processor}")
    for inner in (4, 7, 8, 9, 16, 17, 32):
        x, w = numbers(left, 1, inner), numbers(right, inner, 1)
        model = node_model("MatMulInteger", [(left, x.shape), w])
        assert agrees(souffle.compile(model, target="cpu", processor=processor), model, {"x0": x}), inner


def test_a_short_sum_beside_words():
    """A function has no instruction that adds words where LLVM could make another sum of its with one."""
    a, b, c = numbers("uint8", 33, 64), numbers("int8", 64, 48), numbers("int8", 8, 1)
    x, w, v = (te.placeholder(array.shape, str(array.dtype)) for array in (a, b, c))
    r, s = te.reduce_axis((0, 64), "r"), te.reduce_axis((0, 8), "s")
    y = te.compute((33, 48), lambda i, j: te.sum(x[i, r].astype("int32") * w[r, j].astype("int32"), axis=r))
    z = te.compute((1, 1), lambda i, j: te.sum(x[i, s].astype("int32") * v[s, j].astype("int32"), axis=s))
    module = build_cpu({"f": te.create_prim_func([x, w, v, y, z])}, host_target())
    given = [tvm.runtime.tensor(array) for array in (a, b, c)]
    given += [tvm.runtime.empty(tensor.shape, "int32") for tensor in (y, z)]
    module.get_function("f", query_imports=True)(*given)
    np.testing.assert_array_equal(given[3].numpy(), a.astype(int) @ b)
    np.testing.assert_array_equal(given[4].numpy(), a[:1, :8].astype(int) @ c)


def test_what_a_processor_has_is_what_it_is_asked_for():
    target = host_target()
    dots = dots_of(target, machine_of(target).vector_bits)
    assert all(dot.numbers in (2, 4) and dot.lanes * 32 == dot.bits for dot in dots)
    assert [dot.numbers for dot in dots] == sorted((dot.numbers for dot in dots), reverse=True)
    for dot in dots:
        words = tirx.Broadcast(tirx.const(0, "int32"), dot.lanes)
        assert str(dot.apply(words, words, words).ty.dtype) == f"int32x{dot.lanes}"
    assert dots_of(target, 128) == ()
