"""How two chained products are shared among the warps of a block: what may be chosen, and what to choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

import numpy as np
from tvm import tirx
from tvm.ir import Call, TensorLoad

from souffle.decision import Refused
from souffle.index.operations import ARITHMETIC
from souffle.schedule.gpu.device import ASSUMED_REGISTERS, DEVICES
from souffle.schedule.gpu.emit.mma_fragments import HALVES, Fragments
from souffle.schedule.gpu.emit.mma_instructions import COLUMNS, ROWS
from souffle.schedule.gpu.forms.chained_products import ChainedProducts
from souffle.schedule.gpu.forms.memory_access import bits_of
from souffle.schedule.gpu.rule import GpuRequest, Knob, Values
from souffle.schedule.gpu.tiling.mma_figures import (
    BARRIER,
    BUSY_LATENCY,
    L2_BYTES,
    LATENCY,
    LOAD_LATENCY,
    MOST_PARTS,
    MOST_REGISTERS,
    OWN_REGISTERS,
    SHARED_BYTES,
    THREADS,
    tensor_fma,
)
from souffle.schedule.gpu.tiling.mma_tiling import MmaTiling
from souffle.schedule.gpu.tiling.operand_source import OperandSource, operand_source
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import PrimExpr, dtype_of

__all__ = ["ChainSources", "ChainTiling", "assumed_sources", "chain_knobs", "choose_chain", "tile_sources"]

_PARTS_DOWN = (1, 2, 3, 4)
"""Fragments of 16 rows of a warp in the first product."""

_PARTS_ACROSS = (2, 4, 8)
"""Fragments of 8 columns of a warp in one chunk of the first product."""

_PIECES = (1, 2, 4)
"""Fragments along the inner axis in a step."""

_STAGES = (1, 2, 3)

_CHUNKS = (0, 1, 2, 3, 4)
"""Chunks of columns that a block has in registers at once; 0: all."""

_ALONE = 1.5
"""By how much faster a tiling has to be that fills a multiprocessor with one block."""

_OF_FIRST = 5
"""Knobs that say how a block shares the first product's rows and columns; they come first."""

_FUNCTION_INSTRUCTIONS = 8.0
"""Of an exponential or a division, about."""


@dataclass(frozen=True, eq=False)
class ChainSources:
    """How the three operands come: the rows' of the first product, the columns' of the first, and the second's; and
    what all are multiplied in."""

    left: OperandSource
    right: OperandSource
    other: OperandSource
    fragments: Fragments = HALVES


