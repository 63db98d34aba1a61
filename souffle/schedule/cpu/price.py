"""The time that a function is predicted to take on one core, before it is scheduled."""

from __future__ import annotations

from collections.abc import Collection

from tvm import DataType, tirx

from souffle.schedule.cpu.contraction_form import contraction_of, contractions_of
from souffle.schedule.cpu.contraction_tiling import product_cycles, reduction_cycles
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.nest import Nest, parse, product
from souffle.schedule.cpu.packed_constants import packed_contractions
from souffle.schedule.cpu.sharing import nest_cycles

__all__ = ["function_cycles"]

_READ_BYTES = 16
"""A cycle, of packed constants that are not in the second-level cache, as measured: 2 MB in 38 µs; from there, three
times as many."""


def function_cycles(func: tirx.PrimFunc, constants: Collection[int], machine: Machine) -> float | None:
    """Cycles of one core; ``None`` where the function holds something other than loop nests.

    Parameters
    ----------
    func : PrimFunc
        From ``te.create_prim_func``.
    constants : collection of int
        Positions of the parameters that hold the same in every call, which may be packed.
    machine : Machine
    """
    held = [func.params[position] for position in constants]
    cycles = 0.0
    for item in parse(func).items:
        if not isinstance(item, Nest):
            return None
        cycles += _nest_cycles(item, held, machine)
    return cycles


def _nest_cycles(nest: Nest, held: list[tirx.Buffer], machine: Machine) -> float:
    ways = packed_contractions(nest, held, machine) if held else ()
    if ways:
        best = ways[0]
        # Between two calls a network reads other constants.
        read = product(best.layout.shape) * DataType(str(best.constant.dtype)).itemsize / _READ_BYTES
        return max(best.cycles, read)
    form = contraction_of(nest)
    if form is not None:
        return product_cycles(form, machine, packed="none")
    forms = contractions_of(nest)
    return reduction_cycles(forms[0], machine) if forms else nest_cycles([nest], machine)
