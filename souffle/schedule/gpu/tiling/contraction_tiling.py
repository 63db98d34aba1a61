"""How a sum of products is shared among the threads of blocks on CUDA cores: what may be chosen, and what to choose.

A thread of many results reads less of shared memory for each product, and a tile of few results then leaves threads
without any. These have a slice of the inner axis each: a part of every sum of the tile, added up at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

from souffle.decision import Refused
from souffle.schedule.gpu.device import ASSUMED_REGISTERS
from souffle.schedule.gpu.emit.folding import fold_bytes, fold_problem
from souffle.schedule.gpu.emit.row_statements import row_bytes
from souffle.schedule.gpu.forms.matrix_product import Contraction
from souffle.schedule.gpu.forms.memory_access import bits_of
from souffle.schedule.gpu.rule import GpuRequest, Knob, Values
from souffle.schedule.gpu.tiling.contraction_cost import Number, estimate, result_lanes_of, sides_of

__all__ = [
    "PADDING",
    "PART_SETS",
    "VECTOR",
    "ContractionTiling",
    "choose_serial_tiling",
    "choose_tiling",
    "contraction_shared_bytes",
    "estimated_clocks",
    "knobs_of",
    "staging_refusal",
    "tiling_refusal",
]

_MIN_SIDE = 4
"""Fewest rows and columns: a staged element is used that often, below it staging costs what it saves."""

_ALIKE = 1.05
"""Estimates of time closer than this factor are not told apart."""

_STEPS = (8, 16, 32)
"""Extents of a tile along the inner axis."""

_EACH = (1, 2, 3, 4, 6, 8, 12)
"""Rows or columns of a thread. Multiples of three as well: a tile of 96 x 96 has 128 of 384 x 3072 results for 132
multiprocessors, where those by powers of two have 72, 144 or 288."""
_MOST_WIDE = 4
"""Rows or columns of a thread whose totals take two registers each."""

_STAGES = (1, 2, 3, 4)
"""Tiles along the inner axis that are in shared memory or on their way to it."""

_SLICES = (1, 2, 4, 8)
"""Parts of a sum in one block, of which each adds up one or more of the rows of a thread."""

_MOST_THREADS_ALONG = 64
"""Threads along rows, or along columns."""

_EVERY_TILE_ALONE = 1 << 20
"""Multiprocessors of which each has one tile at most."""

_MIN_INNER = 4
"""Shortest inner axis: below it the stage moves its output and does no arithmetic to speak of."""

_MOST_REGISTERS = 168
"""Of a thread by :func:`_registers`, which is above what ptxas reports: two thirds of the 255 that it may have."""

_OWN_REGISTERS = 32
"""Of a thread beside its arrays: addresses, indices. Of 34 tilings of a product with a residual for sm_90, nvcc 13.0
gave none more."""

_SPARED_REGISTERS = 12
"""Of these, what nvcc does without where two blocks are asked for."""

PADDING = 4
"""Elements between rows of shared memory where tiles are turned on the way."""

_ALWAYS = 48 * 1024
"""Bytes of shared memory of which every multiprocessor has room for two blocks."""

PART_SETS = 2
"""Sets of registers for a thread's parts of the operands: what it multiplies, and what is read meanwhile. With three,
nvcc 13.0 writes the same machine code for most tilings."""

VECTOR = 4
"""Elements of the widest access to shared memory, of 4 bytes."""


@dataclass(frozen=True)
class ContractionTiling:
    """One way to share a problem among blocks and threads, or many: each number is an array then.

    Attributes
    ----------
    across : tuple of int
        Threads along batch, rows, columns; their product is the block's.
    each : tuple of int
        Rows and columns of one thread.
    step : int
        Extent of a tile along the inner axis, of one slice.
    together : int
        Neighbouring columns of a thread; the next ones lie as many times the threads along columns further.
    stages : int
        Tiles in shared memory. With 1 the next one waits in registers; more are brought by asynchronous copies.
    slices : int
        Parts of the inner axis, each for as many threads as `across` says: a block has that many times as many.
    """

    across: tuple[Number, Number, Number]
    each: tuple[Number, Number]
    step: Number
    together: Number
    stages: Number
    slices: Number = 1

    @property
    def tile(self) -> tuple[Number, Number, Number]:
        """Extents of a block's tile: batch, rows, columns."""
        return (self.across[0], self.across[1] * self.each[0], self.across[2] * self.each[1])

    @property
    def deep(self) -> Number:
        """What a block's tile has of the inner axis, all slices together."""
        return self.step * self.slices

    @property
    def row_lanes(self) -> Number:
        """Neighbouring rows of a thread: of those that it writes, so that threads write what lies as for one slice."""
        return _in_vectors(self.each[0] // self.slices)

    @property
    def shares(self) -> tuple[tuple[Number, Number, Number], tuple[Number, Number]]:
        """`across` and `each` of what threads write: one in as many of their rows as there are slices."""
        batch, rows, columns = self.across
        return (batch, rows * self.slices, columns), (self.each[0] // self.slices, self.each[1])

    @property
    def values(self) -> Values:
        """As the knobs of the sketch say it."""
        return {
            "threads_along_rows": self.across[1],
            "threads_along_columns": self.across[2],
            "rows_each": self.each[0],
            "columns_each": self.each[1],
            "step": self.step,
            "columns_together": self.together,
            "stages": self.stages,
            "slices": self.slices,
        }

    @classmethod
    def of(cls, values: Values, threads: int) -> ContractionTiling | None:
        """The tiling of these values; the threads that they leave lie along the batch."""
        along = values["threads_along_rows"] * values["threads_along_columns"] * values["slices"]
        if threads % along:
            return None
        across = (threads // along, values["threads_along_rows"], values["threads_along_columns"])
        each = (values["rows_each"], values["columns_each"])
        return cls(across, each, values["step"], values["columns_together"], values["stages"], values["slices"])

    def applied(self, function: Callable[[Number], Number]) -> ContractionTiling:
        """With each number replaced."""
        across, each = (tuple(map(function, numbers)) for numbers in (self.across, self.each))
        rest = (self.step, self.together, self.stages, self.slices)
        return ContractionTiling(across, each, *map(function, rest))

    def counts(self, extents: tuple[int, int, int, int]) -> tuple[Number, Number, Number]:
        """Tiles along batch, rows, columns."""
        return tuple(-(-extent // size) for extent, size in zip(extents, self.tile, strict=False))


def knobs_of(problem: Contraction, request: GpuRequest) -> tuple[Knob, ...]:
    """What is open."""
    threads = tuple(d for d in _divisors(request.threads) if d <= _MOST_THREADS_ALONG)
    each = _EACH if bits_of(problem.dtype) <= 32 else tuple(each for each in _EACH if each <= _MOST_WIDE)
    steps = tuple(sorted({min(step, problem.extents[3]) for step in _STEPS}))
    copied = any(side.copied for side in sides_of(problem, request))
    return (
        Knob("threads_along_rows", threads),
        Knob("threads_along_columns", threads),
        Knob("rows_each", each),
        Knob("columns_each", each),
        Knob("step", steps),
        Knob("columns_together", (1, 2, 4)),
        Knob("stages", _STAGES if copied else (1,)),
        Knob("slices", _SLICES if problem.product_sum else (1,), former=1),
    )


def staging_refusal(problem: Contraction, request: GpuRequest) -> Refused | None:
    """Why staging tiles would not pay, or ``None``."""
    _, rows, columns, inner = problem.extents
    if min(rows, columns) < _MIN_SIDE:
        return problem.refused(
            f"{rows} x {columns} results use an operand fewer than {_MIN_SIDE} times; a reduction rule splits the sum"
        )
    if inner < _MIN_INNER:
        return problem.refused(f"sums of {inner} products are too short to stage operands for")
    if request.threads % 32:
        return problem.refused(f"{request.threads} threads are not whole warps")
    return None


def _in_vectors(count: Number) -> Number:
    """The widest access that takes so many elements in whole vectors."""
    return gcd(count, VECTOR) if isinstance(count, int) else np.gcd(count, VECTOR)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def choose_tiling(problem: Contraction, request: GpuRequest) -> tuple[float, ContractionTiling] | None:
    """The tiling of least estimated time, and that time in clocks.

    Of those that are about as fast, it is one with the fewest tiles: a grid that fits one wave ends no kernel (§5.4).
    """
    # Half of what one block may have leaves room for a second one, beside what every multiprocessor has.
    most = request.max_shared_bytes
    modest = replace(request, max_shared_bytes=max(most // 2, min(most, _ALWAYS)))
    many = _possible_tilings(problem, request, modest)
    return None if many is None else _cheapest(problem, many, request)


def choose_serial_tiling(problem: Contraction, request: GpuRequest) -> tuple[float, ContractionTiling] | None:
    """The tiling for one block that computes all tiles one after another, and its clocks."""
    alone = replace(request, sm_count=_EVERY_TILE_ALONE)
    many = _possible_tilings(problem, alone, alone)
    if many is None:
        return None
    clocks = prod(many.counts(problem.extents)) * estimated_clocks(problem, many, alone)
    place = int(np.argmin(clocks))
    return float(clocks[place]), many.applied(lambda numbers: int(numbers[place]))


def _possible_tilings(problem: Contraction, request: GpuRequest, modest: GpuRequest) -> ContractionTiling | None:
    """The tilings that the rule's own choice considers and `modest` has room for, if there are any."""
    many = _with_step(problem, _candidates(problem, request), modest)
    possible = many.step > 0
    return many.applied(lambda numbers: numbers[possible]) if possible.any() else None


def estimated_clocks(problem: Contraction, many: ContractionTiling, request: GpuRequest) -> np.ndarray:
    """Of many tilings, in a kernel that has the registers of its hungriest stage."""
    wanted = _registers(problem, many, request.threads)
    registers = np.where(wanted <= ASSUMED_REGISTERS + _SPARED_REGISTERS, ASSUMED_REGISTERS, wanted)
    return estimate(problem, many, sides_of(problem, request), request, registers)


def _cheapest(problem: Contraction, many: ContractionTiling, request: GpuRequest) -> tuple[float, ContractionTiling]:
    cost, tiles = estimated_clocks(problem, many, request), prod(many.counts(problem.extents))
    alike = np.flatnonzero(cost <= _ALIKE * cost.min())
    best = alike[np.lexsort((many.stages[alike], cost[alike], tiles[alike]))[0]]
    return float(cost[best]), many.applied(lambda numbers: int(numbers[best]))


def _candidates(problem: Contraction, request: GpuRequest) -> ContractionTiling:
    """The tilings that the rule's own choice considers, all of the shortest step."""
    candidates: list[tuple[int, ...]] = []
    knobs = {knob.name: knob.values for knob in knobs_of(problem, request)}
    batch, rows, columns, inner = problem.extents
    lanes = {each: result_lanes_of(problem, _in_vectors(each)) for each in knobs["columns_each"]}
    shortest = min(_STEPS[0], inner)
    among = itertools.product(knobs["slices"], knobs["threads_along_rows"], knobs["threads_along_columns"])
    for slices, *along in among:
        along_batch, rest = divmod(request.threads, slices * prod(along))
        if rest or along_batch > batch or (slices > 1 and slices * shortest > inner):
            continue
        for each in itertools.product(knobs["rows_each"], knobs["columns_each"]):
            if along[0] * each[0] >= 2 * rows or along[1] * each[1] >= 2 * columns or each[0] % slices:
                continue  # half of it or more would be idle
            for together in sorted({_in_vectors(each[1]), lanes[each[1]]}):
                of_slice = (along_batch, *along, *each, together)
                candidates += [(*of_slice, stages, slices) for stages in knobs["stages"]]
    numbers = np.array(candidates, np.int64).reshape(-1, 8).T
    return ContractionTiling(tuple(numbers[:3]), tuple(numbers[3:5]), np.full(len(candidates), shortest), *numbers[5:])


def _with_step(problem: Contraction, many: ContractionTiling, request: GpuRequest) -> ContractionTiling:
    """Each with the shortest step that gives every thread something to read and fits shared memory, or with 0."""
    chosen = np.zeros_like(many.step)
    going = np.ones(chosen.shape, bool)
    batch, rows, columns = many.tile
    for step in _STEPS:
        tried = replace(many, step=np.full_like(chosen, min(step, problem.extents[3])))
        reads = batch * tried.deep * (rows + columns) / request.threads
        going &= _fits(problem, tried, request) & ((chosen == 0) | (reads <= 16))
        chosen = np.where(going, tried.step, chosen)
        going &= batch * tried.deep * np.minimum(rows, columns) < 4 * request.threads
    return replace(many, step=chosen)


def _fits(problem: Contraction, many: ContractionTiling, request: GpuRequest) -> np.ndarray:
    """Which of many tilings are possible: as :func:`tiling_refusal`, of what the rule's own choice considers."""
    return (
        ((many.stages == 1) | (many.stages <= -(-problem.extents[3] // many.deep)))
        & (contraction_shared_bytes(problem, many) <= request.max_shared_bytes)
        & (_registers(problem, many, request.threads) <= _MOST_REGISTERS)
        & fold_problem(problem, many.tile)
    )


def tiling_refusal(problem: Contraction, tiling: ContractionTiling, request: GpuRequest) -> Refused | None:
    """Why these numbers do not go together, or ``None``."""
    if tiling.across[0] > problem.extents[0]:
        return problem.refused(f"{tiling.across[0]} threads along a batch of {problem.extents[0]}")
    if _in_vectors(tiling.each[1]) % tiling.together:
        return problem.refused(f"{tiling.each[1]} columns of a thread are no vectors of {tiling.together}")
    if tiling.each[0] % tiling.slices:
        return problem.refused(f"{tiling.slices} threads would share the {tiling.each[0]} rows of one")
    if tiling.stages > 1 and tiling.stages > -(-problem.extents[3] // tiling.deep):
        return problem.refused(f"{tiling.stages} stages are more than the steps of a sum")
    if not fold_problem(problem, tiling.tile):
        return problem.refused(f"a tile of {tiling.tile} is none that the reductions behind start in")
    taken = contraction_shared_bytes(problem, tiling)
    if taken > request.max_shared_bytes:
        return problem.refused(f"{taken} bytes of shared memory are more than {request.max_shared_bytes}")
    registers = _registers(problem, tiling, request.threads)
    if registers > _MOST_REGISTERS:
        return problem.refused(f"a thread would need {registers} registers of {_MOST_REGISTERS}")
    return None


def contraction_shared_bytes(problem: Contraction, tiling: ContractionTiling) -> Number:
    """Bytes of shared memory of a block."""
    batch, rows, columns = tiling.tile
    deep = tiling.deep
    # Padded along whichever axis is contiguous there.
    bits = np.maximum(rows + PADDING, rows * (deep + PADDING) / deep) * bits_of(problem.left.dtype)
    bits += np.maximum(columns + PADDING, columns * (deep + PADDING) / deep) * bits_of(problem.right.dtype)
    tiles = np.ceil(batch * deep * bits / 8).astype(np.int64) * tiling.stages
    sums = np.where(np.greater(tiling.slices, 1), tiling.slices * batch * rows * columns, 0)
    sums = sums * (bits_of(problem.dtype) // 8)
    # Parts of sums lie where the tiles were, if all are of one type.
    alike = problem.left.dtype == problem.right.dtype == problem.dtype
    tiles = np.maximum(tiles, sums) if alike else tiles + sums
    return tiles + fold_bytes(problem, *tiling.shares) + row_bytes(problem, batch * rows)


def _registers(problem: Contraction, tiling: ContractionTiling, threads: int) -> Number:
    """Of a thread, about: its totals, the parts of the operands that it multiplies now and next, and what is on its way
    to shared memory.
    """
    batch, rows, columns = tiling.tile
    words = tiling.each[0] * tiling.each[1] * max(1, bits_of(problem.dtype) // 32)
    waiting = np.ceil(batch * tiling.deep * (rows + columns) / threads)
    for operand, elements in ((problem.left, tiling.each[0]), (problem.right, tiling.each[1])):
        words = words + PART_SETS * elements * max(1, bits_of(operand.dtype) // 32)
    return _OWN_REGISTERS + words + waiting.astype(np.int64)
