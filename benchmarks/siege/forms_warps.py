"""Forms of stages: lanes of warps that shuffle, and multiply matrices together.

A form draws what it likes and gives a function that is right, and what it is to compute; one more is one more function
here, with its weight. Mistakes are planted later, in the TensorIR of any form.
"""

from __future__ import annotations

from tvm import te, tirx

from benchmarks.siege.body import FULL_MASK, Body, call, number, shuffle
from benchmarks.siege.registry import WARP, ZERO, body_of, form, staged, whole
from benchmarks.siege.setting import Read, Setting, Stage, each, place_in

__all__: list[str] = []


def _lanes(b: Body, threads: int):
    return tirx.bitwise_and(b.tid, number(WARP - 1))


@form(2)
def butterfly(s: Setting) -> Stage | None:
    """Sums over the lanes of a warp, or of parts of it, by shuffles among all lanes, or those of a part alone."""
    n = s.threads
    if n % WARP or not s.even or s.per_tile != n:
        return None
    width = s.draw.choice([4, 8, 16, 32])
    alone = s.draw.random() < 0.3
    b = body_of(s)
    r = b.registers(1)
    i = b.tile * n + b.tid
    b.store(r, 0, b.tensors[0][i])
    mask = number(FULL_MASK, "uint32")
    loop = s.draw.random() < 0.3

    def add(distance) -> None:
        b.store(r, 0, r[0] + shuffle("_xor", mask, r[0], distance, 32))

    limit = s.draw.choice(range(WARP, n + 1, WARP))
    with b.when(b.tid < limit if alone else True):
        if loop:
            with b.loop(width.bit_length() - 1) as k:
                add(tirx.shift_left(number(1), k))
        else:
            distance = width // 2
            while distance:
                add(number(distance))
                distance //= 2
    b.store(b.tensors[1], i, r[0])

    def element(i, x):
        k = te.reduce_axis((0, width), name="k")
        return te.sum(x[tirx.truncdiv(i, width) * width + k], axis=k)

    if not alone or limit == n:
        return staged(s, b, "butterfly", (Read(),), element)
    source = te.placeholder((s.count,), "float32", name="in0")
    sums = te.compute((s.count,), lambda i: element(i, source), name="sums")
    output = te.compute(
        (s.count,), lambda i: tirx.if_then_else(tirx.truncmod(i, n) < limit, sums[i], source[i]), name="out"
    )
    return whole(s, b, "butterfly", (Read(),), te.create_prim_func([source, output]))


@form(1)
def neighbours(s: Setting) -> Stage | None:
    """The next lane's number, where lanes may be missing at the end: the mask names those that there are."""
    n = s.threads
    if not s.even or s.per_tile != n or (n < WARP and s.block != n):
        return None
    some = s.draw.randrange(2, WARP + 1) if s.draw.random() < 0.5 else WARP
    if n < some:
        some = n
    if n % WARP and some == WARP:
        return None
    mask = 2**some - 1
    b = body_of(s)
    r = b.registers(2)
    i = b.tile * n + b.tid
    b.store(r, 0, b.tensors[0][i])
    b.store(r, 1, r[0])
    lane = _lanes(b, n)
    within = b.tid < some if n % WARP else lane < some
    with b.when(True if some == WARP else within):
        b.store(r, 1, shuffle("_down", number(mask, "uint32"), r[0], number(1)))
    last = tirx.And(within, lane < some - 1)
    b.store(b.tensors[1], i, r[0] + tirx.Select(last, r[1], ZERO))

    def element(i, x):
        e = tirx.truncmod(i, n)
        here = tirx.truncmod(e, WARP)
        inside = tirx.And(e + 1 < n, here < some - 1)
        if n % WARP:
            inside = tirx.And(inside, e < some)
        return x[i] + tirx.if_then_else(inside, x[tirx.min(i + 1, number(s.count - 1))], ZERO)

    return staged(s, b, "neighbours", (Read(),), element)


@form(1.5)
def warp_exchange(s: Setting) -> Stage | None:
    """Each warp has its part of the shared array, and waits for itself only; in a loop, if it likes."""
    n = s.threads
    if n % WARP or not s.even or s.per_tile != n:
        return None
    steps, flip = s.draw.randrange(1, 4), s.draw.randrange(1, WARP)
    b = body_of(s)
    a, r = b.shared(n), b.registers(1)
    i = b.tile * n + b.tid
    b.store(r, 0, b.tensors[0][i])
    with b.loop(steps):
        b.store(a, b.tid, r[0])
        b.barrier("warp")
        b.store(r, 0, a[tirx.bitwise_xor(b.tid, number(flip))] + 1.0)
        b.barrier("warp")
    b.store(b.tensors[1], i, r[0])

    def element(i, x):
        tile, e = place_in(s, i)
        return x[tile * n + tirx.bitwise_xor(e, number(flip if steps % 2 else 0))] + float(steps)

    return staged(s, b, "warp_exchange", (Read(),), element)


