"""Changes of numbers and of statements: each gives another text, and none gets lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tvm import tirx

from benchmarks.siege.kernels import random_case
from souffle.mutation.comparisons import comparison_changes
from souffle.mutation.numbers import number_changes
from souffle.mutation.statement_paths import Change
from souffle.mutation.structure import structure_changes
from souffle.verify import PROVEN
from tests.verify.hand_made import THREADS, Memory, Run, barrier, certificate, sequence, stage, tensor

SIZE = 4 * THREADS
BUFFERS = (tensor("x", SIZE, "input"), tensor("h", SIZE, "workspace"), tensor("y", SIZE, "output"))


def through_shared(m: Memory) -> tirx.Stmt:
    at = m.tile * THREADS + m.tid
    turn = tirx.Var("turn", "int32")
    put = tirx.BufferStore(m.shared, m.tensors[0][at], [m.tid])
    take = tirx.BufferStore(m.tensors[1], m.shared[THREADS - 1 - m.tid], [at])
    return tirx.For(turn, 0, 2, tirx.ForKind.SERIAL, sequence(put, barrier(), take, barrier()))


def changed(change: Callable[[tirx.PrimFunc], Iterator[Change]]) -> list[tuple[Change, tirx.PrimFunc]]:
    return [(one, one.make()) for one in change(stage("one", (SIZE, SIZE), through_shared))]


@pytest.mark.parametrize("changes", [number_changes, structure_changes])
def test_each_change_gives_another_function(changes) -> None:
    before = str(stage("one", (SIZE, SIZE), through_shared))
    after = [str(func) for _, func in changed(changes)]
    assert before not in after and len(after) > 10


def test_what_spoils_a_result_is_not_proven() -> None:
    """Of structure, all but what is done twice or once more; ``verdict`` before the change is PROVEN."""
    run = [Run("one", 4, (0, 2))]
    assert certificate(run, [stage("one", (SIZE, SIZE), through_shared)], BUFFERS).verdict == PROVEN
    wanted = {("condition", "call, thread"), ("order", "swap"), ("statement", "delete"), ("condition", "store, lane")}
    seen: dict[tuple[str, str], list[str]] = {}
    for one, func in changed(structure_changes):
        seen.setdefault((one.kind, one.action), []).append(certificate(run, [func], BUFFERS).verdict)
    assert wanted <= set(seen)
    assert all(any(v != PROVEN for v in seen[key]) for key in wanted)


def test_tensors_of_calls_are_swapped_in_kernels() -> None:
    case = next(c for c in map(random_case, range(50)) if len(c.functions) > 1)
    (kernel,) = list(case.kernels.values())[:1]
    assert any(change.kind == "tensor" for change in structure_changes(kernel))


def test_comparisons_of_data_are_changed_and_no_others() -> None:
    def body(m: Memory) -> tirx.Stmt:
        at = m.tile * THREADS + m.tid
        x = m.tensors[0][at]
        value = tirx.max(tirx.Select(x > 0.0, x, m.tensors[1][at]), tirx.FloatImm("float32", 2.0))
        return tirx.IfThenElse(at < SIZE - 1, tirx.BufferStore(m.tensors[1], value, [at]), None)

    func = stage("one", (SIZE, SIZE), body)
    found = list(comparison_changes(func))
    texts = {str(change.make()) for change in found}
    assert len(texts) == len(found) and str(func) not in texts
    assert {change.action for change in found} == {"operator", "extreme", "arm", "literal"}
    assert all(f"< {SIZE - 1}" in text for text in texts)


def test_numbers_stay_in_their_types() -> None:
    def body(m: Memory) -> tirx.Stmt:
        at = m.tile * THREADS + m.tid
        index = tirx.min(at, tirx.const(2**31 - 1, "int32"))
        return tirx.BufferStore(m.tensors[1], m.tensors[0][index], [at])

    words = [change.what for change in number_changes(stage("one", (SIZE, SIZE), body)) if change.action == "literal"]
    assert f"the number {2**31 - 1} becomes {2**31 - 2}" in words
    assert f"the number {2**31 - 1} becomes {2**31}" not in words
