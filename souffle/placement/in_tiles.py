"""Reductions that start in the tiles of the contraction whose results they reduce (paper §6.3).

::

    C[m, n] = sum over k of ...              C, and P[i, n] = combine over q of f(C[i * t + q, n])     one stage
    R[n]    = combine over m of f(C[m, n])   R[n] = combine over i of P[i, n]

with t the extent of a tile along m: a tile has all that its element of P needs, so that nothing reads C again. Where a
tile holds all of m, R itself is computed there and nothing is left of it. As in :mod:`souffle.placement.two_phase` the
identity stands beyond the end of the last chunk, and the order of combination is fixed: a result has the same bits in
every run.

A TE says so by its placement; the formation of stages puts it into the contraction's. :func:`propagate` places
what it is told to; :func:`start_by_cost` says what pays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx

from souffle.cost.kernel import MEDIAN_ERROR
from souffle.decision import Decision, Refused
from souffle.placement.stage_trial import StageTrial, StageTrials, reduction_of, reductions_of_groups
from souffle.placement.two_phase import Phases, Split, free_suffix, split_by_cost
from souffle.program import TE, FusedTE, InTiles, Item, Tensor, TEProgram, fuse, parts_of
from souffle.schedule.gpu import RULES
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.rules.contraction import tile_of

__all__ = ["Start", "Started", "propagate", "start_by_cost", "started"]

_SUFFIX = "_tiles"

_LONGEST_WHOLE = 256
"""Values that a tile might hold all of; longer ones leave no room for tiles that keep the device busy."""


@dataclass(frozen=True)
class Start:
    """How a reduction starts in the tiles of a contraction.

    Attributes
    ----------
    size : int or None
        Values of a chunk; ``None``: a tile holds all.
    reason : str
        Why, with the figures that decided.
    """

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


Choose = Callable[[TE | FusedTE, Sequence[Started], TE | FusedTE], Start | Refused]
"""Of a contraction, of what starts in its tiles already, and of one more reduction that reads it."""


def propagate(program: TEProgram, choose: Choose) -> tuple[TEProgram, tuple[Decision, ...]]:
    """Let reductions start in the tiles of the contractions that they read.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet: what stands in a loop already stays as it is.
    choose : callable
        As :func:`start_by_cost` does. Asked once for equal layers, so that they stay equal.

    Returns
    -------
    program : TEProgram
        The same object where nothing changed.
    decisions : tuple of Decision
        One for each reduction asked about.
    """
    position = {item: number for number, item in enumerate(program.tes)}
    of_group = reductions_of_groups(program)
    answers: dict[object, Start | Refused] = {}
    decisions: list[Decision] = []
    inside: dict[Item, list[Started]] = {}
    suffix = free_suffix(program, _SUFFIX)
    for reader in program.tes:
        producer = _producer(program, position, reader)
        if producer is None:
            continue
        already = inside.setdefault(producer, [])
        key = (*_key(producer, already, reader), *_around(program, of_group, producer, already, reader))
        if key not in answers:
            answers[key] = choose(producer, tuple(already), reader)
        answer = answers[key]
        placed = answer if isinstance(answer, Refused) else started(producer, reader, answer.size, suffix)
        accepted = isinstance(placed, Started)
        reason = answer.reason if accepted else placed.reason
        decisions.append(Decision("propagate", f"{reader.name} in the tiles of {producer.name}", accepted, reason))
        if accepted:
            already.append(placed)
    rests = {placed.whole: placed.rest for several in inside.values() for placed in several}
    if not rests:
        return program, tuple(decisions)
    items: list[Item] = []
    for item in program.tes:
        rest = rests.get(item, item)
        items += [] if rest is None else [rest]
        items += [placed.inside for placed in inside.get(item, ())]
    return program.with_tes(items), tuple(decisions)


def started(producer: TE | FusedTE, reader: TE | FusedTE, size: int | None, suffix: str = _SUFFIX) -> Started | Refused:
    """A reduction in the tiles of a contraction.

    Parameters
    ----------
    producer, reader : TE or FusedTE
    size : int or None
        See :class:`Start`.
    suffix : str
        Of the names of what the tiles define.
    """
    placement = InTiles(reduction_of(producer).name)
    if size is None:
        parts = [part.placed(placement) for part in parts_of(reader)]
        return Started(reader, fuse(parts, reader.outputs) if isinstance(reader, FusedTE) else parts[0], None)
    phases = Phases.of(reader, 1, suffix, size=size, placement=placement)
    return phases if isinstance(phases, Refused) else Started(reader, phases.partial, phases.total)


def _producer(program: TEProgram, position: dict[Item, int], reader: Item) -> TE | FusedTE | None:
    """The reduction whose results another one reduces, each once, with nothing else that it waits for."""
    if not isinstance(reader, (TE, FusedTE)) or not reader.is_reduction or reader.placement is not None:
        return None
    producers = {program.producers[t] for t in reader.inputs if t in program.producers}
    last = max(producers, key=position.__getitem__, default=None)
    if not isinstance(last, (TE, FusedTE)) or not last.is_reduction or last.placement is not None:
        return None
    reduction = reduction_of(reader)
    values = reduction.outputs[0].size * prod(reduction.reduction_shape)
    return last if any(t in last.outputs and t.size == values for t in reader.inputs) else None


def _around(
    program: TEProgram, of_group: Counter[str], producer: TE | FusedTE, already: Sequence[Started], reader: Item
) -> tuple[object, ...]:
    """What an answer may depend on besides: who else needs the contraction, and what else the operator reduces."""
    outside = _read_outside(program, producer, already, reader)
    needed = tuple(tensor in outside for tensor in producer.outputs)
    return needed, of_group[reduction_of(reader).origin.group]


def _key(producer: TE | FusedTE, already: Sequence[Started], reader: TE | FusedTE) -> tuple[object, ...]:
    """Equal for equal layers: what both compute, and where the one reads the other."""
    key: list[object] = []
    tensors: dict[Tensor, object] = {tensor: number for number, tensor in enumerate(producer.outputs)}
    for item in (producer, *(placed.whole for placed in already), reader):
        key.append(item.wiring if isinstance(item, FusedTE) else item.op)
        key.append(tuple(tensors.get(tensor) for tensor in item.inputs))
    key.append(tuple((placed.inside.outputs[0].shape, placed.rest is None) for placed in already))
    return tuple(key)


def _read_outside(
    program: TEProgram, producer: TE | FusedTE, already: Sequence[Started], *more: TE | FusedTE
) -> tuple[Tensor, ...]:
    """What others need of the outputs of a contraction than what starts in its tiles."""
    inside = {*more, *(placed.whole for placed in already)}
    return tuple(
        tensor
        for tensor in producer.outputs
        if tensor in program.outputs or any(item not in inside for item in program.consumers[tensor])
    )


def start_by_cost(
    producer: TE | FusedTE, already: Sequence[Started], reader: TE | FusedTE, trials: StageTrials, request: GpuRequest
) -> Start | Refused:
    """Whether it pays that a reduction starts in the tiles of a contraction, and in chunks of what size.

    What falls away is the reduction's reading of the contraction's results, a stage with its grid sync where a tile
    holds all that an element reduces, and the results themselves where nobody else reads them. What is added is
    arithmetic in the contraction's stage, a tile that it might not have chosen, and the combination of what the tiles
    have. It is compared with what becomes of the reduction otherwise, two phases perhaps.

    Parameters
    ----------
    producer, already, reader
        See :data:`Choose`.
    trials : StageTrials
        Of the program that they stand in. Where its device is ``None``, everything is refused.
    request : GpuRequest
        What the schedules of the trials are made for.
    """
    if trials.device is None:
        return Refused("no product of this architecture is described, so that no time can be predicted")
    if trials.shares_rows(reader):
        return Refused("another reduction of its operator is computed on the same rows")
    inside = tuple(placed.inside for placed in already)
    needed = (*_read_outside(trials.program, producer, already), *_results(inside))
    answer, draft = trials.answer(producer, *inside, needed=needed)
    if answer.schedule is None or not RULES[answer.rule].starts_reductions:
        able = ", ".join(rule.name for rule in RULES.values() if rule.starts_reductions)
        return Refused(f"the rule {answer.rule} computes its producer; reductions start in tiles of {able}")
    if isinstance(split_by_cost(producer, trials), Split):
        return Refused("its producer is a sum in two phases: no tile has finished results")
    apart = _apart(reader, trials)
    if isinstance(apart, Refused):
        return apart
    before, *removed = trials.seconds([trials.lowered(answer, draft), *apart])
    seconds: dict[int | None, float] = {}
    refusal = Refused("no chunk is of a tile's size")
    for size in _sizes(draft.func, reader, request):
        together = _together(producer, already, reader, size, trials)
        if isinstance(together, Refused):
            refusal = together
        else:
            seconds[size] = sum(trials.seconds(together))
    if not seconds:
        return refusal
    size, after = min(seconds.items(), key=lambda pair: pair[1])
    saved, added = sum(removed), after - before
    tiles = "one tile" if size is None else f"tiles of {size}"
    figures = (
        f"{before * 1e6:.1f} + {saved * 1e6:.1f} µs apart; {after * 1e6:.1f} µs where it starts in "
        f"{tiles}{'' if size is None else ', with their combination'}"
    )
    if added * MEDIAN_ERROR >= saved:
        return Refused(f"{figures}: the {added * 1e6:.1f} µs added are not less by the factor {MEDIAN_ERROR}")
    return Start(size, figures)


def _sizes(func: tirx.PrimFunc, reader: TE | FusedTE, request: GpuRequest) -> list[int | None]:
    """Chunks to try: the sides of the tile that the producer's rule chooses; ``None`` for all in one tile."""
    values = prod(reduction_of(reader).reduction_shape)
    tile = tile_of(func, request) or ()
    sizes: list[int | None] = [size for size in dict.fromkeys(tile) if 1 < size < values]
    return [*sizes, None] if values <= _LONGEST_WHOLE else sizes


