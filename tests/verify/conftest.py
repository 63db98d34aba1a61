"""The small network of :mod:`tests.verify.wired`, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from souffle.runtime import Network
from tests.verify.wired import compiled


@pytest.fixture(scope="session")
def network() -> Network:
    return compiled()


@pytest.fixture(scope="session")
def in_modules(network: Network) -> Network:
    """Several kernels, in as many texts as there are cores."""
    return compiled("V0")


@pytest.fixture
def file(network: Network, tmp_path: Path) -> Path:
    path = tmp_path / "net.souffle"
    network.save(path)
    return path
