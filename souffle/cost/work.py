"""What one tile of a lowered stage asks of each unit of a multiprocessor, counted from its TensorIR.

The function that a stage was lowered to is walked once, with its loops, for all threads of a few tiles that are spread
over the grid. Every access to global memory is placed in the 32-byte sectors that its warps touch, so that coalescing,
padding and threads without work are seen and not assumed. Arithmetic is counted as the compiler will emit it: a
multiplication and an addition are one instruction, what does not vary in a loop is computed before it, what has a name
is computed where it is first needed, an element that stays in a register is converted once, an index that threads have
in common costs nothing. ``benchmarks/tile_sass.py`` holds the counts against machine code.

The chain is the time that a block needs for itself alone: the loads that wait for one another, the barriers, the
additions into one total. Loads between two barriers wait together, those of a loop's turns as many turns at a time as
the compiler unrolls. Behind branches they wait one after another: an epilogue whose results are written under
conditions of their own loads what the next needs (a bias, a residual) only when the last is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.cost.counting import BANK_BYTES, INSTRUCTION_BYTES, WARP, Counter, Surrounding, Work
from souffle.cost.device_calls import DeviceCalls
from souffle.cost.per_function import OncePerFunction
from souffle.index.arrays import Shape, Value, apply, constant, joined_shape
from souffle.index.operations import call_name, operation_of
from souffle.schedule.lower import WINDOWS, DeviceFunction
from souffle.tvm_calls import structural_walk
from souffle.tvm_compat import StatementVisitor, choice_parts, collect, const_int, dtype_of

__all__ = ["function_cost", "work_of"]

_SAMPLED_TILES = 5
"""Spread evenly: those at an edge, which often have less to do, are as likely as they are frequent."""

_UNROLL = 4
"""Turns of a loop whose loads nvcc issues together where the loop is too long to unroll as a whole."""

_UNROLLED_TURNS = 32
"""Nested loops of so few turns nvcc unrolls by itself."""

_FULLY_UNROLLED = 300
"""Instructions, of all turns, up to which nvcc unrolls a loop that does not ask for it: of bodies of 2 to 32 turns of
multiply-adds or of ``erff`` those up to 256 are unrolled as a whole (but for one, of two turns of 128), and none from
384; of these, bodies of 64 and less stand there up to four times, longer ones once (nvcc 13.0, sm_90;
``benchmarks/unrolling.py``)."""

_DIVISION = 4
"""Instructions of an integer division by a constant: a high product, a shift, a correction."""

_LOOP = 2
"""Instructions of a turn of a loop that is not unrolled: count and branch."""

_FRAME = 80
"""Instructions around a tile: pointers, the loop over tiles. Machine code of small stages has 60 to 120 more than are
counted in it, as ``docs/results/code_size.json`` records."""

_FUNCTIONS: dict[str, tuple[int, int]] = {
    "exp": (6, 1),
    "exp2": (2, 1),
    "log": (8, 1),
    "sqrt": (6, 1),
    "rsqrt": (2, 1),
    "tanh": (10, 2),
    "erf": (24, 1),
    "pow": (20, 2),
    "sin": (16, 1),
    "cos": (16, 1),
    "sigmoid": (14, 2),
}
"""fp32 instructions and special-function instructions of CUDA's functions at full precision, about."""

_OTHER_FUNCTION = (16, 1)

_QUOTIENT = (8, 1)
"""Those of an fp32 division at full precision."""

_FRAGMENT_FMA = 16 * 16 * 16

_WMMA_LOAD_INSTRUCTIONS, _WMMA_MMA_INSTRUCTIONS = 4, 2

_DIVISIONS = frozenset(["div", "mod", "floordiv", "floormod"])
_ARITHMETIC = _DIVISIONS | {"add", "sub", "mul", "min", "max"}
_OF_ONE_INSTRUCTION = frozenset(["lt", "le", "gt", "ge", "eq", "ne", "bitand", "bitor", "bitxor", "shl", "shr"])


