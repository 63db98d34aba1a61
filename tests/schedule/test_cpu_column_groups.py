"""Functions of elements behind the panels of a product whose columns they read in groups, against NumPy."""

from __future__ import annotations

import platform
import random
from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import te

import souffle
from souffle.reference import onnxruntime_outputs
from souffle.schedule.cpu import build_cpu, host_target, machine_of, takes_followers, use_cores

pytestmark = pytest.mark.sampled(4)

LANES = machine_of(host_target()).lanes("float32")
_FLAGS = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" and Path("/proc/cpuinfo").is_file() else ""
# Vectors of eight and sixteen registers, which a processor with wider ones runs, too.
NARROW = {
    cores: tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": cores})
    for cores in (1, 2, 3)
    if " avx2 " in _FLAGS and " fma " in _FLAGS
}


class Program:
    """A product and functions of its columns in groups, as TEs and in double precision."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.rows = tuple(rng.choice([1, 2, 3, 7, 13]) for _ in range(rng.randint(0, 2)))
        self.groups, self.units = rng.choice([2, 3, 4, 5]), LANES * rng.choice([1, 2, 3, 5, 8])
        steps, columns = rng.choice([1, 5, 16, 40]), self.groups * self.units
        # Whether the constant is of the columns alone: else of rows too, or of rows alone, or it has rows of its own.
        self.kind = rng.choice(["plain", "plain", "transposed", "batched", "left", "wide"]) if self.rows else "plain"
        first = self.rows[:1]
        shapes = [(*self.rows, steps), (steps, columns), (*self.rows, self.units)]
        if self.kind == "transposed":
            shapes[1] = (columns, steps)
        elif self.kind == "batched":
            shapes[1] = (*first, steps, columns)
        elif self.kind == "left":
            shapes[:2] = [(*self.rows[1:], steps, columns), (*first, steps)]
        elif self.kind == "wide":
            shapes[:2] = [(*self.rows[1:], steps), (*first, steps, columns)]
        self.steps = steps
        self.arrays = [numbers.standard_normal(shape).astype(np.float32) for shape in shapes]
        x, w, old = (te.placeholder(shape, name=name) for shape, name in zip(shapes, "xwo", strict=True))
        k = te.reduce_axis((0, steps), "k")

        def term(*at):
            head, c = at[:-1], at[-1]
            return {
                "plain": lambda: x[(*head, k)] * w[k, c],
                "transposed": lambda: x[(*head, k)] * w[c, k],
                "batched": lambda: x[(*head, k)] * w[head[0], k, c],
                "left": lambda: x[(*head[1:], k, c)] * w[head[0], k],
                "wide": lambda: x[(*head[1:], k)] * w[head[0], k, c],
            }[self.kind]()

        product = te.compute((*self.rows, columns), lambda *at: te.sum(term(*at), axis=k), name="product")
        a, b, c = (array.astype(float) for array in self.arrays)
        wide = np.einsum(
            {
                "plain": "...k,kc->...c",
                "transposed": "...k,ck->...c",
                "batched": "r...k,rkc->r...c",
                "left": "...kc,rk->r...c",
                "wide": "...k,rkc->r...c",
            }[self.kind],
            a,
            b,
        )
        if rng.random() < 0.5:
            plain = product
            product = te.compute(plain.shape, lambda *at: plain[at] * 0.5 + 1.0, name="scaled")
            wide = wide * 0.5 + 1.0
        parts = [wide[..., g * self.units : (g + 1) * self.units] for g in range(self.groups)]
        self.wanted, made = [], []
        for number in range(rng.randint(1, 3)):
            first, second = rng.choices(range(self.groups), k=2)
            before = rng.choice([old, *made])
            value = c if before is old else self.wanted[made.index(before)]
            made.append(self.follower(product, before, first, second, f"follower{number}"))
            one, other = parts[first], parts[second]
            self.wanted.append(1 / (1 + np.exp(-one)) * value + np.tanh(other))
        self.func = te.create_prim_func([x, w, old, *made])

    def follower(self, product, before, first, second, name):
        def element(*at):
            one, other = (product[(*at[:-1], at[-1] + group * self.units)] for group in (first, second))
            return te.sigmoid(one) * before[at] + te.tanh(other)

        return te.compute(before.shape, element, name=name)


def outputs(func, arrays, shapes, target, **options):
    use_cores(target)
    scheduled: dict = {}
    module = build_cpu({"f": func}, target, constants={"f": [1]}, scheduled=scheduled, **options)
    given = [*arrays, *(np.full(shape, np.nan, np.float32) for shape in shapes)]
    parameters = scheduled["f"].parameters
    placed = [tvm.runtime.tensor(given[at] if layout is None else layout.pack(given[at])) for at, layout in parameters]
    module.get_function("f")(*placed)
    found = {at: tensor.numpy() for tensor, (at, _) in zip(placed, parameters, strict=True)}
    return [found[len(arrays) + number] for number in range(len(shapes))]


@pytest.mark.parametrize("seed", range(56))
def test_random_functions_of_groups(seed):
    program = Program(seed)
    cores = 1 + seed % 3
    target = NARROW[cores] if seed % 4 == 3 and NARROW else host_target(cores)
    panels = program.units // machine_of(target).lanes("float32")
    taken = takes_followers(program.func, [1], target)
    if program.steps == 1 or panels < cores or program.kind == "left":
        assert not taken
    elif program.kind in ("plain", "transposed") and program.steps >= 16:
        # Of shorter sums packing may take longer than it saves.
        assert taken
    if program.kind == "wide" and len(program.rows) == 1 and program.rows[0] > 1:
        assert not taken  # its panels would be of rows and columns
    shapes = [(*program.rows, program.units)] * len(program.wanted)
    backwards = ["f"] if seed % 2 else []
    found = outputs(program.func, program.arrays, shapes, target, backwards=backwards)
    for result, wanted in zip(found, program.wanted, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=2e-4, atol=2e-4)


def cell(read, rows=1, units=2 * LANES, groups=2):
    """A function of a product of two groups of columns, which `read` gives an element of."""
    x, w = te.placeholder((rows, 8), name="x"), te.placeholder((8, groups * units), name="w")
    k = te.reduce_axis((0, 8), "k")
    product = te.compute((rows, groups * units), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k), name="product")
    out = te.compute((rows, units), lambda i, j: te.tanh(read(product, i, j)) + product[i, j], name="out")
    return te.create_prim_func([x, w, out])


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda p, i, j: p[i, j + LANES], "half a group away"),
        (lambda p, i, j: p[i, 2 * LANES - 1 - j], "from the end"),
        (lambda p, i, j: p[2 - i, j], "another row"),
        (lambda p, i, j: p[i, 2 * j], "every other column"),
        (lambda p, i, j: p[i, tvm.tirx.min(j + 1, 4 * LANES - 1)], "the next column"),
    ],
)
def test_what_other_threads_compute_is_waited_for(read, what):
    rng = np.random.default_rng(5)
    func = cell(read, rows=3)
    assert not takes_followers(func, [1], host_target()), what
    a, b = rng.standard_normal((3, 8)).astype(np.float32), rng.standard_normal((8, 4 * LANES)).astype(np.float32)
    (found,) = outputs(func, [a, b], [(3, 2 * LANES)], host_target(2))
    product = a.astype(float) @ b
    at = [(i, j, read(_Places(), i, j)) for i in range(3) for j in range(2 * LANES)]
    wanted = np.zeros((3, 2 * LANES))
    for i, j, (row, column) in at:
        wanted[i, j] = np.tanh(product[row, column]) + product[i, j]
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


class _Places:
    def __getitem__(self, at):
        return tuple(int(index.value) if hasattr(index, "value") else int(index) for index in at)


def test_groups_without_whole_vectors_are_computed_apart():
    func = cell(lambda p, i, j: p[i, j + 2 * LANES - 3], units=2 * LANES - 3)
    assert not takes_followers(func, [1], host_target())


@pytest.mark.parametrize(
    ("operator", "batch", "direction"),
    [("LSTM", 1, "bidirectional"), ("GRU", 3, "bidirectional"), ("LSTM", 3, "forward"), ("GRU", 1, "forward")],
)
def test_cells_are_computed_behind_their_products(operator, batch, direction):
    hidden, steps, size, ways = 3 * LANES, 5, 9, 1 + (direction == "bidirectional")
    gates, rng = 4 if operator == "LSTM" else 3, np.random.default_rng(batch)
    weights = {
        "w": rng.standard_normal((ways, gates * hidden, size)) * 0.3,
        "r": rng.standard_normal((ways, gates * hidden, hidden)) * 0.3,
        "b": rng.standard_normal((ways, 2 * gates * hidden)) * 0.3,
    }
    more = {"linear_before_reset": 1} if operator == "GRU" else {}
    node = helper.make_node(operator, ["x", *weights], ["y"], hidden_size=hidden, direction=direction, **more)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, batch, size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [steps, ways, batch, hidden])
    held = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph([node], "recurrent", [x], [y], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    given = rng.standard_normal((steps, batch, size)).astype(np.float32)
    wanted = onnxruntime_outputs(model, {"x": given})["y"]
    launches = {}
    for switches in ((), ("interleaving",)):
        network = souffle.compile(model, target="cpu", threads=2, disable=switches)
        np.testing.assert_allclose(network(given)["y"], wanted, rtol=1e-4, atol=1e-5)
        launches[switches] = len(network.plan.launches)
    assert launches[()] < launches[("interleaving",)]
