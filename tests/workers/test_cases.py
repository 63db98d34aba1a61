"""Cases that ask for jobs step by step: which jobs go to workers first, and how many are under way."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future

from souffle.workers import Job, Outcome, Places
from souffle.workers.cases import Cases


class Slow:
    """Workers that end jobs in an order of their own, when nothing further is given to them."""

    name = "slow"

    def __init__(self, workers: int, seed: int = 0) -> None:
        self.workers, self._rng = workers, random.Random(seed)
        self._held: list[tuple[Job, Future[Outcome]]] = []
        self.given: list[Job] = []
        self.most = 0

    def submit(self, job: Job, check=None) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self.given.append(job)
        self._held.append((job, future))
        self.most = max(self.most, len(self._held))
        return future

    def end_one(self) -> None:
        job, future = self._held.pop(self._rng.randrange(len(self._held)))
        future.set_result(Outcome(job.payload))


def asking(name: str, steps: int, jobs: int):
    for step in range(steps):
        outcomes = yield [(Job("played", (name, step, place), name), None) for place in range(jobs)]
        assert [outcome.value for outcome in outcomes] == [(name, step, place) for place in range(jobs)]
    return name * 2


def ended(engine: Slow, cases: Cases) -> dict[str, str]:
    """All cases; the engine ends a job whenever there is nothing to do but wait."""

    class Answers:
        def __init__(self, answers) -> None:
            self._answers, self.put, self.empty = answers, answers.put, answers.empty

        def get(self):
            if self._answers.empty():
                engine.end_one()
            return self._answers.get()

    cases._answers = Answers(cases._answers)
    return dict(cases)


def test_all_end_in_whatever_order_workers_do() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        engine, names = Slow(rng.randint(1, 5), seed), [f"c{number}" for number in range(rng.randint(1, 12))]
        shapes = {name: (rng.randint(0, 4), rng.randint(0, 9)) for name in names}
        options = [{}, {"ahead": 12}, {"ahead": 40, "order": lambda name, step: (step, name)}]
        cases = Cases(engine, ((name, asking(name, *shapes[name])) for name in names), **options[seed % 3])
        assert ended(engine, cases) == {name: name * 2 for name in names}
        assert len(engine.given) == sum(steps * jobs for steps, jobs in shapes.values())
        # What workers cannot take soon waits here, where others can pass.
        assert engine.most <= 3 * engine.workers


def test_cases_that_are_behind_go_first() -> None:
    engine = Slow(2)
    cases = Cases(
        engine, ((name, asking(name, 3, 8)) for name in "abcd"), ahead=100, order=lambda name, step: (step,)
    )
    ended(engine, cases)
    steps = [job.payload[1] for job in engine.given]
    # The first jobs of all cases; a job of a later step goes only where none of an earlier one is known.
    assert steps[:32] == [0] * 32 and steps == sorted(steps)


def test_without_an_order_cases_that_began_first_go_first() -> None:
    engine = Slow(2)
    ended(engine, Cases(engine, ((name, asking(name, 2, 4)) for name in "abc"), ahead=100))
    assert [job.payload[0] for job in engine.given[:12]] == list("aaaabbbbcccc")


def measuring(name: str, steps: int, rng: random.Random, boards: list[Places]):
    """Each step asks for jobs of workers alone, and for some that take a board too."""
    for step in range(steps):
        places = [rng.choice([None, *boards]) for _ in range(rng.randrange(1, 6))]
        outcomes = yield [
            (Job("played", (name, step, number), name, places=one), None) for number, one in enumerate(places)
        ]
        assert [outcome.value for outcome in outcomes] == [(name, step, number) for number in range(len(places))]
    return name


def test_no_more_workers_than_boards_are_given_jobs_of_boards() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        boards = [Places("few", rng.randrange(1, 3)), Places("many", rng.randrange(2, 6))]
        engine = Watching(rng.randrange(1, 9), seed)
        names = [str(number) for number in range(rng.randrange(1, 12))]
        cases = Cases(engine, [(name, measuring(name, rng.randrange(1, 5), rng, boards)) for name in names])
        assert ended(engine, cases) == {name: name for name in names}
        assert all(engine.most_of[board.name] <= board.count for board in boards)


def test_workers_do_other_jobs_while_others_wait_for_the_board() -> None:
    engine = Watching(4, seed=1)
    board = Places("board", 1)
    measured = [(f"measured {number}", asking_for(f"measured {number}", board)) for number in range(20)]
    looked = [(f"looked {number}", asking_for(f"looked {number}", None)) for number in range(20)]
    ended(engine, Cases(engine, measured + looked, ahead=20))
    # All that was given at a time but one were looks, though measurements were asked for first.
    assert engine.most_of["board"] == 1 and engine.most == 3 * 4


def asking_for(name: str, places: Places | None):
    yield [(Job("played", name, name, places=places), None)]


class Watching(Slow):
    """Remembers how many jobs of each kind of places it had at a time."""

    def __init__(self, workers: int, seed: int) -> None:
        super().__init__(workers, seed)
        self.most_of: Counter[str] = Counter()

    def submit(self, job: Job, check=None) -> Future[Outcome]:
        future = super().submit(job, check)
        for name, count in Counter(held.places.name for held, _ in self._held if held.places is not None).items():
            self.most_of[name] = max(self.most_of[name], count)
        return future
