"""TVM's frequent calls give what they give with TVM's own checks around them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx

from souffle import tvm_calls
from souffle.tvm_calls import PlainSchedule, collect
from tests.defects import fails_without

X, Y = tirx.Var("x", "int32"), tirx.Var("y", "int32")
EXPRESSIONS = (X, tirx.IntImm("int32", 3), X + 3, (X * 2 + Y) // 5 % 7 - (X * 2 + Y), tirx.Select(X < Y, X, Y * X))
KINDS = (tirx.Var, tirx.IntImm, (tirx.Add, tirx.Mul), tvm.ir.Expr, object)


def named(node: object) -> str:
    return f"{type(node).__name__} {node}"


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_walks_see_what_those_of_tvm_see(expression: tirx.Expr, kinds: type | tuple[type, ...]) -> None:
    def seen(walk: Callable, *rules: tuple) -> list[str]:
        found: list[str] = []
        several = [(kinds, lambda node: found.append(named(node))), *rules]
        walk(expression, several if rules else several[0])
        return found

    for rules in ((), ((tirx.Var, lambda node: None),)):
        assert seen(tvm_calls.structural_walk, *rules) == seen(tvm_ffi.structural_walk, *rules)
    if isinstance(kinds, type):
        assert [named(node) for node in collect(expression, kinds)] == seen(tvm_ffi.structural_walk)


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_rewriting_gives_what_that_of_tvm_gives(expression: tirx.Expr) -> None:
    rules = [(tirx.IntImm, lambda node: tirx.IntImm("int32", int(node.value) + 1)), (tirx.Var, lambda node: node * 2)]
    for given in (rules, rules[0]):
        own, theirs = tvm_calls.structural_map(expression, given), tvm_ffi.structural_map(expression, given)
        assert tvm_ffi.structural_equal(own, theirs)

    def product(node: tirx.Mul, mutator: object) -> tirx.Expr:
        return mutator.default_mutate(node) + 1

    rules = [(tirx.Mul, product), (tirx.Var, lambda node, mutator: Y)]
    own, theirs = tvm_calls.structural_mutate(expression, rules), tvm_ffi.structural_mutate(expression, rules)
    assert tvm_ffi.structural_equal(own, theirs)


def doubled() -> tirx.PrimFunc:
    x = te.placeholder((6, 8), "float32", "x")
    between = te.compute((6, 8), lambda i, j: x[i, j] + 1.0, "between")
    return te.create_prim_func([x, te.compute((6, 8), lambda i, j: between[i, j] * 2.0, "doubled")])


def test_a_schedule_takes_the_steps_of_tvm() -> None:
    """Each step is TVM's with nothing around it; TVM's own wraps all of them."""
    steps = [name for name, step in vars(s_tir.Schedule).items() if hasattr(step, "__wrapped__") and callable(step)]
    assert {"split", "fuse", "bind", "get_sblock", "get_child_blocks", "compute_inline"} <= {*steps}
    for name in steps:
        assert not hasattr(getattr(PlainSchedule, name), "__wrapped__") or name == "_create_non_traced", name
        if name != "__init__":
            assert signature(getattr(PlainSchedule, name)) == signature(getattr(s_tir.Schedule, name))


def test_its_steps_do_what_those_of_tvm_do() -> None:
    own, theirs = PlainSchedule(doubled()), s_tir.Schedule(doubled())
    for sch in (own, theirs):
        sch.compute_inline(sch.get_sblock("between"))
        outer, inner = sch.split(sch.fuse(*sch.get_loops(sch.get_sblock("doubled"))), [None, 16])
        sch.bind(outer, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
    tvm.ir.assert_structural_equal(own.mod, theirs.mod)
    assert isinstance(own, s_tir.Schedule)


def test_its_mistakes_are_errors_too() -> None:
    sch = PlainSchedule(doubled())
    with pytest.raises(s_tir.ScheduleError):
        sch.compute_inline(sch.get_sblock("doubled"))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        sch.split(3, [None, 16])


def test_tvm_works_out_types_of_arguments_at_each_step() -> None:
    with fails_without("the class PlainSchedule", TypeError, match="wrong type"):
        s_tir.Schedule(doubled()).split(3, [None, 16])
