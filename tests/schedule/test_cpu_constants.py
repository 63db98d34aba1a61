"""The CPU schedules with constants: packed ahead of time, and convolutions by minimal filtering, against NumPy."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import te, topi

import souffle
from souffle.schedule.cpu import (
    build_cpu,
    contraction_panel,
    contraction_tiling,
    host_target,
    machine_of,
    schedule_with_constants,
    use_cores,
    winograd,
)
from souffle.schedule.cpu.contraction_form import contraction_of, contractions_of
from souffle.schedule.cpu.contraction_tiling import product_tiling
from souffle.schedule.cpu.filtering import filtering_at
from souffle.schedule.cpu.nest import parse
from souffle.schedule.cpu.packed_constants import PackedLayout
from souffle.schedule.cpu.winograd import WinogradLayout
from souffle.schedule.cpu.words import dots_of
from tests.thorough import some

pytestmark = pytest.mark.sampled(8)

TARGET = host_target()
FLOAT = np.float32


def drawn(rng, *shape, dtype=FLOAT):
    return rng.standard_normal(shape).astype(dtype)


def run(tensors, arrays, constants, *, target=TARGET, **options):
    """Compile with some parameters as constants; the output, and the layouts of what was packed."""
    use_cores(target)
    scheduled = {}
    func = te.create_prim_func(list(tensors))
    module = build_cpu({"f": func}, target, constants={"f": constants}, scheduled=scheduled, **options)
    (*_, out) = tensors
    nothing = np.nan if str(out.dtype).startswith("float") else 77
    given = [*arrays, np.full([int(e) for e in out.shape], nothing, str(out.dtype))]
    parameters = scheduled["f"].parameters
    placed = [tvm.runtime.tensor(given[at] if layout is None else layout.pack(given[at])) for at, layout in parameters]
    module.get_function("f")(*placed)
    result = next(t for t, (at, _) in zip(placed, parameters, strict=True) if at == len(arrays))
    return result.numpy(), [layout for _, layout in parameters if layout is not None]


def naive(layout: PackedLayout, array: np.ndarray) -> np.ndarray:
    if layout.numbers[0] > 1:
        return naive_words(layout, array)
    flat, packed = array.reshape(-1), np.zeros(layout.shape, array.dtype)
    axes = (*layout.batch, *layout.steps, *layout.columns)
    before, steps = len(layout.batch), len(layout.steps)
    for place in itertools.product(*(range(extent) for extent, _ in axes)):
        at = layout.offset + sum(i * stride for i, (_, stride) in zip(place, axes, strict=True))
        column = 0
        for i, (extent, _) in zip(place[before + steps :], layout.columns, strict=True):
            column = column * extent + i
        where = (*place[:before], column // layout.width, *place[before : before + steps], column % layout.width)
        packed[where] = flat[at]
    return packed


def naive_words(layout: PackedLayout, array: np.ndarray) -> np.ndarray:
    """Each word of what one number of it alone is packed to."""
    count, stride = layout.numbers
    bits = 32 // count
    words = np.zeros(layout.shape, np.uint32)
    for number in range(count):
        one = replace(layout, offset=layout.offset + number * stride, numbers=(1, 0))
        words |= (naive(one, array.astype(np.int64)) & ((1 << bits) - 1)).astype(np.uint32) << np.uint32(bits * number)
    return words.view(np.int32)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("seed", range(3))
def test_packing_makes_words_of_numbers(seed, dtype, count):
    rng = random.Random(seed)
    strides = [rng.choice([-3, 1, 2, 7]) for _ in range(5)]
    extents = [rng.choice([1, 2, 3, 5]) for _ in range(4)] + [count]
    low = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True) if stride < 0)
    high = sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True) if stride > 0)
    kind = np.iinfo(dtype)
    array = np.random.default_rng(seed).integers(kind.min, kind.max + 1, high - low + 1).astype(dtype)
    first, second, third, fourth, numbers = zip(extents, strides, strict=True)
    layout = PackedLayout(-low, (first,), (second, third), (fourth,), rng.choice([1, 4, 16]), numbers)
    packed = layout.pack(array)
    assert packed.shape == layout.shape and packed.dtype == np.int32
    np.testing.assert_array_equal(packed, naive(layout, array))
    with pytest.raises(ValueError, match="are read of a constant"):
        layout.pack(array[:-1])


@pytest.mark.skipif(not dots_of(TARGET, machine_of(TARGET).vector_bits), reason="no instruction multiplies words")
@pytest.mark.parametrize("kinds", list(itertools.product(("int8", "uint8"), repeat=2)), ids=str)
@pytest.mark.parametrize(
    ("m", "k", "n", "constant"),
    [(1, 64, 300, 1), (33, 36, 29, 1), (7, 4096, 50, 1), (64, 64, 784, 0), (31, 20, 2049, 0), (9, 37, 64, 1)],
)
def test_words_of_constants_are_packed(kinds, m, k, n, constant):
    rng = np.random.default_rng(m + k + n)
    ranges = [np.iinfo(kind) for kind in kinds]
    a, b = (
        rng.integers(kind.min, kind.max + 1, shape).astype(kind.dtype)
        for kind, shape in zip(ranges, ((m, k), (k, n)), strict=True)
    )
    x, w = (te.placeholder(array.shape, str(array.dtype)) for array in (a, b))
    r = te.reduce_axis((0, k), "r")
    y = te.compute((m, n), lambda i, j: te.sum(x[i, r].astype("int32") * w[r, j].astype("int32"), axis=r))
    result, layouts = run([x, w, y], [a, b], [constant])
    # A word of what goes through the whole sum has to be filled up where that is no multiple of it. Pairs of 16 bits,
    # which older processors multiply, need not pay for few rows.
    pays = dots_of(TARGET, machine_of(TARGET).vector_bits)[0].adds or m > 8
    assert len(layouts) == (k % 4 == 0) if pays else len(layouts) <= (k % 4 == 0)
    assert all(layout.numbers[0] > 1 for layout in layouts)
    np.testing.assert_array_equal(result, a.astype(np.int64) @ b)


@pytest.mark.parametrize("seed", range(20))
def test_packing_puts_each_element_where_the_layout_says(seed):
    rng = random.Random(seed)
    groups = [[rng.choice([1, 2, 3, 5]) for _ in range(rng.randint(low, 2))] for low in (0, 1, 1)]
    axes = [(extent, rng.choice([-3, -1, 0, 1, 2, 7])) for group in groups for extent in group]
    low = sum((extent - 1) * stride for extent, stride in axes if stride < 0)
    high = sum((extent - 1) * stride for extent, stride in axes if stride > 0)
    array = np.arange(1, high - low + 1 + rng.randint(1, 4), dtype=FLOAT)
    b, s = len(groups[0]), len(groups[0]) + len(groups[1])
    layout = PackedLayout(-low, tuple(axes[:b]), tuple(axes[b:s]), tuple(axes[s:]), rng.choice([1, 4, 16]))
    np.testing.assert_array_equal(layout.pack(array), naive(layout, array))
    with pytest.raises(ValueError, match="are read of a constant"):
        layout.pack(array[: high - low])


@pytest.mark.parametrize(("m", "k", "n"), [(1, 300, 517), (2, 64, 64), (4, 129, 48), (17, 31, 100), (128, 96, 65)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_read_packed_weights(m, k, n, transposed):
    rng = np.random.default_rng(m + k + n)
    a, b = drawn(rng, m, k), drawn(rng, *((n, k) if transposed else (k, n)))
    x, w = te.placeholder(a.shape), te.placeholder(b.shape)
    r = te.reduce_axis((0, k), "r")
    y = te.compute((m, n), lambda i, j: te.sum(x[i, r] * (w[j, r] if transposed else w[r, j]), axis=r), name="y")
    out = te.compute((m, n), lambda i, j: y[i, j] + 1.0, name="out")
    result, layouts = run([x, w, out], [a, b], [1])
    # One row is multiplied along the weights' own rows.
    assert [type(layout) for layout in layouts] == ([] if m == 1 and transposed else [PackedLayout])
    np.testing.assert_allclose(result, a.astype(float) @ (b.T if transposed else b) + 1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "k", "n"), [(100, 40, 784), (9, 17, 1000), (31, 300, 500), (64, 64, 2049)])
@pytest.mark.parametrize("room", [None, 4096])
def test_weights_are_rows_of_products_with_many_columns(m, k, n, room, monkeypatch):
    """With less room than the weights need, a tile of them is multiplied with several panels before the next one."""
    if room is not None:
        monkeypatch.setattr(contraction_tiling, "CACHE_BYTES", room)
        monkeypatch.setattr(contraction_panel, "_FIRST_LEVEL", 0)
    rng = np.random.default_rng(m + k + n)
    a, b = drawn(rng, m, k), drawn(rng, k, n)
    w, x = te.placeholder(a.shape), te.placeholder(b.shape)
    out = topi.nn.relu(topi.matmul(w, x))
    result, layouts = run([w, x, out], [a, b], [0])
    assert [layout.columns for layout in layouts] == [((m, k),)]
    np.testing.assert_allclose(result, np.maximum(a.astype(float) @ b, 0), rtol=1e-4, atol=1e-4)


def test_panels_are_as_many_at_a_time_as_have_room(monkeypatch):
    x, w = te.placeholder((64, 500), name="x"), te.placeholder((300, 64), name="w")
    (nest,) = parse(te.create_prim_func([x, w, topi.matmul(w, x)])).items
    (form,) = [form for form in contractions_of(nest) if not form.by_rows]
    tiling = contraction_tiling.CpuTiling(8, 3, 16)
    assert contraction_tiling.panels_together(form, tiling) == 1
    panel = 4 * 64 * tiling.width
    for room, together in ((panel - 1, 1), (3 * panel, 3), (4 * panel, 4), (5 * panel, 4), (6 * panel, 6)):
        monkeypatch.setattr(contraction_tiling, "CACHE_BYTES", room)
        assert contraction_tiling.panels_together(form, tiling) == (together if room < 300 * 64 * 4 else 1), room


def test_a_constant_that_is_read_in_two_ways_is_there_as_it_is_and_packed():
    rng = np.random.default_rng(0)
    a, b = drawn(rng, 24, 40), drawn(rng, 40, 72)
    x, w = te.placeholder(a.shape), te.placeholder(b.shape)
    y = topi.add(topi.matmul(x, w), topi.sum(w, axis=0))
    result, layouts = run([x, w, y], [a, b], [1])
    assert len(layouts) == 1
    np.testing.assert_allclose(result, a @ b + b.sum(0), rtol=1e-4, atol=1e-4)


def test_weights_of_half_precision_keep_their_type():
    rng = np.random.default_rng(1)
    a, b = drawn(rng, 30, 64, dtype=np.float16), drawn(rng, 64, 80, dtype=np.float16)
    x, w = te.placeholder(a.shape, "float16"), te.placeholder(b.shape, "float16")
    result, (layout,) = run([x, w, topi.matmul(x, w)], [a, b], [1])
    assert layout.pack(b).dtype == np.float16
    np.testing.assert_allclose(result, a.astype(float) @ b.astype(float), rtol=2e-3, atol=2e-3)


def convolution(x, w, stride, pad, dilation, groups):
    x = np.pad(x.astype(float), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    kh, kw = ((k - 1) * dilation + 1 for k in w.shape[2:])
    windows = np.lib.stride_tricks.sliding_window_view(x, (kh, kw), (2, 3))
    windows = windows[:, :, ::stride, ::stride, ::dilation, ::dilation]
    n, c, *_ = windows.shape
    parts = windows.reshape(n, groups, c // groups, *windows.shape[2:])
    weights = w.astype(float).reshape(groups, -1, *w.shape[1:])
    found = np.einsum("ngchwij,gfcij->ngfhw", parts, weights, optimize=True)
    return found.reshape(n, -1, *found.shape[3:])


def convolved(a, b, bias, stride, pad, dilation, groups, residual=None):
    x, w, c = (te.placeholder(each.shape, str(each.dtype)) for each in (a, b, bias))
    if groups == 1:
        y = topi.nn.conv2d_nchw(x, w, stride, pad, dilation, "float32")
    else:
        y = topi.nn.group_conv2d_nchw(x, w, stride, pad, dilation, groups, "float32")
    y = topi.add(y, topi.reshape(c, (1, len(bias), 1, 1)))
    if residual is None:
        return [x, w, c, topi.nn.relu(y)], [a, b, bias]
    z = te.placeholder(residual.shape)
    return [x, w, c, z, topi.nn.relu(topi.add(y, z))], [a, b, bias, residual]


WINDOWS = [
    # image, filters, kernel, stride, pad, dilation, groups
    ((1, 64, 14, 14), 64, 3, 1, 1, 1, 1),
    ((2, 48, 9, 13), 40, 3, 1, 1, 1, 1),
    ((3, 33, 7, 5), 37, 3, 1, 0, 1, 1),
    ((1, 128, 2, 2), 96, 3, 1, 1, 1, 1),
    ((1, 64, 1, 1), 64, 3, 1, 1, 1, 1),
    ((1, 96, 13, 10), 64, 3, 1, 1, 1, 1),
    ((2, 34, 12, 19), 50, 3, 1, 2, 1, 1),
    ((1, 32, 14, 11), 48, 3, 2, 1, 1, 1),
    ((1, 32, 15, 15), 48, 3, 1, 2, 2, 1),
    ((1, 24, 12, 12), 40, 5, 1, 2, 1, 1),
    ((2, 64, 7, 7), 112, 1, 1, 0, 1, 1),
    ((1, 64, 14, 14), 64, 3, 1, 1, 1, 4),
    ((1, 48, 7, 7), 48, 5, 1, 2, 1, 48),
    ((1, 32, 28, 28), 32, 3, 2, 1, 1, 32),
    ((1, 3, 33, 31), 24, 3, 2, 1, 1, 1),
]


@pytest.mark.parametrize(("shape", "filters", "kernel", "stride", "pad", "dilation", "groups"), WINDOWS)
@pytest.mark.parametrize("points", [0, 4, 6])
def test_convolutions_with_constant_weights(
    shape, filters, kernel, stride, pad, dilation, groups, points, monkeypatch
):
    """By minimal filtering of tiles of 2 x 2 and of 4 x 4, which read so many points along an axis, and without."""
    offered = winograd._convolutions

    def of_points(window, machine):
        convolutions = offered(window, machine)
        return [each for each in convolutions if each.panels.shape[0] == points**2] or convolutions

    monkeypatch.setattr(winograd, "_convolutions", of_points)
    rng = np.random.default_rng(filters)
    a, b, bias = drawn(rng, *shape), drawn(rng, filters, shape[1] // groups, kernel, kernel), drawn(rng, filters)
    expected = convolution(a, b, stride, pad, dilation, groups) + bias[:, None, None]
    residual = drawn(rng, *expected.shape) if shape[0] == 1 else None
    tensors, arrays = convolved(a, b, bias, stride, pad, dilation, groups, residual)
    result, layouts = run(tensors, arrays, [1, 2], winograd=bool(points))
    filtered = [len(layout.matrix) for layout in layouts if isinstance(layout, WinogradLayout)]
    assert not filtered or (points and (kernel, stride, dilation, groups) == (3, 1, 1, 1))
    # A sum over 33 channels has no equal parts that serve, so that tiles of 4 x 4 are not offered.
    assert filtered in ([], [points]) or (filtered, shape[1]) == ([4], 33)
    assert filtered or not points or shape != (1, 64, 14, 14) or groups > 1
    expected = np.maximum(expected + (0 if residual is None else residual), 0)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_filtering_is_taken_where_it_pays_and_is_as_exact_as_the_sum():
    rng = np.random.default_rng(2)
    a, b, bias = drawn(rng, 1, 64, 21, 23), drawn(rng, 64, 64, 3, 3), drawn(rng, 64)
    tensors, arrays = convolved(a, b, bias, 1, 1, 1, 1)
    exact = np.maximum(convolution(a, b, 1, 1, 1, 1) + bias[:, None, None], 0)
    (filtered, (layout, *_)), (plain, _) = (run(tensors, arrays, [1], winograd=on) for on in (True, False))
    assert isinstance(layout, WinogradLayout)
    assert np.abs(filtered - exact).max() <= 2 * np.abs(plain - exact).max()
    # In single precision it was above, with more around it.
    for dtype in some(["float16"], ["float32"]):
        x, w = te.placeholder(a.shape, dtype), te.placeholder(b.shape, dtype)
        y = topi.nn.conv2d_nchw(x, w, 1, 1, 1, dtype)
        small = [a.astype(dtype), b.astype(dtype)]
        exact = convolution(*(each.astype(np.float64) for each in small), 1, 1, 1, 1)
        (filtered, (layout,)), (plain, _) = (run([x, w, y], small, [1], winograd=on) for on in (True, False))
        assert isinstance(layout, WinogradLayout)
        assert np.abs(filtered - exact).max() <= 2 * np.abs(plain - exact).max()


def exactly_filtered(points: list[Fraction]) -> bool:
    """Whether results of an algorithm are those of the sum for whole numbers, in numbers that are exact."""
    filtering = filtering_at(points, in_parts=False)
    data, weights, results = (np.array(each) for each in (filtering.data, filtering.weights, filtering.results))
    rng = np.random.default_rng(0)
    d, g = rng.integers(-9, 10, filtering.points), rng.integers(-9, 10, 3)
    found = results @ ((data @ d) * (weights @ g))
    return np.allclose(found, [d[i : i + 3] @ g for i in range(filtering.size)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", range(1, 7))
def test_interpolation_at_any_points_gives_the_sum(size):
    rng = random.Random(size)
    points = rng.sample([Fraction(n, 4) for n in range(-12, 13)], size + 1)
    assert exactly_filtered(points)


def test_what_is_far_from_a_nan_is_right_in_a_filtered_convolution():
    rng = np.random.default_rng(3)
    a, b, bias = drawn(rng, 1, 64, 15, 17), drawn(rng, 64, 64, 3, 3), drawn(rng, 64)
    holes = [(0, 0), (7, 8), (14, 16), (6, 3)]
    for at, (y, x) in enumerate(holes):
        a[0, at, y, x] = (np.nan, np.inf, -np.inf, np.nan)[at]
    tensors, arrays = convolved(a, b, bias, 1, 1, 1, 1)
    result, (layout, *_) = run(tensors, arrays, [1])
    assert isinstance(layout, WinogradLayout)
    size = len(layout.matrix) - 2
    reached = np.zeros((15, 17), bool)
    for y, x in holes:
        # All results of the tiles that read it.
        tops, lefts = ([place for place in range(0, 20, size) if place - 1 <= at <= place + size] for at in (y, x))
        for top, left in itertools.product(tops, lefts):
            reached[top : top + size, left : left + size] = True
    finite = np.where(np.isfinite(a), a, 0).astype(FLOAT)
    expected = np.maximum(convolution(finite, b, 1, 1, 1, 1) + bias[:, None, None], 0)
    np.testing.assert_allclose(result[0][:, ~reached], expected[0][:, ~reached], rtol=1e-4, atol=1e-4)
    assert not np.isfinite(result[0, :, 0, 0]).any()  # of the first, which is NaN


def model(batch: int) -> bytes:
    """A convolution, and two products with one matrix, of which one is by elements."""
    rng = np.random.default_rng(4)
    arrays = {"w": drawn(rng, 32, 16, 3, 3), "m": drawn(rng, 32, 32), "n": drawn(rng, 32, 24)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["g"]),
        helper.make_node("Add", ["g", "f"], ["h"]),
        helper.make_node("MatMul", ["h", "n"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 24])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def test_a_network_holds_its_constants_once_also_in_versions(tmp_path):
    batches = some((1, 16), (3,))
    net = souffle.compile(model(1), target="cpu", dims={"batch": batches})
    rng = np.random.default_rng(5)
    alone = {}
    for batch in batches:
        single = souffle.compile(model(1), target="cpu", dims={"batch": batch})
        x = drawn(rng, batch, 16, 12, 12)
        alone[batch] = x, single(x)["y"]
        np.testing.assert_array_equal(net(x)["y"], alone[batch][1])
        constants = [buffer for buffer in single.plan.buffers if buffer.kind == "constant"]
        taken = {index for launch in single.plan.launches for index in launch.buffers}
        assert taken >= {i for i, buffer in enumerate(single.plan.buffers) if buffer.kind == "constant"}
        # Transformed weights of a window are four times as many, at most, and panels are filled up.
        assert sum(b.nbytes for b in constants) <= 4 * (4 * 32 * 16 * 9 + 32 * 32 + 32 * 32)
    net.save(tmp_path / "net.souffle")
    again = souffle.load(tmp_path / "net.souffle")
    for x, expected in alone.values():
        np.testing.assert_array_equal(again(x)["y"], expected)


def test_switching_filtering_off_is_an_option_of_a_compilation():
    text = model(1)
    x = drawn(np.random.default_rng(6), 1, 16, 12, 12)
    on, off = (souffle.compile(text, target="cpu", dims={"batch": 1}, disable=d) for d in ([], ["winograd"]))
    names = [{b.name: b.shape for b in net.plan.buffers if b.kind == "constant"} for net in (on, off)]
    assert names[0] != names[1]
    np.testing.assert_allclose(on(x)["y"], off(x)["y"], rtol=1e-4, atol=1e-5)


def test_rows_that_follow_each_other_are_one_run_of_tiles():
    """Fifty steps of a batch of six are 300 rows, of which a tile takes more than six."""
    rng = np.random.default_rng(0)
    a, b = drawn(rng, 50, 6, 96), drawn(rng, 96, 144)
    x, w = te.placeholder(a.shape, "float32", "x"), te.placeholder(b.shape, "float32", "w")
    k = te.reduce_axis((0, 96), "k")
    product = te.compute((50, 6, 144), lambda m, i, j: te.sum(x[m, i, k] * w[k, j], axis=k), name="product")
    form = contraction_of(parse(te.create_prim_func([x, w, product])).items[0])
    wide = replace(machine_of(TARGET), vector_bits=512, vector_registers=32)
    assert product_tiling(form, wide, packed="columns").rows > 6
    out, _ = run((x, w, product), (a, b), [1])
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-4)
    # Of six rows five are read: tiles do not cross from one run to the next where a run has a divisor that serves.
    part = te.compute((50, 5, 144), lambda m, i, j: te.sum(x[m, i, k] * w[k, j], axis=k), name="part")
    form = contraction_of(parse(te.create_prim_func([x, w, part])).items[0])
    assert product_tiling(form, wide, packed="columns").rows == 5
    out, _ = run((x, w, part), (a, b), [1])
    np.testing.assert_allclose(out, a[:, :5] @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 300, 500), (3, 64, 250), (2, 7, 1), (40, 200, 330)])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_panels_that_are_read_from_the_end_give_the_same_numbers(shape, cores):
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    a, b = drawn(rng, rows, depth), drawn(rng, depth, columns)
    x, w = te.placeholder(a.shape, "float32", "x"), te.placeholder(b.shape, "float32", "w")
    k = te.reduce_axis((0, depth), "k")
    product = te.compute((rows, columns), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k), name="product")
    func = te.create_prim_func([x, w, product])
    target = tvm.target.Target({"kind": "llvm", "mcpu": TARGET.attrs["mcpu"], "num-cores": cores})
    known = {"target": target, "constants": [1]}
    texts = [schedule_with_constants(func, **known, backwards=way).func.script() for way in (False, True)]
    found = [run((x, w, product), (a, b), [1], backwards=names, target=target)[0] for names in ((), ("f",))]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], a @ b, rtol=1e-4, atol=1e-4)
    assert (texts[0] != texts[1]) == (columns > 1)
