"""How a sum of products is shared among the warps of tensor-core blocks: what may be chosen, and what to choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from souffle.decision import Refused
from souffle.schedule.gpu.device import ASSUMED_REGISTERS, DEVICES, GpuDevice, taken_registers
from souffle.schedule.gpu.emit.mma_fragments import HALVES, Fragments
from souffle.schedule.gpu.emit.mma_instructions import COLUMNS, ROWS
from souffle.schedule.gpu.emit.mma_moments import moments_refusal
from souffle.schedule.gpu.emit.row_statements import row_bytes
from souffle.schedule.gpu.forms.matrix_product import Contraction
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
    SPARED_AHEAD,
    SPARED_REGISTERS,
    THREADS,
    tensor_fma,
)
from souffle.schedule.gpu.tiling.operand_source import OperandSource, operand_source

__all__ = [
    "MmaTiling",
    "Operands",
    "assumed_operands",
    "choose_serial_tiling",
    "choose_tiling",
    "estimated_tilings",
    "knobs_of",
    "tile_operands",
    "tiling_refusal",
]

STRIP_PADDING = 8
"""fp32 between rows of totals: rows that are 8 banks apart let a warp store 4 rows of pairs at once."""

_PARTS_DOWN = (1, 2, 3, 4)
"""Fragments of 16 rows of a warp."""

_PARTS_ACROSS = (2, 4, 6, 8)
"""Fragments of 8 columns of a warp, an even number: ``ldmatrix.x4`` brings two."""

_PLAIN_PARTS = frozenset({1, 2, 4, 8})
"""Of either, the only ones where an operand passes through registers: the estimate leaves out how indices are
calculated there, and does not tell more shapes apart."""

_PIECES = (2, 4, 8, 16)
"""Fragments along the inner axis in a step."""

_STAGES = (1, 2, 3, 4)

_USUAL_BLOCKS = 2
"""Blocks on a multiprocessor for which the rule leaves shared memory by itself, so that stages that share the kernel
have as many and a grid that does not fit one wave ends no kernel (§5.4); a search may take all."""

_ALIKE = 1.04
"""Estimates of time closer than this factor are not told apart."""

_FULL = 1.08
"""By which those must be estimated to be sooner that take the registers of two blocks on a multiprocessor to the last:
with 1.06 to 1.1 an H100 took least for what is chosen, as ``docs/results/tiling_choice.json`` records."""


@dataclass(frozen=True, eq=False)
class Operands:
    """How the two operands of a block's tile come."""

    left: OperandSource
    right: OperandSource
    fragments: Fragments = HALVES

    @property
    def both(self) -> tuple[OperandSource, OperandSource]:
        """The left one first."""
        return self.left, self.right

    @property
    def copied(self) -> bool:
        """Whether both come by asynchronous copies."""
        return all(one.asynchronous for one in self.both)

    def rolled(self) -> Operands:
        """With many copies of a thread in a loop."""
        return Operands(self.left.rolled(), self.right.rolled(), self.fragments)


