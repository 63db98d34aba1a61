"""One-relies-on-one or -many, matrix forms, arithmetic intensity."""

from __future__ import annotations

import pytest
from tvm import te, tirx, topi

from souffle.analysis import Arithmetic, Relies, analyze, is_one_to_one
from souffle.analysis.access import Access
from tests.analysis.analysis_cases import program_of, te_of


def placeholder(*shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype=dtype, name="A")


ONE, MANY = Relies.ONE, Relies.MANY


def _stencil(a):
    return te.compute((7,), lambda i: a[i] + a[i + 1], name="stencil")


def _rotate(a):
    return te.compute((8,), lambda i: a[i] + tirx.if_then_else(i < 4, a[i + 4], a[i - 4]), name="rotate")


def _same_twice(a):
    return te.compute((8,), lambda i: a[i] * topi_erf(a[i]), name="gelu_like")


def topi_erf(x):
    return tirx.call_intrin("float32", "tirx.erf", x)


TABLE = [
    ("relu", lambda: topi.nn.relu(placeholder(3, 4)), ONE, True),
    ("used twice", lambda: _same_twice(placeholder(8)), ONE, True),
    ("broadcast", lambda: topi.add(placeholder(3, 4), placeholder(4)), ONE, True),
    ("reshape", lambda: topi.reshape(placeholder(6, 4), (8, 3)), ONE, True),
    ("transpose", lambda: topi.transpose(placeholder(6, 4), (1, 0)), ONE, True),
    ("slice", lambda: topi.strided_slice(placeholder(6, 4), [5, 0], [0, 4], [-2, 1]), ONE, True),
    ("concat", lambda: topi.concatenate((placeholder(2, 4), placeholder(3, 4)), 0), ONE, True),
    ("pad", lambda: topi.nn.pad(placeholder(3, 4), (1, 1), (1, 1)), ONE, True),
    ("gather", lambda: topi.gather(placeholder(4, 6), 1, placeholder(4, 3, dtype="int64")), ONE, True),
    ("stencil", lambda: _stencil(placeholder(8)), MANY, False),
    ("rotate half", lambda: _rotate(placeholder(8)), MANY, False),
    ("matmul", lambda: topi.matmul(placeholder(4, 5), placeholder(5, 6)), MANY, False),
    ("sum", lambda: topi.sum(placeholder(4, 5), axis=1), MANY, False),
    ("reduction of one", lambda: topi.sum(placeholder(4, 1), axis=1), ONE, False),
    ("max pool", lambda: topi.nn.pool2d(placeholder(1, 1, 4, 4), (2, 2), (2, 2), (1, 1), (0,) * 4, "max"), MANY, False),
    ("constant", lambda: te.compute((3,), lambda i: tirx.const(1.0, "float32"), name="ones"), ONE, True),
]


