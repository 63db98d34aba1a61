"""Forms of stages: threads that hand elements to each other through shared memory.

A form draws what it likes and gives a function that is right, and what it is to compute; one more is one more function
here, with its weight. Mistakes are planted later, in the TensorIR of any form.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

from benchmarks.siege.body import Body, number
from benchmarks.siege.registry import ZERO, body_of, form, staged, whole
from benchmarks.siege.setting import Read, Setting, Stage, each, place_in, places

__all__: list[str] = []


def _sum_of_tiles(s: Setting, b: Body, name: str, steps: int, other: Callable) -> Stage:
    """A stage that adds an element each of its own tile and of those after it, where `other` is in each."""

    def element(i, x):
        tile, e = place_in(s, i)
        k = te.reduce_axis((0, steps), name="k")
        return te.sum(x[tirx.truncmod(tile + k, s.tiles) * s.threads + other(e)], axis=k)

    return staged(s, b, name, (Read(reach="all"),), element)


def _fetched_ahead(b: Body, fetch: Callable, copies: int, groups: int) -> None:
    """So many groups of asynchronous copies, the first of which hold one each."""
    for k in range(groups):
        if k < copies:
            fetch(number(k))
        b.commit()


@form(2.5)
def exchange(s: Setting) -> Stage | None:
    """Threads hand elements to each other, in the pool or in a static array, with a swizzle."""
    per = s.per_tile
    power = per & (per - 1) == 0 and per > 1
    flip = s.draw.randrange(per) if power else 0
    static, parts = s.draw.random() < 0.25, 1 + (s.draw.random() < 0.3)
    where = places(s, ("tile",) if s.even else ("thread",))
    b = body_of(s)
    if s.draw.random() < 0.3 and not static:
        b.shared(s.draw.choice([4, 16, 36]))
    arrays = [b.shared(per, static=static) for _ in range(parts)]

    def at(e):
        return tirx.bitwise_xor(e, number(flip)) if flip else e

    with each(b, s) as (e, i):
        for a in arrays:
            b.store(a, at(e), b.tensors[0][i])
    s.barrier(b)
    with each(b, s) as (_, i):
        _, e = place_in(s, where.of(i))
        e = at(e)
        b.store(b.tensors[1], i, arrays[0][e] + arrays[-1][e])
    if s.draw.random() < 0.2:
        s.barrier(b)
    return staged(s, b, "exchange", (Read(),), lambda i, x: x[where.of(i)] + x[where.of(i)])


@form(2)
def ring(s: Setting) -> Stage | None:
    """A loop over steps that goes through slots of shared memory, filled a turn ahead."""
    if not s.even or s.per_tile != s.threads:
        return None
    slots, steps = s.draw.choice([2, 2, 3, 4]), s.draw.randrange(2, 6)
    n, t = s.threads, s.tiles
    b = body_of(s)
    a, r = b.shared(slots * n), b.registers(1)
    i = b.tile * n + b.tid

    def source(k):
        return tirx.truncmod(b.tile + k, t) * n + b.tid

    b.store(r, 0, ZERO)
    ahead = s.draw.randrange(0, slots - 1)
    for k in range(ahead):
        b.store(a, (k % slots) * n + b.tid, b.tensors[0][source(k)])
    with b.loop(steps) as k:
        with b.when(k + ahead < steps if ahead else True):
            b.store(a, tirx.truncmod(k + ahead, slots) * n + b.tid, b.tensors[0][source(k + ahead)])
        s.barrier(b)
        b.store(r, 0, r[0] + a[tirx.truncmod(k, slots) * n + (n - 1 - b.tid)])
        if slots - ahead < 2:
            s.barrier(b)
    b.store(b.tensors[1], i, r[0])

    return _sum_of_tiles(s, b, "ring", steps, lambda e: n - 1 - e)


@form(3)
def pipeline(s: Setting) -> Stage | None:
    """A ring of slots that asynchronous copies fill ahead."""
    if not s.even or s.per_tile != s.threads:
        return None
    width = s.draw.choice([4, 8, 16])
    lanes = width // 4
    if s.threads % lanes:
        return None
    slots, steps, n, t = s.draw.choice([2, 3, 4]), s.draw.randrange(2, 7), s.threads, s.tiles
    ahead, loose = slots - 1, s.draw.random() < 0.3
    zero = s.draw.random() < 0.3
    b = body_of(s)
    a, r = b.shared(slots * n), b.registers(1)
    copies = n // lanes

    def fetch(k) -> None:
        with b.when(b.tid < copies if lanes > 1 else True):
            into = a[tirx.truncmod(k, slots) * n + b.tid * lanes]
            source = b.tensors[0][tirx.truncmod(b.tile + k, t) * n + b.tid * lanes]
            b.copy(width, into, source, tirx.Cast("int32", b.tid * lanes < n) if zero else None)

    b.store(r, 0, ZERO)
    _fetched_ahead(b, fetch, min(ahead, steps), ahead)
    with b.loop(steps) as k:
        # One group is closed in each turn, whether it holds a copy or not, so that the newest may be left.
        b.wait(0 if loose else slots - 2)
        s.barrier(b)
        with b.when(k + ahead < steps):
            fetch(k + ahead)
        b.commit()
        b.store(r, 0, r[0] + a[tirx.truncmod(k, slots) * n + (n - 1 - b.tid)])
    b.store(b.tensors[1], b.tile * n + b.tid, r[0])
    if s.draw.random() < 0.5:
        b.wait(0)

    return _sum_of_tiles(s, b, "pipeline", steps, lambda e: n - 1 - e)


@form(1.5)
def tree(s: Setting) -> Stage | None:
    """A sum over a tile by halves, with a barrier for each."""
    n = s.threads
    if not s.even or s.per_tile != n or n & (n - 1):
        return None
    b = body_of(s)
    a = b.shared(n)
    i = b.tile * n + b.tid
    b.store(a, b.tid, b.tensors[0][i])
    halves = n.bit_length() - 1
    if s.draw.random() < 0.5:
        with b.loop(halves) as k:
            s.barrier(b)
            half = tirx.shift_right(number(n // 2), k)
            with b.when(b.tid < half):
                b.store(a, b.tid, a[b.tid] + a[b.tid + half])
    else:
        for k in range(halves):
            s.barrier(b)
            with b.when(b.tid < n >> (k + 1)):
                b.store(a, b.tid, a[b.tid] + a[b.tid + (n >> (k + 1))])
    s.barrier(b)
    b.store(b.tensors[1], i, b.tensors[0][i] + a[0])

    def element(i, x):
        k = te.reduce_axis((0, n), name="k")
        return te.sum(x[tirx.truncdiv(i, n) * n + k], axis=k)

    total = te.placeholder((s.count,), "float32", name="in0")
    sums = te.compute((s.count,), lambda i: element(i, total), name="sums")
    output = te.compute((s.count,), lambda i: total[i] + sums[i], name="out")
    return whole(s, b, "tree", (Read(),), te.create_prim_func([total, output]))


@form(1)
def scan(s: Setting) -> Stage | None:
    """Prefix sums by doubling, from one of two arrays to the other."""
    n = s.threads
    if not s.even or s.per_tile != n:
        return None
    b = body_of(s)
    arrays = [b.shared(n), b.shared(n)]
    i = b.tile * n + b.tid
    b.store(arrays[0], b.tid, b.tensors[0][i])
    s.barrier(b)
    distance, turn = 1, 0
    while distance < n:
        source, target = arrays[turn % 2], arrays[1 - turn % 2]
        before = tirx.if_then_else(b.tid >= distance, source[tirx.max(b.tid - distance, number(0))], ZERO)
        b.store(target, b.tid, source[b.tid] + before)
        s.barrier(b)
        distance, turn = 2 * distance, turn + 1
    b.store(b.tensors[1], i, arrays[turn % 2][b.tid])

    def element(i, x):
        k = te.reduce_axis((0, n), name="k")
        _, e = place_in(s, i)
        return te.sum(tirx.if_then_else(k <= e, x[i - e + k], ZERO), axis=k)

    return staged(s, b, "scan", (Read(),), element)


@form(1)
def some_tiles(s: Setting) -> Stage | None:
    """Shared memory in the later tiles only: the others leave the pool to whoever was before."""
    if not s.even or s.per_tile != s.threads or s.tiles < 2:
        return None
    n, first, up = s.threads, s.draw.randrange(1, s.tiles), s.draw.random() < 0.5
    b = body_of(s)
    a = b.shared(n)
    i = b.tile * n + b.tid
    here = b.tile >= first if up else b.tile < first
    with b.when(here):
        b.store(a, b.tid, b.tensors[0][i])
        s.barrier(b)
        b.store(b.tensors[1], i, a[n - 1 - b.tid])
    with b.when(tirx.Not(here)):
        b.store(b.tensors[1], i, b.tensors[0][i])

    def element(i, x):
        tile, e = place_in(s, i)
        inside = tile >= first if up else tile < first
        return x[tile * n + tirx.if_then_else(inside, n - 1 - e, e)]

    return staged(s, b, "some_tiles", (Read(),), element)


@form(0.7)
def own_slot(s: Setting) -> Stage | None:
    """A thread keeps a number in shared memory for itself, over the turns of a loop without barriers."""
    if not s.even or s.per_tile != s.threads:
        return None
    n, turns = s.threads, s.draw.randrange(2, 5)
    b = body_of(s)
    a = b.shared(n)
    i = b.tile * n + b.tid
    b.store(a, b.tid, b.tensors[0][i])
    with b.loop(turns):
        b.store(a, b.tid, a[b.tid] + 1.0)
    b.store(b.tensors[1], i, a[b.tid])
    return staged(s, b, "own_slot", (Read(),), lambda i, x: x[i] + float(turns))


@form(1.2)
def private_pipeline(s: Setting) -> Stage | None:
    """A pipeline of each thread's own: it copies, waits and reads alone, and no barrier is needed."""
    if not s.even or s.per_tile != s.threads:
        return None
    n, t, slots, steps = s.threads, s.tiles, s.draw.choice([2, 3]), s.draw.randrange(2, 6)
    b = body_of(s)
    a, r = b.shared(slots * n), b.registers(1)
    ahead = slots - 1

    def fetch(k) -> None:
        source = b.tensors[0][tirx.truncmod(b.tile + k, t) * n + b.tid]
        b.copy(4, a[tirx.truncmod(k, slots) * n + b.tid], source)

    b.store(r, 0, ZERO)
    _fetched_ahead(b, fetch, min(ahead, steps), ahead)
    with b.loop(steps) as k:
        b.wait(ahead - 1)
        b.store(r, 0, r[0] + a[tirx.truncmod(k, slots) * n + b.tid])
        with b.when(k + ahead < steps):
            fetch(k + ahead)
        b.commit()
    b.store(b.tensors[1], b.tile * n + b.tid, r[0])

    return _sum_of_tiles(s, b, "private_pipeline", steps, lambda e: e)


