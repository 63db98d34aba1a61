"""Products with the same weights as one on the CPU target: what is independent, what lies in place, and the results."""

from __future__ import annotations

import random
import re
import threading

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import souffle
from souffle.analysis import DependenceOrder
from souffle.placement import gathered_products
from tests.thorough import sized, some

FLOAT = np.float32


def model_of(nodes, inputs, outputs, weights):
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in each.items()]
        for each in (inputs, outputs)
    ]
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "tied", *ends, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def onnxruntime_of(model, given):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, given)


def stack_of(kind, *, layers, steps, batch, hidden, direction="forward"):
    """Recurrent layers upon each other; the output of the last one, and the last state of each."""
    rng = np.random.default_rng(layers * 100 + steps)
    gates, ways = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 1 + (direction == "bidirectional")
    nodes, weights, x, width = [], {}, "x", hidden
    weights["shape"] = np.array([steps, batch, ways * hidden], np.int64)
    outputs = {}
    for layer in range(layers):
        shapes = {"w": (gates * hidden, width), "r": (gates * hidden, hidden), "b": (2 * gates * hidden,)}
        for name, shape in shapes.items():
            weights[f"{name}{layer}"] = (rng.standard_normal((ways, *shape)) / hidden**0.5).astype(FLOAT)
        operands = [x, *(f"{name}{layer}" for name in "wrb")]
        options = {"linear_before_reset": layer % 2} if kind == "GRU" else {}
        results = [f"y{layer}", f"h{layer}"]
        nodes.append(
            helper.make_node(kind, operands, results, f"n{layer}", hidden_size=hidden, direction=direction, **options)
        )
        nodes.append(helper.make_node("Transpose", [f"y{layer}"], [f"t{layer}"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"t{layer}", "shape"], [f"x{layer}"]))
        outputs[f"h{layer}"] = (ways, batch, hidden)
        x, width = f"x{layer}", ways * hidden
    outputs[x] = (steps, batch, width)
    return model_of(nodes, {"x": (steps, batch, hidden)}, outputs, weights)


def joined(network_or_program) -> list[list[str]]:
    """The names of the products in each set that was joined."""
    decisions = getattr(network_or_program, "plan", network_or_program)
    return [
        d.subject.partition(":")[0].split(", ") for d in decisions.decisions if d.stage == "gathered" and d.accepted
    ]


