"""More families against enumeration: iteration maps, unions, footprints, compositions, and what is not exact."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi

from souffle.analysis import Arithmetic, Relies, access, analyze, reuse
from souffle.analysis import intensity as intensity_module
from souffle.analysis.access import Access
from souffle.index import isl
from souffle.program import TE, TEProgram
from souffle.transform import vertical
from tests.analysis import analysis_cases
from tests.analysis.analysis_cases import interpreted, program_of, reads_of, te_of
from tests.analysis.test_access_maps import FAMILIES, check_exact, placeholder, shapes

pytestmark = pytest.mark.sampled(6)

SMALL = st.integers(1, 4)
SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def convolution(draw):
    """Every parameter of a convolution at once: uneven padding, strides, dilations, groups."""
    groups, channels, filters = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    dilation = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(4))
    data = placeholder(1, groups * channels, 4, 5)
    weight = placeholder(groups * filters, channels, *kernel)
    return topi.nn.group_conv2d_nchw(data, weight, stride, padding, dilation, groups)


def convolution_1d(draw):
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return topi.nn.conv1d_ncw(placeholder(1, 2, 7), placeholder(2, 2, 3), stride, padding, dilation)


def pooling_uneven(draw):
    kernel, stride = (draw(st.integers(1, 3)), draw(st.integers(1, 2))), (draw(SMALL), draw(st.integers(1, 2)))
    padding = tuple(draw(st.integers(0, min(1, extent - 1))) for extent in (*kernel, *kernel))
    kind, ceil_mode = draw(st.sampled_from(["max", "avg"])), draw(st.booleans())
    return topi.nn.pool2d(placeholder(1, 1, 5, 4), kernel, stride, (1, 1), padding, kind, ceil_mode)


def attention_scores(draw):
    """Heads taken out of a projection, transposed, and multiplied."""
    heads, width, tokens = draw(st.integers(1, 3)), draw(SMALL), draw(st.integers(1, 5))
    q, k = (placeholder(tokens, heads * width) for _ in range(2))
    r = te.reduce_axis((0, width), name="r")
    return te.compute(
        (heads, tokens, tokens), lambda h, i, j: te.sum(q[i, h * width + r] * k[j, h * width + r], axis=[r]), name="qk"
    )


def layer_norm(draw):
    rows, columns = draw(SMALL), draw(st.integers(1, 5))
    return topi.nn.layer_norm(placeholder(rows, columns), placeholder(columns), placeholder(columns), [1])


def log_softmax(draw):
    return topi.nn.log_softmax(placeholder(draw(SMALL), draw(SMALL)))


def flip(draw):
    return topi.flip(placeholder(draw(SMALL), draw(SMALL)), draw(st.integers(0, 1)))


def dilate(draw):
    return topi.nn.dilate(placeholder(3, 4), [draw(st.integers(1, 3)), draw(st.integers(1, 3))])


def one_hot(draw):
    on, off = tirx.const(1, "float32"), tirx.const(0, "float32")
    depth, axis = draw(SMALL), draw(st.integers(0, 1))
    return topi.one_hot(placeholder(draw(SMALL), dtype="int32"), on, off, depth, axis, "float32")


def stencil(draw):
    """Several reads of one input, which may overlap."""
    offsets = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=5))
    steps = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    a = placeholder(8, 8)

    def element(i, j):
        return sum((a[i * steps[0] + y, j * steps[1] + x] for y, x in offsets[1:]), a[i, j])

    return te.compute((3, 3), element, name="stencil")


def reduced_stencil(draw):
    """Several reads of one input at points of a reduction, one of them under a condition."""
    shift, width = draw(st.integers(0, 2)), draw(st.integers(1, 4))
    a = placeholder(5, 8)
    k = te.reduce_axis((draw(st.integers(0, 1)), width), name="k")

    def element(i):
        return te.sum(a[i, k] * tirx.if_then_else(k < 2, a[i + shift % 2, k + shift], a[i, 7 - k]), axis=[k])

    return te.compute((4,), element, name="reduced")


def random_indices(draw):
    """Indices of random shape: sums, multiples, quotients, remainders, choices."""
    extents = tuple(draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3))))
    a = placeholder(*(draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 2)))))
    reduced = draw(st.booleans())
    r = te.reduce_axis((0, draw(st.integers(1, 3))), name="r")

    def index(variables, depth):
        kind = draw(st.sampled_from(["axis", "number", "sum", "scaled", "quotient", "remainder", "choice", "least"]))
        if depth == 0 or kind == "axis":
            return draw(st.sampled_from(variables))
        if kind == "number":
            return tirx.const(draw(st.integers(-3, 5)), "int32")
        one = index(variables, depth - 1)
        if kind == "sum":
            return one + index(variables, depth - 1)
        if kind == "scaled":
            return one * draw(st.integers(-2, 3))
        if kind == "quotient":
            return tirx.floordiv(one, draw(st.integers(1, 3)))
        if kind == "remainder":
            return tirx.floormod(one, draw(st.integers(1, 4)))
        other = index(variables, depth - 1)
        if kind == "least":
            return tirx.min(one, other)
        return tirx.Select(one <= draw(st.integers(-1, 3)), one, other)

    def element(*axes):
        variables = [axis.var if isinstance(axis, tirx.IterVar) else axis for axis in axes]
        variables += [r.var] if reduced else []
        reads = [
            a(*(tirx.floormod(index(variables, 2), int(extent)) for extent in a.shape))
            for _ in range(draw(st.integers(1, 2)))
        ]
        value = sum(reads[1:], reads[0])
        if draw(st.booleans()):
            value = tirx.if_then_else(index(variables, 1) > draw(st.integers(-1, 2)), value, tirx.const(0.0, "float32"))
        return te.sum(value, axis=[r]) if reduced else value

    return te.compute(extents, element, name="random")


MORE_FAMILIES = [
    convolution,
    convolution_1d,
    pooling_uneven,
    attention_scores,
    layer_norm,
    log_softmax,
    flip,
    dilate,
    one_hot,
    stencil,
    reduced_stencil,
    random_indices,
]


@pytest.mark.parametrize("family", MORE_FAMILIES, ids=lambda f: f.__name__)
def test_maps_equal_enumerated_reads(family):
    @SETTINGS
    @given(st.data())
    def run(data):
        for te_ in program_of(family(data.draw)).tes:
            check_exact(te_)

    run()


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES], ids=lambda f: f.__name__)
def test_iteration_maps_and_footprints_equal_enumerated_reads(family):
    """With the reduction axes as dimensions: which point of the iteration space reads what."""

    @settings(SETTINGS, max_examples=8)
    @given(st.data())
    def run(data):
        for te_ in program_of(family(data.draw)).tes:
            found = interpreted(te_)
            for position in range(len(te_.inputs)):
                known = Access(te_, position)
                assert isl.pairs(known.iteration_map) == found.point_reads[position], str(known)
                assert set(isl.points(known.footprint)) == {element for _, element in found.reads[position]}

    run()


def test_the_enumeration_shares_nothing_with_the_analysis():
    tree = ast.parse(Path(analysis_cases.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not any(name.startswith("souffle.analysis") or name == "islpy" for name in imported)


def test_reads_of_one_input_are_one_union():
    a = placeholder(9)
    te_ = te_of(te.compute((3,), lambda i: a[2 * i] + a[i + 3] + a[2 * i], name="union"))
    known = Access(te_, 0)
    assert isl.pairs(known.map) == {((i,), (e,)) for i in range(3) for e in (2 * i, i + 3)}
    assert known.positions == 2 and str(known).splitlines() == [
        "union_0_o0[i] → x0[2 * i]",
        "union_0_o0[i] → x0[i + 3]",
    ]
    assert known.elements == len({0, 2, 4, 3, 5}) and known.times == 6
    assert not known.single_valued and known.matrix_form is None


# Chains of TEs that only move data: the map of the composed TE is the composition of their maps (paper §6.2, eq. 2).


def _moved(draw, tensor: te.Tensor) -> te.Tensor:
    shape = [int(extent) for extent in tensor.shape]
    axis = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(["reshape", "transpose", "slice", "flip", "roll", "split"]))
    if kind == "reshape":
        size = math.prod(shape)
        first = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        return topi.reshape(tensor, (first, size // first))
    if kind == "split":
        factor = draw(st.sampled_from([d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]))
        return topi.reshape(tensor, (*shape[:axis], factor, shape[axis] // factor, *shape[axis + 1 :]))
    if kind == "transpose":
        return topi.transpose(tensor, draw(st.permutations(range(len(shape)))))
    if kind == "slice":
        begin, step = draw(st.integers(0, (shape[axis] - 1) // 2)), draw(st.integers(1, 2))
        begins, steps = [0] * len(shape), [1] * len(shape)
        begins[axis], steps[axis] = begin, step
        return topi.strided_slice(tensor, begins, shape, steps)
    if kind == "flip":
        return topi.flip(tensor, axis)
    shift = draw(st.integers(0, shape[axis] - 1))

    def rolled(*index):
        return tensor(*index[:axis], (index[axis] + shift) % shape[axis], *index[axis + 1 :])

    return te.compute(shape, rolled, name="roll")


@SETTINGS
@given(st.data())
def test_composed_tes_have_the_composition_of_the_maps(data):
    result = placeholder(4, 6)
    for _ in range(data.draw(st.integers(2, 5))):
        result = _moved(data.draw, result)
    program = program_of(result)
    analysis = analyze(program)
    composed = analysis.access(program.tes[-1], 0).map
    for te_ in reversed(program.tes[:-1]):
        composed = composed.apply_range(analysis.access(te_, 0).map)
    smaller, _ = vertical(program)
    assert len(smaller.tes) == 1 and analysis.relies(program.tes[0]) is Relies.ONE
    found = Access(smaller.tes[0], 0)
    assert found.exact and isl.pairs(found.map) == isl.pairs(composed) == reads_of(smaller.tes[0])[0]


@SETTINGS
@given(window=st.integers(1, 3), rows=st.integers(1, 2), columns=st.integers(1, 3), data=st.data())
def test_swins_shifted_windows(window, rows, columns, data):
    """Cyclic shift, reshape, transpose, reshape, as the model has them, in one TE."""
    height, width = rows * window, columns * window
    shift = data.draw(st.integers(0, window - 1))
    a = placeholder(height, width, 2)
    shifted = te.compute((height, width, 2), lambda y, x, c: a[(y + shift) % height, (x + shift) % width, c], name="s")
    split = topi.reshape(shifted, (rows, window, columns, window, 2))
    windows = topi.reshape(topi.transpose(split, (0, 2, 1, 3, 4)), (rows * columns, window * window, 2))
    smaller, _ = vertical(program_of(windows))
    (te_,) = smaller.tes
    check_exact(te_)
    assert Access(te_, 0).map.is_bijective() and isl.pairs(Access(te_, 0).map) == {
        ((block, place, c), ((block // columns * window + place // window + shift) % height,
                             (block % columns * window + place % window + shift) % width, c))
        for block in range(rows * columns) for place in range(window * window) for c in range(2)
    }  # fmt: skip


# What is not known exactly says so, and holds at least what is read.


def _take(draw):
    rows, width, wanted = draw(st.integers(2, 5)), draw(SMALL), draw(SMALL)
    return topi.take(placeholder(rows, width), placeholder(wanted, dtype="int32"), draw(st.integers(0, 1)), mode="clip")


def _embedding(draw):
    table, ids = placeholder(draw(st.integers(2, 5)), draw(SMALL)), placeholder(draw(SMALL), draw(SMALL), dtype="int64")
    return te.compute((*ids.shape, table.shape[1]), lambda b, t, c: table[ids[b, t], c], name="embedding")


def _gather_nd(draw):
    return topi.gather_nd(placeholder(2, 3, draw(SMALL)), placeholder(2, draw(SMALL), dtype="int32"))


def _gathered_sum(draw):
    table, ids = placeholder(3, draw(SMALL)), placeholder(2, draw(SMALL), dtype="int32")
    k = te.reduce_axis((0, ids.shape[1]), name="k")
    return te.compute((2, table.shape[1]), lambda i, c: te.sum(table[ids[i, k], c], axis=[k]), name="bag")


def _where(draw):
    shape = shapes(draw, 1, 3)
    return topi.where(placeholder(*shape, dtype="bool"), placeholder(*shape), placeholder(*shape))


def _product_of_axes(draw):
    a = placeholder(16)
    return te.compute((draw(SMALL), draw(SMALL)), lambda i, j: a[i * j], name="product")


UNKNOWN_FAMILIES = {
    _take: "an index depends on data",
    _embedding: "an index depends on data",
    _gather_nd: "an index depends on data",
    _gathered_sum: "an index depends on data",
    _where: "a condition depends on data or is not quasi-affine",
    _product_of_axes: "an index is not quasi-affine",
}


@pytest.mark.parametrize("family", UNKNOWN_FAMILIES, ids=lambda f: f.__name__.strip("_"))
def test_what_is_over_approximated_says_so_and_holds_what_is_read(family):
    reasons: set[str] = set()

    @SETTINGS
    @given(st.data())
    def run(data):
        te_ = te_of(family(data.draw))
        for seed in range(2):
            found = interpreted(te_, seed)
            for position in range(len(te_.inputs)):
                known = Access(te_, position)
                wanted = found.reads[position]
                if known.exact:
                    assert isl.pairs(known.map) == wanted
                    continue
                reasons.update(known.inexact_because)
                assert wanted <= isl.pairs(known.map)
                assert found.point_reads[position] <= isl.pairs(known.iteration_map)
                assert len({element for _, element in wanted}) <= known.elements <= known.tensor.size
                outputs = {out for out, _ in wanted}
                assert not known.single_valued or len(outputs) == len(wanted)
                assert known.matrix_form is None

    run()
    assert reasons == {UNKNOWN_FAMILIES[family]}


# An exhausted budget is a dependence on everything, with the reason.


@pytest.fixture
def tiny_budget(monkeypatch):
    """isl stops at its first operations, for every query of the analysis."""
    caches = [value for module in (access, intensity_module, reuse) for value in vars(module).values()]
    caches = [value for value in caches if hasattr(value, "cache_clear")]
    assert caches
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(isl, "BUDGET", 1)
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


def _everything(te_: TE, position: int) -> set:
    """Every output element with every element of the input."""
    outputs = [tuple(index) for index in _indices(te_.outputs[0].shape)]
    return {(out, element) for out in outputs for element in _indices(te_.inputs[position].shape)}


def _indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for extent in shape:
        found = [(*index, i) for index in found for i in range(extent)]
    return found


@pytest.mark.parametrize(
    "build",
    [
        lambda: topi.reshape(placeholder(6, 4), (8, 3)),
        lambda: topi.nn.relu(placeholder(3, 4)),
        lambda: topi.matmul(placeholder(3, 4), placeholder(4, 2)),
        lambda: topi.nn.conv2d_nchw(placeholder(1, 1, 4, 4), placeholder(1, 1, 3, 3), 1, 1, 1),
        lambda: topi.concatenate((placeholder(2, 3), placeholder(1, 3)), 0),
    ],
    ids=["reshape", "relu", "matmul", "convolution", "concatenation"],
)
def test_an_exhausted_budget_is_a_dependence_on_everything(build, tiny_budget):
    program: TEProgram = program_of(build())
    known = {(te_, i): Access(te_, i) for te_ in program.tes for i in range(len(te_.inputs))}
    reasons = {key: (a.exact, a.inexact_because, a.relation, a.matrix_form) for key, a in known.items()}
    for (te_, position), (exact, because, relation, form) in reasons.items():
        assert not exact and because == ("isl ran out of its operation budget",)
        # Enumerated after the budget: the relation was already built.
        isl.BUDGET, kept = 4_000_000, isl.BUDGET
        assert isl.pairs(relation.elements) == _everything(te_, position)
        isl.BUDGET = kept
        assert form is None and known[te_, position].elements >= len(
            {element for _, element in reads_of(te_)[position]}
        )
        assert Arithmetic(te_).ratio >= 0


def test_a_stencil_without_budget_is_one_relies_on_many(tiny_budget):
    """Nothing is composed on a guess: what isl could not decide counts as many."""
    a = placeholder(8)
    halves = te.compute((8,), lambda i: tirx.if_then_else(i < 4, a[i + 4], a[i - 4]), name="halves")
    te_ = te_of(halves)
    assert analyze(program_of(halves)).relies(te_) is Relies.MANY
