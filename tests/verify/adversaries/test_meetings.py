"""Who meets in a tensor: every writer counts, every meeting, and every pair of pointers of one call."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import tvm
import tvm_ffi
from tvm import tirx

from souffle.verify import PROVEN, REFUTED, Certificate, certify_plan
from tests.verify.hand_made import THREADS, Memory, Run, barrier, kernel, plan_of, sequence, stage, tensor


def store(m: Memory, number: int, index: object, value: object) -> tirx.Stmt:
    return tirx.BufferStore(m.tensors[number], value, [index])


def copied(m: Memory) -> tirx.Stmt:
    """A register's worth from one tensor to the next."""
    at = m.tile * THREADS + m.tid
    return store(m, 1, at, m.tensors[0][at])


def in_slots(func: tirx.PrimFunc, name: str, per_slot: int) -> tirx.PrimFunc:
    """A kernel whose blocks take so many tiles of a stage together, with a block barrier after each."""

    def together(node: tirx.For) -> tirx.Stmt:
        branch = node.body
        call, after = branch.then_case.seq
        if call.value.op.name_hint != name:
            return node
        place = tirx.Var("place", "int32")
        slot, *others = call.value.args
        tile = tirx.Evaluate(tvm.ir.Call(call.value.op, [slot * per_slot + place, *others]))
        body = tirx.For(place, 0, per_slot, tirx.ForKind.SERIAL, sequence(tile, after))
        guarded = tirx.IfThenElse(branch.condition, body, None)
        return tirx.For(node.loop_var, 0, node.extent, tirx.ForKind.SERIAL, guarded)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, together)))


@dataclass(frozen=True)
class Case:
    """A kernel of stages, the tensors that they get, and the rule that is broken, if one is."""

    runs: tuple[Run, ...]
    functions: tuple[tirx.PrimFunc, ...]
    sizes: tuple[int, ...]
    rule: str
    slots: bool = False

    def certificate(self) -> Certificate:
        kinds = ("input", *("output" for _ in self.sizes[1:]))
        buffers = [tensor(f"b{i}", n, kind) for i, (n, kind) in enumerate(zip(self.sizes, kinds, strict=True))]
        made = in_slots(kernel(self.runs, len(buffers)), "tiles", 2) if self.slots else kernel(self.runs, len(buffers))
        named = {str(f.attrs["global_symbol"]): f for f in self.functions}
        return certify_plan(plan_of(buffers, self.runs, 1024), {"kernel": made}, named)


def two_writers(fence: bool) -> Case:
    """An element is written by one thread in the first turn and by its neighbour in the second; then it is read."""

    def body(m: Memory) -> tirx.Stmt:
        k = tirx.Var("k", "int32")
        write = store(m, 1, m.tile * 65 + m.tid + k, m.tensors[0][m.tile * 65 + m.tid])
        return tirx.For(k, 0, 2, tirx.ForKind.SERIAL, sequence(barrier(), write))

    def read(m: Memory) -> tirx.Stmt:
        return store(m, 1, m.tile * THREADS + m.tid, m.tensors[0][m.tile * 65 + m.tid])

    runs = (Run("write", 3, (0, 1), after=fence), Run("read", 3, (1, 2)))
    functions = stage("write", (195, 195), body), stage("read", (195, 192), read)
    return Case(runs, functions, (195, 195, 192), "" if fence else "race in a block")


def through_two_pointers(promised: bool, apart: bool) -> Case:
    """What one pointer writes the other reads past a barrier; in one buffer, or in two."""

    def body(m: Memory) -> tirx.Stmt:
        at, mirrored = m.tile * THREADS + m.tid, m.tile * THREADS + (THREADS - 1 - m.tid)
        before = store(m, 2, at, m.tensors[1][mirrored])
        return sequence(
            before, barrier(), store(m, 0, at, tirx.const(1.0)), barrier(), store(m, 2, at, m.tensors[1][mirrored])
        )

    func = stage("both", (128, 128, 128), body)
    func = func.with_attr("tirx.noalias", True) if promised else func
    fill = stage("fill", (128, 128), copied)
    runs = (Run("fill", 2, (0, 1)), Run("fill", 2, (0, 2)), Run("both", 2, (2 if apart else 1, 1, 3), grid_before=True))
    return Case(runs, (fill, func), (128,) * 4, "aliased pointers" if promised and not apart else "")


def tiles_of_a_slot(own: bool) -> Case:
    """A tile reads what another tile of its slot has written, which is in order; and what other threads write in it."""

    def body(m: Memory) -> tirx.Stmt:
        mine, theirs = m.tile * THREADS + m.tid, (m.tile ^ 1) * THREADS + m.tid
        reads = [m.tensors[1][(m.tile ^ 1) * THREADS + (m.tid ^ 1)]]
        reads += [m.tensors[1][m.tile * THREADS + (m.tid ^ 1)]] if own else []
        write = store(m, 1, mine, sum(reads, m.tensors[0][theirs]))
        return write

    fill = stage("fill", (256, 256), copied)
    runs = (Run("fill", 4, (0, 1)), Run("tiles", 2, (0, 1), grid_before=True))
    return Case(runs, (fill, stage("tiles", (256, 256), body)), (256, 256), "race in a block" if own else "", True)


CASES = {
    "threads of a tile, beside tiles of a slot": (tiles_of_a_slot, True),
    "tiles of a slot": (tiles_of_a_slot, False),
    "the first writer races": (two_writers, False),
    "both writers are waited for": (two_writers, True),
    "a restricted pointer past a barrier": (through_two_pointers, True, False),
    "restricted pointers to two tensors": (through_two_pointers, True, True),
    "pointers without a promise": (through_two_pointers, False, False),
}


@pytest.mark.parametrize("name", CASES)
def test_meetings(name: str) -> None:
    make, *arguments = CASES[name]
    case = make(*arguments)
    found = case.certificate()
    assert found.verdict == (REFUTED if case.rule else PROVEN), str(found)
    assert {c.rule for c in found.counterexamples} == ({case.rule} if case.rule else set())
