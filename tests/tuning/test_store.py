"""Writing tuning logs: whole lines whoever writes and is killed, one order of equal records, disks that are full."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tvm import te, tirx

from souffle.errors import OptionError
from souffle.schedule.log import RECORDS, WORKLOADS, Record, RecordOrigin, TuningLog
from souffle.schedule.lower import cuda_target
from souffle.schedule.recipe import Recipe
from souffle.tuning import store
from souffle.tuning.store import LogWriter, NewRecord

ARCH = "sm_90"
ROOT = Path(__file__).parents[2]
ORIGIN = RecordOrigin("predicted", "H200-SXM5-141GB", "0.27.0.post1", "0.1.0", "2026-01-01", own_seconds=3e-6)
STEPS = [["GetSBlock", [], ["total", "main"], ["b0"]], ["SamplePerfectTile", ["l1"], [5, 64], ["v2", "v3"]]]


def stage(rows: int = 8) -> tirx.PrimFunc:
    a = te.placeholder((rows, 4), name="a")
    k = te.reduce_axis((0, 4), name="k")
    return te.create_prim_func([a, te.compute((rows,), lambda i: te.sum(a[i, k], axis=k), name="total")])


def writer(folder: Path) -> LogWriter:
    return LogWriter(folder, ARCH, cuda_target(ARCH))


def new(trial: int, **other) -> NewRecord:
    return NewRecord(Recipe("reduction", {"lanes": trial % 7}), (1e-6, 2e-6), replace(ORIGIN, trial=trial, **other))


def trials(folder: Path) -> list[int]:
    return [record.origin.trial for record in TuningLog(folder / ARCH, ARCH).records]


def text(folder: Path) -> tuple[bytes, bytes]:
    return (folder / ARCH / WORKLOADS).read_bytes(), (folder / ARCH / RECORDS).read_bytes()


def test_what_is_appended_is_read(tmp_path) -> None:
    tiled = Recipe("metaschedule", {}, [STEPS, [[1, [2, 4]]]])
    failed = NewRecord(tiled, (), replace(ORIGIN, problem="it differs", text="0123", tiles=3))
    writer(tmp_path).append(stage(), [new(4), failed], name="total")
    log = TuningLog(tmp_path / ARCH, ARCH)
    fine, broken = log.of(stage())
    assert (fine.recipe.rule, fine.recipe.knobs, fine.recipe.trace) == ("reduction", {"lanes": 4}, None)
    assert fine.origin == replace(ORIGIN, trial=4) and fine.figures == (1e-6, 2e-6) and fine.useful
    assert broken.recipe.trace == tiled.trace and broken.recipe.key == tiled.key and broken.failed
    assert broken.origin == failed.origin
    assert [workload.name for workload in log.table.workloads.values()] == ["total"]
    assert not log.problems


def test_what_is_no_time_is_refused_and_nothing_is_nothing(tmp_path) -> None:
    one = writer(tmp_path)
    for seconds in ((float("nan"),), (0.0,), (-1e-6,), (float("inf"), 1e-6)):
        with pytest.raises(ValueError, match="no seconds"):
            one.append(stage(), [new(0), NewRecord(Recipe("reduction", {}), seconds, ORIGIN)])
    one.append(stage(), [])
    one.sort()
    assert not list((tmp_path / ARCH).glob("*.jsonl"))


def test_equal_records_are_equal_files(tmp_path) -> None:
    """In whatever order, by whatever number of writers, with duplicates, and sorted in between or not."""
    funcs = [stage(rows) for rows in (8, 9, 10)]
    many = [(func, new(trial, figure=figure)) for func in funcs for trial in range(6) for figure in FIGURES]
    tiled = Recipe("metaschedule", {}, [STEPS, [[1, [2, 4]]]])
    many += [(funcs[0], NewRecord(tiled, (), ORIGIN))]
    texts = set()
    for seed in range(4):
        order = random.Random(seed)
        again = order.sample(many, 9)
        later = [(func, replace(one, origin=replace(one.origin, date="2026-02-02"))) for func, one in again]
        shuffled = [*many, *again, *later]
        order.shuffle(shuffled)
        writers = [writer(tmp_path / str(seed)) for _ in range(3)]
        for func, record in shuffled:
            one = order.choice(writers)
            one.append(func, [record])
            if order.random() < 0.2:
                one.sort()
        one.sort()
        texts.add(text(tmp_path / str(seed)))
    assert len(texts) == 1
    log = TuningLog(tmp_path / "0" / ARCH, ARCH)
    assert len(log.records) == len(many) and len(log.table.workloads) == 3
    origins = [(one, one.origin) for one in log.records]
    orders = [(one.workload, said.figure, said.device, said.trial, one.recipe.key) for one, said in origins]
    assert orders == sorted(orders)


FIGURES = ("predicted", "measured")


def test_sorting_keeps_what_another_version_may_understand(tmp_path) -> None:
    one = writer(tmp_path)
    one.append(stage(), [new(1), new(0)])
    path = tmp_path / ARCH / RECORDS
    later = {**json.loads(path.read_bytes().splitlines()[0]), "figure": "guessed", "certainty": 0.5}
    path.write_bytes(b"\n<<<<<<< ours\n" + json.dumps(later).encode() + b"\n" + path.read_bytes() + b'{"workload":"x')
    one.sort()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line.get("trial", 0) for line in lines] == [0, 1, 1] and lines[-1] == later


def test_a_workload_is_written_once_and_again_where_it_was_lost(tmp_path) -> None:
    first, second = writer(tmp_path), writer(tmp_path)
    path = tmp_path / ARCH / WORKLOADS
    for trial, one in enumerate((first, second, first)):
        one.append(stage(), [new(trial)])
    assert len(path.read_bytes().splitlines()) == 1
    path.write_bytes(path.read_bytes()[:-9])
    second.append(stage(), [new(3)])
    assert sorted(trials(tmp_path)) == [0, 1, 2, 3]
    second.sort()
    assert len(path.read_bytes().splitlines()) == 1 and sorted(trials(tmp_path)) == [0, 1, 2, 3]


def test_a_stage_gets_the_first_name_that_it_is_given(tmp_path) -> None:
    for name in ("", "total", "", "other", "total"):
        writer(tmp_path).append(stage(), [new(0)], name)
    for _ in range(2):
        (workload,) = TuningLog(tmp_path / ARCH, ARCH).table.workloads.values()
        assert workload.name == "total"
        lines = text(tmp_path)[0].splitlines()
        writer(tmp_path).sort()
    assert len(lines) == 1


@pytest.mark.parametrize("name", [RECORDS, WORKLOADS])
def test_a_file_cut_anywhere_loses_the_lines_that_were_cut(tmp_path, name) -> None:
    one = writer(tmp_path / "whole")
    for trial, rows in enumerate((8, 9, 10)):
        one.append(stage(rows), [new(trial)])
    whole = text(tmp_path / "whole")
    table = whole[name == RECORDS]
    ends = [index + 1 for index, byte in enumerate(table) if byte == ord("\n")]
    cuts = {0, 1, len(table) - 1, *ends, *(end - 1 for end in ends), *random.Random(0).sample(range(len(table)), 12)}
    for cut in sorted(cuts):
        folder = tmp_path / str(cut)
        (folder / ARCH).mkdir(parents=True)
        for file, content in zip((WORKLOADS, RECORDS), whole, strict=True):
            (folder / ARCH / file).write_bytes(content[:cut] if file == name else content)
        # Without its end a line is whole all the same.
        left = sum(end - 1 <= cut for end in ends)
        assert len(trials(folder)) == left
        other = writer(folder)
        other.append(stage(8), [new(3)])
        other.append(stage(10), [new(4)])
        expected = {*range(left), 3, 4}
        if name == WORKLOADS:
            expected |= {0, 2}  # their stages were written anew
        assert set(trials(folder)) == expected
        other.sort()
        assert set(trials(folder)) == expected


def append_until_killed(folder: Path, number: int, seconds: float, dribbling: bool) -> None:
    """Append records with numbers of its own, and note each that was written; sort now and then."""
    if dribbling:
        write = os.write

        def slowly(file: int, data: bytes) -> int:
            time.sleep(0.0002)
            return write(file, data[:60])

        store.os = type("Slow", (), {**vars(os), "write": staticmethod(slowly)})
    one = writer(folder)
    noted = os.open(folder / f"noted_{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    funcs = [stage(rows) for rows in (8, 9, 10 + number)]
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        batch = [number * 1_000_000 + count + index for index in range(1 + count % 5)]
        one.append(funcs[count % 3], [new(trial) for trial in batch])
        os.write(noted, "".join(f"{trial}\n" for trial in batch).encode())
        count += len(batch)
        if count % 7 == 0 and not dribbling:
            one.sort()


def noted_in(folder: Path) -> set[int]:
    lines = [line for path in folder.glob("noted_*") for line in path.read_text().splitlines(keepends=True)]
    return {int(line) for line in lines if line.endswith("\n")}


def test_processes_write_and_sort_at_once_and_are_killed(tmp_path) -> None:
    """Two write as they do; three write slowly, and each of these is killed, mostly in the middle of a line."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    steady = [server.Process(target=append_until_killed, args=(tmp_path, n, 2.0, False)) for n in range(2)]
    doomed = [server.Process(target=append_until_killed, args=(tmp_path, n, 60.0, True)) for n in range(2, 5)]
    for process in (*steady, *doomed):
        process.start()
    for process in doomed:
        noted = tmp_path / f"noted_{doomed.index(process) + 2}"
        while not (noted.is_file() and noted.stat().st_size):
            time.sleep(0.02)
            assert process.is_alive()
        time.sleep(random.Random(process.pid).random() * 0.1)
        os.kill(process.pid, signal.SIGKILL)
    while any(process.is_alive() for process in steady):
        # Whoever reads meanwhile finds all that was written before.
        before = noted_in(tmp_path)
        assert before <= set(trials(tmp_path))
    for process in (*steady, *doomed):
        process.join(60)
    assert [process.exitcode for process in steady] == [0, 0]
    noted = noted_in(tmp_path)
    written = trials(tmp_path)
    assert len(written) == len(set(written)) and noted <= set(written)
    # In flight was one batch of each that was killed: whole lines of it may be there.
    assert len(written) - len(noted) <= 5 * len(doomed)
    log = TuningLog(tmp_path / ARCH, ARCH)
    assert len(log.records) and len(log.problems) <= len(doomed)
    writer(tmp_path).sort()
    log = TuningLog(tmp_path / ARCH, ARCH)
    assert sorted(record.origin.trial for record in log.records) == sorted(written) and not log.problems
    assert len(log.table.workloads) == len({record.workload for record in log.records})
    assert not list((tmp_path / ARCH).glob("*.new"))


