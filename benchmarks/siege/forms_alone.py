"""Forms of stages: threads that work alone, in registers and global memory.

A form draws what it likes and gives a function that is right, and what it is to compute; one more is one more function
here, with its weight. Mistakes are planted later, in the TensorIR of any form.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

from benchmarks.siege.body import number
from benchmarks.siege.registry import ZERO, body_of, form, staged, whole
from benchmarks.siege.setting import Read, Setting, Stage, each, elements, formula, place_in, places

__all__: list[str] = []


@form(2)
def pointwise(s: Setting) -> Stage:
    """One element from one or two others; loops, guards, strides."""
    f, where, two = formula(s.draw), places(s), s.draw.random() < 0.4
    other = places(s) if two else where
    b = body_of(s, 2 if two else 1)
    with each(b, s, s.draw.choice(["serial", "unrolled"])) as (_, i):
        value = f(b.tensors[0][where.of(i)])
        b.store(b.tensors[-1], i, value + b.tensors[1][other.of(i)] if two else value)
    reads = (Read(reach=where.reach), Read(reach=other.reach))[: 1 + two]
    if two:
        return staged(s, b, "pointwise", reads, lambda i, x, y: f(x[where.of(i)]) + y[other.of(i)])
    return staged(s, b, "pointwise", reads, lambda i, x: f(x[where.of(i)]))


@form(1)
def vectors(s: Setting) -> Stage | None:
    """Wide accesses, or strided ones: a thread makes some elements at once."""
    lanes = s.draw.choice([2, 4])
    if s.per_tile % lanes or not s.even:
        return None
    apart = s.per_tile // lanes if s.draw.random() < 0.3 else 1
    b = body_of(s)
    with elements(b, s, s.per_tile // lanes) as e:
        at = tirx.Ramp(b.tile * s.per_tile + (e if apart > 1 else e * lanes), number(apart), lanes)
        two = tirx.Broadcast(tirx.FloatImm("float32", 2.0), lanes)
        b.store(b.tensors[1], at, tirx.BufferLoad(b.tensors[0], [at]) * two)
    return staged(s, b, "vectors", (Read(reach="tile"),), lambda i, x: x[i] * 2.0, own=False)


def _picked(s: Setting, name: str, of: Callable) -> Stage:
    """A stage that reads the elements whose indices are `of` those that it writes."""
    b = body_of(s)
    with each(b, s) as (_, i):
        b.store(b.tensors[1], i, b.tensors[0][of(i)])
    return staged(s, b, name, (Read(reach="all"),), lambda i, x: x[of(i)])


@form(1)
def narrow(s: Setting) -> Stage:
    """An index that is calculated in a narrower type, or without a sign, and stays in it."""
    dtype, by = s.draw.choice(["int16", "uint16", "uint32"]), s.draw.randrange(1, 12)
    most = {"int16": 2**15, "uint16": 2**16, "uint32": 2**32}[dtype] - 1
    by = min(by, most // s.count)
    up = s.draw.randrange(max(1, min(200, most - s.count * by)))

    def of(i):
        wide = tirx.Cast(dtype, i) * number(by, dtype) + number(up, dtype)
        return tirx.Cast("int32", tirx.truncmod(wide, number(s.count, dtype)))

    return _picked(s, "narrow", of)


@form(1)
def registers(s: Setting) -> Stage:
    """A thread keeps its elements in an array of registers, and writes them in another order."""
    turns = -(-s.per_tile // s.threads)
    b = body_of(s)
    r = b.registers(turns)

    def guarded(k) -> tuple:
        e = k * s.threads + b.tid
        i = b.tile * s.per_tile + e
        inside = i < s.count if s.per_tile == turns * s.threads else tirx.And(e < s.per_tile, i < s.count)
        return i, True if s.even and s.per_tile == turns * s.threads else inside

    with b.loop(turns) as k:
        i, inside = guarded(k)
        with b.when(inside):
            b.store(r, k, b.tensors[0][i] * 3.0)
    with b.loop(turns, "unrolled") as k:
        i, inside = guarded(turns - 1 - k)
        with b.when(inside):
            b.store(b.tensors[1], i, r[turns - 1 - k])
    return staged(s, b, "registers", (Read(),), lambda i, x: x[i] * 3.0)


@form(1.5)
def gather(s: Setting) -> Stage:
    """An index that data decides, clamped or under a guard of its own."""
    guard, last = s.draw.random() < 0.5, s.count - 1
    b = body_of(s, dtypes=("int32", "float32"))

    def chosen(index, x):
        if guard:
            inside = tirx.And(index >= 0, index < s.count)
            return tirx.if_then_else(inside, x[index], ZERO)
        return x[tirx.max(tirx.min(index, number(last)), number(0))]

    with each(b, s) as (_, i):
        b.store(b.tensors[2], i, chosen(b.tensors[0][i], b.tensors[1]))

    def element(i, index, x):
        inside = tirx.And(index[i] >= 0, index[i] < s.count)
        clamped = x[tirx.max(tirx.min(index[i], number(last)), number(0))]
        return tirx.if_then_else(inside, clamped, ZERO) if guard else clamped

    return staged(s, b, "gather", (Read("int32"), Read(reach="all")), element)


@form(1)
def on_data(s: Setting) -> Stage:
    """A choice by data, as an expression or as a branch that both ways write."""
    branch = s.draw.random() < 0.5
    b = body_of(s)
    with each(b, s) as (_, i):
        x = b.tensors[0][i]
        if branch:
            then = tirx.BufferStore(b.tensors[1], x * 2.0, [i])
            b.do(tirx.IfThenElse(x > ZERO, then, tirx.BufferStore(b.tensors[1], x - 1.0, [i])))
        else:
            b.store(b.tensors[1], i, tirx.Select(x > ZERO, x * 2.0, x - 1.0))
    return staged(s, b, "on_data", (Read(),), lambda i, x: tirx.Select(x[i] > ZERO, x[i] * 2.0, x[i] - 1.0))


@form(1)
def resized(s: Setting) -> Stage:
    """An index by a fraction, whose product is near the end of 32 bits, or beyond and calculated in 64."""
    wide = s.draw.random() < 0.6
    top = s.draw.choice([2**31, 2**33]) if wide else 2**31
    scale = max(2, top // s.count - s.draw.randrange(0, 3)) if not wide else top // max(1, s.count // 3)
    scale = min(scale, 2**31 - 1) if wide else min(scale, (2**31 - 1) // max(1, s.count))
    by = scale + s.draw.randrange(1, 3) if scale < 2**31 - 4 else scale

    def of(i):
        if not wide:
            return tirx.truncdiv(i * scale, by)
        return tirx.Cast("int32", tirx.truncdiv(tirx.Cast("int64", i) * number(scale, "int64"), number(by, "int64")))

    return _picked(s, "resized", of)


@form(1)
def scratch(s: Setting) -> Stage:
    """Writes to the workspace, and reads it back: a thread its own, or those of the tile after a barrier."""
    where = places(s, ("thread", "tile"))
    b = body_of(s, scratch=1)
    with each(b, s) as (_, i):
        b.store(b.tensors[1], i, b.tensors[0][i] + 1.0)
    if where.reach != "thread" or s.draw.random() < 0.3:
        s.barrier(b)
    with each(b, s) as (_, i):
        b.store(b.tensors[2], i, b.tensors[1][where.of(i)] * 2.0)
    source = te.placeholder((s.count,), "float32", name="in0")
    kept = te.compute((s.count,), lambda i: source[i] + 1.0, name="kept")
    output = te.compute((s.count,), lambda i: kept[where.of(i)] * 2.0, name="out")
    return whole(s, b, "scratch", (Read(),), te.create_prim_func([source, kept, output]), scratch=1)


@form(1)
def triangle(s: Setting) -> Stage:
    """A loop that has more turns in later threads: sums of the first elements of the tile."""
    if s.per_tile > 128:
        return None
    b = body_of(s)
    r = b.registers(1)
    with each(b, s) as (e, i):
        b.store(r, 0, ZERO)
        with b.loop(e + 1) as k:
            b.store(r, 0, r[0] + b.tensors[0][b.tile * s.per_tile + k])
        b.store(b.tensors[1], i, r[0])

    def element(i, x):
        _, e = place_in(s, i)
        k = te.reduce_axis((0, s.per_tile), name="k")
        source = tirx.min(i - e + k, number(s.count - 1))
        return te.sum(tirx.if_then_else(k <= e, x[source], ZERO), axis=k)

    return staged(s, b, "triangle", (Read(reach="tile"),), element)
