"""Spatial and temporal reuse, live ranges and reachability."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, topi

from souffle.analysis import LiveRange, analyze
from souffle.program import ExternTE, Origin, Tensor, TEProgram
from tests.analysis.analysis_cases import program_of
from tests.testlib import calls_made


def placeholder(*shape: int) -> te.Tensor:
    return te.placeholder(shape, name="A")


def qkv():
    x = placeholder(16, 32)
    return program_of(*(topi.matmul(x, placeholder(32, 32)) for _ in range(3)))


def softmax():
    return program_of(topi.nn.softmax(placeholder(4, 8)))


def test_qkv_share_their_input_spatially():
    program = qkv()
    analysis = analyze(program)
    (reuse,) = analysis.reuse.values()
    assert reuse.tensor.shape == (16, 32)
    assert reuse.spatial == (program.tes,) and reuse.temporal == ()
    assert reuse.spatial_bytes == 2 * 16 * 32 * 4 and reuse.temporal_bytes == 0
    assert all(analysis.independent(a, b) == (a is not b) for a in program.tes for b in program.tes)


def test_softmax_reuses_temporally():
    program = softmax()
    maxelem, exp, expsum, norm = program.tes
    analysis = analyze(program)
    of_input, of_exp = analysis.reuse[program.inputs[0]], analysis.reuse[exp.output]
    assert of_input.temporal == ((maxelem, exp),) and of_input.spatial == ()
    assert of_exp.temporal == ((expsum, norm),)
    assert of_exp.temporal_bytes == 4 * 8 * 4
    assert analysis.depends(norm, maxelem) and not analysis.depends(maxelem, norm)
    assert not analysis.depends(norm, norm)


def test_disjoint_parts_save_nothing():
    a = placeholder(6, 4)
    program = program_of(*topi.split(a, 2, 0))
    reuse = analyze(program).reuse[program.inputs[0]]
    assert len(reuse.spatial) == 1 and reuse.spatial_bytes == 0
    overlapping = program_of(topi.strided_slice(a, [0, 0], [4, 4]), topi.strided_slice(a, [2, 0], [6, 4]))
    assert analyze(overlapping).reuse[overlapping.inputs[0]].spatial_bytes == 2 * 4 * 4


def test_mixed_reuse():
    """Two independent readers, one of which a third one needs."""
    a = placeholder(8)
    left, right = topi.exp(a), topi.tanh(a)
    program = program_of(topi.add(left, a), right)
    reuse = analyze(program).reuse[program.inputs[0]]
    assert len(reuse.temporal) == 1 and reuse.temporal[0][1].name.startswith("T_add")
    assert len(reuse.spatial) == 1 and len(reuse.spatial[0]) == 2


def test_live_ranges():
    program = softmax()
    ranges = analyze(program).live_ranges
    maxelem, exp, expsum, norm = (te_.output for te_ in program.tes)
    assert ranges[program.inputs[0]] == LiveRange(-1, 1)
    assert ranges[maxelem] == LiveRange(0, 1)
    assert ranges[exp] == LiveRange(1, 3)
    assert ranges[expsum] == LiveRange(2, 3)
    assert ranges[norm] == LiveRange(3, 4)


def test_an_operator_without_expression_relies_on_everything():
    program = softmax()
    value = Tensor("sorted", (4, 8), "float32")
    extern = ExternTE("sort", None, (program.outputs[0],), (value,), Origin(("n",), ("TopK",), "g"))
    longer = TEProgram(program.inputs, (value,), (*program.tes, extern), {}, program.input_names, ("y",))
    analysis = analyze(longer)
    access = analysis.access(extern, 0)
    assert not access.exact and not access.single_valued and access.covers
    assert analysis.arithmetic(extern).expensive and not analysis.is_compute_intensive(extern)
    assert "one-relies-on-many" in str(analysis)
    assert analysis.depends(extern, program.tes[0])


def test_identical_layers_cost_little():
    def work(sizes: Sequence[int]) -> int:
        program = program_of(*(topi.nn.softmax(topi.nn.relu(placeholder(size, 64))) for size in sizes))
        texts: list[str] = []
        calls = calls_made(lambda: texts.append(str(analyze(program))), within="index/isl.py")
        assert texts[0].count("one-relies-on-many") == 1 + 2 * len(sizes)
        return calls

    work([64])
    assert work([64] * 20) == 0 < work(range(65, 85))
