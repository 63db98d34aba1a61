"""Random programs on a thread's own array, beside a run of them element by element."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from tvm import tirx

from souffle.tvm_compat import PrimExpr
from souffle.verify.footprint import Footprint
from souffle.verify.function_reader import read_function
from souffle.verify.registers import unwritten
from tests.verify.hand_made import Memory, sequence, stage

TILES, THREADS, ELEMENTS = 3, 4, 8
Env = dict[str, int]
Event = tuple[str, int]
Run = Callable[[Env], Iterator[Event]]
Made = tuple[tirx.Stmt, Run]


class Program:
    """A random stage function, and what one thread does in it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.run: Run
        self.loops = 0
        self.func = stage("random", (TILES * THREADS,), self._body)

    def _body(self, m: Memory) -> tirx.Stmt:
        made = self._several(m, {"tile": m.tile, "tid": m.tid}, 3)
        self.run = made[1]
        return made[0]

    def _several(self, m: Memory, names: dict[str, PrimExpr], depth: int) -> Made:
        parts = [self._statement(m, names, depth) for _ in range(self.draw.randint(1, 3))]

        def run(env: Env) -> Iterator[Event]:
            for _, part in parts:
                yield from part(env)

        return (sequence(*(stmt for stmt, _ in parts)) if len(parts) > 1 else parts[0][0]), run

    def _statement(self, m: Memory, names: dict[str, PrimExpr], depth: int) -> Made:
        kind = self.draw.choice(("put", "put", "take", "loop", "loop", "branch") if depth else ("put", "put", "take"))
        if kind == "loop":
            return self._loop(m, names, depth)
        if kind == "branch":
            return self._branch(m, names, depth)
        index, at = self._index(names)
        if kind == "put":
            wide = self.draw.random() < 0.3
            if wide:
                index, one = index % 4 * 2, at
                at = lambda env: one(env) % 4 * 2  # noqa: E731
            value = tirx.Broadcast(tirx.const(1.0), 2) if wide else tirx.const(1.0)
            place = tirx.Ramp(index, 1, 2) if wide else index
            return tirx.BufferStore(m.register, value, [place]), lambda env: iter(
                [("put", at(env) + i) for i in range(1 + wide)]
            )
        place = m.tile * THREADS + m.tid
        return tirx.BufferStore(m.tensors[0], m.register[index], [place]), lambda env: iter([("take", at(env))])

    def _index(self, names: dict[str, PrimExpr]) -> tuple[PrimExpr, Callable[[Env], int]]:
        """A sum of a few variables and a number, into the array."""
        chosen = self.draw.sample(sorted(names), self.draw.randint(0, min(2, len(names))))
        factors = [self.draw.randint(1, 3) for _ in chosen]
        up = self.draw.randrange(ELEMENTS)
        total = tirx.IntImm("int32", up)
        for name, factor in zip(chosen, factors, strict=True):
            total = total + names[name] * factor

        def of(env: Env) -> int:
            return (up + sum(env[name] * factor for name, factor in zip(chosen, factors, strict=True))) % ELEMENTS

        return tirx.floormod(total, ELEMENTS), of

    def _loop(self, m: Memory, names: dict[str, PrimExpr], depth: int) -> Made:
        name, extent = f"i{self.loops}", self.draw.choice((1, 2, 4, 8))
        self.loops += 1
        turn = tirx.Var(name, "int32")
        body, inner = self._several(m, {**names, name: turn}, depth - 1)

        def run(env: Env) -> Iterator[Event]:
            for i in range(extent):
                yield from inner({**env, name: i})

        return tirx.For(turn, 0, extent, tirx.ForKind.SERIAL, body), run

    def _branch(self, m: Memory, names: dict[str, PrimExpr], depth: int) -> Made:
        index, at = self._index(names)
        below = self.draw.randrange(1, ELEMENTS)
        then, first = self._several(m, names, depth - 1)
        otherwise, second = (
            self._several(m, names, depth - 1) if self.draw.random() < 0.5 else (None, lambda env: iter(()))
        )

        def run(env: Env) -> Iterator[Event]:
            yield from first(env) if at(env) < below else second(env)

        return tirx.IfThenElse(index < below, then, otherwise), run

    def reads_unwritten(self) -> bool:
        """Whether a thread of a tile takes an element that it has not put there."""
        for tile in range(TILES):
            for tid in range(THREADS):
                written: set[int] = set()
                for event, element in self.run({"tile": tile, "tid": tid}):
                    if event == "put":
                        written.add(element)
                    elif element not in written:
                        return True
        return False


def refuted(program: Program) -> bool:
    footprint = Footprint(read_function("random", program.func, TILES, THREADS))
    assert not footprint.function.problems
    found = list(unwritten("kernel", footprint))
    assert all(hasattr(one, "rule") for one in found), found
    return bool(found)


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_what_is_read_unwritten_is_refuted_and_nothing_else(first: int) -> None:
    verdicts = []
    for seed in range(first, first + 100):
        program = Program(seed)
        verdicts.append(program.reads_unwritten())
        assert refuted(program) == verdicts[-1], f"seed {seed}: {program.func.script()}"
    assert 10 < sum(verdicts) < 90
