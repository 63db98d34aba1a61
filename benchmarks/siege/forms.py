"""The forms of stages, each right by construction; one more is one more function here, with its weight.

A form is given a :class:`benchmarks.siege.setting.Setting`, draws what it likes, and gives the function and what it is
to compute. ``None`` says that the setting does not suit it. Mistakes are planted later, in the TensorIR of any form.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

from benchmarks.siege.body import FULL_MASK, Body, number, shuffle
from benchmarks.siege.setting import Read, Setting, Stage, defined, each, elements, formula, place_in, places

__all__ = ["FORMS", "stage_of"]

Form = Callable[[Setting], Stage | None]
FORMS: dict[str, tuple[float, Form]] = {}
_ZERO = tirx.FloatImm("float32", 0.0)
_WARP = 32


def _form(weight: float) -> Callable[[Form], Form]:
    def register(form: Form) -> Form:
        FORMS[form.__name__] = (weight, form)
        return form

    return register


def stage_of(setting: Setting, names: tuple[str, ...] = ()) -> Stage:
    """A stage of a random form, of these if any are named and suit the setting."""
    known = [name for name in FORMS if not names or name in names]
    while True:
        name = setting.draw.choices(known, [FORMS[n][0] for n in known])[0]
        found = FORMS[name][1](setting)
        if found is not None:
            return found
        known = [n for n in known if n != name] or list(FORMS)


def _body(s: Setting, reads: int = 1, dtypes: tuple[str, ...] = (), scratch: int = 0) -> Body:
    dtypes = dtypes or ("float32",) * reads
    return Body(s.name, [*((s.count, d) for d in dtypes), *(((s.count, "float32"),) * (scratch + 1))])


def _stage(s: Setting, b: Body, form: str, reads: tuple[Read, ...], element, *, own: bool = True, scratch: int = 0):
    definition = None if element is None else defined(s, [r.dtype for r in reads], element)
    return _whole(s, b, form, reads, definition, own, scratch)


def _whole(s: Setting, b: Body, form: str, reads: tuple[Read, ...], definition, own: bool = True, scratch: int = 0):
    return Stage(b.function(), s, reads, scratch, definition, own, form, b.shared_bytes, b.static_bytes)


# Without shared memory


@_form(2)
def pointwise(s: Setting) -> Stage:
    """One element from one or two others; loops, guards, strides."""
    f, where, two = formula(s.draw), places(s), s.draw.random() < 0.4
    other = places(s) if two else where
    b = _body(s, 2 if two else 1)
    with each(b, s, s.draw.choice(["serial", "unrolled"])) as (_, i):
        value = f(b.tensors[0][where.of(i)])
        b.store(b.tensors[-1], i, value + b.tensors[1][other.of(i)] if two else value)
    reads = (Read(reach=where.reach), Read(reach=other.reach))[: 1 + two]
    if two:
        return _stage(s, b, "pointwise", reads, lambda i, x, y: f(x[where.of(i)]) + y[other.of(i)])
    return _stage(s, b, "pointwise", reads, lambda i, x: f(x[where.of(i)]))


@_form(1)
def vectors(s: Setting) -> Stage | None:
    """Wide accesses: a thread makes neighbours."""
    lanes = s.draw.choice([2, 4])
    if s.per_tile % lanes or not s.even:
        return None
    b = _body(s)
    with elements(b, s, s.per_tile // lanes) as e:
        at = tirx.Ramp(b.tile * s.per_tile + e * lanes, number(1), lanes)
        b.store(
            b.tensors[1], at, tirx.BufferLoad(b.tensors[0], [at]) * tirx.Broadcast(tirx.FloatImm("float32", 2.0), lanes)
        )
    return _stage(s, b, "vectors", (Read(reach="tile"),), lambda i, x: x[i] * 2.0, own=False)


@_form(1)
def registers(s: Setting) -> Stage:
    """A thread keeps its elements in an array of registers, and writes them in another order."""
    turns = -(-s.per_tile // s.threads)
    b = _body(s)
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
    return _stage(s, b, "registers", (Read(),), lambda i, x: x[i] * 3.0)


@_form(1.5)
def gather(s: Setting) -> Stage:
    """An index that data decides, clamped or under a guard of its own."""
    guard, last = s.draw.random() < 0.5, s.count - 1
    b = _body(s, dtypes=("int32", "float32"))

    def chosen(index, x):
        if guard:
            inside = tirx.And(index >= 0, index < s.count)
            return tirx.if_then_else(inside, x[index], _ZERO)
        return x[tirx.max(tirx.min(index, number(last)), number(0))]

    with each(b, s) as (_, i):
        b.store(b.tensors[2], i, chosen(b.tensors[0][i], b.tensors[1]))

    def element(i, index, x):
        inside = tirx.And(index[i] >= 0, index[i] < s.count)
        clamped = x[tirx.max(tirx.min(index[i], number(last)), number(0))]
        return tirx.if_then_else(inside, clamped, _ZERO) if guard else clamped

    return _stage(s, b, "gather", (Read("int32"), Read(reach="all")), element)


@_form(1)
def on_data(s: Setting) -> Stage:
    """A choice by data, as an expression or as a branch that both ways write."""
    branch = s.draw.random() < 0.5
    b = _body(s)
    with each(b, s) as (_, i):
        x = b.tensors[0][i]
        if branch:
            then = tirx.BufferStore(b.tensors[1], x * 2.0, [i])
            b.do(tirx.IfThenElse(x > _ZERO, then, tirx.BufferStore(b.tensors[1], x - 1.0, [i])))
        else:
            b.store(b.tensors[1], i, tirx.Select(x > _ZERO, x * 2.0, x - 1.0))
    return _stage(s, b, "on_data", (Read(),), lambda i, x: tirx.Select(x[i] > _ZERO, x[i] * 2.0, x[i] - 1.0))


@_form(1)
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

    b = _body(s)
    with each(b, s) as (_, i):
        b.store(b.tensors[1], i, b.tensors[0][of(i)])
    return _stage(s, b, "resized", (Read(reach="all"),), lambda i, x: x[of(i)])


@_form(1)
def scratch(s: Setting) -> Stage:
    """Writes to the workspace, and reads it back: a thread its own, or those of the tile after a barrier."""
    where = places(s, ("thread", "tile"))
    b = _body(s, scratch=1)
    with each(b, s) as (_, i):
        b.store(b.tensors[1], i, b.tensors[0][i] + 1.0)
    if where.reach != "thread" or s.draw.random() < 0.3:
        s.barrier(b)
    with each(b, s) as (_, i):
        b.store(b.tensors[2], i, b.tensors[1][where.of(i)] * 2.0)
    return _stage(s, b, "scratch", (Read(),), None, scratch=1)


@_form(1)
def triangle(s: Setting) -> Stage:
    """A loop that has more turns in later threads: sums of the first elements of the tile."""
    if s.per_tile > 128:
        return None
    b = _body(s)
    r = b.registers(1)
    with each(b, s) as (e, i):
        b.store(r, 0, _ZERO)
        with b.loop(e + 1) as k:
            b.store(r, 0, r[0] + b.tensors[0][b.tile * s.per_tile + k])
        b.store(b.tensors[1], i, r[0])

    def element(i, x):
        _, e = place_in(s, i)
        k = te.reduce_axis((0, s.per_tile), name="k")
        source = tirx.min(i - e + k, number(s.count - 1))
        return te.sum(tirx.if_then_else(k <= e, x[source], _ZERO), axis=k)

    return _stage(s, b, "triangle", (Read(reach="tile"),), element)


# Through shared memory


@_form(2.5)
def exchange(s: Setting) -> Stage | None:
    """Threads hand elements to each other, in the pool or in a static array, with a swizzle."""
    per = s.per_tile
    power = per & (per - 1) == 0 and per > 1
    flip = s.draw.randrange(per) if power else 0
    static, parts = s.draw.random() < 0.25, 1 + (s.draw.random() < 0.3)
    where = places(s, ("tile",) if s.even else ("thread",))
    b = _body(s)
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
    return _stage(s, b, "exchange", (Read(),), lambda i, x: x[where.of(i)] + x[where.of(i)])


@_form(2)
def ring(s: Setting) -> Stage | None:
    """A loop over steps that goes through slots of shared memory, filled a turn ahead."""
    if not s.even or s.per_tile != s.threads:
        return None
    slots, steps = s.draw.choice([2, 2, 3, 4]), s.draw.randrange(2, 6)
    n, t = s.threads, s.tiles
    b = _body(s)
    a, r = b.shared(slots * n), b.registers(1)
    i = b.tile * n + b.tid

    def source(k):
        return tirx.truncmod(b.tile + k, t) * n + b.tid

    b.store(r, 0, _ZERO)
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

    def element(i, x):
        tile, e = place_in(s, i)
        k = te.reduce_axis((0, steps), name="k")
        return te.sum(x[tirx.truncmod(tile + k, t) * n + (n - 1 - e)], axis=k)

    return _stage(s, b, "ring", (Read(reach="all"),), element)


@_form(3)
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
    b = _body(s)
    a, r = b.shared(slots * n), b.registers(1)
    copies = n // lanes

    def fetch(k) -> None:
        with b.when(b.tid < copies if lanes > 1 else True):
            into = a[tirx.truncmod(k, slots) * n + b.tid * lanes]
            source = b.tensors[0][tirx.truncmod(b.tile + k, t) * n + b.tid * lanes]
            b.copy(width, into, source, tirx.Cast("int32", b.tid * lanes < n) if zero else None)

    b.store(r, 0, _ZERO)
    for k in range(ahead):
        if k < steps:
            fetch(number(k))
        b.commit()
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

    def element(i, x):
        tile, e = place_in(s, i)
        k = te.reduce_axis((0, steps), name="k")
        return te.sum(x[tirx.truncmod(tile + k, t) * n + (n - 1 - e)], axis=k)

    return _stage(s, b, "pipeline", (Read(reach="all"),), element)


@_form(1.5)
def tree(s: Setting) -> Stage | None:
    """A sum over a tile by halves, with a barrier for each."""
    n = s.threads
    if not s.even or s.per_tile != n or n & (n - 1):
        return None
    b = _body(s)
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
    return _whole(s, b, "tree", (Read(),), te.create_prim_func([total, output]))


@_form(1)
def scan(s: Setting) -> Stage | None:
    """Prefix sums by doubling, from one of two arrays to the other."""
    n = s.threads
    if not s.even or s.per_tile != n:
        return None
    b = _body(s)
    arrays = [b.shared(n), b.shared(n)]
    i = b.tile * n + b.tid
    b.store(arrays[0], b.tid, b.tensors[0][i])
    s.barrier(b)
    distance, turn = 1, 0
    while distance < n:
        source, target = arrays[turn % 2], arrays[1 - turn % 2]
        before = tirx.if_then_else(b.tid >= distance, source[tirx.max(b.tid - distance, number(0))], _ZERO)
        b.store(target, b.tid, source[b.tid] + before)
        s.barrier(b)
        distance, turn = 2 * distance, turn + 1
    b.store(b.tensors[1], i, arrays[turn % 2][b.tid])

    def element(i, x):
        k = te.reduce_axis((0, n), name="k")
        _, e = place_in(s, i)
        return te.sum(tirx.if_then_else(k <= e, x[i - e + k], _ZERO), axis=k)

    return _stage(s, b, "scan", (Read(),), element)


# Warps


def _lanes(b: Body, threads: int):
    return tirx.bitwise_and(b.tid, number(_WARP - 1))


@_form(2)
def butterfly(s: Setting) -> Stage | None:
    """Sums over the lanes of a warp, or of parts of it, by shuffles among all lanes, or those of a part alone."""
    n = s.threads
    if n % _WARP or not s.even or s.per_tile != n:
        return None
    width = s.draw.choice([4, 8, 16, 32])
    alone = s.draw.random() < 0.3
    b = _body(s)
    r = b.registers(1)
    i = b.tile * n + b.tid
    b.store(r, 0, b.tensors[0][i])
    mask = number(FULL_MASK, "uint32")
    loop = s.draw.random() < 0.3

    def add(distance) -> None:
        b.store(r, 0, r[0] + shuffle("_xor", mask, r[0], distance, 32))

    limit = s.draw.choice(range(_WARP, n + 1, _WARP))
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
        return _stage(s, b, "butterfly", (Read(),), element)
    source = te.placeholder((s.count,), "float32", name="in0")
    sums = te.compute((s.count,), lambda i: element(i, source), name="sums")
    output = te.compute(
        (s.count,), lambda i: tirx.if_then_else(tirx.truncmod(i, n) < limit, sums[i], source[i]), name="out"
    )
    return _whole(s, b, "butterfly", (Read(),), te.create_prim_func([source, output]))


@_form(1)
def neighbours(s: Setting) -> Stage | None:
    """The next lane's number, where lanes may be missing at the end: the mask names those that there are."""
    n = s.threads
    if not s.even or s.per_tile != n or (n < _WARP and s.block != n):
        return None
    some = s.draw.randrange(2, _WARP + 1) if s.draw.random() < 0.5 else _WARP
    if n < some:
        some = n
    if n % _WARP and some == _WARP:
        return None
    mask = 2**some - 1
    b = _body(s)
    r = b.registers(2)
    i = b.tile * n + b.tid
    b.store(r, 0, b.tensors[0][i])
    b.store(r, 1, r[0])
    lane = _lanes(b, n)
    within = b.tid < some if n % _WARP else lane < some
    with b.when(True if some == _WARP else within):
        b.store(r, 1, shuffle("_down", number(mask, "uint32"), r[0], number(1)))
    last = tirx.And(within, lane < some - 1)
    b.store(b.tensors[1], i, r[0] + tirx.Select(last, r[1], _ZERO))

    def element(i, x):
        e = tirx.truncmod(i, n)
        here = tirx.truncmod(e, _WARP)
        inside = tirx.And(e + 1 < n, here < some - 1)
        if n % _WARP:
            inside = tirx.And(inside, e < some)
        return x[i] + tirx.if_then_else(inside, x[tirx.min(i + 1, number(s.count - 1))], _ZERO)

    return _stage(s, b, "neighbours", (Read(),), element)