@form(1.5)
def block_sum(s: Setting) -> Stage | None:
    """A sum over a tile: by shuffles in each warp, then through shared memory."""
    n = s.threads
    if n % WARP or not s.even or s.per_tile != n:
        return None
    b = body_of(s)
    r, a = b.registers(1), b.shared(n // WARP, static=s.draw.random() < 0.3)
    i = b.tile * n + b.tid
    b.store(r, 0, b.tensors[0][i])
    distance = WARP // 2
    while distance:
        b.store(r, 0, r[0] + shuffle("_xor", number(FULL_MASK, "uint32"), r[0], number(distance)))
        distance //= 2
    lane = tirx.truncmod(b.tid, WARP)
    with b.when(tirx.EQ(lane, number(0))):
        b.store(a, tirx.truncdiv(b.tid, WARP), r[0])
    s.barrier(b)
    b.store(r, 0, ZERO)
    with b.loop(n // WARP, s.draw.choice(["serial", "unrolled"])) as k:
        b.store(r, 0, r[0] + a[k])
    b.store(b.tensors[1], i, r[0])

    def element(i, x):
        k = te.reduce_axis((0, n), name="k")
        return te.sum(x[tirx.truncdiv(i, n) * n + k], axis=k)

    return staged(s, b, "block_sum", (Read(),), element)


@form(0.5)
def told(s: Setting) -> Stage | None:
    """A barrier under a number that is the same for all threads."""
    b = body_of(s, dtypes=("int32", "float32"))
    if s.threads < s.block:
        return None
    a = b.shared(s.per_tile)
    with each(b, s) as (e, i):
        b.store(a, e, b.tensors[1][i])
    b.barrier()
    flag = b.bind(b.tensors[0][b.tile]) if s.tiles <= s.count else None
    if flag is None:
        return None
    with b.when(flag > 0):
        b.barrier()
    with each(b, s) as (e, i):
        b.store(b.tensors[2], i, a[e] * 2.0)
    return staged(s, b, "told", (Read("int32", "all"), Read()), lambda i, flag, x: x[i] * 2.0)


@form(0.8)
def active_sum(s: Setting) -> Stage | None:
    """A sum over the lanes that are active together, whole warps of them, as TVM writes its reductions."""
    n = s.threads
    if n % WARP or not s.even or s.per_tile != n:
        return None
    limit = s.draw.choice(range(WARP, n + 1, WARP))
    b = body_of(s)
    r, mask = b.registers(1), b.registers(1, "uint32")
    i = b.tile * n + b.tid
    b.store(r, 0, b.tensors[0][i])
    with b.when(True if limit == n else b.tid < limit):
        b.store(mask, 0, tirx.call_intrin("uint32", "tirx.cuda.__activemask"))
        for distance in (16, 8, 4, 2, 1):
            b.store(r, 0, r[0] + shuffle("_xor", mask[0], r[0], number(distance)))
    b.store(b.tensors[1], i, r[0])
    source = te.placeholder((s.count,), "float32", name="in0")
    k = te.reduce_axis((0, WARP), name="k")
    sums = te.compute((s.count,), lambda i: te.sum(source[tirx.truncdiv(i, WARP) * WARP + k], axis=k), name="sums")
    output = te.compute(
        (s.count,), lambda i: tirx.if_then_else(tirx.truncmod(i, n) < limit, sums[i], source[i]), name="out"
    )
    return whole(s, b, "active_sum", (Read(),), te.create_prim_func([source, output]))


@form(1)
def matrices(s: Setting) -> Stage | None:
    """A product of matrices by each warp, out of shared memory in halves: not defined, for it adds many."""
    n = s.threads
    if n % WARP or not s.even or s.per_tile != n:
        return None
    b = body_of(s)
    a = b.shared(n * 8, "float16")
    left, right, total = b.registers(4, "uint32"), b.registers(4, "uint32"), b.registers(4)
    i = b.tile * n + b.tid
    with b.loop(8) as k:
        b.store(a, b.tid * 8 + k, tirx.Cast("float16", b.tensors[0][i]))
    if s.draw.random() < 0.5:
        s.barrier(b)
    else:
        b.barrier("warp")
    with b.loop(4) as k:
        b.store(total, k, ZERO)
    b.do(call("souffle_load_matrices", tirx.address_of(left[0]), tirx.address_of(a[b.tid * 8])))
    b.do(call("souffle_load_transposed_matrices", tirx.address_of(right[0]), tirx.address_of(a[b.tid * 8])))
    with b.loop(2, "unrolled") as k:
        halves = (tirx.address_of(left[0]), tirx.address_of(right[k * 2]))
        b.do(call("souffle_add_product", tirx.address_of(total[0]), *halves))
    b.store(b.tensors[1], i, total[0] + total[1] + total[2] + total[3])
    return staged(s, b, "matrices", (Read(),), None)
