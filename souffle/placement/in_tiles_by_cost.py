"""Which reductions start in the tiles of the contraction they read: those whose predicted time falls by it.

What falls away is the reduction's reading of the contraction's results, a stage with its grid sync where a tile holds
all that an element reduces, and the results themselves where nobody else reads them. What is added is arithmetic in the
contraction's stage, a tile that it might not have chosen, and the combination of what the tiles have.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from souffle.cost.device import CostDevice
from souffle.cost.kernel import MEDIAN_ERROR
from souffle.placement.in_tiles import Start, Started, started
from souffle.placement.trial import Trial, Trials
from souffle.placement.two_phase import Phases
from souffle.placement.two_phase_by_cost import SplitByCost
from souffle.program import TE, FusedTE, Tensor, TEProgram, parts_of
from souffle.schedule.drafts import Scheduler
from souffle.schedule.gpu.rule import GpuRequest
from souffle.schedule.gpu.rules.contraction import tile_of
from souffle.schedule.lower import Lowering

__all__ = ["PropagateByCost"]

_RULE = "contraction"
"""The rule whose tiles reductions can start in."""

_LONGEST_WHOLE = 256
"""Values that a tile might hold all of; longer ones leave no room for tiles that keep the device busy."""


class PropagateByCost:
    """Answers whether a reduction starts in tiles; ``choose`` for :func:`souffle.placement.in_tiles.propagate`.

    Parameters
    ----------
    program : TEProgram
        That the reductions are of.
    device : CostDevice or None
        ``None`` where no product of the architecture is described: every stage stays as it is then.
    scheduler : callable
        Answers for a TensorIR function.
    lowering : Lowering
        Knows the schedules that the scheduler looked at.
    request : GpuRequest
        What the scheduler's schedules are made for.
    split : SplitByCost
        What becomes of a reduction otherwise.
    """

    def __init__(
        self,
        program: TEProgram,
        device: CostDevice | None,
        scheduler: Scheduler,
        lowering: Lowering,
        request: GpuRequest,
        split: SplitByCost,
    ) -> None:
        self.device = device
        self._program = program
        self._request = request
        self._split = split
        self._trials = Trials(program, device, scheduler, lowering)

    def __call__(self, producer: TE | FusedTE, already: Sequence[Started], reader: TE | FusedTE) -> Start:
        """Where the reduction is computed, with the figures of both ways."""
        if self.device is None:
            return _no("no product of this architecture is described, so that no time can be predicted")
        if self._split.shares_rows(reader):
            return _no("another reduction of its operator is computed on the same rows")
        answer, draft = self._trials.answer(
            producer, *(one.inside for one in already), needed=self._needed(producer, already)
        )
        if answer.schedule is None or answer.rule != _RULE:
            return _no(f"the rule {answer.rule} computes its producer; reductions start in tiles of {_RULE}")
        if self._split(producer).parts > 1:
            return _no("its producer is a sum in two phases: no tile has finished results")
        now = self._trials.lowered(answer, draft)
        later = self._later(reader)
        if isinstance(later, str):
            return _no(later)
        before = self._trials.seconds([now, *later])
        figures: dict[int | None, list[float]] = {}
        refused = "no chunk is of a tile's size"
        for size in self._sizes(draft.func, reader):
            stages = self._joint(producer, already, reader, size)
            if isinstance(stages, str):
                refused = stages
            else:
                figures[size] = self._trials.seconds(stages)
        if not figures:
            return _no(refused)
        size, after = min(figures.items(), key=lambda pair: sum(pair[1]))
        removed, added = sum(before[1:]), sum(after) - before[0]
        tiles = "one tile" if size is None else f"tiles of {size}"
        found = (
            f"{before[0] * 1e6:.1f} + {removed * 1e6:.1f} µs apart; {sum(after) * 1e6:.1f} µs where it starts in "
            f"{tiles}{'' if size is None else ', with their combination'}"
        )
        if added * MEDIAN_ERROR >= removed:
            return _no(f"{found}: the {added * 1e6:.1f} µs added are not less by the factor {MEDIAN_ERROR}")
        return Start(True, size, found)

    def _needed(self, producer: TE | FusedTE, already: Sequence[Started], *more: TE | FusedTE) -> tuple[Tensor, ...]:
        """What others need of the outputs of a contraction and of what starts in its tiles."""
        inside = {one.whole for one in already} | set(more)
        own = tuple(
            tensor
            for tensor in producer.outputs
            if tensor in self._program.outputs or any(one not in inside for one in self._program.consumers[tensor])
        )
        return own + tuple(tensor for one in already for tensor in one.inside.outputs)

    def _sizes(self, func: object, reader: TE | FusedTE) -> list[int | None]:
        """Chunks to try: the sides of the tile that the producer's rule chooses; ``None`` for all in one tile."""
        values = prod(next(part for part in parts_of(reader) if part.is_reduction).reduction_shape)
        tile = tile_of(func, self._request) or ()
        sizes: list[int | None] = [size for size in dict.fromkeys(tile) if 1 < size < values]
        return [*sizes, None] if values <= _LONGEST_WHOLE else sizes

    def _later(self, reader: TE | FusedTE) -> list[Trial] | str:
        """The stages that the reduction has of its own."""
        parts = self._split(reader).parts
        phases = Phases.of(reader, parts) if parts > 1 else "whole"
        return self._trials.stages([reader] if isinstance(phases, str) else [phases.partial, phases.total])

    def _joint(
        self, producer: TE | FusedTE, already: Sequence[Started], reader: TE | FusedTE, size: int | None
    ) -> list[Trial] | str:
        """The stages where it starts in tiles, or why it cannot."""
        made = started(producer, reader, size)
        if isinstance(made, str):
            return made
        items = (producer, *(one.inside for one in already), made.inside)
        needed = self._needed(producer, already, reader) + made.inside.outputs
        answer, draft = self._trials.answer(*items, needed=needed)
        if answer.schedule is None or answer.rule != _RULE:
            return f"no tile of its producer can hold it: {answer.reason}"
        rest = [] if made.rest is None else self._trials.stages([made.rest])
        return rest if isinstance(rest, str) else [self._trials.lowered(answer, draft), *rest]


def _no(reason: str) -> Start:
    return Start(False, None, reason)
