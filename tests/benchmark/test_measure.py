"""The benchmark's page: outputs first, then rounds in turn; what is refused, what fails, what an interrupt leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from souffle.benchmark import measure as page
from souffle.benchmark.host_way import HostWay
from souffle.benchmark.measure import measure
from souffle.benchmark.peer import GRAPH, LAUNCHES, Setting
from souffle.benchmark.report import BenchmarkReport
from souffle.benchmark.rounds import figures_of, ratio_of
from tests.benchmark.played import PlayedPeer, PlayedWay

_RIGHT = {"y": np.array([1.0, 2.0], np.float32)}
_WRONG = {"y": np.array([1.0, 2.01], np.float32)}


def _report(runs: int = 3, warmup: int = 1) -> BenchmarkReport:
    return BenchmarkReport("m", "a machine", Setting("cpu", 1, "fp32"), "V4", "a reference", runs, warmup)


def _measured(
    monkeypatch: pytest.MonkeyPatch,
    ours: list[PlayedWay],
    peers: list[PlayedPeer],
    log: list[str],
    seconds: float = 1e9,
    **sizes: int,
) -> BenchmarkReport:
    report = _report(**sizes)
    monkeypatch.setattr(page, "ways_of", lambda network, inputs: ours)
    measure(
        None, None, peers, report, inputs={}, expected=_RIGHT, seconds=seconds, rest=lambda: log.append("rest")
    )  # fmt: skip
    return report


def test_all_are_compared_before_any_is_timed_and_a_round_runs_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    ours, first, second = (PlayedWay(name, log, _RIGHT) for name in "abc")
    _measured(monkeypatch, [ours], [PlayedPeer("p", [first]), PlayedPeer("q", [second])], log, runs=2, warmup=1)
    compared = [f"{name} outputs" for name in "abc" for _ in range(2)]
    rounds = [line for cache in ("warm", "cold") for _ in range(3) for n in "abc" for line in ("rest", f"{n} {cache}")]
    assert log == [*compared, *rounds]


def test_wrong_outputs_get_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    right, wrong = PlayedWay("right", log, _RIGHT), PlayedWay("wrong", log, _WRONG)
    report = _measured(monkeypatch, [PlayedWay("ours", log, _RIGHT)], [PlayedPeer("p", [right, wrong])], log)
    row = report.rows[2]
    assert row.name == "p" and not row.times and not row.ratios and row.passed is False
    assert row.reason.startswith("its outputs are wrong: off by 5.0e-03")
    assert not [line for line in log if line in ("wrong warm", "wrong cold")]
    assert report.rows[1].times["cold"].runs == 3 and not report.wrong


def test_our_own_wrong_outputs_are_said_and_peers_have_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    peer = PlayedPeer("p", [PlayedWay("p", log, _RIGHT)])
    report = _measured(monkeypatch, [PlayedWay("ours", log, _WRONG)], [peer], log)
    assert report.wrong and not report.rows[0].times
    assert report.rows[1].times and not report.rows[1].ratios


def test_a_peer_that_lacks_something_or_fails_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    peers = [
        PlayedPeer("absent", reason="it is not installed: pip install it"),
        PlayedPeer("failing", error=ZeroDivisionError("no kernel\nand more")),
        PlayedPeer("there", [PlayedWay("there", log, _RIGHT)]),
    ]
    report = _measured(monkeypatch, [PlayedWay("ours", log, _RIGHT)], peers, log)
    assert [row.reason for row in report.rows] == [
        "",
        "it is not installed: pip install it",
        "it fails: ZeroDivisionError: no kernel",
        "",
    ]
    assert [bool(row.times) for row in report.rows] == [True, False, False, True]


def test_what_a_peer_does_not_own_up_to_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        _measured(monkeypatch, [PlayedWay("ours", [], _RIGHT)], [PlayedPeer("p", error=KeyError("a bug"))], [])


def test_who_would_take_too_long_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    report = _measured(monkeypatch, [PlayedWay("ours", log, _RIGHT)], [], log, seconds=0.0)
    assert "more are allowed by --seconds" in report.rows[0].reason and not report.rows[0].times


def _interrupted_at(number: int) -> Callable[[int], float]:
    def microseconds(sample: int) -> float:
        if sample == number:
            raise KeyboardInterrupt
        return float(sample)

    return microseconds


def test_an_interrupt_leaves_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    ours = PlayedWay("ours", log, _RIGHT, lambda sample: 2.0 * sample)
    peer = PlayedWay("p", log, _RIGHT, _interrupted_at(4))  # the third round that counts, after one of warm-up
    report = _measured(monkeypatch, [ours], [PlayedPeer("p", [peer])], log, runs=9, warmup=1)
    assert report.interrupted
    mine, other = report.rows
    assert mine.times.keys() == other.times.keys() == {"warm"} and not mine.reason and not other.reason
    assert (mine.times["warm"].runs, mine.times["warm"].median_us) == (2, 5.0)
    assert other.ratios["warm"].median == 0.5


def test_an_interrupt_before_the_first_round_leaves_errors_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    peers = [PlayedPeer("p", [PlayedWay("p", log, _RIGHT)]), PlayedPeer("q", error=KeyboardInterrupt())]
    report = _measured(monkeypatch, [PlayedWay("ours", log, _RIGHT)], peers, log)
    assert report.interrupted and not any(row.times for row in report.rows)
    assert [row.reason for row in report.rows] == [
        "interrupted before it was timed",
        "interrupted before it was timed",
        "interrupted before it was prepared",
    ]


def test_a_peer_is_beside_our_row_of_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    ours = [PlayedWay("g", log, _RIGHT, lambda n: 1.0, GRAPH), PlayedWay("l", log, _RIGHT, lambda n: 4.0, LAUNCHES)]
    peer = PlayedPeer("p", [PlayedWay(form, log, _RIGHT, lambda n: 8.0, form) for form in (GRAPH, LAUNCHES)])
    report = _measured(monkeypatch, ours, [peer], log)
    assert [row.ratios["warm"].median for row in report.rows[2:]] == [8.0, 2.0]


def test_a_run_is_timed_after_one_like_it_or_after_the_caches_were_overwritten() -> None:
    now, log = [0.0], []

    def call() -> str:
        log.append("call")
        now[0] += 0.002
        return "found"

    def evict() -> None:
        log.append("evict")
        now[0] += 7.0

    way = HostWay(call, lambda found: {"y": found}, timer=lambda: now[0], evict=evict)
    assert way.sample(cold=True) == pytest.approx(2000.0) and log == ["evict", "call"]
    log.clear()
    assert way.sample(cold=False) == pytest.approx(2000.0) and log == ["call", "call"]
    assert way.outputs() == {"y": "found"}


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_quartiles_are_those_of_sorted_samples(count: int) -> None:
    samples = np.random.default_rng(count).exponential(size=count).tolist()
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (count - 1)
        low = int(place)
        return ordered[low] + (place - low) * (ordered[min(low + 1, count - 1)] - ordered[low])

    found = figures_of(samples)
    assert (found.lower_us, found.median_us, found.upper_us) == pytest.approx((at(0.25), at(0.5), at(0.75)))


def test_a_ratio_is_one_of_neighbours_and_its_interval_holds_the_true_one() -> None:
    drift = np.linspace(1.0, 10.0, 60)  # the machine slows down: ratios of neighbours do not
    exact = ratio_of((3.0 * drift).tolist(), drift.tolist())
    assert (exact.low, exact.median, exact.high) == pytest.approx((3.0, 3.0, 3.0))
    held = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).lognormal(0.0, 0.3, (2, 40))
        ratio = ratio_of((1.5 * noise[0]).tolist(), noise[1].tolist())
        held += ratio.low <= 1.5 <= ratio.high
        assert ratio.low <= ratio.median <= ratio.high
    assert held >= 85  # 95 expected; below 86 by chance once in ten thousand times


