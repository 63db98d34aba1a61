"""The siege: its right cases are right and proven, its mistakes are found, its files can be read back."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from benchmarks.campaign import read_records, without_times
from benchmarks.siege import __main__ as siege
from benchmarks.siege.__main__ import main
from benchmarks.siege.case import read_case, text_of, write_case
from benchmarks.siege.forms import FORMS
from benchmarks.siege.judge import RIGHT, UNDEFINED, Judge
from benchmarks.siege.kernels import random_case
from benchmarks.siege.minimize import minimized
from benchmarks.siege.mistakes import mistakes, planted
from benchmarks.siege.report import report
from benchmarks.siege.trial import BAD, Trial
from souffle.mutation.sandbox import Sandbox
from souffle.verify import PROVEN, REFUTED
from tests.thorough import sized

SEEDS = range(sized(12, 16))


@pytest.fixture(scope="module")
def judge():
    with Sandbox(60.0) as sandbox:
        yield Judge(sandbox)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("siege") / "out.jsonl"
    assert main(["--seeds", f"{SEEDS.start}:{SEEDS.stop}", "--out", str(path), "--on", "here"]) == 0
    return path


def test_what_is_proven_is_right(lines: Path) -> None:
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["seed"] for record in records] == list(SEEDS)
    assert not {record["seed"]: record["detail"] for record in records if record["kind"] in BAD}
    right = [record for record in records if record["right"]]
    assert sum(record["memory"] == PROVEN for record in right) == len(right) > 3
    assert sum(record["memory"] == REFUTED for record in records if not record["right"]) > 3


def test_a_siege_goes_on_where_it_stopped(lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = lines.read_text()
    main(["--seeds", f"{SEEDS.start}:{SEEDS.stop}", "--out", str(lines)])
    assert lines.read_text() == before
    main(["--report", "--out", str(lines)])
    told = capsys.readouterr().out
    assert f"{len(SEEDS)} cases" in told and "right and not proven" in told


@pytest.mark.thorough("of all campaigns, tests/benchmarks/test_campaign.py has it")
def test_all_workers_give_the_same(lines: Path, tmp_path: Path) -> None:
    """Also in other batches, as where it went on."""
    path = tmp_path / "out.jsonl"
    for options in (["--seeds", "3:5"], ["--seeds", "0:5", "--workers", "2"]):
        assert main([*options, "--out", str(path)]) == 0
    assert without_times(read_records(path)) == without_times(read_records(lines))[:5]


def test_a_kernel_that_ends_its_worker_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(siege, "WORK", "tests.benchmarks.deadly_work")
    path = tmp_path / "out.jsonl"
    assert main(["--seeds", "0:20", "--workers", "2", "--out", str(path)]) == 1
    records = read_records(path)
    assert [record["seed"] for record in records] == list(range(20))
    why = "crash: its worker ended with signal SIGABRT (it had 8192 MB)"
    assert [(r["seed"], r["kind"], r["reason"]) for r in records if r["kind"] in BAD] == [(3, "error", why)]
    captured = capsys.readouterr()
    assert "seed 3: error" in captured.err and "error:\n" in captured.out and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_right(form: str, judge: Judge) -> None:
    seed = next(s for s in range(100) if f"stage0={form}" in random_case(s, (form,)).note)
    case = random_case(seed, (form,))
    judgement = judge.judgement(case)
    assert judgement.memory != REFUTED and judgement.values in ("", "agree"), judgement


def test_equal_seeds_give_equal_cases() -> None:
    for seed in range(sized(4, 8)):
        assert text_of([random_case(seed)]) == text_of([random_case(seed)])
        found = [planted(random_case(seed), random.Random(seed))[0] for _ in range(2)]
        assert text_of([found[0]]) == text_of([found[1]])


def test_a_case_is_read_back(tmp_path: Path, judge: Judge) -> None:
    for seed in range(sized(3, 6)):
        case = random_case(seed)
        write_case(case, tmp_path / "case.py", "as it was")
        again = read_case(tmp_path / "case.py")
        assert "as it was" in again.note
        assert (again.plan.buffers, again.plan.launches) == (case.plan.buffers, case.plan.launches)
        assert set(again.functions) == set(case.functions)
        write_case(again, tmp_path / "again.py")
        assert judge.judgement(again) == judge.judgement(case)
        body = lambda c: {name: str(func.body) for name, func in c.functions.items()}  # noqa: E731
        assert body(read_case(tmp_path / "again.py")) == body(again)


def racing():
    """A case that hands elements through shared memory, without its barrier."""
    case = next(c for c in map(exchanged, range(40)) if c.plan.kernels[0].threads == 64)
    return next(m for m in mistakes(case) if (m.kind, m.action) == ("block barrier", "delete") and "stage" in m.what)


def exchanged(seed: int):
    return random_case(seed, ("exchange",))


def test_what_is_wrong_is_seen_and_small_once_it_is_minimized(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    case = racing().make()
    assert judge.judgement(case).memory == REFUTED
    assert judge.outcome(case).kind == UNDEFINED
    assert judge.outcome(exchanged(1)).kind == RIGHT
    # As if it had been proven.
    real = Judge.judgement
    changed = lambda self, c, values=True: dataclasses.replace(real(self, c, values=values), memory=PROVEN)  # noqa: E731
    monkeypatch.setattr(Judge, "judgement", changed)
    small = minimized(case, judge, 8)
    assert judge.outcome(small).kind == UNDEFINED
    assert len(text_of([small])) < len(text_of([case]))


def test_a_false_accept_and_a_false_reject_are_told() -> None:
    facts = {"note": "", "what": (), "rules": (), "reason": "why 7", "values": "agree", "values_reason": ""}
    facts |= {"detail": "", "seconds": 0.0}
    wrong = Trial(seed=1, right=False, mistakes=("order/swap",), memory=PROVEN, outcome=UNDEFINED, **facts)
    strict = Trial(seed=2, right=True, mistakes=(), memory=REFUTED, outcome=RIGHT, **facts)
    assert (wrong.kind, strict.kind) == ("false accept", "false reject")
    told = report([wrong, strict])
    assert "1 of 1, 100.0 %" in told and "why #" in told
