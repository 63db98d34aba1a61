"""When a normalization becomes part of the products around it: where the cost model predicts that it pays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from souffle.cost.kernel import MEDIAN_ERROR
from souffle.decision import Refused
from souffle.placement.normalization import Chosen, Normalization, Product, Rewritten, rewritten
from souffle.placement.stage_trial import StageTrial, StageTrials, reduction_of
from souffle.placement.two_phase import Split, split_by_cost
from souffle.program import Item
from souffle.schedule.gpu import RULES
from souffle.schedule.gpu.device import ASSUMED_REGISTERS
from souffle.schedule.gpu.forms.matrix_product import read_contraction
from souffle.schedule.gpu.forms.stage_forms import StageForms

__all__ = ["normalize_by_cost"]

_SIZES = (64, 32)
"""Columns of tiles that moments may be of: narrower tiles read more than they compute, and half a warp or a whole one
has a row of these."""


def normalize_by_cost(found: Normalization, products: dict[Item, Product], trials: StageTrials) -> Chosen | Refused:
    """Whether it pays that a normalization becomes part of the products around it, and of what size its chunks are.

    What falls away is its own stage with its grid sync. What is added is arithmetic of the producer's tiles, a tile
    that it might not have chosen, and in each reader the values of rows and an operand that is computed on its way.

    Parameters
    ----------
    found, products
        See :data:`souffle.placement.normalization.Choose`.
    trials : StageTrials
        Of the program that they stand in. Where its device is ``None``, everything is refused.
    """
    if trials.device is None:
        return Refused("no product of this architecture is described, so that no time can be predicted")
    around = [products.get(item, Product(item)) for item in (found.producer, *found.readers)]
    seconds: dict[Chosen, float] = {}
    refusal = Refused("no chunk is of a tile's size")
    sizes = _sizes(prod(reduction_of(found.moments[0]).reduction_shape))
    for size, stored in ((size, stored) for size in sizes for stored in (False, True)):
        for copies in (True, False):
            chosen = Chosen(size, copies, "", stored)
            made = rewritten(trials.program, found, products, chosen)
            taken = made if isinstance(made, Refused) else _seconds_of(made, trials)
            if isinstance(taken, Refused):
                refusal = taken
            else:
                seconds[chosen] = taken
                break
    if not seconds:
        return refusal
    needed = [tensor for element in found.elements for tensor in element.outputs]
    answer, draft = trials.answer(*found.of_rows, *found.elements, needed=needed)
    # A sum in two phases has no tile with finished results: it would have to become whole again.
    apart = _seconds(around, () if answer.schedule is None else (trials.lowered(answer, draft),), trials)
    if answer.schedule is None or isinstance(apart, Refused):
        return Refused("it is no stage of its own, which could be compared with")
    before, saved = apart
    best, after = min(seconds.items(), key=lambda pair: pair[1])
    added = after - before
    figures = (
        f"{before * 1e6:.1f} + {saved * 1e6:.1f} µs as a stage of its own; {after * 1e6:.1f} µs where it begins in "
        f"tiles of {best.size} columns and its {len(found.readers)} readers finish it"
        f"{', of copies about the means of these' if best.copies else ''}"
        f"{', some by values of rows that are stored' if best.stored else ''}"
    )
    if added * MEDIAN_ERROR >= saved:
        return Refused(f"{figures}: the {added * 1e6:.1f} µs added are not less by the factor {MEDIAN_ERROR}")
    return best._replace(reason=figures)


def _seconds_of(made: Rewritten, trials: StageTrials) -> float | Refused:
    """Of the products that a normalization is part of, and of its rows' values if they are stored."""
    trials.add_constants([product.weights for product in made.folded])
    rows: list[StageTrial] = []
    if made.of_rows:
        answer, draft = trials.answer(*made.of_rows, needed=[t for item in made.of_rows for t in item.outputs])
        if answer.schedule is None:
            return Refused(f"the values of its rows are no stage: {answer.reason}")
        rows.append(trials.lowered(answer, draft))
    taken = _seconds((made.producer, *made.readers), rows, trials)
    # They wait for the producer with a reader that needs none of them, at the same grid sync.
    return taken if isinstance(taken, Refused) else sum(taken) - len(rows) * trials.device.shared_sync_seconds


def _seconds(
    products: Sequence[Product], others: Sequence[StageTrial], trials: StageTrials
) -> tuple[float, float] | Refused:
    """Of products, each in two phases where that pays, and of other stages in the same kernel."""
    splits = [_split_alone(product, trials) for product in products]
    stages = _stages([p for p, split in zip(products, splits, strict=True) if split is None], trials)
    if isinstance(stages, Refused):
        return stages
    seconds = trials.seconds([*stages, *others])
    count = len(stages)
    return sum(seconds[:count]) + sum(split.seconds for split in splits if split is not None), sum(seconds[count:])


def _split_alone(product: Product, trials: StageTrials) -> Split | None:
    """How a product is shared among more blocks, if nothing asks for its tiles yet and that pays."""
    split = Refused("its tiles are whole") if product.ahead or product.inside else split_by_cost(product.item, trials)
    return split if isinstance(split, Split) else None


def _sizes(values: int) -> list[int]:
    """Columns of chunks to try: those that divide a row; all below it where none does."""
    shorter = [size for size in _SIZES if size < values]
    return [size for size in shorter if values % size == 0] or shorter


def _stages(products: Sequence[Product], trials: StageTrials) -> list[StageTrial] | Refused:
    """Each product as a stage."""
    stages = []
    for product in products:
        needed = [tensor for item in (product.item, *product.inside) for tensor in item.outputs]
        draft = trials.draft(*product.items, needed=needed)
        if product.ahead or product.inside:
            contraction = StageForms(draft.func).read(read_contraction)
            if isinstance(contraction, Refused):
                return Refused(f"no tile of {product.item.name} can hold it: {contraction.reason}")
        answer, draft = trials.answer(*product.items, needed=needed)
        if answer.schedule is None or ((product.ahead or product.inside) and not RULES[answer.rule].normalizes):
            return Refused(f"no tile of {product.item.name} can hold it: {answer.reason}")
        stages.append(trials.lowered(answer, draft))
        if (product.ahead or product.inside) and stages[-1].resources.registers > ASSUMED_REGISTERS:
            return Refused(f"{product.item.name} would leave the other stages too few registers")
    return stages
