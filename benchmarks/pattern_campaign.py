"""Random patterns as stages that templates schedule, against NumPy on the CPU device.

``python -m benchmarks.pattern_campaign [--count 300] [--seed 0] [--batch 6] [--best] [--out FILE.json]``. A pattern is
drawn operation by operation: light and expensive element-wise ones, reductions along any axes, broadcasts, reshapes,
transpositions, slices and small products, of sizes with 1 and primes among them; any of them may be needed outside. Its
NumPy value is made beside it. Some data has NaN. Unless ``--best``, the template is any of a few and not the fastest.
Those of a batch are stages of one program, which runs fixed, checked, and shuffled on other grids; its certificate must
be PROVEN with the values.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from tvm import te, tirx

import souffle
from benchmarks.record import save_results
from souffle.cost import cost_device
from souffle.program import TEProgram
from souffle.runtime import Network
from souffle.schedule.stage import Stages
from souffle.stitching import TemplateError
from souffle.stitching.template_choice import Stitched, stitched

DEVICE = "A100-SXM4-40GB"
SIZES = (1, 2, 3, 5, 7, 8, 13, 31, 32, 33, 64, 97)
MOST_ELEMENTS = 4096


@dataclass
class Node:
    """A tensor and its value."""

    tensor: te.Tensor
    value: np.ndarray
    read: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of both."""
        return self.value.shape


@dataclass
class Pattern:
    """A random pattern: what is read, all that is computed, and what is needed of it."""

    number: int
    inputs: list[Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    needed: list[Node] = field(default_factory=list)

    def add(self, shape: tuple[int, ...], element: Callable[..., object], value: np.ndarray) -> Node:
        """One more operation."""
        made = te.compute(shape, element, name=f"p{self.number}_{len(self.nodes)}")
        self.nodes.append(Node(made, np.asarray(value, dtype=np.float64)))
        assert self.nodes[-1].shape == tuple(shape), (self.nodes[-1].shape, shape)
        return self.nodes[-1]


def draw(number: int, seed: int) -> Pattern:
    """A pattern by its seed."""
    rng = random.Random(seed)
    pattern = Pattern(number)
    data = np.random.default_rng(seed)
    for n in range(rng.randint(1, 3)):
        shape = _shape(rng)
        value = data.standard_normal(shape).astype(np.float32)
        if rng.random() < 0.2:
            value.reshape(-1)[data.integers(value.size)] = np.nan
        placeholder = te.placeholder(shape, name=f"x{number}_{n}")
        pattern.inputs.append(Node(placeholder, value))
    count = rng.randint(2, 12)
    while len(pattern.nodes) < count:
        # What was computed last is read most: chains are longer so.
        known = [*pattern.inputs, *pattern.nodes, *pattern.nodes[-2:], *pattern.nodes[-1:]]
        rng.choice(_OPERATIONS)(pattern, rng, rng.choice(known))
    ends = [node for node in pattern.nodes if not node.read]
    pattern.needed = ends + [node for node in pattern.nodes if node.read and rng.random() < 0.2]
    return pattern


def _shape(rng: random.Random) -> tuple[int, ...]:
    while True:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((1, 2, 2, 2, 3))))
        if prod(shape) <= MOST_ELEMENTS:
            return shape


def _light(pattern: Pattern, rng: random.Random, x: Node) -> None:
    x.read = True
    t = x.tensor
    kind = rng.randrange(3)
    if kind == 0:
        pattern.add(x.shape, lambda *i: t(*i) * 0.5 + 1.0, x.value * 0.5 + 1)
    elif kind == 1:
        pattern.add(x.shape, lambda *i: tirx.max(t(*i), tirx.const(0, "float32")), np.maximum(x.value, 0))
    else:
        pattern.add(x.shape, lambda *i: t(*i) * t(*i) - t(*i), x.value * x.value - x.value)