@pytest.mark.parametrize(
    ("kind", "layers", "steps", "batch", "hidden", "direction"),
    some(
        [
            ("LSTM", 2, 2, 3, 7, "bidirectional"),
            ("LSTM", 1, 1, 1, 64, "forward"),
            ("GRU", 2, 9, 3, 64, "reverse"),
        ],
        [
            ("LSTM", 2, 2, 3, 7, "forward"),
            ("RNN", 2, 17, 1, 256, "forward"),
            ("LSTM", 2, 17, 1, 64, "bidirectional"),
            ("LSTM", 2, 2, 3, 7, "reverse"),
            ("GRU", 2, 17, 3, 64, "reverse"),
            ("GRU", 3, 5, 1, 7, "bidirectional"),
            ("RNN", 2, 70, 3, 16, "reverse"),
        ],
    ),
)
def test_recurrent_layers_give_what_onnxruntime_gives(kind, layers, steps, batch, hidden, direction):
    model = stack_of(kind, layers=layers, steps=steps, batch=batch, hidden=hidden, direction=direction)
    given = {"x": np.random.default_rng(1).standard_normal((steps, batch, hidden)).astype(FLOAT)}
    network = souffle.compile(model, target="cpu")
    wanted = onnxruntime_of(model, given)
    for _ in range(2):
        for one, other in zip(network(**given).values(), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_layer_reads_its_weights_for_inputs_once_and_its_steps_are_one_function():
    more, few = sized(7, 40), sized(5, 10)
    long, short = (
        souffle.compile(stack_of("LSTM", layers=2, steps=steps, batch=1, hidden=64), target="cpu")
        for steps in (more, few)
    )
    assert [len(each) for each in joined(long)] == [more, more]
    assert all(all(re.search(r"_t\d+_MatMul_x", name) for name in each) for each in joined(long))
    readers = [[n for n in launch.tes if "MatMul_x" in n] for launch in long.plan.launches]
    assert sum(map(bool, readers)) == 2
    assert len(long.plan.kernels) == len(short.plan.kernels)
    # Each step is a product and a cell; of what moves pieces nothing is called.
    assert sum(launch.tes[0].endswith("_more") for launch in long.plan.launches) == 0
    off = souffle.compile(stack_of("LSTM", layers=2, steps=few, batch=1, hidden=64), target="cpu", disable=["gathered"])
    assert not any(d.stage == "gathered" for d in off.plan.decisions)


def test_pieces_share_the_memory_of_their_whole():
    network = souffle.compile(stack_of("LSTM", layers=2, steps=10, batch=1, hidden=64), target="cpu")
    places = {b.name: (b.offset, b.nbytes) for b in network.plan.buffers if b.kind == "workspace"}
    start, nbytes = next(places[name] for name in places if name.startswith("n1_forward_t0_MatMul_x_x10"))
    pieces = sorted(at for name, (at, _) in places.items() if re.fullmatch(r"n1_forward_t\d_MatMul_x", name))
    assert pieces == [start + number * nbytes // 10 for number in range(10)]


class Tied:
    """A random network of products with few matrices, each of a value before; and its values by NumPy."""

    def __init__(self, seed: int, width: int = 128, count: int = 24) -> None:
        rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        rows = rng.choice([1, 2, 3])
        self.weights = {f"w{n}": self._drawn(width, width) for n in range(rng.randint(1, 3))}
        self.given = {f"x{n}": self._drawn(rows, width, by=1.0) for n in range(rng.randint(1, 3))}
        known = {name: array.astype(np.float64) for name, array in self.given.items()}
        needs: dict[str, set[str]] = {name: set() for name in known}
        self.product_of: dict[str, str] = {}
        nodes = []
        for number in range(count):
            left, weight, other = rng.choice(list(known)), rng.choice(list(self.weights)), rng.choice(list(known))
            product, result = f"p{number}", f"v{number}"
            nodes.append(helper.make_node("MatMul", [left, weight], [product], product))
            nodes.append(helper.make_node("Add", [product, other], [f"s{number}"], f"s{number}"))
            nodes.append(helper.make_node("Tanh", [f"s{number}"], [result], result))
            known[product] = known[left] @ self.weights[weight].astype(np.float64)
            known[result] = np.tanh(known[product] + known[other])
            needs[product], self.product_of[product] = {left, *needs[left]}, weight
            needs[result] = {product, other, *needs[product], *needs[other]}
        self.needs = needs
        outputs = {name: known[name] for name in {f"v{count - 1}", *rng.sample(list(known), 3)} - set(self.given)}
        self.wanted = outputs
        shapes = dict.fromkeys(outputs, (rows, width))
        self.model = model_of(nodes, dict.fromkeys(self.given, (rows, width)), shapes, self.weights)

    def _drawn(self, *shape, by=0.1):
        return (self.numbers.standard_normal(shape) * by).astype(FLOAT)


@pytest.mark.parametrize("seed", range(sized(3, 16)))
def test_random_networks_with_tied_weights(seed):
    tied = Tied(seed, width=random.Random(seed).choice([100, 128, 192]))
    network = souffle.compile(tied.model, target="cpu")
    for each in joined(network):
        assert len({tied.product_of[name] for name in each}) == 1
        assert not any(one in tied.needs[other] for one in each for other in each)
    found = network(**tied.given)
    for name, value in tied.wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def test_random_networks_are_joined_at_all():
    programs = [souffle.import_onnx(Tied(seed).model) for seed in range(8)]
    assert sum(d.accepted for program in programs for d in gathered_products(program)[1]) >= 8


def test_sets_that_need_each_other_are_not_both_joined():
    """``a1 → b1`` and ``b2 → a2``: either pair may be one product, but not both."""
    weights = {name: np.eye(256, dtype=FLOAT) for name in ("a", "b")}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["a1"], "a1"),
        helper.make_node("MatMul", ["y", "b"], ["b2"], "b2"),
        helper.make_node("Tanh", ["a1"], ["ta"]),
        helper.make_node("Tanh", ["b2"], ["tb"]),
        helper.make_node("MatMul", ["ta", "b"], ["b1"], "b1"),
        helper.make_node("MatMul", ["tb", "a"], ["a2"], "a2"),
        helper.make_node("Sub", ["b1", "a2"], ["z"]),
    ]
    model = model_of(nodes, {"x": (1, 256), "y": (1, 256)}, {"z": (1, 256)}, weights)
    network = souffle.compile(model, target="cpu")
    assert [sorted(each) for each in joined(network)] == [["a1", "a2"]]
    x, y = (np.full((1, 256), value, FLOAT) for value in (0.5, -2.0))
    np.testing.assert_allclose(network(x, y)["z"], np.tanh(x) - np.tanh(y), rtol=1e-5)


