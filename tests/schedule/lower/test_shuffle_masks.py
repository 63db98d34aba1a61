"""Masks of shuffles name all lanes where whole warps come, and what the device says elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm_ffi
from tvm import tirx

import souffle
from souffle.schedule.lower.shuffle_masks import with_full_masks
from souffle.tvm_compat import Analyzer, substitute
from tests.testlib import Builder

TID = tirx.Var("tid", "int32")
TILE = tirx.Var("tile", "int32")
X = tirx.decl_buffer((64,), "float32", name="x")
OWN = tirx.decl_buffer((1,), "float32", name="own", scope="local")
COPY = tirx.decl_buffer((1,), "uint32", name="copy", scope="local")
MASK = tirx.decl_buffer((1,), "uint32", name="mask", scope="local")

Around = Callable[[tirx.Stmt], tirx.Stmt]


def take() -> tirx.Stmt:
    return tirx.BufferStore(MASK, tirx.call_intrin("uint32", "tirx.cuda.__activemask"), [0])


def give() -> tirx.Stmt:
    given = tirx.call_intrin("float32", "tirx.cuda.__shfl_down_sync", MASK[0], OWN[0], 1, 32)
    return tirx.BufferStore(OWN, OWN[0] + given, [0])


def is_full(body: tirx.Stmt, threads: int = 64) -> bool:
    """Whether the one mask of a body becomes that of all lanes."""
    values: list[object] = []

    def see(store: tirx.BufferStore) -> None:
        if store.buffer.same_as(MASK):
            values.append(store.value)

    tvm_ffi.structural_walk(with_full_masks(body, TID, threads), (tirx.BufferStore, see))
    (value,) = values
    return isinstance(value, tirx.IntImm) and int(value.value) == 2**32 - 1


def masks(threads: int) -> list[int]:
    """Of each thread, what a shuffle that all come to names."""
    values: list[object] = []
    made = with_full_masks(tirx.SeqStmt([take(), give()]), TID, threads)
    tvm_ffi.structural_walk(
        made, (tirx.BufferStore, lambda s: values.append(s.value) if s.buffer.same_as(MASK) else None)
    )
    at = ({TID: tirx.IntImm("int32", thread)} for thread in range(threads))
    return [int(Analyzer().simplify(substitute(values[0], one)).value) for one in at]


def under(condition: object) -> Around:
    return lambda body: tirx.IfThenElse(condition, body, None)


def turns(extent: object) -> Around:
    return lambda body: tirx.For(tirx.Var("turn", "int32"), 0, extent, tirx.ForKind.SERIAL, body)


def bound(value: object, make: Callable[[tirx.Var], Around]) -> Around:
    var = tirx.Var("bound", "int32")
    return lambda body: tirx.SeqStmt([tirx.Bind(var, value), make(var)(body)])


@pytest.mark.parametrize(
    ("around", "full"),
    [
        (lambda body: body, True),
        (turns(4), True),
        (under(TILE < 3), True),
        (under(TID < 32), True),
        (under(tirx.truncdiv(TID, 32) == TILE), True),
        (turns(tirx.truncdiv(TID, 32) + 1), True),
        (bound(tirx.truncdiv(TID, 64) + TILE, lambda var: under(var < 3)), True),
        (under(TID < 7), False),
        (under(TID < 40), False),
        (under(tirx.truncmod(TID, 32) + TILE < 16), False),
        (turns(TID), False),
        (bound(tirx.truncmod(TID, 32), lambda var: under(var < 3)), False),
        (under(X[0] > tirx.FloatImm("float32", 0.0)), False),
        (lambda body: tirx.While(TILE < 3, body), False),
        (lambda body: tirx.SeqStmt([body, tirx.DeclBuffer(COPY, data=tirx.address_of(MASK[0]))]), False),
    ],
)
def test_where_all_lanes_come(around: Around, full: bool) -> None:
    assert is_full(around(tirx.SeqStmt([take(), give()]))) == full


def test_a_shuffle_that_not_all_come_to_keeps_its_mask() -> None:
    assert not is_full(tirx.SeqStmt([take(), tirx.IfThenElse(TID < 7, give(), None)]))


def test_a_mask_that_is_read_for_something_else_stays() -> None:
    count = tirx.BufferStore(OWN, tirx.Cast("float32", MASK[0]), [0])
    assert not is_full(tirx.SeqStmt([take(), give(), count]))


def test_a_broken_warp_names_the_lanes_that_there_are() -> None:
    assert masks(64) == [2**32 - 1] * 64
    assert masks(48) == [2**32 - 1] * 32 + [2**16 - 1] * 16
    assert masks(7) == [2**7 - 1] * 7


def test_reductions_of_a_network_name_all_lanes_and_are_proven() -> None:
    b = Builder()
    x = b.input(8, 512)
    network = souffle.compile(b.program(b.reduce(x, 1)), target="cuda", arch="sm_90", cubin=False, device="cpu")
    text = "".join(module.text for module in network.plan.modules)
    assert "__shfl_" in text and "__activemask" not in text
    assert network.certificate.verdict == "PROVEN" and not network.certificate.assumed
