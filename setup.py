"""Puts the tuning logs, which lie beside the package in a checkout, inside of it in a wheel."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithLogs(build_py):
    """Copies ``tuning_logs/<arch>/*.jsonl`` to ``souffle/tuning_logs``."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for log in sorted(Path("tuning_logs").glob("*/*.jsonl")):
            target = Path(self.build_lib) / "souffle" / log
            self.mkpath(str(target.parent))
            self.copy_file(str(log), str(target))


setup(cmdclass={"build_py": BuildWithLogs})
