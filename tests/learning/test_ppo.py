"""Training: the objective against NumPy, problems whose optimum is known, and the same bits again."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("safetensors")

from souffle.learning import (  # noqa: E402
    HistoryRow,
    Policy,
    PolicyConfig,
    PolicyError,
    PpoConfig,
    Training,
    fine_tune,
    priorities,
    train,
)
from souffle.learning.objective import advantages, clipped_objective, rewards  # noqa: E402
from tests.learning.toys import Chain, Toy, by_chance, graph, ordering, random_graph  # noqa: E402


def small(features: int = 2, **sizes: int) -> Policy:
    sizes = {"width": 32, "graph_layers": 3, "attention_layers": 1, "segment": 32, "memory": 32, "levels": 8} | sizes
    return Policy(PolicyConfig(features, **sizes))


def test_the_objective_and_its_gradient_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    draws, count, levels, clip = 5, 7, 4, 0.2
    old, new = rng.normal(size=(2, count, levels))
    chosen = rng.integers(0, levels, (draws, count))
    advantage = rng.normal(size=draws)

    def log_softmax(values: np.ndarray) -> np.ndarray:
        return values - np.log(np.exp(values).sum(axis=1, keepdims=True))

    logits = torch.tensor(new, requires_grad=True)
    log_ratios = (logits.log_softmax(1) - torch.tensor(log_softmax(old))).gather(1, torch.tensor(chosen).T).T
    found = clipped_objective(log_ratios, torch.tensor(advantage), clip)
    found.backward()
    value, gradient, clipped = 0.0, np.zeros((count, levels)), 0
    probabilities = np.exp(log_softmax(new))
    for b in range(draws):
        for n in range(count):
            a = chosen[b, n]
            ratio = probabilities[n, a] / np.exp(log_softmax(old))[n, a]
            value += min(ratio * advantage[b], min(max(ratio, 1 - clip), 1 + clip) * advantage[b])
            if (advantage[b] > 0 and ratio > 1 + clip) or (advantage[b] < 0 and ratio < 1 - clip):
                clipped += 1
                continue
            gradient[n] += advantage[b] * ratio * (np.eye(levels)[a] - probabilities[n])
    assert 0 < clipped < draws * count
    assert math.isclose(found.item(), value / (draws * count))
    np.testing.assert_allclose(logits.grad.numpy(), gradient / (draws * count), atol=1e-12)


def test_rewards_are_logarithms_and_what_cannot_run_is_worst() -> None:
    np.testing.assert_allclose(rewards(np.array([1.0, 2.0, 4.0]), 2.0), [math.log(2), 0, -math.log(2)])
    found = rewards(np.array([1.0, np.inf, 4.0]), 2.0)
    np.testing.assert_allclose(found, [math.log(2), -3 * math.log(2), -math.log(2)])
    assert rewards(np.array([np.inf, 2.0, 2.0]), 2.0)[0] == pytest.approx(-0.1)
    assert not rewards(np.full(3, np.inf), 2.0).any()


def test_advantages_of_small_gains_count_as_much_and_rounding_counts_nothing() -> None:
    gained = np.array([0.3, 0.1, 0.2])
    np.testing.assert_allclose(advantages(gained), advantages(gained / 1000), atol=1e-12)
    assert advantages(gained).mean() == pytest.approx(0) and advantages(gained).std() == pytest.approx(1)
    assert not advantages(gained / 1e9).any()


def test_a_policy_learns_what_a_feature_says() -> None:
    environment = ordering(24, seed=0)
    start = small(graph_layers=0)
    trained = train(start, [environment], PpoConfig(updates=60, learning_rate=3e-3))
    mode = next(priorities(trained.policy, environment.features))
    asked = environment.evaluations
    assert asked == 60 * 16 == trained.history[-1].evaluations
    assert environment.time(mode) < 1.5 < by_chance(environment, asked)
    assert trained.history[-1].mean_seconds < trained.history[0].mean_seconds - 1
    best = trained.best["ordering 0"]
    assert best.seconds == environment.time(best.priorities) == trained.history[-1].best_seconds
    assert next(priorities(start, environment.features)).std() < 3, "what it began with is not changed"


def test_joint_training_finds_orders_and_carries_over_to_graphs_not_seen() -> None:
    environments = [Chain(40, seed) for seed in range(3)]
    trained = train(small(), environments, PpoConfig(updates=24, learning_rate=3e-3, entropy=0.001))
    for environment in environments:
        asked = environment.evaluations
        assert asked == 24 * 16
        found = environment.gained(trained.best[environment.features.name].seconds)
        assert found > 0.985 and found > environment.gained(by_chance(environment, asked))
    unseen = [Chain(80, seed) for seed in range(10, 14)]
    modes = [one.gained(one.time(next(priorities(trained.policy, one.features)))) for one in unseen]
    chance = [one.gained(by_chance(one, 384)) for one in unseen]
    assert min(modes) > 0.9 and np.mean(modes) > np.mean(chance) + 0.02
    tuned = fine_tune(trained.policy, unseen[0], PpoConfig(updates=5, entropy=1e-9))
    assert unseen[0].gained(tuned.best["chain 10"].seconds) > max(modes[0], 0.96)


CONFIG = PpoConfig(updates=7, draws=4, graphs=2, epochs=2, seed=3)


def _environments() -> list[Toy]:
    return [Chain(6, 0), Chain(9, 1), Chain(7, 2)]


def _tiny() -> Policy:
    return small(width=8, graph_layers=1, heads=2)


def _same(one: Training, other: Training) -> bool:
    def timeless(rows: tuple[HistoryRow, ...]) -> list[HistoryRow]:
        return [replace(row, wall_seconds=0) for row in rows]

    def best(training: Training) -> dict:
        return {name: (best.seconds, best.priorities.tolist()) for name, best in training.best.items()}

    parameters = zip(one.policy.state_dict().values(), other.policy.state_dict().values(), strict=True)
    same = all(torch.equal(mine, its) for mine, its in parameters)
    return same and timeless(one.history) == timeless(other.history) and best(one) == best(other)


@functools.cache
def _whole(updates: int) -> Training:
    return train(_tiny(), _environments(), replace(CONFIG, updates=updates))


@pytest.mark.parametrize(("every", "evaluation"), [(1, 1), (1, 17), (3, 30), (1, 55), (3, 55)])
def test_an_interrupted_training_goes_on_to_the_same_bits(every: int, evaluation: int, tmp_path: Path) -> None:
    whole = _whole(7)
    environments = _environments()
    asked = 0
    for one in environments:

        def time(values: np.ndarray, inner=one.time) -> float:
            nonlocal asked
            asked += 1
            if asked == evaluation:
                raise KeyboardInterrupt
            return inner(values)

        one.time = time
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(_tiny(), environments, CONFIG, checkpoint=path, every=every)
    # An update asks two graphs four times each.
    assert path.exists() == (evaluation > 8 * every)
    told: list[HistoryRow] = []
    resumed = train(_tiny(), _environments(), CONFIG, checkpoint=path, every=every, progress=told.append)
    assert _same(resumed, whole)
    assert len(told) < len(resumed.history) or evaluation <= 8 * every
    walls = [row.wall_seconds for row in resumed.history]
    assert walls == sorted(walls)
    assert _same(train(_tiny(), _environments(), CONFIG, checkpoint=path), whole), "there is nothing left to do"
    longer = replace(CONFIG, updates=9)
    assert _same(train(_tiny(), _environments(), longer, checkpoint=path), _whole(9))


def test_the_same_seed_gives_the_same_bits_and_pytorch_is_left_as_it_was() -> None:
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    one = train(_tiny(), _environments(), CONFIG)
    assert torch.get_num_threads() == 2 and not torch.are_deterministic_algorithms_enabled()
    assert (torch.get_rng_state() == before).all()
    torch.manual_seed(99)
    torch.set_num_threads(1)
    assert _same(one, train(_tiny(), _environments(), CONFIG))
    assert not _same(one, train(_tiny(), _environments(), replace(CONFIG, seed=4)))


def test_graphs_take_turns_and_no_more_is_asked_than_allowed() -> None:
    environments = _environments()
    trained = train(_tiny(), environments, replace(CONFIG, updates=100, evaluations=11))
    assert [one.evaluations for one in environments] == [11, 11, 11]
    by_update = [[row.graph for row in trained.history if row.update == update] for update in range(5)]
    assert all(len(set(graphs)) == 2 for graphs in by_update[:4]) and sum(map(len, by_update)) == 9
    assert trained.provenance["graphs"] == {"chain 0": 11, "chain 1": 11, "chain 2": 11}
    assert trained.provenance["updates"] == 5 and trained.provenance["hyperparameters"]["seed"] == 3


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, -math.inf])
def test_an_answer_that_is_no_time_is_an_error(value: float) -> None:
    environment = Toy(random_graph(5, 2), 1.0, lambda priorities: value)
    with pytest.raises(PolicyError, match=r"'random 5' takes \S+ s with some priorities, which is no time"):
        train(_tiny(), [environment], CONFIG)


def test_what_cannot_run_is_learnt_to_be_avoided() -> None:
    one = Toy(graph(np.ones((1, 2)), []), 2.0, lambda priorities: 1.0 if priorities[0] < 4 else math.inf)
    trained = train(_tiny(), [one], PpoConfig(updates=40, learning_rate=1e-2, entropy=1e-9))
    assert next(priorities(trained.policy, one.features))[0] < 4
    draws = [draw[0] for draw in priorities(trained.policy, one.features, 50)]
    assert np.mean(np.array(draws) < 4) > 0.9
    none = Toy(graph(np.ones((1, 2)), []), 2.0, lambda priorities: math.inf)
    trained = train(_tiny(), [none], CONFIG)
    assert trained.best == {} and trained.history[-1].mean_seconds == math.inf


def test_graphs_that_cannot_be_trained_on_are_refused() -> None:
    with pytest.raises(PolicyError, match="different names, not chain 0, chain 0"):
        train(_tiny(), [Chain(5, 0), Chain(6, 0)], CONFIG)
    with pytest.raises(PolicyError, match="not none"):
        train(_tiny(), [], CONFIG)
    with pytest.raises(PolicyError, match=r"'random 5' takes inf s without fusion"):
        train(_tiny(), [Toy(random_graph(5, 2), math.inf, lambda priorities: 1.0)], CONFIG)
    with pytest.raises(PolicyError, match="have 3 features, and the policy knows 2"):
        train(_tiny(), [Toy(random_graph(5, 3), 1.0, lambda priorities: 1.0)], CONFIG)
    with pytest.raises(PolicyError, match="two draws to compare"):
        PpoConfig(draws=1)
    with pytest.raises(PolicyError, match="above zero"):
        PpoConfig(learning_rate=math.nan)
    with pytest.raises(PolicyError, match="no number from zero"):
        PpoConfig(entropy=-0.1)
