"""The cells on one wavefront of a stack of LSTM layers are one product, one cell state and one hidden state."""

from __future__ import annotations

from functools import cache

import pytest

import souffle
from souffle.models.lstm import LstmConfig, build_lstm
from souffle.program import TE, TEProgram
from souffle.transform import horizontal
from tests.testlib import assert_same_function, calls_made
from tests.thorough import some


@cache
def imported(layers: int, steps: int) -> TEProgram:
    return souffle.import_onnx(build_lstm(LstmConfig(layers, steps, 16), 0))


@cache
def merged(layers: int, steps: int) -> TEProgram:
    return horizontal(imported(layers, steps))[0]


def wavefront(program: TEProgram, step: int) -> list[TE]:
    """The TEs of the wavefront on which the first layer is at `step`."""
    return [te_ for te_ in program.tes if f"lstm_LSTM_forward_t{step}_" in te_.name]


@pytest.mark.parametrize(("layers", "steps"), some([(3, 8)], [(10, 15)]))
def test_the_products_of_a_wavefront_are_one_without_selection(layers: int, steps: int) -> None:
    program = merged(layers, steps)
    for step in range(layers + 2, steps):
        (product,) = [te_ for te_ in wavefront(program, step) if te_.is_reduction]
        assert product.output.shape == (2 * layers - 1, 1, 64)
        state, packed = product.inputs
        assert state.name.endswith(f"Mul_h_x{layers}") and packed in program.constants
        assert "if_then_else" not in str(product.body) and "// 2" in str(program_line(program, product))


def program_line(program: TEProgram, te_: TE) -> str:
    return next(line for line in str(program).splitlines() if line.startswith(f"{te_.name}["))


@pytest.mark.parametrize(("layers", "steps"), some([(3, 8)], [(10, 15)]))
def test_cells_of_a_wavefront_are_one_cell(layers: int, steps: int) -> None:
    program = merged(layers, steps)
    for step in range(layers + 1, steps):
        tes = wavefront(program, step)
        kinds = sorted(te_.name.removeprefix(f"lstm_LSTM_forward_t{step}_") for te_ in tes)
        expected = [f"{kind}_x{layers}" for kind in ("Add_gates", "Add_bias", "c_Tanh", "Mul_ic", "Mul_fc", "Add_c")]
        expected += [f"h_Tanh_x{layers}", f"Mul_h_x{layers}", f"MatMul_h_x{2 * layers - 1}"]
        expected += [f"i_Slice_x{4 * layers}", f"i_Sigmoid_x{3 * layers}"]
        assert kinds == sorted(expected)
        selecting = [te_.name for te_ in tes if "if_then_else" in str(te_.body)]
        # The first layer's share of its input is computed ahead, for all steps at once.
        first = step == layers + 1
        assert all("Add_gates" in name or (first and ("Mul_fc" in name or "MatMul" in name)) for name in selecting)


def test_equal_wavefronts_share_their_expressions() -> None:
    program = merged(3, 8)
    for kind in ("MatMul_h_x5", "Add_bias_x3", "i_Sigmoid_x9", "Add_c_x3", "Mul_h_x3"):
        same = {wave.op for wave in program.tes if wave.name in {f"lstm_LSTM_forward_t{t}_{kind}" for t in (5, 6, 7)}}
        assert len(same) == 1


def test_weights_are_kept_once() -> None:
    program = merged(3, 8)
    largest = [t for t in program.constants if len(t.shape) == 3]
    assert [t.shape for t in largest] == [(5, 16, 64)]


def test_the_function_is_the_same() -> None:
    assert_same_function(imported(3, 8), merged(3, 8))


@pytest.mark.thorough("of the importer, tests/frontend/test_models.py has it")
def test_work_grows_with_the_steps_and_not_faster() -> None:
    def work(steps: int) -> int:
        program = imported(4, steps)
        return calls_made(lambda: horizontal(program))

    work(8)  # what is loaded and remembered once
    assert work(64) < 5 * work(16)
