"""Reductions that start in the tiles of the contraction whose results they reduce (paper §6.3).

::

    C[m, n] = sum over k of ...              C, and P[i, n] = combine over q of f(C[i * t + q, n])     one stage
    R[n]    = combine over m of f(C[m, n])   R[n] = combine over i of P[i, n]

with t the extent of a tile along m: a tile has all that its element of P needs, so that nothing reads C again. Where a
tile holds all of m, R itself is computed there and nothing is left of it. As in :mod:`souffle.placement.two_phase` the
identity stands beyond the end of the last chunk, and the order of combination is fixed: a result has the same bits in
every run.

The TEs are marked by their origin; the formation of stages puts them into their producer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from souffle.decision import Decision
from souffle.placement.two_phase import Phases
from souffle.program import TE, FusedTE, Item, Origin, Tensor, TEProgram, fuse, parts_of

__all__ = ["Start", "Started", "propagate", "started"]

_SUFFIX = "_tiles"


@dataclass(frozen=True)
class Start:
    """What is to become of a reduction behind a contraction.

    Attributes
    ----------
    accepted : bool
        Whether it starts in the contraction's tiles.
    size : int or None
        Values of a chunk; ``None``: a tile holds all.
    reason : str
        Why, with the figures that decided.
    """

    accepted: bool
    size: int | None
    reason: str


@dataclass(frozen=True, eq=False)
class Started:
    """A reduction that starts in the tiles of a contraction.

    Attributes
    ----------
    whole : TE or FusedTE
        As it was.
    inside : TE or FusedTE
        What the tiles compute.
    rest : TE or FusedTE or None
        What combines their results; ``None`` where a tile holds all.
    """

    whole: TE | FusedTE
    inside: TE | FusedTE
    rest: TE | FusedTE | None


Choose = Callable[[TE | FusedTE, Sequence[Started], TE | FusedTE], Start]
"""Of a contraction, of what starts in its tiles already, and of one more reduction that reads it."""


def propagate(program: TEProgram, choose: Choose) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Let reductions start in the tiles of the contractions that they read.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet: what stands in a loop already stays as it is.
    choose : callable
        Asked once for equal layers, so that they stay equal.

    Returns
    -------
    program : TEProgram
        The same object where nothing changed.
    decisions : tuple of Decision
        One for each reduction asked about.
    """
    place = {item: number for number, item in enumerate(program.tes)}
    parts = (part for item in program.tes for part in parts_of(item) if isinstance(part, TE))
    in_group = Counter(part.origin.group for part in parts if part.is_reduction)
    answers: dict[object, Start] = {}
    decisions: list[Decision] = []
    inside: dict[Item, list[Started]] = {}
    suffix = _free_suffix(program)
    for reader in program.tes:
        producer = _producer(program, place, reader)
        if producer is None:
            continue
        already = inside.setdefault(producer, [])
        key = (*_key(producer, already, reader), *_around(program, in_group, producer, already, reader))
        if key not in answers:
            answers[key] = choose(producer, tuple(already), reader)
        chosen = answers[key]
        made = started(producer, reader, chosen.size, suffix) if chosen.accepted else chosen.reason
        reason = made if isinstance(made, str) else chosen.reason
        subject = f"{reader.name} in the tiles of {producer.name}"
        decisions.append(Decision("propagate", subject, isinstance(made, Started), reason))
        if isinstance(made, Started):
            already.append(made)
    if not any(inside.values()):
        return program, tuple(decisions)
    moved = {one.whole: one.rest for found in inside.values() for one in found}
    items: list[Item] = []
    for item in program.tes:
        own = moved.get(item, item)
        items += [] if own is None else [own]
        items += [one.inside for one in inside.get(item, ())]
    return program.with_tes(items), tuple(decisions)


def started(
    producer: TE | FusedTE, reader: TE | FusedTE, size: int | None, suffix: str = _SUFFIX
) -> Started | str:
    """A reduction in the tiles of a contraction, or the reason why it cannot be split so.

    Parameters
    ----------
    producer, reader : TE or FusedTE
    size : int or None
        See :class:`Start`.
    suffix : str
        Of the names of what the tiles define.
    """
    origin = _reduction_of(producer).origin
    if size is None:
        return Started(reader, _marked(reader, origin), None)
    phases = Phases.of(reader, 1, suffix, size=size, producer=origin)
    return phases if isinstance(phases, str) else Started(reader, phases.partial, phases.total)


def _reduction_of(item: TE | FusedTE) -> TE:
    return next(part for part in parts_of(item) if part.is_reduction)


def _marked(item: TE | FusedTE, origin: Origin) -> TE | FusedTE:
    parts = [replace(part, origin=part.origin.started_in(origin)) for part in parts_of(item)]
    return fuse(parts, item.outputs) if isinstance(item, FusedTE) else parts[0]


def _producer(program: TEProgram, place: dict[Item, int], reader: Item) -> TE | FusedTE | None:
    """The reduction whose results another one reduces, each once, with nothing else that it waits for."""
    if not isinstance(reader, (TE, FusedTE)) or not reader.is_reduction or reader.origin.starts_in_tiles:
        return None
    found = {program.producers[t] for t in reader.inputs if t in program.producers}
    last = max(found, key=place.__getitem__, default=None)
    if not isinstance(last, (TE, FusedTE)) or not last.is_reduction or last.origin.starts_in_tiles:
        return None
    own = _reduction_of(reader)
    values = own.outputs[0].size * prod(own.reduction_shape)
    return last if any(t in last.outputs and t.size == values for t in reader.inputs) else None


def _around(
    program: TEProgram, in_group: Counter[str], producer: TE | FusedTE, already: Sequence[Started], reader: Item
) -> tuple[object, ...]:
    """What an answer may depend on besides: who else needs the contraction, and what else the operator reduces."""
    inside = {reader, *(one.whole for one in already)}
    needed = tuple(
        tensor in program.outputs or any(item not in inside for item in program.consumers[tensor])
        for tensor in producer.outputs
    )
    return needed, in_group[_reduction_of(reader).origin.group]


def _key(producer: TE | FusedTE, already: Sequence[Started], reader: TE | FusedTE) -> tuple[object, ...]:
    """Equal for equal layers: what both compute, and where the one reads the other."""
    own: list[object] = []
    tensors: dict[Tensor, object] = {tensor: number for number, tensor in enumerate(producer.outputs)}
    for item in (producer, *(one.whole for one in already), reader):
        own.append(item.wiring if isinstance(item, FusedTE) else item.op)
        own.append(tuple(tensors.get(tensor) for tensor in item.inputs))
    own.append(tuple((one.inside.outputs[0].shape, one.rest is None) for one in already))
    return tuple(own)


def _free_suffix(program: TEProgram) -> str:
    names = {tensor.name for tensor in program.tensors()}
    names |= {part.name for item in program.tes for part in parts_of(item)}
    suffix = _SUFFIX
    while any(f"{name}{suffix}" in names for name in names):
        suffix += "_"
    return suffix
