"""What all texts begin with is compiled once for each kind of text; g++ takes it, or does without."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
from pathlib import Path

import pytest

from souffle.cache import read_entry
from souffle.emulator import toolchain
from souffle.errors import CudaCompileError
from tests.thorough import some

pytestmark = pytest.mark.sampled(4)

SHOWN = 'extern "C" __attribute__((visibility("default")))'


def text(number: int) -> str:
    return f"{SHOWN} int answer() {{ return (int)fminf({number}.0f, 1e6f); }}\n"


def answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the CPU device keeps what it compiles, of which nothing is there yet."""
    monkeypatch.setenv("SOUFFLE_CACHE", str(tmp_path / "cache"))
    toolchain._compiled_prelude.cache_clear()
    return tmp_path / "cache" / "cpu_device"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that appends the headers that it opened to a file; ``!`` marks one that was compiled before."""
    log, command = tmp_path / "headers", tmp_path / "gxx"
    real = shutil.which("g++")
    assert real is not None
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(real)} -H "$@" 2>> {shlex.quote(str(log))}\n')
    command.chmod(0o755)
    log.write_text("")
    monkeypatch.setenv("SOUFFLE_CXX", str(command))
    return log


def taken(log: Path) -> list[str]:
    return [line[2:] for line in log.read_text().splitlines() if line.startswith("! ")]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("prelude-*/*.gch"))


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
def test_it_is_compiled_once_and_taken(tmp_path: Path, folder: Path, asked: Path, checked: bool) -> None:
    """Wherever the texts are kept."""
    for number, own in ((7, folder), (8, tmp_path / "elsewhere"), (9, None)):
        library = toolchain.build_kernel_library(text(number), own, checked=checked)
        assert checked or answer(library) == number  # who loads a checked one has the runtime's functions
    (made,) = entries(folder)
    assert taken(asked) == [str(made)] * 3


@pytest.mark.thorough("that one is compiled once and taken is above")
def test_kinds_of_texts_have_their_own(folder: Path, asked: Path) -> None:
    for checked in (False, True):
        for rest in (None, text(3)):
            source = text(4) if rest is None else "int other() { return 1; }\n"
            library = toolchain.build_kernel_library(source, folder, checked=checked, rest=rest)
            assert checked or answer(library) == (4 if rest is None else 3)
    assert len(entries(folder)) == 4 and set(taken(asked)) == set(map(str, entries(folder)))


@pytest.mark.parametrize("damage", some(["half", "folder gone", "another's"], ["empty", "changed", "gone"]))
def test_one_that_cannot_be_taken_costs_nothing_but_time(folder: Path, asked: Path, damage: str) -> None:
    toolchain.build_kernel_library(text(1), folder)
    (made,) = entries(folder)
    whole = made.read_bytes()
    if damage == "folder gone":
        shutil.rmtree(made.parent)
    elif damage == "gone":
        made.unlink()
    elif damage == "another's":
        toolchain.build_kernel_library(text(1), folder, checked=True)
        (other,) = set(entries(folder)) - {made}
        shutil.copy(other, made)
    else:
        middle = len(whole) // 2
        shown = {"empty": b"", "half": whole[:middle], "changed": whole[:middle] + bytes(len(whole) - middle)}
        made.write_bytes(shown[damage])
    # This process looked at it before it was damaged; the next one makes it anew.
    assert answer(toolchain.build_kernel_library(text(2), folder)) == 2
    toolchain._compiled_prelude.cache_clear()
    asked.write_text("")
    assert answer(toolchain.build_kernel_library(text(3), folder)) == 3
    assert read_entry(made) is not None and taken(asked) == ([] if damage == "another's" else [str(made)])


def test_it_cannot_be_kept(folder: Path, asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    real = toolchain._key
    monkeypatch.setattr(toolchain, "_key", lambda *parts: "taken" if parts[0].startswith("-std") else real(*parts))
    (folder / "prelude-taken").write_text("a file where the folder would be")
    assert answer(toolchain.build_kernel_library(text(5), folder)) == 5
    assert not entries(folder) and not taken(asked)


def test_it_lies_with_the_texts_where_the_cache_is_no_folder(
    tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SOUFFLE_CACHE", str(tmp_path / "file"))
    for number in (3, 4):
        assert answer(toolchain.build_kernel_library(text(number), tmp_path / "texts")) == number
    (made,) = entries(tmp_path / "texts")
    assert taken(asked) == [str(made)] * 2


def test_errors_are_those_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "int good;\n#line 40\nint bad = unknown;\n"
    with pytest.raises(CudaCompileError) as with_it:
        toolchain.build_kernel_library(wrong, tmp_path)
    monkeypatch.setattr(toolchain, "_compiled_prelude", lambda flags, folder: None)
    with pytest.raises(CudaCompileError, match=r":40:.*unknown") as without:
        toolchain.build_kernel_library(wrong, tmp_path)
    assert str(with_it.value) == str(without.value)


def test_old_ones_are_removed(folder: Path) -> None:
    for age in range(12):
        entry = folder / f"prelude-{age:024}" / "souffle_device.h.gch"
        entry.parent.mkdir(parents=True)
        entry.write_bytes(b"old")
        os.utime(entry, (1e9 - age, 1e9 - age))
    toolchain.build_kernel_library(text(6), folder)
    left = entries(folder)
    assert len(left) == len(list(folder.glob("prelude-*"))) == toolchain._MOST_PRELUDES
    assert sum(entry.read_bytes() == b"old" for entry in left) == toolchain._MOST_PRELUDES - 1
    ages = [int(entry.parent.name.removeprefix("prelude-")) for entry in left if entry.read_bytes() == b"old"]
    assert ages == list(range(toolchain._MOST_PRELUDES - 1))
