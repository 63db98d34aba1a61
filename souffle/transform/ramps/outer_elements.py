"""What steps read outside of a tensor is computed with the tensor, in the place of a copy of it with zeros around.

::

    R[i] = f(i)                               0 ≤ i < n
    P[i] = R[i - b] if b ≤ i < b + n else 0   0 ≤ i < b + n + a   →   P[i] = f(min(max(i - b, 0), n - 1))

Legal where P alone reads R. The elements that R has are the same. The others are read for rows that idle alone, which
take nothing of them (:mod:`souffle.transform.ramps.absorb`), so they may be anything; and f reads at a point that R has
what there is to be read. A stage less, and a grid sync; the elements that are computed again are as many as the copy
had zeros. In a fused TE each part has further elements; its parts read each other at the same place along the
dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import tirx

from souffle.program import TE, FusedTE, Item, Tensor, TEProgram, fuse, make_te, parts_of
from souffle.transform.handles import Handles, read
from souffle.tvm_compat import (
    PrimExpr,
    bounded_analyzer,
    fresh_axis,
    load_indices,
    load_tensor,
    map_bodies,
    same_expression,
    substitute,
)

__all__ = ["Pad", "with_outer_elements"]


@dataclass(frozen=True)
class Pad:
    """A tensor with elements `before` and `after` those of another one along a dimension.

    Attributes
    ----------
    dimension, before, after : int
    tensor : Tensor
    """

    dimension: int
    before: int
    after: int
    tensor: Tensor


def with_outer_elements(program: TEProgram, pads: Mapping[Tensor, Pad]) -> TEProgram:
    """A program in which tensors are computed as copies of them have them, where nothing else reads them.

    Parameters
    ----------
    program : TEProgram
    pads : mapping of Tensor to Pad
        Of each tensor the copy, whose elements before and after nothing depends on.
    """
    made: dict[Item, Item | None] = {}
    for tensor, pad in pads.items():
        whole, copy = program.producers.get(tensor), program.producers.get(pad.tensor)
        if copy is None or tensor in program.outputs or set(program.consumers[tensor]) != {copy}:
            continue
        longer = _longer(whole, pad) if isinstance(whole, TE | FusedTE) else None
        if longer is not None:
            made |= {whole: None, copy: longer}
    if not made:
        return program
    # Steps of which nothing is read stay.
    items = (made.get(item, item) for item in program.tes)
    result = replace(program, tes=tuple(item for item in items if item is not None))
    result.check()
    return result


def _longer(item: TE | FusedTE, pad: Pad) -> TE | FusedTE | None:
    """An item that defines what `pad` says in the place of its only result; ``None`` where it is not that simple."""
    if len(item.outputs) != 1 or item.placement is not None:
        return None
    parts: list[TE] = []
    longer: dict[Tensor, Tensor] = {}
    for part in parts_of(item):
        made = _longer_part(part, pad, longer, pad.tensor if part.outputs == item.outputs else None)
        if made is None:
            return None
        longer[part.outputs[0]] = made.outputs[0]
        parts.append(made)
    return fuse(parts, [pad.tensor]) if isinstance(item, FusedTE) else parts[0]


def _longer_part(part: TE, pad: Pad, inside: Mapping[Tensor, Tensor], output: Tensor | None) -> TE | None:
    shape = part.outputs[0].shape
    extent = pad.tensor.shape[pad.dimension] - pad.before - pad.after
    if len(part.outputs) != 1 or len(shape) != len(pad.tensor.shape) or shape[pad.dimension] != extent:
        return None
    old = part.axes[pad.dimension]
    new = fresh_axis(pad.tensor.shape[pad.dimension], f"i{pad.dimension}")
    axes = [new if dimension == pad.dimension else axis for dimension, axis in enumerate(part.axes)]
    place = bounded_analyzer(axes).simplify(tirx.max(tirx.min(new.var - pad.before, extent - 1), 0))
    handles, apart = Handles(), []

    def moved(load: PrimExpr) -> PrimExpr:
        tensor = part.input_of(load_tensor(load))
        indices = list(load_indices(load))
        if tensor in inside:
            if not same_expression(indices[pad.dimension], old.var):
                apart.append(tensor)
            indices[pad.dimension] = new.var
        return read(handles.of(inside.get(tensor, tensor)), indices)

    bodies = [substitute(body, {old.var: place}) for body in map_bodies(part.op.body, moved)]
    if apart:
        return None
    whole = output or Tensor(f"{part.outputs[0].name}_longer", pad.tensor.shape, part.outputs[0].dtype)
    return make_te(whole.name, axes, bodies, handles.pairs(), part.origin, [whole])
