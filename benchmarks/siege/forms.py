"""All forms of stages; a new one is a function in one of the files that are imported here."""

from __future__ import annotations

from benchmarks.siege import forms_alone, forms_shared, forms_warps
from benchmarks.siege.registry import FORMS
from benchmarks.siege.setting import Setting, Stage

__all__ = ["FILES", "FORMS", "stage_of"]

FILES = (forms_alone, forms_shared, forms_warps)
"""Each registers its own."""


def stage_of(setting: Setting, names: tuple[str, ...] = ()) -> Stage:
    """A stage of a random form, of these if any are named and suit the setting."""
    known = [name for name in FORMS if not names or name in names]
    while True:
        name = setting.draw.choices(known, [FORMS[n][0] for n in known])[0]
        found = FORMS[name][1](setting)
        if found is not None:
            return found
        known = [n for n in known if n != name] or list(FORMS)
