"""Choosing how many outputs a thread holds and how many threads share a sum, by what a multiprocessor has to do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod

import numpy as np
from tvm.ir import Call

from souffle.decision import Refused
from souffle.index.operations import COMPARISONS
from souffle.schedule.gpu.forms.contraction_expressions import Axis, depends
from souffle.schedule.gpu.forms.memory_access import bits_of, lanes_along, memory_step
from souffle.schedule.gpu.forms.two_operands import Operand
from souffle.schedule.gpu.rule import GpuRequest, Knob, Values
from souffle.schedule.gpu.tiling.direct_tiling import (
    WARP,
    DirectTiling,
    Held,
    SumPlan,
    held_of,
    shared_bytes,
    split_refusal,
)
from souffle.tvm_compat import collect

__all__ = [
    "choose_serial_tiling",
    "choose_tiling",
    "estimate",
    "knobs_of",
    "least_clocks",
    "least_serial_clocks",
    "tiling_of",
    "tiling_refusal",
]

_EACH = (1, 2, 3, 4, 7, 8)
"""Outputs of a thread along an axis: powers of two, and what divides the 7, 14, 28, 56 and 112 of image networks."""

_TURNS = (1, 2, 4)

_MOST_UNROLLED = 1024
"""Multiply-adds that one turn writes out; beyond, they leave the instruction cache."""

_MOST_OUTPUTS = 64
"""Outputs of a thread that the rule's own choice considers."""

_MOST_REGISTERS = 128
"""Of a thread, so that two blocks of 256 threads share a multiprocessor."""

_OWN_REGISTERS = 32
"""Of a thread beside its arrays: addresses, indices, what is being computed."""

_MOST_IDLE = 4
"""One in so many threads has something to do, at least, where threads have several outputs one block after another."""

_ROUNDED = 1 - 1e-9
"""Below a sum that is added up in another order."""

_ALIKE = 1.05
"""Estimates of time closer than this factor are not told apart."""

# Clocks of a current GPU, to the precision of an estimate: they decide between schedules, not what is reported.
_MEMORY_LATENCY, _SHUFFLE_LATENCY, _ADD_LATENCY, _BARRIER = 500.0, 25.0, 4.0, 40.0
_ISSUE, _FP32_WARPS, _L2_BYTES, _LINE, _MOST_RESIDENT = 4.0, 2.0, 48.0, 128, 8
_INDEX, _CONDITIONAL_INDEX, _UNROLLED = 4.0, 4.0, 4


def knobs_of(plan: SumPlan, request: GpuRequest) -> tuple[Knob, ...]:
    """What is open."""
    lanes = [1]
    if plan.vector is not None:
        most = lanes_along(plan.main.value, plan.vector, plan.main.dtype)
        lanes = [most] if plan.is_slot(plan.vector) else [1 << bit for bit in range(most.bit_length())]
    split = [1]
    if plan.long:
        split = [d for d in range(1, request.threads + 1) if split_refusal(plan, d, request) is None]
        split = [d for d in split if request.threads % d == 0]
    turns = [n for n in _TURNS if n == 1 or n <= plan.terms]
    each = [Knob(f"each_{number}", _each(plan, axis)) for number, axis in enumerate(plan.many)]
    return (*each, Knob("lanes", tuple(lanes)), Knob("split", tuple(split)), Knob("turns", tuple(turns)))


def _each(plan: SumPlan, axis: Axis) -> tuple[int, ...]:
    """Outputs that a thread may hold along an axis."""
    return (axis.extent,) if plan.is_slot(axis) else tuple(n for n in _EACH if n <= axis.extent)


def tiling_of(plan: SumPlan, values: Values) -> DirectTiling:
    """The tiling of these values."""
    each = tuple(values[f"each_{number}"] for number in range(len(plan.many)))
    return DirectTiling(each, values["lanes"], values["split"], values["turns"])


