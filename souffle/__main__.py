"""``python -m souffle``."""

from __future__ import annotations

import sys

from souffle.cli.main import main

sys.exit(main())
