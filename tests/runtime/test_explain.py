"""What ``explain`` prints: subprograms with predicted times first, decisions wrapped and gathered."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from souffle.certificate import ACTIVE_LANES, Certificate, Section
from souffle.codegen.plan import Plan, PredictedKernel, PredictedStage, Resources
from souffle.decision import Decision
from souffle.runtime.explain import explain, explain_data
from souffle.runtime.plan_json import PlanFormatError, plan_from_json, plan_to_json
from tests.runtime.plans import cooperative_plan

US = 1e-6


def predicted_plan() -> Plan:
    """The hand-written plan with predicted times, and decisions of ten equal layers."""
    plan = cooperative_plan()
    fused, bump = plan.kernels
    stages = (
        PredictedStage("scale", 1, 4, 24, 0, 3.0 * US, "memory"),
        PredictedStage("total", 12, 7, 20, 128, 12.7 * US, "chain"),
    )
    fused = replace(fused, predicted=PredictedKernel(19.3 * US, 2.3 * US, 1.3 * US, 8, stages))
    one = (PredictedStage("bump", 1, 7, 24, 0, 1.0 * US, "chain"),)
    bump = replace(bump, predicted=PredictedKernel(3.3 * US, 2.3 * US, 0.0, 64, one))
    layers = tuple(
        Decision(
            "vertical", f"layer_{n}_add into layer_{n}_mul (Add /layer.{n}/add)", True, f"layer_{n}_mul alone reads it"
        )
        for n in range(10)
    )
    tiles = tuple(Decision("vertical", f"layer_{n}_sum", False, f"{n} tiles are too few") for n in (3, 4))
    long = Decision("partition", "cut before y (MatMul y)", True, "230 registers of t leave 1 resident block; " * 6)
    return replace(
        plan,
        kernels=(fused, bump),
        decisions=(*layers, *tiles, long, *plan.decisions),
        predicted_on="A100-SXM4-40GB",
    )


def test_text(golden) -> None:
    text = explain(predicted_plan())
    assert all(len(line) <= 120 for line in text.splitlines())
    golden("explain.txt", text + "\n")


def test_names_and_subjects_of_any_length_stay_within_the_width() -> None:
    plan = predicted_plan()
    fused, bump = plan.kernels
    long = "encoder_" * 30
    stages = tuple(replace(stage, name=long + stage.name) for stage in fused.predicted.stages)
    fused = replace(fused, name=long, predicted=replace(fused.predicted, stages=stages))
    text = explain(replace(plan, kernels=(fused, bump), decisions=(("schedule", long, True, long),)))
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "…" in text and "encoder_scale" in text and "encoder_total" in text


def test_only_decisions_whose_names_differ_in_numbers_are_gathered() -> None:
    text = explain(predicted_plan())
    assert "  + 10 x layer_0_add into layer_0_mul (Add /layer.0/add): layer_0_mul alone reads it" in text
    assert "layer_1_" not in text
    assert "  - layer_3_sum: 3 tiles are too few" in text and "  - layer_4_sum: 4 tiles are too few" in text
    assert "vertical: 10 done, 2 refused" in text


def test_where_kernels_end_comes_before_the_other_decisions() -> None:
    text = explain(predicted_plan())
    assert text.index("\nsubprograms") < text.index("\npartition: 2 done") < text.index("\nvertical: 10 done")


def test_the_total_is_that_of_all_launches() -> None:
    data = explain_data(predicted_plan())
    assert data["predicted_seconds"] == pytest.approx((19.3 + 2 * 3.3) * US)
    assert [kernel["share"] for kernel in data["kernels"]] == pytest.approx([19.3 / 25.9, 6.6 / 25.9])
    assert data["launches"] == [0, 1, 1]
    assert "predicted 25.9 µs on A100-SXM4-40GB, not measured: stages 17.7, grid syncs 1.3, launches 6.9" in explain(
        predicted_plan()
    )


def test_without_predictions_the_stages_are_named_and_the_reason_is_said() -> None:
    text = explain(cooperative_plan(arch="sm_75"))
    assert "no times are predicted: no description of a device for sm_75 was at hand" in text
    assert "    stages scale, total" in text and "µs" not in text
    data = explain_data(cooperative_plan())
    assert data["predicted_on"] is None and data["predicted_seconds"] is None
    assert data["kernels"][0]["predicted"] is None and data["kernels"][0]["share"] is None


def test_a_kernel_of_which_no_block_fits_has_no_time_and_there_is_no_total() -> None:
    plan = predicted_plan()
    fused, bump = plan.kernels
    text = explain(replace(plan, kernels=(replace(fused, predicted=None), bump)))
    assert "not measured" not in text and "bump x2: 6.6 µs\n" in text and "    stages scale, total" in text


def round_trip(plan: Plan, edit=lambda content: None) -> Plan:
    content = json.loads(json.dumps(plan_to_json(plan)))
    edit(content)
    texts, cubins = [m.text for m in plan.modules], [m.cubin for m in plan.modules]
    return plan_from_json(content, texts, cubins)


def test_predictions_are_kept_in_a_saved_plan() -> None:
    plan = predicted_plan()
    back = round_trip(plan)
    assert back.kernels == plan.kernels and back.predicted_on == plan.predicted_on
    assert explain(replace(back, constants=plan.constants)) == explain(plan)


def test_plans_saved_before_times_were_predicted_load() -> None:
    def older(content: dict) -> None:
        del content["predicted_on"]
        for kernel in content["kernels"]:
            del kernel["predicted"]

    plan = cooperative_plan()
    back = round_trip(plan, older)
    assert back.kernels == plan.kernels and back.predicted_on == ""


def test_a_stack_is_told_with_the_stages_that_have_one_alone() -> None:
    plan = predicted_plan()
    fused, bump = plan.kernels
    scale, total = fused.predicted.stages
    predicted = replace(fused.predicted, stages=(scale, replace(total, stack_bytes=128)))
    fused = replace(fused, predicted=predicted, resources=Resources(24, 0, 8, 8, 136, 4096))
    plan = replace(plan, kernels=(fused, bump))
    said = "16 bytes spilled, 136 bytes of stack (alone: total 128), 4096 bytes of machine code"
    assert said in " ".join(explain(plan).split())
    assert [kernel["stack_bytes"] for kernel in explain_data(plan)["kernels"]] == [136, None]
    assert [kernel["code_bytes"] for kernel in explain_data(plan)["kernels"]] == [4096, None]
    assert round_trip(plan).kernels == plan.kernels


def test_a_smaller_grid_is_told() -> None:
    plan = predicted_plan()
    fused, bump = plan.kernels
    plan = replace(plan, kernels=(replace(fused, most_blocks=3), bump))
    said = "multiprocessor, launched with 3, whose barriers take less than those of all that fit"
    assert said in " ".join(explain(plan).split()) and said not in explain(predicted_plan())
    assert [kernel["most_blocks"] for kernel in explain_data(plan)["kernels"]] == [3, None]
    assert round_trip(plan).kernels == plan.kernels


def test_what_the_certificate_assumes_is_said() -> None:
    kernel, launches = Section("fused", (), (), ((ACTIVE_LANES, 3),)), Section("memory over all launches", (), (), ())
    plan = replace(predicted_plan(), certificate=Certificate((kernel,), launches))
    assumed = "lanes that are active together stay together, at 3 shuffles"
    assert f"    assumed: {assumed}\n" in explain(plan)
    assert explain_data(plan)["certificate"]["assumed"] == assumed
    assert round_trip(plan).certificate == plan.certificate


def test_plans_saved_before_stacks_and_code_sizes_were_kept_load() -> None:
    def older(content: dict) -> None:
        for kernel in content["kernels"]:
            del kernel["resources"]["stack_bytes"], kernel["resources"]["code_bytes"]
            for stage in kernel["predicted"]["stages"]:
                del stage["stack_bytes"]

    plan = predicted_plan()
    back = round_trip(plan, older)
    assert back.kernels == plan.kernels
    assert [kernel.resources.stack_bytes for kernel in back.kernels] == [None, None]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda p: p.update(seconds=-1.0), "kernel 0 has seconds -1.0, which is no time"),
        (lambda p: p.update(sync_seconds="long"), "sync_seconds 'long'"),
        (lambda p: p.update(launch_seconds=float("inf")), "launch_seconds inf"),
        (lambda p: p.update(blocks_per_sm=0), "blocks_per_sm 0"),
        (lambda p: p.update(stages=None), "no list stages"),
        (lambda p: p["stages"][1].update(runs=0), "stage of kernel 0 has runs 0"),
        (lambda p: p["stages"][0].update(bound=3), "no proper bound"),
    ],
)
def test_a_prediction_that_is_none_is_refused(edit, says: str) -> None:
    with pytest.raises(PlanFormatError, match=says):
        round_trip(predicted_plan(), lambda content: edit(content["kernels"][0]["predicted"]))
