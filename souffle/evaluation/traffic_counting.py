"""Bytes of global memory that kernels touch, counted exactly from their TensorIR, without computing anything.

The certificate's reader (:mod:`souffle.verify.function_reader`) gives each stage function as loops, conditions and
accesses with integer expressions as addresses. Here that skeleton is written as C, compiled, and run for every tile and
thread: it goes through the same accesses as the kernel and only counts them. What stays in a block's shared memory from
stage to stage is no memory here: on the grid that is expected all of it has its place.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from souffle.errors import SouffleError
from souffle.kernel import KernelShape
from souffle.kernel.kernel_shape import ArgumentPlace, LoopCall
from souffle.schedule.lower import WINDOWS, DeviceFunction
from souffle.schedule.lower.teams import TEAM_BARRIER_FUNCTION
from souffle.tvm_compat import PrimExpr, const_int
from souffle.verify.accesses import Branch, Function, Item, MemoryAccess, SerialLoop
from souffle.verify.expressions import Axis, Expr, interval
from souffle.verify.function_reader import read_function

__all__ = ["CountingError", "FunctionTraffic", "Moved", "ShapeTraffic", "count_functions", "count_shape"]

_WARP = 32

_C_OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/", "mod": "%", "eq": "==", "ne": "!=", "lt": "<", "le": "<="},
    **{"gt": ">", "ge": ">=", "and": "&&", "or": "||", "shl": "<<", "shr": ">>", "band": "&", "bor": "|", "bxor": "^"},
}

_PRELUDE = """
typedef long long num;
static inline num floordiv(num a, num b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
static inline num floormod(num a, num b) { return a - floordiv(a, b) * b; }
static inline num least(num a, num b) { return a < b ? a : b; }
static inline num most(num a, num b) { return a > b ? a : b; }
typedef struct { num size, asked, once; unsigned* stamp; } Side;
static inline void touch(Side* side, num offset, num width, num unit, unsigned stamp, num* outside) {
  side->asked += width;
  for (num at = offset / unit; at < (offset + width) / unit; ++at) {
    if (at < 0 || at >= side->size) { ++*outside; continue; }
    if (side->stamp[at] != stamp) { side->stamp[at] = stamp; side->once += unit; }
  }
}
"""


class CountingError(SouffleError):
    """A stage function whose accesses cannot be counted; the message names it and what could not be read."""


@dataclass(frozen=True)
class Moved:
    """Bytes read and written."""

    read: int = 0
    written: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.read + other.read, self.written + other.written)

    def times(self, count: int) -> Moved:
        """So often."""
        return Moved(self.read * count, self.written * count)


@dataclass(frozen=True, eq=False)
class FunctionTraffic:
    """What one run of a stage function, over all its tiles, does to global memory.

    Attributes
    ----------
    asked : Moved
        By all threads.
    once_per_tile : Moved
        Each element once for each tile.
    read, written : tuple of array of bool
        For each pointer parameter, which elements are touched by any tile.
    units : tuple of int
        Bytes of an element of each parameter.
    """

    asked: Moved
    once_per_tile: Moved
    read: tuple[np.ndarray, ...]
    written: tuple[np.ndarray, ...]
    units: tuple[int, ...]


@dataclass(frozen=True)
class ShapeTraffic:
    """What one launch of a kernel does to global memory, loops counted as often as they run.

    Attributes
    ----------
    asked : Moved
        By threads.
    once_per_tile : Moved
        Each element once for each tile of each stage.
    once_per_stage : Moved
        Each element once for each run of a stage.
    once_per_launch : Moved
        Each element of memory once; of what the kernel itself writes nothing is read.
    """

    asked: Moved
    once_per_tile: Moved
    once_per_stage: Moved
    once_per_launch: Moved


# The skeleton as C


class _Writer:
    """Writes the accesses of one function as C statements, but for those of parameters that are shared memory."""

    def __init__(self, function: Function, windows: Collection[int]) -> None:
        self.function, self.windows = function, windows
        self.lines: list[str] = []
        self.names: dict[Axis, str] = {function.tile: "tile", function.thread: "tid"}
        self.numbers = 0

    def fresh(self, prefix: str) -> str:
        self.numbers += 1
        return f"{prefix}{self.numbers}"

    def items(self, items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, MemoryAccess):
                self.access(item)
            elif isinstance(item, SerialLoop) and _touches(item.body):
                name = self.names[item.axis] = self.fresh("i")
                self.lines.append(f"for (num {name} = 0; {name} < {item.axis.extent}; ++{name}) {{")
                self.items(item.body)
                self.lines.append("}")
            elif isinstance(item, Branch) and _touches((item,)):
                self.branch(item)

    def branch(self, item: Branch) -> None:
        condition = self.value(item.condition)
        for opening, body in (("if (%s) {", item.then), ("if (!%s) {", item.otherwise)):
            if _touches(body):
                self.lines.append(opening % condition)
                self.items(body)
                self.lines.append("}")

    def access(self, access: MemoryAccess) -> None:
        memory = access.place.memory
        if memory.kind != "global" or memory.parameter in self.windows:
            return
        offset = access.place.offset
        if offset.opaque or any(c.opaque for c in access.conditions):
            raise CountingError(f"{self.function.name}: which elements are touched depends on data")
        self.lines.append("{")
        axes = offset.axes.union(*(c.axes for c in access.conditions)) - self.names.keys()
        inner = sorted(axes, key=lambda axis: axis.name)
        for axis in inner:
            name = self.names[axis] = self.fresh("i")
            self.lines.append(f"for (num {name} = 0; {name} < {axis.extent}; ++{name})")
        self.lines.append("{")
        conditions = [self.value(c) for c in access.conditions]
        if access.by == "warp":
            conditions.append(f"tid % {_WARP} == 0")
        if conditions:
            self.lines.append(f"if ({' && '.join(conditions)}) {{")
        side = f"{'writes' if access.writes else 'reads'} + {memory.parameter}"
        place = self.value(offset)
        self.lines.append(f"touch({side}, {place}, {access.width}, {memory.unit}, tile + 1, outside);")
        self.lines.append("}}" + "}" * bool(conditions))
        for axis in inner:
            del self.names[axis]

    def value(self, expr: Expr) -> str:
        """The name of a variable that holds the value; each part of the expression is worked out once."""
        known: dict[Expr, str] = {}

        def of(node: Expr) -> str:
            if node.op == "const":
                return f"{node.value}LL"
            if node.op == "axis":
                return self.names[node.value]
            if node.op == "unknown":
                raise CountingError(f"{self.function.name}: which elements are touched depends on data")
            if node not in known:
                text = _operation(node, [of(argument) for argument in node.args])
                known[node] = self.fresh("v")
                self.lines.append(f"const num {known[node]} = {text};")
            return known[node]

        return of(expr)


def _operation(node: Expr, arguments: list[str]) -> str:
    a = arguments[0]
    if node.op in _C_OPERATORS:
        return f"{a} {_C_OPERATORS[node.op]} {arguments[1]}"
    if node.op in ("floordiv", "floormod"):
        natural = interval(node.args[0])[0] >= 0 and interval(node.args[1])[0] > 0
        plain = f"{a} {'/' if node.op == 'floordiv' else '%'} {arguments[1]}"
        return plain if natural else f"{node.op}({a}, {arguments[1]})"
    if node.op in ("min", "max"):
        return f"{'least' if node.op == 'min' else 'most'}({a}, {arguments[1]})"
    if node.op == "not":
        return f"!{a}"
    if node.op == "select":
        return f"{a} ? {arguments[1]} : {arguments[2]}"
    raise CountingError(f"the operation {node.op} in an index")


def _touches(items: Iterable[Item]) -> bool:
    """Whether global memory is accessed in these."""
    for item in items:
        if isinstance(item, MemoryAccess):
            if item.place.memory.kind == "global":
                return True
        elif isinstance(item, SerialLoop):
            if _touches(item.body):
                return True
        elif isinstance(item, Branch) and (_touches(item.then) or _touches(item.otherwise)):
            return True
    return False


def _sizes(function: Function) -> list[int]:
    """Elements of each pointer parameter, by what its accesses declare."""
    sizes = [0] * len(function.pointers)

    def see(items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, MemoryAccess) and item.place.memory.kind == "global":
                memory, within = item.place.memory, item.place.within
                end = within[1] if within else interval(item.place.offset)[1] + item.width
                sizes[memory.parameter] = max(sizes[memory.parameter], -(-end // memory.unit))
            elif isinstance(item, SerialLoop):
                see(item.body)
            elif isinstance(item, Branch):
                see((*item.then, *item.otherwise))

    see(function.body)
    return sizes


def _of_one_team(function: DeviceFunction) -> tirx.PrimFunc:
    """A function for blocks of teams as its first team runs it, without barriers; teams differ in shared memory."""
    *parameters, team = function.func.params

    def without_barrier(node: tirx.Evaluate) -> tirx.Stmt:
        call = node.value
        named = isinstance(call, tvm.ir.Call) and str(getattr(call.op, "name", "")) == "tirx.call_extern"
        barrier = named and str(call.args[0].value).startswith(TEAM_BARRIER_FUNCTION)
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if barrier else node

    def first(node: tirx.Var) -> PrimExpr:
        return tirx.IntImm("int32", 0) if node.same_as(team) else node

    body = tvm_ffi.structural_map(function.func.body, [(tirx.Evaluate, without_barrier), (tirx.Var, first)])
    return tirx.PrimFunc(parameters, body, function.func.ret_type).with_attr(dict(function.func.attrs.items()))


def _lane_by_lane(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Values that all lanes of a vector have, spelled out for each lane."""

    def spelled(node: tirx.Broadcast) -> tirx.Shuffle:
        lanes = const_int(node.lanes)
        return tirx.Shuffle([node.value] * lanes, list(range(lanes)))

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Broadcast, spelled)))


