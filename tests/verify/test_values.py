"""Values of stage functions against their definitions, in a finite field: what agrees, and what a mutation changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

import souffle
from souffle import models
from souffle.certificate import PROVEN
from souffle.pipeline import stages_of
from souffle.program import TEProgram
from souffle.schedule.stage import flat_stages
from souffle.tvm_compat import dtype_of
from souffle.verify.values import Agreement, Mismatch, StageText, compare_stages, values_agree, values_section
from tests.frontend.support import node_model
from tests.testlib import Builder, random_program

# Networks are staged once, by one worker.
pytestmark = [pytest.mark.xdist_group("bert"), pytest.mark.sampled(4)]


def stages(program: TEProgram, arch: str = "sm_90", **options: object) -> dict[str, tuple[str, StageText]]:
    """The stages of a program by name, each with the rule that made its schedule."""
    units, _ = stages_of(program, arch=arch, cubin=False, **options)
    return {
        s.name: (
            s.schedule.rule,
            StageText(
                tuple(f.name for f in s.functions),
                s.draft.func,
                tuple((f.func, f.tiles, f.threads) for f in s.functions),
            ),
        )
        for s in flat_stages(units)
    }


@cache
def of_model(name: str, level: str, precision: str, arch: str = "sm_90") -> dict[str, tuple[str, StageText]]:
    program = souffle.import_onnx(models.build(name))
    return stages(program, arch, level=level, precision=precision)


def of_node(operator: str, inputs: list, options: dict) -> list[tuple[str, StageText]]:
    program = souffle.import_onnx(node_model(operator, inputs, **options))
    return list(stages(program, level="V4").values())


# What is right


MODELS = [
    ("bert", "V4", "mixed", "sm_90"),
    ("bert", "V3", "mixed", "sm_90"),
    ("bert", "V3", "tf32", "sm_90"),
    ("bert", "V3", "tf32x3", "sm_90"),
    ("bert", "V3", "fp32", "sm_90"),
    ("bert", "V4", "mixed", "sm_75"),
    ("mmoe", "V4", "fp32", "sm_90"),
]


@pytest.mark.parametrize(("name", "level", "precision", "arch"), MODELS)
def test_every_stage_computes_its_definition(name: str, level: str, precision: str, arch: str) -> None:
    found = compare_stages(text for _, text in of_model(name, level, precision, arch).values())
    section = values_section(found)
    assert section.verdict == PROVEN, [str(result) for _, result in found]
    assert dict(section.facts)["elements compared"] > 0


F, I64, BOOL = "float32", "int64", "bool"

NODES = {
    "window": ("MaxPool", [(F, (1, 2, 9, 9))], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "reduction": ("ReduceSum", [(F, (3, 700))], {"keepdims": 0}),
    "elementwise": ("Add", [(F, (3, 1, 5)), (F, (4, 1))], {}),
    # Operands come by copies.
    "contraction": ("MatMul", [(F, (32, 96)), (F, (96, 48))], {}),
}


def candidates(rule: str) -> list[StageText]:
    """Stages whose schedule a rule made."""
    found = [text for own, text in of_node(*NODES[rule]) if own == rule] if rule in NODES else []
    return found + [text for how in MODELS for own, text in of_model(*how).values() if own == rule]


RULES = ("mma_contraction", "tensor_core_contraction", "rowwise", *NODES)


@pytest.mark.parametrize("rule", RULES)
def test_stages_of_every_rule_agree(rule: str) -> None:
    for text in candidates(rule)[:2] or [None]:
        assert text is not None
        found = values_agree(text.definition, text.functions, tiles="all", seed=1)
        assert isinstance(found, Agreement), str(found)
        assert found.complete


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_agree(seed: int) -> None:
    chosen = random.Random(seed)
    program = random_program(lambda options: chosen.choice(list(options)), 10, seed)
    for _, text in stages(program, level=("V3", "V4")[seed % 2]).values():
        found = values_agree(text.definition, text.functions, tiles="all")
        assert isinstance(found, Agreement), str(found)
        assert found.complete


@pytest.mark.parametrize(
    ("operator", "inputs", "options"),
    [
        ("Gather", [(F, (6, 5)), (I64, (4,))], {}),
        ("GatherND", [(F, (3, 4, 5)), (I64, (6, 2))], {}),
        ("Where", [(BOOL, (3, 5)), (F, (3, 5)), (F, (5,))], {}),
        ("ArgMax", [(F, (3, 7))], {}),
        ("TopK", [(F, (3, 9)), np.array([2])], {"outputs": 2}),
        ("Mod", [(F, (3, 5)), (F, (3, 5))], {"fmod": 1}),
        ("Ceil", [(F, (3, 5))], {}),
        ("Mul", [(F, ()), (F, ())], {}),
        ("Add", [(I64, (3, 5)), (I64, (3, 5))], {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operators_that_choose_by_number_agree(operator: str, inputs: list, options: dict) -> None:
    for _, text in of_node(operator, inputs, options):
        found = values_agree(text.definition, text.functions, tiles="all")
        assert isinstance(found, Agreement), str(found)


def test_an_operator_that_is_no_te_agrees() -> None:
    builder = Builder()
    program = builder.program(builder.extern_sort(builder.input(5, 9)))
    for _, text in stages(program, level="V4").values():
        assert isinstance(values_agree(text.definition, text.functions), Agreement)


# What is wrong in stages of a model


def changed(func: tirx.PrimFunc, kind: type, wanted: Callable[[object], bool], new: Callable[[object], object]):
    """`func` with the first node of a kind that is wanted replaced."""
    done = False

    def replace(node: object) -> object:
        nonlocal done
        if done or not wanted(node):
            return node
        done = True
        return new(node)

    body = tvm_ffi.structural_map(func.body, (kind, replace))
    assert done
    return func.with_body(body)


def extern_name(node: tirx.Evaluate) -> str:
    call = node.value
    return str(call.args[0].value) if isinstance(call, Call) and "extern" in str(call.op) else ""


def with_arguments(node: tirx.Evaluate, change: Callable[[list], list]) -> tirx.Evaluate:
    name, *arguments = change([str(node.value.args[0].value), *node.value.args[1:]])
    return tirx.Evaluate(tirx.call_extern("int32", name, *arguments))


def further(address: Call, elements: int) -> Call:
    """The address of an element some elements further."""
    load = address.args[0]
    return tirx.address_of(load.source[load.indices[0] + elements])


def one(text: StageText, func: tirx.PrimFunc) -> StageText:
    (_, tiles, threads), *rest = text.functions
    return StageText(text.names, text.definition, ((func, tiles, threads), *rest))


def is_named(part: str) -> Callable[[tirx.Evaluate], bool]:
    return lambda node: part in extern_name(node)


NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))

WRONG = {
    "a copy from the next element": (
        "mma_contraction",
        tirx.Evaluate,
        is_named("copy_async_or_zero"),
        lambda node: with_arguments(node, lambda a: [a[0], a[1], further(a[2], 8), a[3]]),
    ),
    "zeros for a wanted element": (
        "mma_contraction",
        tirx.Select,
        lambda node: isinstance(node.condition, tirx.LT),
        lambda node: tirx.Select(node.condition.a < node.condition.b - 1, node.true_value, node.false_value),
    ),
    "a product that is left out": ("mma_contraction", tirx.Evaluate, is_named("add_product"), lambda node: NOTHING),
    "a matrix that is transposed": (
        "mma_contraction",
        tirx.Evaluate,
        is_named("load_transposed"),
        lambda node: with_arguments(node, lambda a: ["souffle_load_matrices", *a[1:]]),
    ),
    "a product of words that is left out": (
        "mma_contraction",
        tirx.Evaluate,
        is_named("add_tf32_product"),
        lambda node: NOTHING,
    ),
    "words that are loaded further apart": (
        "mma_contraction",
        tirx.Evaluate,
        is_named("load_words"),
        lambda node: with_arguments(node, lambda a: [*a[:3], a[3] + 1]),
    ),
    "a matrix of words from the next row": (
        "mma_contraction",
        tirx.Evaluate,
        is_named("load_word_matrices"),
        lambda node: with_arguments(node, lambda a: [*a[:2], further(a[2], 4)]),
    ),
    "a first product of words that is left out": (
        "mma_contraction",
        tirx.Evaluate,
        is_named("begin_tf32_product"),
        lambda node: NOTHING,
    ),
    "words that are not split": ("mma_contraction", tirx.Evaluate, is_named("split_to_tf32"), lambda node: NOTHING),
    "a total that is not put": ("mma_contraction", tirx.Evaluate, is_named("put_totals"), lambda node: NOTHING),
    "one plane too few": (
        "mma_contraction",
        tirx.Evaluate,
        is_named("take_totals<4, 2>"),
        lambda node: with_arguments(node, lambda a: ["souffle_take_totals<4, 1>", *a[1:]]),
    ),
    "a copy that is left out": ("contraction", tirx.Evaluate, is_named("copy_async"), lambda node: NOTHING),
    "a turn too few": (
        "contraction",
        tirx.For,
        lambda node: node.kind == tirx.ForKind.UNROLLED,
        lambda node: tirx.For(node.loop_var, node.min, node.extent - 1, node.kind, node.body),
    ),
    "a difference the other way": (
        "rowwise",
        tirx.Sub,
        lambda node: dtype_of(node) == "float32",
        lambda node: node.b - node.a,
    ),
    "another function": (
        "rowwise",
        Call,
        lambda node: len(node.args) > 1 and str(getattr(node.args[0], "value", "")) == "expf",
        lambda node: tirx.call_pure_extern("float32", "exp2f", node.args[1]),
    ),
    "a lane too near": (
        "rowwise",
        Call,
        lambda node: "shfl_down" in str(node.op),
        lambda node: tirx.call_intrin("float32", "tirx.cuda.__shfl_down_sync", *node.args[:2], 3, node.args[3]),
    ),
    "the least for the largest": (
        "rowwise",
        tirx.BufferStore,
        lambda node: isinstance(node.value, tirx.Max),
        lambda node: tirx.BufferStore(node.buffer, tirx.Min(node.value.a, node.value.b), list(node.indices)),
    ),
    "what is written elsewhere": (
        "reduction",
        tirx.BufferStore,
        lambda node: str(node.buffer.scope()) == "global" and len(node.indices) == 1,
        lambda node: tirx.BufferStore(node.buffer, node.value, [tirx.bitwise_xor(node.indices[0], 1)]),
    ),
    "a sum that starts at one": (
        "reduction",
        tirx.BufferStore,
        lambda node: isinstance(node.value, tirx.FloatImm),
        lambda node: tirx.BufferStore(node.buffer, tirx.FloatImm("float32", 1.0), list(node.indices)),
    ),
    "a product for a sum": ("elementwise", tirx.Add, lambda n: dtype_of(n) == "float32", lambda n: n.a * n.b),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_change_of_what_is_computed_is_a_mismatch(name: str) -> None:
    rule, kind, wanted, new = WRONG[name]
    for text in candidates(rule):
        func = text.functions[0][0]
        there: list[object] = []
        tvm_ffi.structural_walk(
            func.body, (kind, lambda node, there=there: there.append(node) if wanted(node) else None)
        )
        if there:
            wrong = one(text, changed(func, kind, wanted, new))
            found = values_agree(wrong.definition, wrong.functions, tiles="all")
            assert isinstance(found, Mismatch), str(found)
            assert str(found)
            return
    raise AssertionError(f"no stage of the rule {rule} has such a place")


@pytest.mark.parametrize("part", ["round_to_tf32", "add_tf32_product"])
def test_what_rounding_leaves_is_for_runs(part: str) -> None:
    """Numbers are exact here: rounding changes none, and products with what it leaves are 0."""
    (text,) = [one for one in candidates("mma_contraction") if "begin_tf32" in str(one.functions[0][0])][:1]
    if part == "round_to_tf32":
        (text,) = [one for one in candidates("mma_contraction") if part in str(one.functions[0][0])][:1]
    less = one(text, changed(text.functions[0][0], tirx.Evaluate, is_named(part), lambda node: NOTHING))
    assert isinstance(values_agree(less.definition, less.functions, tiles="all"), Agreement)


def test_a_barrier_that_is_missing_is_for_the_certificate() -> None:
    """Threads go in step here: what they would race for is found by the check of accesses."""
    for text in candidates("mma_contraction")[:1]:
        func = text.functions[0][0]
        less = changed(
            func, tirx.Evaluate, lambda n: "storage_sync" in str(getattr(n.value, "op", "")), lambda n: NOTHING
        )
        assert isinstance(values_agree(text.definition, one(text, less).functions), Agreement)