@dataclass(frozen=True)
class MmaTiling:
    """One way to share a problem.

    Attributes
    ----------
    warps : tuple of int
        Along rows, columns and the inner axis. Warps along the inner axis take different products of each step, and add
        their totals in the end.
    parts : tuple of int
        Fragments of a warp: of 16 rows, and of 8 columns.
    step : int
        Extent of a tile along the inner axis.
    stages : int
        Tiles in shared memory: one is worked on, the others are on their way.
    fragments : Fragments
        What operands are multiplied in: no choice, but the problem's.
    """

    warps: tuple[int, int, int]
    parts: tuple[int, int]
    step: int
    stages: int
    fragments: Fragments = HALVES

    @property
    def tile(self) -> tuple[int, int, int]:
        """Extents of a block's tile: batch, rows, columns."""
        return (1, self.warps[0] * self.parts[0] * ROWS, self.warps[1] * self.parts[1] * COLUMNS)

    @property
    def values(self) -> Values:
        """As the knobs of the sketch say it."""
        return {
            "warps_along_rows": self.warps[0],
            "warps_along_inner": self.warps[2],
            "mma_rows": self.parts[0],
            "mma_columns": self.parts[1],
            "step": self.step,
            "stages": self.stages,
        }

    @classmethod
    def of(cls, values: Values, threads: int, fragments: Fragments = HALVES) -> MmaTiling | None:
        """The tiling of these values; ``None`` if the block's warps cannot be shared so."""
        warps, along = threads // 32, values["warps_along_rows"] * values["warps_along_inner"]
        if warps % along:
            return None
        return cls(
            (values["warps_along_rows"], warps // along, values["warps_along_inner"]),
            (values["mma_rows"], values["mma_columns"]),
            values["step"],
            values["stages"],
            fragments,
        )

    def counts(self, extents: tuple[int, int, int, int]) -> tuple[int, int, int]:
        """Tiles along batch, rows, columns."""
        return tuple(ceil(extent / size) for extent, size in zip(extents, self.tile, strict=False))

    @property
    def strip_pitch(self) -> int:
        """fp32 from one row of totals to the next, as they pass through shared memory."""
        return self.tile[2] + STRIP_PADDING

    def strip_bytes(self, parts: int) -> int:
        """Shared memory of the totals of `parts` fragments of rows of each warp."""
        return 4 * self.warps[2] * parts * self.warps[0] * ROWS * self.strip_pitch

    def operand_bytes(self, operands: Operands) -> int:
        """Shared memory of all tiles of both operands."""
        sizes = (
            one.elements(extent, self.step) * one.buffers(self.stages)
            for one, extent in zip(operands.both, self.tile[1:], strict=True)
        )
        return self.fragments.element_bytes * sum(sizes)

    def shared_bytes(self, operands: Operands) -> int:
        """Bytes of shared memory of a block; in the end totals pass through where the tiles were."""
        return max(self.operand_bytes(operands), self.strip_bytes(1))

    def strip_parts(self, operands: Operands) -> int:
        """How many fragments of rows of each warp pass through shared memory at a time."""
        fitting = [
            n
            for n in range(1, self.parts[0] + 1)
            if self.parts[0] % n == 0 and self.strip_bytes(n) <= self.shared_bytes(operands)
        ]
        return fitting[-1]

    def wanted(self, operands: Operands, threads: int) -> int:
        """Registers of a thread that a compiler takes if it may, about."""
        down, across = self.parts
        extents = zip(operands.both, self.tile[1:], strict=True)
        held = sum(one.registers(extent, self.step, threads) for one, extent in extents)
        held += operands.left.row_registers(down)
        return down * across * 4 + self.part_registers + held + OWN_REGISTERS

    @property
    def part_registers(self) -> int:
        """Registers of a thread for its parts of both operands, and for sums of their products."""
        down, across = self.parts
        parts = down * 4 + across * 2
        return (2 * parts if self.fragments.split else parts) + across * self.fragments.sums

    def piece_instructions(self, *, left_inner_last: bool, right_inner_last: bool) -> float:
        """Of a thread for a piece of a step, as long as fragments are: loads, what prepares them, products and sums."""
        (down, across), fragments = self.parts, self.fragments
        loads = down * fragments.loads(inner_last=left_inner_last)
        loads += across / 2 * fragments.loads(inner_last=right_inner_last)
        prepared = fragments.preparing * (4 * down + 2 * across)
        return down * across * (fragments.products + fragments.sums) + prepared + loads

    def registers(self, operands: Operands, threads: int) -> int:
        """Registers of a thread where two blocks are to share a multiprocessor."""
        return taken_registers(self.wanted(operands, threads), SPARED_REGISTERS if operands.copied else 0)

    def crowded(self, operands: Operands, threads: int) -> bool:
        """Whether a thread is left fewer registers than a compiler would take."""
        return self.wanted(operands, threads) > self.registers(operands, threads)

    @property
    def pieces(self) -> int:
        """Of a step, as long as fragments are, for each warp."""
        return self.step // self.fragments.inner // self.warps[2]

    @property
    def steps_together(self) -> int:
        """Steps that have an even number of pieces together."""
        return 1 if self.pieces % 2 == 0 else 2

    def rolls_pieces(self, operands: Operands, threads: int) -> bool:
        """Whether a piece is loaded when the products of the one before are done, for want of registers."""
        return self.wanted(operands, threads) > ASSUMED_REGISTERS + SPARED_AHEAD

    def reads_ahead(self, operands: Operands, threads: int, steps: int) -> bool:
        """Whether parts of a piece are loaded before the products of the piece before, also where that is of another
        step.

        Each second piece has registers of its own. The next step's tiles are waited for a piece sooner: with two stages
        they would be, in the same step in which they are asked for.
        """
        down, across = self.parts
        room = self.wanted(operands, threads) + down * 4 + across * 2 <= ASSUMED_REGISTERS + SPARED_AHEAD
        even = steps > self.steps_together and steps % self.steps_together == 0
        return operands.copied and operands.left.finished is None and room and self.stages > 2 and even

    def refusal(self, operands: Operands, request: GpuRequest) -> Refused | None:
        """Why the parts of this tiling do not go together, or ``None``."""
        if prod(self.warps) * 32 != request.threads:
            return Refused(f"{self.warps} warps are not {request.threads} threads")
        if prod(self.parts) > MOST_PARTS or self.registers(operands, request.threads) > MOST_REGISTERS:
            return Refused("the totals and what is on its way do not fit the registers of a thread")
        if self.step // self.fragments.inner % self.warps[2]:
            return Refused(f"a step of {self.step} products has no equal parts for {self.warps[2]} warps")
        if not any(one.asynchronous for one in operands.both) and self.stages > 2:
            return Refused("what passes through registers is one step ahead at most")
        needed = self.shared_bytes(operands)
        if needed > request.max_shared_bytes:
            return Refused(f"{needed} bytes of shared memory are more than {request.max_shared_bytes}")
        return None


def tiling_refusal(problem: Contraction, tiling: MmaTiling, operands: Operands, request: GpuRequest) -> Refused | None:
    """Why a contraction cannot be shared so, or ``None``."""
    left = request.max_shared_bytes - row_bytes(problem, tiling.tile[1], operands.left.finished)
    return (
        moments_refusal(problem, tiling.tile)
        or _finished_refusal(problem, tiling, operands)
        or tiling.refusal(operands, replace(request, max_shared_bytes=left))
    )


def _finished_refusal(problem: Contraction, tiling: MmaTiling, operands: Operands) -> Refused | None:
    """Why an operand that has values of chunks, or that is finished in fragments, cannot come in such steps."""
    finished, chunks = operands.left.finished, problem.row_values.chunks
    if finished is None:
        return None if chunks is None else Refused("values of chunks are applied to fragments of copies alone")
    if problem.extents[3] % tiling.step or not operands.left.fetch.inner_last:
        return Refused(f"{problem.extents[3]} products are not finished in steps of {tiling.step}")
    if chunks is not None and chunks.size % tiling.fragments.inner:
        return Refused(f"fragments lie in several chunks of {chunks.size}")
    return None


def _operands(
    problem: Contraction, tile: tuple[int, int, int], step: int, request: GpuRequest, fragments: Fragments
) -> Operands:
    """How the operands of a block's tile come."""
    sides = (("left", tile[1]), ("right", tile[2]))
    comes = (operand_source(problem, side, (1, extent, step), request, fragments) for side, extent in sides)
    return Operands(*comes, fragments)


def assumed_operands(problem: Contraction, request: GpuRequest, fragments: Fragments = HALVES) -> Operands:
    """How operands come in whatever tile: what the choice looks at."""
    return _operands(problem, (1, 64, 64), min(_steps(problem, fragments)), request, fragments)


def tile_operands(problem: Contraction, tiling: MmaTiling, request: GpuRequest) -> Operands:
    """How the operands of this tiling's tiles come."""
    return _operands(problem, tiling.tile, tiling.step, request, tiling.fragments)


def _steps(problem: Contraction, fragments: Fragments) -> tuple[int, ...]:
    inner = problem.extents[3]
    if inner <= fragments.inner:
        return (fragments.inner,)
    steps = [pieces * fragments.inner for pieces in _PIECES]
    return tuple(step for step in steps if step < 2 * max(inner, steps[0]))


def knobs_of(problem: Contraction, operands: Operands, threads: int) -> tuple[Knob, ...]:
    """What is open."""
    divisors = tuple(d for d in range(1, threads // 32 + 1) if threads // 32 % d == 0)
    steps = _steps(problem, operands.fragments)
    pieces = max(steps) // operands.fragments.inner
    return (
        Knob("warps_along_rows", divisors),
        Knob("warps_along_inner", tuple(d for d in divisors if pieces % d == 0)),
        Knob("mma_rows", _parts(_PARTS_DOWN, operands)),
        Knob("mma_columns", _parts(_PARTS_ACROSS, operands)),
        Knob("step", steps),
        Knob("stages", _STAGES if any(one.asynchronous for one in operands.both) else _STAGES[:2]),
    )


def _parts(parts: tuple[int, ...], operands: Operands) -> tuple[int, ...]:
    return parts if operands.copied else tuple(part for part in parts if part in _PLAIN_PARTS)


def _tilings(problem: Contraction, operands: Operands, request: GpuRequest) -> Iterator[MmaTiling]:
    knobs = knobs_of(problem, operands, request.threads)
    names = [knob.name for knob in knobs]
    usual = _device(request).shared_for(_USUAL_BLOCKS)
    modest = replace(request, max_shared_bytes=min(request.max_shared_bytes, usual))
    extents = problem.extents
    for values in itertools.product(*(knob.values for knob in knobs)):
        tiling = MmaTiling.of(dict(zip(names, values, strict=True)), request.threads, operands.fragments)
        if tiling is None or _is_idle(extents, tiling):
            continue
        if tiling_refusal(problem, tiling, operands, modest) is None:
            yield tiling


def _is_idle(extents: tuple[int, int, int, int], tiling: MmaTiling) -> bool:
    """Whether half of the tile or more lies beyond the end of the rows or columns, where a smaller one would do."""
    _, rows, columns, inner = extents
    return (
        tiling.tile[1] >= 2 * max(rows, ROWS)
        or tiling.tile[2] >= 2 * max(columns, 2 * COLUMNS)
        or (tiling.stages > 2 and (tiling.stages - 2) * tiling.step >= inner)
    )


def estimated_tilings(problem: Contraction, operands: Operands, request: GpuRequest) -> list[tuple[float, MmaTiling]]:
    """Every tiling that the rule may take by itself with its estimated clocks, the quickest first."""
    estimated = [(_cost(problem, operands, tiling, request), tiling) for tiling in _tilings(problem, operands, request)]
    return sorted(estimated, key=lambda candidate: candidate[0])


def choose_tiling(problem: Contraction, operands: Operands, request: GpuRequest) -> tuple[float, MmaTiling] | None:
    """The tiling of least estimated time, and that time in clocks.

    Of those that are about as fast, it is one with the fewest tiles, and of these with the least shared memory: a grid
    that fits one wave ends no kernel (§5.4).
    """
    return _least(problem, operands, request, lambda tiling: _cost(problem, operands, tiling, request))


def choose_serial_tiling(
    problem: Contraction, operands: Operands, request: GpuRequest
) -> tuple[float, MmaTiling] | None:
    """The same for one block that computes all tiles one after another."""

    def cost(tiling: MmaTiling) -> float:
        tiles = prod(tiling.counts(problem.extents))
        return tiles * _cost(problem, operands, tiling, replace(request, sm_count=tiles))

    return _least(problem, operands, request, cost)


def _least(
    problem: Contraction, operands: Operands, request: GpuRequest, cost_of: Callable[[MmaTiling], float]
) -> tuple[float, MmaTiling] | None:
    every = list(_tilings(problem, operands, request))
    # What leaves room for a second block on a multiprocessor, so that other stages of its kernel have one, too.
    sharing = [candidate for candidate in every if candidate.registers(operands, request.threads) <= ASSUMED_REGISTERS]
    estimated = [(cost_of(tiling), tiling) for tiling in sharing or every]
    if not estimated:
        # Short and few: the smallest tile that there is.
        estimated = [(cost_of(t), t) for t in _smallest(problem, operands, request)]
    weighed = [(cost * _risk(tiling, operands, request), cost, tiling) for cost, tiling in estimated]
    least = min((weight for weight, _, _ in weighed), default=0.0)
    alike = [(cost, tiling) for weight, cost, tiling in weighed if weight <= _ALIKE * least]

    def size(candidate: tuple[float, MmaTiling]) -> tuple[int, int, float]:
        cost, tiling = candidate
        return prod(tiling.counts(problem.extents)), tiling.shared_bytes(operands), cost

    return min(alike, key=size) if alike else None


def _risk(tiling: MmaTiling, operands: Operands, request: GpuRequest) -> float:
    """What an estimate is multiplied with to be compared."""
    return _FULL if tiling.crowded(operands, request.threads) else 1.0


def _smallest(problem: Contraction, operands: Operands, request: GpuRequest) -> list[MmaTiling]:
    knobs = knobs_of(problem, operands, request.threads)
    names = [knob.name for knob in knobs]
    tilings = [
        MmaTiling.of(dict(zip(names, values, strict=True)), request.threads, operands.fragments)
        for values in itertools.product(*(knob.values for knob in knobs))
    ]
    fitting = [t for t in tilings if t is not None and tiling_refusal(problem, t, operands, request) is None]
    return sorted(fitting, key=lambda t: (prod(t.tile), t.shared_bytes(operands)))[:1]


def _cost(problem: Contraction, operands: Operands, tiling: MmaTiling, request: GpuRequest) -> float:
    """Estimated clocks of a multiprocessor: those of its waves, as :mod:`souffle.cost.predict` adds them up.

    One tile keeps the tensor cores, shared memory and the L2 cache's port busy, one of them longest. Alone it also
    waits: for its first tile of operands, at the barrier of each step, for fragments, and for operands where the stages
    on their way do not hide the latency. Behind the barrier all warps copy, then load, then multiply: the tensor cores
    are idle until the first piece is there, unless that was loaded before. Instructions of 128 in a clock: 4 of a
    thread for each copy and 8 for each vector through registers, 8 for each total.
    """
    _, rows, columns = tiling.tile
    down, across = tiling.parts
    threads, fragments = request.threads, tiling.fragments
    steps = ceil(problem.extents[3] / tiling.step)
    reads_ahead = tiling.reads_ahead(operands, threads, steps)
    tensor = rows * columns * tiling.step * fragments.relative_work / tensor_fma(request)
    reads = tiling.warps[0] * tiling.warps[1] * (down * ROWS + across * COLUMNS) * tiling.step
    loads = (reads * fragments.element_bytes + threads * operands.left.factor_bytes(down)) / SHARED_BYTES
    left, right = (one.fetch.inner_last for one in operands.both)
    of_piece = tiling.piece_instructions(left_inner_last=left, right_inner_last=right)
    fetched, issued, ahead, put = 0.0, threads * tiling.pieces * of_piece, 0.0, 0.0
    for one, extent in zip(operands.both, (rows, columns), strict=True):
        fetched += extent * tiling.step * bits_of(one.fetch.operand.dtype) / 8
        issued += one.instructions(extent * tiling.step)
        put += one.put_clocks(extent * tiling.step * fragments.element_bytes)
    for one in operands.both:
        # The tiles that are read ahead are waited for a piece sooner.
        depth = tiling.stages - 1 - (1 / tiling.pieces if reads_ahead else 0) if one.asynchronous else 1
        # With one stage copies are waited for at once; what passes through registers is still one step ahead.
        ahead = max(ahead, (BUSY_LATENCY + put) / depth if depth else 0.0)
    issued += threads * tiling.pieces * operands.left.finishing(down)
    waits = LATENCY * any(one.asynchronous for one in operands.both) if tiling.stages == 1 else 0.0
    step = max(tensor, put + loads, fetched / L2_BYTES, issued / THREADS)
    # What is read ahead is waited for no more before the first piece of a step.
    waited = tiling.pieces - reads_ahead
    in_turn = put + max(tensor, loads) + min(tensor, loads) / tiling.pieces
    alone = max(step, 0.0 if reads_ahead else in_turn)
    alone += BARRIER * (2 if tiling.stages == 1 else 1) + LOAD_LATENCY * waited
    totals = rows * columns
    end = max(totals * 4 * (tiling.warps[2] + 1) / SHARED_BYTES, totals * 8.0 / THREADS, totals * 4 / L2_BYTES)
    end += 4 * BARRIER
    busy = steps * step + end
    chain = LATENCY + put + steps * (waits + max(alone, ahead)) + end
    tiles = prod(tiling.counts(problem.extents))
    resident = _resident(tiling, operands, request)
    full, rest = divmod(tiles, request.sm_count * resident)
    last = ceil(rest / request.sm_count)
    return full * max(resident * busy, chain) + (max(last * busy, chain) if rest else 0.0)


def _resident(tiling: MmaTiling, operands: Operands, request: GpuRequest) -> int:
    """Blocks that a multiprocessor holds at once."""
    registers = tiling.registers(operands, request.threads)
    fits = _device(request).resident_blocks(request.threads, tiling.shared_bytes(operands), registers)
    return max(1, min(fits.values()))


def _device(request: GpuRequest) -> GpuDevice:
    return DEVICES.get(request.arch, DEVICES["sm_80"])
