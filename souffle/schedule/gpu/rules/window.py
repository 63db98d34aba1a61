"""Rules whose threads hold a few outputs in registers: windows that overlap, and what `reduction` uses of them.

A window is what a convolution with few channels a group or a pooling reads for one output. Neighbouring outputs share
most of it, so a thread computes several and reads each input once (``direct_tiling.py``); between threads inputs are
shared by the L1 cache. Numbers are chosen by an estimate of what the units of a multiprocessor have to do.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import ceil, prod

import numpy as np
from tvm import tirx
from tvm.ir import Call

from souffle.schedule.gpu.emit.direct_emission import emit_direct
from souffle.schedule.gpu.forms.blocks import inlining_refusal
from souffle.schedule.gpu.forms.expressions import COMPARE, Axis, buffer_loads, depends
from souffle.schedule.gpu.forms.matrix_product import Operand
from souffle.schedule.gpu.forms.memory_access import bits_of, lanes_along, memory_step
from souffle.schedule.gpu.forms.one_reduction import Sum, find_meeting, read_sum
from souffle.schedule.gpu.forms.rows import open_stage
from souffle.schedule.gpu.rule import GpuRequest, GpuSchedule, Refusal
from souffle.schedule.gpu.rules.contraction import estimated_clocks
from souffle.schedule.gpu.sketch import Knob, Sketch, Values
from souffle.schedule.gpu.tiling.direct_tiling import WARP, Held, Plan, Tiling, held_of, shared_bytes, split_problem
from souffle.tvm_compat import collect, const_int

__all__ = ["direct_sketch", "plan_of", "window"]

_EACH = (1, 2, 3, 4, 7, 8)
"""Outputs of a thread along an axis: powers of two, and what divides the 7, 14, 28, 56 and 112 of image networks."""

_TURNS = (1, 2, 4)

_MOST_WINDOW = 64
"""Places of a window that are unrolled: 7 x 7 and a little."""

_MOST_UNROLLED = 1024
"""Multiply-adds that one turn writes out; beyond, they leave the instruction cache."""

_MOST_OUTPUTS = 64
"""Outputs of a thread that the rule's own choice considers."""

_MOST_MANY = 3
"""Axes along which a thread may hold several outputs."""

_MOST_REGISTERS = 128
"""Of a thread, so that two blocks of 256 threads share a multiprocessor."""

_OWN_REGISTERS = 32
"""Of a thread beside its arrays: addresses, indices, what is being computed."""

_ALIKE = 1.05
"""Estimates of time closer than this factor are not told apart."""

# Clocks of a current GPU, to the precision of an estimate: they decide between schedules, not what is reported.
_MEMORY_LATENCY, _SHUFFLE_LATENCY, _ADD_LATENCY, _BARRIER = 500.0, 25.0, 4.0, 40.0
_ISSUE, _FP32_WARPS, _L2_BYTES, _LINE, _MOST_RESIDENT = 4.0, 2.0, 48.0, 128, 8
_INDEX, _CONDITIONAL_INDEX, _UNROLLED = 4.0, 4.0, 4


def window(func: tirx.PrimFunc, request: GpuRequest) -> Sketch | Refusal:
    """Schedule convolutions with few channels a group, and poolings: sums over windows that neighbours share.

    Parameters
    ----------
    func : tirx.PrimFunc
    request : GpuRequest

    Returns
    -------
    Sketch or Refusal
        Refused are stages that are not one reduction in this sense, those whose outputs share no input, and
        convolutions that the contraction rule computes faster by both rules' estimates.
    """
    plan = _planned(func)
    if isinstance(plan, str):
        return Refusal("window", plan)
    if not any(plan.meetings):
        return Refusal("window", f"block {plan.problem.name}: neighbouring outputs share no input")
    sketch = _sketch(func, plan, request, "window")
    values = sketch.choose()
    if isinstance(values, Refusal):
        return values
    own, other = _estimate(plan, _tiling_of(plan, values), request), estimated_clocks(func, request)
    if other is not None and other < own:
        return Refusal(
            "window",
            f"block {plan.problem.name}: by estimates, {own:.0f} clocks in registers alone, {other:.0f} with tiles in "
            "shared memory",
        )
    return Sketch(sketch.rule, sketch.knobs, lambda: values, sketch.make)


