"""README.md and docs/: their Python blocks run, their commands are ones that there are, and links lead somewhere.

docs/te-experiments.md and docs/extending.md, which print what they do, have tests of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import souffle
from souffle import models
from souffle.cli.main import command_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "tuning_logs" / "README.md"]
_PYTHON = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\nprints\n\n```\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
_SHELL = re.compile(r"^```sh\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
_EXTRAS = {r"\btorch\b": "torch", r"souffle\.learn\(": "torch_geometric", "stitching-ilp": "highspy"}
"""What a block needs that is optional."""


def _needs(code: str) -> bool:
    """Whether what a block needs is here."""
    return all(importlib.util.find_spec(name) for words, name in _EXTRAS.items() if re.search(words, code))


def _run_blocks(page: Path, namespace: dict[str, object]) -> None:
    text, run = page.read_text(), 0
    for block in _PYTHON.finditer(text):
        if not _needs(block["code"]):
            continue
        line = text.count("\n", 0, block.start()) + 1
        # Line numbers of an error are those of the page.
        code = compile("\n" * line + block["code"], str(page), "exec")
        found = io.StringIO()
        with contextlib.redirect_stdout(found):
            exec(code, namespace)
        run += 1
        if block["printed"] is not None:
            assert found.getvalue() == block["printed"], f"{page.name}, line {line}"
    assert run


@pytest.mark.xdist_group("bert")
def test_the_blocks_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user, who has a cache: what a block compiles, another one finds."""
    monkeypatch.setenv("SOUFFLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SOUFFLE_CACHE_GB", "1")
    monkeypatch.chdir(tmp_path)
    _run_blocks(ROOT / "README.md", {})


_QUICK = {"level": "V1", "cubin": False, "device": "cpu"}


@pytest.fixture(scope="module")
def network() -> souffle.Network:
    """What pages have compiled."""
    return souffle.compile(models.build("bert", "tiny"), target="cuda", **_QUICK)


@pytest.fixture
def quick(
    network: souffle.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, object]]:
    """A folder with what pages take for granted; compilations are cheap where pages do not say how."""
    for name in ("bert", "lstm", "mmoe"):
        (tmp_path / f"{name}.onnx").write_bytes(models.build(name, "tiny").SerializeToString())
    monkeypatch.chdir(tmp_path)
    compiled: Callable[..., object] = souffle.compile
    monkeypatch.setattr(souffle, "compile", lambda model, **options: compiled(model, **{**_QUICK, **options}))
    network.save("bert.souffle")
    (tmp_path / "edited.cu").write_text(network.kernels[0].text)
    inputs = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in network.inputs}
    yield {"souffle": souffle, "models": models, "inputs": inputs}


@pytest.mark.parametrize("page", ["debugging", "planners", "pytorch", "learning", "verification"])
def test_the_blocks_of_a_page(page: str, quick: dict[str, object]) -> None:
    path = ROOT / "docs" / f"{page}.md"
    if not any(_needs(block["code"]) for block in _PYTHON.finditer(path.read_text())):
        pytest.skip("needs what is not installed here")
    _run_blocks(path, quick)


def _commands(page: Path) -> Iterator[str]:
    for block in _SHELL.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.partition(" #")[0].split("&&"):
                yield command.strip()


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_commands_are_ones_that_there_are(page: Path) -> None:
    parser = command_parser()
    for command in _commands(page):
        words = shlex.split(command.partition(" | ")[0].partition(" > ")[0].rstrip(";"))
        while words and "=" in words[0]:
            words = words[1:]
        if words[:2] == ["python", "-m"] and words[2] != "souffle":
            if words[2].startswith(("benchmarks", "souffle")):
                assert importlib.util.find_spec(words[2]), command
            elif words[2] == "pytest":
                named = [word for word in words[3:] if word.startswith("tests/")]
                assert all((ROOT / name.partition("::")[0]).exists() for name in named), command
            continue
        if words[:1] != ["souffle"] and words[:3] != ["python", "-m", "souffle"]:
            continue
        arguments = words[1:] if words[0] == "souffle" else words[3:]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{page.name}: {command}\n{said.getvalue()}")


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_lead_to_files(page: Path) -> None:
    broken = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken
