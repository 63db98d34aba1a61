"""Where the parts of a tensor lie that tiles make: boxes in any order, and runs of elements."""

from __future__ import annotations

from itertools import product

import pytest

from souffle.index import isl
from souffle.kernel.tile_layouts import TileLayout, flat, layout_of


def written(shape: tuple[int, ...], part: tuple[int, ...], order: tuple[int, ...]) -> isl.Map:
    """``[tile] -> [index]`` of tiles that make boxes, counted along the dimensions of `order`, the slowest first."""
    counts = [extent // own for extent, own in zip(shape, part, strict=True)]
    tile, below = isl.constant(len(shape), 0), 1
    for dimension in reversed(order):
        along = isl.divide_floor(isl.axis(len(shape), dimension), part[dimension])
        tile, below = tile.add(along.mul(isl.constant(len(shape), below))), below * counts[dimension]
    return isl.map_to(isl.box([(0, extent) for extent in shape]), [tile], (below,)).reverse()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("part", [(4, 3), (2, 6), (4, 6)])
def test_the_boxes_of_tiles_in_any_order(part: tuple[int, int], order: tuple[int, int]) -> None:
    shape = (8, 12)
    layout = layout_of(shape, (8 // part[0]) * (12 // part[1]), written(shape, part, order))
    assert layout == TileLayout(shape, part, order)
    assert layout.parts == (8 // part[0]) * (12 // part[1]) and layout.plain is False
    assert sorted(layout.relaid[:2]) == sorted((8 // part[0], 12 // part[1])) and layout.relaid[2:] == part
    other = written(shape, part, order[::-1])
    assert layout.holds(other) is (layout.counts[0] == 1 or layout.counts[1] == 1)


@pytest.mark.parametrize(
    ("shape", "part", "order", "plain"),
    [
        ((6, 4), (2, 4), (0,), True),
        ((6, 4), (1, 2), (0, 1), True),
        ((6, 4), (1, 2), (1, 0), False),
        ((6, 4), (2, 2), (0, 1), False),
        ((1, 6, 2, 2), (1, 3, 2, 2), (1,), True),
        ((3, 5), (3, 5), (), True),
    ],
)
def test_which_layouts_are_that_of_the_tensor(shape, part, order, plain: bool) -> None:
    layout = TileLayout(shape, part, order)
    assert layout.plain is plain
    # Where it is plain, and only there, all elements are where they would be part by part.
    counts = layout.counts
    place = 0
    same = True
    for number in product(*(range(counts[d]) for d in order)):
        for inside in product(*map(range, part)):
            index = list(inside)
            for along, dimension in zip(number, order, strict=True):
                index[dimension] += along * part[dimension]
            at = 0
            for value, extent in zip(index, shape, strict=True):
                at = at * extent + value
            same, place = same and at == place, place + 1
    assert same is plain


def test_runs_of_elements_are_parts_of_a_row() -> None:
    # Tiles of ten elements of three rows of twenty, which are no boxes of whole rows.
    shape = (3, 20)
    number = isl.axis(2, 0).mul(isl.constant(2, 20)).add(isl.axis(2, 1))
    runs = isl.map_to(isl.box([(0, 3), (0, 20)]), [isl.divide_floor(number, 15)], (4,)).reverse()
    assert layout_of(shape, 4, runs) is None
    (row, (in_row,)) = flat(shape, [runs])
    layout = layout_of(row, 4, in_row)
    assert layout == TileLayout((60,), (15,), (0,)) and layout.plain


def test_what_no_layout_says() -> None:
    shape = (8, 12)
    rows = written(shape, (4, 12), (0,))
    assert layout_of(shape, 3, rows) is None and layout_of((), 1, rows) is None
    overlapping = rows.union(written(shape, (2, 12), (0,)))
    assert layout_of(shape, 4, overlapping) is None
    # Tiles beyond the end of the tensor.
    assert layout_of((7, 12), 2, written((8, 12), (4, 12), (0,))) is None