def test_threads_share_a_writer(tmp_path) -> None:
    one = writer(tmp_path)

    def work(number: int) -> None:
        for count in range(20):
            one.append(stage(8 + number % 3), [new(number * 100 + count)])
            if count % 9 == number:
                one.sort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = TuningLog(tmp_path / ARCH, ARCH)
    assert sorted(trials(tmp_path)) == sorted(number * 100 + count for number in range(6) for count in range(20))
    assert len(log.table.workloads) == 3 and not log.problems


def test_a_disk_that_is_full_keeps_what_was_there(tmp_path) -> None:
    one = writer(tmp_path)
    one.append(stage(), [new(1), new(0)])
    before = text(tmp_path)
    most, ever = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # There is room for a part of a line, which the system writes before it says that there is no more.
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(map(len, before)) + 100, ever))
        with pytest.raises(OptionError, match=r"cannot be written.*--log DIR"):
            one.append(stage(), [new(trial) for trial in range(2, 20)])
        with pytest.raises(OptionError, match="cannot be written"):
            one.append(stage(9), [new(20)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, ever))
        with pytest.raises(OptionError, match="cannot be written"):
            one.sort()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, ever))
        signal.signal(signal.SIGXFSZ, ignored)
    assert text(tmp_path) == before and len(list((tmp_path / ARCH).iterdir())) == 3
    one.append(stage(9), [new(21)])
    assert trials(tmp_path) == [1, 0, 21] and not TuningLog(tmp_path / ARCH, ARCH).problems
    (tmp_path / ARCH / RECORDS).unlink()
    (tmp_path / ARCH / RECORDS).symlink_to("/dev/full")
    with pytest.raises(OptionError, match="No space left"):
        one.append(stage(), [new(22)])


