"""Which tensors stay in shared memory while there is room: the paper's rule and Belady's, against every choice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest

from souffle.kernel.reuse_policy import POLICIES, Policy, Reuse, belady, lru


def fits(reuses: Sequence[Reuse], served: Sequence[int], room: Sequence[int]) -> bool:
    """Whether what stays, until the last read that finds it, has room at each time."""

    def held(time: int) -> int:
        return sum(r.nbytes for r, reads in zip(reuses, served) if reads and r.uses[0] <= time <= r.uses[reads])

    return all(held(time) <= free for time, free in enumerate(room))


def worth(reuses: Sequence[Reuse], served: Sequence[int]) -> int:
    """Bytes that are not read from global memory."""
    return sum(r.nbytes * reads for r, reads in zip(reuses, served, strict=True))


def best(reuses: Sequence[Reuse], room: Sequence[int]) -> int:
    """What the best of all choices is worth."""
    choices = product(*(range(len(r.uses)) for r in reuses))
    return max(worth(reuses, served) for served in choices if fits(reuses, served, room))


def instance(seed: int, *, equal: bool) -> tuple[list[Reuse], list[int]]:
    """Some tensors and the room at each time; `equal` ones are of one size and read once."""
    choose = random.Random(seed)
    times = choose.randint(2, 8)
    room = [choose.randint(0, 4) for _ in range(times)]
    reuses = []
    for _ in range(choose.randint(1, 5)):
        uses = sorted(choose.sample(range(times), 2 if equal else choose.randint(1, min(4, times))))
        reuses.append(Reuse(1 if equal else choose.randint(1, 3), tuple(uses)))
    return reuses, room


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_stays_has_room(policy: Policy) -> None:
    for seed in range(500):
        reuses, room = instance(seed, equal=False)
        served = policy(reuses, room)
        assert all(0 <= reads < len(r.uses) for r, reads in zip(reuses, served, strict=True))
        assert fits(reuses, served, room), (reuses, room, served)


def test_who_knows_the_next_use_is_not_beaten() -> None:
    """Of tensors of one size that are read once, no choice finds more in shared memory."""
    lost = 0
    for seed in range(1500):
        reuses, room = instance(seed, equal=True)
        most = best(reuses, room)
        assert worth(reuses, belady(reuses, room)) == most, (reuses, room)
        lost += worth(reuses, lru(reuses, room)) < most
    assert lost > 20  # So the two differ, and these instances show it.


def test_on_other_instances_it_is_no_worse_than_the_paper_s_in_sum() -> None:
    found = [instance(seed, equal=False) for seed in range(1000)]
    sums = [sum(worth(reuses, policy(reuses, room)) for reuses, room in found) for policy in (belady, lru, best_choice)]
    assert sums[1] <= sums[0] <= sums[2] and sums[0] > 0.75 * sums[2]


def best_choice(reuses: Sequence[Reuse], room: Sequence[int]) -> tuple[int, ...]:
    """A best choice."""
    choices = product(*(range(len(r.uses)) for r in reuses))
    return max((c for c in choices if fits(reuses, c, room)), key=lambda served: worth(reuses, served))


def test_the_paper_s_rule_lets_the_oldest_go_and_belady_the_one_needed_last() -> None:
    old, young = Reuse(1, (0, 2)), Reuse(1, (1, 9))
    room = [1] * 10
    assert lru([old, young], room) == (0, 1) and belady([old, young], room) == (1, 0)


def test_what_has_left_does_not_come_back() -> None:
    # Read at 1 while there is room, which a stage at 2 takes.
    assert belady([Reuse(4, (0, 1, 3))], [4, 4, 0, 4]) == (1,)
    assert belady([Reuse(4, (0, 1))], [3, 9]) == (0,)
    assert belady([], [1, 2]) == () and lru([Reuse(1, (0,))], [5]) == (0,)