def work_of(function: DeviceFunction) -> Work:
    """What one tile of a lowered stage takes.

    Parameters
    ----------
    function : DeviceFunction
        See :func:`souffle.kernel.lower_stage`.

    Returns
    -------
    Work
        The mean of the sampled tiles.
    """
    return _counted(function)


_counted: OncePerFunction[Work] = OncePerFunction(lambda function: _Walk(function).run())
"""For all who ask: which rule to take, whether to split a stage, to cut a kernel, and what to report of it."""


class _Walk(StatementVisitor):
    def __init__(self, function: DeviceFunction) -> None:
        self.function = function
        body = function.func.body
        self.written = _stored(body)
        self.changing: list[tirx.Var] = []
        self.later: dict[tirx.Var, tuple[object, int]] = {}
        count = min(_SAMPLED_TILES, function.tiles)
        tiles = (np.arange(count) * 2 + 1) * function.tiles // (2 * count)
        self.counter = Counter(tiles, function.threads)
        tile, thread, *pointers = function.func.params
        attributes = function.func.attrs
        near = attributes[WINDOWS] if attributes is not None and WINDOWS in attributes else ()
        windows = [pointers[int(number)] for number in near]
        # What is read and written through such a pointer is in shared memory, though its type does not say so.
        self.windows = [d.buffer for d in collect(body, tirx.DeclBuffer) if any(d.data.same_as(w) for w in windows)]
        self.names: dict[tirx.Var, Value] = {tile: self.counter.tile, thread: self.counter.thread}
        self.calls = DeviceCalls(self.counter, self._value)
        self.in_step = False
        self.into_register = False
        self.numbers = itertools.count()
        self.keys: dict[object, int] = {}
        self.computed: set[tuple[str, object]] = set()

    def run(self) -> Work:
        self.visit(self.function.func.body)
        return self.counter.work() + Work(code_bytes=_FRAME * INSTRUCTION_BYTES)

    # Statements

    def visit_bind(self, node: tirx.Bind) -> None:
        if "int" in dtype_of(node.value) and not collect(node.value, TensorLoad):
            self.later[node.var] = (node.value, len(self.counter.loops))
        else:
            self.names[node.var] = self._value(node.value)

    def visit_if_then_else(self, node: tirx.IfThenElse) -> None:
        condition = self._value(node.condition)
        before = self.counter.total["code_bytes"], self.counter.waiting["global_waits"]
        with self.counter.where(condition):
            self.visit(node.then_case)
        if condition.per_thread and _writes_results(node.then_case):
            self.counter.branched(condition, *before)
        if node.else_case is not None:
            with self.counter.where(condition, negated=True):
                self.visit(node.else_case)

    def visit_while(self, node: tirx.While) -> None:
        self._value(node.condition)
        self.visit(node.body)

    def visit_for(self, node: tirx.For) -> None:
        turns = self._turns(node)
        barriers = _has_barrier(node.body)
        unrolled = node.kind == tirx.ForKind.UNROLLED or (not barriers and _turns(node) <= _UNROLLED_TURNS)
        steps = np.arange(turns) + (const_int(node.min) if isinstance(node.min, tirx.IntImm) else 0)
        self.names[node.loop_var] = Value.of(
            steps.reshape(-1, *([1] * (len(self.counter.loops) + 2))), ("loop", next(self.numbers))
        )
        if not unrolled:
            self.counter.settle()
            # The loop's own instructions, once for each of its turns.
            innermost = not barriers and not _has_serial_loop(node.body)
            before, copies = self.counter.total["code_bytes"], self.counter.executions((), all_loops=True).copies
            together = min(turns, _UNROLL) if innermost else 1
            self.counter.loops.append(Surrounding(turns, False, together))
            self.counter.count("", self.counter.executions((), all_loops=True), _LOOP)
            outer, step = self.counter.turns, self.in_step
            if barriers:
                self.calls.enter_loop()
            self.in_step |= barriers
            self.calls.in_step = self.in_step
            self.counter.turns = outer * (turns if barriers else -(-turns // _UNROLL))
            self.visit(node.body)
            self.counter.settle()
            self._write_once_if_long(before, together, copies)
            self.counter.turns, self.in_step = outer, step
            self.calls.in_step = step
            if innermost:
                self.counter.total["arithmetic_waits"] += outer * turns
        else:
            first = not (self.counter.loops and self.counter.loops[-1].unrolled)
            outside, self.changing = self.changing, _stored(node.body) if first else self.changing
            before, copies = self.counter.total["code_bytes"], self.counter.executions((), all_loops=True).copies
            self.counter.loops.append(Surrounding(turns, True))
            self.visit(node.body)
            self.changing = outside
            if node.kind != tirx.ForKind.UNROLLED:
                self._write_once_if_long(before, turns, copies)
        self.counter.loops.pop()

    def _write_once_if_long(self, before: float, together: int, copies: float) -> None:
        """Correct the code of a loop that does not ask to be unrolled, of which so many turns were counted as written.

        `before` is what was counted before it, and `copies` of the loop stand in unrolled loops around it.
        """
        code = self.counter.total["code_bytes"] - before
        turn = code / together / copies / INSTRUCTION_BYTES
        if turn * together > _FULLY_UNROLLED:
            several = min(together, _UNROLL) if turn * _UNROLL <= _FULLY_UNROLLED else 1
            self.counter.total["code_bytes"] = before + code * several / together

    def _turns(self, node: tirx.For) -> int:
        """The turns of a loop; where they vary the most that there are, and one where they depend on data."""
        extent = self._value(node.extent).array
        return 1 if extent is None else max(1, int(extent.max()))

    def visit_buffer_store(self, node: tirx.BufferStore) -> None:
        self.into_register = self.in_step and str(node.buffer.scope()) == "local"
        self._value(node.value)
        self.into_register = False
        itemsize = tvm.DataType(dtype_of(node.value)).itemsize
        self._access(node.buffer, node.indices, itemsize, tvm.DataType(dtype_of(node.value)).lanes, store=True)

    def visit_evaluate(self, node: tirx.Evaluate) -> None:
        self._value(node.value)

    def visit_other(self, node: tirx.Stmt) -> None:
        """Declarations, and what no stage has, cost nothing."""

    # Expressions

    def _value(self, node: object) -> Value:
        operation = operation_of(node)
        if operation in ("int", "float"):
            return constant(node.value)
        if operation == "variable":
            if node in self.later:
                self._name(node)
            return self.names.get(node, Value.unknown(()))
        if operation in _ARITHMETIC:
            return self._arithmetic(operation, node)
        if operation in _OF_ONE_INSTRUCTION:
            return self._charged(self._known(apply(operation, self._value(node.a), self._value(node.b))), "int32", 1)
        if operation in ("and", "or"):
            # A comparison takes the predicate that it is joined to along.
            return self._charged(self._known(apply(operation, self._value(node.a), self._value(node.b))), "int32", 0)
        if operation in ("not", "bitnot"):
            return apply(operation, self._value(node.a))
        if operation == "cast":
            value = self._value(node.value)
            if "float" in dtype_of(node) or "float" in dtype_of(node.value):
                self._convert(node.value, value)
                return Value.unknown(value.shape)
            return value
        if operation == "choose":
            return self._choice(*choice_parts(node))
        if operation == "load":
            return self._load(node)
        if operation == "call":
            return self._call(node)
        if operation == "ramp":
            return self._value(node.base)
        if operation == "broadcast":
            return self._value(node.value)
        if operation == "let":
            self.names[node.var] = self._value(node.value)
            return self._value(node.body)
        if operation == "shuffle":
            return Value.unknown(joined_shape(*(self._value(v).shape for v in node.vectors)))
        return Value.unknown(())

    def _name(self, variable: tirx.Var) -> None:
        """Count what a name stands for, at its first use: nvcc moves what only some threads need to where they do."""
        value, depth = self.later.pop(variable)
        loops = self.counter.loops
        self.counter.loops = loops[:depth]
        self.names[variable] = self._value(value)
        self.counter.loops = loops

    def _convert(self, node: object, value: Value) -> None:
        """Count a conversion; an element kept in a register is converted once for all unrolled turns that use it."""
        kept = isinstance(node, TensorLoad) and str(node.source.scope()) == "local"
        place = self._value(node.indices[0]) if kept else Value.unknown(())
        if place.array is None or place.per_thread or any(node.source.same_as(one) for one in self.changing):
            self._charged(value, "fp32", 1)
            return
        shape, first = [self.counter.threads, 1], []
        for depth, loop in enumerate(self.counter.loops):
            axis = place.array.ndim - 3 - depth
            varies = axis >= 0 and place.array.shape[axis] > 1
            shape.append(loop.turns if varies or not loop.unrolled else 1)
            first.append(slice(None) if loop.unrolled else slice(1))
        places = place.array[(*reversed(first[: max(0, place.array.ndim - 2)]), ...)]
        share = len(np.unique(places)) / places.size
        self.counter.count("fp32", self.counter.executions(tuple(reversed(shape))) * share)

    def _known(self, value: Value) -> Value:
        """The value with a short key."""
        if value.key is None:
            return value
        return Value(value.shape, value.array, ("value", self.keys.setdefault(value.key, len(self.keys))))

    def _charged(self, value: Value, unit: str, instructions: float, lanes: int = 1, unrolled: bool = True) -> Value:
        """Count an operation where threads differ in it; what they share runs on the scalar path or is moved away."""
        repeated = value.key is not None and (unit, value.key) in self.computed
        if value.per_thread and not repeated:
            self.computed.add((unit, value.key))
            self.counter.count(unit, self.counter.executions(value.shape, unrolled=unrolled), instructions * lanes)
        return value

    def _arithmetic(self, operation: str, node: object) -> Value:
        dtype = tvm.DataType(dtype_of(node))
        real = "float" in str(dtype)
        if not real and operation in ("add", "sub"):
            return self._sum(node)
        left, right = self._value(node.a), self._value(node.b)
        if real:
            product = isinstance(node.a, tirx.Mul) or isinstance(node.b, tirx.Mul)
            shape = joined_shape(left.shape, right.shape)
            value = Value.unknown(shape)
            if operation == "div" and not _is_power_of_two(node.b):
                self._charged(value, "fp32", _QUOTIENT[0], dtype.lanes)
                self._charged(value, "special", _QUOTIENT[1], dtype.lanes)
            elif operation in ("add", "sub") and product:
                pass  # The product was counted, and takes the addition with it.
            else:
                self._charged(value, "fp32", 1, dtype.lanes)
            return value
        value = self._known(apply(operation, left, right))
        if operation in _DIVISIONS:
            divisor = int(right.array.flat[0]) if right.array is not None and right.array.size == 1 else 3
            return self._charged(value, "int32", 1 if divisor & (divisor - 1) == 0 else _DIVISION)
        return self._charged(value, "int32", 1)

    def _sum(self, node: tirx.Add | tirx.Sub) -> Value:
        """A sum of integers. What threads have different values of is added up first, products as multiply-adds; what
        all have alike goes into an instruction's immediate offset then, or into a pointer that is moved on.
        """
        own: list[tuple[bool, bool, Value]] = []
        alike = constant(0)
        for added, term in _terms(node):
            value = self._value(term)
            if value.per_thread:
                own.append((isinstance(term, tirx.Mul), not added, value))
            else:
                alike = self._known(apply("add" if added else "sub", alike, value))
        # The first is no product and is added, if any is so.
        total = constant(0)
        for place, (product, subtracted, value) in enumerate(sorted(own, key=lambda one: one[:2])):
            if not place and not subtracted:
                total = value
                continue
            total = self._known(apply("sub" if subtracted else "add", total, value))
            if not product:
                self._charged(total, "int32", 1)
        if alike.array is not None and alike.array.size == 1 and not alike.array.any():
            return total
        return self._charged(self._known(apply("add", total, alike)), "int32", 1, unrolled=False)

    def _choice(self, condition: object, then: object, other: object) -> Value:
        held = self._value(condition)
        with self.counter.where(held):
            first = self._value(then)
        with self.counter.where(held, negated=True):
            second = self._value(other)
        value = self._known(apply("choose", held, first, second))
        return self._charged(value, "int32", 1)

    def _load(self, node: TensorLoad) -> Value:
        dtype = tvm.DataType(dtype_of(node))
        shape = self._access(node.source, node.indices, dtype.itemsize, dtype.lanes, store=False)
        return Value.unknown(shape)

    def _call(self, node: tvm.ir.Call) -> Value:
        name = call_name(node)
        if name == "tvm_storage_sync":
            self.counter.settle()
            self.calls.barrier()
            self.counter.total["barriers"] += self.counter.turns
            return Value.unknown(())
        if name in ("tvm_mma_sync", "tvm_fill_fragment", "tvm_load_matrix_sync", "tvm_store_matrix_sync"):
            return self._fragment(name, node)
        if name in ("address_of", "buffer_data", "tvm_access_ptr"):
            return Value.unknown(())
        if name == "call_extern" and self.calls.count(str(node.args[0].value), node.args[1:]):
            return Value.unknown(())
        values = [self._value(arg) for arg in node.args if type(arg).__name__ != "StringImm"]
        shape = joined_shape(*(value.shape for value in values)) if values else ()
        if name in ("call_pure_extern", "call_extern"):
            name = str(node.args[0].value)
        if "float" not in dtype_of(node):
            return self._charged(apply(name, *values) if values else Value.unknown(()), "int32", 1)
        if "shfl" in name or "shuffle" in name:
            # It passes through the data path of shared memory.
            executions = self.counter.executions(shape, all_loops=True)
            self.counter.count("", executions)
            self.counter.total["shared_bytes"] += executions.warps * WARP * BANK_BYTES
            self.counter.total["shared_waits"] += self.counter.turns
            return Value.unknown(self.counter.full_shape())
        lanes = tvm.DataType(dtype_of(node)).lanes
        simple, special = function_cost(name)
        value = Value.unknown(shape)
        self._charged(value, "fp32", simple, lanes)
        self._charged(value, "special", special, lanes)
        return value

    def _fragment(self, name: str, node: tvm.ir.Call) -> Value:
        executions = self.counter.executions((), all_loops=True)
        if name == "tvm_mma_sync":
            self.counter.count("", executions, _WMMA_MMA_INSTRUCTIONS)
            self.counter.total["tensor_fma"] += executions.warps * _FRAGMENT_FMA
        elif name == "tvm_fill_fragment":
            self.counter.count("fp32", executions, _FRAGMENT_FMA // 16 // WARP)
        else:
            itemsize = 4 if name == "tvm_store_matrix_sync" else 2
            self.counter.count("", executions, _WMMA_LOAD_INSTRUCTIONS)
            self.counter.total["shared_bytes"] += executions.warps * 256 * itemsize
            self.counter.waiting["shared_waits"] |= name == "tvm_load_matrix_sync"
        return Value.unknown(self.counter.full_shape())

    # Memory

    def _access(self, buffer: tirx.Var, indices: Sequence[object], itemsize: int, lanes: int, *, store: bool) -> Shape:
        """Count a load or store and give the shape of what is loaded."""
        scope, index = str(buffer.scope()), indices[0]
        shared = scope.startswith("shared") or any(buffer.same_as(window) for window in self.windows)
        if scope not in ("", "global") and not shared:
            return self.counter.full_shape()  # a register, whose number is known where it is read
        place = self._value(index)
        stride = const_int(index.stride) if isinstance(index, tirx.Ramp) else 1
        each = lanes if stride != 1 else 1
        width, unit = itemsize // each, tvm.DataType(str(buffer.dtype)).itemsize
        waiting = self.counter.waiting
        if shared:
            if store:
                self.counter.held.clear()
            kept = not store and place.key is not None and not any(buffer.same_as(one) for one in self.changing)
            word = (buffer, self._known(place).key, width, each) if kept else None
            self.counter.shared_access(place.array, unit, width, each, word)
            waiting["shared_waits"] |= not store
            return self.counter.full_shape()
        waiting["prefetched_waits" if self.into_register else "global_waits"] |= not store
        if place.array is None:
            self.counter.scattered_access(str(buffer.name), store=store)
            return self.counter.full_shape()
        fixed = not any(buffer.same_as(one) for one in self.written)
        for lane in range(each):
            places = place.array + lane * stride
            self.counter.global_access(str(buffer.name), places, unit, store=store, fixed=fixed, width=width)
        mask = self.counter.mask
        return joined_shape(place.shape, () if mask is None else mask.shape) if fixed else self.counter.full_shape()


def _is_power_of_two(node: object) -> bool:
    """Whether a division by an expression is a product with its reciprocal, which is exact."""
    return isinstance(node, tirx.FloatImm) and abs(math.frexp(float(node.value))[0]) == 0.5


def function_cost(name: str) -> tuple[int, int]:
    """fp32 instructions and special-function instructions of a mathematical function, about."""
    plain = name.strip("_").removesuffix("f").removesuffix("_")
    for prefix in ("h2", "h"):
        if plain not in _FUNCTIONS and plain.removeprefix(prefix) in _FUNCTIONS:
            plain = plain.removeprefix(prefix)
    if plain in ("fmax", "fmin", "fab", "fabs", "floor", "ceil", "trunc", "round", "nearbyint", "reinterpret"):
        return 1, 0
    return _FUNCTIONS.get(plain, _OTHER_FUNCTION)


def _terms(node: object, added: bool = True) -> Iterator[tuple[bool, object]]:
    """The terms of a sum in the order of its text, each with whether it is added or subtracted."""
    operation = operation_of(node)
    if operation not in ("add", "sub"):
        yield added, node
        return
    yield from _terms(node.a, added)
    yield from _terms(node.b, added if operation == "add" else not added)


def _stored(node: tirx.Stmt) -> list[tirx.Var]:
    """The buffers that a statement stores to."""
    found: list[tirx.Var] = []
    structural_walk(node, (tirx.BufferStore, lambda store: found.append(store.buffer)))
    return found


def _has_barrier(node: tirx.Stmt) -> bool:
    found = False

    def see(call: tvm.ir.Call) -> None:
        nonlocal found
        found = found or getattr(call.op, "name", "") == "tirx.tvm_storage_sync"

    structural_walk(node, (tvm.ir.Call, see))
    return found


def _turns(node: tirx.For) -> int:
    """Turns of a loop and of those nested in it."""
    inner = 1

    def see(loop: tirx.For) -> None:
        nonlocal inner
        inner *= const_int(loop.extent) if isinstance(loop.extent, tirx.IntImm) else _UNROLLED_TURNS + 1

    structural_walk(node, (tirx.For, see))
    return inner


def _writes_results(node: tirx.Stmt) -> bool:
    """Whether a statement writes global memory."""
    return any(str(store.buffer.scope()) in ("", "global") for store in collect(node, tirx.BufferStore))


def _has_serial_loop(node: tirx.Stmt) -> bool:
    found = False

    def see(loop: tirx.For) -> None:
        nonlocal found
        found = found or (loop.kind != tirx.ForKind.UNROLLED and _turns(loop) > _UNROLLED_TURNS)

    structural_walk(node, (tirx.For, see))
    return found