def _expensive(pattern: Pattern, rng: random.Random, x: Node) -> None:
    x.read = True
    t = x.tensor
    kind = rng.randrange(3)
    if kind == 0:
        pattern.add(x.shape, lambda *i: te.tanh(t(*i)), np.tanh(x.value))
    elif kind == 1:
        pattern.add(x.shape, lambda *i: te.exp(te.tanh(t(*i))), np.exp(np.tanh(x.value)))
    else:
        pattern.add(x.shape, lambda *i: te.rsqrt(t(*i) * t(*i) + 1.0), 1 / np.sqrt(x.value * x.value + 1))


def _binary(pattern: Pattern, rng: random.Random, x: Node) -> None:
    """With what has the same shape, or one that NumPy broadcasts to it, also along a middle axis."""
    fit = []
    for other in [*pattern.inputs, *pattern.nodes]:
        axes = _spread(other.shape, x.shape, rng)
        if axes is not None:
            fit.append((other, axes))
    other, axes = rng.choice(fit)
    x.read = other.read = True
    t, u = x.tensor, other.tensor
    ones = tuple(x.shape[a] if a in axes else 1 for a in range(len(x.shape)))
    spread = np.broadcast_to(other.value.reshape(ones), x.shape)
    kind = rng.randrange(3)

    def element(*i: tirx.Var) -> object:
        own, that = t(*i), u(*(i[a] for a in axes))
        return own + that if kind == 0 else own - that if kind == 1 else own * that

    value = x.value + spread if kind == 0 else x.value - spread if kind == 1 else x.value * spread
    pattern.add(x.shape, element, value)


def _spread(shape: tuple[int, ...], into: tuple[int, ...], rng: random.Random) -> tuple[int, ...] | None:
    """Axes of `into`, rising, that have the extents of `shape`."""
    found: list[tuple[int, ...]] = [()]
    for extent in shape:
        after = [(axes, range(axes[-1] + 1 if axes else 0, len(into))) for axes in found]
        found = [(*axes, a) for axes, places in after for a in places if into[a] == extent]
    return rng.choice(found) if found else None


def _reduce(pattern: Pattern, rng: random.Random, x: Node) -> None:
    if not x.shape:
        return
    x.read = True
    t, rank = x.tensor, len(x.shape)
    axes = sorted(rng.sample(range(rank), rng.choice((1, 1, 1, rank))))
    keeps = rng.random() < 0.4
    largest = rng.random() < 0.4
    ks = {a: te.reduce_axis((0, x.shape[a]), f"k{a}") for a in axes}
    left = [a for a in range(rank) if a not in axes]
    shape = tuple(1 if a in axes else x.shape[a] for a in range(rank)) if keeps else tuple(x.shape[a] for a in left)

    def element(*i: tirx.Var) -> object:
        own = {a: i[a] for a in left} if keeps else dict(zip(left, i, strict=True))
        read = t(*(ks[a] if a in ks else own[a] for a in range(rank)))
        return te.max(read, axis=list(ks.values())) if largest else te.sum(read, axis=list(ks.values()))

    value = x.value.max(tuple(axes)) if largest else x.value.sum(tuple(axes))
    made = pattern.add(shape, element, value.reshape(shape))
    if not largest:
        # So that values stay small: a mean.
        made.read, s, scale = True, made.tensor, 1.0 / prod(x.shape[a] for a in axes)
        pattern.add(shape, lambda *i: s(*i) * tirx.const(scale, "float32"), made.value * np.float32(scale))


def _broadcast(pattern: Pattern, rng: random.Random, x: Node) -> None:
    extent, place = rng.choice(SIZES), rng.randint(0, len(x.shape))
    shape = (*x.shape[:place], extent, *x.shape[place:])
    if prod(shape) > MOST_ELEMENTS or len(shape) > 4:
        return
    x.read = True
    t = x.tensor
    value = np.broadcast_to(np.expand_dims(x.value, place), shape)
    pattern.add(shape, lambda *i: t(*i[:place], *i[place + 1 :]), value)