def direct_sketch(func: tirx.PrimFunc, request: GpuRequest, rule: str) -> Sketch | Refusal:
    """The same schedule for any single reduction, whether or not its outputs share inputs."""
    plan = _planned(func)
    return Refusal(rule, plan) if isinstance(plan, str) else _sketch(func, plan, request, rule)


@lru_cache(maxsize=2)
def _planned(func: tirx.PrimFunc) -> Plan | str:
    """What is settled of a stage; the reduction rule asks for it again where the window rule refused."""
    reason = inlining_refusal(func)
    if reason is not None:
        return reason
    problem = read_sum(open_stage(func))
    return problem if isinstance(problem, str) else plan_of(problem)


def _sketch(func: tirx.PrimFunc, plan: Plan, request: GpuRequest, rule: str) -> Sketch:
    knobs = _knobs(plan, request)

    def choose() -> Values | Refusal:
        found = []
        # More turns do by hand what the compiler's own unrolling does; they are left to a search.
        offered = {knob.name: knob.values for knob in knobs} | {"turns": (1,)}
        for chosen in itertools.product(*offered.values()):
            values = dict(zip(offered, chosen, strict=True))
            if prod(chosen[: len(plan.many)]) * values["lanes"] > _MOST_OUTPUTS:
                continue
            tiling = _tiling_of(plan, values)
            if _problem_of(plan, tiling, request) is None:
                found.append((_estimate(plan, tiling, request), tiling.tiles(plan, request.threads), values))
        if not found:
            return Refusal(rule, f"block {plan.problem.name}: no numbers fit {request.threads} threads")
        least = min(time for time, _, _ in found)
        alike = [one for one in found if one[0] <= _ALIKE * least]
        # Wide reads need fewer of what the estimate does not see, such as slots for loads on their way.
        return min(alike, key=lambda one: (-one[2]["lanes"], one[1], one[0]))[2]

    def make(values: Values) -> GpuSchedule | Refusal:
        tiling = _tiling_of(plan, values)
        reason = _problem_of(plan, tiling, request)
        if reason is not None:
            return Refusal(rule, f"block {plan.problem.name}: {reason}")
        kernel, tiles = emit_direct(func, plan, tiling, request.threads)
        return GpuSchedule(kernel, rule, tiles, request.threads)

    return Sketch(rule, knobs, choose, make)


def _tiling_of(plan: Plan, values: Values) -> Tiling:
    each = tuple(values[f"each_{number}"] for number in range(len(plan.many)))
    return Tiling(each, values["lanes"], values["split"], values["turns"])


def plan_of(problem: Sum) -> Plan | str:
    """What is settled of a sum before its numbers are chosen; or why it cannot be scheduled so."""
    if not problem.leaves:
        return f"block {problem.name} reads nothing"
    main = max(problem.leaves, key=lambda leaf: _largest(leaf.value))
    meetings: list[tuple] = []
    window: list[Axis] = []
    for leaf in problem.leaves:
        found = []
        for axis, place in itertools.product(problem.axes, problem.inner):
            how = find_meeting(leaf.value, axis, place)
            if how is not None and how.across < place.extent:
                found.append((axis, place, how))
        meetings.append(tuple(found))
    met = [place for place in problem.inner if any(place is m[1] for found in meetings for m in found)]
    for place in sorted(met, key=lambda axis: axis.extent):
        if prod(axis.extent for axis in window) * place.extent <= _MOST_WINDOW:
            window.append(place)
    window = [place for place in problem.inner if any(place is w for w in window)]
    kept = tuple(tuple(m for m in found if any(m[1] is w for w in window)) for found in meetings)

    def far(axis: Axis) -> int:
        step = memory_step(main.value, axis)
        if not step and problem.stores:
            store = problem.stores[0]
            step = memory_step(store.buffer[store.indices], axis)
        return abs(step) if step else 0

    long = sorted((axis for axis in problem.inner if not any(axis is w for w in window)), key=far, reverse=True)
    reused = [axis for axis in problem.axes if any(not depends(leaf.value, axis) for leaf in problem.leaves)]
    # What the main leaf does not depend on goes first, so that neighbouring threads read neighbours.
    order = sorted(problem.axes, key=lambda axis: (depends(main.value, axis), -far(axis)))
    vector = None
    meets = [m[0] for m in kept[_index(problem, main)]]
    if order and memory_step(main.value, order[-1]) == 1 and not any(axis is order[-1] for axis in meets):
        vector = order[-1]
    elif long and memory_step(main.value, long[-1]) == 1:
        vector = long[-1]
    sum_fast = bool(long) and (memory_step(main.value, long[-1]) == 1 or not order)
    if vector is not None and lanes_along(main.value, vector, main.dtype) == 1:
        vector = None
    overlap = [m[0] for found in kept for m in found]
    rest = [axis for axis in order if axis is not vector]
    many = [axis for axis in rest if any(axis is one for one in overlap)]
    many += [a for a in reversed(rest) if any(a is one for one in reused) and not any(a is one for one in many)]
    return Plan(problem, tuple(order), tuple(window), tuple(long), kept, vector, sum_fast, tuple(many[:_MOST_MANY]))


