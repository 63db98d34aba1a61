"""Contractions whose blocks have several slices of a sum: who adds up what, and equal bits in any order of threads."""

from __future__ import annotations

import re
from math import gcd, prod

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from souffle.codegen.device_functions import with_device_functions
from souffle.decision import Refused
from souffle.emulator import compile_text
from souffle.schedule.gpu.emit.thread_vectors import ThreadVectors
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.rules.contraction import CONTRACTION
from souffle.schedule.lower import cuda_target
from souffle.tvm_compat import Analyzer, primfunc_from_tensors, structural_digest

SIZES = ("batch", "rows", "columns", "inner")
KNOBS = (
    "threads_along_rows", "threads_along_columns", "rows_each", "columns_each", "columns_together", "step", "stages",
    "slices",
)  # fmt: skip
TILINGS = {
    "whole_vectors": (1, 32, 32, 64, 4, 4, 8, 8, 4, 8, 1, 2),
    "pieces_of_vectors": (1, 32, 32, 128, 4, 4, 8, 8, 4, 8, 2, 4),
    "single_rows": (1, 29, 31, 200, 4, 4, 8, 8, 4, 8, 1, 8),
    "ragged": (1, 13, 33, 67, 4, 4, 4, 8, 4, 8, 1, 4),
    "few_rows": (1, 5, 32, 200, 4, 8, 2, 8, 2, 8, 2, 2),
    "a_batch": (3, 17, 9, 40, 4, 4, 4, 2, 2, 8, 1, 4),
    "two_of_a_batch_in_a_tile": (5, 8, 8, 33, 4, 2, 2, 4, 4, 8, 2, 2),
    "one_row_a_slice": (1, 9, 8, 96, 8, 4, 2, 2, 2, 8, 2, 2),
    "a_sum_shorter_than_a_tile": (1, 16, 16, 9, 4, 4, 4, 4, 4, 8, 1, 2),
    "threes": (1, 29, 50, 67, 4, 4, 6, 3, 1, 8, 2, 2),
    "three_rows_a_slice": (1, 32, 48, 40, 2, 4, 12, 4, 4, 8, 1, 4),
    "pairs_of_columns": (3, 17, 20, 40, 8, 4, 3, 6, 2, 8, 2, 1),
}
"""Sizes of the problem, then what is chosen."""

BATCH_THREADS = {"a_batch": 2, "two_of_a_batch_in_a_tile": 2}


def kernel(name: str, numbers: tuple[int, ...], of_batch: int = 1) -> GpuSchedule | Refused:
    (batch, rows, columns, inner), knobs = numbers[:4], dict(zip(KNOBS, numbers[4:], strict=True))
    a, b = te.placeholder((batch, rows, inner), name="a"), te.placeholder((batch, inner, columns), name="b")
    k = te.reduce_axis((0, inner), "k")
    product = te.compute((batch, rows, columns), lambda z, i, j: te.sum(a[z, i, k] * b[z, k, j], k), "p")
    c = te.compute(product.shape, lambda z, i, j: product[z, i, j] * 2.0, "c")
    threads = of_batch * prod(knobs[n] for n in ("threads_along_rows", "threads_along_columns", "slices"))
    request = GpuRequest("sm_90", threads=threads, sm_count=4)
    return CONTRACTION.sketch(StageForms(primfunc_from_tensors([a, b, c], name)), request).with_values(knobs)


def plain_product(largest: bool = False) -> StageForms:
    a, b = te.placeholder((32, 64), name="a"), te.placeholder((64, 32), name="b")
    k = te.reduce_axis((0, 64), "k")
    c = te.compute(
        (32, 32), lambda i, j: te.max(a[i, k] + b[k, j], k) if largest else te.sum(a[i, k] * b[k, j], k), "c"
    )
    return StageForms(primfunc_from_tensors([a, b, c], "c"))


def cuda_text(schedules: dict[str, GpuSchedule]) -> str:
    tvm.register_global_func("tvm_callback_cuda_compile", lambda code, target=None: b"x", override=True)
    module = tvm.IRModule({name: schedule.func for name, schedule in schedules.items()})
    return with_device_functions(tvm.compile(module, target=cuda_target("sm_90")).mod.imports[0].inspect_source())


