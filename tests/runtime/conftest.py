"""What tests of running networks have: only their own garbage is looked through."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_garbage() -> Iterator[None]:
    """What is collected in a test is what it has left: to look through all that the worker holds takes a second."""
    gc.freeze()
    yield
    gc.unfreeze()
