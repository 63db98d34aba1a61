"""The operations of a pattern as blocks of a schedule, with what the pattern gives stored by blocks of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx

from souffle.schedule.gpu.forms.blocks import block_view, block_views, intermediates, open_schedule, same_buffer
from souffle.stitching.template import OpSchedule, TemplateError
from souffle.stitching.template_launch import TemplateOp, stored_by, tiling_of

__all__ = ["Pattern"]


class Pattern:
    """The operations of a stage as blocks of a schedule, with what the pattern gives written by blocks of its own.

    A result that others of the pattern read too is in shared memory where its schedule has an ``S``, and a *copy* of
    that is stored, by the blocks that have it. Else it is computed where it is stored, and again where it is read.

    Attributes
    ----------
    sch : Schedule
    count : int
        Operations; the copy of operation ``n`` has number ``count + n``.
    tilings : dict of int to Tiling
        Of operations that have a schedule, and of copies.
    blocks : dict of int to SBlockRV
    stored : set of int
        The numbers of what writes results of the pattern.
    """

    def __init__(
        self, func: tirx.PrimFunc, ops: Sequence[TemplateOp], known: Mapping[int, OpSchedule], cta_size: int
    ) -> None:
        self.sch, self.count = open_schedule(func), len(ops)
        self.tilings = {number: tiling_of(schedule, ops[number], cta_size) for number, schedule in known.items()}
        self.blocks = {number: self.sch.get_sblock(f"t{number}") for number in range(self.count)}
        self.stored: set[int] = set()
        private, views = intermediates(self.sch), block_views(self.sch)
        for number, view in sorted(((int(view.name[1:]), view) for view in views), key=lambda pair: pair[0]):
            buffer = view.writes[0].buffer
            if not any(same_buffer(buffer, one) for one in private):
                readers = [other.rv for other in views if other.reads_from(buffer)]
                self.store(number, ops[number].name, readers, cta_size)
        for number in sorted(set(range(self.count)) - set(self.tilings)):
            self.sch.compute_inline(self.blocks[number])

    def store(self, number: int, name: str, readers: Sequence[Any], cta_size: int) -> None:
        """Have a result written by a block that none reads."""
        tiling = self.tilings.get(number)
        if tiling is None:
            raise TemplateError(f"{name} has no schedule; what is needed outside of the pattern needs one")
        schedule, op, own = tiling.schedule, tiling.op, self.blocks[number]
        if schedule.shared and not readers:
            raise TemplateError(f"{op.name} is what the pattern gives, which is read from global memory: no S")
        if not readers:
            self.stored.add(number)
            return
        copy = self.sch.cache_write(own, 0, "local", list(readers))
        if schedule.shared:
            self.stored.add(self.count + number)
            self.blocks[self.count + number] = copy
            self.tilings[self.count + number] = tiling_of(*stored_by(schedule, op, cta_size), cta_size)
            return
        if any(op.reduced):
            raise TemplateError(f"{op.name} is read in the pattern, which gives it, too; S would keep it for both")
        self.stored.add(number)
        self.blocks[number] = copy
        self.sch.compute_inline(own)

    def readers(self) -> dict[int, set[int]]:
        """Which of those that have a schedule read each of them."""
        views = {number: block_view(self.sch, self.blocks[number]) for number in self.tilings}
        return {
            number: {other for other, reader in views.items() if reader.reads_from(view.writes[0].buffer)}
            for number, view in views.items()
        }
