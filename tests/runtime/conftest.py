"""What tests of the runtime share."""

from __future__ import annotations

import pytest

from benchmarks.rehearsal_driver import RehearsalDriver


@pytest.fixture(params=[False, True], ids=["at once", "deferred"])
def both_modes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Played drivers that run work when it is queued, and ones that run it as late as they can; whether the latter."""
    monkeypatch.setitem(RehearsalDriver.__init__.__kwdefaults__, "deferred", request.param)
    return request.param