def _index(problem: Sum, leaf: object) -> int:
    return next(number for number, one in enumerate(problem.leaves) if one is leaf)


def _largest(value: tirx.PrimExpr) -> int:
    return max(prod(const_int(e) for e in load.source.shape) for load in buffer_loads(value))


def _knobs(plan: Plan, request: GpuRequest) -> tuple[Knob, ...]:
    lanes = [1]
    if plan.vector is not None:
        main = max(plan.problem.leaves, key=lambda leaf: _largest(leaf.value))
        most = lanes_along(main.value, plan.vector, main.dtype)
        lanes = [1 << bit for bit in range(most.bit_length())]
    split = [1]
    if plan.long:
        split = [d for d in range(1, request.threads + 1) if split_problem(plan, d, request) is None]
        split = [d for d in split if request.threads % d == 0]
    turns = [n for n in _TURNS if n == 1 or n <= plan.terms]
    each = [
        Knob(f"each_{number}", tuple(n for n in _EACH if n <= axis.extent)) for number, axis in enumerate(plan.many)
    ]
    return (*each, Knob("lanes", tuple(lanes)), Knob("split", tuple(split)), Knob("turns", tuple(turns)))


def _registers(plan: Plan, tiling: Tiling, held: tuple[Held, ...]) -> int:
    totals = -(-tiling.outputs(plan) * bits_of(plan.problem.dtype) // 32)
    return _OWN_REGISTERS + totals + sum(one.registers for one in held)


def _problem_of(plan: Plan, tiling: Tiling, request: GpuRequest) -> str | None:
    """Why these numbers do not go together, or ``None``."""
    own = 1 if plan.vector_is_output else tiling.lanes
    if tiling.split * tiling.turns * own > max(plan.terms, 1) and tiling.split * tiling.turns * own > 1:
        return (
            f"{tiling.split} threads with {tiling.turns} turns of {own} are more than the {plan.terms} terms of a sum"
        )
    unrolled = tiling.outputs(plan) * prod(a.extent for a in plan.window) * own * tiling.turns
    if unrolled > _MOST_UNROLLED and tiling.outputs(plan) * tiling.turns > 1:
        return f"{unrolled} multiply-adds in a turn are more than {_MOST_UNROLLED}"
    registers = _registers(plan, tiling, held_of(plan, tiling))
    if registers > _MOST_REGISTERS and tiling.outputs(plan) * tiling.turns * tiling.lanes > 1:
        return f"a thread would need {registers} registers of {_MOST_REGISTERS}"
    taken = shared_bytes(plan, tiling, request.threads)
    if taken > request.max_shared_bytes:
        return f"{taken} bytes of shared memory are more than {request.max_shared_bytes}"
    return None


@lru_cache(maxsize=4096)
def _step(leaf: Operand, axis: Axis) -> int | None:
    """Elements from one value of a leaf to the next along an axis; 0 if it does not depend on it."""
    return memory_step(leaf.value, axis) if depends(leaf.value, axis) else 0


@lru_cache(maxsize=1024)
def _conditional(leaf: Operand) -> bool:
    return any(collect(leaf.value, kind) for kind in COMPARE)


@lru_cache(maxsize=64)
def _calls(plan: Plan) -> int:
    """Calls of functions in what is stored."""
    return sum(len(collect(store.value, Call)) for store in plan.problem.stores)


def _estimate(plan: Plan, tiling: Tiling, request: GpuRequest) -> float:
    """Estimated clocks: what a multiprocessor's busiest unit does, or the latencies of one block, wave by wave."""
    held = held_of(plan, tiling)
    warps = request.threads / WARP
    own = 1 if plan.vector_is_output else tiling.lanes
    rounds = ceil(plan.terms / own / (tiling.split * tiling.turns)) if plan.long else 1
    outputs = tiling.outputs(plan)
    products = outputs * prod(a.extent for a in plan.window) * own * (tiling.turns if plan.long else 1) * rounds
    instructions, lines, fetched, index = 1.0 * products, 0.0, 0.0, 0.0
    for one in held:
        times = rounds if one.long else 1
        reads = one.size / (tiling.lanes if one.vector else 1) * times
        index += reads * (_CONDITIONAL_INDEX if _conditional(one.leaf) else 1.0)
        instructions += reads
        lines += reads * _lines(plan, tiling, one, request)
        fetched += times * _fresh(plan, tiling, one)
    instructions += outputs * (4.0 + 12.0 * _calls(plan)) * (1 if tiling.split == 1 else 2)
    levels = 0
    if tiling.split > 1:
        levels = max(1, min(tiling.split, WARP).bit_length() - 1)
        instructions += 3.0 * outputs * levels
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
    chain += levels * _SHUFFLE_LATENCY + (2 * _BARRIER if shared else 0.0) + _ADD_LATENCY * products / outputs
    resident = max(1, min(_MOST_RESIDENT, 65536 // (_registers(plan, tiling, held) * request.threads)))
    full, rest = divmod(tiling.tiles(plan, request.threads), request.sm_count * resident)
    last = ceil(rest / request.sm_count)
    return full * max(resident * busy, chain) + (max(last * busy, chain) if rest else 0.0)


def _lines(plan: Plan, tiling: Tiling, held: Held, request: GpuRequest) -> float:
    """Lines of the L1 cache that one read of a warp touches."""
    lines = _touched(plan, held.leaf, tiling.widths(plan), tiling.split, tiling.lanes, held.vector, request.threads)
    # What is held beside the first value begins anywhere in a line.
    return lines + (0.5 if lines > 1 and held.size > tiling.lanes else 0.0)


@lru_cache(maxsize=1 << 14)
def _touched(
    plan: Plan, leaf: Operand, widths: tuple[int, ...], split: int, lanes: int, vector: bool, threads: int
) -> int:
    """Lines that the first values of a leaf of a warp's threads lie in."""
    thread = np.arange(min(WARP, threads))
    itemsize = bits_of(leaf.dtype) / 8
    group, lane = np.divmod(thread, split) if plan.sum_fast else np.divmod(thread, threads // split)[::-1]
    own = 1 if plan.vector_is_output else lanes
    place = np.zeros_like(thread)
    long = [own if axis is plan.vector else 1 for axis in plan.long]
    for axes, number, sizes in ((plan.order, group, widths), (plan.long, lane, long)):
        for axis, width in zip(reversed(axes), reversed(sizes), strict=True):
            step = _step(leaf, axis)
            number, part = np.divmod(number, -(-axis.extent // width))
            place = place + part * width * (_LINE * thread if step is None else step)
    first = (place * itemsize).astype(np.int64)
    last = first + int(itemsize * (lanes if vector else 1)) - 1
    # Of so few numbers a set is built faster than NumPy begins to sort.
    return len({*(first // _LINE).tolist(), *(last // _LINE).tolist()})


def _fresh(plan: Plan, tiling: Tiling, held: Held) -> float:
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
