"""Every step of a compilation as a numbered file, written as it comes, so that a failing one leaves what it has."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from souffle.certificate import Certificate
from souffle.codegen.plan import Plan
from souffle.errors import OptionError
from souffle.options import Hook
from souffle.runtime.plan_json import plan_to_json

__all__ = ["Dump"]

_TEXT = "text"
"""The step that comes once for each module; its files are numbered among themselves."""

_AN_EARLIER_ONE_S = re.compile(
    r"\d\d+_(frontend|gathered|precision|horizontal|vertical|narrow|two_phase|roll|fusion|analysis|schedule|lower|"
    r"partition|merge)\.txt|\d\d+_text_\d+\.cu|plan\.json|decisions\.txt|certificate\.txt"
)


class Dump:
    """A folder for the steps of one compilation.

    Parameters
    ----------
    folder : path
        Made where there is none. The files that an earlier dump left there are removed, others are kept.

    Raises
    ------
    OptionError
        If nothing can be written there.

    Attributes
    ----------
    folder : Path
    files : list of str
        The names of those written so far.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.files: list[str] = []
        self._number = -1
        self._modules = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                if _AN_EARLIER_ONE_S.fullmatch(path.name):
                    path.unlink()
        except OSError as error:
            raise self._cannot(error) from error

    def around(self, hook: Hook) -> Hook:
        """A hook that writes what `hook` gives: what the compiler goes on with."""

        def writing(stage: str, result: object) -> object:
            result = hook(stage, result)
            self._write(self._name(stage), str(result))
            return result

        return writing

    def plan(self, plan: Plan) -> None:
        """Write what was compiled: its structure, its decisions and its certificate."""
        self._write("plan.json", json.dumps(plan_to_json(plan), indent=2))
        self._write("decisions.txt", "\n".join(map(str, plan.decisions)))
        if plan.certificate is not None:
            self.certificate(plan.certificate)

    def certificate(self, certificate: Certificate) -> None:
        """Write what was proven, or refuted."""
        self._write("certificate.txt", str(certificate))

    def _name(self, stage: str) -> str:
        """The file of the step that comes now; a step that comes again has a file of its own."""
        if stage == _TEXT:
            self._number += self._modules == 0
            self._modules += 1
            return f"{self._number:02}_{stage}_{self._modules - 1}.cu"
        self._number += 1
        return f"{self._number:02}_{stage}.txt"

    def _write(self, name: str, text: str) -> None:
        try:
            (self.folder / name).write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise self._cannot(error) from error
        self.files.append(name)

    def _cannot(self, error: OSError) -> OptionError:
        return OptionError(f"dump={str(self.folder)!r} is no folder that can be written to: {error}")
