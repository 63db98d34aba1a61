"""The CPU schedules: right for every kind of TE, parallel and vectorised, and never without an answer."""

from __future__ import annotations

import math
import random
import warnings

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from tvm import te, tirx, topi

import souffle
from souffle.program.evaluate import evaluate
from souffle.schedule.cpu import (
    build,
    build_cpu,
    host_target,
    machine_of,
    schedule_cpu,
    schedule_with_constants,
    use_cores,
)
from souffle.schedule.cpu.contraction_tiling import tiling_of
from souffle.schedule.cpu.elementary import scales
from souffle.schedule.cpu.inline import node_count
from souffle.schedule.cpu.loop_emission import overlapping, pieces
from souffle.schedule.cpu.nest import simplify
from souffle.tvm_compat import statements_of
from tests.frontend.support import model_of
from tests.testlib import inputs_for, random_program
from tests.thorough import sized

pytestmark = pytest.mark.sampled(6)

TARGET = host_target()
ERF = np.vectorize(math.erf)
PROPERTY = settings(max_examples=sized(3, 12), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def values(*shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed + sum(shape))
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith(("int", "uint")):
        return rng.integers(0, 7, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def placeholders(*arrays):
    return [te.placeholder(a.shape, str(a.dtype), name=f"x{i}") for i, a in enumerate(arrays)]


def execute(tensors, arrays):
    """Schedule, compile and run; the scheduled function's text and its outputs."""
    use_cores(TARGET)
    func = te.create_prim_func(list(tensors))
    scheduled = schedule_cpu(func, target=TARGET)
    module = build_cpu({"kernel": func}, TARGET)
    outputs = [tvm.runtime.empty([int(d) for d in t.shape], str(t.dtype), tvm.cpu()) for t in tensors[len(arrays) :]]
    module.get_function("kernel")(*[tvm.runtime.tensor(a, tvm.cpu()) for a in arrays], *outputs)
    return scheduled.script(), [o.numpy() for o in outputs]


def check(tensors, arrays, expected, *, rtol=1e-4, atol=1e-5, shape=True, parallel=True):
    text, results = execute(tensors, arrays)
    for result, reference in zip(results, expected, strict=True):
        scale = max(1.0, float(np.abs(np.asarray(reference, dtype="float64")).max(initial=0.0)))
        np.testing.assert_allclose(result, reference, rtol=rtol, atol=atol * scale)
    if shape:
        assert "T.parallel" in text or not parallel
        assert "T.vectorized" in text
    return text


def test_matmul_with_bias_and_gelu():
    a, b, bias = values(67, 129), values(129, 101), values(101)
    x, w, c = placeholders(a, b, bias)
    y = topi.add(topi.matmul(x, w), c)
    gelu = te.compute(y.shape, lambda *i: y(*i) * 0.5 * (1 + te.erf(y(*i) * math.sqrt(0.5))), name="gelu")
    reference = a @ b + bias
    text = check([x, w, c, gelu], [a, b, bias], [reference * 0.5 * (1 + ERF(reference * math.sqrt(0.5)))])
    assert text.count("T.parallel") == 1  # bias and gelu are stored with the tile


def test_matmul_of_transposed_weights_and_a_cast():
    a, b = values(50, 96, dtype="float16"), values(70, 96, dtype="float16")
    x, w = placeholders(a, b)
    k = te.reduce_axis((0, 96), "k")
    y = te.compute(
        (50, 70), lambda i, j: te.sum(x[i, k].astype("float32") * w[j, k].astype("float32"), axis=k), name="y"
    )
    check([x, w, y], [a, b], [a.astype("float32") @ b.astype("float32").T])


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_matmul_of_other_types(dtype):
    a, b = values(33, 40, dtype=dtype), values(40, 37, dtype=dtype)
    x, w = placeholders(a, b)
    check([x, w, topi.matmul(x, w)], [a, b], [a @ b], parallel=False)


def test_matmul_of_a_vector():
    for a, b in ((values(1, 300), values(300, 517)), (values(200, 300), values(300, 1))):
        x, w = placeholders(a, b)
        check([x, w, topi.matmul(x, w)], [a, b], [a @ b], shape=False)


def test_attention():
    q, k, v = values(3, 29, 16, seed=1), values(3, 31, 16, seed=2), values(3, 31, 16, seed=3)
    tq, tk, tv = placeholders(q, k, v)
    r = te.reduce_axis((0, 16), "r")
    scores = te.compute((3, 29, 31), lambda b, i, j: te.sum(tq[b, i, r] * tk[b, j, r], axis=r), name="scores")
    scaled = te.compute(scores.shape, lambda *i: scores(*i) * 0.25, name="scaled")
    probability = topi.nn.softmax(scaled)
    s = te.reduce_axis((0, 31), "s")
    out = te.compute((3, 29, 16), lambda b, i, d: te.sum(probability[b, i, s] * tv[b, s, d], axis=s), name="out")
    joined = te.compute((29, 48), lambda i, c: out[c // 16, i, c % 16], name="joined")
    exact = q @ k.transpose(0, 2, 1) * 0.25
    exact = np.exp(exact - exact.max(-1, keepdims=True))
    exact = exact / exact.sum(-1, keepdims=True) @ v
    check([tq, tk, tv, joined], [q, k, v], [exact.transpose(1, 0, 2).reshape(29, 48)], parallel=False)


def convolution(x, w, stride, pad, groups):
    n, _, h, width = x.shape
    f, per_group, kh, kw = w.shape
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    oh, ow = (h + 2 * pad - kh) // stride + 1, (width + 2 * pad - kw) // stride + 1
    y = np.zeros((n, f, oh, ow), x.dtype)
    for g in range(groups):
        fs = slice(g * f // groups, (g + 1) * f // groups)
        cs = slice(g * per_group, (g + 1) * per_group)
        for i in range(kh):
            for j in range(kw):
                part = x[:, cs, i : i + stride * (oh - 1) + 1 : stride, j : j + stride * (ow - 1) + 1 : stride]
                y[:, fs] += np.einsum("nchw,fc->nfhw", part, w[fs, :, i, j])
    return y


@pytest.mark.parametrize(
    ("shape", "filters", "kernel", "stride", "pad", "groups"),
    [
        ((1, 16, 14, 14), 32, 3, 1, 1, 1),
        ((2, 17, 13, 11), 19, 3, 2, 1, 1),
        ((1, 64, 7, 7), 48, 1, 1, 0, 1),
        ((1, 24, 15, 15), 20, 1, 2, 0, 1),
        ((1, 3, 40, 40), 16, 7, 2, 3, 1),
        ((1, 32, 14, 14), 32, 3, 1, 1, 8),
        ((1, 32, 15, 15), 64, 3, 2, 1, 2),
        ((1, 64, 9, 9), 64, 3, 2, 1, 8),
    ],
)
def test_convolution(shape, filters, kernel, stride, pad, groups):
    a, b, bias = values(*shape), values(filters, shape[1] // groups, kernel, kernel), values(filters)
    x, w, c = placeholders(a, b, bias)
    if groups == 1:
        y = topi.nn.conv2d_nchw(x, w, stride, pad, 1, "float32")
    else:
        y = topi.nn.group_conv2d_nchw(x, w, stride, pad, 1, groups, "float32")
    y = topi.nn.relu(topi.add(y, topi.reshape(c, (1, filters, 1, 1))))
    reference = np.maximum(convolution(a, b, stride, pad, groups) + bias[:, None, None], 0)
    check([x, w, c, y], [a, b, bias], [reference], parallel=reference.size * b[0].size > 1 << 19)


@pytest.mark.parametrize(("size", "kernel", "stride"), [(14, 3, 1), (13, 5, 2), (7, 3, 1), (56, 3, 2)])
def test_depthwise_convolution(size, kernel, stride):
    a, b = values(1, 24, size, size), values(24, 1, kernel, kernel)
    x, w = placeholders(a, b)
    y = topi.nn.depthwise_conv2d_nchw(x, w, stride, kernel // 2, 1, "float32")
    check([x, w, y], [a, b], [convolution(a, b, stride, kernel // 2, 24)], parallel=size > 7)


@PROPERTY
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(4, 40)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.sampled_from(["none", "relu", "sigmoid"]),
)
def test_windows_of_any_shape(shape, filters, strides, dilations, function):
    """Rows of a tile share vectors, and vectors run on into the next row: nothing may be missed or written twice."""
    a, b = values(*shape), values(shape[1], *filters)
    each, *kernel = filters
    pads = tuple((k - 1) * d // 2 for k, d in zip(kernel, dilations, strict=True))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if any(extent + 2 * pad < span for extent, pad, span in zip(shape[2:], pads, spans, strict=True)):
        return
    x, w = placeholders(a, b)
    y = topi.nn.depthwise_conv2d_nchw(x, w, strides, (*pads, *pads), dilations, "float32")
    padded = np.pad(a.astype("float64"), ((0, 0), (0, 0), (pads[0],) * 2, (pads[1],) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, (2, 3))
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    expected = np.einsum("nchwij,cmij->ncmhw", windows, b.astype("float64"))
    expected = expected.reshape(shape[0], shape[1] * each, *expected.shape[3:])
    if function != "none":
        y = topi.nn.relu(y) if function == "relu" else topi.sigmoid(y)
        expected = np.maximum(expected, 0) if function == "relu" else 1 / (1 + np.exp(-expected))
    check([x, w, y], [a, b], [expected], shape=False)


def test_what_lies_far_apart_is_asked_for_ahead():
    """Rows of a product of images: the data of the next columns, and the results before their sums are made."""

    def asked(channels, size):
        a, b = values(1, channels, size, size), values(8, channels)
        x, w = placeholders(a, b)
        c = te.reduce_axis((0, channels))
        y = te.compute((1, 8, size, size), lambda n, f, p, q: te.sum(x[n, c, p, q] * w[f, c], axis=c), name="y")
        func = te.create_prim_func([x, w, y])
        text = schedule_with_constants(func, target=TARGET, constants=[1]).func.script()
        lines = [line for line in text.splitlines() if "llvm.prefetch" in line]
        return {kind: any(f"T.address_of({kind}" in line for line in lines) for kind in ("x0", "y")}

    assert asked(24, 56) == {"x0": True, "y": True}
    assert asked(3, 8) == {"x0": False, "y": False}  # all of it is in the first-level cache


@pytest.mark.parametrize("size", [(131, 131), (256, 128), (1, 20000), (3, 16389)])
def test_functions_of_sums_that_have_no_room_in_a_cache(size):
    a, b = values(1, 2, *size), values(2, 1, 1, 3)
    x, w = placeholders(a, b)
    y = topi.sigmoid(topi.nn.depthwise_conv2d_nchw(x, w, 1, (0, 1, 0, 1), 1, "float32"))
    padded = np.pad(a.astype("float64"), ((0, 0), (0, 0), (0, 0), (1, 1)))
    sums = sum(padded[..., k : k + size[1]] * b[None, :, 0, :, k : k + 1] for k in range(3))
    check([x, w, y], [a, b], [1 / (1 + np.exp(-sums))], shape=False)


def test_padding_written_inside_the_convolution():
    """As vertical transformation leaves it: the padding and an activation under the sum."""
    a, b = values(1, 12, 10, 10), values(18, 12, 3, 3)
    x, w = placeholders(a, b)
    c, i, j = te.reduce_axis((0, 12)), te.reduce_axis((0, 3)), te.reduce_axis((0, 3))

    def padded(n, ch, y, z):
        inside = tirx.all(y >= 1, y < 11, z >= 1, z < 11)
        return tirx.if_then_else(inside, te.max(x[n, ch, y - 1, z - 1], tirx.const(0, "float32")), 0.0)

    y = te.compute(
        (1, 18, 10, 10),
        lambda n, f, p, q: te.sum(padded(n, c, p + i, q + j) * w[f, c, i, j], axis=[c, i, j]),
        name="y",
    )
    text = check([x, w, y], [a, b], [convolution(np.maximum(a, 0), b, 1, 1, 1)])
    assert "y_window" in text  # the padded input is written once, not once for each tap


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("stride", [1, 2])
def test_pooling(kind, stride):
    a = values(1, 16, 17, 17)
    (x,) = placeholders(a)
    y = topi.nn.pool2d(x, (3, 3), (stride, stride), (1, 1), (0, 0, 0, 0), kind)
    windows = np.lib.stride_tricks.sliding_window_view(a, (3, 3), (2, 3))[:, :, ::stride, ::stride]
    expected = windows.max((-1, -2)) if kind == "max" else windows.mean((-1, -2))
    check([x, y], [a], [expected], parallel=False)


def test_layer_norm_and_softmax():
    a, g, b = values(53, 197), values(197, seed=1), values(197, seed=2)
    x, tg, tb = placeholders(a, g, b)
    mean, variance = a.mean(-1, keepdims=True), a.var(-1, keepdims=True)
    text = check(
        [x, tg, tb, topi.nn.layer_norm(x, tg, tb, [1], 1e-5)],
        [a, g, b],
        [(a - mean) / np.sqrt(variance + 1e-5) * g + b],
    )
    assert text.count("T.parallel") == 1  # all of it under one loop over rows
    e = np.exp(a - a.max(-1, keepdims=True))
    check([x, topi.nn.softmax(x)], [a], [e / e.sum(-1, keepdims=True)])


def between(tensors):
    """Elements of each buffer between the parameters, as scheduled."""
    block = schedule_cpu(te.create_prim_func(list(tensors)), target=TARGET).body.block
    return {str(b.name): math.prod(int(extent) for extent in b.shape) for b in block.alloc_buffers}


def test_what_one_task_writes_and_reads_has_the_size_of_a_task():
    a, w, v = values(96, 50), values(50, 64), values(3, 40, 28, 28)
    x, y, z = placeholders(a, w, v)
    exponentials = np.exp(a - a.max(1, keepdims=True))
    expected = exponentials / exponentials.sum(1, keepdims=True)
    rows = topi.nn.softmax(x, axis=1)
    check([x, rows], [a], [expected])
    # Eight rows are one task: a vector does not wait for what has just been written beside it.
    assert between([x, rows]) and max(between([x, rows]).values()) <= 8 * 50
    # Two channels with their borders, but for what is beside them to be read in whole vectors.
    (k,) = placeholders(values(40, 1, 3, 3))
    windows = topi.nn.depthwise_conv2d_nchw(z, k, 1, 1, 1)
    assert max(between([z, k, windows]).values()) <= 2 * 30 * 64
    # What a product reads of it later, and what is an output, stays whole.
    shifted = te.compute(a.shape, lambda i, j: tirx.exp(x[i, j]) + 1.0, name="shifted")
    r = te.reduce_axis((0, 50))
    sums = te.compute((96,), lambda i: te.sum(shifted[i, r], axis=r), name="sums")
    means = te.compute(a.shape, lambda i, j: tirx.exp(shifted[i, j] / sums[i]), name="means")
    product = topi.matmul(shifted, y)
    grown = np.exp(a) + 1
    check([x, y, means, product], [a, w], [np.exp(grown / grown.sum(1, keepdims=True)), grown @ w])
    held = between([x, y, means, product])
    assert held["shifted"] == a.size and held["sums"] == 8
    check([x, means, shifted], [a], [np.exp(grown / grown.sum(1, keepdims=True)), grown])


def shared_run(a):
    """Two functions of an expensive one, so that three nests share all loops, and what they give."""
    (x,) = placeholders(a)
    once = topi.tanh(x)
    grown = te.compute(a.shape, lambda *i: tirx.exp(once[i]), name="grown")
    square = te.compute(a.shape, lambda *i: once[i] * once[i], name="square")
    return [x, grown, square], [np.exp(np.tanh(a)), np.tanh(a) ** 2]


@pytest.mark.parametrize("shape", [(300,), (3, 531), (40, 1000)])
def test_what_a_run_of_elements_writes_and_reads_has_the_size_of_a_run(shape):
    a = values(*shape)
    tensors, expected = shared_run(a)
    check(tensors, [a], expected, parallel=False)
    sizes = between(tensors)
    assert sizes and max(sizes.values()) <= 16 * 16
    # In no other loop: what two have would be allocated around both, and tasks would write to it at the same time.
    block = schedule_cpu(te.create_prim_func(tensors), target=TARGET).body.block
    parts = statements_of(block.body)
    parallel = [part for part in parts if getattr(part, "kind", None) == tirx.ForKind.PARALLEL]
    assert len(parallel) == (a.size >= 40_000)
    for loop in parallel:
        own = [buffer for buffer in block.alloc_buffers if any(buffer.same_as(b) for b in written(loop))]
        others = [b for part in parts if not part.same_as(loop) for b in written(part)]
        assert own and not any(buffer.same_as(b) for buffer in own for b in others)


def written(statement):
    """Buffers that a statement stores to."""
    found = []
    tvm_ffi.structural_walk(statement, (tirx.BufferStore, lambda store: found.append(store.buffer)))
    return found


def test_reductions_along_every_axis():
    a = values(19, 31, 23)
    (x,) = placeholders(a)
    for axes in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)):
        for tensor, array in ((topi.sum, np.sum), (topi.max, np.max), (topi.min, np.min)):
            _, (result,) = execute([x, tensor(x, axis=list(axes))], [a])
            np.testing.assert_allclose(result, array(a, axis=axes), rtol=1e-4, atol=1e-3)


def test_argmax_of_tuples():
    a = values(40, 129)
    (x,) = placeholders(a)
    k = te.reduce_axis((0, 129), "k")

    def combine(left, right):
        keep = left[1] >= right[1]
        return tirx.Select(keep, left[0], right[0]), tirx.Select(keep, left[1], right[1])

    argmax = te.comm_reducer(combine, lambda i, v: (tirx.const(-1, i), tirx.min_value(v)), name="argmax")
    index, value = te.compute((40,), lambda r: argmax((tirx.Cast("int32", k), x[r, k]), axis=k), name="best")
    text, results = execute([x, index, value], [a])
    np.testing.assert_array_equal(results[0], a.argmax(1))
    np.testing.assert_array_equal(results[1], a.max(1))
    assert "T.parallel" in text


def test_gather_concatenation_and_transpose():
    table, ids, more = values(50, 40), values(3, 11, dtype="int64"), values(33, 24)
    t, i, m = placeholders(table, ids, more)
    taken = te.compute((33, 40), lambda r, c: t[i[r // 11, r % 11], c], name="taken")
    joined = topi.concatenate([taken, m], axis=1)
    out = topi.transpose(joined, (1, 0))
    reference = np.concatenate([table[ids].reshape(33, 40), more], 1).T
    check([t, i, m, out], [table, ids, more], [reference], shape=False)


def test_zero_dimensions_and_single_elements():
    a = values(37)
    (x,) = placeholders(a)
    k = te.reduce_axis((0, 37), "k")
    total = te.compute((), lambda: te.sum(x[k], axis=k), name="total")
    half = te.compute((), lambda: total() * 0.5, name="half")
    _, (result,) = execute([x, half], [a])
    np.testing.assert_allclose(result, a.sum() / 2, rtol=1e-5)
    b = values(1, 1)
    (y,) = placeholders(b)
    _, (result,) = execute([y, topi.exp(y)], [b])
    np.testing.assert_allclose(result, np.exp(b), rtol=1e-6)


def test_several_outputs_keep_their_buffers():
    a = values(64, 70)
    (x,) = placeholders(a)
    doubled = te.compute(a.shape, lambda i, j: x[i, j] * 2.0, name="doubled")
    total = topi.sum(doubled, axis=[1])
    shifted = te.compute(a.shape, lambda i, j: doubled[i, j] + total[i], name="shifted")
    twice = a * 2
    check([x, doubled, total, shifted], [a], [twice, twice.sum(1), twice + twice.sum(1)[:, None]], parallel=False)


def test_booleans_and_integers():
    a, b = values(45, 33, dtype="bool"), values(45, 33, dtype="int8")
    x, y = placeholders(a, b)
    out = te.compute(a.shape, lambda i, j: tirx.Select(x[i, j], y[i, j].astype("int64"), tirx.const(-1, "int64")))
    check([x, y, out], [a, b], [np.where(a, b, -1)], shape=False)
    less = te.compute(a.shape, lambda i, j: y[i, j] < 3)
    check([y, less], [b], [b < 3], shape=False)


@pytest.mark.parametrize("scaling", [False, True])
def test_elementary_functions_are_accurate(scaling, monkeypatch):
    if scaling and not scales(TARGET):
        pytest.skip("this processor has no instruction that scales")
    monkeypatch.setattr("souffle.schedule.cpu.schedule.scales", lambda target: scaling)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.7, 89.5, -87.4, -103.0, -110.0, 1e-30, 4.0, -4.0]
    a = np.concatenate([np.linspace(-100, 95, 4001), np.linspace(-6, 6, 4001), special]).astype("float32")
    (x,) = placeholders(a)
    exact = a.astype("float64")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        references = {
            topi.exp: np.exp(exact),
            topi.tanh: np.tanh(exact),
            topi.sigmoid: 1 / (1 + np.exp(-exact)),
            topi.erf: ERF(exact),
            topi.sinh: np.sinh(exact),
            topi.cosh: np.cosh(exact),
        }
    for function, reference in references.items():
        _, (result,) = execute([x, function(x)], [a])
        with np.errstate(all="ignore"):
            # exp(-x) of sigmoid overflows before the result would be subnormal.
            atol = {topi.erf: 2e-7, topi.sigmoid: 1e-37}.get(function, 1e-44)
            np.testing.assert_allclose(result, reference.astype("float32"), rtol=5e-7, atol=atol)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_convolution_whose_panels_cross_its_rows(dtype):
    x, w = values(1, 3, 64, 64, dtype=dtype), values(64, 3, 7, 7, dtype=dtype)
    a, b = placeholders(x, w)
    y = topi.nn.relu(topi.nn.conv2d_nchw(a, b, 2, 3, 1, out_dtype=dtype))
    report = []
    module = build_cpu({"f": te.create_prim_func([a, b, y])}, TARGET, report=report)
    assert report == []
    out = tvm.runtime.empty((1, 64, 32, 32), dtype, tvm.cpu())
    module.get_function("f", query_imports=True)(*(tvm.runtime.tensor(v, tvm.cpu()) for v in (x, w)), out)
    exact = np.maximum(convolution(x.astype("float64"), w.astype("float64"), 2, 3, 1), 0)
    # Sums are of float32, and rounded to half precision once.
    np.testing.assert_allclose(out.numpy(), exact, rtol=1e-3 if dtype == "float16" else 1e-4, atol=1e-4)


def test_sums_of_half_precision_are_of_single():
    a, b = np.full((8, 4096), 0.5, "float16"), np.full((4096, 64), 0.25, "float16")
    x, w = placeholders(a, b)
    check([x, w, topi.matmul(x, w), topi.sum(x, axis=1)], [a, b], [np.full((8, 64), 512), np.full(8, 2048)], rtol=0)


def test_expensive_expressions_are_computed_once():
    a, b = values(160, 192), values(192, 128)
    x, w = placeholders(a, b)
    y = topi.matmul(topi.exp(x), topi.tanh(w))
    text = check([x, w, y], [a, b], [np.exp(a) @ np.tanh(b)])
    assert text.count("T.parallel") == 3  # both factors in buffers of their own


NESTED = {
    "tanh": (lambda v: te.tanh(v) * 2.0, lambda v: np.tanh(v) * 2),
    "gelu": (lambda v: v * 0.5 * (1.0 + te.erf(v * 0.7)), lambda v: v * 0.5 * (1 + ERF(v * 0.7))),
    "swish": (lambda v: v * te.sigmoid(v), lambda v: v / (1 + np.exp(-v))),
    "log": (lambda v: te.log(v * v + 1.0), lambda v: np.log(v * v + 1)),
    "branch": (
        lambda v: tirx.if_then_else(v > 0.0, te.tanh(v), te.exp(v) - 1.0),
        lambda v: np.where(v > 0, np.tanh(v), np.exp(v) - 1),
    ),
}


def nested(tensor, function, depth):
    def element(*index):
        value = tensor(*index)
        for _ in range(depth):
            value = function(value)
        return value

    return te.compute(tensor.shape, element, name="nested")


@pytest.mark.parametrize("name", NESTED)
def test_nested_calls_stay_linear(name):
    function, reference = NESTED[name]
    x = te.placeholder((64, 610), "float32", name="x")  # worth dividing at any depth

    def size(depth):
        return node_count(schedule_cpu(te.create_prim_func([x, nested(x, function, depth)]), target=TARGET).body)

    if name != "branch":  # which itself repeats its argument in the condition and on both sides
        assert size(4) - size(3) <= 1.1 * (size(3) - size(2)) + 8
    a = values(16, 61)
    expected = a.astype("float64")
    depth = 3 if name == "branch" else 5
    for _ in range(depth):
        expected = reference(expected)
    x = te.placeholder(a.shape, "float32", name="x")
    check([x, nested(x, function, depth)], [a], [expected], shape=False)


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 4e-3), ("float64", 1e-12)])
def test_nested_calls_of_other_types(dtype, rtol):
    a = values(7, 45, dtype=dtype)
    (x,) = placeholders(a)
    out = nested(x, lambda v: te.tanh(v) * tirx.const(2, dtype), 4)
    expected = a.astype("float64")
    for _ in range(4):
        expected = np.tanh(expected) * 2
    check([x, out], [a], [expected], rtol=rtol, shape=False)


def test_equal_calls_are_computed_once():
    a, b = values(40, 64), values(64)
    x, y = placeholders(a, b)
    out = te.compute(a.shape, lambda i, j: te.log(x[i, j] * x[i, j]) + y[j] * te.log(x[i, j] * x[i, j]), name="out")
    text = check([x, y, out], [a, b], [np.log(a * a) * (1 + b)], shape=False)
    assert text.count("T.log(") == text.count("T.vectorized(")


def test_call_of_what_is_equal_in_all_lanes():
    """A vector loop along a dimension that the argument does not depend on."""
    a = values(4, 3)
    (x,) = placeholders(a)
    k = te.reduce_axis((0, 3), "k")
    total = te.compute((4,), lambda i: te.sum(x[i, k], axis=k), name="total")
    out = te.compute((5, 16), lambda i, j: te.round(te.tanh(total[0] + x[0, 0]) * 4.0) + te.erf(total[1]), name="out")
    report = []
    build_cpu({"f": te.create_prim_func([x, out])}, TARGET, report=report)
    assert not report
    total = a.sum(1)
    expected = np.full((5, 16), np.round(np.tanh(total[0] + a[0, 0]) * 4) + math.erf(total[1]))
    check([x, out], [a], [expected], shape=False)


def test_calls_under_conditions_read_nothing_else():
    a, ids = values(5, 37), np.array([3, -(2**30), 0, 2**30, 4] * 8, dtype="int32")
    x, rows = placeholders(a, ids)

    def element(i, j):
        row = rows[j]
        inside = tirx.all(row >= 0, row < 5)
        taken = te.tanh(te.exp(tirx.if_then_else(i < 3, x[row, i], x[row, i + 1])))
        return tirx.if_then_else(inside, taken, te.exp(tirx.const(0.5, "float32")))

    out = te.compute((36, 40), element, name="out")
    column = np.arange(36) + (np.arange(36) >= 3)
    taken = np.tanh(np.exp(a[np.clip(ids, 0, 4)][:, column].T))
    check([x, rows, out], [a, ids], [np.where((ids >= 0) & (ids < 5), taken, np.exp(0.5))], shape=False)


def test_calls_under_conditions_that_lanes_share():
    a = values(24, 50)
    (x,) = placeholders(a)
    out = te.compute(
        (48, 50), lambda i, j: tirx.if_then_else(i < 24, te.tanh(x[i, j]), te.exp(x[i - 24, j])), name="out"
    )
    check([x, out], [a], [np.concatenate([np.tanh(a), np.exp(a)])], shape=False)
    flat = te.compute(
        (24 * 52,),
        lambda i: tirx.if_then_else(tirx.all(i % 52 > 0, i % 52 < 51), te.erf(x[i // 52, i % 52 - 1]), 0.0),
        name="flat",
    )
    check([x, flat], [a], [np.pad(ERF(a), ((0, 0), (1, 1))).reshape(-1)], shape=False)
    masked = te.compute(a.shape, lambda i, j: tirx.if_then_else(x[i, j] > 0.0, te.sqrt(x[i, j]), te.tanh(x[i, j])))
    check([x, masked], [a], [np.where(a > 0, np.sqrt(np.abs(a)), np.tanh(a))], shape=False)


def test_powers():
    a = np.abs(values(9, 33)) + 0.1
    (x,) = placeholders(a)
    for exponent in (1.0, 2.0, 3.0, 1.7):
        out = topi.power(topi.multiply(x, tirx.const(2.0, "float32")), tirx.const(exponent, "float32"))
        check([x, out], [a], [(a * 2) ** exponent], shape=False)


def test_reduction_of_tuples_of_calls():
    a = values(6, 40)
    (x,) = placeholders(a)
    k = te.reduce_axis((0, 40), "k")
    both = te.comm_reducer(
        lambda left, right: (left[0] + right[0], te.max(left[1], right[1])),
        lambda s, m: (tirx.const(0, s), tirx.min_value(m)),
        name="both",
    )
    total, largest = te.compute((6,), lambda i: both((te.exp(x[i, k]), te.tanh(te.exp(x[i, k]))), axis=k), name="both")
    _, results = execute([x, total, largest], [a])
    np.testing.assert_allclose(results[0], np.exp(a).sum(1), rtol=1e-5)
    np.testing.assert_allclose(results[1], np.tanh(np.exp(a)).max(1), rtol=1e-5)


def test_function_without_a_schedule_is_reported(monkeypatch):
    a = values(30, 40)
    (x,) = placeholders(a)
    funcs = {f"f{i}": te.create_prim_func([x, topi.add(x, tirx.const(float(i), "float32"))]) for i in range(3)}

    def refuse(func, **options):
        if tvm_ffi.structural_equal(func, funcs["f1"]):
            raise tvm.error.InternalError("Check failed: no such schedule\nwhere it was thrown")
        return schedule_with_constants(func, **options)

    monkeypatch.setattr(build, "schedule_with_constants", refuse)
    report = []
    module = build_cpu(funcs, TARGET, report=report)
    assert report == [("f1", "Check failed: no such schedule")]
    out = tvm.runtime.empty((30, 40), "float32", tvm.cpu())
    module.get_function("f1", query_imports=True)(tvm.runtime.tensor(a, tvm.cpu()), out)
    np.testing.assert_allclose(out.numpy(), a + 1, rtol=1e-6)


@pytest.mark.parametrize("seed", [2003, 2008])
def test_random_programs_have_schedules(seed, caplog):
    caplog.set_level("INFO")
    program = random_program(random.Random(seed).choice, 25, seed)
    network = souffle.compile(program, level="V2", target="cpu")
    assert "without a schedule" not in caplog.text
    inputs = inputs_for(program)
    for name, value in evaluate(program, inputs).items():
        np.testing.assert_array_equal(np.asarray(network(inputs)[name]), value)


def test_statement_that_is_no_nest_stays():
    @tvm.script.tirx.prim_func(s_tir=True)
    def cumulative(x: tvm.script.tirx.Buffer((8,), "float32"), y: tvm.script.tirx.Buffer((8,), "float32")):
        for i in range(8):
            y[i] = x[i]

    assert schedule_cpu(cumulative, target=TARGET) is not None


def test_calls_in_a_statement_that_is_no_nest():
    @tvm.script.tirx.prim_func(s_tir=True)
    def running(
        x: tvm.script.tirx.Buffer((8, 32), "float32"),
        y: tvm.script.tirx.Buffer((8, 32), "float32"),
        z: tvm.script.tirx.Buffer((8, 32), "float32"),
    ):
        with tvm.script.tirx.sblock("root"):
            for i in range(8):
                with tvm.script.tirx.sblock("y"):
                    row = tvm.script.tirx.axis.spatial(8, i)
                    y[row, 0] = tvm.script.tirx.tanh(tvm.script.tirx.exp(x[row, 0]))
                    for j in range(31):
                        y[row, j + 1] = y[row, j] + tvm.script.tirx.tanh(tvm.script.tirx.exp(x[row, j + 1]))
            for i, j in tvm.script.tirx.grid(8, 32):
                with tvm.script.tirx.sblock("z"):
                    row, column = tvm.script.tirx.axis.remap("SS", [i, j])
                    z[row, column] = y[row, column] * 2.0

    a = values(8, 32)
    report = []
    module = build_cpu({"f": running}, TARGET, report=report)
    assert not report
    outputs = [tvm.runtime.empty((8, 32), "float32", tvm.cpu()) for _ in range(2)]
    module.get_function("f")(tvm.runtime.tensor(a, tvm.cpu()), *outputs)
    np.testing.assert_allclose(outputs[1].numpy(), 2 * np.tanh(np.exp(a)).cumsum(1), rtol=1e-5)


def test_build_of_several_functions():
    a = values(30, 40)
    (x,) = placeholders(a)
    funcs = {f"f{i}": te.create_prim_func([x, topi.add(x, tirx.const(float(i), "float32"))]) for i in range(3)}
    module = build_cpu(funcs, TARGET)
    for i in range(3):
        out = tvm.runtime.empty((30, 40), "float32", tvm.cpu())
        module.get_function(f"f{i}", query_imports=True)(tvm.runtime.tensor(a, tvm.cpu()), out)
        np.testing.assert_allclose(out.numpy(), a + i, rtol=1e-6)


def test_exported_library(tmp_path):
    a = values(30, 40)
    (x,) = placeholders(a)
    funcs = {f"f{i}": te.create_prim_func([x, topi.add(x, tirx.const(float(i), "float32"))]) for i in range(3)}
    build_cpu(funcs, TARGET, workers=2).export_library(str(tmp_path / "library.so"))
    library = tvm.runtime.load_module(str(tmp_path / "library.so"))
    for i in range(3):
        out = tvm.runtime.empty((30, 40), "float32", tvm.cpu())
        library[f"f{i}"](tvm.runtime.tensor(a, tvm.cpu()), out)
        np.testing.assert_allclose(out.numpy(), a + i, rtol=1e-6)


def test_other_targets():
    for cpu in ("x86-64", "haswell", "skylake-avx512"):
        target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": 16})
        machine = machine_of(target)
        assert machine.cores == 16
        x, w = te.placeholder((64, 100)), te.placeholder((100, 96))
        assert "T.parallel" in schedule_cpu(te.create_prim_func([x, w, topi.matmul(x, w)]), target=target).script()


@PROPERTY
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 90), st.booleans(), st.booleans(), st.integers(1, 3))
def test_contractions_of_any_shape(m, k, n, transposed, before, batch):
    a, b = values(batch, m, k), values(batch, *((n, k) if transposed else (k, n)))
    x, w = placeholders(a, b)
    p = topi.nn.relu(x) if before else x
    r = te.reduce_axis((0, k), "r")
    y = te.compute(
        (batch, m, n),
        lambda g, i, j: te.sum(p[g, i, r] * (w[g, j, r] if transposed else w[g, r, j]), axis=r),
        name="y",
    )
    out = te.compute((batch * m, n), lambda i, j: y[i // m, i % m, j] + 1.0, name="out")
    left = np.maximum(a, 0) if before else a
    reference = left @ (b.transpose(0, 2, 1) if transposed else b) + 1
    check([x, w, out], [a, b], [reference.reshape(batch * m, n)], shape=False)


@PROPERTY
@given(
    st.integers(1, 2), st.sampled_from([1, 3, 5, 16]), st.integers(5, 21), st.integers(1, 21),
    st.sampled_from([1, 2, 3, 5]), st.integers(1, 3), st.integers(0, 2),
)  # fmt: skip
def test_convolutions_of_any_shape(n, channels, size, filters, kernel, stride, pad):
    a, b = values(n, channels, size, size + 1), values(filters, channels, kernel, kernel)
    x, w = placeholders(a, b)
    y = topi.nn.conv2d_nchw(x, w, stride, pad, 1, "float32")
    check([x, w, y], [a, b], [convolution(a, b, stride, pad, 1)], shape=False)


@PROPERTY
@given(st.lists(st.integers(1, 23), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_chains_of_any_shape(shape, random):
    a = values(*shape)
    (x,) = placeholders(a)
    order = list(range(len(shape)))
    random.shuffle(order)
    axis = random.randrange(len(shape))
    moved = topi.transpose(topi.exp(topi.multiply(x, tirx.const(0.1, "float32"))), order)
    total = topi.sum(moved, axis=[axis], keepdims=True)
    y = topi.divide(moved, total)
    flat = topi.reshape(y, (a.size,))
    reference = np.exp(a * np.float32(0.1)).transpose(order)
    reference = reference / reference.sum(axis, keepdims=True)
    check([x, flat], [a], [reference.reshape(-1)], shape=False)


@given(st.integers(1, 300), st.sampled_from([4, 8, 16]))
def test_pieces_cover_everything_once(extent, width):
    covered = [p.start + i for p in pieces(extent, width) for i in range(p.count * p.width)]
    assert covered == list(range(extent))


@given(st.integers(1, 300), st.sampled_from([1, 2, 4, 8, 16]))
def test_overlapping_vectors_cover_everything_and_nothing_else(extent, width):
    runs = overlapping(extent, width)
    places = [[start + i for i in range(run.width)] for run in runs for start in run.starts]
    assert {place for each in places for place in each} == set(range(extent))
    assert len(places) <= -(-extent // width) + 1 or extent < 4 or width < 4
    for run in runs:
        assert run.starts == [int(simplify(run.first(tirx.const(n, "int32")), ())) for n in range(run.count)]


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(4, 16), (8, 16), (16, 32)]))
def test_tiles_fit_the_registers(rows, columns, registers):
    lanes, count = registers
    tiling = tiling_of(rows, columns, lanes, count)
    assert 1 <= tiling.rows <= rows
    assert tiling.rows * tiling.vectors + tiling.vectors + 1 <= count


@pytest.mark.parametrize("extent", [7, 9, 31])
def test_every_second_element_is_read_only_where_it_is(extent):
    """Read ahead of the condition that keeps it inside its tensor, all of a vector would be undefined to LLVM."""
    node = helper.make_node("LpPool", ["x"], ["y"], kernel_shape=[3], strides=[2], p=3, pads=[1, 1])
    model = model_of([node], {"x": ("float32", (1, 2, extent))}, ["y"], opset=18)
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal((1, 2, extent)).astype("float32")
        cubes = np.pad(np.abs(x) ** 3, ((0, 0), (0, 0), (1, 1)))
        want = np.cbrt(sum(cubes[..., k : k + extent : 2] for k in range(3)))
        np.testing.assert_allclose(souffle.compile(model, target="cpu")(x)["y"], want, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 300), (4, 256), (3, 7), (5, 1), (2, 3, 530), (40, 1000)])
def test_functions_of_elements_that_share_all_loops_are_vectors(shape):
    """A recurrent cell's state and its output: the second reads what the first wrote, at the same element."""
    x, y = values(*shape), values(*shape, seed=1)
    a, b = placeholders(x, y)
    state = te.compute(shape, lambda *i: te.tanh(a(*i)) * b(*i), name="state")
    out = te.compute(shape, lambda *i: te.sigmoid(b(*i)) * te.tanh(state(*i)), name="out")
    func, (got_state, got) = execute((a, b, state, out), (x, y))
    wanted = np.tanh(x) * y
    np.testing.assert_allclose(got_state, wanted, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(got, np.tanh(wanted) / (1 + np.exp(-y)), rtol=2e-6, atol=1e-6)
    if shape[-1] >= 16:
        assert str(func).count("T.vectorized") >= 2
