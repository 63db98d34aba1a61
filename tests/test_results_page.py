"""docs/results.md is what its chapters and files say, its marks of age are right, and what does not fit is refused."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.results_page.__main__ import main
from benchmarks.results_page.files import PageError, Record, moment_of, read_source
from benchmarks.results_page.page import make_page
from benchmarks.results_page.tables import decimal, percent, table
from benchmarks.results_page.unused import unused_files
from benchmarks.results_page.views import VIEWS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_RULER = re.compile(r"\|(?:-{3,}:?\|)+")
_TYPED = {"date": "2026-11-25T10:00:00Z", "kinds": ["speed"], "columns": ["a", "b"], "right": [1], "rows": [["x", "1"]]}
_CHANGES = {
    "date": "2026-11-27",
    "kinds": {"speed": "how fast", "size": "how large"},
    "changes": [
        {"commit": "aaaaaaa", "date": "2026-11-24T00:00:00Z", "name": "one", "what": "First", "alters": ["speed"]},
        {"commit": "ccccccc", "date": "2026-11-26T00:00:00Z", "name": "three", "what": "Third", "alters": ["speed"]},
        {"commit": "bbbbbbb", "date": "2026-11-25T12:00:00Z", "name": "two", "what": "Second", "alters": ["size"]},
    ],
}


def small(tmp_path: Path, chapter: str, **files: Any) -> Path:
    """A folder of figures with one chapter."""
    folder = tmp_path / "results"
    (folder / "page").mkdir(parents=True)
    (folder / "tables").mkdir()
    (folder / "page" / "010-chapter.md").write_text(chapter)
    for name, content in ({"changes": _CHANGES} | files).items():
        (folder / f"{name.replace('__', '/')}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def text() -> str:
    """The page as it is made now."""
    return make_page(DOCS / "results").text


def test_the_page_is_what_its_files_say(text: str) -> None:
    assert (DOCS / "results.md").read_text() == text, "call python -m benchmarks.results_page"
    # Where git is at hand, every commit is one that there is.
    assert main(["--check"]) == 0


def test_every_file_is_shown_or_named_with_a_reason() -> None:
    assert not unused_files(DOCS / "results", make_page(DOCS / "results").used)
    assert all(read_source(DOCS / "results", "unused.json").content["files"].values())


def test_chapters_hold_no_table_of_their_own() -> None:
    for chapter in (DOCS / "results" / "page").glob("*.md"):
        assert not any(_RULER.fullmatch(line) for line in chapter.read_text().splitlines()), chapter.name


def test_every_table_says_where_it_comes_from(text: str) -> None:
    lines = text.splitlines()
    ends = [at for at in range(1, len(lines)) if lines[at - 1].startswith("|") and not lines[at].startswith("|")]
    assert len(ends) == sum(bool(_RULER.fullmatch(line)) for line in lines) > 50
    assert all(re.match(r"\*2026-\d\d-\d\d, (?:commit|recorded with) [0-9a-f]{7,}", lines[at + 1]) for at in ends)


def test_every_view_is_used() -> None:
    chapters = "".join(path.read_text() for path in (DOCS / "results" / "page").glob("*.md"))
    assert set(re.findall(r"^\{\{ table ([\w-]+):", chapters, re.MULTILINE)) == set(VIEWS)


def _numbers(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(content, bool) or content is None or isinstance(content, str):
        return []
    if isinstance(content, (int, float)):
        return [path]
    steps = content.items() if isinstance(content, dict) else enumerate(content)
    return [found for key, value in steps for found in _numbers(value, (*path, key))]


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("on_chip_v4.json", ("results", 0, "us")),
        ("gpu-h100-2026-11-27.json", ("before", "latency", "bert-paper-fp32-V4", "graph", "median_us")),
        ("reproduce/table4.json", ("results", 1, "cells", 0, "value")),
        ("mutation.json", ("by kind", 0, "refuted")),
        ("hfuse_pairs.json", ("results", 0, "compiled", "sm_90", "fused", "registers")),
    ],
)
def test_another_number_is_another_page(tmp_path: Path, text: str, file: str, keys: tuple[Any, ...]) -> None:
    folder = tmp_path / "results"
    shutil.copytree(DOCS / "results", folder, ignore=shutil.ignore_patterns("*.svg"))
    content = json.loads((folder / file).read_text())
    assert keys in _numbers(content)
    place = content
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = place[keys[-1]] * 3 + 1
    (folder / file).write_text(json.dumps(content))
    before, after = text.splitlines(), make_page(folder).text.splitlines()
    different = [now for then, now in zip(before, after, strict=True) if then != now]
    assert different and all(line.startswith("|") for line in different)


def test_a_cell_that_was_typed_is_shown_as_it_is(tmp_path: Path) -> None:
    chapter = "## A\n\n{{ table typed: tables/a.json }}\n"
    page = make_page(small(tmp_path, chapter, tables__a=_TYPED | {"rows": [["`x \\| y`", "1,234.5 → 2"]]}))
    assert "| `x \\| y` | 1,234.5 → 2 |" in page.lines and "|---|---:|" in page.lines


def test_tables_older_than_a_change_of_their_kind_are_marked(tmp_path: Path) -> None:
    chapter = "{{ older tables }}\n\n{{ table typed: tables/a.json }}\n\n{{ table typed: tables/b.json }}\n\n"
    chapter += "{{ table typed: tables/a.json | of ddddddd 2026-11-26T00:00:00Z }}\n"
    b = _TYPED | {"date": "2026-11-25", "kinds": ["size"]}
    page = make_page(small(tmp_path, chapter, tables__a=_TYPED, tables__b=b))
    marks = [line for line in page.lines if line.startswith("*2026")]
    # a is of before the third change; what is of a day may be of its end; and the state that a chapter names counts.
    assert marks == [
        "*2026-11-25: [tables/a.json](results/tables/a.json).* **Older than** three (ccccccc, 2026-11-26).",
        "*2026-11-25: [tables/b.json](results/tables/b.json).*",
        "*2026-11-25, commit ddddddd: [tables/a.json](results/tables/a.json).*",
    ]
    assert page.lines[1].startswith("Of the 3 tables, 1 are older")
    assert page.lines[3:4] == ["- three (ccccccc, 2026-11-26): Third: 1"]


def test_a_table_is_as_old_as_its_oldest_file(tmp_path: Path) -> None:
    row = {"model": "m", "size": "tiny", "level": "V3", "precision": "fp32", "verdict": "PROVEN", "proven": 1}
    row |= {"kernels": 1, "facts": {"grid barriers": 0, "pairs of accesses compared": 0}}
    row |= {"compile_seconds": 0.04, "proof_seconds": 1}
    new, old = ({"date": date, "results": [row]} for date in ("2026-11-27", "2026-11-20"))
    old["recorded"] = {"commit": "eeeeeee", "date": "2026-11-22T00:00:00Z"}
    changes = _CHANGES | {"kinds": {"certificate": "", "launches": "", "speed": "", "size": ""}}
    changes["changes"] = [_CHANGES["changes"][0] | {"alters": ["certificate"], "date": "2026-11-21T00:00:00Z"}]
    folder = small(tmp_path, "{{ table certificates: new.json old.json }}\n", changes=changes, new=new, old=old)
    # The day on which it was made is before the commit that it came with.
    assert make_page(folder).lines[-1].endswith("**Older than** one (aaaaaaa, 2026-11-21).")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "a.json is no JSON"),
        ("[]", "a.json holds no JSON object"),
        (json.dumps({k: v for k, v in _TYPED.items() if k != "date"}), "no 'date' and no 'recorded'"),
        (json.dumps(_TYPED | {"date": "yesterday"}), "'yesterday'"),
        (json.dumps(_TYPED | {"date": 20261127}), "'date' is 20261127 and no text"),
        (json.dumps(_TYPED | {"recorded": "f00"}), "'recorded' is no object"),
        (json.dumps({k: v for k, v in _TYPED.items() if k != "columns"}), "'columns'"),
        (json.dumps({k: v for k, v in _TYPED.items() if k != "kinds"}), "'kinds'"),
        (json.dumps(_TYPED | {"kinds": ["weight"]}), "weight is no kind"),
        (json.dumps(_TYPED | {"rows": [["x"]]}), "row 1 has 1 cells for 2 columns"),
        (json.dumps(_TYPED | {"rows": [["x", 1]]}), "cells are texts"),
        (json.dumps(_TYPED | {"rows": 3}), "a.json"),
        (json.dumps(_TYPED | {"rows": [["x|y", "1"]]}), "'x|y' ends a cell"),
        (json.dumps(_TYPED | {"kinds": [3]}), "'kinds' is [3] and no list of texts"),
        (json.dumps(_TYPED | {"recorded": {"commit": 7, "date": "2026-11-27"}}), "'commit' is 7 and no text"),
        (None, "a.json cannot be read"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path, content: str | None, said: str) -> None:
    folder = small(tmp_path, "{{ table typed: tables/a.json }}\n")
    if content is not None:
        (folder / "tables" / "a.json").write_text(content)
    with pytest.raises(PageError, match=re.escape(said)) as error:
        make_page(folder)
    assert "a.json" in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("error"), "host_speed.json: a record has no 'error'"),
        (lambda row: row.update(error="0.9"), "host_speed.json: 'error' is '0.9' and no number"),
        (lambda row: row.update(error=True), "host_speed.json: 'error' is True and no number"),
        (lambda row: row.update(error=None), "host_speed.json: 'error' is None and no number"),
    ],
)
def test_a_row_that_lacks_something_is_refused_with_its_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    content = json.loads((DOCS / "results" / "host_speed.json").read_text())
    change(content["results"][2])
    changes = _CHANGES | {"kinds": _CHANGES["kinds"] | {"host": ""}}
    folder = small(tmp_path, "{{ table host-speed: host_speed.json }}\n", host_speed=content, changes=changes)
    with pytest.raises(PageError, match=re.escape(said)):
        make_page(folder)


@pytest.mark.parametrize(
    ("chapter", "said"),
    [
        ("text\n\n| a |\n|---|\n| 1 |\n", "010-chapter.md:3 has a table of its own"),
        ("{{ table typed tables/a.json }}\n", "010-chapter.md:1"),
        ("{{ table of: tables/a.json }}\n", "there is no view 'of'"),
        ("{{ older }}\n", "is no table"),
        ("a | b\n--- | ---\n1 | 2\n", "010-chapter.md:2 has a table of its own"),
        ("- a point\n  {{ table typed: tables/a.json }}\n", "is no table"),
        ("{{ table typed: tables/a.json | of xyz 2026-11-27 }}\n", "is no table"),
    ],
)
def test_chapters_that_do_not_fit_are_refused(tmp_path: Path, chapter: str, said: str) -> None:
    with pytest.raises(PageError, match=re.escape(said)):
        make_page(small(tmp_path, chapter, tables__a=_TYPED))


def test_what_stands_in_a_block_is_left_alone(tmp_path: Path) -> None:
    chapter = "```\n| a |\n{{ table typed: nothing }}\n```\n"
    assert make_page(small(tmp_path, chapter)).text.endswith(chapter)


def test_commands_are_told_once_and_not_below_their_own_block(tmp_path: Path) -> None:
    block = "```sh\npython -m benchmarks.x \\\n    --fast --out a.json   # ten minutes\n```\n"
    chapter = f"{block}\n{{{{ table typed: tables/a.json }}}}\n" + "\n{{ table typed: tables/b.json }}\n" * 2
    a = _TYPED | {"command": "python -m benchmarks.x --fast --out elsewhere.json"}
    b = _TYPED | {"command": "python -m benchmarks.x --slow"}
    page = make_page(small(tmp_path, chapter, tables__a=a, tables__b=b))
    assert ["`" in line for line in page.lines if line.startswith("*2026")] == [False, True, False]


def test_files_that_no_table_shows_are_told(tmp_path: Path) -> None:
    unused = {"date": "2026-11-27", "files": {"gone.json": "a reason", "tables/a.json": "a reason"}}
    folder = small(tmp_path, "{{ table typed: tables/a.json }}\n", tables__a=_TYPED, b=_TYPED, unused=unused)
    told = unused_files(folder, make_page(folder).used)
    assert [line.split()[0] for line in told] == ["b.json", "unused.json", "unused.json"]


def test_the_command_writes_checks_and_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unused = {"date": "2026-11-27", "files": {}}
    folder = small(tmp_path, "# A\n\n{{ table typed: tables/a.json }}\n", tables__a=_TYPED, unused=unused)
    asked = ["--docs", str(tmp_path)]
    assert main([*asked, "--check"]) == 1, "there is no page yet"
    assert main(asked) == 0 and main([*asked, "--check"]) == 0
    (folder / "tables" / "a.json").write_text(json.dumps(_TYPED | {"rows": [["x", "2"]]}))
    before = (tmp_path / "results.md").read_text()
    capsys.readouterr()
    assert main([*asked, "--check"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert "-| x | 1 |" in said and "+| x | 2 |" in said
    assert (tmp_path / "results.md").read_text() == before
    (folder / "b.json").write_text("{}")
    assert main(asked) == 1 and (tmp_path / "results.md").read_text() == before


def test_a_file_without_a_date_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"model": "mmoe"}')
    assert main(["--record", str(path)]) == 0
    source = read_source(tmp_path, "a.json")
    (tmp_path / "b.json").write_text("[]")
    assert main(["--record", str(tmp_path / "b.json")]) == main(["--record", str(tmp_path / "c.json")]) == 1
    assert source.content["model"] == "mmoe" and source.origin.recorded and source.origin.date.startswith("20")


def test_a_printed_table_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = ["| a | b, µs |", "|---|---:|", "| `x \\| y` |  |", "| z | 1,234.5 (−3 %) |"]
    folder = small(tmp_path, "", old=_TYPED)
    asked = ["--docs", str(tmp_path), "--take", "new", "--kinds", "speed", "--command", "python -m x"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(printed)))
    assert main(asked) == 0
    line = capsys.readouterr().out
    assert line == "{{ table typed: tables/new.json }}\n"
    (folder / "page" / "010-chapter.md").write_text(line)
    page = make_page(folder)
    assert page.lines[1:5] == printed and page.lines[-1].endswith(", `python -m x`.*")


@pytest.mark.parametrize("printed", ["", "| a |", "| a |\n| 1 |\n| 2 |", "| a |\n|---|\n| 1 | 2 |", "a\n---\nx | y"])
def test_what_is_no_table_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    folder = small(tmp_path, "")
    monkeypatch.setattr("sys.stdin", io.StringIO(printed))
    assert main(["--docs", str(tmp_path), "--take", "new", "--kinds", "speed"]) == 1
    assert not list((folder / "tables").iterdir())
    monkeypatch.setattr("sys.stdin", io.StringIO("| a |\n|---|\n| 1 |"))
    assert main(["--docs", str(tmp_path), "--take", "new", "--kinds", "weight"]) == 1


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (0.25, 1, "0.3"),
        (1274.85, 1, "1,274.9"),
        (8.45, 1, "8.5"),
        (1e6, 0, "1,000,000"),
        (-0.5, 0, "-1"),
        (None, 2, ""),
    ],
)
def test_halves_are_rounded_away_from_zero(value: float | None, digits: int, shown: str) -> None:
    assert decimal(value, digits) == shown


def test_no_change_has_no_minus() -> None:
    assert [percent(ratio) for ratio in (0.99999, 1, 0.9, 1.1)] == ["+0.0 %", "+0.0 %", "-10.0 %", "+10.0 %"]


def test_rows_of_another_width_are_no_table() -> None:
    with pytest.raises(ValueError, match="other columns"):
        table("a | b", [["1"]])


def test_a_day_is_over_at_its_end() -> None:
    assert moment_of("2026-11-27", "") < moment_of("2026-11-28T00:00:00Z", "")
    assert moment_of("2026-11-27", "") > moment_of("2026-11-27T23:00:00+00:00", "")
    assert Record("a.json", [("x", 1)]).number("x") == 1


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, benchmarks.results_page.__main__; print({'tvm', 'numpy', 'onnx'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_campaign_that_goes_on_stays_of_the_commit_of_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"commit": "aaaaaaa", "committed": "2026-11-20T00:00:00Z", "results": [{"us": 1}]}))
    record.save_results(str(path), "benchmarks.x", [*record.kept_results(path), {"us": 2}])
    kept = json.loads(path.read_text())
    assert (kept["commit"], kept["committed"], len(kept["results"])) == ("aaaaaaa", "2026-11-20T00:00:00Z", 2)
    other = tmp_path / "other.json"
    other.write_text(path.read_text())
    record.save_results(str(other), "benchmarks.x", [{"us": 1}])
    assert json.loads(other.read_text()).get("commit") != "aaaaaaa", "its rows were not taken over"
    renewed = tmp_path / "renewed.json"
    renewed.write_text(path.read_text())
    old = record.kept_results(renewed, lambda row: row["us"] > 2)
    record.save_results(str(renewed), "benchmarks.x", [*old, {"us": 1}])
    assert old == [] and json.loads(renewed.read_text()).get("commit") != "aaaaaaa", "all its rows are new"
