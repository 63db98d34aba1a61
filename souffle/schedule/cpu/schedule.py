"""``target="cpu"``: a PrimFunc of tensor expressions to parallel, vectorised loops for LLVM.

The function is read into nests, injective ones are substituted where that repeats nothing expensive, and each nest
that stays is emitted by the first rule that fits: a contraction in packed tiles, else groups of nests that share their
leading loops under one parallel loop, each reduction or injective nest vectorised inside. A statement that is not such
a nest stays as it is, so there is always a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir.stmt import SBlock, SBlockRealize
from tvm.tirx import ForKind

from souffle.schedule.cpu.column_groups import grouped_product
from souffle.schedule.cpu.column_reduction import with_room
from souffle.schedule.cpu.contraction import emit_contraction, materialized_rows
from souffle.schedule.cpu.contraction_form import CpuContraction, contraction_of, split_groups, without_units
from souffle.schedule.cpu.elementary import expand_elementary, scales
from souffle.schedule.cpu.host import Machine, machine_of
from souffle.schedule.cpu.inline import attach_epilogues, inline_injective, without_trivial_reductions
from souffle.schedule.cpu.loop_emission import collapse, emit_injective, lanes_of
from souffle.schedule.cpu.nest import Axis, Nest, decode, distinct, loop, parse, product
from souffle.schedule.cpu.packed_constants import PackedContraction, PackedLayout, packed_contractions
from souffle.schedule.cpu.reduction import emit_reduction, reduces_along_memory
from souffle.schedule.cpu.sharing import kind_of_loop, nest_cycles
from souffle.schedule.cpu.task_buffers import TaskBuffers
from souffle.schedule.cpu.widen import with_wide_sums
from souffle.schedule.cpu.windows import hoist_windows
from souffle.schedule.cpu.winograd import WinogradLayout, by_winograd
from souffle.schedule.cpu.words import WordDot, dots_of, in_words, safe_dots
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import PrimExpr, buffer_loads, sequence

__all__ = ["Layout", "ScheduledFunction", "schedule_cpu", "schedule_with_constants", "takes_followers"]

_TASKS_PER_CORE = 4
_RUN_VECTORS = 16
"""Of nests that share all loops, one after another: a few thousand bytes, which stay in the first-level cache."""
_MOST_TOGETHER, _TOGETHER_BYTES = 8, 8192
"""Positions of a shared loop in one task, and the bytes that they may have: a part of a first-level cache."""


Layout = PackedLayout | WinogradLayout
"""How a constant is laid out ahead of time: ``shape``, and ``pack(array)``."""


@dataclass(frozen=True)
class ScheduledFunction:
    """A function as LLVM is to compile it.

    Attributes
    ----------
    func : PrimFunc
    parameters : tuple of (int, Layout or None)
        What each of its parameters is: one of the unscheduled function's, by position, as it is or packed.
    """

    func: tirx.PrimFunc
    parameters: tuple[tuple[int, Layout | None], ...]

    @classmethod
    def as_it_is(cls, func: tirx.PrimFunc) -> ScheduledFunction:
        """A function whose parameters stay."""
        return cls(func, tuple((position, None) for position in range(len(func.params))))


def schedule_cpu(func: tirx.PrimFunc, *, target: tvm.target.Target) -> tirx.PrimFunc:
    """Schedule a function of which nothing is known ahead of time; see :func:`schedule_with_constants`.

    Returns
    -------
    PrimFunc
        The same parameters and attributes.
    """
    return schedule_with_constants(func, target=target).func


def schedule_with_constants(
    func: tirx.PrimFunc,
    *,
    target: tvm.target.Target,
    constants: Iterable[int] = (),
    winograd: bool = True,
    backwards: bool = False,
) -> ScheduledFunction:
    """Schedule a function for the CPU.

    Parameters
    ----------
    func : PrimFunc
        From ``te.create_prim_func`` over a small group of TEs with static shapes.
    target : Target
        An LLVM target; its features give the vector width, ``num-cores`` the number of threads.
    constants : iterable of int
        Positions of the parameters that hold the same in every call, which may be packed.
    winograd : bool
        Whether convolutions with constant weights may be computed by minimal filtering.
    backwards : bool
        Whether packed constants are read from their end.

    Returns
    -------
    ScheduledFunction
        Results differ by the order of sums only, and by about two units in the last place of exp, tanh, erf and
        sigmoid.
    """
    machine = machine_of(target)
    items = _items(func, machine)
    dots = safe_dots((item for item in items if isinstance(item, Nest)), dots_of(target, machine.vector_bits))
    held = [func.params[position] for position in constants]
    packed: list[tuple[tirx.Buffer, int, Layout]] = []
    units: list[tuple[Nest | tirx.Stmt, CpuContraction | None]] = []
    position = 0
    while position < len(items):
        item = items[position]
        form = contraction_of(item) if isinstance(item, Nest) else None
        form = form if form is None else in_words(form, dots) or form
        ways, followers = _packed(items[position:], held, machine, dots)
        position += 1 + followers
        if ways:
            best = ways[0]
            parameter = next(i for i, p in enumerate(func.params) if p.same_as(best.constant))
            filtered = by_winograd(ways, machine) if winograd and not followers else None
            if filtered is not None:
                packed.append((filtered.panels, parameter, filtered.layout))
                units.extend(filtered.steps)
                continue
            form = best.form
            packed.append((form.packed_factor, parameter, best.layout))
        separate = materialized_rows(form) if form is not None and form.row_tiles is None else None
        if separate is not None:
            rows, form = separate
            units.append((rows, None))
        units.append((item, form))
    if not any(isinstance(item, Nest) for item, _ in units):
        return ScheduledFunction.as_it_is(func)
    statements = _statements(units, func.params, machine, backwards)
    scaling = scales(target)
    body = sequence(*(expand_elementary(statement, scaling=scaling) for statement in statements))
    used = _buffers(body)
    whole = [(i, p) for i, p in enumerate(func.params) if not packed or any(p.same_as(b) for b in used)]
    parameters = [*(p for _, p in whole), *(buffer for buffer, _, _ in packed)]
    intermediates = [b for b in used if not any(b.same_as(p) for p in parameters)]
    block = SBlock([], [], [], "root", body, None, intermediates)
    return ScheduledFunction(
        tirx.PrimFunc(parameters, SBlockRealize([], True, block), func.ret_type, func.attrs),
        (*((i, None) for i, _ in whole), *((position, layout) for _, position, layout in packed)),
    )


def takes_followers(func: tirx.PrimFunc, constants: Iterable[int], target: tvm.target.Target) -> bool:
    """Whether a product, and what reads its columns in groups, would be computed together, with nothing else.

    Parameters
    ----------
    func, constants, target
        As for :func:`schedule_with_constants`.
    """
    machine = machine_of(target)
    items = _items(func, machine)
    held = [func.params[position] for position in constants]
    _, followers = _packed(items, held, machine)
    return 0 < followers == len(items) - 1


def _items(func: tirx.PrimFunc, machine: Machine) -> list[Nest | tirx.Stmt]:
    """What a function computes, one after another, with all that can be put into each other."""
    items = inline_injective(with_wide_sums(without_trivial_reductions(parse(func).items)), func.params)
    return with_room(attach_epilogues(hoist_windows(items), func.params), func.params, machine)


def _packed(
    items: Sequence[Nest | tirx.Stmt], held: Sequence[tirx.Buffer], machine: Machine, dots: Sequence[WordDot] = ()
) -> tuple[tuple[PackedContraction, ...], int]:
    """The ways to compute the first item as a product of a packed constant, and how many of the next are part of it."""
    first, *rest = items
    if not held or not isinstance(first, Nest):
        return (), 0
    grouped = grouped_product(first, rest, machine)
    ways = () if grouped is None else packed_contractions(grouped.nest, held, machine, grouped=grouped)
    return (ways, grouped.taken) if ways else (packed_contractions(first, held, machine, dots=dots), 0)


def _statements(
    units: Sequence[tuple[Nest | tirx.Stmt, CpuContraction | None]],
    params: Sequence[Any],
    machine: Machine,
    backwards: bool,
) -> list[tirx.Stmt]:
    """Emit contractions one by one, and what can share loops together."""
    parts: list[tirx.Stmt | tuple[list[Nest], int]] = []
    position = 0
    while position < len(units):
        item, form = units[position]
        if form is not None:
            parts.append(emit_contraction(form, machine, backwards=backwards))
            position += 1
        elif not isinstance(item, Nest):
            parts.append(item)
            position += 1
        else:
            run = _run(units[position:])
            depth, count = _shared_depth(run, machine)
            parts.append((run[:count], depth))
            position += count
    used = [
        _buffers(part) if not isinstance(part, tuple) else [b for nest in part[0] for b in (*nest.reads, *nest.writes)]
        for part in parts
    ]
    statements: list[tirx.Stmt] = []
    for number, part in enumerate(parts):
        if isinstance(part, tuple):
            outside = [*params, *(b for other, each in enumerate(used) if other != number for b in each)]
            part = _emit_group(*part, outside, machine)
        statements.append(part)
    return statements


def _buffers(body: tirx.Stmt) -> list[tirx.Var]:
    """Buffers that are used and not allocated inside."""
    inside: list[tirx.Var] = []
    stores: list[tirx.Var] = []
    structural_walk(body, (tirx.AllocBuffer, lambda node: inside.append(node.buffer)))
    structural_walk(body, (SBlock, lambda node: inside.extend(node.alloc_buffers)))
    structural_walk(body, (tirx.BufferStore, lambda node: stores.append(node.buffer)))
    stores.extend(load.source for load in buffer_loads(body))
    return [b for b in distinct(stores) if not any(b.same_as(i) for i in inside)]


def _run(units: Sequence[tuple[Nest | tirx.Stmt, CpuContraction | None]]) -> list[Nest]:
    """The nests at the start of `units`, up to a contraction or another statement."""
    found: list[Nest] = []
    for item, form in units:
        if form is not None or not isinstance(item, Nest):
            break
        found.append(item)
    return found


def _shared_depth(run: Sequence[Nest], machine: Machine) -> tuple[int, int]:
    """How many leading loops the first nests of `run` can share, and how many nests.

    Sharing is right where each nest reads what another of them wrote only at the shared loops' own position.
    """
    wanted = _TASKS_PER_CORE * machine.cores
    best = (0, 1)
    for count in range(2, len(run) + 1):
        group = run[:count]
        depth = min(len(nest.spatial) for nest in group)
        while depth and not _shareable(group, depth):
            depth -= 1
        if not depth or product(axis.extent for axis in group[0].spatial[:depth]) < wanted:
            break
        best = (depth, count)
    return best


def _shareable(group: Sequence[Nest], depth: int) -> bool:
    extents = [axis.extent for axis in group[0].spatial[:depth]]
    written: list[tirx.Var] = []
    for nest in group:
        if [axis.extent for axis in nest.spatial[:depth]] != extents:
            return False
        leading = nest.spatial[:depth]
        statements = [s for s in (nest.body, nest.epilogue) if s is not None]
        for statement in statements:
            for load in buffer_loads(statement):
                if any(load.source.same_as(w) for w in written) and not _at(load.indices, leading):
                    return False
            stores: list[tirx.BufferStore] = []
            structural_walk(statement, (tirx.BufferStore, stores.append))
            if not all(_at(store.indices, leading) for store in stores):
                return False
        written.extend(nest.writes)
    return True


def _at(indices: Sequence[tirx.Var], leading: Sequence[Axis]) -> bool:
    return len(indices) >= len(leading) and all(
        index.same_as(axis.var) or (axis.extent == 1 and isinstance(index, tirx.IntImm) and int(index.value) == 0)
        for index, axis in zip(indices, leading, strict=False)
    )


def _emit(nest: Nest, machine: Machine) -> tirx.Stmt:
    return emit_injective(nest, machine) if nest.injective else emit_reduction(nest, machine)


def _emit_group(group: Sequence[Nest], depth: int, outside: Sequence[Any], machine: Machine) -> tirx.Stmt:
    if len(group) == 1:
        return _emit_alone(group[0], machine)
    if all(nest.injective and len(nest.spatial) == depth for nest in group):
        return _emit_in_runs(group, outside, machine)
    extent = product(axis.extent for axis in group[0].spatial[:depth])
    own = TaskBuffers.of(group, depth, outside)
    together = _together(group, depth, own, machine)
    if together > 1:
        own = TaskBuffers.of(group, depth, outside, last=together)

    def part(nest: Nest, number: tirx.Var) -> Nest:
        *outer, last = nest.spatial[:depth]
        if together == 1:
            return own.inside(nest.bind(decode(number, [*outer, last])))
        joint = Axis(tirx.Var("part", last.dtype), last.extent // together)
        values = decode(number, [*outer, joint])
        some = nest.restrict(last, values.pop(joint.var) * together, together).bind(values)
        return own.inside(some, some.spatial[0].var)

    def task(number: tirx.Var) -> tirx.Stmt:
        return sequence(*(_emit(part(nest, number), machine) for nest in group))

    kind = kind_of_loop(nest_cycles(group, machine))
    return loop(extent // together, task, kind, name="task", dtype=_index_type(group))


def _together(group: Sequence[Nest], depth: int, own: TaskBuffers, machine: Machine) -> int:
    """How many positions of the last shared loop a task has, each nest for all of them before the next one.

    What a vector reads that several have just written, it waits for until they have reached the cache.
    """
    if not own.table:
        return 1
    extents = [axis.extent for axis in group[0].spatial[:depth]]
    tasks = product(extents)
    # Of what a position reads and writes, roughly.
    walked = max(nest.points // tasks for nest in group)
    nbytes = max(own.nbytes, walked * 4)
    most = min(_MOST_TOGETHER, _TOGETHER_BYTES // max(1, nbytes), tasks // (_TASKS_PER_CORE * machine.cores))
    return max((n for n in range(1, most + 1) if extents[-1] % n == 0), default=1)


def _emit_in_runs(group: Sequence[Nest], outside: Sequence[Any], machine: Machine) -> tirx.Stmt:
    """Nests that share all of their loops: in runs along the last one, so that each nest has vectors."""
    *outer, last = group[0].spatial
    size = min(last.extent, _RUN_VECTORS * min(lanes_of(nest.body, machine) for nest in group))
    runs, rest = divmod(last.extent, size)
    count = product(axis.extent for axis in outer)
    joint = Axis(tirx.Var("run", last.dtype), runs)

    def part(values: dict[tirx.Var, PrimExpr], start: PrimExpr | int, extent: int, own: TaskBuffers) -> tirx.Stmt:
        statements = []
        for nest in group:
            bound = {axis.var: values[like.var] for axis, like in zip(nest.spatial[:-1], outer, strict=True)}
            run = nest.restrict(nest.spatial[-1], start, extent).bind(bound)
            statements.append(_emit(own.inside(run, run.spatial[-1].var), machine))
        return sequence(*statements)

    def buffers(extent: int) -> TaskBuffers:
        # Of each loop its own: one that two have would be allocated outside of both, for all tasks at once.
        return TaskBuffers.of(group, len(group[0].spatial), outside, last=extent)

    of_runs, of_rest = buffers(size), buffers(rest)

    def task(number: tirx.Var) -> tirx.Stmt:
        values = decode(number, [*outer, joint])
        return part(values, values[joint.var] * size, size, of_runs)

    index, kind = _index_type(group), kind_of_loop(nest_cycles(group, machine))
    statements = [loop(count * runs, task, kind, name="task", dtype=index)]
    if rest:
        last_runs = loop(count, lambda n: part(decode(n, outer), runs * size, rest, of_rest), name="rest", dtype=index)
        statements.append(last_runs)
    return sequence(*statements)


def _index_type(group: Sequence[Nest]) -> str:
    axes = [axis for nest in group for axis in nest.axes]
    return "int64" if any(axis.dtype == "int64" for axis in axes) else "int32"


def _emit_alone(nest: Nest, machine: Machine) -> tirx.Stmt:
    """A nest by itself: its leading loops parallel, and runs of the last one where they are too few."""
    nest = without_units(nest)
    nest = collapse(nest) if nest.injective else split_groups(nest)
    if kind_of_loop(nest_cycles([nest], machine)) == ForKind.SERIAL or not nest.spatial:
        return _emit(nest, machine)
    wanted = _TASKS_PER_CORE * machine.cores
    *outer, last = nest.spatial
    depth = 0
    while depth < len(outer) and product(axis.extent for axis in outer[:depth]) < wanted:
        depth += 1
    leading = outer[:depth]
    index = _index_type([nest])
    count = product(axis.extent for axis in leading)
    if depth < len(outer) or count >= machine.cores:
        return loop(
            count, lambda n: _emit(nest.bind(decode(n, leading)), machine), ForKind.PARALLEL, name="task", dtype=index
        )
    step = 1 if nest.reduce and reduces_along_memory(nest) else 4 * lanes_of(nest.body, machine)
    runs = max(1, min(-(-wanted // count), last.extent // step))
    size = last.extent // runs // step * step
    if not size:
        return loop(
            count, lambda n: _emit(nest.bind(decode(n, leading)), machine), ForKind.PARALLEL, name="task", dtype=index
        )
    runs = last.extent // size
    joint = Axis(tirx.Var("run", last.dtype), runs)

    def task(number: tirx.Var) -> tirx.Stmt:
        values = decode(number, [*leading, joint])
        return _emit(nest.restrict(last, values.pop(joint.var) * size, size).bind(values), machine)

    statements = [loop(count * runs, task, ForKind.PARALLEL, name="task", dtype=index)]
    rest = last.extent - runs * size
    if rest:
        statements.append(
            loop(
                count,
                lambda n: _emit(nest.restrict(last, runs * size, rest).bind(decode(n, leading)), machine),
                ForKind.SERIAL,
                name="rest",
                dtype=index,
            )
        )
    return sequence(*statements)