@pytest.mark.parametrize(("build", "relies", "one_to_one"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_relies(build, relies, one_to_one):
    te_ = te_of(build())
    program = program_of(build())
    assert analyze(program).relies(program.tes[-1]) is relies
    assert is_one_to_one(te_) is one_to_one


def test_relies_of_each_input():
    k = te.reduce_axis((0, 8), name="k")
    a, scale = placeholder(4, 8), placeholder(4)
    program = program_of(te.compute((4,), lambda i: te.sum(a[i, k] * scale[i], axis=[k]), name="scaled"))
    analysis, te_ = analyze(program), program.tes[0]
    by_rank = {len(access.tensor.shape): access for access in analysis.accesses(te_)}
    assert analysis.relies(te_, by_rank[2].position) is MANY
    assert analysis.relies(te_, by_rank[1].position) is ONE
    assert analysis.relies(te_) is MANY


def test_matrix_form():
    transposed = Access(te_of(topi.transpose(placeholder(6, 4), (1, 0))), 0)
    assert transposed.matrix_form.matrix == ((0, 1), (1, 0)) and transposed.matrix_form.constant == (0, 0)
    sliced = Access(te_of(topi.strided_slice(placeholder(6, 4), [5, 1], [0, 4], [-2, 1])), 0)
    assert str(sliced.matrix_form) == "[[-2, 0], [0, 1]] v + [5, 1]"
    assert Access(te_of(topi.nn.pad(placeholder(3), (2,), (1,))), 0).matrix_form.constant == (-2,)
    assert Access(te_of(topi.reshape(placeholder(6, 4), (8, 3))), 0).matrix_form is None
    assert Access(te_of(topi.matmul(placeholder(4, 5), placeholder(5, 6))), 0).matrix_form is None


def work(tensor: te.Tensor) -> Arithmetic:
    return Arithmetic(te_of(tensor))


def test_gemm_is_compute_intensive():
    gemm = work(topi.matmul(placeholder(64, 64), placeholder(64, 64)))
    assert gemm.operations == 2 * 64**3
    assert gemm.elements_read + gemm.elements_written == 3 * 64**2
    assert gemm.ratio == pytest.approx(2 * 64 / 3)
    assert gemm.compute_intensive and not gemm.expensive


def test_matrix_times_vector_is_memory_intensive():
    product = work(topi.matmul(placeholder(1, 64), placeholder(64, 64)))
    assert product.operations == 2 * 64**2 and not product.compute_intensive


def test_convolution():
    conv = work(topi.nn.conv2d_nchw(placeholder(1, 16, 8, 8), placeholder(16, 16, 3, 3), 1, 0, 1))
    assert conv.operations == 2 * 16 * 36 * 16 * 9
    assert conv.elements_read == 16 * 64 + 16 * 16 * 9
    assert conv.compute_intensive


def test_only_elements_accessed_count():
    """A stride of 4 leaves rows and columns unread."""
    conv = work(topi.nn.conv2d_nchw(placeholder(1, 1, 9, 9), placeholder(1, 1, 1, 1), 4, 0, 1))
    assert conv.elements_read == 9 + 1
    picked = work(topi.strided_slice(placeholder(8, 8), [0, 0], [8, 8], [2, 4]))
    assert picked.elements_read == 8 and picked.operations == 0


def test_a_sum_is_memory_intensive():
    total = work(topi.sum(placeholder(16, 64), axis=1))
    assert total.operations == 16 * 64 and total.ratio == pytest.approx(1024 / 1040)
    assert not total.compute_intensive


def test_expensive_operations():
    softmax = program_of(topi.nn.softmax(placeholder(4, 8)))
    by_name = {te_.name.split("_")[2]: Arithmetic(te_) for te_ in softmax.tes}
    assert [by_name[name].expensive for name in ("maxelem", "exp", "expsum", "norm")] == [False, True, False, True]
    assert by_name["exp"].operations == 2 * 32 and by_name["exp"].expensive_operations == 32
    assert not work(topi.nn.relu(placeholder(4))).expensive
    assert not work(topi.cast(placeholder(4), "float16")).expensive
    assert work(topi.power(placeholder(4), 3.0)).expensive


def test_a_repeated_subexpression_counts_once():
    a = placeholder(8)

    def element(i):
        x = tirx.exp(a[i])
        return x * x + tirx.exp(a[i])

    assert work(te.compute((8,), element, name="repeat")).operations == 8 * 3


def test_branches_count_where_they_are_taken():
    a, b = placeholder(4, 3), placeholder(2, 3)
    chosen = te.compute(
        (6, 3),
        lambda i, j: tirx.if_then_else(i < 4, tirx.exp(a[i, j]), b[i - 4, j] * 2.0 + 1.0),
        name="branches",
    )
    arithmetic = work(chosen)
    assert arithmetic.operations == 4 * 3 + 2 * 2 * 3
    assert arithmetic.expensive_operations == 12
    assert arithmetic.elements_read == 18


def test_index_arithmetic_is_not_counted():
    assert work(topi.reshape(placeholder(6, 4), (8, 3))).operations == 0
    assert work(topi.nn.pad(placeholder(6, 4), (1, 1), (1, 1))).operations == 0


def test_times_counts_repeated_reads():
    k = te.reduce_axis((0, 5), name="k")
    a = placeholder(5)
    guarded = te.compute((3,), lambda i: te.sum(tirx.if_then_else(i < 2, a[k], 0.0), axis=[k]), name="guarded")
    access = Access(te_of(guarded), 0)
    assert (access.times, access.elements, access.positions) == (10, 5, 1)


def test_choices_of_shared_values_do_not_multiply():
    """A row of 12 choices between two forms of one value has 4096 paths through it."""
    a, b = placeholder(64), placeholder(64)

    def by_index(i):
        value = a[i]
        for bit in range(12):
            value = tirx.if_then_else(i < bit, value, value + 1.0)
        return value

    def by_data(i):
        value = b[i]
        for _ in range(12):
            value = tirx.Select(value > 0.0, value * 2.0, value + 1.0)
        return value

    indexed, chosen = te_of(te.compute((64,), by_index, name="i")), te_of(te.compute((64,), by_data, name="d"))
    assert Access(indexed, 0).exact and is_one_to_one(indexed) and is_one_to_one(chosen)
    assert Arithmetic(indexed).operations == sum(64 - bit for bit in range(12))
    assert Access(chosen, 0).exact and Arithmetic(chosen).operations == 12 * 3 * 64


def test_a_long_chain_is_not_too_deep():
    a = placeholder(4)

    def element(i):
        value = a[i]
        for _ in range(3000):
            value = value + 1.0
        return value

    assert work(te.compute((4,), element, name="deep")).operations == 4 * 3000
