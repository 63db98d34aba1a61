"""Rule for chains of reductions over shared rows: softmax, layer and instance normalization, variance with epilogue."""

from __future__ import annotations

from tvm import ir, s_tir, tirx

from souffle.decision import Refused
from souffle.schedule.gpu.forms.blocks import (
    BlockView,
    block_views,
    expression_cost,
    intermediates,
    open_schedule,
    same_buffer,
)
from souffle.schedule.gpu.forms.rows import Chain, Rows, build, read_rows
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Knob, Rule, Sketch, Values
from souffle.schedule.gpu.tiling.row_tiling import choose_layout, layout_with, row_threads

__all__ = ["ROWWISE", "rows_sketch"]

WORTH_KEEPING = 8
"""Cost of an expression, as `expression_cost` counts, from which it is kept on chip for its readers: one function."""

STARVED_WORK = 1 << 16
"""Work of a row from which it matters that most multiprocessors have none."""

STARVED_SHARE = 8
"""A stage starves the device if fewer than one in so many multiprocessors have a tile."""


def _apply(rows: Rows, request: GpuRequest) -> Sketch | Refused:
    """Blocks that share rows, each tile holding whole rows and what is kept of them in shared memory.

    Refused are stages without a chain (no reduction, or single ones), rows that do not fit on chip, and few rows of
    much work, which as separate stages would occupy more of the device.
    """
    if all(_single(chain) for chain in rows.chains):
        return Refused("no block reads a whole row that another block reduces")
    for chain in rows.chains:
        if chain.row_count * STARVED_SHARE <= request.sm_count and chain.work >= STARVED_WORK:
            why = chain.broken[0] if chain.broken else f"{chain.row_count} row(s) of {chain.work} evaluations"
            return Refused(f"would leave most of {request.sm_count} multiprocessors idle: {why}")
    return rows_sketch(rows, request, ROWWISE.name, _worth_keeping(rows.func))


ROWWISE = Rule("rowwise", read_rows, _apply, whole_rows=True)


def rows_sketch(rows: Rows, request: GpuRequest, rule: str, worth: frozenset[str] = frozenset()) -> Sketch:
    """Tiles of whole rows, with what may be chosen of them.

    Parameters
    ----------
    rows : Rows
    request : GpuRequest
    rule : str
        Whose sketch it is.
    worth : frozenset of str
        Injective blocks that may be kept on chip for their readers, or computed again by each.
    """
    knobs = [Knob("threads_per_row", row_threads(request))]
    if worth:
        knobs.append(Knob("keep", (0, 1)))
    known: dict[tuple[int, int], GpuSchedule | Refused] = {}

    def make(values: Values) -> GpuSchedule | Refused:
        key = (values["threads_per_row"], values.get("keep", 0))
        if key not in known:
            try:
                known[key] = _with_rows(rows, request, rule, worth if key[1] else frozenset(), key[0])
            except s_tir.ScheduleError as error:
                why = str(error).strip().splitlines()[0]
                known[key] = Refused(f"{key[0]} threads a row: a scheduling step does not apply: {why}")
        return known[key]

    def choose() -> Values | Refused:
        answer = Refused("no layout")
        for keep in (1, 0) if worth else (0,):
            # A reduction that TVM cannot divide among threads (a combiner that it does not know) is left to one a row.
            for cross in (True, False):
                layout = choose_layout(rows.opened(worth) if keep else rows, request, cross)
                if isinstance(layout, Refused):
                    answer = layout
                    continue
                values = {"threads_per_row": layout.inner, **({"keep": keep} if worth else {})}
                made = make(values)
                if isinstance(made, GpuSchedule):
                    return values
                answer = made
        return answer

    return Sketch(rule, tuple(knobs), choose, make)


def _with_rows(form: Rows, request: GpuRequest, rule: str, keep: frozenset[str], inner: int) -> GpuSchedule | Refused:
    """The schedule with so many threads on a row, keeping the injective blocks named in `keep` on chip."""
    rows = form.opened(keep)
    layout = layout_with(rows, request, inner)
    if isinstance(layout, Refused):
        return layout
    if keep and inner == 1:
        return Refused("a thread that works on whole rows keeps no intermediates")
    build(rows, layout)
    if inner > 1 and not _reduces_across_threads(rows):
        return Refused("the combiner of its reduction is none that threads can share")
    return GpuSchedule(rows.sch.mod["main"], rule, layout.tiles, layout.rows * layout.inner)


def _reduces_across_threads(rows: Rows) -> bool:
    """Whether TVM can lower the cross-thread reductions of what was built."""
    try:
        s_tir.transform.LowerCrossThreadReduction()(rows.sch.mod)
    except ValueError:
        return False
    return True


def _single(chain: Chain) -> bool:
    """Whether a chain is one reduction whose readers take its elements in place."""
    reductions = [view for view in chain.blocks if view.reduction]
    return len(reductions) == 1 and all(chain.columns(i) == 1 for i in range(len(chain.blocks)))


def _worth_keeping(func: tirx.PrimFunc) -> frozenset[str]:
    """Injective blocks that several blocks read and that cost more to compute again than to keep."""
    sch = open_schedule(func)
    views = block_views(sch)
    private = intermediates(sch)

    def readers(buffer: ir.Var) -> list[BlockView]:
        return [view for view in views if view.reads_from(buffer)]

    return frozenset(
        view.name
        for view in views
        if not view.reduction
        and all(any(same_buffer(access.buffer, buffer) for buffer in private) for access in view.writes)
        and len(readers(view.writes[0].buffer)) > 1
        and expression_cost(view.node) >= WORTH_KEEPING
    )