def test_bits() -> None:
    """Whole numbers, of which every order gives the same bits, so that any part that is taken twice or never shows."""
    schedules = {name: kernel(name, numbers, BATCH_THREADS.get(name, 1)) for name, numbers in TILINGS.items()}
    assert all(isinstance(schedule, GpuSchedule) for schedule in schedules.values()), schedules
    text = cuda_text(schedules)
    plain, checked = compile_text(text), compile_text(text, checked=True)
    for name, (batch, rows, columns, inner, *_) in TILINGS.items():
        chance = np.random.default_rng(7)
        a = chance.integers(-9, 9, (batch, rows, inner)).astype("float32")
        b = chance.integers(-9, 9, (batch, inner, columns)).astype("float32")
        signature = re.search(rf"\b{name}_kernel\(([^)]*)\) {{", text)
        parameters = [re.sub(r"_ptr$", "", p.split()[-1]) for p in signature.group(1).split(",")]
        for module, order in ((plain, "shuffled"), (checked, "fixed")):
            by_name = {"a": a, "b": b, "c": np.full((batch, rows, columns), 7, "float32")}
            module.launch(
                f"{name}_kernel",
                grid=(schedules[name].tiles, 1, 1),
                block=(schedules[name].threads, 1, 1),
                args=[by_name[parameter] for parameter in parameters],
                order=order,
            )
            np.testing.assert_array_equal(by_name["c"], 2 * (a @ b), err_msg=f"{name}, {order}")


def test_sums_lie_where_the_tiles_were() -> None:
    """A block with two slices asks for no more than the larger of both."""
    text = cuda_text({"c": kernel("c", TILINGS["whole_vectors"])})
    sizes = re.findall(r"__shared__ [\w() ]*float \w+\[(\d+)\]", text)
    assert list(map(int, sizes)) == [max(2 * 32 * 32, 16 * (32 + 4) + 16 * 32)]


def test_what_is_no_sum_has_one_slice() -> None:
    sketch = CONTRACTION.sketch(plain_product(largest=True), GpuRequest("sm_90"))
    assert next(knob.values for knob in sketch.knobs if knob.name == "slices") == (1,)


def test_rows_and_columns_that_cannot_be_shared_are_refused() -> None:
    refused = kernel("c", (1, 32, 32, 512, 4, 4, 2, 4, 4, 8, 1, 8))
    assert isinstance(refused, Refused) and "8 threads would share the 2 rows of one" in refused.reason
    uneven = kernel("c", (1, 32, 32, 512, 4, 4, 6, 4, 4, 8, 1, 4))
    assert isinstance(uneven, Refused) and "4 threads would share the 6 rows of one" in uneven.reason
    apart = kernel("c", (1, 32, 48, 64, 8, 4, 4, 6, 4, 8, 1, 1))
    assert isinstance(apart, Refused) and "6 columns of a thread are no vectors of 4" in apart.reason


def test_records_of_before_have_one_slice() -> None:
    """A search's record without the knob is what it was."""
    sketch = CONTRACTION.sketch(plain_product(), GpuRequest("sm_90", threads=64))
    before = dict(zip(KNOBS[:-1], (8, 8, 4, 4, 4, 8, 1), strict=True))
    one, other = sketch.with_values(before), sketch.with_values({**before, "slices": 1})
    assert structural_digest(one.func) == structural_digest(other.func)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_every_row_is_kept_by_one_thread(count: int, lanes: int, threads: int) -> None:
    """What the threads of all parts keep are the rows that each of them has, each once."""
    analyzer = Analyzer()

    def number(expression: object) -> int:
        return int(analyzer.simplify(tirx.const(0, "int32") + expression))

    def rows_of(vectors: ThreadVectors, thread: int) -> list[int]:
        return [
            number(vectors.position(tirx.const(n, "int32"), tirx.const(thread, "int32"))) for n in range(vectors.count)
        ]

    for parts in (p for p in (1, 2, 4, 8) if count % p == 0):
        whole = ThreadVectors(count, gcd(lanes, count // parts), threads)
        kept = whole.shared_by(parts)
        for thread in range(threads):
            own = [row for part in range(parts) for row in rows_of(kept, part * threads + thread)]
            assert sorted(own) == sorted(rows_of(whole, thread)), "a thread keeps rows of which it has no totals"
        every = [row for thread in range(kept.threads) for row in rows_of(kept, thread)]
        assert sorted(every) == list(range(count * threads))