def _transpose(pattern: Pattern, rng: random.Random, x: Node) -> None:
    if len(x.shape) < 2:
        return
    x.read = True
    order = rng.sample(range(len(x.shape)), len(x.shape))
    t = x.tensor
    shape = tuple(x.shape[a] for a in order)
    pattern.add(shape, lambda *i: t(*(i[order.index(a)] for a in range(len(order)))), x.value.transpose(order))


def _reshape(pattern: Pattern, rng: random.Random, x: Node) -> None:
    size = prod(x.shape)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    first = rng.choice(divisors)
    shape = rng.choice([(size,), (first, size // first), (*x.shape[:-1], 1, *x.shape[-1:])])
    x.read = True
    t = x.tensor

    def element(*i: tirx.Var) -> object:
        flat: object = tirx.const(0, "int32")
        for index, extent in zip(i, shape, strict=True):
            flat = flat * extent + index
        read = []
        for extent in reversed(x.shape):
            read.append(tirx.indexmod(flat, extent))
            flat = tirx.indexdiv(flat, extent)
        return t(*reversed(read))

    pattern.add(shape, element, x.value.reshape(shape))


def _slice(pattern: Pattern, rng: random.Random, x: Node) -> None:
    long = [a for a, extent in enumerate(x.shape) if extent > 2]
    if not long:
        return
    x.read = True
    axis = rng.choice(long)
    start, step = rng.randint(0, x.shape[axis] - 2), rng.choice((1, 1, 2))
    cut = x.value[tuple(slice(start, None, step) if a == axis else slice(None) for a in range(len(x.shape)))]
    t = x.tensor
    pattern.add(cut.shape, lambda *i: t(*(one * step + start if a == axis else one for a, one in enumerate(i))), cut)


def _product(pattern: Pattern, rng: random.Random, x: Node) -> None:
    """By what has the same axes but one, so that it sums over the last; also by itself."""
    if len(x.shape) < 2 or prod(x.shape) * x.shape[-2] > 16 * MOST_ELEMENTS:
        return
    like = (len(x.shape), x.shape[:-2], x.shape[-1])
    fit = [y for y in [*pattern.inputs, *pattern.nodes] if len(y.shape) > 1]
    other = rng.choice([y for y in fit if (len(y.shape), y.shape[:-2], y.shape[-1]) == like])
    *batch, rows, depth = x.shape
    columns = other.shape[-2]
    if prod(batch) * rows * columns > MOST_ELEMENTS:
        return
    x.read = other.read = True
    t, u, k = x.tensor, other.tensor, te.reduce_axis((0, depth), "k")
    shape = (*batch, rows, columns)
    value = x.value @ np.swapaxes(other.value, -1, -2)
    made = pattern.add(shape, lambda *i: te.sum(t(*i[:-1], k) * u(*i[:-2], i[-1], k), axis=[k]), value)
    made.read, s, scale = True, made.tensor, 1.0 / depth
    pattern.add(shape, lambda *i: s(*i) * tirx.const(scale, "float32"), made.value * np.float32(scale))


_OPERATIONS = (
    *(_light, _light, _light, _expensive, _expensive, _expensive, _binary, _binary, _binary, _binary),
    *(_reduce, _reduce, _reduce, _broadcast, _broadcast, _transpose, _reshape, _slice, _product),
)


def program_of(patterns: Sequence[Pattern]) -> TEProgram:
    """One program of all."""
    inputs = [node.tensor for pattern in patterns for node in pattern.inputs]
    return souffle.from_te(inputs, [node.tensor for p in patterns for node in p.needed], name="patterns")


class _Random:
    """Prices that mean nothing."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __call__(self, functions: Sequence[object]) -> float:
        return self.rng.random()


def stages_of(program: TEProgram, patterns: Sequence[Pattern], best: bool) -> tuple[list[Stitched], list[str]]:
    """Each pattern as a stage, and why some are none."""
    made, refused = [], []
    for pattern in patterns:
        tes = [one for one in program.tes if one.name.startswith(f"p{pattern.number}_")]
        any_of_four = {} if best else {"price": _Random(pattern.number), "most": 4}
        try:
            made.append(stitched(tes, program, cost_device(DEVICE), **any_of_four))
        except TemplateError as error:
            refused.append(f"{pattern.number}: {error}")
    return made, refused


def wrong(
    patterns: Sequence[Pattern], *, best: bool = False, verify: str = "values"
) -> tuple[list[str], list[str], list[Stitched]]:
    """What is not as NumPy has it or not proven, what was refused, and the stages."""
    program = program_of(patterns)
    made, refused = stages_of(program, patterns, best)
    if refused:
        left = {int(one.split(":")[0]) for one in refused}
        patterns = [pattern for pattern in patterns if pattern.number not in left]
        program = program_of(patterns)
        made, _ = stages_of(program, patterns, best)

    def hook(name: str, result: object) -> object:
        return Stages([one.stage for one in made]) if name == "schedule" else result

    options = {"target": "cuda", "arch": "sm_80", "device": "cpu", "cubin": False, "level": "V0", "hook": hook}
    net = souffle.compile(program, verify=verify, **options)
    found = [] if net.certificate.verdict == "PROVEN" else [f"{net.certificate.verdict}: {net.certificate}"]
    data = {node.tensor.op.name: node.value for pattern in patterns for node in pattern.inputs}
    runs = {
        "fixed": net,
        "checked": net.on("cpu", checked=True),
        "shuffled": Network(net.plan, device="cpu", order="shuffled", seed=1, blocks=3),
    }
    for mode, one in runs.items():
        given = {name: data[name] for name in (tensor.name for tensor in program.inputs)}
        results = one(given)
        for pattern, stage in zip(patterns, made, strict=True):
            for node in pattern.needed:
                name = node.tensor.op.name
                scale = np.max(np.abs(node.value[~np.isnan(node.value)]), initial=1.0)
                if not np.allclose(np.asarray(results[name]), node.value, 1e-4, 1e-5 * scale, equal_nan=True):
                    found.append(f"pattern {pattern.number} {name} {mode}: {stage.template}")
    return found, refused, made


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=6, help="patterns in one program")
    parser.add_argument("--best", action="store_true", help="the fastest template of each")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    start, bad, unfit, schemes, kinds = time.perf_counter(), [], [], Counter(), Counter()
    stages = requested = allocated = 0
    for first in range(arguments.seed, arguments.seed + arguments.count, arguments.batch):
        numbers = range(first, min(first + arguments.batch, arguments.seed + arguments.count))
        patterns = [draw(number, number) for number in numbers]
        try:
            found, refused, made = wrong(patterns, best=arguments.best)
        except Exception as error:
            # A campaign goes on, and says what it was.
            found, refused, made = [f"patterns {numbers}: {type(error).__name__}: {str(error)[:300]}"], [], []
        bad, unfit, stages = bad + found, unfit + refused, stages + len(made)
        for one in made:
            schemes.update(map(str, one.schemes))
            kinds[len(one.stage.outputs) > 1] += 1
            requested, allocated = requested + one.shared.requested, allocated + one.allocated
        print(*found, *refused, sep="\n", end="\n" if found or refused else "")
        print(f"{numbers.stop - arguments.seed} of {arguments.count}, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{stages} stages, {kinds[True]} of several results; {len(bad)} wrong, {len(unfit)} refused")
    print(", ".join(f"{count} {scheme}" for scheme, count in schemes.most_common()))
    print(f"shared memory: {requested} bytes requested, {allocated} allocated")
    if arguments.out:
        figures = {"stages": stages, "several": kinds[True], "schemes": dict(schemes)}
        figures |= {"requested": requested, "allocated": allocated, "wrong": bad, "refused": unfit}
        save_results(arguments.out, "benchmarks.pattern_campaign", [figures])


if __name__ == "__main__":
    main()
