"""The graphs of the two papers written by hand, random graphs, and brute force that shares no code with a planner."""

from __future__ import annotations

import itertools
import random

import numpy as np
from tvm import te, tirx

from souffle.program import Tensor, TEProgram
from souffle.stitching import Kind, Op, OpGraph, Read
from souffle.stitching.work import OpWork
from tests.testlib import Builder


def rows_map(b: Builder, function, x: Tensor, *rows: Tensor, name: str) -> Tensor:
    """Element by element; each of `rows` has one element a row."""
    return b.add(
        lambda p, *qs: te.compute(x.shape, lambda *i: function(p(*i), *(q(*i[:-1]) for q in qs))), x, *rows, name=name
    )


def layer_norm(rows: int = 512, columns: int = 768) -> TEProgram:
    """000 Figure 1: two means by reductions, an expensive reciprocal root of few elements, and light ones."""
    b = Builder()
    x = b.input(rows, columns)
    gamma, beta = (b.constant(np.ones(columns, np.float32)) for _ in range(2))
    mean = b.scaled(b.reduce(x, 1), 1.0 / columns)
    centred = rows_map(b, lambda v, m: v - m, x, mean, name="sub")
    variance = b.scaled(b.reduce(b.map(lambda v: v * v, centred, name="square"), 1), 1.0 / columns)
    inverse = b.map(lambda v: te.rsqrt(v + 1e-5), variance, name="rsqrt")
    normal = rows_map(b, lambda v, r: v * r, centred, inverse, name="normal")
    scaled = b.add(lambda p, q: te.compute(x.shape, lambda i, j: p(i, j) * q(j)), normal, gamma, name="gamma")
    return b.program(b.bias(scaled, beta))


def multi_interests(batch: int = 256, seen: int = 94, width: int = 32) -> TEProgram:
    """003 Figure 1: two batched gemms with a large tensor between them, nine element-wise TEs and two reductions."""
    b = Builder()
    q, k, v = b.input(batch, seen, width), b.input(batch, seen, width), b.input(batch, seen, width)

    def dot(x: Tensor, y: Tensor, transposed: bool) -> Tensor:
        inner, columns = x.shape[2], y.shape[1] if transposed else y.shape[2]

        def made(p, r):
            axis = te.reduce_axis((0, inner), "k")
            other = (lambda n, j: r(n, j, axis)) if transposed else (lambda n, j: r(n, axis, j))
            shape = (batch, x.shape[1], columns)
            return te.compute(shape, lambda n, i, j: te.sum(p(n, i, axis) * other(n, j), axis=[axis]))

        return b.add(made, x, y, name="dot")

    scores = b.scaled(dot(q, k, True), 0.25)
    shifted = rows_map(b, lambda s, m: s - m, scores, b.reduce(scores, 2, "max"), name="subtract")
    exponential = b.map(te.exp, shifted, name="exp")
    total = b.reduce(exponential, 2)
    divided = rows_map(b, lambda e, t: e / t, exponential, total, name="divide")
    log = b.map(te.log, total, name="log")
    masked = b.map(lambda e: tirx.max(e, tirx.const(1e-6, "float32")), divided, name="mask")
    added = b.map(lambda e: e + tirx.const(1e-6, "float32"), masked, name="add")
    result = dot(added, v, False)
    multiplied = b.scaled(result, 2.0)
    squared = b.map(lambda e: e * e, multiplied, name="square")
    return b.program(divided, log, multiplied, squared)


def cyclic() -> OpGraph:
    """Both papers' example: A -> B -> C and A -> C, of which A and C are to be fused and B cannot be."""
    large = 1 << 24
    return OpGraph(
        (
            op("A", reads=[("x", None, large)], written=large),
            op("B", Kind.WINDOW, reads=[("a", 0, large)], written=large),
            op("C", reads=[("a", 0, large), ("b", 1, large)], written=large, needed=True),
        )
    )


def op(name: str, kind: Kind = Kind.LIGHT, *, reads, written: int, needed: bool = False) -> Op:
    """A vertex of one axis."""
    found = tuple(Read(tensor, producer, size) for tensor, producer, size in reads)
    return Op(name, kind, (written // 4,), written, found, (), OpWork(written // 4, 0), needed=needed)


def random_graph(rng: random.Random, vertices: int, kinds=tuple(Kind)) -> OpGraph:
    """Vertices with random edges to earlier ones, of random kinds and sizes."""
    ops: list[Op] = []
    for number in range(vertices):
        written = rng.choice([64, 4096, 1 << 18, 1 << 22])
        producers = rng.sample(range(number), min(number, rng.randint(0, 3)))
        reads = [(p, p, ops[p].written) for p in producers] or [(f"x{rng.randint(0, 2)}", None, written)]
        ops.append(op(f"v{number}", rng.choice(kinds), reads=reads, written=written, needed=rng.random() < 0.2))
    return OpGraph(tuple(ops))


def contracted_has_cycle(edges: list[tuple[int, int]], groups: list[set[int]]) -> bool:
    """Whether the graph whose vertices are `groups` (and all others alone) has a cycle: by removing sources."""
    label = {v: f"g{place}" for place, group in enumerate(groups) for v in group}
    pairs = {(label.get(a, a), label.get(b, b)) for a, b in edges}
    pairs = {(a, b) for a, b in pairs if a != b}
    while pairs:
        targets = {b for _, b in pairs}
        kept = {(a, b) for a, b in pairs if a in targets}
        if kept == pairs:
            return True
        pairs = kept
    return False


def brute_force(graph: OpGraph, scores: dict[int, float]) -> float:
    """The highest total of disjoint patterns without a cycle, by trying every set of them."""
    edges = [(a, b) for a, b, _ in graph.edges]
    worth = {frozenset(v for v in range(len(graph.ops)) if p >> v & 1): s for p, s in scores.items() if s > 0}
    best = 0.0

    def extend(chosen: list[set[int]], rest: list[frozenset[int]], total: float) -> None:
        nonlocal best
        if total > best and not contracted_has_cycle(edges, chosen):
            best = total
        for place, pattern in enumerate(rest):
            others = [p for p in rest[place + 1 :] if not p & pattern]
            extend([*chosen, set(pattern)], others, total + worth[pattern])

    extend([], list(worth), 0.0)
    return best


def all_patterns(graph: OpGraph, kinds: set[Kind]) -> list[int]:
    """Every set of at least two vertices of `kinds`, as the bits of a number."""
    allowed = [n for n, one in enumerate(graph.ops) if one.kind in kinds]
    sizes = range(2, len(allowed) + 1)
    return [sum(1 << n for n in members) for size in sizes for members in itertools.combinations(allowed, size)]
