"""The shape of a product's micro-kernel, and the time that a product is predicted to take with it."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import DataType, tirx

from souffle.schedule.cpu.contraction_form import CpuContraction, Packed
from souffle.schedule.cpu.host import Machine
from souffle.schedule.cpu.nest import (
    Axis,
    flat_index,
    map_buffer_loads,
    replace_variables,
    simplify,
    stride_along,
    uses,
)
from souffle.schedule.cpu.reduction import reduces_along_memory
from souffle.tvm_compat import PrimExpr, buffer_loads, dtype_of

__all__ = [
    "CACHE_BYTES",
    "CpuTiling",
    "grouped_vectors",
    "panel_vectors",
    "panels_together",
    "product_cycles",
    "product_tiling",
    "reads_in_vectors",
    "reduction_cycles",
    "row_tile",
    "stores_in_vectors",
    "task_cycles",
    "tiling_of",
]

_MOST_ROWS = 10
"""Rows are read side by side, and where they lie powers of two apart, more of them push each other out of a cache of
eight ways: at a distance of 8 or 12 KiB, 14 rows of two vectors ran at three quarters of the speed of 9 of three."""
_LATENCY = 8
"""Multiplications that have to be in flight: four cycles' worth, of two units on some processors."""
_STEP = 1.5
"""Cycles of a step beside its multiplications."""
CACHE_BYTES = 3 << 18
"""What is used again and again: less than the second-level cache of today's cores."""
_MANY = 1 << 12
"""Rows or columns."""
_GATHERED, _SCATTERED = 3.0, 1.0
"""Cycles for an element that is packed by itself, and for one that is stored by itself, as measured."""
_PACKED_VECTOR = 2.0
_APART = 1.15
"""Where rows are not packed, they lie a whole sum apart: measured on convolutions and products of six shapes."""
_LINE, _PAGE = 64, 4096
_NEXT_LINE, _NEXT_PAGE = 3.0, 9.0
"""Cycles of a tile for a step to elements of its rows in another line, or in another page, whose address is looked up
again: of products of 49, 784 and 3,136 rows on a processor whose second-level cache has 2 MB."""
_LONE_RESULT = 8.0
"""Cycles to add the lanes of a vector up."""
_VECTOR_OF_REDUCTION = 1.5
_STRIDED_VECTOR = 4.0
"""Cycles to read a vector where the next ones lie rows apart: a product of one row read its matrix at 18 bytes a cycle
from the second-level cache, and at 4 from memory."""


@dataclass(frozen=True)
class CpuTiling:
    """Shape of the micro-kernel: `rows` by `vectors` registers of `lanes` elements."""

    rows: int
    vectors: int
    lanes: int

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.vectors * self.lanes