@lru_cache(maxsize=4)
def choose_tiling(plan: SumPlan, request: GpuRequest) -> tuple[float, Values] | None:
    """The values of least estimated time, and that time in clocks; ``None`` if none go together.

    Of those that are about as fast, it is those of the widest reads: they need fewer of what the estimate does not see,
    such as slots for loads on their way. Two rules ask for it.
    """
    estimated = []
    # More turns do by hand what the compiler's own unrolling does; they are left to a search.
    offered = {knob.name: knob.values for knob in knobs_of(plan, request)} | {"turns": (1,)}
    for chosen in itertools.product(*offered.values()):
        values = dict(zip(offered, chosen, strict=True))
        if prod(chosen[: len(plan.many)]) * values["lanes"] > _MOST_OUTPUTS:
            continue
        tiling = tiling_of(plan, values)
        if tiling_refusal(plan, tiling, request) is None:
            estimated.append((estimate(plan, tiling, request), tiling.tiles(plan, request.threads), values))
    if not estimated:
        return None
    least = min(time for time, _, _ in estimated)
    alike = [candidate for candidate in estimated if candidate[0] <= _ALIKE * least]
    time, _, values = min(alike, key=lambda candidate: (-candidate[2]["lanes"], candidate[1], candidate[0]))
    return time, values


@lru_cache(maxsize=64)
def choose_serial_tiling(plan: SumPlan, request: GpuRequest) -> tuple[float, DirectTiling] | None:
    """The tiling for one block that computes all tiles one after another, and its clocks; ``None`` if none fits.

    Considered are those that keep most threads busy and share sums only where outputs are too few for the threads.
    """
    offered = {knob.name: knob.values for knob in knobs_of(plan, request)}
    considered: list[tuple[float, int, DirectTiling]] = []
    for number, chosen in enumerate(itertools.product(*offered.values())):
        tiling = tiling_of(plan, dict(zip(offered, chosen, strict=True)))
        if tiling.outputs(plan) > _MOST_OUTPUTS:
            continue
        working = tiling.groups(plan) * tiling.split
        idle = working * _MOST_IDLE < request.threads and tiling.outputs(plan) > 1
        if idle or (tiling.split > 1 and working > 2 * request.threads):
            continue
        least = tiling.tiles(plan, request.threads) * _least_of_tile(plan, tiling, request)
        considered.append((least, number, tiling))
    best: tuple[float, int, DirectTiling] | None = None
    # An estimate takes a hundred times as long as what it is not below: those that may be the best come first.
    for least, number, tiling in sorted(considered, key=lambda one: one[:2]):
        if best is not None and least * _ROUNDED > best[0]:
            break
        if tiling_refusal(plan, tiling, request) is not None:
            continue
        tiles = tiling.tiles(plan, request.threads)
        clocks = tiles * estimate(plan, tiling, replace(request, sm_count=tiles))
        if best is None or (clocks, number) < best[:2]:
            best = (clocks, number, tiling)
    return None if best is None else (best[0], best[2])


def least_serial_clocks(products: int) -> float:
    """What one block takes at least for a sum of so many products in all, however it is tiled."""
    return 2 * _MEMORY_LATENCY + products / (_FP32_WARPS * WARP) * _ROUNDED


def _least_of_tile(plan: SumPlan, tiling: DirectTiling, request: GpuRequest) -> float:
    """What :func:`estimate` is not below for a tile alone: its products and results, and the latencies of its turns."""
    rounds, products = _products(plan, tiling)
    outputs, levels = tiling.outputs(plan), _levels(tiling)
    instructions = products + _of_results(plan, outputs, levels)
    busy = request.threads / WARP * max(instructions / _ISSUE, products / _FP32_WARPS)
    return _MEMORY_LATENCY * (ceil(rounds / _UNROLLED) + 1) + busy + _latency_of_sums(outputs, levels, products)


def _levels(tiling: DirectTiling) -> int:
    """Shuffles of a total, one after another."""
    return max(1, min(tiling.split, WARP).bit_length() - 1) if tiling.split > 1 else 0


def _of_results(plan: SumPlan, outputs: int, levels: int) -> float:
    """Instructions of a thread that join its totals with others' and store what becomes of them."""
    elements = outputs / plan.together
    return elements * (4.0 * plan.together + 12.0 * _calls(plan)) * (2 if levels else 1) + 3.0 * outputs * levels


