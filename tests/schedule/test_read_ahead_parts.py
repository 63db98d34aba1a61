"""Parts of operands that a contraction's threads read ahead of their products: where they stand, and equal bits."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from souffle.codegen.device_functions import with_device_functions
from souffle.emulator import compile_text
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule
from souffle.schedule.gpu.rules.contraction import CONTRACTION
from souffle.schedule.lower import cuda_target
from souffle.tvm_compat import primfunc_from_tensors

TILINGS = {
    "whole_step": {"inner": 64, "each": (4, 4), "step": 16, "stages": 1},
    "copied": {"inner": 64, "each": (4, 4), "step": 16, "stages": 3},
    "ragged_step": {"inner": 43, "each": (2, 4), "step": 8, "stages": 2},
    "two_groups": {"inner": 64, "each": (8, 8), "step": 16, "stages": 1},
    "groups_of_an_odd_step": {"inner": 9, "each": (8, 8), "step": 9, "stages": 1},
    "odd_step": {"inner": 9, "each": (4, 4), "step": 9, "stages": 1},
    "one_place_at_a_time": {"inner": 11, "each": (8, 8), "step": 11, "stages": 1},
}
"""What is read ahead: a whole step, or each group of its places that has 512 products or fewer."""


def kernel(name: str, inner: int, each: tuple[int, int], step: int, stages: int, largest: bool) -> GpuSchedule:
    """A product, or the largest of sums, of 8 x 8 threads."""
    a, b = te.placeholder((8 * each[0] + 3, inner), name="a"), te.placeholder((inner, 8 * each[1] + 4), name="b")
    k = te.reduce_axis((0, inner), name="k")

    def result(i: tirx.Var, j: tirx.Var) -> tvm.ir.Expr:
        return te.max(a[i, k] + b[k, j], axis=k) if largest else te.sum(a[i, k] * b[k, j], axis=k)

    func = primfunc_from_tensors([a, b, te.compute((a.shape[0], b.shape[1]), result, name="c")], name)
    sketch = CONTRACTION.sketch(StageForms(func), GpuRequest("sm_90", threads=64, sm_count=4))
    schedule = sketch.with_values(
        {
            "threads_along_rows": 8,
            "threads_along_columns": 8,
            "rows_each": each[0],
            "columns_each": each[1],
            "step": step,
            "columns_together": 4,
            "stages": stages,
        }
    )
    assert isinstance(schedule, GpuSchedule), schedule
    return schedule


def cuda_text(schedules: dict[str, GpuSchedule]) -> str:
    tvm.register_global_func("tvm_callback_cuda_compile", lambda code, target=None: b"x", override=True)
    module = tvm.IRModule({name: schedule.func for name, schedule in schedules.items()})
    return with_device_functions(tvm.compile(module, target=cuda_target("sm_90")).mod.imports[0].inspect_source())


@pytest.mark.parametrize("stages", [1, 3])
def test_the_next_parts_are_read_before_products_of_these(stages: int) -> None:
    text = cuda_text({"c": kernel("c", 64, (4, 4), 16, stages, False)})
    assert re.search(r"float left_part_ptr\[8\];", text) and re.search(r"float right_part_ptr\[8\];", text)
    before, body = re.split(r"for \(int k = 0; k < 16; \+\+k\) \{", text.split("c_kernel(")[-1])
    for side in ("left", "right"):
        first = before.rindex(f"*(float4*)({side}_part_ptr + 0) = ")
        assert "totals_ptr" not in before[first:], "products before the first parts"
        following = body.index(f"*(float4*)({side}_part_ptr + (((k + 1) & 1) * 4)) = ")
        assert following < body.index("totals_ptr["), "products before the next parts are read"
        assert f"{side}_part_ptr[(((k & 1) * 4) + " in body
    assert "if (k < 15)" in body, "beyond the last place there is nothing to read"


@pytest.mark.parametrize("largest", [False, True], ids=["sum", "largest"])
def test_bits(largest: bool) -> None:
    """Whole numbers, of which every order gives the same bits, so that any part that is taken twice or never shows."""
    schedules = {name: kernel(name, **numbers, largest=largest) for name, numbers in TILINGS.items()}
    text = cuda_text(schedules)
    module = compile_text(text)
    for name, numbers in TILINGS.items():
        chance = np.random.default_rng(5)
        rows, columns = 8 * numbers["each"][0] + 3, 8 * numbers["each"][1] + 4
        a = chance.integers(-9, 9, (rows, numbers["inner"])).astype("float32")
        b = chance.integers(-9, 9, (numbers["inner"], columns)).astype("float32")
        expected = (a[:, :, None] + b).max(axis=1) if largest else a @ b
        by_name = {"a": a, "b": b, "c": np.full((rows, columns), 7, "float32")}
        signature = re.search(rf"\b{name}_kernel\(([^)]*)\) {{", text)
        parameters = [re.sub(r"_ptr$", "", p.split()[-1]) for p in signature.group(1).split(",")]
        schedule = schedules[name]
        module.launch(
            f"{name}_kernel",
            grid=(schedule.tiles, 1, 1),
            block=(schedule.threads, 1, 1),
            args=[by_name[parameter] for parameter in parameters],
            order="shuffled",
        )
        np.testing.assert_array_equal(by_name["c"], expected, err_msg=name)
