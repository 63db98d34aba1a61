"""Caches that cannot be used, or hold what nobody wrote whole: a warning at most, and the same results."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from souffle import cache
from souffle.cache import cache_root, read_entry, write_entry
from souffle.codegen import nvcc
from souffle.emulator import toolchain
from souffle.runtime import Network
from tests.runtime.plans import cooperative_expected, cooperative_plan

_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo played; exit; fi
while [ "$1" != -o ]; do shift; done
echo run >> "$0.runs"; printf image > "$2"
echo "ptxas info    : Compiling entry function 'k' for 'sm_90'"; echo "ptxas info    : Used 24 registers, 8 bytes smem"
"""


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_warned", set())


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A played nvcc; what it is run for is a line in this file."""
    compiler = tmp_path / "nvcc"
    compiler.write_text(_NVCC)
    compiler.chmod(0o755)
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: compiler)
    return tmp_path / "nvcc.runs"


def _unusable(kind: str, tmp_path: Path) -> Path:
    if kind == "a file in the way":
        (tmp_path / "file").write_text("")
        return tmp_path / "file" / "cache"
    if kind == "it is a file":
        (tmp_path / "file").write_text("")
        return tmp_path / "file"
    return Path("/proc/souffle/cache")  # not even root can make it


@pytest.mark.parametrize("kind", ["a file in the way", "it is a file", "not allowed"])
def test_a_folder_that_cannot_be_used_is_a_warning_and_no_cache(
    kind: str, tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _unusable(kind, tmp_path)
    for _ in range(2):
        image, resources = nvcc.compile_cubin("text", "sm_90", cache_dir=folder)
        assert image == b"image" and resources["k"].registers == 24
    assert runs.read_text() == "run\n" * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"] and str(folder) in caplog.text
    monkeypatch.setenv("SOUFFLE_CACHE", str(folder))
    x = np.ones((10, 10), np.float32)
    for options in ({}, {"cache_dir": folder}):
        outputs = Network(cooperative_plan(), device="cpu", **options)(x)
        np.testing.assert_allclose(outputs["again"], cooperative_expected(x)["again"], rtol=1e-4)
    assert len(caplog.records) <= 2


@pytest.mark.parametrize("home", ["here", None])
def test_without_a_home_there_is_no_cache(
    home: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("SOUFFLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is None:

        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(cache.Path, "home", no_home)
    else:
        monkeypatch.setenv("HOME", home)
    assert cache_root() is cache_root() is None
    assert len(caplog.records) == 1
    assert toolchain.default_cache_dir().is_dir()


def test_an_entry_that_is_not_whole_is_made_again(tmp_path: Path, runs: Path) -> None:
    folder = tmp_path / "cache"
    nvcc.compile_cubin("text", "sm_90", cache_dir=folder)
    made = sorted(folder.iterdir())
    assert {path.suffix for path in made} == {".cubin", ".txt"}
    count = 1
    for path in made:
        whole = path.read_bytes()
        for broken in (b"", whole[:3], whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], None):
            path.unlink() if broken is None else path.write_bytes(broken)
            assert nvcc.compile_cubin("text", "sm_90", cache_dir=folder)[0] == b"image"
            count += 1
            assert runs.read_text() == "run\n" * count and path.read_bytes() == whole
    nvcc.compile_cubin("text", "sm_90", cache_dir=folder)
    assert runs.read_text() == "run\n" * count and sorted(folder.iterdir()) == made


def test_half_a_library_is_not_loaded(tmp_path: Path) -> None:
    source = 'extern "C" int answer() { return 42; }\n'
    path = toolchain.build_kernel_library(source, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert toolchain.build_kernel_library(source, tmp_path) == path and len(path.read_bytes()) == len(whole)
    assert toolchain.build_kernel_library(source, tmp_path) == path
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == [path.name]


def test_readers_find_the_whole_of_an_entry_while_others_write_it(tmp_path: Path) -> None:
    path, content = tmp_path / "entry", b"x" * 100_000
    seen: set[bytes | None] = set()

    def work() -> None:
        for _ in range(20):
            assert write_entry(path, content)
            seen.add(read_entry(path))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {content} and list(tmp_path.iterdir()) == [path]
