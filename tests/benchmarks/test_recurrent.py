"""What the tables of recurrent networks say of constants that stay, and of those that do not."""

from __future__ import annotations

import pytest

import souffle
from benchmarks.recurrent import kept_bytes, recurrent
from benchmarks.results_page.views.recurrent import in_short
from souffle.kernel.calls import LoopCall
from souffle.pipeline import compile_cuda


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        ("the constants of a tile take 256 registers of each thread, of 255 at most", "256 registers of 255"),
        (
            "the constants of a tile take 256 registers of each thread, of 255 at most, in the best of 33 ways; "
            "of its 512 tiles 264 are on the device at once, with 128 threads of 168 registers",
            "256 registers of 255; 512 tiles, 264 at once",
        ),
        (
            "4096 bytes of constants a block stay in 4 registers of each thread for 6 steps, 8 tiles of 256 threads; "
            "the network is predicted to take 30.7 µs with and 30.5 µs without",
            "30.7 µs, 30.5 without",
        ),
        ("something that nobody has thought of", "something that nobody has thought of"),
    ],
)
def test_reasons_in_short(reason: str, short: str) -> None:
    assert in_short(reason) == short


def test_what_stays_is_counted_of_what_each_step_reads() -> None:
    """A layer of 64 cells without gates: its matrix is 16 KiB, and each step reads 256 bytes of bias, too."""
    program = souffle.import_onnx(recurrent("RNN", 64, 64, steps=8))
    options = {"arch": "sm_90", "cubin": False, "verify": "off"}
    with_weights = compile_cuda(program, level="V4", **options)
    kept, read = kept_bytes(with_weights)
    assert kept == read >= 64 * 64 * 4
    (told,) = [d.reason for d in with_weights.plan.decisions if d.stage == "weights" and "each of its" in d.reason]
    calls = [call for merged in with_weights.merged for call in merged.shape.calls]
    (steps,) = [call.steps for call in calls if isinstance(call, LoopCall)]
    assert told == f"of {read} bytes of constants that each of its {steps} steps reads {kept} stay"
    assert kept_bytes(compile_cuda(program, level="V4", disable=["weights"], **options)) == (0, read)
    assert kept_bytes(compile_cuda(program, level="V2", **options)) is None