@_form(1.5)
def warp_exchange(s: Setting) -> Stage | None:
    """Each warp has its part of the shared array, and waits for itself only; in a loop, if it likes."""
    n = s.threads
    if n % _WARP or not s.even or s.per_tile != n:
        return None
    steps, flip = s.draw.randrange(1, 4), s.draw.randrange(1, _WARP)
    b = _body(s)
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

    return _stage(s, b, "warp_exchange", (Read(),), element)


@_form(1.5)
def block_sum(s: Setting) -> Stage | None:
    """A sum over a tile: by shuffles in each warp, then through shared memory."""
    n = s.threads
    if n % _WARP or not s.even or s.per_tile != n:
        return None
    b = _body(s)
    r, a = b.registers(1), b.shared(n // _WARP, static=s.draw.random() < 0.3)
    i = b.tile * n + b.tid
    b.store(r, 0, b.tensors[0][i])
    distance = _WARP // 2
    while distance:
        b.store(r, 0, r[0] + shuffle("_xor", number(FULL_MASK, "uint32"), r[0], number(distance)))
        distance //= 2
    lane = tirx.truncmod(b.tid, _WARP)
    with b.when(tirx.EQ(lane, number(0))):
        b.store(a, tirx.truncdiv(b.tid, _WARP), r[0])
    s.barrier(b)
    b.store(r, 0, _ZERO)
    with b.loop(n // _WARP, s.draw.choice(["serial", "unrolled"])) as k:
        b.store(r, 0, r[0] + a[k])
    b.store(b.tensors[1], i, r[0])

    def element(i, x):
        k = te.reduce_axis((0, n), name="k")
        return te.sum(x[tirx.truncdiv(i, n) * n + k], axis=k)

    return _stage(s, b, "block_sum", (Read(),), element)


@_form(0.5)
def told(s: Setting) -> Stage | None:
    """A barrier under a number that is the same for all threads."""
    b = _body(s, dtypes=("int32", "float32"))
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
    return _stage(s, b, "told", (Read("int32", "all"), Read()), lambda i, flag, x: x[i] * 2.0)
