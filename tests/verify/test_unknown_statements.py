"""A statement that the checker does not know is said, by every reader, and nothing that holds it is proven."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import ir, te, tirx

from souffle.verify import UNKNOWN, certify_plan
from souffle.verify.expressions import Undecided
from souffle.verify.values import values_agree
from tests.verify.hand_made import THREADS, Memory, Run, certificate, kernel, plan_of, sequence, stage, tensor

SIZE = 4 * THREADS
BUFFERS = (tensor("x", SIZE, "input"), tensor("y", SIZE, "output"))
NEVER = tirx.const(False, "bool")


def told(body: tirx.Stmt) -> tirx.Stmt:
    return sequence(tirx.AssertStmt(tirx.const(True, "bool"), ir.StringImm("RuntimeError"), []), body)


AROUND: dict[str, Callable[[tirx.Stmt], tirx.Stmt]] = {
    "While": lambda body: tirx.While(NEVER, body),
    "Break": lambda body: sequence(tirx.Break(), body),
    "AssertStmt": told,
    "attribute unheard_of": lambda body: tirx.AttrStmt(tirx.IntImm("int32", 0), "unheard_of", 0, body),
}


def copy(m: Memory) -> tirx.Stmt:
    at = m.tile * THREADS + m.tid
    return tirx.BufferStore(m.tensors[1], m.tensors[0][at], [at])


def definition() -> tirx.PrimFunc:
    x = te.placeholder((SIZE,), "float32", "x")
    return te.create_prim_func([x, te.compute((SIZE,), lambda i: x[i], "y")])


def function(around: Callable[[tirx.Stmt], tirx.Stmt] = lambda body: body) -> tirx.PrimFunc:
    return stage("one", (SIZE, SIZE), lambda m: around(copy(m)))


@pytest.mark.parametrize("kind", AROUND)
def test_in_a_stage(kind: str) -> None:
    found = certificate([Run("one", 4, (0, 1))], [function(AROUND[kind])], BUFFERS)
    assert found.verdict == UNKNOWN
    assert kind in str(found)


@pytest.mark.parametrize("kind", AROUND)
def test_in_a_kernel(kind: str) -> None:
    runs = [Run("one", 4, (0, 1))]
    whole = kernel(runs, 2)
    inside = whole.body.body
    body = AROUND[kind](inside.body)
    launch = tirx.AttrStmt(inside.node, inside.attr_key, inside.value, body)
    around = tirx.AttrStmt(whole.body.node, whole.body.attr_key, whole.body.value, launch)
    found = certify_plan(plan_of(BUFFERS, runs, 1024), {"kernel": whole.with_body(around)}, {"one": function()})
    assert found.verdict == UNKNOWN
    assert kind in str(found)


@pytest.mark.parametrize("kind", AROUND)
def test_of_values(kind: str) -> None:
    found = values_agree(definition(), [(function(AROUND[kind]), 4, THREADS)])
    assert isinstance(found, Undecided)
    assert kind in str(found)


@pytest.mark.parametrize("kind", AROUND)
def test_in_a_definition(kind: str) -> None:
    meant = definition()
    root = meant.body.block
    body = AROUND[kind](root.body)
    changed = meant.with_body(_with_block(meant.body, body))
    found = values_agree(changed, [(function(), 4, THREADS)])
    assert isinstance(found, Undecided)
    assert "AttrStmt" in str(found) if kind.startswith("attribute") else kind in str(found)


def _with_block(realize: tirx.Stmt, body: tirx.Stmt) -> tirx.Stmt:
    block = realize.block
    own = type(block)([], [], [], block.name_hint, body)
    return type(realize)([], True, own)