@dataclass(frozen=True)
class ChainTiling:
    """One way to share a problem.

    Attributes
    ----------
    first : MmaTiling
        Of one chunk of columns of the first product; its warps do not share the inner axis.
    chunks : int
        Chunks that a block holds in registers: a panel.
    panels : int
        Panels that make all columns. With several, each reduction of rows and the second product compute the elements
        of the first again.
    second : MmaTiling
        Of the second product; a tile has as many rows as the first's, and all columns.
    running : bool
        Whether rows are reduced along with the second product instead, one panel after the other, see
        :mod:`souffle.schedule.gpu.forms.running_rows`.
    """

    first: MmaTiling
    chunks: int
    second: MmaTiling
    panels: int = 1
    running: bool = False

    @classmethod
    def of(
        cls, values: Values, form: ChainedProducts, threads: int, fragments: Fragments = HALVES
    ) -> ChainTiling | None:
        """The tiling of these values; ``None`` if the block's warps cannot be shared so."""
        warps = threads // 32
        along = values["warps_along_rows"]
        again = values["second_warps_along_rows"] * values["second_warps_along_inner"]
        down = along * values["mma_rows"]
        if warps % along or warps % again or down % values["second_warps_along_rows"]:
            return None
        first = MmaTiling(
            (along, warps // along, 1),
            (values["mma_rows"], values["mma_columns"]),
            values["step"],
            values["stages"],
            fragments,
        )
        across = warps // again
        columns = 2 * ceil(form.second.extents[2] / (across * COLUMNS * 2))
        second = MmaTiling(
            (values["second_warps_along_rows"], across, values["second_warps_along_inner"]),
            (down // values["second_warps_along_rows"], columns),
            values["second_step"],
            values["stages"],
            fragments,
        )
        every = ceil(form.first.extents[2] / first.tile[2])
        chunks = values["chunks"] or every
        running = bool(values["running"])
        # Else the last panel would begin beyond the end.
        if every % chunks or (running and every == chunks):
            return None
        return cls(first, chunks, second, every // chunks, running)

    @property
    def values(self) -> Values:
        """As the knobs of the sketch say it."""
        return {
            "warps_along_rows": self.first.warps[0],
            "mma_rows": self.first.parts[0],
            "mma_columns": self.first.parts[1],
            "step": self.first.step,
            "chunks": self.chunks if self.panels > 1 else 0,
            "running": int(self.running),
            "second_warps_along_rows": self.second.warps[0],
            "second_warps_along_inner": self.second.warps[2],
            "second_step": self.second.step,
            "stages": self.stages,
        }

    def way(self, form: ChainedProducts) -> str:
        """How whole rows are computed, in words."""
        kind = "" if self.fragments is HALVES else f", in {self.fragments.name}"
        if self.panels == 1:
            return f"rows of {self.width} in registers{kind}"
        how = "with a running maximum and sum" if self.running else "again for each reduction"
        computed = self.computed_panels(form)
        left = f"; {computed:.1f} of them on average, the mask hides the others" if computed < self.panels else ""
        return f"{self.panels} panels of {self.width} {how}{left}{kind}"

    def computed_panels(self, form: ChainedProducts) -> float:
        """How many panels a tile computes on average: where a mask leaves nothing of one, it is left out."""
        if not self.running or form.running.seen is None:
            return self.panels
        tile, panel = np.arange(self.counts(form)[1])[:, None], np.arange(self.panels)
        first, last = form.running.seen.of_tile(tile * self.rows, self.rows)
        return float(((panel * self.width <= last) & ((panel + 1) * self.width > first)).sum(axis=1).mean())

    @property
    def rows(self) -> int:
        """Rows of a block's tile."""
        return self.first.tile[1]

    @property
    def width(self) -> int:
        """Columns of a panel, of which the last ones may lie beyond the end."""
        return self.chunks * self.first.tile[2]

    @property
    def row_pitch(self) -> int:
        """Elements from one row of the second product's left operand to the next."""
        return self.width + self.fragments.padding(inner_last=True)

    @property
    def fragments(self) -> Fragments:
        """What both products' operands are multiplied in."""
        return self.first.fragments

    @property
    def stages(self) -> int:
        """Tiles of an operand in shared memory."""
        return self.first.stages

    def counts(self, form: ChainedProducts) -> tuple[int, int]:
        """Tiles along batch and rows."""
        return form.first.extents[0], ceil(form.first.extents[1] / self.rows)

    def inner_steps(self, form: ChainedProducts) -> tuple[int, int]:
        """Steps along the inner axes of a chunk of the first product, and of a panel of the second."""
        columns = self.width if self.panels > 1 else form.first.extents[2]
        return ceil(form.first.extents[3] / self.first.step), ceil(columns / self.second.step)

    def ring_elements(self, sources: ChainSources) -> int:
        """Elements of the tiles of the operands of columns, of which one follows the other."""
        return max(
            source.buffers(self.stages) * source.elements(tiling.tile[2], tiling.step)
            for source, tiling in ((sources.right, self.first), (sources.other, self.second))
        )

    def shared_elements(self, form: ChainedProducts, sources: ChainSources) -> int:
        """Elements of shared memory: tiles, all of the rows' operand, and the rows; in the end totals take their
        place."""
        left = self.inner_steps(form)[0] * sources.left.elements(self.rows, self.first.step)
        needed = self.ring_elements(sources) + left + self.rows * self.row_pitch
        return max(needed, self.second.strip_bytes(1) // self.fragments.element_bytes)

    def shared_bytes(self, form: ChainedProducts, sources: ChainSources) -> int:
        """Bytes of shared memory of a block."""
        operands = self.fragments.element_bytes * self.shared_elements(form, sources)
        return operands + 4 * (self.part_elements(form) + self.factor_elements)

    @property
    def same_rows(self) -> bool:
        """Whether each warp has the rows of the second product that it has of the first, all columns of them."""
        return self.first.warps == self.second.warps

    @property
    def factor_elements(self) -> int:
        """fp32 of what totals of rows are multiplied with, where other warps have them than the rows before."""
        return self.rows if self.running and not self.same_rows else 0

    def part_elements(self, form: ChainedProducts) -> int:
        """fp32 that warps hand each other of values of rows; twice, so that one reduction need not wait for another."""
        most = max((len(step.reductions) for step in form.steps), default=0)
        return 2 * most * self.rows * self.first.warps[1] if self.first.warps[1] > 1 else 0

    def strip_parts(self, form: ChainedProducts, sources: ChainSources) -> int:
        """How many fragments of rows of each warp pass through shared memory at a time."""
        down = self.second.parts[0]
        free = self.fragments.element_bytes * self.shared_elements(form, sources)
        return max(n for n in range(1, down + 1) if down % n == 0 and self.second.strip_bytes(n) <= free)

    def registers(self, form: ChainedProducts, sources: ChainSources, threads: int) -> int:
        """Registers of a thread, about."""
        down, across = self.first.parts
        rows = 2 * down * (1 + len(form.reductions) + 2 * self.running)
        first = self.chunks * down * across * 4 + self.first.part_registers + rows
        first += sources.right.registers(self.first.tile[2], self.first.step, threads)
        second = prod(self.second.parts) * 4 + self.second.part_registers
        second += sources.other.registers(self.second.tile[2], self.second.step, threads)
        # With several panels the second product goes on while the first has its elements.
        return (max(first, second) if self.panels == 1 else first + second) + OWN_REGISTERS

    def refusal(self, form: ChainedProducts, sources: ChainSources, request: GpuRequest) -> Refused | None:
        """Why the parts of this tiling do not go together, or ``None``."""
        if self.chunks * prod(self.first.parts) > MOST_PARTS or prod(self.second.parts) > MOST_PARTS:
            return Refused("the totals of whole rows do not fit the registers of a block's threads")
        if self.registers(form, sources, request.threads) > MOST_REGISTERS:
            return Refused("the totals and what is on its way do not fit the registers of a thread")
        if self.panels > 1 and prod(self.second.parts) + self.chunks * prod(self.first.parts) > MOST_PARTS:
            return Refused("the totals of both products do not fit the registers of a block's threads")
        beyond = self.panels * self.width - form.first.extents[2]
        if self.panels > 1 and beyond >= self.second.step and form.first.extents[2] % self.second.step == 0:
            return Refused(f"{self.panels} panels of {self.width} columns end with a whole step beyond the end")
        if self.width % self.second.step:
            return Refused(f"rows of {self.width} are no steps of {self.second.step}")
        if self.second.step // self.fragments.inner % self.second.warps[2]:
            return Refused(f"a step of {self.second.step} has no equal parts for {self.second.warps[2]} warps")
        if not (sources.right.asynchronous or sources.other.asynchronous) and self.stages > 2:
            return Refused("what passes through registers is one step ahead at most")
        needed = self.shared_bytes(form, sources)
        if needed > request.max_shared_bytes:
            return Refused(f"{needed} bytes of shared memory are more than {request.max_shared_bytes}")
        return None


def assumed_sources(form: ChainedProducts, request: GpuRequest, fragments: Fragments = HALVES) -> ChainSources:
    """How operands come in whatever tile: what the choice looks at."""
    most, inner = max(_PIECES) * fragments.inner, fragments.inner
    tile = (1, 64, min(most, inner * ceil(form.first.extents[3] / inner)))
    first = (operand_source(form.first, side, tile, request, fragments) for side in ("left", "right"))
    other = operand_source(form.second, "right", (1, 64, most), request, fragments)
    return ChainSources(*first, other, fragments)


def tile_sources(form: ChainedProducts, tiling: ChainTiling, request: GpuRequest) -> ChainSources:
    """How the operands of this tiling's tiles come."""
    first, second, fragments = tiling.first, tiling.second, tiling.fragments
    return ChainSources(
        operand_source(form.first, "left", (1, first.tile[1], first.step), request, fragments),
        operand_source(form.first, "right", (1, first.tile[2], first.step), request, fragments),
        operand_source(form.second, "right", (1, second.tile[2], second.step), request, fragments),
        fragments,
    )


def chain_knobs(form: ChainedProducts, sources: ChainSources, threads: int) -> tuple[Knob, ...]:
    """What is open."""
    divisors = tuple(d for d in range(1, threads // 32 + 1) if threads // 32 % d == 0)

    each = sources.fragments.inner

    def steps(inner: int) -> tuple[int, ...]:
        return tuple(n * each for n in _PIECES if n * each < 2 * max(inner, each))

    some = sources.right.asynchronous or sources.other.asynchronous
    return (
        Knob("warps_along_rows", divisors),
        Knob("mma_rows", _PARTS_DOWN),
        Knob("mma_columns", _PARTS_ACROSS),
        Knob("chunks", _CHUNKS),
        Knob("running", (0,) if isinstance(form.running, Refused) else (0, 1)),
        Knob("step", steps(form.first.extents[3])),
        Knob("second_warps_along_rows", divisors),
        Knob("second_warps_along_inner", divisors),
        Knob("second_step", steps(form.first.extents[2])),
        Knob("stages", _STAGES if some else _STAGES[:2]),
    )


def _tilings(form: ChainedProducts, sources: ChainSources, request: GpuRequest) -> Iterator[ChainTiling]:
    """Those that fit. The first product's numbers are looked at alone first: few of them do."""
    knobs = chain_knobs(form, sources, request.threads)
    first, second = knobs[:_OF_FIRST], knobs[_OF_FIRST:]
    rows, columns = form.first.extents[1:3]
    for values in _products(first):
        warps, down, across = values["warps_along_rows"], values["mma_rows"], values["mma_columns"]
        every = ceil(columns / (request.threads // 32 // warps * across * COLUMNS))
        fits = every * down * across <= MOST_PARTS
        if warps * down * ROWS >= 2 * max(rows, ROWS) or values["chunks"] >= every:
            continue
        # Rows that fit are computed once; those that do not, in panels.
        panels, running = values["chunks"] > 0, values["running"] > 0
        if (panels and fits and not running) or (not panels and (running or not fits)):
            continue
        if values["chunks"] * down * across >= MOST_PARTS or every % (values["chunks"] or every):
            continue
        for more in _products(second):
            tiling = ChainTiling.of({**values, **more}, form, request.threads, sources.fragments)
            if tiling is not None and tiling.refusal(form, sources, request) is None:
                yield tiling


def _products(knobs: tuple[Knob, ...]) -> Iterator[dict[str, int]]:
    names = [knob.name for knob in knobs]
    for values in itertools.product(*(knob.values for knob in knobs)):
        yield dict(zip(names, values, strict=True))


def choose_chain(form: ChainedProducts, sources: ChainSources, request: GpuRequest) -> tuple[float, ChainTiling] | None:
    """The tiling of least estimated time, and that time in clocks.

    One that leaves no room for a second block on a multiprocessor leaves none to the other stages of its kernel either,
    and has to be as much faster.
    """
    half = request.max_shared_bytes // 2
    each = _instructions(form)

    def weighed(tiling: ChainTiling) -> tuple[float, float, float, ChainTiling]:
        modest = tiling.registers(form, sources, request.threads) <= ASSUMED_REGISTERS
        modest &= tiling.shared_bytes(form, sources) <= half
        cost, chain = _cost(form, sources, tiling, request, each)
        return cost * (1.0 if modest else _ALONE), chain, cost, tiling

    best = min(map(weighed, _tilings(form, sources, request)), key=lambda found: found[:2], default=None)
    return None if best is None else best[2:]


def _instructions(form: ChainedProducts) -> float:
    """Instructions for an element between the products, about."""
    values = [form.second.left.value]
    for step in form.steps:
        values += [] if step.update is None else [step.update]
        values += [reduction.term for reduction in step.reductions]
    return sum(map(_of_value, values)) + len(form.reductions)


def _of_value(value: PrimExpr) -> float:
    """Instructions of an expression: of each function about as many, of all other operations on data one."""
    total = 0.0

    def see(node: object) -> None:
        nonlocal total
        if "float" in dtype_of(node):
            total += _FUNCTION_INSTRUCTIONS if isinstance(node, Call) else 1.0

    structural_walk(value, ((*ARITHMETIC, Call, TensorLoad, tirx.Cast, tirx.Select), see))
    return total


@dataclass
class _Work:
    """What a tile asks of the units of a multiprocessor: bytes, multiply-adds, of which it does `fma` in a clock,
    instructions; and what it waits for."""

    fma: float
    tensor: float = 0.0
    shared: float = 0.0
    fetched: float = 0.0
    issued: float = 0.0
    waits: float = 0.0
    ahead: float = 0.0

    def add_product(self, tiling: MmaTiling, source: OperandSource, steps: float, threads: int) -> None:
        """A product of so many steps, of which the left operand is in shared memory."""
        _, rows, columns = tiling.tile
        down, across = tiling.parts
        fragments = tiling.fragments
        pieces = tiling.step // fragments.inner
        loads = tiling.warps[0] * tiling.warps[1] * (down * ROWS + across * COLUMNS) * tiling.step
        of_piece = tiling.piece_instructions(left_inner_last=True, right_inner_last=source.fetch.inner_last)
        instructions = threads * pieces / tiling.warps[2] * of_piece
        self.tensor += steps * rows * columns * tiling.step * fragments.relative_work
        put = source.put_clocks(columns * tiling.step * fragments.element_bytes)
        self.shared += steps * (loads * fragments.element_bytes + put * SHARED_BYTES)
        self.fetched += steps * columns * tiling.step * bits_of(source.fetch.operand.dtype) / 8
        self.issued += steps * (instructions + source.instructions(columns * tiling.step))
        barriers = 2 if tiling.stages == 1 else 1
        self.waits += steps * (barriers * BARRIER + LOAD_LATENCY * pieces / tiling.warps[2])
        depth = tiling.stages - 1 if source.asynchronous else 1
        self.ahead += (BUSY_LATENCY + put) * steps / depth if depth else 0.0
        self.waits += 0.0 if depth else LATENCY * steps

    @property
    def busy(self) -> float:
        """Clocks of a multiprocessor with all latencies hidden."""
        return max(self.tensor / self.fma, self.shared / SHARED_BYTES, self.fetched / L2_BYTES, self.issued / THREADS)

    @property
    def chain(self) -> float:
        """Clocks of a block alone, whose warps load and multiply in turns."""
        own = max(self.busy, self.tensor / self.fma + self.shared / SHARED_BYTES)
        return LATENCY + max(self.waits + own, self.ahead)


def _cost(
    form: ChainedProducts, sources: ChainSources, tiling: ChainTiling, request: GpuRequest, each: float
) -> tuple[float, float]:
    """Estimated clocks of a multiprocessor, its waves as :mod:`souffle.cost.predict` adds them up; and of one tile.

    Between the products `each` instructions are for an element.
    """
    first_steps, second_steps = tiling.inner_steps(form)
    panels = tiling.computed_panels(form)
    rows, elements = tiling.rows, tiling.rows * tiling.width * panels
    again = tiling.panels > 1 and not tiling.running
    times = 1 + sum(bool(step.reductions) for step in form.steps) if again else 1
    work = _Work(tensor_fma(request))
    work.add_product(tiling.first, sources.right, times * panels * first_steps * tiling.chunks, request.threads)
    work.add_product(tiling.second, sources.other, panels * second_steps, request.threads)
    work.fetched += rows * form.first.extents[3] * tiling.fragments.element_bytes
    # Half of what is computed of rows is computed again, on average.
    work.issued += elements * each * (1 + times) / 2
    work.shared += elements * tiling.fragments.element_bytes + 4 * tiling.part_elements(form) * tiling.first.warps[1]
    work.waits += len(form.reductions) * (BARRIER + 4 * LOAD_LATENCY) + 4 * BARRIER
    totals = rows * form.second.extents[2]
    if tiling.running:
        # Each panel rescales what there is; exponentials of a row are its own threads'.
        each_row = _FUNCTION_INSTRUCTIONS * 4 * tiling.first.warps[1]
        work.issued += panels * (totals * tiling.second.warps[2] + rows * (each_row + 8))
        barriers = (tiling.first.warps[1] > 1) + (not tiling.same_rows)
        work.waits += (panels - 1) * (barriers * BARRIER + 4 * LOAD_LATENCY)
    work.shared += totals * 4 * (tiling.second.warps[2] + 1)
    work.issued += totals * 8.0
    work.fetched += totals * 4
    tiles = prod(tiling.counts(form))
    resident = _resident(form, sources, tiling, request)
    full, rest = divmod(tiles, request.sm_count * resident)
    last = ceil(rest / request.sm_count)
    chain = work.chain
    return full * max(resident * work.busy, chain) + (max(last * work.busy, chain) if rest else 0.0), chain


def _resident(form: ChainedProducts, sources: ChainSources, tiling: ChainTiling, request: GpuRequest) -> int:
    """Blocks that a multiprocessor holds at once."""
    device = DEVICES.get(request.arch, DEVICES["sm_80"])
    registers = tiling.registers(form, sources, request.threads)
    held = device.resident_blocks(request.threads, tiling.shared_bytes(form, sources), registers)
    return max(1, min(held.values()))
