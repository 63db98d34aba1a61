"""What a form of stages is given, and what it gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import te, tirx

from benchmarks.siege.body import Body, number
from souffle.tvm_compat import PrimExpr

__all__ = ["Read", "Setting", "Stage", "defined", "each", "elements", "formula", "place_in", "places"]

Formula = Callable[..., PrimExpr]


@dataclass(frozen=True)
class Setting:
    """Where a stage is to stand.

    Attributes
    ----------
    draw : random.Random
    name : str
    count : int
        Elements of each tensor.
    tiles, threads : int
        Of the stage; tile `t` makes elements ``t * per_tile`` and on.
    block : int
        Threads of the kernel.
    """

    draw: random.Random
    name: str
    count: int
    tiles: int
    threads: int
    block: int

    @property
    def per_tile(self) -> int:
        """Elements that one tile makes."""
        return -(-self.count // self.tiles)

    @property
    def even(self) -> bool:
        """Whether all tiles make equally many."""
        return self.tiles * self.per_tile == self.count

    def barrier(self, body: Body) -> None:
        """A barrier of all threads of the stage."""
        part = self.threads < self.block or (self.threads % 32 == 0 and self.draw.random() < 0.1)
        body.barrier("part" if part else "block", self.threads)


@dataclass(frozen=True)
class Read:
    """A tensor that a stage reads.

    Attributes
    ----------
    dtype : str
        ``"float32"``, or ``"int32"`` for any numbers.
    reach : str
        Which elements a thread reads: ``"thread"`` for those that it would write itself, ``"tile"`` for any of its
        tile, ``"all"``.
    """

    dtype: str = "float32"
    reach: str = "thread"


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage function.

    Attributes
    ----------
    func : PrimFunc
        ``f(tile, tid, reads..., scratch..., output)``.
    setting : Setting
    reads : tuple of Read
    scratch : int
        Tensors of the workspace that it writes and reads itself.
    definition : PrimFunc or None
        What it is to compute, from the same tensors.
    own : bool
        Whether element `e` of a tile is written by thread ``e % threads``.
    form : str
    shared_bytes, static_bytes : int
        Of the pool, and of arrays of its own.
    """

    func: tirx.PrimFunc
    setting: Setting
    reads: tuple[Read, ...]
    scratch: int
    definition: tirx.PrimFunc | None
    own: bool
    form: str
    shared_bytes: int
    static_bytes: int

    @property
    def name(self) -> str:
        """Of the function."""
        return self.setting.name

    @property
    def shares(self) -> bool:
        """Whether it uses shared memory, or barriers of its own."""
        return bool(self.shared_bytes or self.static_bytes or self.setting.threads < self.setting.block)


def defined(setting: Setting, dtypes: Sequence[str], element: Formula) -> tirx.PrimFunc:
    """The definition ``out[i] = element(i, *inputs)``."""
    inputs = [te.placeholder((setting.count,), dtype, name=f"in{n}") for n, dtype in enumerate(dtypes)]
    output = te.compute((setting.count,), lambda i: element(i, *inputs), name="out")
    return te.create_prim_func([*inputs, output])


def formula(draw: random.Random) -> Callable[[PrimExpr], PrimExpr]:
    """A function of one number that is exact for small whole ones."""
    kind, by = draw.randrange(4), draw.randrange(1, 5)
    if kind == 0:
        return lambda v: v * 2.0 + float(by)
    if kind == 1:
        return lambda v: tirx.max(v, tirx.FloatImm("float32", float(-by))) - float(by)
    if kind == 2:
        return lambda v: v - float(by)
    return lambda v: v


def place_in(setting: Setting, i: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """The tile of an element, and its place in it."""
    per = setting.per_tile
    return tirx.truncdiv(i, per), tirx.truncmod(i, per)


@contextmanager
def each(body: Body, setting: Setting, kind: str = "serial") -> Iterator[tuple[PrimExpr, PrimExpr]]:
    """For each element of the tile, by thread ``e % threads``: its place in the tile, and in the tensor."""
    with elements(body, setting, setting.per_tile, kind) as e:
        i = body.tile * setting.per_tile + e
        with body.when(True if setting.even else i < setting.count):
            yield e, i


@contextmanager
def elements(body: Body, setting: Setting, count: int, kind: str = "serial") -> Iterator[PrimExpr]:
    """For each number below `count`, by thread ``e % threads``."""
    turns = -(-count // setting.threads)
    even = turns * setting.threads == count
    if turns == 1:
        with body.when(True if even else body.tid < count):
            yield body.tid
        return
    with body.loop(turns, kind, setting.draw.choice([0, 0, 0, 1, 3])) as k:
        e = k * setting.threads + body.tid
        with body.when(True if even else e < count):
            yield e


@dataclass(frozen=True)
class Places:
    """A way to choose an element for each element, the same in a stage and in its definition."""

    reach: str
    of: Callable[[PrimExpr], PrimExpr]


def places(setting: Setting, reach: Sequence[str] = ("thread", "tile", "all")) -> Places:
    """Which element of an input an element needs."""
    draw, count, per = setting.draw, setting.count, setting.per_tile
    found = [Places("thread", lambda i: i)]
    if setting.even:

        def turned(i: PrimExpr) -> PrimExpr:
            tile, e = place_in(setting, i)
            return tile * per + (per - 1 - e)

        found.append(Places("tile", turned))
        if per & (per - 1) == 0 and per > 1:
            flip = draw.randrange(1, per)

            def swizzled(i: PrimExpr) -> PrimExpr:
                tile, e = place_in(setting, i)
                return tile * per + tirx.bitwise_xor(e, number(flip))

            found.append(Places("tile", swizzled))
    stride, shift = draw.randrange(1, 8), draw.randrange(-40, 41)
    found.append(Places("all", lambda i: count - 1 - i))
    found.append(Places("all", lambda i: tirx.truncmod(i * stride, count)))
    found.append(Places("all", lambda i: tirx.max(tirx.min(i + shift, number(count - 1)), number(0))))
    allowed = [p for p in found if p.reach in reach]
    return draw.choice(allowed)
