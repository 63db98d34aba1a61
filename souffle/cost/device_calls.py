"""What the device functions take that lowered stages call by name: asynchronous copies and the tensor cores' own
instructions (:mod:`souffle.codegen.device_functions` has their texts).

An asynchronous copy reads global memory and writes shared memory in one instruction, past the registers. It is waited
for where the stage says so. A wait that lets ``n`` newer groups be on their way gives each copy the time of ``n + 1``
steps, so of a loop's turns one in ``n + 1`` has a latency that follows that of another; with copies issued between the
last barrier and the wait, each turn waits for its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad

from souffle.cost.counting import Counter
from souffle.index.arrays import Value
from souffle.program.products import TF32
from souffle.schedule.gpu.emit.async_copy import COMMIT_FUNCTION, COPY_FUNCTION, COPY_OR_ZERO_FUNCTION, WAIT_FUNCTION
from souffle.schedule.gpu.emit.mma_fragments import HALVES, WORDS
from souffle.schedule.gpu.emit.mma_instructions import (
    BEGIN_TF32_PRODUCT_FUNCTION,
    BYTE_PRODUCT_FUNCTION,
    BYTE_TYPES,
    COLUMNS,
    LOAD_FUNCTION,
    LOAD_TRANSPOSED_FUNCTION,
    LOAD_WORD_MATRICES_FUNCTION,
    LOAD_WORDS_FUNCTION,
    PRODUCT_FUNCTION,
    PUT_FUNCTION,
    ROUND_FUNCTION,
    ROWS,
    SCALE_FUNCTION,
    SPLIT_FUNCTION,
    TAKE_FUNCTION,
    TF32_PRODUCT_FUNCTION,
)
from souffle.tvm_compat import dtype_of

__all__ = ["DeviceCalls"]

_BYTE_PRODUCTS = [BYTE_PRODUCT_FUNCTION.format(*pair) for pair in itertools.product(BYTE_TYPES.values(), repeat=2)]

_MATRICES_BYTES = 16
"""Of the row that a thread of ``ldmatrix`` points to."""

_PAIR_BYTES = 8

_WORD_BYTES = 4

_PART_REGISTERS = 4
"""Of a thread, of a part of an operand."""


class DeviceCalls:
    """Counts calls of device functions.

    Parameters
    ----------
    counter : Counter
    value : callable
        From an expression to its value, its arithmetic counted.
    """

    def __init__(self, counter: Counter, value: Callable[[object], Value]) -> None:
        self.counter, self.value = counter, value
        self.copied = False
        self.in_step = False
        # Registers that were loaded from shared memory since the last use of others.
        self.fresh: set[tirx.Var] = set()

    def enter_loop(self) -> None:
        """A loop with barriers begins: what was copied before it is waited for once."""
        if self.copied:
            self.counter.total["global_waits"] += self.counter.turns
            self.copied = False
        self.fresh.clear()

    def barrier(self) -> None:
        """All threads meet: later copies are of the next step."""
        self.copied = False

    def count(self, text: str, arguments: Sequence[object]) -> bool:
        """Count a call, if it is one of these functions."""
        name, _, numbers = text.partition("<")
        given = [int(number) for number in re.findall(r"\d+", numbers)]
        handler = {
            COPY_FUNCTION: self._copy,
            COPY_OR_ZERO_FUNCTION: self._copy,
            COMMIT_FUNCTION: self._commit,
            WAIT_FUNCTION: self._wait,
            LOAD_FUNCTION: self._load,
            LOAD_TRANSPOSED_FUNCTION: self._load,
            LOAD_WORD_MATRICES_FUNCTION: self._load,
            LOAD_WORDS_FUNCTION: self._load_words,
            PRODUCT_FUNCTION: self._product,
            # As long as as many rows and columns of halves, of which it has twice as many products.
            **dict.fromkeys(_BYTE_PRODUCTS, self._product),
            TF32_PRODUCT_FUNCTION: self._tf32_product,
            BEGIN_TF32_PRODUCT_FUNCTION: self._tf32_product,
            ROUND_FUNCTION: self._round,
            SPLIT_FUNCTION: self._split,
            PUT_FUNCTION: self._put,
            TAKE_FUNCTION: self._take,
            SCALE_FUNCTION: self._scale,
        }.get(name)
        if handler is None:
            return False
        handler(given, arguments)
        return True

    def _copy(self, _: list[int], arguments: Sequence[object]) -> None:
        target, source = (_element(argument) for argument in arguments[:2])
        self.value(target.indices[0])
        place = self.value(source.indices[0])
        unit = tvm.DataType(dtype_of(source)).itemsize
        self.copied = True
        if len(arguments) > 2:
            with self.counter.where(self.value(arguments[2])):
                self._read(source, place, unit)
        else:
            self._read(source, place, unit)

    def _read(self, source: TensorLoad, place: Value, unit: int) -> None:
        # The bytes pass the data path of shared memory on their way into it alone, which takes as long as two loads.
        if place.array is None:
            self.counter.scattered_access(str(source.source.name), store=False)
        else:
            self.counter.global_access(str(source.source.name), place.array, unit, store=False, fixed=False)

    def _commit(self, _: list[int], __: Sequence[object]) -> None:
        self.counter.count("", self.counter.executions((), all_loops=True))

    def _wait(self, given: list[int], _: Sequence[object]) -> None:
        self.counter.count("", self.counter.executions((), all_loops=True))
        # The newest group may be what was just copied.
        steps = given[0] if self.copied else given[0] + 1
        if steps and self.in_step:
            self.counter.total["prefetched_waits"] += self.counter.turns / steps
        else:
            self.counter.total["global_waits"] += self.counter.turns

    def _load(self, _: list[int], arguments: Sequence[object]) -> None:
        self._shared(arguments[1], _MATRICES_BYTES, 1)
        self._loaded(arguments[0])

    def _load_words(self, _: list[int], arguments: Sequence[object]) -> None:
        self._shared(arguments[1], _WORD_BYTES, 2)
        self._loaded(arguments[0])

    def _loaded(self, registers: object) -> None:
        self.fresh.add(_element(registers).source)

    def _used(self, *registers: object) -> None:
        """Registers are read: what was loaded last is waited for, and all else by then is there."""
        if any(_element(one).source in self.fresh for one in registers):
            self.counter.waiting["shared_waits"] = True
        self.fresh.clear()

    def _product(self, _: list[int], arguments: Sequence[object]) -> None:
        self._multiply("tensor_fma", HALVES.inner, arguments)

    def _tf32_product(self, _: list[int], arguments: Sequence[object]) -> None:
        self._multiply("tf32_fma", WORDS[TF32].inner, arguments)

    def _multiply(self, unit: str, inner: int, arguments: Sequence[object]) -> None:
        self._used(*arguments[1:3])
        executions = self.counter.executions((), all_loops=True)
        self.counter.count("", executions)
        self.counter.total[unit] += executions.warps * ROWS * COLUMNS * inner

    def _round(self, _: list[int], arguments: Sequence[object]) -> None:
        self._used(arguments[0])
        self.counter.count("int32", self.counter.executions((), all_loops=True), _PART_REGISTERS)

    def _split(self, _: list[int], arguments: Sequence[object]) -> None:
        self._used(arguments[0])
        # Conversions have the rate of 32-bit integers (CUDA C++ Programming Guide, throughput of native instructions).
        executions = self.counter.executions((), all_loops=True)
        self.counter.count("int32", executions, 2 * _PART_REGISTERS)
        self.counter.count("fp32", executions, _PART_REGISTERS)

    def _put(self, _: list[int], arguments: Sequence[object]) -> None:
        self._shared(arguments[0], _PAIR_BYTES, 1)

    def _take(self, given: list[int], arguments: Sequence[object]) -> None:
        lanes, planes = given
        self._shared(arguments[1], 4 * lanes, planes)
        executions = self.counter.executions((), all_loops=True)
        self.counter.count("fp32", executions, lanes * (planes - 1))
        self.counter.waiting["shared_waits"] = True

    def _scale(self, _: list[int], arguments: Sequence[object]) -> None:
        self._used(arguments[0])
        # A multiply-add of pairs for each register.
        self.counter.count("fp32", self.counter.executions((), all_loops=True), 4)

    def _shared(self, pointer: object, width: int, times: int) -> None:
        element = _element(pointer)
        place = self.value(element.indices[0])
        unit = tvm.DataType(dtype_of(element)).itemsize
        self.counter.shared_access(place.array, unit, width, times)


def _element(pointer: object) -> TensorLoad:
    """What a pointer points to."""
    assert isinstance(pointer, tvm.ir.Call) and isinstance(pointer.args[0], TensorLoad), pointer
    return pointer.args[0]