def test_products_that_depend_on_each_other_stay_apart():
    nodes, x = [], "x"
    for number in range(6):
        nodes.append(helper.make_node("MatMul", [x, "w"], [f"p{number}"]))
        nodes.append(helper.make_node("Relu", [f"p{number}"], [f"v{number}"]))
        x = f"v{number}"
    model = model_of(nodes, {"x": (1, 256)}, {x: (1, 256)}, {"w": np.eye(256, dtype=FLOAT)})
    program = souffle.import_onnx(model)
    same, decisions = gathered_products(program)
    assert same is program and not decisions


def test_many_rows_are_not_worth_a_copy():
    nodes = [helper.make_node("MatMul", [f"x{n}", "w"], [f"p{n}"]) for n in range(3)]
    nodes.append(helper.make_node("Sum", ["p0", "p1", "p2"], ["y"]))
    inputs = {f"x{n}": (120, 256) for n in range(3)}
    model = model_of(nodes, inputs, {"y": (120, 256)}, {"w": np.eye(256, dtype=FLOAT)})
    _, decisions = gathered_products(souffle.import_onnx(model))
    assert decisions and not any(d.accepted for d in decisions)


def test_what_is_not_a_number_stays_in_its_row():
    weights = {"w": np.random.default_rng(0).standard_normal((256, 256)).astype(FLOAT)}
    nodes = [helper.make_node("MatMul", [f"x{n}", "w"], [f"p{n}"]) for n in range(4)]
    nodes += [helper.make_node("Relu", [f"p{n}"], [f"y{n}"]) for n in range(4)]
    ends = [{f"{letter}{n}": (1, 256) for n in range(4)} for letter in "xy"]
    network = souffle.compile(model_of(nodes, *ends, weights), target="cpu")
    assert [len(each) for each in joined(network)] == [4]
    given = [np.ones((1, 256), FLOAT) for _ in range(4)]
    given[2][0, 5], given[3][0, 7] = np.nan, np.inf
    found = network(*given)
    assert np.isnan(found["y2"]).all() and np.isfinite(found["y0"]).all() and np.isfinite(found["y1"]).all()
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(found["y3"], np.maximum(given[3] @ weights["w"], 0), rtol=1e-5)


def test_calls_of_several_threads_have_memory_of_their_own():
    model = stack_of("LSTM", layers=2, steps=10, batch=1, hidden=64)
    network = souffle.compile(model, target="cpu")
    inputs = [np.random.default_rng(n).standard_normal((10, 1, 64)).astype(FLOAT) for n in range(4)]
    wanted = [network(x) for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            found = network(inputs[number])
            if any(not np.array_equal(found[name], value) for name, value in wanted[number].items()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("seed", range(8))
def test_sets_are_independent_and_as_few_as_the_longest_chain(seed):
    tied = Tied(seed)
    program = souffle.import_onnx(tied.model)
    order = DependenceOrder(program)
    products = [te_ for te_ in program.tes if te_.name in tied.product_of]
    sets = order.independent(products)
    assert sorted(t.name for each in sets for t in each) == sorted(t.name for t in products)
    for each in sets:
        assert not any(one.name in tied.needs[other.name] for one in each for other in each)
    chain: dict[str, int] = {}
    for te_ in products:
        before = [chain[name] for name in tied.needs[te_.name] if name in chain]
        chain[te_.name] = 1 + max(before, default=0)
    assert len(sets) == max(chain.values())
    for each in sets:
        order.join(each)  # graphlib raises where that makes a cycle
