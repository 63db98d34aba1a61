"""The template of a pattern that is predicted to be fastest (FusionStitching 2019, Algorithm 3; 2021, §4.2).

The few choices that make a template (``template_styles.py``) are made one after another, from a first guess on: of each
the value with which the lowered stage is predicted to take the least time, while the others stay. That is gone over
again until nothing gets better, or so many stages have been scheduled that it has to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from souffle.cost.device import CostDevice
from souffle.cost.stage_price import price_on
from souffle.decision import Decision, Refused
from souffle.program import TE, ExternTE, TEProgram
from souffle.schedule.gpu.rule import GpuSchedule
from souffle.schedule.lower import DeviceFunction, LoweringError, cuda_target, lower_stage
from souffle.schedule.stage import Stage, draft_stage
from souffle.stitching.graph import OpGraph, Read, pattern_graph
from souffle.stitching.kinds import CONTRACTIONS, ELEMENTWISE, REDUCTIONS, Kind
from souffle.stitching.layout import axis_sets, layout_of
from souffle.stitching.plan import Scheme
from souffle.stitching.shared import SharedPlan, SharedRequest, plan_shared
from souffle.stitching.template import Attribute, Template, TemplateError
from souffle.stitching.template_launch import TemplateOp, tiling_of
from souffle.stitching.template_ops import op_of
from souffle.stitching.template_schedule import scheduled_by
from souffle.stitching.template_styles import STYLES, Choices, points_of, sub_roots, template_of

__all__ = ["MOST_SCHEDULED", "Price", "Stitched", "Stitcher", "stitched", "stitched_stage"]

MOST_SCHEDULED = 32
"""Stages of a pattern that are scheduled and lowered at most."""

FEWEST_POINTS, MOST_POINTS = 64, 65536
"""That a block computes of an operation: fewer would leave threads idle, and more would take a block too long."""

THREADS = (256, 128, 64)
"""Of a block, of which stages of a kernel have 256 at most."""

_SHORT, _WARP_ROW, _LONG = 4, 64, 1024
"""Terms of a row up to which a thread alone is tried first, is tried at all, and up to which a warp is tried first."""

_MANY_TES, _FEWEST_SCHEDULED = 32, 4
"""TEs above which fewer stages are scheduled, since each takes longer; and how many always are, if there may be."""

_ALIGNMENT = 128
"""Bytes at whose multiples results begin in shared memory, as lowering places them."""

Price = Callable[[Sequence[DeviceFunction]], float]
"""Predicted seconds of a lowered stage."""


@dataclass(frozen=True, eq=False)
class Stitched:
    """A pattern as a stage that a template schedules.

    Attributes
    ----------
    stage : Stage
        With the functions that it was lowered to.
    template : Template
    schemes : tuple of Scheme
        How each TE is attached.
    shared : SharedPlan
        What they ask for of shared memory, and how Algorithm 4 of 2019 would place it.
    allocated : int
        Bytes of shared memory that a block has.
    seconds : float
        Predicted.
    scheduled : int
        Stages that were lowered to find it.
    decisions : tuple of Decision
    """

    stage: Stage
    template: Template
    schemes: tuple[Scheme, ...]
    shared: SharedPlan
    allocated: int
    seconds: float
    scheduled: int
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, eq=False)
class _Tried:
    """A candidate: what it takes, or why it cannot be had."""

    seconds: float
    template: Template | None = None
    schedule: GpuSchedule | None = None
    functions: tuple[DeviceFunction, ...] = ()
    reason: str = ""


def stitched_stage(
    tes: Sequence[TE | ExternTE], program: TEProgram, device: CostDevice, *, price: Price | None = None
) -> Stage:
    """The stage of :func:`stitched`, whose parameters and errors it has."""
    return stitched(tes, program, device, price=price).stage


def stitched(
    tes: Sequence[TE | ExternTE],
    program: TEProgram,
    device: CostDevice,
    *,
    price: Price | None = None,
    most: int = MOST_SCHEDULED,
) -> Stitched:
    """TEs of a program as one stage, by the template that is predicted to be fastest.

    Parameters
    ----------
    tes : sequence of TE
        In topological order. What others of the program need of them is stored, each element once.
    program : TEProgram
        Which they are of.
    device : CostDevice
    price : callable, optional
        Predicted seconds of a lowered stage; by the cost model where not given.
    most : int
        Stages to schedule.

    Raises
    ------
    TemplateError
        If they cannot be one; the message names the TE and says why.
    """
    return Stitcher(device, price=price, most=most)(tes, program)


class Stitcher:
    """:func:`stitched` for many patterns: those that are structurally equal, as of equal layers, are searched once.

    Parameters
    ----------
    device, price, most
        See :func:`stitched`.
    """

    def __init__(self, device: CostDevice, *, price: Price | None = None, most: int = MOST_SCHEDULED) -> None:
        self.device, self.most = device, most
        self.price: Price = price or price_on(device)
        self._known: dict[str, _Found | Refused] = {}

    def __call__(self, tes: Sequence[TE | ExternTE], program: TEProgram) -> Stitched:
        """See :func:`stitched`."""
        search = _Search(tes, program, self)
        digest = search.draft.digest
        if digest not in self._known:
            self._known[digest] = search.found()
        found = self._known[digest]
        if isinstance(found, Refused):
            raise TemplateError(f"{tes[-1].name} and what it needs cannot be one kernel: {found.reason}")
        return search.answer(found)


@dataclass(frozen=True, eq=False)
class _Found:
    """The best candidate of a pattern, and how many there were."""

    choices: Choices
    tried: _Tried
    scheduled: int


class _Search:
    def __init__(self, tes: Sequence[TE | ExternTE], program: TEProgram, how: Stitcher) -> None:
        for one in tes:
            if not isinstance(one, TE):
                raise TemplateError(f"{one.name} is {type(one).__name__}; a template schedules TEs of one statement")
            if len(one.outputs) != 1:
                raise TemplateError(f"{one.name} has {len(one.outputs)} outputs; a template schedules TEs of one")
        self.tes = tuple(tes)
        self.device, self.price = how.device, how.price
        self.most = min(how.most, max(_FEWEST_SCHEDULED, how.most * _MANY_TES // len(self.tes)))
        self.draft = draft_stage(tes, program)
        self.graph: OpGraph = pattern_graph(tes, program)
        self.ops: list[TemplateOp] = [op_of(one) for one in tes]
        self.target = cuda_target(how.device.arch)
        self.tried: dict[tuple[str, int], _Tried] = {}
        self.known: dict[Choices, _Tried] = {}

    def found(self) -> _Found | Refused:
        """The best of those that are tried."""
        best = self.guess()
        least = self.of(best).seconds
        again = True
        while again and self.scheduled < self.most:
            again = False
            for changes in self.changes():
                for change in changes:
                    if self.scheduled >= self.most:
                        break
                    choices = replace(best, **change)
                    if self.of(choices).seconds < least:
                        best, least, again = choices, self.of(choices).seconds, True
        if least == inf:
            reasons = dict.fromkeys(one.reason for one in self.tried.values())
            return Refused("; ".join(reasons))
        return _Found(best, self.of(best), self.scheduled)

    @property
    def scheduled(self) -> int:
        """Stages that were lowered so far."""
        return len(self.tried)

    def guess(self) -> Choices:
        """Where the search begins: two blocks for each multiprocessor; short rows in warps, long ones in blocks."""
        row = "thread" if self.longest <= _SHORT else "warp" if self.longest <= _LONG else "block"
        return Choices(
            sub_roots(self.graph)[0], 2 * self.device.sm_count, row, "column", "thread", False, THREADS[0], False
        )

    @property
    def longest(self) -> int:
        """Terms of the longest reduction."""
        return max((prod(op.reduced) for op in self.graph.ops if op.kind in REDUCTIONS), default=1)

    def changes(self) -> Iterator[list[dict[str, object]]]:
        """What may be chosen otherwise, in the order in which it is tried."""
        kinds = {op.kind for op in self.graph.ops}
        rows = bool(kinds & {Kind.ROW, Kind.SCALAR})
        yield [{"blocks": count} for count in self.counts()]
        if rows:
            unfit = {"thread"} if self.longest > _WARP_ROW else {"block"}
            yield [{"row": style} for style in STYLES["row"] if style not in unfit]
        if Kind.COLUMN in kinds:
            yield [{"column": style} for style in STYLES["column"]]
        if kinds & {*CONTRACTIONS, Kind.WINDOW}:
            yield [{"product": style} for style in STYLES["product"]]
        kept = sub_roots(self.graph)
        yield [{"kept": one, "registers": way} for one in kept for way in ((True, False) if rows else (False,))]
        yield [{"threads": threads} for threads in THREADS]
        yield [{"first": first} for first in (False, True)]

    def counts(self) -> list[int]:
        """Numbers of blocks: multiples of the multiprocessors, and those of blocks with whole warps of units."""
        components = layout_of(self.graph, range(len(self.tes))).components
        units = max(component.units for component in components)
        points = max(points_of(self.graph, number) for number in range(len(self.tes)))
        few, many = -(-points // MOST_POINTS), max(1, points // FEWEST_POINTS)
        sizes = [1, 4, 8, 32, 256]
        found = [self.device.sm_count * n for n in (1, 2, 4, 8, 16)] + [-(-units // size) for size in sizes]
        return list(dict.fromkeys(min(units, max(few, min(many, count))) for count in found))

    # A candidate

    def of(self, choices: Choices) -> _Tried:
        """What some choices come to."""
        if choices not in self.known:
            try:
                template = template_of(self.graph, self.ops, choices)
            except TemplateError as error:
                self.known[choices] = _Tried(inf, reason=str(error))
                return self.known[choices]
            key = (str(template), choices.threads)
            if key not in self.tried:
                self.tried[key] = self.lowered(template, choices)
            self.known[choices] = self.tried[key]
        return self.known[choices]

    def lowered(self, template: Template, choices: Choices) -> _Tried:
        shared = [number for number, one in enumerate(self.tes) if _is_shared(template, one.name)]
        sets = axis_sets(self.graph, range(len(self.tes)), shared)
        try:
            schedule = scheduled_by(self.draft.func, self.ops, template, sets=sets, cta_size=choices.threads)
            functions = lower_stage("stage", schedule, self.target)
        except (TemplateError, LoweringError) as error:
            return _Tried(inf, template, reason=str(error))
        nbytes = max(function.shared_bytes for function in functions)
        if nbytes > self.device.shared_per_block:
            limit = self.device.shared_per_block
            return _Tried(inf, template, reason=f"{template} needs {nbytes} bytes of shared memory, of {limit}")
        return _Tried(self.price(functions), template, schedule, functions)

    # The answer

    def answer(self, found: _Found) -> Stitched:
        """What was found for this pattern, or for one that is equal but for names."""
        tried = found.tried
        template = template_of(self.graph, self.ops, found.choices)
        schedule = replace(tried.schedule, way=str(template))
        schemes = tuple(self.scheme(number, template, schedule.threads) for number in range(len(self.tes)))
        plan = plan_shared(self.requests(template, schedule.threads), alignment=_ALIGNMENT)
        allocated = max(function.shared_bytes for function in tried.functions)
        why = (
            f"{tried.seconds * 1e6:.2f} us predicted, the least of {found.scheduled} templates; shared memory: "
            f"{plan.requested} bytes requested, {allocated} allocated"
        )
        attached = ", ".join(f"{one.name}/{scheme}" for one, scheme in zip(self.tes, schemes, strict=True))
        decisions = (
            Decision("template", str(template), True, why),
            Decision("template", self.draft.name, True, f"attached: {attached}"),
        )
        stage = Stage(self.draft, schedule, tried.functions)
        return Stitched(stage, template, schemes, plan, allocated, tried.seconds, found.scheduled, decisions)

    def scheme(self, number: int, template: Template, threads: int) -> Scheme:
        """How a TE is attached to those that read it."""
        schedule = template.of_te(self.tes[number].name)
        if not self.graph.consumers[number]:
            return Scheme.PACKING
        if schedule is None or (not schedule.shared and not self.ops[number].reduced):
            return Scheme.THREAD
        if schedule.shared:
            return Scheme.BLOCK
        return Scheme.WARP if tiling_of(schedule, self.ops[number], threads).across else Scheme.THREAD

    def requests(self, template: Template, threads: int) -> list[SharedRequest]:
        """What each TE asks for of a block's shared memory."""
        found = []
        for number, one in enumerate(self.tes):
            nbytes = 0
            if _is_shared(template, one.name):
                op = self.ops[number]
                tiling = tiling_of(template.of_te(one.name), op, threads)
                nbytes = one.outputs[0].itemsize
                for d, reduced in enumerate(op.reduced):
                    nbytes *= 1 if reduced else tiling.without({Attribute.GRID}, d)
            operands = tuple(self.tes[producer].name for producer in self.graph.producers[number])
            in_place = frozenset(
                self.tes[read.producer].name
                for read in self.graph.ops[number].reads
                if read.producer is not None and self.in_place(number, read)
            )
            found.append(SharedRequest(one.name, operands, nbytes, in_place))
        return found

    def in_place(self, number: int, read: Read) -> bool:
        """Whether an operation reads a tensor at the element that it computes alone."""
        op = self.graph.ops[number]
        own = {(d, d, extent) for d, extent in enumerate(op.shape) if extent > 1}
        return op.kind in ELEMENTWISE and op.shape == read.shape and own <= set(read.alignments)


def _is_shared(template: Template, name: str) -> bool:
    schedule = template.of_te(name)
    return schedule is not None and schedule.shared
