"""The page of a report: its data, its style and its script in one HTML file, which asks for nothing from a network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from souffle.report.schema import Report

__all__ = ["page_of"]

_ASSETS = Path(__file__).with_name("assets")

_SCRIPTS = (
    *("format.js", "model.js", "list.js", "graph.js", "tables.js", "timeline.js"),
    *("parts.js", "detail_stage.js", "detail.js", "overview.js", "app.js"),
)
"""In the order in which they need each other."""

_STYLES = ("report.css",)

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""What a browser lets the page do: run what is in it, and fetch nothing."""

_HARMLESS = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What would end a script, or begin a comment in it, as JSON can say it without."""


def page_of(report: Report, texts: Sequence[str]) -> str:
    """One HTML file.

    Parameters
    ----------
    report : Report
        From :func:`souffle.report.report_of`.
    texts : sequence of str
        The CUDA texts of the modules that its kernels name.
    """
    template = (_ASSETS / "page.html").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(f"{report['name']} at {report['shown']}: Souffle report"),
        "policy": html.escape(_POLICY),
        "style": "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in _STYLES),
        "report": _embedded(report),
        "texts": _embedded(list(texts)),
        "script": "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    # Pieces of the template and names of parts take turns.
    pieces = template.split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _embedded(value: Any) -> str:
    """JSON that may stand in a script element whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escaped in _HARMLESS.items():
        text = text.replace(character, escaped)
    return text
