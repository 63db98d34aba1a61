"""Which loops are worth dividing among threads: those that take longer than it takes to start the threads."""

from __future__ import annotations

from collections.abc import Iterable

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.tirx import Div, ForKind

from souffle.schedule.cpu.elementary import is_expensive_call
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.inline import node_count
from souffle.schedule.cpu.nest import Nest, map_buffer_loads
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of

__all__ = ["kind_of_loop", "nest_cycles"]

_WORTH_CYCLES = 20_000
"""Two cores that poll for work begin and end a loop together within 2 to 3 µs; sums of 65,536 elements, 6 µs, are the
first that get shorter by it."""
_EXPENSIVE_CYCLES = 40
"""Of a vector of exp, tanh, erf or divisions."""
_LANES = 16


def kind_of_loop(cycles: float) -> ForKind:
    """Parallel where a loop takes so many cycles on one core that dividing it pays.

    Parameters
    ----------
    cycles : float
        Predicted.
    """
    return ForKind.PARALLEL if cycles >= _WORTH_CYCLES else ForKind.SERIAL


def nest_cycles(nests: Iterable[Nest], machine: Machine) -> float:
    """Cycles of one core for nests that are no contractions, roughly: each load and operation takes one a vector."""
    return sum(_cycles(nest, min(_LANES, machine.lanes("float32"))) for nest in nests)


def _cycles(nest: Nest, lanes: int) -> float:
    if not nest.single:
        return _operations(nest.body) * nest.work  # of tuples, one by one
    total = _operations(nest.body) * nest.work
    if nest.epilogue is not None:
        total += _operations(nest.epilogue) * nest.points
    return total / lanes


def _operations(statement: tirx.Stmt) -> float:
    values: list[PrimExpr] = []
    tvm_ffi.structural_walk(statement, ((tirx.BufferStore, tirx.Bind), lambda each: values.append(each.value)))
    expensive: list[bool] = []
    tvm_ffi.structural_walk(statement, (Call, lambda call: expensive.append(is_expensive_call(call))))
    tvm_ffi.structural_walk(statement, (Div, lambda _: expensive.append(True)))
    loads = sum(len(buffer_loads(value)) for value in values)
    alone = [map_buffer_loads(value, lambda load: tirx.const(0, dtype_of(load))) for value in values]
    return loads + sum(map(node_count, alone)) + _EXPENSIVE_CYCLES * sum(expensive)
