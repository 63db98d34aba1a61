"""Where reductions are computed: in the tiles of what they reduce, in two phases, or as they stand (paper §6.3)."""

from __future__ import annotations

from functools import partial

from souffle.cost.device import CostDevice
from souffle.decision import Decision
from souffle.placement.chain_ends import ChainEnds
from souffle.placement.in_tiles import propagate, start_by_cost
from souffle.placement.interleaving import interleave, interleave_by_cost
from souffle.placement.normalization import normalize_by_cost, normalize_in_products
from souffle.placement.one_form import in_one_form
from souffle.placement.stage_trial import StageTrials
from souffle.placement.two_phase import split_by_cost, two_phase
from souffle.program import TEProgram
from souffle.schedule.gpu.scheduler import GpuScheduler
from souffle.schedule.tuned import TunedAnswers
from souffle.transform import masks_by_index

__all__ = ["place_reductions"]


def place_reductions(
    program: TEProgram,
    device: CostDevice | None,
    scheduler: GpuScheduler,
    on_chip: frozenset[str] = frozenset(),
    tuned: TunedAnswers | None = None,
) -> tuple[TEProgram, tuple[Decision, ...]]:
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
        What tuning logs hold, by which the first is decided.
    """
    masks: tuple[Decision, ...] = ()
    normalized: tuple[Decision, ...] = ()
    if "attention" in on_chip:
        program, masks = masks_by_index(program)
    if "normalization" in on_chip:
        known = {} if tuned is None else {"tuned": tuned}
        opened = in_one_form(program)
        trials = StageTrials(opened, device, scheduler, **known)
        made, normalized = normalize_in_products(opened, partial(normalize_by_cost, trials=trials))
        program = program if made is opened else made
    beside: tuple[Decision, ...] = ()
    if "interleaving" in on_chip:
        trials = StageTrials(program, device, scheduler)
        program, beside = interleave(program, partial(interleave_by_cost, trials=trials))
    trials = StageTrials(program, device, scheduler)
    # First into tiles, which is compared with the split that would be made otherwise: a split one reads no whole.
    program, started = propagate(program, partial(start_by_cost, trials=trials, request=scheduler.request))
    whole = (ChainEnds(program, trials).refusal,) if "attention" in on_chip else ()
    program, split = two_phase(program, partial(split_by_cost, trials=trials), *whole)
    return program, (*masks, *normalized, *beside, *started, *split)