def tiling_of(
    rows: int,
    columns: int,
    lanes: int,
    registers: int,
    *,
    vectors: int | None = None,
    run: int = 1,
    height: int | None = None,
) -> CpuTiling:
    """The micro-kernel that needs the least time, its remainders included.

    Parameters
    ----------
    rows, columns : int
        Extents of the matrix.
    lanes, registers : int
        Elements of a vector register, and how many there are.
    vectors : int, optional
        Of a panel; the best number without.
    run : int
        Rows that follow each other in memory. Tiles do not cross from one run to the next, if it has a divisor that
        serves as the height of tiles.
    height : int, optional
        Rows of a tile; as many as serve best without.
    """
    most = -(-columns // lanes)
    choices = [count for count in (3, 2, 1) if count <= most] if vectors is None else [vectors]
    best: tuple[float, CpuTiling] | None = None
    for count in choices:
        tiling = CpuTiling(_height(rows, count, registers, run) if height is None else height, count, lanes)
        cost = _cycles(rows, columns, tiling)
        if best is None or cost < best[0] * 0.995:
            best = (cost, tiling)
    assert best is not None
    return best[1]


def panel_vectors(columns: int, lanes: int, registers: int) -> int:
    """The vectors of a panel that is packed ahead of time: the same for any number of rows, which then share it."""
    return tiling_of(_MANY, columns, lanes, registers).vectors


def grouped_vectors(rows: int, units: int, groups: int, machine: Machine, dtype: str) -> int | None:
    """The vectors of a panel with as many columns of each of some groups; ``None`` if there is none of whole vectors.

    Parameters
    ----------
    rows : int
    units : int
        Columns of a group.
    groups : int
    machine : Machine
    dtype : str
        Of totals.
    """
    lanes, registers = machine.lanes(dtype), machine.vector_registers
    best: tuple[float, int] | None = None
    for each in range(1, units // lanes + 1):
        vectors = each * groups
        if 2 * vectors + 1 > registers:
            break
        # There are to be panels for all cores.
        if units % (each * lanes) or units // (each * lanes) < machine.cores:
            continue
        cost = _cycles(rows, units * groups, tiling_of(rows, units * groups, lanes, registers, vectors=vectors))
        if best is None or cost < best[0] * 0.995:
            best = (cost, vectors)
    return None if best is None else best[1]


def _height(rows: int, vectors: int, registers: int, run: int) -> int:
    # One register per vector for the panel and one for the broadcast element.
    highest = min((registers - 1 - vectors) // vectors, _MOST_ROWS)
    even = -(-rows // -(-rows // highest))
    if run == rows or run % even == 0:
        return even
    inside = [height for height in range(highest // 2, highest + 1) if height and run % height == 0]
    return max(inside, default=even)


def _cycles(rows: int, columns: int, tiling: CpuTiling) -> float:
    """Of one step of the sum for a whole matrix."""
    full, rest = divmod(-(-columns // tiling.lanes), tiling.vectors)

    def panel(vectors: int) -> float:
        tiles, last = divmod(rows, tiling.rows)
        return tiles * _steps(tiling.rows, vectors) + (_steps(last, vectors) if last else 0)

    return full * panel(tiling.vectors) + (panel(rest) if rest else 0)


def _steps(rows: int, vectors: int) -> float:
    """Relative time of one step of a micro-kernel: its multiplications, or the loads or the latency that bound it."""
    return max(rows * vectors, 0.6 * (rows + vectors), _LATENCY) + _STEP


def row_tile(form: CpuContraction, machine: Machine) -> int:
    """The rows of a tile that is packed ahead of time: the same for any number of columns, which then share it."""
    lanes = machine.lanes(str(form.nest.body.buffer.dtype))
    return tiling_of(form.height, _MANY, lanes, machine.vector_registers, run=form.height).rows


def product_tiling(form: CpuContraction, machine: Machine, *, packed: Packed) -> CpuTiling:
    """The micro-kernel of a contraction.

    Parameters
    ----------
    form : CpuContraction
    machine : Machine
    packed : Packed
        Which factor is packed already.
    """
    lanes = machine.lanes(str(form.nest.body.buffer.dtype)) if form.dot is None else form.dot.lanes
    registers = machine.vector_registers
    if packed == "rows":
        return tiling_of(form.height, form.width, lanes, registers, height=row_tile(form, machine))
    vectors = (form.vectors or panel_vectors(form.width, lanes, registers)) if packed == "columns" else None
    return tiling_of(form.height, form.width, lanes, registers, vectors=vectors, run=_run_of_rows(form))


def _run_of_rows(form: CpuContraction) -> int:
    """Rows that follow each other in memory: of the last axis, and of those before it that go on where it ends."""
    axes, loads = form.nest.axes, buffer_loads(form.scalar.value)
    run = 1
    inner: Axis | None = None
    for axis in reversed(form.rows):
        if inner is not None and any(
            stride_along(load, axis, axes) != run * (stride_along(load, inner, axes) or 0) for load in loads
        ):
            break
        inner = form.rows[-1]
        run *= axis.extent
    return run


def panels_together(form: CpuContraction, tiling: CpuTiling) -> int:
    """How many panels a tile of rows is multiplied with before the next one.

    All rows pass through the first-level cache for each block of panels. Where they have no room in the second-level
    cache, a block has as many panels as it holds, so that the rows come from memory as seldom as can be.
    """
    if form.panels is not None:
        return 1
    row, column = (form.steps * DataType(dtype_of(side.value)).itemsize for side in (form.scalar, form.vector))
    if form.height * row <= CACHE_BYTES:
        return 1
    panels = -(-form.width // tiling.width)
    blocks = -(-panels // max(1, CACHE_BYTES // (column * tiling.width)))
    return -(-panels // blocks)


def task_cycles(form: CpuContraction, tiling: CpuTiling, rows: int, columns: int) -> float:
    """Cycles of one core for a part of a contraction: multiplying, and packing columns if that is left to do."""
    cycles = form.steps * _cycles(rows, columns, tiling)
    return cycles if form.panels is not None else cycles + _packing_cycles(form, columns, tiling)


def _packing_cycles(form: CpuContraction, columns: int, tiling: CpuTiling) -> float:
    vectors = -(-columns // tiling.lanes)
    return form.steps * (vectors * _PACKED_VECTOR if reads_in_vectors(form) else columns * _GATHERED)


def product_cycles(form: CpuContraction, machine: Machine, *, packed: Packed) -> float:
    """Cycles of one core for a contraction: multiplying, packing columns, and storing results.

    Parameters
    ----------
    form : CpuContraction
    machine : Machine
    packed : Packed
        Which factor is packed already.
    """
    tiling = product_tiling(form, machine, packed=packed)
    columns = -(-form.width // tiling.lanes)
    cycles = form.steps * _cycles(form.height, form.width, tiling)
    if packed == "none":
        cycles *= _APART
    if packed != "columns":
        cycles += _packing_cycles(form, form.width, tiling)
    if packed != "rows":
        cycles += -(-form.height // tiling.rows) * -(-columns // tiling.vectors) * _far_steps(form)
    cycles += form.height * (columns if stores_in_vectors(form) else form.width * _SCATTERED)
    return form.batches * cycles


def _far_steps(form: CpuContraction) -> float:
    """Cycles in which a tile waits for its rows: at each step that moves to another line, or to another page."""
    axes, cycles = form.nest.axes, 0.0
    # The numbers of a word follow each other, or are looked up once.
    for load in buffer_loads(form.scalar.value)[: None if form.dot is None else 1]:
        itemsize, times = DataType(str(load.source.dtype)).itemsize, 1
        for axis in form.nest.reduce:
            times *= axis.extent
            stride = stride_along(load, axis, axes)
            far = _PAGE if stride is None else abs(stride) * itemsize
            cycles += times * (_NEXT_PAGE if far >= _PAGE else _NEXT_LINE if far >= _LINE else 0.0)
    return cycles


def reduction_cycles(form: CpuContraction, machine: Machine) -> float:
    """Cycles of one core where no panels are made: :mod:`souffle.schedule.cpu.reduction`."""
    lanes = machine.lanes(str(form.nest.body.buffer.dtype))
    multiplied = form.height * form.width * form.steps / lanes
    if reduces_along_memory(form.nest):
        return form.batches * (multiplied * _VECTOR_OF_REDUCTION + form.height * form.width * _LONE_RESULT)
    return form.batches * (multiplied + form.width * form.steps / lanes * _STRIDED_VECTOR)


def reads_in_vectors(form: CpuContraction) -> bool:
    """Whether the columns, counted together, follow each other in memory."""
    axes = form.nest.axes
    inner = form.columns[-1]
    loads = [load for load in buffer_loads(form.vector.value) if uses(load, [inner])]
    vectors = all(stride_along(load, inner, axes) == 1 for load in loads)
    return vectors and (len(form.columns) == 1 or _columns_are_contiguous(form))


def _columns_are_contiguous(form: CpuContraction) -> bool:
    """Whether the columns, counted together, are read with stride 1 throughout."""
    axes = form.nest.axes
    for load in buffer_loads(form.vector.value):
        expected = 1
        for axis in reversed(form.columns):
            if uses(load, [axis]) and stride_along(load, axis, axes) != expected:
                return False
            expected *= axis.extent
    rest = [axis for axis in form.columns if uses(_without_loads(form.vector.value), [axis])]
    return not rest


def _without_loads(expression: PrimExpr) -> PrimExpr:
    return map_buffer_loads(expression, lambda load: tirx.const(0, dtype_of(load)))


def stores_in_vectors(form: CpuContraction) -> bool:
    """Whether the results of a row follow each other in memory, at least along the last axis of the columns."""
    store = form.nest.body if form.nest.epilogue is None else form.nest.epilogue
    inner = form.columns[-1]
    position = flat_index(store.buffer, list(store.indices))
    step = simplify(replace_variables(position, {inner.var: inner.var + 1}) - position, form.nest.axes)
    return isinstance(step, tirx.IntImm) and int(step.value) == 1
