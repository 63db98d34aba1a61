"""Composition of TEs: the expressions of producers in the place of reads of them, worked out once for equal layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import te

from souffle.analysis import Access, Arithmetic
from souffle.program import TE, Tensor, make_te
from souffle.program.shared import OncePer
from souffle.transform.handles import Handles, instantiate, read
from souffle.transform.vertical.selections import merge_selections
from souffle.tvm_compat import PrimExpr, bounded_analyzer, load_indices, load_tensor, loads, map_bodies

__all__ = ["InputUse", "TEWork", "composed", "simplified", "use_of", "work_of"]


@dataclass(frozen=True)
class TEWork:
    """What one TE does, of which its composition with others depends.

    Attributes
    ----------
    operations : int
        Arithmetic operations of all elements.
    expensive : bool
        Whether some of them are costly.
    loads : int
        Loads in the text of its bodies.
    nested : bool
        Whether an index holds a load.
    """

    operations: int
    expensive: bool
    loads: int
    nested: bool


@dataclass(frozen=True)
class InputUse:
    """How one TE reads one of its inputs.

    Attributes
    ----------
    occurrences : int
        Loads of it in the text.
    times : int
        Element reads of one evaluation.
    """

    occurrences: int
    times: int


@dataclass(frozen=True)
class _Prototype:
    """A composed expression; ``sources`` numbers the tensors that its placeholders stand for."""

    op: te.ComputeOp
    placeholders: tuple[te.Tensor, ...]
    sources: tuple[int, ...]


_works: OncePer[TEWork] = OncePer()
_uses: OncePer[InputUse] = OncePer()
_prototypes: OncePer[_Prototype] = OncePer()


def work_of(te_: TE) -> TEWork:
    """What a TE does."""
    return _works(te_.op, lambda: _work(te_))


def _work(te_: TE) -> TEWork:
    arithmetic = Arithmetic(te_)
    found = [load for body in te_.op.body for load in loads(body)]
    nested = any(loads(index) for load in found for index in load_indices(load))
    return TEWork(arithmetic.operations, arithmetic.expensive, len(found), nested)


def use_of(te_: TE, tensor: Tensor) -> InputUse:
    """How a TE reads a tensor that is one of its inputs."""
    position = te_.inputs.index(tensor)
    return _uses((te_.op, position), lambda: _use(te_, position))


def _use(te_: TE, position: int) -> InputUse:
    placeholder = te_.placeholders[position]
    found = (load for body in te_.op.body for load in loads(body))
    return InputUse(sum(load_tensor(load).same_as(placeholder) for load in found), Access(te_, position).times)


def composed(te_: TE, producers: Mapping[Tensor, TE]) -> TE:
    """`te_` with the expressions of some producers in the place of its reads of them.

    Parameters
    ----------
    te_ : TE
    producers : mapping of Tensor to TE
        TEs without reduction, by the tensor that each defines.
    """
    numbers: dict[Tensor, int] = {}
    key: list[object] = [te_.op]
    for tensor in te_.inputs:
        producer = producers.get(tensor)
        if producer is None:
            key.append(numbers.setdefault(tensor, len(numbers)))
        else:
            key.append((producer.op, tuple(numbers.setdefault(t, len(numbers)) for t in producer.inputs)))
    made = _prototypes(tuple(key), lambda: _compose(te_, producers, numbers))
    tensors = list(numbers)
    inlined = [producers[t] for t in te_.inputs if t in producers]
    origin = te_.origin.merged(*(p.origin for p in inlined))
    inputs = tuple(tensors[number] for number in made.sources)
    return replace(te_, op=made.op, placeholders=made.placeholders, inputs=inputs, origin=origin)


def _compose(te_: TE, producers: Mapping[Tensor, TE], numbers: Mapping[Tensor, int]) -> _Prototype:
    handles = Handles()
    bodies = handles.opened(te_)
    inlined = {t: producers[t] for t in te_.inputs if t in producers}
    # By the handle's operation, which TVM compares by identity.
    opened = {handles.of(t).op: (p, handles.opened(p)[0]) for t, p in inlined.items()}

    def rewrite(load: PrimExpr) -> PrimExpr:
        found = opened.get(load_tensor(load).op)
        return load if found is None else instantiate(found[1], found[0].axes, load_indices(load))

    axes = (*te_.axes, *te_.reduce_axes)
    bodies = merge_selections(map_bodies(bodies, rewrite), axes)
    made = make_te(te_.name, te_.axes, bodies, handles.pairs(), te_.origin, te_.outputs)
    return _Prototype(made.op, made.placeholders, tuple(numbers[tensor] for tensor in made.inputs))


def simplified(bodies: Sequence[PrimExpr], te_: TE) -> list[PrimExpr]:
    """The index arithmetic of some bodies simplified under the bounds of the TE's axes."""
    analyzer = bounded_analyzer((*te_.axes, *te_.reduce_axes))

    def tidy(index: PrimExpr) -> PrimExpr:
        # TVM simplifies no index that depends on data.
        return index if loads(index) else analyzer.simplify(index)

    return map_bodies(bodies, lambda load: read(load_tensor(load), [tidy(i) for i in load_indices(load)]))
