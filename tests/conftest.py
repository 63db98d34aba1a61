"""What all tests have: golden files, and one worker for what a module builds once."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rehearsal_driver import RehearsalDriver
from souffle.garbage import collect_rarely
from souffle.models import NAMES
from souffle.schedule.gpu.scheduler import ANSWERS, LEAST
from tests.thorough import THOROUGH, chosen

_GOLDEN = Path(__file__).parent / "golden"


# Tests see the compiler at work, whatever ran before.
os.environ["SOUFFLE_CACHE_GB"] = "0"

collect_rarely()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what was printed into tests/golden")


def _is_shared(fixture: pytest.FixtureDef) -> bool:
    ours = fixture.func.__module__.startswith("tests.")
    return fixture.scope == "module" or (fixture.scope == "session" and ours)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """What takes long is made by one worker, not by each (``--dist loadgroup``).

    That is what a fixture of a whole module makes, or one of all tests that is ours, and the schedules of a paper's
    network, which tests of many modules compile: those that have its name as a parameter, or a mark of that name.
    """
    # Who names a case has it.
    if not THOROUGH and not any("::" in argument for argument in config.args):
        kept = list(chosen(items))
        config.hook.pytest_deselected(items=list(set(items).difference(kept)))
        items[:] = kept
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        if item.get_closest_marker("xdist_group") is not None:
            continue
        shared = any(_is_shared(last) for *_, last in fixtures.values())
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        networks = sorted({value for value in given if isinstance(value, str) and value in NAMES})
        if shared:
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
        elif networks:
            item.add_marker(pytest.mark.xdist_group(networks[0]))
    # Before xdist's own, which reads the marks and asks to be first.
    return (yield)


_SCHEDULED_BY = ("tvm", *(f"souffle.{part}" for part in ("cost", "index", "multi", "program", "schedule", "tvm")))

_changed: set[int] = set()
"""Those ``monkeypatch`` es, by identity, that have changed something that stages are scheduled by."""


def _forget() -> None:
    ANSWERS.forget()
    LEAST.forget()


def _forgetting(change: Callable) -> Callable:
    """A method of ``monkeypatch`` that has stages scheduled anew, which answers from before it would hide."""

    @functools.wraps(change)
    def changed(patch: pytest.MonkeyPatch, target: Any, *arguments: Any, **options: Any) -> Any:
        named = getattr(target, "__module__", None) or getattr(target, "__name__", "")
        of = target if isinstance(target, str) else named
        if of.startswith(_SCHEDULED_BY) or (not of and target is not os.environ):
            _changed.add(id(patch))
            _forget()
        return change(patch, target, *arguments, **options)

    return changed


def _undoing(undo: Callable) -> Callable:
    @functools.wraps(undo)
    def undone(patch: pytest.MonkeyPatch) -> None:
        if id(patch) in _changed:
            _changed.remove(id(patch))
            _forget()
        undo(patch)

    return undone


for _name in ("setattr", "delattr", "setitem", "delitem"):
    setattr(pytest.MonkeyPatch, _name, _forgetting(getattr(pytest.MonkeyPatch, _name)))
pytest.MonkeyPatch.undo = _undoing(pytest.MonkeyPatch.undo)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: `text` is what ``tests/golden/name`` holds."""

    def compare(name: str, text: str) -> None:
        path = _GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.is_file(), f"{path.name} is missing; run pytest with --update-golden to write it"
        assert text == path.read_text(), f"{path.name} differs; if that is meant, run pytest with --update-golden"

    return compare


@pytest.fixture(params=[False, True], ids=["at once", "deferred"])
def both_modes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Played drivers that run work when it is queued, and ones that run it as late as they can; whether the latter."""
    monkeypatch.setitem(RehearsalDriver.__init__.__kwdefaults__, "deferred", request.param)
    return request.param


@pytest.fixture
def threads_that_take_turns() -> Iterator[None]:
    """Threads give way to others as often as Python lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
