"""Ctrl-C on the command line: one line, exit status 130, and what is finished is shown."""

from __future__ import annotations

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
    "command", ["compile", "explain", "check", "ablate", "mutate", "tune --trials 1", "run", "verify", "measure-device"]
)
def test_every_command_says_one_line(
    command: str, action: Callable, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("import_onnx", "compile", "tune", "load"):
        monkeypatch.setattr(souffle, name, action)
    monkeypatch.setattr("souffle.runtime.artifact.load", action)
    monkeypatch.setattr("souffle.cli.verify.load", action, raising=False)
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


def test_mutants_that_have_run_are_shown_and_their_processes_end(model: Path) -> None:
    status, out, err = _stopped_at("mutant 2 of", "mutate", str(model), "-n", "4")
    assert status == INTERRUPTED and "Traceback" not in err and err.splitlines()[-1] == "souffle: interrupted"
    assert ", 1 of " in out and mutate.COUNTS[0] in out
