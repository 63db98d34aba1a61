"""Constants that are two values by a condition on their indices are calculated instead of read, such as causal masks.

::

    y[i, j] = x[i, j] + mask[i, j]      →      y[i, j] = x[i, j] + (0 if least ≤ j - i ≤ greatest else -inf)

Legal because the expression has the bits of the constant at every one of its points, which is tried. Where a stage then
sees by its indices which elements a mask leaves, it computes no panel in which it leaves none
(:mod:`souffle.schedule.gpu.forms.seen_columns`); and nobody reads the mask.

Exporters write such masks as constants, or as calculations of ones that fold to one. Found are half-spaces and bands of
any small multiples of the indices: masks ahead of or behind a diagonal, of a window around it, of padded columns. Only
functions of elements take them in: an operand of a product stays a tensor. So do masks that differ between TEs that are
equal but for what they read: calculated, they would make these TEs different, and no loop of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import numpy as np
from tvm import tirx

from souffle.alone import one_at_a_time
from souffle.decision import Decision
from souffle.program import TE, FusedTE, Item, Tensor, TEProgram, fuse, make_te, parts_of
from souffle.program.shared import OncePer
from souffle.transform.handles import Handles
from souffle.transform.roll.repetition import Signature, signature
from souffle.tvm_compat import PrimExpr, load_indices, load_tensor, map_bodies

__all__ = ["Mask", "mask_of", "masks_by_index"]

_DTYPES = ("bool", "float16", "float32")
"""Whose literals have the bits that the constant has."""

_MOST_AXES = 3
"""Axes of more than one element, and multiples of each: 62 directions at most are tried."""

_MULTIPLES = (-2, -1, 0, 1, 2)

_LARGEST = 1 << 26
"""Elements of a constant that is looked at, a mask of 8,192 tokens: 2 s."""

_SECTOR = 32
"""Bytes that a GPU reads at least (NVIDIA's CUDA programming guide, device memory accesses); less saves nothing."""

_SAMPLE = 256


@dataclass(frozen=True)
class Mask:
    """A tensor of two values.

    Attributes
    ----------
    multiples : tuple of int
        Of the indices, one for each.
    least, greatest : int or None
        Between which the sum of these multiples lies where the tensor is `inside`; ``None`` where nothing is beyond.
    inside, outside : float
    dtype : str
    """

    multiples: tuple[int, ...]
    least: int | None
    greatest: int | None
    inside: float
    outside: float
    dtype: str

    def at(self, indices: Sequence[PrimExpr]) -> PrimExpr:
        """An element."""
        ahead = [index if m == 1 else index * m for m, index in zip(self.multiples, indices, strict=True) if m > 0]
        behind = [index if m == -1 else index * -m for m, index in zip(self.multiples, indices, strict=True) if m < 0]
        left, right = sum(ahead[1:], ahead[0]), sum(behind[1:], behind[0]) if behind else 0
        bounds = [left <= right + self.greatest] if self.greatest is not None else []
        bounds += [right + self.least <= left] if self.least is not None else []
        holds = bounds[0] if len(bounds) == 1 else tirx.And(*bounds)
        if self.dtype == "bool":
            return holds if self.inside else tirx.Not(holds)
        return tirx.Select(holds, tirx.const(self.inside, self.dtype), tirx.const(self.outside, self.dtype))

    def __str__(self) -> str:
        """Such as ``0.0 where i1 - i0 ≤ 0, -inf elsewhere``."""
        named = [(m, f"i{n}" if abs(m) == 1 else f"{abs(m)} i{n}") for n, m in enumerate(self.multiples) if m]
        condition = " ".join(f"{'+' if m > 0 else '-'} {name}" for m, name in named).removeprefix("+ ")
        least = "" if self.least is None else f"{self.least} ≤ "
        greatest = "" if self.greatest is None else f" ≤ {self.greatest}"
        return f"{self.inside} where {least}{condition}{greatest}, {self.outside} elsewhere"


@one_at_a_time
def masks_by_index(program: TEProgram) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Calculate masks where functions of elements read them.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet.

    Returns
    -------
    program : TEProgram
        The same object where there is none.
    decisions : tuple of Decision
        One for each mask.
    """
    read = {t for item in program.tes for part in _of_elements(item) for t in part.inputs if t in program.constants}
    found = {t: mask_of(program.constants[t]) for t in program.constants if t in read}
    differing = _differing(program, found)
    masks = {t: mask for t, mask in found.items() if mask is not None and t not in differing}
    if not masks:
        return program, ()
    decisions = (Decision("masks", t.name, True, f"{mask}: calculated, not read") for t, mask in masks.items())
    return program.with_tes(_calculated(item, masks) for item in program.tes), tuple(decisions)


def mask_of(values: np.ndarray) -> Mask | None:
    """How an array is two values by a condition on its indices; ``None`` if no such condition is found.

    Parameters
    ----------
    values : array
    """
    if values.dtype.name not in _DTYPES or not values.nbytes > _SECTOR or values.size > _LARGEST:
        return None
    axes = [n for n, extent in enumerate(values.shape) if extent > 1]
    two = _two_values(values)
    if two is None or len(axes) > _MOST_AXES:
        return None
    first = _bits(values) == _bits(np.asarray(two[0]))
    for multiples in _directions(values.ndim, axes):
        distance: np.ndarray = np.zeros([1] * values.ndim, np.int32)
        for axis, multiple in enumerate(multiples):
            if multiple:
                shape = [1] * values.ndim
                shape[axis] = -1
                distance = distance + multiple * np.arange(values.shape[axis], dtype=np.int32).reshape(shape)
        for inside, region in ((0, first), (1, ~first)):
            bounds = _bounds(np.broadcast_to(distance, values.shape), region)
            if bounds is not None:
                return Mask(multiples, *bounds, float(two[inside]), float(two[1 - inside]), values.dtype.name)
    return None


def _differing(program: TEProgram, found: Mapping[Tensor, Mask | None]) -> set[Tensor]:
    """Constants that equal TEs read in the same place and that are no equal masks, as the steps of a loop may have."""
    places: dict[tuple[Signature, int], dict[Tensor, Mask | None]] = {}
    for item in program.tes:
        for part in _of_elements(item):
            for position, tensor in enumerate(part.inputs):
                if tensor in found:
                    places.setdefault((signature(part), position), {})[tensor] = found[tensor]
    return {t for masks in places.values() if len(set(masks.values())) > 1 for t in masks}


def _of_elements(item: Item) -> list[TE]:
    """The parts of an item that are functions of elements, which nothing reduces in the same item."""
    if not isinstance(item, (TE, FusedTE)):
        return []
    parts = list(parts_of(item))
    reductions = [number for number, part in enumerate(parts) if part.is_reduction]
    return parts[reductions[0] + 1 :] if reductions else parts


def _bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.itemsize}")


def _two_values(values: np.ndarray) -> tuple[np.generic, np.generic] | None:
    """Both values of an array that has two, neither of them NaN or a zero with a sign, which no literal keeps."""
    flat = values.reshape(-1)
    if np.unique(_bits(flat[:: max(1, flat.size // _SAMPLE)].copy())).size > 2:
        return None
    first = flat[0]
    others = _bits(flat) != _bits(np.asarray(first))
    where = int(others.argmax())
    both = [float(first), float(flat[where])]
    if not others[where] or any(np.isnan(value) or (value == 0 and np.signbit(value)) for value in both):
        return None
    return (first, flat[where]) if (others == (_bits(flat) == _bits(np.asarray(flat[where])))).all() else None


def _directions(dims: int, axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Multiples of indices, the smallest first, of which the last one is above 0 and no number divides all."""
    every = [m for m in product(_MULTIPLES, repeat=len(axes)) if gcd(*m) == 1 and next(n for n in m[::-1] if n) > 0]
    for multiples in sorted(every, key=lambda m: (max(map(abs, m)), -m.count(0), m)):
        yield tuple(dict(zip(axes, multiples, strict=True)).get(n, 0) for n in range(dims))


def _bounds(distance: np.ndarray, region: np.ndarray) -> tuple[int | None, int | None] | None:
    """The least and the greatest distance in a region, if all elements between are in it: what each is beyond."""
    inner = distance[region]
    least, greatest = int(inner.min()), int(inner.max())
    below, above = distance.min() < least, distance.max() > greatest
    if not (below or above):
        return None
    sample = tuple(slice(None, None, max(1, extent // 16)) for extent in region.shape)
    for part in (sample, ...):
        if (((distance[part] >= least) & (distance[part] <= greatest)) != region[part]).any():
            return None
    return least if below else None, greatest if above else None


_prototypes: OncePer[tuple[TE, tuple[int, ...]]] = OncePer()


def _calculated(item: Item, masks: Mapping[Tensor, Mask]) -> Item:
    """An item that reads no mask where it is a function of elements."""
    wanted = [part for part in _of_elements(item) if masks.keys() & set(part.inputs)]
    if not wanted:
        return item
    parts = [_without(part, masks) if part in wanted else part for part in parts_of(item)]
    return fuse(parts, item.outputs) if len(parts) > 1 else parts[0]


def _without(part: TE, masks: Mapping[Tensor, Mask]) -> TE:
    """A TE with the expressions of masks; of those that share one expression, as equal layers do, the same."""
    own = {position: masks[t] for position, t in enumerate(part.inputs) if t in masks}
    made, sources = _prototypes((part.op, tuple(own.items())), lambda: _expressed(part, own))
    inputs = tuple(part.inputs[number] for number in sources)
    return replace(part, op=made.op, placeholders=made.placeholders, inputs=inputs)


def _expressed(part: TE, masks: Mapping[int, Mask]) -> tuple[TE, tuple[int, ...]]:
    """A TE with expressions for some of its inputs, and the numbers of those that it still reads."""
    handles = Handles()
    bodies = handles.opened(part)
    known = {handles.of(part.inputs[position]).op: mask for position, mask in masks.items()}

    def rewrite(load: PrimExpr) -> PrimExpr:
        mask = known.get(load_tensor(load).op)
        return load if mask is None else mask.at(load_indices(load))

    made = make_te(part.name, part.axes, map_bodies(bodies, rewrite), handles.pairs(), part.origin, part.outputs)
    return made, tuple(map(part.inputs.index, made.inputs))
