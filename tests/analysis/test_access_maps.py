"""isl access maps against reads enumerated by running the expression, over random TE programs of many families."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi

from souffle.analysis import Arithmetic, analyze
from souffle.analysis import access as access_module
from souffle.analysis import intensity as intensity_module
from souffle.analysis.access import Access
from souffle.index import isl
from souffle.program import TE
from tests.analysis.analysis_cases import program_of, reads_of, te_of

pytestmark = pytest.mark.sampled(6)

SMALL = st.integers(1, 4)


def placeholder(*shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype=dtype, name="A")


def shapes(draw: st.DrawFn, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.lists(SMALL, min_size=low, max_size=high)))


def matmul(draw):
    m, n, k = draw(SMALL), draw(SMALL), draw(SMALL)
    left, right = draw(st.booleans()), draw(st.booleans())
    a = placeholder(*((k, m) if left else (m, k)))
    return topi.matmul(a, placeholder(*((n, k) if right else (k, n))), left, right)


def batch_matmul(draw):
    b, m, n, k = (draw(SMALL) for _ in range(4))
    return topi.nn.batch_matmul(placeholder(b, m, k), placeholder(draw(st.sampled_from([1, b])), n, k))


def conv2d(draw):
    groups, channels, filters = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    stride, dilation, padding = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 2))
    kernel = draw(st.integers(1, 3))
    data = placeholder(1, groups * channels, 5, 6)
    weight = placeholder(groups * filters, channels, kernel, kernel)
    if groups == 1:
        return topi.nn.conv2d_nchw(data, weight, stride, padding, dilation)
    return topi.nn.group_conv2d_nchw(data, weight, stride, padding, dilation, groups)


def depthwise(draw):
    stride, padding = draw(st.integers(1, 2)), draw(st.integers(0, 1))
    return topi.nn.depthwise_conv2d_nchw(placeholder(1, 2, 5, 5), placeholder(2, 1, 3, 3), stride, padding, 1)


def conv_transpose(draw):
    stride = draw(st.integers(1, 2))
    return topi.nn.conv2d_transpose_nchw(
        placeholder(1, 2, 3, 3), placeholder(2, 2, 2, 2), (stride, stride), (0, 0), "float32", (0, 0)
    )


def pooling(draw):
    kernel, stride, padding = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
    return topi.nn.pool2d(
        placeholder(1, 2, 5, 5),
        (kernel, kernel),
        (stride, stride),
        (1, 1),
        (padding,) * 4,
        draw(st.sampled_from(["max", "avg"])),
        count_include_pad=draw(st.booleans()),
    )


def adaptive_pooling(draw):
    return topi.nn.adaptive_pool(placeholder(1, 2, 4, 6), (draw(SMALL), draw(st.integers(1, 6))), "avg")


def reshape(draw):
    shape = shapes(draw, 1, 4)
    size = 1
    for extent in shape:
        size *= extent
    first = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    return topi.reshape(placeholder(*shape), (first, size // first))


def transpose(draw):
    shape = shapes(draw, 1, 4)
    return topi.transpose(placeholder(*shape), draw(st.permutations(range(len(shape)))))


def strided_slice(draw):
    n, begin, step = draw(st.integers(4, 8)), draw(st.integers(0, 2)), draw(st.integers(1, 3))
    a = placeholder(n, 3)
    if draw(st.booleans()):
        return topi.strided_slice(a, [n - 1, 0], [0, 3], [-step, 1])
    return topi.strided_slice(a, [begin, 1], [n, 3], [step, 1])


def concatenate(draw):
    axis = draw(st.integers(0, 1))
    parts = []
    for _ in range(draw(st.integers(2, 4))):
        shape = [3, 2]
        shape[axis] = draw(SMALL)
        parts.append(placeholder(*shape))
    if draw(st.booleans()):
        parts[-1] = parts[0]
    return topi.concatenate(parts, axis)


def pad(draw):
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    a = placeholder(3, draw(st.integers(3, 4)))
    if draw(st.booleans()):
        return topi.nn.mirror_pad(a, (before, 0), (after, 1), "REFLECT")
    return topi.nn.pad(a, (before, 1), (after, 0))


def depth_to_space(draw):
    mode = draw(st.sampled_from(["DCR", "CRD"]))
    if draw(st.booleans()):
        return topi.nn.space_to_depth(placeholder(1, 2, 4, 4), 2)
    return topi.nn.depth_to_space(placeholder(1, 8, 2, 3), 2, "NCHW", mode)


def window_partition(draw):
    """Swin's cyclic shift, reshape and transpose, written as the single TE that they become."""
    window, shift = draw(st.integers(2, 3)), draw(st.integers(0, 2))
    height, width, channels = 2 * window, 2 * window, 2
    a = placeholder(height, width, channels)

    def element(block, y, x, c):
        row = (block // 2) * window + y + shift
        column = (block % 2) * window + x + shift
        return a[row % height, column % width, c]

    return te.compute((4, window, window, channels), element, name="windows")


def roll(draw):
    shift = draw(st.integers(0, 3))
    a = placeholder(4, 3)
    parts = [topi.strided_slice(a, [shift, 0], [4, 3]), topi.strided_slice(a, [0, 0], [shift, 3])]
    return topi.concatenate(parts, 0) if 0 < shift < 4 else topi.identity(a)


def softmax(draw):
    return topi.nn.softmax(placeholder(*shapes(draw, 2, 3)))


def reduction(draw):
    shape = shapes(draw, 2, 4)
    axes = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    function = draw(st.sampled_from([topi.sum, topi.max, topi.min]))
    return function(placeholder(*shape), axis=sorted(axes), keepdims=draw(st.booleans()))


def argmax(draw):
    function = draw(st.sampled_from([topi.argmax, topi.argmin]))
    return function(placeholder(*shapes(draw, 2, 3)), axis=draw(st.integers(0, 1)))


def broadcast(draw):
    shape = shapes(draw, 1, 3)
    other = tuple(draw(st.sampled_from([1, extent])) for extent in shape)
    return topi.add(placeholder(*shape), topi.exp(placeholder(*other)))


def resize(draw):
    method = draw(st.sampled_from(["nearest_neighbor", "linear"]))
    mode = draw(st.sampled_from(["half_pixel", "asymmetric", "align_corners"]))
    height, width = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    data = placeholder(1, 1, draw(st.integers(2, 5)), draw(st.integers(2, 5)))
    return topi.image.resize2d(
        data, [0, 0, 0, 0], [height, width], layout="NCHW", method=method, coordinate_transformation_mode=mode
    )


def tile_repeat(draw):
    a = placeholder(2, 3)
    return topi.tile(a, (draw(SMALL), 2)) if draw(st.booleans()) else topi.repeat(a, draw(SMALL), 1)


def split(draw):
    part = draw(st.integers(1, 3))
    return topi.split(placeholder(4, 3), [part], 0)[draw(st.integers(0, 1))]


def rotate_half(draw):
    n = 2 * draw(st.integers(1, 3))
    a = placeholder(3, n)
    half = n // 2
    return te.compute(
        (3, n), lambda i, j: a[i, j] + tirx.if_then_else(j < half, -a[i, j + half], a[i, j - half]), name="rotate"
    )


def triangle(draw):
    offset = draw(st.integers(-1, 1))
    a = placeholder(4, 4)
    return te.compute((4, 4), lambda i, j: tirx.if_then_else(j - i <= offset, a[i, j], 0.0), name="tril")


_COMPARED = (
    lambda v: v != 0,
    lambda v: v == 0,
    lambda v: v > 1,
    lambda v: v >= 0,
    lambda v: v * 3 - 1 < 2,
    lambda v: tirx.const(0, "int32") < v,
)


def integer_tricks(draw):
    """Shifts, masks, truncating division and remainder, nested choices."""
    a = placeholder(16)
    k = te.reduce_axis((1, 3), name="k")
    compare = draw(st.sampled_from(_COMPARED))

    def condition(i):
        return tirx.all(i // 5 < 2, i % 3 == 0)

    function = draw(
        st.sampled_from(
            [
                lambda i: a[(i << 1) & 15],
                lambda i: a[tirx.truncdiv(i - 7, 3) + 2],
                lambda i: a[tirx.truncmod(i - 7, 3) + 2],
                lambda i: a[tirx.Select(tirx.any(i < 3, i > 9), 15 - i, tirx.min(i >> 1, 4))],
                lambda i: a[tirx.if_then_else(tirx.Not(i % 3 == 0), i, 0)],
                lambda i: te.sum(a[i + k], axis=[k], where=(i + k) % 2 == 0),
                # A condition that is kept as a number, as lowering does, and compared.
                lambda i: tirx.if_then_else(compare(tirx.Select(condition(i), 1, 0)), a[i], tirx.const(0, "float32")),
                lambda i: tirx.if_then_else(compare(tirx.Cast("int32", condition(i))), a[i], a[15 - i]),
                lambda i: tirx.if_then_else(tirx.Cast("bool", tirx.Cast("int32", i % 4 < 2)), a[i], a[0]),
            ]
        )
    )
    return te.compute((13,), function, name="tricks")


FAMILIES = [
    matmul,
    batch_matmul,
    conv2d,
    depthwise,
    conv_transpose,
    pooling,
    adaptive_pooling,
    reshape,
    transpose,
    strided_slice,
    concatenate,
    pad,
    depth_to_space,
    window_partition,
    roll,
    softmax,
    reduction,
    argmax,
    broadcast,
    resize,
    tile_repeat,
    split,
    rotate_half,
    triangle,
    integer_tricks,
]


def check_exact(te_: TE) -> None:
    """Every access map equals the enumerated reads, and what is derived from it holds on them."""
    expected = reads_of(te_)
    for position, tensor in enumerate(te_.inputs):
        access = Access(te_, position)
        assert access.exact, (str(access), access.inexact_because)
        found, wanted = isl.pairs(access.map), expected[position]
        assert found == wanted, (str(access), sorted(found ^ wanted)[:4])
        counts = {out: sum(1 for o, _ in wanted if o == out) for out, _ in wanted}
        assert access.single_valued == all(count <= 1 for count in counts.values())
        assert access.elements == len({element for _, element in wanted})
        form = access.matrix_form
        for out, element in wanted if form is not None else ():
            image = tuple(
                sum(m * x for m, x in zip(row, out, strict=True)) + c
                for row, c in zip(form.matrix, form.constant, strict=True)
            )
            assert image == element
        assert tensor.name in str(access)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_maps_equal_enumerated_reads(family):
    @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data):
        for te_ in program_of(family(data.draw)).tes:
            check_exact(te_)

    run()


def test_gather_is_over_approximated_and_says_so():
    te_ = te_of(topi.gather(placeholder(4, 6), 1, placeholder(4, 3, dtype="int64")))
    indices, data = (Access(te_, i) for i in range(2))
    if te_.inputs[0].dtype != "int64":
        indices, data = data, indices
    assert indices.exact and not data.exact
    assert data.inexact_because == ("an index depends on data",)
    assert reads_of(te_)[data.position] <= isl.pairs(data.map)
    assert isl.pairs(data.map) == {((i, j), (i, k)) for i in range(4) for j in range(3) for k in range(6)}
    assert data.single_valued and data.elements == 12
    assert "*" in str(data) and "0 ≤ * < 6" in str(data)


def test_a_choice_by_data_is_over_approximated_and_says_so():
    te_ = te_of(topi.where(placeholder(5, dtype="bool"), placeholder(5), placeholder(5)))
    expected = reads_of(te_)
    for position in range(3):
        access = Access(te_, position)
        assert access.exact == (te_.inputs[position].dtype == "bool")
        assert expected[position] <= isl.pairs(access.map)
        assert access.single_valued


def test_products_of_axes_are_over_approximated():
    a = placeholder(10)
    te_ = te_of(te.compute((3, 4), lambda i, j: a[i * j] + a[i + j], name="product"))
    access = Access(te_, 0)
    assert access.inexact_because == ("an index is not quasi-affine",)
    assert reads_of(te_)[0] <= isl.pairs(access.map)
    assert not access.single_valued


def test_an_exhausted_budget_is_unknown():
    assert isl.within_budget(lambda: isl.box([(0, 5), (0, 7)]).is_empty(), budget=1) is None
    assert isl.within_budget(lambda: isl.box([(0, 5)]).is_empty()) is False
    assert isl.count_points(isl.box([(0, 5), (2, 7)])) == 35


def test_printing_is_the_papers():
    a, b = te.placeholder((64, 64), name="a"), te.placeholder((64, 64), name="b")
    rk = te.reduce_axis((0, 64), name="rk")
    product = te.compute((64, 64), lambda i, j: te.sum(a[i, rk] * b[rk, j], axis=[rk]), name="O")
    program = program_of(product)
    analysis = analyze(program)
    te_ = program.tes[0]
    assert str(analysis.access(te_, 0)) == "O_0_o0[i, j] → x0[i, rk], 0 ≤ rk < 64"
    assert str(analysis.access(te_, 1)) == "O_0_o0[i, j] → x1[rk, j], 0 ≤ rk < 64"
    assert "one-relies-on-many, compute-intensive (42.67 operations per element)" in str(analysis)


def test_scalars_and_tensors_without_elements_to_read():
    scalar = te.placeholder((), name="s")
    te_ = te_of(te.compute((2, 2), lambda i, j: scalar() * 2.0, name="fill"))
    check_exact(te_)
    total = te_of(topi.sum(placeholder(2, 3)))
    check_exact(total)


def test_equal_layers_share_their_relations():
    program = program_of(topi.tanh(topi.tanh(placeholder(4, 4))))
    analysis = analyze(program)
    first, second = (analysis.access(te_, 0) for te_ in program.tes)
    assert first.relation is second.relation
    assert second.tensor.name in str(second.map) and str(first.map) != str(second.map)


def test_the_iteration_map_keeps_the_reduction_axes():
    access = Access(te_of(topi.matmul(placeholder(2, 3), placeholder(3, 4))), 0)
    expected = {((i, j, k), (i, k)) for i in range(2) for j in range(4) for k in range(3)}
    assert isl.pairs(access.iteration_map) == expected


@pytest.mark.parametrize("budget", [1, 30, 100, 300, 1000, 3000, 10_000, 30_000])
def test_any_budget_gives_a_sound_answer(budget, monkeypatch):
    """Wherever isl stops, the answer holds at least the elements read; never an error."""
    data = placeholder(1, 2, 5, 5)
    results = [
        topi.nn.conv2d_nchw(data, placeholder(2, 2, 3, 3), 1, 1, 1),
        topi.nn.pool2d(data, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "avg"),
        topi.reshape(placeholder(6, 4), (8, 3)),
        topi.concatenate((placeholder(2, 3), placeholder(3, 3)), 0),
        topi.image.resize2d(data, [0, 0, 0, 0], [7, 4], layout="NCHW"),
    ]
    tes = [te_ for result in results for te_ in program_of(result).tes]
    a = placeholder(6, 5)
    tes += program_of(te.compute((5, 4), lambda i, j: a[i, j] + a[i + (j % 3) // 2, (j * 3) // 2])).tes
    caches = [access_module.relation, intensity_module._work] + [
        getattr(access_module, name) for name in ("_single_valued", "_matrix_form", "_footprint", "_elements", "_times")
    ]
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(isl, "BUDGET", budget)
    answers = []
    for te_ in tes:
        assert Arithmetic(te_).ratio >= 0
        for position in range(len(te_.inputs)):
            access = Access(te_, position)
            answers.append((te_, access, access.single_valued, access.matrix_form, access.elements, access.times))
    monkeypatch.undo()
    for te_, access, single_valued, _, elements, times in answers:
        wanted = reads_of(te_)[access.position]
        assert wanted <= isl.pairs(access.map)
        assert len({element for _, element in wanted}) <= elements <= access.tensor.size and times >= len(wanted)
        assert not single_valued or len({out for out, _ in wanted}) == len(wanted)
    for cache in caches:
        cache.cache_clear()