def test_a_sorted_file_takes_the_place_of_the_other_as_a_whole(tmp_path, monkeypatch) -> None:
    one = writer(tmp_path)
    one.append(stage(), [new(1), new(0)])
    before = text(tmp_path)

    def fails(beside: Path, path: Path) -> None:
        assert (path.read_bytes() in before) and sorted(beside.read_bytes()) == sorted(path.read_bytes())
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OptionError, match="Input/output error"):
        one.sort()
    assert text(tmp_path) == before and not list((tmp_path / ARCH).glob("*.new"))


READING_ONLY = """
import os
from pathlib import Path
from souffle.errors import OptionError
from tests.tuning.test_store import new, stage, writer
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
one = writer(Path("."))
print(len(one.read().records))
for act in (lambda: one.append(stage(), [new(1)]), one.sort, lambda: writer(Path("deeper"))):
    try:
        act()
    except OptionError as error:
        print(error)
"""


def test_a_folder_to_read_only_is_read_and_named(tmp_path) -> None:
    writer(tmp_path).append(stage(), [new(0)])
    before = text(tmp_path)
    read_only = (tmp_path / ARCH, tmp_path, *(tmp_path / ARCH).iterdir())
    for path in read_only:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        command = [sys.executable, "-c", READING_ONLY]
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    finally:
        for path in read_only:
            path.chmod(0o755)
    said = done.stdout.splitlines()
    assert said[:1] == ["1"], done.stderr
    assert len(said) == 4 and all("Permission denied" in line for line in said[1:]), said
    assert text(tmp_path) == before


def test_records_that_are_chosen_stay(tmp_path) -> None:
    one = writer(tmp_path)
    for rows in (8, 9):
        one.append(stage(rows), [new(trial) for trial in range(5)])
    (kept,) = {record.workload for record in one.read().of(stage(8))}

    def choose(log: TuningLog) -> list[Record]:
        return [record for record in log.records if record.workload == kept and record.origin.trial > 2]

    one.reduce(choose)
    log = one.read()
    assert [record.origin.trial for record in log.records] == [3, 4] and list(log.table.workloads) == [kept]
    one.append(stage(9), [new(7)])
    assert [record.origin.trial for record in one.read().of(stage(9))] == [7]
