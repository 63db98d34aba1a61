"""Where reads lie in memory, against all elements of random tensors counted one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from math import prod

import pytest
from tvm import tirx

from souffle.schedule.gpu.forms.contraction_expressions import Axis
from souffle.schedule.gpu.forms.memory_access import aligned_lanes, lanes_along, memory_step
from souffle.tvm_compat import PrimExpr

_EXTENTS = (1, 2, 3, 4, 7, 8)
_MOST = 8

Point = tuple[int, ...]
Index = tuple[PrimExpr, Callable[[Point], int]]
"""An expression, and the same in Python."""


def _drawn(rng: random.Random, axes: list[Axis], depth: int, linear: bool) -> Index:
    """A random index; sums and multiples alone where it is to be linear."""
    kind = rng.choice(["sum", "times", "difference"] + ([] if linear else ["quotient", "rest"])) if depth else "leaf"
    if kind == "leaf":
        if rng.random() < 0.2:
            number = rng.choice([0, 1, 3, 8])
            return tirx.IntImm("int32", number), lambda _: number
        place = rng.randrange(len(axes))
        return axes[place].var, lambda point: point[place]
    left, own = _drawn(rng, axes, depth - 1, linear)
    number = rng.choice([1, 2, 3, 4, 8])
    if kind == "times":
        return left * number, lambda point: own(point) * number
    if kind == "quotient":
        return tirx.FloorDiv(left, tirx.IntImm("int32", number)), lambda point: own(point) // number
    if kind == "rest":
        return tirx.FloorMod(left, tirx.IntImm("int32", number)), lambda point: own(point) % number
    right, other = _drawn(rng, axes, depth - 1, linear)
    if kind == "sum":
        return left + right, lambda point: own(point) + other(point)
    return left - right, lambda point: own(point) - other(point)


@pytest.mark.parametrize("linear", [True, False])
def test_steps_and_vectors_are_those_of_the_elements(linear: bool) -> None:
    """A step is that from each element to the next, and a vector begins at a multiple of its length."""
    rng = random.Random(29)
    wide = known = 0
    for _ in range(120):
        axes = [Axis(tirx.Var(name, "int32"), rng.choice(_EXTENTS)) for name in "ijk"]
        shape = [rng.choice(_EXTENTS) for _ in range(rng.randint(1, 3))]
        drawn = [_drawn(rng, axes, rng.randint(0, 3), linear) for _ in shape]
        load = tirx.decl_buffer(shape, "float32", "tensor")[tuple(index for index, _ in drawn)]

        def place(point: Point, shape: list[int] = shape, drawn: list[Index] = drawn) -> int:
            offset = 0
            for extent, (_, value) in zip(shape, drawn, strict=True):
                offset = offset * extent + value(point)
            return offset

        points = list(product(*(range(axis.extent) for axis in axes)))
        for number, axis in enumerate(axes):
            if axis.extent == 1:
                continue
            last = [point for point in points if point[number] + 1 < axis.extent]
            steps = {place((*p[:number], p[number] + 1, *p[number + 1 :])) - place(p) for p in last}
            step = memory_step(load, axis)
            if linear:
                assert len(steps) == 1 and (step or 0) == steps.pop()
            elif step is not None:
                assert steps == {step}
            known += step is not None

            lanes = aligned_lanes(load, axis, _MOST)
            starts = [place(p) for p in points if p[number] % lanes == 0]
            assert step in (None, 0) or all(start % lanes == 0 for start in starts)
            if linear and step and lanes < _MOST and prod(shape) % (2 * lanes) == 0:
                corners = product(*((0, 2 * lanes if axis is other else 1) for other in axes))
                assert any(place(corner) % (2 * lanes) for corner in corners), "longer vectors were possible"
            vector = lanes_along(load, axis, "float32")
            assert vector == 1 or steps <= {0, 1}
            wide += vector > 1
    assert known and wide
