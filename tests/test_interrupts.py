"""Ctrl-C on the command line: one line, exit status 130, and what is finished is shown."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import souffle
from souffle.cli import ablate, check, mutate
from souffle.cli.interruption import INTERRUPTED
from souffle.cli.main import main
from souffle.errors import DeviceError
from souffle.parallel import map_in_threads
from souffle.runtime.cuda import Cuda
from tests.test_bad_input import one_node

_ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(one_node("Softmax", [4, 8]).SerializeToString())
    return path


def _interrupt(*args: object, **options: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _swallowed(*args: object, **options: object) -> None:
    """As a callback of TVM or isl that turns what it meets into an error of its own."""
    try:
        _interrupt()
    except KeyboardInterrupt as error:
        raise DeviceError("in a callback") from error


@pytest.mark.parametrize("action", [_interrupt, _swallowed])
@pytest.mark.parametrize(
    "command",
    [
        *("compile", "explain", "check", "ablate", "bench", "mutate", "tune --trials 1", "run", "verify"),
        "measure-device",
    ],
)
def test_every_command_says_one_line(
    command: str, action: Callable, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("import_onnx", "compile", "tune", "load"):
        monkeypatch.setattr(souffle, name, action)
    monkeypatch.setattr("souffle.runtime.artifact.load", action)
    monkeypatch.setattr("souffle.runtime.artifact.read", action)
    monkeypatch.setattr(Cuda, "__init__", action)
    words = command.split()
    arguments = [*words[:1], "--quiet", *words[1:], *([] if command == "measure-device" else [str(model)])]
    assert main(arguments) == INTERRUPTED
    captured = capsys.readouterr()
    assert captured.err == "souffle: interrupted\n" and captured.out == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("command", "module"), [("check --levels V0 V1", check), ("ablate --no-cubin", ablate)])
def test_levels_that_have_run_are_shown(
    command: str, module: object, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real = souffle.compile

    def compile(*args: object, level: str, **options: object):
        if level == "V1":
            _interrupt()
        return real(*args, level=level, **options)

    monkeypatch.setattr(module.souffle, "compile", compile)
    words = command.split()
    assert main([words[0], str(model), "--quiet", *words[1:]]) == INTERRUPTED
    captured = capsys.readouterr()
    assert captured.err == "souffle: interrupted\n"
    assert [line.split()[0] for line in captured.out.splitlines() if line.startswith(("V0 ", "V1 "))] == ["V0"]


def test_progress_raises_an_interrupt_again_that_was_swallowed(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def compile(*args: object, progress: Callable[[str], None], **options: object) -> None:
        try:
            _interrupt()
        except KeyboardInterrupt:
            progress("going on")
        raise AssertionError("never here")

    monkeypatch.setattr(souffle, "compile", compile)
    assert main(["compile", str(model)]) == INTERRUPTED
    assert capsys.readouterr().err == "souffle: interrupted\n"


def test_an_interrupt_that_a_command_swallowed_ends_it_as_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real = souffle.compile

    def compile(*args: object, **options: object):
        network = real(*args, **options)
        with contextlib.suppress(KeyboardInterrupt):
            _interrupt()
        return network

    monkeypatch.setattr(souffle, "compile", compile)
    assert main(["explain", str(model), "--quiet", "--no-cubin"]) == INTERRUPTED
    assert capsys.readouterr().err == "souffle: interrupted\n"


def test_finalizers_that_an_interrupt_falls_into_say_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Folder:
        def __del__(self) -> None:
            _interrupt()

    class Half:
        def __init__(self) -> None:
            _interrupt()
            self.path = ""

        def __del__(self) -> None:
            print(self.path)

    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    for made in (Folder, Half):
        monkeypatch.setattr(souffle, "compile", lambda *args, made=made, **options: made() and None)
        assert main(["compile", str(model), "--quiet"]) == INTERRUPTED
        assert capsys.readouterr().err == "souffle: interrupted\n" and not heard
    assert sys.unraisablehook == heard.append


def test_nothing_is_begun_after_an_interrupt() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        map_in_threads(1, work, range(1000))
    assert len(begun) < 1000


def _stopped_at(words: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command, and interrupt its group once its progress says something."""
    command = [sys.executable, "-m", "souffle", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=_ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    return process.returncode, out, said + err


def test_a_compilation_ends_at_once(model: Path) -> None:
    status, out, err = _stopped_at("LLVM", "compile", str(model), "--target", "cpu")
    assert (status, out) == (INTERRUPTED, "") and "Traceback" not in err
    assert err.splitlines()[-1] == "souffle: interrupted" and not model.with_suffix(".souffle").exists()


_PROCESS = """
import _thread, atexit, os, signal, sys, threading, time
import souffle
from souffle.cli import main

def interrupt(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)

def compile(*arguments, **options):
{}
souffle.compile = compile
main.entry()
"""

_IN_THE_START_OF_A_THREAD = """
    threading.Event.set = lambda event: None
    threading.Event.wait = interrupt
    threading.Thread(target=time.sleep, args=(60,)).start()
"""

_WHILE_A_THREAD_OF_C_RUNS = """
    seen = threading.Event()
    _thread.start_new_thread(lambda: (threading.current_thread(), seen.set(), time.sleep(60)), ())
    seen.wait()
    interrupt()
"""

_WITH_ITS_READERS = """
    sys.stdout = open(1, "w")  # buffered
    sys.stdout.write("text")
    for file in (1, 2):
        read, write = os.pipe()
        os.dup2(write, file)
        os.close(write)
        os.close(read)
    interrupt()
"""

_BEFORE_THE_COMMAND = """
    pass
main.command_parser  # there is one
main.command_parser = interrupt
"""

_AFTER_THE_COMMAND = """
    raise souffle.SouffleError("refused")
atexit.register(interrupt)
"""


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (_IN_THE_START_OF_A_THREAD, "souffle: interrupted\n"),
        (_WHILE_A_THREAD_OF_C_RUNS, "souffle: interrupted\n"),
        (_WITH_ITS_READERS, ""),
        (_BEFORE_THE_COMMAND, "souffle: interrupted\n"),
    ],
    ids=["in the start of a thread", "while a thread of C runs", "with its readers", "before the command"],
)
def test_an_interrupted_process_ends_with_its_status(where: str, said: str, model: Path) -> None:
    assert _ended(where, "compile", str(model), "--quiet") == (INTERRUPTED, "", said)


def test_an_interrupt_after_a_command_changes_nothing() -> None:
    assert _ended(_AFTER_THE_COMMAND, "compile", "model.onnx") == (2, "", "souffle: SouffleError: refused\n")


def _ended(compile: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command with another function in place of the compiler."""
    command = [sys.executable, "-c", _PROCESS.format(compile), *arguments]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


def test_mutants_that_have_run_are_shown_and_their_processes_end(model: Path) -> None:
    status, out, err = _stopped_at("mutant 2 of", "mutate", str(model), "-n", "4")
    assert status == INTERRUPTED and "Traceback" not in err and err.splitlines()[-1] == "souffle: interrupted"
    assert ", 1 of " in out and mutate.COUNTS[0] in out
