"""Files of results: rows are there once they are made, and are taken over only where they are of the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from souffle.errors import SouffleError
from souffle.evaluation.model_digest import model_digest
from souffle.evaluation.result_file import FORMAT, ResultFile, result_header
from tests.test_bad_input import one_node


def header(**changes: object) -> dict:
    return result_header({"arch": "sm_90"}, None) | changes


def test_rows_are_on_disk_before_the_next_is_made(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    file = ResultFile(path, header())
    for number in range(3):
        file.add(f"row {number}", {"figure": number})
        kept = json.loads(path.read_text())
        assert kept["format"] == FORMAT and [row["figure"] for row in kept["results"]] == list(range(number + 1))
    again = ResultFile(path, header())
    assert again.anew == "" and again.row("row 1") == {"key": "row 1", "figure": 1} and again.row("row 3") is None


def test_rows_are_brought_into_an_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    file = ResultFile(path, header())
    for key in "cbda":
        file.add(key, {"is": key})
    file.arrange(["a", "no such row", "b", "c"])
    assert [row["key"] for row in file.rows] == [row["key"] for row in ResultFile(path, header()).rows] == list("abcd")
    assert file.row("d") == {"key": "d", "is": "d"}
    # What is in order already is not written again.
    path.unlink()
    file.arrange("abcd")
    assert not path.exists()


def test_the_header_says_what_made_the_file() -> None:
    made = header()
    assert {"command", "date", "souffle", "commit", "source", "device", "python", "cores", "versions"} <= made.keys()
    assert made["versions"]["numpy"] and made["device"] is None and made["options"] == {"arch": "sm_90"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "0"}, "of another state of the compiler"),
        ({"device": "a GPU"}, "of another device (None before, a GPU now)"),
        ({"options": {"arch": "sm_80"}}, "with other options (arch=sm_90 before, sm_80 now)"),
    ],
)
def test_what_is_of_something_else_is_made_anew_and_kept_beside(tmp_path: Path, changes: dict, says: str) -> None:
    path = tmp_path / "rows.json"
    ResultFile(path, header()).add("row", {"figure": 1})
    before = path.read_text()
    other = ResultFile(path, header(**changes))
    assert says in other.anew and other.rows == ()
    assert (tmp_path / "rows.json.before").read_text() == before
    other.add("row", {"figure": 2})
    assert [row["figure"] for row in json.loads(path.read_text())["results"]] == [2]


def test_a_changed_model_loses_its_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    file = ResultFile(path, header())
    for model in ("a.onnx", "b.onnx"):
        file.add(f"{model}: V0", {"model": model, "sha256": "old"})
    again = ResultFile(path, header(), {"a.onnx": "new", "b.onnx": "old"})
    assert again.anew == "a.onnx has changed" and [row["model"] for row in again.rows] == ["b.onnx"]
    # A model that is not asked for now keeps its rows.
    assert len(ResultFile(path, header(), {"b.onnx": "old"}).rows) == 2


def test_force_takes_nothing_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    ResultFile(path, header()).add("row", {"figure": 1})
    assert ResultFile(path, header(), force=True).rows == ()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other", "results": []}', "\x00\x01"])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.json"
    path.write_text(content)
    with pytest.raises(SouffleError, match=r"notes\.json is there and holds no results.*--force"):
        ResultFile(path, header())
    assert path.read_text() == content
    assert ResultFile(path, header(), force=True).rows == ()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SouffleError, match="cannot be written"):
        ResultFile(tmp_path / "none" / "rows.json", header()).add("row", {})


def test_the_digest_of_a_model_is_of_its_content(tmp_path: Path) -> None:
    a, b = tmp_path / "a.onnx", tmp_path / "b.onnx"
    a.write_bytes(one_node("Softmax", [4, 8]).SerializeToString())
    b.write_bytes(a.read_bytes())
    assert model_digest(a) == model_digest(b) != ""
    b.write_bytes(one_node("Softmax", [4, 9]).SerializeToString())
    assert model_digest(a) != model_digest(b)
    assert model_digest(tmp_path / "none.onnx") == ""
