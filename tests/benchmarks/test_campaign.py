"""A campaign goes on where its file stops, also where the machine stopped in the middle of a line."""

from itertools import islice
from pathlib import Path

from benchmarks.campaign import append_record, read_records, seeds


def test_seeds_that_are_done_are_left_out() -> None:
    assert list(seeds("3:7", None, {4, 5})) == [3, 6]
    assert list(seeds("3", None, {})) == [3]
    assert list(seeds(None, 3, {0, 2})) == [1, 3, 4]
    assert list(islice(seeds(None, None, {0}), 2)) == [1, 2]


def test_a_line_that_was_not_finished_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "out.jsonl"
    assert read_records(path) == read_records(None) == []
    append_record(path, {"seed": 1})
    with path.open("a") as file:
        file.write('{"seed": 2, "no')
    append_record(path, {"seed": 3})
    append_record(path, {"seed": 4})
    assert [record["seed"] for record in read_records(path)] == [1, 3, 4]
