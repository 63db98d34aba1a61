"""The page of a report as a file: one that holds all it needs, and nothing of a model that a browser could run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

from souffle.report import page_of, report_of
from tests.report.networks import plan_of

HOSTILE = (
    "</script><script>document.title='taken'</script><!--<img src=x onerror=\"document.title='taken'\">"
    "&amp;'\"\u2028\u2029ünï\x00@@"
)

_WORDS = frozenset(
    {"shown", "level", "scope", "place", "where", "verdict", "kind", "bound", "function", "functions", "arch"}
)
"""Fields that hold words of ours, not of a model."""


def hostile() -> tuple[dict[str, Any], list[str]]:
    """A report in which each name and text ends with what a careless page would run."""
    report = json.loads(json.dumps(report_of(plan_of("mmoe", "V4"))))

    def changed(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: changed(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [changed(one, key) for one in value]
        kept = {
            "shown",
            "level",
            "scope",
            "place",
            "where",
            "verdict",
            "kind",
            "bound",
            "function",
            "functions",
            "arch",
        }
        return value + HOSTILE if isinstance(value, str) and key not in kept else value

    names = report["kernels"][0]["name"]
    return changed(report), [f"// {HOSTILE}\nvoid {names}(int n) {{\n  n = {json.dumps(HOSTILE)};\n}}\n"]


class Elements(HTMLParser):
    """The start tags of a page, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def test_it_holds_the_data_whatever_that_is() -> None:
    report, texts = hostile()
    found = Elements(page_of(report, texts))
    plain = Elements(page_of(report_of(plan_of("mmoe", "V4")), ["void f() {}"]))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    data, cuda, script = found.scripts
    assert json.loads(data) == report and json.loads(cuda) == texts
    assert script == plain.scripts[2]
    for text in (data, cuda):
        assert not re.search("[<>&\u2028\u2029\x00]", text)


def test_it_asks_for_nothing() -> None:
    page = page_of(report_of(plan_of("mmoe", "V2")), ["void f() {}"])
    found = Elements(page)
    assert not [tag for tag, _ in found.tags if tag in {"link", "img", "iframe", "object", "embed", "audio", "video"}]
    assert not [one for _, one in found.tags if {"src", "href"} & one.keys() or any(k.startswith("on") for k in one)]
    policy = next(one["content"] for tag, one in found.tags if tag == "meta" and "http-equiv" in one)
    assert policy.startswith("default-src 'none'")
    # The name of SVG's elements is the only address, and no one fetches it.
    assert set(re.findall(r"https?://[\w./]+", found.scripts[2])) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page and "@import" not in page


def test_text_is_never_read_as_html() -> None:
    script = Elements(page_of(report_of(plan_of("mmoe", "V2")), [""])).scripts[2]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)


def test_it_is_the_same_each_time() -> None:
    pages = {page_of(report_of(plan_of("deep", "V3")), ["text"]) for _ in range(2)}
    assert len(pages) == 1
