"""The walk over TensorIR's statements that TVM lacks, and what sequences are made of and taken apart with."""

from __future__ import annotations

import pytest
import tvm
from tvm import s_tir, tirx
from tvm_ffi import core, registry

from souffle.tvm_compat import StatementVisitor, sequence, statements_of
from tests.defects import fails_without

NO_METHOD = {
    "s_tir.SBlock": "a part of its SBlockRealize",
    "tirx.AssertStmt": "of functions for the host",
    "tirx.Break": "no schedule makes one",
    "tirx.Continue": "no schedule makes one",
    "tirx.Return": "of functions for the host",
    "tirx.ScopeIdDefStmt": "of TVM's own tile primitives",
    "tirx.TilePrimitiveCall": "of TVM's own tile primitives",
}
"""Statements of TVM 0.27 that go to ``visit_other``, and why."""

X = tirx.decl_buffer((8,), "float32", "x")
TURN = tirx.Var("turn", "int32")


def evaluate(number: int) -> tirx.Stmt:
    return tirx.Evaluate(tirx.IntImm("int32", number))


INNER = evaluate(1)
STATEMENTS = {
    "visit_alloc_buffer": tirx.AllocBuffer(X),
    "visit_attr": tirx.AttrStmt(tirx.IntImm("int32", 0), "extern_scope", 0, INNER),
    "visit_bind": tirx.Bind(TURN, tirx.IntImm("int32", 1)),
    "visit_block": s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "block", INNER)),
    "visit_buffer_store": tirx.BufferStore(X, tirx.FloatImm("float32", 1.0), [0]),
    "visit_decl_buffer": tirx.DeclBuffer(X, data=tirx.address_of(X[0])),
    "visit_evaluate": evaluate(2),
    "visit_for": tirx.For(TURN, 0, 4, tirx.ForKind.SERIAL, INNER),
    "visit_if_then_else": tirx.IfThenElse(TURN < 2, INNER, None),
    "visit_sequence": tirx.SeqStmt([INNER, evaluate(2)]),
    "visit_while": tirx.While(TURN < 2, INNER),
}
"""The method for each class, with one of its statements."""


class Others(StatementVisitor):
    """Has no method: notes what comes to ``visit_other``."""

    def __init__(self) -> None:
        self.seen: list[tuple[tirx.Stmt, tuple[object, ...]]] = []

    def visit_other(self, node: tirx.Stmt, *context: object) -> str:
        self.seen.append((node, context))
        return "other"


@pytest.mark.parametrize("method", STATEMENTS)
def test_each_class_has_its_method(method: str) -> None:
    own = type("Own", (Others,), {method: lambda self, node, *context: (method, node, context)})
    statement = STATEMENTS[method]
    assert own().visit(statement, 3, "here") == (method, statement, (3, "here"))
    for name, other in STATEMENTS.items():
        if name not in (method, "visit_sequence", "visit_attr"):
            assert own().visit(other) == "other"


def test_what_has_no_method_is_seen_with_its_context() -> None:
    for statement in (STATEMENTS["visit_for"], tirx.Break(), tirx.Return(tirx.IntImm("int32", 0))):
        visitor = Others()
        assert visitor.visit(statement, "here") == "other"
        assert visitor.seen == [(statement, ("here",))]


def test_sequences_are_walked_in_order_and_attributes_passed_over() -> None:
    visitor = Others()
    body = tirx.AttrStmt(tirx.IntImm("int32", 0), "extern_scope", 0, tirx.SeqStmt([evaluate(i) for i in range(4)]))
    visitor.visit(body, "here")
    assert [(int(node.value), context) for node, context in visitor.seen] == [(i, ("here",)) for i in range(4)]


def test_a_reader_says_what_it_does_with_other_statements() -> None:
    class Silent(StatementVisitor):
        def visit_for(self, node: tirx.For) -> None:
            self.visit(node.body)

    with pytest.raises(TypeError, match="visit_other"):
        Silent()


def is_statement(type_key: str) -> bool:
    # Of classes that have none in Python too.
    parent = core._lookup_or_register_type_info_from_type_key(type_key).parent_type_info
    return parent is not None and (parent.type_key == "tirx.Stmt" or is_statement(parent.type_key))


def test_every_statement_of_tvm_is_known() -> None:
    """A class that a new TVM adds gets a method, or a reason for having none."""
    of_tvm = {key for key in map(str, registry.get_registered_type_keys()) if is_statement(key)}
    with_method = {type(statement).__tvm_ffi_type_info__.type_key for statement in STATEMENTS.values()}
    assert of_tvm == with_method | set(NO_METHOD)


def test_a_sequence_and_its_statements() -> None:
    one, two, nothing = evaluate(1), evaluate(2), evaluate(0)
    assert sequence(one).same_as(one)
    assert sequence(None, one, None).same_as(one)
    assert statements_of(one) == [one]
    assert statements_of(sequence(one, None, two)) == [one, two]
    # One after the other, whatever was a sequence before; TVM's own would drop what does nothing.
    nested = sequence(one, sequence(nothing, two), one)
    assert statements_of(nested) == [one, nothing, two, one]
    tvm.ir.assert_structural_equal(nested, sequence(*statements_of(nested)))


def test_tvm_makes_no_sequence_of_one_with_what_does_nothing() -> None:
    with fails_without("taking sequences apart in `sequence`", tvm.error.InternalError, match="length 1 is prohibited"):
        tirx.SeqStmt([evaluate(0), tirx.SeqStmt([evaluate(0), evaluate(1)])])
