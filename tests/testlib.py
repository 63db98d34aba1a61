"""TE programs built by hand and at random, and the comparisons that tests share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from tvm import te, tirx

from souffle.program import TE, ExternTE, Origin, Tensor, TEProgram, make_te
from souffle.program.evaluate import evaluate
from souffle.runtime import Network

__all__ = [
    "ORDERS",
    "Builder",
    "assert_on_every_grid",
    "assert_same_function",
    "calls_made",
    "inputs_for",
    "random_program",
    "run_on_cpu_device",
]

T = TypeVar("T")

ORDERS = (
    {"order": "shuffled", "seed": 1, "blocks": 1},
    {"order": "shuffled", "seed": 2, "blocks": 3},
    {"order": "shuffled", "seed": 3, "blocks": 40},
    {"checked": True, "order": "shuffled", "seed": 4},
    {"checked": True, "blocks": 2},
)
"""How :func:`run_on_cpu_device` runs a network beside in order: all give the same bits where blocks wait rightly."""
Choose = Callable[[Sequence[T]], T]


class Builder:
    """A TE program in the making. Every method adds one TE and gives its tensor."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.constants: dict[Tensor, np.ndarray] = {}
        self.tes: list[TE | ExternTE] = []
        self._group = ""

    def input(self, *shape: int, dtype: str = "float32") -> Tensor:
        self.inputs.append(Tensor(f"x{len(self.inputs)}", shape, dtype))
        return self.inputs[-1]

    def constant(self, array: np.ndarray) -> Tensor:
        tensor = Tensor(f"w{len(self.constants)}", array.shape, str(array.dtype))
        self.constants[tensor] = array
        return tensor

    def grouped(self, name: str) -> Builder:
        """What is added from now on belongs to one operator-fusion group; ``""`` gives each TE its own."""
        self._group = name
        return self

    def add(self, compute: Callable[..., te.Tensor], *tensors: Tensor, name: str = "t") -> Tensor:
        """The TE that ``compute`` makes of placeholders for `tensors`."""
        placeholders = [te.placeholder(t.shape, t.dtype, name=f"p{i}") for i, t in enumerate(tensors)]
        op = compute(*placeholders).op
        label = f"{name}{len(self.tes)}"
        origin = Origin((label,), (name.capitalize(),), self._group or label)
        reads = list(zip(placeholders, tensors, strict=True))
        self.tes.append(make_te(label, list(op.axis), list(op.body), reads, origin))
        return self.tes[-1].outputs[0]

    def map(self, function: Callable, *tensors: Tensor, name: str = "map") -> Tensor:
        """Element by element, over tensors of one shape."""
        return self.add(
            lambda *ps: te.compute(ps[0].shape, lambda *i: function(*(p(*i) for p in ps))), *tensors, name=name
        )

    def relu(self, x: Tensor) -> Tensor:
        return self.map(lambda v: tirx.max(v, tirx.const(0, x.dtype)), x, name="relu")

    def tanh(self, x: Tensor) -> Tensor:
        """An expensive expression; rounded, so that an integer gives an integer on every machine."""
        return self.map(lambda v: te.round(te.tanh(v) * 4.0), x, name="tanh")

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        return self.map(lambda a, b: a + b, x, y, name="plus")

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return self.map(lambda v: v * tirx.const(factor, x.dtype), x, name="scale")

    def bias(self, x: Tensor, b: Tensor) -> Tensor:
        """`b`, of one dimension, added along the last axis."""
        return self.add(lambda p, q: te.compute(x.shape, lambda *i: p(*i) + q(i[-1])), x, b, name="bias")

    def broadcast(self, x: Tensor, extent: int) -> Tensor:
        """A new first axis."""
        return self.add(lambda p: te.compute((extent, *x.shape), lambda g, *i: p(*i)), x, name="broadcast")

    def reshape(self, x: Tensor, *shape: int) -> Tensor:
        def element(p: te.Tensor, index: Sequence) -> object:
            flat = 0
            for i, extent in zip(index, shape, strict=True):
                flat = flat * extent + i
            source = []
            for extent in reversed(x.shape):
                source.insert(0, flat % extent)
                flat = flat // extent
            return p(*source)

        return self.add(lambda p: te.compute(shape, lambda *i: element(p, i)), x, name="reshape")

    def transpose(self, x: Tensor, *order: int) -> Tensor:
        shape = tuple(x.shape[axis] for axis in order)

        def element(p: te.Tensor, index: Sequence) -> object:
            source = [index[order.index(axis)] for axis in range(len(order))]
            return p(*source)

        return self.add(lambda p: te.compute(shape, lambda *i: element(p, i)), x, name="transpose")

    def slice(self, x: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
        shape = [*x.shape]
        shape[axis] = -(-(stop - start) // step)

        def element(p: te.Tensor, index: tuple) -> object:
            return p(*index[:axis], index[axis] * step + start, *index[axis + 1 :])

        return self.add(lambda p: te.compute(shape, lambda *i: element(p, i)), x, name="slice")

    def pad(self, x: Tensor, axis: int, before: int, after: int) -> Tensor:
        shape, extent = [*x.shape], x.shape[axis]
        shape[axis] += before + after

        def element(p: te.Tensor, index: tuple) -> object:
            at = index[axis]
            inside = tirx.all(at >= before, at < before + extent)
            value = p(*index[:axis], at - before, *index[axis + 1 :])
            return tirx.if_then_else(inside, value, tirx.const(0, x.dtype))

        return self.add(lambda p: te.compute(shape, lambda *i: element(p, i)), x, name="pad")

    def concat(self, x: Tensor, y: Tensor, axis: int) -> Tensor:
        shape, extent = [*x.shape], x.shape[axis]
        shape[axis] += y.shape[axis]

        def element(p: te.Tensor, q: te.Tensor, index: tuple) -> object:
            at = index[axis]
            other = q(*index[:axis], at - extent, *index[axis + 1 :])
            return tirx.if_then_else(at < extent, p(*index), other)

        return self.add(lambda p, q: te.compute(shape, lambda *i: element(p, q, i)), x, y, name="concat")

    def gather(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rows of `x` that the integers of `rows` choose."""
        shape = (*rows.shape, *x.shape[1:])
        return self.add(lambda p, r: te.compute(shape, lambda i, *rest: p(r(i), *rest)), x, rows, name="gather")

    def reduce(self, x: Tensor, axis: int, kind: str = "sum") -> Tensor:
        shape = tuple(extent for a, extent in enumerate(x.shape) if a != axis)
        combine = {"sum": te.sum, "max": te.max}[kind]

        def made(p: te.Tensor) -> te.Tensor:
            k = te.reduce_axis((0, x.shape[axis]), "k")
            return te.compute(shape, lambda *i: combine(p(*i[:axis], k, *i[axis:]), axis=[k]))

        return self.add(made, x, name=kind)

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """``x[..., k] * w[k, n]``, summed over k."""

        def made(p: te.Tensor, q: te.Tensor) -> te.Tensor:
            k = te.reduce_axis((0, w.shape[0]), "k")
            return te.compute((*x.shape[:-1], w.shape[1]), lambda *i: te.sum(p(*i[:-1], k) * q(k, i[-1]), axis=[k]))

        return self.add(made, x, w, name="matmul")

    def extern_sort(self, x: Tensor) -> Tensor:
        """An operator that is no TE: each row of `x` sorted, by one thread for each row."""
        rows, columns = x.shape
        label = f"sort{len(self.tes)}"
        func = _sort_function(rows, columns).with_attr("global_symbol", "main")
        output = Tensor(label, x.shape, x.dtype)
        self.tes.append(ExternTE(label, func, (x,), (output,), Origin((label,), ("Sort",), label)))
        return output

    def program(self, *outputs: Tensor) -> TEProgram:
        """The program that computes `outputs`; TEs that none of them needs are dropped."""
        empty = TEProgram(
            tuple(self.inputs),
            outputs,
            (),
            dict(self.constants),
            tuple(f"in{i}" for i in range(len(self.inputs))),
            tuple(f"out{i}" for i in range(len(outputs))),
        )
        return empty.with_tes(self.tes)


def _sort_function(rows: int, columns: int) -> tirx.PrimFunc:
    source = te.placeholder((rows, columns), "float32", name="source")
    rank = te.reduce_axis((0, columns), "rank")

    def smaller(i, j, k):
        tie = tirx.all(source[i, k] == source[i, j], k < j)
        return tirx.Select(tirx.any(source[i, k] < source[i, j], tie), 1, 0)

    place = te.compute((rows, columns), lambda i, j: te.sum(smaller(i, j, rank), axis=[rank]), name="place")
    pick = te.reduce_axis((0, columns), "pick")
    smallest = tirx.min_value("float32")
    sorted_ = te.compute(
        (rows, columns),
        lambda i, j: te.max(tirx.Select(place[i, pick] == j, source[i, pick], smallest), axis=[pick]),
        name="sorted",
    )
    return te.create_prim_func([source, sorted_])


_LARGEST = 1024.0
"""Values past this are scaled down, so that sums and products stay whole numbers that float32 holds exactly."""

_MOST_ELEMENTS = 600


class _Random:
    """Adds random TEs to a builder, and keeps a bound of each tensor's magnitude."""

    def __init__(self, choose: Choose, rng: np.random.Generator) -> None:
        self.choose, self.rng = choose, rng
        self.builder = Builder()
        self.bound: dict[Tensor, float] = {}

    def put(self, tensor: Tensor, bound: float) -> Tensor:
        if bound > _LARGEST:
            tensor = self.builder.map(lambda v: tirx.max(tirx.min(v, 8.0), -8.0), tensor, name="clip")
            bound = 8.0
        self.bound[tensor] = bound
        return tensor

    def weights(self, *shape: int) -> Tensor:
        return self.builder.constant(self.rng.integers(-3, 4, shape).astype(np.float32))

    def step(self) -> None:
        b, choose, live = self.builder, self.choose, list(self.bound)
        x = choose(live[-4:])
        bound = self.bound[x]
        kinds = ["relu", "scale", "tanh", "binary", "bias", "reshape", "transpose", "slice", "pad", "sum", "max"]
        kinds += ["matmul", "branches", "branches", "gather", "concat"]
        if x.size * 2 <= _MOST_ELEMENTS:
            kinds.append("broadcast")
        kind, axis = choose(kinds), choose(range(len(x.shape)))
        last = x.shape[-1]
        if kind == "relu":
            self.put(b.relu(x), bound)
        elif kind == "scale":
            self.put(b.scaled(x, -2.0), 2 * bound)
        elif kind == "tanh":
            self.put(b.tanh(x), 4.0)
        elif kind == "binary":
            other = choose([t for t in live if t.shape == x.shape])
            if choose((True, False)):
                self.put(b.plus(x, other), bound + self.bound[other])
            else:
                self.put(b.map(lambda u, v: u * v, x, other, name="times"), bound * self.bound[other])
        elif kind == "bias":
            self.put(b.bias(x, self.weights(last)), bound + 3)
        elif kind == "reshape":
            divisors = [d for d in range(1, x.size + 1) if x.size % d == 0]
            first = choose(divisors)
            self.put(b.reshape(x, *choose(((x.size,), (first, x.size // first), (x.size // first, 1, first)))), bound)
        elif kind == "transpose":
            rank = len(x.shape)
            self.put(b.transpose(x, *choose(([*range(rank)][::-1], [*range(1, rank), 0]))), bound)
        elif kind == "slice":
            start = choose(range((x.shape[axis] + 1) // 2))
            self.put(b.slice(x, axis, start, x.shape[axis], choose((1, 2))), bound)
        elif kind == "pad" and x.size * 2 <= _MOST_ELEMENTS:
            self.put(b.pad(x, axis, choose((0, 1)), choose((1, 2))), bound)
        elif kind in ("sum", "max") and len(x.shape) > 1:
            self.put(b.reduce(x, axis, kind), bound * (x.shape[axis] if kind == "sum" else 1))
        elif kind == "matmul":
            self.put(b.matmul(x, self.weights(last, choose((1, 5, 8)))), 3 * bound * last)
        elif kind == "branches":
            self._branches(x, choose((2, 3)))
        elif kind == "gather":
            rows = self.rng.integers(0, x.shape[0], choose((1, 4))).astype(np.int32)
            self.put(b.gather(x, b.constant(rows)), bound)
        elif kind == "concat" and x.size * 2 <= _MOST_ELEMENTS:
            self.put(b.concat(x, b.relu(x), axis), bound)
        elif kind == "broadcast":
            self.put(b.broadcast(x, 2), bound)

    def _branches(self, x: Tensor, count: int) -> None:
        """Isomorphic TEs over one tensor, as the heads of an attention or the gates of a recurrent cell."""
        b, last = self.builder, x.shape[-1]
        kind = self.choose(("matmul", "bias", "slice"))
        if kind == "slice" and last < count:
            kind = "bias"
        parts = []
        for number in range(count):
            if kind == "matmul":
                parts.append(self.put(b.matmul(x, self.weights(last, 4)), 3 * self.bound[x] * last))
            elif kind == "bias":
                parts.append(self.put(b.bias(x, self.weights(last)), self.bound[x] + 3))
            else:
                width = last // count
                part = b.slice(x, len(x.shape) - 1, number * width, (number + 1) * width)
                parts.append(self.put(b.tanh(part), 4.0))
        joined = parts[0]
        for part in parts[1:]:
            bound = self.bound[joined] + self.bound[part]
            joined = self.put(b.plus(joined, part), bound)


def random_program(choose: Choose, steps: int, seed: int = 0) -> TEProgram:
    """A random TE program over small whole numbers in float32, so that every order of summation gives the same bits.

    Parameters
    ----------
    choose : callable
        Picks one of a sequence: ``random.Random(seed).choice``, or a draw of hypothesis.
    steps : int
        About how many TEs.
    seed : int
        Of the constants.
    """
    random = _Random(choose, np.random.default_rng(seed))
    shape = choose(((4, 6), (3, 5), (2, 3, 4), (7,), (1, 8)))
    random.put(random.builder.input(*shape), 4.0)
    for _ in range(steps):
        random.step()
    live = list(random.bound)[1:]
    if not live:
        live = [random.put(random.builder.relu(random.builder.inputs[0]), 4.0)]
    outputs = dict.fromkeys((live[-1], choose(live)))
    return random.builder.program(*outputs)


def inputs_for(program: TEProgram, seed: int = 0) -> dict[str, np.ndarray]:
    """Whole numbers from -4 to 4, in the inputs' types."""
    rng = np.random.default_rng(seed)
    named = zip(program.input_names, program.inputs, strict=True)
    return {name: np.asarray(rng.integers(-4, 5, tensor.shape)).astype(tensor.dtype) for name, tensor in named}


def assert_same_function(one: TEProgram, other: TEProgram, seed: int = 0) -> None:
    """Both give the same bits for the same whole numbers."""
    inputs = inputs_for(one, seed)
    expected, found = evaluate(one, inputs), evaluate(other, inputs)
    assert list(expected) == list(found)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def calls_made(work: Callable[[], object], within: str = "") -> int:
    """How many functions `work` calls: what its time grows with, and equal on every machine.

    With `within`, only those written in Python in a file whose path ends so.
    """
    calls = 0

    def count(frame, event: str, argument) -> None:
        nonlocal calls
        if within:
            calls += event == "call" and frame.f_code.co_filename.endswith(within)
        else:
            calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def in_threads(work: Sequence[Callable[[], object]]) -> list[BaseException]:
    """Do some work at the same time, a thread for each; what went wrong."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def run_on_cpu_device(plan, inputs: dict[str, np.ndarray], **options) -> dict[str, np.ndarray]:
    """A plan's emitted CUDA text on the CPU."""
    return {name: np.asarray(value) for name, value in Network(plan, device="cpu", **options)(inputs).items()}


def assert_on_every_grid(plan, program: TEProgram) -> None:
    """A plan computes, in each of `ORDERS`, what its program does: the same numbers."""
    inputs = inputs_for(program)
    expected = evaluate(program, inputs)
    for options in ORDERS:
        found = run_on_cpu_device(plan, inputs, **options)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=str(options))