class _Side(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_longlong),
        ("asked", ctypes.c_longlong),
        ("once", ctypes.c_longlong),
        ("stamp", ctypes.c_void_p),
    )


def count_functions(
    functions: Iterable[DeviceFunction], *, as_written: bool = False
) -> dict[DeviceFunction, FunctionTraffic]:
    """Count the accesses of one run of each function.

    Parameters
    ----------
    functions : iterable of DeviceFunction
    as_written : bool
        Count a value that is loaded for all lanes of a vector as often as TVM's CUDA text names it: once for each lane.
        A compiler that keeps nothing in registers loads it so often.

    Raises
    ------
    CountingError
        If the accesses of one depend on data, cannot be read, or leave what a parameter is declared as.
    """
    distinct = list(dict.fromkeys(functions))
    trees: list[Function] = []
    texts = [_PRELUDE]
    for number, function in enumerate(distinct):
        name = str(function.func.attrs["global_symbol"]) if "global_symbol" in function.func.attrs else "stage"
        func = _of_one_team(function) if function.in_team else function.func
        func = _lane_by_lane(func) if as_written else func
        tree = read_function(f"{name} {number}", func, function.tiles, function.threads)
        if tree.problems:
            raise CountingError(f"{tree.name}: {'; '.join(tree.problems)}")
        windows = function.func.attrs.get(WINDOWS, ())
        writer = _Writer(tree, [int(number) for number in windows])
        writer.items(tree.body)
        head = f"void count_{number}(Side* reads, Side* writes, num* outside) {{"
        tiles = f"for (num tile = 0; tile < {function.tiles}; ++tile)"
        threads = f"for (num tid = 0; tid < {function.threads}; ++tid) {{"
        texts.append("\n".join([head, tiles, threads, *writer.lines, "}}"]))
        trees.append(tree)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "counts.c", Path(folder) / "counts.so"
        source.write_text("\n".join(texts))
        command = ["gcc", "-O2", "-w", "-fwrapv", "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CountingError(f"gcc: {done.stderr[:500]}")
        loaded = ctypes.CDLL(str(library))
        return {
            function: _run(getattr(loaded, f"count_{number}"), tree)
            for number, (function, tree) in enumerate(zip(distinct, trees, strict=True))
        }


def _run(entry: ctypes._CFuncPtr, tree: Function) -> FunctionTraffic:
    sizes = _sizes(tree)
    stamps = [[np.zeros(size, np.uint32) for size in sizes] for _ in range(2)]
    sides = [(_Side * max(1, len(sizes)))() for _ in range(2)]
    for side, own in zip(sides, stamps, strict=True):
        for entry_, stamp in zip(side, own, strict=False):
            entry_.size, entry_.stamp = stamp.size, stamp.ctypes.data
    outside = ctypes.c_longlong(0)
    entry(sides[0], sides[1], ctypes.byref(outside))
    if outside.value:
        raise CountingError(f"{tree.name}: {outside.value} elements outside of what parameters are declared as")
    asked = Moved(*(sum(one.asked for one in side) for side in sides))
    once = Moved(*(sum(one.once for one in side) for side in sides))
    read, written = (tuple(stamp > 0 for stamp in own) for own in stamps)
    return FunctionTraffic(asked, once, read, written, tuple(memory.unit for memory in tree.pointers))


# Kernels


def count_shape(shape: KernelShape, known: Mapping[DeviceFunction, FunctionTraffic]) -> ShapeTraffic:
    """Add up what the stages of a kernel do in one launch.

    Parameters
    ----------
    shape : KernelShape
    known : mapping of DeviceFunction to FunctionTraffic
        From :func:`count_functions`.
    """
    asked = once_per_tile = once_per_stage = Moved()
    memory = _Memory()
    for call in shape.calls:
        steps = call.steps if isinstance(call, LoopCall) else 1
        for stage in call.calls if isinstance(call, LoopCall) else (call,):
            parts = [known[function] for function in stage.wholes]
            for part in parts:
                asked += part.asked.times(steps)
                once_per_tile += part.once_per_tile.times(steps)
            read, written = (_union([getattr(p, way) for p in parts]) for way in ("read", "written"))
            units = parts[0].units
            once_per_stage += Moved(_nbytes(read, units), _nbytes(written, units)).times(steps)
            for number, place in enumerate(stage.arguments):
                memory.touch(place, steps, units[number], read[number], written[number])
    return ShapeTraffic(asked, once_per_tile, once_per_stage, memory.total())


def _union(parts: Sequence[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    joined = [np.zeros(max(map(len, own)), bool) for own in zip(*parts, strict=True)]
    for own in parts:
        for whole, one in zip(joined, own, strict=True):
            whole[: len(one)] |= one
    return joined


def _nbytes(touched: Sequence[np.ndarray], units: Sequence[int]) -> int:
    return sum(int(one.sum()) * unit for one, unit in zip(touched, units, strict=True))


class _Memory:
    """Which elements of each parameter of a kernel are touched."""

    def __init__(self) -> None:
        self.read: dict[int, np.ndarray] = {}
        self.written: dict[int, np.ndarray] = {}
        self.units: dict[int, int] = {}

    def touch(self, place: ArgumentPlace, steps: int, unit: int, read: np.ndarray, written: np.ndarray) -> None:
        for parameter, start in {_at(place, step, steps) for step in range(steps)}:
            self.units[parameter] = unit
            for table, touched in ((self.read, read), (self.written, written)):
                if touched.any():
                    _mark(table, parameter, start, touched)

    def total(self) -> Moved:
        # What the kernel writes, it reads after it: from the cache, if that keeps what lies inside of a kernel.
        outer = self.read.keys() - self.written.keys()
        read = sum(int(self.read[p].sum()) * self.units[p] for p in outer)
        return Moved(read, sum(int(one.sum()) * self.units[p] for p, one in self.written.items()))


def _at(place: ArgumentPlace, step: int, steps: int) -> tuple[int, int]:
    """The parameter, and the element in it, where an argument lies at a step."""
    if step < len(place.first):
        return place.first[step], 0
    if place.last is not None and step == steps - 1:
        return place.last, 0
    part = step - len(place.first)
    return place.parameter, (part % place.ring if place.ring else part) * place.stride


def _mark(table: dict[int, np.ndarray], parameter: int, start: int, touched: np.ndarray) -> None:
    known = table.get(parameter)
    end = start + len(touched)
    if known is None or len(known) < end:
        grown = np.zeros(end if known is None else max(end, 2 * len(known)), bool)
        if known is not None:
            grown[: len(known)] = known
        table[parameter] = known = grown
    known[start:end] |= touched
