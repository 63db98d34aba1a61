"""The page of a report in a browser, headless; where there is no Chromium, nothing is tested here."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chromium import Page, chromium_page, find_chromium
from souffle.report import page_of, report_of
from tests.report.networks import plan_of
from tests.report.test_page import HOSTILE, hostile

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")

TEXT = "document.getElementById('detail').innerText"
TABS = ("overview", "program", "tensors", "waits", "decisions", "certificate", "cuda")


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium_page(find_chromium()) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    browser.problems.clear()
    yield browser
    assert browser.problems == []


def shown(page: Page, folder: Path, name: str, level: str) -> dict[str, Any]:
    """Open the report of a network."""
    plan = plan_of(name, level)
    report = report_of(plan)
    path = folder / "report.html"
    path.write_text(page_of(report, [module.text for module in plan.modules]), encoding="utf-8")
    page.open(path)
    return report


def at(page: Page, address: str) -> str:
    """Go to an address of the page; what the panel then says."""
    page.run(f"location.hash = {json.dumps(address)}")
    page.frame()
    return page.run(TEXT)


def test_the_first_screen_says_what_it_costs(page: Page, tmp_path: Path) -> None:
    report = shown(page, tmp_path, "deep", "V3")
    level = report["levels"][0]
    head = page.run("document.querySelector('h1').innerText")
    assert f"{level['kernels']} kernel of {len(report['stages'])} stages" in head
    assert f"{level['predicted_seconds'] * 1e6:.1f} µs" in head
    assert page.run("document.querySelector('h1').getBoundingClientRect().bottom") < 400
    figures = page.run("document.querySelector('.figures').innerText")
    assert str(level["grid_syncs"]) in figures and "PROVEN" in figures
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_everything_that_can_be_selected_is_told(page: Page, tmp_path: Path) -> None:
    report = shown(page, tmp_path, "deep", "V3")
    kinds = ("stage", "launch", "loop", "wait", "tensor", "decision")
    lists = ("stages", "launches", "loops", "waits", "tensors", "decisions")
    for kind, key in zip(kinds, lists, strict=True):
        for number in range(min(len(report[key]), 12)):
            text = at(page, f"#program/{kind}/{number}")
            assert len(text) > 60 and "undefined" not in text and "NaN" not in text, (kind, number, text)
    wait = report["waits"][0]
    text = at(page, "#waits/wait/0")
    assert wait["reason"] in text and report["stages"][wait["before"]]["name"] in text


def test_why_two_stages_are_in_different_kernels(page: Page, tmp_path: Path) -> None:
    report = shown(page, tmp_path, "mmoe", "V2")
    place, stage = next((n, s) for n, s in enumerate(report["stages"]) if s["needs"])
    text = at(page, f"#program/stage/{place}")
    assert "different kernels" in text
    refused = [
        report["decisions"][n] for n in stage["decisions"] if n in report["stages"][stage["needs"][0]]["decisions"]
    ]
    assert any(reason in text for _, _, _, reason in refused)


def test_why_there_is_a_wait(page: Page, tmp_path: Path) -> None:
    report = shown(page, tmp_path, "deep", "V3")
    for wait in report["waits"]:
        if wait["place"] == "before" and wait["after"] in report["stages"][wait["before"]]["needs"]:
            text = at(page, f"#program/stage/{wait['before']}")
            assert f"between them, for this: {wait['reason']}" in text


def test_the_tensor_that_costs_most_is_first(page: Page, tmp_path: Path) -> None:
    report = shown(page, tmp_path, "deep", "V3")
    most = max(report["tensors"], key=lambda tensor: tensor["read"] + tensor["written"])
    page.press("3")
    first = page.run("document.querySelector('.list .row').title")
    found = next(tensor for tensor in report["tensors"] if tensor["name"] == first)
    assert found["read"] + found["written"] == most["read"] + most["written"]
    page.press("ArrowDown")
    assert report["tensors"][0]["name"] and "rank" in page.run(TEXT)


def test_clicks_and_parts(page: Page, tmp_path: Path) -> None:
    report = shown(page, tmp_path, "deep", "V3")
    for number, name in enumerate(TABS):
        page.click("#tabs button", number)
        assert page.run("location.hash").startswith(f"#{name}")
        assert len(page.run("document.getElementById('main').innerText")) > 100
    page.click("#tabs button", 1)
    page.click(".program .row.stage", 1)
    assert report["stages"][1]["name"] in page.run(TEXT)
    assert page.run("document.querySelectorAll('.program .arcs path.in, .program .arcs path.out').length") > 0
    page.run("document.querySelector('#detail details summary').click()")
    page.click(".program .row.kernel [data-twist]")
    assert page.run("document.querySelectorAll('.program .row.stage').length") == 0
    page.click(".program .row.kernel [data-twist]")
    assert page.run("document.querySelectorAll('.program .row.stage').length") == len(report["stages"])
    # What was clicked can be gone back from.
    page.run("history.back()")
    page.wait("document.querySelectorAll('#main > *').length > 0")


def test_the_text_of_a_stage_and_of_its_kernel(page: Page, tmp_path: Path) -> None:
    report = shown(page, tmp_path, "deep", "V3")
    for address, name in (
        ("#program/stage/0", report["stages"][0]["function"]),
        ("#program/launch/0", report["kernels"][0]["name"]),
    ):
        at(page, address)
        page.run("[...document.querySelectorAll('#detail details')].forEach((one) => { one.open = true; })")
        page.frame()
        texts = page.run("[...document.querySelectorAll('#detail pre')].map((one) => one.textContent)")
        text = next(text for text in texts if f"{name}(" in text)
        assert text.count("{") == text.count("}") > 0 and text.endswith("}")


def test_keys(page: Page, tmp_path: Path) -> None:
    report = shown(page, tmp_path, "deep", "V3")
    page.press("2")
    assert page.run("document.activeElement.getAttribute('role')") == "tree"
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert page.run("document.querySelectorAll('[aria-selected=true].row').length") == 1
    active = page.run("document.activeElement.getAttribute('aria-activedescendant')")
    assert page.run(f"document.getElementById({json.dumps(active)}).getAttribute('aria-selected')") == "true"
    page.press("ArrowLeft")
    assert page.run("document.querySelectorAll('.row.stage').length") == 0
    page.press("ArrowRight")
    assert page.run("document.querySelectorAll('.row.stage').length") == len(report["stages"])
    page.press("Enter")
    assert page.run("document.activeElement.id") == "detail"
    page.press("/")
    assert page.run("document.activeElement.id") == "search"
    wanted = report["stages"][-1]["name"]
    page.type(wanted)
    assert page.run("document.querySelectorAll('.row.stage').length") >= 1
    page.press("Enter")
    assert wanted in page.run(TEXT)
    page.press("/")
    page.type("no stage has this")
    assert page.run("document.querySelectorAll('.row').length") == 0
    assert "Nothing has these letters" in page.run("document.getElementById('main').innerText")
    page.press("Escape")
    assert page.run("document.querySelectorAll('.row.stage').length") == len(report["stages"])
    # All that can be reached by the tab key shows that it has been.
    page.press("1")
    for _ in range(12):
        page.press("Tab")
        outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.run("document.activeElement === document.body")


def test_light_and_dark(page: Page, tmp_path: Path) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        shown(page, tmp_path, "mmoe", "V4")
        seen[scheme] = page.run(colour)
        assert page.run("document.documentElement.dataset.theme") == scheme
    assert seen["light"] != seen["dark"]
    page.click("#theme")
    assert page.run(colour) == seen["light"]
    page.prefer("light")


def test_names_that_would_be_code_are_text(page: Page, tmp_path: Path) -> None:
    report, texts = hostile()
    path = tmp_path / "hostile.html"
    path.write_text(page_of(report, texts), encoding="utf-8")
    page.open(path)
    for tab in TABS:
        at(page, f"#{tab}/stage/0")
        assert page.run("document.title") != "taken"
    assert page.run("document.querySelectorAll('img').length") == 0
    assert "<img src=x onerror=" in at(page, "#program/stage/0")
    assert HOSTILE.split("\u2028")[0] in page.run("document.querySelector('#detail h2').textContent")


def test_thousands_of_stages_do_not_stall(page: Page, tmp_path: Path) -> None:
    """Five thousand, each a launch of its own: what cannot be seen is not in the page."""
    report = json.loads(json.dumps(report_of(plan_of("mmoe", "V2"))))
    each = len(report["stages"])
    pattern = {key: copy.deepcopy(report[key]) for key in ("stages", "launches")}
    for again in range(1, 5000 // each):
        for stage in copy.deepcopy(pattern["stages"]):
            stage["launch"] += again * each
            stage["needs"] = [maker + again * each for maker in stage["needs"]]
            report["stages"].append(stage)
        for number, launch in enumerate(copy.deepcopy(pattern["launches"])):
            launch["stages"] = [stage + again * each for stage in launch["stages"]]
            launch["like"] = number
            report["launches"].append(launch)
    path = tmp_path / "long.html"
    path.write_text(page_of(report, [""] * 8), encoding="utf-8")
    page.open(path)
    page.press("2")
    total = len(report["stages"]) + len(report["launches"])
    assert page.run("document.querySelector('.list .row').getAttribute('aria-setsize')") == str(total)
    assert page.run("document.querySelectorAll('*').length") < 2500
    page.press("End")
    assert page.run(TEXT).startswith(f"Stage 1 of 1, kernel {each}, launch {len(report['launches'])}")
    page.press("/")
    page.type(report["stages"][0]["name"])
    assert page.run("document.querySelectorAll('.row.stage').length") > 0
    assert page.run("document.querySelectorAll('*').length") < 2500


def test_the_time_line_is_as_long_as_what_is_predicted(page: Page, tmp_path: Path) -> None:
    for name, level in (("deep", "V3"), ("mmoe", "V2")):
        report = shown(page, tmp_path, name, level)
        page.wait("document.querySelector('.timeline .readout span').innerText.includes('µs')")
        said = page.run("document.querySelector('.timeline .readout span').innerText")
        assert said.startswith(f"{report['levels'][0]['predicted_seconds'] * 1e6:.1f} µs")
        page.run("document.querySelector('.timeline canvas').focus()")
        page.press("ArrowRight")
        page.press("ArrowRight")
        page.press("Enter")
        assert report["stages"][0]["name"] in page.run(TEXT)