@form(0.8)
def copied_scratch(s: Setting) -> Stage | None:
    """A copy out of the stage's own part of the workspace, which is written anew once the copy is done."""
    if not s.even or s.per_tile != s.threads:
        return None
    n = s.threads
    b = body_of(s, scratch=1)
    a = b.shared(n)
    i = b.tile * n + b.tid
    b.store(b.tensors[1], i, b.tensors[0][i])
    s.barrier(b)
    b.copy(4, a[b.tid], b.tensors[1][b.tile * n + (n - 1 - b.tid)])
    b.commit()
    b.wait(0)
    s.barrier(b)
    b.store(b.tensors[1], i, b.tensors[0][i] * 2.0)
    b.store(b.tensors[2], i, a[b.tid] + b.tensors[1][i])
    source = te.placeholder((s.count,), "float32", name="in0")
    kept = te.compute((s.count,), lambda i: source[i] * 2.0, name="kept")

    def element(i):
        tile, e = place_in(s, i)
        return source[tile * n + (n - 1 - e)] + kept[i]

    output = te.compute((s.count,), element, name="out")
    return whole(s, b, "copied_scratch", (Read(),), te.create_prim_func([source, kept, output]), scratch=1)


@form(1)
def reused(s: Setting) -> Stage | None:
    """Two arrays in the same bytes of the pool, one after the other, with a barrier between."""
    if not s.even or s.per_tile != s.threads:
        return None
    n = s.threads
    b = body_of(s)
    r, one = b.registers(1), b.shared(n)
    other = b.shared(n + 16, over=one)
    i = b.tile * n + b.tid
    b.store(one, b.tid, b.tensors[0][i])
    s.barrier(b)
    b.store(r, 0, one[n - 1 - b.tid])
    s.barrier(b)
    b.store(other, b.tid + 16, r[0])
    with b.when(b.tid < 16):
        b.store(other, b.tid, ZERO)
    s.barrier(b)
    b.store(b.tensors[1], i, other[b.tid] + r[0])

    def element(i, x):
        tile, e = place_in(s, i)
        before = x[tile * n + (n - 1 - tirx.max(e - 16, number(0)))]
        return tirx.if_then_else(e >= 16, before, ZERO) + x[tile * n + (n - 1 - e)]

    return staged(s, b, "reused", (Read(),), element)