def _latency_of_sums(outputs: int, levels: int, products: float) -> float:
    """Clocks of what waits for the last addition into a total, or for another thread's."""
    return levels * _SHUFFLE_LATENCY + _ADD_LATENCY * products / outputs


def _products(plan: SumPlan, tiling: DirectTiling) -> tuple[int, float]:
    """Turns of a thread over the terms of its sums, and its products in all of them."""
    together = 1 if plan.vector_is_output else tiling.lanes
    rounds = ceil(plan.terms / together / (tiling.split * tiling.turns)) if plan.long else 1
    window = prod(a.extent for a in plan.window) * together * (tiling.turns if plan.long else 1)
    return rounds, tiling.outputs(plan) * window * rounds


def least_clocks(plan: SumPlan, request: GpuRequest) -> float:
    """What no estimate is below: its products, and what a block waits for memory."""
    products = plan.problem.size * plan.problem.length
    return max(2 * _MEMORY_LATENCY, products / (request.sm_count * _FP32_WARPS * WARP))


def _registers(plan: SumPlan, tiling: DirectTiling, held: tuple[Held, ...]) -> int:
    totals = -(-tiling.outputs(plan) * bits_of(plan.problem.dtype) // 32)
    return _OWN_REGISTERS + totals + sum(one.registers for one in held)


def tiling_refusal(plan: SumPlan, tiling: DirectTiling, request: GpuRequest) -> Refused | None:
    """Why these numbers do not go together, or ``None``."""
    lanes = 1 if plan.vector_is_output else tiling.lanes
    if tiling.split * tiling.turns * lanes > max(plan.terms, 1) and tiling.split * tiling.turns * lanes > 1:
        return plan.problem.refused(
            f"{tiling.split} threads with {tiling.turns} turns of {lanes} are more than the {plan.terms} terms of a sum"
        )
    unrolled = tiling.outputs(plan) * prod(a.extent for a in plan.window) * lanes * tiling.turns
    if unrolled > _MOST_UNROLLED and tiling.outputs(plan) * tiling.turns > 1:
        return plan.problem.refused(f"{unrolled} multiply-adds in a turn are more than {_MOST_UNROLLED}")
    registers = _registers(plan, tiling, held_of(plan, tiling))
    if registers > _MOST_REGISTERS and tiling.outputs(plan) * tiling.turns * tiling.lanes > 1:
        return plan.problem.refused(f"a thread would need {registers} registers of {_MOST_REGISTERS}")
    taken = shared_bytes(plan, tiling, request.threads)
    if taken > request.max_shared_bytes:
        return plan.problem.refused(f"{taken} bytes of shared memory are more than {request.max_shared_bytes}")
    return None


@lru_cache(maxsize=4096)
def _step(leaf: Operand, axis: Axis) -> int | None:
    """Elements from one value of a leaf to the next along an axis; 0 if it does not depend on it."""
    return memory_step(leaf.value, axis) if depends(leaf.value, axis) else 0


@lru_cache(maxsize=1024)
def _conditional(leaf: Operand) -> bool:
    return any(collect(leaf.value, kind) for kind in COMPARISONS)


@lru_cache(maxsize=64)
def _calls(plan: SumPlan) -> int:
    """Calls of functions in what is stored."""
    return sum(len(collect(store.value, Call)) for store in plan.problem.stores)


def estimate(plan: SumPlan, tiling: DirectTiling, request: GpuRequest) -> float:
    """Estimated clocks: what a multiprocessor's busiest unit does, or the latencies of one block, wave by wave."""
    held = held_of(plan, tiling)
    warps = request.threads / WARP
    rounds, products = _products(plan, tiling)
    outputs = tiling.outputs(plan)
    instructions, lines, fetched, index = 1.0 * products, 0.0, 0.0, 0.0
    for kept in held:
        times = rounds if kept.long else 1
        reads = kept.size / (tiling.lanes if kept.vector else 1) * times
        index += reads * (_CONDITIONAL_INDEX if _conditional(kept.leaf) else 1.0)
        instructions += reads
        lines += reads * _lines(plan, tiling, kept, request)
        fetched += times * _fresh(plan, tiling, kept)
    levels = _levels(tiling)
    instructions += _of_results(plan, outputs, levels)
    lines += outputs * levels
    if len(plan.long) > 1:
        index += _INDEX * 2 * (len(plan.long) - 1) * rounds * tiling.turns
    shared = shared_bytes(plan, tiling, request.threads)
    busy = max(
        warps * (instructions + index) / _ISSUE,
        warps * index / _FP32_WARPS,
        warps * products / _FP32_WARPS,
        warps * lines,
        request.threads * fetched / _L2_BYTES,
    )
    chain = _MEMORY_LATENCY * (ceil(rounds / _UNROLLED) + 1) + busy
    chain += _latency_of_sums(outputs, levels, products) + (2 * _BARRIER if shared else 0.0)
    resident = max(1, min(_MOST_RESIDENT, 65536 // (_registers(plan, tiling, held) * request.threads)))
    full, rest = divmod(tiling.tiles(plan, request.threads), request.sm_count * resident)
    last = ceil(rest / request.sm_count)
    return full * max(resident * busy, chain) + (max(last * busy, chain) if rest else 0.0)


def _lines(plan: SumPlan, tiling: DirectTiling, held: Held, request: GpuRequest) -> float:
    """Lines of the L1 cache that one read of a warp touches, or lines' worth of what its threads are given."""
    lines = _touched(plan, held.leaf, tiling.widths(plan), tiling.split, tiling.lanes, held.vector, request.threads)
    lines = max(lines, WARP * bits_of(held.leaf.dtype) // 8 * (tiling.lanes if held.vector else 1) / _LINE)
    # What is held beside the first value begins anywhere in a line.
    return lines + (0.5 if lines > 1 and held.size > tiling.lanes else 0.0)


@lru_cache(maxsize=1 << 14)
def _touched(
    plan: SumPlan, leaf: Operand, widths: tuple[int, ...], split: int, lanes: int, vector: bool, threads: int
) -> int:
    """Lines that the first values of a leaf of a warp's threads lie in."""
    thread = np.arange(min(WARP, threads))
    itemsize = bits_of(leaf.dtype) / 8
    group, lane = np.divmod(thread, split) if plan.sum_fast else np.divmod(thread, threads // split)[::-1]
    terms_together = 1 if plan.vector_is_output else lanes
    position = np.zeros_like(thread)
    long = [terms_together if axis is plan.vector else 1 for axis in plan.long]
    for axes, number, sizes in ((plan.order, group, widths), (plan.long, lane, long)):
        for axis, width in zip(reversed(axes), reversed(sizes), strict=True):
            step = _step(leaf, axis)
            number, part = np.divmod(number, -(-axis.extent // width))
            position = position + part * width * (_LINE * thread if step is None else step)
    first = (position * itemsize).astype(np.int64)
    last = first + int(itemsize * (lanes if vector else 1)) - 1
    # Of so few numbers a set is built faster than NumPy begins to sort.
    return len({*(first // _LINE).tolist(), *(last // _LINE).tolist()})


def _fresh(plan: SumPlan, tiling: DirectTiling, held: Held) -> float:
    """Bytes of a leaf that a thread reads and none of its neighbours does."""
    count = 1.0
    for kind, extent in zip(held.kinds, held.extents, strict=True):
        count *= tiling.width(plan, kind[1]) * kind[3].across if kind[0] == "met" else extent
    alike = plan.order and _step(held.leaf, plan.order[-1]) == 0
    if alike and not (plan.sum_fast and held.long and tiling.split > 1):
        # The same for all threads along the fastest axis.
        count /= min(WARP, max(1, plan.order[-1].extent))
    for kind in held.kinds:
        met = [m for found in plan.meetings for m in found if kind[0] == "window" and m[1] is kind[1]]
        if any(_step(held.leaf, axis) for axis, _, _ in met):
            count /= kind[1].extent
    return count * bits_of(held.leaf.dtype) / 8
