"""The network: shapes, what a vertex sees, relative attention against a loop, and priorities from a policy."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("safetensors")

from souffle.learning import GraphFeatures, Policy, PolicyConfig, PolicyError, priorities  # noqa: E402
from souffle.learning.attention import RelativeAttention  # noqa: E402
from tests.learning.toys import graph, random_graph  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def small(features: int = 3, seed: int = 0, **sizes: int) -> Policy:
    """A policy whose logits differ before any training."""
    sizes = {
        "width": 16,
        "graph_layers": 2,
        "attention_layers": 1,
        "heads": 2,
        "segment": 4,
        "memory": 4,
        "levels": 8,
    } | sizes
    policy = Policy(PolicyConfig(features, **sizes), seed)
    with torch.no_grad():
        policy.head.weight *= 100
    return policy


def logits_of(policy: Policy, features: GraphFeatures) -> np.ndarray:
    with torch.no_grad():
        return policy(features).numpy()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 50])
@pytest.mark.parametrize("memory", [0, 3, 4, 9])
def test_shapes(count: int, memory: int) -> None:
    found = logits_of(small(memory=memory, levels=5), random_graph(count))
    assert found.shape == (count, 5) and np.isfinite(found).all()


def test_a_graph_without_edges_and_a_policy_without_layers() -> None:
    assert logits_of(small(), graph(np.ones((6, 3)), [])).shape == (6, 8)
    assert logits_of(small(graph_layers=0, attention_layers=0), random_graph(6)).shape == (6, 8)


def test_the_default_policy_is_small_and_begins_undecided() -> None:
    policy = Policy(PolicyConfig(32))
    assert 100_000 < sum(value.numel() for value in policy.parameters()) < 150_000
    chances = np.exp(logits_of(policy, random_graph(300, 32)))
    chances /= chances.sum(axis=1, keepdims=True)
    assert np.abs(chances - 1 / policy.config.levels).max() < 0.01


def _changed(policy: Policy, vertex: int, count: int = 12) -> list[int]:
    """Vertices whose logits another feature of a vertex changes; no edges."""
    nodes = np.random.default_rng(0).normal(size=(count, 3))
    before = logits_of(policy, graph(nodes, []))
    nodes[vertex] += 1
    return np.flatnonzero((logits_of(policy, graph(nodes, [])) != before).any(axis=1)).tolist()


def test_a_segment_sees_the_one_before_through_memory_alone() -> None:
    assert _changed(small(graph_layers=0), 1) == [*range(0, 8)]
    assert _changed(small(graph_layers=0), 9) == [*range(8, 12)], "not before"
    assert _changed(small(graph_layers=0, memory=0), 1) == [*range(0, 4)]
    assert _changed(small(graph_layers=0, memory=2), 1) == [*range(0, 4)]
    assert _changed(small(graph_layers=0, memory=2), 2) == [*range(0, 8)]
    assert _changed(small(graph_layers=0, memory=8), 1) == [*range(0, 12)]
    assert _changed(small(graph_layers=0, attention_layers=2), 1) == [*range(0, 12)], "two layers reach twice as far"


def test_no_gradient_passes_through_memory() -> None:
    torch.manual_seed(0)
    attention = RelativeAttention(8, 2, segment=4, memory=4)
    hidden = torch.randn(8, 8, requires_grad=True)
    attention(hidden)[4:].square().sum().backward()
    assert not hidden.grad[:4].any() and hidden.grad[4:].all()


@pytest.mark.parametrize(("count", "segment", "memory"), [(11, 4, 3), (8, 4, 4), (9, 2, 5), (3, 8, 8), (1, 4, 4)])
def test_relative_attention_is_that_of_a_loop(count: int, segment: int, memory: int) -> None:
    torch.manual_seed(1)
    width, heads = 8, 2
    attention = RelativeAttention(width, heads, segment, memory)
    with torch.no_grad():
        attention.content_bias.normal_()
        attention.position_bias.normal_()
        hidden = torch.randn(count, width)
        found = attention(hidden)
        query, position = attention.query(hidden).view(count, heads, -1), attention.position
        key, value = (part.view(count, heads, -1) for part in attention.key_value(hidden).chunk(2, dim=1))
        frequencies = [10_000 ** (-2 * number / width) for number in range(width // 2)]
        for i in range(count):
            first = i // segment * segment
            seen = range(max(0, first - memory), min(count, first + segment))
            read = []
            for head in range(heads):
                scores = []
                for j in seen:
                    angles = [(i - j) * frequency for frequency in frequencies]
                    encoding = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
                    relative = position(encoding).view(heads, -1)[head]
                    content = (query[i, head] + attention.content_bias[head]) @ key[j, head]
                    scores.append(content + (query[i, head] + attention.position_bias[head]) @ relative)
                weights = (torch.stack(scores) / math.sqrt(width // heads)).softmax(0)
                read.append(sum(weight * value[j, head] for weight, j in zip(weights, seen, strict=True)))
            torch.testing.assert_close(found[i], attention.out(torch.cat(read)), rtol=1e-4, atol=1e-5)


def test_the_graph_network_knows_the_ends_and_the_weights_of_edges() -> None:
    policy = small(attention_layers=0, graph_layers=1)
    nodes = np.random.default_rng(0).normal(size=(4, 3))
    chain = logits_of(policy, graph(nodes, [(0, 1), (1, 2)]))
    heavy = logits_of(policy, graph(nodes, [(0, 1), (1, 2)], np.array([1.0, 2.0])))
    assert (chain[0] == heavy[0]).all() and (chain[1:3] != heavy[1:3]).any(axis=1).all()
    assert (chain[3] == heavy[3]).all(), "no edge leads there"
    equal = np.ones((2, 3))
    producer, consumer = logits_of(policy, graph(equal, [(0, 1)]))
    assert np.abs(producer - consumer).max() > 1e-3


def test_another_numbering_changes_what_it_must() -> None:
    """Of the graph network nothing but the order; the attention looks at the order itself. Edges have none."""
    rng = np.random.default_rng(3)
    features = random_graph(20)
    nodes, edges, weights = features.nodes, features.edges, features.edge_weights
    # Another topological order: ready vertices by chance.
    order: list[int] = []
    while len(order) < len(nodes):
        ready = [v for v in range(len(nodes)) if v not in order and set(edges[0][edges[1] == v]) <= set(order)]
        order.append(int(rng.choice(ready)))
    place = np.argsort(order)
    other = GraphFeatures("other", nodes[order], place[edges], weights)
    graph_only = small(attention_layers=0)
    found = logits_of(graph_only, other)
    np.testing.assert_allclose(found, logits_of(graph_only, features)[order], rtol=1e-4, atol=1e-5)
    policy = small()
    before = logits_of(policy, features)
    assert np.abs(logits_of(policy, other) - before[order]).max() > 1e-3
    shuffled = rng.permutation(len(weights))
    same = GraphFeatures("same", nodes, np.ascontiguousarray(edges[:, shuffled]), weights[shuffled])
    np.testing.assert_allclose(logits_of(policy, same), before, rtol=1e-4, atol=1e-5)


def test_seeds_make_policies_and_leave_pytorch_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = small(seed=1), small(seed=1), small(seed=2)
    assert (torch.get_rng_state() == before).all()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.enter.weight, other.enter.weight)


def test_priorities_are_the_mode_and_then_draws() -> None:
    policy, features = small(), random_graph(30)
    mode, *draws = priorities(policy, features, samples=200, seed=4)
    logits = logits_of(policy, features).astype(float)
    assert (mode == logits.argmax(axis=1)).all() and mode.dtype == np.int64 and len(draws) == 199
    shares = np.stack([(np.stack(draws) == level).mean(axis=0) for level in range(8)], axis=1)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.abs(shares - chances).max() < 0.15
    again = [*priorities(policy, features, samples=200, seed=4)]
    assert (np.stack(again) == np.stack([mode, *draws])).all()
    assert (np.stack([*priorities(policy, features, 200, seed=5)][1:]) != np.stack(draws)).any()
    assert [*priorities(policy, features, samples=0)] == []


def test_another_number_of_features_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"'random 5' have 4 features, and the policy knows 3; train one"):
        next(priorities(small(), random_graph(5, features=4)))


@pytest.mark.parametrize(
    "sizes", [{"width": 10**9}, {"levels": 1}, {"heads": 3}, {"segment": 1}, {"memory": -1}, {"width": 64.0}]
)
def test_sizes_out_of_bounds_are_refused(sizes: dict) -> None:
    with pytest.raises(PolicyError, match=next(iter(sizes))):
        PolicyConfig(3, **sizes)
