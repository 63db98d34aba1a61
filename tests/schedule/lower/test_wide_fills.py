"""What turns read from neighbours in memory is read together; what is kept is what the stage would have read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import tvm
from tvm import tirx

from souffle.decision import Refused
from souffle.schedule.lower import DeviceFunction, keep_loads
from souffle.tvm_compat import collect, sequence

TILES, THREADS, TURNS = 3, 8, 8
SIZE = 4096

Index = Callable[[object, object, object, object], object]
"""From tile, thread, outer and inner turn."""


def pointer(name: str, dtype: str) -> tirx.Var:
    return tirx.Var(name, tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global"))


def never(tile: object, tid: object, outer: object, inner: object) -> None:
    return None


def function(
    index: Index,
    *,
    dtype: str = "float32",
    around: Index = never,
    choice: Index = never,
    inner: int = TURNS,
    named: bool = False,
) -> DeviceFunction:
    """``for k in 3: for i in inner: y[...] = x[...] * w[index]``, under a condition, or zero without one."""
    tile, tid, k, i = (tirx.Var(name, "int32") for name in ("tile", "tid", "k", "i"))
    pointers = [pointer(name, dtype) for name in ("x_ptr", "w_ptr", "y_ptr")]
    x, w, y = (
        tirx.decl_buffer((SIZE,), dtype, name, data=one, layout=None)
        for name, one in zip(("x", "w", "y"), pointers, strict=True)
    )
    place, value = index(tile, tid, k, i), tirx.Var("at", "int32")
    names = [tirx.Bind(value, place)] if named else []
    read = w[value if named else place]
    inside = choice(tile, tid, k, i)
    if inside is not None:
        read = tirx.if_then_else(inside, read, tirx.const(0, dtype))
    at = ((tile * THREADS + tid) * 3 + k) * inner + i
    body: tirx.Stmt = sequence(*names, tirx.BufferStore(y, x[at] * read, [at]))
    condition = around(tile, tid, k, i)
    if condition is not None:
        body = tirx.IfThenElse(condition, body, None)
    loops = tirx.For(k, 0, 3, tirx.ForKind.SERIAL, tirx.For(i, 0, inner, tirx.ForKind.UNROLLED, body))
    declared = [tirx.DeclBuffer(one, data=data) for one, data in zip((x, w, y), pointers, strict=True)]
    func = tirx.PrimFunc([tile, tid, *pointers], sequence(*declared, loops))
    return DeviceFunction(func, TILES, THREADS, 0, False, None, "stage")


OPERATIONS: dict[str, Callable[..., object]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "FloorMod": lambda a, b: a % b,
    "LT": lambda a, b: a < b,
    "Max": max,
}


def value_of(node: object, env: dict, memory: dict) -> object:
    kind = type(node).__name__
    of = partial(value_of, env=env, memory=memory)
    if kind in OPERATIONS:
        return OPERATIONS[kind](of(node.a), of(node.b))
    if kind in ("IntImm", "FloatImm"):
        return node.value
    if isinstance(node, tirx.Var):
        return env[node]
    if kind == "Ramp":
        return of(node.base) + np.arange(int(node.lanes))
    if kind == "Broadcast":
        return np.full(int(node.lanes), of(node.value))
    if kind == "TensorLoad":
        return memory[str(node.source.name)][of(node.indices[0])]
    condition, then, other = node.args
    return of(then) if of(condition) else of(other)


def run(node: tirx.Stmt, env: dict, memory: dict) -> None:
    kind = type(node).__name__
    if kind == "SeqStmt":
        for part in node.seq:
            run(part, env, memory)
    elif kind == "For":
        for turn in range(int(node.extent)):
            run(node.body, {**env, node.loop_var: turn}, memory)
    elif kind == "IfThenElse":
        if value_of(node.condition, env, memory):
            run(node.then_case, env, memory)
    elif kind == "Bind":
        env[node.var] = value_of(node.value, env, memory)
    elif kind == "BufferStore":
        place = value_of(node.indices[0], env, memory)
        if np.ndim(place):
            assert place[0] % len(place) == 0, "a store of registers that are not aligned"
        memory[str(node.buffer.name)][place] = value_of(node.value, env, memory)
    else:
        assert kind == "DeclBuffer", kind


def results(stages: list[DeviceFunction], kept: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    memory = {"x": rng.integers(1, 9, SIZE) * 1.0, "w": rng.integers(1, 99, SIZE) * 1.0, "y": np.zeros(SIZE)}
    for tile in range(TILES):
        for tid in range(THREADS):
            memory["kept0"] = np.full(kept, np.nan)
            for stage in stages:
                run(stage.func.body, dict(zip(stage.func.params[:2], (tile, tid), strict=True)), memory)
    return memory["y"]


def widths(stage: DeviceFunction) -> set[int]:
    return {tvm.DataType(str(store.value.ty.dtype)).lanes for store in collect(stage.func.body, tirx.BufferStore)}


NEIGHBOURS: Index = lambda tile, tid, k, i: (tile * 8 + tid) * 64 + k * 16 + i  # noqa: E731

CASES: dict[str, tuple[DeviceFunction, set[int]]] = {
    "neighbours": (function(NEIGHBOURS), {4}),
    "halves": (function(NEIGHBOURS, dtype="float16"), {8}),
    "as many as divide the turns": (function(NEIGHBOURS, inner=6), {2}),
    "an odd number of turns": (function(NEIGHBOURS, inner=5), {1}),
    "all turns": (function(NEIGHBOURS, inner=4), {4}),
    "under a name": (function(NEIGHBOURS, named=True), {4}),
    "the outer loop's": (function(lambda b, t, k, i: t * 64 + i * 4 + k), {1}),
    "of two steps": (function(lambda b, t, k, i: t * 64 + i * 2), {1}),
    "backwards": (function(lambda b, t, k, i: t * 64 + 31 - i), {1}),
    "begins at any place": (function(lambda b, t, k, i: t * 63 + i), {1}),
    "begins at pairs": (function(lambda b, t, k, i: t * 62 + k * 10 + i), {2}),
    "begins behind a multiple": (function(lambda b, t, k, i: t * 64 + i + 1), {1}),
    "behind what is no linear form": (
        function(lambda b, t, k, i: tirx.Max(b * 2 + k - 1, 0) * 64 + tirx.floordiv(t, 2) * 8 + i),
        {4},
    ),
    "where its turn decides": (function(NEIGHBOURS, around=lambda b, t, k, i: tirx.LT(i, 5)), {1}),
    "where something else decides": (function(NEIGHBOURS, around=lambda b, t, k, i: tirx.LT(t + k, 5)), {4}),
    "or zero by its turn": (function(NEIGHBOURS, choice=lambda b, t, k, i: tirx.LT(i + t, 5)), {1}),
    "or zero by something else": (function(NEIGHBOURS, choice=lambda b, t, k, i: tirx.LT(b + t, 5)), {4}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_lies_beside_each_other_is_read_together(name: str) -> None:
    stage, expected = CASES[name]
    kept = keep_loads(stage, [1], 1 << 10)
    assert not isinstance(kept, Refused), kept
    assert widths(kept.fill) == expected
    ((_, count),) = kept.arrays
    np.testing.assert_array_equal(results([kept.fill, kept.use], count), results([stage], 1))


def test_reads_of_several_widths_in_one_loop_stand_in_loops_of_their_own() -> None:
    """One array for all, in which each begins at a multiple of its width."""
    tile, tid, i = (tirx.Var(name, "int32") for name in ("tile", "tid", "i"))
    pointers = [pointer(name, "float32") for name in ("x_ptr", "w_ptr", "y_ptr")]
    x, w, y = (
        tirx.decl_buffer((SIZE,), "float32", name, data=one, layout=None)
        for name, one in zip(("x", "w", "y"), pointers, strict=True)
    )
    thread = tile * THREADS + tid
    terms = (w[thread + i * 100], w[thread * 16 + i], w[thread * 18 + i], w[thread * 16 + 8 + i], w[thread])
    total = x[thread * 4 + i]
    for one in terms:
        total = total + one
    loop = tirx.For(i, 0, 4, tirx.ForKind.UNROLLED, tirx.BufferStore(y, total, [thread * 4 + i]))
    declared = [tirx.DeclBuffer(one, data=data) for one, data in zip((x, w, y), pointers, strict=True)]
    func = tirx.PrimFunc([tile, tid, *pointers], sequence(*declared, loop))
    stage = DeviceFunction(func, TILES, THREADS, 0, False, None, "stage")
    kept = keep_loads(stage, [1], 1 << 10)
    assert widths(kept.fill) == {1, 2, 4}
    reads = [len(collect(one, tirx.BufferStore)) for one in collect(kept.fill.func.body, tirx.For)]
    assert sorted(reads) == [1, 2]
    ((_, count),) = kept.arrays
    np.testing.assert_array_equal(results([kept.fill, kept.use], count), results([stage], 1))
