"""What stands around a job: messages however they are cut, shared data that are damaged, limits that are taken back."""

from __future__ import annotations

import faulthandler
import pickle
import resource
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from souffle.errors import SouffleError
from souffle.workers.framing import Frames, FramingError, framed, receive
from souffle.workers.harness import Harness, Request, SharedFiles, key_of
from souffle.workers.process import Workplace


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_messages_are_the_same_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, messages))
    frames, found, begin, turn = Frames(), [], 0, 0
    while begin < len(stream):
        size = cuts[turn % len(cuts)]
        found += frames.feed(stream[begin : begin + size])
        begin, turn = begin + size, turn + 1
    assert found == messages
    # Half a message is none, and no message begins so.
    assert not [*frames.feed(framed(b"half")[:-1])]
    with pytest.raises(FramingError, match="begins no message"):
        list(Frames().feed(b"half" + stream + bytes(12)))


def test_a_stream_that_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(framed(b"whole") + framed(b"half")[:-1])
        assert receive(ours) == b"whole"
        theirs.close()
        assert receive(ours) is None and receive(ours) is None


def test_shared_files_are_what_their_keys_say(tmp_path: Path) -> None:
    data = [bytes([n]) * size for n, size in enumerate((40, 50, 0, 200))]
    for each in data:
        (tmp_path / key_of(each)).write_bytes(each)
    files = SharedFiles(tmp_path, most_bytes=100)
    # Twice, and the one that is larger than all that is kept between: what was put out is read again.
    assert [files.read(key_of(each)) for each in [*data, *reversed(data)]] == [*data, *reversed(data)]
    for key in (key_of(b"never shared"), "no key"):
        with pytest.raises(SouffleError, match="cannot be read: No such file"):
            files.read(key)
    (tmp_path / key_of(data[0])).write_bytes(data[0][:-1])
    assert files.read(key_of(data[0])) == data[0], "it was kept"
    with pytest.raises(SouffleError, match=r"are damaged: .* holds 39 bytes of something else"):
        SharedFiles(tmp_path).read(key_of(data[0]))


def test_limits_are_the_jobs_alone(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with (tmp_path / "late.txt").open("w") as late:
        harness = Harness(SharedFiles(tmp_path).read, late)

        def run(name: str, payload: object, **limits: float | None) -> object:
            options = {"seconds": None, "memory_mb": None, **limits}
            function = f"tests.workers.played_jobs:{name}"
            answer = harness.run(Request(function, pickle.dumps(payload), (), **options))
            return pickle.loads(answer.value) if not answer.failure else answer

        assert run("memory_limit", None) == before[0]
        limits = [run("memory_limit", None, memory_mb=megabytes) for megabytes in (100, 400)]
        assert 250e6 < limits[1] - limits[0] < 350e6, "they count from what there is"
        assert run("allocate", 15, memory_mb=20) == 15 * 10**6, "what this process has does not count"
        # More than this process could have, so that none of it is what others have let go.
        much = limits[1] // 10**6
        said = "needed more memory than its 100 MB"
        failed = run("allocate", much, memory_mb=100)
        assert failed.failure.startswith(f"{said}\nMemoryError") and failed.spent
        # The lack of memory is seen where a library words it in its own way, and in what a job starts.
        assert run("allocate_in_a_library", much, memory_mb=100).failure.startswith(said)
        assert "MemoryError" in run("allocate_in_a_child", much, memory_mb=100)
        assert run("allocate_in_a_child", 1, memory_mb=100) == ""
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
        assert run("double", 1, seconds=0.05) == 2
        assert run("sleep", 0.1) == 0.1, "the time of the job before is over, and nothing has come of it"
        faulthandler.cancel_dump_traceback_later()
    assert not (tmp_path / "late.txt").read_text()


def test_a_path_that_sockets_have_room_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 40)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    for most, inside in ((None, True), (200, True), (39, False)):
        workplace = Workplace(most)
        assert (workplace.folder.parent == deep) is inside and workplace.shared.is_dir()
        workplace.put("key", b"data")
        workplace.put("key", b"data")
        assert [path.name for path in workplace.shared.iterdir()] == ["key"]
        workplace.close()
        workplace.close()
        assert not workplace.folder.exists()
    assert not [*deep.iterdir()]
