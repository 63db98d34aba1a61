"""Where reductions are computed: in the tiles of what they reduce, in two phases, or as they stand (paper §6.3)."""

from __future__ import annotations

from functools import partial

from souffle.cost.device import CostDevice
from souffle.decision import Decision, Refused
from souffle.placement.chain_ends import ChainEnds
from souffle.placement.in_tiles import propagate, start_by_cost
from souffle.placement.interleaving import interleave, interleave_by_cost
from souffle.placement.normalization import normalize_in_products
from souffle.placement.normalizing_by_cost import normalize_by_cost
from souffle.placement.one_form import in_one_form
from souffle.placement.stage_trial import StageTrials
from souffle.placement.two_phase import Split, split_by_cost, two_phase
from souffle.program import TE, FusedTE, TEProgram
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.tuned import TunedAnswers
from souffle.transform import masks_by_index

__all__ = ["place_reductions"]

_JOIN_SECOND_PHASES = frozenset(["channels", "reuse"])
"""Of :data:`souffle.options.ON_CHIP`, what forms stages of a second phase and of what reads its results."""

_AHEAD = "two-phase ahead of a reader"
"""What decisions are called that take readers to compute second phases."""


def place_reductions(
    program: TEProgram,
    device: CostDevice | None,
    scheduler: GpuScheduler,
    on_chip: frozenset[str] = frozenset(),
    tuned: TunedAnswers | None = None,
) -> list[tuple[TEProgram, tuple[Decision, ...]]]:
    """A program whose reductions are computed where the cost model predicts them to be fastest.

    Parameters
    ----------
    program : TEProgram
        Not rolled yet.
    device : CostDevice or None
        ``None`` where no product of the architecture is described: nothing changes then.
    scheduler : GpuScheduler
        Of the same device.
    on_chip : frozenset of str
        Of :data:`souffle.options.ON_CHIP`. With ``"normalization"``, products take normalizations in; with
        ``"attention"``, products that end a chain are left whole, and masks between them are calculated; with
        ``"interleaving"``, reductions of which a reader needs several elements for one are computed where it does.
    tuned : TunedAnswers, optional
        What tuning logs hold, by which normalizations and two phases are decided.

    Returns
    -------
    list of (TEProgram, tuple of Decision)
        One or two programs: the second has the parts that are best where what reads a reduction's results computes its
        second phase, if these are others. Which it is shows when stages are formed.
    """
    known = {} if tuned is None else {"tuned": tuned}
    masks: tuple[Decision, ...] = ()
    normalized: tuple[Decision, ...] = ()
    if "attention" in on_chip:
        program, masks = masks_by_index(program)
    if "normalization" in on_chip:
        opened = in_one_form(program)
        trials = StageTrials(opened, device, scheduler, **known)
        made, normalized = normalize_in_products(opened, partial(normalize_by_cost, trials=trials))
        program = program if made is opened else made
    beside: tuple[Decision, ...] = ()
    if "interleaving" in on_chip:
        trials = StageTrials(program, device, scheduler)
        program, beside = interleave(program, partial(interleave_by_cost, trials=trials))
    trials = StageTrials(program, device, scheduler, **known)
    # First into tiles, which is compared with the split that would be made otherwise: a split one reads no whole.
    program, started = propagate(program, partial(start_by_cost, trials=trials, request=scheduler.request))
    whole = (ChainEnds(program, trials).refusal,) if "attention" in on_chip else ()
    before = (*masks, *normalized, *beside, *started)
    answers: dict[TE | FusedTE, Split | Refused] = {}

    def choose(item: TE | FusedTE) -> Split | Refused:
        answers[item] = split_by_cost(item, trials)
        return answers[item]

    made, split = two_phase(program, choose, *whole)
    placed = [(made, (*before, *split))]
    joined = {item: one.joined for item, one in answers.items() if isinstance(one, Split) and one.joined is not None}
    if joined and on_chip & _JOIN_SECOND_PHASES:
        made, split = two_phase(program, lambda item: joined.get(item, answers[item]), *whole, label=_AHEAD)
        placed.append((made, (*before, *split)))
    return placed
