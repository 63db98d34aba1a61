"""What is installed: the networks as ``souffle.models``, and no package beside ``souffle``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from souffle import models

ROOT = Path(__file__).resolve().parents[1]


def _run(*arguments: str | Path, cwd: Path, path: str = "") -> str:
    """A process that finds only what lies in `cwd`, in `path`, and in the environment."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel holds: ``bdist_wheel`` packs this folder."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("no setuptools, which builds wheels")
    folder = tmp_path_factory.mktemp("wheel")
    # Nothing is written into the checkout, which other workers use at the same time.
    egg_info = ("egg_info", "--egg-base", folder)
    build = ("build", "--build-base", folder / "build", "--build-lib", folder / "lib")
    _run("setup.py", "-q", *egg_info, *build, cwd=ROOT)
    return folder / "lib"


def _files(folder: Path) -> dict[str, bytes]:
    walk = os.walk(folder, followlinks=True)
    paths = [Path(base, name) for base, _, names in walk for name in names if not name.endswith(".pyc")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_a_wheel_holds_one_package_and_all_of_it(installed: Path) -> None:
    assert [path.name for path in installed.iterdir()] == ["souffle"]
    found = _files(installed / "souffle")
    logs = {name: text for name, text in _files(ROOT / "tuning_logs").items() if name.endswith(".jsonl")}
    expected = _files(ROOT / "souffle") | {f"tuning_logs/{name}": text for name, text in logs.items()}
    assert sorted(found) == sorted(expected)
    assert found == expected
    networks = {name.removeprefix("models/") for name in found if name.startswith("models/")}
    assert networks == {path.name for path in (ROOT / "models").glob("*.py")}


@pytest.mark.parametrize("origin", ["checkout", "wheel"])
def test_the_networks_are_souffles(origin: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Those of the folder at hand, even where another checkout is installed; and none is loaded under two names."""
    root = ROOT if origin == "checkout" else request.getfixturevalue("installed")
    _run("-m", "souffle.models", "mmoe", "--size", "tiny", "-o", tmp_path / "mmoe.onnx", cwd=root)
    assert onnx.load(str(tmp_path / "mmoe.onnx")) == models.build("mmoe")
    program = (
        "import sys\n"
        "import souffle.models\n"
        "print(souffle.models.__file__)\n"
        "print(*(name for name in sys.modules if name.split('.')[0] == 'models'))\n"
    )
    where, others = _run("-c", program, cwd=tmp_path, path=str(root)).split("\n")[:2]
    assert Path(where) == root / "souffle" / "models" / "__init__.py"
    assert others == ""
