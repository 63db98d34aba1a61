"""Reductions over what tiles own: each tile reduces its part, and all readers combine the parts (paper §6.3, §6.5).

::

    p[c] = f(channel c)          p[c] = f(channel c)
    h[r] = sum over c of w(r, c) * p[c]   →   P[t, r] = sum over c in tile t of w(r, c) * p[c]
                                 h[r] = sum over t of P[t, r]

The rewriting is that of :mod:`souffle.placement.two_phase`, with as many parts as there are tiles. The first phase
reads of `p` what its tile has just computed, so that it becomes a part of that stage (``schedule/owned_tiles.py``): no
grid sync stands between, and the weights are read once and not by every block. The second phase is short enough for
every block that needs `h`. So a squeeze of channels starts where they are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, prod

from souffle.cost.device import CostDevice
from souffle.decision import Decision, Refused
from souffle.placement.stage_trial import StageTrials, reduction_of
from souffle.placement.two_phase import Phases, Split, two_phase
from souffle.program import TE, FusedTE, Item, TEProgram
from souffle.schedule.gpu.forms.owned_chain import OwnedChain, read_owned_chain
from souffle.schedule.gpu.forms.stage_forms import StageForms
from souffle.schedule.gpu.scheduler import GpuScheduler

__all__ = ["reduce_in_tiles"]

_MOST_MADE = 1 << 10
"""Elements of a reduction that every block may combine for itself."""

_LONGEST_CHAIN = 4


def reduce_in_tiles(
    program: TEProgram, device: CostDevice | None, scheduler: GpuScheduler
) -> tuple[TEProgram, tuple[Decision, ...]]:
    """A program whose reductions over what tiles may own are in as many parts as there would be tiles.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet.
    device : CostDevice or None
        ``None`` where no product of the architecture is described: nothing changes then.
    scheduler : GpuScheduler
        Of the same device.

    Returns
    -------
    program : TEProgram
        The same object where nothing is predicted to gain from it.
    decisions : tuple of Decision
        One for each reduction of another's results.
    """
    if device is None:
        return program, ()
    trials = StageTrials(program, device, scheduler)
    return two_phase(program, partial(_parts, trials=trials), label="channels")


def _parts(whole: TE | FusedTE, trials: StageTrials) -> Split | Refused:
    """Whether a reduction should start in the tiles of what it reduces, and how many these are."""
    program = trials.program
    if prod(whole.outputs[0].shape) > _MOST_MADE:
        return Refused(f"its {prod(whole.outputs[0].shape)} elements are too many for every block to combine")
    producers = [program.producers[t] for t in reduction_of(whole).inputs if t in program.producers]
    producers = [one for one in producers if isinstance(one, (TE, FusedTE)) and one.is_reduction]
    if len(producers) != 1 or producers[0].placement is not None:
        return Refused("it reduces no result of one other reduction")
    readers = _readers(whole, trials)
    if not readers:
        return Refused("nothing that reads it could combine its parts")
    if _is_owned(producers[0], whole, trials):
        return Refused("the tiles that own what it reduces own it, too")
    chain = _chain(producers[0], trials)
    tiles = trials.answer(*chain, needed=_needed(chain, program), owned=len(chain) > 1)[0].tiles
    phases = Phases.of(whole, tiles) if tiles > 1 else Refused(f"{tiles} tile makes what it reduces")
    if isinstance(phases, Refused):
        return phases
    alone = [_seconds(trials, chain, _needed(chain, program), owned=len(chain) > 1)]
    alone.append(_seconds(trials, [whole], whole.outputs, owned=False))
    if None in alone:
        return Refused("no time is predicted of it")
    if _seconds(trials, [*chain, whole], _needed([*chain, whole], program), owned=True, below=sum(alone)) is not None:
        return Refused("one stage computes it with what it reduces")
    behind = _seconds(trials, readers, _needed(readers, program), owned=False)
    apart = inf if behind is None else alone[1] + behind
    repeated = _seconds(trials, [whole, *readers], _needed(readers, program), owned=True, below=apart)
    now = alone[0] + (apart if repeated is None else repeated)
    nowhere = Refused(
        f"its {tiles} parts have no place in the tiles of what it reduces, or in those of its readers, in less time"
    )
    started = [*chain, phases.partial]
    needed = (*_needed(chain, program, besides=whole), *phases.partial.outputs)
    first = _seconds(trials, started, needed, owned=True, below=now)
    if first is None:
        return nowhere
    second = _seconds(trials, [phases.total, *readers], _needed(readers, program), owned=True, below=now - first)
    if second is None:
        return nowhere
    figures = (
        f"in {tiles} parts the stages before it take {first * 1e6:.1f} µs and those behind it {second * 1e6:.1f} µs, "
        f"all of them {now * 1e6:.1f} µs as it stands"
    )
    return Split(tiles, figures)


def _is_owned(producer: TE | FusedTE, whole: TE | FusedTE, trials: StageTrials) -> bool:
    """Whether tiles of one stage can own both, none repeating anything: in parts, the second would only take longer."""
    draft = trials.draft(producer, whole, needed=_needed([producer, whole], trials.program), owned=True)
    chain = StageForms(draft.func).read(read_owned_chain)
    return isinstance(chain, OwnedChain) and not chain.repeated


def _chain(last: TE | FusedTE, trials: StageTrials) -> list[TE | FusedTE]:
    """A reduction with those before it that one stage computes in less time than several."""
    chain = [last]
    seconds = _seconds(trials, chain, last.outputs, owned=False)
    while len(chain) < _LONGEST_CHAIN:
        before = [trials.program.producers.get(t) for t in chain[0].inputs]
        before = [one for one in before if isinstance(one, (TE, FusedTE)) and one.is_reduction]
        if len(before) != 1 or before[0].placement is not None or seconds is None:
            break
        longer = [before[0], *chain]
        alone = _seconds(trials, before, before[0].outputs, owned=False)
        if alone is None:
            break
        needed = _needed(longer, trials.program)
        together = _seconds(trials, longer, needed, owned=True, below=alone + seconds)
        if together is None:
            break
        chain, seconds = longer, together
    return chain


def _readers(whole: TE | FusedTE, trials: StageTrials) -> list[TE | FusedTE]:
    """What reads a reduction, and what reads that alone: a stage's worth."""
    found: list[TE | FusedTE] = []
    tensors = whole.outputs
    while len(found) < 2:
        items = list(dict.fromkeys(item for t in tensors for item in trials.program.consumers[t]))
        if len(items) != 1 or not isinstance(items[0], (TE, FusedTE)) or items[0].placement is not None:
            break
        if found and items[0].is_reduction:
            break
        found.append(items[0])
        tensors = items[0].outputs
    return found


def _needed(items: Sequence[Item], program: TEProgram, besides: Item | None = None) -> tuple:
    """What others need of what some items define."""
    inside = {*items, besides}
    results = set(program.outputs)
    return tuple(
        t
        for item in items
        for t in item.outputs
        if t in results or any(reader not in inside for reader in program.consumers[t])
    )


def _seconds(
    trials: StageTrials, items: Sequence[TE | FusedTE], needed: Sequence, *, owned: bool, below: float = inf
) -> float | None:
    """Of some items as one stage with the grid sync before it; ``None`` if they are none, or one of `below` or more.

    By the price that joins are decided by (``schedule/owned_tiles.py``), which finds what a stage reads in the cache:
    what is placed here has to be joined there.
    """
    if below < inf and trials.least_seconds(*items, needed=needed, owned=owned) >= below:
        return None
    answer, _ = trials.answer(*items, needed=needed, owned=owned)
    if answer.schedule is None:
        return None
    seconds = trials.price(answer)
    return seconds if seconds < below else None