def _apart(reader: TE | FusedTE, trials: StageTrials) -> list[StageTrial] | Refused:
    """The stages that the reduction has of its own."""
    split = split_by_cost(reader, trials)
    phases = split if isinstance(split, Refused) else Phases.of(reader, split.parts)
    return trials.stages([reader] if isinstance(phases, Refused) else [phases.partial, phases.total])


def _together(
    producer: TE | FusedTE, already: Sequence[Started], reader: TE | FusedTE, size: int | None, trials: StageTrials
) -> list[StageTrial] | Refused:
    """The stages where the reduction starts in tiles."""
    placed = started(producer, reader, size)
    if isinstance(placed, Refused):
        return placed
    inside = (*(earlier.inside for earlier in already), placed.inside)
    needed = (*_read_outside(trials.program, producer, already, reader), *_results(inside))
    answer, draft = trials.answer(producer, *inside, needed=needed)
    if answer.schedule is None or not RULES[answer.rule].starts_reductions:
        return Refused(f"no tile of its producer can hold it: {answer.reason}")
    rest = [] if placed.rest is None else trials.stages([placed.rest])
    return rest if isinstance(rest, Refused) else [trials.lowered(answer, draft), *rest]


def _results(items: Sequence[TE | FusedTE]) -> tuple[Tensor, ...]:
    return tuple(tensor for item in items for tensor in item.outputs)
