"""``python -m souffle``."""

from __future__ import annotations

from souffle.cli.main import entry

entry()
