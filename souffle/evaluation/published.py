"""What the papers report, from the one file that holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["PublishedTable", "published", "table_names"]

_FILE = Path(__file__).parent / "data" / "published.json"

PublishedTable = Mapping[str, Any]
"""``paper`` (with its title), ``where``, ``section``, ``title``, ``unit``, ``gpus``, ``columns`` and ``rows``: each has
``name``, ``cells``, and ``network`` where one of :mod:`souffle.models` stands for it."""


@cache
def _content() -> Mapping[str, Any]:
    return json.loads(_FILE.read_text())


def table_names() -> tuple[str, ...]:
    """The tables and figures that the file has."""
    return tuple(_content()["tables"])


def published(name: str) -> PublishedTable:
    """A table or figure.

    Parameters
    ----------
    name : str
        One of :func:`table_names`.
    """
    table = _content()["tables"][name]
    return {**table, "paper": _content()["papers"][table["paper"]]}
