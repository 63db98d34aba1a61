"""Inverses of index maps: those of rotations are right, and none is taken on trust."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import tvm
from tvm import tirx
from tvm.ir import Range

from souffle.index.inverse import inverse_map
from souffle.tvm_compat import PrimExpr, substitute
from tests.defects import mended

Map = Callable[..., Sequence[PrimExpr]]


def axes_of(extents: Sequence[int], dtype: str = "int32") -> list[tuple[tirx.Var, int]]:
    return [(tirx.Var(f"i{n}", dtype), extent) for n, extent in enumerate(extents)]


def value_at(expression: PrimExpr, names: Sequence[tirx.Var], point: Sequence[int]) -> int:
    """By TVM's own folding of constants."""
    made = substitute(expression, {v: tirx.const(x, str(v.ty.dtype)) for v, x in zip(names, point, strict=True)})
    return int(tvm.sym.Analyzer().simplify(made).value)


def assert_inverse(axes: Sequence[tuple[tirx.Var, int]], expressions: Sequence[PrimExpr]) -> None:
    """Every point comes back."""
    found = inverse_map(axes, expressions)
    assert found is not None
    names = [var for var, _ in axes]
    places = [tirx.Var(f"p{n}", "int32") for n, _ in enumerate(expressions)]
    back = found(places)
    for point in itertools.product(*(range(extent) for _, extent in axes)):
        place = [value_at(e, names, point) for e in expressions]
        assert tuple(value_at(e, places, place) for e in back) == point


@pytest.mark.parametrize(
    ("extents", "make"),
    [
        ((4, 6), lambda i, j: (j, i)),
        ((8, 12), lambda i, j: (i // 4 * 3 + j // 4, i % 4 * 4 + j % 4)),
        ((8,), lambda i: ((i + 6) % 8,)),
        ((7, 5), lambda i, j: ((i + 3) % 7, j)),
        ((8, 8), lambda i, j: ((i + 6) % 8 // 4 * 2 + (j + 6) % 8 // 4, (i + 2) % 4 * 4 + (j + 2) % 4)),
        ((8, 12), lambda i, j: ((i + 3) % 8 // 4 * 3 + j // 4, (i + 3) % 4 * 4 + j % 4)),
        ((12,), lambda i: ((i + 5) // 3 % 4, (i + 5) % 3)),
        ((12, 3), lambda i, j: ((i - 5) % 12 * 3 + j,)),
    ],
)
def test_each_point_comes_back(extents: Sequence[int], make: Map) -> None:
    axes = axes_of(extents)
    assert_inverse(axes, make(*(var for var, _ in axes)))


@pytest.mark.parametrize(
    ("extents", "make"),
    [
        ((8,), lambda i: (i // 2,)),
        ((8, 8), lambda i, j: ((i + j) % 8, j % 4)),
        ((8,), lambda i: (i % 4,)),
    ],
)
def test_what_is_no_bijection_has_none(extents: Sequence[int], make: Map) -> None:
    axes = axes_of(extents)
    assert inverse_map(axes, make(*(var for var, _ in axes))) is None


def test_an_answer_of_tvm_that_forgets_a_rotation_is_not_taken() -> None:
    """A rotation of a rotation is not read here; TVM's inverse of it is that of ``i``, which every point refutes."""
    axes = axes_of((8,))
    (i, _) = axes[0]
    twice = ((i * 3 + 6) % 8 + 3) % 8
    assert inverse_map(axes, [twice]) is None


def test_tvm_forgets_a_rotation() -> None:
    (i, _) = axes_of((8,))[0]
    found = tirx.IndexMap([i], [(i + 6) % 8], None).inverse([Range(0, 8)])
    place = tirx.Var("place", "int32")
    assert found.map_indices([place])[0].same_as(place), mended("`_rotation` of `index/inverse.py`")


@pytest.mark.parametrize("seed", range(40))
def test_random_windows_around_the_end(seed: int) -> None:
    choose = random.Random(seed)
    windows = [(choose.randint(1, 4), choose.randint(1, 4)) for _ in range(choose.randint(1, 2))]
    extents = [count * size for count, size in windows]
    shifts = [choose.randrange(extent) for extent in extents]
    axes = axes_of(extents)
    outer: PrimExpr = tirx.IntImm("int32", 0)
    inner: PrimExpr = tirx.IntImm("int32", 0)
    for (var, extent), (count, size), shift in zip(axes, windows, shifts, strict=True):
        around = (var + shift) % extent if shift else var
        outer, inner = outer * count + around // size, inner * size + around % size
    found = inverse_map(axes, [outer, inner])
    if found is not None:
        assert_inverse(axes, [outer, inner])
    else:
        # A window of one element, or one window, is an index that is always 0 to TVM.
        assert any(1 in pair for pair in windows)
