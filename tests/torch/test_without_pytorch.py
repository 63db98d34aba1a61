"""What is said where PyTorch is missing or old: PyTorch is optional, and nothing loads it unasked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import souffle.torch
from souffle.errors import IncompatibleEnvironmentError

_ROOT = Path(__file__).resolve().parents[2]
_BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import souffle
assert "from_torch" in dir(souffle) and "torch" in dir(souffle)
import souffle.torch
assert "breaks" in dir(souffle.torch)
assert "torch" not in sys.modules
try:
    souffle.from_torch
except souffle.SouffleError as error:
    print(error)
"""


def test_a_missing_pytorch_is_told_in_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED], cwd=_ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "need PyTorch 2.9 or later, which cannot be imported (torch is blocked)" in done.stdout
    assert "pip install 'souffle-dl[torch]'" in done.stdout


@pytest.mark.parametrize(
    ("version", "refused"), [("2.8.1+cpu", True), ("1.13.0", True), ("2.9.0", False), ("3.0a0", False)]
)
def test_an_old_pytorch_is_told_with_its_version(version: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stands_for = type(sys)("torch")
    stands_for.__version__ = version
    monkeypatch.setitem(sys.modules, "torch", stands_for)
    if refused:
        with pytest.raises(IncompatibleEnvironmentError, match=f"this is {version.split('+')[0]}"):
            souffle.torch.require()
    else:
        souffle.torch.require()
